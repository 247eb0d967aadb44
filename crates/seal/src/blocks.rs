//! Keyed sums over the blocks of a file.
//!
//! The sum of a file is the XOR of a number for each block, so the blocks may come in any order and
//! from any number of threads, and the sum follows where blocks change without the others being read. The
//! number of a block is a tag of it (AES-256-GMAC; the nonce is the number of the file and that of the
//! block), put through a second cipher: tags alone are linear, and blocks that change places, or change in the same way,
//! would have the same sum. Blocks of zeros count nothing: a hole is the same as what a copy makes of it.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::secret::{KEY_LEN, Secret};

/// The size of a block, but for the last of a file.
pub const BLOCK: usize = 4096;

/// The sum of some blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockSum(pub [u8; 16]);

impl std::ops::BitXorAssign for BlockSum {
    fn bitxor_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a ^= b);
    }
}

/// What sums are made with: for the files of one checkpoint.
pub struct BlockKey {
    tags: LessSafeKey,
    numbers: LessSafeKey,
}

impl BlockKey {
    /// The secrets must be used for nothing else.
    ///
    /// # Errors
    /// If the library cannot take them, which it can always.
    pub fn new(tags: &Secret, numbers: &Secret) -> std::io::Result<Self> {
        const { assert!(KEY_LEN == 32) };
        let key = |secret: &Secret| {
            let key = UnboundKey::new(&AES_256_GCM, secret.expose());
            key.map(LessSafeKey::new).map_err(|_| failed())
        };
        Ok(Self { tags: key(tags)?, numbers: key(numbers)? })
    }

    /// What `data` adds to the sum of file number `file`, in which it begins with block number `first`.
    ///
    /// # Errors
    /// If the library fails.
    pub fn sum(&self, file: u32, first: u64, data: &[u8]) -> std::io::Result<BlockSum> {
        let mut sum = BlockSum::default();
        for (number, block) in (first..).zip(data.chunks(BLOCK)) {
            if block.iter().all(|&byte| byte == 0) {
                continue;
            }
            let mut nonce = [0; NONCE_LEN];
            nonce[..4].copy_from_slice(&file.to_le_bytes());
            nonce[4..].copy_from_slice(&number.to_le_bytes());
            let nonce = Nonce::assume_unique_for_key(nonce);
            let tag = self.tags.seal_in_place_separate_tag(nonce, Aad::from(block), &mut []);
            sum ^= self.number(tag.map_err(|_| failed())?.as_ref())?;
        }
        Ok(sum)
    }

    /// The number of a block with this tag: what the second cipher makes of its first 96 bits.
    fn number(&self, tag: &[u8]) -> std::io::Result<BlockSum> {
        let nonce = Nonce::try_assume_unique_for_key(tag.get(..NONCE_LEN).ok_or_else(failed)?);
        let nonce = nonce.map_err(|_| failed())?;
        let mut number = BlockSum::default();
        let done = self.numbers.seal_in_place_separate_tag(nonce, Aad::empty(), &mut number.0);
        done.map(|_| number).map_err(|_| failed())
    }
}

fn failed() -> std::io::Error {
    std::io::Error::other("AES-256-GCM failed")
}

impl std::fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BlockKey")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn key(byte: u8) -> BlockKey {
        BlockKey::new(&Secret::take(&mut [byte; KEY_LEN]), &Secret::take(&mut [9; KEY_LEN]))
            .unwrap()
    }

    #[test]
    fn the_order_does_not_matter_and_the_place_does() {
        let (one, two) = ([1; BLOCK], [2; BLOCK]);
        let whole = key(1).sum(7, 0, &[one, two].concat()).unwrap();
        let mut parts = key(1).sum(7, 1, &two).unwrap();
        parts ^= key(1).sum(7, 0, &one).unwrap();
        assert_eq!(whole, parts);
        for other in [
            key(1).sum(7, 0, &[two, one].concat()),
            // The same change in both.
            key(1).sum(7, 0, &[[1 ^ 8; BLOCK], [2 ^ 8; BLOCK]].concat()),
            key(1).sum(7, 1, &[one, two].concat()),
            key(1).sum(8, 0, &[one, two].concat()),
            key(2).sum(7, 0, &[one, two].concat()),
            key(1).sum(7, 0, &[one, two].concat()[1..]),
        ] {
            assert_ne!(whole, other.unwrap());
        }
    }

    #[test]
    fn holes_count_nothing() {
        let hole = [0; BLOCK];
        let sum = key(1).sum(7, 0, &[hole, [1; BLOCK], hole].concat()).unwrap();
        assert_eq!(sum, key(1).sum(7, 1, &[1; BLOCK]).unwrap());
        assert_eq!(key(1).sum(7, 0, &hole).unwrap(), BlockSum::default());
    }
}
