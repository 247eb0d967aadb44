//! What the rules cost long jobs by themselves: the same days, simulated, where giving way takes no time. No way to save
//! jobs does better by these rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Result;
use torpor_queue::preemption::Means;
use torpor_queue::scheduler::simulation::{Policy, Summary, Task, summarize};
use torpor_queue::scheduler::{Class, Millis, Rules};

use crate::Setting;
use crate::day::{SLOTS, dense, seconds};

/// Bytes of memory of the machine.
const MEMORY: u64 = 6 << 30;

/// Simulates the day as it is, and two attempts to slow long jobs down by less.
pub fn measure(setting: &Setting) -> Result<()> {
    let mut table =
        "| day | long jobs, first in, first out | at no price | slower | makespan, longer |\n\
                     |---|---:|---:|---:|---:|\n"
            .to_owned();
    let second = f64::from(setting.seconds);
    for (name, length, says) in [
        ("as it is", second, false),
        ("long jobs say how long they will run", second, true),
        ("ten times as long", second * 10.0, false),
        ("ten times as long, and they say it", second * 10.0, true),
    ] {
        let tasks = tasks(length, says);
        let of = |policy| -> Summary {
            summarize((SLOTS, MEMORY), &rules(), policy, &tasks, &|class| class == "short")
        };
        let (plain, free) = (of(Policy::FirstInFirstOut), of(Policy::AtNoPrice));
        let slower = |of: fn(&Summary) -> Millis| (of(&free) * 1000 / of(&plain) - 1000) / 10;
        let _ = writeln!(
            table,
            "| {name} | {:.1} s | {:.1} s | {} % | {} % |",
            seconds(plain.long_mean),
            seconds(free.long_mean),
            slower(|one| one.long_mean),
            slower(|one| one.makespan),
        );
    }
    print!("{table}");
    setting.write("queue-floor.md", &table)
}

fn rules() -> Rules {
    let short = Class { priority: 600, ..Class::default() };
    let long = Class { means: vec![Means::Stop, Means::Checkpoint], ..Class::default() };
    let classes = BTreeMap::from([("short".to_owned(), short), ("long".to_owned(), long)]);
    Rules { classes, ..Rules::default() }
}

fn tasks(length: f64, says: bool) -> Vec<Task> {
    let of = |task: &crate::day::Task| {
        let work = millis(task.work);
        Task {
            at: millis(task.at),
            work,
            class: task.class.to_owned(),
            memory: u64::from(task.memory) << 20,
            estimate: (says && task.class == "long").then_some(work),
            ..Task::default()
        }
    };
    dense(length).iter().map(of).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "some hours")]
fn millis(seconds: f64) -> Millis {
    (seconds * 1000.0) as Millis
}
