//! Files of procfs that belong to a process: to which one.
//!
//! The kernel asks a process for no right to its own memory, and here that is the restoring program: `/proc/self`
//! is that of the process that opens it, not of the task that had the file open. So images may name no file of the restoring program's,
//! by whichever number its procfs has.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::description::{duplicate, same_inode};
use crate::error::{Context, Error, Result};
use crate::proc;

/// The number of the root directory of every procfs (`PROC_ROOT_INO` of linux/proc_ns.h).
const ROOT: u64 = 1;
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A process, whichever procfs shows it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OwningProcess {
    /// What procfs's link to its own pid namespace says.
    space: Vec<u8>,
    /// Its number there.
    number: i32,
}

impl OwningProcess {
    /// The process `pid` of the restoring program's procfs, or `self`.
    ///
    /// # Errors
    /// If its status cannot be read.
    pub(super) fn of(pid: &str) -> Result<Option<Self>> {
        let link = format!("/proc/{pid}");
        // `self` is a link.
        match rustix::fs::open(&link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(dir) => Self::shown_at(dir.as_fd()),
            Err(_) => Ok(None),
        }
    }

    /// The process that a directory of procfs is of, or a thread's directory, if it is one.
    fn shown_at(dir: BorrowedFd<'_>) -> Result<Option<Self>> {
        let Ok(space) = rustix::fs::readlinkat(dir, "ns/pid", Vec::new()) else { return Ok(None) };
        let Ok(status) = rustix::fs::openat(dir, "status", OFlags::CLOEXEC, Mode::empty()) else {
            return Ok(None);
        };
        let mut text = String::new();
        File::from(status).read_to_string(&mut text).context(|| "read a status".to_owned())?;
        let numbers = proc::Status::parse(text).in_each_ns("NStgid");
        let space = space.into_bytes();
        Ok(numbers.last().map(|&number| OwningProcess { space, number }))
    }
}

/// The process that `found` belongs to, to which `path` leads below `root`; `None` if it belongs to none, or is not of a procfs.
///
/// # Errors
/// `Invalid` if the path leads there over a link or upwards, which no path of a dump does.
pub(super) fn process_of(
    root: BorrowedFd<'_>,
    path: &[u8],
    found: &OwnedFd,
) -> Result<Option<OwningProcess>> {
    if !is_procfs(found.as_fd())? {
        return Ok(None);
    }
    let invalid = |why: &str| Error::invalid(String::from_utf8_lossy(path), why.to_owned());
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let mut at = duplicate(root)?;
    let (mut is_root, mut entry) = (is_root_of_procfs(at.as_fd())?, None);
    for name in path.split(|&c| c == b'/').filter(|name| !name.is_empty()) {
        at = match rustix::fs::openat2(&at, name, PLACE, Mode::empty(), resolve) {
            Ok(next) => next,
            Err(Errno::LOOP | Errno::XDEV | Errno::NOTDIR) => {
                return Err(invalid("leads to a file of procfs over a link or upwards"));
            }
            Err(e) => return Err(e).context(|| format!("open {}", String::from_utf8_lossy(path))),
        };
        if is_root {
            entry = Some(at.try_clone().context(|| "dup".to_owned())?);
        }
        is_root = is_root_of_procfs(at.as_fd())?;
    }
    match same_inode(&stat(at.as_fd())?, &stat(found.as_fd())?) {
        true => entry.map_or(Ok(None), |entry| OwningProcess::shown_at(entry.as_fd())),
        false => Err(invalid("leads to a file of procfs over a link, or to another one by now")),
    }
}

fn is_root_of_procfs(dir: BorrowedFd<'_>) -> Result<bool> {
    Ok(stat(dir)?.st_ino == ROOT && is_procfs(dir)?)
}

fn is_procfs(file: BorrowedFd<'_>) -> Result<bool> {
    let fs = rustix::fs::fstatfs(file).context(|| "fstatfs".to_owned())?;
    Ok(fs.f_type == libc::PROC_SUPER_MAGIC)
}

fn stat(file: BorrowedFd<'_>) -> Result<Stat> {
    rustix::fs::fstat(file).context(|| "fstat".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Whose a path is, opened below the root directory of this process.
    fn whose(path: &str) -> Result<Option<OwningProcess>> {
        let root = rustix::fs::open("/", PLACE, Mode::empty()).unwrap();
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        process_of(root.as_fd(), path.as_bytes(), &found)
    }

    #[test]
    fn files_of_procfs_belong_to_processes() {
        let own = OwningProcess::of("self").unwrap().unwrap();
        let pid = std::process::id();
        let mine =
            |path: &str| whose(path).unwrap() == Some(OwningProcess::of("self").unwrap().unwrap());
        assert!(mine(&format!("/proc/{pid}")) && mine(&format!("/proc/{pid}/mem")));
        assert!(mine(&format!("/proc/{pid}/task/{pid}/environ")));
        // A thread has a directory that no list shows.
        let thread = std::thread::spawn(|| {
            let tid = rustix::thread::gettid();
            whose(&format!("/proc/{tid}/maps")).unwrap()
        });
        assert_eq!(thread.join().unwrap(), Some(own));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let other = child.id();
        let whose_it_is = whose(&format!("/proc/{other}/stat")).unwrap();
        assert!(
            whose_it_is.is_some() && whose_it_is == OwningProcess::of(&other.to_string()).unwrap()
        );
        assert!(!mine(&format!("/proc/{other}/stat")));
        child.kill().unwrap();
        child.wait().unwrap();
        for path in ["/proc/meminfo", "/proc/sys/kernel/hostname", "/proc", "/etc", "/dev/null"] {
            assert_eq!(whose(path).unwrap(), None, "{path}");
        }
        for path in
            ["/proc/self/mem", "/proc/thread-self/maps", "/proc/1/../self/mem", "/proc/1/../1/stat"]
        {
            assert!(whose(path).unwrap_err().to_string().contains("over a link"), "{path}");
        }
    }
}
