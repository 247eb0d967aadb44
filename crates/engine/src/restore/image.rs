//! What the images say of a task, in types of which each is read by one function.

use std::sync::Arc;

use torpor_policy::memory::{MemoryArea, ProcessMemory};
use torpor_policy::process::{NestedPids, ProcessRest, ThreadRest};
use torpor_policy::{
    Credentials, Descriptor, NsSet, ProcessLimits, Scheduling, Seccomp, SharedParts, TreePlace,
    Whereabouts,
};

use super::pages;
use crate::task::ThreadRegisters;

/// Everything about one task.
#[derive(Debug, Default)]
pub(crate) struct TaskImage {
    /// Its place in the tree.
    pub tree: TreePlace,
    /// What it shares besides; nothing of a zombie.
    pub sharing: SharedParts,
    /// The namespaces that it lives in.
    pub homes: NsSet,
    /// What it has besides the following.
    pub process: ProcessRest,
    /// Likewise, each of its threads, the leader first.
    pub threads: Vec<ThreadRest>,
    /// Their registers, in the same order; none of one that has ended.
    pub registers: Vec<Option<ThreadRegisters>>,
    /// What each of its threads may do, in the same order.
    pub credentials: Vec<Option<Credentials>>,
    /// What limits their system calls, likewise.
    pub seccomp: Vec<Seccomp>,
    /// What it may use.
    pub limits: ProcessLimits,
    /// How its threads are scheduled, in the same order.
    pub scheduling: Vec<Scheduling>,
    /// Its address space; `None` for a zombie.
    pub memory: Option<ProcessMemory>,
    /// Its pages.
    pub pages: Arc<pages::Pages>,
    /// Its descriptors, by number; empty if a task before it has the same table.
    pub fds: Vec<Descriptor>,
    /// Working directory, root, umask.
    pub fs: Option<Whereabouts>,
}

impl AsRef<TaskImage> for TaskImage {
    fn as_ref(&self) -> &TaskImage {
        self
    }
}

impl TaskImage {
    /// Its pid.
    pub(crate) fn vpid(&self) -> i32 {
        self.tree.pid.cast_signed()
    }

    /// How pid namespaces below that of the root task know its thread with this index, if it is in
    /// any, or its children are.
    pub(crate) fn nested(&self, thread: usize) -> Option<&NestedPids> {
        self.threads.get(thread)?.nested.as_ref()
    }

    /// In how many pid namespaces below that of the root task it is.
    pub(crate) fn depth(&self) -> usize {
        self.nested(0).map_or(0, |nested| nested.tids.len())
    }

    /// The ids of its thread with this index as clone3(2) takes them: in its own pid namespace
    /// first, in that of the root task last.
    pub(crate) fn pids(&self, thread: usize) -> Vec<i32> {
        let outermost = self.tree.threads.get(thread).unwrap_or(&self.tree.pid);
        let below = self.nested(thread).into_iter().flat_map(|nested| nested.tids.iter().rev());
        below.chain([outermost]).map(|tid| tid.cast_signed()).collect()
    }

    /// Its pid in the pid namespace of a task at that depth above it.
    pub(crate) fn pid_at(&self, depth: usize) -> i32 {
        let pids = self.pids(0);
        pids.get(pids.len().saturating_sub(depth + 1)).copied().unwrap_or(0)
    }

    /// Whether it is a zombie.
    pub(crate) fn is_zombie(&self) -> bool {
        self.memory.is_none()
    }

    /// Whether its thread with this index has ended before it has.
    pub(crate) fn has_ended(&self, thread: usize) -> bool {
        thread == 0 && self.process.leader_ended
    }

    /// What it may do and in whose name, as far as it is known: that of its first thread that says so.
    pub(crate) fn rights(&self) -> Option<&Credentials> {
        self.credentials.iter().flatten().next()
    }

    /// The effective user and group of its first thread, as far as they are known: what is made for it is theirs.
    pub(crate) fn ids(&self) -> Option<(u32, u32)> {
        Some(self.credentials.first()?.as_ref()?.effective())
    }

    /// Its mappings.
    pub(crate) fn areas(&self) -> impl Iterator<Item = &MemoryArea> {
        self.memory.iter().flat_map(|memory| &memory.areas)
    }
}
