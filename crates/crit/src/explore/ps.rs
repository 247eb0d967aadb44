//! The process tree.

use std::collections::{HashMap, HashSet};

use serde_json::{Value as Json, json};
use torpor_images::proto::{CoreEntry, PstreeEntry};
use torpor_images::{ImageDir, kind};

use super::{Holdings, inconsistent, lossy, printable};
use crate::error::Result;

/// All tasks, parents before their children.
pub(super) struct Tree(Vec<Task>);

struct Task {
    entry: PstreeEntry,
    comm: String,
    /// How many ancestors are in the tree.
    depth: usize,
}

impl Tree {
    /// Reads the tree.
    ///
    /// # Errors
    /// If an image is missing or damaged, or a task is its own ancestor.
    pub(super) fn read(dir: &ImageDir) -> Result<Self> {
        let tree: Vec<PstreeEntry> = dir.read_all(kind::PSTREE, 0)?;
        let pids: HashSet<u32> = tree.iter().map(|task| task.pid).collect();
        let mut children: HashMap<u32, Vec<usize>> = HashMap::new();
        let mut stack = vec![];
        for (index, task) in tree.iter().enumerate().rev() {
            if pids.contains(&task.ppid) {
                children.entry(task.ppid).or_default().push(index);
            } else {
                stack.push((index, 0));
            }
        }
        let mut tasks = vec![];
        while let Some((index, depth)) = stack.pop() {
            let entry = tree[index].clone();
            let core: CoreEntry = dir.read_one(kind::CORE, entry.pid.into())?;
            let comm = core.tc.map(|tc| tc.comm).unwrap_or_default();
            // Taken out, so that two tasks of one id do not have children twice.
            let below = children.remove(&entry.pid).unwrap_or_default();
            stack.extend(below.into_iter().map(|child| (child, depth + 1)));
            tasks.push(Task { entry, comm: lossy(&comm), depth });
        }
        if tasks.len() < tree.len() {
            return Err(inconsistent(dir, kind::PSTREE, 0, "some tasks are their own ancestors"));
        }
        Ok(Self(tasks))
    }
}

impl Holdings for Tree {
    fn text(&self) -> String {
        let mut text = format!("{:>7}{:>7}{:>7}   COMM\n", "PID", "PGID", "SID");
        for Task { entry, comm, depth } in &self.0 {
            let PstreeEntry { pid, pgid, sid, .. } = entry;
            let indent = " ".repeat(4 * depth);
            text += &format!("{pid:7}{pgid:7}{sid:7}   {indent}{}\n", printable(comm));
        }
        text
    }

    fn tasks(&self) -> Vec<Json> {
        let object = |Task { entry, comm, .. }: &Task| {
            let PstreeEntry { pid, ppid, pgid, sid, threads } = entry;
            json!({
                "pid": pid, "ppid": ppid, "pgid": pgid, "sid": sid, "threads": threads, "comm": comm,
            })
        };
        self.0.iter().map(object).collect()
    }
}
