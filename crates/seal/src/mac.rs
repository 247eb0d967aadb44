//! HMAC-SHA256 of pages, many at once.
//!
//! SHA-256 is one long chain of steps that each need the one before, and the instructions that
//! processors have for it wait for each other most of the time. Pages are of one length, so the
//! chains of [`LANES`] of them are worked on side by side, one in each lane of a wide register.
//! That is worth it where registers are so wide; elsewhere, and for what is left over, it is one
//! page after the other.

use aws_lc_rs::hmac;
use multiversion::multiversion;
use multiversion::target::match_target;
use zeroize::Zeroizing;

#[cfg(target_arch = "x86_64")]
use crate::lanes;
use crate::secret::{KEY_LEN, Secret};

/// The length of a digest, in bytes.
pub const DIGEST: usize = 32;
/// Messages that are digested side by side: as many as a 512-bit register has words.
pub(crate) const LANES: usize = 16;

/// Bytes that SHA-256 takes at once.
pub(crate) const BLOCK: usize = 64;
/// Bytes in front of a page: its address and its owner.
pub(crate) const HEAD: usize = 16;

/// A page and its address.
pub(crate) type Page<'p> = (u64, &'p [u8]);

/// The key.
pub(crate) struct Mac {
    key: hmac::Key,
    wide: Option<Wide>,
}

/// The key, as the lanes want it: what SHA-256 has come to behind the padded key, inside and
/// outside.
struct Wide {
    inner: Zeroizing<[u32; 8]>,
    outer: Zeroizing<[u32; 8]>,
}

impl Wide {
    /// Nothing, where there are no lanes.
    fn new(key: &Secret) -> Option<Self> {
        let state = |pad: u8| {
            let mut block = Zeroizing::new([pad; BLOCK]);
            block.iter_mut().zip(key.expose()).for_each(|(byte, key)| *byte ^= key);
            first_block(&block)
        };
        const { assert!(KEY_LEN <= BLOCK) };
        Some(Self { inner: state(0x36)?, outer: state(0x5c)? })
    }
}

impl Mac {
    pub(crate) fn new(key: &Secret) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key.expose()), wide: Wide::new(key) }
    }

    /// The XOR of the HMACs over address, owner and content of pages.
    pub(crate) fn sum<'p>(
        &self,
        owner: u64,
        pages: impl Iterator<Item = Page<'p>>,
    ) -> [u8; DIGEST] {
        let pages: Vec<Page<'_>> = pages.collect();
        let mut sum = [0; DIGEST];
        for group in pages.chunks(LANES) {
            match self.group(owner, group) {
                Some(digests) => xor(&mut sum, &bytes_of(&digests)),
                None => group.iter().for_each(|&page| xor(&mut sum, &self.one(owner, page))),
            }
        }
        sum
    }

    /// The XOR for a page in each lane, if there are lanes, and the pages are of one length.
    fn group(&self, owner: u64, pages: &[Page<'_>]) -> Option<[u32; 8]> {
        let pages: &[Page<'_>; LANES] = pages.try_into().ok()?;
        let len = pages[0].1.len();
        let alike = len > 0 && len.is_multiple_of(BLOCK);
        let alike = alike && pages.iter().all(|page| page.1.len() == len);
        digests(self.wide.as_ref().filter(|_| alike)?, owner, pages)
    }

    fn one(&self, owner: u64, page: Page<'_>) -> [u8; DIGEST] {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&head(owner, page));
        context.update(page.1);
        let mut digest = [0; DIGEST];
        digest.copy_from_slice(context.sign().as_ref());
        digest
    }
}

/// Adds a digest to a sum.
pub fn xor(sum: &mut [u8; DIGEST], part: &[u8; DIGEST]) {
    sum.iter_mut().zip(part).for_each(|(a, b)| *a ^= b);
}

pub(crate) fn head(owner: u64, (address, _): Page<'_>) -> [u8; HEAD] {
    (u128::from(owner) << 64 | u128::from(address)).to_le_bytes()
}

fn bytes_of(words: &[u32; 8]) -> [u8; DIGEST] {
    let mut bytes = [0; DIGEST];
    for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_be_bytes();
    }
    bytes
}

/// What the lanes begin with, if this processor has registers for them, with the instructions
/// to rotate in them. In two of half the size they are slower than a processor's own
/// instructions for SHA-256.
#[multiversion(targets("x86_64+avx512f+avx512bw"))]
#[allow(unused_variables, reason = "where there are none")]
fn first_block(padded: &[u8; BLOCK]) -> Option<Zeroizing<[u32; 8]>> {
    match_target! {
        "x86_64+avx512f+avx512bw" => Some(lanes::first_block(padded)),
        _ => None,
    }
}

/// The XOR of the HMACs of a group of pages, likewise.
#[multiversion(targets("x86_64+avx512f+avx512bw"))]
#[allow(unused_variables, reason = "where there are none")]
fn digests(wide: &Wide, owner: u64, pages: &[Page<'_>; LANES]) -> Option<[u32; 8]> {
    match_target! {
        "x86_64+avx512f+avx512bw" => Some(lanes::digests(&wide.inner, &wide.outer, owner, pages)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_by_one(mac: &Mac, owner: u64, pages: &[Page<'_>]) -> [u8; DIGEST] {
        let mut sum = [0; DIGEST];
        pages.iter().for_each(|&page| xor(&mut sum, &mac.one(owner, page)));
        sum
    }

    /// The lanes, where this processor has them, against the library.
    #[test]
    fn lanes_are_hmac() {
        let mac = Mac::new(&Secret::take(&mut [7; KEY_LEN]));
        #[cfg(target_arch = "x86_64")]
        let wide = std::arch::is_x86_feature_detected!("avx512vbmi2");
        #[cfg(not(target_arch = "x86_64"))]
        let wide = false;
        for len in [64, 128, 4096] {
            let data: Vec<u8> = (0..=250).cycle().take(len * LANES).collect();
            let address = |lane: usize| 0x7f00_0000_1000 + (lane * len) as u64;
            let mut pages: Vec<Page<'_>> =
                data.chunks(len).enumerate().map(|(lane, page)| (address(lane), page)).collect();
            assert_eq!(mac.group(77, &pages).is_some(), wide);
            // However many there are, and however long.
            let changes: [fn(&mut Vec<Page<'_>>); 3] =
                [|_| (), |pages| pages.push(pages[3]), |pages| pages[5].1 = &[1; 99]];
            for change in changes {
                change(&mut pages);
                assert_eq!(mac.sum(77, pages.iter().copied()), one_by_one(&mac, 77, &pages));
            }
        }
    }
}
