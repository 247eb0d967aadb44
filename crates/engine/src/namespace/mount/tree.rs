//! The mounts of one namespace as a tree.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::mountinfo::Mount;

/// The mounts of a namespace. Each is known by its index.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tree {
    mounts: Vec<Mount>,
    parents: Vec<Option<usize>>,
    children: Vec<Vec<usize>>,
    by_id: HashMap<u32, usize>,
    root: usize,
}

impl Tree {
    /// Checks that `mounts` form one tree.
    ///
    /// # Errors
    /// If two mounts have the same number or the same place; if there is no root, or a mount is not
    /// inside of its parent.
    pub(crate) fn new(mounts: Vec<Mount>) -> Result<Self, String> {
        let mut by_id = HashMap::new();
        for (i, mount) in mounts.iter().enumerate() {
            if by_id.insert(mount.id, i).is_some() {
                return Err(format!("two mounts have number {}", mount.id));
            }
        }
        let mut tree = Tree {
            parents: vec![None; mounts.len()],
            children: vec![Vec::new(); mounts.len()],
            by_id,
            mounts,
            root: usize::MAX,
        };
        tree.link()?;
        tree.check_reach()?;
        Ok(tree)
    }

    /// The root is the one whose parent is not in the tree (or is itself, as that
    /// of the kernel's first mount).
    fn link(&mut self) -> Result<(), String> {
        for (i, mount) in self.mounts.iter().enumerate() {
            let parent = self.by_id.get(&mount.parent).copied().filter(|&p| p != i);
            let Some(p) = parent else {
                if self.root != usize::MAX {
                    return Err(format!("mount {} has no parent", mount.id));
                }
                self.root = i;
                continue;
            };
            let inside = mount.mountpoint.starts_with(&self.mounts[p].mountpoint);
            let plain = mount.mountpoint.is_absolute()
                && !mount.mountpoint.components().any(|c| c.as_os_str() == "..");
            if !inside || !plain {
                return Err(format!(
                    "mount {} at {} is not inside of its parent {}",
                    mount.id,
                    mount.mountpoint.display(),
                    mount.parent
                ));
            }
            self.parents[i] = Some(p);
            self.children[p].push(i);
        }
        // Deeper places first: a mount at /a hides what its sibling at /a/b is
        // mounted on, so the other one must have come before.
        let depth = |i: &usize| std::cmp::Reverse(self.mounts[*i].mountpoint.components().count());
        for children in &mut self.children {
            children.sort_by_key(depth);
        }
        Ok(())
    }

    fn check_reach(&self) -> Result<(), String> {
        if self.root == usize::MAX {
            return Err("there is no root mount".to_owned());
        }
        let reached = self.top_down().len();
        if reached != self.mounts.len() {
            return Err(format!(
                "{} mounts hang together in a circle",
                self.mounts.len() - reached
            ));
        }
        let mut places = HashSet::new();
        for (i, mount) in self.mounts.iter().enumerate() {
            if !places.insert((self.parents[i], &mount.mountpoint)) {
                return Err(format!("mount {} is at the place of another one", mount.id));
            }
        }
        Ok(())
    }

    /// The tree without the mounts at the given places and what is mounted on them.
    /// The root stays.
    #[must_use]
    pub(crate) fn without(&self, places: &[PathBuf]) -> Tree {
        let mut gone = vec![false; self.mounts.len()];
        for i in self.top_down() {
            gone[i] = self.parents[i]
                .is_some_and(|p| gone[p] || places.contains(&self.mounts[i].mountpoint));
        }
        let rest = self.mounts.iter().zip(&gone).filter(|(_, gone)| !**gone);
        // A tree without some of its branches is a tree.
        Tree::new(rest.map(|(m, _)| m.clone()).collect()).unwrap_or_default()
    }

    /// The root mount.
    #[must_use]
    pub(crate) fn root(&self) -> usize {
        self.root
    }

    /// The mount with that index.
    #[must_use]
    pub(crate) fn mount(&self, index: usize) -> &Mount {
        &self.mounts[index]
    }

    /// The mount with that index.
    pub(crate) fn mount_mut(&mut self, index: usize) -> &mut Mount {
        &mut self.mounts[index]
    }

    /// All mounts, in the order given.
    #[must_use]
    pub(crate) fn mounts(&self) -> &[Mount] {
        &self.mounts
    }

    /// The index of the mount with number `id`.
    #[must_use]
    pub(crate) fn find(&self, id: u32) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// The mount that it is mounted on; `None` for the root.
    #[must_use]
    pub(crate) fn parent(&self, index: usize) -> Option<usize> {
        self.parents[index]
    }

    /// Its mount point, relative to the root of its parent mount; empty if it lies
    /// on that root.
    #[must_use]
    pub(crate) fn place(&self, index: usize) -> &Path {
        let mount = &self.mounts[index];
        let base = self.parents[index].map(|p| self.mounts[p].mountpoint.as_path());
        base.and_then(|base| mount.mountpoint.strip_prefix(base).ok()).unwrap_or(Path::new(""))
    }

    /// All mounts in an order in which they can be mounted: parents first, and no
    /// mount before one whose place it hides.
    #[must_use]
    pub(crate) fn top_down(&self) -> Vec<usize> {
        let mut order = Vec::with_capacity(self.mounts.len());
        let mut todo = vec![self.root];
        while let Some(i) = todo.pop() {
            order.push(i);
            todo.extend(self.children[i].iter().rev());
        }
        order
    }

    /// The mounts that must be taken away, in that order, before the root of mount
    /// `index` can be reached by its path.
    #[must_use]
    pub(crate) fn hiding(&self, index: usize) -> Vec<usize> {
        let on_root = |c: &&usize| self.place(**c).as_os_str().is_empty();
        let mut found: Vec<usize> = self.children[index].iter().filter(on_root).copied().collect();
        let mut on_path = index;
        while let Some(parent) = self.parents[on_path] {
            let place = &self.mounts[on_path].mountpoint;
            found.extend(
                self.children[parent]
                    .iter()
                    .copied()
                    .filter(|&c| c != on_path && place.starts_with(&self.mounts[c].mountpoint)),
            );
            on_path = parent;
        }
        found.sort_by_key(|&i| self.mounts[i].mountpoint.components().count());
        found
    }

    /// How many mounts are stacked on the root of mount `index`.
    #[must_use]
    pub(crate) fn stacked_on(&self, index: usize) -> usize {
        let on_root = |i: usize| {
            self.children[i].iter().copied().find(|&c| self.place(c).as_os_str().is_empty())
        };
        std::iter::successors(on_root(index), |&i| on_root(i)).count()
    }

    /// Whether `path` (seen from the root of the namespace) leads to the file that
    /// mount `index` has there, rather than to one of a mount on top.
    #[must_use]
    pub(crate) fn is_visible(&self, index: usize, path: &Path) -> bool {
        path.starts_with(&self.mounts[index].mountpoint)
            && self.hiding(index).is_empty()
            && !self.children[index].iter().any(|&c| path.starts_with(&self.mounts[c].mountpoint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(mounts: &[(u32, u32, &str)]) -> Result<Tree, String> {
        let mount = |&(id, parent, at): &(u32, u32, &str)| Mount {
            id,
            parent,
            mountpoint: at.into(),
            ..Mount::default()
        };
        Tree::new(mounts.iter().map(mount).collect())
    }

    fn ids(tree: &Tree, indices: &[usize]) -> Vec<u32> {
        indices.iter().map(|&i| tree.mount(i).id).collect()
    }

    #[test]
    fn hidden_places_are_mounted_first() {
        // 3 lies at /a/b of the root, below 2; 4 on 2; 5 on top of everything.
        let t = tree(&[(1, 0, "/"), (2, 1, "/a"), (3, 1, "/a/b"), (4, 2, "/a/b"), (5, 1, "/")]);
        let t = t.unwrap();
        assert_eq!(ids(&t, &t.top_down()), [1, 3, 2, 4, 5]);
        let at = |id| t.find(id).unwrap();
        assert_eq!(ids(&t, &t.hiding(at(3))), [5, 2]);
        assert_eq!(ids(&t, &t.hiding(at(4))), [5]);
        assert_eq!(ids(&t, &t.hiding(at(1))), [5]);
        assert_eq!(ids(&t, &t.hiding(at(5))), Vec::<u32>::new());
        assert_eq!((t.stacked_on(at(1)), t.stacked_on(at(2))), (1, 0));
        assert_eq!(t.place(at(4)).to_str(), Some("b"));
        assert_eq!(t.place(at(5)).to_str(), Some(""));
        assert!(t.is_visible(at(5), Path::new("/x")));
        assert!(!t.is_visible(at(1), Path::new("/x")));
    }

    #[test]
    fn a_file_below_a_mount_is_not_visible() {
        let t = tree(&[(1, 0, "/"), (2, 1, "/a")]).unwrap();
        assert!(!t.is_visible(0, Path::new("/a/x")));
        assert!(t.is_visible(0, Path::new("/ab")));
        assert!(t.is_visible(1, Path::new("/a/x")));
        assert!(!t.is_visible(1, Path::new("/b")));
    }

    #[test]
    fn branches_can_be_left_out() {
        let t = tree(&[(1, 0, "/"), (2, 1, "/a"), (3, 2, "/a/b"), (4, 1, "/c")]).unwrap();
        let rest = t.without(&["/a".into(), "/".into()]);
        assert_eq!(rest.mounts().iter().map(|m| m.id).collect::<Vec<_>>(), [1, 4]);
    }

    #[test]
    fn what_is_no_tree_is_refused() {
        for bad in [
            &[][..],
            &[(1, 0, "/"), (1, 0, "/")],
            &[(1, 0, "/"), (2, 9, "/a")],
            &[(1, 0, "/"), (2, 3, "/a"), (3, 2, "/a")],
            &[(1, 0, "/"), (2, 1, "/a"), (3, 2, "/b")],
            &[(1, 0, "/"), (2, 1, "/a"), (3, 1, "/a")],
            &[(1, 0, "/"), (2, 1, "/a"), (3, 1, "/a/")],
            &[(1, 0, "/"), (2, 1, "/a"), (3, 1, "//a/.")],
            &[(1, 0, "/"), (2, 1, "/../a")],
            &[(1, 0, "/"), (2, 1, "a")],
        ] {
            assert!(tree(bad).is_err(), "{bad:?}");
        }
        // The kernel's first mount is its own parent.
        assert!(tree(&[(1, 1, "/")]).is_ok());
    }
}
