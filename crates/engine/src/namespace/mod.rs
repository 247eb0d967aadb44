//! Namespaces: which there are, and how to work inside one.

mod enter;
mod external;
mod homes;
pub mod ipc;
pub mod mount;
pub mod net;
pub mod pid;
#[cfg(test)]
pub mod testing;
pub mod time;
pub mod user;
pub mod uts;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::TaskKobjIdsEntry;

use crate::error::{Error, Result};
use crate::options::JoinNsKind;

pub use enter::send_into;
pub use homes::{
    Homes, Made, dump, enter, finish, restore, restore_late, set_clocks, take_external,
};

/// A kind of namespace, by its name in `/proc/PID/ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum NsKind {
    Pid,
    Net,
    Ipc,
    Uts,
    Mnt,
    User,
    Cgroup,
    Time,
}

impl NsKind {
    /// All kinds.
    pub const ALL: [NsKind; 8] = [
        NsKind::Pid,
        NsKind::Net,
        NsKind::Ipc,
        NsKind::Uts,
        NsKind::Mnt,
        NsKind::User,
        NsKind::Cgroup,
        NsKind::Time,
    ];

    /// The name of its link in `/proc/PID/ns`.
    pub fn name(self) -> &'static str {
        match self {
            NsKind::Pid => "pid",
            NsKind::Net => "net",
            NsKind::Ipc => "ipc",
            NsKind::Uts => "uts",
            NsKind::Mnt => "mnt",
            NsKind::User => "user",
            NsKind::Cgroup => "cgroup",
            NsKind::Time => "time",
        }
    }

    /// Its `CLONE_NEW*` flag.
    pub fn clone_flag(self) -> u64 {
        let flag = match self {
            NsKind::Pid => libc::CLONE_NEWPID,
            NsKind::Net => libc::CLONE_NEWNET,
            NsKind::Ipc => libc::CLONE_NEWIPC,
            NsKind::Uts => libc::CLONE_NEWUTS,
            NsKind::Mnt => libc::CLONE_NEWNS,
            NsKind::User => libc::CLONE_NEWUSER,
            NsKind::Cgroup => libc::CLONE_NEWCGROUP,
            NsKind::Time => 0x80, // CLONE_NEWTIME, linux/sched.h: outside of libc's int flags
        };
        u64::from(flag.cast_unsigned())
    }
}

impl From<JoinNsKind> for NsKind {
    fn from(kind: JoinNsKind) -> Self {
        match kind {
            JoinNsKind::Ipc => NsKind::Ipc,
            JoinNsKind::Mnt => NsKind::Mnt,
            JoinNsKind::Net => NsKind::Net,
            JoinNsKind::Time => NsKind::Time,
            JoinNsKind::User => NsKind::User,
            JoinNsKind::Uts => NsKind::Uts,
        }
    }
}

impl NsKind {
    /// The number of a task's namespace of this kind.
    pub fn id_in(self, ids: &TaskKobjIdsEntry) -> Option<u32> {
        match self {
            NsKind::Pid => ids.pid_ns_id,
            NsKind::Net => ids.net_ns_id,
            NsKind::Ipc => ids.ipc_ns_id,
            NsKind::Uts => ids.uts_ns_id,
            NsKind::Mnt => ids.mnt_ns_id,
            NsKind::User => ids.user_ns_id,
            NsKind::Cgroup => ids.cgroup_ns_id,
            NsKind::Time => ids.time_ns_id,
        }
    }

    /// Sets the number of a task's namespace of this kind.
    pub fn set_id_in(self, ids: &mut TaskKobjIdsEntry, id: u32) {
        let field = match self {
            NsKind::Pid => &mut ids.pid_ns_id,
            NsKind::Net => &mut ids.net_ns_id,
            NsKind::Ipc => &mut ids.ipc_ns_id,
            NsKind::Uts => &mut ids.uts_ns_id,
            NsKind::Mnt => &mut ids.mnt_ns_id,
            NsKind::User => &mut ids.user_ns_id,
            NsKind::Cgroup => &mut ids.cgroup_ns_id,
            NsKind::Time => &mut ids.time_ns_id,
        };
        *field = Some(id);
    }
}

/// A namespace of the tree.
#[derive(Debug)]
pub struct Namespace {
    /// Its kind.
    pub kind: NsKind,
    /// Its number in the images, from 1, unique over all kinds.
    pub id: u32,
    /// The inode number of its file in nsfs (of the one that was dumped).
    pub inode: u64,
    /// Whether it is the caller's own, so that its content is not part of the
    /// checkpoint.
    pub is_host: bool,
    /// Open file on it (at dump: always; at restore: once it has been made).
    pub file: Option<OwnedFd>,
    /// Index of a task that lives in it.
    pub task: usize,
    /// Its pid here; 0 as long as there is no such task.
    pub pid: i32,
}

/// The namespaces of a tree.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// In the order in which they were met; the root task's first.
    pub all: Vec<Namespace>,
}

impl Namespaces {
    /// The namespaces of tasks, by what each shares, as images have them; those that the dumping
    /// program (`host`) shared with them are the caller's own now.
    pub fn list<'i>(
        tasks: impl Iterator<Item = &'i TaskKobjIdsEntry>,
        host: &TaskKobjIdsEntry,
    ) -> Self {
        let mut list = Namespaces::default();
        for (task, ids) in tasks.enumerate() {
            for kind in NsKind::ALL {
                let id = kind.id_in(ids).unwrap_or(0);
                let known = list.by_id(id).is_some_and(|ns| ns.kind == kind);
                if id == 0 || known {
                    continue;
                }
                let is_host = kind.id_in(host) == Some(id);
                list.all.push(Namespace { kind, id, inode: 0, is_host, file: None, task, pid: 0 });
            }
        }
        list
    }

    /// The namespace with image number `id`.
    pub fn by_id(&self, id: u32) -> Option<&Namespace> {
        self.all.iter().find(|ns| ns.id == id)
    }

    /// The namespace with inode number `inode`.
    pub fn by_inode(&self, inode: u64) -> Option<&Namespace> {
        self.all.iter().find(|ns| ns.inode == inode)
    }

    /// The file of namespace `id`, to enter it.
    ///
    /// # Errors
    /// If there is none (yet).
    pub fn open_file(&self, id: u32) -> Result<BorrowedFd<'_>> {
        let file = self.by_id(id).and_then(|ns| ns.file.as_ref()).map(AsFd::as_fd);
        file.ok_or_else(|| Error::invalid("ids", format!("there is no namespace {id}")))
    }

    /// Runs `work` inside the network namespace with image number `id` (0 is the caller's
    /// own, if the tasks have no other), on a thread of its own.
    ///
    /// # Errors
    /// What `work` returns; setns(2); a number that is none of such a namespace.
    pub fn in_netns<T: Send>(&self, id: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let others = || self.of_kind(NsKind::Net).any(|ns| !ns.is_host);
        let ns = match self.by_id(id) {
            Some(ns) if ns.kind == NsKind::Net => ns,
            None if !others() => return work(),
            _ => {
                let reason = format!("{id} is no network namespace of the tasks");
                return Err(Error::invalid("files.img", reason));
            }
        };
        if ns.is_host {
            return work();
        }
        if let Some(file) = &ns.file {
            return run_in(&[file.as_fd()], work);
        }
        // It came into being with its first task.
        let file = crate::proc::open(ns.pid, "ns/net")?;
        run_in(&[file.as_fd()], work)
    }

    /// All of one kind.
    pub fn of_kind(&self, kind: NsKind) -> impl Iterator<Item = &Namespace> {
        self.all.iter().filter(move |ns| ns.kind == kind)
    }
}

/// [`torpor_kernel::namespace::run_in`] for work of the engine.
///
/// # Errors
/// If a namespace cannot be entered, or what `work` returns.
pub fn run_in<T: Send>(
    namespaces: &[BorrowedFd<'_>],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    torpor_kernel::namespace::run_in(namespaces, work)
}
