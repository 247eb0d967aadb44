//! HMAC-SHA256 of pages, many at once.
//!
//! SHA-256 is one long chain of steps that each need the one before, and the instructions that
//! processors have for it wait for each other most of the time. Pages are of one length, so the
//! chains of [`LANES`] of them are worked on side by side, one in each lane of a wide register.
//! That is worth it where registers are so wide; elsewhere, and for what is left over, it is one
//! page after the other.

use std::array::from_fn;

use aws_lc_rs::hmac;
use multiversion::multiversion;
use zeroize::Zeroizing;

use crate::secret::{KEY_LEN, Secret};

/// The length of a digest, in bytes.
pub(crate) const DIGEST: usize = 32;
/// Messages that are digested side by side: as many as a 512-bit register has words.
pub(crate) const LANES: usize = 16;

/// Bytes that SHA-256 takes at once.
const BLOCK: usize = 64;
/// Bits that the outer hash is of: a padded key and a digest.
const OUTER_BITS: u32 = (64 + 32) * 8;
/// Bytes in front of a page: its address and its owner.
const HEAD: usize = 16;

/// A word of each lane.
type Lanes = [u32; LANES];
/// The state of SHA-256 in each lane.
type State = [Lanes; 8];

/// A page and its address.
pub(crate) type Page<'p> = (u64, &'p [u8]);

/// The key, as both ways to use it want it.
pub(crate) struct Mac {
    key: hmac::Key,
    /// What SHA-256 has come to behind the padded key, inside and outside.
    inner: Zeroizing<[u32; 8]>,
    outer: Zeroizing<[u32; 8]>,
}

impl Mac {
    pub fn new(key: &Secret) -> Self {
        let padded = |pad: u8| {
            let mut block = Zeroizing::new([pad; BLOCK]);
            block.iter_mut().zip(key.expose()).for_each(|(byte, key)| *byte ^= key);
            Zeroizing::new(first_block(&block))
        };
        const { assert!(KEY_LEN <= BLOCK) };
        let (inner, outer) = (padded(0x36), padded(0x5c));
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key.expose()), inner, outer }
    }

    /// The XOR of the HMACs over address, owner and content of pages.
    pub fn sum<'p>(&self, owner: u64, pages: impl Iterator<Item = Page<'p>>) -> [u8; DIGEST] {
        let pages: Vec<Page<'_>> = pages.collect();
        let mut sum = [0; DIGEST];
        let len = pages.first().map_or(0, |page| page.1.len());
        let alike = len > 0 && len.is_multiple_of(BLOCK);
        let alike = alike && pages.iter().all(|page| page.1.len() == len);
        let (groups, rest) =
            if alike && is_wide() { pages.as_chunks::<LANES>() } else { (&[][..], &*pages) };
        for group in groups {
            xor(&mut sum, &bytes_of(&digests(&self.inner, &self.outer, owner, group)));
        }
        for &page in rest {
            xor(&mut sum, &self.one(owner, page));
        }
        sum
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

pub(crate) fn xor(sum: &mut [u8; DIGEST], part: &[u8; DIGEST]) {
    sum.iter_mut().zip(part).for_each(|(a, b)| *a ^= b);
}

fn head(owner: u64, (address, _): Page<'_>) -> [u8; HEAD] {
    (u128::from(owner) << 64 | u128::from(address)).to_le_bytes()
}

fn bytes_of(words: &[u32; 8]) -> [u8; DIGEST] {
    let mut bytes = [0; DIGEST];
    for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_be_bytes();
    }
    bytes
}

/// Whether the lanes fit one register, with the instructions to rotate in it. In two of half
/// the size they are slower than a processor's own instructions for SHA-256.
fn is_wide() -> bool {
    #[cfg(target_arch = "x86_64")]
    let wide = std::arch::is_x86_feature_detected!("avx512bw");
    #[cfg(not(target_arch = "x86_64"))]
    let wide = false;
    wide
}

/// The XOR of the HMACs of pages of one length, which is a multiple of [`BLOCK`].
#[multiversion(targets("x86_64+avx512f+avx512bw"))]
fn digests(inner: &[u32; 8], outer: &[u32; 8], owner: u64, pages: &[Page<'_>; LANES]) -> [u32; 8] {
    let len = pages[0].1.len();
    let heads: [[u8; BLOCK]; LANES] = from_fn(|lane| {
        let mut block = [0; BLOCK];
        block[..HEAD].copy_from_slice(&head(owner, pages[lane]));
        block[HEAD..].copy_from_slice(&pages[lane].1[..BLOCK - HEAD]);
        block
    });
    let bits = ((BLOCK + HEAD + len) * 8) as u64;
    let tails: [[u8; BLOCK]; LANES] = from_fn(|lane| {
        let mut block = [0; BLOCK];
        block[..HEAD].copy_from_slice(&pages[lane].1[len - HEAD..]);
        block[HEAD] = 0x80;
        block[BLOCK - 8..].copy_from_slice(&bits.to_be_bytes());
        block
    });
    let middles: [&[[u8; BLOCK]]; LANES] =
        from_fn(|lane| pages[lane].1[BLOCK - HEAD..len - HEAD].as_chunks().0);
    let mut words = [[0; LANES]; ROUNDS];
    let mut state = inner.map(|word| [word; LANES]);
    absorb(&mut state, from_fn(|lane| &heads[lane]), &mut words);
    #[allow(clippy::needless_range_loop, reason = "the same block of each lane")]
    for i in 0..len / BLOCK - 1 {
        absorb(&mut state, from_fn(|lane| &middles[lane][i]), &mut words);
    }
    absorb(&mut state, from_fn(|lane| &tails[lane]), &mut words);

    words[..BLOCK / 4].fill([0; LANES]);
    words[..8].copy_from_slice(&state);
    words[8] = [0x8000_0000; LANES];
    words[15] = [OUTER_BITS; LANES];
    let mut state = outer.map(|word| [word; LANES]);
    compress(&mut state, &mut words);
    state.map(|lanes| lanes.into_iter().fold(0, |all, word| all ^ word))
}

/// What SHA-256 comes to behind one block.
fn first_block(block: &[u8; BLOCK]) -> [u32; 8] {
    let mut state = START.map(|word| [word; LANES]);
    absorb(&mut state, [block; LANES], &mut [[0; LANES]; ROUNDS]);
    state.map(|lanes| lanes[0])
}

/// Takes one block of each lane's message. What `words` had does not matter.
#[inline(always)]
fn absorb(state: &mut State, blocks: [&[u8; BLOCK]; LANES], words: &mut [Lanes; ROUNDS]) {
    for (lane, block) in blocks.into_iter().enumerate() {
        for (word, bytes) in words.iter_mut().zip(block.as_chunks::<4>().0) {
            word[lane] = u32::from_be_bytes(*bytes);
        }
    }
    compress(state, words);
}

/// FIPS 180-4, 6.2.2, in all lanes. The first 16 of `words` are the block. Written as loops
/// over lanes that a compiler turns into one instruction each.
#[inline(always)]
fn compress(state: &mut State, words: &mut [Lanes; ROUNDS]) {
    for i in 16..ROUNDS {
        let (w2, w7, w15, w16) = (words[i - 2], words[i - 7], words[i - 15], words[i - 16]);
        let low = map(w15, |x| x.rotate_right(7) ^ x.rotate_right(18) ^ (x >> 3));
        let high = map(w2, |x| x.rotate_right(17) ^ x.rotate_right(19) ^ (x >> 10));
        words[i] = add(add(w16, low), add(w7, high));
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in CONSTANTS.iter().zip(words) {
        let sum = map(e, |x| x.rotate_right(6) ^ x.rotate_right(11) ^ x.rotate_right(25));
        let choice = from_fn(|l| g[l] ^ (e[l] & (f[l] ^ g[l])));
        let first = add(add(h, map(*word, |x| x.wrapping_add(*constant))), add(sum, choice));
        let sum = map(a, |x| x.rotate_right(2) ^ x.rotate_right(13) ^ x.rotate_right(22));
        let majority = from_fn(|l| (a[l] & b[l]) | (c[l] & (a[l] | b[l])));
        (h, g, f, e) = (g, f, e, add(d, first));
        (d, c, b, a) = (c, b, a, add(first, add(sum, majority)));
    }
    let [a0, b0, c0, d0, e0, f0, g0, h0] = *state;
    *state = [
        add(a0, a),
        add(b0, b),
        add(c0, c),
        add(d0, d),
        add(e0, e),
        add(f0, f),
        add(g0, g),
        add(h0, h),
    ];
}

#[inline(always)]
fn map(lanes: Lanes, f: impl Fn(u32) -> u32) -> Lanes {
    lanes.map(f)
}

#[inline(always)]
fn add(a: Lanes, b: Lanes) -> Lanes {
    from_fn(|lane| a[lane].wrapping_add(b[lane]))
}

const ROUNDS: usize = 64;

/// The fractions of the square roots of the first 8 primes.
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// The fractions of the cube roots of the first 64 primes.
const CONSTANTS: [u32; ROUNDS] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// All lanes against the library, whatever this processor has.
    #[test]
    fn lanes_are_hmac() {
        let mac = Mac::new(&Secret::take(&mut [7; KEY_LEN]));
        for len in [64, 128, 4096] {
            let data: Vec<u8> = (0..=250).cycle().take(len * LANES).collect();
            let pages: [Page<'_>; LANES] = from_fn(|lane| {
                (0x7f00_0000_1000 + (lane * len) as u64, &data[lane * len..(lane + 1) * len])
            });
            let mut wanted = [0; DIGEST];
            pages.iter().for_each(|&page| xor(&mut wanted, &mac.one(77, page)));
            assert_eq!(bytes_of(&digests(&mac.inner, &mac.outer, 77, &pages)), wanted);
            // However many there are.
            let mut last = [0; DIGEST];
            xor(&mut last, &mac.sum(77, pages.into_iter().chain([pages[3]])));
            xor(&mut last, &mac.one(77, pages[3]));
            assert_eq!(last, wanted);
        }
    }
}
