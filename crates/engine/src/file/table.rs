//! The descriptors of the dumped tasks: each description is described once.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::OsString;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::process::PidfdGetfdFlags;
use torpor_images::kind;
use torpor_images::proto::{FdinfoEntry, FileEntry};
use torpor_sys::kcmp::{Object, kcmp};

use super::lock::{self, Locks};
use super::memfd::Memfds;
use super::remap::Remaps;
use super::{Dumper, FdInfo, Found, fown};
use crate::dump::Dump;
use crate::error::{Context, Error, Result};
use crate::proc;

/// `FD_CLOEXEC` as fdinfo shows it.
const O_CLOEXEC: u32 = libc::O_CLOEXEC.cast_unsigned();

/// The open file descriptions met so far.
#[derive(Debug, Default)]
pub struct FileTable {
    dumpers: Vec<Box<dyn Dumper>>,
    /// Descriptions by device and inode of the file they are open on.
    known: HashMap<(u64, u64), Vec<Known>>,
    entries: Vec<FileEntry>,
    /// Mapped files: mount namespace, device, inode, name, flags.
    pub(super) mapped: HashMap<(u32, u64, u64, String, u32), u32>,
    /// Working and root directories and executables.
    pub(super) places: HashMap<Place, u32>,
    /// Files whose path does not lead to them.
    pub remaps: Remaps,
    /// Locks on files.
    pub(super) locks: Locks,
    /// Memfds by inode.
    pub(super) memfds: Memfds,
    last_id: u32,
    /// Descriptions found in flight that are still to be described, with the task and
    /// the file that they are in.
    waiting: Vec<(Found, i32, String)>,
    /// Our descriptors of those in flight: what they are compared by.
    kept: Vec<OwnedFd>,
}

/// What tells files apart that tasks refer to by one of procfs's links.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) mount: u64,
    pub(super) dev: (u32, u32),
    pub(super) ino: u64,
    pub(super) path: PathBuf,
    pub(super) flags: u32,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    pid: i32,
    fd: i32,
    id: u32,
    kind: i32,
}

impl FileTable {
    /// An empty table with all kinds.
    pub fn new() -> Self {
        FileTable { dumpers: super::dumpers(), ..FileTable::default() }
    }

    /// A number for a description that no descriptor refers to (a mapped file, the
    /// executable, a working directory).
    pub fn next_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    /// Adds the description of such a file.
    pub fn push(&mut self, entry: FileEntry) {
        self.entries.push(entry);
    }

    /// The entries so far.
    pub fn entries(&self) -> &[FileEntry] {
        &self.entries
    }

    /// An entry that is to be completed.
    pub fn entry_mut(&mut self, id: u32) -> Option<&mut FileEntry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// The descriptions open on the inode number `ino` of any file system: task, descriptor, number.
    pub fn open_on(&self, ino: u64) -> impl Iterator<Item = (i32, i32, u32)> {
        let all = self.known.iter().filter(move |((_, i), _)| *i == ino);
        all.flat_map(|(_, known)| known).map(|k| (k.pid, k.fd, k.id))
    }

    /// The number of the description behind a descriptor, if it is known.
    pub fn id_of(&self, pid: i32, fd: i32) -> Option<u32> {
        let key = identity(pid, fd).ok()?;
        let same = |k: &&Known| {
            kcmp(pid, k.pid, Object::File(fd, k.fd)).is_ok_and(std::cmp::Ordering::is_eq)
        };
        self.known.get(&key)?.iter().find(same).map(|k| k.id)
    }
}

/// Device and inode of what a descriptor is open on.
fn identity(pid: i32, fd: i32) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let stat = rustix::fs::stat(&path).context(|| format!("stat {path}"))?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A descriptor of a task.
#[derive(Debug)]
pub struct Listed {
    fd: i32,
    info: FdInfo,
    /// Device and inode of what it is open on.
    key: (u64, u64),
}

impl Listed {
    fn of(pid: i32, fd: i32) -> Result<Self> {
        let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
        Ok(Listed { fd, info, key: identity(pid, fd)? })
    }
}

/// The descriptors of a task.
///
/// # Errors
/// The kernel's.
pub fn list(pid: i32) -> Result<Vec<Listed>> {
    proc::numbers(pid, "fd")?.into_iter().map(|fd| Listed::of(pid, fd)).collect()
}

/// Describes all descriptors of `task` and writes its `fdinfo` image, unless a task
/// with the same table came before.
///
/// # Errors
/// Refusals, by descriptor.
pub fn dump_descriptors(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let mut list = Vec::new();
    for listed in mem::take(&mut cx.tasks[task].descriptors) {
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
    let known = known(cx, key, pid, fd)?;
    let (id, kind) = match known {
        Some(known) => (known.id, known.kind),
        None => describe(cx, task, fd, info)?,
    };
    lock::note(cx, task, fd, id, &locks)?;
    if tracing::enabled!(tracing::Level::DEBUG) {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
        let vpid = cx.tasks[task].vpid;
        let name =
            torpor_images::proto::FdTypes::try_from(kind).map_or("?", |kind| kind.as_str_name());
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

fn known(cx: &Dump<'_>, key: (u64, u64), pid: i32, fd: i32) -> Result<Option<Known>> {
    for known in cx.files.known.get(&key).map(Vec::as_slice).unwrap_or_default() {
        let order = kcmp(pid, known.pid, Object::File(fd, known.fd))
            .context(|| format!("kcmp of fd {fd} of task {pid}"))?;
        if order.is_eq() {
            return Ok(Some(*known));
        }
    }
    Ok(None)
}

/// Asks the kinds to describe a new description: its number and type.
fn describe(cx: &mut Dump<'_>, task: usize, fd: i32, info: FdInfo) -> Result<(u32, i32)> {
    let found = fetch(cx, task, fd, info)?;
    add(cx, found)
}

/// Describes what was found, and what is in flight inside of it (descriptors in a
/// socket's queue).
pub(super) fn add(cx: &mut Dump<'_>, found: Found) -> Result<(u32, i32)> {
    let (id, kind) = ask(cx, &found)?;
    let key = (found.stat.st_dev, found.stat.st_ino);
    let known = Known { pid: found.pid, fd: found.fd, id, kind };
    cx.files.known.entry(key).or_default().push(known);
    while let Some((found, holder, place)) = cx.files.waiting.pop() {
        let (id, kind) = ask(cx, &found).map_err(|e| match e {
            Error::Refused { object, reason, .. } => {
                Error::refused(holder, format!("{object} in flight in {place}"), reason)
            }
            other => other,
        })?;
        let same = cx.files.known.values_mut().flatten().find(|k| k.id == id);
        if let Some(known) = same {
            known.kind = kind;
        }
    }
    Ok((id, kind))
}

fn ask(cx: &mut Dump<'_>, found: &Found) -> Result<(u32, i32)> {
    let mut dumpers = mem::take(&mut cx.files.dumpers);
    let mut entry = Ok(None);
    for dumper in &mut dumpers {
        entry = dumper.describe(cx, found);
        if !matches!(entry, Ok(None)) {
            break;
        }
    }
    cx.files.dumpers = dumpers;
    let entry = entry?.ok_or_else(|| found.refuse("this kind of file is not supported"))?;
    let (id, kind) = (entry.id, entry.r#type);
    cx.files.push(entry);
    Ok((id, kind))
}

/// The number of a description that a dumper has found inside of `holder`, not in a
/// descriptor table: in flight between sockets. `file` is a duplicate of it. It is
/// described after `holder`.
///
/// # Errors
/// The kernel's.
pub fn in_flight(cx: &mut Dump<'_>, holder: &Found, file: OwnedFd) -> Result<u32> {
    let (pid, fd) = (own_pid(), file.as_raw_fd());
    let key = identity(pid, fd)?;
    // The holder itself is not among the known ones yet.
    if kcmp(pid, pid, Object::File(fd, holder.file.as_raw_fd())).is_ok_and(Ordering::is_eq) {
        return Ok(holder.id);
    }
    if let Some(known) = known(cx, key, pid, fd)? {
        return Ok(known.id);
    }
    // What a found file is looked up by later is the descriptor that is kept.
    let kept = file.try_clone().context(|| "dup".to_owned())?;
    let fd = kept.as_raw_fd();
    let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
    let found = Found { task: holder.task, ..look(cx, pid, fd, file, info)? };
    let place = format!("fd {} ({})", holder.fd, holder.link.display());
    if found.info.values("lock").next().is_some() {
        let object = format!("{} in flight in {place}", found.link.display());
        lock::note_in_flight(cx, found.id, holder.pid, object);
    }
    let id = found.id;
    cx.files.known.entry(key).or_default().push(Known { pid, fd, id, kind: 0 });
    cx.files.kept.push(kept);
    cx.files.waiting.push((found, holder.pid, place));
    Ok(id)
}

/// This process, in its own pid namespace.
pub(super) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn fetch(cx: &mut Dump<'_>, task: usize, fd: i32, info: FdInfo) -> Result<Found> {
    let t = &cx.tasks[task];
    let pid = t.pid;
    let file = rustix::process::pidfd_getfd(&t.pidfd, fd, PidfdGetfdFlags::empty())
        .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
    Ok(Found { task, ..look(cx, pid, fd, file, info)? })
}

fn look(cx: &mut Dump<'_>, pid: i32, fd: i32, file: OwnedFd, info: FdInfo) -> Result<Found> {
    let stat = rustix::fs::fstat(&file).context(|| format!("fstat of fd {fd} of task {pid}"))?;
    let path = format!("/proc/{pid}/fd/{fd}");
    let link = rustix::fs::readlink(&path, Vec::new()).context(|| format!("readlink {path}"))?;
    let link = PathBuf::from(OsString::from_vec(link.into_bytes()));
    let fs_type = rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type);
    let fown = fown::of(cx, &file);
    Ok(Found { id: cx.files.next_id(), task: 0, pid, fd, file, stat, fs_type, link, info, fown })
}

/// Describes a descriptor of this process.
#[cfg(test)]
pub(super) fn describe_own(cx: &mut Dump<'_>, fd: i32) -> Result<FileEntry> {
    let listed = Listed::of(cx.tasks[0].pid, fd)?;
    let id = dump_descriptor(cx, 0, listed)?.id;
    let found = cx.files.entries.iter().find(|entry| entry.id == id);
    found.cloned().ok_or_else(|| crate::Error::invalid("files.img", "not described"))
}

/// After the last task: lets the kinds finish and writes `files.img`.
///
/// # Errors
/// Refusals; the image files'.
pub fn finish(cx: &mut Dump<'_>) -> Result<()> {
    let mut dumpers = mem::take(&mut cx.files.dumpers);
    let done = dumpers.iter_mut().try_for_each(|d| d.finish(cx));
    cx.files.dumpers = dumpers;
    done?;
    lock::write(cx)?;
    Ok(cx.images.write_all(kind::FILES, 0, &cx.files.entries)?)
}

impl FdInfo {
    /// Parses `/proc/PID/fdinfo/FD`.
    pub fn parse(text: &str) -> Self {
        let mut info = FdInfo::default();
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else {
                info.rest.push(line.to_owned());
                continue;
            };
            let value = value.trim();
            match key {
                "pos" => info.pos = value.parse().unwrap_or(0),
                "flags" => info.flags = u32::from_str_radix(value, 8).unwrap_or(0),
                "mnt_id" => info.mnt_id = value.parse().unwrap_or(-1),
                "ino" => info.ino = value.parse().unwrap_or(0),
                _ => info.rest.push(line.to_owned()),
            }
        }
        info
    }
}
