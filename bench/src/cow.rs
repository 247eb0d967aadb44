//! A dump that copies while the program runs on, against one that does not.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::bench::{Bench, Goal, frozen, median, run};
use crate::redis::Redis;
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
        for (options, times) in [([].as_slice(), &mut without), (&["--cow"], &mut with)] {
            bench.warm_up()?;
            times.push(dump(bench, dump_of(bench, subject.pid(), options))?);
        }
        subject.end()?;
    }
    let what = format!("freeze of a copy-on-write dump of {mib} MiB, {kind}");
    let ratio = median(&with) / median(&without);
    bench.add(what.clone(), ratio, "× freeze of a dump", Some(Goal::AtMost(goal)));
    bench.add(what, median(&with) * 1e3, "ms", None);
    Ok(())
}

/// How fast a program writes memory during a dump, against how fast before. It writes as
/// fast as memory takes it, and so faster than memory can be copied.
fn throughput(bench: &mut Bench) -> Result<()> {
    let (mut ratios, mut lost) = (vec![], vec![]);
    let counter = bench.dir.join("counter");
    let count = || -> Result<u64> {
        let bytes = fs::read(&counter)?;
        Ok(u64::from_le_bytes(*bytes.first_chunk().context("no counter")?))
    };
    for _ in 0..bench.rounds {
        let subject = Subject::start(&bench.dir, "writer", bench.mib)?;
        bench.warm_up()?;
        let before = rate(count, undisturbed)?;
        let start = Instant::now();
        let copy = || dump(bench, dump_of(bench, subject.pid(), &["--cow"])).map(drop);
        let ratio = rate(count, copy)? / before;
        ratios.push(ratio);
        lost.push(start.elapsed().as_secs_f64() * (1.0 - ratio) * 1e3);
        subject.end()?;
    }
    let what = format!("writes of a program with {} MiB during a copy-on-write dump", bench.mib);
    bench.add(what.clone(), median(&ratios), "× before", Some(Goal::AtLeast(0.8)));
    bench.add(what + ": time that it loses", median(&lost), "ms", None);
    Ok(())
}

/// How many commands Redis carries out during a dump, against how many before; and when it
/// saves its data itself, by a fork.
pub fn redis(bench: &mut Bench) -> Result<()> {
    let redis = Redis::with_data(&bench.dir, bench.mib)?;
    let _load = redis.load()?;
    let (mut ratios, mut in_rounds, mut by_itself) = (vec![], vec![], vec![]);
    for _ in 0..bench.rounds {
        bench.warm_up()?;
        let before = rate(|| redis.commands(), undisturbed)?;
        let command = dump_of_redis(bench, &redis, &[]);
        let during = rate(|| redis.commands(), || dump(bench, command).map(drop))?;
        ratios.push(during / before);
        in_rounds.push(rate(|| redis.commands(), || round_and_dump(bench, &redis))? / before);
        by_itself.push(rate(|| redis.commands(), || redis.save())? / before);
    }
    let what = format!("Redis with {} MiB under write load", bench.mib * 3 / 4);
    let during = format!("{what}: commands during a copy-on-write dump");
    bench.add(during, median(&ratios), "× before", Some(Goal::AtLeast(0.8)));
    let during = format!("{what}: commands during a round and a copy-on-write dump after it");
    bench.add(during, median(&in_rounds), "× before", Some(Goal::AtLeast(0.8)));
    bench.add(what + ": commands during its own BGSAVE", median(&by_itself), "× before", None);
    Ok(())
}

fn dump_of_redis(bench: &Bench, redis: &Redis, options: &[&str]) -> Command {
    let mut command = redis.beside(bench.torpor());
    command.args(["dump", "--leave-running", "--cow", "--tcp-established", "-t"]);
    command.arg(redis.server.pid().to_string()).arg("-D").arg(bench.images()).args(options);
    command
}

/// Most of the memory while it is tracked, the rest as it is at the freeze.
fn round_and_dump(bench: &Bench, redis: &Redis) -> Result<()> {
    let first = bench.dir.join("first");
    fs::create_dir(&first)?;
    let mut round = redis.beside(bench.torpor());
    round.args(["pre-dump", "-t", &redis.server.pid().to_string(), "-D"]).arg(&first);
    run(&mut round)?;
    let options = ["--track-mem", "--prev-images-dir", "../first"];
    dump(bench, dump_of_redis(bench, redis, &options))?;
    Ok(fs::remove_dir_all(first)?)
}

fn undisturbed() -> Result<()> {
    std::thread::sleep(UNDISTURBED);
    Ok(())
}

/// By how much a count goes on in a second while something is done.
fn rate(count: impl Fn() -> Result<u64>, what: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (start, first) = (Instant::now(), count()?);
    what()?;
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
    let counted = (count()? - first) as f64;
    Ok(counted / start.elapsed().as_secs_f64())
}

fn dump_of(bench: &Bench, pid: i32, options: &[&str]) -> Command {
    let mut command = Command::new(bench.torpor());
    command.args(["dump", "--leave-running", "-t", &pid.to_string(), "-D"]);
    command.arg(bench.images()).args(options);
    command
}

/// Seconds that the tree is frozen in a dump that it survives.
fn dump(bench: &Bench, mut command: Command) -> Result<f64> {
    fs::create_dir(bench.images())?;
    run(&mut command)?;
    let seconds = frozen(&bench.images())?;
    fs::remove_dir_all(bench.images())?;
    Ok(seconds)
}
