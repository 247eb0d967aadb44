//! Tasks that were born or have ended after a skeleton was built.

use std::collections::{BTreeMap, BTreeSet};

use super::tree::{self, Step};
use super::{Restore, Task};
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
    let all = tree::outline(tasks);
    let is_task = |pid: u32| tasks.iter().any(|task| task.image.tree.pid == pid);
    let (tasks, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|place| is_task(place.0));
    (
        tasks.into_iter().map(|(pid, sid, parent)| (pid, (sid, parent))).collect(),
        others.into_iter().collect(),
    )
}

/// The steps that make those tasks which are not there yet.
fn steps(tasks: &[Task], is_there: impl Fn(usize) -> bool) -> Result<Vec<Step>> {
    let all = tree::steps(tasks)?;
    let is_new = |step: &Step| match *step {
        Step::Birth { task, .. }
        | Step::Setsid { task }
        | Step::SiblingBirth { task, .. }
        | Step::OrphanBirth { task, .. } => task < tasks.len() && !is_there(task),
    };
    Ok(all.into_iter().filter(is_new).collect())
}

/// Ends the husks of tasks that `last` does not have.
///
/// # Errors
/// If a husk does not end, or its parent is gone.
pub(super) fn end(cx: &mut Restore<'_>, last: &[Task]) -> Result<()> {
    // Children first: their parents have to wait for them.
    for task in (0..cx.tasks.len()).rev() {
        let vpid = cx.tasks[task].vpid;
        if last.iter().any(|task| task.vpid == vpid) {
            continue;
        }
        tracing::debug!("task {vpid} has ended");
        let ppid = cx.tasks[task].image.tree.ppid;
        let Some(husk) = cx.tasks[task].threads.pop() else { continue };
        husk.exit_with(0)?;
        if let Some(parent) = cx.tasks.iter().position(|task| task.image.tree.pid == ppid) {
            let pid = cx.tasks[task].image.pid_at(cx.tasks[parent].image.depth());
            tree::wait_for(cx, parent, pid)?;
        }
    }
    Ok(())
}

/// Makes the tasks that have no husk yet. Before one is born `prepare` is called for the task that
/// it is born from, and then, with that, for itself.
///
/// # Errors
/// If a pid is taken, or no process can be started; if a husk ends; what `prepare` returns.
pub(super) fn bear(
    cx: &mut Restore<'_>,
    mut prepare: impl FnMut(&mut Restore<'_>, usize, Option<usize>) -> Result<()>,
) -> Result<()> {
    for step in steps(&cx.tasks, |task| !cx.tasks[task].threads.is_empty())? {
        let (task, from) = match step {
            Step::Birth { task, from: Some(from) }
            | Step::SiblingBirth { task, leader: from }
            | Step::OrphanBirth { task, leader: from } => (task, from),
            Step::Birth { from: None, .. } => continue,
            Step::Setsid { task } => {
                cx.tasks[task].remote()?.call("setsid", (libc::SYS_setsid, []))?;
                continue;
            }
        };
        tracing::debug!("task {} was born", cx.tasks[task].vpid);
        prepare(cx, from, None)?;
        tree::take(cx, step)?;
        prepare(cx, task, Some(from))?;
    }
    Ok(())
}
