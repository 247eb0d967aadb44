//! Random private memory, in small and in huge pages, against `cp`.

use std::fs;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::bench::{Bench, Goal, Times, Way, median, run};
use crate::subject::Subject;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let mut copies = Vec::new();
    let mib = bench.mib;
    for kind in ["small-pages", "huge-pages"] {
        let mut times = Times::default();
        for _ in 0..bench.rounds {
            copies.push(copy(bench)?);
            bench.round(kind, mib, &Way::default(), &mut times)?;
        }
        let (cp, goal) = (median(&copies), Some(Goal::AtMost(1.0)));
        bench.add(format!("dump of {mib} MiB, {kind}"), median(&times.dump) / cp, "× cp", goal);
        let restore = median(&times.restore) / cp;
        bench.add(format!("restore of {mib} MiB, {kind}"), restore, "× cp", goal);
        let what = format!("of that: images of {mib} MiB, {kind}, are read without rights");
        bench.add(what, median(&times.reading) * 1e3, "ms", None);
    }
    bench.add(format!("cp of {mib} MiB"), median(&copies), "s", None);
    fs::remove_file(bench.dir.join("from"))?;
    peak(bench, &Way::default(), "")
}

/// Seconds that `cp` of a file as large as the memory takes.
fn copy(bench: &Bench) -> Result<f64> {
    let (from, to) = (bench.dir.join("from"), bench.dir.join("to"));
    if !from.exists() {
        let (of, count) = (format!("of={}", from.display()), format!("count={}", bench.mib));
        let args = ["if=/dev/urandom", "bs=1M", &count, &of, "status=none"];
        run(Command::new("dd").args(args))?;
    }
    bench.warm_up()?;
    let start = Instant::now();
    run(Command::new("cp").arg(&from).arg(&to))?;
    let time = start.elapsed().as_secs_f64();
    fs::remove_file(&to)?;
    Ok(time)
}

/// The most memory that torpor needs itself, by one way to dump and restore; `what` it is.
pub fn peak(bench: &mut Bench, way: &Way, what: &str) -> Result<()> {
    let subject = Subject::start(&bench.dir, "small-pages", bench.mib)?;
    fs::create_dir(bench.images())?;
    let pid = subject.pid().to_string();
    let dump = peak_of(bench.command(&["dump", "-t", &pid]).args(&way.dump))?;
    subject.gone()?;
    let restore = peak_of(bench.command(&["restore", "-d"]).args(&way.restore))?;
    subject.end()?;
    fs::remove_dir_all(bench.images())?;
    let (mib, goal) = (bench.mib, Some(Goal::AtMost(64.0)));
    bench.add(format!("peak memory of the {what}dump of {mib} MiB"), dump, "MiB", goal);
    bench.add(format!("peak memory of the {what}restore of {mib} MiB"), restore, "MiB", goal);
    Ok(())
}

/// MiB at most of a command, which is run by another process of this program.
fn peak_of(inner: &Command) -> Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("peak").arg(inner.get_program()).args(inner.get_args());
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let kib: f64 = text
        .lines()
        .last()
        .unwrap_or_default()
        .trim()
        .parse()
        .with_context(|| format!("{inner:?}: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(kib / 1024.0)
}
