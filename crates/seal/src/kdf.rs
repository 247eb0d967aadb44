//! How the keys of a checkpoint come from its master key.
//!
//! HKDF-SHA256 (RFC 5869): the salt is the checkpoint's identity, the information is
//! "torpor seal v1", the suite, the purpose and, for a file, its name and the random
//! salt at its head, each with its length before it. So no two files share a key, nor
//! do two files of the same name, one written after the other.

use aws_lc_rs::hkdf;

use crate::error::{Error, Result};
use crate::header::{CheckpointId, Suite};
use crate::secret::{KEY_LEN, MasterKey, Secret};

/// What every derivation begins with.
const LABEL: &[u8] = b"torpor seal v1";

/// Derives keys of one checkpoint.
pub struct Keys {
    prk: hkdf::Prk,
    suite: Suite,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.suite)
    }
}

struct Length;

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        KEY_LEN
    }
}

impl Keys {
    /// The keys under `master` of the checkpoint `id`.
    #[must_use]
    pub fn new(master: &MasterKey, id: &CheckpointId, suite: Suite) -> Self {
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, id).extract(master.expose());
        Self { prk, suite }
    }

    /// The suite of the checkpoint.
    #[must_use]
    pub fn suite(&self) -> Suite {
        self.suite
    }

    /// The key for `purpose` with the file `name`, whose head holds `salt`.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn derive(&self, purpose: &str, name: &str, salt: &[u8]) -> Result<Secret> {
        let suite = self.suite.to_string();
        let mut info = Vec::new();
        for part in [LABEL, suite.as_bytes(), purpose.as_bytes(), name.as_bytes(), salt] {
            info.extend((part.len() as u64).to_le_bytes());
            info.extend(part);
        }
        let mut key = [0; KEY_LEN];
        let failed = |_| Error::Crypto("deriving a key");
        let info = [info.as_slice()];
        let okm = self.prk.expand(&info, Length).map_err(failed)?;
        okm.fill(&mut key).map_err(failed)?;
        Ok(Secret::take(&mut key))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashSet;

    use super::*;

    fn keys(master: u8, id: u8, suite: Suite) -> Keys {
        Keys::new(&Secret::take(&mut [master; 32]), &[id; 32], suite)
    }

    /// Computed with Python's hmac module, from RFC 5869 alone.
    #[test]
    fn known_answer() {
        let key = keys(1, 2, Suite::Aes256Gcm).derive("entries", "core-1.img", &[3; 16]).unwrap();
        let hex: String = key.expose().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "07a86c29ed05b111cf62c493a02580544fbf0973d882a1ede088c6d6ba124b30");
    }

    #[test]
    fn everything_matters() {
        let mut seen = HashSet::new();
        let mut add = |keys: Keys, purpose: &str, name: &str, salt: &[u8]| {
            assert!(seen.insert(*keys.derive(purpose, name, salt).unwrap().expose()));
        };
        add(keys(1, 1, Suite::Aes256Gcm), "p", "n", b"s");
        add(keys(2, 1, Suite::Aes256Gcm), "p", "n", b"s");
        add(keys(1, 2, Suite::Aes256Gcm), "p", "n", b"s");
        add(keys(1, 1, Suite::Aes256XtsHmacSha256), "p", "n", b"s");
        add(keys(1, 1, Suite::Aes256Gcm), "q", "n", b"s");
        add(keys(1, 1, Suite::Aes256Gcm), "p", "m", b"s");
        add(keys(1, 1, Suite::Aes256Gcm), "p", "n", b"t");
        // Where one part ends and the next begins matters too.
        add(keys(1, 1, Suite::Aes256Gcm), "pn", "", b"s");
        add(keys(1, 1, Suite::Aes256Gcm), "p", "ns", b"");
    }
}
