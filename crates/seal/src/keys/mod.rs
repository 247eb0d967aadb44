//! Who can open a checkpoint: recipients, to whom its key is wrapped, and identities,
//! which unwrap it again.
//!
//! | kind | recipient | identity | construction |
//! |---|---|---|---|
//! | `X25519` | `age1…` | `AGE-SECRET-KEY-1…` | age's X25519 stanza |
//! | `rsa-oaep-sha256` | RSA certificate | its private key | RSAES-OAEP, RFC 8017 |
//! | `hpke-p256`, `hpke-p384`, `hpke-x25519` | certificate of such a key | its private key | HPKE, RFC 9180, base mode |
//! | `provider` | a command | a command | [`provider`] |
//!
//! What is wrapped is bound to its checkpoint: the *binding* is authenticated with the
//! key, so that a stanza is of no use in another one.

mod age;
mod armor;
mod cert;
mod error;
mod hpke;
mod identity;
pub mod provider;
mod recipient;
mod rsa;

pub use age::{AgeIdentity, AgeRecipient};
pub(crate) use cert::Purpose;
pub use cert::{Certificate, Trust};
pub use error::{KeyError, Result};
pub use identity::{Identities, Identity};
pub use recipient::{Recipient, described};

pub(crate) use armor::private_key;

use std::path::Path;

use zeroize::Zeroizing;

use crate::secret::{KEY_LEN, MasterKey};

/// No file of keys, certificates or revocations is larger.
const MAX_FILE: u64 = 4 << 20;

/// A whole file of keys or certificates.
pub(crate) fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>> {
    use std::io::Read;
    let failed = |source| KeyError::File { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // The first allocation is large enough: growing would leave copies behind.
    let size = file.metadata().map_err(failed)?.len().min(MAX_FILE) + 1;
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(size).unwrap_or(0)));
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_FILE) {
        return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
    }
    Ok(bytes)
}

/// A plaintext that must be a key.
fn key_from(plain: &[u8]) -> Option<MasterKey> {
    let mut key: [u8; KEY_LEN] = plain.try_into().ok()?;
    Some(MasterKey::take(&mut key))
}

#[cfg(test)]
mod testing {
    #![allow(clippy::unwrap_used)]
    use super::Result;
    use crate::header::Stanza;
    use crate::secret::MasterKey;

    /// A key that is wrapped comes back to its recipient (`ours`) alone, not to another one,
    /// not in another place, and not from a stanza of which any byte was changed.
    pub(super) fn comes_back_only_to(
        wrap: impl Fn(&MasterKey, &[u8]) -> Result<Stanza>,
        ours: impl Fn(&Stanza, &[u8]) -> Option<MasterKey>,
        other: impl Fn(&Stanza, &[u8]) -> Option<MasterKey>,
    ) {
        let stanza = wrap(&MasterKey::take(&mut [9; 32]), b"here").unwrap();
        assert_eq!(ours(&stanza, b"here").unwrap().expose(), &[9; 32]);
        assert!(ours(&stanza, b"there").is_none());
        assert!(other(&stanza, b"here").is_none());
        for at in 0..stanza.body.len() {
            let mut changed = stanza.clone();
            changed.body[at] ^= 1;
            assert!(ours(&changed, b"here").is_none(), "byte {at}");
        }
    }
}
