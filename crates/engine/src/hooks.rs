//! How the engine talks back to its caller while it works.

use std::os::fd::OwnedFd;

use crate::Result;
use crate::external::External;

/// A point of a dump or restore at which the caller has a say.
#[derive(Debug)]
pub enum Event {
    /// Before anything is stopped.
    PreDump,
    /// The images are complete; the tasks are still stopped, if they did not run on while their
    /// memory was copied (`Options::cow`).
    PostDump,
    /// The network of the tree must now hold still.
    NetworkLock,
    /// The network may go on.
    NetworkUnlock,
    /// The root task has just been made, with its new namespaces.
    SetupNamespaces {
        /// The root task, in the caller's pid namespace.
        pid: i32,
    },
    /// The namespaces have been filled.
    PostSetupNamespaces,
    /// Before anything is made.
    PreRestore,
    /// Everything is restored; an error now still undoes the restore.
    PostRestore {
        /// The root task, in the caller's pid namespace.
        pid: i32,
    },
    /// The tasks wait for their last push; the callee may no longer fail.
    PreResume {
        /// The root task, in the caller's pid namespace.
        pid: i32,
    },
    /// The tasks run.
    PostResume {
        /// The root task, in the caller's pid namespace.
        pid: i32,
    },
    /// The images of a lazy dump are complete, and it listens for the restore.
    StatusReady {
        /// The port, unless the connection is there already.
        port: Option<u16>,
    },
    /// The master of a terminal whose master is outside of the tree.
    OrphanPtsMaster(OwnedFd),
}

impl Event {
    /// The name of the event in CRIU's interfaces.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::PreDump => "pre-dump",
            Self::PostDump => "post-dump",
            Self::NetworkLock => "network-lock",
            Self::NetworkUnlock => "network-unlock",
            Self::SetupNamespaces { .. } => "setup-namespaces",
            Self::PostSetupNamespaces => "post-setup-namespaces",
            Self::PreRestore => "pre-restore",
            Self::PostRestore { .. } => "post-restore",
            Self::PreResume { .. } => "pre-resume",
            Self::PostResume { .. } => "post-resume",
            Self::StatusReady { .. } => "status-ready",
            Self::OrphanPtsMaster(_) => "orphan-pts-master",
        }
    }

    /// The root task that the event is about, if it is about one.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        match self {
            Self::SetupNamespaces { pid }
            | Self::PostRestore { pid }
            | Self::PreResume { pid }
            | Self::PostResume { pid } => Some(*pid),
            _ => None,
        }
    }
}

/// The caller's side of a dump or restore: action scripts, RPC notifications, the
/// progress bar.
pub trait Hooks {
    /// Something happened; an error stops the operation where it still can.
    ///
    /// # Errors
    /// [`Error::Hook`](crate::Error::Hook), if the caller does not want to go on.
    fn notify(&mut self, event: Event) -> Result<()>;

    /// The tree is stopped: which of its resources does the caller also take care
    /// of (the RPC's `query-ext-files`)?
    ///
    /// # Errors
    /// [`Error::Hook`](crate::Error::Hook), if the caller does not want to go on.
    fn query_external(&mut self) -> Result<Vec<External>> {
        Ok(Vec::new())
    }

    /// `done` of `total` bytes of memory have been written or read.
    fn progress(&mut self, _done: u64, _total: u64) {}
}

/// Nobody listens.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoHooks;

impl Hooks for NoHooks {
    fn notify(&mut self, _event: Event) -> Result<()> {
        Ok(())
    }
}
