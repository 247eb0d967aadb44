//! Keys in memory: overwritten when they are dropped, never shown.

use std::fmt;

use aws_lc_rs::constant_time;
use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::error::{Error, Result};

/// The length of every key, in bytes.
pub(crate) const KEY_LEN: usize = 32;

/// 32 secret bytes, which are overwritten with zeros when they are dropped.
#[derive(Clone)]
pub struct Secret([u8; KEY_LEN]);

/// The key of one checkpoint, from which the keys of all its files are derived. It is
/// what recipients get wrapped.
pub type MasterKey = Secret;

impl Secret {
    /// Fresh random bytes.
    ///
    /// # Errors
    /// If the system has none.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }

    /// Takes over `bytes`, which are overwritten.
    #[must_use]
    pub fn take(bytes: &mut [u8; KEY_LEN]) -> Self {
        let secret = Self(*bytes);
        bytes.zeroize();
        secret
    }

    /// The bytes: for ciphers and wrapping only.
    #[must_use]
    pub fn expose(&self) -> &[u8; KEY_LEN] {
        &self.0
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl ZeroizeOnDrop for Secret {}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// `N` random bytes that are no secret.
///
/// # Errors
/// If the system has none.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| Error::Crypto("making random bytes"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_secret_does_not_show() {
        let secret = Secret::take(&mut [0x5a; 32]);
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn what_is_taken_is_overwritten() {
        let mut bytes = [7; 32];
        let secret = Secret::take(&mut bytes);
        assert_eq!((bytes, secret.expose()), ([0; 32], &[7; 32]));
    }

    #[test]
    fn random_ones_differ() {
        assert_ne!(Secret::random().unwrap(), Secret::random().unwrap());
    }
}
