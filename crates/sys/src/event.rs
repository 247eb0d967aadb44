//! Descriptors for signals, timers and file system events, as far as rustix lacks them.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::{Result, addr, check, syscall};

/// Makes a signalfd for a set of signals in the kernel's encoding: bit `n - 1` is
/// signal `n` (signalfd(2)).
///
/// # Errors
/// `EINVAL` for flags other than `SFD_CLOEXEC` and `SFD_NONBLOCK`.
pub fn signalfd(mask: u64, flags: i32) -> Result<OwnedFd> {
    let args = [u64::MAX, addr(&raw const mask), 8, u64::from(flags.cast_unsigned()), 0, 0];
    // SAFETY: `mask` is a kernel signal set of the given 8 bytes, which the call reads.
    let fd = unsafe { syscall(libc::SYS_signalfd4, args) }?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(libc::c_int::try_from(fd).unwrap_or(-1)) })
}

/// `TFD_IOC_SET_TICKS`: `_IOW('T', 0, __u64)`.
pub const TFD_IOC_SET_TICKS: libc::Ioctl = 0x4008_5400;

/// Sets the number of expirations that a timerfd has not reported yet. Arming the
/// timer clears them, so this comes after it.
///
/// # Errors
/// `EINVAL` for 0; `ENOTTY` on kernels without `CONFIG_CHECKPOINT_RESTORE`.
pub fn timerfd_set_ticks(timer: impl AsFd, ticks: u64) -> Result<()> {
    let fd = timer.as_fd().as_raw_fd();
    // SAFETY: the request reads one u64.
    check(unsafe { libc::ioctl(fd, TFD_IOC_SET_TICKS, &raw const ticks) }).map(drop)
}

/// `INOTIFY_IOC_SETNEXTWD`: `_IOW('I', 0, __s32)`; the number itself is the argument.
const INOTIFY_IOC_SETNEXTWD: libc::Ioctl = 0x4004_4900;

/// Chooses the number of the next watch of an inotify descriptor.
///
/// # Errors
/// `EINVAL` for numbers below 1; `ENOTTY` on kernels without
/// `CONFIG_CHECKPOINT_RESTORE`.
pub fn inotify_set_next_wd(inotify: impl AsFd, wd: i32) -> Result<()> {
    let fd = inotify.as_fd().as_raw_fd();
    // SAFETY: the request takes a number, no pointer.
    check(unsafe { libc::ioctl(fd, INOTIFY_IOC_SETNEXTWD, wd) }).map(drop)
}
