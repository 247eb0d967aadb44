//! The tasks that are restored: husks first, and what the images say of them.

use std::sync::Arc;

use torpor_policy::memory::MemoryArea;
use torpor_tracee::Tracee;

use super::image::TaskImage;
use super::pages::Pages;
use super::places::FileOnMount;
use crate::error::{Error, Result};

/// A task (thread group) that is being restored.
#[derive(Debug)]
pub(crate) struct Task {
    /// Its pid here, 0 before it exists.
    pub pid: i32,
    /// Its pid in the images.
    pub vpid: i32,
    /// Its husks, the leader first, in the order of the images; none before it exists,
    /// and for a zombie that has ended.
    pub threads: Vec<Tracee>,
    /// What the images say.
    pub image: TaskImage,
    /// The pages that its husk has while its children are born.
    pub(super) bequest: Arc<Pages>,
    /// The mappings that its husk has.
    pub(super) mapped: Vec<Mapped>,
    /// Where it was put in the file system, and what it was made to run.
    pub(super) places: Option<[FileOnMount; 3]>,
}

impl AsRef<TaskImage> for Task {
    fn as_ref(&self) -> &TaskImage {
        &self.image
    }
}

impl Task {
    /// Remote calls in its leader.
    ///
    /// # Errors
    /// If the task does not exist (yet, or any more).
    pub(crate) fn remote(&mut self) -> Result<&mut Tracee> {
        let pid = self.vpid;
        self.threads.first_mut().ok_or(Error::Gone { pid })
    }
}

/// The tasks with these numbers, which ascend.
pub(super) fn chosen<'t>(
    tasks: &'t mut [Task],
    numbers: &[usize],
) -> impl Iterator<Item = &'t mut Task> {
    let mut before = 0;
    let mut rest = tasks;
    numbers.iter().map_while(move |&number| {
        let (task, others) =
            std::mem::take(&mut rest).split_at_mut_checked(number - before)?.1.split_first_mut()?;
        (before, rest) = (number + 1, others);
        Some(task)
    })
}

/// A mapping in place.
#[derive(Debug, Clone)]
pub(crate) struct Mapped {
    /// What it is to be.
    pub(super) area: MemoryArea,
    /// Whether it is writable for the time being, although the task may not write it:
    /// for its pages to be filled in, or since it was writable once. Others are mapped as they are right
    /// away: what was writable once counts as memory of the task for ever.
    pub(super) opened: bool,
}

/// The pid here of the task with pid `vpid` in the images.
pub(crate) fn real_pid(tasks: &[Task], vpid: i32) -> Option<i32> {
    tasks.iter().find(|task| task.vpid == vpid).map(|task| task.pid)
}
