//! Certificates for connections that are encrypted.

#![allow(missing_docs, reason = "not an interface")]

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// The options that name an authority, and a certificate of this host.
pub fn certificates(dir: &Path) -> Vec<String> {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let own = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&own, &issuer).unwrap().pem();
    let files = [
        ("--tls-cacert", authority),
        ("--tls-cert", certificate),
        ("--tls-key", own.serialize_pem()),
    ];
    let mut options = vec!["--tls".to_owned()];
    for (option, pem) in files {
        let file = dir.join(&option[2..]);
        fs::write(&file, pem).unwrap();
        options.extend([option.to_owned(), file.to_str().unwrap().to_owned()]);
    }
    options
}
