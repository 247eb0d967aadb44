//! What an operation costs this process besides time.

use torpor_kernel::proc;
use torpor_sys::heap;

/// How often this process did what is dear, until some moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    /// Allocations of memory, if they are counted.
    pub allocations: Option<u64>,
    /// Files, links and directories of tasks in procfs that were read or opened.
    pub procfs_reads: u64,
    /// Stops of tasks that were waited for: those of a freeze, and the end of each batch.
    pub stops: u64,
}

impl Effort {
    /// Until now.
    pub(crate) fn now() -> Self {
        Effort {
            allocations: heap::allocations(),
            procfs_reads: proc::reads(),
            stops: torpor_tracee::stops(),
        }
    }

    /// What there was since this moment.
    pub(crate) fn since(self) -> Self {
        let now = Self::now();
        let allocations = now.allocations.zip(self.allocations);
        Effort {
            allocations: allocations.map(|(now, then)| now.saturating_sub(then)),
            procfs_reads: now.procfs_reads.saturating_sub(self.procfs_reads),
            stops: now.stops.saturating_sub(self.stops),
        }
    }
}
