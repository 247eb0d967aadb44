//! What can be wrong with an image file.

use std::io;
use std::path::{Path, PathBuf};

use crate::kind::Kind;

/// The result of working on image files.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with an image file. The text names the file, and the
/// offset where there is one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The system refused an operation on the file.
    #[error("{}: {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    /// There is no such file.
    #[error("{}: no such image file", file.display())]
    Missing { file: PathBuf },
    /// The name would lead out of the image directory.
    #[error("{name:?} is no name for an image file")]
    BadName { name: String },
    /// It is a directory, a device, a symbolic link or the like.
    #[error("{}: not a regular file", file.display())]
    NotRegular { file: PathBuf },
    /// The file does not start as one of its kind does.
    #[error("{}: offset {offset}: magic number {found:#010x}, {expected:#010x} expected", file.display())]
    BadMagic { file: PathBuf, offset: u64, expected: u32, found: u32 },
    /// The file ends within something.
    #[error("{}: offset {offset}: {wanted} bytes expected for {what}, the file has {left}", file.display())]
    Truncated { file: PathBuf, offset: u64, what: &'static str, wanted: u64, left: u64 },
    /// Something is larger than what is accepted.
    #[error("{}: offset {offset}: {what} of {size} bytes, at most {limit} are accepted", file.display())]
    TooLarge { file: PathBuf, offset: u64, what: &'static str, size: u64, limit: u64 },
    /// An entry is no valid message.
    #[error("{}: offset {offset}: not a valid {message}: {source}", file.display())]
    Decode { file: PathBuf, offset: u64, message: &'static str, source: prost::DecodeError },
    /// A file that holds one entry has none.
    #[error("{}: offset {offset}: no entry", file.display())]
    Empty { file: PathBuf, offset: u64 },
    /// Something follows what should be the end.
    #[error("{}: offset {offset}: {left} bytes after the last entry", file.display())]
    Trailing { file: PathBuf, offset: u64, left: u64 },
    /// An entry is a valid message that makes no sense.
    #[error("{}: offset {offset}: {reason}", file.display())]
    Invalid { file: PathBuf, offset: u64, reason: String },
    /// The checkpoint has a format that is not known here.
    #[error("{}: image version {found}, only versions up to {expected} are supported", file.display())]
    BadVersion { file: PathBuf, found: u32, expected: u32 },
    /// The checkpoint is sealed, and nobody has given its key.
    #[error("{}: is sealed; give an identity that can open it", file.display())]
    Sealed { file: PathBuf },
    /// A sealed file, or the checkpoint as a whole, is not what was sealed.
    #[error("{}: {source}", dir.display())]
    Seal { dir: PathBuf, source: torpor_seal::Error },
    /// A dump was killed before it was complete.
    #[error("{}: no checkpoint: a dump was killed there, and the one before it lies in {}: move \
             its files back, or dump again", dir.display(), torpor_store::ASIDE)]
    Interrupted { dir: PathBuf },
    /// A chain of `parent` directories does not end.
    #[error("{}: more than {limit} parent directories", file.display())]
    TooManyParents { file: PathBuf, limit: u32 },
}

impl Error {
    /// Whether the file simply is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing { .. })
    }

    /// The error of a failed `action` on `file`; a file that does not exist
    /// becomes [`Error::Missing`].
    #[must_use]
    pub fn io(file: &Path, action: &'static str, source: io::Error) -> Self {
        let file = file.to_owned();
        if source.kind() == io::ErrorKind::NotFound {
            Self::Missing { file }
        } else {
            Self::Io { file, action, source }
        }
    }
}

/// Checks that a message is one of those that a kind holds; a wrong one is a
/// mistake in the caller, so that release builds do without.
pub(crate) fn debug_check_message(kind: Kind, message: &str) {
    debug_assert!(kind.holds(message), "{message} is not a message of {kind:?}");
}
