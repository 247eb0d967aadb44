//! Mounts: what rustix lacks of the kernel's mount calls.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, addr, syscall};

/// Changes to a mount, see mount_setattr(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountAttributes {
    /// `MOUNT_ATTR_*` to set.
    pub set: u64,
    /// `MOUNT_ATTR_*` to clear; applied before `set`.
    pub clear: u64,
    /// One of `MS_PRIVATE`, `MS_SHARED`, `MS_SLAVE`, `MS_UNBINDABLE`; 0 for no change.
    pub propagation: u64,
}

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Changes the mount whose root directory `mount` refers to, and all mounts below
/// it if `recursive`.
///
/// # Errors
/// See mount_setattr(2); `EINVAL` if it is in another mount namespace.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    recursive: bool,
    attributes: MountAttributes,
) -> Result<()> {
    let attr = MountAttr {
        set: attributes.set,
        clear: attributes.clear,
        propagation: attributes.propagation,
        userns_fd: 0,
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    let args = [
        u64::from(mount.as_raw_fd().cast_unsigned()),
        addr(c"".as_ptr()),
        u64::from(flags.cast_unsigned()),
        addr(&raw const attr),
        size_of::<MountAttr>() as u64,
        0,
    ];
    // SAFETY: a NUL-terminated path and a structure of the given size, both only read.
    unsafe { syscall(libc::SYS_mount_setattr, args) }.map(drop)
}
