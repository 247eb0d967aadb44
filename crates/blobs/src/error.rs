//! What went wrong, for whoever gave the command.

use std::fmt::Display;
use std::io;

/// An error: a sentence, and what to do about it where that is known.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    text: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// Whether nobody was there to answer, which may pass.
    pub is_absent: bool,
}

/// The result of what may fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error that says `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), hint: None, is_absent: false }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Notes that nobody was there to answer.
    #[must_use]
    pub fn absent(mut self) -> Self {
        self.is_absent = true;
        self
    }

    /// Says in front of it what was being done.
    #[must_use]
    pub fn during(mut self, what: impl Display) -> Self {
        self.text = format!("{what}: {}", self.text);
        self
    }
}

/// Says what was being done when something failed.
pub trait Context<T> {
    /// `what` goes in front of the error.
    ///
    /// # Errors
    /// If there was an error: the same, with what was tried before it.
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| Error::new(format!("{}: {error}", what())))
    }
}

impl<T> Context<T> for rustix::io::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|errno| Error::new(format!("{}: {}", what(), io::Error::from(errno))))
    }
}

impl<T> Context<T> for serde_json::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| Error::new(format!("{}: {error}", what())))
    }
}

impl<T> Context<T> for Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| error.during(what()))
    }
}
