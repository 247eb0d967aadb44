//! Cgroups: which are made, changed and entered, and the devices that they allow.

use std::collections::BTreeSet;

use torpor_images::kind;
use torpor_images::proto::{CgroupDirEntry, CgroupEntry};

use super::checkpoint::{Checkpoint, Maps, Requests};
use crate::error::{Error, Result};
use crate::groups::{self, Groups, Reading};
use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::request::Ask;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    maps: &Maps,
    all: &mut Requests,
) -> Result<()> {
    let Some(roots) = &passed.cgroups else { return Ok(()) };
    devices(checkpoint, passed, all)?;
    let groups = Groups::read(
        checkpoint.images,
        Reading {
            own: checkpoint.inventory.group_set.unwrap_or(0),
            root: checkpoint.tasks.first().and_then(|task| task.rests.first()?.group_set),
            roots,
            maps: maps.0.clone(),
        },
    )?;
    let image = kind::CGROUP.file_name(0);
    groups.asks().into_iter().for_each(|ask| all.add(&*image, None, ask));
    groups.asks_beyond(passed).into_iter().for_each(|ask| all.add(&*image, None, ask));
    for (of, number, nested) in sets_of_tasks(checkpoint, &groups) {
        let asks = groups.asks_of(number, nested).ok_or_else(|| {
            let reason = format!("its set of cgroups, {number}, is not in cgroup.img");
            Error::Invalid { image: of, reason }
        })?;
        asks.into_iter().for_each(|ask| all.add(&*image, None, ask));
    }
    Ok(())
}

/// The sets that tasks and threads are put into, the images that say so, and whether a task or
/// thread of them has a cgroup namespace of the tasks' own.
fn sets_of_tasks(checkpoint: &Checkpoint<'_>, groups: &Groups) -> Vec<(String, u32, bool)> {
    let mut seen = BTreeSet::new();
    let mut all = vec![];
    for task in &checkpoint.tasks {
        let nested = task.homes.own(NsKind::Cgroup).is_some();
        let Some(&first) = task.threads.first() else { continue };
        // One that has ended is nowhere, unless it says where.
        let is_there =
            !task.zombie || task.rests.first().is_some_and(|rest| rest.group_set.is_some());
        let sets = groups.sets_of(task.rests).into_iter().filter(|_| is_there);
        let new = sets.filter(|&set| seen.insert((set, nested)));
        all.extend(new.map(|set| (kind::CORE.file_name(first.into()), set, nested)));
    }
    all
}

/// The devices that tasks may use by the rules of their cgroups.
pub(super) fn devices(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    if passed.cgroups.is_none() {
        return Ok(());
    }
    let entry: CgroupEntry = checkpoint.images.read_opt(kind::CGROUP, 0)?.unwrap_or_default();
    let mut left: Vec<&CgroupDirEntry> = entry.controllers.iter().flat_map(|c| &c.dirs).collect();
    while let Some(dir) = left.pop() {
        left.extend(&dir.children);
        let lists = ["devices.list", "devices.allow"];
        for property in dir.properties.iter().filter(|p| lists.contains(&p.name.as_str())) {
            for device in property.value.lines().flat_map(groups::allowed) {
                let path = format!("{}/{}", String::from_utf8_lossy(&dir.dir_name), property.name);
                all.add(kind::CGROUP.file_name(0), None, Ask::Device { path, device });
            }
        }
    }
    Ok(())
}
