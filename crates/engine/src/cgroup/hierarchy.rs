//! The cgroup hierarchies of this machine (cgroups(7)).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};

use torpor_policy::groups::same;

use crate::error::{Context, Result};
use crate::namespace::mount::{Mount, Tree};

/// A hierarchy.
#[derive(Debug)]
pub(super) struct Hierarchy {
    /// Its root directory, or the part of it that is mounted here (`O_PATH`).
    root: OwnedFd,
    /// The group that this directory is.
    base: PathBuf,
}

impl Hierarchy {
    /// Opens the directory of a group.
    ///
    /// # Errors
    /// `ENOENT` if there is none, or it is above what is mounted; others of openat2(2).
    pub(super) fn open(&self, group: &Path) -> rustix::io::Result<OwnedFd> {
        let below = group.strip_prefix(&self.base).map_err(|_| Errno::NOENT)?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(&self.root, below, flags, Mode::empty(), resolve)
    }
}

/// Those that have been needed so far.
#[derive(Debug, Default)]
pub(super) struct Hierarchies {
    open: BTreeMap<String, Hierarchy>,
}

impl Hierarchies {
    /// The hierarchy of that name: where `host`, the caller's mounts, have it, below
    /// `yard` if given, or mounted for the occasion.
    ///
    /// # Errors
    /// If there is no such hierarchy, or it may not be mounted.
    pub(super) fn get(
        &mut self,
        name: &str,
        host: &Tree,
        yard: Option<&Path>,
    ) -> Result<&Hierarchy> {
        if !self.open.contains_key(name) {
            let found = match yard {
                Some(yard) => in_yard(name, yard)?,
                None => match mounted(name, host)? {
                    Some(found) => found,
                    None => mount(name)?,
                },
            };
            self.open.insert(name.to_owned(), found);
        }
        let found = self.open.get(name).ok_or(Errno::NOENT);
        found.context(|| format!("cgroup hierarchy {name:?}"))
    }
}

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

fn in_yard(name: &str, yard: &Path) -> Result<Hierarchy> {
    let plain = name.strip_prefix("name=").unwrap_or(name);
    let plain = if name.is_empty() { "unified" } else { plain };
    let found = open(&yard.join(name)).or_else(|_| open(&yard.join(plain)));
    let root = found.context(|| format!("open {plain} in {}", yard.display()))?;
    Ok(Hierarchy { root, base: PathBuf::from("/") })
}

/// The controllers (or the name) of the hierarchy that a mount shows.
pub(crate) fn shown_by(mount: &Mount) -> Option<String> {
    const NONE: &[&str] = &["none", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"];
    match mount.fs.as_str() {
        "cgroup2" => Some(String::new()),
        "cgroup" => {
            let options = mount.options.to_string_lossy();
            let words = options.split(',').filter(|w| !NONE.contains(w) && !w.is_empty());
            let words: Vec<&str> = words.filter(|w| !w.starts_with("release_agent=")).collect();
            Some(words.join(","))
        }
        _ => None,
    }
}

fn mounted(name: &str, host: &Tree) -> Result<Option<Hierarchy>> {
    let candidates = host.mounts().iter().enumerate().filter(|(i, mount)| {
        shown_by(mount).is_some_and(|shown| same(&shown, name))
            && !mount.root.iter().any(|c| c == "..")
            && host.is_visible(*i, &mount.mountpoint)
    });
    // The widest view.
    let Some((_, mount)) = candidates.min_by_key(|(_, m)| m.root.components().count()) else {
        return Ok(None);
    };
    let root =
        open(&mount.mountpoint).context(|| format!("open {}", mount.mountpoint.display()))?;
    Ok(Some(Hierarchy { root, base: mount.root.clone() }))
}

/// Mounts a hierarchy that the host has not mounted, in no namespace.
fn mount(name: &str) -> Result<Hierarchy> {
    let what = || format!("mount the cgroup hierarchy {name:?}");
    let fs = if name.is_empty() { "cgroup2" } else { "cgroup" };
    let context = fsopen(fs, FsOpenFlags::FSOPEN_CLOEXEC).context(what)?;
    for word in name.split(',').filter(|w| !w.is_empty()) {
        match word.strip_prefix("name=") {
            Some(name) => {
                fsconfig_set_flag(context.as_fd(), "none").context(what)?;
                fsconfig_set_string(context.as_fd(), "name", name).context(what)?;
            }
            None => fsconfig_set_flag(context.as_fd(), word).context(what)?,
        }
    }
    fsconfig_create(context.as_fd()).context(what)?;
    let root =
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).context(what)?;
    Ok(Hierarchy { root, base: PathBuf::from("/") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_mounted_hierarchies() {
        let mount = |fs: &str, options: &str| {
            shown_by(&Mount { fs: fs.into(), options: options.into(), ..Mount::default() })
        };
        assert_eq!(mount("cgroup", "xattr,name=systemd").as_deref(), Some("name=systemd"));
        assert_eq!(mount("cgroup2", "nsdelegate").as_deref(), Some(""));
        assert_eq!(mount("tmpfs", ""), None);
        assert!(same("cpuacct,cpu", "cpu,cpuacct") && !same("cpu", "cpu,cpuacct"));
    }

    #[test]
    fn own_groups_exist() {
        let own = torpor_kernel::cgroup::of(std::process::id().cast_signed()).unwrap();
        let host = crate::namespace::mount::own_tree().unwrap();
        let mut all = Hierarchies::default();
        for (name, group) in own {
            all.get(&name, &host, None).unwrap().open(&group).unwrap();
        }
        assert!(all.get("no-such-controller", &host, None).is_err());
    }
}
