//! Keys of age: X25519 recipients and identities, so that people can use those that
//! they have.
//!
//! The stanza is age's own (age-encryption.org/v1, "The X25519 recipient type"): an
//! ephemeral share, and the key under ChaCha20-Poly1305 with a zero nonce and a key
//! derived by HKDF-SHA256 from the shared secret, salted with both public keys. Two
//! things differ: the key has 32 bytes, not 16, and the checkpoint's binding is
//! authenticated with it.

use aws_lc_rs::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::agreement::{PrivateKey, UnparsedPublicKey, X25519, agree};
use aws_lc_rs::encoding::{AsBigEndian, Curve25519SeedBin};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use bech32::{Bech32, Hrp};
use zeroize::Zeroizing;

use super::{KeyError, Result, key_from};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// The kind of these stanzas.
pub(super) const KIND: &str = "X25519";
/// Prefix of a recipient in its Bech32 form.
const RECIPIENT: &str = "age";
/// Prefix of an identity, which is written in capitals.
const IDENTITY: &str = "age-secret-key-";
/// What the wrapping key is derived for.
const INFO: &[u8] = b"age-encryption.org/v1/X25519";
/// Bytes of a public key, a secret key and a shared secret.
const LEN: usize = 32;

/// Somebody who holds an age identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgeRecipient([u8; LEN]);

/// The secret half of an [`AgeRecipient`].
pub struct AgeIdentity {
    secret: PrivateKey,
    public: [u8; LEN],
}

impl std::fmt::Debug for AgeIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("AgeIdentity").field(&self.recipient()).finish()
    }
}

impl std::fmt::Display for AgeRecipient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&encode(RECIPIENT, &self.0).map_err(|_| std::fmt::Error)?)
    }
}

impl AgeRecipient {
    /// Reads `age1…`.
    ///
    /// # Errors
    /// If the text is no recipient of age: mistyped, or cut.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |reason: &str| KeyError::Spec {
            what: super::error::shown(text),
            reason: reason.into(),
        };
        let bytes = decode(RECIPIENT, text)
            .ok_or_else(|| wrong("this is no recipient of age: it is mistyped or cut"))?;
        Ok(Self(*bytes))
    }

    /// Wraps `key` for this recipient.
    ///
    /// # Errors
    /// If the public key is a weak one.
    pub fn wrap(&self, key: &[u8], binding: &[u8]) -> Result<Stanza> {
        let ephemeral = generate()?;
        let share = public_of(&ephemeral)?;
        let mut body = key.to_vec();
        wrapping_key(&ephemeral, &self.0, &share, &self.0)?
            .seal_in_place_append_tag(zero_nonce(), Aad::from(binding), &mut body)
            .map_err(|_| CIPHER)?;
        Ok(Stanza { kind: KIND.into(), args: vec![share.to_vec()], body })
    }
}

impl AgeIdentity {
    /// A new identity, and its text.
    ///
    /// # Errors
    /// If there is no randomness to be had.
    pub fn generate() -> Result<(Self, Zeroizing<String>)> {
        let secret = generate()?;
        let seed: Curve25519SeedBin<'_> = secret.as_be_bytes().map_err(|_| CIPHER)?;
        let text = encode(IDENTITY, seed.as_ref()).map_err(|_| CIPHER)?;
        let text = Zeroizing::new(Zeroizing::new(text).to_ascii_uppercase());
        Ok((Self { public: public_of(&secret)?, secret }, text))
    }

    /// Reads `AGE-SECRET-KEY-1…`; the error does not repeat it.
    ///
    /// # Errors
    /// If the text is no identity of age.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        const WRONG: &str = "this is no identity of age: it is mistyped or cut";
        let seed = decode(IDENTITY, text).ok_or(WRONG)?;
        let secret = PrivateKey::from_private_key(&X25519, &*seed).map_err(|_| WRONG)?;
        Ok(Self { public: public_of(&secret).map_err(|_| WRONG)?, secret })
    }

    /// Who this is the identity of.
    #[must_use]
    pub fn recipient(&self) -> AgeRecipient {
        AgeRecipient(self.public)
    }

    /// Unwraps the key in `stanza`, or finds that it is somebody else's: stanzas of
    /// this kind do not say whose they are.
    #[must_use]
    pub fn unwrap(&self, stanza: &Stanza, binding: &[u8]) -> Option<MasterKey> {
        key_from(&self.unwrap_bytes(stanza, binding)?)
    }

    fn unwrap_bytes(&self, stanza: &Stanza, binding: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let [share] = stanza.args.as_slice() else { return None };
        let share: [u8; LEN] = share.as_slice().try_into().ok()?;
        let key = wrapping_key(&self.secret, &share, &share, &self.public).ok()?;
        let mut body = Zeroizing::new(stanza.body.clone());
        let len = key.open_in_place(zero_nonce(), Aad::from(binding), &mut body).ok()?.len();
        body.truncate(len);
        Some(body)
    }
}

const CIPHER: KeyError = KeyError::Cipher { what: "wrapping a key by X25519" };

fn generate() -> Result<PrivateKey> {
    PrivateKey::generate(&X25519).map_err(|_| CIPHER)
}

fn public_of(secret: &PrivateKey) -> Result<[u8; LEN]> {
    let public = secret.compute_public_key().map_err(|_| CIPHER)?;
    public.as_ref().try_into().map_err(|_| CIPHER)
}

/// The key is used once: its salt holds a fresh share.
fn zero_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

struct Len;

impl KeyType for Len {
    fn len(&self) -> usize {
        LEN
    }
}

fn wrapping_key(
    ours: &PrivateKey,
    theirs: &[u8; LEN],
    share: &[u8; LEN],
    recipient: &[u8; LEN],
) -> Result<LessSafeKey> {
    let salt = [share.as_slice(), recipient.as_slice()].concat();
    // An all-zero secret, which a public key of low order makes, is refused in here.
    agree(ours, UnparsedPublicKey::new(&X25519, theirs), CIPHER, |shared| {
        let prk = Salt::new(HKDF_SHA256, &salt).extract(shared);
        let mut key = Zeroizing::new([0; LEN]);
        prk.expand(&[INFO], Len).and_then(|okm| okm.fill(&mut *key)).map_err(|_| CIPHER)?;
        let key = UnboundKey::new(&CHACHA20_POLY1305, &*key).map_err(|_| CIPHER)?;
        Ok(LessSafeKey::new(key))
    })
}

fn encode(prefix: &str, bytes: &[u8]) -> Result<String, bech32::EncodeError> {
    bech32::encode::<Bech32>(Hrp::parse_unchecked(prefix), bytes)
}

fn decode(prefix: &str, text: &str) -> Option<Zeroizing<[u8; LEN]>> {
    let checked = bech32::primitives::decode::CheckedHrpstring::new::<Bech32>(text).ok()?;
    if checked.hrp().to_lowercase() != prefix {
        return None;
    }
    let mut bytes = Zeroizing::new([0; LEN]);
    let mut count = 0;
    for byte in checked.byte_iter() {
        *bytes.get_mut(count)? = byte;
        count += 1;
    }
    (count == LEN).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD_NO_PAD;

    /// The key pair and the stanza of the format's published test vectors.
    const KNOWN: &str =
        "AGE-SECRET-KEY-1XMWWC06LY3EE5RYTXM9MFLAZ2U56JJJ36S0MYPDRWSVLUL66MV4QX3S7F6";
    const SHARE: &str = "TEiF0ypqr+bpvcqXNyCVJpL7OuwPdVwPL7KQEbFDOCc";
    const BODY: &str = "EmECAEcKN+n/Vs9SbWiV+Hu0r+E8R77DdWYyd83nw7U";

    #[test]
    fn published_stanzas_open() {
        let identity = AgeIdentity::parse(KNOWN).unwrap();
        let decode = |text| STANDARD_NO_PAD.decode(text).unwrap();
        let stanza = Stanza { kind: KIND.into(), args: vec![decode(SHARE)], body: decode(BODY) };
        let key = identity.unwrap_bytes(&stanza, b"").unwrap();
        assert_eq!(key.as_slice(), b"YELLOW SUBMARINE");
        // The file key of age is no key of ours.
        assert!(identity.unwrap(&stanza, b"").is_none());
    }

    #[test]
    fn keys_come_back_only_to_their_recipient_in_their_place() {
        let (ours, text) = AgeIdentity::generate().unwrap();
        let (other, _) = AgeIdentity::generate().unwrap();
        assert!(text.starts_with("AGE-SECRET-KEY-1"));
        let again = AgeIdentity::parse(&text).unwrap();
        assert_eq!(again.recipient(), ours.recipient());

        let recipient = AgeRecipient::parse(&ours.recipient().to_string()).unwrap();
        let stanza = recipient.wrap(&[9; 32], b"here").unwrap();
        assert_eq!(again.unwrap(&stanza, b"here").unwrap().expose(), &[9; 32]);
        assert!(again.unwrap(&stanza, b"there").is_none());
        assert!(other.unwrap(&stanza, b"here").is_none());
        for at in 0..stanza.body.len() {
            let mut changed = stanza.clone();
            changed.body[at] ^= 1;
            assert!(again.unwrap(&changed, b"here").is_none(), "byte {at}");
        }
    }

    #[test]
    fn weak_public_keys_are_refused() {
        assert!(AgeRecipient([0; LEN]).wrap(&[1; 32], b"").is_err());
    }

    #[test]
    fn mistakes_are_no_keys() {
        let (identity, text) = AgeIdentity::generate().unwrap();
        let public = identity.recipient().to_string();
        assert!(AgeRecipient::parse(&public[..public.len() - 1]).is_err());
        assert!(AgeRecipient::parse(&text).is_err());
        assert!(AgeIdentity::parse(&public).is_err());
        assert!(AgeIdentity::parse(&text.replace('Q', "P")).is_err() || !text.contains('Q'));
        // Bech32 of something longer.
        let long = encode(RECIPIENT, &[1; 33]).unwrap();
        assert!(AgeRecipient::parse(&long).is_err());
    }
}
