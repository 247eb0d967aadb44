//! The tasks of a tree that is stopped for its last round, and which of them somebody had stopped before.

use std::path::Path;

use torpor_images::proto::CoreEntry;
use torpor_images::{ImageDir, kind};

use crate::error::Result;
use crate::task::{self, Task};

/// `task_core_entry.task_state` of a process that job control has stopped.
const STOPPED: u32 = 3;

/// The tasks of a tree that is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frozen {
    /// All of them, the root first.
    pub tasks: Vec<Task>,
    /// The process ids of those that are to stay stopped if the tree stays here: by Ctrl-Z, a debugger, SIGSTOP.
    pub stopped: Vec<i32>,
}

impl Frozen {
    /// The tree under `root`, with images of it in `dir`. Of sealed images nothing is known: whoever seals them keeps the
    /// key elsewhere.
    ///
    /// # Errors
    /// If the root or a task below it is gone.
    pub(super) fn of(root: i32, dir: &Path) -> Result<Self> {
        let tasks = task::tree(root)?;
        let stopped = stopped(&tasks, dir).unwrap_or_default();
        Ok(Self { tasks, stopped })
    }
}

fn stopped(tasks: &[Task], dir: &Path) -> Option<Vec<i32>> {
    let images = ImageDir::open(dir).ok()?;
    // Images have the process ids that the root sees.
    let level = task::ids(tasks.first()?.pid).len().checked_sub(1)?;
    let is_stopped = |task: &&Task| {
        let id = task::ids(task.pid).get(level).and_then(|&id| u64::try_from(id).ok());
        let core = id.and_then(|id| images.read_one::<CoreEntry>(kind::CORE, id).ok());
        core.and_then(|core| core.tc).is_some_and(|tc| tc.task_state == STOPPED)
    };
    Some(tasks.iter().filter(is_stopped).map(|task| task.pid).collect())
}
