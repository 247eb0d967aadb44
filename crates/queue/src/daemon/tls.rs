//! The certificate of the daemon.

use std::path::PathBuf;

/// The certificate of the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    /// The certificate, and those that lead from it to an authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority of the pool: whoever has a certificate of it is another machine.
    pub authority: Option<PathBuf>,
}
