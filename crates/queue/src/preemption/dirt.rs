//! How fast a job changes memory that was saved already.

/// A job that was saved and runs on, with what is known of how it changes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirt {
    /// When it was saved, in milliseconds.
    at: i64,
    /// Bytes that it changes in a second; `None` while nothing was measured.
    rate: Option<u64>,
}

impl Dirt {
    /// A job that was saved as a whole at `at`.
    #[must_use]
    pub fn whole(at: i64) -> Self {
        Self { at, rate: None }
    }

    /// The same job, saved again at `at`: `bytes` had changed in `since_ms` milliseconds.
    #[must_use]
    pub fn changed(self, at: i64, bytes: u64, since_ms: u64) -> Self {
        let seen = bytes.saturating_mul(1000) / since_ms.max(1);
        let rate = self.rate.map_or(seen, |before| before.midpoint(seen));
        Self { at, rate: Some(rate) }
    }

    /// Bytes that have changed by `now`, as far as anybody can know: all, where nothing was
    /// measured. A job changes much of what it changes again and again, so the estimate is
    /// too high rather than too low.
    #[must_use]
    pub fn by(&self, now: i64) -> u64 {
        let Some(rate) = self.rate else { return u64::MAX };
        let passed = u64::try_from(now - self.at).unwrap_or(0);
        rate.saturating_mul(passed) / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_expected() {
        let dirt = Dirt::whole(1000);
        assert_eq!(dirt.by(2000), u64::MAX);
        let dirt = dirt.changed(11_000, 50 << 20, 10_000);
        assert_eq!(dirt.by(11_000), 0);
        assert_eq!(dirt.by(13_000), 10 << 20);
        let dirt = dirt.changed(21_000, 150 << 20, 10_000);
        assert_eq!(dirt.by(22_000), 10 << 20);
        assert_eq!(dirt.by(0), 0);
    }
}
