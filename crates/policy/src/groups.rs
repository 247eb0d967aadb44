//! Where the cgroups of images are restored: the same answer for the policy, which judges
//! the places, and for the restore, which makes the groups there.

mod beyond;
mod devices;
mod limits;
mod named;
mod planned;
mod unset;
mod values;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use torpor_images::proto::{CgSetEntry, CgroupEntry, CoreEntry};

pub(crate) use devices::allowed;
pub(crate) use limits::most_memory;
pub(crate) use planned::check;
pub use planned::{Group, Groups, Head, Owner, Property, Reading};

/// What the caller of a restore says of cgroups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roots {
    /// Where groups are to be moved: the controllers, or `None` for all, and the path.
    pub given: Vec<(Option<String>, PathBuf)>,
    /// The groups of the restoring program: hierarchy and path.
    pub own: Vec<(String, PathBuf)>,
    /// Whether the files of groups that are there already are written, too.
    pub sets_what_is_there: bool,
    /// The hierarchies in which the group that the caller names is not there: the restore makes it.
    pub missing: Vec<String>,
}

/// A part of a hierarchy that is restored elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Moved {
    hierarchy: String,
    from: PathBuf,
    to: PathBuf,
}

/// Which part of which hierarchy goes where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places(Vec<Moved>);

/// Whether two names are of the same hierarchy: the order of controllers differs
/// between the places where the kernel shows them.
#[must_use]
pub fn same(a: &str, b: &str) -> bool {
    a.split(',').collect::<BTreeSet<_>>() == b.split(',').collect::<BTreeSet<_>>()
}

/// A path of the images, which may lack the slash in front.
#[must_use]
pub fn path(bytes: &[u8]) -> PathBuf {
    Path::new("/").join(OsStr::from_bytes(bytes))
}

/// The number of the set of cgroups that a thread is in: of a process, that of its first one.
#[must_use]
pub(crate) fn set_of(core: &CoreEntry) -> Option<u32> {
    let of_thread = core.thread_core.as_ref().and_then(|thread| thread.cg_set);
    // Where older images have it.
    let of_task = core.tc.as_ref().and_then(|tc| tc.cg_set);
    of_thread.or(of_task).filter(|&id| id != 0)
}

/// The longest common part of two paths.
fn shared(a: &Path, b: &Path) -> PathBuf {
    a.components().zip(b.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

impl Roots {
    /// Where the caller wants groups of a hierarchy, if anywhere.
    #[must_use]
    pub fn chosen(&self, hierarchy: &str) -> Option<&Path> {
        let of = |c: &str| same(c, hierarchy) || hierarchy.split(',').any(|name| name == c);
        let named = self.given.iter().find(|(c, _)| c.as_deref().is_some_and(of));
        let all = || self.given.iter().find(|(c, _)| c.is_none());
        named.or_else(all).map(|(_, path)| path.as_path())
    }

    /// The groups of the restoring program that are not at or below the roots that the caller names.
    fn outside(&self) -> Vec<(String, PathBuf)> {
        let is_outside = |(hierarchy, own): &&(String, PathBuf)| {
            self.chosen(hierarchy).is_some_and(|root| !own.starts_with(root))
        };
        self.own.iter().filter(is_outside).cloned().collect()
    }

    /// Whether a group is the very one that the caller gives: the root that it names, or the group that it is in itself.
    fn is_given(&self, hierarchy: &str, group: &Path) -> bool {
        match self.chosen(hierarchy) {
            Some(root) => group == root,
            None => self.own.iter().any(|(name, own)| same(name, hierarchy) && group == own),
        }
    }

    /// Whether that group is there, with the limits that the caller has set.
    fn has_given(&self, hierarchy: &str, group: &Path) -> bool {
        self.is_given(hierarchy, group) && !self.missing.iter().any(|name| same(name, hierarchy))
    }

    /// Whether this host has a controller of version 2 in a tree of version 1, and so in no other one.
    fn split(&self, controller: &str) -> bool {
        let name = if controller == "io" { "blkio" } else { controller };
        self.own.iter().any(|(hierarchy, _)| hierarchy.split(',').any(|of_it| of_it == name))
    }

    /// Whether a group lies in one that is there with the limits of the caller.
    fn limit(&self, hierarchy: &str, group: &Path) -> bool {
        let mut above = group.ancestors().skip(1);
        // The root of a hierarchy has none.
        above.any(|above| above.parent().is_some() && self.has_given(hierarchy, above))
    }

    /// Whether a group is one that the caller has given: at or below the root that it names, or
    /// the group that it is in itself. In a hierarchy that this host does not have there is none: to make one would take
    /// controllers from the others.
    #[must_use]
    pub(crate) fn contain(&self, hierarchy: &str, group: &Path) -> bool {
        let chosen = self.chosen(hierarchy);
        let own = self.own.iter().filter(|(name, _)| same(name, hierarchy));
        own.map(|(_, own)| own).any(|own| match (chosen, own.parent()) {
            (Some(root), _) => group.starts_with(root),
            (None, Some(_)) => group.starts_with(own),
            // A task that is in no group has nothing to give.
            (None, None) => group == own,
        })
    }
}

impl Places {
    /// What the caller's roots move: the group that holds all others of a hierarchy, or that
    /// of the root task if there is none. `root` is the set of the root task, `own` the number
    /// of that of the dumping program.
    #[must_use]
    pub fn of(image: &CgroupEntry, root: Option<u32>, own: u32, roots: &Roots) -> Self {
        let root_set = image.sets.iter().find(|s| Some(s.id) == root);
        let mut all = Vec::new();
        for member in root_set.iter().flat_map(|set: &&CgSetEntry| &set.ctls) {
            let Some(to) = roots.chosen(&member.name) else { continue };
            let mine = path(&member.path);
            if mine.starts_with(to) {
                continue;
            }
            let others = image.sets.iter().filter(|s| s.id != own);
            let others = others.flat_map(|s| &s.ctls).filter(|m| m.name == member.name);
            let common = others.fold(mine.clone(), |common, m| shared(&common, &path(&m.path)));
            let from = if common == Path::new("/") { mine } else { common };
            all.push(Moved { hierarchy: member.name.clone(), from, to: to.to_owned() });
        }
        Places(all)
    }

    /// Where a group of the dump is now.
    #[must_use]
    pub fn place_of(&self, hierarchy: &str, group: &Path) -> PathBuf {
        let moved = self.0.iter().filter(|m| same(&m.hierarchy, hierarchy));
        let below = |m: &Moved| Some(m.to.join(group.strip_prefix(&m.from).ok()?));
        let place = moved.filter_map(below).next().unwrap_or_else(|| group.to_owned());
        // Without the slash that an empty rest leaves at the end.
        place.components().collect()
    }
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{TaskCoreEntry, ThreadCoreEntry};

    use super::*;

    #[test]
    fn common_part_of_paths() {
        let common = |a: &str, b: &str| shared(Path::new(a), Path::new(b));
        assert_eq!(common("/a/b", "/a/c"), Path::new("/a"));
        assert_eq!(common("/a/b", "/ab"), Path::new("/"));
        assert_eq!(common("/a", "/a/b"), Path::new("/a"));
    }

    #[test]
    fn the_set_of_a_task_is_found_in_old_images() {
        let of = |task: Option<u32>, thread: Option<u32>| {
            let tc = TaskCoreEntry { cg_set: task, ..TaskCoreEntry::default() };
            let thread_core = ThreadCoreEntry { cg_set: thread, ..ThreadCoreEntry::default() };
            let (tc, thread_core) = (Some(tc), Some(thread_core));
            set_of(&CoreEntry { tc, thread_core, ..CoreEntry::default() })
        };
        assert_eq!(of(None, Some(3)), Some(3));
        assert_eq!(of(Some(2), None), Some(2));
        assert_eq!(of(Some(2), Some(3)), Some(3));
        assert_eq!(of(Some(0), None), None);
        assert_eq!(of(Some(2), Some(0)), None);
        assert_eq!(set_of(&CoreEntry::default()), None);
    }

    #[test]
    fn groups_move_with_their_root() {
        let moved = |from: &str, to: &str| Moved {
            hierarchy: "cpu,cpuacct".into(),
            from: from.into(),
            to: to.into(),
        };
        let places = Places(vec![moved("/a/b", "/new")]);
        let place = |name: &str, at: &str| places.place_of(name, Path::new(at));
        assert_eq!(place("cpuacct,cpu", "/a/b"), Path::new("/new"));
        assert_eq!(place("cpu,cpuacct", "/a/b/c"), Path::new("/new/c"));
        assert_eq!(place("cpu,cpuacct", "/a/x"), Path::new("/a/x"));
        assert_eq!(place("pids", "/a/b"), Path::new("/a/b"));
    }

    #[test]
    fn what_the_caller_has_given() {
        let mut roots = Roots {
            own: vec![("cpu".into(), "/own".into()), ("pids".into(), "/".into())],
            ..Roots::default()
        };
        let contain = |roots: &Roots, name: &str, at: &str| roots.contain(name, Path::new(at));
        assert!(contain(&roots, "cpu", "/own/x") && !contain(&roots, "cpu", "/"));
        assert!(contain(&roots, "pids", "/") && !contain(&roots, "pids", "/x"));
        assert!(!contain(&roots, "memory", "/"));
        roots.given = vec![(Some("cpu".into()), "/box".into())];
        assert!(contain(&roots, "cpu", "/box/x") && !contain(&roots, "cpu", "/own"));
        assert!(contain(&roots, "pids", "/"));
        // All of them, but for those that this host does not have.
        roots.given = vec![(None, "/box".into())];
        assert!(contain(&roots, "cpu", "/box/x") && contain(&roots, "pids", "/box"));
        for hierarchy in ["", "hugetlb", "name=new", "cpu,pids"] {
            assert!(!contain(&roots, hierarchy, "/box/x"), "{hierarchy}");
        }
    }
}
