//! Where the content of each mount comes from: the same question for a dump, which
//! refuses what has no answer, and for a restore, which acts on it.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::LazyLock;

use torpor_policy::Ask;

use super::fs::Origin;
use super::mountinfo::Mount;
use super::tree::Tree;

/// A mount of a [`Forest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Node {
    /// Index of its namespace.
    pub space: usize,
    /// Index into the tree.
    pub mount: usize,
}

/// The mount namespaces that are part of a checkpoint, the root task's first.
#[derive(Debug, Default)]
pub(crate) struct Forest {
    /// The number of each in the images, and its mounts.
    pub spaces: Vec<(u32, Tree)>,
    /// What a restore makes each mount from; nothing for a dump, which finds it out.
    pub(super) judged: HashMap<Node, Judged>,
    /// What of the files of each archive was judged, by the names of the images.
    pub(super) contents: HashMap<String, HashSet<Ask>>,
}

/// What a plan says of a mount: it was judged, and nothing else is made.
#[derive(Debug)]
pub(super) struct Judged {
    /// Where its content comes from.
    pub source: ContentSource,
    /// The path of this host, or the device, that the caller gives for it.
    pub given: Option<String>,
}

/// Where the content of a mount comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContentSource {
    /// It is the root that the restore is given.
    Root,
    /// The restore is given it, see [`Mount::external`].
    External,
    /// It shows a part of what another mount, given from outside, shows.
    Part {
        /// That mount.
        of: Node,
        /// The root of this one, below the root of that one.
        below: PathBuf,
    },
    /// It shows (its root of) a file system that the restore makes.
    FileSystem,
}

impl Forest {
    /// All mounts.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> {
        let trees = self.spaces.iter().enumerate();
        trees.flat_map(|(space, (_, tree))| {
            (0..tree.mounts().len()).map(move |mount| Node { space, mount })
        })
    }

    /// A mount.
    #[must_use]
    pub(crate) fn mount(&self, node: Node) -> &Mount {
        self.spaces[node.space].1.mount(node.mount)
    }

    /// A mount.
    pub(crate) fn mount_mut(&mut self, node: Node) -> &mut Mount {
        self.spaces[node.space].1.mount_mut(node.mount)
    }

    /// Whether it is the root that the restore is given.
    #[must_use]
    pub(crate) fn is_root(&self, node: Node) -> bool {
        node.space == 0 && node.mount == self.spaces[0].1.root()
    }

    /// Where the content of a mount comes from.
    ///
    /// # Errors
    /// If the mount shows what cannot be made anew and is not given from outside: why.
    pub(crate) fn source(&self, node: Node) -> Result<ContentSource, String> {
        let found = match self.judged.get(&node) {
            Some(judged) => judged.source.clone(),
            None => self.find_source(node),
        };
        if found == ContentSource::FileSystem {
            self.can_be_made(self.mount(node))
        } else {
            Ok(found)
        }
    }

    fn find_source(&self, node: Node) -> ContentSource {
        let mount = self.mount(node);
        if self.is_root(node) {
            return ContentSource::Root;
        }
        if mount.external.is_some() {
            return ContentSource::External;
        }
        let Some(of) = self.outside_of(mount) else { return ContentSource::FileSystem };
        let below = mount.root.strip_prefix(&self.mount(of).root).unwrap_or(&mount.root);
        ContentSource::Part { of, below: below.to_owned() }
    }

    fn can_be_made(&self, mount: &Mount) -> Result<ContentSource, String> {
        let at = mount.mountpoint.display();
        match mount.ty.origin {
            Origin::New if mount.fs == "proc" && is_of_a_task(mount) => {
                Err("it shows a directory of a task, which a new proc does not have yet".to_owned())
            }
            Origin::New | Origin::Kernel | Origin::Layered => Ok(ContentSource::FileSystem),
            Origin::Filled | Origin::Registered | Origin::Automatic
                if self.whole(mount.dev).is_some() =>
            {
                Ok(ContentSource::FileSystem)
            }
            Origin::Filled | Origin::Registered | Origin::Automatic => Err(format!(
                "the root directory of this file system is mounted nowhere in the tree, so its \
                 content cannot be read; provide the mount with --external mnt[{at}]:KEY"
            )),
            Origin::Namespace if mount.namespace.is_some() => Ok(ContentSource::FileSystem),
            Origin::Namespace => Err(format!(
                "it keeps the namespace {}, which no task of the tree lives in, or which is not of \
                 network, UTS or IPC; unmount it (`ip netns delete` for those of `ip netns add`), leave \
                 it out with --skip-mnt {at}, or provide all mounts from outside with --external mnt[]",
                mount.root.display()
            )),
            Origin::None => Err(format!(
                "a file system of type {} cannot be made again; provide the mount with \
                 --external mnt[{at}]:KEY, all mounts from outside with --external mnt[]",
                mount.fs
            )),
        }
    }

    /// The mount from outside that shows the most specific part that `mount` is in.
    fn outside_of(&self, mount: &Mount) -> Option<Node> {
        let given = |n: &Node| self.is_root(*n) || self.mount(*n).external.is_some();
        self.nodes()
            .filter(given)
            .filter(|&n| self.mount(n).dev == mount.dev)
            .filter(|&n| !self.mount(n).deleted && mount.root.starts_with(&self.mount(n).root))
            .max_by_key(|&n| self.mount(n).root.components().count())
    }

    /// A mount that shows all of a file system that is not given from outside.
    #[must_use]
    pub(crate) fn whole(&self, dev: u32) -> Option<Node> {
        let is_made =
            |n| self.judged.get(&n).is_none_or(|judged| judged.source == ContentSource::FileSystem);
        self.nodes().find(|&n| {
            let mount = self.mount(n);
            mount.dev == dev
                && mount.root.as_os_str() == "/"
                && mount.external.is_none()
                && !self.is_root(n)
                && is_made(n)
        })
    }

    /// What of the files of an archive was judged.
    pub(super) fn judged_of(&self, archive: &str) -> &HashSet<Ask> {
        static NONE: LazyLock<HashSet<Ask>> = LazyLock::new(HashSet::new);
        self.contents.get(archive).unwrap_or(&NONE)
    }

    /// What the caller gives for a mount: a path of this host, or a device.
    pub(super) fn given(&self, node: Node) -> Option<&str> {
        self.judged.get(&node)?.given.as_deref()
    }
}

/// Whether the mount shows something of a process directory of proc.
fn is_of_a_task(mount: &Mount) -> bool {
    let first = mount.root.iter().nth(1).and_then(|name| name.to_str()).unwrap_or_default();
    first.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::super::mountinfo::{FromOutside, parse};
    use super::*;

    fn forest(lines: &[&str]) -> Forest {
        let trees = lines.iter().zip(1..);
        let spaces = trees.map(|(l, ns)| (ns, Tree::new(parse(l.as_bytes()).unwrap()).unwrap()));
        Forest { spaces: spaces.collect(), ..Forest::default() }
    }

    fn at(forest: &Forest, id: u32) -> Node {
        forest.nodes().find(|&n| forest.mount(n).id == id).unwrap()
    }

    #[test]
    fn a_container() {
        let mut f = forest(&["1 0 8:1 /c / rw - ext4 d rw
2 1 0:40 / /proc rw - proc proc rw
3 1 0:41 / /dev rw - tmpfs tmpfs rw
4 2 0:41 /null /proc/keys rw - tmpfs tmpfs rw
5 1 8:1 /c/a /b rw - ext4 d rw
6 1 8:1 /elsewhere /d rw - ext4 d rw
7 1 8:1 /elsewhere/x /e rw - ext4 d rw
8 2 0:40 /17 /proc/x rw - proc proc rw
9 1 0:43 /x /f rw - tmpfs tmpfs rw
"]);
        let e = at(&f, 6);
        f.mount_mut(e).external = Some(FromOutside::Key("k".into()));
        let source = |id| f.source(at(&f, id));
        assert_eq!(source(1), Ok(ContentSource::Root));
        assert_eq!(source(2), Ok(ContentSource::FileSystem));
        assert_eq!(source(3), Ok(ContentSource::FileSystem));
        assert_eq!(source(4), Ok(ContentSource::FileSystem));
        assert_eq!(source(5), Ok(ContentSource::Part { of: at(&f, 1), below: "a".into() }));
        assert_eq!(source(6), Ok(ContentSource::External));
        assert_eq!(source(7), Ok(ContentSource::Part { of: e, below: "x".into() }));
        assert!(source(8).unwrap_err().contains("task"));
        assert!(source(9).unwrap_err().contains("root directory"));
    }

    #[test]
    fn a_nested_namespace_uses_the_root_of_the_first() {
        let f = forest(&["1 0 8:1 /c / rw - ext4 d rw\n", "2 0 8:1 /c / rw - ext4 d rw\n"]);
        assert_eq!(
            f.source(at(&f, 2)),
            Ok(ContentSource::Part { of: at(&f, 1), below: PathBuf::new() })
        );
        let f = forest(&["1 0 8:1 /c / rw - ext4 d rw\n", "2 0 8:1 / / rw - ext4 d rw\n"]);
        assert!(f.source(at(&f, 2)).unwrap_err().contains("ext4"));
    }
}
