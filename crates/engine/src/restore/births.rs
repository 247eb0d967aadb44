//! Tasks that were born or have ended after a skeleton was built.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::Task;
use super::order::{self, Step};
use crate::error::Result;

/// What cannot be made up for: why, if there is anything. `built` has husks, `last` is what they
/// are to become.
pub(super) fn obstacle(built: &[Task], last: &[Task]) -> Result<Option<String>> {
    let (before, substitutes) = outline(built);
    let (now, wanted) = outline(last);
    if substitutes != wanted {
        return Ok(Some("a leader of a session or a group is missing, or is back".to_owned()));
    }
    for (pid, place) in &before {
        if now.get(pid).is_some_and(|now| now != place) {
            return Ok(Some(format!("task {pid} has another parent, or another session")));
        }
    }
    let root = last.first().map(|task| task.vpid);
    if root != built.first().map(|task| task.vpid) {
        return Ok(Some("the root task is another one".to_owned()));
    }
    if before.keys().eq(now.keys()) {
        return Ok(None);
    }
    if !wanted.is_empty() {
        return Ok(Some("tasks were born or have ended, and leaders are missing".to_owned()));
    }
    for step in steps(last, |task| before.contains_key(&last[task].image.tree.pid))? {
        // A husk has the session of its parent, which may have led another one when it was built.
        if let Step::Birth { task, from: Some(parent) } = step {
            let (child, parent) = (&last[task].image.tree, &last[parent].image.tree);
            if child.sid != parent.sid && child.sid != child.pid {
                let (pid, sid) = (child.pid, child.sid);
                return Ok(Some(format!("task {pid} was born into session {sid}")));
            }
        }
    }
    Ok(None)
}

/// Session and parent of each task, by its pid.
type Places = BTreeMap<u32, (u32, Option<u32>)>;

/// Those of the tasks, and of the substitutes for leaders that are missing.
fn outline(tasks: &[Task]) -> (Places, BTreeSet<(u32, u32, Option<u32>)>) {
    let all = order::outline(tasks);
    let pids: HashSet<u32> = tasks.iter().map(|task| task.image.tree.pid).collect();
    let is_task = |pid: u32| pids.contains(&pid);
    let (tasks, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|place| is_task(place.0));
    (
        tasks.into_iter().map(|(pid, sid, parent)| (pid, (sid, parent))).collect(),
        others.into_iter().collect(),
    )
}

/// The steps that make those tasks which are not there yet.
///
/// # Errors
/// If the parents of the tasks make no tree.
pub(super) fn steps(tasks: &[Task], is_there: impl Fn(usize) -> bool) -> Result<Vec<Step>> {
    let all = order::steps(tasks)?;
    let is_new = |step: &Step| match *step {
        Step::Birth { task, .. }
        | Step::Setsid { task }
        | Step::SiblingBirth { task, .. }
        | Step::OrphanBirth { task, .. } => task < tasks.len() && !is_there(task),
    };
    Ok(all.into_iter().filter(is_new).collect())
}
