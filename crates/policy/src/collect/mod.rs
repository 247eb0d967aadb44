//! From images to requests.
//!
//! This looks at the same entries as the restore does and in the same way: what it
//! would miss would be made without having been judged.

mod files;
mod groups;
mod ipc;
mod limits;
pub mod lists;
mod mounts;
mod network;
mod parts;
mod ports;
mod references;
mod routing;
pub mod settings;
mod socket_options;
mod sockets;
mod tasks;
pub mod uses;

use std::collections::BTreeSet;

use torpor_images::proto::{
    CoreEntry, FileEntry, InventoryEntry, UidGidExtent, UsernsEntry, VmaEntry,
};
use torpor_images::{ImageDir, kind};

pub(crate) use self::limits::LOCKED_MEMORY;
pub use self::mounts::mounts;
pub use self::ports::Network;
pub use self::references::network_of;
pub use self::routing::{Addresses, route, rule};
use crate::credentials::Credentials;
use crate::limits::{LIMITS, ProcessLimits};
use crate::namespace::{NsKind, NsSet};
use crate::nested::{NestedUser, nested_users};
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::scheduling::Scheduling;
use crate::seccomp::Seccomp;

/// A task, as the restore has loaded it.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// Its pid in the images.
    pub pid: u32,
    /// The namespaces that it lives in.
    pub homes: NsSet,
    /// The pids of its threads, the leader first.
    pub threads: &'a [u32],
    /// Its threads, in that order.
    pub cores: &'a [CoreEntry],
    /// What each of them may do, in that order.
    pub credentials: &'a [Option<Credentials>],
    /// What limits their system calls, in that order.
    pub seccomp: &'a [Seccomp],
    /// What it may use.
    pub limits: &'a ProcessLimits,
    /// How its threads are scheduled, in that order.
    pub scheduling: &'a [Scheduling],
    /// Its mappings.
    pub vmas: &'a [VmaEntry],
    /// It has ended and only waits to be noticed.
    pub zombie: bool,
}

/// A checkpoint, as the restore has loaded it.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    /// Its other images.
    pub images: &'a ImageDir,
    /// The inventory.
    pub inventory: &'a InventoryEntry,
    /// Its tasks, the root first.
    pub tasks: Vec<Task<'a>>,
    /// Its open files.
    pub files: Vec<&'a FileEntry>,
}

/// Values of settings, by their paths below `/proc/sys`: `net/ipv4/conf/lo/forwarding`.
pub type Values<'a> = &'a dyn Fn(&[String]) -> Vec<Option<String>>;

/// What is known of settings of network and IPC namespaces.
#[derive(Clone, Copy)]
pub struct Settings<'a> {
    /// The names of those of networks.
    pub names: settings::Names,
    /// The values that this host has.
    pub here: Values<'a>,
    /// The values that new namespaces have.
    pub fresh: Values<'a>,
}

impl std::fmt::Debug for Settings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").finish_non_exhaustive()
    }
}

/// Why images cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An image is damaged.
    #[error(transparent)]
    Image(#[from] torpor_images::Error),
    /// An image makes no sense.
    #[error("{image}: {reason}")]
    Invalid {
        /// The image file.
        image: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The result of collecting.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that a checkpoint asks for.
///
/// # Errors
/// Damaged images.
pub fn collect(
    checkpoint: &Checkpoint<'_>,
    settings: &Settings<'_>,
    passed: &Passed,
) -> Result<Vec<Request>> {
    references::check(checkpoint)?;
    let mounts = mounts(checkpoint.images, &checkpoint.namespaces(NsKind::Mnt), passed)?;
    let mut all = Requests::default();
    namespaces(checkpoint, &mut all);
    let maps = user_namespace(checkpoint, passed, &mut all)?;
    nested(&checkpoint.nested_users()?, &maps, &mut all);
    tasks::collect(checkpoint, &maps, &mut all);
    limits::collect(checkpoint, passed, &mut all);
    uses::collect(checkpoint, settings.here, passed, &mut all)?;
    groups::collect(checkpoint, passed, &maps, &mut all)?;
    files::collect(checkpoint, &mounts, &mut all)?;
    sockets::collect(checkpoint, settings.here, &maps, &mut all)?;
    ports::collect(checkpoint, settings.here, passed, &maps, &mut all)?;
    ipc::collect(checkpoint, settings.fresh, passed, &maps, &mut all)?;
    for mount in mounts {
        all.add(kind::MNTS.file_name(mount.space.into()), None, Ask::Mount(mount));
    }
    if !passed.empty_network {
        network::collect(checkpoint, settings, passed, &mut all)?;
    }
    Ok(all.0)
}

/// What of [`collect`] belongs to no namespace, file system or network: limits, scheduling, what takes a
/// capability, sizes of pipes, sockets (options, ports, peers), objects of IPC namespaces.
/// It is cheap: who restores compares it with a plan that somebody else has read.
///
/// # Errors
/// Damaged images.
pub fn powers(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    passed: &Passed,
) -> Result<Vec<Request>> {
    let mut all = Requests::default();
    limits::collect(checkpoint, passed, &mut all);
    uses::collect(checkpoint, here, passed, &mut all)?;
    sockets::special(checkpoint, here, &mut all)?;
    let maps = user_namespace(checkpoint, passed, &mut Requests::default())?;
    sockets::peers(checkpoint, &maps, &mut all)?;
    ports::collect(checkpoint, here, passed, &maps, &mut all)?;
    ipc::objects(checkpoint, passed, &maps, &mut all)?;
    Ok(all.0)
}

/// The requests that have been found.
#[derive(Debug, Default)]
struct Requests(Vec<Request>);

impl Requests {
    fn add(&mut self, image: impl Into<String>, task: Option<u32>, ask: Ask) {
        self.0.push(Request { image: image.into(), task, ask });
    }
}

/// The ids of the tree's user namespace; none if it is this host's.
#[derive(Debug, Default)]
pub(crate) struct Maps(pub(crate) Option<UsernsEntry>);

impl Maps {
    /// The user id on this host. One that is not mapped cannot be given to anyone.
    pub(crate) fn user(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |maps| outside(&maps.uid_map, id))
    }

    /// The group id on this host, likewise.
    pub(crate) fn group(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |maps| outside(&maps.gid_map, id))
    }
}

fn outside(map: &[UidGidExtent], id: u32) -> u32 {
    let found = map.iter().find_map(|extent| {
        let offset = id.checked_sub(extent.first).filter(|&offset| offset < extent.count)?;
        extent.lower_first.checked_add(offset)
    });
    found.unwrap_or(id)
}

/// The kinds of namespaces, in the order of their names.
const KINDS: [NsKind; 8] = [
    NsKind::Cgroup,
    NsKind::Ipc,
    NsKind::Mnt,
    NsKind::Net,
    NsKind::Pid,
    NsKind::Time,
    NsKind::User,
    NsKind::Uts,
];

/// The words that stand in requests as they are.
pub(crate) fn words() -> impl Iterator<Item = &'static str> {
    let kinds = KINDS.into_iter().map(NsKind::name);
    let more = ["oom_score_adj", "PR_SET_IO_FLUSHER", LOCKED_MEMORY, limits::PIPE_SIZE];
    let kinds = kinds.chain(["packet", "raw", "marked", "ping"]);
    kinds.chain(LIMITS).chain(ipc::BEYOND).chain(more)
}

impl Checkpoint<'_> {
    /// The user namespaces below that of the root task, parents first.
    fn nested_users(&self) -> Result<Vec<NestedUser>> {
        let living = self.tasks.iter().filter(|task| !task.zombie);
        nested_users(self.images, &living.map(|task| task.homes).collect::<Vec<_>>())
    }

    /// Whether a task lives in one of them: what it may do there says nothing about this host.
    fn is_nested_user(&self, task: &Task<'_>) -> bool {
        let root = self.tasks.first().map(|root| root.homes.get(NsKind::User));
        root != Some(task.homes.get(NsKind::User)) && task.homes.own(NsKind::User).is_some()
    }

    /// All namespaces of a kind but this host's own, in the order in which the tasks
    /// have them.
    fn namespaces(&self, kind: NsKind) -> Vec<u32> {
        let mut seen = BTreeSet::new();
        let numbers = self.tasks.iter().filter_map(|task| task.homes.own(kind));
        numbers.filter(|number| seen.insert(*number)).collect()
    }
}

/// The namespaces that are made.
fn namespaces(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    for kind in KINDS {
        for number in checkpoint.namespaces(kind) {
            let lives_there = |task: &&Task<'_>| task.homes.own(kind) == Some(number);
            let task = checkpoint.tasks.iter().find(lives_there).map(|task| task.pid);
            let image = kind::CORE.file_name(task.unwrap_or(0).into());
            all.add(image, task, Ask::Namespace { kind: kind.name(), number });
        }
    }
}

fn user_namespace(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<Maps> {
    // The ids of the images are then those of another namespace than their own.
    if passed.joined.iter().any(|kind| kind == "user") {
        return Ok(Maps(passed.user_maps.clone()));
    }
    let mut maps = Maps::default();
    let root = checkpoint.tasks.first();
    if let Some(id) = root.and_then(|root| root.homes.own(NsKind::User)) {
        let entry: UsernsEntry = checkpoint.images.read_one(kind::USERNS, id.into())?;
        let image = kind::USERNS.file_name(id.into());
        for (groups, map) in [(false, &entry.uid_map), (true, &entry.gid_map)] {
            for UidGidExtent { first, lower_first: lower, count } in map.iter().copied() {
                all.add(&*image, None, Ask::Map { groups, first, lower, count });
            }
        }
        maps.0.get_or_insert(entry);
    }
    Ok(maps)
}

/// User namespaces below that of the root task.
fn nested(users: &[NestedUser], maps: &Maps, all: &mut Requests) {
    for user in users {
        let NestedUser { number, parent, owned, .. } = user.clone();
        let image = kind::USERNS.file_name(number.into());
        all.add(&*image, None, Ask::NestedUser { number, parent, owned });
        for (groups, map) in [false, true].into_iter().zip(&user.maps) {
            for UidGidExtent { first, lower_first, count } in map.iter().copied() {
                let lower = if groups { maps.group(lower_first) } else { maps.user(lower_first) };
                all.add(&*image, None, Ask::NestedMap { number, groups, first, lower, count });
            }
        }
    }
}
