//! Files whose path does not lead to them: what `remap-fpath.img` says about them.
//!
//! An unlinked file becomes a *ghost*: its content is in the images, and while the
//! restore opens it, it has its old name again. A file that has lost this name but
//! has others gets a further one from the dump (`--link-remap`), which the restore
//! uses and removes.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use torpor_images::kind;
use torpor_images::proto::{FdTypes, FileEntry, RegFileEntry, RemapFilePathEntry, RemapType};

use super::Found;
use super::description::open_flags;
use super::description::{lookup, open_in, same_inode};
use super::ghost;
use crate::dump::Dump;
use crate::error::{Context, Error, Result};
use crate::guardian::{Guardian, Undo};
use crate::restore::{Restore, with_process};

/// What procfs's links end with when the name is gone.
pub const DELETED: &[u8] = b" (deleted)";

/// The dump half.
#[derive(Debug, Default)]
pub struct Remaps {
    entries: Vec<RemapFilePathEntry>,
    ghosts: HashMap<(u64, u64), u32>,
    links: HashMap<(u64, u64), u32>,
    /// Names that were given to files, removed again unless [`Remaps::keep`] is called.
    given: Vec<(OwnedFd, String)>,
}

impl Remaps {
    /// The path of a file as the images have it. One that does not lead to it any
    /// more is noted for the description `id`.
    ///
    /// # Errors
    /// Refused, if there is no such path and none can be made.
    pub fn name(cx: &mut Dump<'_>, found: &Found, id: u32) -> Result<Vec<u8>> {
        let link = found.link_bytes();
        if found.fs_type == PROC {
            return Self::name_in_proc(cx, found, id);
        }
        let Some((space, _)) = cx.mounts.find(found.info.mnt_id) else {
            return Err(found.refuse(format!(
                "it was opened through mount {0} outside of the tree's mount namespaces; \
                 --external file[{0:x}:{1:x}] leaves it to the caller",
                found.info.mnt_id, found.stat.st_ino
            )));
        };
        if lookup(space.root.as_fd(), link)?.is_some_and(|now| same_inode(&now, &found.stat)) {
            return Ok(link.to_vec());
        }
        let Some(name) = link.strip_suffix(DELETED) else {
            return Err(found.refuse("its path leads elsewhere: a later mount hides it"));
        };
        let is_dir = FileType::from_raw_mode(found.stat.st_mode) == FileType::Directory;
        if found.stat.st_nlink == 0 || is_dir {
            Self::note_ghost(cx, found, id)?;
        } else {
            Self::note_link(cx, found, id, name)?;
        }
        Ok(name.to_vec())
    }

    /// The path of a file of procfs. Its inodes come and go, so the path is all there
    /// is. It may be that of a process that has ended.
    fn name_in_proc(cx: &mut Dump<'_>, found: &Found, id: u32) -> Result<Vec<u8>> {
        let Some((space, mount)) = cx.mounts.find(found.info.mnt_id) else {
            return Err(found.refuse("it was opened through a procfs outside of the tree"));
        };
        let link = found.link_bytes();
        if lookup(space.root.as_fd(), link)?.is_some() {
            return Ok(link.to_vec());
        }
        let name = link.strip_suffix(DELETED).unwrap_or(link);
        let inside = Path::new(OsStr::from_bytes(name)).strip_prefix(&mount.mountpoint).ok();
        let pid = inside
            .and_then(|path| path.iter().next()?.to_str()?.parse().ok())
            .ok_or_else(|| found.refuse("it is gone, and only the kernel could make it again"))?;
        cx.files.remaps.note(id, pid, RemapType::Procfs);
        Ok(name.to_vec())
    }

    fn note_ghost(cx: &mut Dump<'_>, found: &Found, id: u32) -> Result<()> {
        if is_made_by_kernel(found.fs_type) {
            return Err(found.refuse("it is gone, and only the kernel could make it again"));
        }
        let key = (found.stat.st_dev, found.stat.st_ino);
        let ghost = match cx.files.remaps.ghosts.get(&key) {
            Some(&known) => known,
            None => {
                let ghost = u32::try_from(cx.files.remaps.ghosts.len() + 1).unwrap_or(u32::MAX);
                ghost::save(cx, found, ghost)?;
                cx.files.remaps.ghosts.insert(key, ghost);
                ghost
            }
        };
        cx.files.remaps.note(id, ghost, RemapType::Ghost);
        Ok(())
    }

    /// Gives the file a further name, and notes a description of that.
    fn note_link(cx: &mut Dump<'_>, found: &Found, id: u32, name: &[u8]) -> Result<()> {
        if !cx.opts.link_remap {
            return Err(found.refuse(
                "its name was removed while others lead to it; --link-remap gives it one",
            ));
        }
        if cx.opts.leave_running {
            let path = String::from_utf8_lossy(name);
            tracing::warn!("{path} cannot be restored: its task goes on, and it gets no name");
        }
        let key = (found.stat.st_dev, found.stat.st_ino);
        let link = match cx.files.remaps.links.get(&key) {
            Some(&known) => known,
            None => {
                let link = cx.files.next_id();
                let path = Self::give_name(cx, found, name, link)?;
                let reg = RegFileEntry {
                    id: link,
                    name: path,
                    mnt_id: cx.mounts.number_in_images(found.info.mnt_id),
                    mode: Some(found.stat.st_mode),
                    fown: found.fown,
                    ..RegFileEntry::default()
                };
                cx.files.push(FileEntry {
                    id: link,
                    r#type: FdTypes::Reg.into(),
                    reg: Some(reg),
                    ..FileEntry::default()
                });
                cx.files.remaps.links.insert(key, link);
                link
            }
        };
        cx.files.remaps.note(id, link, RemapType::Linked);
        Ok(())
    }

    /// Links the file into its old directory, or the nearest one above that exists.
    fn give_name(cx: &mut Dump<'_>, found: &Found, name: &[u8], link: u32) -> Result<Vec<u8>> {
        let base = format!("link_remap.{link}");
        // A file system of a user namespace takes only files of its own users.
        let _owner = cx.id_maps.own_files().context(|| "become the owner of files".to_owned())?;
        let mut dir = parent(name);
        loop {
            let (space, _) = cx
                .mounts
                .find(found.info.mnt_id)
                .ok_or_else(|| found.refuse("its mount is gone"))?;
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let nameless = |e| found.refuse(format!("it cannot be given a name: {e}"));
            let at = match open_in(space.root.as_fd(), dir, flags, Mode::empty()) {
                Err(Errno::NOENT) if dir.len() > 1 => {
                    dir = parent(dir);
                    continue;
                }
                opened => opened.map_err(nameless)?,
            };
            cx.guardian.watch_file(&undo(&at, &base)?, at.as_fd())?;
            match rustix::fs::linkat(&found.file, "", &at, &base, AtFlags::EMPTY_PATH) {
                Ok(()) => {
                    cx.files.remaps.given.push((at, base.clone()));
                    return Ok(join(dir, base.as_bytes()));
                }
                // A directory that was removed while it was open.
                Err(Errno::NOENT) if dir.len() > 1 => dir = parent(dir),
                Err(e) => return Err(nameless(e)),
            }
        }
    }

    fn note(&mut self, orig_id: u32, remap_id: u32, kind: RemapType) {
        self.entries.push(RemapFilePathEntry { orig_id, remap_id, remap_type: Some(kind.into()) });
    }

    /// Leaves the names that were given to files: the tasks end, and only through
    /// these names can a restore find the files.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn keep(&mut self, guardian: &mut Guardian) -> Result<()> {
        self.given.drain(..).try_for_each(|(dir, name)| guardian.forget(&undo(&dir, &name)?))
    }

    /// Writes the image.
    ///
    /// # Errors
    /// The image file's.
    pub fn write(cx: &Dump<'_>) -> Result<()> {
        Ok(cx.images.write_unless_empty(kind::REMAP_FPATH, 0, &cx.files.remaps.entries)?)
    }
}

impl Drop for Remaps {
    fn drop(&mut self) {
        for (dir, name) in self.given.drain(..) {
            remove(dir.as_fd(), name.as_bytes(), AtFlags::empty());
        }
    }
}

/// What removes a name if the supervisor is killed.
fn undo(dir: &OwnedFd, name: &str) -> Result<Undo> {
    let stat = rustix::fs::fstat(dir).context(|| "fstat of a directory".to_owned())?;
    Ok(Undo::Unlink(stat.st_ino, name.to_owned()))
}

/// `PROC_SUPER_MAGIC` of linux/magic.h.
const PROC: i64 = 0x9fa0;

/// File systems whose files are views of kernel objects.
fn is_made_by_kernel(fs_type: i64) -> bool {
    /// sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs (linux/magic.h).
    const KERNEL: [i64; 6] =
        [0x6265_6572, 0x27_e0eb, 0x6367_7270, 0x6462_6720, 0x7472_6163, 0x7363_6673];
    KERNEL.contains(&fs_type)
}

/// The path up to its last component: `/` for those in the root directory.
pub fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|&c| c == b'/') {
        Some(0) | None => b"/",
        Some(at) => &path[..at],
    }
}

/// The last component of a path.
pub fn base(path: &[u8]) -> &[u8] {
    path.iter().rposition(|&c| c == b'/').map_or(path, |at| &path[at + 1..])
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let dir = dir.strip_suffix(b"/").unwrap_or(dir);
    [dir, b"/", name].concat()
}

fn remove(dir: BorrowedFd<'_>, name: &[u8], flags: AtFlags) {
    if let Err(e) = rustix::fs::unlinkat(dir, name, flags) {
        tracing::warn!("{} is left over: {e}", String::from_utf8_lossy(name));
    }
}

/// The restore half: the files that have a name only for the time being. Dropping it
/// removes those names.
#[derive(Debug, Default)]
pub struct Temporary {
    remaps: HashMap<u32, (RemapType, u32)>,
    /// The ghosts that were made.
    ghosts: HashMap<u32, Held>,
    /// Those whose mode waits until they have lost their names.
    late: Vec<(OwnedFd, Mode)>,
    /// What was made, in this order.
    made: Vec<(Name, AtFlags)>,
    /// Directories among them that were made for something in them only.
    parents: HashSet<Vec<u8>>,
    /// Names that the dump gave, to be removed once the restore has succeeded.
    given: Vec<Name>,
    /// How often something had to step aside.
    asides: u32,
    /// A process that is there for the moment, for what lies below its directory.
    alive: Option<u32>,
}

/// A name in a directory.
#[derive(Debug)]
struct Name {
    dir: OwnedFd,
    name: Vec<u8>,
}

impl Name {
    /// That of a file of the images.
    fn of(cx: &mut Restore<'_>, reg: &RegFileEntry) -> Result<Self> {
        let dir = open_dir(cx, reg.mnt_id.unwrap_or(-1), parent(&reg.name))?;
        Ok(Name { dir, name: base(&reg.name).to_vec() })
    }

    fn try_clone(&self) -> Result<Self> {
        let dir = self.dir.try_clone().context(|| "dup".to_owned())?;
        Ok(Name { dir, name: self.name.clone() })
    }
}

/// A file that goes by a name for the time being, and a descriptor of it (`O_PATH`): others may
/// put something else there at any moment.
#[derive(Debug)]
struct Held {
    name: Name,
    file: OwnedFd,
}

impl Held {
    fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().context(|| "dup".to_owned())?;
        Ok(Held { name: self.name.try_clone()?, file })
    }

    fn is_dir(&self) -> bool {
        rustix::fs::fstat(&self.file)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    }

    /// Makes sure that `opened` is the file.
    fn check(&self, opened: OwnedFd) -> Result<OwnedFd> {
        let stat = |file: &OwnedFd| rustix::fs::fstat(file).context(|| "fstat".to_owned());
        match same_inode(&stat(&self.file)?, &stat(&opened)?) {
            true => Ok(opened),
            false => {
                let name = String::from_utf8_lossy(&self.name.name);
                let why = format!("somebody has put something else in the place of {name}");
                Err(Error::invalid("remap-fpath.img", why))
            }
        }
    }
}

impl Temporary {
    /// Whether a file is a ghost.
    #[must_use]
    pub fn is_ghost(&self, file: u32) -> bool {
        matches!(self.remaps.get(&file), Some((RemapType::Ghost, _)))
    }

    /// Reads `remap-fpath.img`.
    ///
    /// # Errors
    /// The image file's.
    pub fn load(cx: &mut Restore<'_>) -> Result<()> {
        for entry in cx.images.read_all_or_empty::<RemapFilePathEntry>(kind::REMAP_FPATH, 0)? {
            let ghost = entry.remap_id & !OLD_GHOST;
            let known = match entry.remap_type {
                None if entry.remap_id & OLD_GHOST != 0 => (RemapType::Ghost, ghost),
                _ => (entry.remap_type(), entry.remap_id),
            };
            cx.files.temporary.remaps.insert(entry.orig_id, known);
        }
        Ok(())
    }

    /// Whether the path of the file `id` of the images does not lead to it.
    pub fn is_remapped(&self, id: u32) -> bool {
        self.remaps.contains_key(&id)
    }

    /// A file of the images whose ghost had this inode number, on a device as the kernel encodes
    /// it.
    ///
    /// # Errors
    /// The image files'.
    pub fn with_ghost_of(cx: &Restore<'_>, dev: u32, ino: u64) -> Result<Option<u32>> {
        for (&file, &(kind, ghost)) in &cx.files.temporary.remaps {
            if kind == RemapType::Ghost {
                let image = ghost::load(&cx.images, ghost)?;
                if (image.entry.dev, image.entry.ino) == (Some(dev), Some(ino)) {
                    return Ok(Some(file));
                }
            }
        }
        Ok(None)
    }

    /// Opens the file of `reg`, if its path alone does not lead to it.
    ///
    /// # Errors
    /// The kernel's; contradictions in the images.
    pub fn open(cx: &mut Restore<'_>, reg: &RegFileEntry) -> Result<Option<OwnedFd>> {
        let Some(&(kind, other)) = cx.files.temporary.remaps.get(&reg.id) else { return Ok(None) };
        match kind {
            RemapType::Ghost => open_ghost(cx, reg, other).map(Some),
            RemapType::Linked => open_linked(cx, reg, other).map(Some),
            RemapType::Procfs if cx.files.temporary.alive == Some(other) => {
                open_by_path(cx, reg).map(Some)
            }
            // The process of the path has to be there for a moment.
            RemapType::Procfs => {
                let pid = i32::try_from(other).ok();
                with_process(cx, pid, |cx, _| open_by_path(cx, reg)).map(Some)
            }
        }
    }

    /// Works with the directory `id` of the images, which may be that of a process that has
    /// ended: nobody can change to it but while there is such a process.
    ///
    /// # Errors
    /// What `work` returns; the kernel's, for a pid that is taken.
    pub fn with_directory<T>(
        cx: &mut Restore<'_>,
        id: u32,
        work: impl FnOnce(&mut Restore<'_>) -> Result<T>,
    ) -> Result<T> {
        let Some(&(RemapType::Procfs, pid)) = cx.files.temporary.remaps.get(&id) else {
            return work(cx);
        };
        with_process(cx, i32::try_from(pid).ok(), |cx, _| {
            cx.files.temporary.alive = Some(pid);
            let done = work(cx);
            cx.files.temporary.alive = None;
            done
        })
    }

    /// Removes the names that files have for the restore only, and those that the dump gave;
    /// call it when the tasks have all their files. Files get the modes that had to wait for it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn succeed(&mut self) -> Result<()> {
        for Name { dir, name } in self.given.drain(..) {
            remove(dir.as_fd(), &name, AtFlags::empty());
        }
        self.remove_made();
        self.late.drain(..).try_for_each(|(file, mode)| ghost::set_mode(file.as_fd(), mode))
    }

    fn remove_made(&mut self) {
        while let Some((Name { dir, name }, flags)) = self.made.pop() {
            remove(dir.as_fd(), &name, flags);
        }
    }
}

/// The bit that marked ghosts before `remap_type` was there.
const OLD_GHOST: u32 = 1 << 31;

impl Drop for Temporary {
    fn drop(&mut self) {
        self.remove_made();
    }
}

fn open_linked(cx: &mut Restore<'_>, reg: &RegFileEntry, link: u32) -> Result<OwnedFd> {
    let given = cx.entries.get(&link).and_then(|entry| entry.reg.clone()).ok_or_else(|| {
        let reason = format!("file {} goes by {link}, which is no file", reg.id);
        Error::invalid("remap-fpath.img", reason)
    })?;
    let name = Name::of(cx, &given)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&name.dir, &name.name, flags, Mode::empty())
        .context(|| format!("open {}", String::from_utf8_lossy(&given.name)))?;
    let from = Held { name, file };
    let opened = open_as(cx, reg, &from)?;
    if !cx.files.temporary.given.iter().any(|known| known.name == from.name.name) {
        cx.files.temporary.given.push(from.name);
    }
    Ok(opened)
}

fn open_ghost(cx: &mut Restore<'_>, reg: &RegFileEntry, ghost: u32) -> Result<OwnedFd> {
    let from = match cx.files.temporary.ghosts.get(&ghost) {
        Some(ghost) => ghost.try_clone()?,
        None => make_ghost(cx, reg, ghost)?,
    };
    if from.is_dir() { from.check(open_by_path(cx, reg)?) } else { open_as(cx, reg, &from) }
}

fn open_by_path(cx: &Restore<'_>, reg: &RegFileEntry) -> Result<OwnedFd> {
    cx.open_path(reg.mnt_id.unwrap_or(-1), &reg.name, open_flags(reg.flags), Mode::empty())
}

/// Makes a ghost: a directory under its own name, all else under one of ours, next to
/// the place of the first description that is met.
fn make_ghost(cx: &mut Restore<'_>, reg: &RegFileEntry, ghost: u32) -> Result<Held> {
    let mut image = ghost::load(&cx.images, ghost)?;
    let mut name = Name::of(cx, reg)?;
    let is_dir = image.file_type() == FileType::Directory;
    let file = if is_dir && cx.files.temporary.parents.contains(&reg.name) {
        // It is there already, as the directory of another unlinked file.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&name.dir, &name.name, flags, Mode::empty())
            .context(|| format!("open {}", String::from_utf8_lossy(&reg.name)))?;
        image.set_attributes(&cx.id_maps, file.as_fd())?;
        file
    } else {
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        if !is_dir {
            let what = || "a name for an unlinked file".to_owned();
            name.name = own_name("ghost", ghost).context(what)?.into_bytes();
        }
        let file = image.create(&cx.id_maps, name.dir.as_fd(), &name.name)?;
        cx.files.temporary.made.push((name.try_clone()?, flags));
        file
    };
    if let Some(mode) = image.late_mode() {
        let file = file.try_clone().context(|| "dup".to_owned())?;
        cx.files.temporary.late.push((file, mode));
    }
    let made = Held { name, file };
    cx.files.temporary.ghosts.insert(ghost, made.try_clone()?);
    Ok(made)
}

/// Opens the file `from` under the name that `reg` has, which it has only for this
/// moment. What has the name now steps aside meanwhile.
fn open_as(cx: &mut Restore<'_>, reg: &RegFileEntry, from: &Held) -> Result<OwnedFd> {
    let what = || format!("open {} by a name for the moment", String::from_utf8_lossy(&reg.name));
    let Name { dir, name } = Name::of(cx, reg)?;
    let aside = step_aside(cx, &dir, &name).context(what)?;
    let linked = link(from, &dir, &name);
    let opened = linked.context(what).and_then(|()| {
        let opened = open_by_path(cx, reg).and_then(|opened| from.check(opened));
        rustix::fs::unlinkat(&dir, &name, AtFlags::empty()).context(what).and(opened)
    });
    if let Some(other) = aside {
        rustix::fs::renameat_with(&dir, other, &dir, &name, RenameFlags::NOREPLACE)
            .context(what)?;
    }
    opened
}

/// Gives the file `from` a name in `dir`, which may show the same file system through
/// another mount: links are made within one mount only, so the directory is then opened
/// by its handle through that of the file.
fn link(from: &Held, dir: &OwnedFd, name: &[u8]) -> std::io::Result<()> {
    match rustix::fs::linkat(&from.file, "", dir, name, AtFlags::EMPTY_PATH) {
        Err(Errno::XDEV) => {
            let (kind, handle) = torpor_sys::notify::handle_of(dir.as_fd())?;
            let dir = torpor_sys::notify::open_by_handle(from.name.dir.as_fd(), kind, &handle)?;
            Ok(rustix::fs::linkat(&from.file, "", &dir, name, AtFlags::EMPTY_PATH)?)
        }
        other => Ok(other?),
    }
}

/// A name that nobody else has: other restores may work in the same directory, and the pids of
/// their supervisors repeat in other namespaces.
fn own_name(what: &str, number: u32) -> rustix::io::Result<String> {
    let mut random = [0; 8];
    aws_lc_rs::rand::fill(&mut random).map_err(|_| Errno::IO)?;
    Ok(format!(".torpor.{:016x}.{what}.{number:x}", u64::from_ne_bytes(random)))
}

/// Renames what is called `name`, if there is such a thing.
fn step_aside(
    cx: &mut Restore<'_>,
    dir: &OwnedFd,
    name: &[u8],
) -> rustix::io::Result<Option<String>> {
    cx.files.temporary.asides += 1;
    let other = own_name("aside", cx.files.temporary.asides)?;
    match rustix::fs::renameat_with(dir, name, dir, &other, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Some(other)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Opens a directory to make files in: through a writable copy of its mount, where
/// there is one. Missing directories are made, and removed in the end.
fn open_dir(cx: &mut Restore<'_>, mnt_id: i32, path: &[u8]) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let what = || format!("open {}", String::from_utf8_lossy(path));
    match open_writable(cx, mnt_id, path, flags)? {
        Err(Errno::NOENT) if path.len() > 1 => {}
        other => return other.context(what),
    }
    let above = open_dir(cx, mnt_id, parent(path))?;
    let name = Name { dir: above, name: base(path).to_vec() };
    rustix::fs::mkdirat(&name.dir, &name.name, Mode::from_raw_mode(0o755)).context(what)?;
    let dir = rustix::fs::openat(&name.dir, &name.name, flags | OFlags::CLOEXEC, Mode::empty());
    cx.files.temporary.made.push((name, AtFlags::REMOVEDIR));
    cx.files.temporary.parents.insert(path.to_vec());
    dir.context(what)
}

fn open_writable(
    cx: &Restore<'_>,
    mnt_id: i32,
    path: &[u8],
    flags: OFlags,
) -> Result<rustix::io::Result<OwnedFd>> {
    if let Some((root, mountpoint)) = cx.mounts.writable(mnt_id)
        && let Ok(inside) = Path::new(OsStr::from_bytes(path)).strip_prefix(mountpoint)
    {
        return Ok(open_in(root, inside.as_os_str().as_bytes(), flags, Mode::empty()));
    }
    Ok(open_in(cx.root_of_mount(mnt_id)?, path, flags, Mode::empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart() {
        assert_eq!((parent(b"/a/b"), base(b"/a/b")), (&b"/a"[..], &b"b"[..]));
        assert_eq!((parent(b"/a"), base(b"/a")), (&b"/"[..], &b"a"[..]));
        assert_eq!(join(b"/", b"x"), b"/x");
        assert_eq!(join(b"/a", b"x"), b"/a/x");
    }
}
