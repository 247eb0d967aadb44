//! How many answers there were, and when.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};

/// Answers are counted by milliseconds, for so many of them.
const MILLIS: usize = 1 << 20;

/// Answers, by the millisecond in which they came.
pub struct Answers {
    start: Instant,
    counts: Vec<AtomicU32>,
}

impl Answers {
    pub fn new() -> Self {
        let counts = (0..MILLIS).map(|_| AtomicU32::new(0)).collect();
        Self { start: Instant::now(), counts }
    }

    /// Counts answers that have come now.
    pub fn add(&self, answers: u32) -> Result<()> {
        let millis = usize::try_from(self.start.elapsed().as_millis())?;
        let count = self.counts.get(millis).context("a run that is too long")?;
        count.fetch_add(answers, Ordering::Relaxed);
        Ok(())
    }

    /// Answers a second between two moments.
    pub fn rate(&self, from: Instant, to: Instant) -> f64 {
        let counts = self.between(from, to);
        let sum: u32 = counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        f64::from(sum) / to.saturating_duration_since(from).as_secs_f64().max(1e-3)
    }

    /// Milliseconds of the longest time without any answer between two moments.
    pub fn silence(&self, from: Instant, to: Instant) -> u32 {
        let (mut longest, mut now) = (0, 0);
        for count in self.between(from, to) {
            now = if count.load(Ordering::Relaxed) == 0 { now + 1 } else { 0 };
            longest = longest.max(now);
        }
        longest
    }

    fn between(&self, from: Instant, to: Instant) -> &[AtomicU32] {
        let at = |moment: Instant| {
            let millis = moment.saturating_duration_since(self.start).as_millis();
            usize::try_from(millis).map_or(self.counts.len(), |it| it.min(self.counts.len()))
        };
        &self.counts[at(from)..at(to)]
    }
}
