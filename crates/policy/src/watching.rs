//! What tells tasks of others' doings, epoll sets and inotify descriptors: read of their entries once, listed, and
//! made.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{EventpollTfdEntry, FhEntry, FileEntry, InotifyWdEntry};

/// What waits for several files (epoll(7)).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EpollSet {
    /// The number of the file in the images.
    pub file: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// What it waits for.
    pub watches: Vec<EpollWatch>,
}

/// A file that an epoll set watches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EpollWatch {
    /// A descriptor of it.
    pub fd: u32,
    /// The events (`EPOLLIN` …).
    pub events: u32,
    /// What the program is told with them.
    pub data: u64,
    /// The number of its inode.
    pub inode: Option<u64>,
    /// The number of the file in the images; CRIU's do not have it.
    pub watched: Option<u32>,
    /// The number that the set knows it by, if not that of the descriptor.
    pub number: Option<u32>,
}

/// What is told of changes of files (inotify(7)).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Inotify {
    /// The number of the file in the images.
    pub file: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// What it watches.
    pub watches: Vec<InotifyWatch>,
    /// Events were lost.
    pub overflow: bool,
}

/// A file that is watched for changes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InotifyWatch {
    /// The number of the watch.
    pub number: u32,
    /// The events that count (`IN_MODIFY` …).
    pub mask: u32,
    /// The number of the file in the images; CRIU's do not have it.
    pub watched: Option<u32>,
    /// Its device and inode.
    pub inode: (u32, u64),
    /// How CRIU's images describe it.
    pub handle: WatchedHandle,
}

/// A file as the kernel names it for servers of files (open_by_handle_at(2)).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WatchedHandle {
    /// The number of the mount; below 0 if none is named.
    pub mount: i32,
    /// A path that leads there, on the mount.
    pub path: Option<Vec<u8>>,
    /// The type of the handle.
    pub kind: i32,
    /// The handle; `None` if the images have less of it than they say.
    pub bytes: Option<Vec<u8>>,
}

impl EpollSet {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let epfd = entry.epfd.as_ref()?;
        let watch = |tfd: &EventpollTfdEntry| EpollWatch {
            fd: tfd.tfd,
            events: tfd.events,
            data: tfd.data,
            inode: tfd.inode,
            watched: tfd.torpor_file_id,
            number: tfd.torpor_number,
        };
        let watches = epfd.tfd.iter().map(watch).collect();
        Some(EpollSet { file: epfd.id, flags: epfd.flags, watches })
    }

    /// Whether the host does not sleep as long as an event waits.
    pub(crate) fn keeps_the_host_awake(&self) -> bool {
        const WAKEUP: u32 = libc::EPOLLWAKEUP.cast_unsigned();
        self.watches.iter().any(|watch| watch.events & WAKEUP != 0)
    }
}

impl EpollWatch {
    /// The number that the set knows the file by.
    #[must_use]
    pub fn known_by(&self) -> u32 {
        self.number.unwrap_or(self.fd)
    }
}

impl Inotify {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let ify = entry.ify.as_ref()?;
        let watch = |wd: &InotifyWdEntry| InotifyWatch {
            number: wd.wd,
            mask: wd.mask,
            watched: wd.torpor_file_id,
            inode: (wd.s_dev, wd.i_ino),
            handle: WatchedHandle::of(&wd.f_handle),
        };
        let watches = ify.wd.iter().map(watch).collect();
        let (file, flags, overflow) = (ify.id, ify.flags, ify.torpor_overflow());
        Some(Inotify { file, flags, watches, overflow })
    }

    /// The number of a watch that there cannot be, or that another one has.
    pub(crate) fn impossible_watch(&self) -> Option<u32> {
        let mut seen = HashSet::new();
        let mut is_new = |number| i32::try_from(number).is_ok_and(|wd| wd > 0 && seen.insert(wd));
        self.watches.iter().map(|watch| watch.number).find(|&number| !is_new(number))
    }
}

impl WatchedHandle {
    /// The one that an entry describes.
    #[must_use]
    pub fn of(entry: &FhEntry) -> Self {
        let bytes: Vec<u8> = entry.handle.iter().flat_map(|word| word.to_le_bytes()).collect();
        let len = usize::try_from(entry.bytes).ok();
        WatchedHandle {
            mount: entry.mnt_id.and_then(|id| i32::try_from(id).ok()).unwrap_or(-1),
            path: entry.path.clone(),
            kind: entry.r#type.cast_signed(),
            bytes: len.and_then(|len| bytes.get(..len)).map(<[u8]>::to_vec),
        }
    }
}

/// Files, and how many.
fn count(watches: usize) -> String {
    match watches {
        1 => "1 file".to_owned(),
        watches => format!("{watches} files"),
    }
}

impl fmt::Display for EpollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watched = count(self.watches.len());
        write!(f, "an epoll set that watches {watched} (file {})", self.file)
    }
}

impl fmt::Display for Inotify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watched = count(self.watches.len());
        write!(f, "an inotify descriptor that watches {watched} (file {})", self.file)
    }
}
