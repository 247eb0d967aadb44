//! Makes mount namespaces from the mounts of a plan.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::assembly::Assembly;
use super::base::{Bases, base_of, unfit, unshare};
use super::build::{self, Copies, OldRoot, Yard, no_namespace, shows_terminal};
use super::collect::{open_root, own_tree};
use super::fs::{Origin, attributes};
use super::origin::{ContentSource, Forest, Node};
use super::restored::{Late, Restored};
use super::sharing::{self, Base, Group};
use super::{formats, groups, nested, superblock};
use crate::cgroup;
use crate::error::{Context, Error, Result};
use crate::namespace::{Namespaces, NsKind, nested_user, run_in, send_into};
use crate::restore::image::TaskImage;
use crate::restore::process;
use crate::restore::tasks::Task;

/// Makes the mount namespaces: that of the root husk, a copy of the caller's until
/// now, and those of other tasks. Fills in what the restore knows of them.
///
/// # Errors
/// What is missing or contradictory; everything made goes with the husk.
pub(crate) fn restore(cx: &mut Assembly<'_>) -> Result<()> {
    let mut forest = planned(cx)?;
    host_roots(cx)?;
    if forest.spaces.is_empty() {
        return Ok(());
    }
    let mut groups = sharing::groups(&forest).map_err(|why| Error::invalid("mountpoints", why))?;
    if let Some(node) = sharing::escaping(&forest) {
        return Err(unfit(forest.mount(node), sharing::ESCAPES));
    }
    groups.retain(|group| !group.members.iter().any(|&member| nested::waits(&forest, member)));
    // Without one the root husk lives among the caller's mounts, which nothing here may change.
    let roots_own = cx.root.image.homes.number(NsKind::Mnt);
    let has_own = Some(forest.spaces[0].0) == roots_own;
    let husk = Husk::open(cx, has_own)?;
    let host = own_tree()?;
    let mut bases = Bases::open(cx, &forest, &host)?;
    bases.keep_flags(&mut forest);
    let mut copies = Copies::default();
    copies.make(&forest, &bases, false)?;
    let fresh = fresh(&groups, &bases)?;
    let mut yard = run_in(&[husk.space.as_fd()], || {
        let mut yard = Yard::new()?;
        bases.made().try_for_each(|made| yard.keep(made.as_fd()))?;
        copies.make(&forest, &bases, true)?;
        Ok(yard)
    })?;
    let (mut others, mut staged) = (Vec::new(), HashMap::new());
    for space in usize::from(has_own)..forest.spaces.len() {
        let (file, process) = husk.nested(cx, forest.spaces[space].0)?;
        others.push((space, file));
        staged.extend(process.map(|process| (space, process)));
    }
    let mut roots = Vec::new();
    let old = run_in(&[husk.space.as_fd()], || {
        // First of all, since others show overlays whose layers are there.
        let old = match has_own {
            true => Some(build::assemble(&forest, 0, &mut bases, &mut copies, &mut yard)?),
            false => None,
        };
        for (space, file) in others {
            let root = run_in(&[file.as_fd()], || {
                build::assemble(&forest, space, &mut bases, &mut copies, &mut yard)?.detach()?;
                open_root()
            })?;
            roots.push((space, file, root));
        }
        Ok(old)
    })?;
    for (space, file, root) in &mut roots {
        if let Some(process) = staged.remove(space) {
            *file = lock(cx, forest.spaces[*space].0, process)?;
            *root = run_in(&[file.as_fd()], || copies.reopen(&forest, *space))?;
        }
    }
    run_in(&[husk.space.as_fd()], || {
        build::share(&forest, &groups, &bases, fresh, &copies)?;
        old.map_or(Ok(()), OldRoot::detach)
    })?;
    copies.revived.clear();
    let space = husk.close(cx)?;
    if has_own {
        let root = run_in(&[space.as_fd()], open_root)?;
        roots.push((0, space, root));
    }
    for (space, file, root) in roots {
        late(cx, &forest, space, &file, &copies)?;
        nested::keep(cx.mounts, &forest, space, &file, &copies)?;
        let ns = forest.spaces[space].0;
        let known = cx.spaces.all.iter_mut().find(|n| n.id == ns && n.kind == NsKind::Mnt);
        known.ok_or_else(|| no_namespace(ns))?.file = Some(file);
        cx.roots.by_ns.insert(ns, root);
    }
    formats::restore(cx, &forest, &bases)?;
    hand_over(cx, &forest, &bases, copies);
    cx.mounts.wanted = forest.wanted(|node| bases.of_host(&forest, node, &host));
    Ok(())
}

/// Moves the new husk of `task`, born from that of task `from`, into the mount
/// namespace that it lived in. At once, because children that share its directories
/// (`CLONE_FS`) bind it to where it is.
///
/// # Errors
/// If the husk is gone, or may not enter its mount namespace.
pub(crate) fn enter(task: &mut Task, spaces: &Namespaces, from: &TaskImage) -> Result<()> {
    let ns_of = |task: &TaskImage| task.homes.number(NsKind::Mnt).unwrap_or(0);
    let (ns, inherited) = (ns_of(&task.image), ns_of(from));
    if ns == 0 || ns == inherited {
        return Ok(());
    }
    let file = spaces.by_id(ns).and_then(|ns| ns.file.as_ref()).ok_or_else(|| no_namespace(ns))?;
    send_into(task.remote()?, NsKind::Mnt, file)
}

/// After all files have been restored: mounts that show terminals, and read-only
/// file systems.
///
/// # Errors
/// If a mount cannot be made, or not be made read-only.
pub(crate) fn finish(mounts: &mut Restored) -> Result<()> {
    for late in std::mem::take(&mut mounts.late) {
        late.mount()?;
    }
    for mount in std::mem::take(&mut mounts.read_only) {
        superblock::make_read_only(mount.as_fd())?;
    }
    Ok(())
}

/// The mounts of all namespaces that are part of the checkpoint, cgroups as the restoring program
/// sees them.
fn planned(cx: &mut Assembly<'_>) -> Result<Forest> {
    let mut forest = std::mem::take(cx.forest);
    for ns in cx.spaces.of_kind(NsKind::Mnt).filter(|ns| !ns.is_host) {
        if !forest.spaces.iter().any(|(number, _)| *number == ns.id) {
            return Err(no_namespace(ns.id));
        }
    }
    let root = (cx.root.image.homes.number(NsKind::Cgroup).unwrap_or(0), cx.root.pid);
    let view = cgroup::SeenRoots::of_root(cx.spaces, Some(root))?;
    for node in forest.nodes().collect::<Vec<_>>() {
        let mut shown = view.resolve(forest.mount(node));
        if forest.source(node) == Ok(ContentSource::FileSystem) {
            shown = groups::of_made(cx, forest.mount(node), shown)?;
        }
        forest.mount_mut(node).root = shown;
    }
    Ok(forest)
}

/// The root of tasks in the caller's own mount namespace.
fn host_roots(cx: &mut Assembly<'_>) -> Result<()> {
    let path = cx.wanted.root.clone().unwrap_or_else(|| "/".into());
    for ns in cx.spaces.of_kind(NsKind::Mnt).filter(|ns| ns.is_host) {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())
            .context(|| format!("open {}", path.display()))?;
        cx.roots.by_ns.insert(ns.id, root);
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
    /// The namespace that it works in: a copy of the caller's.
    space: OwnedFd,
    /// The same, as a descriptor of the husk: its way back.
    way_back: RemoteFd,
    /// That where it is to live, likewise.
    home: RemoteFd,
}

impl Husk {
    /// `has_own`: the root husk has a mount namespace of its own already, which it is to stay in.
    fn open(cx: &mut Assembly<'_>, has_own: bool) -> Result<Self> {
        let husk = cx.root.remote()?;
        let home = Self::open_current(husk)?;
        if has_own {
            return Ok(Husk { space: space_of(husk.pid())?, way_back: home, home });
        }
        unshare(husk)?;
        Ok(Husk { space: space_of(husk.pid())?, way_back: Self::open_current(husk)?, home })
    }

    fn open_current(husk: &mut Tracee) -> Result<RemoteFd> {
        let mut batch = husk.batch();
        let path = batch.cstr("/proc/self/ns/mnt");
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let call = batch.call(syscall::openat(RemoteFd::CWD, path, flags, Mode::empty()));
        let number = batch.run()?.expect(call, || "open /proc/self/ns/mnt".to_owned())?;
        Ok(RemoteFd(number))
    }

    /// Makes mount namespace `number`, a copy of the husk's, owned by its user namespace or by one
    /// below that. One that is to be locked belongs to the husk's until it is ([`lock`]), and a process lives there.
    fn nested(&self, cx: &mut Assembly<'_>, number: u32) -> Result<(OwnedFd, Option<Tracee>)> {
        let is_locked = cx.verdict.locks_mounts() && cx.spaces.owner_of(number).is_some();
        let husk = cx.root.remote()?;
        if is_locked {
            let mut process = process::start(husk, None)?;
            unshare(&mut process)?;
            return Ok((space_of(process.pid())?, Some(process)));
        }
        let space = owned(husk, cx.spaces, number)?;
        enter_space(husk, self.way_back)?;
        Ok((space, None))
    }

    /// Enters the namespace once more where it is to live, which makes its root that of the husk.
    fn close(self, cx: &mut Assembly<'_>) -> Result<OwnedFd> {
        let husk = cx.root.remote()?;
        enter_space(husk, self.home)?;
        husk.call("close", syscall::close(self.way_back))?;
        if self.home != self.way_back {
            husk.call("close", syscall::close(self.home))?;
        }
        Ok(self.space)
    }
}

/// Has the user namespace that mount namespace `number` is to belong to make it, as a copy of the one that `process` lives in, where
/// all is in place. In such a copy the kernel locks what is mounted, and how: who lives there cannot take away what
/// hides or protects something (mount_namespaces(7)).
fn lock(cx: &mut Assembly<'_>, number: u32, mut process: Tracee) -> Result<OwnedFd> {
    let space = owned(&mut process, cx.spaces, number)?;
    process::end(cx.root.remote()?, process)?;
    Ok(space)
}

/// A copy of the namespace that a husk is in, owned as mount namespace `number` is to be.
fn owned(husk: &mut Tracee, spaces: &Namespaces, number: u32) -> Result<OwnedFd> {
    nested_user::as_owner(husk, spaces, (None, number), |maker| {
        unshare(maker)?;
        space_of(maker.pid())
    })
}

fn enter_space(husk: &mut Tracee, space: RemoteFd) -> Result<()> {
    husk.call("setns", (libc::SYS_setns, [space.0, libc::CLONE_NEWNS as u64]))?;
    Ok(())
}

fn space_of(pid: i32) -> Result<OwnedFd> {
    let path = format!("/proc/{pid}/ns/mnt");
    File::open(&path).map(OwnedFd::from).context(|| format!("open {path}"))
}

/// Keeps for [`finish`] what shows terminals in namespace `space`.
fn late(
    cx: &mut Assembly<'_>,
    forest: &Forest,
    space: usize,
    file: &OwnedFd,
    copies: &Copies,
) -> Result<()> {
    let tree = &forest.spaces[space].1;
    let dup = |fd: &OwnedFd| fd.try_clone().context(|| "dup".to_owned());
    for (index, mount) in tree.mounts().iter().enumerate() {
        if !shows_terminal(forest, Node { space, mount: index }) {
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
            attributes: torpor_sys::mount::MountAttributes {
                propagation: libc::MS_PRIVATE,
                ..attributes(mount.flags)
            },
        });
    }
    Ok(())
}

fn hand_over(cx: &mut Assembly<'_>, forest: &Forest, bases: &Bases, mut copies: Copies) {
    for node in forest.nodes() {
        let mount = forest.mount(node);
        let id = mount.id.cast_signed();
        cx.roots.of_mount.insert(id, forest.spaces[node.space].0);
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
