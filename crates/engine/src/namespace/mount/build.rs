//! Puts a mount namespace together. Runs on a thread that lives in it.
//!
//! Every mount is made detached and private, with its flags; then it is moved to
//! its place from the root downwards; then the root is changed; and only then are
//! the peer groups set (`MOVE_MOUNT_SET_GROUP`), so that nothing is ever passed on
//! while the tree grows.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsmount, fsopen, move_mount, unmount,
};

use super::base::{Bases, Copy, Revived, base_of, is_layered, unfit};
use super::collect::{clone, make_all_private, open_beneath, open_root};
use super::fs::Origin;
use super::origin::{Forest, Node};
use super::sharing::{Base, Group};
use super::{nested, overlay};
use crate::error::{Context, Error, Result};

/// The copies of each mount that are to be put in place.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// What is mounted.
    pub mounted: HashMap<Node, OwnedFd>,
    /// What other parts of the restore write to.
    pub alone: HashMap<Node, OwnedFd>,
    /// Removed files that mounts show; to be dropped when all mounts are in place.
    pub revived: Vec<Revived>,
}

impl Copies {
    /// Makes the copies of those mounts whose base was `made` here (or not).
    pub(super) fn make(&mut self, forest: &Forest, bases: &Bases, made: bool) -> Result<()> {
        let is_there =
            |n: &Node| !shows_terminal(forest, *n) && nested::shown(forest, *n).is_none();
        for node in forest.nodes().filter(is_there) {
            let (base, _) = base_of(forest, node).map_err(|why| unfit(forest.mount(node), &why))?;
            if bases.get(base).is_some_and(|b| b.made == made) {
                self.add(node, bases.copies(forest, node)?);
            }
        }
        Ok(())
    }

    fn add(&mut self, node: Node, copy: Copy) {
        self.mounted.insert(node, copy.mounted);
        self.alone.insert(node, copy.alone);
        self.revived.extend(copy.revived);
    }

    /// Makes an overlay whose layers are in place below `root`, and the copies for all mounts that show
    /// it. Its layers need not be in the other namespaces.
    fn add_layered(
        &mut self,
        forest: &Forest,
        bases: &mut Bases,
        node: Node,
        root: Node,
        yard: &mut Yard,
    ) -> Result<()> {
        let dev = forest.mount(node).dev;
        if bases.get(Base::FileSystem(dev)).is_some() {
            return Ok(());
        }
        let whole = forest.whole(dev).unwrap_or(node);
        let made = overlay::make(forest.mount(whole), self.get(forest, root)?, yard)?;
        yard.keep(made.as_fd())?;
        bases.insert(dev, made);
        let shows_it = |n: &Node| forest.mount(*n).dev == dev && is_layered(forest, *n);
        for node in forest.nodes().filter(shows_it) {
            self.add(node, bases.copies(forest, node)?);
        }
        Ok(())
    }

    /// Takes the mounts of namespace `space` from a copy of it, in which the calling thread lives, but for those that others
    /// hide there. Returns its root.
    pub(super) fn reopen(&mut self, forest: &Forest, space: usize) -> Result<OwnedFd> {
        let root = open_root()?;
        let tree = &forest.spaces[space].1;
        for mount in 0..tree.mounts().len() {
            let node = Node { space, mount };
            if is_late(forest, node) || self.mounted.remove(&node).is_none() {
                continue;
            }
            let at = &tree.mount(mount).mountpoint;
            if tree.is_visible(mount, at) {
                let opened = open_beneath(root.as_fd(), at, true);
                let opened = opened.context(|| format!("open the copy of {}", at.display()))?;
                self.mounted.insert(node, opened);
            }
        }
        Ok(root)
    }

    /// The copy of a mount that is to be mounted.
    pub(super) fn get(&self, forest: &Forest, node: Node) -> Result<BorrowedFd<'_>> {
        let copy = self.mounted.get(&node).map(AsFd::as_fd);
        copy.ok_or_else(|| unfit(forest.mount(node), "there is no copy of it"))
    }
}

/// Whether a mount is put in place later than the others.
fn is_late(forest: &Forest, node: Node) -> bool {
    shows_terminal(forest, node) || nested::waits(forest, node)
}

/// Whether a mount shows a terminal of a devpts, which exists only after the
/// terminals have been restored.
pub(super) fn shows_terminal(forest: &Forest, node: Node) -> bool {
    let mount = forest.mount(node);
    mount.fs == "devpts" && mount.external.is_none() && mount.root.as_os_str() != "/"
}

/// Where procfs is in a directory of a [`Yard`].
pub(super) const PROC: &str = ".torpor-proc";

/// A place in the namespace of the root husk for file systems that were made:
/// kernels before 6.15 copy no mount that is in no namespace. It goes with the old
/// root.
#[derive(Debug)]
pub(super) struct Yard {
    root: OwnedFd,
    used: usize,
    /// The procfs that it lies on.
    proc: OwnedFd,
}

impl Yard {
    /// Cuts this namespace off from the one it is a copy of, and mounts a yard.
    pub(super) fn new() -> Result<Self> {
        make_all_private()?;
        let what = || "mount the yard".to_owned();
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).context(what)?;
        fsconfig_create(&context).context(what)?;
        let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
            .context(what)?;
        // A directory that is surely there.
        let proc = super::collect::open_proc()?;
        place_at(root.as_fd(), proc.as_fd()).context(what)?;
        Ok(Yard { root, used: 0, proc })
    }

    /// Mounts a file system in the yard.
    pub(super) fn keep(&mut self, mount: BorrowedFd<'_>) -> Result<()> {
        let dir = self.make_dir()?;
        // What its root is cannot be asked: of a FUSE mount of an ordinary user only that one may, and its server may
        // sleep still.
        let placed = match place_at(mount, dir.as_fd()) {
            Err(Errno::INVAL | Errno::NOTDIR) => place_at(mount, self.make_file()?.as_fd()),
            placed => placed,
        };
        placed.context(|| format!("mount in the yard at {}", self.used))
    }

    /// An empty directory, but for the procfs of the caller at [`PROC`].
    pub(super) fn dir_with_proc(&mut self) -> Result<OwnedFd> {
        let what = || "show procfs in the yard".to_owned();
        let dir = self.make_dir()?;
        let at = make_beneath(dir.as_fd(), PROC.as_ref()).context(what)?;
        let proc = clone(self.proc.as_fd()).context(what)?;
        place_at(proc.as_fd(), at.as_fd()).context(what)?;
        Ok(dir)
    }

    fn new_name(&mut self) -> String {
        self.used += 1;
        self.used.to_string()
    }

    fn make_file(&mut self) -> Result<OwnedFd> {
        let name = self.new_name();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.root, name.as_str(), flags, Mode::RUSR);
        made.context(|| format!("make file {name} in the yard"))
    }

    fn make_dir(&mut self) -> Result<OwnedFd> {
        let name = self.new_name();
        let made = make_beneath(self.root.as_fd(), name.as_ref());
        made.context(|| format!("make directory {name} in the yard"))
    }
}

/// Makes a directory in `dir`, if it is not there, and opens it (`O_PATH`).
pub(super) fn make_beneath(dir: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open_beneath(dir, name, false),
        Err(error) => Err(error),
    }
}

/// Moves a detached mount to a place.
pub(super) fn place_at(mount: BorrowedFd<'_>, at: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", at, "", flags)
}

/// The old root of a namespace, to be taken away.
#[must_use]
pub(super) struct OldRoot(OwnedFd);

/// The mounts of a namespace in an order in which they can be made: as [`Tree::top_down`], but
/// overlays come when all is in place that their layers can be in, and last of all what lies on
/// them or would hide their places.
///
/// [`Tree::top_down`]: super::tree::Tree::top_down
fn order(forest: &Forest, space: usize) -> Vec<usize> {
    let tree = &forest.spaces[space].1;
    let mut late: Vec<usize> = Vec::new();
    let mut order = tree.top_down();
    order.retain(|&mount| {
        let parent = tree.parent(mount);
        let hides = |other: &usize| {
            tree.parent(*other) == parent && tree.place(*other).starts_with(tree.place(mount))
        };
        let is_late = is_layered(forest, Node { space, mount })
            || parent.is_some_and(|parent| late.contains(&parent))
            || late.iter().any(hides);
        if is_late {
            late.push(mount);
        }
        !is_late
    });
    order.extend(late);
    order
}

/// Puts the mounts of namespace `space` in place and makes them its root.
pub(super) fn assemble(
    forest: &Forest,
    space: usize,
    bases: &mut Bases,
    copies: &mut Copies,
    yard: &mut Yard,
) -> Result<OldRoot> {
    let tree = &forest.spaces[space].1;
    let root = Node { space, mount: tree.root() };
    for mount in order(forest, space) {
        let node = Node { space, mount };
        if is_late(forest, node) {
            continue;
        }
        if is_layered(forest, node) {
            copies.add_layered(forest, bases, node, root, yard)?;
        }
        let copy = copies.get(forest, node)?;
        let what = || {
            let m = tree.mount(mount);
            format!("mount {} ({}) at {}", m.id, m.fs, m.mountpoint.display())
        };
        tracing::debug!("{}: put in place", what());
        match tree.parent(mount) {
            None => {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                move_mount(copy, "", CWD, "/", flags).context(what)?;
            }
            Some(parent) => {
                // The directories of an automatic mount count as places of others, even while nothing is there.
                let is_automatic = tree.mount(parent).ty.origin == Origin::Automatic;
                let parent = copies.get(forest, Node { space, mount: parent })?;
                let at = open_beneath(parent, tree.place(mount), is_automatic).context(what)?;
                place_at(copy, at.as_fd()).context(what)?;
            }
        }
    }
    change_root(copies.get(forest, root)?)
}

/// Makes the mount on top of the root the root, and puts the old one on top of it.
fn change_root(new: BorrowedFd<'_>) -> Result<OldRoot> {
    let old = open_root()?;
    rustix::process::fchdir(new).context(|| "enter the new root".to_owned())?;
    rustix::process::pivot_root(".", ".").context(|| "pivot_root".to_owned())?;
    Ok(OldRoot(old))
}

impl OldRoot {
    /// Takes it away, with all that is mounted below.
    pub(super) fn detach(self) -> Result<()> {
        let what = || "take away the old root".to_owned();
        // By its descriptor: its path leads to what is below it now.
        rustix::process::fchdir(&self.0).context(what)?;
        unmount(".", UnmountFlags::DETACH).context(what)?;
        rustix::process::chdir("/").context(what)
    }
}

/// Makes the peer groups. `fresh` has a copy of the base of each group that is not
/// made here.
pub(super) fn share(
    forest: &Forest,
    groups: &[Group],
    bases: &Bases,
    mut fresh: HashMap<usize, OwnedFd>,
    copies: &Copies,
) -> Result<()> {
    let mut made: HashMap<u32, OwnedFd> = HashMap::new();
    for (i, group) in groups.iter().enumerate() {
        let first = forest.mount(group.members[0]);
        let what = || format!("make the peer group of mount {}", first.id);
        let base = match fresh.remove(&i) {
            Some(copy) => copy,
            None => bases.fresh(group.base)?,
        };
        let change = |propagation| {
            let attributes =
                torpor_sys::mount::MountAttributes { propagation, ..Default::default() };
            torpor_sys::mount::set_attributes(base.as_fd(), false, attributes).context(what)
        };
        match group.master.map(|m| made.get(&m)) {
            // Joined with the host, as the base is.
            None if group.outside => {}
            None => change(libc::MS_PRIVATE)?,
            // A master outside: that of the base, if it has one.
            Some(None) => change(libc::MS_SLAVE)?,
            Some(Some(master)) => {
                change(libc::MS_PRIVATE)?;
                join(master.as_fd(), base.as_fd()).context(what)?;
                change(libc::MS_SLAVE)?;
            }
        }
        if group.id != 0 {
            change(libc::MS_SHARED)?;
        }
        for &member in &group.members {
            if is_late(forest, member) {
                continue;
            }
            match join(base.as_fd(), copies.get(forest, member)?) {
                // A slave of nobody: the host's mount is not shared.
                Err(rustix::io::Errno::INVAL) if group.id == 0 && is_outside(group, &made) => {
                    tracing::warn!(mount = first.id, "its master on the host is not shared");
                }
                other => other.context(what)?,
            }
        }
        if group.id != 0 {
            made.insert(group.id, base);
        }
    }
    Ok(())
}

fn is_outside(group: &Group, made: &HashMap<u32, OwnedFd>) -> bool {
    group.master.is_some_and(|m| !made.contains_key(&m))
}

/// Makes `mount` a member of the group of `of`.
fn join(of: BorrowedFd<'_>, mount: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_SET_GROUP
        | MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(of, "", mount, "", flags)
}

/// An error for a namespace that the images have, but the restore has not made.
pub(super) fn no_namespace(ns: u32) -> Error {
    Error::invalid("mountpoints", format!("there is no mount namespace {ns}"))
}
