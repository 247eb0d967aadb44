//! What threads may do.

use torpor_images::kind;
use torpor_images::proto::{CoreEntry, SeccompMode};

use super::{Checkpoint, KINDS, Maps, Requests, Task};
use crate::credentials::Credentials;
use crate::request::Ask;

pub(super) fn collect(checkpoint: &Checkpoint<'_>, maps: &Maps, all: &mut Requests) {
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        for kind in KINDS {
            if task.homes.own(kind).is_none() {
                let image = kind::CORE.file_name(task.pid.into());
                all.add(image, Some(task.pid), Ask::HostNamespace(kind.name()));
            }
        }
        let threads = task.threads.iter().zip(task.cores).zip(task.credentials);
        for ((&thread, core), credentials) in threads {
            let image = kind::CORE.file_name(thread.into());
            let mut add = |ask| all.add(&*image, Some(thread), ask);
            match credentials {
                Some(credentials) => {
                    if !checkpoint.is_nested_user(task) {
                        add(Ask::Capabilities(credentials.capabilities.all()));
                    }
                    rights(credentials, maps, &mut add);
                }
                None => add(Ask::NoCredentials),
            }
            // A leader that has ended runs nothing.
            if core.tc.as_ref().is_none_or(|tc| tc.torpor_leader_ended != Some(true)) {
                add(Ask::Seccomp(is_filtered(core, task)));
            }
        }
    }
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

/// Older images have the mode for the process only.
fn is_filtered(core: &CoreEntry, task: &Task<'_>) -> bool {
    let thread = core.thread_core.as_ref().and_then(|core| core.seccomp_mode);
    let process = task.cores.first().and_then(|leader| leader.tc.as_ref()?.old_seccomp_mode);
    let mode = thread.or(process).unwrap_or_default();
    [SeccompMode::Strict, SeccompMode::Filter]
        .contains(&SeccompMode::try_from(mode).unwrap_or_default())
}
