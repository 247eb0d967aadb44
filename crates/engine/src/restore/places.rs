//! Where a task is in the file system: its root and its working directory, and what it runs.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Statx, StatxFlags};

use crate::error::{Context, Result};

/// What of a task each is, by its name in `/proc/PID`.
pub(super) const NAMES: [(&str, &str); 3] =
    [("root", "root directory"), ("cwd", "working directory"), ("exe", "program")];

/// A file or directory, on one of the mounts that show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileOnMount {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

impl FileOnMount {
    /// That of an open file.
    ///
    /// # Errors
    /// If its file system does not answer: that of a network may be gone (`ESTALE`, `EIO`).
    pub(super) fn of_file(file: &OwnedFd) -> Result<Self> {
        let mask = StatxFlags::INO | StatxFlags::MNT_ID;
        let stat = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, mask);
        Ok(stat.context(|| "statx of a directory or program".to_owned())?.into())
    }

    /// One of those of process `pid`.
    ///
    /// # Errors
    /// If it has ended.
    pub(super) fn of_process(pid: i32, name: &str) -> Result<Self> {
        let link = format!("/proc/{pid}/{name}");
        let mask = StatxFlags::INO | StatxFlags::MNT_ID;
        let stat = rustix::fs::statx(CWD, &link, AtFlags::empty(), mask);
        Ok(stat.context(|| format!("statx of {link}"))?.into())
    }
}

impl From<Statx> for FileOnMount {
    fn from(stat: Statx) -> Self {
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        FileOnMount { device, inode: stat.stx_ino, mount: stat.stx_mnt_id }
    }
}

impl fmt::Display for FileOnMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileOnMount { device: (major, minor), inode, mount } = self;
        write!(f, "inode {inode} of device {major}:{minor} on mount {mount}")
    }
}
