//! Cgroups: which are made, changed and entered, and the devices that they allow.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use torpor_images::kind;
use torpor_images::proto::{CgroupDirEntry, CgroupEntry, CgroupPerms};

use super::{Checkpoint, Error, Maps, Requests, Result};
use crate::groups::{Places, path, set_of};
use crate::passed::Passed;
use crate::request::{Ask, Device};

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let Some(roots) = &passed.cgroups else { return Ok(()) };
    let Some(entry) = checkpoint.images.read_opt::<CgroupEntry>(kind::CGROUP, 0)? else {
        return Ok(());
    };
    devices(&entry, all);
    let own = checkpoint.inventory.root_cg_set.unwrap_or(0);
    let root = checkpoint.tasks.first().and_then(|task| set_of(task.cores.first()?));
    let places = Places::of(&entry, root, own, roots);
    let image = kind::CGROUP.file_name(0);
    let mut add = |hierarchy: &str, group: &Path, properties: usize| {
        let ask = Ask::Cgroup {
            hierarchy: hierarchy.to_owned(),
            path: group.to_string_lossy().into_owned(),
            properties,
        };
        all.add(&*image, None, ask);
    };
    let mut more = vec![];
    for controller in &entry.controllers {
        let hierarchy = controller.cnames.join(",");
        // The root of a hierarchy stands for nothing to be made.
        let is_root = |dir: &&CgroupDirEntry| path(&dir.dir_name) == Path::new("/");
        for dir in controller.dirs.iter().filter(|dir| !(is_root(dir) && dir.children.is_empty())) {
            let place = places.place_of(&hierarchy, &path(&dir.dir_name));
            below(dir, &place, &mut |dir, group| {
                add(&hierarchy, group, dir.properties.len());
                more.extend(given_away(dir, group, maps));
                more.extend(release_agents(dir, group));
            });
        }
    }
    // What the tasks share with the dumping program they share with the restoring one.
    let sets = || entry.sets.iter().chain(&entry.torpor_own_set);
    let shared = sets().find(|set| set.id == own);
    let shared: BTreeSet<(&str, PathBuf)> = shared
        .iter()
        .flat_map(|set| &set.ctls)
        .map(|member| (&*member.name, places.place_of(&member.name, &path(&member.path))))
        .collect();
    for (image, number) in sets_of_tasks(checkpoint)? {
        if number == own {
            continue;
        }
        let set = sets().find(|set| set.id == number).ok_or_else(|| {
            let reason = format!("its set of cgroups, {number}, is not in cgroup.img");
            Error::Invalid { image, reason }
        })?;
        for member in &set.ctls {
            let group = places.place_of(&member.name, &path(&member.path));
            if !shared.contains(&(&*member.name, group.clone())) {
                add(&member.name, &group, 0);
            }
        }
    }
    more.into_iter().for_each(|ask| all.add(&*image, None, ask));
    Ok(())
}

/// A group and all inside it, with their places.
fn below(dir: &CgroupDirEntry, place: &Path, visit: &mut impl FnMut(&CgroupDirEntry, &Path)) {
    visit(dir, place);
    for child in &dir.children {
        below(child, &place.join(String::from_utf8_lossy(&child.dir_name).as_ref()), visit);
    }
}

/// To whom a group and its files belong, where others than this host's root may change them.
fn given_away(dir: &CgroupDirEntry, place: &Path, maps: &Maps) -> Vec<Ask> {
    const WRITABLE_FOR_OTHERS: u32 = 0o022;
    let files = dir.properties.iter().filter_map(|property| property.perms.as_ref());
    let of = |perms: &CgroupPerms| {
        let owner = (maps.user(perms.uid), maps.group(perms.gid));
        (owner, perms.mode & 0o7777)
    };
    let all: BTreeSet<_> = dir.dir_perms.iter().chain(files).map(of).collect();
    let path = place.to_string_lossy();
    all.into_iter()
        .filter(|((user, _), mode)| *user != 0 || mode & WRITABLE_FOR_OTHERS != 0)
        .map(|(owner, mode)| Ask::Delegated { path: path.clone().into_owned(), owner, mode })
        .collect()
}

/// The programs that a group has this host run.
fn release_agents(dir: &CgroupDirEntry, place: &Path) -> Vec<Ask> {
    let named = dir.properties.iter().filter(|p| p.name == "release_agent" && !p.value.is_empty());
    let path = place.to_string_lossy();
    named
        .map(|agent| {
            let (path, program) = (path.clone().into_owned(), agent.value.clone());
            Ask::ReleaseAgent { path, program }
        })
        .collect()
}

/// The sets that tasks and threads are put into, and the images that say so.
fn sets_of_tasks(checkpoint: &Checkpoint<'_>) -> Result<Vec<(String, u32)>> {
    let mut seen = BTreeSet::new();
    let mut all = vec![];
    for task in &checkpoint.tasks {
        for (thread, core) in task.threads.iter().zip(task.cores) {
            let image = || kind::CORE.file_name((*thread).into());
            let set = set_of(core);
            // One of the two places where versions of the format have it would go unread.
            let of_task = core.tc.as_ref().and_then(|tc| tc.cg_set).filter(|&set| set != 0);
            if of_task.is_some() && of_task != set {
                let reason = "it has two sets of cgroups".to_owned();
                return Err(Error::Invalid { image: image(), reason });
            }
            if let Some(set) = set.filter(|&set| seen.insert(set)) {
                all.push((image(), set));
            }
        }
    }
    Ok(all)
}

/// The devices that tasks may use by the rules of their cgroups.
fn devices(entry: &CgroupEntry, all: &mut Requests) {
    let mut left: Vec<&CgroupDirEntry> = entry.controllers.iter().flat_map(|c| &c.dirs).collect();
    while let Some(dir) = left.pop() {
        left.extend(&dir.children);
        let lists = ["devices.list", "devices.allow"];
        for property in dir.properties.iter().filter(|p| lists.contains(&p.name.as_str())) {
            for device in property.value.lines().flat_map(allowed) {
                let path = format!("{}/{}", String::from_utf8_lossy(&dir.dir_name), property.name);
                all.add(kind::CGROUP.file_name(0), None, Ask::Device { path, device });
            }
        }
    }
}

/// The devices of a line such as `c 1:3 rwm`; `a` is all of both kinds. To make a node
/// (`m`) is no use of the device.
fn allowed(line: &str) -> Vec<Device> {
    let mut words = line.split_whitespace();
    let (kind, numbers) = (words.next().unwrap_or_default(), words.next().unwrap_or("*:*"));
    if words.next() == Some("m") {
        return vec![];
    }
    let kinds: &[&str] = if kind == "a" { &["b", "c"] } else { &[kind] };
    kinds.iter().filter_map(|kind| Device::parse(&format!("{kind} {numbers}")).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_device_lists() {
        let text = |line| allowed(line).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(text("c 1:3 rwm"), ["c 1:3"]);
        assert_eq!(text("a *:* rwm"), ["b *:*", "c *:*"]);
        assert_eq!(text("b *:* m"), Vec::<String>::new());
        assert_eq!(text("a"), ["b *:*", "c *:*"]);
    }
}
