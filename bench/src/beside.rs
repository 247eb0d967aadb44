//! Another build of Torpor, which `BENCH_BESIDE` names, in turns with this one.

use std::env;
use std::path::Path;

use anyhow::Result;

use crate::bench::{Bench, Times, Way, median};

/// What is dumped and restored: a kind of target, how much of it (none: as much memory as is measured), and its name.
const SUBJECTS: [(&str, Option<u64>, &str); 5] = [
    ("sleep", Some(0), "a small process"),
    ("processes", Some(500), "500 processes"),
    ("threads", Some(2000), "2,000 threads"),
    ("small-pages", None, "memory in small pages"),
    ("huge-pages", None, "memory in huge pages"),
];

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(other) = env::var_os("BENCH_BESIDE") else {
        eprintln!("beside is left out: BENCH_BESIDE names no other build");
        return Ok(());
    };
    let other = bench.of(Path::new(&other));
    for (kind, count, what) in SUBJECTS {
        let count = count.unwrap_or(bench.mib);
        let (mut ours, mut theirs) = (Times::default(), Times::default());
        // One of each that does not count: the first has to wait for what is not in memory yet.
        bench.round(kind, count, &Way::default(), &mut Times::default())?;
        other.round(kind, count, &Way::default(), &mut Times::default())?;
        for _ in 0..bench.rounds {
            bench.round(kind, count, &Way::default(), &mut ours)?;
            other.round(kind, count, &Way::default(), &mut theirs)?;
        }
        let sides =
            [("dump", &ours.dump, &theirs.dump), ("restore", &ours.restore, &theirs.restore)];
        for (action, ours, theirs) in sides {
            let (ours, theirs) = (median(ours), median(theirs));
            bench.add(format!("{action} of {what}"), ours * 1e3, "ms", None);
            bench.add(format!("{action} of {what}, by the other build"), theirs * 1e3, "ms", None);
            bench.add(format!("{action} of {what}"), ours / theirs, "× other build", None);
        }
    }
    Ok(())
}
