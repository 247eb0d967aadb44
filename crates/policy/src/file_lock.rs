//! Locks on files: read of their image once, listed, and taken. They are taken as any program takes
//! them; a lease on a file of somebody else is judged when the file is open.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FileLockEntry;
use torpor_images::{ImageDir, kind};

use crate::descriptor::Descriptor;
use crate::error::{Error, Result};
use crate::sharing::TableNumber;

/// What Torpor wrote for leases and for locks of open files before it had CRIU's numbers: `FL_LEASE`,
/// `FL_OFDLCK` of linux/filelock.h.
const OLD_LEASE: u32 = 32;
const OLD_OFD: u32 = 1024;
/// Added to the type of a lease that is being broken: the type is then what has to remain of it.
const BREAKING: u32 = 4;

/// A lock that a task has on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileLock {
    /// The task that takes it, by its pid in the images.
    pub task: i32,
    /// The descriptor that it takes it through.
    pub fd: i32,
    /// Its kind.
    pub kind: LockKind,
    /// What it is for.
    pub mode: LockMode,
    /// The first byte.
    pub start: i64,
    /// How many bytes; 0 is up to the end of the file, wherever that will be.
    pub len: i64,
}

/// A kind of locks; the number is that of the images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LockKind {
    /// `F_SETLK` of fcntl(2).
    Posix,
    /// flock(2).
    Flock,
    /// `F_OFD_SETLK` of fcntl(2).
    Ofd,
    /// `F_SETLEASE` of fcntl(2).
    Lease {
        /// Somebody else waits for it to become what it is for.
        breaking: bool,
    },
}

/// What a lock is for; the number is that of `F_RDLCK`, `F_WRLCK`, `F_UNLCK` of fcntl.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LockMode {
    /// To read.
    Read = 0,
    /// To write.
    Write = 1,
    /// Nothing: a lease that is to be given up.
    None = 2,
}

/// By what locks are taken: tasks, by their places among all, and the open files in their tables.
#[derive(Debug, Default)]
pub struct LockHolders {
    tasks: HashMap<i32, (usize, TableNumber)>,
    files: HashMap<(TableNumber, i32), u32>,
}

impl LockHolders {
    /// Those of tasks. Of each `tasks` says the pid, the number of its table of descriptors, and what is in that, unless a task
    /// before it has the same.
    pub fn of<'t>(tasks: impl IntoIterator<Item = (u32, TableNumber, &'t [Descriptor])>) -> Self {
        let mut all = Self::default();
        for (place, (pid, table, fds)) in tasks.into_iter().enumerate() {
            all.tasks.entry(pid.cast_signed()).or_insert((place, table));
            for fd in fds {
                all.files.entry((table, fd.fd.cast_signed())).or_insert(fd.file);
            }
        }
        all
    }

    /// Which of the tasks takes a lock, and the number of the open file that it takes it through.
    ///
    /// # Errors
    /// If it is of no task, or its task does not have its descriptor.
    pub fn find(&self, lock: &FileLock) -> Result<(usize, u32)> {
        let task = self.tasks.get(&lock.task);
        let &(task, table) = task.ok_or_else(|| lock.invalid("is that of no task"))?;
        let file = self.files.get(&(table, lock.fd));
        let file = file.ok_or_else(|| lock.invalid("has no descriptor"))?;
        Ok((task, *file))
    }
}

impl FileLock {
    /// All that the images have.
    ///
    /// # Errors
    /// If the image is damaged; a lock of a kind that there is not.
    pub fn all(images: &ImageDir) -> Result<Vec<Self>> {
        let entries = images.read_all_or_empty::<FileLockEntry>(kind::FILE_LOCKS, 0)?;
        let read = |entry: &FileLockEntry| {
            Self::read(entry).ok_or_else(|| {
                let (task, fd) = (entry.pid, entry.fd);
                Error::Invalid {
                    image: kind::FILE_LOCKS.file_name(0),
                    reason: format!(
                        "the lock of task {task} on fd {fd} is of no kind that there is"
                    ),
                }
            })
        };
        entries.iter().map(read).collect()
    }

    /// What is wrong with it in the images.
    #[must_use]
    pub fn invalid(&self, reason: &str) -> Error {
        Error::Invalid {
            image: kind::FILE_LOCKS.file_name(0),
            reason: format!("the lock of task {} on fd {} {reason}", self.task, self.fd),
        }
    }

    fn read(entry: &FileLockEntry) -> Option<Self> {
        let kind = match entry.flag {
            1 => LockKind::Posix,
            2 => LockKind::Flock,
            4 | OLD_OFD => LockKind::Ofd,
            8 | OLD_LEASE => LockKind::Lease { breaking: entry.r#type & BREAKING != 0 },
            _ => return None,
        };
        let is_lease = matches!(kind, LockKind::Lease { .. });
        let number = if is_lease { entry.r#type & !BREAKING } else { entry.r#type };
        let mode = match number {
            0 => LockMode::Read,
            1 => LockMode::Write,
            2 if is_lease => LockMode::None,
            _ => return None,
        };
        let (task, fd, start, len) = (entry.pid, entry.fd, entry.start, entry.len);
        (start >= 0 && len >= 0).then_some(FileLock { task, fd, kind, mode, start, len })
    }
}

impl fmt::Display for FileLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            LockKind::Posix => "a lock of the process",
            LockKind::Flock => "a lock by flock(2)",
            LockKind::Ofd => "a lock of the open file",
            LockKind::Lease { breaking: false } => "a lease",
            LockKind::Lease { breaking: true } => "a lease, being broken,",
        };
        let mode = match self.mode {
            LockMode::Read => "to read",
            LockMode::Write => "to write",
            LockMode::None => "for nothing",
        };
        let FileLock { fd, start, len, .. } = self;
        write!(f, "{kind} {mode} on descriptor {fd}: {len} bytes from {start} on (0: all)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(flag: u32, r#type: u32) -> Option<(LockKind, LockMode)> {
        let entry = FileLockEntry { flag, r#type, pid: 7, fd: 3, start: 0, len: 0 };
        FileLock::read(&entry).map(|lock| (lock.kind, lock.mode))
    }

    /// Images of a few megabytes have so many, and their reader has a minute.
    #[test]
    fn each_of_many_locks_has_its_task_and_file() {
        const MANY: u32 = 200_000;
        let table = TableNumber::of(5);
        let fds: Vec<Descriptor> =
            (0..MANY).map(|fd| Descriptor { fd, file: fd + 7, flags: 0 }).collect();
        // The first that has the table has what is in it.
        let holders = LockHolders::of([(1, table, &fds[..]), (2, table, &[])]);
        let of = |task, fd| {
            let (kind, mode) = (LockKind::Posix, LockMode::Read);
            holders.find(&FileLock { task, fd, kind, mode, start: 0, len: 0 })
        };
        let all = (0..MANY).map(|fd| of(2, fd.cast_signed()).unwrap());
        assert!(all.eq((0..MANY).map(|fd| (1, fd + 7))));
        for (task, fd, why) in [(3, 0, "is that of no task"), (1, -1, "has no descriptor")] {
            assert!(of(task, fd).unwrap_err().to_string().contains(why), "{task}, {fd}");
        }
    }

    #[test]
    fn kinds_of_locks() {
        let lease = |breaking| LockKind::Lease { breaking };
        assert_eq!(lock(1, 0), Some((LockKind::Posix, LockMode::Read)));
        assert_eq!(lock(2, 1), Some((LockKind::Flock, LockMode::Write)));
        for flag in [4, OLD_OFD] {
            assert_eq!(lock(flag, 1), Some((LockKind::Ofd, LockMode::Write)));
        }
        for flag in [8, OLD_LEASE] {
            assert_eq!(lock(flag, 0), Some((lease(false), LockMode::Read)));
            assert_eq!(lock(flag, BREAKING | 2), Some((lease(true), LockMode::None)));
        }
        for (flag, r#type) in [(0, 0), (3, 0), (1, 2), (2, BREAKING), (8, 3), (8, BREAKING | 3)] {
            assert_eq!(lock(flag, r#type), None, "{flag} {type}");
        }
    }
}
