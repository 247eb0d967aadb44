//! Files are opened by their paths: as the tasks have opened them, whatever their paths lead to by
//! now.
//!
//! An unlinked file has its old name again while it is opened, and so has one that the dump gave
//! another name; see [`super::remap`].

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use torpor_images::ImageDir;
use torpor_images::remap::is_given_name;
use torpor_policy::ghost::Ghost;
use torpor_policy::{FoundElsewhere, OpenFile, PathFile, Policy, Remap};

use super::description::{is_tun, open_flags, open_in, same_inode, through_mount};
use super::own_names::{self, own_name, remove};
use super::remap::{base, parent};
use super::{ghost, left_names, procfs, tty};
use crate::error::{Context, Error, Result};
use crate::guardian::{Guardian, Undo};
use crate::namespace::Namespaces;
use crate::namespace::mount::{PathAt, Restored, Roots};
use crate::namespace::user::IdMaps;
use crate::options::{Files, InheritFd};
use crate::restore::process;
use crate::restore::tasks::Task;
use crate::verdict::Verdict;

/// The restore half: the files that have a name only for the time being. Dropping it
/// removes those names.
#[derive(Debug, Default)]
pub(crate) struct Temporary {
    remaps: HashMap<u32, FoundElsewhere>,
    /// The ghosts of the images.
    ghosts: HashMap<u32, Ghost>,
    /// Those that were made.
    made_ghosts: HashMap<u32, Kept>,
    /// Those whose mode waits until they have lost their names.
    late: Vec<(OwnedFd, Mode)>,
    /// What was made, in this order, and what the guardian knows of it.
    made: Vec<(Name, AtFlags, Undo)>,
    /// Directories among them that were made for something in them only.
    parents: Vec<OwnedFd>,
    /// Names that the dump gave, to be removed once the restore has succeeded.
    given: Vec<Name>,
    /// How often something had to step aside.
    asides: u32,
    /// A process that is there for the moment, for what lies below its directory: its number there, and here.
    alive: Option<(u32, i32)>,
    /// Takes names away, and gives them back, if the supervisor is killed.
    pub(crate) guardian: Guardian,
}

/// A name in a directory.
#[derive(Debug)]
struct Name {
    dir: OwnedFd,
    name: Vec<u8>,
}

impl Name {
    /// That of a file of the images.
    fn of(cx: &mut Opener<'_>, reg: &PathFile) -> Result<Self> {
        let dir = open_dir(cx, reg.mount, parent(&reg.path))?;
        Ok(Name { dir, name: base(&reg.path).to_vec() })
    }

    fn try_clone(&self) -> Result<Self> {
        let dir = self.dir.try_clone().context(|| "dup".to_owned())?;
        Ok(Name { dir, name: self.name.clone() })
    }
}

/// A file that goes by a name for the time being, and a descriptor of it (`O_PATH`): others may
/// put something else there at any moment.
#[derive(Debug)]
struct Kept {
    name: Name,
    file: OwnedFd,
}

impl Kept {
    fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().context(|| "dup".to_owned())?;
        Ok(Kept { name: self.name.try_clone()?, file })
    }

    fn is_dir(&self) -> bool {
        rustix::fs::fstat(&self.file)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    }

    /// Makes sure that `found` is the file.
    fn check(&self, found: &OwnedFd) -> Result<()> {
        let stat = |file: &OwnedFd| rustix::fs::fstat(file).context(|| "fstat".to_owned());
        match same_inode(&stat(&self.file)?, &stat(found)?) {
            true => Ok(()),
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
    pub(crate) fn is_ghost(&self, file: u32) -> bool {
        matches!(self.remaps.get(&file), Some(FoundElsewhere::Ghost(_)))
    }

    /// Takes note of the files whose paths do not lead to them, and of the ghosts that some of them are.
    pub(crate) fn load(&mut self, remaps: Vec<Remap>, ghosts: HashMap<u32, Ghost>) {
        self.remaps.extend(remaps.into_iter().map(|remap| (remap.file, remap.by)));
        self.ghosts = ghosts;
    }

    /// The process that has ended and whose directory file `id` of the images is: nobody can open
    /// or change to it but while there is such a process.
    pub(crate) fn process_of(&self, id: u32) -> Option<u32> {
        match self.remaps.get(&id) {
            Some(FoundElsewhere::Process(pid)) => Some(*pid),
            _ => None,
        }
    }

    /// Says which process is there for the moment: its number there, and here.
    pub(crate) fn set_alive(&mut self, process: Option<(u32, i32)>) {
        self.alive = process;
    }

    /// Whether the path of the file `id` of the images does not lead to it.
    pub(crate) fn is_remapped(&self, id: u32) -> bool {
        self.remaps.contains_key(&id)
    }

    /// A file of the images whose ghost had this inode number, on a device as the kernel encodes
    /// it.
    pub(crate) fn with_ghost_of(&self, dev: u32, ino: u64) -> Option<u32> {
        let is_it = |by: FoundElsewhere| match by {
            FoundElsewhere::Ghost(number) => {
                self.ghosts.get(&number).is_some_and(|ghost| ghost.was == Some((dev, ino)))
            }
            _ => false,
        };
        self.remaps.iter().find(|(_, by)| is_it(**by)).map(|(file, _)| *file)
    }

    /// Removes the names that files have for the restore only, and those that the dump gave;
    /// call it when the tasks have all their files. Files get the modes that had to wait for it.
    ///
    /// # Errors
    /// If a name cannot be removed.
    pub(crate) fn succeed(&mut self) -> Result<()> {
        for Name { dir, name } in self.given.drain(..) {
            remove(dir.as_fd(), &name, AtFlags::empty());
        }
        self.remove_made();
        self.late.drain(..).try_for_each(|(file, mode)| ghost::set_mode(file.as_fd(), mode))
    }

    /// The directory that was made for something in it, if that is what has the name.
    fn parent(&self, Name { dir, name }: &Name) -> Option<&OwnedFd> {
        let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let is_it = |parent: &&OwnedFd| {
            rustix::fs::fstat(parent).is_ok_and(|stat| same_inode(&stat, &found))
        };
        self.parents.iter().find(is_it)
    }

    /// From now on a file that nobody else has the name of goes with the restore, and so does what may be left of it before
    /// it is complete.
    fn add_file(&mut self, name: Name) -> Result<()> {
        let undo = left_names::undo(&name.dir, &name.name)?;
        self.add(name, AtFlags::empty(), undo)
    }

    /// From now on a directory goes with the restore.
    fn add_directory(&mut self, name: Name, made: &OwnedFd) -> Result<()> {
        let undo = left_names::undo_directory(&name.dir, &name.name, made)?;
        self.add(name, AtFlags::REMOVEDIR, undo)
    }

    fn add(&mut self, name: Name, flags: AtFlags, undo: Undo) -> Result<()> {
        self.guardian.watch_file(&undo, name.dir.as_fd())?;
        self.made.push((name, flags, undo));
        Ok(())
    }

    fn remove_made(&mut self) {
        while let Some((Name { dir, name }, flags, undo)) = self.made.pop() {
            remove(dir.as_fd(), &name, flags);
            // If it is gone there is nobody to tell.
            let _ = self.guardian.forget(&undo);
        }
    }
}

/// What it takes to open files by their paths.
#[derive(Debug)]
pub(crate) struct Opener<'a> {
    /// Files that the caller gives.
    pub given: &'a [InheritFd],
    /// How files are compared with those of the dump, and terminals without a master brought back.
    pub files: &'a Files,
    /// Whether terminals may be the caller's.
    pub shell_job: bool,
    /// What files may be opened.
    pub policy: &'a Policy,
    /// Where ghosts are.
    pub images: &'a ImageDir,
    /// The open files of the images, by their numbers.
    pub described: &'a HashMap<u32, OpenFile>,
    /// Where message queues are.
    pub spaces: &'a Namespaces,
    /// Where paths begin.
    pub roots: &'a Roots,
    /// The mounts, as they can be written to.
    pub mounts: &'a mut Restored,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// What the policy has to do with files that are opened.
    pub(crate) verdict: &'a Verdict,
    /// Who opens what only a process of the tree can.
    pub tasks: &'a mut [Task],
    /// Names that files have for the moment.
    pub temporary: &'a mut Temporary,
}

impl Opener<'_> {
    /// Opens the file of the images by its path, once it is known what that leads to.
    ///
    /// # Errors
    /// As [`Roots::open_path`] and [`Opener::check_found`].
    pub(crate) fn open_by_path(&self, reg: &PathFile) -> Result<OwnedFd> {
        let flags = open_flags(reg.flags);
        self.roots.open_path((reg.mount, &reg.path), flags, |found| {
            self.check_found((reg.mount, &reg.path), flags, found)
        })
    }

    /// Ends the restore before it opens what a path has led to and may not be opened: a device that the tasks may not have,
    /// or what would be the restoring program's, or its network's, where it opens it. Says whether it belongs to a process of the tree.
    ///
    /// # Errors
    /// If it is one of these.
    pub(crate) fn check_found(
        &self,
        (mount, path): PathAt<'_>,
        flags: OFlags,
        found: &OwnedFd,
    ) -> Result<bool> {
        self.check_opened(path, found)?;
        if flags.contains(OFlags::PATH) {
            return Ok(false);
        }
        let refused = |why: &str| Err(Error::invalid(String::from_utf8_lossy(path), why));
        let stat = rustix::fs::fstat(found).context(|| "fstat".to_owned())?;
        if tty::is_current(&stat) {
            return refused(
                "would be the terminal of the restoring program here, where that of a task is wanted",
            );
        }
        if is_tun(&stat) {
            return refused(
                "would have the network devices of this host here, where those of a network of the tasks are wanted",
            );
        }
        match procfs::process_of(self.roots.root_of_mount(mount)?, path, found)? {
            None => Ok(false),
            Some(owner) if Some(&owner) == procfs::OwningProcess::of("self")?.as_ref() => {
                refused("is a file of the restoring program here, and none of the tasks'")
            }
            Some(owner) => self.is_of_tree(&owner),
        }
    }

    /// Whether a process is of the tree, or is there for the moment in the place of one that has ended.
    fn is_of_tree(&self, owner: &procfs::OwningProcess) -> Result<bool> {
        let tasks = self.tasks.iter().map(|task| task.pid);
        for pid in tasks.chain(self.temporary.alive.map(|alive| alive.1)).filter(|&pid| pid > 0) {
            if procfs::OwningProcess::of(&pid.to_string())?.as_ref() == Some(owner) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends the restore if a path has led to a device that the tasks may not have.
    ///
    /// # Errors
    /// If it is such a device.
    pub(crate) fn check_opened(&self, path: &[u8], file: impl AsFd) -> Result<()> {
        let stat = rustix::fs::fstat(file).context(|| "fstat".to_owned())?;
        self.verdict.check_opened(self.policy, path, &stat)
    }

    /// Whether files may be made, watched and moved where the tasks' user could not: images of this host say where there were
    /// files of the tasks. Where the rights are those of a user of this host it could have put something else there since.
    pub(crate) fn are_places_trusted(&self) -> Result<bool> {
        Ok(!self.roots.of_user && self.verdict.made_here()?)
    }

    /// Ends the restore where the container's user could make no file, but for images of this host: one of theirs
    /// would have a name there for the moment, and what has that name now would have none.
    fn check_place(&self, at: PathAt<'_>, dir: &OwnedFd) -> Result<()> {
        if self.roots.may_make_in(dir.as_fd())?
            || self.are_places_trusted()?
            || self.roots.is_firm(at)?
        {
            return Ok(());
        }
        let (giver, user) = self.roots.giver();
        let why = format!(
            "unlinked files of these images would be made there, and {giver} gives no right to; give it {user}"
        );
        Err(Error::invalid(String::from_utf8_lossy(at.1), why))
    }

    /// Ends the restore where a file, `shown` so, would be watched that the container's user may not read, but for images
    /// of this host: who watches a directory hears the names in it.
    ///
    /// # Errors
    /// If it is such a file.
    pub(crate) fn check_watched(&self, file: &OwnedFd, shown: &str) -> Result<()> {
        if self.roots.may_read(file.as_fd())? || self.are_places_trusted()? {
            return Ok(());
        }
        let (giver, user) = self.roots.giver();
        let why = format!(
            "{shown} would be watched, which {user} may not read, and {giver} gives no right to; give it the right to read \
             the file"
        );
        Err(Error::invalid("files.img", why))
    }

    /// Ends the restore where something would lose its name, for the moment or for good, from which the container's user could
    /// not take it, but for images of this host: in a directory for all it has that right over its own files only.
    fn check_taken(&self, path: &[u8], Name { dir, name }: &Name) -> Result<()> {
        let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(());
        };
        if self.roots.may_take_from(dir.as_fd(), &stat)? || self.are_places_trusted()? {
            return Ok(());
        }
        let why = "what has this name belongs to somebody else, in a directory for all, and the restore would take the name from \
                   it; move it away";
        Err(Error::invalid(String::from_utf8_lossy(path), why))
    }

    /// Opens the file of `reg`, if its path alone does not lead to it.
    ///
    /// # Errors
    /// If a ghost cannot be made again, or the file that stands in is not there; if the process of
    /// the path cannot be started; damaged images.
    pub(crate) fn open_remapped(&mut self, reg: &PathFile) -> Result<Option<OwnedFd>> {
        let Some(&by) = self.temporary.remaps.get(&reg.id) else { return Ok(None) };
        match by {
            FoundElsewhere::Ghost(ghost) => open_ghost(self, reg, ghost).map(Some),
            FoundElsewhere::Linked(other) => open_linked(self, reg, other).map(Some),
            FoundElsewhere::Process(pid)
                if self.temporary.alive.is_some_and(|alive| alive.0 == pid) =>
            {
                self.open_by_path(reg).map(Some)
            }
            // The process of the path has to be there for a moment.
            FoundElsewhere::Process(pid) => {
                let process = process::start(self.tasks[0].remote()?, i32::try_from(pid).ok())?;
                self.temporary.set_alive(Some((pid, process.pid())));
                let opened = self.open_by_path(reg);
                self.temporary.set_alive(None);
                process::end(self.tasks[0].remote()?, process)?;
                opened.map(Some)
            }
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.remove_made();
    }
}

fn open_linked(cx: &mut Opener<'_>, reg: &PathFile, link: u32) -> Result<OwnedFd> {
    let given = cx.described.get(&link).and_then(OpenFile::path).ok_or_else(|| {
        let reason = format!("file {} goes by {link}, which is no file", reg.id);
        Error::invalid("remap-fpath.img", reason)
    })?;
    let name = Name::of(cx, given)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let shown = || String::from_utf8_lossy(&given.path);
    let opened = rustix::fs::openat(&name.dir, &name.name, flags, Mode::empty());
    let is_used_up = is_given_name(&given.path) && matches!(opened, Err(Errno::NOENT));
    let file = opened.context(|| match is_used_up {
        true => format!(
            "open {}, the name that the dump has given to {}, which a restore takes away: these images can be restored once \
             only; dump the tasks again, or put the file there again",
            shown(),
            String::from_utf8_lossy(&reg.path)
        ),
        false => format!("open {}", shown()),
    })?;
    cx.check_taken(&given.path, &name)?;
    let from = Kept { name, file };
    let opened = open_as(cx, reg, &from, false)?;
    if !cx.temporary.given.iter().any(|known| known.name == from.name.name) {
        cx.temporary.given.push(from.name);
    }
    Ok(opened)
}

fn open_ghost(cx: &mut Opener<'_>, reg: &PathFile, ghost: u32) -> Result<OwnedFd> {
    let from = match cx.temporary.made_ghosts.get(&ghost) {
        Some(ghost) => ghost.try_clone()?,
        None => make_ghost(cx, reg, ghost)?,
    };
    match from.is_dir() {
        true => open_kept(cx, reg, &from, true),
        false => open_as(cx, reg, &from, true),
    }
}

/// Opens what is kept by the path of the file of the images, `own` with all rights.
fn open_kept(cx: &Opener<'_>, reg: &PathFile, kept: &Kept, own: bool) -> Result<OwnedFd> {
    let (at, flags) = ((reg.mount, reg.path.as_slice()), open_flags(reg.flags));
    let judge = |found: &OwnedFd| {
        kept.check(found)?;
        cx.check_found(at, flags, found)
    };
    match own {
        true => cx.roots.open_own(at, flags, |found| judge(found).map(drop)),
        false => cx.roots.open_path(at, flags, judge),
    }
}

/// Makes a ghost: a directory under its own name, all else under one of ours, next to
/// the place of the first description that is met.
fn make_ghost(cx: &mut Opener<'_>, reg: &PathFile, ghost: u32) -> Result<Kept> {
    let known = cx.temporary.ghosts.get(&ghost).cloned().ok_or_else(|| {
        let reason = format!("file {} is ghost {ghost}, which there is not", reg.id);
        Error::invalid("remap-fpath.img", reason)
    })?;
    let mut image = ghost::open(cx.images, ghost, known)?;
    let mut name = Name::of(cx, reg)?;
    let is_dir = image.file_type() == FileType::Directory;
    let file = match cx.temporary.parent(&name).filter(|_| is_dir) {
        // It is there already, as the directory of another unlinked file.
        Some(parent) => parent.try_clone().context(|| "dup".to_owned())?,
        None if is_dir => {
            let file = image.create(cx.id_maps, name.dir.as_fd(), &name.name)?;
            cx.temporary.add_directory(name.try_clone()?, &file)?;
            file
        }
        None => {
            let what = || "a name for an unlinked file".to_owned();
            name.name = own_name("ghost", ghost).context(what)?.into_bytes();
            // Before it is there: to fill it takes its time, and may fail.
            cx.temporary.add_file(name.try_clone()?)?;
            image.create(cx.id_maps, name.dir.as_fd(), &name.name)?
        }
    };
    image.set_attributes(cx.id_maps, file.as_fd())?;
    if let Some(mode) = image.late_mode() {
        let file = file.try_clone().context(|| "dup".to_owned())?;
        cx.temporary.late.push((file, mode));
    }
    let made = Kept { name, file };
    cx.temporary.made_ghosts.insert(ghost, made.try_clone()?);
    Ok(made)
}

/// Opens the file `from` under the name that `reg` has, which it has only for this
/// moment, `own` with all rights. What has the name now steps aside meanwhile.
fn open_as(cx: &mut Opener<'_>, reg: &PathFile, from: &Kept, own: bool) -> Result<OwnedFd> {
    let what = || format!("open {} by a name for the moment", String::from_utf8_lossy(&reg.path));
    let place = Name::of(cx, reg)?;
    cx.check_taken(&reg.path, &place)?;
    let Name { dir, name } = place;
    let linked_undo = left_names::undo_of(&dir, &name, &from.file)?;
    cx.temporary.guardian.watch_file(&linked_undo, dir.as_fd())?;
    let aside = step_aside(cx, &dir, &name)?;
    let linked = link(from, &dir, &name);
    let opened = linked.context(what).and_then(|()| {
        let opened = open_kept(cx, reg, from, own);
        rustix::fs::unlinkat(&dir, &name, AtFlags::empty()).context(what).and(opened)
    });
    if let Some((other, undo)) = aside {
        let back = rustix::fs::renameat_with(&dir, &other, &dir, &name, RenameFlags::NOREPLACE);
        back.context(|| {
            format!("{}: give its name back to what is called {other} there now", what())
        })?;
        cx.temporary.guardian.forget(&undo)?;
    }
    cx.temporary.guardian.forget(&linked_undo)?;
    opened
}

/// Gives the file `from` a name in `dir`, which may show the same file system through
/// another mount: links are made within one mount only, so the directory is then opened
/// by its handle through that of the file.
fn link(from: &Kept, dir: &OwnedFd, name: &[u8]) -> std::io::Result<()> {
    match rustix::fs::linkat(&from.file, "", dir, name, AtFlags::EMPTY_PATH) {
        Err(Errno::XDEV) => {
            let dir = through_mount(from.name.dir.as_fd(), dir.as_fd())?;
            Ok(rustix::fs::linkat(&from.file, "", &dir, name, AtFlags::EMPTY_PATH)?)
        }
        other => Ok(other?),
    }
}

/// Renames what is called `name`, if there is such a thing: what it is called then, and what gives it its name back if the
/// supervisor is killed.
fn step_aside(cx: &mut Opener<'_>, dir: &OwnedFd, name: &[u8]) -> Result<Option<(String, Undo)>> {
    let what = || format!("have {} step aside", String::from_utf8_lossy(name));
    cx.temporary.asides += 1;
    let other = own_name("aside", cx.temporary.asides).context(what)?;
    let undo = left_names::undo_aside(dir, &other, name)?;
    cx.temporary.guardian.watch_file(&undo, dir.as_fd())?;
    match rustix::fs::renameat_with(dir, name, dir, &other, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(Some((other, undo))),
        Err(Errno::NOENT) => {}
        Err(e) => return Err(e).context(what),
    }
    cx.temporary.guardian.forget(&undo)?;
    Ok(None)
}

/// Opens a directory to make files in: through a writable copy of its mount, where
/// there is one. Missing directories are made, and removed in the end.
fn open_dir(cx: &mut Opener<'_>, mnt_id: i32, path: &[u8]) -> Result<OwnedFd> {
    let what = || format!("open {}", String::from_utf8_lossy(path));
    match open_writable(cx, mnt_id, path)? {
        Err(Errno::NOENT) if path.len() > 1 => {}
        other => {
            let dir = other.context(what)?;
            cx.check_place((mnt_id, path), &dir)?;
            return Ok(dir);
        }
    }
    let above = open_dir(cx, mnt_id, parent(path))?;
    let name = Name { dir: above, name: base(path).to_vec() };
    let mode = Mode::from_raw_mode(0o755);
    let make = |private: BorrowedFd<'_>, name: &[u8]| rustix::fs::mkdirat(private, name, mode);
    let dir = own_names::make((name.dir.as_fd(), name.name.as_slice()), cx.id_maps, make)?;
    cx.temporary.add_directory(name, &dir)?;
    cx.temporary.parents.push(dir.try_clone().context(|| "dup".to_owned())?);
    Ok(dir)
}

/// A directory through a writable copy of its mount, where there is one. Images of this host may lead where only the restore
/// may go.
fn open_writable(cx: &Opener<'_>, mnt_id: i32, path: &[u8]) -> Result<rustix::io::Result<OwnedFd>> {
    let at = (mnt_id, path);
    let (root, path) = match cx.mounts.on_copy(mnt_id, path) {
        Some(on_copy) => on_copy,
        None => (cx.roots.root_of_mount(mnt_id)?, path),
    };
    match cx.roots.find_below(root, path, OFlags::DIRECTORY)? {
        Err(Errno::ACCESS) if cx.roots.of_user || cx.verdict.made_here()? => {
            let found = open_in(root, path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty());
            // A user of this host could have put a link there that leads to where it may not go.
            let is_astray = cx.roots.of_user && found.is_ok() && !cx.roots.is_firm(at)?;
            Ok(if is_astray { Err(Errno::ACCESS) } else { found })
        }
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use torpor_policy::ghost::GhostKind;

    use super::*;

    /// Whoever may rename in a directory could put another one in the place of one that was made there, to be given that one.
    #[test]
    fn a_directory_that_was_exchanged_is_none_that_was_made() {
        let temp = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| temp.path().join(name));
        [&own, &other].iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let name = Name { dir: File::open(temp.path()).unwrap().into(), name: b"own".to_vec() };
        let mut temporary = Temporary::default();
        temporary.parents.push(File::open(&own).unwrap().into());
        assert!(temporary.parent(&name).is_some());
        fs::rename(&own, temp.path().join("aside")).unwrap();
        assert!(temporary.parent(&name).is_none(), "it is gone");
        fs::rename(&other, &own).unwrap();
        assert!(temporary.parent(&name).is_none());
    }

    /// CRIU's handle of an unlinked file that is watched is stale: its device and inode tell the ghost.
    #[test]
    fn a_ghost_is_found_by_what_it_was() {
        let remap = |file, ghost| Remap { file, by: FoundElsewhere::Ghost(ghost) };
        let ghost = |ino| Ghost {
            kind: GhostKind::Fifo,
            permissions: 0o600,
            owner: (0, 0),
            times: None,
            was: Some((254 << 20, ino)),
        };
        let mut temporary = Temporary::default();
        let ghosts = HashMap::from([(1, ghost(100)), (2, ghost(200))]);
        temporary.load(vec![remap(7, 1), remap(8, 2)], ghosts);
        assert_eq!(temporary.with_ghost_of(254 << 20, 200), Some(8));
        assert_eq!(temporary.with_ghost_of(254 << 20, 201), None);
        assert_eq!(temporary.with_ghost_of(8 << 20, 200), None);
    }
}
