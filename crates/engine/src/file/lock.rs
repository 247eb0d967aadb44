//! Locks on files: POSIX and open file description locks (fcntl(2)), flock(2), leases.
//!
//! The kernel lists, for a descriptor, the locks that were taken through its
//! description: those that belong to the description, and the POSIX locks of the
//! table that the descriptor is in. So a lock that somebody else has on the same file
//! is never taken for one of ours.
//!
//! The restore takes them when nothing opens or closes files any more: closing any
//! descriptor of a file drops all POSIX locks of the table on it (fcntl(2)), and a
//! lease is granted only while nobody else has the file open.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use torpor_images::proto::FileLockEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::{FileLock, LockHolders, LockKind, LockMode};
use torpor_sys::fcntl::Owner;
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::description::{access, duplicate, reopen};
use super::open::OpenFiles;
use crate::dump::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::meanwhile::Meanwhile;
use crate::namespace::user::IdMaps;
use crate::options::Files;
use crate::proc;
use crate::restore::image::TaskImage;
use crate::restore::tasks;
use crate::restore::transport::place_words;

/// The `flag`: the kind of a lock.
const POSIX: u32 = 1;
const FLOCK: u32 = 2;
const OFD: u32 = 4;
const LEASE: u32 = 8;

/// The `type`.
const READ: u32 = libc::F_RDLCK.cast_unsigned();
const WRITE: u32 = libc::F_WRLCK.cast_unsigned();
const NONE: u32 = libc::F_UNLCK.cast_unsigned();
/// Added to the type of a lease that is being broken: the type is then what has to
/// remain of it.
const BREAKING: u32 = 4;

/// The locks met by the dump.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    entries: Vec<FileLockEntry>,
    /// Descriptions whose own locks are known, and those in each table (0: their own).
    seen: HashSet<(u32, u32)>,
    /// Descriptions in flight that hold locks, with their names: one that no task has
    /// as well is refused in the end.
    in_flight: Vec<(u32, i32, String)>,
    /// The files whose flock(2) locks have a descriptor, as the kernel names them.
    flocked: HashSet<String>,
    /// The types of the flock(2) locks that only a mapping has: of a task, at an address.
    mapped: HashMap<(usize, u64), u32>,
}

/// A line of fdinfo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FdinfoLock {
    flag: u32,
    r#type: u32,
    /// Who took it, in the supervisor's pid namespace.
    pid: i32,
    start: i64,
    /// 0 up to the end of the file, wherever that will be.
    len: i64,
}

/// `1: POSIX  ADVISORY  WRITE 359 00:13:11691 0 EOF`: number, kind, state, type, pid,
/// file, first and last byte.
fn parse(line: &str) -> Option<FdinfoLock> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let &[_, kind, state, mode, pid, _, start, end] = words.as_slice() else { return None };
    let flag = match kind {
        "POSIX" => POSIX,
        "FLOCK" => FLOCK,
        "LEASE" => LEASE,
        "OFDLCK" => OFD,
        _ => return None,
    };
    let mode = match mode {
        "READ" => READ,
        "WRITE" => WRITE,
        "UNLCK" => NONE,
        _ => return None,
    };
    let state = match state {
        "ADVISORY" | "ACTIVE" => 0,
        "BREAKING" => BREAKING,
        _ => return None,
    };
    let start: i64 = start.parse().ok()?;
    let len = match end {
        "EOF" => 0,
        end => end.parse::<i64>().ok()?.checked_sub(start)?.checked_add(1)?,
    };
    Some(FdinfoLock { flag, r#type: mode | state, pid: pid.parse().ok()?, start, len })
}

/// All locks of the system, which another thread lists: the kernel takes a grace period for that, 16 ms in which it does
/// nothing else.
#[derive(Debug)]
pub(crate) struct AllLocks(Option<Meanwhile<torpor_kernel::Result<String>>>);

impl AllLocks {
    /// Has them listed, if locks are kept, as they are from now on. Until it is done no process can be forked.
    pub(crate) fn list(files: &Files) -> Self {
        AllLocks(files.locks.then(|| Meanwhile::start("lists locks", proc::locks)))
    }

    /// The list; an empty one if no locks are kept.
    fn listed(self) -> Result<String> {
        self.0.map_or(Ok(String::new()), |thread| Ok(thread.finish()??))
    }
}

impl Locks {
    /// Notes the locks in fdinfo's lines for a descriptor of `task`, whose description
    /// is `id`.
    ///
    /// # Errors
    /// Refused without `--file-locks`.
    pub(crate) fn note(
        &mut self,
        files: &Files,
        tasks: &[Task],
        task: usize,
        (fd, id): (i32, u32),
        lines: &[String],
    ) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let (pid, table) = (tasks[task].pid, tasks[task].ids.files_id);
        let own = self.seen.insert((0, id));
        let of_table = self.seen.insert((table, id));
        for text in lines {
            let line = parse(text).ok_or_else(|| {
                refuse(pid, fd, &format!("holds a lock of a kind that is not supported: {text}"))
            })?;
            if !files.locks {
                let reason = format!("holds a lock; --file-locks keeps locks: {text}");
                return Err(refuse(pid, fd, &reason));
            }
            if line.flag == FLOCK {
                self.flocked.extend(file(text).map(str::to_owned));
            }
            if !(if line.flag == POSIX { of_table } else { own }) {
                continue;
            }
            // F_GETLK tells who took a POSIX lock: where a table is shared, that may be another.
            let taker = tasks.iter().find(|t| t.tgid == line.pid && t.ids.files_id == table);
            let holder = taker.unwrap_or(&tasks[task]);
            tracing::debug!("task {}: fd {fd}: lock {text}: dumped", holder.vpid);
            self.entries.push(FileLockEntry {
                flag: line.flag,
                r#type: line.r#type,
                pid: holder.vpid,
                fd,
                start: line.start,
                len: line.len,
            });
        }
        Ok(())
    }

    /// Finds the locks of open files that only mappings still hold, as a Java virtual machine
    /// has one on its counters. To be called when all descriptors are known.
    ///
    /// # Errors
    /// `/proc/locks` cannot be read.
    pub(crate) fn find_mapped(&mut self, all: AllLocks, tasks: &[Task]) -> Result<()> {
        for text in all.listed()?.lines() {
            let Some(line) = parse(text).filter(|line| line.flag == FLOCK) else { continue };
            let name = file(text).unwrap_or_default();
            let Some(task) = tasks.iter().position(|task| task.tgid == line.pid) else { continue };
            let inode = name.rsplit(':').next().and_then(|inode| inode.parse().ok());
            let mapped = tasks[task].maps.iter().find(|map| Some(map.inode) == inode);
            if let Some(map) = mapped.filter(|_| !self.flocked.contains(name)) {
                self.mapped.insert((task, map.start), line.r#type);
            }
        }
        Ok(())
    }

    /// The type of the flock(2) lock that only the mapping of `task` at `start` holds, if any.
    pub(crate) fn of_mapping(&self, task: usize, start: u64) -> Option<u32> {
        self.mapped.get(&(task, start)).copied()
    }

    /// Notes that the description `id`, `object` of task `pid`, holds a lock and is in flight
    /// between sockets.
    pub(crate) fn note_in_flight(&mut self, id: u32, pid: i32, object: String) {
        self.in_flight.push((id, pid, object));
    }

    /// Writes the image.
    ///
    /// # Errors
    /// Refused, if no task could take a lock again; if the image cannot be written.
    pub(crate) fn write(&self, images: &ImageDir) -> Result<()> {
        if let Some((_, pid, object)) =
            self.in_flight.iter().find(|f| !self.seen.contains(&(0, f.0)))
        {
            return Err(Error::refused(*pid, object, "holds a lock that no task could take again"));
        }
        Ok(images.write_unless_empty(kind::FILE_LOCKS, 0, &self.entries)?)
    }
}

/// The file of a lock: device and inode number.
fn file(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().nth(5)
}

/// What flock(2) is told to take such a lock again.
pub(crate) fn flock_operation(mode: LockMode) -> u64 {
    let how = match mode {
        LockMode::Read => libc::LOCK_SH,
        LockMode::Write => libc::LOCK_EX,
        LockMode::None => libc::LOCK_UN,
    };
    u64::from((how | libc::LOCK_NB).cast_unsigned())
}

fn refuse(pid: i32, fd: i32, reason: &str) -> Error {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
    Error::refused(pid, format!("fd {fd} ({})", link.display()), reason)
}

/// A lock of the images, and what takes it.
#[derive(Debug)]
pub(crate) struct HeldLock {
    lock: FileLock,
    /// The task, by its place among them.
    task: usize,
    /// The open file that it takes it through.
    file: u32,
}

impl HeldLock {
    /// What takes each of these.
    ///
    /// # Errors
    /// If one is of no task, or its task does not have its descriptor.
    pub(crate) fn all(locks: Vec<FileLock>, tasks: &[TaskImage]) -> Result<Vec<Self>> {
        let tasks = tasks.iter().map(|task| (task.tree.pid, task.sharing.table, &*task.fds));
        let holders = LockHolders::of(tasks);
        let held = |lock: FileLock| {
            let (task, file) = holders.find(&lock)?;
            Ok(HeldLock { lock, task, file })
        };
        locks.into_iter().map(held).collect()
    }
}

/// Takes all locks. No file of a task is opened or closed any more, and none has its
/// owner yet: a lease that is being broken must not signal anybody again. `judge` is asked about
/// leases on files that belong to none of the tasks, with the owner.
///
/// # Errors
/// If somebody else has locked a file meanwhile; what `judge` returns; if a task has ended.
pub(crate) fn restore(
    locks: &[HeldLock],
    files: &OpenFiles,
    tasks: &mut [tasks::Task],
    id_maps: &IdMaps,
    judge: impl Fn(&FileLock, u32) -> Result<()>,
) -> Result<()> {
    for HeldLock { lock, task, file } in locks {
        tracing::debug!("task {}: fd {}: taking its lock again: {lock:?}", lock.task, lock.fd);
        match lock.kind {
            LockKind::Lease { breaking } => {
                let file = files.need(*file)?;
                let owner = rustix::fs::fstat(file).context(|| "fstat".to_owned())?.st_uid;
                // A task of the owner could have taken it, and handed the file on. The kernel does
                // not judge it: a program may take leases by CAP_LEASE and then give that up.
                if !is_user(tasks, id_maps, owner) {
                    judge(lock, owner)?;
                }
                lease(tasks[*task].remote()?, id_maps, file, (lock, breaking))?;
            }
            _ => take(tasks[*task].remote()?, lock)?,
        }
    }
    Ok(())
}

/// Whether a thread of the tasks is the user who is `id` here.
fn is_user(tasks: &[tasks::Task], id_maps: &IdMaps, id: u32) -> bool {
    let threads = tasks.iter().flat_map(|task| &task.image.credentials).flatten();
    let mut users = threads.flat_map(|thread| thread.users);
    users.any(|user| id_maps.uid_outside(user) == Some(id))
}

/// Who has a lock that is to be taken again, and what to do.
const LOCKED: &str = "another process has locked it, which lslocks names. If this is a migration, those are the tasks \
    themselves, which keep their locks until they run there: have the file on a file system that is of one of the two \
    hosts, or goes along";

/// The task itself takes the lock: POSIX locks are its own.
fn take(husk: &mut Tracee, lock: &FileLock) -> Result<()> {
    let fd = u64::from(lock.fd.cast_unsigned());
    let mut batch = husk.batch();
    let taken = if lock.kind == LockKind::Flock {
        batch.call((libc::SYS_flock, [fd, flock_operation(lock.mode)]))
    } else {
        let how = if lock.kind == LockKind::Ofd { libc::F_OFD_SETLK } else { libc::F_SETLK };
        // struct flock: type and whence are 16 bits wide, then there is a gap; SEEK_SET
        // is 0, and so must l_pid be.
        let words = [lock.mode as u64, lock.start.cast_unsigned(), lock.len.cast_unsigned(), 0];
        let flock = place_words(&mut batch, &words);
        batch.call(syscall::fcntl(RemoteFd(fd), how, flock.0))
    };
    let taken = batch.run()?.result(taken);
    if taken.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock) {
        return Err(refuse(husk.pid(), lock.fd, LOCKED));
    }
    taken.context(|| format!("lock fd {} of task {} again", lock.fd, lock.task)).map(drop)
}

/// Takes a lease, and lets it be broken again if it was being broken.
fn lease(
    husk: &mut Tracee,
    id_maps: &IdMaps,
    file: BorrowedFd<'_>,
    (lock, breaking): (&FileLock, bool),
) -> Result<()> {
    let what = || format!("F_SETLEASE on fd {} of task {}", lock.fd, lock.task);
    let file = duplicate(file)?;
    let stat = rustix::fs::fstat(&file).context(what)?;
    let flags = rustix::fs::fcntl_getfl(&file).context(what)?.bits();
    let held = match (lock.mode, access(flags)) {
        (mode, _) if !breaking => mode,
        // Only a write lease can be reduced to a read lease, and only a read lease
        // can be on what is open for reading next to other readers.
        (LockMode::None, OFlags::RDONLY) => LockMode::Read,
        _ => LockMode::Write,
    };
    // Only the owner of a file may take a lease on it; CAP_LEASE, which would do as
    // well, is not to be had in a user namespace.
    let owner = id_maps.uid_inside(stat.st_uid).unwrap_or(0);
    let mut batch = husk.batch();
    let fd = u64::from(lock.fd.cast_unsigned());
    let old = batch.call((libc::SYS_setfsuid, [u64::from(owner)]));
    let set = batch.call(syscall::fcntl(RemoteFd(fd), libc::F_SETLEASE, held as u64));
    let back = batch.call((libc::SYS_setfsuid, [0]));
    batch.forward(old, back, 0);
    batch.run()?.result(set).context(what)?;
    if breaking {
        // Taking it has made the task the owner: it would be told.
        torpor_sys::fcntl::set_owner(&file, &Owner { pid_type: 1, ..Owner::default() })
            .context(|| "F_SETOWN_EX".to_owned())?;
        let how = if lock.mode == LockMode::Read { OFlags::RDONLY } else { OFlags::WRONLY };
        match reopen(file.as_fd(), how | OFlags::NONBLOCK) {
            Err(Error::Os { source, .. })
                if source.raw_os_error() == Some(Errno::WOULDBLOCK.raw_os_error()) => {}
            Ok(_) => return Err(lock.invalid("cannot be broken again").into()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::FlockOperation;

    use super::*;
    use crate::file::testing::World;

    #[test]
    fn locks_of_others_are_not_ours() {
        let mut world = World::new();
        let path = world.path("file");
        let (ours, others) = (File::create(&path).unwrap(), File::open(&path).unwrap());
        rustix::fs::flock(&others, FlockOperation::LockExclusive).unwrap();
        world.dump(&[&ours]).unwrap();
        let error = world.dump(&[&others]).unwrap_err().to_string();
        assert!(error.contains("--file-locks") && error.contains("/file"), "{error}");
        world.opts.files.locks = true;
        world.dump(&[&others]).unwrap();
    }

    #[test]
    fn locks_are_those_of_tasks() {
        let world = World::new();
        let images = ImageDir::create(world.path("images")).unwrap();
        for (flag, reason) in [(OFD, "is that of no task"), (16, "is of no kind that there is")] {
            let lock = FileLockEntry { flag, pid: 1, fd: 3, ..FileLockEntry::default() };
            images.write_one(kind::FILE_LOCKS, 0, &lock).unwrap();
            let locks = FileLock::all(&images).map_err(Error::from);
            let held = locks.and_then(|locks| HeldLock::all(locks, &[]));
            let error = held.unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn lines_of_fdinfo() {
        let line = |flag, r#type, start, len| FdinfoLock { flag, r#type, pid: 359, start, len };
        for (text, expected) in [
            ("1: POSIX  ADVISORY  WRITE 359 00:13:11691 10 19", line(POSIX, WRITE, 10, 10)),
            ("1: POSIX  ADVISORY  READ 359 00:13:11691 7 EOF", line(POSIX, READ, 7, 0)),
            ("1: FLOCK  ADVISORY  READ 359 08:01:2 0 EOF", line(FLOCK, READ, 0, 0)),
            ("1: LEASE  ACTIVE    WRITE 359 08:01:2 0 EOF", line(LEASE, WRITE, 0, 0)),
            ("1: LEASE  BREAKING  UNLCK 359 08:01:2 0 EOF", line(LEASE, NONE | BREAKING, 0, 0)),
        ] {
            assert_eq!(parse(text), Some(expected), "{text}");
        }
        assert_eq!(parse("1: OFDLCK ADVISORY  WRITE -1 00:13:11691 0 0").unwrap().len, 1);
        for text in ["", "1: DELEG  ACTIVE    READ 1 08:01:2 0 EOF", "1: POSIX ADVISORY READ 1 2"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
