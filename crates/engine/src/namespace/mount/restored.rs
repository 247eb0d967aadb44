//! The mounts that a restore has made, for those who put files into them.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::autofs;
use super::build::place_at;
use super::collect::{clone, open_beneath};
use super::nested::Waiting;
use super::unpack::Contents;
use crate::error::{Context, Result};
use crate::namespace::run_in;

/// The restored mounts by the numbers that they had.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    alone: HashMap<i32, Alone>,
    /// Mounts that can be made after the tasks only.
    pub(super) waiting: Vec<Waiting>,
    /// Automatic mounts that get their pipes after the descriptors only.
    pub(crate) automatic: Vec<autofs::WaitingForDaemon>,
    /// Mounts that can be made after the terminals only.
    pub(super) late: Vec<Late>,
    /// File systems that become read-only in the end.
    pub(super) read_only: Vec<OwnedFd>,
    /// Those that were filled by images of a round that others follow, by their devices in the images.
    pub(super) filled: HashMap<u32, Filled>,
    /// What each namespace is to have, by its number in the images.
    pub(super) wanted: HashMap<u32, Vec<Wanted>>,
}

/// A file system in memory, and what is in it.
#[derive(Debug)]
pub(super) struct Filled {
    /// Its root.
    pub root: OwnedFd,
    /// What has been unpacked there.
    pub contents: Contents,
}

/// A mount that a namespace is to have.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Its place.
    pub at: PathBuf,
    /// Its `MS_*` flags.
    pub flags: u64,
    /// The file system that it shows; `None` if that is given from outside.
    pub made: Option<MadeFs>,
    /// What it shows of this host, if that is given and this host's mounts tell.
    pub given: Option<GivenFs>,
    /// With whom it shares what is mounted below it; `None` if its place decides that.
    pub peers: Option<WantedPeers>,
}

/// The peers that a mount is to have (mount_namespaces(7)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WantedPeers {
    /// Its own.
    pub group: Partners,
    /// Its masters.
    pub master: Partners,
}

/// Where the members of a peer group are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Partners {
    /// There are none.
    #[default]
    None,
    /// Among the mounts of the tasks, and nowhere else.
    Inside,
    /// Among those of this host, if they are shared there.
    Outside,
}

/// A file or directory of this host, as lists of mounts have it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GivenFs {
    /// The device of its file system, as the kernel encodes it: major << 20 | minor.
    pub device: u32,
    /// Its path in there.
    pub root: PathBuf,
}

/// A file system that was made.
#[derive(Debug)]
pub(crate) struct MadeFs {
    /// Its type.
    pub fs: String,
    /// The sources of all mounts of it: one is made, and the others show the same.
    pub sources: Vec<OsString>,
    /// Whether it is one of its own, and read-only as a whole.
    pub read_only: bool,
}

/// A mount that shows a terminal of a devpts.
#[derive(Debug)]
pub(super) struct Late {
    /// Its namespace.
    pub space: OwnedFd,
    /// The root of the devpts.
    pub devpts: OwnedFd,
    /// Its root in there.
    pub below: PathBuf,
    /// The root of the mount that it is mounted on.
    pub parent: OwnedFd,
    /// Its place there.
    pub place: PathBuf,
    /// Its flags.
    pub attributes: torpor_sys::mount::MountAttributes,
}

impl Late {
    /// Mounts it.
    pub(super) fn mount(&self) -> Result<()> {
        let what =
            || format!("mount the terminal {} at {}", self.below.display(), self.place.display());
        run_in(&[self.space.as_fd()], || {
            let from = open_beneath(self.devpts.as_fd(), &self.below, false).context(what)?;
            let copy = clone(from.as_fd()).context(what)?;
            torpor_sys::mount::set_attributes(copy.as_fd(), false, self.attributes)
                .context(what)?;
            let at = open_beneath(self.parent.as_fd(), &self.place, false).context(what)?;
            place_at(copy.as_fd(), at.as_fd()).context(what)
        })
    }
}

/// A detached, writable copy of one mount: nothing hides what is in it.
#[derive(Debug)]
struct Alone {
    root: OwnedFd,
    mountpoint: PathBuf,
}

impl Restored {
    /// The mounts that a namespace is to have; `None` if it was not made here.
    #[must_use]
    pub(crate) fn wanted(&self, space: u32) -> Option<&[Wanted]> {
        self.wanted.get(&space).map(Vec::as_slice)
    }

    /// Adds a mount.
    pub(super) fn insert(&mut self, mnt_id: i32, mountpoint: PathBuf, root: OwnedFd) {
        self.alone.insert(mnt_id, Alone { root, mountpoint });
    }

    /// Makes the mounts whose terminals are there by now: files may be opened through them.
    ///
    /// # Errors
    /// If a terminal is not there, or cannot be mounted.
    pub(crate) fn mount_terminals(&mut self) -> Result<()> {
        let is_there =
            |late: &mut Late| open_beneath(late.devpts.as_fd(), &late.below, false).is_ok();
        self.late.extract_if(.., is_there).try_for_each(|late| late.mount())
    }

    /// The root directory of a writable copy of the mount `mnt_id`, and the path of
    /// that mount's root in its namespace. To make files where the mount itself is
    /// read-only or hidden by others: a file opened here belongs to the copy, so
    /// open what a task is to have through [`super::Roots::open_path`].
    #[must_use]
    pub(crate) fn writable(&self, mnt_id: i32) -> Option<(BorrowedFd<'_>, &Path)> {
        self.alone.get(&mnt_id).map(|a| (a.root.as_fd(), a.mountpoint.as_path()))
    }

    /// The same root directory, and the path below it that leads where a path of the mount's namespace does; `None` if there is no
    /// such mount, or the path does not lie on it.
    pub(crate) fn on_copy<'p>(
        &self,
        mnt_id: i32,
        path: &'p [u8],
    ) -> Option<(BorrowedFd<'_>, &'p [u8])> {
        let (root, mountpoint) = self.writable(mnt_id)?;
        let inside = Path::new(OsStr::from_bytes(path)).strip_prefix(mountpoint).ok()?;
        Some((root, inside.as_os_str().as_bytes()))
    }
}
