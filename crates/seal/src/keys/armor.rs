//! The forms that certificates and private keys come in: PEM, or the bare DER.

use std::path::Path;

use aws_lc_rs::agreement::{self, ECDH_P256, ECDH_P384};
use aws_lc_rs::encoding::{AsBigEndian, EcPrivateKeyBin};
use aws_lc_rs::rsa::PrivateDecryptingKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use super::hpke::{self, Curve};
use super::rsa::RsaIdentity;
use super::{KeyError, Result, read};

/// What a PKCS#8 file of an X25519 key begins with, RFC 8410; the key follows.
const X25519_PKCS8: &[u8] = &[
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x6e, 0x04, 0x22, 0x04, 0x20,
];
/// First byte of anything in DER that is read here: a sequence.
const SEQUENCE: u8 = 0x30;
/// A chain of certificates is not longer.
const MAX_CHAIN: usize = 16;

/// The certificates in a file, in their order; at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    certificates_in(path, &read(path)?)
}

pub(super) fn certificates_in(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |reason: &str| KeyError::Content { path: path.into(), reason: reason.into() };
    if bytes.first() == Some(&SEQUENCE) {
        return Ok(vec![CertificateDer::from(bytes.to_vec())]);
    }
    let found: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(bytes).take(MAX_CHAIN + 1).collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong("there is no certificate in it")),
        Ok(found) if found.len() > MAX_CHAIN => Err(wrong("there are too many certificates in it")),
        Ok(found) => Ok(found),
        Err(_) => Err(wrong("its PEM is damaged")),
    }
}

/// A private key's DER, of any kind, that zeroes itself.
pub(crate) type PrivateKey = Zeroizing<PrivateKeyDer<'static>>;

/// The private key in a file.
pub(crate) fn private_key(path: &Path) -> Result<PrivateKey> {
    private_key_in(path, &read(path)?)
}

pub(super) fn private_key_in(path: &Path, bytes: &[u8]) -> Result<PrivateKey> {
    let wrong = |reason: &str| KeyError::Content { path: path.into(), reason: reason.into() };
    if bytes.first() == Some(&SEQUENCE) {
        let key = PrivateKeyDer::try_from(bytes.to_vec());
        return key.map(Zeroizing::new).map_err(|_| wrong("this is no private key"));
    }
    let has = |text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    if has("BEGIN ENCRYPTED PRIVATE KEY") || has("Proc-Type: 4,ENCRYPTED") {
        return Err(wrong("the key is protected by a passphrase, and nobody is there to type it"));
    }
    match PrivateKeyDer::from_pem_slice(bytes) {
        Ok(key) => Ok(Zeroizing::new(key)),
        Err(rustls_pki_types::pem::Error::NoItemsFound) => {
            Err(wrong("there is no private key in it"))
        }
        Err(_) => Err(wrong("its PEM is damaged")),
    }
}

/// A private key that opens.
#[derive(Debug)]
pub(super) enum OpeningKey {
    /// Of RSA.
    Rsa(RsaIdentity),
    /// Of a curve.
    Hpke(hpke::HpkeIdentity),
}

/// What kind of key `der` is, if it is one that opens.
pub(super) fn opening_key(der: &PrivateKeyDer<'static>) -> Option<OpeningKey> {
    let bytes = der.secret_der();
    if let Some(secret) = bytes.strip_prefix(X25519_PKCS8).filter(|secret| secret.len() == 32) {
        return hpke::HpkeIdentity::new(Curve::X25519, secret).map(OpeningKey::Hpke);
    }
    for (curve, algorithm) in [(Curve::P256, &ECDH_P256), (Curve::P384, &ECDH_P384)] {
        if let Ok(key) = agreement::PrivateKey::from_private_key_der(algorithm, bytes) {
            let secret: EcPrivateKeyBin<'_> = key.as_be_bytes().ok()?;
            return hpke::HpkeIdentity::new(curve, secret.as_ref()).map(OpeningKey::Hpke);
        }
    }
    let pkcs8 = match der {
        PrivateKeyDer::Pkcs1(_) => pkcs8_of_rsa(bytes),
        _ => Zeroizing::new(bytes.to_vec()),
    };
    let key = PrivateDecryptingKey::from_pkcs8(&pkcs8).ok()?;
    RsaIdentity::new(key).map(OpeningKey::Rsa)
}

/// Wraps the older form of an RSA key (PKCS#1) in the general one (PKCS#8, RFC 5958).
fn pkcs8_of_rsa(pkcs1: &[u8]) -> Zeroizing<Vec<u8>> {
    /// Version 0; the algorithm rsaEncryption without parameters.
    const HEAD: &[u8] = &[
        0x02, 0x01, 0x00, 0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01,
        0x01, 0x05, 0x00,
    ];
    const OCTET_STRING: u8 = 0x04;
    let key = Zeroizing::new(der(OCTET_STRING, &[pkcs1]));
    Zeroizing::new(der(SEQUENCE, &[HEAD, &key]))
}

/// A DER element of more than 255 and less than 65536 bytes.
fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    // Longer ones are no RSA keys, and are refused when they are read.
    let [high, low] = u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes();
    let mut out = Vec::with_capacity(len + 4);
    out.extend_from_slice(&[tag, 0x82, high, low]);
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}
