//! What can be wrong with a sealed checkpoint.

use std::io;

/// The result of sealing and opening.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a sealed checkpoint. Names of files are added by callers who
/// know their directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The system refused to read or write.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A file is not what it should be: it was changed, cut, exchanged, or belongs to
    /// another checkpoint.
    #[error("{file}: {reason}")]
    Damaged { file: String, reason: String },
    /// A part of the format that this program does not know.
    #[error("{file}: {what} is not supported")]
    Unsupported { file: String, what: String },
    /// A key, a certificate or a signature is missing or wrong.
    #[error(transparent)]
    Keys(#[from] crate::keys::KeyError),
    /// The system has no random bytes, or a key could not be used.
    #[error("{0} failed")]
    Crypto(&'static str),
}

impl Error {
    /// What is wrong with the content of `file`.
    pub fn damaged(file: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Damaged { file: file.into(), reason: reason.into() }
    }
}
