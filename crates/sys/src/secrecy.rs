//! Keeps what is in this process's memory from disks and from other processes.

use rustix::mm::MlockAllFlags;
use rustix::process::DumpableBehavior;

use crate::Result;

/// Keeps all memory of this process, present and future, out of swap and core dumps, and
/// from processes without `CAP_SYS_PTRACE`. Neither is passed on to children: the first
/// ends with `fork(2)`, the second with `execve(2)`.
///
/// # Errors
/// If more is in use than `RLIMIT_MEMLOCK` and the lack of `CAP_IPC_LOCK` allow; other
/// processes are kept away nevertheless.
pub fn protect() -> Result<()> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Pages count when they are touched: stacks and arenas reserve far more than they use.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(rustix::mm::mlockall(flags)?)
}
