//! The tasks that are dumped, stopped, and how calls are made in them.

use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;

use torpor_images::proto::TaskKobjIdsEntry;
use torpor_kernel::parallel;
use torpor_tracee::{Mapping, SIDE_BY_SIDE, Tracee};

use crate::error::{Error, Result};
use crate::file::found::Listed;
use crate::guardian::{self, Guardian, Turn, Undo, Way};
use crate::meanwhile::Meanwhile;
use crate::memory::vma::{self, Vma};
use crate::proc;
use crate::task::{ProcFiles, ia32};

/// A task (thread group) of the dumped tree.
#[derive(Debug)]
pub(crate) struct Task {
    /// Its pid here.
    pub tgid: i32,
    /// The id here of its first thread that has not ended, as which the kernel answers for
    /// the process: its pid, as a rule. Of a leader that has ended it shows neither memory
    /// nor files.
    pub pid: i32,
    /// Its pid in the images: in the innermost pid namespace of the tree's root.
    pub vpid: i32,
    /// Where numbers of that namespace stand in its status, which has those of all namespaces
    /// that it is in, the outermost first.
    pub level: usize,
    /// The task as a file.
    pub pidfd: OwnedFd,
    /// Kernel objects that it shares with others, numbered from 1.
    pub ids: TaskKobjIdsEntry,
    /// The inode number of the pid namespace that its children are born into, if that has a task.
    pub pids_for_children: Option<u64>,
    /// The inode number of the time namespace that its children are born into.
    pub time_for_children: u64,
    /// `/proc/PID/stat`.
    pub stat: proc::Stat,
    /// `/proc/PID/status`.
    pub status: proc::Status,
    /// Its stopped threads, the leader first unless it has ended; none for a zombie.
    pub threads: Vec<Tracee>,
    /// `/proc/PID/task/TID/status` of each.
    pub(crate) statuses: Vec<proc::Status>,
    /// More of what procfs says of it.
    pub(super) proc_files: ProcFiles,
    /// Its descriptors, unless a task before it has the same.
    pub(crate) descriptors: Vec<Listed>,
    /// Its mappings, as they were before anything of ours was mapped; without their flags, and whatever else
    /// only [`Tasks::know_mappings`] tells, until then.
    pub vmas: Vec<Vma>,
    pub maps: Vec<Mapping>,
}

/// A stub in a process, at an address.
pub(crate) static STUB: Way = Way {
    turn: Turn::Patiently,
    ..Way::new("stub", |words, _| {
        Ok(torpor_tracee::remove_leftover(words.number(0)?, words.number(1)?, guardian::PATIENCE)?)
    })
};

/// What takes the stub at `base` out of a process.
pub(super) fn stub(pid: i32, base: u64) -> Undo {
    STUB.undo(vec![pid.to_string(), base.to_string()])
}

/// Processes that are to end, each by the id of a thread and when that started.
pub(crate) static DEATH: Way = Way::new("end", |words, _| {
    for at in (0..words.rest(0).len() / 2).map(|process| process * 2) {
        let (pid, start) = (words.number(at)?, words.number::<u64>(at + 1)?);
        // One that has ended meanwhile leaves its number to others.
        let opened = proc::pidfd(pid).or_else(|_| proc::pidfd_of_thread(pid));
        let Ok(pidfd) = opened else { continue };
        if proc::stat(pid).is_ok_and(|stat| stat.start_time == start) {
            let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        }
    }
    Ok(())
});

/// What ends the tasks.
pub(super) fn death(tasks: &[Task]) -> Undo {
    let live = tasks.iter().filter(|task| !task.is_zombie());
    DEATH.undo(live.flat_map(|t| [t.pid.to_string(), t.stat.start_time.to_string()]).collect())
}

impl Task {
    /// Whether it runs a 32-bit program.
    pub(crate) fn is_32bit(&self) -> bool {
        ia32::is_process(&self.threads, &self.maps)
    }

    /// The number that the line `key` of its status (such as `NSsid`) has for the pid namespace of
    /// the tree's root.
    pub(crate) fn number(&self, key: &str) -> Option<i32> {
        self.status.in_each_ns(key).get(self.level).copied()
    }

    /// Whether it has ended and only waits to be waited for.
    pub(crate) fn is_zombie(&self) -> bool {
        self.threads.is_empty()
    }

    /// Whether its first thread has ended, and others have not.
    pub(crate) fn has_lost_leader(&self) -> bool {
        self.pid != self.tgid
    }
}

/// The tasks of a dumped tree: parents before children, the root first. Whoever only looks at
/// what is known of them takes a slice. This is for calls inside them, which need a stub there.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    all: Vec<Task>,
    /// Takes stubs out of them if the supervisor is killed.
    guardian: Guardian,
    /// Reads their mappings.
    reading: Option<Meanwhile<Result<Vec<Vec<Vma>>>>>,
}

impl Deref for Tasks {
    type Target = Vec<Task>;

    fn deref(&self) -> &Vec<Task> {
        &self.all
    }
}

impl DerefMut for Tasks {
    fn deref_mut(&mut self) -> &mut Vec<Task> {
        &mut self.all
    }
}

impl Tasks {
    /// These tasks. The guardian learns of what is put into them.
    pub(crate) fn new(all: Vec<Task>, guardian: Guardian) -> Self {
        Tasks { all, guardian, reading: None }
    }

    /// Has a thread read all that the kernel says of their mappings, as they are now: it looks at each page for that, and takes
    /// 20 ms for 1 GiB. No process can be forked until it is known.
    ///
    /// # Errors
    /// As [`Tasks::inject`]: what is mapped meanwhile would wait for the thread.
    pub(super) fn read_mappings(&mut self, workers: usize) -> Result<()> {
        let live = self.live();
        live.chunks(SIDE_BY_SIDE).try_for_each(|some| self.inject(some))?;
        let pids: Vec<i32> = live.iter().map(|&task| self.all[task].pid).collect();
        let read = move || parallel::map(&pids, workers, |&pid| vma::read(pid));
        self.reading = Some(Meanwhile::start("reads mappings", read));
        Ok(())
    }

    /// Waits until that is known.
    ///
    /// # Errors
    /// Refused, by name, if a mapping cannot be kept; if a task has ended.
    pub(crate) fn know_mappings(&mut self) -> Result<()> {
        let Some(reading) = self.reading.take() else { return Ok(()) };
        for (task, mut vmas) in self.live().into_iter().zip(reading.finish()??) {
            let task = &mut self.all[task];
            if let Some((start, len)) = task.threads.first().and_then(Tracee::stub_range) {
                vmas.retain(|vma| !(start..start + len).contains(&vma.map.start));
            }
            task.vmas = vmas;
        }
        Ok(())
    }

    /// Those that are no zombies.
    pub(crate) fn live(&self) -> Vec<usize> {
        (0..self.len()).filter(|&task| !self[task].is_zombie()).collect()
    }

    /// Whether `task` is the first one with its number of some shared object.
    pub(crate) fn is_first_with(&self, task: usize, id: impl Fn(&TaskKobjIdsEntry) -> u32) -> bool {
        let number = id(&self[task].ids);
        !self[..task].iter().any(|t| !t.is_zombie() && id(&t.ids) == number)
    }

    /// Remote calls in the first thread of `task`.
    ///
    /// # Errors
    /// If the task is a zombie, or has no room for the stub.
    pub(crate) fn remote(&mut self, task: usize) -> Result<&mut Tracee> {
        let t = &self.all[task];
        let (pid, first) = (t.pid, t.threads.first());
        if first.is_none_or(|first| first.stub_range().is_none()) {
            self.inject(&[task])?;
        }
        self.all[task].threads.first_mut().ok_or(Error::Gone { pid })
    }

    /// Puts stubs into those of some tasks that have none.
    pub(super) fn inject(&mut self, tasks: &[usize]) -> Result<()> {
        let mut wanted = Vec::new();
        let some = self.all.iter_mut().enumerate().filter(|(i, _)| tasks.contains(i));
        for (_, t) in some {
            let pid = t.pid;
            let first = t.threads.first_mut().ok_or(Error::Gone { pid })?;
            if first.stub_range().is_some() {
                continue;
            }
            let base = torpor_tracee::stub_place(&t.maps).ok_or_else(|| {
                Error::refused(pid, "its address space", "is full: there is no room for a stub")
            })?;
            self.guardian.watch(&stub(pid, base))?;
            wanted.push((first, t.maps.as_slice(), base));
        }
        Ok(Tracee::inject_all(wanted)?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;
    use std::time::{Duration, Instant};

    use torpor_tests::wait::wait_for;

    use super::*;
    use crate::dump::freeze::{Seized, freeze};
    use crate::dump::freezer::Freezer;

    #[test]
    fn mappings_become_known_as_they_were_without_a_stub() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let patience = Duration::from_secs(60);
        // Not while its loader still maps files.
        let asleep = || proc::read(pid, "stat").unwrap().contains("(sleep) S ");
        wait_for("it to sleep", patience, || Ok(asleep().then_some(()))).unwrap();
        let limits = (Instant::now() + patience, 1);
        let (mut freezer, guardian) = (Freezer::default(), Guardian::default());
        let frozen = freeze(pid, &mut freezer, &guardian, limits, || Ok(Seized::new())).unwrap();
        let known = |vmas: &[Vma]| -> Vec<_> {
            vmas.iter().map(|vma| (vma.map.start, vma.map.end, vma.flags.clone())).collect()
        };
        let before = known(&vma::read(pid).unwrap());
        let seen = || (proc::stat(pid).unwrap(), vma::read_quickly(pid).unwrap());
        let all = frozen.into_iter().map(|task| Task::new(task, 0, seen()).unwrap()).collect();
        let mut tasks = Tasks::new(all, guardian);
        tasks.read_mappings(1).unwrap();
        assert!(known(&vma::read(pid).unwrap()).len() > before.len(), "it has no stub");
        assert!(tasks[0].vmas.iter().all(|vma| vma.flags.is_empty()));
        tasks.know_mappings().unwrap();
        assert_eq!(known(&tasks[0].vmas), before);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
