//! Many tasks, a small process, and many mappings.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use crate::bench::{Bench, Goal, Times, Way, median, run};
use crate::floor::floor;

pub fn processes(bench: &mut Bench) -> Result<()> {
    many(bench, "process", "processes", 500, 100.0)
}

pub fn threads(bench: &mut Bench) -> Result<()> {
    many(bench, "thread", "threads", 2000, 50.0)
}

/// A tree of many processes, or a process of many threads: per task.
fn many(bench: &mut Bench, name: &str, kind: &str, count: u32, most: f64) -> Result<()> {
    let times = measured(bench, kind, u64::from(count))?;
    let each = |times: &[f64]| median(times) / f64::from(count) * 1e6;
    let goal = Some(Goal::AtMost(most));
    bench.add(format!("dump of {count} {kind}, per {name}"), each(&times.dump), "µs", goal);
    let floors = (0..bench.rounds).map(|_| floor(bench, kind, u64::from(count)));
    let floors: Vec<f64> = floors.collect::<Result<_>>()?;
    let least = format!("the kernel's part of that (stop, read, write files), per {name}");
    bench.add(least, each(&floors), "µs", None);
    let (dumped, restored) = (&times.stats, &times.restored);
    let efforts = [
        ("stops of tasks in that dump", dumped.torpor_stops()),
        ("reads of procfs in that dump", dumped.torpor_procfs_reads()),
        ("allocations in that dump", dumped.torpor_allocations()),
        ("stops of tasks in a restore", restored.torpor_stops()),
        ("reads of procfs in a restore", restored.torpor_procfs_reads()),
        ("allocations in a restore", restored.torpor_allocations()),
    ];
    for (what, all) in efforts {
        let each = f64::from(u32::try_from(all)?) / f64::from(count);
        bench.add(format!("{what}, per {name}"), each, "", None);
    }
    bench.add(format!("freeze of {count} {kind}, per {name}"), each(&times.frozen), "µs", None);
    bench.add(format!("restore of {count} {kind}, per {name}"), each(&times.restore), "µs", None);
    Ok(())
}

pub fn small(bench: &mut Bench) -> Result<()> {
    let times = measured(bench, "sleep", 0)?;
    let goal = Some(Goal::AtMost(15.0));
    bench.add("dump of a small process", median(&times.dump) * 1e3, "ms", goal);
    bench.add("restore of a small process", median(&times.restore) * 1e3, "ms", goal);
    let what = "of that: its images are read by a process without rights";
    bench.add(what, median(&times.reading) * 1e3, "ms", Some(Goal::AtMost(2.0)));
    let floors = (0..bench.rounds).map(|_| spawning());
    let floors: Vec<f64> = floors.collect::<Result<_>>()?;
    bench.add("a program that ends at once, as a comparison", median(&floors) * 1e3, "ms", None);
    Ok(())
}

/// Seconds from the start to the end of a program that does nothing.
fn spawning() -> Result<f64> {
    let start = Instant::now();
    run(&mut Command::new("true"))?;
    Ok(start.elapsed().as_secs_f64())
}

pub fn mappings(bench: &mut Bench) -> Result<()> {
    let times = measured(bench, "mappings", 20_000)?;
    let goal = Some(Goal::AtMost(100.0));
    bench.add("dump of 20,000 mappings", median(&times.dump) * 1e3, "ms", None);
    bench.add("restore of 20,000 mappings", median(&times.restore) * 1e3, "ms", goal);
    Ok(())
}

fn measured(bench: &Bench, kind: &str, count: u64) -> Result<Times> {
    let mut times = Times::default();
    for _ in 0..bench.rounds {
        bench.round(kind, count, &Way::default(), &mut times)?;
    }
    Ok(times)
}
