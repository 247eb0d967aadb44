//! What the images call processes, groups and threads of the tree, by the numbers that the supervisor
//! sees: the images have those of the innermost pid namespace of the root task.

use std::collections::HashMap;

use torpor_images::proto::TorporNestedEntry;

use super::tasks::Task;

/// The numbers of a dumped tree.
#[derive(Debug, Default)]
pub(crate) struct Pids {
    /// Numbers of processes, by their pids here.
    processes: HashMap<i32, i32>,
    /// Numbers of process groups that a task is in, by their ids here.
    groups: HashMap<i32, i32>,
    /// Numbers of threads, by their ids here. Processes are among them, those that have ended, too.
    threads: HashMap<i32, i32>,
    /// How pid namespaces below that of the root know threads, by their ids here.
    nested: HashMap<i32, TorporNestedEntry>,
}

impl Pids {
    /// Those of tasks, whose statuses have been read.
    pub(super) fn of(tasks: &[Task]) -> Self {
        let mut pids = Pids::default();
        for task in tasks {
            pids.processes.insert(task.tgid, task.vpid);
            pids.threads.insert(task.tgid, task.vpid);
            for (thread, status) in task.threads.iter().zip(&task.statuses) {
                let tid = thread.tid();
                let vtid = status.ns_pids().get(task.level).copied().unwrap_or(tid);
                pids.threads.insert(tid, vtid);
            }
            // The first of its members tells what a group is called.
            let group = task.number("NSpgid").unwrap_or(0);
            pids.groups.entry(task.stat.pgid).or_insert(group);
        }
        pids
    }

    /// Notes how pid namespaces below that of the root know a thread.
    pub(crate) fn note_nested(&mut self, tid: i32, nested: TorporNestedEntry) {
        self.nested.insert(tid, nested);
    }

    /// The number of the process with pid `pid` here, if it is of the tree.
    pub(crate) fn process(&self, pid: i32) -> Option<i32> {
        self.processes.get(&pid).copied()
    }

    /// The number of the process group with id `pgid` here, if a task of the tree is in it, and it
    /// has one.
    pub(crate) fn group(&self, pgid: i32) -> Option<i32> {
        self.groups.get(&pgid).copied().filter(|&id| id != 0)
    }

    /// The number of the thread with id `tid` here, if it is of the tree.
    pub(crate) fn thread(&self, tid: i32) -> Option<i32> {
        self.threads.get(&tid).copied()
    }

    /// The id that the thread with id `tid` here has for itself.
    pub(crate) fn own_tid(&self, tid: i32) -> Option<i32> {
        let inside = self.nested(tid).and_then(|nested| nested.tids.last());
        inside.map(|tid| tid.cast_signed()).or_else(|| self.thread(tid))
    }

    /// How pid namespaces below that of the root know the thread with id `tid` here, if it is in
    /// any, or its children are.
    pub(crate) fn nested(&self, tid: i32) -> Option<&TorporNestedEntry> {
        self.nested.get(&tid)
    }

    /// Whether pid namespaces below that of the root belong to the tree.
    pub(crate) fn has_nested(&self) -> bool {
        !self.nested.is_empty()
    }
}
