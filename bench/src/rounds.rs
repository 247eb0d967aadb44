//! A round of changed memory against a dump of all of it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::bench::{Bench, Goal, frozen, median, run};
use crate::subject::Subject;

/// One page of so many is written between two rounds.
const DIRTY: u64 = 100;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let (mut full, mut first, mut round, mut freeze) = (vec![], vec![], vec![], vec![]);
    for _ in 0..bench.rounds {
        let subject = Subject::start(&bench.dir, "small-pages", bench.mib)?;
        let dirs = ["full", "first", "second"].map(|name| bench.dir.join(name));
        dirs.iter().try_for_each(fs::create_dir)?;
        bench.warm_up()?;
        full.push(dump(bench, &subject, "dump", &dirs[0], &["--leave-running"])?);
        bench.warm_up()?;
        first.push(dump(bench, &subject, "pre-dump", &dirs[1], &[])?);
        write_some(&subject)?;
        // It takes little memory; and to give back what a warm-up has used goes on for longer
        // than a round.
        let parent = ["--prev-images-dir", "../first"];
        round.push(dump(bench, &subject, "pre-dump", &dirs[2], &parent)?);
        freeze.push(frozen(&dirs[2])?);
        subject.end()?;
        dirs.iter().try_for_each(fs::remove_dir_all)?;
    }
    let mib = bench.mib;
    let full = median(&full);
    bench.add(format!("first round of {mib} MiB"), median(&first) / full, "× dump", None);
    let what = format!("round of {mib} MiB, 1 % of it written");
    bench.add(what, median(&round) / full, "× dump", Some(Goal::AtMost(0.05)));
    let what = format!("freeze of a round of {mib} MiB, 1 % of it written");
    bench.add(what, median(&freeze) * 1e3, "ms", Some(Goal::AtMost(15.0)));
    Ok(())
}

/// Seconds of a command.
fn dump(
    bench: &Bench,
    subject: &Subject,
    action: &str,
    images: &PathBuf,
    options: &[&str],
) -> Result<f64> {
    let mut command = Command::new(bench.torpor());
    command.args([action, "-t", &subject.pid().to_string(), "-D"]).arg(images).args(options);
    let start = Instant::now();
    run(&mut command)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Writes to pages all over the largest mapping.
fn write_some(subject: &Subject) -> Result<()> {
    let proc = Path::new("/proc").join(subject.pid().to_string());
    let maps = fs::read_to_string(proc.join("maps"))?;
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some(number(start)?..number(end)?)
    };
    let largest = maps.lines().filter_map(range).max_by_key(|range| range.end - range.start);
    let memory = File::options().write(true).open(proc.join("mem"))?;
    let pages = largest.context("no mapping")?.step_by(usize::try_from(DIRTY * 4096)?);
    for page in pages {
        memory.write_all_at(b"written", page)?;
    }
    Ok(())
}
