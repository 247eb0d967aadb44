//! A procfs of a pid namespace below that of the root task, and namespaces that are kept as files
//! (`ip netns`, Docker). Only a task that lives in there can make the one, and the others are there
//! with their tasks: so both are mounted when these have been born, and so is what lies on them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use torpor_tracee::Tracee;

use super::base::unfit;
use super::build::{Copies, place_at};
use super::collect::{MountNamespace, clone, open_beneath};
use super::fs::{Origin, attributes};
use super::mountinfo::Mount;
use super::origin::{ContentSource, Forest, Node};
use super::restored::Restored;
use super::superblock;
use super::tree::Tree;
use crate::error::{Context, Result};
use crate::namespace::{Namespace, Namespaces, NsKind, run_in};
use crate::proc;
use crate::restore::process::live_in;
use crate::restore::tasks::Task;

/// Finds out which mounts show such a namespace. `host` are the caller's own mounts.
pub(super) fn mark(
    spaces: &mut [MountNamespace],
    host: &MountNamespace,
    namespaces: &Namespaces,
) -> Result<()> {
    let below: Vec<&Namespace> =
        namespaces.of_kind(NsKind::Pid).filter(|ns| ns.task != 0).collect();
    if below.is_empty() {
        return Ok(());
    }
    let mut known = HashMap::new();
    let dumped = spaces.iter().filter(|space| !space.is_host);
    for mount in dumped.flat_map(|space| space.tree.mounts()).filter(|mount| is_whole(mount)) {
        if let Entry::Vacant(entry) = known.entry(mount.dev) {
            let shown = shown_by(open_any(spaces, host, mount)?.as_fd());
            entry.insert(below.iter().find(|ns| Some(ns.inode) == shown).map(|ns| ns.id));
        }
    }
    for space in spaces {
        for index in 0..space.tree.mounts().len() {
            let mount = space.tree.mount_mut(index);
            mount.pid_ns = known.get(&mount.dev).copied().flatten();
        }
    }
    Ok(())
}

/// Finds out which namespaces of the tree are kept by mounts.
pub(super) fn mark_kept(spaces: &mut [MountNamespace], namespaces: &Namespaces) {
    for tree in spaces.iter_mut().map(|space| &mut space.tree) {
        for index in 0..tree.mounts().len() {
            let mount = tree.mount_mut(index);
            if mount.ty.origin == Origin::Namespace {
                mount.namespace = kept(namespaces, &mount.root);
            }
        }
    }
}

/// The namespace that goes by this name, `net:[4026531840]`. Those of other kinds than here are not what
/// they become when their tasks are born.
fn kept(namespaces: &Namespaces, name: &Path) -> Option<u32> {
    let (kind, inode) = name.to_str()?.strip_suffix(']')?.split_once(":[")?;
    let ns = namespaces.by_inode(inode.parse().ok()?)?;
    let is_there = matches!(ns.kind, NsKind::Net | NsKind::Uts | NsKind::Ipc);
    (is_there && ns.kind.name() == kind).then_some(ns.id)
}

/// Whether it shows all of a procfs.
fn is_whole(mount: &Mount) -> bool {
    mount.fs == "proc" && mount.root.as_os_str() == "/"
}

/// A procfs by any of the mounts that show all of it. What is copied into a namespace of a user
/// namespace is locked in place there (mount_namespaces(7)), so that nobody gets below it.
fn open_any(spaces: &[MountNamespace], host: &MountNamespace, wanted: &Mount) -> Result<OwnedFd> {
    let mut why = None;
    for space in spaces.iter().chain([host]) {
        for (index, mount) in space.tree.mounts().iter().enumerate() {
            if mount.dev != wanted.dev || !is_whole(mount) {
                continue;
            }
            match space.open_alone(index) {
                Ok(root) => return Ok(root),
                Err(error) => why = why.or(Some(error)),
            }
        }
    }
    Err(why.unwrap_or_else(|| unfit(wanted, "nothing shows it")))
}

/// The inode number of the pid namespace that a procfs shows: its process 1 lives in it.
fn shown_by(proc: BorrowedFd<'_>) -> Option<u64> {
    let link = rustix::fs::readlinkat(proc, "1/ns/pid", Vec::new()).ok()?;
    link.to_str().ok()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// What is there with the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// The procfs of this pid namespace.
    Procfs(u32),
    /// This namespace itself.
    Namespace(u32),
}

/// What a mount shows of that, if the restore makes it.
pub(super) fn shown(forest: &Forest, node: Node) -> Option<Shown> {
    let mount = forest.mount(node);
    let shown = mount.pid_ns.map(Shown::Procfs).or(mount.namespace.map(Shown::Namespace))?;
    (forest.source(node) == Ok(ContentSource::FileSystem)).then_some(shown)
}

/// Whether a mount is one of those, or lies on one.
pub(super) fn waits(forest: &Forest, node: Node) -> bool {
    let tree = &forest.spaces[node.space].1;
    let up = |mount: &usize| tree.parent(*mount);
    std::iter::successors(Some(node.mount), up)
        .any(|mount| shown(forest, Node { mount, ..node }).is_some())
}

/// Why a mount that waits cannot be restored, if so: nothing may be passed on to others when it is
/// put into place.
pub(super) fn obstacle(forest: &Forest, node: Node, host: &Tree) -> Option<&'static str> {
    if !waits(forest, node) {
        return None;
    }
    let parent = forest.spaces[node.space].1.parent(node.mount).map(|mount| Node { mount, ..node });
    let is_passed_on = |node: Node| {
        let Some(group) = forest.mount(node).shared else { return false };
        let takes = |mount: &Mount| [mount.shared, mount.master].contains(&Some(group));
        let others = forest.nodes().filter(|other| *other != node).any(|n| takes(forest.mount(n)));
        others || host.mounts().iter().any(takes)
    };
    let has_others = forest.mount(node).master.is_some() || is_passed_on(node);
    (has_others || parent.is_some_and(is_passed_on)).then_some(
        "it keeps a namespace, shows a nested pid namespace, or lies on a procfs that does, and what \
         is mounted there is passed on to other mounts; make it and the mount below it private, or start a program in \
         another network by `nsenter --net=/run/netns/NAME` in place of `ip netns exec`",
    )
}

/// A mount that waits for the tasks.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Its mount namespace.
    space: OwnedFd,
    /// It.
    mount: Mount,
    what: What,
    on: On,
    /// Its place on that.
    place: PathBuf,
}

#[derive(Debug)]
enum What {
    /// The procfs of a pid namespace, made as this mount says.
    Procfs(u32, Box<Mount>),
    Namespace(u32),
    /// A copy of what is there already.
    Copy(OwnedFd),
}

/// The mount that another one is mounted on.
#[derive(Debug)]
enum On {
    Placed(OwnedFd),
    /// The one with this number, which waits as well.
    Waiting(u32),
}

/// Keeps for [`make_nested`] what waits in mount namespace `space`.
pub(super) fn keep(
    mounts: &mut Restored,
    forest: &Forest,
    space: usize,
    file: &OwnedFd,
    copies: &Copies,
) -> Result<()> {
    let tree = &forest.spaces[space].1;
    let dup = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().context(|| "dup".to_owned());
    for mount in tree.top_down() {
        let node = Node { space, mount };
        let Some(parent) = tree.parent(mount).filter(|_| waits(forest, node)) else { continue };
        let parent = Node { space, mount: parent };
        let what = match shown(forest, node) {
            Some(Shown::Namespace(ns)) => What::Namespace(ns),
            Some(Shown::Procfs(ns)) => {
                let whole = forest.whole(tree.mount(mount).dev).unwrap_or(node);
                What::Procfs(ns, Box::new(forest.mount(whole).clone()))
            }
            None => What::Copy(dup(copies.get(forest, node)?)?),
        };
        let on = match waits(forest, parent) {
            true => On::Waiting(forest.mount(parent).id),
            false => On::Placed(dup(copies.get(forest, parent)?)?),
        };
        mounts.waiting.push(Waiting {
            space: dup(file.as_fd())?,
            mount: tree.mount(mount).clone(),
            what,
            on,
            place: tree.place(mount).to_owned(),
        });
    }
    Ok(())
}

/// What has been mounted so far.
#[derive(Debug, Default)]
struct MountedSoFar {
    /// By its number in the images.
    mounts: HashMap<u32, OwnedFd>,
    /// The first mount of each procfs, by mount namespace and device: before Linux 6.15 nobody but
    /// a task that lives there can copy what is mounted.
    first: HashMap<(u64, u32), u32>,
}

/// When the tasks have been born: mounts the procfs of pid namespaces below that of the root
/// task, and what lies on them; and the namespaces that mounts keep.
///
/// # Errors
/// If a namespace or the place of a mount is not there; if the kernel refuses to make a mount
/// (named in the error).
pub(crate) fn make_nested(
    mounts: &mut Restored,
    tasks: &mut [Task],
    namespaces: &Namespaces,
) -> Result<()> {
    let mut placed = MountedSoFar::default();
    let mut shared = Vec::new();
    for Waiting { space, mount, what, on, place } in std::mem::take(&mut mounts.waiting) {
        let is_copy = matches!(what, What::Copy(_));
        let (from, below) = match what {
            What::Copy(copy) => (copy, None),
            What::Namespace(ns) => {
                let ns = namespaces.by_id(ns);
                let ns = ns.ok_or_else(|| unfit(&mount, "its namespace is not there"))?;
                let file = proc::open(ns.pid, &format!("ns/{}", ns.kind.name()))?;
                (file.into(), Some(PathBuf::new()))
            }
            What::Procfs(ns, whole) => {
                let ns = namespaces.by_id(ns).filter(|ns| ns.kind == NsKind::Pid);
                let ns = ns.ok_or_else(|| unfit(&mount, "its pid namespace is not there"))?;
                placed.procfs(space.as_fd(), &mount, || match &ns.file {
                    // A task that lives there need not have the right.
                    Some(file) if namespaces.owner_of(ns.id).is_some() => {
                        let make = |husk: &mut Tracee| superblock::make_in(husk, &whole);
                        live_in(tasks[0].remote()?, file, make)
                    }
                    _ => superblock::make_in(tasks[ns.task].remote()?, &whole),
                })?
            }
        };
        let parent = match &on {
            On::Placed(parent) => Some(parent),
            On::Waiting(id) => placed.mounts.get(id),
        };
        let parent = parent.ok_or_else(|| unfit(&mount, "its place is not there"))?;
        let what =
            || format!("mount {} ({}) at {}", mount.id, mount.fs, mount.mountpoint.display());
        let (new, alone) = run_in(&[space.as_fd()], || {
            let new = match below {
                None => from,
                Some(below) => {
                    let at = open_beneath(from.as_fd(), &below, false).context(what)?;
                    clone(at.as_fd()).context(what)?
                }
            };
            let private = torpor_sys::mount::MountAttributes {
                propagation: libc::MS_PRIVATE,
                ..attributes(mount.flags)
            };
            let at = open_beneath(parent.as_fd(), &place, false).context(what)?;
            place_at(new.as_fd(), at.as_fd()).context(what)?;
            // Behind that: what lies on a shared mount is shared from then on.
            torpor_sys::mount::set_attributes(new.as_fd(), false, private).context(what)?;
            let alone = clone(new.as_fd()).context(what)?;
            Ok((new, alone))
        })?;
        // A copy of what was there has one already.
        if !is_copy {
            mounts.insert(mount.id.cast_signed(), mount.mountpoint.clone(), alone);
        }
        if mount.shared.is_some() {
            shared.push((space, mount.id));
        }
        placed.mounts.insert(mount.id, new);
    }
    for (space, id) in shared {
        let Some(mount) = placed.mounts.get(&id) else { continue };
        let attributes = torpor_sys::mount::MountAttributes {
            propagation: libc::MS_SHARED,
            ..Default::default()
        };
        run_in(&[space.as_fd()], || {
            torpor_sys::mount::set_attributes(mount.as_fd(), false, attributes)
                .context(|| format!("share mount {id}"))
        })?;
    }
    Ok(())
}

impl MountedSoFar {
    /// What a mount shows that is of a procfs: that itself, or what is to be copied, and which part
    /// of it.
    fn procfs(
        &mut self,
        space: BorrowedFd<'_>,
        mount: &Mount,
        make: impl FnOnce() -> Result<OwnedFd>,
    ) -> Result<(OwnedFd, Option<PathBuf>)> {
        let what = || format!("look at {}", mount.mountpoint.display());
        let key = (rustix::fs::fstat(space).context(what)?.st_ino, mount.dev);
        if let Some(first) = self.first.get(&key).and_then(|first| self.mounts.get(first)) {
            return Ok((first.try_clone().context(what)?, Some(mount.root.clone())));
        }
        if mount.root.as_os_str() == "/" {
            self.first.insert(key, mount.id);
            return Ok((make()?, None));
        }
        Ok((make()?, Some(mount.root.clone())))
    }
}
