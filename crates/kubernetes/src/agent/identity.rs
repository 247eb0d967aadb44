//! Who the agent of a node is to the agents of others: a certificate that it has signed itself, kept in its directory of
//! state. What makes it this agent's is that its node's object names it; the controllers write that.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use ureq::tls::{Certificate, ClientCert, PrivateKey};

use super::tls;
use crate::error::{Context, Result};
use crate::time;

/// When it is made anew, in seconds after it was made.
const RENEW: i64 = 60 * 86_400;

/// A certificate and its key.
#[derive(Debug)]
pub(super) struct Identity {
    file: PathBuf,
    address: IpAddr,
    made: i64,
    key: KeyPair,
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// The same, in PEM.
    pub pem: String,
    /// What serves with it, and asks whoever connects for theirs.
    pub tls: Arc<ServerConfig>,
}

impl Identity {
    /// The one that is kept in `file`, or a new one: if there is none, or if this node had another address.
    ///
    /// # Errors
    /// If it cannot be read or written; if there is no TLS.
    pub(super) fn open(file: &Path, address: IpAddr) -> Result<Self> {
        let what = || file.display().to_string();
        match fs::read_to_string(file) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).context(what),
            Ok(kept) => {
                let (head, pem) = kept.split_once('\n').unwrap_or_default();
                if let Some((at, made)) = head.split_once(' ')
                    && at == address.to_string()
                    && let Ok(made) = made.parse()
                {
                    return Self::read(file, address, made, pem);
                }
            }
            Err(_) => {}
        }
        let made = Self::make(file, address)?;
        made.keep()?;
        Ok(made)
    }

    /// Another one that is to take its place, and is not kept yet.
    ///
    /// # Errors
    /// If the kernel has no random numbers for a key; if there is no TLS.
    pub(super) fn renewed(&self) -> Result<Self> {
        Self::make(&self.file, self.address)
    }

    /// Whether it is to be made anew.
    #[must_use]
    pub(super) fn is_old(&self) -> bool {
        time::now() > self.made + RENEW
    }

    /// It, as it is shown to the agents of other nodes.
    ///
    /// # Errors
    /// If its key is none that TLS knows.
    pub(super) fn shown(&self) -> Result<ClientCert> {
        let key = self.key.serialize_pem();
        let key = PrivateKey::from_pem(key.as_bytes()).context(|| self.file.display())?;
        let certificate = Certificate::from_der(&self.certificate).to_owned();
        Ok(ClientCert::new_with_certs(&[certificate], key))
    }

    fn read(file: &Path, address: IpAddr, made: i64, pem: &str) -> Result<Self> {
        let what = || file.display().to_string();
        let end = pem.find("-----BEGIN PRIVATE KEY-----").unwrap_or(pem.len());
        let (pem, key) = pem.split_at(end);
        let key = KeyPair::from_pem(key).context(what)?;
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).context(what)?;
        let tls = tls::mutual(vec![certificate.clone()], &key)?;
        let (file, pem) = (file.to_owned(), pem.to_owned());
        Ok(Self { file, address, made, key, certificate, pem, tls })
    }

    fn make(file: &Path, address: IpAddr) -> Result<Self> {
        let what = || file.display().to_string();
        let key = KeyPair::generate().context(what)?;
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress(address)];
        let certificate = params.self_signed(&key).context(what)?;
        let made = time::now();
        let pem = format!("{}{}", certificate.pem(), key.serialize_pem());
        Self::read(file, address, made, &pem)
    }

    /// Keeps it in its file, for the agents after this one.
    ///
    /// # Errors
    /// If the disk does not take the certificate.
    pub(super) fn keep(&self) -> Result<()> {
        let what = || self.file.display().to_string();
        // Half of a file would be worse than none.
        let part = self.file.with_extension("part");
        let _ = fs::remove_file(&part);
        let opened = File::options().write(true).create_new(true).mode(0o600).open(&part);
        let (head, key) = (format!("{} {}", self.address, self.made), self.key.serialize_pem());
        let text = format!("{head}\n{}{key}", self.pem);
        opened.and_then(|mut to| to.write_all(text.as_bytes())).context(what)?;
        fs::rename(&part, &self.file).context(what)
    }
}

#[cfg(test)]
impl Identity {
    /// Lets it be as old as it may become.
    pub(super) fn age(&mut self) {
        self.made -= RENEW + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_of_an_agent_is_kept() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("agent.pem");
        let open = |address: &str| Identity::open(&file, address.parse().unwrap()).unwrap();
        let mut first = open("10.0.0.1");
        assert!(!first.pem.contains("PRIVATE") && first.pem.contains("CERTIFICATE"));
        assert_eq!(open("10.0.0.1").pem, first.pem);
        assert!(!first.is_old());
        first.age();
        assert!(first.is_old());
        let second = first.renewed().unwrap();
        assert!(!second.is_old() && second.certificate != first.certificate);
        assert_eq!(open("10.0.0.1").certificate, first.certificate, "nobody knows the second");
        second.keep().unwrap();
        assert_eq!(open("10.0.0.1").certificate, second.certificate);
        assert_ne!(open("10.0.0.2").pem, second.pem, "the node has another address");
    }
}
