//! Those for whom checkpoints are sealed.

use std::path::Path;

use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use x509_parser::oid_registry as oid;
use x509_parser::x509::SubjectPublicKeyInfo;

use super::cert::Purpose;
use super::error::shown;
use super::hpke::{Curve, HpkeRecipient};
use super::provider::{self, Provider};
use super::rsa::RsaRecipient;
use super::{AgeRecipient, Certificate, KeyError, Result, Trust, age, armor, read, rsa};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// The object identifier of X25519 keys, RFC 8410.
const X25519: &str = "1.3.101.110";
/// No file names more recipients.
const MAX_IN_FILE: usize = 64;

/// Somebody who can open what is sealed.
#[derive(Debug)]
pub struct Recipient(RecipientKind);

#[derive(Debug)]
enum RecipientKind {
    Age(AgeRecipient),
    Rsa(Certificate, RsaRecipient),
    Hpke(Certificate, HpkeRecipient),
    Provider(Provider),
}

impl Recipient {
    /// Reads what `--recipient` takes: `age1…`, `provider:PROGRAM[:KEY]`, or a file with
    /// a certificate (and those that lead from it to an authority) or with `age1…` lines.
    ///
    /// # Errors
    /// If the text is none of these, or the file cannot be read.
    pub fn parse(spec: &str) -> Result<Vec<Self>> {
        if let Some(command) = spec.strip_prefix(provider::PREFIX) {
            return Ok(vec![Self(RecipientKind::Provider(Provider::parse(command)?))]);
        }
        if spec.starts_with("age1") {
            return Ok(vec![Self(RecipientKind::Age(AgeRecipient::parse(spec)?))]);
        }
        Self::from_file(Path::new(spec))
    }

    /// Reads a file with a certificate, or with `age1…` lines.
    ///
    /// # Errors
    /// If the file cannot be read, or holds neither.
    pub fn from_file(path: &Path) -> Result<Vec<Self>> {
        let bytes = read(path)?;
        let wrong = |reason: String| KeyError::Content { path: path.into(), reason };
        let lines = std::str::from_utf8(&bytes)
            .ok()
            .filter(|text| text.lines().any(|line| line.starts_with("age1")));
        let Some(text) = lines else {
            let chain = armor::certificates_in(path, &bytes)?;
            let certificate = Certificate::new(chain).map_err(wrong)?;
            return Ok(vec![Self::from_certificate(certificate).map_err(wrong)?]);
        };
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let lines: Vec<&str> = lines.filter(|line| !line.starts_with('#')).collect();
        if lines.len() > MAX_IN_FILE {
            return Err(wrong(format!("it names more than {MAX_IN_FILE} recipients")));
        }
        let parsed = lines.into_iter().map(AgeRecipient::parse);
        parsed
            .map(|recipient| {
                Ok(Self(RecipientKind::Age(recipient.map_err(|e| wrong(e.to_string()))?)))
            })
            .collect()
    }

    fn from_certificate(certificate: Certificate) -> Result<Self, String> {
        match certificate.public_key(key_of).ok_or("the certificate is damaged")?? {
            PublicKey::Rsa(key) => Ok(Self(RecipientKind::Rsa(certificate, key))),
            PublicKey::Hpke(key) => Ok(Self(RecipientKind::Hpke(certificate, key))),
        }
    }

    /// Whether its certificate, if it has one, is valid now, and comes from an authority of
    /// `trust` if there is any.
    ///
    /// # Errors
    /// If it has expired, is not valid yet, was revoked, or comes from nobody in `trust`.
    pub fn check(&self, trust: &Trust) -> Result<()> {
        self.certificate().map_or(Ok(()), |certificate| {
            trust.check(certificate, Some(Purpose::Sealing)).map(drop)
        })
    }

    /// Wraps `key`, so that only this recipient and only together with `binding` gets it
    /// back. A provider's command runs meanwhile.
    ///
    /// # Errors
    /// If a provider fails, or a public key is unusable.
    pub fn wrap(&self, key: &MasterKey, binding: &[u8]) -> Result<Stanza> {
        match &self.0 {
            RecipientKind::Age(recipient) => recipient.wrap(key.expose(), binding),
            RecipientKind::Rsa(_, recipient) => recipient.wrap(key, binding),
            RecipientKind::Hpke(_, recipient) => recipient.wrap(key, binding),
            RecipientKind::Provider(provider) => provider.wrap(key, binding),
        }
    }

    /// Its certificate, if it has one.
    #[must_use]
    pub fn certificate(&self) -> Option<&Certificate> {
        match &self.0 {
            RecipientKind::Rsa(certificate, _) | RecipientKind::Hpke(certificate, _) => {
                Some(certificate)
            }
            RecipientKind::Age(_) | RecipientKind::Provider(_) => None,
        }
    }

    /// How keys are wrapped for it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match &self.0 {
            RecipientKind::Age(_) => age::KIND,
            RecipientKind::Rsa(..) => rsa::KIND,
            RecipientKind::Hpke(_, key) => key.kind(),
            RecipientKind::Provider(_) => provider::KIND,
        }
    }

    /// What its stanzas name it by.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.0 {
            RecipientKind::Age(recipient) => recipient.to_string(),
            RecipientKind::Rsa(_, key) => hex(key.fingerprint()),
            RecipientKind::Hpke(_, key) => hex(&key.fingerprint()),
            RecipientKind::Provider(provider) => provider.name(),
        }
    }
}

enum PublicKey {
    Rsa(RsaRecipient),
    Hpke(HpkeRecipient),
}

fn key_of(info: &SubjectPublicKeyInfo<'_>) -> Result<PublicKey, String> {
    let algorithm = &info.algorithm.algorithm;
    let bytes: &[u8] = &info.subject_public_key.data;
    if *algorithm == oid::OID_PKCS1_RSAENCRYPTION {
        let key = RsaRecipient::new(info.raw)
            .ok_or("its RSA key cannot be used: it needs 2048 to 8192 bits")?;
        return Ok(PublicKey::Rsa(key));
    }
    if algorithm.to_id_string() == X25519 {
        return Ok(PublicKey::Hpke(HpkeRecipient::new(Curve::X25519, bytes)));
    }
    if *algorithm == oid::OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = info.algorithm.parameters.as_ref().and_then(|any| any.as_oid().ok());
        let curve = match curve {
            Some(curve) if curve == oid::OID_EC_P256 => Curve::P256,
            Some(curve) if curve == oid::OID_NIST_EC_P384 => Curve::P384,
            _ => return Err("its curve cannot be used: P-256, P-384 and X25519 can".into()),
        };
        return Ok(PublicKey::Hpke(HpkeRecipient::new(curve, bytes)));
    }
    if *algorithm == oid::OID_SIG_ED25519 {
        return Err("an Ed25519 key can sign, but nothing can be sealed for it".into());
    }
    Err(format!("keys of type {algorithm} cannot be used: RSA, P-256, P-384 and X25519 can"))
}

/// What a public key is named by in a stanza: a hash of its kind and itself.
pub(super) type Fingerprint = [u8; SHA256_OUTPUT_LEN];

pub(super) fn fingerprint(kind: &str, public: &[u8]) -> Fingerprint {
    let hash = digest(&SHA256, &[kind.as_bytes(), b"\0", public].concat());
    let mut out = Fingerprint::default();
    out.copy_from_slice(hash.as_ref());
    out
}

/// As a fingerprint is shown.
pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A stanza's recipient, as far as it says, in a few words.
pub fn described(stanza: &Stanza) -> String {
    let kind = shown(&stanza.kind);
    match stanza.args.as_slice() {
        _ if stanza.kind == age::KIND => "an identity of age".into(),
        [program, key] if stanza.kind == provider::KIND => {
            let text = [program.as_slice(), b":", key].concat();
            format!("{kind} {}", shown(&String::from_utf8_lossy(&text)))
        }
        [name, ..] if name.len() == SHA256_OUTPUT_LEN => format!("{kind} {}", hex(name)),
        _ => kind,
    }
}
