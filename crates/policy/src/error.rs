//! Why images cannot be judged.

/// Why images cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An image is damaged.
    #[error(transparent)]
    Image(#[from] torpor_images::Error),
    /// An image makes no sense.
    #[error("{image}: {reason}")]
    Invalid {
        /// The image file.
        image: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The result of collecting.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn invalid<T>(image: impl Into<String>, reason: String) -> Result<T> {
    Err(Error::Invalid { image: image.into(), reason })
}
