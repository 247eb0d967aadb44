//! What judging costs: a restore of images that count as a stranger's, under a policy, beside one of the
//! same kind of process whose images are this host's and meet no policy of the machine.
//!
//! Both are read by a process without rights, and both are compared with their plan: that is never
//! off. What it takes by itself is measured with the small process and with the memory.

use std::fs;

use anyhow::Result;

use crate::bench::{Bench, Goal, Times, Way, median};

/// Rules that have to look at all there is, and allow what the subjects of the benchmark need.
const POLICY: &str = r#"
[capabilities]
allow = "all"
[users]
allow = "all"
[files]
set-uid = false
devices = ["c 1:*", "c 5:*", "c 136:*"]
[foreign.capabilities]
allow = "all"
[foreign.files]
set-uid = false
devices = ["c 1:*", "c 5:*", "c 136:*"]
"#;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let policy = bench.dir.join("policy.toml");
    fs::write(&policy, POLICY)?;
    let words = ["--host-key", "none", "--policy", &policy.display().to_string()];
    let judged = Way { restore: words.map(str::to_owned).to_vec(), ..Way::default() };
    let (own, foreign) = both(bench, &judged, "sleep", 0)?;
    let what = "restore of a small process of a stranger's, under a policy";
    bench.add(what, foreign * 1e3, "ms", None);
    let what = "that is more than for own images without one";
    bench.add(what, (foreign - own) * 1e3, "ms", Some(Goal::AtMost(2.0)));
    let mib = bench.mib;
    let (own, foreign) = both(bench, &judged, "small-pages", mib)?;
    let what = format!("restore of {mib} MiB of a stranger's, under a policy");
    bench.add(what, foreign / own, "× own without", Some(Goal::AtMost(1.05)));
    Ok(fs::remove_file(policy)?)
}

/// Seconds of a restore of own images and of one that is judged, in turn.
fn both(bench: &Bench, judged: &Way, kind: &str, count: u64) -> Result<(f64, f64)> {
    let (mut own, mut foreign) = (Times::default(), Times::default());
    for _ in 0..bench.rounds {
        bench.round(kind, count, &Way::default(), &mut own)?;
        bench.round(kind, count, judged, &mut foreign)?;
    }
    Ok((median(&own.restore), median(&foreign.restore)))
}
