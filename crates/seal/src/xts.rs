//! AES-256-XTS (IEEE 1619, NIST SP 800-38E) of whole pages, many blocks at once.

use aes::Aes256;
use aes::cipher::generic_array::GenericArray;
use aes::cipher::inout::InOutBuf;
use aes::cipher::{BlockDecrypt, BlockEncrypt, KeyInit};

use crate::secret::Secret;

const BLOCK: usize = 16;
/// Blocks in one step: enough to keep the processor's AES units busy.
const STEP: usize = 64;

type Block = GenericArray<u8, aes::cipher::consts::U16>;
type Blocks<'b> = InOutBuf<'b, 'b, Block>;

/// The two keys of XTS, expanded; they zero themselves.
pub(crate) struct Xts {
    data: Aes256,
    tweak: Aes256,
}

impl Xts {
    pub(crate) fn new(data: &Secret, tweak: &Secret) -> Self {
        let expand = |key: &Secret| Aes256::new(GenericArray::from_slice(key.expose()));
        Self { data: expand(data), tweak: expand(tweak) }
    }

    /// Encrypts a unit, a multiple of 16 bytes long, in place.
    pub(crate) fn encrypt(&self, tweak: u128, unit: &mut [u8]) {
        self.run(tweak, unit, |blocks| self.data.encrypt_blocks_inout(blocks));
    }

    /// Decrypts a unit, a multiple of 16 bytes long, in place.
    pub(crate) fn decrypt(&self, tweak: u128, unit: &mut [u8]) {
        self.run(tweak, unit, |blocks| self.data.decrypt_blocks_inout(blocks));
    }

    fn run(&self, tweak: u128, unit: &mut [u8], cipher: impl Fn(Blocks<'_>)) {
        let mut start = Block::from(tweak.to_le_bytes());
        self.tweak.encrypt_block(&mut start);
        let mut next = u128::from_le_bytes(start.into());
        let mut tweaks = [0; STEP];
        for part in unit.chunks_mut(BLOCK * STEP) {
            for tweak in &mut tweaks {
                *tweak = next;
                next = double(next);
            }
            mask(part, &tweaks);
            cipher(InOutBuf::from(&mut *part).into_chunks().0);
            mask(part, &tweaks);
        }
    }
}

fn mask(part: &mut [u8], tweaks: &[u128; STEP]) {
    for (block, tweak) in part.as_chunks_mut::<BLOCK>().0.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ tweak).to_le_bytes();
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
