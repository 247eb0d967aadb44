//! What the pause is expected to be, from what is known while the tasks still run.

use std::time::Duration;

use torpor_kernel::proc;

use super::{Plan, Source};
use crate::error::Result;
use crate::experience::{Experience, Factors, Kind, Sample, Size};
use crate::forecast::{FILL, Measured, Pause, float, seconds};
use crate::pace::{LINK, Pace};
use crate::report::{Downtime, Estimate, Round};
use crate::shape::Shape;
use crate::task;

/// What a migration is comparable with.
///
/// # Errors
/// If there is no such tree.
pub(super) fn kind(plan: &Plan) -> Result<Kind> {
    let (to, is_container) = (plan.to.address.to_string(), plan.container.is_some());
    let size = Size::of(&Shape::of(&task::tree(plan.pid)?));
    let name = proc::stat(plan.pid).map(|stat| stat.comm).unwrap_or_default();
    let program = String::from_utf8_lossy(&name).into_owned();
    Ok(Kind { to, mode: plan.mode, is_container, program, size })
}

impl Source<'_> {
    /// What is expected if the tasks were stopped now. Nothing, if they have ended.
    pub(super) fn estimate(&self) -> Option<Estimate> {
        let stores_files = self.compares_files;
        let shape = Shape { stores_files, ..Shape::of(&task::tree(self.plan.pid).ok()?) };
        let (first, last) = (self.rounds.first(), self.rounds.last());
        let pace = Pace::of(&self.rounds).unwrap_or(Pace { each: 0.0, rate: LINK });
        // The first round there was of all of the tree.
        let whole = first.filter(|_| self.plan.builds_early() || self.brings_files);
        let frozen = last.map_or(Duration::ZERO, |last| last.frozen);
        let freeze = freeze(whole.map(|first| first.frozen), frozen, &shape);
        // Until a round has brought it, only the files in memory are known of what is no page.
        let state = match self.state_bytes {
            0 => shape.files_in_memory,
            all => all,
        };
        let measured = Measured {
            memory: first
                .map_or(shape.memory, |first| first.bytes.saturating_sub(self.compared_bytes)),
            state,
            compared: self.compared_bytes,
            archived: if stores_files { shape.files_in_memory } else { 0 },
            link: pace.rate,
            freeze,
            restore: freeze,
            fill: FILL,
            scan: self.files_time,
            each: seconds(pace.each).saturating_sub(frozen) + freeze,
            ..Measured::default()
        };
        let memory = float(measured.memory);
        let left = left(&self.rounds).map_or(memory, |left| left.min(memory));
        let plain = measured.pause(self.plan.mode, left);
        let lesson = self.experience.lesson(&self.kind);
        let pause = lesson.map_or(plain, |lesson| lesson.factors.correct(&plain));
        let after = measured.after(self.plan.mode, left);
        Some(Estimate { plain, pause, after, learned_from: lesson.map_or(0, |lesson| lesson.of) })
    }

    /// How far the estimate was off is remembered for the next one.
    pub(super) fn learn(&self) {
        let Some(estimate) = &self.estimate else { return };
        let real = pause(&self.downtime);
        let factors = Factors::between(&estimate.plain, &real);
        let sample = Sample::new(self.kind.clone(), factors, &self.rounds, self.plan.mode);
        // Others may have learned something meanwhile.
        if let Err(error) = Experience::of(&self.plan.state_dir).add(sample) {
            tracing::warn!("{error}");
        }
    }
}

/// How long the last round stops the tasks before it sends pages. It looks at all that the first one of a tree looks at (`whole`),
/// and makes no twins of tasks that go on; those between look at memory only. It is between the two, which may be far apart: the
/// geometric mean; but files in memory are read again in whole. Without a whole one, all else costs what its `shape` says.
fn freeze(whole: Option<Duration>, last: Duration, shape: &Shape) -> Duration {
    match whole {
        Some(whole) => {
            let files = whole.mul_f64(shape.archive().as_secs_f64() / shape.cost().as_secs_f64());
            let others = whole.saturating_sub(files);
            files + seconds((others.as_secs_f64() * last.as_secs_f64()).sqrt())
        }
        None => shape.cost() + last,
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
        let [whole, last] = [160, 10].map(Duration::from_millis);
        let plain = Shape::default();
        assert_eq!(freeze(Some(whole), last, &plain).as_millis(), 40);
        assert_eq!(freeze(None, last, &plain), plain.cost() + last);
        // Nearly all of it is files in memory, which the last round reads as well.
        let files = Shape { files_in_memory: 1 << 30, ..plain };
        assert!(freeze(Some(whole), last, &files).as_millis() > 158);
        assert!(freeze(None, last, &files) > files.archive());
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
