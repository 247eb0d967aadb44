//! What has been written to a pseudoterminal and not been read yet.
//!
//! The kernel lets nobody look at it: it is taken out and put back. Both happen while
//! the tasks are stopped, and nothing else is done in between. What is put back was
//! processed when it came the first time, so it must pass unchanged now, and lines
//! must still be lines.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use torpor_sys::tty::{self, Termios};

use crate::error::{Context, Result};

/// Subscripts of `c_cc` (asm/termbits.h).
const VEOF: usize = libc::VEOF;
const ENDS: [usize; 3] = [VEOF, libc::VEOL, libc::VEOL2];
/// Bytes read at once: the size of a terminal's buffer.
const BUFFER: usize = 4096;

/// Takes out what the slave has written: unchanged bytes, in their order. The
/// description may block and is left so.
///
/// # Errors
/// If the master cannot be read.
pub(super) fn take_output(master: impl AsFd) -> Result<Vec<u8>> {
    without_packets(&master, || {
        let mut all = Vec::new();
        while is_readable(&master)? {
            let mut buffer = [0; BUFFER];
            match rustix::io::read(&master, &mut buffer) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(n) => all.extend_from_slice(&buffer[..n]),
                // Every slave is closed, and everything has been read.
                Err(Errno::IO) => break,
                Err(e) => return Err(e).context(|| "read from a terminal".to_owned()),
            }
        }
        Ok(all)
    })
}

/// Writes what a slave has written before; `slave` must not block.
///
/// # Errors
/// If the slave does not take all of it.
pub(super) fn put_output(slave: &OwnedFd, data: &[u8]) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    let own = tty::termios(slave).context(|| "TCGETS2".to_owned())?;
    let raw = Termios { oflag: own.oflag & !libc::OPOST, ..own };
    with_termios(slave, &own, &raw, || {
        let mut rest = data;
        let mut tries = 0;
        while !rest.is_empty() {
            match rustix::io::write(slave, rest) {
                Ok(n) => rest = &rest[n..],
                // The kernel moves it on in the background.
                Err(Errno::AGAIN) if tries < 1000 => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(e) => return Err(e).context(|| "write to a terminal".to_owned()),
            }
        }
        Ok(())
    })
}

/// Takes out what the slave has not read yet. In line mode, the byte for the end of a
/// file (`VEOF`) stands where the end of a line is no byte. `slave` must not block.
///
/// # Errors
/// If the slave cannot be read, or does not change its mode for that.
pub(super) fn take_input(slave: &OwnedFd) -> Result<Vec<u8>> {
    let own = tty::termios(slave).context(|| "TCGETS2".to_owned())?;
    let mut all = Vec::new();
    if own.lflag & libc::ICANON != 0 {
        while let Some(line) = read(slave)? {
            all.extend_from_slice(&line);
            let is_end = |byte: &u8| {
                *byte == b'\n'
                    || ENDS[1..].iter().any(|&end| own.cc[end] != 0 && own.cc[end] == *byte)
            };
            if line.len() < BUFFER && !line.last().is_some_and(is_end) {
                all.push(own.cc[VEOF]);
            }
        }
    }
    // What is left is no whole line, or there are none.
    let mut raw = Termios { lflag: own.lflag & !libc::ICANON, ..own };
    (raw.cc[libc::VMIN], raw.cc[libc::VTIME]) = (0, 0);
    with_termios(slave, &own, &raw, || {
        while let Some(part) = read(slave)?.filter(|part| !part.is_empty()) {
            all.extend_from_slice(&part);
        }
        Ok(())
    })?;
    Ok(all)
}

/// Gives a slave what it had not read yet.
///
/// # Errors
/// If the slave does not take it (`TIOCSTI`), or does not change its mode for that.
pub(super) fn put_input(slave: &OwnedFd, data: &[u8]) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    let own = tty::termios(slave).context(|| "TCGETS2".to_owned())?;
    let mut neutral = Termios {
        // Without IXON, output that a user has stopped would start again.
        iflag: own.iflag & libc::IXON,
        lflag: own.lflag & libc::ICANON,
        ..own
    };
    for (at, byte) in neutral.cc.iter_mut().enumerate() {
        if !ENDS.contains(&at) && at != libc::VMIN && at != libc::VTIME {
            *byte = 0; // _POSIX_VDISABLE
        }
    }
    with_termios(slave, &own, &neutral, || {
        data.iter().try_for_each(|&byte| tty::feed(slave, byte).context(|| "TIOCSTI".to_owned()))
    })
}

/// One read: `None` if there is nothing now.
fn read(slave: &OwnedFd) -> Result<Option<Vec<u8>>> {
    let mut buffer = vec![0; BUFFER];
    match rustix::io::read(slave, &mut buffer) {
        Ok(n) => {
            buffer.truncate(n);
            Ok(Some(buffer))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(e).context(|| "read from a terminal".to_owned()),
    }
}

/// Whether a read would not block now.
///
/// # Errors
/// `ENOMEM`: there is no other reason not to be told.
fn is_readable(file: impl AsFd) -> Result<bool> {
    Ok(poll(file)?.contains(PollFlags::IN))
}

/// Whether a master had a slave that is closed now.
///
/// # Errors
/// `ENOMEM`: there is no other reason not to be told.
pub(super) fn has_closed_slave(master: impl AsFd) -> Result<bool> {
    Ok(poll(master)?.contains(PollFlags::HUP))
}

fn poll(file: impl AsFd) -> Result<PollFlags> {
    let mut list = [PollFd::new(&file, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut list, Some(&now)).context(|| "poll a terminal".to_owned())?;
    Ok(list[0].revents())
}

/// Works with other settings, and puts the own ones back whatever happens.
fn with_termios<T>(
    tty: &OwnedFd,
    own: &Termios,
    other: &Termios,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let set = |termios| tty::set_termios(tty, termios).context(|| "TCSETS2".to_owned());
    set(other)?;
    let done = work();
    set(own)?;
    done
}

/// Works while a master is not in packet mode: in it, every read starts with a byte
/// of its own, and changes of settings are reported.
///
/// # Errors
/// What `work` returns; if the mode of the master cannot be asked for or set.
pub(super) fn without_packets<T>(master: impl AsFd, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let set = |on| tty::set_packet_mode(&master, on).context(|| "TIOCPKT".to_owned());
    if !tty::is_packet_mode(&master).context(|| "TIOCGPKT".to_owned())? {
        return work();
    }
    set(false)?;
    let done = work();
    set(true)?;
    done
}
