//! The mount namespaces of a running tree.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};
use torpor_tracee::Tracee;

use super::mountinfo::{self, Mount};
use super::nested;
use super::superblock::fetch;
use super::tree::Tree;
use crate::error::{Context, Result};
use crate::namespace::{Namespaces, NsKind, run_in};
use crate::restore::transport::Transport;
use crate::task::onlookers;

/// A mount namespace.
#[derive(Debug)]
pub(crate) struct MountNamespace {
    /// Its number in the images.
    pub ns: u32,
    /// Whether it is the caller's own and not part of the checkpoint.
    pub is_host: bool,
    /// The first task that lives in it.
    pub task: usize,
    /// Its file.
    pub file: OwnedFd,
    /// Its root directory (`O_PATH`).
    pub root: OwnedFd,
    /// Its mounts.
    pub tree: Tree,
}

/// The mounts of all namespaces of a tree of tasks.
#[derive(Debug, Default)]
pub(crate) struct TreeMounts {
    /// In the order of [`Namespaces::all`]: the root task's first.
    pub spaces: Vec<MountNamespace>,
    /// The caller's own mounts.
    pub host: Tree,
}

impl TreeMounts {
    /// Reads the mounts of all mount namespaces among `namespaces` that tasks of the tree
    /// live in, by number. The caller's own must not be among them if none does: a path in
    /// it means nothing to a tree with a root of its own.
    ///
    /// # Errors
    /// If a namespace cannot be entered, or its list of mounts cannot be read.
    pub(crate) fn collect(namespaces: &Namespaces, lived_in: impl Fn(u32) -> bool) -> Result<Self> {
        let proc = open_proc()?;
        let host = read_own(proc.as_fd())?;
        let mut spaces = Vec::new();
        for ns in namespaces.of_kind(NsKind::Mnt).filter(|ns| lived_in(ns.id)) {
            let Some(file) = &ns.file else { continue };
            let (tree, root) = if ns.is_host {
                (host.clone(), open_root()?)
            } else {
                run_in(&[file.as_fd()], || Ok((read_own(proc.as_fd())?, open_root()?)))?
            };
            let file = file.try_clone().context(|| "dup".to_owned())?;
            let (is_host, task) = (ns.is_host, ns.task);
            spaces.push(MountNamespace { ns: ns.id, is_host, task, file, root, tree });
        }
        let own = MountNamespace::own(host)?;
        nested::mark(&mut spaces, &own, namespaces)?;
        nested::mark_kept(&mut spaces, namespaces);
        Ok(TreeMounts { spaces, host: own.tree })
    }

    /// The mount with number `mnt_id` (as in `/proc/PID/fdinfo`), and its namespace.
    /// `None` for one that is in no namespace of the tree: a detached one, or one
    /// from outside.
    #[must_use]
    pub(crate) fn find(&self, mnt_id: i32) -> Option<(&MountNamespace, &Mount)> {
        let id = u32::try_from(mnt_id).ok()?;
        self.spaces.iter().find_map(|s| Some((s, s.tree.mount(s.tree.find(id)?))))
    }

    /// What the images call the mount with number `mnt_id`. Nothing for the mounts of the caller's
    /// namespace, where the root task lives in that: they are not part of the checkpoint, and CRIU
    /// looks in vain for one that is called by a number.
    #[must_use]
    pub(crate) fn number_in_images(&self, mnt_id: i32) -> Option<i32> {
        let all_are_dumped = self.spaces.first().is_none_or(|root| !root.is_host);
        let is_dumped = || self.find(mnt_id).is_some_and(|(space, _)| !space.is_host);
        (all_are_dumped || is_dumped()).then_some(mnt_id)
    }

    /// Whether `path`, seen from the root of the namespace, leads to the file that
    /// the mount has there, rather than to one of another mount on top.
    #[must_use]
    pub(crate) fn is_visible(&self, mnt_id: i32, path: &Path) -> bool {
        let id = u32::try_from(mnt_id).ok();
        let found = self.spaces.iter().find_map(|s| Some((s, s.tree.find(id?)?)));
        found.is_some_and(|(space, index)| space.tree.is_visible(index, path))
    }

    /// The root of a mount, through a detached copy of that mount alone: what other
    /// mounts hide is there too.
    ///
    /// # Errors
    /// `ENOENT` if no namespace of the tree has the mount; if the mount cannot be copied.
    pub(crate) fn open_alone(&self, mnt_id: i32) -> Result<OwnedFd> {
        let id = u32::try_from(mnt_id).ok();
        let found = self.spaces.iter().find_map(|s| Some((s, s.tree.find(id?)?)));
        let Some((space, index)) = found else {
            return Err(Errno::NOENT).context(|| format!("find mount {mnt_id}"));
        };
        space.open_alone(index).or_else(|error| {
            // What a user namespace has from above is locked in place. It may lie open there.
            let mount = space.tree.mount(index);
            let same = |other: &Mount| other.dev == mount.dev && other.root == mount.root;
            let others = self.spaces.iter().filter(|other| other.ns != space.ns);
            let opened = others.flat_map(|other| {
                let found = (0..other.tree.mounts().len()).filter(|&i| same(other.tree.mount(i)));
                found.map(move |index| other.open_alone(index))
            });
            opened.flatten().next().ok_or(error)
        })
    }
}

impl MountNamespace {
    /// The caller's own namespace, which has no number.
    fn own(tree: Tree) -> Result<Self> {
        let path = "/proc/self/ns/mnt";
        let file = File::open(path).context(|| format!("open {path}"))?.into();
        Ok(MountNamespace { ns: 0, is_host: true, task: 0, file, root: open_root()?, tree })
    }

    /// As [`TreeMounts::open_alone`], by index into the tree.
    ///
    /// # Errors
    /// If the mount cannot be opened or copied without those below it.
    pub(crate) fn open_alone(&self, index: usize) -> Result<OwnedFd> {
        let mount = self.tree.mount(index);
        let what = || format!("open mount {} at {}", mount.id, mount.mountpoint.display());
        let hiding = self.tree.hiding(index);
        if !hiding.is_empty() || mount.flags & libc::MS_UNBINDABLE != 0 {
            return self.open_in_copy(&hiding, &mount.mountpoint);
        }
        run_in(&[self.file.as_fd()], || {
            let root = open_root()?;
            let place = open_beneath(root.as_fd(), &mount.mountpoint, true).context(what)?;
            if mount_id(place.as_fd()).context(what)? != u64::from(mount.id) {
                return Err(Errno::STALE).context(what);
            }
            clone(place.as_fd()).context(what)
        })
    }

    /// Opens the mount at `place` after `hiding` have been taken away, and all has been
    /// made private (an unbindable mount cannot be copied): in a copy of the namespace
    /// that ends with the husk that makes it. It must be made from within the user
    /// namespace that owns the original: in a copy by somebody else all mounts are
    /// locked in place (mount_namespaces(7)).
    fn open_in_copy(&self, hiding: &[usize], place: &Path) -> Result<OwnedFd> {
        let what = || format!("uncover {}", place.display());
        let owner = torpor_sys::ns::owner(self.file.as_fd()).context(what)?;
        let own = File::open("/proc/self/ns/user").context(what)?;
        let inode = |f: BorrowedFd<'_>| rustix::fs::fstat(f).map(|s| s.st_ino).context(what);
        let foreign = inode(owner.as_fd())? != inode(own.as_fd())?;

        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[])?;
        onlookers::hide_or_show(&mut husk)?;
        let mut transport = Transport::open(&mut husk, 3)?;
        let mut batch = husk.batch();
        transport.send(&mut batch, &[owner.as_fd(), self.file.as_fd()])?;
        let new = libc::CLONE_NEWNS as u64;
        if foreign {
            batch.must((libc::SYS_setns, [0, libc::CLONE_NEWUSER as u64]));
        }
        batch.must((libc::SYS_setns, [1, new]));
        batch.must((libc::SYS_unshare, [new]));
        let root = batch.cstr("/").0;
        batch.must((libc::SYS_mount, [0, root, 0, libc::MS_PRIVATE | libc::MS_REC, 0]));
        let uncover = batch.len();
        for &index in hiding {
            let at = batch.cstr(self.tree.mount(index).mountpoint.as_os_str().as_bytes()).0;
            // The ones stacked on top of it first; unmounting takes all below along.
            for _ in 0..=self.tree.stacked_on(index) {
                batch.must((libc::SYS_umount2, [at, libc::MNT_DETACH as u64]));
            }
        }
        let uncover = uncover..batch.len();
        let place = batch.cstr(place.as_os_str().as_bytes()).0;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_NO_AUTOMOUNT
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
        let here = i64::from(libc::AT_FDCWD).cast_unsigned();
        let opened = batch.must((libc::SYS_open_tree, [here, place, flags.bits().into()]));
        let outcome = batch.run()?;
        if let Some((call, error)) = outcome.first_error() {
            let is_locked = error.raw_os_error() == Some(libc::EINVAL) && uncover.contains(&call);
            return Err(error).context(|| if is_locked { what() + LOCKED } else { what() });
        }
        fetch(husk.pid(), outcome.result(opened).context(what)?).context(what)
    }
}

/// Why what hides a mount cannot be taken away.
const LOCKED: &str = ", which a mount hides that was there when a user namespace below got its copy (they are locked in \
                      place there, and no other mount of the tree or of this host shows what is below); unmount what \
                      hides it before that namespace is made";

/// How often a list of mounts that makes no sense is read. On a host where containers come and go all the
/// time a handful of times is enough.
const TRIES: usize = 100;

/// Reads the mounts of the calling thread's namespace. `proc` is the root of a
/// procfs: the namespace may have none.
///
/// The kernel gives the list in pieces, and others may mount and unmount between two of them: a mount that
/// is gone and one that came in its place are then both there, or one without its parent.
pub(super) fn read_own(proc: BorrowedFd<'_>) -> Result<Tree> {
    let name = "thread-self/mountinfo";
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, name, flags, Mode::empty())
        .context(|| format!("open /proc/{name}"))?;
    let (mut file, mut why) = (File::from(file), String::new());
    for _ in 0..TRIES {
        let mut text = Vec::new();
        file.rewind().context(|| format!("rewind /proc/{name}"))?;
        file.read_to_end(&mut text).context(|| format!("read /proc/{name}"))?;
        let mounts = mountinfo::parse(&text).map_err(|e| e.to_string());
        match mounts.and_then(Tree::new) {
            Ok(tree) => return Ok(tree),
            Err(reason) => why = reason,
        }
    }
    let error = std::io::Error::new(std::io::ErrorKind::InvalidData, why);
    Err(error).context(|| format!("parse /proc/{name}"))
}

/// Cuts all mounts of the calling thread's namespace off from the others.
pub(super) fn make_all_private() -> Result<()> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).context(|| "make all mounts private".to_owned())
}

/// The mounts of the calling thread's namespace.
///
/// # Errors
/// If procfs cannot be mounted, or the list cannot be read.
pub(crate) fn own_tree() -> Result<Tree> {
    read_own(open_proc()?.as_fd())
}

/// The peer groups of the mounts of this process.
///
/// # Errors
/// If the list cannot be read.
pub(crate) fn own_groups() -> Result<HashSet<u32>> {
    Ok(own_tree()?.mounts().iter().filter_map(|mount| mount.shared).collect())
}

/// The mounts of a namespace.
///
/// # Errors
/// If the namespace cannot be entered, or its list cannot be read.
pub(crate) fn tree_of(space: BorrowedFd<'_>) -> Result<Tree> {
    let proc = open_proc()?;
    run_in(&[space], || read_own(proc.as_fd()))
}

/// The caller's procfs.
pub(super) fn open_proc() -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/proc", flags, Mode::empty()).context(|| "open /proc".to_owned())
}

/// The root directory of the calling thread.
pub(super) fn open_root() -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/", flags, Mode::empty()).context(|| "open /".to_owned())
}

/// Opens (`O_PATH`) a path below `dir` (or `dir` itself, which may be a file) that has no symbolic links; it crosses mount
/// points only if asked to.
pub(super) fn open_beneath(
    dir: BorrowedFd<'_>,
    path: &Path,
    cross_mounts: bool,
) -> rustix::io::Result<OwnedFd> {
    let path = path.strip_prefix("/").unwrap_or(path);
    if path.as_os_str().is_empty() {
        return rustix::io::fcntl_dupfd_cloexec(dir, 0);
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    resolve.set(ResolveFlags::NO_XDEV, !cross_mounts);
    rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve)
}

/// A detached copy of the one mount that `at` lies on, with `at` as its root. `at`
/// must be in the calling thread's mount namespace.
pub(super) fn clone(at: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(at, "", flags)
}

/// The number of the mount that a file was opened through.
pub(super) fn mount_id(file: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    Ok(stat.stx_mnt_id)
}
