//! Restored tasks that wait in a frozen cgroup: everything is done, nobody traces them any more,
//! and whoever thaws the group lets them run.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use torpor_kernel::cgroup::{self, Freezer, Membership};

use super::hierarchy::Hierarchies;
use super::restore::{read, write};
use crate::error::{Context, Error, Result};
use crate::namespace::mount::{Tree, own_tree};
use crate::options::Cgroups;
use crate::restore::tasks::Task;

/// The hierarchy of version 1 that freezes.
const FREEZER: &str = "freezer";

/// The group that a task is frozen by, in its hierarchy: none if it is in the root of both.
fn group(groups: &Membership) -> Option<(&String, &PathBuf)> {
    let is_group = |found: &(&String, &PathBuf)| found.1 != Path::new("/");
    let version_1 = groups.iter().find(|(names, _)| names.split(',').any(|name| name == FREEZER));
    version_1.filter(is_group).or_else(|| groups.get_key_value("").filter(is_group))
}

/// Freezes the groups of all tasks, which are about to be let go.
///
/// # Errors
/// If a task has no group of its own, or one that this program cannot leave; if a group cannot be
/// frozen (named in the error).
pub(crate) fn freeze(cgroups: &Cgroups, tasks: &[Task]) -> Result<()> {
    let host = own_tree()?;
    let mut hierarchies = Hierarchies::default();
    leave(cgroups, tasks, &host, &mut hierarchies)?;
    let own = own_groups()?;
    let mut all = BTreeSet::new();
    for task in tasks.iter().filter(|task| !task.threads.is_empty()) {
        let groups = cgroup::of(task.pid)?;
        let found = group(&groups).filter(|(name, path)| !has(&own, name, path));
        let (name, path) = found.ok_or_else(|| {
            Error::Unsupported(format!(
                "--wake-frozen of task {}, which is in no cgroup that could be frozen without \
                 this program: put it into one of its own (--cgroup-root, or dump it in one)",
                task.vpid
            ))
        })?;
        all.insert((name.clone(), path.clone()));
    }
    for (name, path) in all {
        let what = || format!("freeze cgroup {}", path.display());
        let yard = cgroups.yard.as_deref();
        let dir = hierarchies.get(&name, &host, yard)?.open(&path).context(what)?;
        let (file, frozen, _) = if name.is_empty() { Freezer::UNIFIED } else { Freezer::SPLIT };
        tracing::info!("Freezing cgroup {}, where the tasks wait", path.display());
        write(dir.as_fd(), file, frozen).context(what)?;
    }
    Ok(())
}

/// Leaves those of the root task's groups that this program is in, for their parents: a runtime that
/// says where the tasks go has put it into the container's, where it would be frozen with the tasks.
///
/// # Errors
/// If a group cannot be left (named in the error): its parent takes no processes, or may not be
/// written to.
pub(super) fn leave(
    cgroups: &Cgroups,
    tasks: &[Task],
    host: &Tree,
    hierarchies: &mut Hierarchies,
) -> Result<()> {
    let Some(root) = tasks.first().filter(|_| !cgroups.roots.is_empty()) else { return Ok(()) };
    let (own, theirs) = (own_groups()?, cgroup::of(root.pid)?);
    let program = std::fs::read_link("/proc/self/exe").ok();
    let tasks: BTreeSet<i32> = tasks.iter().map(|task| task.pid).collect();
    for (name, path) in theirs.iter().filter(|(name, path)| has(&own, name, path)) {
        let Some(parent) = path.parent() else { continue };
        let what = || format!("leave cgroup {}", path.display());
        let hierarchy = hierarchies.get(name, host, cgroups.yard.as_deref())?;
        // The group that a hierarchy is mounted at may be the one: there is no way out then.
        let Ok(target) = hierarchy.open(parent) else { continue };
        let group = hierarchy.open(path).context(what)?;
        let members = read(group.as_fd(), "cgroup.procs").context(what)?;
        for pid in members.lines().filter_map(|line| line.parse::<i32>().ok()) {
            let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
            if !tasks.contains(&pid) && exe.is_some() && exe == program {
                write(target.as_fd(), "cgroup.procs", &pid.to_string()).context(what)?;
            }
        }
    }
    Ok(())
}

/// Has this process leave those of the roots of the tasks' groups that it is in, for their parents: a runtime that says
/// where the tasks go has put the program there, and could not remove them when the container ends if this process went on
/// there; their limits would hold for it, too. From groups below a root, which others have made, there is nothing to leave.
///
/// # Errors
/// If a group cannot be left (named in the error): its parent takes no processes, or may not be
/// written to.
pub(crate) fn leave_roots(cgroups: &Cgroups) -> Result<()> {
    if cgroups.roots.is_empty() {
        return Ok(());
    }
    let (own, host, mut hierarchies) = (own_groups()?, own_tree()?, Hierarchies::default());
    let pid = std::process::id().to_string();
    for (name, path) in &own {
        let root = cgroups.root_of(name).filter(|root| path == root);
        let Some(parent) = root.and_then(Path::parent) else { continue };
        let what = || format!("leave cgroup {}", path.display());
        let hierarchy = hierarchies.get(name, &host, cgroups.yard.as_deref())?;
        // The group that a hierarchy is mounted at may be the one: there is no way out then.
        let Ok(target) = hierarchy.open(parent) else { continue };
        write(target.as_fd(), "cgroup.procs", &pid).context(what)?;
    }
    Ok(())
}

/// The groups that this program is in now.
///
/// # Errors
/// If procfs does not tell.
pub(super) fn own_groups() -> Result<Membership> {
    Ok(cgroup::of(rustix::process::getpid().as_raw_nonzero().get())?)
}

/// Whether a task in the groups `own` would be frozen with group `path`.
fn has(own: &Membership, name: &str, path: &Path) -> bool {
    own.get(name).is_some_and(|own| own.starts_with(path))
}

#[cfg(test)]
mod tests {
    use torpor_kernel::cgroup::parse;

    use super::*;

    #[test]
    fn the_group_that_freezes_is_found() {
        let found = |text: &str| {
            group(&parse(text.as_bytes())).map(|(name, path)| (name.clone(), path.clone()))
        };
        let expected = Some(("freezer".to_owned(), PathBuf::from("/a")));
        assert_eq!(found("4:freezer:/a\n0::/b\n"), expected);
        assert_eq!(found("4:freezer:/\n0::/b\n"), Some((String::new(), PathBuf::from("/b"))));
        assert_eq!(found("4:freezer:/\n0::/\n"), None);
        let own = parse(b"4:freezer:/a/b\n");
        assert!(has(&own, "freezer", Path::new("/a")) && !has(&own, "freezer", Path::new("/c")));
    }
}
