//! Mounts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;

use torpor_images::kind;
use torpor_images::proto::{Fstype, MntEntry};

use super::{Checkpoint, Requests, Result};
use crate::passed::Passed;
use crate::request::{Ask, From, Mount};
use crate::runtime::NARROW;

/// The key of a mount whose source is a device that the caller names.
pub(super) const DEVICE_KEY: &str = "CRIU:EXTERNAL_DEV";
/// The option with which images mark a devpts of the namespace's own; others are this
/// host's.
const NEW_INSTANCE: &[u8] = b"newinstance";

/// Whether a mount shows a tmpfs, which the images have the content of.
pub(super) fn is_tmpfs(mount: &MntEntry) -> bool {
    fs_type(mount) == Fstype::Tmpfs
}

fn fs_type(mount: &MntEntry) -> Fstype {
    Fstype::try_from(mount.fstype.cast_signed()).unwrap_or_default()
}

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let mut spaces = vec![];
    for id in checkpoint.namespaces(|ids| ids.mnt_ns_id) {
        let mounts: Vec<MntEntry> = checkpoint.images.read_all(kind::MNTS, id.into())?;
        spaces.push((id, mounts));
    }
    let root = spaces.first().and_then(|(id, mounts)| Some((*id, root_of(mounts)?)));
    let is_root = |space: u32, mount: &MntEntry| root == Some((space, mount.mnt_id));
    let mut given = Given::default();
    for (space, mounts) in &spaces {
        let outside =
            |mount: &&MntEntry| is_root(*space, mount) || external(mount, passed).is_some();
        mounts.iter().filter(outside).for_each(|mount| given.add(mount));
    }
    for (space, mounts) in &spaces {
        for mount in mounts {
            let from = match external(mount, passed) {
                _ if is_root(*space, mount) => From::Root,
                Some(from) => from,
                None => match given.parts(mount) {
                    of if of.is_empty() => file_system(mount),
                    of => From::Part { of },
                },
            };
            let ask = Ask::Mount(Mount {
                space: *space,
                id: (mount.mnt_id, mount.parent_mnt_id),
                at: text(&mount.mountpoint),
                from,
                flags: mount.flags,
            });
            all.add(kind::MNTS.file_name((*space).into()), None, ask);
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The mount whose parent is none of the others.
fn root_of(mounts: &[MntEntry]) -> Option<u32> {
    let known: HashSet<u32> = mounts.iter().map(|mount| mount.mnt_id).collect();
    let has_parent = |mount: &&MntEntry| {
        mount.parent_mnt_id != mount.mnt_id && known.contains(&mount.parent_mnt_id)
    };
    mounts.iter().find(|mount| !has_parent(mount)).map(|mount| mount.mnt_id)
}

/// What comes from outside.
fn external(mount: &MntEntry, passed: &Passed) -> Option<From> {
    let path = |key: &str, paths: &[(String, String)]| {
        paths.iter().find(|(k, _)| k == key).map(|(_, path)| path.clone())
    };
    match &mount.ext_key {
        Some(key) if key == DEVICE_KEY => {
            let key = text(&mount.source);
            Some(From::Device {
                path: path(&key, &passed.devices),
                key,
                name: mount.fsname.clone().unwrap_or_default(),
                options: text(&mount.options),
            })
        }
        Some(key) => Some(From::Given { key: key.clone(), path: path(key, &passed.mounts) }),
        None if mount.ext_mount() => Some(From::Host(text(&mount.source))),
        None if fs_type(mount) == Fstype::Devpts => {
            let own = mount.options.split(|&b| b == b',').any(|option| option == NEW_INSTANCE);
            (!own).then(|| From::Host("/dev/pts".to_owned()))
        }
        None => None,
    }
}

/// What is given from outside: for each device a tree of directories, as far as the roots of
/// mounts lead. A mount finds what it shows a part of on the way to its own root, whatever
/// their number.
#[derive(Debug, Default)]
struct Given<'m> {
    /// Where the tree of each device begins, and where each name leads to from each directory.
    devices: HashMap<u32, usize>,
    names: HashMap<(usize, OsString), usize>,
    /// The mounts that show each directory: the first with each of the flags that count, and
    /// which of all mounts it is.
    shown: Vec<BTreeMap<u32, (usize, &'m MntEntry)>>,
    count: usize,
}

impl<'m> Given<'m> {
    fn add(&mut self, mount: &'m MntEntry) {
        self.count += 1;
        if mount.deleted() {
            return;
        }
        let mut at = match self.devices.get(&mount.root_dev) {
            Some(&top) => top,
            None => {
                let top = self.directory();
                *self.devices.entry(mount.root_dev).or_insert(top)
            }
        };
        for name in Path::new(&text(&mount.root)) {
            let key = (at, name.to_owned());
            at = match self.names.get(&key) {
                Some(&below) => below,
                None => {
                    let below = self.directory();
                    *self.names.entry(key).or_insert(below)
                }
            };
        }
        self.shown[at].entry(narrow(mount.flags)).or_insert((self.count, mount));
    }

    fn directory(&mut self) -> usize {
        self.shown.push(BTreeMap::new());
        self.shown.len() - 1
    }

    /// The directories from the top of a device to `root`, as far as they are known.
    fn along<'r>(&self, device: u32, root: &'r Path) -> impl Iterator<Item = usize> + use<'_, 'r> {
        let mut at = self.devices.get(&device).copied();
        let mut names = root.iter();
        std::iter::from_fn(move || {
            let here = at?;
            let below = |name: &OsStr| self.names.get(&(here, name.to_owned())).copied();
            at = names.next().and_then(below);
            Some(here)
        })
    }

    /// Where the mounts are, and which flags they have, that show what `mount` shows a part of:
    /// of those with the same flags the first.
    fn parts(&self, mount: &MntEntry) -> Vec<(String, u32)> {
        let root = text(&mount.root);
        let along = self.along(mount.root_dev, Path::new(&root));
        let mut whole: Vec<_> = along.flat_map(|at| self.shown[at].values()).collect();
        whole.sort_by_key(|(number, _)| *number);
        let mut seen = HashSet::new();
        whole.retain(|(_, whole)| seen.insert(narrow(whole.flags)));
        whole.into_iter().map(|(_, whole)| (text(&whole.mountpoint), whole.flags)).collect()
    }
}

/// The flags that take rights away.
fn narrow(flags: u32) -> u32 {
    NARROW.iter().fold(0, |all, (flag, _)| all | flags & flag)
}

fn file_system(mount: &MntEntry) -> From {
    let ty = fs_type(mount);
    let name = match ty {
        Fstype::Overlayfs => "overlay".to_owned(),
        Fstype::Auto | Fstype::Unsupported => mount.fsname.clone().unwrap_or_default(),
        ty => ty.as_str_name().to_ascii_lowercase(),
    };
    From::FileSystem { name, options: text(&mount.options) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: u32, root: &str, flags: u32) -> MntEntry {
        let (root, mountpoint) = (root.as_bytes().to_vec(), format!("/at{root}").into_bytes());
        MntEntry { root_dev: device, root, mountpoint, flags, ..MntEntry::default() }
    }

    fn given(mounts: &[MntEntry]) -> Given<'_> {
        let mut given = Given::default();
        mounts.iter().for_each(|mount| given.add(mount));
        given
    }

    #[test]
    fn parts_of_what_is_given() {
        let mut gone = mount(1, "/a/gone", 0);
        gone.deleted = Some(true);
        let all = [mount(1, "/a/b", 1), mount(1, "/a", 3), mount(1, "/a", 1 | 1 << 20), gone];
        let given = given(&all);
        let parts = |device, root| given.parts(&mount(device, root, 0));
        let text = |at: &str| format!("/at{at}");
        assert_eq!(parts(1, "/a/x"), [(text("/a"), 3), (text("/a"), 1 | 1 << 20)]);
        // Of those with the same flags the first.
        assert_eq!(parts(1, "/a/b//c/"), [(text("/a/b"), 1), (text("/a"), 3)]);
        assert_eq!(parts(1, "/a/gone").len(), 2);
        assert_eq!(parts(1, "/ab"), []);
        assert_eq!(parts(2, "/a"), []);
    }

    /// A root that is no path, as those of namespaces are.
    #[test]
    fn names_that_are_no_paths() {
        let all = [mount(1, "net:[1]", 0), mount(2, "", 0)];
        let given = given(&all);
        assert_eq!(given.parts(&mount(1, "net:[1]", 0)).len(), 1);
        assert_eq!(given.parts(&mount(1, "net:[2]", 0)), []);
        assert_eq!(given.parts(&mount(2, "/x", 0)).len(), 1);
    }

    /// However many are given, a mount goes through no more directories than its root has, and
    /// has no more wholes than there are sets of flags.
    #[test]
    fn many_mounts_are_compared_in_few_steps() {
        let many: Vec<MntEntry> = (0..5000)
            .map(|i| mount(1, &format!("/a/{}", i % 100), i % 32))
            .chain((0..5000).map(|i| mount(1, "/a", i)))
            .collect();
        let given = given(&many);
        let root = Path::new("/a/7/x/y");
        let steps = given.along(1, root).count();
        assert!(steps <= 1 + root.iter().count(), "{steps} steps");
        assert_eq!(given.parts(&mount(1, "/a/7/x/y", 0)).len(), 1 << NARROW.len());
        assert_eq!(given.shown.len(), 3 + 100, "top, root, /a, and what is below");
    }
}
