//! Directories for images that are needed as long as a migration takes.
//!
//! Each holds a file, [`MARK`], which whoever needs the directory has locked: the process that made it, and the jobs
//! that work there. The kernel lets go when the last of them has ended, however it did. So anybody can tell a
//! directory that is needed from one that was left behind, and which directories are of this kind at all.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;

use crate::error::{Context, Error, Result};
use crate::record::make_private;
use crate::wire::address::SOCKET_MAX;

/// The file that is locked.
const MARK: &str = "torpor-in-use";
/// How often is looked.
const PAUSE: Duration = Duration::from_millis(5);
/// No name of a socket in such a directory is longer: it has the number of a process.
const SOCKET: &str = "runtime-4194304.pages";

/// A directory that is removed when this is dropped. As a descriptor, it is what keeps others from doing so earlier.
#[derive(Debug)]
pub(crate) struct WorkDir {
    path: PathBuf,
    mark: File,
    /// Whether somebody else removes it.
    is_left: bool,
}

impl WorkDir {
    /// Makes it, and all above it.
    ///
    /// # Errors
    /// If the directory cannot be made, or not be marked as in use; if somebody has something else there.
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let name = path.join(MARK);
        let failed = || name.display().to_string();
        loop {
            make_private(&path)?;
            if !name.exists() && fs::read_dir(&path).context(failed)?.next().is_some() {
                return Err(Error::refused_with(
                    format!("{} is no directory of images, and is not empty", path.display()),
                    "another --id, or another --work-dir",
                ));
            }
            let mut options = OpenOptions::new();
            let made = options.write(true).create(true).truncate(false).mode(0o600).open(&name);
            let mark = match made {
                // Taken for one that was left behind before it was locked.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                made => made.context(failed)?,
            };
            flock(&mark, FlockOperation::LockExclusive).context(failed)?;
            let own = mark.metadata().context(failed)?.ino();
            if fs::metadata(&name).is_ok_and(|there| there.ino() == own) {
                return Ok(Self { path, mark, is_left: false });
            }
        }
    }

    /// Where it is.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves it to whoever removes it when nobody needs it any more ([`clear`]).
    pub(crate) fn leave(&mut self) {
        self.is_left = true;
    }

    /// Whether the file system lets a file in it lose what it has in the middle.
    #[must_use]
    pub(crate) fn takes_holes(&self) -> bool {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.mark, how, 0, 1).is_ok()
    }
}

impl AsFd for WorkDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mark.as_fd()
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if !self.is_left {
            remove(&self.path);
        }
    }
}

/// Whether there may be sockets in such a directory.
///
/// # Errors
/// If their paths would be longer than the kernel takes them.
pub(crate) fn check_length(path: &Path) -> Result<()> {
    match path.join(SOCKET).as_os_str().len() {
        0..=SOCKET_MAX => Ok(()),
        len => Err(Error::refused_with(
            format!(
                "the directory of images {} has too long a name: {} bytes less are possible",
                path.display(),
                len - SOCKET_MAX
            ),
            "a shorter --work-dir, or a shorter --id",
        )),
    }
}

/// Removes what was left behind in a directory of such directories, but for those of `kept`.
pub(crate) fn sweep(parent: &Path, kept: &[PathBuf]) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| !kept.contains(path)) {
        remove_unused(&path);
    }
}

/// Removes a directory when nobody needs it any more; gives up after `patience`.
pub(crate) fn clear(path: &Path, patience: Duration) {
    let start = Instant::now();
    while !remove_unused(path) {
        if start.elapsed() > patience {
            tracing::warn!("{} is still in use: the next migration removes it", path.display());
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Removes a directory that nobody needs; false if somebody does.
fn remove_unused(path: &Path) -> bool {
    let Ok(mark) = File::open(path.join(MARK)) else {
        // Somebody else's, which is not empty; or whoever removed it has ended at the last step.
        let _ = fs::remove_dir(path);
        return true;
    };
    match flock(&mark, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => remove(path),
        Err(Errno::WOULDBLOCK) => return false,
        Err(error) => tracing::warn!("{}: {error}", path.display()),
    }
    true
}

fn remove(path: &Path) {
    match empty(path).and_then(|()| fs::remove_dir_all(path)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!("{}: {error}", path.display());
        }
        _ => {}
    }
}

/// All but the mark goes first: what is left if this ends too early can be told by it.
fn empty(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name() == MARK {
            continue;
        } else if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn directories_have_names_that_leave_room_for_sockets() {
        let path = Path::new("/").join("d".repeat(SOCKET_MAX - 2 - SOCKET.len()));
        check_length(&path).unwrap();
        let error = check_length(&path.join("abcd")).unwrap_err();
        assert!(error.to_string().contains("too long a name: 5 bytes less"), "{error}");
        assert!(error.hint().unwrap().contains("--work-dir"));
    }

    #[test]
    fn what_nobody_needs_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        let used = WorkDir::create(path("used")).unwrap();
        fs::create_dir_all(path("strange/work")).unwrap();
        fs::create_dir(path("left")).unwrap();
        fs::write(path("left").join(MARK), "").unwrap();
        fs::write(path("left/core-1.img"), "image").unwrap();
        let job = File::open(path("left").join(MARK)).unwrap();
        flock(&job, FlockOperation::LockExclusive).unwrap();
        sweep(parent.path(), &[]);
        clear(&path("left"), Duration::ZERO);
        assert!(path("left").exists(), "a job works there");
        drop(job);
        // A program that another test starts at this moment has all descriptors until it is executed.
        clear(&path("left"), Duration::from_secs(60));
        assert!(!path("left").exists());
        assert!(path("strange/work").exists() && used.path().exists());
        WorkDir::create(path("strange")).unwrap_err();
        assert!(path("strange/work").exists(), "it is somebody's");
        drop(used);
        assert!(!path("used").exists());
        let mut open = WorkDir::create(path("open")).unwrap();
        open.leave();
        drop(open);
        assert!(path("open").exists(), "somebody else removes it");
        clear(&path("open"), Duration::from_secs(60));
        assert!(!path("open").exists());
        fs::create_dir(path("empty")).unwrap();
        sweep(parent.path(), &[]);
        assert!(!path("empty").exists());
        clear(&path("nowhere"), Duration::ZERO);
    }
}
