//! How often jobs are lost, as it was seen.

use serde::{Deserialize, Serialize};

/// In so many milliseconds of work one job is lost as long as nothing was seen: in a day.
const AT_FIRST: u64 = 86_400_000;

/// What was seen in more work than this counts for half (sixty days).
const MOST: u64 = 60 * AT_FIRST;

/// How much jobs have worked, all together, and how often one was lost because the machine, or what keeps it there, has
/// failed. Ordered preemptions are no failures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    worked_ms: u64,
    lost: u64,
}

impl Failures {
    /// A job has worked for so many milliseconds.
    pub fn worked(&mut self, millis: u64) {
        self.worked_ms = self.worked_ms.saturating_add(millis);
        if self.worked_ms > MOST {
            (self.worked_ms, self.lost) = (self.worked_ms / 2, self.lost / 2);
        }
    }

    /// A job that worked was lost.
    pub fn lost(&mut self) {
        self.lost += 1;
    }

    /// In how many milliseconds of work one job is lost, on average.
    #[must_use]
    pub fn mean_ms(&self) -> u64 {
        (AT_FIRST + self.worked_ms) / (1 + self.lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_takes_the_place_of_what_was_thought() {
        let mut seen = Failures::default();
        assert_eq!(seen.mean_ms(), AT_FIRST);
        (0..9).for_each(|_| seen.lost());
        assert_eq!(seen.mean_ms(), AT_FIRST / 10);
        seen.worked(9 * AT_FIRST);
        assert_eq!(seen.mean_ms(), AT_FIRST);
        // A machine that does not fail any more is found out.
        (0..120).for_each(|_| seen.worked(AT_FIRST));
        assert!(seen.mean_ms() > 10 * AT_FIRST, "{seen:?}");
    }
}
