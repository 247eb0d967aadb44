//! Certificates for connections that are encrypted.

#![allow(missing_docs, reason = "not an interface")]

use std::path::Path;

/// The options that name an authority, and a certificate of this host.
pub fn certificates(dir: &Path) -> Vec<String> {
    let names = ["--tls-cacert", "--tls-cert", "--tls-key"];
    let made = torpor_runtimes_tests::certificates::certificates(dir, "127.0.0.1", names);
    [vec!["--tls".to_owned()], made].concat()
}
