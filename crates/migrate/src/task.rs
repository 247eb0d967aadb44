//! Tasks by process id and start time, so that a process id that is used again is noticed.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use torpor_kernel::proc::{self, children_of, stat};

use crate::error::{Error, Result};

/// More tasks than any system has.
const MAX_TASKS: usize = 4 << 20;

/// A process, as long as it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Its process id.
    pub pid: i32,
    /// When it was started, in ticks since boot.
    pub start: u64,
}

impl Task {
    /// The process with this id.
    ///
    /// # Errors
    /// If there is no process of that id.
    pub(crate) fn find(pid: i32) -> Result<Self> {
        let start = stat(pid).map(|stat| stat.start_time);
        let start = start.map_err(|_| {
            Error::refused_with(
                format!("there is no process {pid}"),
                "ps lists those that there are",
            )
        })?;
        Ok(Self { pid, start })
    }

    /// This one.
    ///
    /// # Errors
    /// Without /proc.
    pub(crate) fn this() -> Result<Self> {
        Self::find(rustix::process::getpid().as_raw_nonzero().get())
    }

    /// Whether it has not ended.
    #[must_use]
    pub(crate) fn lives(&self) -> bool {
        stat(self.pid).is_ok_and(|stat| stat.start_time == self.start && !stat.has_ended())
    }

    /// Whether it lives and nobody has killed it: one that was killed takes a moment to end.
    #[must_use]
    pub(crate) fn goes_on(&self) -> bool {
        let Ok(status) = proc::status(self.pid) else { return false };
        let is_ending = stat(self.pid).map_or(true, |stat| stat.is_ending());
        self.lives() && !is_ending && !status.is_killed()
    }

    /// The process id of whoever traces it: a job of ours, or somebody else.
    #[must_use]
    pub(crate) fn tracer(&self) -> Option<u64> {
        proc::status(self.pid).ok()?.number("TracerPid", 10).filter(|&pid| pid != 0)
    }

    /// Whether somebody does.
    #[must_use]
    pub(crate) fn is_traced(&self) -> bool {
        self.tracer().is_some() && self.lives()
    }

    /// Kills it, and waits until it has ended.
    pub(crate) fn end(&self) {
        self.signal(Signal::KILL);
        while self.lives() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// The same with all that are below it.
    pub(crate) fn end_tree(&self) {
        let all = if self.lives() { tree(self.pid).unwrap_or_default() } else { Vec::new() };
        all.iter().for_each(Self::end);
    }

    /// Sends it a signal; nothing happens if it has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // What the descriptor stands for can be no other any more once this is so.
        if self.lives() {
            let _ = pidfd_send_signal(&pidfd, signal);
        }
    }
}

/// The tree under `root`, which comes first.
///
/// # Errors
/// If there is no process `root`, or the tree below it does not end.
pub(crate) fn tree(root: i32) -> Result<Vec<Task>> {
    let mut found = vec![Task::find(root)?];
    let mut next = 0;
    while let Some(task) = found.get(next).copied() {
        next += 1;
        found.extend(children_of(task.pid).into_iter().filter_map(|pid| Task::find(pid).ok()));
        if found.len() > MAX_TASKS {
            return Err(Error::refused(format!("the tree under {root} does not end")));
        }
    }
    Ok(found)
}

/// The process ids of a process in all pid namespaces that see it, the outermost first.
#[must_use]
pub(crate) fn ids(pid: i32) -> Vec<i32> {
    proc::status(pid).map(|status| status.ns_pids()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;

    use super::*;

    #[test]
    fn a_tree_is_found_and_ends() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let root = i32::try_from(child.id()).unwrap();
        while tree(root).unwrap().len() < 2 {}
        let tasks = tree(root).unwrap();
        assert_eq!(tasks[0].pid, root);
        assert!(tasks.iter().all(Task::lives));
        assert_eq!(ids(root).first(), Some(&root));
        let other = Task { start: tasks[0].start + 1, ..tasks[0] };
        other.signal(Signal::KILL);
        assert!(!other.lives() && tasks[0].lives());
        tasks.iter().for_each(|task| task.signal(Signal::KILL));
        child.wait().unwrap();
        assert!(!tasks[0].lives());
    }
}
