//! Namespaces.

use crate::{Result, check};

/// Stops sharing cwd, root and umask with the other threads of this process, so
/// that this thread may enter a mount namespace (unshare(2), `CLONE_FS`).
///
/// # Errors
/// See unshare(2).
pub fn unshare_fs() -> Result<()> {
    // SAFETY: CLONE_FS only copies the thread's file system context; no memory and
    // no descriptor that Rust code relies on changes.
    check(unsafe { libc::unshare(libc::CLONE_FS) }).map(drop)
}

/// Moves this thread into new namespaces (unshare(2)).
///
/// # Errors
/// See unshare(2); `EINVAL` for flags other than `CLONE_NEW*`.
pub fn unshare_namespaces(flags: i32) -> Result<()> {
    const NEW: i32 = libc::CLONE_NEWNS
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWPID;
    if flags & !NEW != 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the flags are namespaces only (checked above), which change what the
    // thread sees by name, not its memory or descriptors.
    check(unsafe { libc::unshare(flags) }).map(drop)
}
