//! What all kinds of open file descriptions have in common.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use torpor_sys::notify;

use crate::error::{Context, Result};
use crate::namespace::user::IdMaps;

/// `O_LARGEFILE` as the kernel shows it: libc's constant is 0 on 64-bit systems.
const O_LARGEFILE: u32 = 0o100_000;

/// `PIPEFS_MAGIC` of linux/magic.h: the file system of pipes that have no name.
pub(crate) const PIPEFS: i64 = 0x5049_5045;

/// Number of `/dev/net/tun` (linux/miscdevice.h).
const TUN: (u32, u32) = (10, 200);

/// The `O_*` bits that `fcntl(F_SETFL)` can change, less `O_ASYNC`, which comes
/// with the owner (see [`super::fown`]).
const SETTABLE: OFlags =
    OFlags::APPEND.union(OFlags::NONBLOCK).union(OFlags::DIRECT).union(OFlags::NOATIME);

/// Whether this is `/dev/net/tun`, which has the devices of the network that it is opened in.
pub(crate) fn is_tun(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
        && (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)) == TUN
}

/// The flags to open a description with, from those in its image: without what
/// belongs to the descriptor, to the first opening, or to its owner. A terminal never
/// becomes ours by the way.
pub(crate) fn open_flags(flags: u32) -> OFlags {
    let once = OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC | OFlags::CLOEXEC;
    // O_TMPFILE contains O_DIRECTORY, which a plain directory keeps.
    let tmpfile = if flags & OFlags::TMPFILE.bits() == OFlags::TMPFILE.bits() {
        OFlags::TMPFILE
    } else {
        OFlags::empty()
    };
    let known = OFlags::from_bits_retain(flags & !O_LARGEFILE & !libc::O_ASYNC.cast_unsigned());
    let flags = known.difference(once).difference(tmpfile);
    // openat2(2) takes no flags with O_PATH that have no meaning there.
    if flags.contains(OFlags::PATH) { flags } else { flags | OFlags::NOCTTY }
}

/// The access mode in `flags`.
pub(crate) fn access(flags: u32) -> OFlags {
    OFlags::from_bits_retain(flags).intersection(OFlags::RWMODE)
}

/// Whether a description with `flags` can be read from.
pub(crate) fn is_readable(flags: u32) -> bool {
    access(flags) != OFlags::WRONLY && !OFlags::from_bits_retain(flags).contains(OFlags::PATH)
}

/// Opens the file behind `file` once more: a new description of the same inode,
/// through procfs's link.
///
/// # Errors
/// `EACCES` if the inode does not let this process do what `flags` ask for, `ENXIO` for what is opened by no path (a
/// socket) or has nobody at its other end, `EMFILE` if this process has as many descriptors as it may.
pub(crate) fn reopen(file: impl AsFd, flags: OFlags) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty())
        .context(|| format!("open {path} again"))
}

/// What `open` opens with the flags that it is handed, which end as `flags`. Nobody is waited for: what is there now may be
/// a fifo, and a fifo that nobody else opens waits for ever.
///
/// # Errors
/// Those of `open`, such as `ENXIO` for a fifo to be written to that nobody reads.
pub(crate) fn without_waiting(
    flags: OFlags,
    open: impl FnOnce(OFlags) -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    if flags.intersects(OFlags::PATH | OFlags::NONBLOCK) {
        return open(flags);
    }
    let file = open(flags | OFlags::NONBLOCK)?;
    set_status_flags(&file, flags.bits())?;
    Ok(file)
}

/// Gives a description the changeable flags in `flags`.
///
/// # Errors
/// `EINVAL` if what is open does not have the flag (`O_DIRECT` on a file system without it), `EPERM` if `O_APPEND` is
/// to go from a file that is for appending only, or `O_NOATIME` is to be set on somebody else's file.
pub(crate) fn set_status_flags(file: impl AsFd, flags: u32) -> Result<()> {
    let now = rustix::fs::fcntl_getfl(&file).context(|| "F_GETFL".to_owned())?;
    let wanted = OFlags::from_bits_retain(flags).intersection(SETTABLE);
    if now.intersection(SETTABLE) == wanted {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(&file, now.difference(SETTABLE) | wanted)
        .context(|| "F_SETFL".to_owned())
}

/// A duplicate of a descriptor, closed on exec.
///
/// # Errors
/// `EMFILE` if this process has as many descriptors as it may.
pub(crate) fn duplicate(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(file, 0).context(|| "F_DUPFD_CLOEXEC".to_owned())
}

/// What the kernel shows for a user or group that a user namespace does not have.
const NOBODY: u32 = 65534;

/// An owner as the tree's user namespace knows it.
pub(crate) fn inside(maps: &IdMaps, stat: &Stat) -> (u32, u32) {
    let (uid, gid) = (maps.uid_inside(stat.st_uid), maps.gid_inside(stat.st_gid));
    (uid.unwrap_or(NOBODY), gid.unwrap_or(NOBODY))
}

/// An owner in the images, as the supervisor knows it.
pub(crate) fn outside(maps: &IdMaps, uid: u32, gid: u32) -> (Option<Uid>, Option<Gid>) {
    let (uid, gid) = (maps.uid_outside(uid), maps.gid_outside(gid));
    let (uid, gid) = (uid.unwrap_or(NOBODY), gid.unwrap_or(NOBODY));
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

/// Opens `path` as a task would whose root directory is `root`; symbolic links
/// cannot lead out of it.
///
/// # Errors
/// `ENOENT`, `ENOTDIR` or `ELOOP` if the path leads nowhere, `EACCES` if this process may not go there or open what is
/// there like this, `EAGAIN` if something was renamed meanwhile and the kernel cannot be sure of the root.
pub(crate) fn open_in(
    root: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    mode: Mode,
) -> rustix::io::Result<OwnedFd> {
    open_so(root, path, (flags, mode), ResolveFlags::IN_ROOT)
}

/// The same over no link, without making anything: where tasks have removed a directory they could have laid out a link to
/// another one.
///
/// # Errors
/// As [`open_in`]; `ELOOP` if there is a link on the way.
pub(crate) fn open_over_no_link(
    root: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    open_so(root, path, (flags, Mode::empty()), resolve)
}

fn open_so(
    root: BorrowedFd<'_>,
    path: &[u8],
    (flags, mode): (OFlags, Mode),
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let start = path.iter().position(|&c| c != b'/').unwrap_or(path.len());
    let relative = if start == path.len() { b"." } else { &path[start..] };
    rustix::fs::openat2(root, relative, flags | OFlags::CLOEXEC, mode, resolve)
}

/// What `path` leads to under `root`, links at its end not followed.
///
/// # Errors
/// If `path` cannot be opened or asked for its status. That nothing is there is no error.
pub(crate) fn lookup(root: BorrowedFd<'_>, path: &[u8]) -> Result<Option<Stat>> {
    let what = || format!("look up {}", String::from_utf8_lossy(path));
    match open_in(root, path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty()) {
        Ok(file) => rustix::fs::fstat(file).map(Some).context(what),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(e) => Err(e).context(what),
    }
}

/// A device number as the kernel has it (linux/kdev_t.h), unlike stat(2): 20 bits for the minor
/// one.
pub(crate) fn kernel_number(dev: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    major << 20 | minor & 0xf_ffff
}

/// The same file as `file`, opened with `O_PATH` through the mount that `mount` is on. A handle says of no file system, and
/// leads to some file on each that takes it.
///
/// # Errors
/// `EXDEV` if the mount is of another file system; those of name_to_handle_at(2) and open_by_handle_at(2).
pub(crate) fn through_mount(
    mount: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
) -> std::io::Result<OwnedFd> {
    let (kind, handle) = notify::handle_of(file)?;
    let opened = notify::open_by_handle(mount, kind, &handle)?;
    match same_inode(&rustix::fs::fstat(file)?, &rustix::fs::fstat(&opened)?) {
        true => Ok(opened),
        false => Err(Errno::XDEV.into()),
    }
}

/// Whether two results of stat(2) are of the same inode.
pub(crate) fn same_inode(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_first_opening_are_left_out() {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::TMPFILE;
        let kept = OFlags::RDWR | OFlags::APPEND | OFlags::NOCTTY;
        assert_eq!(open_flags(flags.bits() | O_LARGEFILE), kept);
        let path = OFlags::PATH | OFlags::DIRECTORY;
        assert_eq!(open_flags(path.bits()), path);
    }

    #[test]
    fn a_description_is_opened_again() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let second = reopen(&read, OFlags::RDONLY | OFlags::NONBLOCK).unwrap();
        rustix::io::write(&write, b"x").unwrap();
        assert_eq!(rustix::io::read(&second, &mut [0u8; 4]).unwrap(), 1);
        set_status_flags(&read, libc::O_NONBLOCK.cast_unsigned()).unwrap();
        assert_eq!(rustix::io::read(&read, &mut [0u8; 4]), Err(rustix::io::Errno::AGAIN));
    }
}
