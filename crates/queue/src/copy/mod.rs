//! Copies of trees of any depth: the own directories of jobs, their input and what they hand over.
//!
//! Others may change what is copied meanwhile, so it is walked by descriptors. Files that share their blocks, have holes
//! or several names, and what they have beside their content, are the same in the copy.
//!
//! A [`snapshot`] is taken by root of a job that is frozen. A file that has not changed since the snapshot before is
//! shared with it; each that is copied is written back, or a later change through a mapping might not give it another
//! time. Where that does not help nothing is shared. What is copied [for a user](for_user) is copied by a process that has
//! that user's rights, who must not get at other files through links, and may not give files all that they had.

mod links;
mod making;

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, chmodat, linkat, statfs};
use rustix::io::Errno;
use torpor_kernel::tree::{self, Entry, Id};

use crate::files;
use crate::marks::{self, Attributes, Marks};
use crate::walk::{Step, TreeTop, Walk, Way};
use links::HardLinks;
use making::{Making, Manner};

/// File systems on which a file may keep its time when it is written to through a mapping: tmpfs, ramfs, and overlayfs,
/// which has no pages of its own to write back, and may lie on them.
const SILENT: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x794c_7630];

/// Whether the times of files in a directory tell of all that is written to them.
fn tells_of_writes(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|kind| SILENT.iter().all(|&silent| i64::from(silent) != kind.f_type))
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Bytes of files.
    pub bytes: u64,
    /// Files that are whole.
    pub files: u64,
}

/// Copies a directory as it is, however deep it is. Regular files that are the same in `before` (a copy that
/// nobody writes to) become links to those there, where their times [say so](tells_of_writes).
///
/// # Errors
/// If a file cannot be read or copied (named in the error), or `to` is there already. Sockets, devices and what is
/// mounted there are left out.
pub(crate) fn snapshot(from: &Path, before: Option<&Path>, to: &Path) -> io::Result<()> {
    let walk = Walk::of(from).map_err(|errno| failed(from, &Way::default(), errno))?;
    let before = before.filter(|_| tells_of_writes(from));
    fs::DirBuilder::new().mode(0o700).create(to)?;
    let before = before.and_then(|before| TreeTop::at(before).ok());
    let root = TreeTop::at(to)?;
    let mut quiet = |_| Ok(());
    let making = Making::of(to, Manner::AsItIs, &mut quiet);
    // Nothing is left out of such a copy.
    Copy { from, walk, before, to: root, making }.all().map(drop)
}

/// Copies a directory, or something else, with the rights of this process. A directory that is there already gets what is
/// in the other one besides what it has; files that are there are replaced, each when its copy is whole. What was not there
/// is there when all of it is copied, or not at all; directories that it is to lie in are made. `copied` is told from time to time.
/// Returns a sentence about extended attributes that could not be read, which the copy is without.
///
/// # Errors
/// If a file cannot be read, copied or replaced (named in the error), is mounted there, or `copied` fails. A directory that
/// is there and is somebody else's keeps its mode and times, which is an error when all else is copied. Sockets and devices
/// are left out.
pub(crate) fn for_user(
    from: &Path,
    to: &Path,
    copied: &mut dyn FnMut(Copied) -> io::Result<()>,
) -> io::Result<Option<String>> {
    let random = torpor_seal::secret::random().map_err(io::Error::other)?;
    let beside = format!(".torpor-{:032x}", u128::from_le_bytes(random));
    let meta = fs::symlink_metadata(from).map_err(|e| named(from, &e))?;
    // Nothing is made for what is not there.
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).map_err(|e| named(dir, &e))?;
    }
    if !meta.is_dir() {
        return alone(from, to, &beside, copied);
    }
    let mut whole = |at: &Path| {
        let walk = Walk::of(from).map_err(|errno| failed(from, &Way::default(), errno))?;
        let root = TreeTop::at(at).map_err(|errno| named(to, &errno.into()))?;
        let making = Making::of(to, Manner::ForUser { beside: beside.clone() }, copied);
        Copy { from, walk, before: None, to: root, making }.all()
    };
    if fs::symlink_metadata(to).is_ok() {
        return whole(to);
    }
    let place = to.with_file_name(&beside);
    let made = fs::DirBuilder::new().mode(0o700).create(&place);
    let made = made.map_err(|e| named(to, &e)).and_then(|()| whole(&place));
    let put = |left_out| match fs::rename(&place, to) {
        Ok(()) => Ok(left_out),
        Err(e) => Err(named(to, &e)),
    };
    made.and_then(put).inspect_err(|_| {
        let _ = open_up(&place);
        let _ = files::remove_trees(&[&place]);
    })
}

/// Lets this user remove a copy whose directories may have their modes already, by which nothing can be removed from them.
fn open_up(place: &Path) -> io::Result<()> {
    fs::set_permissions(place, fs::Permissions::from_mode(0o700))?;
    let mut walk = Walk::of(place)?;
    while let Some(dir) = walk.next_dir()? {
        for entry in tree::list(&dir, Path::new(""))?.iter().filter(|entry| entry.meta.is_dir()) {
            chmodat(&dir, &entry.name, Mode::RWXU, AtFlags::empty())?;
            walk.descend(&entry.name);
        }
    }
    Ok(())
}

/// Copies what is no directory.
fn alone<'p>(
    from: &'p Path,
    to: &'p Path,
    beside: &str,
    copied: &mut dyn FnMut(Copied) -> io::Result<()>,
) -> io::Result<Option<String>> {
    let place = |path: &'p Path| match (path.parent(), path.file_name()) {
        (Some(dir), Some(name)) => Ok((dir, Path::new(name))),
        _ => Err(io::Error::other(format!("{} has no name", path.display()))),
    };
    let ((source, name), (target, own)) = (place(from)?, place(to)?);
    // These directories may be reached over links.
    let open = |dir: &Path| TreeTop::at(&dir.join("."));
    let mut top = open(source).map_err(|errno| named(from, &errno.into()))?;
    let mut root = open(target).map_err(|errno| named(to, &errno.into()))?;
    let way = Way::default();
    let (dir, at) = (top.dir(&way)?, root.dir(&way)?);
    let entry = tree::entry(&dir, name).map_err(|errno| named(from, &errno.into()))?;
    let kind = entry.meta.file_type();
    if !(kind.is_symlink() || kind.is_file() || kind.is_fifo()) {
        let text = format!("{}: sockets and devices are not copied", from.display());
        return Err(io::Error::other(text));
    }
    let mut making = Making::of(target, Manner::ForUser { beside: beside.to_owned() }, copied);
    let place = CopiedDir { from: source, way: &way, dir, before: None, to: at };
    place.entry(&entry, own, &root, &mut making)?;
    Ok(making.left_out.sentence())
}

/// A copy of a directory that is being made.
struct Copy<'c> {
    from: &'c Path,
    walk: Walk,
    before: Option<TreeTop>,
    to: TreeTop,
    making: Making<'c>,
}

/// A directory of it.
struct CopiedDir<'p> {
    from: &'p Path,
    way: &'p Way,
    dir: File,
    before: Option<File>,
    to: File,
}

impl Copy<'_> {
    /// Makes it; returns a sentence about what it is without.
    fn all(mut self) -> io::Result<Option<String>> {
        let own = tree::id(&self.to.dir(&Way::default())?.metadata()?);
        while let Some(step) = self.walk.step() {
            let dir = self.walk.dir();
            let way = self.walk.way();
            let dir = dir.map_err(|errno| failed(self.from, way, errno))?;
            if way.depth() == 0 && tree::id(&dir.metadata()?) == own {
                return Err(into_itself(self.from, way));
            }
            let to = self.to.dir(way).map_err(|errno| {
                let e = io::Error::from(errno);
                io::Error::new(e.kind(), format!("{}: {e}", way.shown(self.making.at)))
            })?;
            if step == Step::OutOf {
                self.making.dress_dir(&to, &dir, way)?;
                continue;
            }
            let before = self.before.as_mut().and_then(|top| top.dir(way).ok());
            let place = CopiedDir { from: self.from, way, dir, before, to };
            let below = place.copy(&self.to, own, &mut self.making)?;
            below.iter().for_each(|name| self.walk.descend(name));
        }
        self.making.undressed.map_or(Ok(self.making.left_out.sentence()), Err)
    }
}

impl CopiedDir<'_> {
    /// Copies what is in it; returns the directories among that, which are empty until it is their turn.
    fn copy(&self, root: &TreeTop, own: Id, making: &mut Making<'_>) -> io::Result<Vec<PathBuf>> {
        let mut below = Vec::new();
        let listed = tree::list_with_mounts(&self.dir, Path::new(""));
        let (listed, mounted) = listed.map_err(|errno| failed(self.from, self.way, errno))?;
        if let (Some(mounted), Manner::ForUser { .. }) = (mounted.first(), &making.manner) {
            let shown = self.way.to(mounted).shown(self.from);
            let text = format!("{shown}: what is mounted there is not copied");
            return Err(io::Error::other(text));
        }
        for entry in listed {
            if entry.meta.is_dir() && tree::id(&entry.meta) == own {
                return Err(into_itself(self.from, &self.way.to(&entry.name)));
            }
            if entry.meta.is_dir() {
                let made = making.put_dir(&self.to, &entry.name);
                made.map_err(|e| making.failed(self.way, &entry.name, &e))?;
                below.push(entry.name);
            } else {
                self.entry(&entry, &entry.name, root, making)?;
            }
        }
        Ok(below)
    }

    /// Copies something that is no directory, and has this name then.
    fn entry(
        &self,
        entry: &Entry,
        own: &Path,
        root: &TreeTop,
        making: &mut Making<'_>,
    ) -> io::Result<()> {
        let Entry { name, meta, link } = entry;
        let (to, is_for_user) = (&self.to, matches!(making.manner, Manner::ForUser { .. }));
        let made = if let Some(link) = link {
            making.put(to, own, |_, name| {
                marks::make_link(to, name, link)?;
                let given = marks::give_link(to, name, (meta.uid(), meta.gid()));
                if is_for_user { Ok(()) } else { given }
            })
        } else if meta.is_file() {
            if self.is_named_again(entry, own, root, making) {
                return Ok(());
            }
            let file = tree::file(&self.dir, name, tree::id(meta));
            let file = file.map_err(|errno| failed(self.from, &self.way.to(name), errno))?;
            let made = making.put(to, own, |making, name| {
                let copy = marks::make_file(to, name)?;
                making.fill(&file, &copy)?;
                making.dress(&copy, &file, || self.way.to(own).shown(Path::new(".")))
            });
            made.inspect(|()| making.names.note(self.way, own, meta))
        } else if meta.file_type().is_fifo() {
            making.put(to, own, |_, name| {
                let (pipe, marks) = (marks::make_fifo(to, name)?, Marks::of(meta));
                match is_for_user {
                    true => marks.give_what_may_be(&pipe, &Attributes::new()),
                    false => marks.give(&pipe, &Attributes::new()),
                }
            })
        } else if marks::is_whiteout(meta) && !is_for_user {
            marks::make_whiteout(to, own)
        } else {
            Ok(())
        };
        made.map_err(|e| making.failed(self.way, own, &e))
    }

    /// Makes a file one more name of the copy that it has already, or of the one in the copy before, if that is the same.
    fn is_named_again(
        &self,
        entry: &Entry,
        own: &Path,
        root: &TreeTop,
        making: &mut Making<'_>,
    ) -> bool {
        let meta = &entry.meta;
        if let Some((dir, first)) = making.names.known(meta)
            && let Ok(dir) = root.dir_at(&dir)
        {
            let named = making.put(&self.to, own, |_, name| {
                Ok(linkat(&dir, &first, &self.to, name, AtFlags::empty())?)
            });
            // Too many names, for example: then it has a copy of its own.
            if named.is_ok() {
                return true;
            }
        }
        let is_shared = self.is_shared(entry, &mut making.names);
        if is_shared {
            making.names.note(self.way, own, meta);
        }
        is_shared
    }

    /// Makes a file one more name of the one in the copy before, if that is the same.
    fn is_shared(&self, Entry { name, meta, .. }: &Entry, names: &mut HardLinks) -> bool {
        let Some(before) = &self.before else { return false };
        // A directory may have been a link then.
        let old = tree::open(before, name, OFlags::PATH).map(File::from);
        let Some(old) = old.ok().filter(|old| is_same(old, meta)) else { return false };
        // A capability, say, is given and taken without a trace in what was compared.
        let attributes = |dir: &File, meta: &Metadata| {
            marks::attributes(&tree::file(dir, name, tree::id(meta)).ok()?).ok()
        };
        let Ok(old_meta) = old.metadata() else { return false };
        let known = attributes(before, &old_meta);
        if known.is_none() || known != attributes(&self.dir, meta) {
            return false;
        }
        let (id, as_file) = (tree::id(&old_meta), tree::id(meta));
        if names.shared.get(&id).is_some_and(|&known| known != as_file) {
            return false;
        }
        let old = format!("/proc/self/fd/{}", old.as_raw_fd());
        let is_linked = linkat(CWD, old, &self.to, name, AtFlags::SYMLINK_FOLLOW).is_ok();
        if is_linked {
            names.shared.insert(id, as_file);
        }
        is_linked
    }
}

/// Says of what something is that the kernel says, of a directory that others of the job's user can change, too.
fn failed(from: &Path, way: &Way, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    let why = if tree::is_gone(errno) { ": somebody else has changed it meanwhile" } else { "" };
    io::Error::new(error.kind(), format!("{}: {error}{why}", way.shown(from)))
}

/// What would have a copy of itself in it, and so on until the disk is full.
fn into_itself(from: &Path, way: &Way) -> io::Error {
    io::Error::other(format!("{}: it is where this is copied to", way.shown(from)))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Whether a file of an earlier copy is what the file with `meta` is now, but for its attributes.
fn is_same(old: &File, meta: &Metadata) -> bool {
    let key = |meta: &Metadata| {
        (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.mode(), meta.uid(), meta.gid())
    };
    old.metadata().is_ok_and(|old| old.is_file() && key(&old) == key(meta))
}

#[cfg(test)]
mod tests;
