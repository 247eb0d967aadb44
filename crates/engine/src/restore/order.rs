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

use std::collections::{HashMap, HashSet, VecDeque};

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
    let firsts = pid::firsts(tasks);
    let node = |(index, task): (usize, &TaskImage)| {
        let parent = numbers.get(&task.tree.ppid).copied().filter(|_| index > 0);
        let after = parent.and_then(|parent| pid::awaited(tasks, &firsts, index, parent));
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
/// Images of a stranger may name as many tasks as there are pids, in any tree: this takes no stack for each of them, and
/// looks at each a few times only.
///
/// # Errors
/// A session that no task of the tree can have founded.
pub(super) fn plan(nodes: &[TaskNode]) -> Result<Vec<Step>> {
    let mut births = Births::new(nodes);
    if !nodes.is_empty() {
        births.bear(Step::Birth { task: 0, from: None }, 0, root_session(nodes));
    }
    loop {
        if let Some(next) = births.ahead.pop() {
            births.go_on(next);
        } else if let Some(task) = births.orphans.pop_front() {
            births.bear_orphan(task);
        } else {
            break;
        }
    }
    let waiting = births.waiting.into_values().flatten().min();
    let Some(lost) = births.lost.or(waiting) else { return Ok(births.steps) };
    let TaskNode { pid, sid, .. } = nodes[lost];
    let reason =
        format!("task {pid} is in session {sid}, whose leader is not in the tree; see --shell-job");
    Err(Error::invalid(kind::PSTREE.file_name(0), reason))
}

/// What comes after the birth of a task.
#[derive(Debug, Clone, Copy)]
enum Ahead {
    /// The birth of a child which is in the session that its parent was born into.
    Elder(ChildBirth),
    /// The task becomes a session leader.
    Setsid(usize),
    /// The birth of another child, if it can be born by then.
    Younger(ChildBirth),
}

/// A child, its parent, and the session that this one is in when the child is born.
#[derive(Debug, Clone, Copy)]
struct ChildBirth {
    task: usize,
    parent: usize,
    session: u32,
}

/// The births of a tree, as far as they are in order.
#[derive(Debug)]
struct Births<'n> {
    nodes: &'n [TaskNode],
    /// The last child of each task.
    last: Vec<Option<usize>>,
    /// The child before each one, of the same parent.
    before: Vec<Option<usize>>,
    /// The tasks by their pids.
    numbers: HashMap<u32, usize>,
    born: Vec<bool>,
    steps: Vec<Step>,
    /// What comes next, the last first.
    ahead: Vec<Ahead>,
    /// Those that could not be born when their parents had been, and perhaps can be now.
    orphans: VecDeque<usize>,
    /// Those that cannot be born before another task, by that.
    waiting: HashMap<usize, Vec<usize>>,
    /// One whose leader is not there.
    lost: Option<usize>,
}

impl<'n> Births<'n> {
    fn new(nodes: &'n [TaskNode]) -> Self {
        let mut last = vec![None; nodes.len()];
        let before = nodes.iter().enumerate().map(|(task, node)| {
            let of_parent = node.parent.and_then(|parent| last.get_mut(parent));
            of_parent.and_then(|last| last.replace(task))
        });
        Births {
            before: before.collect(),
            nodes,
            last,
            numbers: nodes.iter().map(|node| node.pid).zip(0..).collect(),
            born: vec![false; nodes.len()],
            steps: Vec::new(),
            ahead: Vec::new(),
            orphans: VecDeque::new(),
            waiting: HashMap::new(),
            lost: None,
        }
    }

    fn go_on(&mut self, ahead: Ahead) {
        match ahead {
            Ahead::Setsid(task) => self.steps.push(Step::Setsid { task }),
            Ahead::Younger(ChildBirth { task, session, .. })
                if !fits(self.nodes[task], session) || self.awaited(task).is_some() =>
            {
                self.orphans.push_back(task);
            }
            Ahead::Elder(birth) | Ahead::Younger(birth) => {
                let ChildBirth { task, parent, session } = birth;
                self.bear(Step::Birth { task, from: Some(parent) }, task, session);
            }
        }
    }

    /// Takes the step by which `task` is born into `session`: its children are next.
    fn bear(&mut self, step: Step, task: usize, session: u32) {
        self.steps.push(step);
        self.born[task] = true;
        self.orphans.extend(self.waiting.remove(&task).into_iter().flatten());
        let (nodes, node) = (self.nodes, self.nodes[task]);
        let leads = node.sid == node.pid && session != node.sid;
        let is_elder = |child: &usize| leads && nodes[*child].sid == session;
        let children = std::iter::successors(self.last[task], |&child| self.before[child]);
        let birth = |session| move |child| ChildBirth { task: child, parent: task, session };
        let now = if leads { node.sid } else { session };
        let younger = children.clone().filter(|child| !is_elder(child)).map(birth(now));
        self.ahead.extend(younger.map(Ahead::Younger));
        if leads {
            self.ahead.push(Ahead::Setsid(task));
            self.ahead.extend(children.filter(is_elder).map(birth(session)).map(Ahead::Elder));
        }
    }

    /// A task that could not be born when its parent had been is born now, or waits for another one.
    fn bear_orphan(&mut self, task: usize) {
        let node = self.nodes[task];
        let parent = node.parent.filter(|&parent| fits(node, self.nodes[parent].sid));
        let leader = self.numbers.get(&node.sid).copied();
        match (self.awaited(task), parent, leader) {
            (Some(first), ..) => self.waiting.entry(first).or_default().push(task),
            (None, Some(parent), _) => {
                let session = self.nodes[parent].sid;
                self.bear(Step::Birth { task, from: Some(parent) }, task, session);
            }
            (None, None, Some(leader)) if self.born[leader] => {
                let step = match self.nodes[leader].parent == node.parent {
                    true => Step::SiblingBirth { task, leader },
                    false => Step::OrphanBirth { task, leader },
                };
                self.bear(step, task, node.sid);
            }
            (None, None, Some(leader)) => self.waiting.entry(leader).or_default().push(task),
            (None, None, None) => self.lost = self.lost.or(Some(task)),
        }
    }

    /// Who has to be born before the task, and has not been.
    fn awaited(&self, task: usize) -> Option<usize> {
        self.nodes[task].after.filter(|&first| !self.born[first])
    }
}

/// Whether a task can be born from one that is in session `sid`.
fn fits(node: TaskNode, sid: u32) -> bool {
    node.sid == sid || node.sid == node.pid
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::ImageDir;
    use torpor_images::proto::{CoreEntry, TaskKobjIdsEntry};
    use torpor_policy::memory::ProcessMemory;
    use torpor_policy::{Descriptor, HostSpaces, SharedParts, TreePlace};

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
        let (sharing, _) =
            SharedParts::read(&images, pid, &leader, &HostSpaces::default()).unwrap();
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

    /// The root task and `count` below it: one from the other, or all from the root.
    fn tree(count: u32, parent: fn(usize) -> usize, sid: impl Fn(u32) -> u32) -> Vec<TaskNode> {
        let below = |index: usize, pid| TaskNode {
            pid,
            sid: sid(pid),
            parent: Some(parent(index)),
            after: None,
        };
        let below = (2..=count).enumerate().map(|(index, pid)| below(index, pid));
        [node(1, 0, None)].into_iter().chain(below).collect()
    }

    /// The parents of tasks that are one below the other, and of sisters.
    const SHAPES: [fn(usize) -> usize; 2] = [|index| index, |_| 0];

    /// A function that calls itself for each would have no stack left, and one that looks at all for each would not end.
    #[test]
    fn as_many_tasks_as_there_are_pids_are_born() {
        const MANY: u32 = 50_000;
        for shape in SHAPES {
            // Of one session, and each of its own.
            let one = plan(&tree(MANY, shape, |_| 0)).unwrap();
            assert_eq!(one.len(), 50_000);
            assert_eq!(one[49_999], Step::Birth { task: 49_999, from: Some(shape(49_998)) });
            assert_eq!(plan(&tree(MANY, shape, |pid| pid)).unwrap().len(), 2 * 50_000 - 1);
            // None has the leader of its session, and the one of all but the last has it behind itself.
            assert!(plan(&tree(MANY, shape, |_| 77_777)).is_err());
            let behind = |pid| if pid == MANY { pid } else { pid + 1 };
            let error = plan(&tree(MANY, shape, behind));
            assert_eq!(error.is_ok(), shape(7) == 0);
        }
        let most = plan(&tree(torpor_policy::PID_MAX, SHAPES[0], |_| 0)).unwrap();
        assert_eq!(most.len(), torpor_policy::PID_MAX as usize);
    }
}
