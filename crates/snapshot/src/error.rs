//! What went wrong, for whoever gave the command.

use std::fmt::Display;
use std::io;

use torpor_worker::Outcome;

/// An error: a sentence, and what to do about it where that is known.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    text: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// The result of what may fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error that says `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), hint: None }
    }

    /// That `what` failed since the kernel said `error`.
    pub fn failed(what: impl Display, error: &io::Error) -> Self {
        denied(what, error, is_root())
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What to do about it, if that is known.
    #[must_use]
    pub fn told(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Says in front of it what was being done.
    #[must_use]
    pub fn during(mut self, what: impl Display) -> Self {
        self.text = format!("{what}: {}", self.text);
        self
    }
}

/// That `what` failed since the kernel said `error`, with what to do about it where that is plain.
fn denied(what: impl Display, error: &io::Error, is_root: bool) -> Error {
    let said = Error::new(format!("{what}: {error}"));
    match error.kind() {
        io::ErrorKind::PermissionDenied if !is_root => said.hint("run it as root"),
        _ => said,
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl From<Error> for Outcome {
    fn from(Error { text, hint }: Error) -> Self {
        Self { hint, ..Self::from(text) }
    }
}

impl From<torpor_kernel::Error> for Error {
    fn from(error: torpor_kernel::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<torpor_images::Error> for Error {
    fn from(error: torpor_images::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<torpor_blobs::error::Error> for Error {
    fn from(error: torpor_blobs::error::Error) -> Self {
        Self { text: error.to_string(), hint: error.hint }
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
        self.map_err(|error| denied(what(), &error, is_root()))
    }
}

impl<T> Context<T> for rustix::io::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|errno| denied(what(), &errno.into(), is_root()))
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

impl<T> Context<T> for torpor_seal::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| Error::new(format!("{}: {error}", what())))
    }
}

impl<T> Context<T> for Result<T, torpor_seal::keys::KeyError> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(torpor_seal::Error::from).context(what)
    }
}

impl<T> Context<T> for torpor_blobs::error::Result<T> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Result<T> {
        self.map_err(|error| Error::from(error).during(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_root_hears_what_is_missing() {
        for (number, is_root, hint) in [
            (libc::EPERM, false, Some("run it as root")),
            (libc::EACCES, false, Some("run it as root")),
            (libc::EPERM, true, None),
            (libc::ENOSPC, false, None),
        ] {
            let error = denied("/mnt", &io::Error::from_raw_os_error(number), is_root);
            assert_eq!(error.told(), hint, "{error}");
            assert!(error.to_string().starts_with("/mnt: "), "{error}");
        }
    }
}
