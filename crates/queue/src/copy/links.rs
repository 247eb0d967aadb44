//! Files that have several names, in a copy as in what is copied.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use torpor_kernel::tree::{self, Id};

use crate::walk::Way;

/// Which files of a copy are one file by several names.
#[derive(Debug, Default)]
pub(super) struct HardLinks {
    /// Directories of the copy that one of those is in.
    dirs: Vec<PathBuf>,
    /// Those that have more names than were seen: which directory the copy is in, its name there, and how many are to come.
    several: HashMap<Seen, (usize, PathBuf, u64)>,
    /// As which file something is here that is shared with the copy before, by the file there. Two that were one then may be
    /// two now.
    pub(super) shared: HashMap<Id, Id>,
}

/// A file as it was seen. Once it has changed, it is another one than was copied.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Seen {
    /// Other file systems that the walk comes to have the same inodes: subvolumes of btrfs, layers of an overlay.
    id: Id,
    len: u64,
    changed: (i64, i64),
}

impl Seen {
    fn of(meta: &Metadata) -> Self {
        let changed = (meta.ctime(), meta.ctime_nsec());
        Self { id: tree::id(meta), len: meta.len(), changed }
    }
}

impl HardLinks {
    /// Notes the first name of a file that has several. Where paths are long each name becomes a file of its own.
    pub(super) fn note(&mut self, way: &Way, name: &Path, meta: &Metadata) {
        if meta.nlink() < 2 || way.is_long() {
            return;
        }
        let dir = way.path_after(0);
        if self.dirs.last() != Some(&dir) {
            self.dirs.push(dir);
        }
        let first = (self.dirs.len() - 1, name.to_owned(), meta.nlink() - 1);
        self.several.insert(Seen::of(meta), first);
    }

    /// The directory and the name that the copy of a file has already.
    pub(super) fn known(&mut self, meta: &Metadata) -> Option<(PathBuf, PathBuf)> {
        let seen = Seen::of(meta);
        let (dir, name, left) = self.several.get_mut(&seen)?;
        let found = (self.dirs.get(*dir)?.clone(), name.clone());
        *left -= 1;
        if *left == 0 {
            self.several.remove(&seen);
        }
        Some(found)
    }
}
