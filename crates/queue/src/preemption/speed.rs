//! How fast this machine saves jobs and brings them back, as it was measured.

use serde::{Deserialize, Serialize};

/// The weight of a new measurement, in percent.
const WEIGHT: u64 = 30;

/// Measurements of small images say nothing about the rate.
const SMALLEST: u64 = 16 << 20;

/// Rates in bytes a millisecond, and what even the smallest job takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Speed {
    save: u64,
    restore: u64,
    base_save_ms: u64,
    base_restore_ms: u64,
    /// How much of the time a job stands still that is saved in rounds, in percent.
    still: u64,
}

impl Default for Speed {
    /// What a machine can do at least; replaced by what is measured.
    fn default() -> Self {
        Self { save: 500_000, restore: 500_000, base_save_ms: 50, base_restore_ms: 50, still: 25 }
    }
}

impl Speed {
    /// How long it takes to save so many bytes.
    #[must_use]
    pub(crate) fn save_ms(&self, bytes: u64) -> u64 {
        self.base_save_ms + bytes / self.save.max(1)
    }

    /// How long a job stands still meanwhile: all the time, unless rounds are written before.
    #[must_use]
    pub(crate) fn still_ms(&self, bytes: u64) -> u64 {
        let all = self.save_ms(bytes);
        if super::rounds(bytes) == 0 { all } else { all * self.still / 100 }
    }

    /// How long it takes to bring so many bytes back.
    #[must_use]
    pub fn restore_ms(&self, bytes: u64) -> u64 {
        self.base_restore_ms + bytes / self.restore.max(1)
    }

    /// Takes a measurement in: so many bytes were saved in so many microseconds.
    pub fn saved(&mut self, bytes: u64, took_us: u64) {
        learn(&mut self.save, &mut self.base_save_ms, bytes, took_us);
    }

    /// Takes a measurement in: what was saved in rounds, so many bytes in `took_us`, stood still
    /// for `still_us` of that.
    pub(crate) fn stood_still(&mut self, bytes: u64, still_us: u64, took_us: u64) {
        if super::rounds(bytes) > 0 {
            self.still = blend(self.still, (still_us * 100).div_ceil(took_us.max(1)).min(100));
        }
    }

    /// Takes a measurement in: so many bytes were brought back in so many microseconds.
    pub fn restored(&mut self, bytes: u64, took_us: u64) {
        learn(&mut self.restore, &mut self.base_restore_ms, bytes, took_us);
    }
}

fn blend(old: u64, new: u64) -> u64 {
    (old * (100 - WEIGHT) + new * WEIGHT) / 100
}

fn learn(rate: &mut u64, base_ms: &mut u64, bytes: u64, took_us: u64) {
    let took_ms = (took_us / 1000).max(1);
    if bytes < SMALLEST {
        *base_ms = blend(*base_ms, took_ms);
    } else {
        let copying = took_ms.saturating_sub(*base_ms).max(1);
        *rate = blend(*rate, (bytes / copying).max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_move_the_estimate() {
        let mut speed = Speed::default();
        for _ in 0..30 {
            speed.saved(1 << 10, 10_000);
            speed.saved(2_000_000_000, 1_010_000);
        }
        assert!(speed.save_ms(0).abs_diff(10) <= 3, "{speed:?}");
        assert!(speed.save_ms(2_000_000_000).abs_diff(1010) < 30, "{speed:?}");
        assert_eq!(speed.restore_ms(0), Speed::default().restore_ms(0));
        for _ in 0..30 {
            speed.stood_still(2_000_000_000, 505_000, 1_010_000);
            speed.stood_still(1 << 20, 5, 1000);
        }
        assert!(speed.still_ms(2_000_000_000).abs_diff(505) < 50, "{speed:?}");
    }
}
