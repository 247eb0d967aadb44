//! What a directory holds, set aside while something else takes its place.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// The directory, in that of a checkpoint, that the one before it lies in until the new one counts.
pub const ASIDE: &str = ".former";

/// Files of a directory that lie in [`ASIDE`] of it. It is locked meanwhile: nobody else sets
/// anything aside there.
#[derive(Debug)]
pub struct Aside {
    dir: OwnedFd,
    aside: Option<OwnedFd>,
}

impl Aside {
    /// Locks a directory, and opens what somebody who was killed has left aside there.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if somebody else has locked it; if [`ASIDE`] is no directory.
    pub fn lock(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let dir = dir.try_clone_to_owned()?;
        match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
            // There are file systems without locks.
            Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::NOLCK | Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut locked = Aside { dir, aside: None };
        match locked.open() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            opened => locked.aside = Some(opened?),
        }
        Ok(locked)
    }

    fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.dir, ASIDE, flags, Mode::empty())?)
    }

    /// Whether anything is aside.
    #[must_use]
    pub fn has_any(&self) -> bool {
        self.aside.is_some()
    }

    /// Sets these files aside, in this order.
    ///
    /// # Errors
    /// If the directory cannot be made, or a file cannot be moved.
    pub fn set<'n>(&mut self, names: impl IntoIterator<Item = &'n str>) -> io::Result<()> {
        for name in names {
            let aside = match &self.aside {
                Some(aside) => aside,
                None => {
                    rustix::fs::mkdirat(&self.dir, ASIDE, Mode::RWXU)?;
                    self.aside.insert(self.open()?)
                }
            };
            rustix::fs::renameat(&self.dir, name, aside, name)?;
        }
        Ok(())
    }

    /// The names of what is aside.
    fn names(&self) -> io::Result<Vec<String>> {
        let Some(aside) = &self.aside else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for entry in Dir::read_from(aside)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    /// Puts all back, the file `last` after all others.
    ///
    /// # Errors
    /// If a file cannot be moved.
    pub fn put_back(&mut self, last: &str) -> io::Result<()> {
        let mut names = self.names()?;
        names.sort_by_key(|name| name == last);
        if let Some(aside) = &self.aside {
            for name in names {
                rustix::fs::renameat(aside, &name, &self.dir, &name)?;
            }
        }
        self.leave()
    }

    /// Removes all that is aside.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn discard(&mut self) -> io::Result<()> {
        let names = self.names()?;
        if let Some(aside) = &self.aside {
            for name in names {
                rustix::fs::unlinkat(aside, &name, AtFlags::empty())?;
            }
        }
        self.leave()
    }

    fn leave(&mut self) -> io::Result<()> {
        match self.aside.take() {
            Some(_) => Ok(rustix::fs::unlinkat(&self.dir, ASIDE, AtFlags::REMOVEDIR)?),
            None => Ok(()),
        }
    }
}

/// Not by closing it: children that this process has forked may have it open, too.
impl Drop for Aside {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.dir, FlockOperation::Unlock);
    }
}
