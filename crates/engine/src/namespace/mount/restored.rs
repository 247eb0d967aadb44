//! The mounts that a restore has made, for those who put files into them.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::error::{Context, Error, Result};

/// The restored mounts by the numbers that they had.
#[derive(Debug, Default)]
pub struct Restored {
    alone: HashMap<i32, Alone>,
}

/// A detached, writable copy of one mount: nothing hides what is in it.
#[derive(Debug)]
struct Alone {
    root: OwnedFd,
    mountpoint: PathBuf,
}

impl Restored {
    /// Adds a mount.
    pub(super) fn insert(&mut self, mnt_id: i32, mountpoint: PathBuf, root: OwnedFd) {
        self.alone.insert(mnt_id, Alone { root, mountpoint });
    }

    /// The root directory of a writable copy of the mount `mnt_id`, and the path of
    /// that mount's root in its namespace. To make files where the mount itself is
    /// read-only or hidden by others: a file opened here belongs to the copy, so
    /// open what a task is to have through [`crate::restore::Restore::open_path`].
    #[must_use]
    pub fn writable(&self, mnt_id: i32) -> Option<(BorrowedFd<'_>, &Path)> {
        self.alone.get(&mnt_id).map(|a| (a.root.as_fd(), a.mountpoint.as_path()))
    }

    /// Opens a path of the mount's namespace in the writable copy of the mount.
    ///
    /// # Errors
    /// `ENOENT` if there is no such mount or `path` does not lie on it; see openat2(2).
    pub fn open(&self, mnt_id: i32, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        let what = || format!("open {} on mount {mnt_id}", path.display());
        let found = self.writable(mnt_id);
        let inside = found.and_then(|(root, at)| Some((root, path.strip_prefix(at).ok()?)));
        let Some((root, relative)) = inside else {
            return Err(Error::Os { what: what(), source: rustix::io::Errno::NOENT.into() });
        };
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::openat2(root, relative, flags, mode, ResolveFlags::IN_ROOT).context(what)
    }
}
