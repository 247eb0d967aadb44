//! userfaultfd(2), in two ways of our own. It tracks changes: asynchronous write-protection, which
//! the kernel takes off by itself at the first write, with nobody to be asked. And it
//! lets pages be brought in when they are touched, of memory that changes meanwhile. Those of
//! programs are made again, in whatever way they use it.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, check};

/// `UFFD_USER_MODE_ONLY`: a userfaultfd that needs no privilege.
pub const USER_MODE_ONLY: u64 = 1;
/// `UFFD_API`.
pub const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_UNPOPULATED`: anonymous memory can be tracked with pte markers.
pub const WP_UNPOPULATED: u64 = 1 << 13;
/// `UFFD_FEATURE_WP_ASYNC` (Linux 6.7).
pub const WP_ASYNC: u64 = 1 << 15;
/// `UFFD_FEATURE_EVENT_FORK`: a fork waits until its event was read.
pub const EVENT_FORK: u64 = 1 << 1;
/// `UFFD_FEATURE_EVENT_REMAP`.
pub const EVENT_REMAP: u64 = 1 << 2;
/// `UFFD_FEATURE_EVENT_REMOVE`.
pub const EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_FEATURE_EVENT_UNMAP`.
pub const EVENT_UNMAP: u64 = 1 << 6;
/// `UFFDIO_REGISTER_MODE_MISSING`.
pub const MODE_MISSING: u64 = 1 << 0;
/// `UFFDIO_REGISTER_MODE_WP`.
pub const MODE_WP: u64 = 1 << 1;
/// `UFFDIO_REGISTER_MODE_MINOR`.
pub const MODE_MINOR: u64 = 1 << 2;

/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
pub const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xAA, 0x00, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xAA, 0x01, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
/// `_IOR(0xAA, 0x02, struct uffdio_range)`.
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
/// `_IOWR(0xAA, 0x03, struct uffdio_copy)`.
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
/// `UFFDIO_COPY_MODE_DONTWAKE`: nobody who waits for the pages is woken.
const UFFDIO_COPY_MODE_DONTWAKE: u64 = 1;
/// `_IOWR(0xAA, 0x04, struct uffdio_zeropage)`.
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `_IOWR(0xAA, 0x06, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
/// `UFFDIO_WRITEPROTECT_MODE_WP`: protect, in place of unprotecting.
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;
/// `_IOWR(0xAA, 0x08, struct uffdio_poison)`.
const UFFDIO_POISON: libc::c_ulong = 0xc020_aa08;

/// Prepares a new userfaultfd for use, with the `UFFD_FEATURE_*` that it is to have.
///
/// # Errors
/// `EINVAL` on kernels without one of them; `EPERM` for some without `CAP_SYS_PTRACE`.
pub fn enable(uffd: BorrowedFd<'_>, features: u64) -> Result<()> {
    let mut api: [u64; 3] = [API, features, 0];
    // SAFETY: `api` has the three words of a uffdio_api, valid for reads and writes.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }).map(drop)
}

/// Prepares a new userfaultfd for asynchronous write-protection.
///
/// # Errors
/// `EINVAL` on kernels without it.
pub fn enable_tracking(uffd: BorrowedFd<'_>) -> Result<()> {
    enable(uffd, WP_UNPOPULATED | WP_ASYNC)
}

/// Prepares a new userfaultfd that only marks mappings, by [`register`]: without features, so that
/// what is moved, or mapped anew, and the memory of children is not registered.
///
/// # Errors
/// `EINVAL` if this kernel does not mark asynchronously (before Linux 6.7).
pub fn enable_marking(uffd: BorrowedFd<'_>) -> Result<()> {
    enable(uffd, 0)
}

/// What a task did to memory that is registered with [`register_missing`].
#[derive(Debug)]
pub enum Event {
    /// It waits for the page at this address.
    Fault(u64),
    /// It forked: this is the userfaultfd of the child's address space.
    Fork(OwnedFd),
    /// It moved memory (mremap(2)).
    Remap {
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
        /// How much.
        len: u64,
    },
    /// It dropped pages or mappings, from the first address to before the second: what
    /// is there, if anything, is zero.
    Drop(u64, u64),
}

/// Prepares a new userfaultfd for pages that are brought in: forks, moves and drops are
/// told of.
///
/// # Errors
/// `EPERM` without `CAP_SYS_PTRACE`; `EINVAL` on kernels without it.
pub fn enable_paging(uffd: BorrowedFd<'_>) -> Result<()> {
    enable(uffd, EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP)
}

/// From now on whoever touches a page of whole mappings that is not there waits for
/// [`copy`] or [`zero`].
///
/// # Errors
/// As [`register`].
pub fn register_missing(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    register_for(uffd, start, len, MODE_MISSING)
}

/// Lets pages of whole mappings be write-protected, in the address space that `uffd` was
/// made in, whoever calls. Again for what is registered already is no error.
///
/// # Errors
/// `EBUSY` if another userfaultfd has them; `EINVAL`, `EPERM` for what cannot be
/// tracked; `ESRCH` if the address space is gone.
pub fn register(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    register_for(uffd, start, len, MODE_WP)
}

/// Registers whole mappings for the faults that `mode` says (`MODE_*`).
///
/// # Errors
/// As [`register`].
pub fn register_for(uffd: BorrowedFd<'_>, start: u64, len: u64, mode: u64) -> Result<()> {
    let mut register: [u64; 4] = [start, len, mode, 0];
    // SAFETY: `register` has the four words of a uffdio_register, valid for reads and writes.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, register.as_mut_ptr()) };
    check(done).map(drop)
}

/// Takes [`register`] back.
///
/// # Errors
/// `EINVAL` for a range that is not one of mappings.
pub fn unregister(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let range: [u64; 2] = [start, len];
    // SAFETY: `range` has the two words of a uffdio_range, which the call reads.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, range.as_ptr()) }).map(drop)
}

/// Puts pages in place at `to`, all in one mapping, and wakes the threads that wait for them,
/// unless that is left to [`wake`]. Returns how many bytes went in before something was in the way,
/// at least a page.
///
/// # Errors
/// `EAGAIN` if there are events to be read first; `EEXIST` if the first page is there
/// already; `ENOENT` if no one mapping that is registered has all of it; `ESRCH` if the
/// address space is gone.
pub fn copy(uffd: BorrowedFd<'_>, to: u64, pages: &[u8], wakes: bool) -> Result<usize> {
    let mode = if wakes { 0 } else { UFFDIO_COPY_MODE_DONTWAKE };
    let mut copy: [u64; 5] =
        [to, pages.as_ptr().expose_provenance() as u64, pages.len() as u64, mode, 0];
    // SAFETY: `copy` has the five words of a uffdio_copy, valid for reads and writes; the
    // source is `pages`, in its length. The target is in the address space of the
    // userfaultfd: pages that were not there before, which no reference here can be to.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, copy.as_mut_ptr()) };
    moved(done, copy[4], pages.len())
}

/// As [`copy`], with pages of zeros.
///
/// # Errors
/// As [`copy`].
pub fn zero(uffd: BorrowedFd<'_>, at: u64, len: usize) -> Result<usize> {
    let mut zero: [u64; 4] = [at, len as u64, 0, 0];
    // SAFETY: `zero` has the four words of a uffdio_zeropage, valid for reads and writes;
    // for the target see `copy`.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_ZEROPAGE, zero.as_mut_ptr()) };
    moved(done, zero[3], len)
}

/// Write-protects the pages of a range that is registered for that.
///
/// # Errors
/// `ENOENT` if it is not; `EAGAIN` if there are events to be read first.
pub fn protect(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let mut protect: [u64; 3] = [start, len, UFFDIO_WRITEPROTECT_MODE_WP];
    // SAFETY: `protect` has the three words of a uffdio_writeprotect, valid for reads and writes.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, protect.as_mut_ptr()) })
        .map(drop)
}

/// Marks pages that are not there: whoever touches them gets `SIGBUS`.
///
/// # Errors
/// `EINVAL` on kernels without it (Linux 6.6); `EEXIST` if there is a page.
pub fn poison(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let mut poison: [u64; 4] = [start, len, 0, 0];
    // SAFETY: `poison` has the four words of a uffdio_poison, valid for reads and writes.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_POISON, poison.as_mut_ptr()) }).map(drop)
}

/// What a call did: it fails with `EAGAIN` also when it did a part.
fn moved(result: libc::c_int, bytes: u64, len: usize) -> Result<usize> {
    match check(result) {
        Ok(_) => Ok(len),
        Err(error) => match usize::try_from(bytes) {
            Ok(part) if part > 0 && part <= len => Ok(part),
            _ => Err(error),
        },
    }
}

/// Wakes the threads that wait for pages that are there by now.
///
/// # Errors
/// `EINVAL` for a range that is not one of pages.
pub fn wake(uffd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    let range: [u64; 2] = [start, len];
    // SAFETY: `range` has the two words of a uffdio_range, which the call reads.
    check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, range.as_ptr()) }).map(drop)
}

/// Whether the address space of a userfaultfd is gone.
#[must_use]
pub fn is_gone(uffd: BorrowedFd<'_>) -> bool {
    // The last page: the kernel leaves it alone, and no mapping that could be registered
    // ever has it.
    const LAST: u64 = (1 << 47) - 2 * 4096;
    zero(uffd, LAST, 4096).is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

/// Bytes of a `struct uffd_msg`.
const MESSAGE: usize = 32;
/// How many events are read at once: where fewer are, there were no more.
pub const EVENTS: usize = 64;

/// Reads what has happened; `EAGAIN` if nothing has and the descriptor does not block.
///
/// # Errors
/// See read(2).
pub fn events(uffd: BorrowedFd<'_>) -> Result<Vec<Event>> {
    let mut messages = [0; EVENTS * MESSAGE];
    let len = rustix::io::read(uffd, &mut messages)?;
    Ok(messages[..len].chunks_exact(MESSAGE).filter_map(event).collect())
}

/// What a message says; nothing if it is one that was not asked for.
fn event(message: &[u8]) -> Option<Event> {
    let word = |at: usize| {
        let bytes = message.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    };
    match message.first() {
        Some(0x12) => Some(Event::Fault(word(16))),
        Some(0x13) => {
            let number = libc::c_int::try_from(word(8) & 0xffff_ffff).unwrap_or(-1);
            // SAFETY: the kernel has just opened this descriptor for the reader of the
            // message, which is read once.
            Some(Event::Fork(unsafe { OwnedFd::from_raw_fd(number) }))
        }
        Some(0x14) => Some(Event::Remap { from: word(8), to: word(16), len: word(24) }),
        Some(0x15 | 0x16) => Some(Event::Drop(word(8), word(16))),
        _ => None,
    }
}
