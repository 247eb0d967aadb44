//! Instances of io_uring, asked by somebody who has a descriptor of one.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, addr, syscall};

/// `IORING_REGISTER_PBUF_STATUS` (Linux 6.8): asks for the state of a group of buffers.
pub const PBUF_STATUS: u64 = 26;
/// `IORING_REGISTER_PBUF_RING`.
const PBUF_RING: u64 = 22;
/// An address where nothing is.
const NOWHERE: u64 = 1;

/// Whether this kernel tells of groups of buffers, by its answer to [`PBUF_STATUS`] with an address where
/// nothing is.
///
/// # Errors
/// `Unsupported` if it does not (before Linux 6.8); what else it says.
pub fn tells_of_groups(answer: Result<u64>) -> Result<()> {
    match answer {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(io::ErrorKind::Unsupported.into()),
        Err(e) if e.raw_os_error() != Some(libc::EFAULT) => Err(e),
        _ => Ok(()),
    }
}

/// Whether there is a group of buffers, by the answer of a kernel that tells to [`PBUF_STATUS`] with its
/// number.
///
/// # Errors
/// If the kernel answers with an error that says neither.
pub fn is_group(answer: Result<u64>) -> Result<bool> {
    match answer.map_err(|e| (e.raw_os_error(), e)) {
        Err((Some(libc::ENOENT), _)) => Ok(false),
        // Those that were handed over by requests (`IORING_OP_PROVIDE_BUFFERS`) have no state.
        Ok(_) | Err((Some(libc::EINVAL), _)) => Ok(true),
        Err((_, error)) => Err(error),
    }
}

/// A group of buffers of an instance, of which requests take one (`IOSQE_BUFFER_SELECT`), if it has
/// any: the kernel is asked for each number that one can have.
///
/// # Errors
/// `Unsupported` if this kernel does not tell (before Linux 6.8); `EEXIST` if only the thread that has
/// made the instance may ask; what else io_uring_register(2) says.
pub fn group_of_buffers(instance: BorrowedFd<'_>) -> Result<Option<u16>> {
    let fd = u64::from(instance.as_raw_fd().cast_unsigned());
    let ask = |status: u64| {
        // SAFETY: the kernel reads and writes a `struct io_uring_buf_status` there, or fails if there is
        // none.
        unsafe { syscall(libc::SYS_io_uring_register, [fd, PBUF_STATUS, status, 1, 0, 0]) }
    };
    tells_of_groups(ask(NOWHERE))?;
    for group in 0..=u16::MAX {
        // Its number, and what the kernel says of it.
        let mut status = [0_u32; 10];
        status[0] = group.into();
        if is_group(ask(addr(status.as_mut_ptr())))? {
            return Ok(Some(group));
        }
    }
    Ok(None)
}

/// Registers `file` with an instance, at a place for files that it has.
///
/// # Errors
/// `ENXIO` if it has no such places, `EINVAL` if not this one; `EBADF` for a file of an instance; `EEXIST` if only the
/// thread that has made the instance may do so.
pub fn register_file(instance: BorrowedFd<'_>, place: u32, file: BorrowedFd<'_>) -> Result<()> {
    /// `IORING_REGISTER_FILES_UPDATE`.
    const FILES_UPDATE: u64 = 6;
    let number = file.as_raw_fd();
    // struct io_uring_files_update: the place, nothing, and where descriptors are.
    let update = [u64::from(place), addr(&raw const number)];
    let fd = u64::from(instance.as_raw_fd().cast_unsigned());
    let args = [fd, FILES_UPDATE, addr(update.as_ptr()), 1, 0, 0];
    // SAFETY: the kernel reads `update`, and one number where that says.
    unsafe { syscall(libc::SYS_io_uring_register, args) }.map(drop)
}

/// A new instance, for a few requests.
///
/// # Errors
/// `EPERM` or `ENOSYS` where this process gets none; if there are no more descriptors.
pub fn instance() -> Result<OwnedFd> {
    let mut params = [0_u32; 30];
    let place = addr(params.as_mut_ptr());
    // SAFETY: the kernel reads and writes a `struct io_uring_params` there.
    let made = unsafe { syscall(libc::SYS_io_uring_setup, [4, place, 0, 0, 0, 0]) }?;
    let fd = i32::try_from(made).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: it is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Registers a page of this process as the memory of a ring of buffers. No request takes one, so that the kernel
/// keeps the page where it is, and neither reads nor writes it.
///
/// # Errors
/// `EINVAL` for memory that does not begin with a page, or if this kernel has no such rings (before Linux 5.19);
/// `ENOMEM` above the limit of locked memory.
pub fn keep_page(instance: BorrowedFd<'_>, page: &[u8; 4096]) -> Result<()> {
    // struct io_uring_buf_reg: the address, for how many buffers it has room, group 0 and no flags.
    let group = [addr(page.as_ptr()), 4096 / 16, 0, 0, 0];
    let fd = u64::from(instance.as_raw_fd().cast_unsigned());
    let args = [fd, PBUF_RING, addr(group.as_ptr()), 1, 0, 0];
    // SAFETY: the kernel reads `group`, and the page when a request takes a buffer, which none does.
    unsafe { syscall(libc::SYS_io_uring_register, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn answers_of_the_kernel_are_understood() {
        let error = |number| Err(io::Error::from_raw_os_error(number));
        let is_unsupported = |e: io::Error| e.kind() == io::ErrorKind::Unsupported;
        assert!(tells_of_groups(error(libc::EFAULT)).is_ok());
        assert!(tells_of_groups(error(libc::EINVAL)).is_err_and(is_unsupported));
        assert!(tells_of_groups(error(libc::EEXIST)).is_err());
        assert!(!is_group(error(libc::ENOENT)).unwrap());
        assert!(is_group(error(libc::EINVAL)).unwrap());
        assert!(is_group(Ok(0)).unwrap());
        assert!(is_group(error(libc::EEXIST)).is_err());
    }

    #[test]
    fn the_last_group_is_found_as_well() {
        /// The flag of one in memory of the kernel (Linux 6.4).
        const OF_KERNEL: u32 = 1 << 16;
        let Ok(instance) = instance() else {
            println!("left out: the_last_group_is_found_as_well (this kernel makes no io_uring)");
            return;
        };
        let none = group_of_buffers(instance.as_fd());
        if none.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::Unsupported) {
            println!("left out: the_last_group_is_found_as_well (told by Linux 6.8)");
            return;
        }
        assert_eq!(none.unwrap(), None);
        // struct io_uring_buf_reg: no address, four buffers, number and flags.
        let group = [0_u32, 0, 4, u32::from(u16::MAX) | OF_KERNEL, 0, 0, 0, 0, 0, 0];
        let fd = u64::from(instance.as_raw_fd().cast_unsigned());
        // SAFETY: the kernel reads such a structure there.
        let made = unsafe {
            syscall(libc::SYS_io_uring_register, [fd, PBUF_RING, addr(group.as_ptr()), 1, 0, 0])
        };
        made.unwrap();
        assert_eq!(group_of_buffers(instance.as_fd()).unwrap(), Some(u16::MAX));
    }
}
