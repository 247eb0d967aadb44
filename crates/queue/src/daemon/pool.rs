//! Other machines of the pool: who they are, and how they are spoken to.
//!
//! Daemons show each other certificates of an authority that is the pool's own
//! (`--tls-ca`). Whoever has such a certificate may hand jobs over.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::listen::Tls;
use crate::http::{Address, Client};

/// What begins the names of instructions that a program may have found and gone on to use.
const INSTRUCTIONS: [&str; 14] = [
    "avx", "sse", "ssse", "aes", "vaes", "sha", "bmi", "adx", "fma", "pclmul", "vpclmul", "movbe",
    "popcnt", "gfni",
];

/// The authorities in a file.
///
/// # Errors
/// If it cannot be read, or holds none.
pub fn authorities(path: &Path) -> io::Result<RootCertStore> {
    let say = |e: &dyn std::fmt::Display| io::Error::other(format!("{}: {e}", path.display()));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|e| say(&e))? {
        roots.add(certificate.map_err(|e| say(&e))?).map_err(|e| say(&e))?;
    }
    if roots.is_empty() { Err(say(&"holds no certificate")) } else { Ok(roots) }
}

/// A daemon's certificate and key.
pub type Proof = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Reads the certificate and the key of this daemon.
///
/// # Errors
/// If one cannot be read.
pub fn proof(tls: &Tls) -> io::Result<Proof> {
    let chain = CertificateDer::pem_file_iter(&tls.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| io::Error::other(format!("{}: {e}", tls.certificate.display())))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key)
        .map_err(|e| io::Error::other(format!("{}: {e}", tls.key.display())))?;
    Ok((chain, key))
}

/// How this daemon speaks to others.
///
/// # Errors
/// If certificates or keys cannot be read or used.
pub fn client_config(tls: &Tls) -> io::Result<Option<Arc<rustls::ClientConfig>>> {
    let Some(authority) = &tls.authority else { return Ok(None) };
    let (chain, key) = proof(tls)?;
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(authorities(authority)?)
        .with_client_auth_cert(chain, key)
        .map_err(io::Error::other)?;
    Ok(Some(Arc::new(config)))
}

impl super::core::Core {
    /// Another machine of the pool, by its name.
    ///
    /// # Errors
    /// A sentence, if there is none of that name, or it must not be spoken to.
    pub fn peer(&self, name: &str) -> Result<Client, String> {
        let address = self.config.pool.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.config.pool.keys().map(String::as_str).collect();
            format!("there is no machine {name} in the pool: {}", names.join(", "))
        })?;
        let address: Address = address.parse()?;
        if !matches!(address, Address::Secure(_)) {
            return Err(format!("machine {name} needs an address that begins with https://"));
        }
        let tls = self.pool.clone().ok_or("a pool needs --tls-cert, --tls-key and --tls-ca")?;
        Ok(Client { address, token: None, tls: Some(tls) })
    }
}

/// Instructions of this machine's processors.
#[must_use]
pub fn processor() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let words = line.split_once(':').map_or("", |(_, words)| words).split_whitespace();
    let counts = |word: &&str| INSTRUCTIONS.iter().any(|start| word.starts_with(start));
    words.filter(counts).map(str::to_owned).collect()
}
