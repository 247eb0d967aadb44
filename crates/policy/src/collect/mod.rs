//! From images to requests.
//!
//! This looks at the same entries as the restore does and in the same way: what it
//! would miss would be made without having been judged.

pub(crate) mod anybody;
pub(crate) mod checkpoint;
mod files;
mod filled;
mod groups;
mod ipc;
mod limits;
pub mod lists;
mod mounts;
mod network;
mod ports;
pub(crate) mod references;
mod routing;
pub mod settings;
mod socket_options;
mod sockets;
mod targets;
mod tasks;
mod unlimited;
mod unreferenced;
pub mod uses;
mod values;

use torpor_images::kind;
use torpor_images::proto::UsernsEntry;

pub use self::anybody::OpenNetwork;
pub(crate) use self::checkpoint::Maps;
pub use self::checkpoint::{Checkpoint, Task};
use self::checkpoint::{KINDS, Requests};
pub use self::filled::filled;
pub use self::mounts::mounts;
pub use self::references::check as check_references;
pub use self::routing::{Addresses, comes_with_address, route, rule, texts};
pub use self::tasks::shared;
pub use self::values::{SysctlValues, Values};
pub use crate::error::{Error, Result};
use crate::given::GivenNamespace;
use crate::namespace::NsKind;
use crate::nested::{NestedUser, impossible};
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::user_maps::UserMaps;

/// Everything that a checkpoint asks for.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub fn collect(
    checkpoint: &Checkpoint<'_>,
    settings: &SysctlValues<'_>,
    passed: &Passed,
) -> Result<Vec<Request>> {
    references::check(checkpoint)?;
    let mounts = mounts(checkpoint.images, &checkpoint.namespaces(NsKind::Mnt), passed)?;
    let mut all = Requests::default();
    namespaces(checkpoint, passed, &mut all)?;
    let maps = user_namespace(checkpoint, passed, &mut all)?;
    nested(&checkpoint.nested_users()?, &maps, &mut all);
    tasks::collect(checkpoint, passed, &maps, &mut all);
    tasks::sessions(checkpoint, &mut all);
    tasks::groups_left(checkpoint, passed, &maps, &mut all)?;
    tasks::filters(checkpoint, passed, &mut all);
    limits::collect(checkpoint, passed, &mut all);
    uses::collect(checkpoint, settings.here, passed, &mut all)?;
    groups::collect(checkpoint, passed, &maps, &mut all)?;
    files::collect(checkpoint, &mounts, &maps, &mut all)?;
    sockets::collect(checkpoint, settings.here, &maps, passed, &mut all)?;
    sockets::connections(checkpoint, passed, &mut all)?;
    ports::collect(checkpoint, settings.here, passed, &maps, &mut all)?;
    ipc::collect(checkpoint, settings.fresh, passed, &maps, &mut all)?;
    unlimited::collect(checkpoint, passed, &maps, &mut all)?;
    for mount in mounts {
        all.add(kind::MNTS.file_name(mount.space.into()), None, Ask::Mount(mount));
    }
    if !passed.empty_network {
        network::collect(checkpoint, settings, passed, &mut all)?;
    }
    let filled = filled(checkpoint, &all.0, passed)?;
    all.0.extend(filled);
    Ok(all.0)
}

/// What of [`collect`] belongs to no namespace, file system or network: sessions, groups that are left, system calls beyond the profile, limits, scheduling,
/// what takes a capability, pipes and what waits in them, sockets (options, ports, peers, connections), objects of IPC namespaces,
/// files in memory, devices that groups allow. And what no rule limits.
/// It is cheap: a restore compares it with a plan that somebody else has read.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub fn powers(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    passed: &Passed,
) -> Result<Vec<Request>> {
    let mut all = Requests::default();
    tasks::sessions(checkpoint, &mut all);
    tasks::filters(checkpoint, passed, &mut all);
    limits::collect(checkpoint, passed, &mut all);
    uses::collect(checkpoint, here, passed, &mut all)?;
    sockets::special(checkpoint, here, passed, &mut all)?;
    sockets::connections(checkpoint, passed, &mut all)?;
    let maps = user_namespace(checkpoint, passed, &mut Requests::default())?;
    sockets::peers(checkpoint, &maps, passed, &mut all)?;
    ports::collect(checkpoint, here, passed, &maps, &mut all)?;
    tasks::groups_left(checkpoint, passed, &maps, &mut all)?;
    ipc::objects(checkpoint, passed, &maps, &mut all)?;
    files::memory_files(checkpoint, &maps, &mut all)?;
    groups::devices(checkpoint, passed, &mut all)?;
    unlimited::collect(checkpoint, passed, &maps, &mut all)?;
    Ok(all.0)
}

/// The namespaces that are made, and those that the caller gives.
fn namespaces(checkpoint: &Checkpoint<'_>, passed: &Passed, all: &mut Requests) -> Result<()> {
    let root = checkpoint.tasks.first();
    for kind in KINDS {
        let roots = root.and_then(|root| root.homes.own(kind));
        for number in checkpoint.namespaces(kind) {
            let lives_there = |task: &&Task<'_>| task.homes.own(kind) == Some(number);
            let task = checkpoint.tasks.iter().find(lives_there).map(|task| task.pid);
            let image = kind::CORE.file_name(task.unwrap_or(0).into());
            let is_roots = roots == Some(number);
            let given = GivenNamespace::read(checkpoint.images, (kind, number), is_roots, passed)?;
            let made = Ask::Namespace { kind: kind.name(), number };
            all.add(image, task, given.map_or(made, Ask::GivenNamespace));
        }
    }
    Ok(())
}

fn user_namespace(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<Maps> {
    // The ids of the images are then those of another namespace than their own.
    if passed.joins(NsKind::User) {
        return Ok(Maps(passed.user_maps.clone()));
    }
    let mut maps = Maps::default();
    let root = checkpoint.tasks.first();
    if let Some(id) = root.and_then(|root| root.homes.own(NsKind::User)) {
        let entry: UsernsEntry = checkpoint.images.read_one(kind::USERNS, id.into())?;
        let image = kind::USERNS.file_name(id.into());
        let own = UserMaps::read(&entry).ok_or_else(|| impossible(id))?;
        for (groups, extent) in own.extents() {
            let (first, lower, count) = extent.numbers();
            all.add(&*image, None, Ask::Map { groups, first, lower, count });
        }
        maps.0 = Some(own);
    }
    Ok(maps)
}

/// User namespaces below that of the root task.
fn nested(users: &[NestedUser], maps: &Maps, all: &mut Requests) {
    for user in users {
        let NestedUser { number, parent, owned, .. } = user.clone();
        let image = kind::USERNS.file_name(number.into());
        all.add(&*image, None, Ask::NestedUser { number, parent, owned });
        for (groups, extent) in user.maps.extents() {
            let (first, lower, count) = extent.numbers();
            let lower = maps.outside(groups, lower);
            all.add(&*image, None, Ask::NestedMap { number, groups, first, lower, count });
        }
    }
}
