//! Dump: from running tasks to images.

pub mod freeze;

use std::os::fd::OwnedFd;

use torpor_images::ImageDir;
use torpor_images::proto::TaskKobjIdsEntry;
use torpor_tracee::Tracee;

use crate::error::Result;
use crate::namespace::Namespaces;
use crate::namespace::mount::Mounts;
use crate::options::Options;

/// Everything that the dump knows while the tree is frozen.
#[derive(Debug)]
pub struct Dump<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images go.
    pub images: ImageDir,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<Task>,
    /// The namespaces that the tasks live in.
    pub ns: Namespaces,
    /// The mounts in them ([`Mounts::collect`]).
    pub mounts: Mounts,
}

/// A task (thread group) of the dumped tree.
#[derive(Debug)]
pub struct Task {
    /// Its pid here.
    pub pid: i32,
    /// Its pid in the images: in the innermost pid namespace of the tree's root.
    pub vpid: i32,
    /// The task as a file.
    pub pidfd: OwnedFd,
    /// Kernel objects that it shares with others, numbered from 1.
    pub ids: TaskKobjIdsEntry,
    /// The stopped leader; `None` for a zombie.
    pub tracee: Option<Tracee>,
}

impl Dump<'_> {
    /// Remote calls in the leader of `task`.
    ///
    /// # Errors
    /// If the task is a zombie.
    pub fn remote(&mut self, task: usize) -> Result<&mut Tracee> {
        let t = &mut self.tasks[task];
        let pid = t.pid;
        t.tracee.as_mut().ok_or(crate::error::Error::Gone { pid })
    }
}

#[cfg(test)]
impl<'a> Dump<'a> {
    /// A dump of no tasks, for the tests of single kinds of resources.
    pub fn bare(opts: &'a Options, images: ImageDir, ns: Namespaces) -> Self {
        Dump { opts, images, tasks: Vec::new(), ns, mounts: Mounts::default() }
    }
}
