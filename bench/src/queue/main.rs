//! Benchmarks of the queue, on a real daemon: part of `make bench`.
//!
//! - `tools`: verification tools that are preempted at random or given moments, over their life;
//! - `day`: a dense day of CI, scaled to some seconds, by several policies;
//! - `hour`: the day that `torpor queue simulate` makes up, likewise: long enough for its long jobs in an hour;
//! - `floor`: what the rules cost by themselves on the dense day, in a simulation;
//! - `urgent`: from an urgent submission to its first instruction, beside a victim of 2 GiB;
//! - `move`: a job of 1,400 MB goes to another machine over 1 Gbit/s.

mod daemon;
mod day;
mod floor;
mod moving;
mod programs;
mod svg;
mod tools;
mod urgent;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const USAGE: &str =
    "usage: torpor-bench-queue TORPOR RESULT-DIRECTORY [PART|PART:NAME,NAME]...
parts: urgent, move, tools, floor, day; and hour, which is left out unless it is named. Names are those of tools, and of
  policies of day and hour: fifo, kill, checkpoint, stop
What policies make of a day is kept, and told with what others make of the same one later, by the same build.
QUEUE_SECONDS: how long each tool runs, and a day (60)
QUEUE_LIMIT: after how many seconds a day is given up, with what is not done by then (never)
QUEUE_MIB: what a job holds that moves (1335, which is 1,400 MB)
QUEUE_TIMES: how often each tool is preempted, at random moments (10)
QUEUE_MOMENTS: at which seconds of running instead, as \"1 60 600\"; some tools count time for which they are
  away as well, so that the last should be a minute before the end
QUEUE_BESIDE: how many tools run at a time (1): the others are frozen while one is measured
TORPOR_TEST_KERNEL: the kernel that the emulator boots";

/// What all parts need to know.
#[derive(Debug)]
pub struct Setting {
    /// The program that is measured.
    pub torpor: PathBuf,
    /// Where tables and plots are written.
    pub results: PathBuf,
    /// Seconds that a tool runs, and a day.
    pub seconds: u32,
    /// Seconds after which a day is given up.
    pub limit: Option<u32>,
    /// How often a tool is preempted, at random moments.
    pub times: u32,
    /// At which seconds of running it is instead, if there are any.
    pub moments: Vec<u32>,
    /// How many tools run at a time.
    pub beside: usize,
    /// MiB of a job that moves.
    pub mib: u32,
}

impl Setting {
    /// Writes a result, and prints its path.
    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.results.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
        Ok(())
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [torpor, results, parts @ ..] = args.as_slice() else { bail!(USAGE) };
    let number = |name: &str, default: u32| match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}: {text:?} is no number")),
        Err(_) => Ok(default),
    };
    let moments = std::env::var("QUEUE_MOMENTS").unwrap_or_default();
    let setting = Setting {
        torpor: Path::new(torpor).canonicalize().with_context(|| torpor.clone())?,
        results: PathBuf::from(results),
        seconds: number("QUEUE_SECONDS", 60)?,
        limit: Some(number("QUEUE_LIMIT", 0)?).filter(|&seconds| seconds > 0),
        times: number("QUEUE_TIMES", 10)?,
        moments: moments.split_whitespace().map(str::parse).collect::<Result<_, _>>()?,
        beside: usize::try_from(number("QUEUE_BESIDE", 1)?)?.max(1),
        mib: number("QUEUE_MIB", 1335)?,
    };
    let day = f64::from(setting.seconds);
    fs::create_dir_all(&setting.results)?;
    let all = ["urgent", "move", "tools", "floor", "day"].map(str::to_owned);
    for part in if parts.is_empty() { &all[..] } else { parts } {
        match part.split_once(':').unwrap_or((part, "")) {
            ("tools", only) => tools::measure(&setting, only)?,
            ("day", only) => day::measure(&setting, "day", &day::dense(day), only)?,
            ("hour", only) => day::measure(&setting, "hour", &day::simulated(day), only)?,
            ("floor", "") => floor::measure(&setting)?,
            ("urgent", "") => urgent::measure(&setting)?,
            ("move", "") => moving::measure(&setting)?,
            _ => bail!(USAGE),
        }
    }
    Ok(())
}

/// A line that compares a figure with its goal. One that is missed is told of: what is wrong fails, what is slow
/// does not.
#[must_use]
pub fn goal(what: &str, value: f64, most: f64, unit: &str) -> String {
    let outcome = if value <= most { "held" } else { "MISSED" };
    format!("goal, {what}: {most} {unit} at most, {value:.1} {unit} seen: {outcome}\n")
}

/// The middle one of several values; 0 if there are none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
