//! Open files that anybody makes, without a path: read of their entries once, listed, and made.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FileEntry;

use crate::memory_file::{MemoryFile, MemoryInode};
use crate::watching::{EpollSet, Inotify};

/// Images of Torpor's old versions have it in the lowest bit of the flags, which is free: an
/// eventfd is always open for reading and writing, `O_RDWR` is bit 1.
const SEMAPHORE: u32 = libc::EFD_SEMAPHORE.cast_unsigned();
/// What images say of a process that has ended and been reaped.
const ENDED: i32 = -1;

/// Such a file, or the content of some.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PlainFile {
    /// A counter.
    Eventfd(Eventfd),
    /// A set of signals.
    Signalfd(Signalfd),
    /// A process of the tree.
    Pidfd(Pidfd),
    /// A namespace of the tree.
    Namespace(NamespaceFile),
    /// What waits for several files.
    Epoll(EpollSet),
    /// What is told of changes of files.
    Inotify(Inotify),
    /// A file in memory.
    Memory(MemoryFile),
    /// What files in memory are descriptions of.
    Inode(MemoryInode),
}

/// A counter with a descriptor (eventfd(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Eventfd {
    /// The number of the file in the images.
    pub file: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// What it has counted.
    pub count: u64,
    /// A read takes 1 from it.
    pub semaphore: bool,
}

/// A set of signals with a descriptor (signalfd(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signalfd {
    /// The number of the file in the images.
    pub file: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// The signals.
    pub signals: u64,
}

/// A process with a descriptor (pidfd_open(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pidfd {
    /// The number of the file in the images.
    pub file: u32,
    /// The flags of pidfd_open(2).
    pub flags: u32,
    /// The process, by its pid in the images; `None` of one that has ended.
    pub process: Option<i32>,
    /// The number of its inode, which tells those that have ended apart.
    pub inode: u32,
}

/// A descriptor of a namespace in which a task of the tree lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NamespaceFile {
    /// The number of the file in the images.
    pub file: u32,
    /// The number of the namespace.
    pub namespace: u32,
}

impl PlainFile {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let one = Eventfd::of(entry).map(PlainFile::Eventfd);
        one.or_else(|| Signalfd::of(entry).map(PlainFile::Signalfd))
            .or_else(|| Pidfd::of(entry).map(PlainFile::Pidfd))
            .or_else(|| NamespaceFile::of(entry).map(PlainFile::Namespace))
            .or_else(|| EpollSet::of(entry).map(PlainFile::Epoll))
            .or_else(|| Inotify::of(entry).map(PlainFile::Inotify))
            .or_else(|| MemoryFile::of(entry).map(PlainFile::Memory))
    }
}

impl Eventfd {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let efd = entry.efd.as_ref()?;
        Some(Eventfd {
            file: efd.id,
            flags: efd.flags & !SEMAPHORE,
            count: efd.counter,
            semaphore: efd.torpor_semaphore() || efd.flags & SEMAPHORE != 0,
        })
    }
}

impl Signalfd {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let sgfd = entry.sgfd.as_ref()?;
        Some(Signalfd { file: sgfd.id, flags: sgfd.flags, signals: sgfd.sigmask })
    }
}

impl Pidfd {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let pidfd = entry.pidfd.as_ref()?;
        let process = Some(pidfd.nspid).filter(|pid| *pid != ENDED);
        Some(Pidfd { file: pidfd.id, flags: pidfd.flags, process, inode: pidfd.ino })
    }
}

impl NamespaceFile {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        entry.nsf.as_ref().map(|nsf| NamespaceFile { file: nsf.id, namespace: nsf.ns_id })
    }
}

impl fmt::Display for PlainFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlainFile::Eventfd(Eventfd { file, count, .. }) => {
                write!(f, "an eventfd that has counted {count} (file {file})")
            }
            PlainFile::Signalfd(Signalfd { file, signals, .. }) => {
                write!(f, "a signalfd of the signals {signals:#x} (file {file})")
            }
            PlainFile::Pidfd(Pidfd { file, process: Some(pid), .. }) => {
                write!(f, "a pidfd of task {pid} (file {file})")
            }
            PlainFile::Pidfd(Pidfd { file, .. }) => {
                write!(f, "a pidfd of a process that has ended (file {file})")
            }
            PlainFile::Namespace(NamespaceFile { file, namespace }) => {
                write!(f, "a descriptor of namespace {namespace} (file {file})")
            }
            PlainFile::Epoll(set) => set.fmt(f),
            PlainFile::Inotify(inotify) => inotify.fmt(f),
            PlainFile::Memory(memory) => memory.fmt(f),
            PlainFile::Inode(inode) => inode.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        EventfdFileEntry, EventpollFileEntry, EventpollTfdEntry, FhEntry, InotifyFileEntry,
        InotifyWdEntry, MemfdFileEntry, NsFileEntry, PidfdEntry, SignalfdEntry,
    };

    use super::*;

    fn entries() -> [FileEntry; 8] {
        let of = || FileEntry { id: 7, ..FileEntry::default() };
        let efd = EventfdFileEntry { id: 7, flags: 0o4003, counter: 5, ..Default::default() };
        let sgfd = SignalfdEntry { id: 7, sigmask: 0x200, ..Default::default() };
        let pidfd = PidfdEntry { id: 7, nspid: 3, ..Default::default() };
        let ended = PidfdEntry { nspid: -1, ..pidfd };
        let nsf = NsFileEntry { id: 7, ns_id: 11, ..Default::default() };
        let tfd = vec![EventpollTfdEntry { tfd: 4, ..Default::default() }; 2];
        let epfd = EventpollFileEntry { id: 7, tfd, ..Default::default() };
        let f_handle = FhEntry { bytes: 9, handle: vec![1], ..Default::default() };
        let wd = vec![InotifyWdEntry { wd: 1, f_handle, ..Default::default() }];
        let ify = InotifyFileEntry { id: 7, wd, ..Default::default() };
        let memfd = MemfdFileEntry { id: 7, inode_id: 2, ..Default::default() };
        [
            FileEntry { efd: Some(efd), ..of() },
            FileEntry { sgfd: Some(sgfd), ..of() },
            FileEntry { pidfd: Some(pidfd), ..of() },
            FileEntry { pidfd: Some(ended), ..of() },
            FileEntry { nsf: Some(nsf), ..of() },
            FileEntry { epfd: Some(epfd), ..of() },
            FileEntry { ify: Some(ify), ..of() },
            FileEntry { memfd: Some(memfd), ..of() },
        ]
    }

    #[test]
    fn files_of_each_kind() {
        let texts = entries().map(|entry| PlainFile::of(&entry).unwrap().to_string());
        assert_eq!(
            texts,
            [
                "an eventfd that has counted 5 (file 7)",
                "a signalfd of the signals 0x200 (file 7)",
                "a pidfd of task 3 (file 7)",
                "a pidfd of a process that has ended (file 7)",
                "a descriptor of namespace 11 (file 7)",
                "an epoll set that watches 2 files (file 7)",
                "an inotify descriptor that watches 1 file (file 7)",
                "a file in memory, inode 2 (file 7)",
            ]
        );
        assert_eq!(PlainFile::of(&FileEntry::default()), None);
    }

    #[test]
    fn semaphores_of_old_images() {
        let [eventfd, ..] = entries();
        let eventfd = Eventfd::of(&eventfd).unwrap();
        assert_eq!((eventfd.flags, eventfd.semaphore), (0o4002, true));
    }

    #[test]
    fn a_handle_that_is_too_short_is_none() {
        let [.., inotify, _] = entries();
        let inotify = Inotify::of(&inotify).unwrap();
        assert_eq!(inotify.watches[0].handle.bytes, None);
    }
}
