//! Keys of P-256, P-384 and X25519 certificates: HPKE (RFC 9180) in its base mode.
//!
//! DHKEM of the curve with its own hash, and ChaCha20-Poly1305. The binding is the
//! additional data.

use aws_lc_rs::agreement::{self, ECDH_P256, ECDH_P384, X25519};
use rustls::crypto::aws_lc_rs::hpke::{
    DH_KEM_P256_HKDF_SHA256_CHACHA20_POLY1305, DH_KEM_P384_HKDF_SHA384_CHACHA20_POLY1305,
    DH_KEM_X25519_HKDF_SHA256_CHACHA20_POLY1305,
};
use rustls::crypto::hpke::{EncapsulatedSecret, Hpke, HpkePrivateKey, HpkePublicKey};
use zeroize::Zeroizing;

use super::recipient::{Fingerprint, fingerprint};
use super::{KeyError, Result, key_from};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// What the shared secret is for.
const INFO: &[u8] = b"torpor seal v1 recipient";

/// The curves that there are certificates of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Curve {
    P256,
    P384,
    X25519,
}

impl Curve {
    /// The kind of the stanzas.
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::P256 => "hpke-p256",
            Self::P384 => "hpke-p384",
            Self::X25519 => "hpke-x25519",
        }
    }

    fn suite(self) -> &'static dyn Hpke {
        match self {
            Self::P256 => DH_KEM_P256_HKDF_SHA256_CHACHA20_POLY1305,
            Self::P384 => DH_KEM_P384_HKDF_SHA384_CHACHA20_POLY1305,
            Self::X25519 => DH_KEM_X25519_HKDF_SHA256_CHACHA20_POLY1305,
        }
    }

    fn agreement(self) -> &'static agreement::Algorithm {
        match self {
            Self::P256 => &ECDH_P256,
            Self::P384 => &ECDH_P384,
            Self::X25519 => &X25519,
        }
    }
}

/// The public key of a certificate, as HPKE writes it.
#[derive(Debug, Clone)]
pub(super) struct HpkeRecipient {
    curve: Curve,
    public: Vec<u8>,
}

/// The private key of such a certificate.
pub(super) struct HpkeIdentity {
    curve: Curve,
    secret: HpkePrivateKey,
    fingerprint: Fingerprint,
}

impl std::fmt::Debug for HpkeIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HpkeIdentity").field(&self.curve).field(&self.fingerprint).finish()
    }
}

impl HpkeRecipient {
    pub(super) fn new(curve: Curve, public: &[u8]) -> Self {
        Self { curve, public: public.to_vec() }
    }

    pub(super) fn kind(&self) -> &'static str {
        self.curve.kind()
    }

    pub(super) fn fingerprint(&self) -> Fingerprint {
        fingerprint(self.curve.kind(), &self.public)
    }

    pub(super) fn wrap(&self, key: &MasterKey, binding: &[u8]) -> Result<Stanza> {
        let public = HpkePublicKey(self.public.clone());
        let (share, body) = self
            .curve
            .suite()
            .seal(INFO, binding, key.expose(), &public)
            .map_err(|_| KeyError::Cipher { what: "wrapping a key by HPKE" })?;
        let args = vec![self.fingerprint().to_vec(), share.0];
        Ok(Stanza { kind: self.kind().into(), args, body })
    }
}

impl HpkeIdentity {
    /// From the bytes of the private key, as HPKE writes it.
    pub(super) fn new(curve: Curve, secret: &[u8]) -> Option<Self> {
        let key = agreement::PrivateKey::from_private_key(curve.agreement(), secret).ok()?;
        let public = key.compute_public_key().ok()?;
        let fingerprint = fingerprint(curve.kind(), public.as_ref());
        Some(Self { curve, secret: HpkePrivateKey::from(secret.to_vec()), fingerprint })
    }

    pub(super) fn kind(&self) -> &'static str {
        self.curve.kind()
    }

    pub(super) fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    pub(super) fn unwrap(&self, stanza: &Stanza, binding: &[u8]) -> Option<MasterKey> {
        let [_, share] = stanza.args.as_slice() else { return None };
        let share = EncapsulatedSecret(share.clone());
        let opened = self.curve.suite().open(&share, INFO, binding, &stanza.body, &self.secret);
        key_from(&Zeroizing::new(opened.ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    }

    /// Opens a known message; info, plaintext and additional data are those of RFC 9180.
    fn known(curve: Curve, secret: &[u8], share: &str, sealed: &str) {
        let opened = curve
            .suite()
            .open(
                &EncapsulatedSecret(hex(share)),
                b"Ode on a Grecian Urn",
                b"Count-0",
                &hex(sealed),
                &HpkePrivateKey::from(secret.to_vec()),
            )
            .unwrap();
        assert_eq!(opened, b"Beauty is truth, truth beauty");
    }

    #[test]
    fn x25519_of_rfc_9180_appendix_a_2() {
        known(
            Curve::X25519,
            &hex("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb"),
            "1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a",
            "1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28",
        );
    }

    #[test]
    fn p256_of_rfc_9180_appendix_a_5() {
        known(
            Curve::P256,
            &hex("a4d1c55836aa30f9b3fbb6ac98d338c877c2867dd3a77396d13f68d3ab150d3b"),
            "04c07836a0206e04e31d8ae99bfd549380b072a1b1b82e563c935c095827824fc1\
             559eac6fb9e3c70cd3193968994e7fe9781aa103f5b50e934b5b2f387e381291",
            "6469c41c5c81d3aa85432531ecf6460ec945bde1eb428cb2fedf7a29f5a685b4ccb0d057f03ea2952a27bb458b",
        );
    }

    /// RFC 9180 has no vector of P-384: this one was sealed by another implementation,
    /// that of Go's standard library, to the key 1, 2, … 48.
    #[test]
    fn p384_of_another_implementation() {
        known(
            Curve::P384,
            &(1..=48).collect::<Vec<u8>>(),
            "04b8b0f1386da3fdd58ea6284e43b58cd7727b46bceed42ccab5a5e99fe5b4f108\
             92356db65832d6fdb0cf3933c4182c182968e19a7df33547980a74ba5479e1fb42\
             823a9ce6e0d84f4b0089792505cc42d8addba54da15fe5562b889771004515",
            "24db804a7183e2ce4cf6767dce65c475f33452c1c1c8c67764ac115127364219f5cccb39e93ea84ee97a723a90",
        );
    }

    #[test]
    fn keys_come_back_only_to_their_recipient_in_their_place() {
        for curve in [Curve::P256, Curve::P384, Curve::X25519] {
            let pair = || {
                let (public, secret) = curve.suite().generate_key_pair().unwrap();
                let identity = HpkeIdentity::new(curve, secret.secret_bytes()).unwrap();
                (HpkeRecipient::new(curve, &public.0), identity)
            };
            let ((recipient, ours), (_, other)) = (pair(), pair());
            assert_eq!(&recipient.fingerprint(), ours.fingerprint());
            assert_ne!(&recipient.fingerprint(), other.fingerprint());
            testing::comes_back_only_to(
                |key, place| recipient.wrap(key, place),
                |stanza, place| ours.unwrap(stanza, place),
                |stanza, place| other.unwrap(stanza, place),
            );
        }
    }

    #[test]
    fn points_off_the_curve_are_refused() {
        for curve in [Curve::P256, Curve::P384, Curve::X25519] {
            let (public, _) = curve.suite().generate_key_pair().unwrap();
            let wrong = vec![0; public.0.len()];
            assert!(
                HpkeRecipient::new(curve, &wrong)
                    .wrap(&MasterKey::take(&mut [1; 32]), b"")
                    .is_err()
            );
        }
    }
}
