//! Namespaces: which there are, and how to work inside one.

pub mod ipc;
pub mod mount;
pub mod net;
pub mod pid;
mod space;
#[cfg(test)]
pub mod testing;
pub mod time;
pub mod user;
pub mod uts;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_images::proto::TaskKobjIdsEntry;

use crate::error::{Context, Error, Result};
use crate::options::JoinNsKind;

pub(crate) use space::send_into;
pub use space::{Made, dump, enter, finish, restore, restore_late, set_clocks, take_external};

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
}

/// The namespaces of a tree.
#[derive(Debug, Default)]
pub struct Namespaces {
    /// In the order in which they were met; the root task's first.
    pub all: Vec<Namespace>,
}

impl Namespaces {
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

    /// All of one kind.
    pub fn of_kind(&self, kind: NsKind) -> impl Iterator<Item = &Namespace> {
        self.all.iter().filter(move |ns| ns.kind == kind)
    }
}

/// Runs `work` on a thread of its own that has entered the given namespaces
/// (any but user and pid), in the given order.
///
/// The thread unshares its file system context first: the kernel lets a task
/// enter a mount namespace only if it shares cwd and root with nobody.
///
/// # Errors
/// If a namespace cannot be entered, or what `work` returns.
pub fn run_in<T: Send>(
    namespaces: &[BorrowedFd<'_>],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            torpor_sys::ns::unshare_fs().context(|| "unshare(CLONE_FS)".to_owned())?;
            for ns in namespaces {
                rustix::thread::move_into_link_name_space(ns.as_fd(), None)
                    .context(|| "setns".to_owned())?;
            }
            work()
        });
        thread.join().unwrap_or_else(|_| {
            Err(Error::Bug("a worker thread in another namespace panicked".to_owned()))
        })
    })
}
