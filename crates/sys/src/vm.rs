//! The memory of another process.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, addr, check};

/// Reads `buf.len()` bytes at `address` of process `pid` (process_vm_readv(2)).
///
/// # Errors
/// `EFAULT` when nothing there is readable; a short count when only the head is.
pub fn read(pid: i32, address: u64, buf: &mut [u8]) -> Result<usize> {
    let local = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: buf.len() };
    // SAFETY: `local` covers `buf`, which is borrowed for writing; the remote
    // address is checked by the kernel against the other address space.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    check(n).map(isize::cast_unsigned)
}

/// Reads several remote ranges into one buffer, one after the other.
///
/// # Errors
/// As [`read`].
pub fn read_ranges(pid: i32, ranges: &[(u64, usize)], buf: &mut [u8]) -> Result<usize> {
    let remote: Vec<libc::iovec> = ranges
        .iter()
        .map(|&(a, len)| libc::iovec { iov_base: a as *mut _, iov_len: len })
        .collect();
    let local = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: as in `read`; `remote` lives until the call returns.
    let n = unsafe {
        libc::process_vm_readv(
            pid,
            &raw const local,
            1,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    check(n).map(isize::cast_unsigned)
}

/// Writes `buf` at `address` of process `pid` (process_vm_writev(2)).
///
/// # Errors
/// `EFAULT` when nothing there is writable; a short count when only the head is.
pub fn write(pid: i32, address: u64, buf: &[u8]) -> Result<usize> {
    let local = libc::iovec { iov_base: buf.as_ptr().cast_mut().cast(), iov_len: buf.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: buf.len() };
    // SAFETY: `local` covers `buf` and is only read from; the remote address is
    // checked by the kernel against the other address space.
    let n = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    check(n).map(isize::cast_unsigned)
}

/// Reads several places: addresses, and where what is there goes.
///
/// # Errors
/// As [`read`].
pub fn read_parts(pid: i32, parts: &mut [(u64, &mut [u8])]) -> Result<usize> {
    let remote: Vec<_> = parts.iter().map(|(at, buf)| iovec(*at as *mut u8, buf.len())).collect();
    let local: Vec<_> =
        parts.iter_mut().map(|(_, buf)| iovec(buf.as_mut_ptr(), buf.len())).collect();
    let count = parts.len() as libc::c_ulong;
    // SAFETY: each of `local` covers a buffer that is borrowed for writing; the remote
    // addresses are checked by the kernel against the other address space.
    let n =
        unsafe { libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) };
    check(n).map(isize::cast_unsigned)
}

/// Writes several places: addresses, and what goes there.
///
/// # Errors
/// As [`write()`].
pub fn write_parts(pid: i32, parts: &[(u64, &[u8])]) -> Result<usize> {
    let remote: Vec<_> = parts.iter().map(|(at, buf)| iovec(*at as *mut u8, buf.len())).collect();
    let local: Vec<_> =
        parts.iter().map(|(_, buf)| iovec(buf.as_ptr().cast_mut(), buf.len())).collect();
    let count = parts.len() as libc::c_ulong;
    // SAFETY: each of `local` covers a buffer, which is only read from; the remote
    // addresses are checked by the kernel against the other address space.
    let n =
        unsafe { libc::process_vm_writev(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) };
    check(n).map(isize::cast_unsigned)
}

fn iovec(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

/// Advice of madvise(2): touching the pages is an error (Linux 6.13).
pub const MADV_GUARD_INSTALL: u64 = 102;

/// A category of pages for [`scan`]; values of linux/fs.h.
pub mod page {
    /// In a mapping that is tracked by asynchronous write-protection.
    pub const IS_WPALLOWED: u64 = 1 << 0;
    /// Written since it was write-protected.
    pub const IS_WRITTEN: u64 = 1 << 1;
    /// Belongs to a file, shared memory, or is the shared zero page's opposite.
    pub const IS_FILE: u64 = 1 << 2;
    /// In memory.
    pub const IS_PRESENT: u64 = 1 << 3;
    /// In swap.
    pub const IS_SWAPPED: u64 = 1 << 4;
    /// The zero page.
    pub const IS_PFNZERO: u64 = 1 << 5;
    /// Soft-dirty.
    pub const IS_SOFT_DIRTY: u64 = 1 << 7;
    /// A guard page (`MADV_GUARD_INSTALL`).
    pub const IS_GUARD: u64 = 1 << 8;
}

/// A run of pages of the same categories.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageRegion {
    /// First address.
    pub start: u64,
    /// Address behind the last page.
    pub end: u64,
    /// Bits of [`page`].
    pub categories: u64,
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// `PM_SCAN_WP_MATCHING`.
const WP_MATCHING: u64 = 1 << 0;

/// A search for pages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scan {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// Pages must have one of these categories.
    pub any_of: u64,
    /// Pages must have all of these, after inversion.
    pub all_of: u64,
    /// Categories whose sense is inverted.
    pub inverted: u64,
    /// Categories to report.
    pub report: u64,
    /// Write-protect the pages that match, in mappings where that is tracked.
    pub protect: bool,
}

/// Finds pages of an address space through its `/proc/PID/pagemap`, without
/// touching holes (`PAGEMAP_SCAN`, Linux 6.7). Returns the number of regions
/// filled into `out` and the address where the walk ended. With no room in `out` nothing
/// is reported.
///
/// # Errors
/// `ENOTTY` on kernels without it; `EINVAL` for unaligned ranges.
pub fn scan(pagemap: &File, what: &Scan, out: &mut [PageRegion]) -> Result<(usize, u64)> {
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        flags: if what.protect { WP_MATCHING } else { 0 },
        start: what.start,
        end: what.end,
        vec: if out.is_empty() { 0 } else { addr(out.as_mut_ptr()) },
        vec_len: out.len() as u64,
        category_inverted: what.inverted,
        category_mask: what.all_of,
        category_anyof_mask: what.any_of,
        return_mask: what.report,
        ..ScanArg::default()
    };
    // SAFETY: `arg` is a pm_scan_arg of the size it states; `vec` points to
    // `vec_len` regions that are borrowed for writing.
    let n = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    let n = check(n)?;
    let n = usize::try_from(n).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok((n, arg.walk_end))
}

/// Size of a huge page of x86-64.
pub const HUGE_PAGE: usize = 2 << 20;

/// Maps memory that is never written, and reads it: what is there is the kernel's page of zeros,
/// with `huge` that of huge pages if there are any. It stays for the life of this process. Returns
/// its address, behind which a huge page fits.
///
/// # Errors
/// `ENOMEM` if there is no room for the mapping.
pub fn map_zero_page(huge: bool) -> Result<u64> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    let size = HUGE_PAGE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel picks.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * size, ProtFlags::READ, flags) }?;
    let base = base.cast::<u8>();
    // SAFETY: the mapping has two such pages, so one that is aligned lies in it.
    let start = unsafe { base.add(base.align_offset(size)) };
    let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    // SAFETY: the range is part of the new mapping. A kernel without huge pages takes no such advice.
    let _ = unsafe { madvise(start.cast(), size, advice) };
    // SAFETY: the mapping is readable, and stays.
    unsafe { start.read_volatile() };
    Ok(addr(start))
}

/// Writes to a file through a mapping of it, for files that write(2) refuses
/// (hugetlbfs). The file must be long enough: it is an object that the caller has made
/// and that nobody else truncates meanwhile.
///
/// # Errors
/// `EINVAL` if the file ends before; `ENOMEM` without free huge pages; see mmap(2).
pub fn write_mapped(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<()> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let stat = rustix::fs::fstat(file)?;
    let page = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096);
    let start = offset - offset % page;
    let end = (offset + bytes.len() as u64).next_multiple_of(page);
    if end > stat.st_size.cast_unsigned() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let len = usize::try_from(end - start).map_err(invalid)?;
    let skip = usize::try_from(offset - start).map_err(invalid)?;
    // SAFETY: a new shared mapping at an address that the kernel picks.
    let base = unsafe {
        mmap(std::ptr::null_mut(), len, ProtFlags::WRITE, MapFlags::SHARED, file, start)
    }?;
    // SAFETY: the mapping covers `len` writable bytes, `skip + bytes.len()` is within it,
    // and nothing in this process refers to it but this copy.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.cast::<u8>().add(skip), bytes.len());
        munmap(base, len)?;
    }
    Ok(())
}

/// A shared mapping of a file in this process, unmapped when it is dropped. Its memory is read and
/// written by [`read`] and [`write()`] of this process: somebody else may write there, too.
#[derive(Debug)]
pub struct Window {
    base: *mut std::ffi::c_void,
    len: usize,
}

impl Window {
    /// Maps the first `len` bytes of a file.
    ///
    /// # Errors
    /// See mmap(2).
    pub fn new(file: BorrowedFd<'_>, len: usize) -> Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel picks.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0) }?;
        Ok(Window { base, len })
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> u64 {
        addr(self.base)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference to its memory was ever made.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len) };
    }
}
