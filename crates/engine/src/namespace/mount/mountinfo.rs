//! A mount as the engine knows it: what the kernel shows of it, and where it comes from.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use torpor_kernel::mountinfo::{self, Malformed};
use torpor_policy::Automatic;

use super::fs::{self, FsType, split_options, take_flags};

/// A mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Its number, unique on a machine while it lives.
    pub id: u32,
    /// The mount that it is mounted on.
    pub parent: u32,
    /// The device of its superblock, as the kernel encodes it: major << 20 | minor.
    pub dev: u32,
    /// The directory or file of the file system that is its root.
    pub root: PathBuf,
    /// Whether that has been unlinked.
    pub deleted: bool,
    /// Where it is mounted, seen from the root of the namespace.
    pub mountpoint: PathBuf,
    /// `MS_*` flags of the mount itself, `MS_UNBINDABLE` included.
    pub flags: u64,
    /// Other options of the mount itself, such as `idmapped`.
    pub unknown: Vec<String>,
    /// The peer group that it shares events with.
    pub shared: Option<u32>,
    /// The peer group that it receives events from.
    pub master: Option<u32>,
    /// The type of its file system, with a subtype as in `fuse.sshfs`.
    pub fs: String,
    /// What the images know that type as.
    pub ty: FsType,
    /// The source given when it was mounted.
    pub source: OsString,
    /// `MS_*` flags of the superblock.
    pub sb_flags: u64,
    /// Other options of the superblock, separated by commas.
    pub options: OsString,
    /// Set where the mount belongs to the outside.
    pub external: Option<FromOutside>,
    /// Set where its peer group has members outside that are to stay in it.
    pub outside_peers: bool,
    /// The pid namespace that it shows, where that is a procfs of one below the root task's.
    pub pid_ns: Option<u32>,
    /// The namespace that it keeps, where that is one of nsfs and a task of the tree lives in it.
    pub namespace: Option<u32>,
    /// Who is asked what is to be mounted there, if it is an automatic one (at restore).
    pub automatic: Option<Automatic>,
}

/// What is known about a mount that comes from outside of the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromOutside {
    /// The caller of the restore names the source under this key.
    Key(String),
    /// It was found at this path of the host.
    Auto(PathBuf),
    /// The caller of the restore names the block device under this key.
    Device(String),
}

/// Parses `/proc/PID/mountinfo`.
///
/// # Errors
/// The first line that is not as documented.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Mount>, Malformed> {
    Ok(mountinfo::parse(text)?.into_iter().map(Mount::from).collect())
}

impl From<mountinfo::Mount> for Mount {
    fn from(shown: mountinfo::Mount) -> Self {
        let (mut flags, unknown) = mount_flags(&shown.options);
        if shown.unbindable {
            flags |= libc::MS_UNBINDABLE;
        }
        let (sb_flags, options) = take_flags(&shown.super_options);
        Self {
            id: shown.id,
            parent: shown.parent,
            dev: shown.dev,
            root: shown.root,
            deleted: shown.deleted,
            mountpoint: shown.mountpoint,
            flags,
            unknown,
            shared: shown.shared,
            master: shown.master,
            ty: fs::by_name(&shown.fs),
            fs: shown.fs,
            source: shown.source,
            sb_flags,
            options,
            external: None,
            outside_peers: false,
            pid_ns: None,
            namespace: None,
            automatic: None,
        }
    }
}

/// The kernel never shows `strictatime`: it is the absence of the other two.
pub(super) fn mount_flags(options: &OsStr) -> (u64, Vec<String>) {
    let (mut flags, mut unknown) = (0, Vec::new());
    for option in split_options(options) {
        match option.as_bytes() {
            b"rw" => {}
            b"ro" => flags |= libc::MS_RDONLY,
            b"nosuid" => flags |= libc::MS_NOSUID,
            b"nodev" => flags |= libc::MS_NODEV,
            b"noexec" => flags |= libc::MS_NOEXEC,
            b"noatime" => flags |= libc::MS_NOATIME,
            b"nodiratime" => flags |= libc::MS_NODIRATIME,
            b"relatime" => flags |= libc::MS_RELATIME,
            b"nosymfollow" => flags |= fs::MS_NOSYMFOLLOW,
            other => unknown.push(String::from_utf8_lossy(other).into_owned()),
        }
    }
    if flags & (libc::MS_RELATIME | libc::MS_NOATIME) == 0 {
        flags |= libc::MS_STRICTATIME;
    }
    (flags, unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_options_are_told_apart() {
        let line = "1 2 0:4 / /c ro,idmapped unbindable - tmpfs none ro,sync,size=4k";
        let mount = parse(line.as_bytes()).unwrap().remove(0);
        assert_eq!(mount.unknown, ["idmapped"]);
        assert_eq!(mount.flags, libc::MS_RDONLY | libc::MS_STRICTATIME | libc::MS_UNBINDABLE);
        assert_eq!(mount.sb_flags, libc::MS_RDONLY | libc::MS_SYNCHRONOUS);
        assert_eq!(mount.options, "size=4k");
        let line = "1 2 0:4 / /c rw,noatime - ext3 /dev/root rw,errors=continue";
        let mount = parse(line.as_bytes()).unwrap().remove(0);
        assert_eq!((mount.flags, mount.sb_flags), (libc::MS_NOATIME, 0));
        assert_eq!(mount.options, "errors=continue");
    }
}
