//! Lazy restore: tasks run while their pages are still in the images.
//!
//! A restore with `--lazy-pages` makes the mappings of private anonymous memory, leaves
//! them empty, registers them with userfaultfd and hands the descriptors to a *pager*,
//! which brings pages in as they are touched, and the others in between. The pager is the
//! `lazy-pages` command if one listens in the work directory, else a process that the
//! restore leaves behind.
//!
//! Pages that a lazy dump has left in its stopped tasks are fetched from there, urgent ones
//! first. The dump ends its tasks when the pager has everything; until then they can go
//! on, and do if the pager goes away. If the dump goes away it is the pager that ends the
//! tasks: at no moment is there a whole tree nowhere. A migration has somebody who looks afterwards
//! where the tasks are: its pager says so by a file ([`Waymark`]) before it tells the dump, and from
//! then on never ends them.
//!
//! **No task ever sees a page that is not its own.** When the last descriptor of a
//! userfaultfd closes, the kernel gives zeros for what is missing. So there are two
//! processes with one table of descriptors ([`pair`]): whatever happens to one of
//! them, the other keeps all descriptors open, kills the tasks, and goes only when their
//! memory is gone.

mod address_space;
mod ahead;
mod daemon;
mod missing;
mod page_reader;
mod pager;
mod pair;
mod sight;
mod working_set;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use torpor_kernel::shortage::Shortage;
use torpor_policy::memory::{AreaKind, MemoryArea, Sharing};
use torpor_sys::socket::{self, Message, Received};

use crate::error::{Context, Error, Result};
use crate::page_server::Borrower;
use crate::ranges::Ranges;
use crate::waymark::Waymark;

use ahead::AskedAhead;
pub use daemon::{Daemon, id_of};
pub(crate) use daemon::{fetcher, own_pager};

/// Whether the pages of a mapping can be brought in later. It depends on nothing that two
/// relatives may have differently in a mapping that one of them inherits.
///
/// What children do not get must not be missing at a fork: the pager would give it to them,
/// for nothing tells it that their mapping is to be empty.
pub fn may_wait(area: &MemoryArea) -> bool {
    // Needed at once.
    !area.form.grows_down && can_wait(area)
}

/// Whether it is a stack that can be brought in later, if it has to be: CRIU's lazy dumps serve
/// stacks, too.
pub(crate) fn stack_can_wait(area: &MemoryArea) -> bool {
    area.form.grows_down && can_wait(area)
}

fn can_wait(area: &MemoryArea) -> bool {
    area.kind == AreaKind::Anonymous
        && area.form.sharing == Sharing::Private
        && area.form.huge.is_none()
        // What is locked is never to be missing.
        && area.locked.is_none()
        && !(area.watched || area.pinned)
        && !area.advice.wipes_on_fork()
}

/// The name of the daemon's socket in the work directory.
const SOCKET: &str = "lazy-pages.socket";
/// Ranges in one packet.
const RANGES: usize = 2048;
/// Bytes of one.
const RANGE: usize = 16;
/// More ranges than a task has stretches of pages: 64 GiB with a hole behind each page.
const MAX_RANGES: usize = 1 << 24;
/// What the restore says when the tasks run.
const RESTORED: &[u8] = b"run";
/// What a restore says that has lost its pager.
const PAGER_GONE: &str = "the lazy-pages process has ended";
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
    /// The pages that are missing, in what is registered.
    pub missing: Ranges,
}

/// A restore's connection to its pager.
#[derive(Debug)]
pub struct PagerLine {
    socket: OwnedFd,
}

impl PagerLine {
    /// Says of which images the address spaces are that are handed over next.
    ///
    /// # Errors
    /// If the pager has ended.
    pub fn begin(&self, images: &str) -> Result<()> {
        self.send(images.as_bytes(), &[])
    }

    /// Hands some of them over. The pager finds their pages while others are still to come.
    ///
    /// # Errors
    /// If the pager has ended.
    pub fn hand_over(&self, spaces: &[Handed]) -> Result<()> {
        for space in spaces {
            self.send(&space.id.to_le_bytes(), &[space.uffd.as_fd(), space.pidfd.as_fd()])?;
            for ranges in space.missing.as_slice().chunks(RANGES) {
                let words =
                    ranges.iter().flat_map(|r| [r.start.to_le_bytes(), r.end.to_le_bytes()]);
                self.send(&words.flatten().collect::<Vec<u8>>(), &[])?;
            }
            self.send(b".", &[])?;
        }
        Ok(())
    }

    /// All were handed over. When this returns the pager works.
    ///
    /// # Errors
    /// If the pager has ended, or is one of other images.
    pub fn finish(&self) -> Result<()> {
        self.send(b"end", &[])?;
        let mut answer = vec![0; 4096];
        let received = socket::receive(self.socket.as_fd(), &mut answer, 0);
        let received = received.map_err(|error| lost_pager(error, "listening to"))?;
        match answer.get(..received.len) {
            Some(b"ok") => Ok(()),
            Some(b"") | None => Err(Error::Peer(PAGER_GONE.to_owned())),
            Some(reason) => {
                let reason = String::from_utf8_lossy(reason);
                Err(Error::Peer(format!("the lazy-pages process: {reason}")))
            }
        }
    }

    /// Tells the pager that the tasks run. Whoever fetches pages waits for this before it lets the
    /// tasks end that they are fetched from.
    pub fn restored(self) {
        if let Err(error) = self.send(RESTORED, &[]) {
            // It has everything and is gone already.
            tracing::debug!("{error}");
        }
    }

    fn send(&self, data: &[u8], files: &[BorrowedFd<'_>]) -> Result<()> {
        let message = Message { data, files, ..Message::default() };
        let sent = socket::send(self.socket.as_fd(), &message, 0);
        sent.map(drop).map_err(|error| lost_pager(error, "telling"))
    }
}

impl Drop for PagerLine {
    /// The pager has a copy of this end if it was forked: closing does not tell it.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

/// Why a pager was not spoken to: one that has ended need not have taken the connection.
fn lost_pager(source: io::Error, doing: &str) -> Error {
    match source.kind() {
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::NotConnected => Error::Peer(PAGER_GONE.to_owned()),
        _ => Error::Os { what: format!("{doing} the lazy-pages process"), source },
    }
}

fn receive(line: BorrowedFd<'_>, data: &mut [u8]) -> Result<Received> {
    socket::receive(line, data, 0).context(|| "receive".to_owned())
}

/// The dump that still has pages, and the restore that needs them.
#[derive(Debug)]
pub(super) struct Remote<'a> {
    /// The connection to the dump.
    pub borrower: Borrower,
    /// What is asked of it that nobody waits for.
    ahead: AskedAhead,
    line: &'a OwnedFd,
    restorer: &'a OwnedFd,
    shortage: Shortage,
    /// What is left when the tasks are not ended again.
    mark: Option<Waymark>,
}

impl Remote<'_> {
    /// All pages are here that are needed: waits until the restore has let the tasks run, and lets the dump end its own. From
    /// when the mark is left on, nothing here ends those that run. A task that has ended early has done so by itself, or was
    /// killed since memory ran out here.
    ///
    /// # Errors
    /// A restore that has failed after all; a mark that cannot be left; without one, a dump that cannot be told or has taken its
    /// tasks back; and tasks that did not fit here: they are to go on where they were.
    pub(crate) fn conclude(self, has_ended_early: bool, buffer: &mut Vec<u8>) -> Result<()> {
        if let Some(place) = self.shortage.place().filter(|_| has_ended_early) {
            return Err(Error::Peer(format!("memory ran out {place}")));
        }
        let mut data = [0; RESTORED.len()];
        let received = next(self.line, self.restorer, &mut data)?;
        if &data[..received.len] != RESTORED {
            return Err(Error::invalid("what the restore says", "is not understood"));
        }
        let Some(mark) = &self.mark else { return self.borrower.close(buffer) };
        mark.leave().context(|| "say that all pages are here".to_owned())?;
        if let Err(error) = self.borrower.close(buffer) {
            tracing::warn!(
                "{error}; the tasks run here, and are to be ended where they were dumped"
            );
        }
        Ok(())
    }
}

/// Waits for a packet of the restore, whose process is `sender`.
fn next(line: &OwnedFd, sender: &OwnedFd, data: &mut [u8]) -> Result<Received> {
    let mut fds = [
        PollFd::from_borrowed_fd(line.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(sender.as_fd(), PollFlags::IN),
    ];
    poll(&mut fds, None).context(|| "poll".to_owned())?;
    let received = match fds[0].revents().is_empty() {
        true => Received::default(),
        false => receive(line.as_fd(), data)?,
    };
    match received.len {
        0 => Err(Error::Peer("the restore has failed".to_owned())),
        _ => Ok(received),
    }
}

/// What a restore hands over: `take` gets each address space as it comes, with the id of the images that it is of. Returns
/// that id when all have come. `sender` is the process that restores, whose end ends this, too.
///
/// # Errors
/// What is not understood; a restore that ends before it has said all; if it has, the first error of `take`.
pub fn accept_all(
    line: &OwnedFd,
    sender: &OwnedFd,
    mut take: impl FnMut(&str, Handed) -> Result<()>,
) -> Result<String> {
    let bad = || Error::invalid("what the restore says", "is not understood");
    let mut data = vec![0; RANGES * RANGE];
    let mut next = || -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let received = self::next(line, sender, &mut data)?;
        Ok((data[..received.len].to_vec(), received.files))
    };
    let images = String::from_utf8(next()?.0).map_err(|_| bad())?;
    let mut taken = Ok(());
    for _ in 0..MAX_TASKS {
        let (head, files) = next()?;
        if head == b"end" {
            return taken.map(|()| images);
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
                ranges.push(word(start)?..word(end)?);
            }
            if ranges.len() > MAX_RANGES {
                return Err(bad());
            }
        }
        let space = Handed { id, uffd, pidfd, missing: ranges.into_iter().collect() };
        // It is told what is wrong when it listens.
        taken = taken.and_then(|()| take(&images, space));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::VmaEntry;
    use torpor_policy::memory::status;

    use super::*;

    #[test]
    fn what_children_are_not_to_get_does_not_wait() {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
        let end = crate::memory::vma::PAGE;
        let plain = VmaEntry { end, status: status::ANON_PRIVATE, flags, ..VmaEntry::default() };
        let read = |entry: VmaEntry| MemoryArea::of(&entry).unwrap();
        let advised = |advice: i32| read(VmaEntry { madv: Some(1 << advice), ..plain });
        assert!(may_wait(&read(plain)) && may_wait(&advised(libc::MADV_DONTFORK)));
        assert!(!may_wait(&advised(libc::MADV_WIPEONFORK)));
        let with = |flag: i32| read(VmaEntry { flags: flags | flag.cast_unsigned(), ..plain });
        let stack = with(libc::MAP_GROWSDOWN);
        assert!(!may_wait(&stack) && stack_can_wait(&stack) && !stack_can_wait(&read(plain)));
        assert!(!may_wait(&with(libc::MAP_LOCKED)) && !may_wait(&with(libc::MAP_HUGETLB)));
        for bit in [status::USERFAULTFD, status::PINNED] {
            assert!(!may_wait(&read(VmaEntry { status: plain.status | bit, ..plain })));
        }
    }
}
