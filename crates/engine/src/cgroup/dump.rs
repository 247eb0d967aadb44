//! Writes `cgroup.img`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat};
use rustix::io::Errno;
use torpor_images::proto::{
    CgControllerEntry, CgMemberEntry, CgSetEntry, CgroupDirEntry, CgroupEntry, CgroupPerms,
    CgroupPropEntry,
};
use torpor_images::{ImageDir, kind};
use torpor_kernel::cgroup::{self, Membership};

use super::hierarchy::Hierarchies;
use super::programs::{self, GroupPrograms};
use super::properties::{Properties, is_list_of_tasks};
use super::view::{SeenRoots, outside};
use super::wanted_properties;
use crate::dump::tasks::Task;
use crate::error::{Context, Result};
use crate::namespace::Namespaces;
use crate::namespace::mount::Tree;
use crate::namespace::user::IdMaps;
use crate::options::{CgroupMode, Cgroups};
use crate::proc;

/// How deep groups can lie in each other.
const DEPTH: usize = 128;
/// How long the value of a property can be.
const VALUE: u64 = 1 << 20;

/// The number of the dumping program's set.
pub(crate) const OWN: u32 = 1;

/// The sets of groups that tasks are in.
#[derive(Debug, Default)]
pub(crate) struct Sets {
    all: Vec<Vec<CgMemberEntry>>,
    of_thread: HashMap<i32, u32>,
}

impl Sets {
    /// The number of the set that the thread with id `tid` here is in; the dumping program's
    /// if cgroups are not dumped.
    #[must_use]
    pub(crate) fn of(&self, tid: i32) -> Option<u32> {
        Some(self.of_thread.get(&tid).copied().unwrap_or(OWN))
    }

    fn add(&mut self, members: Vec<CgMemberEntry>) -> u32 {
        let at = self.all.iter().position(|set| *set == members).unwrap_or_else(|| {
            self.all.push(members);
            self.all.len() - 1
        });
        u32::try_from(at + 1).unwrap_or(u32::MAX)
    }
}

/// What the groups of a tree are looked for by.
#[derive(Debug)]
pub(crate) struct Survey<'a> {
    /// What was asked for.
    pub cgroups: &'a Cgroups,
    /// Where the image goes.
    pub images: &'a ImageDir,
    /// The namespaces of the tree.
    pub spaces: &'a Namespaces,
    /// The caller's own mounts.
    pub host: &'a Tree,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// Device and inode of the file of a group that was frozen.
    pub frozen: Option<(u64, u64)>,
    /// Whether what is not kept is refused.
    pub strict: bool,
}

/// Finds out which groups the tasks are in and writes them.
///
/// # Errors
/// If a task is gone, a group cannot be read, or the image cannot be written.
pub(crate) fn dump(cx: &Survey<'_>, tasks: &[Task], sets: &mut Sets) -> Result<()> {
    if cx.cgroups.manage == CgroupMode::Ignore {
        return Ok(());
    }
    let properties = wanted_properties(cx.cgroups)?;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let own = only_wanted(cx, cgroup::of(own)?);
    sets.add(members(&own, &BTreeMap::new()));
    let mut threaded = BTreeSet::new();
    let mut views: HashMap<u32, SeenRoots> = HashMap::new();
    for Task { pid, threads, ids, .. } in tasks {
        let (pid, ns) = (*pid, ids.cgroup_ns_id.unwrap_or(0));
        let mut leaders = None;
        for tid in threads.iter().map(|t| t.tid()) {
            let groups = cgroup::parse(&proc::bytes(pid, &format!("task/{tid}/cgroup"))?);
            let groups = only_wanted(cx, groups);
            if let Entry::Vacant(place) = views.entry(ns) {
                place.insert(SeenRoots::of(cx.spaces, ns, pid, &groups)?);
            }
            let prefixes = prefixes(pid, &views[&ns].roots, &groups)?;
            let set = sets.add(members(&groups, &prefixes));
            tracing::debug!("thread {tid} here: set {set} of cgroups");
            sets.of_thread.insert(tid, set);
            let leader: &Membership = leaders.get_or_insert_with(|| groups.clone());
            let others = groups.iter().filter(|(name, path)| leader.get(*name) != Some(path));
            threaded.extend(others.map(|(name, _)| name.clone()));
        }
    }
    if sets.all.len() == 1 {
        return Ok(());
    }
    let pid = tasks.first().map_or(0, |root| root.pid);
    let controllers = dump_controllers(cx, sets, (&own, pid), &properties, &threaded)?;
    let all = (OWN..).zip(&sets.all);
    let mut all = all.map(|(id, ctls)| CgSetEntry { id, ctls: ctls.clone() });
    let entry = CgroupEntry { torpor_own_set: all.next(), sets: all.collect(), controllers };
    Ok(cx.images.write_one(kind::CGROUP, 0, &entry)?)
}

/// Leaves out the hierarchies without the controllers of `--cgroup-dump-controller`.
fn only_wanted(cx: &Survey<'_>, mut groups: Membership) -> Membership {
    let wanted = &cx.cgroups.controllers;
    groups.retain(|name, _| {
        wanted.is_empty() || name.split(',').any(|n| wanted.iter().any(|w| w == n))
    });
    groups
}

fn members(groups: &Membership, prefixes: &BTreeMap<String, u32>) -> Vec<CgMemberEntry> {
    let member = |(name, path): (&String, &PathBuf)| CgMemberEntry {
        name: name.clone(),
        path: path.as_os_str().as_bytes().to_vec(),
        cgns_prefix: prefixes.get(name).copied(),
    };
    groups.iter().map(member).collect()
}

/// How much of each path belongs to the root of the task's cgroup namespace.
fn prefixes(pid: i32, roots: &Membership, groups: &Membership) -> Result<BTreeMap<String, u32>> {
    let mut all = BTreeMap::new();
    for (name, root) in roots {
        let Some(path) = groups.get(name) else { continue };
        if !path.starts_with(root) {
            return Err(outside(pid, name, path));
        }
        // That of the whole hierarchy is the slash that all paths start with.
        let len = if root == Path::new("/") { 0 } else { root.as_os_str().len() };
        all.insert(name.clone(), u32::try_from(len).unwrap_or(0));
    }
    Ok(all)
}

/// The trees of groups below those that tasks are in and the dumping program is not.
fn dump_controllers(
    cx: &Survey<'_>,
    sets: &Sets,
    (own, pid): (&Membership, i32),
    properties: &Properties,
    threaded: &BTreeSet<String>,
) -> Result<Vec<CgControllerEntry>> {
    let mut heads: BTreeMap<&str, BTreeSet<PathBuf>> = BTreeMap::new();
    for member in sets.all.iter().skip(1).flatten() {
        let path = PathBuf::from(OsStr::from_bytes(&member.path));
        let below = cx.cgroups.root_of(&member.name).filter(|root| path.starts_with(root));
        let path = below.map_or(path, |root| root.to_owned());
        // Each hierarchy is named, also where there is nothing to be made.
        let heads = heads.entry(&member.name).or_default();
        if path != Path::new("/") && own.get(&member.name) != Some(&path) {
            heads.insert(path);
        }
    }
    let mut hierarchies = Hierarchies::default();
    let mut entries = Vec::new();
    for (name, heads) in heads {
        let yard = cx.cgroups.yard.as_deref();
        let hierarchy = hierarchies.get(name, cx.host, yard)?;
        let mut keep = Keep {
            names: properties.of(name),
            maps: cx.id_maps,
            frozen: cx.frozen,
            // The unified hierarchy has no name. Others have no programs.
            programs: name.is_empty().then(Vec::new),
        };
        let mut dirs = Vec::new();
        let topmost =
            heads.iter().filter(|h| !heads.iter().any(|other| *h != other && h.starts_with(other)));
        for head in topmost {
            let what = || format!("cgroup {} ({name})", head.display());
            let dir = hierarchy.open(head).context(what)?;
            let relative = head.strip_prefix("/").unwrap_or(head);
            dirs.push(keep.group(dir.as_fd(), relative, 0).context(what)?);
        }
        programs::leave_out(keep.programs.as_deref().unwrap_or_default(), pid, cx.strict)?;
        if dirs.is_empty() {
            let root =
                hierarchy.open(Path::new("/")).context(|| format!("open cgroup / ({name})"))?;
            let dir_perms = keep.permissions(root.as_fd()).context(|| "fstat".to_owned())?;
            dirs.push(CgroupDirEntry { dir_perms, ..CgroupDirEntry::default() });
        }
        entries.push(CgControllerEntry {
            cnames: name.split(',').map(str::to_owned).collect(),
            dirs,
            is_threaded: Some(threaded.contains(name)),
        });
    }
    Ok(entries)
}

/// What is kept of each group.
struct Keep<'a> {
    names: Vec<String>,
    maps: &'a IdMaps,
    frozen: Option<(u64, u64)>,
    /// What is not kept, where groups have programs.
    programs: Option<Vec<GroupPrograms>>,
}

impl Keep<'_> {
    fn group(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &Path,
        depth: usize,
    ) -> rustix::io::Result<CgroupDirEntry> {
        if depth > DEPTH {
            return Err(Errno::LOOP);
        }
        // The topmost is whoever's that has started the tree; what is attached to it is theirs to attach again.
        if let Some(programs) = self.programs.as_mut().filter(|_| depth > 0) {
            programs.extend(GroupPrograms::of(dir, path));
        }
        let mut children = Vec::new();
        for entry in rustix::fs::Dir::read_from(dir)? {
            let entry = entry?;
            let child = entry.file_name().to_bytes();
            if entry.file_type() != rustix::fs::FileType::Directory || matches!(child, b"." | b"..")
            {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            match rustix::fs::openat(dir, entry.file_name(), flags, Mode::empty()) {
                Ok(fd) => {
                    let path = path.join(OsStr::from_bytes(child));
                    children.push(self.group(fd.as_fd(), &path, depth + 1)?);
                }
                // Others may remove their groups meanwhile.
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
        }
        children.sort_by(|a, b| a.dir_name.cmp(&b.dir_name));
        let properties = self.names.iter().filter_map(|name| self.property(dir, name));
        let name = if depth == 0 { path.as_os_str() } else { path.file_name().unwrap_or_default() };
        Ok(CgroupDirEntry {
            dir_name: name.as_bytes().to_vec(),
            children,
            properties: properties.collect(),
            dir_perms: self.permissions(dir)?,
        })
    }

    /// A property, if the group has it and it can be read: that depends on the kernel,
    /// on the hierarchy, and on whether the group is the root of something.
    fn property(&self, dir: BorrowedFd<'_>, name: &str) -> Option<CgroupPropEntry> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(dir, name, flags, Mode::empty()).ok()?;
        let perms = self.permissions(file.as_fd()).ok()?;
        let mut value = String::new();
        let stat = fstat(&file).ok()?;
        if self.frozen == Some((stat.st_dev, stat.st_ino)) {
            value.push_str(if name == "freezer.state" { "FROZEN" } else { "1" });
        } else if !is_list_of_tasks(name) {
            std::fs::File::from(file).take(VALUE).read_to_string(&mut value).ok()?;
        }
        Some(CgroupPropEntry { name: name.to_owned(), value: value.trim_end().to_owned(), perms })
    }

    /// Whose a file is, and what may be done with it. `None` if that is nobody whom the tree's user namespace knows: the number
    /// would be somebody's in there, who was given nothing.
    fn permissions(&self, file: BorrowedFd<'_>) -> rustix::io::Result<Option<CgroupPerms>> {
        let stat = fstat(file)?;
        let ids = self.maps.uid_inside(stat.st_uid).zip(self.maps.gid_inside(stat.st_gid));
        Ok(ids.map(|(uid, gid)| CgroupPerms { mode: stat.st_mode, uid, gid }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_policy::{IdExtent, UserMaps};

    use super::*;

    /// A limit of this host's root did not become one of the container's.
    #[test]
    fn files_of_nobody_in_the_tree_are_given_to_nobody() {
        let ids = |first, lower| vec![IdExtent::new(first, lower, 10).unwrap()];
        let maps = IdMaps::new(UserMaps { users: ids(0, 1000), groups: ids(0, 2000) });
        let keep = Keep { names: vec![], maps: &maps, frozen: None, programs: None };
        let file = tempfile::tempfile().unwrap();
        let of = |uid, gid| {
            std::os::unix::fs::fchown(&file, Some(uid), Some(gid)).unwrap();
            let perms = keep.permissions(file.as_fd()).unwrap();
            perms.map(|perms| (perms.uid, perms.gid))
        };
        assert_eq!(of(1005, 2000), Some((5, 0)));
        for (uid, gid) in [(0, 0), (1005, 0), (0, 2000)] {
            assert_eq!(of(uid, gid), None, "{uid} {gid}");
        }
    }
}
