//! Writes mount namespaces to images.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::fs::{FileType, fstat};
use torpor_images::proto::MntEntry;
use torpor_images::{ImageDir, Writer, kind};

use super::base::is_layered;
use super::collect::TreeMounts;
use super::fs::{Origin, join_options, split_options};
use super::mountinfo::{FromOutside, Mount};
use super::origin::{ContentSource, Forest, Node};
use super::{autofs, content, entry, external, formats, nested, overlay, sharing};
use crate::cgroup;
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::halt::Halt;
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind};
use crate::options::{self, Given};

/// The mounts of a dumped tree, and who sees them.
#[derive(Debug)]
pub(crate) struct Saving<'a> {
    /// Mounts that are left to the caller.
    pub given: &'a Given,
    /// Which mounts are kept, and how.
    pub wanted: &'a options::Mounts,
    /// Where the images go.
    pub images: &'a ImageDir,
    /// The mounts.
    pub mounts: &'a TreeMounts,
    /// The namespaces of the tree.
    pub spaces: &'a Namespaces,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// The tasks of the tree.
    pub tasks: &'a [Task],
}

impl Saving<'_> {
    /// Writes the mounts of all namespaces but the host's. Returns the file systems that exist in memory only, whose content is
    /// still to be written.
    ///
    /// # Errors
    /// A mount that cannot be kept, by name and reason.
    pub(crate) fn write(&self) -> Result<Vec<Unsaved>> {
        write(self)
    }
}

/// A file system that exists in memory only, and its archive, which has nothing yet.
#[derive(Debug)]
pub(crate) struct Unsaved {
    root: OwnedFd,
    archive: Writer,
    id_maps: IdMaps,
    at: PathBuf,
    is_shared: bool,
    is_stored: bool,
}

impl Unsaved {
    /// Writes its content.
    ///
    /// # Errors
    /// As [`content::save`].
    fn save(self, halt: &Halt) -> Result<()> {
        let Self { root, archive, id_maps, at, is_shared, is_stored } = self;
        let place = content::SavedFileSystem { at: &at, is_shared, is_stored };
        content::save(root.as_fd(), archive, &id_maps, place, halt)
    }
}

/// Saves files in memory in a thread of its own while `copy` copies pages, which go out meanwhile. The tasks stand still
/// until both are done, or one has failed: the other one ends early then.
///
/// # Errors
/// As [`Unsaved::save`]; those of `copy`. The first of them.
pub(crate) fn save_beside(
    files: Vec<Unsaved>,
    copy: impl FnOnce(&Halt) -> Result<()>,
) -> Result<()> {
    let halt = Halt::default();
    if files.is_empty() {
        return copy(&halt);
    }
    std::thread::scope(|scope| {
        let save = || files.into_iter().try_for_each(|files| files.save(&halt));
        let saving = scope.spawn(|| halt.note(save()));
        halt.note(copy(&halt));
        saving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    halt.finish()
}

fn write(cx: &Saving<'_>) -> Result<Vec<Unsaved>> {
    let inside = cx.mounts.spaces.iter().filter(|s| !s.is_host);
    let spaces = inside.map(|s| (s.ns, s.tree.without(&cx.wanted.skip))).collect();
    let mut forest = Forest { spaces, ..Forest::default() };
    external::mark(&mut forest, &cx.mounts.host, &cx.given.external, &cx.wanted.enable_fs);
    external::check_used(&forest, cx.given)?;
    name_layers(cx, &mut forest)?;
    for node in forest.nodes() {
        check(cx, &forest, node).map_err(|e| refusal(cx, &forest, node, e))?;
    }
    sharing::check(&mut forest, &cx.mounts.host, &cx.given.external)
        .and_then(|()| {
            let first = Node { space: 0, mount: 0 };
            sharing::groups(&forest).map(drop).map_err(|why| (first, why))
        })
        .map_err(|(node, why)| refusal(cx, &forest, node, Unfit::Reason(why)))?;
    let unsaved = save_contents(cx, &forest)?;
    // CRIU says of all groups that tasks in a cgroup namespace of their own see: from its root on.
    let root = cx.tasks.first().map(|root| (root.ids.cgroup_ns_id.unwrap_or(0), root.pid));
    let view = cgroup::SeenRoots::of_root(cx.spaces, root)?;
    for (ns, tree) in &forest.spaces {
        let order = tree.top_down();
        let entries: Vec<MntEntry> = order
            .iter()
            .map(|&i| {
                let mount = tree.mount(i);
                log_mount(*ns, mount);
                let options = own_ids(&mount.options, cx.id_maps);
                entry::encode(&Mount { options, root: view.within(mount), ..mount.clone() })
            })
            .collect();
        cx.images.write_all(kind::MNTS, u64::from(*ns), &entries)?;
    }
    Ok(unsaved)
}

/// Says what becomes of a mount.
fn log_mount(ns: u32, mount: &Mount) {
    let Mount { id, fs, mountpoint, .. } = mount;
    let at = mountpoint.display();
    tracing::debug!("mount namespace {ns}: mount {id} ({fs}) at {at}: {}", decision(mount));
}

fn decision(mount: &Mount) -> String {
    match &mount.external {
        None => "dumped".to_owned(),
        Some(FromOutside::Key(key)) => format!("left to the caller as {key}"),
        Some(FromOutside::Auto(path)) => format!("of the host, there at {}", path.display()),
        Some(FromOutside::Device(key)) => format!("on the caller's device {key}"),
    }
}

/// Gives overlay mounts absolute paths of their layers.
fn name_layers(cx: &Saving<'_>, forest: &mut Forest) -> Result<()> {
    for node in forest.nodes().filter(|&n| is_layered(forest, n)).collect::<Vec<_>>() {
        let whole = forest.whole(forest.mount(node).dev).unwrap_or(node);
        let (mount, ns) = (forest.mount(whole), forest.spaces[whole.space].0);
        let Some(space) = cx.mounts.spaces.iter().find(|s| s.ns == ns) else { continue };
        let inside = cx.tasks.iter().filter(|t| t.ids.mnt_ns_id == Some(ns));
        let bases: Vec<PathBuf> = inside
            .filter_map(|t| std::fs::read_link(format!("/proc/{}/cwd", t.pid)).ok())
            .collect();
        let merged = fstat(alone(cx, mount)?).context(|| format!("stat mount {}", mount.id))?;
        let own_users = cx.spaces.of_kind(NsKind::User).any(|ns| !ns.is_host);
        let named = if own_users {
            Err("an overlay in a user namespace cannot be made again".to_owned())
        } else {
            overlay::absolute(mount, &merged, space.root.as_fd(), &bases)
        };
        let options = named.map_err(|why| refusal(cx, forest, node, Unfit::Reason(why)))?;
        forest.mount_mut(node).options = options;
    }
    Ok(())
}

/// The options with user and group ids as the tasks call them: the kernel shows
/// those of the host, and takes those of the mounting task's user namespace.
pub(super) fn own_ids(options: &OsStr, maps: &IdMaps) -> OsString {
    let own = |option: &OsStr| {
        let number = |key: &str| {
            let id = option.as_bytes().strip_prefix(key.as_bytes())?;
            std::str::from_utf8(id).ok()?.parse::<u32>().ok()
        };
        let user = number("uid=").and_then(|id| Some(format!("uid={}", maps.uid_inside(id)?)));
        let group = number("gid=").and_then(|id| Some(format!("gid={}", maps.gid_inside(id)?)));
        user.or(group).map_or_else(|| option.to_owned(), OsString::from)
    };
    let options: Vec<OsString> = split_options(options).map(own).collect();
    join_options(options.iter().map(OsString::as_os_str))
}

/// Why a mount cannot be dumped.
enum Unfit {
    Reason(String),
    Failed(Error),
}

impl From<String> for Unfit {
    fn from(reason: String) -> Self {
        Unfit::Reason(reason)
    }
}

impl From<Error> for Unfit {
    fn from(error: Error) -> Self {
        Unfit::Failed(error)
    }
}

fn refusal(cx: &Saving<'_>, forest: &Forest, node: Node, unfit: Unfit) -> Error {
    let why = match unfit {
        Unfit::Failed(error) => return error,
        Unfit::Reason(why) => why,
    };
    let (ns, tree) = &forest.spaces[node.space];
    let mount = tree.mount(node.mount);
    let task = cx.mounts.spaces.iter().find(|s| s.ns == *ns).map_or(0, |s| s.task);
    let pid = cx.tasks.get(task).map_or(0, |t| t.pid);
    let object = format!("mount {} at {} ({})", mount.id, mount.mountpoint.display(), mount.fs);
    Error::refused(pid, object, why)
}

fn check(cx: &Saving<'_>, forest: &Forest, node: Node) -> std::result::Result<(), Unfit> {
    let mount = forest.mount(node);
    let source = forest.source(node)?;
    if let Some(option) = mount.unknown.first() {
        return Err(Unfit::Reason(format!("its option {option} cannot be restored")));
    }
    if let Some(why) = nested::obstacle(forest, node, &cx.mounts.host) {
        return Err(Unfit::Reason(why.to_owned()));
    }
    let is_made = source == ContentSource::FileSystem;
    if is_made && mount.ty.origin == Origin::Automatic && cx.spaces.own_user().is_some() {
        let why = "the kernel makes no automatic mounts in a user namespace; unmount it";
        return Err(Unfit::Reason(why.to_owned()));
    }
    if is_made && mount.ty.origin == Origin::Registered {
        let space = forest.spaces[node.space].0;
        if let Some(why) = formats::obstacle(mount, space, cx.spaces)? {
            return Err(Unfit::Reason(why.to_owned()));
        }
    }
    if mount.deleted && matches!(source, ContentSource::FileSystem | ContentSource::Part { .. }) {
        check_deleted(cx, mount)?;
    }
    Ok(())
}

/// An unlinked directory is empty, and so must an unlinked file be: only the mount
/// holds it, so that it is among nobody's open files.
fn check_deleted(cx: &Saving<'_>, mount: &Mount) -> std::result::Result<(), Unfit> {
    let stat = fstat(alone(cx, mount)?).context(|| format!("stat mount {}", mount.id))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        FileType::RegularFile if stat.st_size == 0 => Ok(()),
        _ => Err(Unfit::Reason(format!(
            "the mounted file {} was removed, and what it is cannot be kept; unmount it, or leave it \
             out with --skip-mnt {}",
            mount.root.display(),
            mount.mountpoint.display()
        ))),
    }
}

fn alone(cx: &Saving<'_>, mount: &Mount) -> Result<OwnedFd> {
    cx.mounts.open_alone(mount.id.cast_signed())
}

/// Writes the content of file systems that nobody else has, but for those that are packed: these are returned.
fn save_contents(cx: &Saving<'_>, forest: &Forest) -> Result<Vec<Unsaved>> {
    let (mut saved, mut unsaved) = (Vec::new(), Vec::new());
    for node in forest.nodes() {
        let mount = forest.mount(node);
        let has_content =
            matches!(mount.ty.origin, Origin::Filled | Origin::Registered | Origin::Automatic);
        if !has_content
            || saved.contains(&mount.dev)
            || forest.source(node) != Ok(ContentSource::FileSystem)
        {
            continue;
        }
        let Some(first) = forest.whole(mount.dev) else { continue };
        let whole = forest.mount(first);
        let root = readable(cx, forest, first)?;
        saved.push(mount.dev);
        if mount.ty.origin == Origin::Automatic {
            let entry = autofs::describe(cx.tasks, whole, root.as_fd())?
                .map_err(|why| refusal(cx, forest, first, Unfit::Reason(why)))?;
            cx.images.write_all(kind::AUTOFS, u64::from(mount.dev), &[entry])?;
            continue;
        }
        if mount.ty.origin == Origin::Registered {
            formats::save(root.as_fd(), cx.images)?;
            continue;
        }
        let archive = cx.images.writer(kind::TMPFS_DEV, u64::from(mount.dev))?;
        let is_shared = cx.mounts.host.mounts().iter().any(|other| other.dev == whole.dev);
        let (at, is_stored) = (whole.mountpoint.clone(), cx.wanted.stores_files);
        let id_maps = cx.id_maps.clone();
        unsaved.push(Unsaved { root, archive, id_maps, at, is_shared, is_stored });
    }
    Ok(unsaved)
}

/// Opens a mount whose content is to be saved.
fn readable(cx: &Saving<'_>, forest: &Forest, node: Node) -> Result<OwnedFd> {
    let mount = forest.mount(node);
    alone(cx, mount).map_err(|error| match &error {
        Error::Os { source, .. } if source.raw_os_error() == Some(libc::EINVAL) => {
            let reason = format!(
                "a user namespace has got it in a copy of the mounts above it, where the kernel locks \
                 them to each other, and so its content cannot be read; provide all mounts from outside \
                 with --external mnt[], or leave it out with --skip-mnt {}",
                mount.mountpoint.display()
            );
            refusal(cx, forest, node, Unfit::Reason(reason))
        }
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::{self, File};
    use std::io::Read;

    use super::*;

    /// A file system of more than a pipe holds, whose archive is one: it is complete only if somebody reads meanwhile.
    #[test]
    fn files_are_saved_while_pages_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("rows"), vec![b'7'; 1 << 20]).unwrap();
        let unsaved = || {
            let (reader, writer) =
                rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            let archive = Writer::new(kind::TMPFS_DEV, dir.path(), File::from(writer)).unwrap();
            let root = File::open(dir.path()).unwrap().into();
            let (at, id_maps) = (PathBuf::from("/dev/shm"), IdMaps::identity());
            let (is_shared, is_stored) = (false, true);
            let files = Unsaved { root, archive, id_maps, at, is_shared, is_stored };
            (File::from(reader), vec![files])
        };
        let (mut reader, files) = unsaved();
        let mut copied = Vec::new();
        save_beside(files, |_| {
            reader.read_to_end(&mut copied).unwrap();
            Ok(())
        })
        .unwrap();
        assert!(copied.len() > 1 << 20, "{}", copied.len());
        // If nobody takes the archive, whoever copies pages ends when it is between two of them.
        let (reader, files) = unsaved();
        drop(reader);
        let failed = save_beside(files, |halt| {
            while halt.check().is_ok() {
                std::thread::yield_now();
            }
            halt.check()
        });
        let error = failed.unwrap_err().to_string();
        let expected = "pack the files at /dev/shm: write the archive: Broken pipe";
        assert!(error.starts_with(expected), "{error}");
        let failed = save_beside(Vec::new(), |_| Err(Error::Gone { pid: 1 }));
        assert!(matches!(failed, Err(Error::Gone { pid: 1 })));
    }
}
