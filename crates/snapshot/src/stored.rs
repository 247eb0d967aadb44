//! Archives that count as compressed and are not: a Zstandard frame of blocks that are stored
//! as they are.
//!
//! Packs are compressed by clusters inside. Tools that copy images compress a plain archive on
//! the way, which would make it another blob of which no part could be read alone; one in a
//! Zstandard frame they leave as it is. Where a byte of the archive is in the blob is known by
//! its number alone.

use std::io::{self, Write};
use std::ops::Range;

/// The bytes of a block; the most that the format allows.
const BLOCK: u64 = 128 << 10;
/// Magic number, no flags, a window of one block.
const HEAD: [u8; 6] = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 7 << 3];
/// The bytes in front of each block.
const BLOCK_HEAD: u64 = 3;

/// Where byte `at` of the archive is in the blob. What is nowhere, as a hostile index may have it, is behind all of it.
fn place(at: u64) -> u64 {
    at.saturating_add(HEAD.len() as u64 + (at / BLOCK + 1) * BLOCK_HEAD)
}

/// Where a part of the archive, which is not empty, is in the blob.
#[must_use]
pub fn extent(part: &Range<u64>) -> Range<u64> {
    place(part.start)..place(part.end.saturating_sub(1)).saturating_add(1)
}

/// The part of the archive, from what the blob has at its [`extent`].
#[must_use]
pub fn strip(mut stored: Vec<u8>, part: &Range<u64>) -> Vec<u8> {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let first = size(BLOCK - part.start % BLOCK);
    let (mut to, mut from) = (first.min(stored.len()), first.saturating_add(size(BLOCK_HEAD)));
    while from < stored.len() {
        let end = from.saturating_add(size(BLOCK)).min(stored.len());
        stored.copy_within(from..end, to);
        to += end - from;
        from = end.saturating_add(size(BLOCK_HEAD));
    }
    stored.truncate(to);
    stored
}

/// Writes an archive into a frame.
#[derive(Debug)]
pub struct Store<W> {
    to: W,
    /// What is not written yet: never empty blocks but the last.
    open: Vec<u8>,
}

impl<W: Write> Store<W> {
    /// Begins a frame.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn new(mut to: W) -> io::Result<Self> {
        to.write_all(&HEAD)?;
        Ok(Self { to, open: Vec::new() })
    }

    fn block(&mut self, len: usize, last: bool) -> io::Result<()> {
        let size = u32::try_from(len).map_err(io::Error::other)?;
        let head = (size << 3 | u32::from(last)).to_le_bytes();
        self.to.write_all(&head[..3])?;
        self.to.write_all(&self.open[..len])?;
        self.open.drain(..len);
        Ok(())
    }

    /// Ends the frame.
    ///
    /// # Errors
    /// Those of what it is written to.
    pub fn finish(mut self) -> io::Result<W> {
        self.block(self.open.len(), true)?;
        Ok(self.to)
    }
}

impl<W: Write> Write for Store<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.open.extend_from_slice(data);
        let block = usize::try_from(BLOCK).unwrap_or(usize::MAX);
        // The last block is known by its end only.
        while self.open.len() > block {
            self.block(block, false)?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_nowhere_is_behind_the_end() {
        for part in [u64::MAX - 1..u64::MAX, 0..u64::MAX] {
            assert_eq!(extent(&part).end, u64::MAX);
        }
    }

    #[test]
    fn parts_are_found_and_the_whole_is_a_frame() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 77] {
            let plain: Vec<u8> = (0..len).map(|n| (n * n / 7).to_le_bytes()[0]).collect();
            let mut store = Store::new(Vec::new()).unwrap();
            plain.chunks(1000).for_each(|part| store.write_all(part).unwrap());
            let stored = store.finish().unwrap();
            assert_eq!(zstd::decode_all(stored.as_slice()).unwrap(), plain);
            for start in [0, 1, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK] {
                for end in [start + 1, start + BLOCK - 1, start + BLOCK, start + 2 * BLOCK, len] {
                    if start < end && end <= len {
                        let at = |n: u64| usize::try_from(n).unwrap();
                        let range = extent(&(start..end));
                        let part = stored[at(range.start)..at(range.end)].to_vec();
                        assert_eq!(strip(part, &(start..end)), plain[at(start)..at(end)]);
                    }
                }
            }
        }
    }
}
