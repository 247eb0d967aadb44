//! What can go wrong, in sentences for whoever asked.

use std::io;

use torpor_worker::{Class, Outcome};

/// The result of what can fail here.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel, or a file, said no.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What came back.
        source: io::Error,
    },
    /// The link is down, or the other end has gone.
    #[error("the link to the other host: {0}")]
    Link(String),
    /// The other end broke the protocol.
    #[error("the other end broke the protocol: {0}")]
    Protocol(String),
    /// It cannot be done, and this is why; perhaps with what to do about it.
    #[error("{text}")]
    Refused {
        /// Why.
        text: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// Somebody asked for the end of it.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// A refusal.
    pub fn refused(text: impl Into<String>) -> Self {
        Self::Refused { text: text.into(), hint: None }
    }

    /// A refusal, and what to do about it.
    pub(crate) fn refused_with(text: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused { text: text.into(), hint: Some(hint.into()) }
    }

    /// What to do about it, if anything is known.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Refused { hint, .. } => hint.as_deref(),
            _ => None,
        }
    }

    /// How it went, for programs.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let class = match self {
            Self::Io { .. } => Class::Kernel,
            Self::Link(_) => Class::PeerLost,
            Self::Protocol(_) => Class::Protocol,
            Self::Refused { .. } => Class::Refused,
            Self::Cancelled => Class::Vetoed,
        };
        let hint = self.hint().map(str::to_owned);
        let mut outcome = Outcome { hint, ..Outcome::failed(class, self.to_string()) };
        if let Self::Io { source, .. } = self {
            outcome.errno = source.raw_os_error().unwrap_or(outcome.errno);
        }
        outcome
    }
}

/// Says what was tried when something fails.
pub(crate) trait Context<T> {
    /// Names it.
    ///
    /// # Errors
    /// That of the result itself.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { what: what(), source: source.into() })
    }
}

impl From<torpor_tls::Error> for Error {
    fn from(error: torpor_tls::Error) -> Self {
        Self::refused(error.to_string())
    }
}

impl From<torpor_worker::Error> for Error {
    fn from(error: torpor_worker::Error) -> Self {
        Self::refused(error.to_string())
    }
}
