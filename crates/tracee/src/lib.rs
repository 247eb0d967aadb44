//! Stopped tasks: a safe interface to run system calls inside them.
//!
//! A [`Tracee`] is a thread that is stopped under ptrace and whose own state is
//! kept aside. [`Tracee::batch`] collects system calls and runs them inside the
//! task in one go, through a *stub*: a region with a few dozen bytes of code that
//! works through an array of records. A task whose tracer dies at any moment
//! finishes its batch and goes on from where it was, because whatever it is made
//! to execute ends in `rt_sigreturn` to its own registers.

#![warn(unreachable_pub)]

mod batch;
mod discard;
mod frame;
mod husk;
mod inject;
mod job;
mod leftover;
mod lone;
mod maps;
mod restart;
mod rseq;
mod stop;
mod stub;
pub mod syscall;
mod template;
mod twin;

pub use batch::{Batch, Call, Outcome, Slot};
pub use husk::Birth;
pub use leftover::remove_leftover;
pub use lone::call_once;
pub use maps::{Mapping, parse_maps};
pub use stop::{StopState, Tracee, stops};
pub use stub::{SIDE_BY_SIDE, STUB_SIZE, stub_place};

/// Why a step on a tracee failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The task ended (or was killed) meanwhile.
    #[error("task {pid} is gone")]
    Gone {
        /// Its thread id here.
        pid: i32,
    },
    /// ptrace or the access to its memory failed.
    #[error("task {pid}: {what}: {source}")]
    Os {
        /// Its thread id here.
        pid: i32,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A system call inside the task failed.
    #[error("task {pid}: {what} inside the task: {source}")]
    Remote {
        /// Its thread id here.
        pid: i32,
        /// The call.
        what: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The task is in a state in which nothing can be run inside it.
    #[error("task {pid}: {reason}")]
    Unusable {
        /// Its thread id here.
        pid: i32,
        /// What is in the way.
        reason: String,
    },
}

/// The result of a step on a tracee.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wraps the answer of the kernel; `ESRCH` means that the task is gone.
    fn os(pid: i32, what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
        move |source| match source.raw_os_error() {
            Some(libc::ESRCH) => Error::Gone { pid },
            _ => Error::Os { pid, what, source },
        }
    }
}

/// An address inside another task; never to be dereferenced here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RemoteAddr(pub u64);
