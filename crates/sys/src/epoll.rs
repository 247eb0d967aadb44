//! Epoll sets whose entries have numbers of another process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::{Result, addr, check, syscall};

/// An entry of an epoll set.
#[derive(Debug, Clone, Copy)]
pub struct Interest<'f> {
    /// What is watched.
    pub file: BorrowedFd<'f>,
    /// The descriptor number that the entry is known by.
    pub number: i32,
    /// `EPOLL*` bits.
    pub events: u32,
    /// What the watcher wants to be told.
    pub data: u64,
}

/// Whether those that wait for a set poll network devices meanwhile (`EPIOCSPARAMS`, Linux 6.9).
///
/// # Errors
/// `ENOTTY` and others where the kernel has no such thing.
pub fn polls_busily(epoll: impl AsFd) -> Result<bool> {
    // struct epoll_params
    let mut params = [0u8; 8];
    // SAFETY: the request fills a struct of 8 bytes, or is not known.
    check(unsafe {
        libc::ioctl(epoll.as_fd().as_raw_fd(), libc::EPIOCGPARAMS, params.as_mut_ptr())
    })?;
    Ok(params != [0; 8])
}

/// Adds entries to an epoll set as if each file had been open under the number given.
///
/// The kernel takes the number of an entry from the caller's descriptor table
/// (epoll(7), question 6) and keeps it without looking again. So this happens on a
/// thread with a table of its own, in which any number can be given to any file.
///
/// # Errors
/// If an entry cannot be added, for the first of them: see epoll_ctl(2); `EBADF` for numbers above the
/// limit of open files.
pub fn add(epoll: BorrowedFd<'_>, interests: &[Interest<'_>]) -> Result<()> {
    let Some(highest) = interests.iter().map(|i| i.number).max() else { return Ok(()) };
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || add_in_own_table(epoll, interests, highest));
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

fn add_in_own_table(epoll: BorrowedFd<'_>, all: &[Interest<'_>], highest: i32) -> Result<()> {
    // SAFETY: this thread runs nothing but the calls below and then ends; no descriptor
    // that code of other threads owns is touched, as they keep the old table.
    check(unsafe { libc::unshare(libc::CLONE_FILES) })?;
    let own = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?;
    // Out of the way of all numbers.
    let (epoll, source) = (above(epoll.as_raw_fd(), highest)?, above(pidfd.as_raw_fd(), highest)?);
    // It ends with the table.
    std::mem::forget(pidfd);
    // SAFETY: takes numbers only; the table is this thread's own.
    check(unsafe { libc::close_range(0, highest.cast_unsigned(), 0) })?;
    all.iter().try_for_each(|interest| add_one(epoll, source, interest))
}

fn above(fd: i32, number: i32) -> Result<i32> {
    let least = number.saturating_add(1);
    // SAFETY: takes numbers only.
    check(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, least) })
}

fn add_one(epoll: i32, source: i32, interest: &Interest<'_>) -> Result<()> {
    let arg = |fd: i32| u64::from(fd.cast_unsigned());
    // From the table that the other threads have kept.
    let args = [arg(source), arg(interest.file.as_raw_fd()), 0, 0, 0, 0];
    // SAFETY: pidfd_getfd takes numbers only.
    let file = unsafe { syscall(libc::SYS_pidfd_getfd, args) }?;
    let number = arg(interest.number);
    if file != number {
        // SAFETY: dup3 takes numbers only.
        unsafe { syscall(libc::SYS_dup3, [file, number, 0, 0, 0, 0]) }?;
    }
    let mut event = libc::epoll_event { events: interest.events, u64: interest.data };
    let args = [arg(epoll), libc::EPOLL_CTL_ADD as u64, number, addr(&raw mut event), 0, 0];
    // SAFETY: `event` is a struct epoll_event that the call reads.
    let added = unsafe { syscall(libc::SYS_epoll_ctl, args) };
    for fd in [file, number] {
        // SAFETY: a descriptor of this thread's own table, used by nobody else; the
        // second one is gone already where both are the same.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
    added.map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn entries_have_the_numbers_that_were_asked_for() {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.unwrap();
        let (a, b) = rustix::pipe::pipe().unwrap();
        let interest = |file, number, data| Interest { file, number, events: 4, data };
        // Twice the same file under different numbers; numbers that are in use here.
        let all = [
            interest(b.as_fd(), 0, 7),
            interest(b.as_fd(), epoll.as_raw_fd(), 8),
            interest(a.as_fd(), 900, 9),
        ];
        add(epoll.as_fd(), &all).unwrap();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", epoll.as_raw_fd()));
        let numbers: Vec<i32> = info
            .unwrap()
            .lines()
            .filter_map(|l| l.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok())
            .collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, epoll.as_raw_fd(), 900]);
        assert!(rustix::fs::fstat(&a).is_ok() && rustix::fs::fstat(&epoll).is_ok());
        let error = add(epoll.as_fd(), &all[..1]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
    }
}
