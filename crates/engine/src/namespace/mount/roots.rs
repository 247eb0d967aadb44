//! The root directories of restored mount namespaces, below which paths lead.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use torpor_sys::rights::{FileRights, Limited};

use crate::error::{Context, Error, Result};
use crate::file::description::{open_in, reopen, without_waiting};

/// `CAP_DAC_OVERRIDE`, `CAP_FOWNER` (linux/capability.h).
const DAC_OVERRIDE: u32 = 1;
const FOWNER: u32 = 3;

/// Where the paths of the images begin.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    /// The root directory of each mount namespace, by its image number.
    pub by_ns: HashMap<u32, OwnedFd>,
    /// The mount namespace (image number) that each dumped mount id belongs to.
    pub of_mount: HashMap<i32, u32>,
    /// The mount namespace of the root task.
    pub first: Option<u32>,
    /// What the calling runtime has given the container, if that is known.
    pub rights: Option<FileRights>,
}

impl Roots {
    /// Opens a path as the tasks of a mount namespace see it. `mnt_id` is the
    /// dumped mount that it was opened through, -1 for the root task's namespace.
    /// The path is resolved inside that namespace's root; symbolic links cannot
    /// lead out of it. A fifo at its end is not waited for.
    /// It is opened with no more than what the calling runtime passed: its descriptor keeps the
    /// credentials of its opener. The owner of a file could give itself the right to open it.
    ///
    /// # Errors
    /// If no mount namespace is known; `ENOENT`, `ENOTDIR` or `ELOOP` if the path leads nowhere there, `EACCES` if the
    /// container's user may not open what is there like this, `ENXIO` for a fifo that is to be written to and that nobody reads.
    pub(crate) fn open_path(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd> {
        let limited = self.limit()?;
        match self.open_own(mnt_id, path, flags, mode) {
            Err(Error::Os { what, source })
                if limited.is_some() && source.kind() == ErrorKind::PermissionDenied =>
            {
                drop(limited);
                if let Some(opened) = self.open_as_owner(mnt_id, path, flags)? {
                    return Ok(opened);
                }
                let what = format!("{what} with no more rights than the calling runtime gives");
                Err(Error::Os { what, source })
            }
            other => other,
        }
    }

    /// Opens a regular file that belongs to the container's user, whatever its mode is by now.
    fn open_as_owner(&self, mnt_id: i32, path: &[u8], flags: OFlags) -> Result<Option<OwnedFd>> {
        let Some(rights @ FileRights { user: Some(user), .. }) = &self.rights else {
            return Ok(None);
        };
        let limited = self.limit()?;
        let found = self.open_own(mnt_id, path, OFlags::PATH, Mode::empty());
        drop(limited);
        let Ok(file) = found else { return Ok(None) };
        let stat = rustix::fs::fstat(&file).context(|| "fstat".to_owned())?;
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_regular || stat.st_uid != *user {
            return Ok(None);
        }
        let _owner = rights.with(DAC_OVERRIDE).limit().context(|| "open a file".to_owned())?;
        Ok(without_waiting(flags, |flags| reopen(&file, flags)).ok())
    }

    /// Opens a program to map it, which the container's user may run, but not read: exec(2) maps it as well. `None` if
    /// the user may not run it, or is not limited.
    ///
    /// # Errors
    /// If it cannot be opened with all rights.
    pub(crate) fn open_program(&self, mnt_id: i32, path: &[u8]) -> Result<Option<OwnedFd>> {
        let program = self.allowed(mnt_id, path, FileType::RegularFile, Access::EXEC_OK)?;
        program.map(|file| reopen(&file, OFlags::RDONLY)).transpose()
    }

    /// Opens a fifo for both directions, of which the container's user may have those in `flags` only. `None` if it
    /// may not have them, or is not limited.
    ///
    /// # Errors
    /// If it cannot be opened with all rights.
    pub(crate) fn open_fifo(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
    ) -> Result<Option<OwnedFd>> {
        let access = match flags.intersection(OFlags::RWMODE) {
            OFlags::RDONLY => Access::READ_OK,
            OFlags::WRONLY => Access::WRITE_OK,
            _ => Access::READ_OK | Access::WRITE_OK,
        };
        let fifo = self.allowed(mnt_id, path, FileType::Fifo, access)?;
        fifo.map(|file| reopen(&file, OFlags::RDWR | OFlags::NONBLOCK)).transpose()
    }

    /// Whether the container's user may make files in a directory. Where nobody can, whoever makes one finds out.
    ///
    /// # Errors
    /// If the rights for that cannot be given up.
    pub(crate) fn may_make_in(&self, dir: BorrowedFd<'_>) -> Result<bool> {
        let Some(_limited) = self.limit()? else { return Ok(true) };
        Ok(!is_denied(accessed(dir, Access::WRITE_OK | Access::EXEC_OK)))
    }

    /// Whether the container's user may read a file, or could give itself the right to.
    ///
    /// # Errors
    /// If the rights for that cannot be given up; if the kernel says nothing of the file.
    pub(crate) fn may_read(&self, file: BorrowedFd<'_>) -> Result<bool> {
        let Some(_limited) = self.limit()? else { return Ok(true) };
        let stat = rustix::fs::fstat(file).context(|| "fstat".to_owned())?;
        let is_own = self.rights.as_ref().and_then(|rights| rights.user) == Some(stat.st_uid);
        Ok(is_own || !is_denied(accessed(file, Access::READ_OK)))
    }

    /// Whether the container's user may take a file's name from it, in a directory where that user may make files: who may
    /// in one for all (`S_ISVTX`), chmod(2) says.
    ///
    /// # Errors
    /// If the kernel says nothing of the directory.
    pub(crate) fn may_take_from(&self, dir: BorrowedFd<'_>, file: &Stat) -> Result<bool> {
        let Some(rights) = &self.rights else { return Ok(true) };
        let dir = rustix::fs::fstat(dir).context(|| "fstat".to_owned())?;
        let is_for_all = Mode::from_raw_mode(dir.st_mode).contains(Mode::SVTX);
        let is_own = |stat: &Stat| rights.user.is_none_or(|user| user == stat.st_uid);
        let has_right = rights.capabilities & 1 << FOWNER != 0;
        Ok(!is_for_all || has_right || is_own(&dir) || is_own(file))
    }

    /// What a path leads to (`O_PATH`), if it is of this type, and the container's user is limited and has this access
    /// to it.
    fn allowed(
        &self,
        mnt_id: i32,
        path: &[u8],
        kind: FileType,
        access: Access,
    ) -> Result<Option<OwnedFd>> {
        let Some(_limited) = self.limit()? else { return Ok(None) };
        let Ok(file) = self.open_own(mnt_id, path, OFlags::PATH, Mode::empty()) else {
            return Ok(None);
        };
        let stat = rustix::fs::fstat(&file).context(|| "fstat".to_owned())?;
        let is_of_kind = FileType::from_raw_mode(stat.st_mode) == kind;
        let has_access = accessed(&file, access).is_ok();
        Ok((is_of_kind && has_access).then_some(file))
    }

    /// Opens a path with all rights, for what the restore has put there itself or recognizes by what it is.
    ///
    /// # Errors
    /// If no mount namespace is known; `ENOENT`, `ENOTDIR` or `ELOOP` if the path leads nowhere there, `ETXTBSY` for a
    /// program that runs and is to be written to, `ENXIO` for a fifo to be written to that nobody reads.
    pub(crate) fn open_own(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd> {
        let root = self.root_of_mount(mnt_id)?;
        without_waiting(flags, |flags| {
            open_in(root, path, flags, mode)
                .context(|| format!("open {}", String::from_utf8_lossy(path)))
        })
    }

    /// While the result lives, this thread has no more rights for files than what the runtime passed.
    ///
    /// # Errors
    /// As [`FileRights::limit`].
    pub(crate) fn limit(&self) -> Result<Option<Limited>> {
        let limited = self.rights.as_ref().map(FileRights::limit).transpose();
        limited.context(|| "open a file as the container's user".to_owned())
    }

    /// The root directory of the mount namespace that `mnt_id` belongs to.
    ///
    /// # Errors
    /// If no mount namespace is known at all.
    pub(crate) fn root_of_mount(&self, mnt_id: i32) -> Result<BorrowedFd<'_>> {
        let of_mount = self.of_mount.get(&mnt_id).copied().or(self.first);
        of_mount
            .and_then(|ns| self.by_ns.get(&ns))
            .map(AsFd::as_fd)
            .ok_or_else(|| Error::invalid("mountpoints", format!("no root for mount {mnt_id}")))
    }
}

/// Whether this thread has an access to a file: by the ids for files, and not the real ones.
fn accessed(file: impl AsFd, access: Access) -> rustix::io::Result<()> {
    let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::accessat(CWD, link, access, AtFlags::EACCESS)
}

/// Whether an access was refused. What else is wrong with a file, whoever uses it finds out.
fn is_denied(accessed: rustix::io::Result<()>) -> bool {
    matches!(accessed, Err(Errno::ACCESS | Errno::PERM))
}
