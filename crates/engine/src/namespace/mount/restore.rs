//! Makes mount namespaces from images.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use torpor_images::kind;
use torpor_images::proto::MntEntry;

use super::base::{Bases, base_of, unfit};
use super::build::{self, Copies, Yard, is_late, no_namespace};
use super::collect::own_tree;
use super::fs::{Origin, attributes};
use super::mountinfo::Mount;
use super::origin::{Forest, Node};
use super::restored::Late;
use super::sharing::{self, Base, Group};
use super::tree::Tree;
use super::{entry, superblock};
use crate::cgroup;
use crate::error::{Context, Error, Result};
use crate::namespace::{NsKind, run_in};
use crate::restore::{Restore, Transport};

/// Makes the mount namespaces: that of the root husk, a copy of the caller's until
/// now, and those of other tasks. Fills in what the restore knows of them.
///
/// # Errors
/// What is missing or contradictory; everything made goes with the husk.
pub fn restore(cx: &mut Restore<'_>) -> Result<()> {
    let forest = load(cx)?;
    host_roots(cx)?;
    if forest.spaces.is_empty() {
        return Ok(());
    }
    let groups = sharing::groups(&forest).map_err(|why| Error::invalid("mountpoints", why))?;
    let husk = Husk::open(cx)?;
    let host = own_tree()?;
    let mut bases = Bases::open(cx, &forest, &host)?;
    let mut copies = Copies::default();
    copies.make(&forest, &bases, false)?;
    let fresh = fresh(&groups, &bases)?;
    let mut yard = run_in(&[husk.space.as_fd()], || {
        let mut yard = Yard::new()?;
        bases.made().try_for_each(|made| yard.keep(made.as_fd()))?;
        copies.make(&forest, &bases, true)?;
        Ok(yard)
    })?;
    let mut roots = Vec::new();
    for space in 1..forest.spaces.len() {
        let file = husk.nested(cx)?;
        let root = run_in(&[file.as_fd()], || {
            build::assemble(&forest, space, &mut bases, &mut copies, &mut yard)?.detach()
        })?;
        roots.push((space, file, root));
    }
    let root = run_in(&[husk.space.as_fd()], || {
        let old = build::assemble(&forest, 0, &mut bases, &mut copies, &mut yard)?;
        build::share(&forest, &groups, &bases, fresh, &copies)?;
        old.detach()
    })?;
    copies.revived.clear();
    let space = husk.close(cx)?;
    roots.push((0, space, root));
    for (space, file, root) in roots {
        late(cx, &forest, space, &file, &copies)?;
        let ns = forest.spaces[space].0;
        let known = cx.ns.all.iter_mut().find(|n| n.id == ns && n.kind == NsKind::Mnt);
        known.ok_or_else(|| no_namespace(ns))?.file = Some(file);
        cx.roots.insert(ns, root);
    }
    hand_over(cx, &forest, &bases, copies);
    cx.mounts.wanted = forest.spaces.into_iter().collect();
    Ok(())
}

/// Moves the new husk of `task`, born from that of task `from`, into the mount
/// namespace that it lived in. At once, because children that share its directories
/// (`CLONE_FS`) bind it to where it is.
///
/// # Errors
/// The kernel's.
pub fn enter(cx: &mut Restore<'_>, task: usize, from: usize) -> Result<()> {
    let ns_of = |task: usize| cx.tasks[task].image.ids.mnt_ns_id.unwrap_or(0);
    let (ns, inherited) = (ns_of(task), ns_of(from));
    if ns == 0 || ns == inherited {
        return Ok(());
    }
    let file = cx.ns.by_id(ns).and_then(|ns| ns.file.as_ref()).ok_or_else(|| no_namespace(ns))?;
    let file = file.try_clone().context(|| "dup".to_owned())?;
    let husk = cx.remote(task)?;
    let transport = Transport::open(husk, 3)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[file.as_fd()])?;
    batch.must(libc::SYS_setns, [0, libc::CLONE_NEWNS as u64]);
    batch.call(libc::SYS_close, [0]);
    transport.close(&mut batch);
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| format!("enter mount namespace {ns}")),
        None => Ok(()),
    }
}

/// After all files have been restored: mounts that show terminals, and read-only
/// file systems.
///
/// # Errors
/// The kernel's.
pub fn finish(cx: &mut Restore<'_>) -> Result<()> {
    for late in std::mem::take(&mut cx.mounts.late) {
        late.mount()?;
    }
    for mount in std::mem::take(&mut cx.mounts.read_only) {
        superblock::make_read_only(mount.as_fd())?;
    }
    Ok(())
}

/// Reads the mounts of all namespaces that are part of the checkpoint.
fn load(cx: &Restore<'_>) -> Result<Forest> {
    let mut forest = Forest::default();
    let root = cx.tasks.first();
    let root = root.map(|root| (root.image.ids.cgroup_ns_id.unwrap_or(0), root.pid));
    let view = cgroup::View::of_root(&cx.ns, root)?;
    let decode = |entry: &MntEntry| {
        let mount = entry::decode(entry)?;
        Ok(Mount { root: view.from_within(&mount), ..mount })
    };
    for ns in cx.ns.of_kind(NsKind::Mnt).filter(|ns| !ns.is_host) {
        let entries: Vec<MntEntry> = cx.images.read_all(kind::MNTS, ns.id.into())?;
        let mounts: std::result::Result<Vec<_>, _> = entries.iter().map(decode).collect();
        let tree = mounts
            .and_then(Tree::new)
            .map_err(|why| Error::invalid(kind::MNTS.file_name(ns.id.into()), why))?;
        forest.spaces.push((ns.id, tree));
    }
    Ok(forest)
}

/// The root of tasks in the caller's own mount namespace.
fn host_roots(cx: &mut Restore<'_>) -> Result<()> {
    let path = cx.opts.root.clone().unwrap_or_else(|| "/".into());
    for ns in cx.ns.of_kind(NsKind::Mnt).filter(|ns| ns.is_host) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())
            .context(|| format!("open {}", path.display()))?;
        cx.roots.insert(ns.id, root);
    }
    Ok(())
}

/// For each group that is not made from a file system of ours a copy of its base:
/// only the caller's own namespace can copy those.
fn fresh(groups: &[Group], bases: &Bases) -> Result<HashMap<usize, OwnedFd>> {
    let given = groups
        .iter()
        .enumerate()
        .filter(|(_, group)| bases.get(group.base).is_some_and(|base| !base.made));
    given.map(|(i, group)| Ok((i, bases.fresh(group.base)?))).collect()
}

/// The root husk, as far as its mount namespaces go.
struct Husk {
    /// The namespace that it lives in.
    space: OwnedFd,
    /// The same, as a descriptor of the husk: its way back.
    way_back: u64,
}

impl Husk {
    fn open(cx: &mut Restore<'_>) -> Result<Self> {
        let husk = cx.remote(0)?;
        let pid = husk.pid();
        let mut batch = husk.batch();
        let path = batch.cstr("/proc/self/ns/mnt");
        let here = i64::from(libc::AT_FDCWD).cast_unsigned();
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
        let call = batch.call(libc::SYS_openat, [here, path.0, flags]);
        let way_back = batch.run()?.expect(call, || "open /proc/self/ns/mnt".to_owned())?;
        Ok(Husk { space: space_of(pid)?, way_back })
    }

    /// A new mount namespace, a copy of the husk's, owned by its user namespace.
    fn nested(&self, cx: &mut Restore<'_>) -> Result<OwnedFd> {
        let husk = cx.remote(0)?;
        let new = libc::CLONE_NEWNS as u64;
        husk.call("unshare(CLONE_NEWNS)", libc::SYS_unshare, [new])?;
        let space = space_of(husk.pid())?;
        husk.call("setns", libc::SYS_setns, [self.way_back, new])?;
        Ok(space)
    }

    /// Enters the namespace once more, which makes its root that of the husk.
    fn close(self, cx: &mut Restore<'_>) -> Result<OwnedFd> {
        let husk = cx.remote(0)?;
        husk.call("setns", libc::SYS_setns, [self.way_back, libc::CLONE_NEWNS as u64])?;
        husk.call("close", libc::SYS_close, [self.way_back])?;
        Ok(self.space)
    }
}

fn space_of(pid: i32) -> Result<OwnedFd> {
    let path = format!("/proc/{pid}/ns/mnt");
    File::open(&path).map(OwnedFd::from).context(|| format!("open {path}"))
}

/// Keeps for [`finish`] what shows terminals in namespace `space`.
fn late(
    cx: &mut Restore<'_>,
    forest: &Forest,
    space: usize,
    file: &OwnedFd,
    copies: &Copies,
) -> Result<()> {
    let tree = &forest.spaces[space].1;
    let dup = |fd: &OwnedFd| fd.try_clone().context(|| "dup".to_owned());
    for (index, mount) in tree.mounts().iter().enumerate() {
        if !is_late(forest, Node { space, mount: index }) {
            continue;
        }
        let on = |node: Option<Node>| {
            node.and_then(|node| copies.mounted.get(&node))
                .ok_or_else(|| unfit(mount, "its devpts or its place is not there"))
        };
        let parent = tree.parent(index).map(|mount| Node { space, mount });
        cx.mounts.late.push(Late {
            space: dup(file)?,
            devpts: dup(on(forest.whole(mount.dev))?)?,
            below: mount.root.clone(),
            parent: dup(on(parent)?)?,
            place: tree.place(index).to_owned(),
            attributes: torpor_sys::mount::Attributes {
                propagation: libc::MS_PRIVATE,
                ..attributes(mount.flags)
            },
        });
    }
    Ok(())
}

fn hand_over(cx: &mut Restore<'_>, forest: &Forest, bases: &Bases, mut copies: Copies) {
    for node in forest.nodes() {
        let mount = forest.mount(node);
        let id = mount.id.cast_signed();
        cx.mount_ns.insert(id, forest.spaces[node.space].0);
        if let Some(alone) = copies.alone.remove(&node) {
            cx.mounts.insert(id, mount.mountpoint.clone(), alone);
        }
        let read_only = mount.sb_flags & libc::MS_RDONLY != 0;
        let filled = mount.ty.origin == Origin::Filled && forest.whole(mount.dev) == Some(node);
        let base = base_of(forest, node).ok().map(|(base, _)| base);
        if read_only && filled && base == Some(Base::FileSystem(mount.dev)) {
            let made = bases.get(Base::FileSystem(mount.dev));
            cx.mounts.read_only.extend(made.and_then(|b| b.at.try_clone().ok()));
        }
    }
}
