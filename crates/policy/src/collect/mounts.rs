//! Mounts.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use torpor_images::proto::{Fstype, MntEntry};
use torpor_images::{ImageDir, kind};

use crate::automatic::{Automatic, NAME as AUTOFS};
use crate::error::{Error, Result};
use crate::mount::{FileSystem, From, Mount, Peers};
use crate::mount_options::{NARROW, mount_flag};
use crate::passed::Passed;

/// The key of a mount whose source is a device that the caller names.
pub(super) const DEVICE_KEY: &str = "CRIU:EXTERNAL_DEV";
/// The option with which images mark a devpts of the namespace's own; others are this
/// host's.
const NEW_INSTANCE: &[u8] = b"newinstance";
/// The file system of namespaces that are mounted as files. Their roots are called `net:[4026531840]`.
const NSFS: &str = "nsfs";
/// That of processes.
const PROC: &str = "proc";
/// Flags that say how a mount propagates: its peer groups say it, too.
const PROPAGATION: u32 = mount_flag(libc::MS_PRIVATE | libc::MS_SLAVE | libc::MS_SHARED);

/// Reads the mounts of mount namespaces, the root task's first. This is all that is ever read of
/// them: the policy judges what is returned, and the restore makes it.
///
/// # Errors
/// Damaged images; a mount that makes no sense.
pub fn mounts(images: &ImageDir, spaces: &[u32], passed: &Passed) -> Result<Vec<Mount>> {
    let mut read: Vec<(u32, Vec<MntEntry>)> = vec![];
    for &space in spaces {
        let all: Vec<MntEntry> = images.read_all(kind::MNTS, space.into())?;
        if all.is_empty() {
            let image = kind::MNTS.file_name(space.into());
            return Err(Error::Invalid { image, reason: "there is no root mount".to_owned() });
        }
        read.push((space, all));
    }
    let root = read.first().and_then(|(space, mounts)| Some((*space, root_of(mounts)?)));
    let given = |space: u32, entry: &MntEntry| match root == Some((space, entry.mnt_id)) {
        true => Some(From::Root),
        false => external(entry, passed),
    };
    let entries =
        || read.iter().flat_map(|(space, all)| all.iter().map(move |entry| (*space, entry)));
    let mut outside = Given::default();
    for (space, entry) in entries().filter(|(space, entry)| given(*space, entry).is_some()) {
        outside.add(space, entry);
    }
    let mounts = entries().map(|(space, entry)| {
        let from = given(space, entry).or_else(|| outside.part(entry)).unwrap_or_default();
        let mut mount = mount(space, entry, from).map_err(|reason| {
            let image = kind::MNTS.file_name(space.into());
            Error::Invalid { image, reason: format!("mount {}: {reason}", entry.mnt_id) }
        })?;
        if mount.made() == Some(AUTOFS) {
            mount.automatic = Automatic::read(images, mount.device)?;
        }
        Ok(mount)
    });
    mounts.collect()
}

fn mount(space: u32, entry: &MntEntry, from: From) -> std::result::Result<Mount, String> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let outside = matches!(from, From::Given { .. } | From::Device { .. } | From::Host(_));
    let group = entry.shared_id.filter(|&id| id != 0);
    let (root, fs) = (path(&entry.root), file_system(entry)?);
    let keeps = entry.torpor_namespace.is_some();
    if keeps && fs.name != NSFS {
        return Err("only a mount of nsfs keeps a namespace".to_owned());
    }
    if entry.torpor_pid_ns.is_some() && fs.name != PROC {
        return Err("only a procfs shows a pid namespace".to_owned());
    }
    if !root.is_absolute() && !outside && !keeps {
        return Err(format!("its root {} is no path", root.display()));
    }
    Ok(Mount {
        space,
        id: (entry.mnt_id, entry.parent_mnt_id),
        at: path(&entry.mountpoint),
        from,
        fs,
        flags: entry.flags & !PROPAGATION,
        device: entry.root_dev,
        root,
        deleted: entry.deleted(),
        pid_ns: entry.torpor_pid_ns,
        namespace: entry.torpor_namespace,
        automatic: None,
        peers: Peers {
            group,
            master: entry.master_id.filter(|&id| id != 0),
            outside: outside && group.is_some() && !entry.internal_sharing(),
        },
    })
}

fn file_system(entry: &MntEntry) -> std::result::Result<FileSystem, String> {
    let number = Fstype::try_from(entry.fstype.cast_signed())
        .map_err(|_| format!("there is no file system {}", entry.fstype))?;
    let name = match number {
        Fstype::Overlayfs => "overlay".to_owned(),
        Fstype::Auto | Fstype::Unsupported => entry.fsname.clone().unwrap_or_default(),
        number => number.as_str_name().to_ascii_lowercase(),
    };
    Ok(FileSystem {
        name,
        plain: number == Fstype::Auto,
        source: OsStr::from_bytes(&entry.source).to_owned(),
        flags: entry.sb_flags(),
        options: OsStr::from_bytes(&entry.options).to_owned(),
    })
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
            Some(From::Device { path: path(&key, &passed.devices), key })
        }
        Some(key) => Some(From::Given { key: key.clone(), path: path(key, &passed.mounts) }),
        None if mount.ext_mount() => Some(From::Host(OsStr::from_bytes(&mount.source).into())),
        None if Fstype::try_from(mount.fstype.cast_signed()) == Ok(Fstype::Devpts) => {
            let own = mount.options.split(|&b| b == b',').any(|option| option == NEW_INSTANCE);
            (!own).then(|| From::Host(in_devpts(Path::new(OsStr::from_bytes(&mount.root)))))
        }
        None => None,
    }
}

/// Where this host has what a mount shows of its devpts.
fn in_devpts(root: &Path) -> PathBuf {
    let names = root.components().filter(|part| matches!(part, Component::Normal(_)));
    std::iter::once(Component::Normal(OsStr::new("/dev/pts"))).chain(names).collect()
}

/// What is given from outside: for each device a tree of directories, as far as the roots of
/// mounts lead. A mount finds what it shows a part of on the way to its own root, whatever
/// their number.
#[derive(Debug, Default)]
struct Given<'m> {
    /// Where the tree of each device begins, and where each name leads to from each directory.
    devices: HashMap<u32, usize>,
    names: HashMap<(usize, OsString), usize>,
    /// The mounts that show each directory: the last with each of the flags that count.
    shown: Vec<BTreeMap<u32, GivenMount<'m>>>,
    count: usize,
}

/// A mount from outside: which of them it is, its namespace and its entry.
type GivenMount<'m> = (usize, u32, &'m MntEntry);

impl<'m> Given<'m> {
    fn add(&mut self, space: u32, mount: &'m MntEntry) {
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
        for name in Path::new(OsStr::from_bytes(&mount.root)) {
            let key = (at, name.to_owned());
            at = match self.names.get(&key) {
                Some(&below) => below,
                None => {
                    let below = self.directory();
                    *self.names.entry(key).or_insert(below)
                }
            };
        }
        self.shown[at].insert(narrow(mount.flags), (self.count, space, mount));
    }

    fn directory(&mut self) -> usize {
        self.shown.push(BTreeMap::new());
        self.shown.len() - 1
    }

    /// The directories from the top of a device to `root`, as far as they are known.
    fn along<'r>(&self, device: u32, root: &'r Path) -> impl Iterator<Item = usize> + use<'_, 'r> {
        let mut at = self.devices.get(&device).copied();
        let mut names = root.iter();
        let all = std::iter::from_fn(move || {
            let here = at?;
            let below = |name: &OsStr| self.names.get(&(here, name.to_owned())).copied();
            at = names.next().and_then(below);
            Some(here)
        });
        // What `..` leads out of is not above it: so begin the roots of cgroup mounts that were seen
        // from another namespace.
        let up = root.iter().enumerate().filter(|(_, name)| *name == "..").last();
        all.skip(up.map_or(0, |(index, _)| index + 1))
    }

    /// What `mount` is made of: of the mounts from outside that show more, the one that shows least
    /// and takes no right away that `mount` has; the one that shows least, if they all do. So what is
    /// judged are the flags of what it is made of, whatever the numbers of the images say.
    fn part(&self, mount: &MntEntry) -> Option<From> {
        let root = Path::new(OsStr::from_bytes(&mount.root));
        let along: Vec<usize> = self.along(mount.root_dev, root).collect();
        let least = |fits: fn(u32, u32) -> bool| {
            along.iter().rev().find_map(|&at| {
                let fit = self.shown[at].iter().filter(|(flags, _)| fits(**flags, mount.flags));
                fit.map(|(_, whole)| whole).max_by_key(|(number, ..)| *number)
            })
        };
        let (_, space, whole) =
            least(|whole, own| whole & !own == 0).or_else(|| least(|_, _| true))?;
        let of = (text(&whole.mountpoint), whole.flags);
        Some(From::Part { whole: (*space, whole.mnt_id), of })
    }
}

/// The flags that take rights away.
fn narrow(flags: u32) -> u32 {
    NARROW.iter().fold(0, |all, (flag, _)| all | flags & flag)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::AutofsEntry;

    use super::*;

    fn entry(device: u32, root: &str, flags: u32) -> MntEntry {
        let (root, mountpoint) = (root.as_bytes().to_vec(), format!("/at{root}").into_bytes());
        MntEntry { root_dev: device, root, mountpoint, flags, ..MntEntry::default() }
    }

    fn given(mounts: &[MntEntry]) -> Given<'_> {
        let mut given = Given::default();
        mounts.iter().for_each(|mount| given.add(7, mount));
        given
    }

    /// Where the mount is that `entry` is made of, and its flags.
    fn part(given: &Given<'_>, entry: &MntEntry) -> Option<(String, u32)> {
        match given.part(entry) {
            Some(From::Part { of, .. }) => Some(of),
            _ => None,
        }
    }

    #[test]
    fn parts_of_what_is_given() {
        let mut gone = entry(1, "/a/gone", 0);
        gone.deleted = Some(true);
        let all = [entry(1, "/a/b", 1), entry(1, "/a", 3), entry(1, "/a", 1 | 1 << 20), gone];
        let given = given(&all);
        let part = |device, root| part(&given, &entry(device, root, 0));
        let at = |at: &str, flags: u32| Some((format!("/at{at}"), flags));
        assert_eq!(part(1, "/a/x"), at("/a", 1 | 1 << 20));
        assert_eq!(part(1, "/a/b//c/"), at("/a/b", 1));
        assert_eq!(part(1, "/a/gone"), at("/a", 1 | 1 << 20));
        assert_eq!((part(1, "/ab"), part(2, "/a")), (None, None));
    }

    /// What is writable is not made of what is not, although images say that something writable shows the same.
    #[test]
    fn a_part_is_made_of_what_gives_its_flags() {
        let made_of = |all: &[MntEntry], flags| match given(all).part(&entry(1, "/ro", flags)) {
            Some(From::Part { whole: (_, number), of }) => Some((number, of.1)),
            _ => None,
        };
        let numbered = |mut all: [MntEntry; 2]| {
            all.iter_mut().zip(1..).for_each(|(entry, id)| entry.mnt_id = id);
            all
        };
        for flag in [1, 2, 4, 8] {
            for above in ["/", "/ro"] {
                let all = numbered([entry(1, above, 0), entry(1, "/ro", flag)]);
                assert_eq!(made_of(&all, 0), Some((1, 0)), "{above}");
                assert_eq!(made_of(&all, flag), Some((2, flag)), "{above}");
            }
            let all = numbered([entry(1, "/ro", flag), entry(1, "/", flag)]);
            assert_eq!(made_of(&all, 15 & !flag), Some((1, flag)));
        }
    }

    /// A mount is made of the smallest that has it, the last one of several.
    #[test]
    fn the_smallest_whole_counts() {
        let mut all =
            [entry(1, "/", 0), entry(1, "/a/b", 1), entry(1, "/a/b", 1), entry(1, "/../c", 0)];
        all.iter_mut().zip(1..).for_each(|(entry, id)| entry.mnt_id = id);
        let given = given(&all);
        let whole = |root| match given.part(&entry(1, root, 1)) {
            Some(From::Part { whole, .. }) => Some(whole),
            _ => None,
        };
        assert_eq!(whole("/a/b/x"), Some((7, 3)));
        assert_eq!(whole("/a/x"), Some((7, 1)));
        // What is outside of what a cgroup namespace shows is no part of it.
        assert_eq!(
            (whole("/../c/x"), whole("/../x"), whole("/../../x")),
            (Some((7, 4)), None, None)
        );
    }

    fn read(entries: &[MntEntry]) -> Result<Vec<Mount>> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        images.write_all(kind::MNTS, 7, entries).unwrap();
        mounts(&images, &[7], &Passed::default())
    }

    #[test]
    fn nonsense_is_refused() {
        for (fstype, root, why) in [(4711, "/", "no file system 4711"), (5, "x", "is no path")] {
            let entry = MntEntry { fstype, ..entry(1, root, 0) };
            let error = read(&[entry]).unwrap_err().to_string();
            assert!(error.starts_with("mountpoints-7.img: mount 0: ") && error.contains(why));
        }
        assert!(read(&[]).unwrap_err().to_string().contains("no root mount"));
        let kept = |fsname: Option<&str>| {
            let fsname = fsname.map(str::to_owned);
            let kept = MntEntry { mnt_id: 2, parent_mnt_id: 1, fsname, ..entry(4, "net:[1]", 0) };
            read(&[
                MntEntry { mnt_id: 1, ..entry(1, "/", 0) },
                MntEntry { torpor_namespace: Some(3), ..kept },
            ])
        };
        assert_eq!(kept(Some(NSFS)).unwrap()[1].namespace, Some(3));
        assert!(kept(Some("tmpfs")).unwrap_err().to_string().contains("only a mount of nsfs"));
        assert!(kept(None).unwrap_err().to_string().contains("only a mount of nsfs"));
        let fstype = i32::from(Fstype::Tmpfs).cast_unsigned();
        let shown = MntEntry { fstype, torpor_pid_ns: Some(3), ..entry(1, "/", 0) };
        assert!(read(&[shown]).unwrap_err().to_string().contains("only a procfs shows a pid"));
    }

    /// Whom an automatic mount asks is judged and made with it.
    #[test]
    fn who_is_asked_for_a_mount_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let fstype = i32::from(Fstype::Autofs).cast_unsigned();
        let root = MntEntry { mnt_id: 1, ..entry(1, "/", 0) };
        let of =
            |mnt_id, device| MntEntry { mnt_id, parent_mnt_id: 1, fstype, ..entry(device, "/", 0) };
        images.write_all(kind::MNTS, 7, &[root, of(2, 5), of(3, 6)]).unwrap();
        let asks = AutofsEntry { fd: 4, pgrp: 9, mode: 1, ..AutofsEntry::default() };
        images.write_all(kind::AUTOFS, 5, &[asks]).unwrap();
        let read = mounts(&images, &[7], &Passed::default()).unwrap();
        let group = |mount: &Mount| Some(mount.automatic.as_ref()?.daemon?.group);
        assert_eq!(read.iter().map(group).collect::<Vec<_>>(), [None, Some(9), None]);
        let text = read[1].to_string();
        assert!(text.ends_with("file system autofs, for which process group 9 is asked"), "{text}");
        let asks = AutofsEntry { mode: 9, ..AutofsEntry::default() };
        images.write_all(kind::AUTOFS, 5, &[asks]).unwrap();
        let error = mounts(&images, &[7], &Passed::default()).unwrap_err().to_string();
        assert_eq!(error, "autofs-5.img: there is no mode 9");
    }

    /// The root is the root, whatever else its entry says.
    #[test]
    fn the_root_is_never_a_device() {
        let device = |id, parent| MntEntry {
            mnt_id: id,
            parent_mnt_id: parent,
            source: b"disk".to_vec(),
            ext_key: Some(DEVICE_KEY.to_owned()),
            shared_id: Some(3),
            ..entry(1, "/", 0)
        };
        let read = read(&[device(1, 0), device(2, 1)]).unwrap();
        assert_eq!((&read[0].from, read[0].peers.outside), (&From::Root, false));
        let given = From::Device { key: "disk".to_owned(), path: None };
        assert_eq!((&read[1].from, read[1].peers.outside), (&given, true));
    }

    /// What is not marked as one of the namespace's own shows of the host's what it showed, and never more than that.
    #[test]
    fn a_devpts_of_this_host_is_shown_in_part() {
        let fstype = i32::from(Fstype::Devpts).cast_unsigned();
        let from = |root: &str, options: &[u8]| {
            let options = options.to_vec();
            external(&MntEntry { fstype, options, ..entry(1, root, 0) }, &Passed::default())
        };
        let host = |path: &str| Some(From::Host(path.into()));
        assert_eq!(from("/", b"mode=620"), host("/dev/pts"));
        assert_eq!(from("/ptmx", b"mode=620"), host("/dev/pts/ptmx"));
        assert_eq!(from("/../../etc", b""), host("/dev/pts/etc"));
        assert_eq!(from("/3", b"mode=620,newinstance"), None);
    }

    /// A root that is no path, as those of namespaces are.
    #[test]
    fn names_that_are_no_paths() {
        let all = [entry(1, "net:[1]", 0), entry(2, "", 0)];
        let given = given(&all);
        assert!(part(&given, &entry(1, "net:[1]", 0)).is_some());
        assert_eq!(part(&given, &entry(1, "net:[2]", 0)), None);
        assert!(part(&given, &entry(2, "/x", 0)).is_some());
    }

    /// However many are given, a mount goes through no more directories than its root has, and
    /// there are no more wholes of one than there are sets of flags.
    #[test]
    fn many_mounts_are_compared_in_few_steps() {
        let many: Vec<MntEntry> = (0..5000)
            .map(|i| entry(1, &format!("/a/{}", i % 100), i % 32))
            .chain((0..5000).map(|i| entry(1, "/a", i)))
            .collect();
        let given = given(&many);
        let root = Path::new("/a/7/x/y");
        let steps = given.along(1, root).count();
        assert!(steps <= 1 + root.iter().count(), "{steps} steps");
        assert!(given.shown.iter().all(|wholes| wholes.len() <= 1 << NARROW.len()));
        assert_eq!(given.shown.len(), 3 + 100, "top, root, /a, and what is below");
    }
}
