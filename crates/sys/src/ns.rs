//! Namespaces.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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

/// Makes the children that this thread will have live in a new time namespace
/// (unshare(2), time_namespaces(7)).
///
/// # Errors
/// See unshare(2).
pub fn unshare_time() -> Result<()> {
    // SAFETY: takes a number; only what children will see changes.
    check(unsafe { libc::unshare(libc::CLONE_NEWTIME) }).map(drop)
}

/// The user namespace that owns a namespace (ioctl_nsfs(2), `NS_GET_USERNS`): that directly above a
/// user namespace.
///
/// # Errors
/// `EPERM` if it is outside of the caller's own user namespace.
pub fn owner(namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    // _IO(0xb7, 1) of linux/nsfs.h.
    // SAFETY: the request has no argument; it returns a new descriptor.
    let fd = check(unsafe { libc::ioctl(namespace.as_raw_fd(), libc::NS_GET_USERNS) })?;
    // SAFETY: the kernel has just made `fd` for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The kind of a namespace, its `CLONE_NEW*` flag (ioctl_nsfs(2), `NS_GET_NSTYPE`).
///
/// # Errors
/// `ENOTTY` if the file is that of no namespace.
pub fn kind(namespace: BorrowedFd<'_>) -> Result<i32> {
    // _IO(0xb7, 3) of linux/nsfs.h.
    // SAFETY: the request has no argument; it returns a number.
    check(unsafe { libc::ioctl(namespace.as_raw_fd(), libc::NS_GET_NSTYPE) })
}

/// The user who has made a user namespace, by the id that the caller has for it (ioctl_nsfs(2),
/// `NS_GET_OWNER_UID`).
///
/// # Errors
/// `EINVAL` if it is no user namespace.
pub fn maker(namespace: BorrowedFd<'_>) -> Result<u32> {
    // _IO(0xb7, 4) of linux/nsfs.h.
    let mut id = 0u32;
    // SAFETY: the request writes one uid_t, for which `id` has room.
    check(unsafe { libc::ioctl(namespace.as_raw_fd(), libc::NS_GET_OWNER_UID, &raw mut id) })?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_namespace_has_a_kind() {
        for (file, flag) in [("net", libc::CLONE_NEWNET), ("user", libc::CLONE_NEWUSER)] {
            let space = std::fs::File::open(format!("/proc/self/ns/{file}")).unwrap();
            assert_eq!(kind(space.as_fd()).unwrap(), flag);
        }
        let other = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(kind(other.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }

    #[test]
    fn this_mount_namespace_has_an_owner() {
        let mnt = std::fs::File::open("/proc/self/ns/mnt").unwrap();
        let owner = std::fs::File::from(owner(mnt.as_fd()).unwrap());
        let user = std::fs::metadata("/proc/self/ns/user").unwrap();
        assert_eq!(owner.metadata().unwrap().ino(), user.ino());
    }
}
