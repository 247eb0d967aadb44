//! Namespaces that the caller hands over.

use std::io;
use std::os::fd::OwnedFd;

use crate::error::{Context, Error, Result};
use crate::options::InheritFd;

/// The file that `--inherit-fd` brings under `key`.
pub(super) fn inherited(given: &[InheritFd], key: &str) -> Result<OwnedFd> {
    let found = given.iter().find(|inherited| inherited.key == key);
    let fd = found.ok_or_else(|| Error::Os {
        what: format!("external namespace {key}: hand it over with --inherit-fd fd[N]:{key}"),
        source: io::ErrorKind::NotFound.into(),
    })?;
    fd.fd.try_clone().context(|| "dup".to_owned())
}
