//! Namespaces: which there are, and how to work inside one.

mod ask;
pub(crate) mod clocks;
mod enter;
mod external;
pub(crate) mod filling;
pub(crate) mod homes;
pub(crate) mod ipc;
mod left_out;
pub(crate) mod limits;
pub(crate) mod mount;
pub(crate) mod nested_user;
pub(crate) mod net;
pub(crate) mod pid;
pub(crate) mod pid_settings;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod time;
pub(crate) mod user;
pub(crate) mod uts;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_policy::{GivenNamespace, Home, NsSet};

use crate::error::{Context, Error, Result};
use crate::options::JoinNsKind;

pub(crate) use torpor_policy::NsKind;

pub(crate) use enter::send_into;

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

/// A namespace of the tree.
#[derive(Debug)]
pub(crate) struct Namespace {
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
pub(crate) struct Namespaces {
    /// In the order in which they were met; the root task's first.
    pub all: Vec<Namespace>,
    /// What more is to be said of user namespaces below that of the root task; parents first.
    pub users: Vec<user::NestedUser>,
    /// Those that are not made, because the caller gives them, by number.
    pub(crate) given: HashMap<u32, GivenNamespace>,
    /// The network that the tree joins, whose tasks were in this host's.
    pub(crate) joined_network: Option<OwnedFd>,
    /// What the clocks of time namespaces were set to, by number; 0 is that of a root task whose clocks
    /// were the host's.
    pub(crate) clocks: HashMap<u32, clocks::Offsets>,
    /// What of the network namespaces that were filled is the caller's doing.
    pub(crate) networks: net::items::OfCaller,
    /// What those that are made are filled with.
    pub(crate) filling: filling::Filling,
}

impl Namespaces {
    /// The namespaces that tasks live in, task by task.
    pub(crate) fn list(tasks: impl Iterator<Item = NsSet>) -> Self {
        let mut list = Namespaces::default();
        for (task, homes) in tasks.enumerate() {
            for kind in NsKind::ALL {
                let (id, is_host) = match homes.get(kind) {
                    Home::Own(id) => (id, false),
                    Home::Host(Some(id)) => (id, true),
                    Home::Host(None) => continue,
                };
                if list.by_id(id).is_none_or(|ns| ns.kind != kind) {
                    let ns = Namespace { kind, id, inode: 0, is_host, file: None, task, pid: 0 };
                    list.all.push(ns);
                }
            }
        }
        list
    }

    /// The namespace with image number `id`.
    pub(crate) fn by_id(&self, id: u32) -> Option<&Namespace> {
        self.all.iter().find(|ns| ns.id == id)
    }

    /// The namespace with inode number `inode`.
    pub(crate) fn by_inode(&self, inode: u64) -> Option<&Namespace> {
        self.all.iter().find(|ns| ns.inode == inode)
    }

    /// The file of namespace `id`, to enter it.
    ///
    /// # Errors
    /// If the images have no namespace of this number, or it is not made yet.
    pub(crate) fn open_file(&self, id: u32) -> Result<BorrowedFd<'_>> {
        let file = self.by_id(id).and_then(|ns| ns.file.as_ref()).map(AsFd::as_fd);
        file.ok_or_else(|| Error::invalid("ids", format!("there is no namespace {id}")))
    }

    /// Runs `work` inside the network namespace with image number `id` (0 is the caller's
    /// own, if the tasks have no other), on a thread of its own.
    ///
    /// # Errors
    /// What `work` returns; setns(2); a number that is none of such a namespace.
    pub(crate) fn in_netns<T: Send>(
        &self,
        id: u32,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        match self.netns(id)? {
            Some(file) => run_in(&[file.as_fd()], work),
            None => work(),
        }
    }

    /// The network namespace with image number `id`; `None` for the caller's own (0, if the tasks have no other), unless the
    /// tree joins one in its place.
    ///
    /// # Errors
    /// A number that is none of such a namespace; one of a task that has ended.
    pub(crate) fn netns(&self, id: u32) -> Result<Option<OwnedFd>> {
        let others = || self.of_kind(NsKind::Net).any(|ns| !ns.is_host);
        let joined = || {
            let joined = self.joined_network.as_ref().map(OwnedFd::try_clone).transpose();
            joined.context(|| "dup of a network namespace".to_owned())
        };
        match self.by_id(id) {
            Some(ns) if ns.kind == NsKind::Net && ns.is_host => joined(),
            Some(Namespace { kind: NsKind::Net, file: Some(file), .. }) => {
                file.try_clone().context(|| "dup of a network namespace".to_owned()).map(Some)
            }
            // It came into being with its first task.
            Some(ns) if ns.kind == NsKind::Net => {
                Ok(Some(crate::proc::open(ns.pid, "ns/net")?.into()))
            }
            None if !others() => joined(),
            _ => {
                let reason = format!("{id} is no network namespace of the tasks");
                Err(Error::invalid("files.img", reason))
            }
        }
    }

    /// Those for which there is something to be filled with, by kind and number: all that are made, and networks that are
    /// joined, whose devices the caller may name.
    pub(crate) fn filled(&self) -> impl Iterator<Item = (NsKind, u32)> {
        let own = self.all.iter().filter(|ns| !ns.is_host);
        let filled = own.filter(|ns| match self.given.get(&ns.id) {
            None => true,
            Some(given) => given.key.is_none() && ns.kind == NsKind::Net,
        });
        filled.map(|ns| (ns.kind, ns.id))
    }

    /// The user namespace of the root task, if it is not the caller's own.
    pub(crate) fn own_user(&self) -> Option<&Namespace> {
        self.of_kind(NsKind::User).find(|ns| ns.task == 0 && !ns.is_host)
    }

    /// All of one kind.
    pub(crate) fn of_kind(&self, kind: NsKind) -> impl Iterator<Item = &Namespace> {
        self.all.iter().filter(move |ns| ns.kind == kind)
    }
}

/// [`torpor_kernel::namespace::run_in`] for work of the engine.
///
/// # Errors
/// If a namespace cannot be entered, or what `work` returns.
pub(crate) fn run_in<T: Send>(
    namespaces: &[BorrowedFd<'_>],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    torpor_kernel::namespace::run_in(namespaces, work)
}
