//! Open files of the images: each is read of its entry once, as what it is. What opens a file takes what is read here, and
//! no entry.

use std::collections::HashMap;

use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry};

use crate::error::{Error, Result};
use crate::fanotify::Fanotify;
use crate::fifo::FifoEnd;
use crate::inet_socket::InetSocket;
use crate::io_uring::IoUring;
use crate::memory_file::MemoryFile;
use crate::netlink::Netlink;
use crate::packet::PacketSocket;
use crate::parts;
use crate::path_file::{FoundBy, PathFile};
use crate::pipe::PipeEnd;
use crate::plain_file::{Eventfd, NamespaceFile, Pidfd, Signalfd};
use crate::signal_owner::SignalOwner;
use crate::socket::SocketSetup;
use crate::socket_kind::SocketKind;
use crate::socket_options::SocketOptions;
use crate::terminal::TerminalFile;
use crate::timers::Timerfd;
use crate::tun_file::TunFile;
use crate::unix_end::UnixEnd;
use crate::userfaultfd::Userfaultfd;
use crate::watching::{EpollSet, Inotify};

/// An open file of the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFile {
    /// Its number.
    pub id: u32,
    /// What it is.
    pub kind: FileKind,
    /// Who is sent a signal, as far as its own entry says: see [`OpenFile::owner`].
    signals: Option<SignalOwner>,
}

/// What an open file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileKind {
    /// It is opened by a path.
    Path(PathFile),
    /// An end of a pipe.
    Pipe(PipeEnd),
    /// An end of a pipe that has a path.
    Fifo(FifoEnd),
    /// An end of a terminal.
    Terminal(TerminalFile),
    /// An Internet socket.
    Inet(Box<InetSocket>),
    /// A Unix socket.
    Unix(Box<UnixEnd>),
    /// A packet socket.
    Packet(Box<(SocketSetup, PacketSocket)>),
    /// A netlink socket.
    Netlink(Box<(SocketSetup, Netlink)>),
    /// A counter.
    Eventfd(Eventfd),
    /// A set of signals.
    Signalfd(Signalfd),
    /// A clock that rings.
    Timerfd(Timerfd),
    /// A process.
    Pidfd(Pidfd),
    /// A namespace.
    Namespace(NamespaceFile),
    /// What waits for several files.
    Epoll(EpollSet),
    /// What is told of changes of files.
    Inotify(Inotify),
    /// Likewise, as fanotify(7) does.
    Fanotify(Fanotify),
    /// A file in memory.
    Memory(MemoryFile),
    /// A network device of a program.
    Tun(TunFile),
    /// An io_uring instance.
    IoUring(Box<IoUring>),
    /// What is told of accesses to memory.
    Userfaultfd(Box<Userfaultfd>),
}

/// A function for each kind: what a file of that kind is.
macro_rules! as_kind {
    ($($(#[$doc:meta])* $name:ident: $kind:ident($ty:ty);)*) => {
        impl OpenFile {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(&self) -> Option<&$ty> {
                match &self.kind {
                    FileKind::$kind(file) => Some(file),
                    _ => None,
                }
            })*
        }
    };
}

as_kind! {
    /// One that is opened by a path.
    path: Path(PathFile);
    /// An end of a pipe.
    pipe: Pipe(PipeEnd);
    /// An end of a pipe that has a path.
    fifo: Fifo(FifoEnd);
    /// An end of a terminal.
    terminal: Terminal(TerminalFile);
    /// An Internet socket.
    inet: Inet(InetSocket);
    /// A Unix socket.
    unix: Unix(UnixEnd);
    /// A packet socket.
    packet: Packet((SocketSetup, PacketSocket));
    /// A clock that rings.
    timerfd: Timerfd(Timerfd);
    /// A process.
    pidfd: Pidfd(Pidfd);
    /// What is told of changes of files, as fanotify(7) does.
    fanotify: Fanotify(Fanotify);
    /// A file in memory.
    memory: Memory(MemoryFile);
    /// A network device of a program.
    tun: Tun(TunFile);
    /// An io_uring instance.
    io_uring: IoUring(IoUring);
    /// What is told of accesses to memory.
    userfaultfd: Userfaultfd(Userfaultfd);
}

impl OpenFile {
    /// All of the images, by their numbers.
    ///
    /// # Errors
    /// A number that two have; the first that there cannot be.
    pub fn all(entries: &[FileEntry]) -> Result<HashMap<u32, Self>> {
        let invalid = |reason| Error::Invalid { image: kind::FILES.file_name(0), reason };
        let mut all = HashMap::new();
        for entry in entries {
            if all.insert(entry.id, Self::read(entry).map_err(invalid)?).is_some() {
                return Err(invalid(format!("file {} appears twice", entry.id)));
            }
        }
        Ok(all)
    }

    /// The one that an entry describes.
    ///
    /// # Errors
    /// What no dump writes: a type that is not supported; one without its part, with another part, or whose part is of
    /// another file; what that cannot say.
    pub fn read(entry: &FileEntry) -> std::result::Result<Self, String> {
        parts::check(entry)?;
        let kind = FileKind::read(entry)?;
        Ok(OpenFile { id: entry.id, kind, signals: SignalOwner::of(entry) })
    }

    /// Who is sent a signal when it becomes ready; that of a fifo is said where its path is, one of `all`. `None` of a file
    /// that has none.
    #[must_use]
    pub fn owner(&self, all: &HashMap<u32, Self>) -> Option<SignalOwner> {
        let path = || all.get(&self.fifo()?.path)?.signals;
        self.signals.or_else(path)
    }

    /// What socket it is, if it is one.
    #[must_use]
    pub fn socket(&self) -> Option<&SocketKind> {
        match &self.kind {
            FileKind::Inet(socket) => Some(&socket.kind),
            FileKind::Unix(socket) => Some(&socket.kind),
            FileKind::Packet(socket) => Some(&socket.0.kind),
            FileKind::Netlink(socket) => Some(&socket.0.kind),
            _ => None,
        }
    }

    /// The number of the network namespace that it belongs to, where it says.
    #[must_use]
    pub fn network(&self) -> Option<u32> {
        match &self.kind {
            FileKind::Tun(tun) => tun.network,
            _ => self.socket()?.network(),
        }
    }

    /// The options of a socket.
    #[must_use]
    pub fn socket_options(&self) -> Option<&SocketOptions> {
        match &self.kind {
            FileKind::Inet(socket) => Some(&socket.options),
            FileKind::Unix(socket) => Some(&socket.options),
            FileKind::Packet(socket) => Some(&socket.0.options),
            FileKind::Netlink(socket) => Some(&socket.0.options),
            _ => None,
        }
    }

    /// The number of the inode of a socket, by which an epoll set may know it.
    #[must_use]
    pub fn inode(&self) -> Option<u32> {
        match &self.kind {
            FileKind::Inet(socket) => Some(socket.inode),
            FileKind::Unix(socket) => Some(socket.link.inode),
            FileKind::Netlink(socket) => socket.0.inode,
            _ => None,
        }
    }
}

impl FileKind {
    /// What messages call it, as images do.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            FileKind::Path(_) => "REG",
            FileKind::Pipe(_) => "PIPE",
            FileKind::Fifo(_) => "FIFO",
            FileKind::Terminal(_) => "TTY",
            FileKind::Inet(_) => "INETSK",
            FileKind::Unix(_) => "UNIXSK",
            FileKind::Packet(_) => "PACKETSK",
            FileKind::Netlink(_) => "NETLINKSK",
            FileKind::Eventfd(_) => "EVENTFD",
            FileKind::Signalfd(_) => "SIGNALFD",
            FileKind::Timerfd(_) => "TIMERFD",
            FileKind::Pidfd(_) => "PIDFD",
            FileKind::Namespace(_) => "NS",
            FileKind::Epoll(_) => "EVENTPOLL",
            FileKind::Inotify(_) => "INOTIFY",
            FileKind::Fanotify(_) => "FANOTIFY",
            FileKind::Memory(_) => "MEMFD",
            FileKind::Tun(_) => "TUNF",
            FileKind::IoUring(_) => "IO_URING",
            FileKind::Userfaultfd(_) => "USERFAULTFD",
        }
    }

    fn read(entry: &FileEntry) -> std::result::Result<Self, String> {
        let (id, ty) = (entry.id, entry.r#type());
        let lacks = |name: &str| format!("file {id} has no {name}");
        let is_no = |name: &str| format!("socket {id}: is no {name} socket");
        Ok(match ty {
            FdTypes::Reg => {
                let file = PathFile::of(entry).ok_or_else(|| lacks("path"))?;
                if file.found != FoundBy::Caller && !file.path.starts_with(b"/") {
                    return Err(format!("file {id} has the path {}", file.text()));
                }
                FileKind::Path(file)
            }
            FdTypes::Pipe => FileKind::Pipe(PipeEnd::of(entry)?.ok_or_else(|| lacks("pipe"))?),
            FdTypes::Fifo => FileKind::Fifo(FifoEnd::of(entry)?.ok_or_else(|| lacks("fifo"))?),
            FdTypes::Tty => {
                FileKind::Terminal(TerminalFile::of(entry).ok_or_else(|| lacks("terminal"))?)
            }
            FdTypes::Inetsk => {
                let socket = InetSocket::of(entry)?.ok_or_else(|| is_no("Internet"))?;
                FileKind::Inet(Box::new(socket))
            }
            FdTypes::Unixsk => {
                FileKind::Unix(Box::new(UnixEnd::of(entry)?.ok_or_else(|| is_no("Unix"))?))
            }
            FdTypes::Packetsk => {
                let socket = SocketSetup::of(entry)?.zip(PacketSocket::of(entry)?);
                FileKind::Packet(Box::new(socket.ok_or_else(|| is_no("packet"))?))
            }
            FdTypes::Netlinksk => {
                let netlink = entry.nlsk.as_ref().map(Netlink::read).transpose()?;
                let socket = SocketSetup::of(entry)?.zip(netlink);
                FileKind::Netlink(Box::new(socket.ok_or_else(|| is_no("netlink"))?))
            }
            FdTypes::Eventfd => {
                let eventfd = Eventfd::of(entry).ok_or_else(|| lacks("eventfd"))?;
                if eventfd.count == u64::MAX {
                    return Err(format!("eventfd {id} counts too far"));
                }
                FileKind::Eventfd(eventfd)
            }
            FdTypes::Signalfd => {
                FileKind::Signalfd(Signalfd::of(entry).ok_or_else(|| lacks("signalfd"))?)
            }
            FdTypes::Timerfd => {
                FileKind::Timerfd(Timerfd::of(entry).ok_or_else(|| lacks("timerfd"))?)
            }
            FdTypes::Pidfd => FileKind::Pidfd(Pidfd::of(entry).ok_or_else(|| lacks("pidfd"))?),
            FdTypes::Ns => {
                FileKind::Namespace(NamespaceFile::of(entry).ok_or_else(|| lacks("namespace"))?)
            }
            FdTypes::Eventpoll => {
                FileKind::Epoll(EpollSet::of(entry).ok_or_else(|| lacks("epoll set"))?)
            }
            FdTypes::Inotify => {
                let inotify = Inotify::of(entry).ok_or_else(|| lacks("inotify descriptor"))?;
                if let Some(number) = inotify.impossible_watch() {
                    return Err(format!("file {id} has an impossible watch {number}"));
                }
                FileKind::Inotify(inotify)
            }
            FdTypes::Fanotify => {
                let group = entry.ffy.as_ref().ok_or_else(|| lacks("fanotify descriptor"))?;
                FileKind::Fanotify(Fanotify::read(group)?)
            }
            FdTypes::Memfd => {
                FileKind::Memory(MemoryFile::of(entry).ok_or_else(|| lacks("memfd"))?)
            }
            FdTypes::Tunf => FileKind::Tun(TunFile::of(entry).ok_or_else(|| lacks("path of tun"))?),
            FdTypes::Ext => match (Userfaultfd::of(entry), IoUring::of(entry)) {
                (Some(faults), _) => FileKind::Userfaultfd(Box::new(faults)),
                (None, Some(ring)) => FileKind::IoUring(Box::new(ring)),
                (None, None) => return Err(lacks("io_uring instance")),
            },
            FdTypes::Und | FdTypes::Bpfmap | FdTypes::CtlTty | FdTypes::AutofsPipe => {
                return Err(format!(
                    "file {id} is of type {}, which is not supported",
                    ty.as_str_name()
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        EventfdFileEntry, FifoEntry, FownEntry, InetSkEntry, PipeEntry, RegFileEntry, TtyFileEntry,
    };

    use super::*;

    fn entry(r#type: FdTypes, change: impl FnOnce(&mut FileEntry)) -> FileEntry {
        let mut entry = FileEntry { id: 7, r#type: r#type.into(), ..FileEntry::default() };
        change(&mut entry);
        entry
    }

    #[test]
    fn what_no_dump_writes_is_named() {
        let refused = |entry: FileEntry, why: &str| {
            assert_eq!(
                OpenFile::all(&[entry]).unwrap_err().to_string(),
                format!("files.img: {why}")
            );
        };
        refused(entry(FdTypes::Und, |_| ()), "file 7 is of type UND, which is not supported");
        refused(entry(FdTypes::Bpfmap, |_| ()), "file 7 is of type BPFMAP, which is not supported");
        refused(entry(FdTypes::Ext, |_| ()), "file 7 has no io_uring instance");
        refused(entry(FdTypes::Netlinksk, |_| ()), "socket 7: is no netlink socket");
        let pipe = Some(PipeEntry { id: 7, ..PipeEntry::default() });
        refused(entry(FdTypes::Reg, |_| ()), "file 7 has no path");
        let why = "file 7: it is of type REG, but has a part of type PIPE";
        refused(entry(FdTypes::Reg, |entry| entry.pipe = pipe), why);
        let wrong = Some(PipeEntry { id: 7, flags: 3, ..PipeEntry::default() });
        let why = "file 7: is an end of pipe 0 for neither reading nor writing";
        refused(entry(FdTypes::Pipe, |entry| entry.pipe = wrong), why);
        let fifo = Some(FifoEntry { id: 7, pipe_id: 1, regf_id: None });
        refused(entry(FdTypes::Fifo, |entry| entry.fifo = fifo), "fifo 7 has no path");
        let other = Some(PipeEntry { id: 8, ..PipeEntry::default() });
        let why = "file 7: its part has number 8";
        refused(entry(FdTypes::Pipe, |entry| entry.pipe = other), why);
        let counts = Some(EventfdFileEntry { id: 7, counter: u64::MAX, ..Default::default() });
        let why = "eventfd 7 counts too far";
        refused(entry(FdTypes::Eventfd, |entry| entry.efd = counts), why);
        let socket = InetSkEntry { id: 7, family: 2, r#type: 1, proto: 6, ..Default::default() };
        let why = "socket 7: is in state 0";
        refused(entry(FdTypes::Inetsk, |entry| entry.isk = Some(socket)), why);
        let twice = entry(FdTypes::Pipe, |entry| entry.pipe = pipe);
        let why = OpenFile::all(&[twice.clone(), twice]).unwrap_err().to_string();
        assert_eq!(why, "files.img: file 7 appears twice");
    }

    #[test]
    fn a_fifo_has_the_owner_of_its_path() {
        let fown = FownEntry { pid: 9, uid: 3, ..FownEntry::default() };
        let name = b"/fifo".to_vec();
        let reg = Some(RegFileEntry { id: 4, fown, name, ..RegFileEntry::default() });
        let path = FileEntry { id: 4, ..entry(FdTypes::Reg, |entry| entry.reg = reg) };
        let fifo = Some(FifoEntry { id: 7, pipe_id: 1, regf_id: Some(4) });
        let terminal = Some(TtyFileEntry { id: 8, tty_info_id: 2, ..TtyFileEntry::default() });
        let entries = [
            path,
            entry(FdTypes::Fifo, |entry| entry.fifo = fifo),
            FileEntry { id: 8, ..entry(FdTypes::Tty, |entry| entry.tty = terminal) },
        ];
        let all = OpenFile::all(&entries).unwrap();
        let pid = |id: u32| all[&id].owner(&all).map(|owner| owner.id);
        assert_eq!([4, 7, 8].map(pid), [Some(9), Some(9), Some(0)]);
        assert_eq!(all[&7].fifo().unwrap(), &FifoEnd { file: 7, pipe: 1, path: 4 });
        assert!(all[&8].path().is_none() && all[&8].socket().is_none());
    }
}
