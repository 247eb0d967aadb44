//! The open files of the dumped tasks: each description is described once, by its kind.
//!
//! Here is the table of kinds: which is asked after which, and what each of them needs.

use rustix::process::PidfdGetfdFlags;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FdinfoEntry, FileEntry};

use super::{Dump, Task, memory};
use crate::error::{About, Context, Error, Result};
use crate::file::epoll::EpollDumper;
use crate::file::eventfd::EventfdDumper;
use crate::file::fifo::FifoDumper;
use crate::file::found::{FdInfo, Found, Listed, own_pid};
use crate::file::io_uring::IoUringDumper;
use crate::file::lock::Locks;
use crate::file::memfd::{Memfds, is_memfd};
use crate::file::notify::{FanotifyDumper, InotifyDumper};
use crate::file::pipe::PipeDumper;
use crate::file::regular::{self, Links};
use crate::file::remap::Paths;
use crate::file::socket::{Around, SocketDumper};
use crate::file::table::{InFlight, Numbered};
use crate::file::tty::TtyDumper;
use crate::file::userfaultfd::UserfaultfdDumper;
use crate::file::{fown, mqueue, ns_file, pidfd, signalfd, timerfd, tun};
use crate::memory::vma::Vma;
use crate::namespace::mount;
use crate::proc;

/// `FD_CLOEXEC` as fdinfo shows it.
const O_CLOEXEC: u32 = libc::O_CLOEXEC.cast_unsigned();

/// What each kind of file knows of the files met so far.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    sockets: SocketDumper,
    eventfds: EventfdDumper,
    epolls: EpollDumper,
    pipes: PipeDumper,
    fifos: FifoDumper,
    inotify: InotifyDumper,
    fanotify: FanotifyDumper,
    terminals: TtyDumper,
    memfds: Memfds,
    io_urings: IoUringDumper,
    pub(super) userfaultfds: UserfaultfdDumper,
    /// Files that tasks refer to without a descriptor.
    links: Links,
    /// Locks on files.
    pub(super) locks: Locks,
}

impl Kinds {
    /// A thread of a task has used io_uring.
    pub(super) fn note_io_uring(&mut self, task: usize, tid: i32) {
        self.io_urings.note_user(task, tid);
    }

    /// The number of the io_uring instance that a mapping of a task shows.
    pub(super) fn ring_of_mapping(&self, tasks: &[Task], task: usize, vma: &Vma) -> Result<u32> {
        self.io_urings.of_mapping(tasks, task, vma)
    }

    /// Whether a terminal that is left to the caller is this one.
    pub(super) fn has_external_terminal(&self, rdev: u64, dev: u64) -> bool {
        self.terminals.has_external(rdev, dev)
    }
}

/// The parts of a dump that save a file by its path.
macro_rules! paths {
    ($cx:ident) => {
        Paths {
            external: &$cx.opts.given.external,
            files: &$cx.opts.files,
            shell_job: $cx.opts.shell_job,
            strict: $cx.opts.strict,
            leave_running: $cx.opts.stop.leave_running,
            images: &$cx.images,
            mounts: &$cx.mounts,
            id_maps: &$cx.id_maps,
            guardian: &$cx.guardian,
            table: &mut $cx.files,
            remaps: &mut $cx.remaps,
        }
    };
}

/// The first answer of a kind that knows the file.
macro_rules! first_of {
    ($($asked:expr,)+) => {
        $(if let Some(entry) = $asked? {
            return Ok(entry);
        })+
    };
}

/// Asks the kinds in turn.
fn ask(cx: &mut Dump<'_>, found: &Found) -> Result<FileEntry> {
    let kinds = &mut cx.kinds;
    let mut around = Around {
        external: &cx.opts.given.external,
        service: cx.opts.given.service,
        connections: &cx.opts.network,
        strict: cx.opts.strict,
        images: &cx.images,
        tasks: &cx.tasks,
        pids: &cx.pids,
        spaces: &cx.ns,
        mounts: &cx.mounts,
        id_maps: &cx.id_maps,
        guardian: &cx.guardian,
        table: &mut cx.files,
        network: &mut cx.network,
    };
    first_of! { kinds.sockets.describe(&mut around, found), }
    let mut paths = paths!(cx);
    let task = cx.tasks.get(found.task);
    let ipc = task.and_then(|task| task.ids.ipc_ns_id).unwrap_or(0);
    let net = task.and_then(|task| task.ids.net_ns_id);
    first_of! {
        kinds.eventfds.describe(found),
        kinds.epolls.describe(cx.opts.strict, found),
        signalfd::describe(found),
        timerfd::describe(found),
        kinds.pipes.describe(&cx.images, found),
        kinds.fifos.describe(&mut paths, found),
        ns_file::describe(&cx.ns, found),
        pidfd::describe(&cx.pids, found),
        kinds.inotify.describe(found),
        kinds.fanotify.describe(found),
        kinds.terminals.describe(&mut paths, &cx.tasks, found),
        kinds.memfds.describe(&cx.id_maps, found),
        mqueue::describe(&cx.ns, &cx.mounts, ipc, found),
        kinds.io_urings.describe(&mut cx.tasks, paths.table, found),
        kinds.userfaultfds.describe(&mut cx.tasks, found),
        tun::describe(&cx.ns, &mut paths, net, found),
        regular::describe(&mut paths, found),
    }
    Err(found.refuse(match mount::is_connection(&found.stat) {
        true => mount::fuse_refusal(&cx.mounts, found),
        false => "this kind of file is not supported".to_owned(),
    }))
}

/// After the last task: lets the kinds finish and writes `files.img`.
///
/// # Errors
/// Refused, if what belongs to an open file (a peer, a master, the taker of a lock) is outside of
/// the tree; if an image cannot be written.
pub(crate) fn finish(cx: &mut Dump<'_>) -> Result<()> {
    let kinds = &mut cx.kinds;
    let (tasks, images) = (&cx.tasks, &cx.images);
    let space_of = |task: usize| tasks.get(task).and_then(|task| task.ids.mnt_ns_id);
    kinds.sockets.finish(&cx.opts.given.external, &cx.opts.files, &mut cx.files)?;
    kinds.epolls.finish(&mut cx.files)?;
    kinds.pipes.finish(images)?;
    kinds.fifos.finish(images)?;
    let mut paths = paths!(cx);
    kinds.inotify.finish(&mut paths, &space_of)?;
    kinds.fanotify.finish(&mut paths, &space_of)?;
    let of_caller = (cx.opts.shell_job, cx.opts.files.orphan_pts_master);
    kinds.terminals.finish(of_caller, images, tasks, &cx.pids)?;
    kinds.memfds.write(images)?;
    kinds.io_urings.finish(&mut cx.tasks, &cx.pids, &mut cx.files, cx.opts.strict)?;
    cx.remaps.write(images)?;
    kinds.locks.write(images)?;
    Ok(images.write_all(kind::FILES, 0, cx.files.entries())?)
}

/// Describes all descriptors of `task` and writes its `fdinfo` image, unless a task
/// with the same table came before.
///
/// # Errors
/// Refused, by descriptor, if one cannot be kept; if the image cannot be written.
pub(super) fn dump_descriptors(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let mut list = Vec::new();
    for listed in std::mem::take(&mut cx.tasks[task].descriptors) {
        list.push(dump_descriptor(cx, task, listed)?);
    }
    let table = u64::from(cx.tasks[task].ids.files_id);
    Ok(cx.images.write_unless_empty(kind::FDINFO, table, &list)?)
}

fn dump_descriptor(cx: &mut Dump<'_>, task: usize, listed: Listed) -> Result<FdinfoEntry> {
    let pid = cx.tasks[task].pid;
    let Listed { fd, info, key } = listed;
    let cloexec = u32::from(info.flags & O_CLOEXEC != 0);
    let locks: Vec<String> = info.values("lock").map(str::to_owned).collect();
    let known = cx.files.find(key, pid, fd)?;
    let (id, kind) = match known {
        Some(known) => (known.id, known.kind),
        None => {
            let found = fetch(cx, task, fd, info)?;
            add(cx, found)?
        }
    };
    cx.kinds.locks.note(&cx.opts.files, &cx.tasks, task, (fd, id), &locks)?;
    if tracing::enabled!(tracing::Level::DEBUG) {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
        let vpid = cx.tasks[task].vpid;
        let name = FdTypes::try_from(kind).map_or("?", |kind| kind.as_str_name());
        let again = if known.is_some() { ", met before" } else { "" };
        tracing::debug!("task {vpid}: fd {fd} ({}): file {id}, {name}{again}", link.display());
    }
    Ok(FdinfoEntry {
        id,
        flags: cloexec,
        r#type: kind,
        fd: fd.cast_unsigned(),
        xattr_security_selinux: None,
    })
}

/// Describes what was found, and what is in flight inside of it (descriptors in a
/// socket's queue): its number and type.
pub(crate) fn add(cx: &mut Dump<'_>, found: Found) -> Result<(u32, i32)> {
    let (id, kind) = describe(cx, &found)?;
    let key = (found.stat.st_dev, found.stat.st_ino);
    cx.files.note(key, Numbered { pid: found.pid, fd: found.fd, id, kind })?;
    while let Some(waiting) = cx.files.next_in_flight() {
        let (holder, place) = (waiting.holder, waiting.place.clone());
        let found = look_in_flight(cx, waiting)?;
        let (id, kind) = describe(cx, &found).map_err(|e| match e {
            Error::Refused { object, reason, .. } => {
                Error::refused(holder, format!("{object} in flight in {place}"), reason)
            }
            other => other,
        })?;
        cx.files.set_kind(id, kind);
    }
    Ok((id, kind))
}

fn describe(cx: &mut Dump<'_>, found: &Found) -> Result<(u32, i32)> {
    let entry = ask(cx, found).and_then(|entry| save_memfds(cx).map(|()| entry));
    let entry = entry.about(|| format!("task {}: {}", found.pid, found.object()))?;
    let (id, kind) = (entry.id, entry.r#type);
    cx.files.push(entry);
    Ok((id, kind))
}

/// Plans to save the pages of memfds that were met for the first time.
fn save_memfds(cx: &mut Dump<'_>) -> Result<()> {
    for (id, file) in cx.kinds.memfds.take_unsaved() {
        memory::dump_shared(cx, id, file)?;
    }
    Ok(())
}

fn fetch(cx: &mut Dump<'_>, task: usize, fd: i32, info: FdInfo) -> Result<Found> {
    let Task { pid, pidfd, .. } = &cx.tasks[task];
    let file = rustix::process::pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty())
        .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
    let fown = fown::of(&cx.pids, &cx.id_maps, &file);
    let id = cx.files.next_id();
    Ok(Found { id, task, fown, ..Found::look(*pid, fd, file, info)? })
}

fn look_in_flight(cx: &mut Dump<'_>, waiting: InFlight) -> Result<Found> {
    let InFlight { id, file, fd, task, holder: user, place } = waiting;
    let pid = own_pid();
    let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
    let fown = fown::of(&cx.pids, &cx.id_maps, &file);
    let holder = cx.tasks.get(task).map_or(pid, |task| task.pid);
    let found = Found { id, task, holder, fown, ..Found::look(pid, fd, file, info)? };
    if found.info.values("lock").next().is_some() {
        let object = format!("{} in flight in {place}", found.link.display());
        cx.kinds.locks.note_in_flight(id, user, object);
    }
    Ok(found)
}

/// Describes a mapped file of a task. Also the flags to open it again with.
pub(crate) fn describe_mapped(cx: &mut Dump<'_>, task: usize, vma: &Vma) -> Result<(u32, u32)> {
    regular::describe_mapped(&mut paths!(cx), &mut cx.kinds.links, &cx.tasks[task], vma)
}

/// The same for a memfd, or shared anonymous memory.
pub(super) fn describe_memfd(cx: &mut Dump<'_>, task: usize, vma: &Vma) -> Result<(u32, u32)> {
    let Kinds { memfds, links, .. } = &mut cx.kinds;
    let pid = cx.tasks[task].pid;
    let described = memfds.describe_mapped(&cx.id_maps, &mut cx.files, links, pid, vma)?;
    save_memfds(cx)?;
    Ok(described)
}

/// Describes what a link of a task in procfs leads to.
pub(crate) fn describe_path(cx: &mut Dump<'_>, task: usize, name: &str) -> Result<u32> {
    regular::describe_path(&mut paths!(cx), &mut cx.kinds.links, &cx.tasks[task], name)
}

/// Describes the executable of a task.
pub(crate) fn describe_exe(cx: &mut Dump<'_>, task: usize) -> Result<u32> {
    let Kinds { memfds, links, .. } = &mut cx.kinds;
    let mut paths = paths!(cx);
    let id = regular::describe_link(&mut paths, links, &cx.tasks[task], "exe", |paths, found| {
        if is_memfd(found) {
            return memfds.describe_unopened(paths.id_maps, paths.table, found);
        }
        regular::describe_as_path(paths, found)
    })?;
    save_memfds(cx)?;
    Ok(id)
}

/// Describes a descriptor of this process.
#[cfg(test)]
pub(crate) fn describe_own(cx: &mut Dump<'_>, fd: i32) -> Result<FileEntry> {
    let listed = Listed::of(cx.tasks[0].pid, fd)?;
    let id = dump_descriptor(cx, 0, listed)?.id;
    let found = cx.files.entries().iter().find(|entry| entry.id == id);
    found.cloned().ok_or_else(|| Error::invalid("files.img", "not described"))
}
