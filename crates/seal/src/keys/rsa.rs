//! Keys of RSA certificates: RSAES-OAEP (RFC 8017) with SHA-256 for both its hashes.
//! The binding is the label.

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rsa::{
    OAEP_SHA256_MGF1SHA256, OaepPrivateDecryptingKey, OaepPublicEncryptingKey,
    PrivateDecryptingKey, PublicEncryptingKey,
};
use zeroize::Zeroizing;

use super::recipient::{Fingerprint, fingerprint};
use super::{KeyError, Result, key_from};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// The kind of these stanzas.
pub(super) const KIND: &str = "rsa-oaep-sha256";

/// The public key of a certificate.
#[derive(Debug)]
pub(super) struct RsaRecipient {
    key: OaepPublicEncryptingKey,
    fingerprint: Fingerprint,
}

/// The private key of such a certificate.
#[derive(Debug)]
pub(super) struct RsaIdentity {
    key: OaepPrivateDecryptingKey,
    fingerprint: Fingerprint,
}

fn fingerprint_of(key: &PublicEncryptingKey) -> Option<Fingerprint> {
    Some(fingerprint(KIND, key.as_der().ok()?.as_ref()))
}

impl RsaRecipient {
    /// From a `SubjectPublicKeyInfo`; keys of less than 2048 bits are refused.
    pub(super) fn new(spki: &[u8]) -> Option<Self> {
        let key = PublicEncryptingKey::from_der(spki).ok()?;
        let fingerprint = fingerprint_of(&key)?;
        Some(Self { key: OaepPublicEncryptingKey::new(key).ok()?, fingerprint })
    }

    pub(super) fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    pub(super) fn wrap(&self, key: &MasterKey, binding: &[u8]) -> Result<Stanza> {
        let mut body = vec![0; self.key.ciphertext_size()];
        self.key
            .encrypt(&OAEP_SHA256_MGF1SHA256, key.expose(), &mut body, Some(binding))
            .map_err(|_| KeyError::Cipher { what: "wrapping a key by RSA-OAEP" })?;
        Ok(Stanza { kind: KIND.into(), args: vec![self.fingerprint.to_vec()], body })
    }
}

impl RsaIdentity {
    pub(super) fn new(key: PrivateDecryptingKey) -> Option<Self> {
        let fingerprint = fingerprint_of(&key.public_key())?;
        Some(Self { key: OaepPrivateDecryptingKey::new(key).ok()?, fingerprint })
    }

    pub(super) fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    pub(super) fn unwrap(&self, stanza: &Stanza, binding: &[u8]) -> Option<MasterKey> {
        let mut plain = Zeroizing::new(vec![0; self.key.min_output_size()]);
        let opened =
            self.key.decrypt(&OAEP_SHA256_MGF1SHA256, &stanza.body, &mut plain, Some(binding));
        key_from(opened.ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use aws_lc_rs::rsa::KeySize;

    #[test]
    fn keys_come_back_only_to_their_recipient_in_their_place() {
        let pair = || {
            let key = PrivateDecryptingKey::generate(KeySize::Rsa2048).unwrap();
            let spki = key.public_key().as_der().unwrap().as_ref().to_vec();
            (RsaRecipient::new(&spki).unwrap(), RsaIdentity::new(key).unwrap())
        };
        let ((recipient, ours), (_, other)) = (pair(), pair());
        assert_eq!(recipient.fingerprint(), ours.fingerprint());
        testing::comes_back_only_to(
            |key, place| recipient.wrap(key, place),
            |stanza, place| ours.unwrap(stanza, place),
            |stanza, place| other.unwrap(stanza, place),
        );
    }
}
