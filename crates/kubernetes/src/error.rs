//! What can go wrong.

use std::fmt::Display;

use torpor_worker::{Class, Outcome};

/// An error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The API server, a controller, or the agent of another node said no.
    #[error("{what}: the answer is {status}: {text}")]
    Refused {
        /// What was asked.
        what: String,
        /// The HTTP status.
        status: u16,
        /// What it said.
        text: String,
    },
    /// It said nothing.
    #[error("{what}: there is no answer: {text}")]
    Silent {
        /// What was asked.
        what: String,
        /// How that was seen.
        text: String,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// An error with a text of its own.
    pub fn new(text: impl Into<String>) -> Self {
        Self::Other(text.into())
    }

    /// Whether somebody else has changed or made the object first.
    #[must_use]
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: 409, .. })
    }

    /// Whether whoever has asked is not believed, or may not have it.
    #[must_use]
    pub(crate) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { status: 403, .. })
    }

    /// Whether the other end was too busy, or is being restarted: it may answer in a moment.
    #[must_use]
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Self::Silent { .. } | Self::Refused { status: 429 | 500.., .. })
    }
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Self {
        let class = match &error {
            Error::Refused { status: 401 | 403, .. } => Class::Forbidden,
            Error::Refused { .. } | Error::Silent { .. } | Error::Other(_) => Class::Refused,
        };
        Self::failed(class, error.to_string())
    }
}

/// What comes out of it.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was being done when something failed.
pub trait Context<T> {
    /// Adds what was being done.
    ///
    /// # Errors
    /// If there was an error: the same, with what was tried before it.
    fn context<S: Display>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Display> Context<T> for std::result::Result<T, E> {
    fn context<S: Display>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::Other(format!("{}: {error}", what())))
    }
}
