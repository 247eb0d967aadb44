//! The repair mode of TCP sockets: entered, left, and left by the guardian.

use std::os::fd::BorrowedFd;

use torpor_sys::socket;

use crate::error::{Context, Result};
use crate::guardian::{Undo, Way};

/// `TCP_REPAIR` of linux/tcp.h, and its values: on;
pub(super) const TCP_REPAIR: i32 = libc::TCP_REPAIR;
pub(super) const REPAIR_ON: i32 = 1;
/// off, with a probe that makes the peer say what it has. A firewall that meets the connection for
/// the first time takes the probe's number, which is one too low, for that of the stream, and what
/// the other end then acknowledges for invalid: no more than needed.
pub(super) const REPAIR_OFF: i32 = 0;
/// off, without a packet.
pub(super) const REPAIR_OFF_SILENT: i32 = -1;

pub(super) fn get(fd: BorrowedFd<'_>, name: i32) -> std::io::Result<u32> {
    socket::get_int(fd, libc::IPPROTO_TCP, name).map(i32::cast_unsigned)
}

pub(super) fn set(fd: BorrowedFd<'_>, name: i32, value: i32) -> Result<()> {
    socket::set_int(fd, libc::IPPROTO_TCP, name, value)
        .context(|| format!("setsockopt(TCP, {name}, {value})"))
}

/// A socket of a task that is in repair mode.
#[derive(Debug)]
pub(crate) struct Repaired<'s> {
    socket: BorrowedFd<'s>,
    reuse: i32,
}

impl<'s> Repaired<'s> {
    /// Enters repair mode.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`, and for a socket that listens.
    pub(crate) fn enter(socket: BorrowedFd<'s>) -> Result<Self> {
        let reuse = socket::get_int(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR)
            .context(|| "SO_REUSEADDR".to_owned())?;
        set(socket, TCP_REPAIR, REPAIR_ON)?;
        Ok(Repaired { socket, reuse })
    }

    /// Leaves it.
    ///
    /// # Errors
    /// If setsockopt(2) refuses it: the connection stays in repair mode.
    pub(crate) fn leave(self) -> Result<()> {
        leave_repair(self.socket, self.reuse)
    }
}

/// A socket that may be in repair mode: process, inode number, its `SO_REUSEADDR`. As long as the
/// process lives, the socket leaves it. Closed in repair mode it is silent: so must it be if
/// nobody goes on.
pub(crate) static REPAIR: Way = Way {
    has_file: true,
    ..Way::new("repair", |words, socket| match socket {
        Some(socket) if crate::proc::open(words.number(0)?, "ns/net").is_ok() => {
            leave_repair(socket, words.number(2)?)
        }
        _ => Ok(()),
    })
};

/// A socket that is to be closed without a word to its peer: of a restore, or of tasks that end. Inode number.
pub(crate) static SILENCE: Way =
    Way { has_file: true, ..Way::new("silence", |_, socket| socket.map_or(Ok(()), silence)) };

pub(super) fn undo_repair(pid: i32, inode: u32, reuse: i32) -> Undo {
    REPAIR.undo(vec![pid.to_string(), inode.to_string(), reuse.to_string()])
}

pub(crate) fn undo_silence(inode: u32) -> Undo {
    SILENCE.undo(vec![inode.to_string()])
}

/// Takes a socket of a task out of repair mode, if it is in it, without a packet.
///
/// # Errors
/// If it is in repair mode and stays in it.
pub(crate) fn leave_repair(socket: BorrowedFd<'_>, reuse: i32) -> Result<()> {
    if get(socket, TCP_REPAIR).is_ok_and(|on| on == 0) {
        return Ok(());
    }
    set(socket, TCP_REPAIR, REPAIR_OFF_SILENT)?;
    // The kernel forgets it: in repair mode every port can be reused, behind it none.
    socket::set_int(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse)
        .context(|| "SO_REUSEADDR".to_owned())
}

/// From here on, closing a socket sends no packet.
///
/// # Errors
/// If setsockopt(2) refuses repair mode.
pub(crate) fn silence(socket: BorrowedFd<'_>) -> Result<()> {
    set(socket, TCP_REPAIR, REPAIR_ON)
}
