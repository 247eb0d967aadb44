//! The descriptors of the dumped tasks: each description is described once.

use std::collections::HashMap;
use std::ffi::OsString;
use std::mem;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::process::PidfdGetfdFlags;
use torpor_images::kind;
use torpor_images::proto::{FdinfoEntry, FileEntry};
use torpor_sys::kcmp::{Object, kcmp};

use super::memfd::Memfds;
use super::remap::Remaps;
use super::{Dumper, FdInfo, Found, fown};
use crate::dump::Dump;
use crate::error::{Context, Result};
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
    /// Files whose path does not lead to them.
    pub remaps: Remaps,
    /// Memfds by inode.
    pub(super) memfds: Memfds,
    last_id: u32,
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

/// Describes all descriptors of `task` and writes its `fdinfo` image, unless a task
/// with the same table came before.
///
/// # Errors
/// Refusals, by descriptor.
pub fn dump_descriptors(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let pid = cx.tasks[task].pid;
    let mut list = Vec::new();
    for fd in proc::numbers(pid, "fd")? {
        list.push(dump_descriptor(cx, task, fd)?);
    }
    let table = u64::from(cx.tasks[task].ids.files_id);
    Ok(cx.images.write_all(kind::FDINFO, table, &list)?)
}

fn dump_descriptor(cx: &mut Dump<'_>, task: usize, fd: i32) -> Result<FdinfoEntry> {
    let pid = cx.tasks[task].pid;
    let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
    let cloexec = u32::from(info.flags & O_CLOEXEC != 0);
    let key = identity(pid, fd)?;
    let known = known(cx, key, pid, fd)?;
    let (id, kind) = match known {
        Some(known) => (known.id, known.kind),
        None => describe(cx, task, fd, key, info)?,
    };
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
fn describe(
    cx: &mut Dump<'_>,
    task: usize,
    fd: i32,
    key: (u64, u64),
    info: FdInfo,
) -> Result<(u32, i32)> {
    let found = fetch(cx, task, fd, info)?;
    let mut dumpers = mem::take(&mut cx.files.dumpers);
    let mut entry = Ok(None);
    for dumper in &mut dumpers {
        entry = dumper.describe(cx, &found);
        if !matches!(entry, Ok(None)) {
            break;
        }
    }
    cx.files.dumpers = dumpers;
    let entry = entry?.ok_or_else(|| found.refuse("this kind of file is not supported"))?;
    let (id, kind) = (entry.id, entry.r#type);
    cx.files.known.entry(key).or_default().push(Known { pid: found.pid, fd, id, kind });
    cx.files.push(entry);
    Ok((id, kind))
}

fn fetch(cx: &mut Dump<'_>, task: usize, fd: i32, info: FdInfo) -> Result<Found> {
    let t = &cx.tasks[task];
    let pid = t.pid;
    let file = rustix::process::pidfd_getfd(&t.pidfd, fd, PidfdGetfdFlags::empty())
        .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
    let stat = rustix::fs::fstat(&file).context(|| format!("fstat of fd {fd} of task {pid}"))?;
    let path = format!("/proc/{pid}/fd/{fd}");
    let link = rustix::fs::readlink(&path, Vec::new()).context(|| format!("readlink {path}"))?;
    let link = PathBuf::from(OsString::from_vec(link.into_bytes()));
    let fs_type = rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type);
    let fown = fown::of(cx, &file);
    Ok(Found { id: cx.files.next_id(), task, pid, fd, file, stat, fs_type, link, info, fown })
}

/// Describes a descriptor of this process.
#[cfg(test)]
pub(super) fn describe_own(cx: &mut Dump<'_>, fd: i32) -> Result<FileEntry> {
    let id = dump_descriptor(cx, 0, fd)?.id;
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
