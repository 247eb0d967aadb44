//! The open files of restored tasks: each description is opened once, by its kind.
//!
//! Here is the table of kinds: who reads which images, opens what, and connects when.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::{FdTypes, FileEntry};
use torpor_policy::{FileLock, MemoryInode};

use super::memory;
use crate::error::{About, Context, Error, Result};
use crate::file::OpenFiles;
use crate::file::description::duplicate;
use crate::file::epoll::EpollRestorer;
use crate::file::fifo::FifoRestorer;
use crate::file::io_uring::{IoUringRestorer, Rights};
use crate::file::memfd::{self, MemfdRestorer};
use crate::file::notify::{FanotifyRestorer, InotifyRestorer, Sleeper};
use crate::file::open::Holder;
use crate::file::opener::Opener;
use crate::file::pidfd::PidfdRestorer;
use crate::file::pipe::PipeRestorer;
use crate::file::socket::{InetRestorer, Neighbours, UnixRestorer, netlink, packet};
use crate::file::timerfd::TimerfdRestorer;
use crate::file::tty::TtyRestorer;
use crate::file::tun::TunRestorer;
use crate::file::userfaultfd::UserfaultfdRestorer;
use crate::file::{eventfd, lock, ns_file, regular, signalfd};
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
    locks: Vec<FileLock>,
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

impl Table<'_> {
    /// Lets every kind of file read and check its images, even those that no file needs:
    /// damage to them is damage.
    pub(crate) fn load(&mut self) -> Result<()> {
        let mut of: HashMap<FdTypes, Vec<FileEntry>> = HashMap::new();
        let Table {
            opener: cx,
            files: RestoredFiles { kinds, in_flight, locks, .. },
            tcp_close,
            ..
        } = self;
        let (all, images) = (cx.entries, cx.images);
        for entry in all.values() {
            of.entry(entry.r#type()).or_default().push(entry.clone());
        }
        of.values_mut().for_each(|entries| entries.sort_by_key(|e| e.id));
        let mut take = |kind| of.remove(&kind).unwrap_or_default();
        regular::load(&take(FdTypes::Reg))?;
        cx.temporary.load(images)?;
        kinds.pipes.load(images, &take(FdTypes::Pipe))?;
        kinds.fifos.load(images, all, &take(FdTypes::Fifo))?;
        let root = cx.tasks.first().map(|root| &root.image);
        kinds.inet.load(*tcp_close, images, root, &take(FdTypes::Inetsk))?;
        in_flight.extend(kinds.unix.load(images, all, &take(FdTypes::Unixsk))?);
        kinds.epolls.load(all, &take(FdTypes::Eventpoll))?;
        kinds.inotify.load(all, &take(FdTypes::Inotify))?;
        packet::load(&take(FdTypes::Packetsk))?;
        kinds.terminals.load(images, &take(FdTypes::Tty))?;
        kinds.fanotify.load(all, &take(FdTypes::Fanotify))?;
        netlink::load(&take(FdTypes::Netlinksk))?;
        ns_file::load(cx.spaces, &take(FdTypes::Ns))?;
        let (userfaultfds, others): (Vec<_>, Vec<_>) =
            take(FdTypes::Ext).into_iter().partition(|entry| entry.torpor_userfaultfd.is_some());
        in_flight.extend(kinds.io_urings.load(cx.tasks, all, &others)?);
        kinds.userfaultfds.load(&userfaultfds)?;
        kinds.timers.load(&take(FdTypes::Timerfd))?;
        kinds.tuns.load(images, &take(FdTypes::Tunf))?;
        kinds.memfds.load(images, cx.tasks, &take(FdTypes::Memfd))?;
        kinds.pidfds.load(&take(FdTypes::Pidfd))?;
        // They have no images of their own.
        take(FdTypes::Eventfd);
        take(FdTypes::Signalfd);
        if let Some((kind, entries)) = of.into_iter().next() {
            let (id, kind) = (entries[0].id, kind.as_str_name());
            let reason = format!("file {id} is of type {kind}, which is not supported");
            return Err(Error::invalid("files.img", reason));
        }
        *locks = lock::load(images, cx.tasks)?;
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
        let entry = self.opener.entries.get(&id).ok_or_else(unknown)?;
        let kind = entry.r#type();
        tracing::debug!("file {id}: {}", kind.as_str_name());
        self.open_of_kind(entry, kind).about(|| object(entry))
    }

    fn open_of_kind(&mut self, entry: &FileEntry, kind: FdTypes) -> Result<OwnedFd> {
        let Table { opener: cx, files: RestoredFiles { opened, kinds, .. }, network, .. } = self;
        match kind {
            FdTypes::Reg => regular::open_entry(cx, entry),
            FdTypes::Pipe => kinds.pipes.open(cx.given, cx.roots, entry),
            FdTypes::Fifo => kinds.fifos.open(cx, entry),
            FdTypes::Inetsk => kinds.inet.open(cx.images, cx.spaces, cx.id_maps, network, entry),
            FdTypes::Unixsk => kinds.unix.open(&mut neighbours(cx, opened), entry),
            FdTypes::Eventfd => eventfd::open(entry),
            FdTypes::Eventpoll => kinds.epolls.open(entry),
            FdTypes::Inotify => kinds.inotify.open(entry),
            FdTypes::Signalfd => signalfd::open(entry),
            FdTypes::Packetsk => packet::open(cx.spaces, cx.id_maps, entry),
            FdTypes::Tty => kinds.terminals.open(cx, entry),
            FdTypes::Fanotify => kinds.fanotify.open(entry),
            FdTypes::Netlinksk => netlink::open(cx.spaces, cx.id_maps, entry),
            FdTypes::Ns => ns_file::open(cx.spaces, entry),
            FdTypes::Ext if entry.torpor_userfaultfd.is_some() => {
                kinds.userfaultfds.open(cx.tasks, entry)
            }
            FdTypes::Ext => kinds.io_urings.open(cx.tasks, entry),
            FdTypes::Timerfd => kinds.timers.open(entry),
            FdTypes::Tunf => kinds.tuns.open(cx, entry),
            FdTypes::Memfd => self.open_memfd(entry),
            FdTypes::Pidfd => kinds.pidfds.open(cx.tasks, entry),
            other => {
                let reason = format!("files of type {} are not supported", other.as_str_name());
                Err(Error::invalid("files.img", reason))
            }
        }
    }

    /// Opens a memfd, or shared anonymous memory that a task has mapped by now, as a rule.
    fn open_memfd(&mut self, entry: &FileEntry) -> Result<OwnedFd> {
        let (cx, memfds) = (&mut self.opener, &mut self.files.kinds.memfds);
        let Some(inode) = memfds.anonymous.get(&entry.id) else {
            return memfds.open(cx.images, cx.id_maps, entry);
        };
        let known = (cx.images, &mut *self.shared);
        let husk = cx.tasks[0].remote()?;
        let memory = memory::shared::open(known, husk, None, inode)?;
        memfd::open_anonymous(&memory, entry)
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
        kinds.pipes.connect(cx.given, cx.roots, opened)?;
        kinds.fifos.connect(cx, opened)?;
        kinds.inet.connect(cx.spaces, cx.id_maps, opened, network)?;
        kinds.unix.connect(&mut neighbours(cx, opened))?;
        let watched = kinds.epolls.watched(cx.tasks, cx.entries)?;
        // There may be watches among those.
        self.open_files(watched)?;
        let Table { opener: cx, files: RestoredFiles { kinds, .. }, .. } = self;
        let mut watched = kinds.inotify.watched(cx.temporary, cx.images)?;
        watched.extend(kinds.fanotify.watched(cx.temporary, cx.images)?);
        self.open_files(watched)?;
        let Table { opener: cx, files: RestoredFiles { opened, sleepers, kinds, .. }, .. } = self;
        kinds.epolls.connect(cx.tasks, cx.entries, opened)?;
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
    pub(super) fn attach(&mut self, holder: Holder, entry: &FileEntry) -> Result<()> {
        match entry.r#type() {
            FdTypes::Ext if entry.torpor_io_uring.is_some() => {
                let RestoredFiles { opened, kinds, .. } = &mut *self.files;
                let (maps, spaces) = (self.opener.id_maps, self.opener.spaces);
                let rights = Rights { maps, spaces, profile: self.profile };
                kinds.io_urings.attach(self.opener.tasks, opened, holder, entry, rights)
            }
            FdTypes::Eventpoll => {
                let husk = self.opener.tasks[holder.task].remote()?;
                self.files.kinds.epolls.attach(husk, holder, entry.id)
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
        self.files.kinds.io_urings.register(self.opener.tasks, self.opener.entries)
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
fn object(entry: &FileEntry) -> String {
    let kind = entry.r#type().as_str_name().to_lowercase();
    match &entry.reg {
        Some(reg) => format!("file {} ({})", entry.id, String::from_utf8_lossy(&reg.name)),
        None => format!("file {} ({kind})", entry.id),
    }
}
