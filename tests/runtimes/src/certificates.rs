//! Certificates for connections that are encrypted.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// The options of agents: authority, certificate and key.
pub const OF_AGENTS: [&str; 3] = ["--ca", "--cert", "--key"];

/// Makes an authority, and a certificate of its for `name`, in files of `dir`. They are given by the
/// options `names`: those of the authority, the certificate and its key.
///
/// # Panics
/// If they cannot be made.
#[must_use]
pub fn certificates(dir: &Path, name: &str, names: [&str; 3]) -> Vec<String> {
    of_one_authority([(dir, name)], names).concat()
}

/// The same for several hosts, each with a directory and a name, of one authority.
///
/// # Panics
/// If they cannot be made.
#[must_use]
pub fn of_one_authority<const N: usize>(
    hosts: [(&Path, &str); N],
    names: [&str; 3],
) -> [Vec<String>; N] {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    hosts.map(|(dir, name)| {
        let own = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&own, &issuer).unwrap().pem();
        let option = |(option, pem): (&str, String)| {
            let file = dir.join(&option[2..]);
            fs::write(&file, pem).unwrap();
            [option.to_owned(), file.display().to_string()]
        };
        let files = [authority.clone(), certificate, own.serialize_pem()];
        names.into_iter().zip(files).flat_map(option).collect()
    })
}
