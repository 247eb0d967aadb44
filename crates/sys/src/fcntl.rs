//! fcntl(2) requests that rustix lacks.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Result, check};

/// Who is told of events on a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// `F_OWNER_TID` 0, `F_OWNER_PID` 1 or `F_OWNER_PGRP` 2.
    pub pid_type: u32,
    /// Its id, 0 for nobody.
    pub pid: i32,
    /// The signal, 0 for `SIGIO`.
    pub signal: i32,
    /// Real user whose rights to signal are used.
    pub uid: u32,
    /// Effective user whose rights to signal are used.
    pub euid: u32,
}

#[repr(C)]
#[derive(Default)]
struct OwnerEx {
    kind: i32,
    pid: i32,
}

/// Reads the owner, of `struct f_owner_ex`.
pub const F_GETOWN_EX: i32 = 16;
const F_SETOWN_EX: i32 = 15;
/// Reads the signal.
pub const F_GETSIG: i32 = 11;
/// Sets the signal.
pub const F_SETSIG: i32 = 10;
const F_GETOWNER_UIDS: i32 = 17;

/// Reads the owner of a file (`F_GETOWN_EX`, `F_GETSIG`, `F_GETOWNER_UIDS`).
///
/// # Errors
/// `EBADF` for `O_PATH` descriptors.
pub fn owner(file: impl AsFd) -> Result<Owner> {
    let fd = file.as_fd().as_raw_fd();
    let mut ex = OwnerEx::default();
    // SAFETY: `ex` is a struct f_owner_ex that the call fills.
    check(unsafe { libc::fcntl(fd, F_GETOWN_EX, &raw mut ex) })?;
    // SAFETY: takes no argument.
    let signal = check(unsafe { libc::fcntl(fd, F_GETSIG) })?;
    let mut uids = [0u32; 2];
    // SAFETY: the call fills two uid_t.
    check(unsafe { libc::fcntl(fd, F_GETOWNER_UIDS, uids.as_mut_ptr()) })?;
    Ok(Owner {
        pid_type: ex.kind.cast_unsigned(),
        pid: ex.pid,
        signal,
        uid: uids[0],
        euid: uids[1],
    })
}

/// Sets the owner and the signal. The users are those of the calling thread.
///
/// # Errors
/// `ESRCH` if there is no such task.
pub fn set_owner(file: impl AsFd, owner: &Owner) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    let ex = OwnerEx { kind: owner.pid_type.cast_signed(), pid: owner.pid };
    // SAFETY: `ex` is a struct f_owner_ex that the call reads.
    check(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const ex) })?;
    // SAFETY: takes a number.
    check(unsafe { libc::fcntl(fd, F_SETSIG, owner.signal) }).map(drop)
}
