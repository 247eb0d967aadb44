//! What a policy makes of a trace.

use serde::Serialize;

use super::{Fate, Machine, Task};
use crate::preemption::Means;
use crate::scheduler::{Millis, Rules};

/// Nothing is simulated for longer: a century.
const END: Millis = 100 * 366 * 86_400_000;

/// A policy to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// In the order in which they came, to their end.
    FirstInFirstOut,
    /// By the rules, but a job that gives way is killed and begins again.
    KillAndRestart,
    /// By the rules as they are.
    GiveWay,
    /// By the rules, if it took no time to give way and to come back: no other way to save jobs can do better by them.
    AtNoPrice,
}

impl Policy {
    /// All, in this order.
    pub const ALL: [Self; 4] =
        [Self::FirstInFirstOut, Self::KillAndRestart, Self::GiveWay, Self::AtNoPrice];

    /// Its name in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstInFirstOut => "first in, first out",
            Self::KillAndRestart => "kill and restart",
            Self::GiveWay => "give way",
            Self::AtNoPrice => "at no price",
        }
    }

    /// The rules by which it is done.
    #[must_use]
    pub fn rules(self, rules: &Rules) -> Rules {
        let mut rules = rules.clone();
        let Rules { classes, other, guarantee, .. } = &mut rules;
        for class in classes.values_mut().chain([other]) {
            match self {
                Self::GiveWay | Self::AtNoPrice => {}
                Self::KillAndRestart => class.means = vec![Means::Kill],
                Self::FirstInFirstOut => {
                    (class.priority, class.slice, class.fair) = (0, None, false);
                    class.means.clear();
                }
            }
        }
        if self == Self::FirstInFirstOut {
            guarantee.every = END;
        }
        rules
    }
}

/// What came of it. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// By which policy.
    pub policy: Policy,
    /// Jobs that somebody waits for: how many, and how long 95 % of them waited at most.
    pub short: usize,
    /// How long 95 % of these waited at most until they ran.
    pub wait_p95: Millis,
    /// The longest of these waits.
    pub wait_longest: Millis,
    /// The other jobs.
    pub long: usize,
    /// How long they took from submission to end, in the mean.
    pub long_mean: Millis,
    /// From the first submission until all was done.
    pub makespan: Millis,
    /// How much of the slots' time went to work that counts, in percent.
    pub useful: f64,
    /// How often jobs gave way.
    pub preemptions: u64,
    /// Work that was done again, of each job's slots.
    pub lost: Millis,
    /// That, and the time that giving way and coming back took.
    pub waste: Millis,
    /// Jobs that were not done: no machine like this one can run them.
    pub undone: usize,
}

/// Lets a machine work through a trace by a policy. A job is one that somebody waits for if `is_short`
/// says so of its class.
#[must_use]
pub fn summarize(
    (slots, memory): (u32, u64),
    rules: &Rules,
    policy: Policy,
    tasks: &[Task],
    is_short: &dyn Fn(&str) -> bool,
) -> Summary {
    let machine = Machine::new(slots, memory, policy.rules(rules), tasks.to_vec());
    let is_free = policy == Policy::AtNoPrice;
    let fates = if is_free { machine.at_no_price() } else { machine }.run(END);
    let mut sorted: Vec<&Task> = tasks.iter().collect();
    // As the machine does.
    sorted.sort_by_key(|task| task.at);
    let all = || fates.iter().zip(&sorted);
    let mut waits: Vec<Millis> = all()
        .filter(|(_, task)| is_short(&task.class))
        .filter_map(|(fate, task)| Some(fate.started? - task.at))
        .collect();
    waits.sort_unstable();
    let spans: Vec<Millis> = all()
        .filter(|(_, task)| !is_short(&task.class))
        .filter_map(|(fate, task)| Some(fate.ended? - task.at))
        .collect();
    let first = sorted.first().map_or(0, |task| task.at);
    let last = fates.iter().filter_map(|fate| fate.ended).max().unwrap_or(first);
    let done = all().filter(|(fate, _)| fate.ended.is_some());
    let work: Millis = done.map(|(_, task)| times(task.work, task)).fold(0, Millis::saturating_add);
    let sum = |of: fn(&Fate) -> Millis| {
        all().map(|(fate, task)| times(of(fate), task)).fold(0, Millis::saturating_add)
    };
    let slot_time = i64::from(slots).saturating_mul(last - first).max(1);
    #[expect(clippy::cast_precision_loss, reason = "a share, for people")]
    let useful = work as f64 * 100.0 / slot_time as f64;
    Summary {
        policy,
        short: waits.len(),
        wait_p95: waits.get(waits.len() * 95 / 100).or(waits.last()).copied().unwrap_or(0),
        wait_longest: waits.last().copied().unwrap_or(0),
        long: spans.len(),
        long_mean: mean(&spans),
        makespan: last - first,
        useful,
        preemptions: fates.iter().map(|fate| u64::from(fate.preemptions)).sum(),
        lost: sum(|fate| fate.lost),
        waste: sum(|fate| fate.lost + fate.overhead),
        undone: fates.iter().filter(|fate| fate.ended.is_none()).count(),
    }
}

/// A time on all slots of a job.
fn times(time: Millis, task: &Task) -> Millis {
    time.saturating_mul(i64::from(task.slots))
}

fn mean(spans: &[Millis]) -> Millis {
    let sum: i128 = spans.iter().map(|&span| i128::from(span)).sum();
    let count = i128::try_from(spans.len().max(1)).unwrap_or(1);
    Millis::try_from(sum / count).unwrap_or(Millis::MAX)
}
