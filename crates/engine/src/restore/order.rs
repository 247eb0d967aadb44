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

use std::collections::{HashMap, HashSet};

use torpor_images::kind;
use torpor_policy::TableNumber;
use torpor_policy::process::NestedPids;

use super::image::TaskImage;
use crate::error::{Error, Result};
use crate::namespace::pid;

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

/// A leader that has ended while others still are in its session or group: what stands in for it is
/// numbered behind the tasks.
#[derive(Debug)]
pub(super) struct MissingLeader {
    /// Its pid in the images.
    pub pid: u32,
    /// Its pids as clone3(2) takes them.
    pub pids: Vec<i32>,
    /// The task whose child it is, and that reaps it: another one where it is born from the leader of its session.
    pub parent: usize,
    /// Whether it leads a group only.
    pub of_group: bool,
}

/// Checks that the tasks of images can be born, and share with each other what births can share.
///
/// # Errors
/// As [`plan`]; the image of a task that has its descriptors together with one that it is not born from.
pub(super) fn check_images(tasks: &[TaskImage]) -> Result<()> {
    let shares = |step: Step| match step {
        Step::Birth { task, from: Some(from) } => {
            let (task, from) = (tasks.get(task)?, tasks.get(from)?);
            task.sharing.has_table_of(&from.sharing).then_some(task.tree.pid)
        }
        _ => None,
    };
    let born: HashSet<u32> = steps(tasks)?.into_iter().filter_map(shares).collect();
    let mut tables: HashMap<TableNumber, &TaskImage> = HashMap::new();
    for task in tasks.iter().filter(|task| !task.is_zombie()) {
        let first = *tables.entry(task.sharing.table).or_insert(task);
        let (pid, other) = (task.tree.pid, first.tree.pid);
        if other != pid && !born.contains(&pid) && !first.fds.is_empty() {
            let reason = format!(
                "it shares its descriptors with task {other}, but not with the one that it is born from, which is not \
                 supported"
            );
            return Err(Error::invalid(kind::CORE.file_name(pid.into()), reason));
        }
    }
    Ok(())
}

/// All steps of building the tree of `tasks`; behind these are numbered what stands in for leaders that are missing.
///
/// # Errors
/// See [`plan`].
pub(super) fn steps<T: AsRef<TaskImage>>(tasks: &[T]) -> Result<Vec<Step>> {
    plan(&nodes(tasks).0)
}

/// What the births of the tasks go by, apart from what they share: if it is the same in two
/// checkpoints, then so are the births.
pub(super) fn outline<T: AsRef<TaskImage>>(tasks: &[T]) -> Vec<(u32, u32, Option<u32>)> {
    let (nodes, _) = nodes(tasks);
    let parent = |node: &TaskNode| node.parent.map(|parent| nodes[parent].pid);
    let mut outline: Vec<_> = nodes.iter().map(|n| (n.pid, n.sid, parent(n))).collect();
    outline.sort_unstable();
    outline
}

/// The tasks, and behind them the leaders that are missing.
pub(super) fn nodes<T: AsRef<TaskImage>>(tasks: &[T]) -> (Vec<TaskNode>, Vec<MissingLeader>) {
    let images = || tasks.iter().map(AsRef::<TaskImage>::as_ref);
    let numbers: HashMap<u32, usize> = images().map(|task| task.tree.pid).zip(0..).collect();
    let node = |(index, task): (usize, &TaskImage)| {
        let parent = numbers.get(&task.tree.ppid).copied().filter(|_| index > 0);
        let after = parent.and_then(|parent| pid::awaited(tasks, index, parent));
        TaskNode { pid: task.tree.pid, sid: task.tree.sid, parent, after }
    };
    let mut nodes: Vec<TaskNode> = images().enumerate().map(node).collect();
    let Some(root) = images().next().map(|root| &root.tree) else { return (nodes, vec![]) };
    // Nobody stands in for those outside.
    let mut known: HashSet<u32> = numbers.keys().copied().chain([0, root.sid, root.pgid]).collect();
    let mut missing = Vec::new();
    for task in images() {
        let Some(&parent) = numbers.get(&task.tree.ppid) else { continue };
        let (sid, pgid) = (task.tree.sid, task.tree.pgid);
        let depth = tasks[parent].as_ref().depth();
        let nested = task.nested(0);
        // Where its number is unknown (0) the kernel refuses its birth.
        let pids = |pid: u32, below: fn(&NestedPids) -> &Vec<u32>| -> Vec<i32> {
            let below = nested.map(below).into_iter().flatten().take(depth);
            let all: Vec<i32> = [&pid].into_iter().chain(below).map(|n| n.cast_signed()).collect();
            all.into_iter().rev().collect()
        };
        if known.insert(sid) {
            nodes.push(TaskNode { pid: sid, sid, parent: Some(parent), after: None });
            let pids = pids(sid, |nested| &nested.sids);
            missing.push(MissingLeader { pid: sid, pids, parent, of_group: false });
        }
        if known.insert(pgid) {
            nodes.push(TaskNode { pid: pgid, sid, parent: Some(parent), after: None });
            let pids = pids(pgid, |nested| &nested.pgids);
            missing.push(MissingLeader { pid: pgid, pids, parent, of_group: true });
        }
    }
    (nodes, missing)
}

/// The session that the root task is born into.
fn root_session(nodes: &[TaskNode]) -> u32 {
    nodes.first().filter(|root| root.sid != root.pid).map_or(0, |root| root.sid)
}

/// Orders births and setsid calls.
///
/// # Errors
/// A session that no task of the tree can have founded.
pub(super) fn plan(nodes: &[TaskNode]) -> Result<Vec<Step>> {
    let root_session = root_session(nodes);
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
    use torpor_images::ImageDir;
    use torpor_images::proto::{CoreEntry, TaskKobjIdsEntry};
    use torpor_policy::memory::ProcessMemory;
    use torpor_policy::{Descriptor, HostSpaces, Sharing, TreePlace};

    use super::*;

    fn node(pid: u32, sid: u32, parent: Option<usize>) -> TaskNode {
        TaskNode { pid, sid, parent, after: None }
    }

    #[test]
    fn children_of_the_old_session_come_before_setsid() {
        let nodes =
            [node(1, 0, None), node(2, 2, Some(0)), node(3, 0, Some(1)), node(4, 2, Some(1))];
        let steps = plan(&nodes).unwrap();
        let at = |s: Step| steps.iter().position(|x| *x == s).unwrap();
        let setsid = at(Step::Setsid { task: 1 });
        assert!(at(Step::Birth { task: 2, from: Some(1) }) < setsid);
        assert!(at(Step::Birth { task: 3, from: Some(1) }) > setsid);
    }

    #[test]
    fn an_orphan_is_born_from_the_leader_of_its_session() {
        let nodes =
            [node(1, 0, None), node(2, 2, Some(0)), node(3, 2, Some(0)), node(4, 3, Some(2))];
        let steps = plan(&nodes[..3]).unwrap();
        assert!(steps.contains(&Step::SiblingBirth { task: 2, leader: 1 }));
        assert!(plan(&[node(1, 0, None), node(2, 77, Some(0))]).is_err());
    }

    /// A task that has descriptor 3 in its table, which is shown with the first that has it.
    fn task(pid: u32, ppid: u32, sid: u32, files_id: u32) -> TaskImage {
        let ids = TaskKobjIdsEntry {
            vm_id: pid,
            files_id,
            fs_id: pid,
            sighand_id: pid,
            ..TaskKobjIdsEntry::default()
        };
        let leader = CoreEntry { ids: Some(ids), ..CoreEntry::default() };
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        let (sharing, _) = Sharing::read(&images, pid, &leader, &HostSpaces::default()).unwrap();
        TaskImage {
            tree: TreePlace { pid, ppid, sid, pgid: 0, threads: vec![pid] },
            sharing,
            memory: Some(ProcessMemory::default()),
            fds: vec![Descriptor { fd: 3, file: 1, flags: 0 }],
            ..TaskImage::default()
        }
    }

    #[test]
    fn descriptors_are_shared_by_birth() {
        let check = |tasks: &[TaskImage]| check_images(tasks).map_err(|error| error.to_string());
        let root = || task(1, 0, 0, 5);
        assert_eq!(check(&[root(), task(2, 1, 0, 5), task(3, 2, 0, 5)]), Ok(()));
        assert_eq!(check(&[root(), task(2, 1, 2, 5), task(3, 1, 0, 6), task(4, 3, 0, 6)]), Ok(()));
        let refused = |pid: u32, other: u32| {
            Err(format!(
                "core-{pid}.img: it shares its descriptors with task {other}, but not with the one that it is born \
                 from, which is not supported"
            ))
        };
        // Those of a sister, and those of its parent, where it is born from the leader of its session.
        assert_eq!(check(&[root(), task(2, 1, 0, 6), task(3, 1, 0, 6)]), refused(3, 2));
        let tasks = [root(), task(2, 1, 2, 6), task(3, 1, 3, 5), task(4, 3, 2, 5)];
        assert_eq!(check(&tasks), refused(4, 1));
        // There is nothing to share.
        let without = |task| TaskImage { fds: vec![], ..task };
        let tasks = [root(), without(task(2, 1, 0, 6)), without(task(3, 1, 0, 6))];
        assert_eq!(check(&tasks), Ok(()));
    }

    #[test]
    fn a_session_has_a_leader() {
        let outside = [task(1, 0, 7, 5), task(2, 1, 2, 6), task(3, 2, 3, 8), task(4, 3, 7, 9)];
        let error = check_images(&outside).unwrap_err().to_string();
        let wanted = "pstree.img: task 4 is in session 7, whose leader is not in the tree";
        assert!(error.starts_with(wanted), "{error}");
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
        let steps = plan(&nodes).unwrap();
        let at = |s: Step| steps.iter().position(|x| *x == s).unwrap();
        let first = at(Step::Birth { task: 4, from: Some(3) });
        assert!(at(Step::Birth { task: 2, from: Some(1) }) > first);
        assert!(at(Step::Birth { task: 5, from: Some(2) }) > first);
        let never = TaskNode { after: Some(1), ..node(2, 0, Some(0)) };
        assert!(plan(&[node(1, 0, None), never]).is_err());
    }
}
