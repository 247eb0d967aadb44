//! How long rounds take, from those that were.

use serde::{Deserialize, Serialize};

use crate::forecast::float;
use crate::report::Round;

/// Bytes a second of rounds whose length seems to cost nothing.
const MOST: f64 = 1e12;
/// Bytes a second of a link that is not known yet.
pub(crate) const LINK: f64 = 1e9;

/// What a round takes: a time, whatever it brings, and one for each byte.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pace {
    /// Seconds of each round.
    pub each: f64,
    /// Bytes a second.
    pub rate: f64,
}

impl Pace {
    /// The pace of rounds, by least squares. One alone says nothing about what a round takes that is in each
    /// of them. The time for which `--bandwidth` held them back does not count: the pause has no limit. What the link
    /// can do behind that does not show, so it is no faster than one that is not known.
    #[must_use]
    pub(crate) fn of(rounds: &[Round]) -> Option<Self> {
        let points: Vec<(f64, f64)> =
            rounds.iter().map(|it| (float(it.bytes), it.unlimited().as_secs_f64())).collect();
        let most = if rounds.iter().any(|it| !it.held.is_zero()) { LINK } else { MOST };
        if points.is_empty() {
            return None;
        }
        let count = float(points.len() as u64);
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|it| it.0).max(1.0), mean(|it| it.1).max(1e-6));
        let spread: f64 = points.iter().map(|it| (it.0 - x) * (it.0 - x)).sum();
        let slope = points.iter().map(|it| (it.0 - x) * (it.1 - y)).sum::<f64>() / spread.max(1.0);
        let each = y - slope * x;
        Some(match points.len() {
            // More took less: others had the machine.
            2.. if slope <= 1.0 / most => Self { each: y, rate: most },
            2.. if each >= 0.0 => Self { each, rate: 1.0 / slope },
            _ => Self { each: 0.0, rate: (x / y).min(most) },
        })
    }

    /// Whether it can be one.
    #[must_use]
    pub(crate) fn is_sane(&self) -> bool {
        const DAY: f64 = 86_400.0;
        (0.0..=DAY).contains(&self.each) && (1e-3..=MOST).contains(&self.rate)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::{Duration, Instant};

    use super::*;

    fn round(&(megabytes, millis): &(u64, u64)) -> Round {
        Round {
            start: Instant::now(),
            pages: megabytes * 250,
            bytes: megabytes * 1_000_000,
            time: Duration::from_millis(millis),
            held: Duration::ZERO,
            frozen: Duration::from_millis(2),
        }
    }

    fn pace(rounds: &[(u64, u64)]) -> (f64, f64) {
        let rounds: Vec<Round> = rounds.iter().map(round).collect();
        let pace = Pace::of(&rounds).unwrap();
        assert!(pace.is_sane(), "{pace:?}");
        ((pace.each * 1e3).round(), (pace.rate / 1e6).round())
    }

    #[test]
    fn rounds_are_like_those_before() {
        assert_eq!(Pace::of(&[]), None);
        assert_eq!(pace(&[(100, 1000)]), (0.0, 100.0));
        // 50 ms for each of them, and 10 ms for each megabyte.
        assert_eq!(pace(&[(100, 1050), (10, 150)]), (50.0, 100.0));
        assert_eq!(pace(&[(100, 1050), (50, 550), (10, 150)]), (50.0, 100.0));
        // More took less, as much took longer, or nothing took nothing.
        assert_eq!(pace(&[(10, 300), (20, 100)]), (200.0, 1e6));
        assert_eq!(pace(&[(10, 300), (10, 100)]), (200.0, 1e6));
        assert_eq!(pace(&[(10, 50), (100, 1050)]), (0.0, 100.0));
        assert_eq!(pace(&[(0, 0)]), (0.0, 1.0));
        // 2.5 s of a limit of 40 MB/s, and 0.2 s of another that hides all of the link.
        let limited = |megabytes, millis, held| Round {
            held: Duration::from_millis(held),
            ..round(&(megabytes, millis))
        };
        let rate = |rounds: &[Round]| (Pace::of(rounds).unwrap().rate / 1e6).round();
        assert_eq!(rate(&[limited(100, 2500, 2300)]), 500.0);
        assert_eq!(rate(&[limited(100, 2500, 2300), limited(10, 250, 230)]), 500.0);
        assert_eq!(rate(&[limited(100, 200, 200)]), 1000.0);
        let wrong = [(-1.0, 1.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (1.0, 0.0)];
        assert!(!wrong.iter().any(|&(each, rate)| Pace { each, rate }.is_sane()));
    }
}
