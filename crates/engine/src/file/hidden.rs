//! Files that a later mount hides: no path leads to them, but their own mount still has them.
//!
//! They are looked up in a detached copy of that mount, which nothing hides. A file that is opened
//! there would belong to the copy. So it is opened by its handle, through the root of the mount.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags};
use torpor_policy::PathFile;

use super::Found;
use super::description::{open_flags, open_in, same_inode, through_mount};
use super::opener::Opener;
use crate::error::{Context, Error, Result};
use crate::namespace::mount::TreeMounts;

/// Whether a restore can open `found`, which its path does not lead to: its mount is of the tree,
/// has its own root in sight, still has the file, and is of a file system with handles.
pub(super) fn can_be_opened(mounts: &TreeMounts, found: &Found) -> bool {
    let mnt_id = found.info.mnt_id;
    let Some((space, mount)) = mounts.find(mnt_id) else { return false };
    if space.is_host || !mounts.is_visible(mnt_id, &mount.mountpoint) {
        return false;
    }
    let Ok(inside) = found.link.strip_prefix(&mount.mountpoint) else { return false };
    let opened = mounts.open_alone(mnt_id).and_then(|root| {
        let file = open_in(root.as_fd(), inside.as_os_str().as_bytes(), PLACE, Mode::empty())
            .context(|| "a hidden file".to_owned())?;
        by_handle(&root, &file)
    });
    let is_same =
        |file: OwnedFd| rustix::fs::fstat(file).is_ok_and(|stat| same_inode(&stat, &found.stat));
    opened.is_ok_and(is_same)
}

const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW);

/// The same file, opened with `O_PATH` through the mount of `root`.
fn by_handle(root: &OwnedFd, file: &OwnedFd) -> Result<OwnedFd> {
    let what = || "open a hidden file by its handle".to_owned();
    through_mount(root.as_fd(), file.as_fd()).context(what)
}

/// Opens a file of the images that another mount hides.
///
/// # Errors
/// If the images have no such mount; if the file is not there, or cannot be opened with its flags.
pub(super) fn open(cx: &Opener<'_>, file: &PathFile) -> Result<OwnedFd> {
    let mnt_id = file.mount;
    let writable = cx.mounts.writable(mnt_id).zip(cx.mounts.on_copy(mnt_id, &file.path));
    let ((_, mountpoint), (copy, inside)) = writable
        .ok_or_else(|| Error::invalid(file.text(), "is on a mount that is not in the images"))?;
    let copy = cx.roots.find_below(copy, inside, PLACE)?;
    let copy = copy.context(|| format!("open {} on mount {mnt_id}", file.text()))?;
    let place = OFlags::PATH | OFlags::DIRECTORY;
    let root = cx.roots.find((mnt_id, mountpoint.as_os_str().as_bytes()), place)?;
    let found = by_handle(&root, &copy)?;
    let flags = open_flags(file.flags);
    cx.check_found((mnt_id, &file.path), flags, &found)?;
    cx.roots.open_limited_at_home(&found, flags)
}
