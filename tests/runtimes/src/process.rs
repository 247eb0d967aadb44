//! Processes, as /proc shows them.

use crate::wait::until_true;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs;
use std::process::Child;

/// What stays the same of a process that was put to sleep and woken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Its parent; 0 for the root of a tree, whose parent changes.
    pub parent: i32,
    /// Its process group.
    pub group: i32,
    /// Its session.
    pub session: i32,
    /// How many threads it has.
    pub threads: usize,
}

/// All processes of the tree below and with `root`, by pid.
pub fn tree(root: i32) -> BTreeMap<i32, Facts> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![root];
    while let Some(pid) = waiting.pop() {
        let Some((_, mut facts)) = facts(pid) else { continue };
        if pid == root {
            facts.parent = 0;
        }
        found.insert(pid, facts);
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            waiting.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
    }
    found
}

/// Whether a process is there and no zombie.
pub fn alive(pid: i32) -> bool {
    facts(pid).is_some_and(|(state, _)| state != 'Z' && state != 'X')
}

/// The state letter of a process.
pub fn state(pid: i32) -> Option<char> {
    facts(pid).map(|(state, _)| state)
}

/// The name of a process.
pub fn name(pid: i32) -> Option<String> {
    facts(pid).map(|(_, facts)| facts.name)
}

/// Whether a process has an instance of io_uring.
pub fn has_ring(pid: i32) -> bool {
    ring(pid).is_some()
}

/// What the kernel shows of the instance of io_uring that a process has.
pub fn ring(pid: i32) -> Option<String> {
    let mut files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let ring = files.find(|fd| {
        fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[io_uring]")
    })?;
    let number = ring.file_name().into_string().ok()?;
    fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()
}

fn facts(pid: i32) -> Option<(char, Facts)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may itself contain any.
    let (head, tail) = stat.rsplit_once(") ")?;
    let (_, name) = head.split_once(" (")?;
    let fields: Vec<&str> = tail.split(' ').collect();
    let number = |index: usize| fields[index].parse::<i32>().ok();
    let facts = Facts {
        name: name.to_owned(),
        parent: number(1)?,
        group: number(2)?,
        session: number(3)?,
        threads: fs::read_dir(format!("/proc/{pid}/task")).ok()?.count(),
    };
    Some((fields[0].chars().next()?, facts))
}

/// Kills a process; one that is gone already is fine.
pub fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Kills all processes of a tree.
pub fn kill_tree(root: i32) {
    for pid in tree(root).keys() {
        kill(*pid);
    }
}

/// Waits until none of the processes is left, not even as a zombie: only then are their ids free.
#[track_caller]
pub fn wait_gone<'a>(pids: impl IntoIterator<Item = &'a i32>) {
    for pid in pids {
        until_true(&format!("process {pid} goes"), || state(*pid).is_none());
    }
}

/// The id of a process in its own pid namespace.
pub fn inner_pid(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// Asks a child to end.
pub fn terminate(child: &Child) {
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
}
