//! Files that were opened before a mount namespace was entered: their mount is outside of the tree,
//! which may have another way to them.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, Stat};

use super::collect::{MountNamespace, TreeMounts, mount_id};
use super::mountinfo::Mount;
use crate::file::description::open_in;

impl TreeMounts {
    /// A path by which the tree reaches a file that was opened through mount `mnt_id` of the
    /// caller's own namespace, where its path is `link`, and the mount that this path leads
    /// through. `is_same` tells the file from others; one that was opened for writing needs a mount
    /// that can be written to.
    #[must_use]
    pub(crate) fn other_way(
        &self,
        mnt_id: i32,
        link: &[u8],
        writes: bool,
        is_same: impl Fn(&Stat) -> bool,
    ) -> Option<(PathBuf, i32)> {
        let link = Path::new(OsStr::from_bytes(link));
        let outside = u32::try_from(mnt_id).ok().and_then(|id| self.host.find(id));
        let outside = outside.map(|index| self.host.mount(index));
        self.spaces.iter().filter(|space| !space.is_host).find_map(|space| {
            let by_table = outside.into_iter().flat_map(|mount| ways(mount, link, space));
            std::iter::once(link.to_owned()).chain(by_table).find_map(|path| {
                let found = space.through(&path, &is_same)?;
                let narrow = found.flags & libc::MS_RDONLY != 0;
                let number = i32::try_from(found.id).ok()?;
                (!(writes && narrow)).then_some((path, number))
            })
        })
    }
}

/// Where the mounts of a namespace have what `link` leads to through `outside`, if nothing hides it.
fn ways(outside: &Mount, link: &Path, space: &MountNamespace) -> Vec<PathBuf> {
    let Ok(below) = link.strip_prefix(&outside.mountpoint) else { return Vec::new() };
    let inside = join(&outside.root, below);
    let same = space.tree.mounts().iter().filter(|mount| mount.dev == outside.dev);
    same.filter_map(|mount| Some(join(&mount.mountpoint, inside.strip_prefix(&mount.root).ok()?)))
        .collect()
}

/// As `Path::join`, without a slash at the end.
fn join(base: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { base.to_owned() } else { base.join(rest) }
}

impl MountNamespace {
    /// The mount that `path` leads through, if it leads to the file.
    fn through(&self, path: &Path, is_same: impl Fn(&Stat) -> bool) -> Option<&Mount> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let path = path.as_os_str().as_bytes();
        let file = open_in(self.root.as_fd(), path, flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        let id = u32::try_from(mount_id(file.as_fd()).ok()?).ok()?;
        is_same(&stat).then(|| self.tree.find(id).map(|index| self.tree.mount(index))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_end_without_a_slash() {
        assert_eq!(join(Path::new("/a"), Path::new("")), Path::new("/a"));
        assert_eq!(join(Path::new("/"), Path::new("b/c")), Path::new("/b/c"));
    }
}
