//! Types of file systems, and the flags and options of mounts.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use torpor_images::proto::Fstype;

/// Symbolic links are not followed through the mount (linux/mount.h, since 5.10).
pub(super) const MS_NOSYMFOLLOW: u64 = libc::MS_NOSYMFOLLOW;

/// How a restore gets a file system that it is not given from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It makes a new one, empty, in the namespaces of the tasks.
    New,
    /// It makes a new one and fills it from the images.
    Filled,
    /// It makes a new one in the user namespace of the tasks, and registers there what the images
    /// have.
    Registered,
    /// It makes a new one, which gets the pipe of its daemon when the tasks have their descriptors.
    Automatic,
    /// The kernel has only one, or finds it by its options (cgroups).
    Kernel,
    /// It makes a new one of directories that other mounts show.
    Layered,
    /// The kernel has only one, of namespaces: it mounts one of those that tasks live in.
    Namespace,
    /// Not at all.
    None,
}

/// A type of file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FsType {
    /// The kernel's name.
    pub name: &'static str,
    /// Its number in the images.
    pub code: Fstype,
    /// Where it comes from.
    pub origin: Origin,
}

const fn ty(name: &'static str, code: Fstype, origin: Origin) -> FsType {
    FsType { name, code, origin }
}

/// The types that the images have numbers for, and nsfs, which they know by its name.
pub(super) const TYPES: &[FsType] = &[
    ty("proc", Fstype::Proc, Origin::New),
    ty("sysfs", Fstype::Sysfs, Origin::New),
    ty("devtmpfs", Fstype::Devtmpfs, Origin::Kernel),
    ty("binfmt_misc", Fstype::BinfmtMisc, Origin::Registered),
    ty("tmpfs", Fstype::Tmpfs, Origin::Filled),
    ty("devpts", Fstype::Devpts, Origin::New),
    ty("simfs", Fstype::Simfs, Origin::None),
    ty("pstore", Fstype::Pstore, Origin::Kernel),
    ty("securityfs", Fstype::Securityfs, Origin::Kernel),
    ty("fusectl", Fstype::Fusectl, Origin::Kernel),
    ty("debugfs", Fstype::Debugfs, Origin::Kernel),
    ty("tracefs", Fstype::Tracefs, Origin::Kernel),
    ty("cgroup", Fstype::Cgroup, Origin::Kernel),
    ty("cgroup2", Fstype::Cgroup2, Origin::Kernel),
    ty("aufs", Fstype::Aufs, Origin::None),
    ty("mqueue", Fstype::Mqueue, Origin::New),
    ty("fuse", Fstype::Fuse, Origin::None),
    ty("overlay", Fstype::Overlayfs, Origin::Layered),
    ty("autofs", Fstype::Autofs, Origin::Automatic),
    ty("nsfs", Fstype::Unsupported, Origin::Namespace),
];

/// The type of a mount that is in no table.
pub(super) const UNSUPPORTED: FsType = ty("", Fstype::Unsupported, Origin::None);

/// The type of a mount that a plain mount call is trusted to bring back.
pub(super) const AUTO: FsType = ty("", Fstype::Auto, Origin::Kernel);

impl Default for FsType {
    fn default() -> Self {
        UNSUPPORTED
    }
}

/// The type of that name.
#[must_use]
pub(super) fn by_name(name: &str) -> FsType {
    TYPES.iter().find(|t| t.name == name).copied().unwrap_or(UNSUPPORTED)
}

/// The options between the commas; one that is empty does not count.
pub(super) fn split_options(options: &OsStr) -> impl Iterator<Item = &OsStr> {
    options.as_bytes().split(|&b| b == b',').filter(|o| !o.is_empty()).map(OsStr::from_bytes)
}

/// Options, separated by commas.
pub(super) fn join_options<'o>(options: impl IntoIterator<Item = &'o OsStr>) -> OsString {
    let all: Vec<&[u8]> = options.into_iter().map(OsStr::as_bytes).collect();
    OsString::from_vec(all.join(&b','))
}

/// Names of superblock options that are `MS_*` flags.
const SB_FLAGS: &[(&str, u64)] = &[
    ("ro", libc::MS_RDONLY),
    ("sync", libc::MS_SYNCHRONOUS),
    ("dirsync", libc::MS_DIRSYNC),
    ("mand", libc::MS_MANDLOCK),
    ("lazytime", libc::MS_LAZYTIME),
];

/// Splits superblock options into flags and the rest.
#[must_use]
pub(super) fn take_flags(options: &OsStr) -> (u64, OsString) {
    let mut flags = 0;
    let rest = split_options(options).filter(|option| {
        let flag = SB_FLAGS.iter().find(|(name, _)| OsStr::new(name) == *option);
        flags |= flag.map_or(0, |(_, flag)| *flag);
        flag.is_none() && *option != "rw"
    });
    let rest = join_options(rest);
    (flags, rest)
}

/// The names of superblock flags.
pub(super) fn flag_names(sb_flags: u64) -> impl Iterator<Item = &'static str> {
    SB_FLAGS.iter().filter(move |(_, flag)| sb_flags & flag != 0).map(|(name, _)| *name)
}

/// Flags of a mount that take rights away.
pub(crate) const NARROW: u64 =
    libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | MS_NOSYMFOLLOW;

/// The names of flags of a mount that a list of mounts shows, but for the times of access (see [`access_times`]).
pub(crate) fn mount_flag_names(flags: u64) -> impl Iterator<Item = &'static str> {
    const NAMES: [(&str, u64); 6] = [
        ("ro", libc::MS_RDONLY),
        ("nosuid", libc::MS_NOSUID),
        ("nodev", libc::MS_NODEV),
        ("noexec", libc::MS_NOEXEC),
        ("nodiratime", libc::MS_NODIRATIME),
        ("nosymfollow", MS_NOSYMFOLLOW),
    ];
    NAMES.into_iter().filter(move |(_, flag)| flags & flag != 0).map(|(name, _)| name)
}

/// How a mount with these flags keeps times of access, as lists of mounts have it.
#[must_use]
pub(crate) fn access_times(flags: u64) -> &'static str {
    if flags & libc::MS_NOATIME != 0 {
        "noatime"
    } else if flags & libc::MS_STRICTATIME != 0 {
        "strictatime"
    } else {
        "relatime"
    }
}

/// `MS_*` flags of a mount and what mount_setattr(2) calls them. The modes of
/// access time are values of one field there.
const MOUNT_FLAGS: &[(u64, u64)] = &[
    (libc::MS_RDONLY, libc::MOUNT_ATTR_RDONLY),
    (libc::MS_NOSUID, libc::MOUNT_ATTR_NOSUID),
    (libc::MS_NODEV, libc::MOUNT_ATTR_NODEV),
    (libc::MS_NOEXEC, libc::MOUNT_ATTR_NOEXEC),
    (libc::MS_NODIRATIME, libc::MOUNT_ATTR_NODIRATIME),
    (MS_NOSYMFOLLOW, libc::MOUNT_ATTR_NOSYMFOLLOW),
];

/// The attributes that give a mount exactly these `MS_*` flags.
#[must_use]
pub(super) fn attributes(flags: u64) -> torpor_sys::mount::MountAttributes {
    let all = MOUNT_FLAGS.iter().fold(libc::MOUNT_ATTR__ATIME, |all, (_, attr)| all | attr);
    let mut set = MOUNT_FLAGS
        .iter()
        .filter(|(flag, _)| flags & flag != 0)
        .fold(0, |set, (_, attr)| set | attr);
    set |= match access_times(flags) {
        "noatime" => libc::MOUNT_ATTR_NOATIME,
        "strictatime" => libc::MOUNT_ATTR_STRICTATIME,
        _ => libc::MOUNT_ATTR_RELATIME,
    };
    torpor_sys::mount::MountAttributes { set, clear: all, propagation: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn superblock_options() {
        let (flags, rest) = take_flags(OsStr::new("rw,size=65536k,mode=755"));
        assert_eq!((flags, rest.to_str()), (0, Some("size=65536k,mode=755")));
        let (flags, rest) = take_flags(OsStr::new("ro,lazytime"));
        assert_eq!((flags, rest.to_str()), (libc::MS_RDONLY | libc::MS_LAZYTIME, Some("")));
        assert_eq!(flag_names(flags).collect::<Vec<_>>(), ["ro", "lazytime"]);
    }

    #[test]
    fn every_type_is_found_by_its_name() {
        TYPES.iter().for_each(|ty| assert_eq!(by_name(ty.name), *ty));
        assert_eq!(by_name("ext4"), UNSUPPORTED);
    }

    #[test]
    fn access_times_are_one_field() {
        let attr = |flags| attributes(flags).set;
        assert_eq!(attr(libc::MS_RELATIME), libc::MOUNT_ATTR_RELATIME);
        assert_eq!(
            attr(libc::MS_NOATIME | libc::MS_RDONLY),
            libc::MOUNT_ATTR_NOATIME | libc::MOUNT_ATTR_RDONLY
        );
        assert_eq!(attr(libc::MS_STRICTATIME), libc::MOUNT_ATTR_STRICTATIME);
    }
}
