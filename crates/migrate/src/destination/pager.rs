//! The job that brings pages in while the tasks run.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use torpor_worker::{Event, Idle, Worker};

use super::restore::named;
use crate::engine::{self, PAGER, PAGES, POST_RESUME, judge, over_pages, repeat, wait_readable};
use crate::error::{Context, Error, Result};
use crate::task::Task;

/// Where a restore finds its pager, in the work directory.
const SOCKET: &str = "lazy-pages.socket";

/// A process that is to become the pager, and the socket that a restore finds it at. Both are there before the tasks are
/// stopped: the restore begins as soon as the images are there, whenever the pager has reached the source.
#[derive(Debug)]
pub(super) struct PagerToBe {
    idle: Idle,
    listener: OwnedFd,
}

impl PagerToBe {
    /// One for restores in `dir`.
    ///
    /// # Errors
    /// If the socket cannot be made there, or no process be started.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let listener = listen_in(dir).context(|| format!("listen in {}", dir.display()))?;
        Ok(Self { idle: engine::idle()?, listener })
    }
}

/// A socket that listens in `dir`, however long the name of that is.
fn listen_in(dir: &Path) -> rustix::io::Result<OwnedFd> {
    let dir = open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let path = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 1).map(|()| listener)
}

/// Brings pages in while the tasks run.
#[derive(Debug)]
pub(super) struct Pager {
    worker: Worker,
}

impl Pager {
    /// Has a process become it, of the images of a round. It opens them with what `options` of restores name.
    ///
    /// # Errors
    /// If that process has ended.
    pub(super) fn start(
        to_be: PagerToBe,
        dir: &Path,
        round: u32,
        pages: &OwnedFd,
        options: &[String],
    ) -> Result<Self> {
        let (round, socket) = (round.to_string(), PAGER.to_string());
        let words = ["lazy-pages", "--page-server", "--work-dir", ".", "--images-dir", &round];
        let mut args: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        args.extend(["--lazy-socket".to_owned(), socket]);
        args.extend(over_pages());
        args.extend(named(options, &["--identity", "--trust", "--crl"]));
        // The socket is the pager's alone from here on: when that ends, a restore that has connected notices.
        let PagerToBe { idle, listener } = to_be;
        let fds = [(PAGES, pages.as_fd()), (PAGER, listener.as_fd())];
        let worker = engine::start_in(idle, args, dir, (&[], &[POST_RESUME]), &fds)?;
        Ok(Self { worker })
    }

    /// Its process.
    ///
    /// # Errors
    /// If it has ended.
    pub(super) fn task(&self) -> Result<Task> {
        Task::find(i32::try_from(self.worker.pid()).unwrap_or(0))
    }

    /// Why it has ended early, if it says so by now.
    pub(super) fn failure(mut self) -> Option<Error> {
        while wait_readable(&[self.worker.as_fd()], Some(Duration::ZERO)).ok()? == [true] {
            match self.worker.next_event().ok()? {
                Event::Ended(outcome) => return judge("lazy-pages", outcome).err(),
                event => repeat(&event),
            }
        }
        None
    }

    /// Waits until all pages are there, and the source was told so; or until nothing is left of it, which is two processes
    /// that look after each other.
    ///
    /// # Errors
    /// If the restore has failed, the source went away before, or both processes were killed: tasks that it has left its mark
    /// for run, and others have ended, or are to be ended.
    pub(super) fn finish(self) -> Result<()> {
        engine::finish("lazy-pages", self.worker).map(drop)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::net::connect;

    use super::*;

    /// Names of sockets are short, and those of directories need not be.
    #[test]
    fn a_pager_is_found_before_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("d".repeat(200));
        std::fs::create_dir(&dir).unwrap();
        let listener = listen_in(&dir).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let near = open(&dir, flags, Mode::empty()).unwrap();
        let path = format!("/proc/self/fd/{}/{SOCKET}", near.as_raw_fd());
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let restore = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        connect(&restore, &SocketAddrUnix::new(path).unwrap()).unwrap();
        drop(listener);
        let ready = wait_readable(&[restore.as_fd()], Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, [true], "who has connected notices that nobody is there any more");
    }
}
