//! What restored mounts are copies of: paths that the caller gives, and file
//! systems that are made.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use torpor_tracee::Tracee;

use super::assembly::Assembly;
use super::collect::{clone, mount_id, open_beneath};
use super::fs::{NARROW, Origin, attributes, mount_flag_names, split_options};
use super::mountinfo::{FromOutside, Mount};
use super::origin::{ContentSource, Forest, Node};
use super::restored::{Filled, GivenFs};
use super::sharing::Base;
use super::tree::Tree;
use super::{autofs, formats, fuse, groups, nested, superblock, unpack};
use crate::error::{Context, Error, Result};
use crate::external;
use crate::namespace::nested_user;

/// A directory or file that mounts can be copies of.
#[derive(Debug)]
pub(super) struct Open {
    /// It (`O_PATH`).
    pub at: OwnedFd,
    /// Whether it was made here and is in no namespace yet; else it is the host's.
    pub made: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Bases {
    open: HashMap<Base, Open>,
    /// Flags of this host's mounts that take rights away, which all that shows something of them has as well.
    kept: HashMap<Base, u64>,
    /// New mounts of FUSE servers, by their names in the images.
    served: HashMap<String, OwnedFd>,
    /// Whether files may be made where the tasks cannot write.
    write_read_only: bool,
}

/// What a mount is a copy of, and its root below the root of that.
///
/// # Errors
/// As [`Forest::source`].
pub(super) fn base_of(forest: &Forest, node: Node) -> std::result::Result<(Base, PathBuf), String> {
    let mount = forest.mount(node);
    Ok(match forest.source(node)? {
        ContentSource::Root | ContentSource::External => (Base::Given(node), PathBuf::new()),
        ContentSource::Part { of, below } => (Base::Given(of), below),
        ContentSource::FileSystem => (Base::FileSystem(mount.dev), mount.root.clone()),
    })
}

impl Bases {
    /// Opens or makes what all mounts of the forest are copies of.
    ///
    /// # Errors
    /// If the source of a mount is not there, or its file system cannot be made: the mount is named.
    pub(super) fn open(cx: &mut Assembly<'_>, forest: &Forest, host: &Tree) -> Result<Self> {
        let write_read_only = cx.may_write_read_only();
        let mut all = Bases { write_read_only, ..Bases::default() };
        let is_made_here =
            |n: &Node| !is_layered(forest, *n) && nested::shown(forest, *n).is_none();
        for node in forest.nodes().filter(is_made_here) {
            let (base, _) = base_of(forest, node).map_err(|why| unfit(forest.mount(node), &why))?;
            if all.open.contains_key(&base) {
                continue;
            }
            let open = match base {
                Base::Given(of) => match all.served(cx, forest, of)? {
                    Some(at) => Open { at, made: true },
                    None => given(cx, forest, of, host)?,
                },
                Base::FileSystem(dev) => {
                    let whole = forest.whole(dev).unwrap_or(node);
                    make(cx, forest, whole, host)?
                }
            };
            if let Base::Given(of) = base {
                all.kept.insert(base, kept_flags(cx, forest, (of, open.at.as_fd()), host)?);
            }
            all.open.insert(base, open);
        }
        Ok(all)
    }

    /// Has nothing mounted with fewer restrictions than what it shows has on this host, where the caller has not said so.
    pub(super) fn keep_flags(&self, forest: &mut Forest) {
        for node in forest.nodes().collect::<Vec<_>>() {
            let base = base_of(forest, node).ok().map(|(base, _)| base);
            let kept = base.and_then(|base| self.kept.get(&base)).copied();
            forest.mount_mut(node).flags |= kept.unwrap_or_default();
        }
    }

    /// The new mount of a FUSE server that stands for one of the images, which is made when it is first asked for.
    fn served(
        &mut self,
        cx: &mut Assembly<'_>,
        forest: &Forest,
        node: Node,
    ) -> Result<Option<OwnedFd>> {
        let external = forest.mount(node).external.as_ref();
        let Some((name, new)) = fuse::given(&cx.given.fuse, external) else { return Ok(None) };
        let dup = |at: &OwnedFd| at.try_clone().map(Some).context(|| "dup".to_owned());
        if let Some(made) = self.served.get(name) {
            return dup(made);
        }
        let space = forest.spaces[node.space].0;
        // A file system is made by whoever has all rights over its own mount namespace.
        let enters = cx.spaces.owner_of(space).is_some();
        let husk = cx.root.remote()?;
        let made = nested_user::as_owner(husk, cx.spaces, (None, space), |maker| {
            if enters {
                unshare(maker)?;
            }
            new.make_in(maker)
        })?;
        let at = dup(&made);
        self.served.insert(name.to_owned(), made);
        at
    }

    /// Adds a file system that was made.
    pub(super) fn insert(&mut self, dev: u32, at: OwnedFd) {
        self.open.insert(Base::FileSystem(dev), Open { at, made: true });
    }

    /// A base.
    pub(super) fn get(&self, base: Base) -> Option<&Open> {
        self.open.get(&base)
    }

    /// What `node` shows of this host: the part of a mount in `host` that was opened for it. `None` if it
    /// is not given by a path, had been removed, or lies on no mount of that list.
    pub(super) fn of_host(&self, forest: &Forest, node: Node, host: &Tree) -> Option<GivenFs> {
        let (base, below) = base_of(forest, node).ok()?;
        let given = |open: &&Open| matches!(base, Base::Given(_)) && !open.made;
        let open = self.get(base).filter(given).filter(|_| !forest.mount(node).deleted);
        let at = &open?.at;
        let id = u32::try_from(mount_id(at.as_fd()).ok()?).ok()?;
        let on = host.mount(host.find(id)?);
        let path = std::fs::read_link(format!("/proc/self/fd/{}", at.as_raw_fd())).ok()?;
        let root = on.root.join(path.strip_prefix(&on.mountpoint).ok()?).join(below);
        Some(GivenFs { device: on.dev, root })
    }

    /// The file systems that were made here.
    pub(super) fn made(&self) -> impl Iterator<Item = &OwnedFd> {
        self.open.values().filter(|o| o.made).map(|o| &o.at)
    }

    /// A detached copy of the whole base, with the groups of the original.
    pub(super) fn fresh(&self, base: Base) -> Result<OwnedFd> {
        let open = self.get(base).ok_or_else(|| Error::invalid("mountpoints", "no such base"))?;
        clone(open.at.as_fd()).context(|| "copy a mount".to_owned())
    }

    /// Detached, private copies of what `node` shows.
    pub(super) fn copies(&self, forest: &Forest, node: Node) -> Result<Copy> {
        let mount = forest.mount(node);
        let what = || format!("copy {} for {}", mount.root.display(), mount.mountpoint.display());
        let (base, below) = base_of(forest, node).map_err(|why| unfit(mount, &why))?;
        let open = self.get(base).ok_or_else(|| unfit(mount, "it has no origin"))?;
        let is_deleted = mount.deleted && !matches!(base, Base::Given(n) if n == node);
        let revived = if is_deleted {
            Some(Revived::make(open.at.as_fd(), &below, self.is_directory(forest, node)?)?)
        } else {
            None
        };
        let below = revived.as_ref().map_or(below.as_path(), |r| r.path.as_path());
        let (at, _bare) = open_in(open.at.as_fd(), below).context(what)?;
        let copy = |attributes| -> Result<OwnedFd> {
            let copy = clone(at.as_fd()).context(what)?;
            torpor_sys::mount::set_attributes(copy.as_fd(), false, attributes).context(what)?;
            Ok(copy)
        };
        let unbindable = mount.flags & libc::MS_UNBINDABLE;
        let propagation = if unbindable == 0 { libc::MS_PRIVATE } else { unbindable };
        let mounted =
            copy(torpor_sys::mount::MountAttributes { propagation, ..attributes(mount.flags) })?;
        let bare = libc::MS_PRIVATE;
        // Nobody writes to this host's files where the tasks cannot.
        let kept = if open.made || self.write_read_only { 0 } else { libc::MS_RDONLY };
        let flags = attributes(mount.flags & kept);
        let alone = copy(torpor_sys::mount::MountAttributes { propagation: bare, ..flags })?;
        Ok(Copy { mounted, alone, revived })
    }

    /// Whether a mount shows a directory: as its place does.
    fn is_directory(&self, forest: &Forest, node: Node) -> Result<bool> {
        let tree = &forest.spaces[node.space].1;
        let Some(parent) = tree.parent(node.mount) else { return Ok(true) };
        let parent = Node { space: node.space, mount: parent };
        let mount = forest.mount(node);
        let (base, below) = base_of(forest, parent).map_err(|why| unfit(mount, &why))?;
        let open = self.get(base).ok_or_else(|| unfit(mount, "its place has no origin"))?;
        let path = below.join(tree.place(node.mount));
        let what = || format!("look at {}", mount.mountpoint.display());
        let (place, _bare) = open_in(open.at.as_fd(), &path).context(what)?;
        let stat = rustix::fs::fstat(place).context(what)?;
        Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    }
}

/// Opens what a base has itself at a path. Where something else is mounted there on this host
/// (`ip netns add` leaves /run/netns mounted upon itself) it is looked for in a copy of the base
/// alone, which has to stay as long as what was opened; before Linux 6.15 such a copy cannot be
/// copied again.
fn open_in(base: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<(OwnedFd, Option<OwnedFd>)> {
    match open_beneath(base, path, false) {
        Err(Errno::XDEV) => {
            let bare = clone(base)?;
            Ok((open_beneath(bare.as_fd(), path, false)?, Some(bare)))
        }
        opened => Ok((opened?, None)),
    }
}

/// Whether a mount shows a file system that can be made only when others are in
/// place.
pub(super) fn is_layered(forest: &Forest, node: Node) -> bool {
    let layered = forest.mount(node).ty.origin == Origin::Layered;
    layered && forest.source(node) == Ok(ContentSource::FileSystem)
}

/// An error about a mount of the images.
pub(super) fn unfit(mount: &Mount, why: &str) -> Error {
    let at = mount.mountpoint.display();
    Error::invalid("mountpoints", format!("mount {} at {at}: {why}", mount.id))
}

/// Gives a husk a mount namespace of its own.
///
/// # Errors
/// If the husk is gone, or may not have one.
pub(super) fn unshare(husk: &mut Tracee) -> Result<()> {
    husk.call("unshare(CLONE_NEWNS)", (libc::SYS_unshare, [libc::CLONE_NEWNS as u64]))?;
    Ok(())
}

/// What the caller gives for a mount.
fn given(cx: &Assembly<'_>, forest: &Forest, node: Node, host: &Tree) -> Result<Open> {
    let mount = forest.mount(node);
    if let Some(FromOutside::Device(name)) = &mount.external {
        let missing = || unfit(mount, &format!("its device is --external dev[{name}]:/dev/PATH"));
        let device = forest.given(node).ok_or_else(missing)?;
        return Ok(Open { at: superblock::on_device(mount, device)?, made: true });
    }
    let path = given_path(cx, forest, node)?;
    let what = || format!("open {} for {}", path.display(), mount.mountpoint.display());
    let at = match &mount.external {
        Some(FromOutside::Auto(_)) if !forest.is_root(node) => {
            let at = open_named(cx, &path).context(what)?;
            check_flags(cx, forest, node, (at.as_fd(), &path), host)?;
            at
        }
        _ => {
            rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).context(what)?
        }
    };
    let at = groups::of_given(cx, (at.as_fd(), &path), mount, host)?.unwrap_or(at);
    Ok(Open { at, made: false })
}

/// The flags that what is given for a mount keeps: it comes as this host has it, where the caller says nothing else.
fn kept_flags(
    cx: &Assembly<'_>,
    forest: &Forest,
    (node, at): (Node, BorrowedFd<'_>),
    host: &Tree,
) -> Result<u64> {
    let key = match &forest.mount(node).external {
        _ if forest.is_root(node) => None,
        Some(FromOutside::Key(key)) => Some(key.as_str()),
        _ => return Ok(0),
    };
    match cx.verdict.keeps_host_flags(key) {
        true => host_flags(at, &forest.mount(node).mountpoint, host),
        false => Ok(0),
    }
}

/// The flags that take rights away of the mount of this host that something lies on.
fn host_flags(at: BorrowedFd<'_>, name: &Path, host: &Tree) -> Result<u64> {
    let id = mount_id(at).context(|| format!("look at {}", name.display()))?;
    let on = u32::try_from(id).ok().and_then(|id| host.find(id)).map(|on| host.mount(on));
    Ok(on.map_or(0, |on| on.flags & NARROW))
}

/// Opens a path of this host that the images name: below the one that allows it, which the
/// caller or the policy names, and through no symbolic link. Whoever may write there could
/// otherwise lead elsewhere.
fn open_named(cx: &Assembly<'_>, path: &Path) -> rustix::io::Result<OwnedFd> {
    let (base, below) = cx.source_below(path);
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let base = rustix::fs::open(base, flags, Mode::empty())?;
    let at = open_beneath(base.as_fd(), &below, true)?;
    // The last name may be that of a link, which is opened itself then.
    match FileType::from_raw_mode(rustix::fs::fstat(&at)?.st_mode) {
        FileType::Symlink => Err(Errno::LOOP),
        _ => Ok(at),
    }
}

/// Makes sure that a part of this host does not come with more rights than the mount gives that it is on. The caller
/// says that of the sources that it names, and not of what is mounted below them.
fn check_flags(
    cx: &Assembly<'_>,
    forest: &Forest,
    node: Node,
    (at, path): (BorrowedFd<'_>, &Path),
    host: &Tree,
) -> Result<()> {
    let mount = forest.mount(node);
    let lost = host_flags(at, path, host)? & !mount.flags;
    if lost == 0 {
        return Ok(());
    }
    let space = forest.spaces[node.space].0;
    let lost: Vec<&str> = mount_flag_names(lost).collect();
    cx.verdict.check_source(cx.policy, (space, &mount.mountpoint), (path, &lost.join(", ")))
}

fn given_path(cx: &Assembly<'_>, forest: &Forest, node: Node) -> Result<PathBuf> {
    let mount = forest.mount(node);
    if forest.is_root(node) {
        return Ok(cx.wanted.root.clone().unwrap_or_else(|| PathBuf::from("/")));
    }
    match &mount.external {
        Some(FromOutside::Key(name)) => {
            let missing = || unfit(mount, &format!("its source is --external mnt[{name}]:PATH"));
            forest.given(node).map(PathBuf::from).ok_or_else(missing)
        }
        Some(FromOutside::Auto(path)) => {
            let asked = |e: &external::External| matches!(e, external::External::MntAuto { .. });
            let own = mount.fs == "devpts" && path.starts_with("/dev/pts");
            if !own && !cx.given.external.iter().any(asked) {
                let why =
                    format!("{} of the host is not given; use --external mnt[]", path.display());
                return Err(unfit(mount, &why));
            }
            Ok(path.clone())
        }
        Some(FromOutside::Device(_)) | None => Err(unfit(mount, "it is not from outside")),
    }
}

/// Makes a file system, or finds the one that the host has.
fn make(cx: &mut Assembly<'_>, forest: &Forest, whole: Node, host: &Tree) -> Result<Open> {
    let mount = forest.mount(whole);
    match mount.ty.origin {
        Origin::New => {
            let at = superblock::make_in(cx.root.remote()?, mount)?;
            Ok(Open { at, made: true })
        }
        Origin::Registered if formats::are_own(cx) => {
            let at = superblock::make_in(cx.root.remote()?, mount)?;
            Ok(Open { at, made: true })
        }
        Origin::Automatic => {
            let (at, waiting) = autofs::make(cx.root.remote()?, mount)?;
            cx.mounts.automatic.extend(waiting);
            Ok(Open { at, made: true })
        }
        Origin::Registered => Err(unfit(
            mount,
            "its formats would be those of a user namespace that is not the tasks'",
        )),
        Origin::Filled => {
            let at = superblock::make_in(cx.root.remote()?, mount)?;
            let archive = cx.bulk.archive(mount.dev)?;
            let archive = archive.ok_or_else(|| unfit(mount, "its content is missing"))?;
            let name = torpor_images::kind::TMPFS_DEV.file_name(mount.dev.into());
            let (root, maps, judged) = (at.as_fd(), cx.id_maps, forest.judged_of(&name));
            let target = unpack::UnpackInto { root, name: &name, maps, judged };
            let mut contents = unpack::Contents::new();
            unpack::unpack(target, archive, |entry| {
                if cx.staged {
                    contents.insert(entry.path.clone(), entry);
                }
            })?;
            if cx.staged {
                let root = at.try_clone().context(|| "dup".to_owned())?;
                cx.mounts.filled.insert(mount.dev, Filled { root, contents });
            }
            Ok(Open { at, made: true })
        }
        // To make it again would change the options that the host has given it.
        Origin::Kernel => match on_host(mount, host) {
            Some(path) => {
                let what = || format!("open {} for {}", path.display(), mount.mountpoint.display());
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let at = rustix::fs::open(path, flags, Mode::empty()).context(what)?;
                Ok(Open { at, made: false })
            }
            None if mount.fs == "cgroup" && cx.verdict.shows_own_groups(None) => {
                Err(unfit(mount, "this host has no such hierarchy of groups"))
            }
            None => Ok(Open { at: superblock::make_here(mount)?, made: true }),
        },
        Origin::Layered | Origin::Namespace | Origin::None => {
            Err(unfit(mount, "its file system cannot be made"))
        }
    }
}

/// Where the host has the same file system of the kernel's mounted as a whole.
fn on_host<'h>(mount: &Mount, host: &'h Tree) -> Option<&'h Path> {
    let hierarchy = |m: &Mount| {
        let mut words: Vec<_> = split_options(&m.options).map(|o| o.to_owned()).collect();
        words.retain(|w| w != "xattr" && w != "none" && w != "noprefix" && w != "clone_children");
        words.sort();
        words
    };
    let candidates = host.mounts().iter().enumerate().filter(|(i, h)| {
        h.fs == mount.fs
            && h.root == Path::new("/")
            && (mount.fs != "cgroup" || hierarchy(h) == hierarchy(mount))
            && host.is_visible(*i, &h.mountpoint)
    });
    candidates.map(|(_, h)| h.mountpoint.as_path()).next()
}

/// Detached copies of a mount.
#[derive(Debug)]
pub(super) struct Copy {
    /// With its flags, to be mounted.
    pub mounted: OwnedFd,
    /// Writable, for other parts of the restore.
    pub alone: OwnedFd,
    /// What it shows, if that had been removed. The kernel mounts nothing removed.
    pub revived: Option<Revived>,
}

/// A file or directory that had been removed, and exists again until this is
/// dropped.
#[derive(Debug)]
pub(super) struct Revived {
    parent: OwnedFd,
    name: std::ffi::OsString,
    path: PathBuf,
    directory: bool,
}

impl Revived {
    fn make(base: BorrowedFd<'_>, path: &Path, directory: bool) -> Result<Self> {
        let what = || format!("make the removed {} again", path.display());
        let (parent, name) = (path.parent().unwrap_or(Path::new("")), path.file_name());
        let mut name = name.ok_or(Errno::INVAL).context(what)?.to_owned();
        let dir = open_beneath(base, parent, false).context(what)?;
        // Something else may have taken the name.
        for round in 0.. {
            let made = if directory {
                rustix::fs::mkdirat(&dir, &name, Mode::from_raw_mode(0o755))
            } else {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                rustix::fs::openat(&dir, &name, flags, Mode::from_raw_mode(0o644)).map(drop)
            };
            match made {
                Err(Errno::EXIST) if round < 1000 => name.push("~"),
                other => {
                    other.context(what)?;
                    break;
                }
            }
        }
        let path = parent.join(&name);
        Ok(Revived { parent: dir, name, path, directory })
    }
}

impl Drop for Revived {
    fn drop(&mut self) {
        let flags = if self.directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        if let Err(error) = rustix::fs::unlinkat(&self.parent, &self.name, flags) {
            tracing::warn!(name = %self.name.display(), %error, "cannot be removed again");
        }
    }
}
