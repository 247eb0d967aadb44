//! What files have beside their content: owners, modes, times, extended attributes, and the marks of an overlay.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chownat,
    fsetxattr, futimens, mknodat, openat, symlinkat,
};
use rustix::io::Errno;
use torpor_kernel::tree;
pub(crate) use torpor_kernel::tree::Attributes;

/// Owner, mode and times of a file.
#[derive(Debug, Clone)]
pub(crate) struct Marks {
    /// User and group.
    pub owner: (u32, u32),
    /// What may be done with it.
    pub mode: u32,
    /// When it was read and changed.
    pub times: Timestamps,
}

impl Marks {
    /// Those of a file that is there.
    #[must_use]
    pub(crate) fn of(meta: &Metadata) -> Self {
        let last_access = time((meta.atime(), meta.atime_nsec()));
        let last_modification = time((meta.mtime(), meta.mtime_nsec()));
        Self {
            owner: (meta.uid(), meta.gid()),
            mode: meta.mode(),
            times: Timestamps { last_access, last_modification },
        }
    }

    /// Gives them to a file, and its extended attributes: these after the owner, whose change takes capabilities away.
    ///
    /// # Errors
    /// If the file system does not take one of them, or this process may not give it.
    pub(crate) fn give(&self, file: &File, attributes: &Attributes) -> io::Result<()> {
        fchown(file, Some(self.owner.0), Some(self.owner.1))?;
        file.set_permissions(Permissions::from_mode(self.mode & 0o7777))?;
        for (name, value) in attributes {
            fsetxattr(file, name.as_slice(), value, XattrFlags::empty())?;
        }
        Ok(futimens(file, &self.times)?)
    }

    /// Gives as much of that as this process may, and as the file system takes. The right to become a user or a group is
    /// given only with the owner.
    ///
    /// # Errors
    /// If the file is not this user's.
    pub(crate) fn give_what_may_be(&self, file: &File, attributes: &Attributes) -> io::Result<()> {
        let (user, group) = self.owner;
        let mut mode = self.mode & 0o7777;
        if fchown(file, Some(user), Some(group)).is_err() {
            mode &= !0o6000;
            let _ = fchown(file, None, Some(group));
        }
        file.set_permissions(Permissions::from_mode(mode))?;
        for (name, value) in attributes {
            let _ = fsetxattr(file, name.as_slice(), value, XattrFlags::empty());
        }
        Ok(futimens(file, &self.times)?)
    }
}

/// A time by its seconds and nanoseconds.
#[must_use]
pub(crate) fn time((seconds, nanoseconds): (i64, i64)) -> Timespec {
    Timespec { tv_sec: seconds, tv_nsec: nanoseconds }
}

/// The extended attributes of a file or directory that is open; but for those by which an overlay remembers files of its
/// other layers.
///
/// # Errors
/// If the attributes cannot be read.
pub(crate) fn attributes(file: &File) -> io::Result<Attributes> {
    Ok(but_of_layers(tree::attributes(file)?))
}

/// The same for a copy that gets what this process [may give](Marks::give_what_may_be): those that it may read, and what
/// there is to say about the others.
///
/// # Errors
/// If it cannot be told which there are.
pub(crate) fn attributes_to_give(file: &File) -> io::Result<(Attributes, Option<String>)> {
    let (all, kept_back) = match tree::attributes_shown(file) {
        // Not even their names can be read.
        Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::RANGE)) => {
            let text = format!("extended attributes are left out: {}", io::Error::from(errno));
            return Ok((Attributes::new(), Some(text)));
        }
        shown => shown?,
    };
    let named = |(name, errno): &(Vec<u8>, Errno)| {
        format!("{} ({})", String::from_utf8_lossy(name), io::Error::from(*errno))
    };
    let names: Vec<String> = kept_back.iter().map(named).collect();
    let text = format!("extended attributes are left out: {}", names.join(", "));
    Ok((but_of_layers(all), (!names.is_empty()).then_some(text)))
}

fn but_of_layers(mut all: Attributes) -> Attributes {
    all.retain(|(name, _)| {
        ![&b"trusted.overlay.origin"[..], b"trusted.overlay.impure"].contains(&name.as_slice())
    });
    all
}

/// Whether this marks, in the upper directory of an overlay, that there is nothing.
#[must_use]
pub(crate) fn is_whiteout(meta: &Metadata) -> bool {
    meta.file_type().is_char_device() && meta.rdev() == 0
}

/// Makes such a mark in a directory.
///
/// # Errors
/// If the mark cannot be made: mknod(2) needs privileges.
pub(crate) fn make_whiteout(dir: impl AsFd, name: &Path) -> io::Result<()> {
    Ok(mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0)?)
}

/// Makes a named pipe in a directory, and opens it.
///
/// # Errors
/// If the name is taken, or the file system has no pipes.
pub(crate) fn make_fifo(dir: impl AsFd, name: &Path) -> io::Result<File> {
    mknodat(&dir, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Opened so, it waits for nobody who writes to it.
    Ok(tree::open(dir, name, OFlags::RDONLY | OFlags::NONBLOCK)?.into())
}

/// Makes a symbolic link in a directory.
///
/// # Errors
/// If the name is taken, or the file system has no such links.
pub(crate) fn make_link(dir: impl AsFd, name: &Path, target: &Path) -> io::Result<()> {
    Ok(symlinkat(target, &dir, name)?)
}

/// Gives a symbolic link its owner: user and group.
///
/// # Errors
/// `EPERM`, if this process may not give files to that user or group; as chown(2).
pub(crate) fn give_link(dir: impl AsFd, name: &Path, (user, group): (u32, u32)) -> io::Result<()> {
    let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
    Ok(chownat(dir, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes a new file in a directory, for its owner alone.
///
/// # Errors
/// If the name is taken, or the disk is full.
pub(crate) fn make_file(dir: impl AsFd, name: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}
