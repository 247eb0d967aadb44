//! Open files: the descriptors of tasks, and the network namespaces of sockets.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fs::read_link;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{FileType, OFlags};
use torpor_policy::{Descriptor, OpenFile, SignalOwner, TableNumber};
use torpor_sys::kcmp::{Object, kcmp};
use torpor_sys::socket;

use super::{differs, given, unix, wrong};
use crate::error::{Context, Result};
use crate::file::OpenFiles;
use crate::file::socket::netns_of;
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;
use crate::options::InheritFd;
use crate::proc;
use crate::restore::tasks::Task;

/// The open files of a tree.
pub(super) struct Opened<'c> {
    pub tasks: &'c [Task],
    pub files: &'c OpenFiles,
    pub described: &'c HashMap<u32, OpenFile>,
    pub spaces: &'c Namespaces,
    /// The ids of the tree's user namespace.
    pub id_maps: &'c IdMaps,
    /// What the caller has handed over.
    pub given: &'c [InheritFd],
    /// The first task of each table: see [`firsts`].
    pub firsts: HashMap<TableNumber, i32>,
}

/// The first task of each table of descriptors that has not ended: the number of the table in the images, and the pid here.
pub(super) fn firsts(tasks: &[Task]) -> HashMap<TableNumber, i32> {
    let live = tasks.iter().filter(|task| !task.threads.is_empty());
    live.rev().map(|task| (task.image.sharing.table, task.pid)).collect()
}

impl<'c> Opened<'c> {
    /// The descriptors of a task: it has those of the images and no others, and each is what was opened
    /// for it, no wider. A table that several tasks share is compared once.
    pub(super) fn descriptors(&self, index: usize) -> Result<()> {
        let task = &self.tasks[index];
        let first = self.firsts.get(&task.image.sharing.table).copied().unwrap_or(task.pid);
        let what = || format!("compare the descriptor table of task {}", task.vpid);
        let is_known = || kcmp(first, task.pid, Object::Files).context(what);
        if first != task.pid && is_known()? == Ordering::Equal {
            return Ok(());
        }
        let wanted: BTreeMap<u32, &Descriptor> =
            self.table(task).iter().map(|entry| (entry.fd, entry)).collect();
        // All that is wanted is there, and no more than that, if there are as many: each is compared.
        let each = wanted.values().all(|entry| self.files.get(entry.file).is_some());
        if !each || proc::open_descriptors(task.pid)? != Some(wanted.len() as u64) {
            numbers(task, &wanted)?;
        }
        wanted.values().try_for_each(|entry| self.descriptor(task, entry))
    }

    /// The descriptors in the table of a task: only the first task of a table has them in its image.
    fn table(&self, task: &'c Task) -> &'c [Descriptor] {
        let id = task.image.sharing.table;
        let first = self.tasks.iter().find(|other| other.image.sharing.table == id);
        &first.unwrap_or(task).image.fds
    }

    fn descriptor(&self, task: &Task, entry: &Descriptor) -> Result<()> {
        let Some(file) = self.files.get(entry.file) else { return Ok(()) };
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let fds = Object::File(file.as_raw_fd(), entry.fd.cast_signed());
        let what = || format!("compare descriptor {} of task {}", entry.fd, task.vpid);
        let compared = match kcmp(own, task.pid, fds) {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => None,
            compared => Some(compared.context(what)?),
        };
        if compared != Some(Ordering::Equal) {
            let wanted = target(own, file.as_raw_fd().cast_unsigned());
            let name = format!("descriptor {}", entry.fd);
            let now = compared.map_or("closed".to_owned(), |_| target(task.pid, entry.fd));
            return Err(differs(task.vpid, &name, wanted, now));
        }
        // Of pidfds the images do not have it: all are the same.
        let described = self.described.get(&entry.file).filter(|of| of.pidfd().is_none());
        let described = described.and_then(|of| of.owner(self.described));
        let Some(SignalOwner { flags, .. }) = described else { return Ok(()) };
        let access = |flags: OFlags| flags & (OFlags::RWMODE | OFlags::PATH);
        let wanted = access(OFlags::from_bits_retain(flags));
        let now = access(rustix::fs::fcntl_getfl(file).context(what)?);
        if now != wanted && !now.contains(OFlags::PATH) {
            let name = format!("the access mode of descriptor {}", entry.fd);
            return Err(differs(task.vpid, &name, wanted.bits(), now.bits()));
        }
        Ok(())
    }

    /// The network namespaces of sockets, and with whom Unix sockets are connected.
    pub(super) fn sockets(&self) -> Result<()> {
        let own = proc::ns_inode(i32::try_from(std::process::id()).unwrap_or_default(), "net")?;
        for (id, described) in self.described {
            let Some(kind) = described.socket() else { continue };
            let Some(ns) = self.spaces.by_id(netns_of(self.spaces, kind.network())) else {
                continue;
            };
            let Some(file) = self.files.get(*id).filter(|file| is_socket(*file)) else { continue };
            let what = || format!("network namespace of socket {id}");
            let now = socket::network_namespace(file).context(what)?;
            let now = rustix::fs::fstat(now).context(what)?.st_ino;
            let space = if ns.is_host { &self.spaces.joined_network } else { &ns.file };
            let wanted = match space {
                None if ns.is_host => own,
                Some(file) => rustix::fs::fstat(file).context(what)?.st_ino,
                None => continue,
            };
            // One that the caller has handed over is where the caller has it.
            if now != wanted && !given::is_given(self, described) {
                let text =
                    format!("socket {id}: its network namespace is inode {now}, not {wanted}");
                return Err(wrong(text));
            }
        }
        unix::peers(self)
    }
}

/// Whether a task has descriptors of these numbers and no others.
fn numbers(task: &Task, wanted: &BTreeMap<u32, &Descriptor>) -> Result<()> {
    let now: Vec<u32> =
        proc::numbers(task.pid, "fd")?.into_iter().map(i32::cast_unsigned).collect();
    if let Some(more) = now.iter().find(|fd| !wanted.contains_key(fd)) {
        let what = format!("descriptor {more}");
        return Err(differs(task.vpid, &what, "closed", target(task.pid, *more)));
    }
    if let Some(less) = wanted.keys().find(|fd| !now.contains(fd)) {
        let what = format!("descriptor {less}");
        return Err(differs(task.vpid, &what, "open", "closed"));
    }
    Ok(())
}

/// What a message calls an open file.
fn target(pid: i32, fd: u32) -> String {
    let link = read_link(format!("/proc/{pid}/fd/{fd}"));
    link.map_or_else(|error| error.to_string(), |path| path.display().to_string())
}

pub(super) fn is_socket(file: BorrowedFd<'_>) -> bool {
    let stat = rustix::fs::fstat(file);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}
