//! A day of CI on two slots, by three policies: first in first out, killing, and giving way
//! by stop and checkpoint.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs
)]

use std::collections::BTreeMap;

use torpor_queue::preemption::Means;
use torpor_queue::scheduler::simulation::{Fate, Machine, Task};
use torpor_queue::scheduler::{Class, Guarantee, Millis, Rules};

const SECOND: Millis = 1000;
const HOUR: Millis = 3600 * SECOND;
const GIB: u64 = 1 << 30;

/// Numbers that are the same each time.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Log-normal, with this median.
    fn skewed(&mut self, median: f64, sigma: f64) -> f64 {
        let (a, b) = (self.unit().max(1e-12), self.unit());
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        median * (sigma * normal).exp()
    }
}

/// A day after published CI workloads: pushes by the hour of the day (the peak hour 1.55
/// times the mean), each with short jobs that somebody waits for, of log-normal length; and
/// fuzzers, sanitizers and soak tests of hours that fill the machine.
fn trace() -> Vec<Task> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut tasks = Vec::new();
    let mut now = 0.0;
    while now < 24.0 {
        let load = 1.0 + 0.55 * ((now - 14.0) * std::f64::consts::TAU / 24.0).cos();
        now += -random.unit().max(1e-12).ln() / (12.0 * load);
        let work = random.skewed(20.0, 1.2).clamp(1.0, 600.0);
        tasks.push(Task {
            at: (now * HOUR as f64) as Millis,
            work: (work * SECOND as f64) as Millis,
            class: "short".to_owned(),
            memory: GIB / 2,
            ..Task::default()
        });
    }
    for i in 0..12 {
        let work = random.skewed(2.0, 0.7).clamp(0.5, 8.0);
        tasks.push(Task {
            at: i * 2 * HOUR,
            work: (work * HOUR as f64) as Millis,
            class: "long".to_owned(),
            memory: (random.skewed(0.8, 0.8) * GIB as f64) as u64,
            ..Task::default()
        });
    }
    tasks
}

fn rules(priority: i64, means: &[Means]) -> Rules {
    let class = |priority| Class { priority, means: means.to_vec(), ..Class::default() };
    let classes =
        BTreeMap::from([("short".to_owned(), class(priority)), ("long".to_owned(), class(0))]);
    let guarantee = Guarantee { every: 100_000 * HOUR, slice: SECOND };
    Rules { classes, guarantee, ..Rules::default() }
}

/// What a policy has made of the day.
struct Outcome {
    wait_p95: f64,
    wait_longest: f64,
    long_mean: f64,
    makespan: f64,
    lost: f64,
    waste: f64,
}

fn day(rules: Rules) -> Outcome {
    let mut tasks = trace();
    let fates = Machine::new(2, 6 * GIB, rules, tasks.clone()).run(10_000 * HOUR);
    tasks.sort_by_key(|task| task.at);
    let of =
        |class: &'static str| fates.iter().zip(&tasks).filter(move |(_, task)| task.class == class);
    let mut waits: Vec<Millis> =
        of("short").map(|(fate, task)| fate.started.unwrap() - task.at).collect();
    waits.sort_unstable();
    let seconds = |millis: Millis| millis as f64 / SECOND as f64;
    let spans: Vec<f64> =
        of("long").map(|(fate, task)| seconds(fate.ended.unwrap() - task.at)).collect();
    let sum = |of: fn(&Fate) -> Millis| seconds(fates.iter().map(of).sum());
    Outcome {
        wait_p95: seconds(waits[waits.len() * 95 / 100]),
        wait_longest: seconds(*waits.last().unwrap()),
        long_mean: spans.iter().sum::<f64>() / spans.len() as f64,
        makespan: seconds(fates.iter().map(|fate| fate.ended.unwrap()).max().unwrap()),
        lost: sum(|fate| fate.lost),
        waste: sum(|fate| fate.lost + fate.overhead),
    }
}

#[test]
fn a_day_by_three_policies() {
    let fifo = day(rules(0, &[]));
    let kill = day(rules(100, &[Means::Kill]));
    let ours = day(rules(100, &[Means::Stop, Means::Checkpoint]));
    println!(
        "| policy | short jobs wait, 95 % | longest | long jobs, mean | makespan | lost | waste |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for (name, o) in [("first in, first out", &fifo), ("kill", &kill), ("give way", &ours)] {
        println!(
            "| {name} | {:.1} s | {:.1} s | {:.2} h | {:.1} h | {:.0} s | {:.0} s |",
            o.wait_p95,
            o.wait_longest,
            o.long_mean / 3600.0,
            o.makespan / 3600.0,
            o.lost,
            o.waste
        );
    }
    assert!(ours.wait_p95 <= 3.0, "short jobs wait {} s", ours.wait_p95);
    assert!(fifo.wait_p95 > 60.0, "the trace is no test");
    assert!(ours.long_mean <= 1.1 * fifo.long_mean, "{} {}", ours.long_mean, fifo.long_mean);
    assert!(ours.lost == 0.0 && kill.lost > 0.0);
    assert!(ours.waste <= 0.1 * kill.waste, "{} {}", ours.waste, kill.waste);
}
