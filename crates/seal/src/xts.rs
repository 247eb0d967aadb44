//! AES-256-XTS (IEEE 1619, NIST SP 800-38E) of whole pages, many blocks at once.

use aes::Aes256;
use aes::cipher::generic_array::GenericArray;
use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};

use crate::secret::Secret;

const BLOCK: usize = 16;
/// Blocks in one step: enough to keep the processor's AES units busy.
const STEP: usize = 64;

type Block = GenericArray<u8, aes::cipher::consts::U16>;

/// The two keys of XTS, expanded; they zero themselves.
pub(crate) struct Xts {
    data: Aes256,
    tweak: Aes256,
}

impl Xts {
    pub fn new(data: &Secret, tweak: &Secret) -> Self {
        let expand = |key: &Secret| Aes256::new(GenericArray::from_slice(key.expose()));
        Self { data: expand(data), tweak: expand(tweak) }
    }

    /// Encrypts a unit, a multiple of 16 bytes long, in place.
    pub fn encrypt(&self, tweak: u128, unit: &mut [u8]) {
        self.run(tweak, unit, |blocks| self.data.encrypt_blocks(blocks));
    }

    /// Decrypts a unit, a multiple of 16 bytes long, in place.
    pub fn decrypt(&self, tweak: u128, unit: &mut [u8]) {
        self.run(tweak, unit, |blocks| self.data.decrypt_blocks(blocks));
    }

    fn run(&self, tweak: u128, unit: &mut [u8], cipher: impl Fn(&mut [Block])) {
        let mut start = Block::from(tweak.to_le_bytes());
        self.tweak.encrypt_block(&mut start);
        let mut tweak = u128::from_le_bytes(start.into());
        let mut blocks = [Block::default(); STEP];
        let mut tweaks = [0; STEP];
        for part in unit.chunks_exact_mut(BLOCK * STEP) {
            self.step(&mut tweak, part, &mut blocks, &mut tweaks, &cipher);
        }
        let rest = unit.len() / BLOCK / STEP * STEP * BLOCK;
        self.step(&mut tweak, &mut unit[rest..], &mut blocks, &mut tweaks, &cipher);
    }

    fn step(
        &self,
        tweak: &mut u128,
        part: &mut [u8],
        blocks: &mut [Block; STEP],
        tweaks: &mut [u128; STEP],
        cipher: &impl Fn(&mut [Block]),
    ) {
        let (part, _) = part.as_chunks_mut::<BLOCK>();
        for (data, (block, mask)) in part.iter().zip(blocks.iter_mut().zip(tweaks.iter_mut())) {
            *mask = *tweak;
            *block = (u128::from_le_bytes(*data) ^ *mask).to_le_bytes().into();
            *tweak = double(*tweak);
        }
        cipher(&mut blocks[..part.len()]);
        for (data, (block, mask)) in part.iter_mut().zip(blocks.iter().zip(tweaks.iter())) {
            *data = (u128::from_le_bytes((*block).into()) ^ mask).to_le_bytes();
        }
    }
}

/// Multiplies by α in GF(2^128), reduced by x^128 + x^7 + x^2 + x + 1.
fn double(value: u128) -> u128 {
    (value << 1) ^ ((value >> 127) * 0x87)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |c: u8| u8::try_from(char::from(c).to_digit(16).unwrap_or(0)).unwrap_or(0);
        hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    }

    /// IEEE 1619-2007, vector 10: its data unit is the bytes 0 to 255, twice.
    #[test]
    fn ieee_1619_vector_10() {
        let key = |hex: &str| {
            let mut key = [0; 32];
            key.copy_from_slice(&bytes(hex));
            Secret::take(&mut key)
        };
        let xts = Xts::new(
            &key("2718281828459045235360287471352662497757247093699959574966967627"),
            &key("3141592653589793238462643383279502884197169399375105820974944592"),
        );
        let plain: Vec<u8> = (0..=255).cycle().take(512).collect();
        let mut unit = plain.clone();
        xts.encrypt(0xff, &mut unit);
        assert_eq!(
            unit[..32],
            bytes("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b")
        );
        assert_eq!(
            unit[480..],
            bytes("773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151")
        );
        xts.decrypt(0xff, &mut unit);
        assert_eq!(unit, plain);
    }
}
