//! What threads may do.

use torpor_images::kind;

use super::checkpoint::{Checkpoint, KINDS, Maps, Requests, Task};
use crate::credentials::Credentials;
use crate::passed::Passed;
use crate::request::Ask;
use crate::seccomp::GivenCalls;

pub(super) fn collect(checkpoint: &Checkpoint<'_>, maps: &Maps, all: &mut Requests) {
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        for kind in KINDS {
            if task.homes.own(kind).is_none() {
                let image = kind::CORE.file_name(task.pid.into());
                all.add(image, Some(task.pid), Ask::HostNamespace(kind.name()));
            }
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
