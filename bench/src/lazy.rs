//! Restores that leave memory for later, against ordinary ones.

use std::fs;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use crate::bench::{Bench, Goal, median, run};
use crate::process::{Running, until};
use crate::subject::Subject;

/// MiB of a process that is small.
const SMALL: u64 = 64;

pub fn measure(bench: &mut Bench) -> Result<()> {
    for mib in [SMALL, bench.mib] {
        let (mut running, mut whole, mut ordinary) = (vec![], vec![], vec![]);
        for _ in 0..bench.rounds {
            let subject = Subject::start(&bench.dir, "small-pages", mib)?;
            fs::create_dir(bench.images())?;
            dump(bench, &subject)?;
            bench.warm_up()?;
            ordinary.push(restore(bench)?);
            dump(bench, &subject)?;
            bench.warm_up()?;
            let (first, last) = restore_lazily(bench)?;
            running.push(first);
            whole.push(last);
            subject.end()?;
            fs::remove_dir_all(bench.images())?;
        }
        runs(bench, mib, &running);
        let what = format!("lazy restore of {mib} MiB until all is there");
        let times = median(&whole) / median(&ordinary);
        bench.add(what, times, "× restore", Some(Goal::AtMost(1.5)));
    }
    large(bench)
}

/// When a process runs that has much more memory than the others.
fn large(bench: &mut Bench) -> Result<()> {
    let mib = 8 * bench.mib;
    let mut running = vec![];
    for _ in 0..bench.rounds {
        let subject = Subject::start(&bench.dir, "small-pages", mib)?;
        fs::create_dir(bench.images())?;
        dump(bench, &subject)?;
        running.push(restore_lazily(bench)?.0);
        subject.end()?;
        fs::remove_dir_all(bench.images())?;
    }
    runs(bench, mib, &running);
    Ok(())
}

fn runs(bench: &mut Bench, mib: u64, seconds: &[f64]) {
    let what = format!("lazy restore of {mib} MiB until it runs");
    bench.add(what, median(seconds) * 1e3, "ms", Some(Goal::AtMost(50.0)));
}

fn dump(bench: &Bench, subject: &Subject) -> Result<()> {
    run(&mut bench.command(&["dump", "-t", &subject.pid().to_string()]))?;
    subject.gone()
}

fn restore(bench: &Bench) -> Result<f64> {
    timed(&mut bench.command(&["restore", "-d"]))
}

fn timed(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    run(command)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Starts the command that brings pages in, up to where it waits for the restore.
pub fn daemon(bench: &Bench, options: &[&str]) -> Result<Running> {
    let daemon = Running::start(bench.command(&["lazy-pages"]).args(options))?;
    until("lazy-pages", || bench.images().join("lazy-pages.socket").exists())?;
    Ok(daemon)
}

/// Seconds until the process runs, and until it has all its memory.
fn restore_lazily(bench: &Bench) -> Result<(f64, f64)> {
    let daemon = daemon(bench, &[])?;
    let start = Instant::now();
    let first = timed(&mut bench.command(&["restore", "-d", "--lazy-pages"]))?;
    daemon.end()?;
    Ok((first, start.elapsed().as_secs_f64()))
}
