//! Cutting a stream where its content says so, so that what two streams have in common becomes
//! the same chunks in both, wherever in them it stands.
//!
//! A sum over the last 64 bytes (gear: one shift and one addition for each byte) ends a chunk
//! where its uppermost bits are zero.

use std::io::{self, Write};

/// No chunk but the last is shorter: each is an object, and a request.
const LEAST: usize = 256 << 10;
/// None is longer.
pub const MOST: usize = 4 << 20;
/// One position in so many ends a chunk.
const ONE_IN: u64 = 512 << 10;
/// A byte has left the sum after so many others.
const WINDOW: usize = 64;

/// A number for each byte: what splitmix64 yields.
static GEAR: [u64; 256] = {
    let mut table = [0; 256];
    let mut state = 0_u64;
    let mut at = 0;
    while at < table.len() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[at] = mixed ^ (mixed >> 31);
        at += 1;
    }
    table
};

/// Gives what is written to it to `take`, chunk by chunk.
#[derive(Debug)]
pub struct Cutter<F> {
    take: F,
    open: Vec<u8>,
    sum: u64,
}

impl<F: FnMut(&[u8]) -> io::Result<()>> Cutter<F> {
    /// A cutter that has nothing yet.
    pub fn new(take: F) -> Self {
        Self { take, open: Vec::new(), sum: 0 }
    }

    /// Gives away what is left.
    ///
    /// # Errors
    /// Those of `take`.
    pub fn finish(mut self) -> io::Result<()> {
        if self.open.is_empty() { Ok(()) } else { (self.take)(&self.open) }
    }

    /// How many of these bytes belong to the open chunk, and whether it ends there.
    fn reach(&mut self, data: &[u8]) -> (usize, bool) {
        // Where no chunk may end the sum is of no use.
        let skipped = (LEAST - WINDOW).saturating_sub(self.open.len()).min(data.len());
        let most = data.len().min(MOST - self.open.len());
        for (at, byte) in data.iter().enumerate().take(most).skip(skipped) {
            self.sum = (self.sum << 1).wrapping_add(GEAR[usize::from(*byte)]);
            if self.open.len() + at + 1 >= LEAST && self.sum >> (64 - ONE_IN.ilog2()) == 0 {
                return (at + 1, true);
            }
        }
        (most, self.open.len() + most == MOST)
    }
}

impl<F: FnMut(&[u8]) -> io::Result<()>> Write for Cutter<F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let (count, ends) = self.reach(data);
        self.open.extend_from_slice(&data[..count]);
        if ends {
            (self.take)(&self.open)?;
            self.open.clear();
            self.sum = 0;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn noise(count: usize, mut state: u64) -> Vec<u8> {
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        };
        (0..count).map(next).collect()
    }

    /// The chunks, written in pieces of this length.
    fn cut(data: &[u8], piece: usize) -> Vec<Vec<u8>> {
        let mut chunks = Vec::new();
        let mut cutter = Cutter::new(|chunk: &[u8]| {
            chunks.push(chunk.to_vec());
            Ok(())
        });
        data.chunks(piece).try_for_each(|piece| cutter.write_all(piece)).unwrap();
        cutter.finish().unwrap();
        chunks
    }

    #[test]
    fn chunks_are_found_again_wherever_they_stand() {
        let common = noise(6 << 20, 1);
        let first = cut(&common, 8192);
        assert_eq!(first.concat(), common);
        let (last, inner) = first.split_last().unwrap();
        assert!(inner.iter().all(|chunk| (LEAST..=MOST).contains(&chunk.len())));
        assert!(last.len() <= MOST && inner.len() > 3, "{}", inner.len());
        // However it is written, the chunks are the same.
        assert_eq!(cut(&common, 100_001), first);
        let moved = [noise(12_345, 2), common].concat();
        let second = cut(&moved, 8192);
        assert_eq!(second.concat(), moved);
        let found = second.iter().filter(|chunk| first.contains(chunk)).count();
        assert!(found + 2 >= first.len(), "{found} of {}", first.len());
    }

    #[test]
    fn nothing_is_too_long_and_nothing_is_nothing() {
        assert!(cut(&[], 1).is_empty());
        let zeros = cut(&vec![0; 2 * MOST + 1], 65_536);
        assert_eq!(zeros.iter().map(Vec::len).collect::<Vec<_>>(), [MOST, MOST, 1]);
    }
}
