//! `simulate`

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use torpor_worker::Outcome;

use super::jobs::duration;
use super::submit::size;
use crate::daemon::config::Config;
use crate::scheduler::Millis;
use crate::scheduler::simulation::swf::{self, Trace};
use crate::scheduler::simulation::{Policy, Summary, of_ci, summarize};

/// How it is used.
pub(super) const EXAMPLES: &str = "Examples:
  torpor queue simulate
  torpor queue simulate --trace CTC-SP2-1996-3.1-cln.swf --jobs 5000 --queue 1=urgent
  gunzip <trace.swf.gz | torpor queue simulate --trace - --config queue.json --json";

/// Bytes of memory that a machine has for each slot if nobody says how many.
const MEMORY: u64 = 3 << 30;

/// Slots of the machine that the generated day is made for.
const SLOTS: u32 = 2;

/// `simulate`
#[derive(Debug, Args)]
pub struct Simulate {
    /// Trace in the Standard Workload Format; - is standard input [default: a generated day of CI]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many jobs of it, from the first on
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    jobs: usize,
    /// Slots of the machine [default: the trace's processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,
    /// Memory of the machine, in bytes or with K, M or G [default: 3G for each slot]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Configuration of a daemon, whose rules are tried [default: those of a daemon without one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Class of the jobs of a queue of the trace; may be given several times [default: queue 0
    /// interactive, jobs that ask for ten minutes at most short, others long]
    #[arg(long, value_name = "N=CLASS", value_parser = queue)]
    queue: Vec<(i64, String)>,
    /// Print an object: the machine, and what each policy makes of the trace
    #[arg(long)]
    json: bool,
}

fn queue(text: &str) -> Result<(i64, String), String> {
    let (number, class) = text.split_once('=').ok_or("use N=CLASS")?;
    let number = number.parse().map_err(|_| format!("{number:?} is no number of a queue"))?;
    Ok((number, class.to_owned()))
}

impl Simulate {
    /// Prints what each policy makes of the trace.
    ///
    /// # Errors
    /// If the trace or the configuration cannot be read, or is none.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        let mut trace = self.trace()?;
        let most = trace.tasks.iter().map(|task| task.slots).max();
        let slots = self.slots.or(trace.slots).or(most).unwrap_or(0);
        let before = trace.tasks.len();
        trace.tasks.retain(|task| task.slots <= slots);
        trace.left_out += (before - trace.tasks.len()) as u64;
        if trace.tasks.is_empty() {
            return Err("there is no job in the trace that this machine could run"
                .to_owned()
                .into());
        }
        let memory = self.memory.unwrap_or_else(|| MEMORY.saturating_mul(slots.into()));
        let rules = &config.rules;
        let normal = rules.other.priority;
        let is_short =
            |class: &str| rules.classes.get(class).is_some_and(|class| class.priority > normal);
        let of = |policy| summarize((slots, memory), rules, policy, &trace.tasks, &is_short);
        let found = Policy::ALL.map(of);
        if self.json {
            let (jobs, left_out) = (trace.tasks.len(), trace.left_out);
            let machine = json!({ "slots": slots, "memory": memory });
            let text = json!({
                "machine": machine, "jobs": jobs, "left_out": left_out, "policies": found,
            });
            say!("{text}");
        } else {
            print(slots, memory, &trace, &found)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn trace(&self) -> Result<Trace, String> {
        let Some(path) = &self.trace else {
            let tasks = of_ci();
            return Ok(Trace { tasks, slots: Some(SLOTS), left_out: 0 });
        };
        let say = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let mut file: Box<dyn BufRead> = match path == Path::new("-") {
            true => Box::new(io::stdin().lock()),
            false => Box::new(BufReader::new(File::open(path).map_err(|e| say(&e))?)),
        };
        let class = |number: i64| {
            let known = self.queue.iter().find(|(queue, _)| *queue == number);
            known.map(|(_, class)| class.clone())
        };
        swf::read(&mut *file, self.jobs, &class).map_err(|e| say(&e))
    }
}

fn print(slots: u32, memory: u64, trace: &Trace, found: &[Summary]) -> Result<(), String> {
    say!(
        "{} jobs on {slots} slots with {} MiB; {} were left out",
        trace.tasks.len(),
        memory >> 20,
        trace.left_out
    );
    say!(
        "{:<20} {:>9} {:>9} {:>10} {:>10} {:>7} {:>9} {:>10} {:>10}",
        "POLICY",
        "WAIT 95%",
        "LONGEST",
        "LONG, MEAN",
        "MAKESPAN",
        "USEFUL",
        "GAVE WAY",
        "LOST",
        "WASTE"
    );
    let time = |millis: Millis| duration(&json!(millis));
    for one in found {
        say!(
            "{:<20} {:>9} {:>9} {:>10} {:>10} {:>6.1}% {:>9} {:>10} {:>10}",
            one.policy.name(),
            time(one.wait_p95),
            time(one.wait_longest),
            time(one.long_mean),
            time(one.makespan),
            one.useful,
            one.preemptions,
            time(one.lost),
            time(one.waste),
        );
    }
    if let [fifo, ..] = found {
        say!("waits are of the {} short jobs, LONG of the {} others", fifo.short, fifo.long);
    }
    for one in found.iter().filter(|one| one.undone > 0) {
        say!("{}: {} jobs were not done", one.policy.name(), one.undone);
    }
    Ok(())
}
