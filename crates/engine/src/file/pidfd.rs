//! Pidfds: which process they stand for, which may have ended.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use torpor_images::proto::{FdTypes, FileEntry, PidfdEntry};
use torpor_policy::Pidfd;
use torpor_tracee::Tracee;

use super::Found;
use crate::dump::pids::Pids;
use crate::error::{Context, Error, Result};
use crate::restore::process::with_process;
use crate::restore::tasks::{self, Task};

/// `PIDFD_THREAD` of linux/pidfd.h, which is `O_EXCL`.
const THREAD: u32 = libc::O_EXCL.cast_unsigned();
/// What pidfd_open(2) takes: the only flags that the images have.
const FLAGS: u32 = THREAD | PidfdFlags::NONBLOCK.bits();
/// What fdinfo and the images say of a process that has ended and been reaped.
const GONE: i32 = -1;

/// Describes the file, or says that it is of another kind (`None`).
///
/// # Errors
/// Refused, if the kernel does not show its pid, or that is of no task of the tree.
pub(crate) fn describe(pids: &Pids, found: &Found) -> Result<Option<FileEntry>> {
    if !found.is_anon("[pidfd]") && !found.link_bytes().starts_with(b"pidfd:[") {
        return Ok(None);
    }
    let pid: i32 = found
        .info
        .values("Pid")
        .next()
        .and_then(|pid| pid.parse().ok())
        .ok_or_else(|| found.refuse("its fdinfo shows no pid"))?;
    let nspid = match pid {
        GONE => GONE,
        _ => pids.process(pid).ok_or_else(|| found.refuse(not_a_task(pids, pid)))?,
    };
    let pidfd = PidfdEntry {
        id: found.id,
        // Tells those that have ended apart.
        ino: u32::try_from(found.stat.st_ino & u64::from(u32::MAX)).unwrap_or(0),
        flags: found.flags() & FLAGS,
        nspid,
        fown: found.fown,
    };
    Ok(Some(FileEntry { pidfd: Some(pidfd), ..found.entry(FdTypes::Pidfd) }))
}

fn not_a_task(pids: &Pids, pid: i32) -> String {
    match pids.thread(pid) {
        Some(_) => format!("it stands for the thread {pid}, not for a process"),
        None => format!("its process {pid} is outside of the tree"),
    }
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct PidfdRestorer {
    /// Descriptions of processes that have ended, by file.
    gone: HashMap<u32, OwnedFd>,
    all: Vec<Pidfd>,
}

impl PidfdRestorer {
    /// Takes note of all, before anything is made.
    pub(crate) fn load(&mut self, all: &[&Pidfd]) {
        self.all = all.iter().copied().copied().collect();
    }

    /// Opens a description.
    ///
    /// # Errors
    /// If it is of a pid that no task has; if no process can be started to stand for one that has ended.
    pub(crate) fn open(&mut self, tasks: &mut [Task], pidfd: &Pidfd) -> Result<OwnedFd> {
        if let Some(process) = pidfd.process {
            let pid = tasks::real_pid(tasks, process).ok_or_else(|| {
                let reason = format!("pidfd {} of {process}, which is no task", pidfd.file);
                Error::invalid("files.img", reason)
            })?;
            return open(pid, pidfd.flags);
        }
        if !self.gone.contains_key(&pidfd.file) {
            self.open_gone(tasks[0].remote()?, pidfd.inode)?;
        }
        self.gone
            .remove(&pidfd.file)
            .ok_or_else(|| Error::invalid("files.img", format!("no pidfd {}", pidfd.file)))
    }
}

impl PidfdRestorer {
    /// Opens all that stand for the same process: one that lives for this moment.
    fn open_gone(&mut self, root: &mut Tracee, inode: u32) -> Result<()> {
        let is_same = |pidfd: &&Pidfd| pidfd.process.is_none() && pidfd.inode == inode;
        let same: Vec<Pidfd> = self.all.iter().filter(is_same).copied().collect();
        let opened = with_process(root, None, |process| {
            same.iter().map(|pidfd| Ok((pidfd.file, open(process.pid(), pidfd.flags)?))).collect()
        });
        let opened: Vec<(u32, OwnedFd)> = opened?;
        self.gone.extend(opened);
        Ok(())
    }
}

fn open(pid: i32, flags: u32) -> Result<OwnedFd> {
    let raw = Pid::from_raw(pid).ok_or(Error::Gone { pid })?;
    let flags = PidfdFlags::from_bits_retain(flags & FLAGS);
    rustix::process::pidfd_open(raw, flags).context(|| format!("pidfd_open of {pid}"))
}
