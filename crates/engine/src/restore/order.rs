//! The order of births and sessions in a process tree: who is born when, and from whom.
//!
//! A task's session is that of its parent at its birth, unless it becomes a leader
//! itself. So the children that are in the session which their parent was born into
//! come first, then the parent calls setsid(2), then the others. A task whose
//! session is neither that of its parent's birth nor the one its parent leads has lost the
//! parent it was born from; it is born from the leader of its session again, and
//! adopted by its present parent because the one in between ends.
//!
//! A task that is born into a pid namespace from outside comes when the first task of that is
//! there.

use crate::error::{Error, Result};

/// A step of building the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// `task` is born from its parent (`None`: from the supervisor).
    Birth { task: usize, from: Option<usize> },
    /// `task` becomes a session leader.
    Setsid { task: usize },
    /// `task` is born from the leader of its session, which shares its parent.
    SiblingBirth { task: usize, leader: usize },
    /// `task` is born from a child of the leader of its session that ends at once.
    OrphanBirth { task: usize, leader: usize },
}

/// What the plan needs to know of a task.
#[derive(Debug, Clone, Copy)]
pub(super) struct TaskNode {
    /// Its pid in the images.
    pub pid: u32,
    /// Its session.
    pub sid: u32,
    /// The index of its parent; the root has none.
    pub parent: Option<usize>,
    /// The index of the task that has to be born before.
    pub after: Option<usize>,
}

/// Orders births and setsid calls.
///
/// # Errors
/// A session that no task of the tree can have founded.
pub(super) fn plan(nodes: &[TaskNode], root_session: u32) -> Result<Vec<Step>> {
    let (mut steps, mut orphans) = (Vec::new(), Vec::new());
    grow(nodes, 0, None, root_session, &mut steps, &mut orphans);
    while !orphans.is_empty() {
        let before = steps.len();
        for task in std::mem::take(&mut orphans) {
            grow_later(nodes, task, &mut steps, &mut orphans);
        }
        if steps.len() == before {
            let node = nodes[orphans[0]];
            return Err(Error::invalid(
                "pstree.img",
                format!(
                    "task {} is in session {}, whose leader is not in the tree; see --shell-job",
                    node.pid, node.sid
                ),
            ));
        }
    }
    Ok(steps)
}

/// Adds the birth of a task that could not be born when its parent had been, and what is below it,
/// if it can be born now.
fn grow_later(nodes: &[TaskNode], task: usize, steps: &mut Vec<Step>, orphans: &mut Vec<usize>) {
    let node = nodes[task];
    let parent = node.parent.filter(|&parent| fits(node, nodes[parent].sid));
    let leader = nodes.iter().position(|leader| leader.pid == node.sid);
    match (parent, leader) {
        _ if awaits(node, steps) => orphans.push(task),
        (Some(parent), _) => grow(nodes, task, Some(parent), nodes[parent].sid, steps, orphans),
        (None, Some(leader)) if is_born(leader, steps) => {
            let step = if nodes[leader].parent == node.parent {
                Step::SiblingBirth { task, leader }
            } else {
                Step::OrphanBirth { task, leader }
            };
            steps.push(step);
            below(nodes, task, node.sid, steps, orphans);
        }
        (None, _) => orphans.push(task),
    }
}

/// Whether somebody has to be born before the task, and has not been.
fn awaits(node: TaskNode, steps: &[Step]) -> bool {
    node.after.is_some_and(|first| !is_born(first, steps))
}

fn is_born(task: usize, steps: &[Step]) -> bool {
    steps.iter().any(|step| born_by(*step) == Some(task))
}

/// Whether a task can be born from one that is in session `sid`.
fn fits(node: TaskNode, sid: u32) -> bool {
    node.sid == sid || node.sid == node.pid
}

fn born_by(step: Step) -> Option<usize> {
    match step {
        Step::Birth { task, .. }
        | Step::SiblingBirth { task, .. }
        | Step::OrphanBirth { task, .. } => Some(task),
        Step::Setsid { .. } => None,
    }
}

/// Adds the birth of `task` and of what is below it.
fn grow(
    nodes: &[TaskNode],
    task: usize,
    from: Option<usize>,
    session: u32,
    steps: &mut Vec<Step>,
    orphans: &mut Vec<usize>,
) {
    steps.push(Step::Birth { task, from });
    below(nodes, task, session, steps, orphans);
}

/// Adds what is below `task`, which is in `session` now.
fn below(
    nodes: &[TaskNode],
    task: usize,
    session: u32,
    steps: &mut Vec<Step>,
    orphans: &mut Vec<usize>,
) {
    let children: Vec<usize> =
        (0..nodes.len()).filter(|&c| nodes[c].parent == Some(task)).collect();
    let leads = nodes[task].sid == nodes[task].pid && session != nodes[task].sid;
    let is_older = |c: usize| leads && nodes[c].sid == session;
    if leads {
        for &child in children.iter().filter(|&&c| is_older(c)) {
            grow(nodes, child, Some(task), session, steps, orphans);
        }
        steps.push(Step::Setsid { task });
    }
    let now = if leads { nodes[task].sid } else { session };
    for &child in &children {
        if is_older(child) {
            continue;
        }
        if fits(nodes[child], now) && !awaits(nodes[child], steps) {
            grow(nodes, child, Some(task), now, steps, orphans);
        } else {
            orphans.push(child);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn node(pid: u32, sid: u32, parent: Option<usize>) -> TaskNode {
        TaskNode { pid, sid, parent, after: None }
    }

    #[test]
    fn children_of_the_old_session_come_before_setsid() {
        let nodes =
            [node(1, 0, None), node(2, 2, Some(0)), node(3, 0, Some(1)), node(4, 2, Some(1))];
        let steps = plan(&nodes, 0).unwrap();
        let at = |s: Step| steps.iter().position(|x| *x == s).unwrap();
        let setsid = at(Step::Setsid { task: 1 });
        assert!(at(Step::Birth { task: 2, from: Some(1) }) < setsid);
        assert!(at(Step::Birth { task: 3, from: Some(1) }) > setsid);
    }

    #[test]
    fn an_orphan_is_born_from_the_leader_of_its_session() {
        let nodes =
            [node(1, 0, None), node(2, 2, Some(0)), node(3, 2, Some(0)), node(4, 3, Some(2))];
        let steps = plan(&nodes[..3], 0).unwrap();
        assert!(steps.contains(&Step::SiblingBirth { task: 2, leader: 1 }));
        assert!(plan(&[node(1, 0, None), node(2, 77, Some(0))], 0).is_err());
    }

    #[test]
    fn who_is_born_into_a_namespace_from_outside_awaits_its_first_task() {
        let entered = TaskNode { after: Some(4), ..node(3, 0, Some(1)) };
        let nodes = [
            node(1, 0, None),
            node(2, 0, Some(0)),
            entered,
            node(4, 4, Some(0)),
            node(5, 4, Some(3)),
            node(6, 0, Some(2)),
        ];
        let steps = plan(&nodes, 0).unwrap();
        let at = |s: Step| steps.iter().position(|x| *x == s).unwrap();
        let first = at(Step::Birth { task: 4, from: Some(3) });
        assert!(at(Step::Birth { task: 2, from: Some(1) }) > first);
        assert!(at(Step::Birth { task: 5, from: Some(2) }) > first);
        let never = TaskNode { after: Some(1), ..node(2, 0, Some(0)) };
        assert!(plan(&[node(1, 0, None), never], 0).is_err());
    }
}
