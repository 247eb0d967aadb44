//! How much is asked of a dump besides the pages that somebody waits for.
//!
//! Answers come in the order of the requests: whoever waits for a page waits first for all that was asked for
//! before. So little is under way as long as pages are waited for, and more with each answer for which nobody was.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::address_space::{AROUND, CHUNK};
use crate::memory::vma::PAGE;

/// Bytes that are under way as long as pages are waited for, about: those of 1 ms of a link of 1 Gbit/s. For a dump that
/// is further away so many for each millisecond until it answers: less would leave the link idle.
const LEAST: u64 = 128 * 1024;
/// Bytes that are under way when nobody has waited for long: some are on their way while others are put in place.
pub(super) const MOST: u64 = 3 * CHUNK;
/// Bytes that are added with each answer.
const STEP: u64 = 16 * 1024;

/// Bytes that may be under way.
#[derive(Debug)]
pub(super) struct AskedAhead {
    now: u64,
    /// As long as pages are waited for, once that is known.
    least: Option<u64>,
    /// When that was asked for which has not come.
    since: VecDeque<Instant>,
}

impl Default for AskedAhead {
    /// Begins with the least: a program that begins waits for nearly everything that it touches.
    fn default() -> Self {
        AskedAhead { now: LEAST, least: None, since: VecDeque::new() }
    }
}

impl AskedAhead {
    fn least(&self) -> u64 {
        self.least.unwrap_or(LEAST)
    }

    /// Somebody waits for a page that has to be asked for.
    pub(super) fn is_waited_for(&mut self) {
        self.now = self.least();
    }

    /// Something is asked for.
    pub(super) fn asks(&mut self, at: Instant) {
        self.since.push_back(at);
    }

    /// The answer to what was asked for first has come. How soon the soonest one comes is how far away the dump is.
    pub(super) fn has_come(&mut self, at: Instant) {
        let took = self.since.pop_front().map_or(Duration::ZERO, |since| at.duration_since(since));
        let least = LEAST.saturating_mul(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
        let least = least.clamp(LEAST, MOST).min(self.least.unwrap_or(MOST));
        self.least = Some(least);
        self.now = (self.now + STEP).clamp(least, MOST);
    }

    /// Whether there is room for more while so many bytes are under way.
    pub(super) fn has_room(&self, asked: u64) -> bool {
        asked < self.now
    }

    /// Bytes to ask for around a page that somebody waits for, while so many are under way: the more threads wait, the
    /// less for each of them. A power of two.
    pub(super) fn around(&self, asked: u64) -> u64 {
        let half = self.least().saturating_sub(asked) / 2;
        half.checked_ilog2().map_or(0, |bits| 1 << bits).clamp(PAGE, AROUND)
    }

    /// Bytes to ask for at once: two requests fill what may be under way, so that one comes while the other is
    /// put in place.
    pub(super) fn piece(&self) -> u64 {
        (self.now / 2).min(CHUNK) & !(PAGE - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// What is under way before the next answer, of requests that nobody waits for.
    fn asked(ahead: &AskedAhead) -> Vec<u64> {
        let mut pieces = Vec::new();
        while ahead.has_room(pieces.iter().sum()) {
            pieces.push(ahead.piece());
        }
        pieces
    }

    /// As many answers, each so long after its question.
    fn answers(ahead: &mut AskedAhead, count: usize, took: Duration) {
        let at = Instant::now();
        for _ in 0..count {
            ahead.asks(at);
            ahead.has_come(at + took);
        }
    }

    #[test]
    fn those_who_wait_share_what_is_under_way() {
        let ahead = AskedAhead::default();
        let mut asked = 0;
        let mut one_more = || {
            asked += ahead.around(asked);
            asked
        };
        let under_way: Vec<u64> = (0..16).map(|_| one_more() / 1024).collect();
        assert_eq!(under_way[..6], [64, 96, 112, 120, 124, 128]);
        assert_eq!(under_way[15], 168);
        assert!(!ahead.has_room(asked), "nobody waits for more");
    }

    #[test]
    fn little_is_under_way_as_long_as_somebody_waits() {
        let mut ahead = AskedAhead::default();
        assert_eq!(asked(&ahead), [LEAST / 2; 2]);
        answers(&mut ahead, 100, MS / 2);
        assert_eq!(asked(&ahead), [CHUNK; 3]);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead), [LEAST / 2; 2]);
        // One who waits now and then finds no more than this.
        answers(&mut ahead, 4, MS / 2);
        let under_way: u64 = asked(&ahead).iter().sum();
        assert!(under_way <= 2 * LEAST, "{under_way}");
        assert!(asked(&ahead).iter().all(|piece| piece.is_multiple_of(PAGE)));
    }

    #[test]
    fn a_dump_that_is_far_away_is_asked_for_more() {
        let mut ahead = AskedAhead::default();
        answers(&mut ahead, 1, 3 * MS);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead).iter().sum::<u64>(), 3 * LEAST);
        // One answer that was late says nothing, and one that was sooner does.
        answers(&mut ahead, 10, 500 * MS);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead).iter().sum::<u64>(), 3 * LEAST);
        answers(&mut ahead, 1, 2 * MS);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead).iter().sum::<u64>(), 2 * LEAST);
        let mut ahead = AskedAhead::default();
        answers(&mut ahead, 1, 500 * MS);
        ahead.is_waited_for();
        assert_eq!(asked(&ahead), [CHUNK; 3]);
    }
}
