//! userfaultfd(2), as far as it tracks changes: asynchronous write-protection, which
//! the kernel takes off by itself at the first write, with nobody to be asked.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, check};

/// `UFFD_USER_MODE_ONLY`: a userfaultfd that needs no privilege.
pub const USER_MODE_ONLY: u64 = 1;
/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_UNPOPULATED`: anonymous memory can be tracked with pte markers.
const WP_UNPOPULATED: u64 = 1 << 13;
/// `UFFD_FEATURE_WP_ASYNC` (Linux 6.7).
const WP_ASYNC: u64 = 1 << 15;
/// `UFFDIO_REGISTER_MODE_WP`.
const MODE_WP: u64 = 1 << 1;

/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xAA, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xAA, 0x01, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;

/// Prepares a new userfaultfd for asynchronous write-protection.
///
/// # Errors
/// `EINVAL` on kernels without it.
pub fn enable_tracking(uffd: BorrowedFd<'_>) -> Result<()> {
    let mut api: [u64; 3] = [API, WP_UNPOPULATED | WP_ASYNC, 0];
    // SAFETY: `api` has the three words of a uffdio_api, valid for reads and writes.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }).map(drop)
}

/// Lets pages of whole mappings be write-protected, in the address space that `uffd` was
/// made in, whoever calls. Again for what is registered already is no error.
///
/// # Errors
/// `EBUSY` if another userfaultfd has them; `EINVAL`, `EPERM` for what cannot be
/// tracked; `ESRCH` if the address space is gone.
pub fn register(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let mut register: [u64; 4] = [start, len, MODE_WP, 0];
    // SAFETY: `register` has the four words of a uffdio_register, valid for reads and writes.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, register.as_mut_ptr()) };
    check(done).map(drop)
}

/// Takes [`register`] back.
///
/// # Errors
/// The kernel's.
pub fn unregister(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let range: [u64; 2] = [start, len];
    // SAFETY: `range` has the two words of a uffdio_range, which the call reads.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, range.as_ptr()) }).map(drop)
}
