//! Preemption that knows its costs: by which means a job can give way, how long each
//! takes, what is lost, and how often it pays to save a job that nobody preempts.
//!
//! Nothing here knows of queues or of where jobs are placed: a node agent of a cluster
//! has the same questions.

mod dirt;
mod failures;
mod speed;

use serde::{Deserialize, Serialize};

pub use dirt::Dirt;
pub use failures::Failures;
pub use speed::Speed;

/// How a job gives way, in the order in which they are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// It is frozen and keeps its memory.
    Stop,
    /// It is saved and ended, and is brought back later.
    Checkpoint,
    /// Its own command makes it save its state and end.
    Command,
    /// It is killed, and starts again from its last checkpoint or its beginning.
    Kill,
}

impl Means {
    /// All, in their order.
    pub const ALL: [Means; 4] = [Means::Stop, Means::Checkpoint, Means::Command, Means::Kill];
}

impl std::fmt::Display for Means {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Means::Stop => "stop",
            Means::Checkpoint => "checkpoint",
            Means::Command => "command",
            Means::Kill => "kill",
        })
    }
}

/// How long it takes to freeze a job or to let it go on, in milliseconds.
const STOP_MS: u64 = 5;

/// How long an application's own command is thought to take until it has been seen.
const COMMAND_MS: u64 = 100;

/// What is known of a job that might have to give way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of memory that it holds.
    pub memory: u64,
    /// Bytes of it that a checkpoint has to write: those that are in none yet.
    pub to_save: u64,
    /// Bytes of it that must be there again before it runs: none if they come while it runs.
    pub to_fill: u64,
    /// How long it has run since it was last saved or started, in milliseconds.
    pub unsaved_ms: u64,
    /// Whether it, or its kind, was found not to be saveable.
    pub refused: bool,
    /// Whether it has a command of its own for giving way.
    pub has_command: bool,
    /// How fast this machine saves and brings back.
    pub speed: Speed,
}

/// What is needed of a job that gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressure {
    /// Bytes of memory that are free.
    pub memory_free: u64,
    /// Bytes of memory that the other job needs.
    pub memory_needed: u64,
}

/// What it costs to let a job give way by one means, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// By which means.
    pub means: Means,
    /// Until its processors (and memory, but for `stop`) are free.
    pub away_ms: u64,
    /// How long it stands still of that: while rounds are written it works on.
    #[serde(default)]
    pub still_ms: u64,
    /// Until it goes on, once there is room.
    pub back_ms: u64,
    /// Work that has to be done again.
    pub lost_ms: u64,
}

impl Price {
    /// Time that nobody gets anything for, but for lost work.
    #[must_use]
    pub fn overhead_ms(&self) -> u64 {
        self.still_ms + self.back_ms
    }

    /// All of it, with the time that the other job waits.
    #[must_use]
    pub fn total_ms(&self) -> u64 {
        self.away_ms + self.back_ms + self.lost_ms
    }
}

/// The prices of those of the `allowed` means that are possible, in the order of means.
#[must_use]
pub fn prices(facts: &Facts, allowed: &[Means], pressure: Pressure) -> Vec<Price> {
    Means::ALL
        .into_iter()
        .filter(|means| allowed.contains(means))
        .filter_map(|means| price(facts, means, pressure))
        .collect()
}

/// The price of the first of the `allowed` means that is possible.
#[must_use]
pub fn choose(facts: &Facts, allowed: &[Means], pressure: Pressure) -> Option<Price> {
    prices(facts, allowed, pressure).into_iter().next()
}

fn price(facts: &Facts, means: Means, pressure: Pressure) -> Option<Price> {
    let (away_ms, still_ms, back_ms, lost_ms) = match means {
        Means::Stop if pressure.memory_free < pressure.memory_needed => return None,
        Means::Stop => (STOP_MS, STOP_MS, STOP_MS, 0),
        Means::Checkpoint if facts.refused => return None,
        Means::Checkpoint => {
            let (speed, bytes) = (facts.speed, facts.to_save);
            (speed.save_ms(bytes), speed.still_ms(bytes), speed.restore_ms(facts.to_fill), 0)
        }
        Means::Command if !facts.has_command => return None,
        Means::Command => (COMMAND_MS, COMMAND_MS, COMMAND_MS, 0),
        Means::Kill => (STOP_MS, STOP_MS, STOP_MS, facts.unsaved_ms),
    };
    Some(Price { means, away_ms, still_ms, back_ms, lost_ms })
}

/// A job runs at least this many times as long as it costs to let it give way.
pub const EXEMPT_FACTOR: u64 = 10;

/// How long a job runs, in milliseconds, before it can be made to give way again at this
/// price. Lost work is no part of it: it grows as fast as the time that a job has run.
#[must_use]
pub fn exempt_ms(price: &Price) -> u64 {
    price.overhead_ms().saturating_mul(EXEMPT_FACTOR)
}

/// How many rounds of written pages are worth their time before a job of so many bytes
/// is frozen: none for what is saved in an instant.
#[must_use]
pub fn rounds(memory: u64) -> u32 {
    match memory {
        0..0x1000_0000 => 0,
        0x1000_0000..0x8000_0000 => 1,
        _ => 2,
    }
}

/// How long to run between two checkpoints, in milliseconds, if one costs `cost_ms` and
/// the machine fails every `mean_ms` on average: the first-order optimum of Young and
/// Daly. Ordered preemptions are no failures and no part of `mean_ms`.
#[must_use]
pub fn interval_ms(cost_ms: u64, mean_ms: u64) -> u64 {
    let product = 2 * u128::from(cost_ms.max(1)) * u128::from(mean_ms);
    let optimum = u64::try_from(product.isqrt()).unwrap_or(u64::MAX);
    // Below this, the approximation does not hold, and jobs would do little else.
    optimum.max(cost_ms.saturating_mul(EXEMPT_FACTOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLENTY: Pressure = Pressure { memory_free: 1 << 40, memory_needed: 1 << 30 };
    const TIGHT: Pressure = Pressure { memory_free: 1 << 20, memory_needed: 1 << 30 };

    fn facts() -> Facts {
        Facts {
            memory: 1 << 30,
            to_save: 1 << 30,
            to_fill: 0,
            unsaved_ms: 90_000,
            refused: false,
            has_command: true,
            speed: Speed::default(),
        }
    }

    fn chosen(facts: &Facts, pressure: Pressure) -> Option<Means> {
        choose(facts, &Means::ALL, pressure).map(|price| price.means)
    }

    #[test]
    fn means_in_their_order() {
        assert_eq!(chosen(&facts(), PLENTY), Some(Means::Stop));
        assert_eq!(chosen(&facts(), TIGHT), Some(Means::Checkpoint));
        let refused = Facts { refused: true, ..facts() };
        assert_eq!(chosen(&refused, TIGHT), Some(Means::Command));
        let helpless = Facts { has_command: false, ..refused };
        assert_eq!(chosen(&helpless, TIGHT), Some(Means::Kill));
        assert_eq!(choose(&helpless, &[Means::Stop, Means::Checkpoint], TIGHT), None);
    }

    #[test]
    fn only_killing_loses_work() {
        for price in prices(&facts(), &Means::ALL, PLENTY) {
            assert_eq!(price.lost_ms > 0, price.means == Means::Kill, "{price:?}");
        }
    }

    #[test]
    fn what_a_job_works_on_in_is_no_cost_that_protects_it() {
        // Saving 2 GiB takes seconds, but it stands still only for the last round, and runs
        // again before its memory is there: somebody who waits must not wait for minutes.
        let large = Facts { memory: 2 << 30, to_save: 2 << 30, ..facts() };
        let price = choose(&large, &[Means::Checkpoint], TIGHT).unwrap();
        assert!(price.away_ms > 3 * price.still_ms, "{price:?}");
        assert!(exempt_ms(&price) < 15_000, "{price:?}");
        // It is protected for longer where all of its memory must be there first.
        let whole = Facts { to_fill: 2 << 30, ..large };
        let whole = choose(&whole, &[Means::Checkpoint], TIGHT).unwrap();
        assert!(exempt_ms(&whole) > exempt_ms(&price) + 30_000, "{whole:?}");
        // What is saved without rounds stands still all the time.
        let small = Facts { memory: 64 << 20, to_save: 64 << 20, ..facts() };
        let small = choose(&small, &[Means::Checkpoint], TIGHT).unwrap();
        assert_eq!(small.still_ms, small.away_ms);
    }

    #[test]
    fn young_and_daly() {
        // 5 s each day: 15.5 minutes.
        let minutes = interval_ms(5_000, 86_400_000) / 60_000;
        assert_eq!(minutes, 15);
        // Where the machine fails all the time, still not more than a tenth goes to it.
        assert_eq!(interval_ms(5_000, 10), 50_000);
    }
}
