//! Pid namespaces. What they hold is the tree; only one that is left to the caller
//! (`--external pid[INODE]:NAME`) has an image.
//!
//! A task may live in namespaces below that of the root task. The images call it by its number in
//! that of the root, as all tasks: those are unique. How the namespaces below know it is a field of
//! the images of its threads, which only matters where it is born, and where it calls others by
//! numbers itself.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_images::proto::{PidnsEntry, TorporNestedEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::PID_MAX;
use torpor_tracee::syscall;

use super::{Namespace, Namespaces, NsKind, external};
use crate::dump::pids::Pids;
use crate::dump::tasks as dumped;
use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::options::InheritFd;
use crate::proc::{self, Status};
use crate::restore::image::TaskImage;
use crate::restore::tasks::Task;
use crate::restore::transport::Transport;

/// The number of the first process of a namespace.
const FIRST: i32 = 1;

/// Writes `pidns-ID.img` if the namespace is external.
///
/// # Errors
/// If the image cannot be written.
pub(crate) fn dump(external: &[External], images: &ImageDir, ns: &Namespace) -> Result<()> {
    let inode = ns.inode;
    let name = external.iter().find_map(|external| match external {
        External::Pid { inode: i, name } if *i == inode => Some(name.clone()),
        _ => None,
    });
    // One below that of the root task is the tree's.
    let Some(name) = name.filter(|_| ns.task == 0) else { return Ok(()) };
    let entry = PidnsEntry { ext_key: Some(name) };
    Ok(images.write_one(kind::PIDNS, ns.id.into(), &entry)?)
}

/// The caller's namespace to restore into, if the tree's was external.
///
/// # Errors
/// A namespace that was not handed over.
pub(crate) fn external(given: &[InheritFd], spaces: &Namespaces) -> Result<Option<OwnedFd>> {
    let roots = |ns: &&Namespace| ns.task == 0 && !ns.is_host;
    let root = spaces.of_kind(NsKind::Pid).find(roots);
    let named = root.and_then(|ns| spaces.given.get(&ns.id));
    let key = named.and_then(|named| named.key.as_ref());
    key.map(|key| external::inherited(given, key)).transpose()
}

/// Makes the children of the calling thread live in `file`.
///
/// # Errors
/// `EINVAL` if the namespace is not below the caller's own, `EPERM` without `CAP_SYS_ADMIN` in both.
pub(crate) fn enter(file: &OwnedFd) -> io::Result<()> {
    Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::ProcessID))?)
}

/// Where a task lives, as far as pid namespaces below that of the root task go.
#[derive(Debug)]
struct Residence {
    /// Its numbers there, the outermost first.
    numbers: Vec<u32>,
    /// The number of its own namespace; it is unknown of a zombie.
    space: Option<u32>,
    /// The index of its parent.
    parent: Option<usize>,
    /// The session that it is in, by its number in the namespace of the root task.
    session: u32,
    /// Whether it leads that session.
    leads: bool,
}

impl Residence {
    /// Whether it is the first task of its namespace.
    fn is_first(&self) -> bool {
        self.numbers.last() == Some(&1)
    }
}

/// Whether tasks can be born where they live; which cannot, and why.
fn check(places: &[Residence]) -> std::result::Result<(), (usize, &'static str)> {
    let mut firsts: HashMap<u32, Vec<(usize, &Residence)>> = HashMap::new();
    for (number, place) in places.iter().enumerate().filter(|(_, place)| place.is_first()) {
        let of_space = place.space.map(|space| firsts.entry(space).or_default());
        of_space.into_iter().for_each(|all| all.push((number, place)));
    }
    let firsts = |space: u32| firsts.get(&space).map(Vec::as_slice).unwrap_or_default();
    for (task, place) in places.iter().enumerate() {
        let depth = place.numbers.len();
        let Some(parent) = place.parent.and_then(|parent| places[..task].get(parent)) else {
            match depth {
                0 => continue,
                _ => return Err((task, "is below that of its parent, which is not in the tree")),
            }
        };
        let above = parent.numbers.len();
        match place.space {
            _ if place.is_first() && depth == above + 1 => {
                if place.space.is_some_and(|space| firsts(space).len() > 1) {
                    return Err((task, "has two first tasks"));
                }
            }
            _ if place.is_first() || depth < above => {
                return Err((task, "is not directly below that of its parent"));
            }
            None if depth == above => {}
            None => return Err((task, "is another one than its parent's, and it has ended")),
            Some(space) if depth == above && parent.space == Some(space) => {}
            // Its parent has made the namespace (unshare(2)), or entered it (setns(2)).
            Some(space) => {
                let mut all = firsts(space).iter().copied();
                let first = all.find(|(_, first)| first.numbers.len() == depth);
                let Some((number, first)) = first.filter(|_| depth > above) else {
                    return Err((
                        task,
                        "is one that its parent has entered (setns(2)), and whose first task is \
                         outside of the tree; dump a tree that has both, or end that task first",
                    ));
                };
                // It is born when the first task is there, which may be after its parent has begun
                // a session.
                let beside = number < task && first.parent == place.parent;
                if !beside && place.session != parent.session && !place.leads {
                    return Err((
                        task,
                        "is one that its parent has entered (setns(2)), and its session is not \
                         that of its parent, which is not supported; end that task first",
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Leaves the pid namespace of the root task behind, if its first process is not of the tree: such a tree
/// comes back with its numbers in whatever namespace it is restored in, as one of the dumping program's does.
///
/// # Errors
/// If the root task has ended.
pub(crate) fn leave_behind(
    root: &dumped::Task,
    externals: &[External],
    spaces: &mut Namespaces,
) -> Result<()> {
    let inode = proc::ns_inode(root.pid, NsKind::Pid.name())?;
    let is_given =
        |it: &External| matches!(it, External::Pid { inode: given, .. } if *given == inode);
    if root.vpid == FIRST || externals.iter().any(is_given) {
        return Ok(());
    }
    let of_host = |ns: &&mut Namespace| ns.kind == NsKind::Pid && ns.is_host;
    if let Some(host) = spaces.all.iter_mut().find(of_host) {
        host.inode = inode;
        host.file = Some(proc::open(root.pid, "ns/pid")?.into());
    }
    Ok(())
}

/// Finds out how pid namespaces below that of the root task know the tasks.
///
/// # Errors
/// Refused, where a task lives in one that it cannot be born into again.
pub(crate) fn note(tasks: &[dumped::Task], pids: &mut Pids, spaces: &Namespaces) -> Result<()> {
    let known: HashMap<i32, usize> = tasks.iter().map(|task| task.tgid).zip(0..).collect();
    let place = |task: &dumped::Task| Residence {
        numbers: below(task, &task.status, "NStgid"),
        space: task.ids.pid_ns_id.filter(|_| !task.is_zombie()),
        parent: known.get(&task.stat.ppid).copied(),
        session: task.stat.sid.cast_unsigned(),
        leads: task.stat.sid == task.tgid,
    };
    let places: Vec<Residence> = tasks.iter().map(place).collect();
    let refuse =
        |(task, why): (usize, &str)| Error::refused(tasks[task].pid, "its pid namespace", why);
    check(&places).map_err(refuse)?;
    let mut all = Vec::new();
    for (task, place) in tasks.iter().zip(places) {
        let for_children = for_children(task, spaces)?;
        if place.numbers.is_empty() && for_children.is_none() {
            continue;
        }
        let process = TorporNestedEntry {
            tids: place.numbers,
            pgids: below(task, &task.status, "NSpgid"),
            sids: below(task, &task.status, "NSsid"),
            for_children,
        };
        all.push((task.tgid, process));
        let others = task.threads.iter().zip(&task.statuses);
        let others = others.filter(|(thread, _)| thread.tid() != task.tgid);
        all.extend(others.map(|(thread, status)| {
            let tids = below(task, status, "NSpid");
            (thread.tid(), TorporNestedEntry { tids, ..TorporNestedEntry::default() })
        }));
    }
    for (tid, nested) in all {
        if nested != TorporNestedEntry::default() {
            pids.note_nested(tid, nested);
        }
    }
    Ok(())
}

/// The numbers of a line of a status in namespaces below that of the root task.
fn below(task: &dumped::Task, status: &Status, key: &str) -> Vec<u32> {
    let all = status.in_each_ns(key).into_iter().skip(task.level + 1);
    all.map(i32::cast_unsigned).collect()
}

/// The namespace that the children of a task are born into, if that is not its own.
fn for_children(task: &dumped::Task, spaces: &Namespaces) -> Result<Option<u32>> {
    let own = task.ids.pid_ns_id.and_then(|id| spaces.by_id(id));
    let Some(own) = own.filter(|_| !task.is_zombie()) else { return Ok(None) };
    let inode = task.pids_for_children;
    if inode == Some(own.inode) {
        return Ok(None);
    }
    let below = spaces.of_kind(NsKind::Pid).find(|ns| ns.task != 0 && Some(ns.inode) == inode);
    below.map(|ns| Some(ns.id)).ok_or_else(|| {
        let what = "its pid namespace for children";
        Error::refused(task.pid, what, "has no task, which is not supported; let it have a child")
    })
}

/// Checks what the images say of pid namespaces below that of the root task.
///
/// # Errors
/// Numbers that are impossible; tasks that could not be born so.
pub(crate) fn check_images(tasks: &[TaskImage]) -> Result<()> {
    let invalid = |task: &TaskImage, why: &str| {
        Error::invalid(kind::CORE.file_name(task.tree.pid.into()), why)
    };
    let known: HashMap<u32, usize> = tasks.iter().map(|task| task.tree.pid).zip(0..).collect();
    let place = |task: &TaskImage| Residence {
        numbers: task.nested(0).map(|nested| nested.tids.clone()).unwrap_or_default(),
        space: task.homes.number(NsKind::Pid).filter(|_| !task.is_zombie()),
        parent: known.get(&task.tree.ppid).copied(),
        session: task.tree.sid,
        leads: task.tree.sid == task.tree.pid,
    };
    let places: Vec<Residence> = tasks.iter().map(place).collect();
    for task in tasks {
        for thread in 0..task.threads.len() {
            let (Some(nested), depth) = (task.nested(thread), task.depth()) else {
                match task.depth() {
                    0 => continue,
                    _ => return Err(invalid(task, "a thread lacks its nested numbers")),
                }
            };
            let fits = |all: &[u32]| all.len() == depth && all.iter().all(|id| *id <= PID_MAX);
            let process = thread != 0 || fits(&nested.pgids) && fits(&nested.sids);
            if depth > DEEPEST || !fits(&nested.tids) || nested.tids.contains(&0) || !process {
                return Err(invalid(task, "its nested numbers are impossible"));
            }
        }
    }
    let wrong =
        |(task, why): (usize, &str)| invalid(&tasks[task], &format!("its pid namespace {why}"));
    check(&places).map_err(wrong)
}

/// How deep pid namespaces are nested at most (`MAX_PID_NS_LEVEL`).
const DEEPEST: usize = 32;

/// The pid namespaces that a task is in: its own first, that of the root task last.
#[must_use]
pub(crate) fn levels(tasks: &[Task], spaces: &Namespaces, task: usize) -> Vec<u32> {
    let space = |task: usize| tasks[task].image.homes.number(NsKind::Pid).unwrap_or(0);
    let parent = |task: &usize| {
        let ppid = tasks[*task].image.tree.ppid;
        tasks.iter().position(|task| task.image.tree.pid == ppid)
    };
    let above = |number: &u32| parent(&spaces.by_id(*number)?.task).map(space);
    let depth = tasks[task].image.depth();
    std::iter::successors(Some(space(task)), above).take(depth + 1).collect()
}

/// The first task of each pid namespace that has one in the tree.
pub(crate) fn firsts<T: AsRef<TaskImage>>(tasks: &[T]) -> HashMap<u32, usize> {
    let all = tasks.iter().map(AsRef::<TaskImage>::as_ref).enumerate();
    let first = all.filter(|(_, task)| task.pid_at(task.depth()) == 1);
    // The one that is listed first, should an image have several.
    first.rev().filter_map(|(index, task)| Some((task.homes.number(NsKind::Pid)?, index))).collect()
}

/// Notes who is the first task of each pid namespace below that of the root task, wherever the
/// images list it: the namespace is there as soon as that one is.
pub(crate) fn find_firsts(tasks: &[Task], spaces: &mut Namespaces) {
    let below = |ns: &&mut Namespace| ns.kind == NsKind::Pid && ns.task != 0;
    let firsts = firsts(tasks);
    for ns in spaces.all.iter_mut().filter(below) {
        ns.task = firsts.get(&ns.id).copied().unwrap_or(ns.task);
    }
}

/// Who has to be born before `task` since that is born into its namespace from outside: the first
/// task there, which is one of [`firsts`].
#[must_use]
pub(crate) fn awaited<T: AsRef<TaskImage>>(
    tasks: &[T],
    firsts: &HashMap<u32, usize>,
    task: usize,
    parent: usize,
) -> Option<usize> {
    let home = |task: usize| tasks[task].as_ref().homes.number(NsKind::Pid);
    let space = home(task).filter(|_| home(task) != home(parent))?;
    firsts.get(&space).copied().filter(|first| *first != task)
}

/// How a task is born into its pid namespace.
#[derive(Debug)]
pub(crate) enum NamespaceBirth {
    /// In that of the task that it is born from.
    Same,
    /// As the first task of a new one.
    First,
    /// In one that the task that it is born from has to choose for its children.
    Below(OwnedFd),
}

/// How `task` is born from the husk of task `from`.
///
/// # Errors
/// If the first task of its namespace has not been born yet.
pub(crate) fn birth(
    tasks: &[Task],
    spaces: &Namespaces,
    task: usize,
    from: usize,
) -> Result<NamespaceBirth> {
    let space = |task: usize| tasks[task].image.homes.number(NsKind::Pid).unwrap_or(0);
    let (depth, above) = (tasks[task].image.depth(), tasks[from].image.depth());
    if depth == above + 1 && tasks[task].image.pid_at(depth) == 1 {
        return Ok(NamespaceBirth::First);
    }
    if space(task) == space(from) {
        return Ok(NamespaceBirth::Same);
    }
    let file = spaces.open_file(space(task))?.try_clone_to_owned();
    Ok(NamespaceBirth::Below(file.context(|| "dup".to_owned())?))
}

/// The number of a process group in the pid namespace of a task; 0 if it has none there, or none
/// of its members is a task.
#[must_use]
pub(crate) fn group_seen_by(tasks: &[Task], task: usize, pgid: u32) -> u32 {
    let image = &tasks[task].image;
    let depth = image.depth();
    if depth == 0 {
        return pgid;
    }
    let home = |task: &TaskImage| task.homes.number(NsKind::Pid);
    let is_here = |other: &TaskImage| home(other) == home(image);
    let mut members = tasks.iter().map(|task| &task.image).filter(|m| m.tree.pgid == pgid);
    let member = members.find(|member| member.depth() == depth && is_here(member));
    member.and_then(own_group).unwrap_or(0)
}

/// The number of a task's process group in its own pid namespace.
#[must_use]
pub(crate) fn own_group(task: &TaskImage) -> Option<u32> {
    match task.depth() {
        0 => Some(task.tree.pgid),
        _ => task.nested(0)?.pgids.last().copied(),
    }
}

/// Has the children of tasks be born where they were to be.
///
/// # Errors
/// If the images have no such namespace; if a husk may not enter it, or has no room for descriptors.
pub(crate) fn finish(tasks: &mut [Task], spaces: &Namespaces) -> Result<()> {
    for task in tasks {
        let image = &task.image;
        let wanted = image.nested(0).and_then(|nested| nested.for_children);
        let Some(id) = wanted.filter(|_| !task.threads.is_empty()) else { continue };
        let space = spaces.by_id(id).filter(|space| space.kind == NsKind::Pid);
        let space = space.ok_or_else(|| {
            let image = kind::CORE.file_name(image.tree.pid.into());
            Error::invalid(image, format!("there is no pid namespace {id}"))
        })?;
        let file = spaces.open_file(space.id)?;
        // Its own descriptors are in place, and may have any number.
        let husk = task.remote()?;
        let lent = Transport::lend(husk, file)?;
        let entered =
            husk.call("setns", (libc::SYS_setns, [lent.0, NsKind::Pid.clone_flag()])).map(drop);
        husk.call("close", syscall::close(lent))?;
        entered?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(numbers: &[u32], space: u32, parent: usize) -> Residence {
        let parent = Some(parent);
        Residence {
            numbers: numbers.to_vec(),
            space: Some(space),
            parent,
            session: 1,
            leads: false,
        }
    }

    fn checked(more: Vec<Residence>) -> Option<usize> {
        let root = Residence { parent: None, leads: true, ..place(&[], 1, 0) };
        let all: Vec<Residence> = std::iter::once(root).chain(more).collect();
        check(&all).err().map(|(task, _)| task)
    }

    #[test]
    fn tasks_are_born_where_they_live() {
        // A sandbox in a sandbox, and a second child of the task that has made the first one.
        let all = vec![
            place(&[1], 2, 0),
            place(&[2], 2, 1),
            place(&[3, 1], 3, 2),
            place(&[9], 2, 0),
            Residence { space: None, ..place(&[7], 2, 1) },
            Residence { space: None, ..place(&[1], 4, 0) },
        ];
        assert_eq!(checked(all), None);
    }

    #[test]
    fn who_was_born_into_a_namespace_that_its_parent_has_entered_waits_for_the_first() {
        // Before and behind the first task, at once two levels below, and as the leader of a session.
        let behind = vec![place(&[], 1, 0), place(&[1], 2, 1), place(&[2], 2, 0)];
        assert_eq!(checked(behind), None);
        let leads = Residence { session: 9, leads: true, ..place(&[2], 2, 1) };
        let all = vec![
            place(&[], 1, 0),
            place(&[], 1, 0),
            leads,
            place(&[5, 2], 3, 1),
            place(&[1], 2, 2),
            place(&[2, 1], 3, 5),
        ];
        assert_eq!(checked(all), None);
        // Its parent has begun a session since.
        let begun = Residence { session: 9, ..place(&[], 1, 0) };
        let all = vec![place(&[], 1, 0), begun, place(&[1], 2, 1), place(&[2], 2, 2)];
        assert_eq!(checked(all), Some(4));
    }

    #[test]
    fn who_cannot_be_born_there_is_named() {
        // Two levels at once; no first task; above its parent; twice first; beside that of its parent.
        assert_eq!(checked(vec![place(&[2, 1], 2, 0)]), Some(1));
        assert_eq!(checked(vec![place(&[2], 2, 0)]), Some(1));
        assert_eq!(checked(vec![place(&[1], 2, 0), place(&[], 1, 1)]), Some(2));
        assert_eq!(checked(vec![place(&[1], 2, 0), place(&[1], 2, 0)]), Some(1));
        let beside = vec![place(&[1], 2, 0), place(&[1], 3, 0), place(&[2], 3, 1)];
        assert_eq!(checked(beside), Some(3));
        let zombie = Residence { space: None, ..place(&[7], 2, 0) };
        assert_eq!(checked(vec![place(&[1], 2, 0), zombie]), Some(2));
    }
}
