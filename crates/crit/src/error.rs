//! Why an image cannot be shown or made.

use std::io;
use std::path::PathBuf;

/// The result of showing or making an image.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image cannot be shown or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Error {
    /// The image is damaged.
    #[error(transparent)]
    Image(#[from] torpor_images::Error),
    /// A key is missing or wrong.
    #[error(transparent)]
    Keys(#[from] torpor_seal::keys::KeyError),
    /// No kind of image starts like this.
    #[error(
        "{}: unknown magic number {magic:#010x}; is it an image without a header, such as pages?",
        file.display()
    )]
    UnknownMagic { file: PathBuf, magic: u32 },
    /// The file ends before the number that tells the kind of an image.
    #[error("{}: it has {len} bytes, too few for an image", file.display())]
    TooShort { file: PathBuf, len: usize },
    /// The JSON text is not what an image decodes to.
    #[error("{place}: {reason}")]
    Json { place: String, reason: String },
    /// The text is no JSON.
    #[error("{}: {source}", file.display())]
    Syntax { file: PathBuf, source: serde_json::Error },
    /// The system refused an operation on a file.
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: io::Error },
    /// The messages that this program was built with are damaged.
    #[error("the schema of the images cannot be read: {0}")]
    Schema(String),
    /// The images of a checkpoint do not fit together.
    #[error("{}: {reason}", file.display())]
    Inconsistent { file: PathBuf, reason: String },
}

impl Error {
    /// An error at a place in JSON text.
    pub(crate) fn json(place: &str, reason: impl Into<String>) -> Self {
        Self::Json { place: place.to_owned(), reason: reason.into() }
    }
}
