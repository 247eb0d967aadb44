//! What another machine has sent is checked, and unpacked.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, linkat, mkdirat, openat2};
use torpor_images::dir::PARENT_LINK;
use torpor_kernel::tree;

use super::{Entry, EntryKind, MAX_LIST, bytes_of};
use crate::files::checkpoint_number;
use crate::order::{self, Extent};
use crate::shepherd::OWN;
use crate::shepherd::pump::has_room;
use crate::walk::{TreeTop, Way};
use crate::{holes, marks};

/// Unpacks what is read into `to`, which must be a new directory. What came before is below
/// `there`.
///
/// # Errors
/// If what comes ends early, has too long a list, more in its files than there is room for, or names what is not below `to` or `there`,
/// or has something else than files and directories at its top; if a file cannot be made.
pub(crate) fn unpack(from: &mut dyn Read, to: &Path, there: Option<&Path>) -> io::Result<()> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_be_bytes(length);
    if length > MAX_LIST {
        return Err(io::Error::other("the list of files is too long"));
    }
    let mut list = Vec::new();
    Read::take(&mut *from, length).read_to_end(&mut list)?;
    let entries: Vec<Entry> = serde_json::from_slice(&list)?;
    let bytes = bytes_of(&entries);
    if !has_room(&File::open(to)?, bytes)? {
        let text = format!("there is no room for its {bytes} bytes of files on the disk of jobs");
        return Err(io::Error::other(text));
    }
    check(&entries)?;
    let mut unpacking = Unpacking::new(to, there)?;
    entries.iter().try_for_each(|entry| unpacking.take(entry, from))?;
    unpacking.finish()
}

/// Looks whether entries may be unpacked. In the job's own directories there may be anything; all else is the queue's, and
/// the engine's, which open it by its names.
pub(super) fn check(entries: &[Entry]) -> io::Result<()> {
    let mut bases = 0_usize;
    for entry in entries {
        let refused = |why: &str| Err(io::Error::other(format!("{} {why}", entry.path.display())));
        if entry.what == EntryKind::Leave {
            let before = bases.checked_sub(1);
            bases = before.ok_or_else(|| io::Error::other("the list leaves its directory"))?;
        } else if !is_below(&entry.path) {
            return refused("is no name below");
        } else if bases == 0 && is_of_a_run(&entry.path) {
            return refused("is of a run, which stays where it is");
        } else if bases == 0 && !is_own(&entry.path) && !is_plain(entry) {
            return refused("is neither a file nor a directory, and none of the job's own");
        }
        bases += usize::from(entry.what == EntryKind::Enter);
    }
    Ok(())
}

/// What is being unpacked.
struct Unpacking<'u> {
    to: &'u Path,
    there: Option<&'u Path>,
    top: TreeTop,
    /// The way to the directory below which paths are now.
    way: Way,
    base: File,
    /// The path of a directory below that, and the directory.
    parent: (PathBuf, File),
    /// Directories in which something may come yet, as they are in the list: those below the top, and those below each
    /// directory that the way leads to.
    unfinished: Vec<Vec<&'u Entry>>,
}

impl<'u> Unpacking<'u> {
    fn new(to: &'u Path, there: Option<&'u Path>) -> io::Result<Self> {
        let (mut top, way) = (TreeTop::at(to)?, Way::default());
        let [base, parent] = [top.dir(&way)?, top.dir(&way)?];
        let parent = (PathBuf::new(), parent);
        Ok(Self { to, there, top, way, base, parent, unfinished: vec![Vec::new()] })
    }

    fn take(&mut self, entry: &'u Entry, from: &mut dyn Read) -> io::Result<()> {
        if entry.what == EntryKind::Leave {
            self.finish_but(None)?;
            self.unfinished.pop();
            self.way.leave();
            return self.follow();
        }
        self.finish_but(Some(&entry.path))?;
        if entry.what == EntryKind::Enter {
            self.unfinished.push(Vec::new());
            self.way.enter(&entry.path);
            return self.follow();
        }
        let name = Path::new(entry.path.file_name().unwrap_or_default());
        let (to, there, dir) = (self.to, self.there, self.parent_of(&entry.path)?);
        match &entry.what {
            EntryKind::Dir => {
                mkdirat(dir, name, Mode::RWXU)?;
                self.unfinished.last_mut().into_iter().for_each(|list| list.push(entry));
            }
            EntryKind::File(size) => take_in(from, dir, name, (*size, &[(0, *size)]), entry)?,
            EntryKind::Parts(size, extents) if order::are_whole(extents, *size) => {
                take_in(from, dir, name, (*size, extents), entry)?;
            }
            EntryKind::Sparse(size, extents) if holes::are_within(extents, *size) => {
                take_in(from, dir, name, (*size, extents), entry)?;
            }
            EntryKind::Parts(..) | EntryKind::Sparse(..) => {
                let text = format!("{} does not come as a whole", entry.path.display());
                return Err(io::Error::other(text));
            }
            EntryKind::There(file) => {
                let there = there.ok_or_else(|| io::Error::other("nothing came before"))?;
                link(there, file, dir, name)?;
            }
            EntryKind::Same(file) => link(to, file, dir, name)?,
            EntryKind::Fifo => {
                let pipe = marks::make_fifo(dir, name)?;
                entry.marks().give(&pipe, &entry.attributes)?;
            }
            EntryKind::Whiteout => marks::make_whiteout(dir, name)?,
            EntryKind::Link(target) => {
                marks::make_link(dir, name, target)?;
                marks::give_link(dir, name, (entry.uid, entry.gid))?;
            }
            EntryKind::Enter | EntryKind::Leave => {}
        }
        Ok(())
    }

    /// Opens the directory below which paths are now.
    fn follow(&mut self) -> io::Result<()> {
        self.base = self.top.dir(&self.way)?;
        self.parent = (PathBuf::new(), self.top.dir(&self.way)?);
        Ok(())
    }

    /// The directory that something is in. What comes next is mostly in the same one.
    fn parent_of(&mut self, path: &Path) -> io::Result<&File> {
        let above = path.parent().unwrap_or(Path::new(""));
        if self.parent.0 != above {
            let dir = tree::open(&self.base, above, OFlags::RDONLY | OFlags::DIRECTORY)?;
            self.parent = (above.to_owned(), dir.into());
        }
        Ok(&self.parent.1)
    }

    /// Finishes the directories below the present one that `next`, which comes now, is not in.
    fn finish_but(&mut self, next: Option<&Path>) -> io::Result<()> {
        let is_done = |entry: &mut &Entry| next.is_none_or(|next| !next.starts_with(&entry.path));
        while let Some(entry) = self.unfinished.last_mut().and_then(|list| list.pop_if(is_done)) {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let dir = File::from(tree::open(&self.base, &entry.path, flags)?);
            entry.marks().give(&dir, &entry.attributes)?;
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        while !self.unfinished.is_empty() {
            self.finish_but(None)?;
            self.unfinished.pop();
            self.way.leave();
            self.follow()?;
        }
        Ok(())
    }
}

/// Makes `name` in `dir` one more name of the file `file` below `there`, where all has come from elsewhere. Owner, mode and time are the same
/// file's, and so right already.
fn link(there: &Path, file: &Path, dir: &File, name: &Path) -> io::Result<()> {
    let root = File::open(there)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // What came before is as hostile as what comes now: through a link there it would be any file
    // of this machine.
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let found = File::from(openat2(root, file, flags, Mode::empty(), resolve)?);
    if !found.metadata()?.is_file() {
        return Err(io::Error::other(format!("{} did not come as a file", file.display())));
    }
    Ok(linkat(found, "", dir, name, AtFlags::EMPTY_PATH)?)
}

/// Makes a new file of this size, of parts that come one after the other.
fn take_in(
    from: &mut dyn Read,
    dir: &File,
    name: &Path,
    (size, extents): (u64, &[Extent]),
    entry: &Entry,
) -> io::Result<()> {
    let mut file = marks::make_file(dir, name)?;
    holes::fill(&mut file, size, extents, from)?;
    entry.marks().give(&file, &entry.attributes)
}

fn is_below(path: &Path) -> bool {
    path.components().next().is_some()
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether it is what a run of the job has, or will have, where it runs: the daemon opens that by its names.
fn is_of_a_run(path: &Path) -> bool {
    path.iter().next().is_some_and(|first| first.as_encoded_bytes().starts_with(b"run-"))
}

/// Whether it lies in a directory of the job's own, in a checkpoint.
fn is_own(path: &Path) -> bool {
    let mut parts = path.iter();
    let is_of_a_checkpoint = parts.next().is_some_and(is_checkpoint);
    let is_in_own = parts.next().is_some_and(|name| OWN.iter().any(|own| name == *own));
    is_of_a_checkpoint && is_in_own && parts.next().is_some()
}

fn is_checkpoint(name: &OsStr) -> bool {
    checkpoint_number(name).is_some()
}

/// Whether it is a file or a directory, or the link from images to those that they build on.
fn is_plain(entry: &Entry) -> bool {
    match &entry.what {
        EntryKind::Link(target) => is_parent(&entry.path, target),
        EntryKind::Fifo | EntryKind::Whiteout | EntryKind::Enter => false,
        _ => true,
    }
}

/// Whether a link leads from a round of a checkpoint to another one, there or in another checkpoint.
fn is_parent(path: &Path, target: &Path) -> bool {
    let parts: Vec<&OsStr> = path.iter().collect();
    let target: Vec<&OsStr> = target.iter().collect();
    let is_round = |name: &OsStr| OWN.iter().all(|own| name != *own) && name != "..";
    let [checkpoint, _, name] = parts[..] else { return false };
    let is_there = match target[..] {
        [up, round] => up == ".." && is_round(round),
        [up, again, other, round] => {
            [up, again] == ["..", ".."] && is_checkpoint(other) && is_round(round)
        }
        _ => false,
    };
    is_checkpoint(checkpoint) && name == PARENT_LINK && is_there
}
