//! The mounts of a namespace by what they lie on, and which of them a path leads to. Images may have as many as they like:
//! none of this looks at all of them for each.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use crate::mount::Mount;
use crate::runtime::plain;

/// The mounts of a namespace.
#[derive(Debug)]
pub(crate) struct MountTree<'m> {
    count: usize,
    root: Option<&'m Mount>,
    by_number: HashMap<u32, &'m Mount>,
    /// What lies on each, by its place.
    upon: HashMap<u32, HashMap<PathBuf, &'m Mount>>,
    by_place: BTreeMap<PathBuf, Vec<&'m Mount>>,
    /// What paths lead to, as far as it was asked for.
    seen: RefCell<HashMap<PathBuf, Option<&'m Mount>>>,
}

impl<'m> MountTree<'m> {
    /// That of these mounts of one namespace. The first one counts of several that have one number, or are at one place on
    /// another one.
    pub(crate) fn of(all: &[&'m Mount]) -> Self {
        let mut by_number: HashMap<u32, &'m Mount> = HashMap::new();
        for mount in all {
            by_number.entry(mount.id.0).or_insert(mount);
        }
        let lies_on_one =
            |mount: &Mount| mount.id.0 != mount.id.1 && by_number.contains_key(&mount.id.1);
        let root = all.iter().find(|mount| !lies_on_one(mount)).copied();
        let mut upon: HashMap<u32, HashMap<PathBuf, &'m Mount>> = HashMap::new();
        let mut by_place: BTreeMap<PathBuf, Vec<&'m Mount>> = BTreeMap::new();
        for mount in all {
            let place = plain(&mount.at());
            if mount.id.0 != mount.id.1 {
                upon.entry(mount.id.1).or_default().entry(place.clone()).or_insert(mount);
            }
            by_place.entry(place).or_default().push(mount);
        }
        let seen = RefCell::default();
        MountTree { count: all.len(), root, by_number, upon, by_place, seen }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The one that has this number.
    pub(crate) fn numbered(&self, number: u32) -> Option<&'m Mount> {
        self.by_number.get(&number).copied()
    }

    /// Those whose places are below this one.
    pub(crate) fn below(&self, place: &Path) -> impl Iterator<Item = &'m Mount> {
        let later = (Bound::Excluded(place), Bound::Unbounded);
        let below =
            self.by_place.range::<Path, _>(later).take_while(move |(at, _)| at.starts_with(place));
        below.flat_map(|(_, mounts)| mounts).copied()
    }

    /// The one that a path leads to.
    pub(crate) fn visible(&self, path: &str) -> Option<&'m Mount> {
        let target = plain(path);
        if let Some(known) = self.seen.borrow().get(&target) {
            return *known;
        }
        let found = self.follow(&target);
        self.seen.borrow_mut().insert(target, found);
        found
    }

    fn follow(&self, target: &Path) -> Option<&'m Mount> {
        let mut way: Vec<&Path> = target.ancestors().collect();
        way.reverse();
        let mut here = self.root?;
        // Each step leads to another mount; images that go round in a circle end, too.
        for _ in 0..self.count {
            let upon = self.upon.get(&here.id.0);
            match upon.and_then(|upon| way.iter().find_map(|place| upon.get(*place))) {
                Some(next) => here = next,
                None => break,
            }
        }
        Some(here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::{From, Peers};
    use crate::origin::{Checked, Origin};
    use crate::request::{Ask, Request};
    use crate::rules::Policy;
    use crate::runtime::tests::{fs, in_container, shows};

    fn mount(id: u32, parent: u32, at: String) -> Mount {
        Mount { id: (id, parent), at: at.into(), ..Mount::default() }
    }

    fn visible(mounts: &[Mount], path: &str) -> Option<u32> {
        let tree = MountTree::of(&mounts.iter().collect::<Vec<_>>());
        tree.visible(path).map(|mount| mount.id.0)
    }

    #[test]
    fn paths_lead_to_what_lies_on_top() {
        let all: [(u32, u32, &str); 6] = [
            (4, 3, "/a/b"),
            (3, 1, "/a"),
            (5, 1, "/a/b"),
            (6, 4, "/a/b/./c/"),
            (7, 6, "/a/b/c"),
            (1, 0, "/"),
        ];
        let all = all.map(|(id, parent, at)| mount(id, parent, at.to_owned()));
        for (path, wanted) in [
            ("/", 1),
            ("/ab", 1),
            ("/a", 3),
            ("/a//x", 3),
            ("/a/b", 4),
            ("/a/b/c/d", 7),
            ("/../a", 3),
        ] {
            assert_eq!(visible(&all, path), Some(wanted), "{path}");
        }
        let tree = MountTree::of(&all.iter().collect::<Vec<_>>());
        let below = |place: &str| tree.below(Path::new(place)).map(|m| m.id.0).collect::<Vec<_>>();
        assert_eq!((below("/a"), below("/a/b")), (vec![4, 5, 6, 7], vec![6, 7]));
        assert_eq!(tree.numbered(5).map(|mount| mount.id.1), Some(1));
        assert!(visible(&[], "/").is_none() && tree.numbered(2).is_none());
    }

    /// So many that looking at all of them for each would take a day.
    #[test]
    fn many_mounts_are_judged() {
        const MANY: u32 = 20_000;
        let image = || "mountpoints-1.img".to_owned();
        let below = (2..MANY).map(|id| {
            let place =
                if id % 2 == 0 { "/proc/keys".to_owned() } else { format!("/proc/keys/{id}") };
            let from = [From::FileSystem, From::Part { whole: (1, 1), of: (place.clone(), 0) }];
            let peers = Peers { group: Some(id), master: Some(id + 1), outside: id == MANY - 1 };
            let overlay = || fs("overlay", "lowerdir=/a:/b:/a/c");
            let shows = if id % 3 == 0 { overlay() } else { fs("proc", "") };
            let parent = if id % 5 == 0 { id - 1 } else { 1 };
            let from = from[usize::from(id % 7 == 0)].clone();
            Mount { space: 1, id: (id, parent), at: place.into(), from, peers, ..shows }
        });
        let root = Mount { id: (1, 0), at: "/".into(), ..shows(From::Root) };
        let asks = below.chain([root]).map(Ask::Mount);
        let nested = Ask::NestedUser { number: 9, parent: None, owned: vec![1] };
        let asks = asks.chain([nested]);
        let requests: Vec<_> =
            asks.map(|ask| Request { image: image(), task: None, ask }).collect();
        let (origin, checked) = (Origin::Elsewhere, Checked::default());
        let found = Policy::default().judge(&requests, origin, &checked, &in_container());
        assert!(found.len() > 1000, "{}", found.len());
    }

    #[test]
    fn mounts_in_a_circle_have_an_end() {
        let all = [(1, 0), (2, 3), (3, 2), (4, 1), (5, 4), (4, 5)];
        let all = all.map(|(id, parent)| mount(id, parent, "/x".to_owned()));
        assert!(visible(&all, "/x/y").is_some());
        let all = [mount(1, 2, "/".to_owned()), mount(2, 1, "/".to_owned())];
        assert_eq!(visible(&all, "/"), None);
    }
}
