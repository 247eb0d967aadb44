//! What the pause is expected to be, from what is known while the tasks still run.

use std::time::Duration;

use super::{Plan, Source};
use crate::experience::{Experience, Factors, Kind};
use crate::forecast::{FILL, Measured, Pause, float, seconds};
use crate::pace::{LINK, Pace};
use crate::report::{Downtime, Estimate, Round};
use crate::shape::Shape;
use crate::task;

/// What a migration is comparable with.
pub(super) fn kind(plan: &Plan) -> Kind {
    let (to, is_container) = (plan.to.address.to_string(), plan.container.is_some());
    Kind { to, mode: plan.mode, is_container }
}

impl Source<'_> {
    /// What is expected if the tasks were stopped now. Nothing, if they have ended.
    pub(super) fn estimate(&self) -> Option<Estimate> {
        let shape = Shape::of(&task::tree(self.plan.pid).ok()?);
        let (first, last) = (self.rounds.first(), self.rounds.last());
        let pace = Pace::of(&self.rounds).unwrap_or(Pace { each: 0.0, rate: LINK });
        // The first round there was of all of the tree.
        let whole = first.filter(|_| self.plan.builds_early());
        let frozen = last.map_or(Duration::ZERO, |last| last.frozen);
        let freeze = freeze(whole.map(|first| first.frozen), frozen, shape.cost());
        let measured = Measured {
            memory: first.map_or(shape.memory, |first| first.bytes),
            state: self.state_bytes,
            link: pace.rate,
            freeze,
            restore: freeze,
            fill: FILL,
            scan: self.files_time,
            each: seconds(pace.each).saturating_sub(frozen) + freeze,
            ..Measured::default()
        };
        let left = left(&self.rounds).unwrap_or(float(measured.memory));
        let plain = measured.pause(self.plan.mode, left);
        let lesson = self.experience.lesson(&kind(self.plan));
        let pause = lesson.map_or(plain, |lesson| lesson.factors.correct(&plain));
        let after = measured.after(self.plan.mode, left);
        Some(Estimate { plain, pause, after, learned_from: lesson.map_or(0, |lesson| lesson.of) })
    }

    /// How far the estimate was off is remembered for the next one.
    pub(super) fn learn(&self) {
        let Some(estimate) = &self.estimate else { return };
        let real = pause(&self.downtime);
        let factors = Factors::between(&estimate.plain, &real);
        // Pages that were fetched when the tasks ran there are of no round that they waited for.
        let waited = self.rounds.len() - usize::from(self.plan.mode.is_lazy());
        // Others may have learned something meanwhile.
        let experience = Experience::of(&self.plan.state_dir);
        if let Err(error) =
            experience.add(kind(self.plan), factors, Pace::of(&self.rounds[..waited]))
        {
            tracing::warn!("{error}");
        }
    }
}

/// How long the last round stops the tasks before it sends pages. It looks at all that the first one of a tree looks at (`whole`),
/// and makes no twins of tasks that go on; those between look at memory only. It is between the two, which may be far apart: the
/// geometric mean. Without a whole one, all else costs what its `shape` says.
fn freeze(whole: Option<Duration>, last: Duration, shape: Duration) -> Duration {
    match whole {
        Some(whole) => seconds((whole.as_secs_f64() * last.as_secs_f64()).sqrt()),
        None => shape + last,
    }
}

fn pause(of: &Downtime) -> Pause {
    Pause { freeze: of.freeze, transfer: of.transfer, restore: of.restore() }
}

/// Bytes that a further round would have: what is written while one as long as the last is taken.
fn left(rounds: &[Round]) -> Option<f64> {
    match rounds {
        [.., before, last] => {
            let written = float(last.bytes) / before.time.as_secs_f64().max(1e-6);
            Some(written * last.time.as_secs_f64())
        }
        [only] => Some(float(only.bytes)),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Instant;

    use super::*;

    fn round(megabytes: u64, millis: u64) -> Round {
        Round {
            start: Instant::now(),
            pages: megabytes * 250,
            bytes: megabytes * 1_000_000,
            time: Duration::from_millis(millis),
            held: Duration::ZERO,
            frozen: Duration::from_millis(2),
        }
    }

    #[test]
    fn the_last_round_looks_at_more_than_the_one_before() {
        let [whole, last, shape] = [160, 10, 5].map(Duration::from_millis);
        assert_eq!(freeze(Some(whole), last, shape).as_millis(), 40);
        assert_eq!(freeze(None, last, shape).as_millis(), 15);
    }

    #[test]
    fn the_next_round_is_like_those_before() {
        let (first, second) = (round(100, 1000), round(10, 100));
        // 10 MB/s are written: while the second round took 100 ms, 1 MB.
        assert_eq!(left(&[first.clone(), second]).unwrap().round(), 1e6);
        let only = std::slice::from_ref(&first);
        assert_eq!((left(only), left(&[])), (Some(1e8), None));
    }
}
