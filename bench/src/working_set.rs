//! How soon Redis answers after a lazy restore, with and without a recorded working set.

use std::fs;
use std::path::Path;

use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};

use crate::bench::{Bench, Goal, median, run};
use crate::lazy::daemon;
use crate::process::gone;
use crate::redis::Redis;

/// Keys that are read, out of all.
const HOT: u64 = 10_000;
/// For how long it is recorded, in seconds: the keys are read in less.
const RECORDED: &str = "--record-working-set=5";

pub fn measure(bench: &mut Bench) -> Result<()> {
    let redis = Redis::with_data(&bench.dir, bench.mib)?;
    redis.read(HOT)?;
    fs::create_dir(bench.images())?;
    let pid = redis.server.pid();
    torpor(bench, &redis, &["dump", "-t", &pid.to_string()])?;
    gone(pid)?;
    let rounds = || -> Result<Vec<f64>> {
        (0..bench.rounds).map(|_| first_reads(bench, &redis, &[])).collect()
    };
    let without = rounds()?;
    first_reads(bench, &redis, &[RECORDED])?;
    let with = rounds()?;
    fs::remove_dir_all(bench.images())?;
    let what = format!("{HOT} reads of Redis with {} MiB, lazily restored", bench.mib * 3 / 4);
    let recorded = format!("{what} with its working set");
    bench.add(recorded, median(&with), "× warm", Some(Goal::AtMost(1.2)));
    bench.add(what, median(&without), "× warm", None);
    Ok(())
}

/// Restores the server in place of the one before: how long it takes to read the keys right
/// after that, against when all of its memory is there.
fn first_reads(bench: &Bench, redis: &Redis, options: &[&str]) -> Result<f64> {
    let pid = redis.server.pid();
    if let Some(before) = Pid::from_raw(i32::try_from(pid)?) {
        let _ = kill_process(before, Signal::KILL);
    }
    gone(pid)?;
    let daemon = daemon(bench, options)?;
    torpor(bench, redis, &["restore", "-d", "--lazy-pages"])?;
    let first = redis.read(HOT)?;
    daemon.end()?;
    Ok(first / redis.read(HOT)?)
}

fn torpor(bench: &Bench, redis: &Redis, words: &[&str]) -> Result<()> {
    let program: &Path = bench.torpor();
    run(redis.beside(program).args(words).arg("-D").arg(bench.images()))
}
