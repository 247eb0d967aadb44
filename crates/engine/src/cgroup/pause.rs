//! Restored tasks that wait in a frozen cgroup: everything is done, nobody traces them any more,
//! and whoever thaws the group lets them run.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::hierarchy::{Hierarchies, Membership, parse};
use super::restore::write;
use crate::error::{Context, Error, Result};
use crate::namespace::mount::own_tree;
use crate::proc;
use crate::restore::Restore;

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
/// If a task has no group of its own, or shares one with this program; the kernel's.
pub fn freeze(cx: &Restore<'_>) -> Result<()> {
    let own = own_groups()?;
    let mut all = BTreeSet::new();
    for task in cx.tasks.iter().filter(|task| !task.threads.is_empty()) {
        let groups = parse(&proc::bytes(task.pid, "cgroup")?);
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
    let host = own_tree()?;
    let mut hierarchies = Hierarchies::default();
    for (name, path) in all {
        let what = || format!("freeze cgroup {}", path.display());
        let yard = cx.opts.cgroup_yard.as_deref();
        let dir = hierarchies.get(&name, &host, yard)?.open(&path).context(what)?;
        let (file, value) =
            if name.is_empty() { ("cgroup.freeze", "1") } else { ("freezer.state", "FROZEN") };
        tracing::info!("Freezing cgroup {}, where the tasks wait", path.display());
        write(dir.as_fd(), file, value).context(what)?;
    }
    Ok(())
}

/// The groups that this program is in now.
///
/// # Errors
/// If procfs does not tell.
pub fn own_groups() -> Result<Membership> {
    Ok(parse(&proc::bytes(rustix::process::getpid().as_raw_nonzero().get(), "cgroup")?))
}

/// Whether who is in the groups `own` would be frozen with group `path`.
fn has(own: &Membership, name: &str, path: &Path) -> bool {
    own.get(name).is_some_and(|own| own.starts_with(path))
}

#[cfg(test)]
mod tests {
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
