//! A directory.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::{Elsewhere, NotRegular, PARENT_LINK, Store, check_name};

/// A directory of image files.
///
/// It is held open and files are opened relative to it, so that it stays the
/// same whatever happens to its path, the root and the mount namespace.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
}

impl Directory {
    /// Opens an existing directory.
    ///
    /// # Errors
    /// If there is none, or it may not be looked into.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::open_at(CWD, path.as_ref(), path.as_ref().to_owned())
    }

    /// Opens a directory, which is made if it is not there (its parent must
    /// be), for its owner only.
    ///
    /// # Errors
    /// If it cannot be made or opened.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        make(CWD, path.as_ref())?;
        Self::open(path)
    }

    /// Takes over a descriptor of a directory; `path` is for messages only.
    #[must_use]
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Directory { path: path.into(), fd }
    }

    fn open_at(at: BorrowedFd<'_>, name: &Path, path: PathBuf) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(at, name, flags, Mode::empty())?;
        Ok(Directory { path, fd })
    }
}

fn make(at: BorrowedFd<'_>, name: &Path) -> io::Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens what is on the way to a directory.
fn step(from: &OwnedFd, name: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(from, name, flags, Mode::empty())
}

/// Whether nothing is further up.
fn is_root(dir: &OwnedFd) -> rustix::io::Result<bool> {
    let (own, up) = (rustix::fs::fstat(dir)?, rustix::fs::statat(dir, "..", AtFlags::empty())?);
    Ok((own.st_dev, own.st_ino) == (up.st_dev, up.st_ino))
}

/// Opens a directory that lies below `top`, and the way to it.
fn beneath(top: &OwnedFd, parts: &[Component<'_>]) -> io::Result<OwnedFd> {
    /// So often something is renamed meanwhile at most.
    const TRIES: u32 = 64;
    let below: PathBuf = parts.iter().collect();
    let below = if parts.is_empty() { Path::new(".") } else { &below };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let open = || rustix::fs::openat2(top, below, flags, Mode::empty(), resolve);
    // The kernel does not know of a `..` then whether it still leads there.
    let mut opened = open();
    for _ in 1..TRIES {
        if opened.as_ref().err() != Some(&Errno::AGAIN) {
            break;
        }
        opened = open();
    }
    match opened {
        Ok(fd) => Ok(fd),
        Err(Errno::XDEV) => Err(Elsewhere::error()),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens a directory that lies below the one two further up from `from`, if nobody but root and this user can change anything
/// on the way.
fn laid_out(from: &OwnedFd, parts: &[Component<'_>]) -> io::Result<OwnedFd> {
    let one = step(from, Path::new(".."))?;
    let mut at = step(&one, Path::new(".."))?;
    if is_root(&at)? || !is_ours(&one)? || !is_ours(&at)? {
        return Err(Elsewhere::error());
    }
    for part in parts {
        let Component::Normal(name) = part else { return Err(Elsewhere::error()) };
        at = match step(&at, Path::new(name)) {
            Ok(fd) => fd,
            // A link, or no directory.
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(Elsewhere::error()),
            Err(errno) => return Err(errno.into()),
        };
        if !is_ours(&at)? {
            return Err(Elsewhere::error());
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(&at, ".", flags, Mode::empty())?)
}

/// Whether only root and this user put something into a directory.
fn is_ours(dir: &OwnedFd) -> rustix::io::Result<bool> {
    let stat = rustix::fs::fstat(dir)?;
    let is_owner = stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw();
    let for_others = Mode::WGRP | Mode::WOTH | Mode::SVTX;
    Ok(is_owner && !Mode::from_raw_mode(stat.st_mode).intersects(for_others))
}

impl Store for Directory {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self, name: &str) -> io::Result<File> {
        check_name(name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::LOOP | Errno::NXIO) => return Err(NotRegular::error()),
            Err(errno) => return Err(errno.into()),
        };
        let file = File::from(fd);
        if !file.metadata()?.is_file() {
            return Err(NotRegular::error());
        }
        Ok(file)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        check_name(name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    fn reopen(&self, name: &str) -> io::Result<File> {
        check_name(name)?;
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.fd, name, flags, Mode::empty())?.into())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        Ok(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())?)
    }

    fn replace(&self, from: &str, name: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(name)?;
        rustix::fs::fsync(self.open(from)?)?;
        rustix::fs::renameat(&self.fd, from, &self.fd, name)?;
        Ok(rustix::fs::fsync(&self.fd)?)
    }

    fn exists(&self, name: &str) -> io::Result<bool> {
        check_name(name)?;
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = vec![];
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    fn relative(&self, path: &Path) -> io::Result<Arc<dyn Store>> {
        Ok(Arc::new(Self::open_at(self.fd.as_fd(), path, self.path.join(path))?))
    }

    fn inner(&self, name: &str) -> io::Result<Arc<dyn Store>> {
        check_name(name)?;
        make(self.fd.as_fd(), Path::new(name))?;
        self.relative(Path::new(name))
    }

    fn parent_path(&self) -> io::Result<Option<PathBuf>> {
        match rustix::fs::readlinkat(&self.fd, PARENT_LINK, []) {
            Ok(target) => Ok(Some(OsString::from_vec(target.into_bytes()).into())),
            // A directory of that name serves as well as a link to one.
            Err(Errno::INVAL) => Ok(Some(PARENT_LINK.into())),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    fn parent_near(&self) -> io::Result<Option<Arc<dyn Store>>> {
        let Some(path) = self.parent_path()? else { return Ok(None) };
        let parts: Vec<Component<'_>> =
            path.components().filter(|part| *part != Component::CurDir).collect();
        let fd = match parts.as_slice() {
            [Component::ParentDir, Component::ParentDir, rest @ ..] => laid_out(&self.fd, rest)?,
            [Component::ParentDir, rest @ ..] => {
                let up = step(&self.fd, Path::new(".."))?;
                if is_root(&up)? {
                    return Err(Elsewhere::error());
                }
                beneath(&up, rest)?
            }
            all => beneath(&self.fd, all)?,
        };
        Ok(Some(Arc::new(Directory { fd, path: self.path.join(path) })))
    }

    fn set_parent(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::symlinkat(path, &self.fd, PARENT_LINK)?)
    }

    fn complete(&self) -> io::Result<()> {
        Ok(())
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.fd)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    fn directory(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}
