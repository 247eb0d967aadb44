//! HMAC-SHA256 (RFC 2104, FIPS 180-4) of the pages of one group, one in each lane of 512-bit
//! registers.
//!
//! By a profile, 6 parts of 10 of the time in which pages were opened went here while this was
//! written as loops over arrays: the compiler gathered words one by one, and waited for each
//! word of the schedule to come back from memory. In intrinsics it takes half as long. What
//! limits it now are the rotations, of which a processor begins one at a time.

use std::arch::x86_64::{
    __m512i, _mm_cvtsi128_si32, _mm_set_epi8, _mm_set_epi64x, _mm512_add_epi32,
    _mm512_broadcast_i32x4, _mm512_castsi512_si128, _mm512_cvtepu8_epi32,
    _mm512_permutex2var_epi32, _mm512_ror_epi32, _mm512_set_epi64, _mm512_set1_epi32,
    _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_shuffle_epi32, _mm512_shuffle_i32x4,
    _mm512_srli_epi32, _mm512_ternarylogic_epi32, _mm512_xor_si512,
};
use std::array::from_fn;

use zeroize::Zeroizing;

use crate::mac::{BLOCK, HEAD, LANES, Page, head};

/// Words of a block.
const WORDS: usize = BLOCK / 4;
/// Bits that the outer hash is of: a padded key and a digest.
const OUTER_BITS: i32 = (64 + 32) * 8;

/// What SHA-256 has come to, a word of each lane in a register.
type State = [__m512i; 8];
/// A block of each lane, likewise.
type Words = [__m512i; WORDS];

/// What SHA-256 comes to behind one block, which is a padded key.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn first_block(block: &[u8; BLOCK]) -> Zeroizing<[u32; 8]> {
    let mut words = Zeroizing::new(words([block; LANES]));
    let mut state = Zeroizing::new(in_each(&START));
    compress(&mut state, &mut words);
    let mut out = Zeroizing::new([0; 8]);
    for (out, lanes) in out.iter_mut().zip(&*state) {
        *out = first_lane(*lanes);
    }
    out
}

/// The XOR of the HMACs of pages of one length, which is a multiple of [`BLOCK`]. `inner` and
/// `outer` are what [`first_block`] said of the padded keys.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn digests(
    inner: &[u32; 8],
    outer: &[u32; 8],
    owner: u64,
    pages: &[Page<'_>; LANES],
) -> [u32; 8] {
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
    let mut state = in_each(inner);
    compress(&mut state, &mut words(from_fn(|lane| &heads[lane])));
    #[allow(clippy::needless_range_loop, reason = "the same block of each lane")]
    for i in 0..len / BLOCK - 1 {
        compress(&mut state, &mut words(from_fn(|lane| &middles[lane][i])));
    }
    compress(&mut state, &mut words(from_fn(|lane| &tails[lane])));

    let mut words = [_mm512_setzero_si512(); WORDS];
    words[..8].copy_from_slice(&state);
    words[8] = _mm512_set1_epi32(i32::MIN);
    words[15] = _mm512_set1_epi32(OUTER_BITS);
    let mut state = in_each(outer);
    compress(&mut state, &mut words);
    let mut sum = [0; 8];
    for (sum, lanes) in sum.iter_mut().zip(state) {
        *sum = xor_of(lanes);
    }
    sum
}

#[target_feature(enable = "avx512f")]
fn first_lane(lanes: __m512i) -> u32 {
    _mm_cvtsi128_si32(_mm512_castsi512_si128(lanes)).cast_unsigned()
}

/// The XOR of all lanes: halves, quarters, eighths and sixteenths with each other.
#[target_feature(enable = "avx512f")]
fn xor_of(lanes: __m512i) -> u32 {
    let lanes = _mm512_xor_si512(lanes, _mm512_shuffle_i32x4::<0b01_00_11_10>(lanes, lanes));
    let lanes = _mm512_xor_si512(lanes, _mm512_shuffle_i32x4::<0b10_11_00_01>(lanes, lanes));
    let lanes = _mm512_xor_si512(lanes, _mm512_shuffle_epi32::<0b01_00_11_10>(lanes));
    first_lane(_mm512_xor_si512(lanes, _mm512_shuffle_epi32::<0b10_11_00_01>(lanes)))
}

/// The same state in each lane.
#[target_feature(enable = "avx512f")]
fn in_each(state: &[u32; 8]) -> State {
    let mut out = [_mm512_setzero_si512(); 8];
    for (out, word) in out.iter_mut().zip(state) {
        *out = _mm512_set1_epi32(word.cast_signed());
    }
    out
}

/// A block of each lane, as [`compress`] wants them.
#[target_feature(enable = "avx512f,avx512bw")]
fn words(blocks: [&[u8; BLOCK]; LANES]) -> Words {
    let big_endian =
        _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    let mut words = [_mm512_setzero_si512(); WORDS];
    for (words, block) in words.iter_mut().zip(blocks) {
        *words = _mm512_shuffle_epi8(load(block), big_endian);
    }
    transpose(&mut words);
    words
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(block: &[u8; BLOCK]) -> __m512i {
    let (parts, _) = block.as_chunks::<8>();
    let at = |i: usize| i64::from_le_bytes(parts[i]);
    _mm512_set_epi64(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0))
}

/// Exchanges rows and columns: in ever smaller squares, the upper right quarter of each with
/// the lower left one.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(rows: &mut Words) {
    exchange::<8>(rows);
    exchange::<4>(rows);
    exchange::<2>(rows);
    exchange::<1>(rows);
}

#[inline]
#[target_feature(enable = "avx512f")]
fn exchange<const HALF: usize>(rows: &mut Words) {
    let upper = vector(const { &quarters(HALF, 0) });
    let lower = vector(const { &quarters(HALF, HALF) });
    for i in 0..WORDS / 2 {
        let i = i + i / HALF * HALF;
        let (a, b) = (rows[i], rows[i + HALF]);
        rows[i] = _mm512_permutex2var_epi32(a, upper, b);
        rows[i + HALF] = _mm512_permutex2var_epi32(a, lower, b);
    }
}

/// The words of two rows which make one of them anew: of squares of twice `half` columns, the
/// columns from `from` on. Those of the lower row are numbered from 16 on.
const fn quarters(half: usize, from: usize) -> [u8; LANES] {
    let mut words = [0; LANES];
    let mut i = 0;
    while i < LANES {
        let left = i & half == 0;
        let word = if left { i + from } else { LANES + i - half + from };
        #[allow(clippy::cast_possible_truncation, reason = "less than 32")]
        let word = word as u8;
        words[i] = word;
        i += 1;
    }
    words
}

#[inline]
#[target_feature(enable = "avx512f")]
fn vector(words: &[u8; LANES]) -> __m512i {
    let (low, _) = words.as_chunks::<8>();
    let half = |i: usize| i64::from_le_bytes(low[i]);
    _mm512_cvtepu8_epi32(_mm_set_epi64x(half(1), half(0)))
}

/// Takes a block of each lane, whose words are used up.
#[target_feature(enable = "avx512f")]
fn compress(state: &mut State, words: &mut Words) {
    let mut now = *state;
    let (quarters, _) = CONSTANTS.as_chunks::<WORDS>();
    for (quarter, constants) in quarters.iter().enumerate() {
        // Not a loop, so that state and words stay in registers.
        macro_rules! rounds {
            ($($i:literal)*) => {$(
                round(&mut now, $i % 8, words[$i], constants[$i]);
                if quarter < 3 {
                    next_word(words, $i);
                }
            )*};
        }
        rounds!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }
    for (state, now) in state.iter_mut().zip(now) {
        *state = _mm512_add_epi32(*state, now);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn round(state: &mut State, i: usize, word: __m512i, constant: u32) {
    let at = |letter: usize| (letter + 8 - i) % 8;
    let [a, b, c, d] = [state[at(0)], state[at(1)], state[at(2)], state[at(3)]];
    let [e, f, g, h] = [state[at(4)], state[at(5)], state[at(6)], state[at(7)]];
    let word = _mm512_add_epi32(word, _mm512_set1_epi32(constant.cast_signed()));
    let choice = _mm512_ternarylogic_epi32::<0xca>(e, f, g);
    let sum = xor3(_mm512_ror_epi32::<6>(e), _mm512_ror_epi32::<11>(e), _mm512_ror_epi32::<25>(e));
    let first = _mm512_add_epi32(_mm512_add_epi32(_mm512_add_epi32(h, word), choice), sum);
    let majority = _mm512_ternarylogic_epi32::<0xe8>(a, b, c);
    let sum = xor3(_mm512_ror_epi32::<2>(a), _mm512_ror_epi32::<13>(a), _mm512_ror_epi32::<22>(a));
    state[at(3)] = _mm512_add_epi32(d, first);
    state[at(7)] = _mm512_add_epi32(first, _mm512_add_epi32(sum, majority));
}

/// Replaces word `i` by the one 16 words on.
#[inline]
#[target_feature(enable = "avx512f")]
fn next_word(words: &mut Words, i: usize) {
    let at = |distance: usize| words[(i + distance) % WORDS];
    let (x, y) = (at(1), at(14));
    let low = xor3(_mm512_ror_epi32::<7>(x), _mm512_ror_epi32::<18>(x), _mm512_srli_epi32::<3>(x));
    let high =
        xor3(_mm512_ror_epi32::<17>(y), _mm512_ror_epi32::<19>(y), _mm512_srli_epi32::<10>(y));
    words[i] = _mm512_add_epi32(_mm512_add_epi32(at(0), low), _mm512_add_epi32(at(9), high));
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor3(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0x96>(a, b, c)
}

/// What it begins with: the fractions of the square roots of the first 8 primes.
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
const CONSTANTS: [u32; 4 * WORDS] = [
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
