//! Directories that another user may have made, or made up: only what this user alone can have written is
//! believed, since it says what root removes and writes.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, openat, stat};
use rustix::process::geteuid;

/// What others may do to a file that only its owner writes: nothing.
const WRITE_OF_OTHERS: u32 = 0o022;
/// In a directory with this bit nobody renames or removes what belongs to somebody else.
const STICKY: u32 = 0o1000;

/// A directory that this user owns, and that nobody else may write to.
#[derive(Debug)]
pub(crate) struct OwnDir(OwnedFd);

impl OwnDir {
    /// Opens it, if it is one; a link to one is none.
    ///
    /// # Errors
    /// If it is no directory, or somebody else can write to it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = open(path, flags, Mode::empty())?;
        let about = fstat(&dir)?;
        if about.st_uid != geteuid().as_raw() || about.st_mode & WRITE_OF_OTHERS != 0 {
            return Err(io::Error::other("somebody else can write to it"));
        }
        Ok(Self(dir))
    }

    /// Opens a regular file in it to read. What is something else is not waited for.
    ///
    /// # Errors
    /// If it is not there, or no regular file.
    pub(crate) fn read(&self, name: &str) -> io::Result<File> {
        self.regular(name, OFlags::RDONLY)
    }

    /// Opens a regular file in it, and makes it first if it is not there.
    ///
    /// # Errors
    /// If it cannot be made, or is no regular file.
    pub(crate) fn make(&self, name: &str) -> io::Result<File> {
        self.regular(name, OFlags::RDWR | OFlags::CREATE)
    }

    fn regular(&self, name: &str, how: OFlags) -> io::Result<File> {
        let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is no regular file"));
        }
        Ok(file.into())
    }
}

/// Whether nobody else can exchange what this user makes in a directory.
#[must_use]
pub(crate) fn keeps_what_is_mine(dir: &Path) -> bool {
    let safe = |about: Stat| {
        let mine = [0, geteuid().as_raw()].contains(&about.st_uid);
        mine && (about.st_mode & WRITE_OF_OTHERS == 0 || about.st_mode & STICKY != 0)
    };
    stat(dir).is_ok_and(safe)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_what_nobody_else_writes_is_believed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        fs::create_dir(&own).unwrap();
        let mode = |mode| fs::set_permissions(&own, Permissions::from_mode(mode)).unwrap();
        mode(0o755);
        fs::write(own.join("file"), "x").unwrap();
        symlink("file", own.join("link")).unwrap();
        let fifo = own.join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let opened = OwnDir::open(&own).unwrap();
        assert!(opened.read("file").is_ok() && opened.make("new").is_ok());
        for name in ["link", "fifo", "none"] {
            assert!(opened.read(name).is_err(), "{name}");
        }
        symlink(&own, dir.path().join("to")).unwrap();
        assert!(OwnDir::open(&dir.path().join("to")).is_err());
        assert!(OwnDir::open(&own.join("file")).is_err());
        for (bits, is_own, keeps) in [
            (0o755, true, true),
            (0o775, false, false),
            (0o757, false, false),
            (0o1777, false, true),
        ] {
            mode(bits);
            assert_eq!((OwnDir::open(&own).is_ok(), keeps_what_is_mine(&own)), (is_own, keeps));
        }
        assert!(!keeps_what_is_mine(&dir.path().join("none")));
    }
}
