//! The numbers that tests draw: a seed repeats them.

use std::cell::Cell;
use std::time::{SystemTime, UNIX_EPOCH};

/// What names the seed.
const VARIABLE: &str = "TORPOR_SEED";

/// A generator (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(Cell<u64>);

impl Random {
    /// With the seed of the environment variable `TORPOR_SEED`, or another one each time. It is printed,
    /// so that the report of a failure has it.
    #[must_use]
    pub fn printed() -> Self {
        let given = std::env::var(VARIABLE).ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(now.as_millis()).unwrap_or(0)
        });
        println!("{VARIABLE}={seed}");
        Self::of(seed)
    }

    /// With this seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&self, end: u64) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end.max(1)
    }

    /// A place in a list of this length.
    ///
    /// # Panics
    /// The list is empty.
    pub fn place(&self, len: usize) -> usize {
        assert!(len > 0, "there is none to draw");
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_what_was_drawn() {
        let draw = |seed| {
            let random = Random::of(seed);
            (0..50).map(|_| random.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn all_places_are_drawn_and_none_besides() {
        let random = Random::of(1);
        let mut drawn = [0; 5];
        (0..500).for_each(|_| drawn[random.place(5)] += 1);
        assert!(drawn.iter().all(|times| *times > 50), "{drawn:?}");
        assert_eq!((random.below(0), random.below(1)), (0, 0));
    }
}
