//! The open files of restored tasks: each description is opened once, by its kind.
//!
//! Here is the table of kinds: who reads which images, opens what, and connects when.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_policy::{
    Capabilities, FileKind, MemoryFile, MemoryInode, OpenFile, TableNumber, Terminal,
};

use super::image::TaskImage;
use super::memory;
use super::planned::FileParts;
use super::process::Rights;
use crate::error::{About, Context, Error, Result};
use crate::file::OpenFiles;
use crate::file::description::duplicate;
use crate::file::epoll::EpollRestorer;
use crate::file::fifo::FifoRestorer;
use crate::file::io_uring::IoUringRestorer;
use crate::file::lock::{self, HeldLock};
use crate::file::memfd::{self, MemfdRestorer};
use crate::file::notify::{FanotifyRestorer, InotifyRestorer, Sleeper};
use crate::file::open::Holder;
use crate::file::opener::Opener;
use crate::file::pidfd::PidfdRestorer;
use crate::file::pipe::PipeRestorer;
use crate::file::socket::{InetRestorer, Neighbours, SocketOwner, UnixRestorer, netlink, packet};
use crate::file::timerfd::TimerfdRestorer;
use crate::file::tty::TtyRestorer;
use crate::file::tun::TunRestorer;
use crate::file::userfaultfd::UserfaultfdRestorer;
use crate::file::{eventfd, ns_file, regular, signalfd};
use crate::network::asleep::Asleep;

/// What each kind of file knows of those in the images.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    epolls: EpollRestorer,
    fifos: FifoRestorer,
    io_urings: IoUringRestorer,
    pub(super) memfds: MemfdRestorer,
    inotify: InotifyRestorer,
    fanotify: FanotifyRestorer,
    pidfds: PidfdRestorer,
    pipes: PipeRestorer,
    inet: InetRestorer,
    unix: UnixRestorer,
    timers: TimerfdRestorer,
    tuns: TunRestorer,
    userfaultfds: UserfaultfdRestorer,
    pub(super) terminals: TtyRestorer,
}

/// The open files of a tree, as far as they were restored.
#[derive(Debug, Default)]
pub(crate) struct RestoredFiles {
    /// Opened file descriptions.
    pub opened: OpenFiles,
    /// Descriptors whose watches are still to be set up.
    pub sleepers: Vec<Sleeper>,
    /// Descriptions that are in flight between sockets, or registered with io_uring: to be opened
    /// although no task may hold them.
    pub in_flight: Vec<u32>,
    /// Locks that are still to be taken.
    locks: Vec<HeldLock>,
    /// What each kind of file knows.
    kinds: Kinds,
}

impl RestoredFiles {
    /// The masters of terminals that go to the caller.
    pub(crate) fn take_orphan_masters(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.kinds.terminals.orphan_masters)
    }

    /// The restore has succeeded: names that it has given to files stay.
    pub(crate) fn keep_names(&mut self) {
        self.kinds.unix.keep_files();
    }

    /// What the images say of terminals, by their numbers.
    pub(super) fn terminals(&self) -> &HashMap<u32, Terminal> {
        self.kinds.terminals.known()
    }

    /// The shared anonymous memory that file `id` of the images is, if it is any.
    pub(super) fn anonymous_memory(&self, id: u32) -> Option<MemoryInode> {
        self.kinds.memfds.anonymous.get(&id).cloned()
    }
}

/// The open files, and what it takes to open them.
#[derive(Debug)]
pub(crate) struct Table<'c> {
    /// What opens files by their paths; the rest is in it as well.
    pub opener: Opener<'c>,
    /// What is open.
    pub files: &'c mut RestoredFiles,
    /// What else the images say of files; each kind takes what is its.
    pub(super) parts: &'c mut FileParts,
    /// Where connections wait.
    pub network: &'c mut Asleep,
    /// Whether they come back closed.
    pub tcp_close: bool,
    /// The security profile to use instead of those in the images.
    pub profile: Option<&'c str>,
    /// Objects of shared anonymous memory, by number.
    pub shared: &'c mut HashMap<u64, OwnedFd>,
}

/// The parts that Unix sockets reach.
fn neighbours<'s>(opener: &'s mut Opener<'_>, files: &'s mut OpenFiles) -> Neighbours<'s> {
    Neighbours {
        given: opener.given,
        ext_unix_sk: opener.files.ext_unix_sk,
        spaces: opener.spaces,
        roots: opener.roots,
        mounts: opener.mounts,
        id_maps: opener.id_maps,
        tasks: opener.tasks,
        files,
    }
}

fn socket_owner(opener: &Opener<'_>) -> SocketOwner {
    SocketOwner::of(opener.tasks.first().map(|root| &root.image))
}

/// What the tasks may do together that have a file open; all of it, if the images do not say what one of them may do.
fn capabilities_of_holders(opener: &Opener<'_>, file: u32) -> Capabilities {
    let all = || opener.tasks.iter().map(|task| &task.image);
    let holders = all().filter(|image| image.fds.iter().any(|fd| fd.file == file));
    // Of those with the same table only the first has its descriptors.
    let tables: HashSet<TableNumber> = holders.map(|image| image.sharing.table).collect();
    let hold = all().filter(|image| !image.is_zombie() && tables.contains(&image.sharing.table));
    let of_task = |image: &TaskImage| {
        let least = image.rights().map_or(Capabilities(u64::MAX), |_| Capabilities::default());
        let threads = image.credentials.iter().flatten();
        threads.fold(least, |all, thread| all | thread.capabilities.held())
    };
    hold.map(of_task).fold(Capabilities::default(), |all, of| all | of)
}

/// The user of this host that the root task is.
fn user_of_tree(opener: &Opener<'_>) -> Option<u32> {
    let (user, _) = opener.tasks.first()?.image.ids()?;
    opener.id_maps.uid_outside(user)
}

impl Table<'_> {
    /// Lets every kind of file read and check its images, even those that no file needs:
    /// damage to them is damage.
    pub(crate) fn load(&mut self) -> Result<()> {
        let Table {
            opener: cx,
            files: RestoredFiles { kinds, in_flight, locks, .. },
            tcp_close,
            parts,
            ..
        } = self;
        let (all, images) = (cx.described, cx.images);
        let parts = std::mem::take(*parts);
        let mut files: Vec<&OpenFile> = all.values().collect();
        files.sort_by_key(|file| file.id);
        let files = OfKinds(files);
        cx.temporary.load(parts.remaps, parts.ghosts);
        kinds.pipes.load(images, &files.all(OpenFile::pipe))?;
        kinds.fifos.load(images, &files.all(OpenFile::fifo))?;
        let owner = socket_owner(cx);
        let streams = (images, parts.streams);
        kinds.inet.load(*tcp_close, streams, owner, &files.all(OpenFile::inet))?;
        in_flight.extend(kinds.unix.load(images, &files.all(OpenFile::unix))?);
        let packets = files.0.iter().filter_map(|file| Some((file.id, &file.packet()?.1)));
        packet::load(packets)?;
        let ends = files.all(OpenFile::terminal);
        kinds.terminals.load(parts.terminals, parts.inputs, &ends);
        in_flight.extend(kinds.io_urings.load(cx.tasks, all, &files.all(OpenFile::io_uring))?);
        kinds.userfaultfds.load(&files.all(OpenFile::userfaultfd))?;
        kinds.timers.load(&files.all(OpenFile::timerfd))?;
        kinds.tuns.load(parts.tuns);
        kinds.memfds.load(parts.inodes, cx.tasks, &files.all(OpenFile::memory));
        kinds.pidfds.load(&files.all(OpenFile::pidfd));
        // The others have no images of their own, and refer to nothing.
        *locks = parts.locks;
        Ok(())
    }

    /// The open file description `id` of the images; opens it if need be.
    ///
    /// # Errors
    /// If there is none, or it cannot be opened.
    pub(crate) fn file(&mut self, id: u32) -> Result<BorrowedFd<'_>> {
        if self.files.opened.get(id).is_none() {
            let file = self.open_file(id)?;
            self.files.opened.insert(id, file);
        }
        self.files.opened.need(id)
    }

    fn open_file(&mut self, id: u32) -> Result<OwnedFd> {
        let unknown = || Error::invalid("files.img", format!("no file with id {id}"));
        let file = self.opener.described.get(&id).ok_or_else(unknown)?;
        tracing::debug!("file {id}: {}", file.kind.name());
        self.open_of_kind(file).about(|| object(file))
    }

    fn open_of_kind(&mut self, file: &OpenFile) -> Result<OwnedFd> {
        let Table { opener: cx, files: RestoredFiles { opened, kinds, .. }, network, .. } = self;
        match &file.kind {
            FileKind::Path(path) => regular::open(cx, path),
            FileKind::Pipe(end) => kinds.pipes.open(cx.given, cx.roots, end, user_of_tree(cx)),
            FileKind::Fifo(end) => kinds.fifos.open(cx, end),
            FileKind::Inet(of) => kinds.inet.open(cx.images, cx.spaces, cx.id_maps, network, of),
            FileKind::Unix(end) => kinds.unix.open(&mut neighbours(cx, opened), end),
            FileKind::Eventfd(eventfd) => eventfd::open(eventfd),
            FileKind::Epoll(set) => kinds.epolls.open(set, user_of_tree(cx)),
            FileKind::Inotify(inotify) => kinds.inotify.open(inotify, user_of_tree(cx)),
            FileKind::Signalfd(signalfd) => signalfd::open(signalfd),
            FileKind::Packet(socket) => {
                packet::open(cx.spaces, cx.id_maps, socket_owner(cx), file.id, socket)
            }
            FileKind::Terminal(end) => kinds.terminals.open(cx, end),
            FileKind::Fanotify(group) => kinds.fanotify.open(group, user_of_tree(cx)),
            FileKind::Netlink(socket) => {
                let opener = (socket_owner(cx), capabilities_of_holders(cx, file.id));
                netlink::open(cx.spaces, cx.id_maps, opener, file.id, socket)
            }
            FileKind::Namespace(file) => ns_file::open(cx.spaces, file),
            FileKind::Userfaultfd(faults) => kinds.userfaultfds.open(cx.tasks, faults),
            FileKind::IoUring(ring) => kinds.io_urings.open(cx.tasks, ring),
            FileKind::Timerfd(timer) => kinds.timers.open(timer),
            FileKind::Tun(tun) => kinds.tuns.open(cx, file.id, tun),
            FileKind::Memory(memory) => self.open_memfd(memory),
            FileKind::Pidfd(pidfd) => kinds.pidfds.open(cx.tasks, pidfd),
        }
    }

    /// Opens a memfd, or shared anonymous memory that a task has mapped by now, as a rule.
    fn open_memfd(&mut self, of: &MemoryFile) -> Result<OwnedFd> {
        let (cx, memfds) = (&mut self.opener, &mut self.files.kinds.memfds);
        let Some(inode) = memfds.anonymous.get(&of.file) else {
            return memfds.open(cx.images, cx.id_maps, of);
        };
        let known = (cx.images, &mut *self.shared);
        let husk = cx.tasks[0].remote()?;
        let memory = memory::shared::open(known, husk, None, inode)?;
        memfd::open_anonymous(&memory, of)
    }

    /// A duplicate of description `id`.
    pub(super) fn duplicate(&mut self, id: u32) -> Result<OwnedFd> {
        let file = self.file(id)?;
        rustix::io::fcntl_dupfd_cloexec(file, 0).context(|| "dup".to_owned())
    }

    /// The husk of `task` leads a session now.
    pub(super) fn begin_session(&mut self, task: usize) -> Result<()> {
        self.files.kinds.terminals.session(&mut self.opener, task)
    }

    /// All descriptions are open: connects them, in the order of their types.
    pub(crate) fn connect(&mut self) -> Result<()> {
        let Table { opener: cx, files: RestoredFiles { opened, kinds, .. }, network, .. } = self;
        kinds.pipes.connect(cx.given, cx.roots, opened, user_of_tree(cx))?;
        kinds.fifos.connect(cx, opened)?;
        kinds.inet.connect(cx.spaces, cx.id_maps, opened, network)?;
        kinds.unix.connect(&mut neighbours(cx, opened))?;
        let watched = kinds.epolls.watched(cx.tasks, cx.described)?;
        // There may be watches among those.
        self.open_files(watched)?;
        let Table { opener: cx, files: RestoredFiles { kinds, .. }, .. } = self;
        let mut watched = kinds.inotify.watched(cx.temporary);
        watched.extend(kinds.fanotify.watched(cx.temporary));
        self.open_files(watched)?;
        let Table { opener: cx, files: RestoredFiles { opened, sleepers, kinds, .. }, .. } = self;
        kinds.epolls.connect(cx.tasks, cx.described, opened)?;
        sleepers.extend(kinds.inotify.connect(cx, opened)?);
        sleepers.extend(kinds.fanotify.connect(cx, opened)?);
        kinds.terminals.connect(cx)?;
        kinds.timers.connect(opened)?;
        kinds.memfds.connect()
    }

    fn open_files(&mut self, ids: Vec<u32>) -> Result<()> {
        ids.into_iter().try_for_each(|id| self.file(id).map(drop))
    }

    /// A task holds the descriptor: does what only the task itself can.
    pub(super) fn attach(&mut self, holder: Holder, file: &OpenFile) -> Result<()> {
        match &file.kind {
            FileKind::IoUring(ring) => {
                let RestoredFiles { opened, kinds, .. } = &mut *self.files;
                let (maps, spaces) = (self.opener.id_maps, self.opener.spaces);
                let rights = Rights { maps, spaces, profile: self.profile };
                kinds.io_urings.attach(self.opener.tasks, opened, holder, ring, rights)
            }
            FileKind::Epoll(set) => {
                let husk = self.opener.tasks[holder.task].remote()?;
                self.files.kinds.epolls.attach(husk, holder, set.file)
            }
            _ => Ok(()),
        }
    }

    /// Every task has done what only it can: connects what has waited for that.
    pub(super) fn connect_attached(&mut self) -> Result<()> {
        let RestoredFiles { opened, kinds, .. } = &mut *self.files;
        kinds.io_urings.map(self.opener.tasks)?;
        kinds.epolls.watch_rings(opened)
    }

    /// All threads are there: gives them the descriptors that they have registered with io_uring.
    pub(super) fn register_with_threads(&mut self) -> Result<()> {
        self.files.kinds.io_urings.register(self.opener.tasks, self.opener.described)
    }

    /// The memory of the tasks is as it is to be: registers parts of it with userfaultfds.
    pub(super) fn register_memory(&mut self) -> Result<()> {
        self.files.kinds.userfaultfds.register(self.opener.tasks, &self.files.opened)
    }

    /// Opens the file `id` of the images for a mapping, an executable or a directory to
    /// change to: with the flags of its entry, or others.
    pub(super) fn open_for_mapping(&mut self, id: u32, flags: Option<u32>) -> Result<OwnedFd> {
        match regular::open_otherwise(&mut self.opener, id, flags)? {
            Some(file) => Ok(file),
            None => duplicate(self.file(id)?.as_fd()),
        }
    }

    /// Opens the file that a mapping is of, as nobody else has it open.
    pub(super) fn open_apart(&mut self, id: u32, flags: Option<u32>) -> Result<OwnedFd> {
        match regular::open_apart(&mut self.opener, id, flags)? {
            Some(file) => Ok(file),
            None => self.open_for_mapping(id, flags),
        }
    }

    /// Takes the locks that files had.
    pub(super) fn take_locks(&mut self) -> Result<()> {
        let (cx, RestoredFiles { opened, locks, .. }) = (&mut self.opener, &mut *self.files);
        let (verdict, policy) = (cx.verdict, cx.policy);
        lock::restore(&std::mem::take(locks), opened, cx.tasks, cx.id_maps, |lock, owner| {
            verdict.check_lease(policy, lock, owner)
        })
    }
}

/// What messages call a file of the images.
fn object(file: &OpenFile) -> String {
    match file.path() {
        Some(path) => format!("file {} ({})", file.id, path.text()),
        None => format!("file {} ({})", file.id, file.kind.name().to_lowercase()),
    }
}

/// The open files of the images, in the order of their numbers.
struct OfKinds<'f>(Vec<&'f OpenFile>);

impl<'f> OfKinds<'f> {
    /// Those of one kind.
    fn all<T>(&self, of_kind: fn(&'f OpenFile) -> Option<&'f T>) -> Vec<&'f T> {
        self.0.iter().copied().filter_map(of_kind).collect()
    }
}
