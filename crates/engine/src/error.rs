//! What can go wrong in the engine, worded for the person who reads the log.

use std::io;

use torpor_policy::Violation;

/// The result of an engine operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a dump or a restore ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A task ended while it was being worked on; not an error of Torpor's.
    #[error("task {pid} is gone")]
    Gone {
        /// The task, in the pid namespace of the caller.
        pid: i32,
    },
    /// The dump met something that it cannot keep, or may not without an option.
    #[error("task {pid}: {object}: {reason}")]
    Refused {
        /// The task that holds the object, in the pid namespace of the caller.
        pid: i32,
        /// What was met, e.g. `fd 5 (/dev/kvm)`.
        object: String,
        /// Why it cannot be kept; what to do about it, after a semicolon.
        reason: String,
    },
    /// The kernel refused an operation.
    #[error("{what}: {source}")]
    Os {
        /// The operation and its object, e.g. `open /tmp/x`.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An image file is missing, damaged or not an image.
    #[error(transparent)]
    Image(#[from] torpor_images::Error),
    /// The process that reads images ([`crate::reader`]) could not: the same, in its words.
    #[error("{0}")]
    Unreadable(String),
    /// The images decode, but contradict each other or this machine.
    #[error("{image}: {reason}")]
    Invalid {
        /// The image file.
        image: String,
        /// The contradiction.
        reason: String,
    },
    /// A sealed checkpoint could not be made.
    #[error(transparent)]
    Seal(#[from] torpor_seal::Error),
    /// A key, a certificate or a signature is missing or wrong.
    #[error(transparent)]
    Keys(#[from] torpor_seal::keys::KeyError),
    /// A step on a stopped task failed.
    #[error(transparent)]
    Tracee(#[from] torpor_tracee::Error),
    /// An option or a feature that this build does not have.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A helper program (ip, nft …) failed.
    #[error("{program} failed: {reason}")]
    Program {
        /// The program and its arguments.
        program: String,
        /// Its exit status and the last line it printed.
        reason: String,
    },
    /// The images ask for what the policy does not allow.
    #[error("{}", forbidden(.violations, .allowing))]
    Forbidden {
        /// What.
        violations: Vec<Violation>,
        /// Lines of a policy file with which it would.
        allowing: Vec<String>,
    },
    /// The caller's hooks (action scripts, RPC notifications) asked to stop.
    #[error("{0}")]
    Hook(String),
    /// Another process that this one works with (a page server, a pager, the dump or the restore at
    /// the other end) has ended or failed.
    #[error("{0}")]
    Peer(String),
    /// Such a process says what makes no sense, or is not the one that it has to be.
    #[error("{0}")]
    Protocol(String),
    /// An option is missing that another one needs, or does not fit what there is.
    #[error("{0}")]
    Usage(String),
    /// A thread of this process has panicked, or was asked for what it must not be.
    #[error("{0}; this is a bug of Torpor")]
    Bug(String),
}

impl From<torpor_policy::collect::Error> for Error {
    fn from(error: torpor_policy::collect::Error) -> Self {
        match error {
            torpor_policy::collect::Error::Image(error) => error.into(),
            torpor_policy::collect::Error::Invalid { image, reason } => {
                Error::Invalid { image, reason }
            }
        }
    }
}

impl From<torpor_kernel::Error> for Error {
    fn from(error: torpor_kernel::Error) -> Self {
        match error {
            torpor_kernel::Error::Gone { pid } => Error::Gone { pid },
            torpor_kernel::Error::Os { what, source } => Error::Os { what, source },
            torpor_kernel::Error::Invalid { what, reason } => Error::invalid(what, reason),
            bug @ torpor_kernel::Error::Panicked(_) => Error::Bug(bug.to_string()),
        }
    }
}

/// What is between the reason of a refusal and what to do about it.
pub const ADVICE: &str = "; ";
/// How many violations an error names; all are in an audit.
const MOST: usize = 100;
/// Bytes of the longest line of a policy that an error has.
const LONGEST: usize = 1000;

fn forbidden(all: &[Violation], allowing: &[String]) -> String {
    let mut text = "the policy does not allow what the images ask for:".to_owned();
    all.iter().take(MOST).for_each(|violation| text += &format!("\n  {violation}"));
    if let more @ 1.. = all.len().saturating_sub(MOST) {
        text += &format!("\n  and {more} more");
    }
    for line in allowing.iter().filter(|line| line.len() <= LONGEST) {
        text += &format!("\n  a policy would allow it by: {line}");
    }
    text
}

impl Error {
    /// The dump refuses `object` of task `pid`.
    pub fn refused(pid: i32, object: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Refused { pid, object: object.into(), reason: reason.into() }
    }

    /// What to do about a refusal: its last words.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        let Error::Refused { reason, .. } = self else { return None };
        reason.rsplit_once(ADVICE).map(|(_, advice)| advice)
    }

    /// The content of `image` is contradictory.
    pub fn invalid(image: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Invalid { image: image.into(), reason: reason.into() }
    }

    /// Whether the kernel says that the rights are missing.
    pub(crate) fn is_denial(&self) -> bool {
        matches!(self, Error::Os { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Adds the operation to an error of the kernel.
pub trait Context<T> {
    /// Names the operation, lazily.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::Os { what: what(), source: e.into() })
    }
}

/// Adds what an operation was done to, where its own words do not say it.
pub(crate) trait About<T> {
    /// Names the object, lazily.
    fn about(self, object: impl FnOnce() -> String) -> Result<T>;
}

impl<T> About<T> for Result<T> {
    fn about(self, object: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| match error {
            Error::Os { what, source } => {
                Error::Os { what: format!("{}: {what}", object()), source }
            }
            other => other,
        })
    }
}
