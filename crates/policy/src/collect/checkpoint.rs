//! A checkpoint, as it is looked at, and what it is found to ask for.

use std::collections::BTreeSet;

use torpor_images::ImageDir;
use torpor_images::proto::FileEntry;

use crate::credentials::Credentials;
use crate::descriptor::Descriptor;
use crate::error::Result;
use crate::inventory::Inventory;
use crate::limits::ProcessLimits;
use crate::memory::MemoryArea;
use crate::namespace::{NsKind, NsSet};
use crate::nested::{NestedUser, nested_users};
use crate::process::{ProcessRest, ThreadRest};
use crate::request::{Ask, Request};
use crate::scheduling::Scheduling;
use crate::seccomp::Seccomp;
use crate::sharing::TableNumber;
use crate::user_maps::{IdExtent, UserMaps};

/// A task, as the restore has loaded it.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// Its pid in the images.
    pub pid: u32,
    /// Its session.
    pub session: u32,
    /// The namespaces that it lives in.
    pub homes: NsSet,
    /// The pids of its threads, the leader first.
    pub threads: &'a [u32],
    /// What else it has.
    pub process: &'a ProcessRest,
    /// What else each of them has, in that order.
    pub rests: &'a [ThreadRest],
    /// What each of them may do, in that order.
    pub credentials: &'a [Option<Credentials>],
    /// What limits their system calls, in that order.
    pub seccomp: &'a [Seccomp],
    /// What it may use.
    pub limits: &'a ProcessLimits,
    /// How its threads are scheduled, in that order.
    pub scheduling: &'a [Scheduling],
    /// Its mappings, by their addresses.
    pub areas: &'a [MemoryArea],
    /// The number of its table of descriptors.
    pub table: TableNumber,
    /// What is in that; nothing, if an earlier task has the same table.
    pub fds: &'a [Descriptor],
    /// The open files that are its program, its working directory and its root.
    pub places: [Option<u32>; 3],
    /// It has ended and only waits to be noticed.
    pub zombie: bool,
}

/// A checkpoint, as the restore has loaded it.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    /// Its other images.
    pub images: &'a ImageDir,
    /// The inventory.
    pub inventory: &'a Inventory,
    /// Its tasks, the root first.
    pub tasks: Vec<Task<'a>>,
    /// Its open files.
    pub files: Vec<&'a FileEntry>,
}

/// The kinds of namespaces, in the order of their names.
pub(super) const KINDS: [NsKind; 8] = [
    NsKind::Cgroup,
    NsKind::Ipc,
    NsKind::Mnt,
    NsKind::Net,
    NsKind::Pid,
    NsKind::Time,
    NsKind::User,
    NsKind::Uts,
];

impl Checkpoint<'_> {
    /// The user namespaces below that of the root task, parents first.
    pub(crate) fn nested_users(&self) -> Result<Vec<NestedUser>> {
        let living = self.tasks.iter().filter(|task| !task.zombie);
        nested_users(self.images, &living.map(|task| task.homes).collect::<Vec<_>>())
    }

    /// Whether a task lives in one of them: what it may do there says nothing about this host.
    pub(crate) fn is_nested_user(&self, task: &Task<'_>) -> bool {
        let root = self.tasks.first().map(|root| root.homes.get(NsKind::User));
        root != Some(task.homes.get(NsKind::User)) && task.homes.own(NsKind::User).is_some()
    }

    /// All namespaces of a kind but this host's own, in the order in which the tasks
    /// have them.
    pub(crate) fn namespaces(&self, kind: NsKind) -> Vec<u32> {
        let mut seen = BTreeSet::new();
        let numbers = self.tasks.iter().filter_map(|task| task.homes.own(kind));
        numbers.filter(|number| seen.insert(*number)).collect()
    }
}

/// The requests that have been found.
#[derive(Debug, Default)]
pub(crate) struct Requests(pub(crate) Vec<Request>);

impl Requests {
    pub(crate) fn add(&mut self, image: impl Into<String>, task: Option<u32>, ask: Ask) {
        self.0.push(Request { image: image.into(), task, ask });
    }
}

/// The ids of the tree's user namespace; none if it is this host's.
#[derive(Debug, Default)]
pub(crate) struct Maps(pub(crate) Option<UserMaps>);

impl Maps {
    /// The user id on this host. One that is not mapped cannot be given to anyone.
    pub(crate) fn user(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |maps| outside(&maps.users, id))
    }

    /// The group id on this host, likewise.
    pub(crate) fn group(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |maps| outside(&maps.groups, id))
    }

    /// That of a group, else of a user.
    pub(crate) fn outside(&self, group: bool, id: u32) -> u32 {
        if group { self.group(id) } else { self.user(id) }
    }
}

fn outside(map: &[IdExtent], id: u32) -> u32 {
    map.iter().find_map(|extent| extent.outside(id)).unwrap_or(id)
}
