//! What can go wrong when the kernel is asked.

use std::io;

/// The result of a question to the kernel.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the kernel did not answer, or not so that it can be understood.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The task that was asked about has ended.
    #[error("task {pid} is gone")]
    Gone {
        /// The task, in the pid namespace of the caller.
        pid: i32,
    },
    /// The kernel refused an operation.
    #[error("{what}: {source}")]
    Os {
        /// The operation and its object, e.g. `open /proc/1/ns/net`.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The answer makes no sense.
    #[error("{what}: {reason}")]
    Invalid {
        /// What was read.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A thread that asked has panicked: a bug.
    #[error("{0} panicked")]
    Panicked(&'static str),
}

impl Error {
    /// The answer `what` makes no sense.
    pub fn invalid(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Invalid { what: what.into(), reason: reason.into() }
    }
}

/// Adds the operation to an error of the kernel.
pub trait Context<T> {
    /// Names the operation, lazily.
    ///
    /// # Errors
    /// The error, with that name.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::Os { what: what(), source: e.into() })
    }
}
