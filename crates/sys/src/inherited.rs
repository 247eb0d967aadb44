//! Descriptors that this process was started with, known by number only, or that it has of the one that has forked it.
//!
//! Nothing in this process owns them, so they are duplicated before they are used.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::{Result, check};

/// A duplicate (close-on-exec) of descriptor `number`. The original becomes
/// close-on-exec too, so that it does not leak into programs started from here,
/// unless it is one of the standard three.
///
/// # Errors
/// `EBADF` if it is not open.
pub fn duplicate(number: RawFd) -> Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes an integer and makes a new descriptor; no memory
    // is passed.
    let fd = check(unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) })?;
    if number > libc::STDERR_FILENO {
        // SAFETY: F_SETFD changes a flag of an open descriptor, which its owner, if
        // any, cannot be hurt by; no memory is passed.
        check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    }
    // SAFETY: the kernel has just made `fd` for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The numbers of the descriptors that this process was started with: all that it opens itself are close-on-exec.
///
/// # Errors
/// If procfs does not list them.
pub fn numbers() -> Result<Vec<RawFd>> {
    let mut all = vec![];
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // SAFETY: F_GETFD reads a flag; no memory is passed.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if flags != -1 && flags & libc::FD_CLOEXEC == 0 {
            all.push(number);
        }
    }
    Ok(all)
}

/// Moves `fd` to the number `number`, where [`duplicate`] finds it.
///
/// # Errors
/// `EBUSY` if something is open at that number; `EBADF` if it is out of range.
pub fn place(fd: OwnedFd, number: RawFd) -> Result<()> {
    // SAFETY: F_GETFD reads a flag; no memory is passed.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } != -1 {
        return Err(std::io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: nothing is open at `number` (checked above), so no OwnedFd here stands for
    // it, and none will: it stays open until the process ends.
    check(unsafe { libc::dup3(fd.as_raw_fd(), number, libc::O_CLOEXEC) })?;
    Ok(())
}

/// Puts `other` in the place of the file that descriptor `fd` is of, which this process lets go by that. A process that was
/// forked has no other way to close what its parent has lent to the work that it does.
///
/// # Errors
/// See dup(2).
pub fn replace(fd: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: dup3 takes integers. The number stays an open descriptor, so that what owns it closes no one else's.
    check(unsafe { libc::dup3(other.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) })?;
    Ok(())
}

/// Lets no descriptor but the standard three go on to the program that this process
/// becomes next.
///
/// # Errors
/// `ENOSYS` before Linux 5.9.
pub fn close_on_exec() -> Result<()> {
    let flag = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: close_range with this flag changes a flag of open descriptors, which their
    // owners cannot be hurt by; no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, flag) })?;
    Ok(())
}

/// Closes descriptor `number`, one that nothing in this process has opened.
///
/// # Errors
/// `EBADF` if it is not open; `EBUSY` if it was opened after the start of the
/// program, as far as can be told: its close-on-exec flag is set, which no descriptor
/// has that came through exec.
pub fn close(number: RawFd) -> Result<()> {
    // SAFETY: F_GETFD reads a flag; no memory is passed.
    let flags = check(unsafe { libc::fcntl(number, libc::F_GETFD) })?;
    if flags & libc::FD_CLOEXEC != 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: the descriptor came through exec (checked above: everything that is
    // opened by this program is close-on-exec), so no OwnedFd here stands for it.
    check(unsafe { libc::close(number) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_is_not_open_cannot_be_taken() {
        assert_eq!(duplicate(9999).unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(close(9999).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn the_end_of_a_pipe_is_let_go_by_another_file_in_its_place() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        replace(writer.as_fd(), null.as_fd()).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        drop(writer);
    }

    #[test]
    fn own_files_did_not_come_from_outside() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let given = rustix::io::dup(&file).unwrap();
        let numbers = numbers().unwrap();
        assert!(!numbers.contains(&file.as_raw_fd()) && numbers.contains(&given.as_raw_fd()));
    }

    #[test]
    fn own_files_are_not_closed() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(close(file.as_raw_fd()).unwrap_err().raw_os_error(), Some(libc::EBUSY));
        assert!(duplicate(file.as_raw_fd()).is_ok());
    }
}
