//! The names in a certificate, by which its owner is known again when another one has replaced it.

use aws_lc_rs::digest::{Context, SHA256};
use rustls::pki_types::CertificateDer;
use x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{Result, failed};

/// A digest of the names in a certificate: of its subject, and of the other names that it has. One that has none is known
/// by all of it.
///
/// # Errors
/// If it is no certificate.
pub(crate) fn digest(certificate: &CertificateDer<'_>) -> Result<String> {
    let (_, read) = X509Certificate::from_der(certificate).map_err(|e| failed("TLS", &e))?;
    let others = read.extensions().iter().filter(|it| it.oid == OID_X509_EXT_SUBJECT_ALT_NAME);
    let others: Vec<&[u8]> = others.map(|it| it.value).collect();
    let mut sum = Context::new(&SHA256);
    // Each part says itself where it ends.
    sum.update(read.subject().as_raw());
    others.iter().for_each(|names| sum.update(names));
    if others.is_empty() && read.subject().iter().next().is_none() {
        sum.update(certificate);
    }
    Ok(sum.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, KeyPair};

    use super::*;

    fn named(names: &[&str], has_subject: bool) -> String {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        if !has_subject {
            params.distinguished_name = DistinguishedName::new();
        }
        digest(params.self_signed(&KeyPair::generate().unwrap()).unwrap().der()).unwrap()
    }

    #[test]
    fn a_certificate_that_replaces_another_is_known_by_its_names() {
        for has_subject in [true, false] {
            let known = named(&["a.example", "192.0.2.1"], has_subject);
            assert_eq!(known, named(&["a.example", "192.0.2.1"], has_subject));
            for others in [&["a.example"][..], &["a.example", "192.0.2.2"], &[]] {
                assert_ne!(known, named(others, has_subject), "{others:?}");
            }
            assert_ne!(known, named(&["a.example", "192.0.2.1"], !has_subject));
        }
        assert_ne!(named(&[], false), named(&[], false), "two hosts without a name");
        assert!(digest(&CertificateDer::from(&b"none"[..])).is_err());
    }
}
