//! Files are listed, and sent.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use torpor_kernel::tree;

use super::{Entry, EntryKind, MAX_LIST, There, bytes_of};
use crate::holes;
use crate::marks::{self, Attributes};
use crate::order;
use crate::walk::{LONG, Step, TreeTop, Walk, Way};

/// A file is sent in no more parts, and where there are many such files in fewer.
const MOST_EXTENTS: usize = 10_000;

/// What is to be sent, with its length.
#[derive(Debug)]
pub(crate) struct Bundle {
    root: PathBuf,
    list: Vec<u8>,
    entries: Vec<Entry>,
}

impl Bundle {
    /// All below `root` for which `wanted` says yes, which is asked only where paths are short. Of what is `there` already
    /// only the names are sent.
    ///
    /// # Errors
    /// If a file cannot be looked at.
    pub(crate) fn of(
        root: &Path,
        there: &There,
        wanted: impl Fn(&Path) -> bool,
    ) -> io::Result<Self> {
        let mut entries = collect(root, there, wanted)?;
        let list = list_of(&mut entries, MAX_LIST)?;
        Ok(Self { root: root.to_owned(), list, entries })
    }

    /// Bytes that [`write`](Self::write) writes.
    #[must_use]
    pub(crate) fn length(&self) -> u64 {
        8 + self.list.len() as u64 + bytes_of(&self.entries)
    }

    /// Sends it. A file that has grown since is cut, one that has shrunk is an error.
    ///
    /// # Errors
    /// If a file cannot be read or has shrunk, or the other end is gone.
    pub(crate) fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&(self.list.len() as u64).to_be_bytes())?;
        to.write_all(&self.list)?;
        let (mut top, mut way) = (TreeTop::at(&self.root)?, Way::default());
        let mut base = top.dir(&way)?;
        for entry in &self.entries {
            let whole = match &entry.what {
                EntryKind::File(size) => &[(0, *size)][..],
                EntryKind::Parts(_, extents) | EntryKind::Sparse(_, extents) => extents,
                EntryKind::Enter => {
                    way.enter(&entry.path);
                    base = top.dir(&way)?;
                    continue;
                }
                EntryKind::Leave => {
                    way.leave();
                    base = top.dir(&way)?;
                    continue;
                }
                _ => continue,
            };
            let mut file = File::from(tree::open(&base, &entry.path, OFlags::RDONLY)?);
            for &(offset, len) in whole {
                file.seek(SeekFrom::Start(offset))?;
                if io::copy(&mut Read::take(&mut file, len), to)? != len {
                    return Err(io::Error::other(format!("{} has shrunk", entry.path.display())));
                }
            }
        }
        Ok(())
    }
}

/// The list of what is sent, in at most so many bytes if it can be: holes are sent as data rather than make it longer.
pub(super) fn list_of(entries: &mut [Entry], longest: u64) -> io::Result<Vec<u8>> {
    let mut most = MOST_EXTENTS;
    loop {
        let list = serde_json::to_vec(entries)?;
        if list.len() as u64 <= longest || most <= 1 {
            return Ok(list);
        }
        most /= 2;
        for entry in entries.iter_mut() {
            if let EntryKind::Sparse(_, extents) = &mut entry.what {
                *extents = holes::at_most(most, std::mem::take(extents));
            }
        }
    }
}

fn collect(root: &Path, there: &There, wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    let mut walk = Walk::of(root)?;
    let mut several = There::new();
    // How many steps lead to each of the directories on the way from which paths go on.
    let mut bases = Vec::new();
    while let Some(step) = walk.step() {
        let depth = walk.way().depth();
        if step == Step::OutOf {
            if bases.pop_if(|base| *base == depth).is_some() {
                found.push(Entry::turn(PathBuf::new(), EntryKind::Leave));
            }
            continue;
        }
        let dir = walk.dir()?;
        let mut path = walk.way().path_after(bases.last().copied().unwrap_or(0));
        if depth != 0 {
            let meta = dir.metadata()?;
            found.push(Entry::of(path.clone(), EntryKind::Dir, &meta, marks::attributes(&dir)?));
            if path.as_os_str().len() > LONG {
                bases.push(depth);
                found.push(Entry::turn(std::mem::take(&mut path), EntryKind::Enter));
            }
        }
        for entry in tree::list(&dir, Path::new(""))? {
            let path = path.join(&entry.name);
            if bases.is_empty() && !wanted(&path) {
                continue;
            }
            if entry.meta.is_dir() {
                walk.descend(&entry.name);
            } else {
                let several = bases.is_empty().then_some(&mut several);
                found.extend(look(&dir, path, entry, there, several)?);
            }
        }
    }
    Ok(found)
}

/// What is sent of something in a directory that is none itself. Of files of the job that have more than one name,
/// `several` are those that were seen, where paths are short.
fn look(
    dir: &File,
    path: PathBuf,
    tree::Entry { name, meta, link }: tree::Entry,
    there: &There,
    several: Option<&mut There>,
) -> io::Result<Option<Entry>> {
    let mut attributes = Attributes::new();
    let id = tree::id(&meta);
    let first = several.as_ref().and_then(|several| several.get(&id));
    let what = if let Some(name) = there.get(&id) {
        EntryKind::There(name.clone().into())
    } else if let Some(link) = link {
        EntryKind::Link(link.into())
    } else if let Some(first) = first {
        EntryKind::Same(first.clone().into())
    } else if meta.is_file() {
        if let Some(several) = several.filter(|_| meta.nlink() > 1) {
            several.insert(id, path.clone());
        }
        let file = tree::file(dir, &name, id)?;
        attributes = marks::attributes(&file)?;
        let name = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
        content(&file, &name, &meta)?
    } else if meta.file_type().is_fifo() {
        EntryKind::Fifo
    } else if marks::is_whiteout(&meta) {
        EntryKind::Whiteout
    } else {
        return Ok(None);
    };
    Ok(Some(Entry::of(path, what, &meta, attributes)))
}

/// What is sent of a regular file.
fn content(file: &File, name: &Path, meta: &Metadata) -> io::Result<EntryKind> {
    let size = meta.len();
    if let Some(extents) = order::of_pages(name, size) {
        return Ok(EntryKind::Parts(size, extents));
    }
    if holes::may_have(meta) {
        let extents = holes::at_most(MOST_EXTENTS, holes::data(file, size)?);
        // One that only its file system has made smaller has none.
        if extents != [(0, size)] {
            return Ok(EntryKind::Sparse(size, extents));
        }
    }
    Ok(EntryKind::File(size))
}

/// The files below directories of `root`, as the other end has them. What has too long a path to be named is sent again.
///
/// # Errors
/// If one of the directories cannot be read.
pub(crate) fn there(root: &Path, dirs: &[PathBuf]) -> io::Result<There> {
    let mut found = There::new();
    for top in dirs {
        let mut walk = Walk::of(&root.join(top))?;
        while let Some(dir) = walk.next_dir()? {
            let path = top.join(walk.way().path_after(0));
            for tree::Entry { name, meta, .. } in tree::list(&dir, Path::new(""))? {
                if meta.is_dir() && path.as_os_str().len() <= LONG {
                    walk.descend(&name);
                } else if meta.is_file() {
                    found.insert(tree::id(&meta), path.join(name));
                }
            }
        }
    }
    Ok(found)
}
