//! A dump that copies while the program runs on, against one that does not.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::bench::{Bench, Goal, frozen, median, run};
use crate::subject::Subject;

/// How long a program is watched to see how fast it writes when nothing disturbs it.
const UNDISTURBED: Duration = Duration::from_millis(500);

pub fn measure(bench: &mut Bench) -> Result<()> {
    let mib = bench.mib;
    freeze(bench, "small-pages", mib, 0.10)?;
    freeze(bench, "huge-pages", 4 * mib, 0.02)?;
    throughput(bench)
}

/// The freeze with copy-on-write against the freeze without.
fn freeze(bench: &mut Bench, kind: &str, mib: u64, goal: f64) -> Result<()> {
    let (mut with, mut without) = (vec![], vec![]);
    for _ in 0..bench.rounds {
        let subject = Subject::start(&bench.dir, kind, mib)?;
        without.push(dump(bench, &subject, &[])?);
        with.push(dump(bench, &subject, &["--cow"])?);
        subject.end()?;
    }
    let what = format!("freeze of a copy-on-write dump of {mib} MiB, {kind}");
    let ratio = median(&with) / median(&without);
    bench.add(what.clone(), ratio, "× freeze of a dump", Some(Goal::AtMost(goal)));
    bench.add(what, median(&with) * 1e3, "ms", None);
    Ok(())
}

/// How fast a program writes memory during a dump, against how fast before.
fn throughput(bench: &mut Bench) -> Result<()> {
    let mut ratios = vec![];
    for _ in 0..bench.rounds {
        let subject = Subject::start(&bench.dir, "writer", bench.mib)?;
        let before = rate(&bench.dir, || {
            std::thread::sleep(UNDISTURBED);
            Ok(())
        })?;
        let during = rate(&bench.dir, || dump(bench, &subject, &["--cow"]).map(drop))?;
        ratios.push(during / before);
        subject.end()?;
    }
    let what = format!("writes of a program with {} MiB during a copy-on-write dump", bench.mib);
    bench.add(what, median(&ratios), "× before", Some(Goal::AtLeast(0.8)));
    Ok(())
}

/// Pages that the program writes in a second while something is done.
fn rate(dir: &Path, what: impl FnOnce() -> Result<()>) -> Result<f64> {
    let count = || -> Result<u64> {
        let bytes = fs::read(dir.join("counter"))?;
        Ok(u64::from_le_bytes(*bytes.first_chunk().context("no counter")?))
    };
    let (start, first) = (Instant::now(), count()?);
    what()?;
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    let written = (count()? - first) as f64;
    Ok(written / start.elapsed().as_secs_f64())
}

/// Seconds that the tree is frozen in a dump that it survives.
fn dump(bench: &Bench, subject: &Subject, options: &[&str]) -> Result<f64> {
    let images = bench.images();
    fs::create_dir(&images)?;
    bench.warm_up()?;
    let pid = subject.pid().to_string();
    let mut command = Command::new(bench.torpor());
    command.args(["dump", "--leave-running", "-t", &pid, "-D"]).arg(&images).args(options);
    run(&mut command)?;
    let seconds = frozen(&images)?;
    fs::remove_dir_all(images)?;
    Ok(seconds)
}
