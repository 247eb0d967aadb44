//! The open files of restored tasks: each description is opened once, by its kind.
//!
//! Here is the table of kinds: who reads which images, opens what, and connects when.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::{FdTypes, FileEntry, VmaEntry};

use super::{Restore, memory};
use crate::error::{About, Context, Error, Result};
use crate::file::description::duplicate;
use crate::file::epoll::EpollRestorer;
use crate::file::fifo::FifoRestorer;
use crate::file::io_uring::IoUringRestorer;
use crate::file::memfd::{self, MemfdRestorer};
use crate::file::notify::{FanotifyRestorer, InotifyRestorer};
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

/// The parts of a restore that open files by their paths.
macro_rules! opener {
    ($cx:ident) => {
        Opener {
            opts: $cx.opts,
            images: &$cx.images,
            entries: &$cx.entries,
            spaces: &$cx.ns,
            roots: &$cx.roots,
            mounts: &mut $cx.mounts,
            id_maps: &$cx.id_maps,
            verdict: &$cx.verdict,
            tasks: &mut $cx.tasks,
            temporary: &mut $cx.temporary,
        }
    };
}

/// The parts that Unix sockets reach.
macro_rules! neighbours {
    ($cx:ident) => {
        Neighbours {
            opts: $cx.opts,
            spaces: &$cx.ns,
            roots: &$cx.roots,
            mounts: &$cx.mounts,
            id_maps: &$cx.id_maps,
            tasks: &mut $cx.tasks,
            files: &mut $cx.files,
        }
    };
}

impl Restore<'_> {
    /// Lets every kind of file read and check its images, even those that no file needs:
    /// damage to them is damage.
    pub(crate) fn load_files(&mut self) -> Result<()> {
        let mut of: HashMap<FdTypes, Vec<FileEntry>> = HashMap::new();
        for entry in self.entries.values() {
            of.entry(entry.r#type()).or_default().push(entry.clone());
        }
        of.values_mut().for_each(|entries| entries.sort_by_key(|e| e.id));
        let mut take = |kind| of.remove(&kind).unwrap_or_default();
        let (all, images, tasks, kinds) =
            (&self.entries, &self.images, &self.tasks, &mut self.kinds);
        regular::load(&take(FdTypes::Reg))?;
        self.temporary.load(images)?;
        kinds.pipes.load(images, &take(FdTypes::Pipe))?;
        kinds.fifos.load(images, all, &take(FdTypes::Fifo))?;
        kinds.inet.load(self.opts, images, &take(FdTypes::Inetsk))?;
        let in_flight = kinds.unix.load(images, all, &take(FdTypes::Unixsk))?;
        self.in_flight.extend(in_flight);
        kinds.epolls.load(all, &take(FdTypes::Eventpoll))?;
        kinds.inotify.load(all, &take(FdTypes::Inotify))?;
        packet::load(&take(FdTypes::Packetsk))?;
        kinds.terminals.load(images, &take(FdTypes::Tty))?;
        kinds.fanotify.load(all, &take(FdTypes::Fanotify))?;
        netlink::load(&take(FdTypes::Netlinksk))?;
        ns_file::load(&self.ns, &take(FdTypes::Ns))?;
        let (userfaultfds, others): (Vec<_>, Vec<_>) =
            take(FdTypes::Ext).into_iter().partition(|entry| entry.torpor_userfaultfd.is_some());
        kinds.io_urings.load(&others)?;
        kinds.userfaultfds.load(&userfaultfds)?;
        kinds.timers.load(&take(FdTypes::Timerfd))?;
        kinds.tuns.load(images, &take(FdTypes::Tunf))?;
        kinds.memfds.load(images, tasks, &take(FdTypes::Memfd))?;
        kinds.pidfds.load(&take(FdTypes::Pidfd))?;
        // They have no images of their own.
        take(FdTypes::Eventfd);
        take(FdTypes::Signalfd);
        if let Some((kind, entries)) = of.into_iter().next() {
            let (id, kind) = (entries[0].id, kind.as_str_name());
            let reason = format!("file {id} is of type {kind}, which is not supported");
            return Err(Error::invalid("files.img", reason));
        }
        self.locks = lock::load(images, tasks)?;
        Ok(())
    }

    /// The open file description `id` of the images; opens it if need be.
    ///
    /// # Errors
    /// If there is none, or it cannot be opened.
    pub fn file(&mut self, id: u32) -> Result<BorrowedFd<'_>> {
        if self.files.get(id).is_none() {
            let file = self.open_file(id)?;
            self.files.insert(id, file);
        }
        self.files.need(id)
    }

    fn open_file(&mut self, id: u32) -> Result<OwnedFd> {
        let entry = self
            .entries
            .get(&id)
            .cloned()
            .ok_or_else(|| Error::invalid("files.img", format!("no file with id {id}")))?;
        let (entry, kind) = (&entry, entry.r#type());
        tracing::debug!("file {id}: {}", kind.as_str_name());
        self.open_of_kind(entry, kind).about(|| object(entry))
    }

    fn open_of_kind(&mut self, entry: &FileEntry, kind: FdTypes) -> Result<OwnedFd> {
        let kinds = &mut self.kinds;
        match kind {
            FdTypes::Reg => regular::open_entry(&mut opener!(self), entry),
            FdTypes::Pipe => kinds.pipes.open(self.opts, &self.roots, entry),
            FdTypes::Fifo => kinds.fifos.open(&mut opener!(self), entry),
            FdTypes::Inetsk => kinds.inet.open(&self.images, &self.ns, &mut self.network, entry),
            FdTypes::Unixsk => kinds.unix.open(&mut neighbours!(self), entry),
            FdTypes::Eventfd => eventfd::open(entry),
            FdTypes::Eventpoll => kinds.epolls.open(entry),
            FdTypes::Inotify => kinds.inotify.open(entry),
            FdTypes::Signalfd => signalfd::open(entry),
            FdTypes::Packetsk => packet::open(&self.ns, &self.id_maps, entry),
            FdTypes::Tty => kinds.terminals.open(&mut opener!(self), entry),
            FdTypes::Fanotify => kinds.fanotify.open(entry),
            FdTypes::Netlinksk => netlink::open(&self.ns, &self.id_maps, entry),
            FdTypes::Ns => ns_file::open(&self.ns, entry),
            FdTypes::Ext if entry.torpor_userfaultfd.is_some() => {
                kinds.userfaultfds.open(&mut self.tasks, entry)
            }
            FdTypes::Ext => kinds.io_urings.open(),
            FdTypes::Timerfd => kinds.timers.open(entry),
            FdTypes::Tunf => kinds.tuns.open(&mut opener!(self), entry),
            FdTypes::Memfd => self.open_memfd(entry),
            FdTypes::Pidfd => kinds.pidfds.open(&mut self.tasks, entry),
            other => {
                let reason = format!("files of type {} are not supported", other.as_str_name());
                Err(Error::invalid("files.img", reason))
            }
        }
    }

    /// Opens a memfd, or shared anonymous memory that a task has mapped by now, as a rule.
    fn open_memfd(&mut self, entry: &FileEntry) -> Result<OwnedFd> {
        let Some(inode) = self.kinds.memfds.anonymous.get(&entry.id) else {
            return self.kinds.memfds.open(&self.images, &self.id_maps, entry);
        };
        let known = (&self.images, &mut self.shared);
        let husk = self.tasks.remote(0)?;
        let memory = memory::shared::open(known, husk, &VmaEntry::default(), inode)?;
        memfd::open_anonymous(&memory, entry)
    }

    /// A duplicate of description `id`.
    pub(super) fn duplicate(&mut self, id: u32) -> Result<OwnedFd> {
        let file = self.file(id)?;
        rustix::io::fcntl_dupfd_cloexec(file, 0).context(|| "dup".to_owned())
    }

    /// The husk of `task` leads a session now.
    pub(super) fn begin_session(&mut self, task: usize) -> Result<()> {
        self.kinds.terminals.session(&mut opener!(self), task)
    }

    /// All descriptions are open: connects them, in the order of their types.
    pub(crate) fn connect_files(&mut self) -> Result<()> {
        self.kinds.pipes.connect(self.opts, &self.roots, &mut self.files)?;
        self.kinds.fifos.connect(&mut opener!(self), &mut self.files)?;
        self.kinds.inet.connect(&self.ns, &self.id_maps, &self.files, &self.network)?;
        self.kinds.unix.connect(&mut neighbours!(self))?;
        let watched = self.kinds.epolls.watched(&self.tasks, &self.entries)?;
        self.open_files(watched)?;
        self.kinds.epolls.connect(&self.tasks, &self.entries, &self.files)?;
        let watched = self.kinds.inotify.watched(&self.temporary, &self.images)?;
        self.open_files(watched)?;
        let sleepers = self.kinds.inotify.connect(&opener!(self), &self.files)?;
        self.sleepers.extend(sleepers);
        self.kinds.terminals.connect(&mut opener!(self))?;
        let watched = self.kinds.fanotify.watched(&self.temporary, &self.images)?;
        self.open_files(watched)?;
        let sleepers = self.kinds.fanotify.connect(&opener!(self), &self.files)?;
        self.sleepers.extend(sleepers);
        self.kinds.timers.connect(&self.files)?;
        self.kinds.memfds.connect()
    }

    fn open_files(&mut self, ids: Vec<u32>) -> Result<()> {
        ids.into_iter().try_for_each(|id| self.file(id).map(drop))
    }

    /// A task holds the descriptor: does what only the task itself can.
    pub(super) fn attach_file(&mut self, holder: Holder, entry: &FileEntry) -> Result<()> {
        match entry.r#type() {
            FdTypes::Ext if entry.torpor_io_uring.is_some() => {
                self.kinds.io_urings.attach(&mut self.tasks, &mut self.files, holder, entry)
            }
            _ => Ok(()),
        }
    }

    /// The memory of the tasks is as it is to be: registers parts of it with userfaultfds.
    pub(super) fn register_memory(&mut self) -> Result<()> {
        self.kinds.userfaultfds.register(&mut self.tasks, &self.files)
    }

    /// Opens the file `id` of the images for a mapping, an executable or a directory to
    /// change to: with the flags of its entry, or others.
    pub(super) fn open_for_mapping(&mut self, id: u32, flags: Option<u32>) -> Result<OwnedFd> {
        match regular::open_otherwise(&mut opener!(self), id, flags)? {
            Some(file) => Ok(file),
            None => duplicate(self.file(id)?.as_fd()),
        }
    }

    /// Opens the file that a mapping is of, as nobody else has it open.
    pub(super) fn open_apart(&mut self, id: u32, flags: Option<u32>) -> Result<OwnedFd> {
        match regular::open_apart(&mut opener!(self), id, flags)? {
            Some(file) => Ok(file),
            None => self.open_for_mapping(id, flags),
        }
    }

    /// Takes the locks that files had.
    pub(super) fn take_locks(&mut self) -> Result<()> {
        let locks = std::mem::take(&mut self.locks);
        let (verdict, policy) = (&self.verdict, &self.opts.trust.policy);
        lock::restore(&locks, &self.files, &mut self.tasks, &self.id_maps, |lock, owner| {
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

#[cfg(test)]
impl Restore<'_> {
    /// The masters that go to the caller.
    pub(crate) fn orphan_masters(&mut self) -> &mut Vec<OwnedFd> {
        &mut self.kinds.terminals.orphan_masters
    }
}
