//! Lazy restore: tasks run while their pages are still in the images.
//!
//! A restore with `--lazy-pages` makes the mappings of private anonymous memory, leaves
//! them empty, registers them with userfaultfd and hands the descriptors to a *pager*,
//! which brings pages in as they are touched, and the others in between. The pager is the
//! `lazy-pages` command if one listens in the work directory, else a process that the
//! restore leaves behind.
//!
//! **No task ever sees a page that is not its own.** When the last descriptor of a
//! userfaultfd closes, the kernel gives zeros for what is missing. So there are two
//! processes with one table of descriptors ([`guard`]): whatever happens to one of
//! them, the other keeps all descriptors open, kills the tasks, and goes only when their
//! memory is gone.

mod daemon;
mod guard;
mod missing;
mod pager;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use torpor_sys::socket::{self, Message, Received};

use crate::error::{Context, Error, Result};

pub use daemon::{Daemon, id_of, own_pager};

/// The name of the daemon's socket in the work directory.
const SOCKET: &str = "lazy-pages.socket";
/// Ranges in one packet.
const RANGES: usize = 2048;
/// Bytes of one.
const RANGE: usize = 16;
/// More ranges than the kernel lets a task have mappings.
const MAX_RANGES: usize = 1 << 24;
/// More tasks than any system has.
const MAX_TASKS: usize = 4 << 20;

/// An address space that a pager is to fill.
#[derive(Debug)]
pub struct Handed {
    /// The number of its pagemap.
    pub id: u64,
    /// Its userfaultfd.
    pub uffd: OwnedFd,
    /// Its task.
    pub pidfd: OwnedFd,
    /// What is registered, from the first address to before the second.
    pub ranges: Vec<(u64, u64)>,
}

/// A restore's connection to its pager.
#[derive(Debug)]
pub struct Line {
    socket: OwnedFd,
}

impl Line {
    /// Hands all address spaces over. When this returns the pager works, and nothing of
    /// them is left here.
    ///
    /// # Errors
    /// The pager's, which is another one's or has other images.
    pub fn hand_over(self, images: &str, spaces: Vec<Handed>) -> Result<()> {
        self.send(images.as_bytes(), &[])?;
        for space in &spaces {
            self.send(&space.id.to_le_bytes(), &[space.uffd.as_fd(), space.pidfd.as_fd()])?;
            for ranges in space.ranges.chunks(RANGES) {
                let words = ranges.iter().flat_map(|r| [r.0.to_le_bytes(), r.1.to_le_bytes()]);
                self.send(&words.flatten().collect::<Vec<u8>>(), &[])?;
            }
            self.send(b".", &[])?;
        }
        self.send(b"end", &[])?;
        let mut answer = vec![0; 4096];
        let received = receive(self.socket.as_fd(), &mut answer)?;
        match answer.get(..received.len) {
            Some(b"ok") => Ok(()),
            Some(b"") | None => Err(Error::Hook("the lazy-pages process has ended".to_owned())),
            Some(reason) => {
                let reason = String::from_utf8_lossy(reason);
                Err(Error::Hook(format!("the lazy-pages process: {reason}")))
            }
        }
    }

    fn send(&self, data: &[u8], files: &[BorrowedFd<'_>]) -> Result<()> {
        let message = Message { data, files, ..Message::default() };
        let sent = socket::send(self.socket.as_fd(), &message, 0);
        sent.map(drop).context(|| "telling the lazy-pages process".to_owned())
    }
}

impl Drop for Line {
    /// The pager has a copy of this end if it was forked: closing does not tell it.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

fn receive(line: BorrowedFd<'_>, data: &mut [u8]) -> Result<Received> {
    socket::receive(line, data, 0).context(|| "receive".to_owned())
}

/// What a restore hands over: the id of its images, and the address spaces. `sender` is
/// the process that restores, whose end ends this, too.
fn accept_all(line: &OwnedFd, sender: &OwnedFd) -> Result<(String, Vec<Handed>)> {
    let bad = || Error::invalid("what the restore says", "is not understood");
    let mut data = vec![0; RANGES * RANGE];
    let mut next = || -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut fds = [
            PollFd::from_borrowed_fd(line.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(sender.as_fd(), PollFlags::IN),
        ];
        poll(&mut fds, None).context(|| "poll".to_owned())?;
        let received = match fds[0].revents().is_empty() {
            true => Received::default(),
            false => receive(line.as_fd(), &mut data)?,
        };
        if received.len == 0 {
            return Err(Error::Hook("the restore has failed".to_owned()));
        }
        Ok((data[..received.len].to_vec(), received.files))
    };
    let images = String::from_utf8(next()?.0).map_err(|_| bad())?;
    let mut spaces = Vec::new();
    for _ in 0..MAX_TASKS {
        let (head, files) = next()?;
        if head == b"end" {
            return Ok((images, spaces));
        }
        let id = u64::from_le_bytes(head.try_into().map_err(|_| bad())?);
        let [uffd, pidfd] = <[OwnedFd; 2]>::try_from(files).map_err(|_| bad())?;
        let mut ranges = Vec::new();
        loop {
            let (packet, _) = next()?;
            if packet == b"." {
                break;
            }
            let word = |at: &[u8]| at.try_into().map(u64::from_le_bytes).map_err(|_| bad());
            for range in packet.chunks(RANGE) {
                let (start, end) = range.split_at_checked(8).ok_or_else(bad)?;
                ranges.push((word(start)?, word(end)?));
            }
            if ranges.len() > MAX_RANGES {
                return Err(bad());
            }
        }
        spaces.push(Handed { id, uffd, pidfd, ranges });
    }
    Err(bad())
}

/// A path to the daemon's socket that is short enough for an address, and the directory
/// that has to stay open meanwhile.
fn socket_in(work_dir: &Path) -> Result<(OwnedFd, PathBuf)> {
    use rustix::fs::{Mode, OFlags};
    use std::os::fd::AsRawFd;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(work_dir, flags, Mode::empty())
        .context(|| format!("work directory {}", work_dir.display()))?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()));
    Ok((dir, path))
}
