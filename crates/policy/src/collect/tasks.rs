//! What threads may do.

use std::collections::BTreeSet;

use torpor_images::kind;

use super::checkpoint::{Checkpoint, KINDS, Maps, Requests, Task};
use crate::credentials::Credentials;
use crate::error::Result;
use crate::given::GivenNamespace;
use crate::namespace::{NsKind, NsSet};
use crate::passed::{IdKind, Passed};
use crate::request::Ask;
use crate::seccomp::GivenCalls;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) {
    let root = checkpoint.tasks.first().map(|root| root.homes).unwrap_or_default();
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        for ask in KINDS.into_iter().filter_map(|kind| shared((task.homes, root), kind, passed)) {
            all.add(kind::CORE.file_name(task.pid.into()), Some(task.pid), ask);
        }
        let threads = task.threads.iter().zip(task.credentials).zip(task.seccomp);
        for (index, ((&thread, credentials), seccomp)) in threads.enumerate() {
            let image = kind::CORE.file_name(thread.into());
            let mut add = |ask| all.add(&*image, Some(thread), ask);
            match credentials {
                Some(credentials) => {
                    if !checkpoint.is_nested_user(task) {
                        add(Ask::Capabilities(credentials.capabilities.all()));
                        add(Ask::HeldCapabilities(credentials.capabilities.held()));
                    }
                    rights(credentials, maps, &mut add);
                }
                None => add(Ask::NoCredentials),
            }
            if runs(task, index) {
                add(seccomp.ask());
            }
        }
    }
}

/// Asks for the namespace of a kind that a task has not got for itself: that of this host, or the one that the root task
/// joins in its place, and whoever lives there with it. `homes` are those of the task and of the root task.
#[must_use]
pub fn shared(homes: (NsSet, NsSet), kind: NsKind, passed: &Passed) -> Option<Ask> {
    let (task, root) = homes;
    if task.own(kind).is_some() {
        return None;
    }
    // By a number of its own it would be this host's all the same.
    let is_roots =
        root.own(kind).is_none() && [None, root.number(kind)].contains(&task.number(kind));
    if !(is_roots && passed.joins(kind)) {
        return Some(Ask::HostNamespace(kind.name()));
    }
    let number = task.number(kind).unwrap_or_default();
    Some(Ask::GivenNamespace(GivenNamespace { kind: kind.name(), number, key: None }))
}

/// Tasks in the session that the root task is born into, if it does not begin one before.
pub(super) fn sessions(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    let Some(root) = checkpoint.tasks.first() else { return };
    let callers = if root.session == root.pid { 0 } else { root.session };
    let stays = |task: &&Task<'_>| task.session == callers;
    for task in checkpoint.tasks.iter().filter(stays) {
        all.add(kind::PSTREE.file_name(0), Some(task.pid), Ask::CallersSession);
    }
}

/// Threads that are not in all groups which the configuration puts them into, and user namespaces whose tasks may leave
/// them.
pub(super) fn groups_left(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let Some(spec) = &passed.spec else { return Ok(()) };
    let given = spec.process.user.additional_gids.iter();
    let given = given.filter_map(|&id| passed.outside(spec, IdKind::Group, id));
    let given: BTreeSet<u32> = given.collect();
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie && !given.is_empty()) {
        for (&thread, credentials) in task.threads.iter().zip(task.credentials) {
            let Some(credentials) = credentials else { continue };
            let has: BTreeSet<u32> = credentials.further.iter().map(|&id| maps.group(id)).collect();
            let left: Vec<_> = given.difference(&has).map(ToString::to_string).collect();
            if !left.is_empty() {
                let text = format!("is not in group {}, where it belongs", left.join(", "));
                all.add(kind::CORE.file_name(thread.into()), Some(thread), Ask::FewerGroups(text));
            }
        }
    }
    for user in checkpoint.nested_users()?.iter().filter(|user| !user.denies_groups) {
        let text = format!("user namespace {} lets its tasks leave groups", user.number);
        all.add(kind::USERNS.file_name(user.number.into()), None, Ask::FewerGroups(text));
    }
    Ok(())
}

/// What filters let through, and the profile of the configuration does not.
pub(super) fn filters(checkpoint: &Checkpoint<'_>, passed: &Passed, all: &mut Requests) {
    let profile = passed.spec.as_ref().and_then(|spec| spec.linux.seccomp.as_ref());
    let profile = profile.filter(|profile| !profile.is_empty());
    let Some(mut given) = profile.map(GivenCalls::of) else { return };
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        for (index, (&thread, seccomp)) in task.threads.iter().zip(task.seccomp).enumerate() {
            let filters = seccomp.filters();
            if !runs(task, index) || filters.is_empty() {
                continue;
            }
            let beyond = given.beyond(filters);
            if !beyond.is_empty() {
                let image = kind::CORE.file_name(thread.into());
                all.add(image, Some(thread), Ask::SystemCalls(beyond));
            }
        }
    }
}

/// A leader that has ended runs nothing.
fn runs(task: &Task<'_>, index: usize) -> bool {
    index != 0 || !task.process.leader_ended
}

fn rights(wanted: &Credentials, maps: &Maps, add: &mut impl FnMut(Ask)) {
    add(Ask::NoNewPrivileges(wanted.no_new_privileges == Some(true)));
    add(Ask::Profile(wanted.profile.clone()));
    let mut users = wanted.users.map(|id| maps.user(id));
    users.sort_unstable();
    let mut last = None;
    users.into_iter().filter(|&id| last.replace(id) != Some(id)).for_each(|id| add(Ask::User(id)));
    let own = wanted.groups.iter().chain(&wanted.further);
    let mut groups: Vec<u32> = own.map(|&id| maps.group(id)).collect();
    groups.sort_unstable();
    groups.dedup();
    groups.into_iter().for_each(|id| add(Ask::Group(id)));
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::TaskKobjIdsEntry;

    use super::*;
    use crate::namespace::HostSpaces;

    /// Whoever does not live with the root task is not in what that joins.
    #[test]
    fn what_is_joined_is_the_root_tasks() {
        let home = |number: Option<u32>| {
            let host = TaskKobjIdsEntry { ipc_ns_id: Some(7), ..TaskKobjIdsEntry::default() };
            let ids = TaskKobjIdsEntry { ipc_ns_id: number, ..TaskKobjIdsEntry::default() };
            NsSet::read(&ids, &HostSpaces::of(&host))
        };
        let asked = |task, root, joined: &[&str]| {
            let joined = joined.iter().map(|&kind| kind.to_owned()).collect();
            let passed = Passed { joined, ..Passed::default() };
            let ask = shared((home(task), home(root)), NsKind::Ipc, &passed);
            ask.map(|ask| ask.to_string())
        };
        let host = Some("lives in this host's ipc namespace".to_owned());
        let joined = |number| Some(format!("the ipc namespace that is joined ({number})"));
        for root in [None, Some(7), Some(5)] {
            assert_eq!(asked(Some(6), root, &["ipc"]), None);
            assert_eq!(asked(Some(7), root, &["uts"]), host);
        }
        assert_eq!(asked(Some(7), Some(7), &["ipc"]), joined(7));
        assert_eq!(asked(None, Some(7), &["ipc"]), joined(0));
        assert_eq!(
            [Some(5), None].map(|root| asked(Some(7), root, &["ipc"])),
            [host.clone(), host]
        );
    }
}
