//! How much is asked of a dump besides the pages that somebody waits for.
//!
//! Answers come in the order of the requests: whoever waits for a page waits first for all that was asked for
//! before. So little is under way as long as pages are waited for, and more with each answer for which nobody was.

use super::address_space::{AROUND, CHUNK};
use crate::memory::vma::PAGE;

/// Bytes that are under way as long as pages are waited for, about: those of 1 ms of a link of 1 Gbit/s.
const LEAST: u64 = 128 * 1024;
/// Bytes that are under way when nobody has waited for long: some are on their way while others are put in place.
pub(super) const MOST: u64 = 3 * CHUNK;
/// Bytes that are added with each answer.
const STEP: u64 = 16 * 1024;

/// Bytes that may be under way.
#[derive(Debug)]
pub(super) struct Ahead(u64);

impl Default for Ahead {
    /// Of a program that begins: it waits for nearly everything that it touches.
    fn default() -> Self {
        Ahead(LEAST)
    }
}

impl Ahead {
    /// Somebody waits for a page that has to be asked for.
    pub(super) fn is_waited_for(&mut self) {
        self.0 = LEAST;
    }

    /// An answer has come.
    pub(super) fn has_come(&mut self) {
        self.0 = (self.0 + STEP).min(MOST);
    }

    /// Whether there is room for more while so many bytes are under way.
    pub(super) fn has_room(&self, asked: u64) -> bool {
        asked < self.0
    }

    /// Bytes to ask for around a page that somebody waits for, while so many are under way: the more threads wait, the
    /// less for each of them. A power of two.
    pub(super) fn around(asked: u64) -> u64 {
        let half = LEAST.saturating_sub(asked) / 2;
        half.checked_ilog2().map_or(0, |bits| 1 << bits).clamp(2 * PAGE, AROUND)
    }

    /// Bytes to ask for at once: two requests fill what may be under way, so that one comes while the other is
    /// put in place.
    pub(super) fn piece(&self) -> u64 {
        (self.0 / 2).min(CHUNK) & !(PAGE - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is under way before the next answer, of requests that nobody waits for.
    fn asked(ahead: &Ahead) -> Vec<u64> {
        let mut pieces = Vec::new();
        while ahead.has_room(pieces.iter().sum()) {
            pieces.push(ahead.piece());
        }
        pieces
    }

    #[test]
    fn those_who_wait_share_what_is_under_way() {
        let mut asked = 0;
        let mut one_more = || {
            asked += Ahead::around(asked);
            asked
        };
        let under_way: Vec<u64> = (0..16).map(|_| one_more() / 1024).collect();
        assert_eq!(under_way[..6], [64, 96, 112, 120, 128, 136]);
        assert_eq!(under_way[15], 216);
        assert!(!Ahead::default().has_room(asked), "nobody waits for more");
    }

    #[test]
    fn little_is_under_way_as_long_as_somebody_waits() {
        let mut ahead = Ahead::default();
        assert_eq!(asked(&ahead), [LEAST / 2; 2]);
        for _ in 0..100 {
            ahead.has_come();
        }
        assert_eq!(asked(&ahead), [CHUNK; 3]);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead), [LEAST / 2; 2]);
        // One who waits now and then finds no more than this.
        for _ in 0..4 {
            ahead.has_come();
        }
        let under_way: u64 = asked(&ahead).iter().sum();
        assert!(under_way <= 2 * LEAST, "{under_way}");
        assert!(asked(&ahead).iter().all(|piece| piece.is_multiple_of(PAGE)));
    }
}
