//! What threads that touch memory at random are told, and tell: see `target.c`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::process::until;

/// How many threads there are.
const TOUCHERS: u64 = 16;
/// How many lengths of waits are told apart, in tenths of a millisecond.
const TENTHS: u64 = 1000;

/// The file that they share with whoever measures them.
pub struct Touches(File);

impl Touches {
    /// Those of a program that was started in `dir`.
    pub fn of(dir: &Path) -> Result<Self> {
        let path = dir.join("touches");
        let file = File::options().read(true).write(true).open(&path);
        file.map(Self).with_context(|| path.display().to_string())
    }

    fn word(&self, at: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at * 8)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Lets them begin.
    pub fn begin(&self) -> Result<()> {
        Ok(self.0.write_all_at(&1_u64.to_le_bytes(), 0)?)
    }

    /// Pages a second that they were through with; waits until they are.
    pub fn rate(&self) -> Result<f64> {
        let time = |thread| self.word(2 + 2 * thread);
        let is_done = |thread| time(thread).is_ok_and(|time| time > 0);
        until("threads that touch memory", || (0..TOUCHERS).all(is_done))?;
        let pages: u64 =
            (0..TOUCHERS).map(|thread| self.word(1 + 2 * thread)).sum::<Result<_>>()?;
        let slowest = (0..TOUCHERS).map(time).collect::<Result<Vec<_>>>()?.into_iter().max();
        #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
        let rate = pages as f64 * 1e9 / slowest.unwrap_or(1) as f64;
        Ok(rate)
    }

    /// How long they have waited.
    pub fn waits(&self) -> Result<Waits> {
        (0..TENTHS)
            .map(|tenth| self.word(1 + 2 * TOUCHERS + tenth))
            .collect::<Result<_>>()
            .map(Waits)
    }
}

/// How many touches had to wait, by tenths of a millisecond.
#[derive(Debug)]
pub struct Waits(Vec<u64>);

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
impl Waits {
    pub fn all(&self) -> f64 {
        self.0.iter().sum::<u64>() as f64
    }

    /// The share of them that was shorter than so many tenths of a millisecond.
    pub fn within(&self, tenths: usize) -> f64 {
        self.0.iter().take(tenths).sum::<u64>() as f64 / self.all().max(1.0)
    }

    /// In milliseconds, what a share of them was shorter than.
    pub fn quantile(&self, share: f64) -> f64 {
        let tenths = (0..self.0.len()).find(|&tenths| self.within(tenths) >= share);
        tenths.unwrap_or(self.0.len()) as f64 / 10.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_quantiles_belong_together() {
        let mut tenths = vec![0; 1000];
        (tenths[3], tenths[19], tenths[20]) = (90, 9, 1);
        let waits = Waits(tenths);
        assert!((waits.all() - 100.0).abs() < 1e-9);
        assert!((waits.within(20) - 0.99).abs() < 1e-9 && (waits.within(21) - 1.0).abs() < 1e-9);
        assert!((waits.quantile(0.5) - 0.4).abs() < 1e-9);
        assert!((waits.quantile(0.99) - 2.0).abs() < 1e-9);
        assert!((waits.quantile(1.0) - 2.1).abs() < 1e-9);
    }
}
