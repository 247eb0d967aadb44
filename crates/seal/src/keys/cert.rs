//! Certificates: what they are for, and whether to believe them.
//!
//! A certificate that is used is within its time, chains to a configured authority if
//! any is configured, and is in none of the configured lists of revocations.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{
    ALL_VERIFICATION_ALGS, CertRevocationList, EndEntityCert, ExpirationPolicy,
    ExtendedKeyUsageValidator, KeyPurposeIdIter, OwnedCertRevocationList, RevocationCheckDepth,
    RevocationOptionsBuilder, UnknownStatusPolicy, anchor_from_trusted_cert,
};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use super::error::shown;
use super::{KeyError, Result, armor, read};

/// What a certificate is to be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Keys are wrapped for it.
    Sealing,
    /// It stands behind a signature.
    Signing,
}

/// A certificate, and those that lead from it to an authority.
#[derive(Debug, Clone)]
pub struct Certificate {
    chain: Vec<CertificateDer<'static>>,
    name: String,
    subject: String,
    not_before: i64,
    not_after: i64,
    /// Whether it may be used for sealing, and for signing.
    allows: [bool; 2],
}

impl Certificate {
    /// Takes a chain apart, the certificate itself first.
    ///
    /// # Errors
    /// If the chain is empty, or its first certificate cannot be read: why.
    pub(crate) fn new(chain: Vec<CertificateDer<'static>>) -> Result<Self, String> {
        let first = chain.first().ok_or("there is no certificate")?;
        let (_, cert) =
            X509Certificate::from_der(first).map_err(|_| "the certificate is damaged")?;
        let allows = match cert.key_usage().map_err(|_| "its key usage is damaged")? {
            // A certificate that says nothing of its use is good for any.
            None => [true, true],
            Some(usage) => {
                let usage = usage.value;
                [
                    usage.key_encipherment() || usage.data_encipherment() || usage.key_agreement(),
                    usage.digital_signature() || usage.non_repudiation(),
                ]
            }
        };
        let common = cert.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let name = common.map_or_else(|| cert.subject().to_string(), str::to_owned);
        let (not_before, not_after) =
            (cert.validity().not_before.timestamp(), cert.validity().not_after.timestamp());
        let subject = format!("{:?}", shown(&name));
        Ok(Self { name, subject, not_before, not_after, allows, chain })
    }

    /// Reads a file with a certificate, and those that lead from it to an authority.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no certificate.
    pub fn load(path: &Path) -> Result<Self> {
        let wrong = |reason| KeyError::Content { path: path.into(), reason };
        Self::new(armor::certificates(path)?).map_err(wrong)
    }

    /// Whether it is valid now, and comes from an authority of `trust` if there is any.
    ///
    /// # Errors
    /// If it has expired, is not valid yet, was revoked, or comes from nobody in `trust`.
    pub fn check(&self, trust: &Trust) -> Result<()> {
        trust.check(self, None).map(drop)
    }

    /// Whose it is: a name to compare.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whose it is, quoted: a name to show.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// From when on it is valid.
    #[must_use]
    pub fn not_before(&self) -> String {
        date(self.not_before)
    }

    /// Until when it is valid.
    #[must_use]
    pub fn not_after(&self) -> String {
        date(self.not_after)
    }

    /// The chain, itself first.
    pub(crate) fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    fn own(&self) -> &[u8] {
        self.chain.first().map_or(&[], |der| der)
    }

    /// Hands the algorithm, its parameters and the key of its `SubjectPublicKeyInfo` to `read`.
    pub(super) fn public_key<T>(
        &self,
        read: impl FnOnce(&x509_parser::x509::SubjectPublicKeyInfo<'_>) -> T,
    ) -> Option<T> {
        let (_, cert) = X509Certificate::from_der(self.own()).ok()?;
        Some(read(cert.public_key()))
    }

    fn check_time(&self, now: i64) -> Result<()> {
        if now > self.not_after {
            return Err(KeyError::Expired {
                subject: self.subject.clone(),
                since: self.not_after(),
            });
        }
        if now < self.not_before {
            return Err(KeyError::NotYetValid {
                subject: self.subject.clone(),
                from: self.not_before(),
            });
        }
        Ok(())
    }
}

fn date(seconds: i64) -> String {
    ASN1Time::from_timestamp(seconds).map_or_else(|_| seconds.to_string(), |time| time.to_string())
}

/// The authorities that are trusted, and what they have taken back.
#[derive(Default)]
pub struct Trust {
    /// The authorities' certificates.
    authorities: Vec<CertificateDer<'static>>,
    anchors: Vec<TrustAnchor<'static>>,
    revoked: Vec<CertRevocationList<'static>>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust")
            .field("authorities", &self.authorities.len())
            .field("revocation lists", &self.revoked.len())
            .finish()
    }
}

impl Trust {
    /// Reads files of authorities' certificates and of revocation lists, PEM or DER.
    ///
    /// # Errors
    /// If one of them cannot be read, or there is a list but no authority.
    pub fn load(authorities: &[PathBuf], revocations: &[PathBuf]) -> Result<Self> {
        let mut trust = Self::default();
        for path in authorities {
            for der in armor::certificates(path)? {
                let anchor = anchor_from_trusted_cert(&der).map_err(|e| KeyError::Content {
                    path: path.clone(),
                    reason: format!("this is no certificate of an authority ({e})"),
                })?;
                trust.anchors.push(anchor.to_owned());
                trust.authorities.push(der);
            }
        }
        for path in revocations {
            trust.revoked.extend(revocation_lists(path)?);
        }
        match revocations.first() {
            Some(path) if trust.is_empty() => Err(KeyError::Content {
                path: path.clone(),
                reason: "a list of revocations is of no use without its authority: name that with \
                         --trust"
                    .into(),
            }),
            _ => Ok(trust),
        }
    }

    /// Whether no authority is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.anchors.is_empty()
    }

    /// Whether `certificate` may be used now, and for `purpose`; the name of the authority that it
    /// comes from. Without authorities, one that somebody named is trusted for being named.
    ///
    /// # Errors
    /// If it has expired, is for something else, or comes from no authority that is trusted: a sentence.
    pub(crate) fn check(
        &self,
        certificate: &Certificate,
        purpose: Option<Purpose>,
    ) -> Result<Option<String>> {
        self.check_at(certificate, purpose, SystemTime::now())
    }

    fn check_at(
        &self,
        certificate: &Certificate,
        purpose: Option<Purpose>,
        now: SystemTime,
    ) -> Result<Option<String>> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        certificate.check_time(i64::try_from(now.as_secs()).unwrap_or(i64::MAX))?;
        if let Some(purpose) = purpose
            && !certificate.allows[purpose as usize]
        {
            let use_ = if purpose == Purpose::Sealing { "sealing" } else { "signing" };
            return Err(KeyError::Untrusted {
                subject: certificate.subject.clone(),
                reason: format!("its key usage does not allow {use_}"),
            });
        }
        // One that is configured itself is believed as it is.
        let named = self.authorities.iter().any(|der| der.as_ref() == certificate.own());
        if self.is_empty() || named {
            return Ok(named.then(|| certificate.name.clone()));
        }
        let anchor = self
            .check_chain(certificate, UnixTime::since_unix_epoch(now))
            .map_err(|error| refusal(certificate, &error))?;
        let authority = self.authorities.get(anchor).and_then(|der| {
            Certificate::new(vec![der.clone()]).ok().map(|authority| authority.name)
        });
        Ok(authority)
    }

    /// The number of the authority that a certificate comes from.
    fn check_chain(
        &self,
        certificate: &Certificate,
        now: UnixTime,
    ) -> Result<usize, webpki::Error> {
        let (first, others) = certificate.chain.split_first().ok_or(webpki::Error::BadDer)?;
        let lists: Vec<&CertRevocationList<'_>> = self.revoked.iter().collect();
        let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|options| {
            options
                .with_depth(RevocationCheckDepth::Chain)
                // Not every authority has a list; one that is given must be fresh.
                .with_status_policy(UnknownStatusPolicy::Allow)
                .with_expiration_policy(ExpirationPolicy::Enforce)
                .build()
        });
        let own = EndEntityCert::try_from(first)?;
        let path = own.verify_for_usage(
            ALL_VERIFICATION_ALGS,
            &self.anchors,
            others,
            now,
            AnyExtendedUsage,
            revocation,
            None,
        )?;
        let anchor = self.anchors.iter().position(|anchor| std::ptr::eq(anchor, path.anchor()));
        anchor.ok_or(webpki::Error::UnknownIssuer)
    }
}

/// Extended usages are about TLS, mail and code: they say nothing about checkpoints.
struct AnyExtendedUsage;

impl ExtendedKeyUsageValidator for AnyExtendedUsage {
    fn validate(&self, _: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        Ok(())
    }
}

fn refusal(certificate: &Certificate, error: &webpki::Error) -> KeyError {
    let subject = certificate.subject.clone();
    let reason = match error {
        webpki::Error::CertRevoked => return KeyError::Revoked { subject },
        // Its own time was looked at before.
        webpki::Error::CertExpired { .. } => {
            "a certificate on the way to its authority has expired"
        }
        webpki::Error::CertNotValidYet { .. } => {
            "a certificate on the way to its authority is not valid yet"
        }
        webpki::Error::CrlExpired { .. } => "the list of revocations is out of date",
        webpki::Error::UnknownIssuer | webpki::Error::CaUsedAsEndEntity => {
            "it does not come from an authority given with --trust"
        }
        webpki::Error::UnsupportedCertVersion => {
            "it has no extensions: certificates of version 1 cannot be checked"
        }
        other => return KeyError::Untrusted { subject, reason: other.to_string() },
    };
    KeyError::Untrusted { subject, reason: reason.into() }
}

/// The lists of revocations in a file.
fn revocation_lists(path: &Path) -> Result<Vec<CertRevocationList<'static>>> {
    use rustls_pki_types::CertificateRevocationListDer;
    use rustls_pki_types::pem::PemObject;
    let wrong = |reason: String| KeyError::Content { path: path.into(), reason };
    let bytes = read(path)?;
    let mut lists: Vec<CertificateRevocationListDer<'static>> = Vec::new();
    if bytes.starts_with(b"\x30") {
        lists.push(bytes.to_vec().into());
    } else {
        for list in CertificateRevocationListDer::pem_slice_iter(&bytes) {
            lists.push(list.map_err(|_| wrong("its PEM is damaged".into()))?);
        }
    }
    if lists.is_empty() {
        return Err(wrong("there is no list of revocations in it".into()));
    }
    let parsed = lists.iter().map(|der| OwnedCertRevocationList::from_der(der));
    parsed
        .map(|list| list.map(CertRevocationList::from))
        .collect::<Result<_, _>>()
        .map_err(|e| wrong(format!("this is no list of revocations ({e})")))
}
