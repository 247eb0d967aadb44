//! Terminals: ioctl_tty(2), as far as rustix lacks it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, check};

/// `struct termios2` of asm/termbits.h: settings with speeds in numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Termios {
    pub iflag: u32,
    pub oflag: u32,
    pub cflag: u32,
    pub lflag: u32,
    pub line: u8,
    pub cc: [u8; 19],
    pub ispeed: u32,
    pub ospeed: u32,
}

/// `struct termios`: the same without speeds, for what is locked.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Locked {
    pub iflag: u32,
    pub oflag: u32,
    pub cflag: u32,
    pub lflag: u32,
    pub line: u8,
    pub cc: [u8; 19],
}

/// Reads an `int` with a request that writes one.
fn get(tty: BorrowedFd<'_>, request: libc::Ioctl) -> Result<i32> {
    let mut value: libc::c_int = 0;
    // SAFETY: all requests given here write one int.
    check(unsafe { libc::ioctl(tty.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}

/// Gives an `int` to a request that reads one.
fn set(tty: BorrowedFd<'_>, request: libc::Ioctl, value: i32) -> Result<()> {
    // SAFETY: all requests given here read one int.
    check(unsafe { libc::ioctl(tty.as_raw_fd(), request, &raw const value) }).map(drop)
}

/// The settings of a terminal.
///
/// # Errors
/// `EIO` if it is hung up, `ENOTTY` if it is none.
pub fn termios(tty: impl AsFd) -> Result<Termios> {
    let mut termios = Termios::default();
    let fd = tty.as_fd().as_raw_fd();
    // SAFETY: the request fills a struct termios2.
    check(unsafe { libc::ioctl(fd, libc::TCGETS2, &raw mut termios) })?;
    Ok(termios)
}

/// Changes the settings of a terminal at once; no data is lost.
///
/// # Errors
/// As [`termios`].
pub fn set_termios(tty: impl AsFd, termios: &Termios) -> Result<()> {
    let fd = tty.as_fd().as_raw_fd();
    // SAFETY: the request reads a struct termios2.
    check(unsafe { libc::ioctl(fd, libc::TCSETS2, std::ptr::from_ref(termios)) }).map(drop)
}

/// Which settings are locked: a set bit is.
///
/// # Errors
/// As [`termios`].
pub fn locked(tty: impl AsFd) -> Result<Locked> {
    let mut locked = Locked::default();
    let fd = tty.as_fd().as_raw_fd();
    // SAFETY: the request fills a struct termios.
    check(unsafe { libc::ioctl(fd, libc::TIOCGLCKTRMIOS, &raw mut locked) })?;
    Ok(locked)
}

/// Locks settings.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`.
pub fn set_locked(tty: impl AsFd, locked: &Locked) -> Result<()> {
    let fd = tty.as_fd().as_raw_fd();
    // SAFETY: the request reads a struct termios.
    check(unsafe { libc::ioctl(fd, libc::TIOCSLCKTRMIOS, std::ptr::from_ref(locked)) }).map(drop)
}

/// The line discipline of a terminal: 0 is its own (`N_TTY`). Each end of a pair has one.
///
/// # Errors
/// `ENOTTY` if it is no terminal, `EIO` if it is hung up.
pub fn line_discipline(tty: impl AsFd) -> Result<i32> {
    get(tty.as_fd(), libc::TIOCGETD)
}

/// The number of a pseudoterminal, from its master.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn pty_number(master: impl AsFd) -> Result<u32> {
    Ok(get(master.as_fd(), libc::TIOCGPTN)?.cast_unsigned())
}

/// Whether the slave of a master cannot be opened yet.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn is_slave_locked(master: impl AsFd) -> Result<bool> {
    Ok(get(master.as_fd(), libc::TIOCGPTLCK)? != 0)
}

/// Locks or unlocks the slave of a master.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn lock_slave(master: impl AsFd, lock: bool) -> Result<()> {
    set(master.as_fd(), libc::TIOCSPTLCK, lock.into())
}

/// Whether a master is in packet mode.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn is_packet_mode(master: impl AsFd) -> Result<bool> {
    Ok(get(master.as_fd(), libc::TIOCGPKT)? != 0)
}

/// Sets the packet mode of a master.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn set_packet_mode(master: impl AsFd, on: bool) -> Result<()> {
    set(master.as_fd(), libc::TIOCPKT, on.into())
}

/// Whether the terminal can be opened only once more by the privileged.
///
/// # Errors
/// `ENOTTY` if it is no terminal.
pub fn is_exclusive(tty: impl AsFd) -> Result<bool> {
    Ok(get(tty.as_fd(), libc::TIOCGEXCL)? != 0)
}

/// The device that a terminal is, whatever node it was opened by (`/dev/tty`), in the
/// encoding of `/proc/PID/stat`.
///
/// # Errors
/// `EIO` if it is hung up.
pub fn device(tty: impl AsFd) -> Result<u32> {
    Ok(get(tty.as_fd(), libc::TIOCGDEV)?.cast_unsigned())
}

/// The session and the foreground process group of a pseudoterminal, from its master;
/// 0 for none.
///
/// # Errors
/// `ENOTTY` if it is no master.
pub fn session_and_group(master: impl AsFd) -> Result<(i32, i32)> {
    let master = master.as_fd();
    let session = match get(master, libc::TIOCGSID) {
        // No session has it.
        Err(e) if e.raw_os_error() == Some(libc::ENOTTY) => {
            pty_number(master)?;
            0
        }
        other => other?,
    };
    Ok((session, get(master, libc::TIOCGPGRP)?))
}

/// Opens the slave of a master, whatever mounts there are.
///
/// # Errors
/// `EIO` if it is locked.
pub fn open_slave(master: impl AsFd, flags: i32) -> Result<OwnedFd> {
    // O_LARGEFILE, which open(2) would add. O_CLOEXEC would stay among the flags of the
    // description for ever.
    let flags = flags | libc::O_NOCTTY | 0o100_000;
    // SAFETY: the request takes a number and returns a new descriptor.
    let fd = check(unsafe { libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: a new descriptor that nobody else owns.
    let slave = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&slave, rustix::io::FdFlags::CLOEXEC)?;
    Ok(slave)
}

/// Feeds a byte to a terminal as if it had been typed (`TIOCSTI`). It has been
/// processed when the call returns, unlike what is written to a master.
///
/// # Errors
/// `EPERM` or `EIO` without `CAP_SYS_ADMIN`.
pub fn feed(tty: impl AsFd, byte: u8) -> Result<()> {
    // SAFETY: the request reads one char.
    check(unsafe { libc::ioctl(tty.as_fd().as_raw_fd(), libc::TIOCSTI, &raw const byte) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_requests() {
        // The size stands in bits 16 to 29 of a request's number.
        assert_eq!(size_of::<Termios>(), (libc::TCGETS2 >> 16 & 0x3fff) as usize);
        assert_eq!(size_of::<Locked>(), 36);
    }

    #[test]
    fn a_pseudoterminal() {
        use rustix::pty::{OpenptFlags, openpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        assert!(is_slave_locked(&master).unwrap());
        assert!(open_slave(&master, libc::O_RDWR).is_err());
        lock_slave(&master, false).unwrap();
        let slave = open_slave(&master, libc::O_RDWR).unwrap();
        assert_eq!(session_and_group(&master).unwrap(), (0, 0));
        let mut termios = termios(&slave).unwrap();
        assert_ne!(termios.lflag & libc::ECHO, 0);
        termios.lflag &= !(libc::ECHO | libc::ICANON);
        set_termios(&slave, &termios).unwrap();
        assert_eq!(super::termios(&master).unwrap(), termios);
        feed(&slave, b'x').unwrap();
        assert_eq!(rustix::io::ioctl_fionread(&slave).unwrap(), 1);
        let minor = rustix::fs::minor(rustix::fs::fstat(&slave).unwrap().st_rdev);
        assert_eq!(pty_number(&master).unwrap(), minor);
        assert!(!is_packet_mode(&master).unwrap() && !is_exclusive(&slave).unwrap());
    }
}
