//! What the dump finds behind a descriptor.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use torpor_images::proto::{FdTypes, FileEntry, FownEntry};

use crate::error::{Context, Error, Result};
use crate::proc;

/// An open file description met for the first time by the dump.
#[derive(Debug)]
pub(crate) struct Found {
    /// The number that the images know it by.
    pub id: u32,
    /// Index of the first holder among the tasks.
    pub task: usize,
    /// The pid of that, in the supervisor's pid namespace.
    pub holder: i32,
    /// The process that has the descriptor, in the supervisor's pid namespace: the holder, or
    /// this one for what is in flight.
    pub pid: i32,
    /// The number of the descriptor in that task; -1 where there is none (a mapped
    /// file, an executable, a directory).
    pub fd: i32,
    /// A duplicate (`pidfd_getfd`): same description, so do not move its offset.
    pub file: OwnedFd,
    /// `fstat` of it.
    pub stat: rustix::fs::Stat,
    /// `statfs` type of it (`f_type`), 0 where that fails.
    pub fs_type: i64,
    /// The text of the link `/proc/PID/fd/FD`, e.g. `pipe:[4711]`.
    pub link: PathBuf,
    /// `/proc/PID/fdinfo/FD`.
    pub info: FdInfo,
    /// Owner and signal for SIGIO (`F_GETOWN_EX`, `F_GETSIG`).
    pub fown: FownEntry,
}

impl Found {
    /// Looks at `file`, which is descriptor `fd` of process `pid`. Neither numbered yet nor
    /// known to belong to a task.
    ///
    /// # Errors
    /// If the file cannot be asked for its status, or its link in procfs cannot be read.
    pub(crate) fn look(pid: i32, fd: i32, file: OwnedFd, info: FdInfo) -> Result<Self> {
        let stat =
            rustix::fs::fstat(&file).context(|| format!("fstat of fd {fd} of task {pid}"))?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let link =
            rustix::fs::readlink(&path, Vec::new()).context(|| format!("readlink {path}"))?;
        Ok(Found {
            id: 0,
            task: 0,
            holder: pid,
            pid,
            fd,
            stat,
            fs_type: rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type),
            file,
            link: PathBuf::from(OsString::from_vec(link.into_bytes())),
            info,
            fown: FownEntry::default(),
        })
    }

    /// What a link of process `pid` in procfs leads to, e.g. `exe`, as if opened with `flags`.
    ///
    /// # Errors
    /// If the task is gone, or what the link leads to cannot be opened.
    pub(crate) fn through_link(pid: i32, name: &str, flags: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/{name}");
        let file = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .context(|| format!("open {path}"))?;
        let link = std::fs::read_link(&path).context(|| format!("readlink {path}"))?;
        Found::of_path(pid, file, link, flags)
    }

    /// A file that process `pid` refers to without a descriptor.
    ///
    /// # Errors
    /// If the file cannot be asked for its status.
    pub(crate) fn of_path(pid: i32, file: OwnedFd, link: PathBuf, flags: u32) -> Result<Self> {
        let number = file.as_raw_fd();
        let info = FdInfo::parse(&proc::read(own_pid(), &format!("fdinfo/{number}"))?);
        Ok(Found {
            id: 0,
            task: 0,
            holder: pid,
            pid,
            fd: -1,
            stat: rustix::fs::fstat(&file).context(|| format!("fstat {}", link.display()))?,
            fs_type: rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type),
            file,
            link,
            info: FdInfo { pos: 0, flags, ..info },
            fown: FownEntry::default(),
        })
    }

    /// The refusal that names this descriptor.
    pub(crate) fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::refused(self.pid, self.object(), reason)
    }

    /// Leaves something of it out that its task can do without as a rule.
    ///
    /// # Errors
    /// The refusal, if everything is wanted (`strict`).
    pub(crate) fn leave_out(&self, strict: bool, what: &str) -> Result<()> {
        if strict {
            return Err(self.refuse(what));
        }
        tracing::warn!("task {}: {}: {what}", self.pid, self.object());
        Ok(())
    }

    /// What messages call it, e.g. `fd 5 (/dev/kvm)`.
    pub(crate) fn object(&self) -> String {
        match self.fd {
            // A mapped file, an executable, a directory: no descriptor refers to it.
            ..0 => self.link.display().to_string(),
            fd => format!("fd {fd} ({})", self.link.display()),
        }
    }

    /// The `O_*` flags of the description: `O_CLOEXEC` is the descriptor's.
    pub(crate) fn flags(&self) -> u32 {
        self.info.flags & !OFlags::CLOEXEC.bits()
    }

    /// Whether it was opened with `O_PATH`: a reference to a path and nothing else,
    /// whatever the path leads to.
    pub(crate) fn is_path_only(&self) -> bool {
        self.flags() & OFlags::PATH.bits() != 0
    }

    /// Whether it is an anonymous inode of this kind, e.g. `[eventfd]`.
    pub(crate) fn is_anon(&self, name: &str) -> bool {
        self.link_bytes().strip_prefix(b"anon_inode:") == Some(name.as_bytes())
    }

    /// The link's text; names of files need not be UTF-8.
    pub(crate) fn link_bytes(&self) -> &[u8] {
        self.link.as_os_str().as_bytes()
    }

    /// An entry of `files.img` for it, whose message is still to be added.
    pub(crate) fn entry(&self, kind: FdTypes) -> FileEntry {
        FileEntry { r#type: kind.into(), id: self.id, ..FileEntry::default() }
    }
}

/// The common part of `/proc/PID/fdinfo/FD`, and the rest as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct FdInfo {
    /// File offset.
    pub pos: i64,
    /// `O_*` flags with `O_CLOEXEC` as shown by the kernel.
    pub flags: u32,
    /// The mount that the file was opened through.
    pub mnt_id: i32,
    /// Inode number.
    pub ino: u64,
    /// The remaining lines, `key:<tab>value`, in the order given.
    pub rest: Vec<String>,
}

impl FdInfo {
    /// The values of all remaining lines that start with `key:`.
    pub(crate) fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.rest.iter().filter_map(move |line| {
            line.strip_prefix(key).and_then(|r| r.strip_prefix(':')).map(str::trim)
        })
    }
}

/// Device and inode of what a descriptor is open on.
pub(super) fn identity(pid: i32, fd: i32) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let stat = rustix::fs::stat(&path).context(|| format!("stat {path}"))?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A descriptor of a task.
#[derive(Debug)]
pub(crate) struct Listed {
    /// Its number.
    pub fd: i32,
    /// What procfs says of it.
    pub info: FdInfo,
    /// Device and inode of what it is open on.
    pub key: (u64, u64),
}

impl Listed {
    /// Descriptor `fd` of process `pid`.
    ///
    /// # Errors
    /// If the task is gone, or the descriptor is closed.
    pub(crate) fn of(pid: i32, fd: i32) -> Result<Self> {
        let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
        Ok(Listed { fd, info, key: identity(pid, fd)? })
    }
}

/// The descriptors of a task.
///
/// # Errors
/// If the task is gone.
pub(crate) fn list(pid: i32) -> Result<Vec<Listed>> {
    proc::numbers(pid, "fd")?.into_iter().map(|fd| Listed::of(pid, fd)).collect()
}

/// This process, in its own pid namespace.
pub(crate) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

impl FdInfo {
    /// Parses `/proc/PID/fdinfo/FD`.
    pub(crate) fn parse(text: &str) -> Self {
        let mut info = FdInfo::default();
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else {
                info.rest.push(line.to_owned());
                continue;
            };
            let value = value.trim();
            match key {
                "pos" => info.pos = value.parse().unwrap_or(0),
                "flags" => info.flags = u32::from_str_radix(value, 8).unwrap_or(0),
                "mnt_id" => info.mnt_id = value.parse().unwrap_or(-1),
                "ino" => info.ino = value.parse().unwrap_or(0),
                _ => info.rest.push(line.to_owned()),
            }
        }
        info
    }
}
