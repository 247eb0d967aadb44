//! Open files: what a descriptor refers to, saved and made again.
//!
//! An *open file description* is saved once, however many descriptors of
//! however many tasks refer to it. The dump walks all descriptors, fetches each
//! new description with `pidfd_getfd` and asks the kinds below, in order, to
//! describe it. The restore opens each description once, in the supervisor, and
//! hands it to every task that holds it.
//!
//! A kind of file is a module with a [`Dumper`] and a [`Restorer`], and a line in
//! each of the two tables at the end of this file.

pub mod buildid;
pub mod description;
pub mod epoll;
pub mod eventfd;
pub mod ext;
pub mod fifo;
pub mod fown;
pub mod ghost;
pub mod io_uring;
pub mod lock;
pub mod memfd;
pub mod mqueue;
pub mod notify;
pub mod ns_file;
pub mod pidfd;
pub mod pipe;
pub mod queue;
pub mod regular;
pub mod remap;
pub mod signalfd;
pub mod socket;
pub mod table;
#[cfg(test)]
mod testing;
pub mod timerfd;
pub mod tty;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::OFlags;
use torpor_images::proto::{FdTypes, FileEntry, FileLockEntry, FownEntry, MemfdInodeEntry};

use self::remap::Temporary;
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::restore::Restore;

/// An open file description met for the first time by the dump.
#[derive(Debug)]
pub struct Found {
    /// The number that the images know it by.
    pub id: u32,
    /// Index into [`Dump::tasks`] of the first holder.
    pub task: usize,
    /// Its pid, in the supervisor's pid namespace.
    pub pid: i32,
    /// The number of the descriptor in that task; -1 where there is none (a mapped
    /// file, an executable, a directory).
    pub fd: i32,
    /// A duplicate (`pidfd_getfd`): same description, so do not move its offset.
    pub file: OwnedFd,
    /// `fstat` of it.
    pub stat: rustix::fs::Stat,
    /// `statfs` type of it (`f_type`), 0 where that fails.
    pub fs_type: i64,
    /// The text of the link `/proc/PID/fd/FD`, e.g. `pipe:[4711]`.
    pub link: PathBuf,
    /// `/proc/PID/fdinfo/FD`.
    pub info: FdInfo,
    /// Owner and signal for SIGIO (`F_GETOWN_EX`, `F_GETSIG`).
    pub fown: FownEntry,
}

impl Found {
    /// The refusal that names this descriptor.
    pub fn refuse(&self, reason: impl Into<String>) -> Error {
        let object = match self.fd {
            // A mapped file, an executable, a directory: no descriptor refers to it.
            ..0 => self.link.display().to_string(),
            fd => format!("fd {fd} ({})", self.link.display()),
        };
        Error::refused(self.pid, object, reason)
    }

    /// The `O_*` flags of the description: `O_CLOEXEC` is the descriptor's.
    pub fn flags(&self) -> u32 {
        self.info.flags & !OFlags::CLOEXEC.bits()
    }

    /// Whether it was opened with `O_PATH`: a reference to a path and nothing else,
    /// whatever the path leads to.
    pub fn is_path_only(&self) -> bool {
        self.flags() & OFlags::PATH.bits() != 0
    }

    /// Whether it is an anonymous inode of this kind, e.g. `[eventfd]`.
    pub fn is_anon(&self, name: &str) -> bool {
        self.link_bytes().strip_prefix(b"anon_inode:") == Some(name.as_bytes())
    }

    /// The link's text; names of files need not be UTF-8.
    pub fn link_bytes(&self) -> &[u8] {
        self.link.as_os_str().as_bytes()
    }

    /// An entry of `files.img` for it, whose message is still to be added.
    pub fn entry(&self, kind: FdTypes) -> FileEntry {
        FileEntry { r#type: kind.into(), id: self.id, ..FileEntry::default() }
    }
}

/// The common part of `/proc/PID/fdinfo/FD`, and the rest as text.
#[derive(Debug, Clone, Default)]
pub struct FdInfo {
    /// File offset.
    pub pos: i64,
    /// `O_*` flags with `O_CLOEXEC` as shown by the kernel.
    pub flags: u32,
    /// The mount that the file was opened through.
    pub mnt_id: i32,
    /// Inode number.
    pub ino: u64,
    /// The remaining lines, `key:<tab>value`, in the order given.
    pub rest: Vec<String>,
}

impl FdInfo {
    /// The values of all remaining lines that start with `key:`.
    pub fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.rest.iter().filter_map(move |line| {
            line.strip_prefix(key).and_then(|r| r.strip_prefix(':')).map(str::trim)
        })
    }
}

/// The dump half of a kind of file.
pub trait Dumper: std::fmt::Debug {
    /// Describes the file, or says that it is of another kind (`Ok(None)`).
    fn describe(&mut self, cx: &mut Dump<'_>, found: &Found) -> Result<Option<FileEntry>>;

    /// After the last descriptor of the tree: writes the images that belong to
    /// the kind as a whole (queued data, shared inodes), refuses what is dangling.
    fn finish(&mut self, _cx: &mut Dump<'_>) -> Result<()> {
        Ok(())
    }
}

/// The restore half of a kind of file. Methods are called in this order, each for
/// all kinds before the next one.
pub trait Restorer: std::fmt::Debug {
    /// Reads and checks all images of this kind, before anything is created.
    /// `entries` are the descriptions of this kind, by id.
    fn load(&mut self, _cx: &mut Restore<'_>, _entries: &[FileEntry]) -> Result<()> {
        Ok(())
    }

    /// The husk of `task` leads a session now and has no children in it yet: they
    /// inherit its terminal.
    fn session(&mut self, _cx: &mut Restore<'_>, _task: usize) -> Result<()> {
        Ok(())
    }

    /// Opens one description. Called at most once for an id; where several come
    /// into being together (both ends of a pipe) the others go into
    /// [`OpenFiles::insert`]. May open what it depends on with [`Restore::file`].
    fn open(&mut self, cx: &mut Restore<'_>, entry: &FileEntry) -> Result<OwnedFd>;

    /// After all descriptions are open: connects them and fills their queues.
    fn connect(&mut self, _cx: &mut Restore<'_>) -> Result<()> {
        Ok(())
    }

    /// After a task holds the descriptor: what only the task itself can do
    /// (epoll interest, POSIX locks), by remote calls through [`Restore::remote`].
    /// Called for every descriptor of this kind in every task.
    fn attach(&mut self, _cx: &mut Restore<'_>, _holder: Holder, _entry: &FileEntry) -> Result<()> {
        Ok(())
    }
}

/// A descriptor of a restored task.
#[derive(Debug, Clone, Copy)]
pub struct Holder {
    /// Index into [`Restore::tasks`].
    pub task: usize,
    /// Descriptor number.
    pub fd: i32,
}

/// The descriptions that the restore has opened, by id.
#[derive(Debug, Default)]
pub struct OpenFiles {
    by_id: HashMap<u32, OwnedFd>,
    /// Names that files have for as long as the restore lasts.
    pub temporary: Temporary,
    /// Descriptors whose watches are still to be set up.
    pub sleepers: Vec<notify::Sleeper>,
    /// Locks that are still to be taken.
    pub locks: Vec<FileLockEntry>,
    /// Files that are no memfds, but shared anonymous memory, by id.
    pub anonymous: HashMap<u32, MemfdInodeEntry>,
    /// The masters of terminals whose slaves only are in the tree, for the caller.
    pub orphan_masters: Vec<OwnedFd>,
}

impl OpenFiles {
    /// The description `id`, if it is open already.
    pub fn get(&self, id: u32) -> Option<BorrowedFd<'_>> {
        self.by_id.get(&id).map(AsFd::as_fd)
    }

    /// Adds a description.
    pub fn insert(&mut self, id: u32, file: OwnedFd) {
        self.by_id.insert(id, file);
    }
}

/// The kinds in the order in which the dump asks them.
pub fn dumpers() -> Vec<Box<dyn Dumper>> {
    vec![
        Box::<socket::SocketDumper>::default(),
        Box::<eventfd::EventfdDumper>::default(),
        Box::<epoll::EpollDumper>::default(),
        Box::<signalfd::SignalfdDumper>::default(),
        Box::<timerfd::TimerfdDumper>::default(),
        Box::<pipe::PipeDumper>::default(),
        Box::<fifo::FifoDumper>::default(),
        Box::<ns_file::NsFileDumper>::default(),
        Box::<pidfd::PidfdDumper>::default(),
        Box::<notify::InotifyDumper>::default(),
        Box::<notify::FanotifyDumper>::default(),
        Box::<tty::TtyDumper>::default(),
        Box::<memfd::MemfdDumper>::default(),
        Box::<mqueue::MqueueDumper>::default(),
        Box::<io_uring::IoUringDumper>::default(),
        Box::<regular::RegularDumper>::default(),
    ]
}

/// The restorer of each type of `files.img`.
pub fn restorers() -> Vec<(FdTypes, Box<dyn Restorer>)> {
    vec![
        (FdTypes::Eventpoll, Box::<epoll::EpollRestorer>::default()),
        (FdTypes::Eventfd, Box::<eventfd::EventfdRestorer>::default()),
        (FdTypes::Signalfd, Box::<signalfd::SignalfdRestorer>::default()),
        (FdTypes::Timerfd, Box::<timerfd::TimerfdRestorer>::default()),
        (FdTypes::Fifo, Box::<fifo::FifoRestorer>::default()),
        (FdTypes::Inotify, Box::<notify::InotifyRestorer>::default()),
        (FdTypes::Fanotify, Box::<notify::FanotifyRestorer>::default()),
        (FdTypes::Pidfd, Box::<pidfd::PidfdRestorer>::default()),
        (FdTypes::Ns, Box::<ns_file::NsFileRestorer>::default()),
        (FdTypes::Pipe, Box::<pipe::PipeRestorer>::default()),
        (FdTypes::Tty, Box::<tty::TtyRestorer>::default()),
        (FdTypes::Ext, Box::<io_uring::IoUringRestorer>::default()),
        (FdTypes::Memfd, Box::<memfd::MemfdRestorer>::default()),
        (FdTypes::Reg, Box::<regular::RegularRestorer>::default()),
        (FdTypes::Inetsk, Box::<socket::InetRestorer>::default()),
        (FdTypes::Unixsk, Box::<socket::UnixRestorer>::default()),
        (FdTypes::Packetsk, Box::<socket::PacketRestorer>::default()),
        (FdTypes::Netlinksk, Box::<socket::NetlinkRestorer>::default()),
    ]
}
