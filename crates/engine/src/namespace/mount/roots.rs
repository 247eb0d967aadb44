//! The root directories of restored mount namespaces, below which paths lead.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::error::{Context, Error, Result};
use crate::file::description::{open_in, without_waiting};

/// Where the paths of the images begin.
#[derive(Debug, Default)]
pub struct Roots {
    /// The root directory of each mount namespace, by its image number.
    pub by_ns: HashMap<u32, OwnedFd>,
    /// The mount namespace (image number) that each dumped mount id belongs to.
    pub of_mount: HashMap<i32, u32>,
    /// The mount namespace of the root task.
    pub first: Option<u32>,
}

impl Roots {
    /// Opens a path as the tasks of a mount namespace see it. `mnt_id` is the
    /// dumped mount that it was opened through, -1 for the root task's namespace.
    /// The path is resolved inside that namespace's root; symbolic links cannot
    /// lead out of it. A fifo at its end is not waited for.
    ///
    /// # Errors
    /// See openat2(2).
    pub fn open_path(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd> {
        let root = self.root_of_mount(mnt_id)?;
        without_waiting(flags, |flags| {
            open_in(root, path, flags, mode)
                .context(|| format!("open {}", String::from_utf8_lossy(path)))
        })
    }

    /// The root directory of the mount namespace that `mnt_id` belongs to.
    ///
    /// # Errors
    /// If no mount namespace is known at all.
    pub fn root_of_mount(&self, mnt_id: i32) -> Result<BorrowedFd<'_>> {
        let of_mount = self.of_mount.get(&mnt_id).copied().or(self.first);
        of_mount
            .and_then(|ns| self.by_ns.get(&ns))
            .map(AsFd::as_fd)
            .ok_or_else(|| Error::invalid("mountpoints", format!("no root for mount {mnt_id}")))
    }
}
