//! The process tree: births and sessions in the order of [`super::order`], groups, threads.

use torpor_policy::process::ProcessRest;
use torpor_sys::process::group_of;
use torpor_tracee::Tracee;
use torpor_tracee::syscall;

use super::numbers::{self, Birthplace};
use super::order::{self, MissingLeader, Step};
use super::transport::place_words;
use super::{Restore, Task, memory, process};
use crate::error::{About, Context, Error, Result};
use crate::namespace::{Namespaces, NsKind, nested_user, pid, send_into};
use crate::task::unkept;

/// Stands in for a leader that has ended while others still are in its session or
/// group. Numbered behind the tasks, and gone before they run.
#[derive(Debug)]
pub(super) struct Substitute {
    leader: MissingLeader,
    husk: Option<Tracee>,
}

/// Makes all husks, parents before children, and builds their memory on the way.
///
/// # Errors
/// If a pid is taken, or no process can be started; if parents and sessions make no tree; as
/// [`memory::build`].
pub(super) fn build(cx: &mut Restore<'_>) -> Result<()> {
    let (nodes, missing) = order::nodes(&cx.tasks);
    cx.substitutes = missing.into_iter().map(|leader| Substitute { leader, husk: None }).collect();
    let tasks = cx.tasks.len();
    for step in order::plan(&nodes)? {
        match step {
            // The root husk was made with the namespaces.
            Step::Birth { task, from: None } => {
                unkept::join_new_keyring(cx.tasks[task].remote()?)?;
                memory_of(cx, task, None)?;
            }
            Step::Birth { task, from: Some(parent) } if task >= tasks => {
                substitute(cx, task - tasks, parent, parent)?;
            }
            Step::Birth { task, from: Some(parent) } => {
                let flags = shared_with(&cx.tasks[task], &cx.tasks[parent]);
                bear(cx, task, parent, flags)?;
                memory_of(cx, task, Some(parent))?;
            }
            Step::Setsid { task } => {
                actor(cx, task)?.call("setsid", (libc::SYS_setsid, []))?;
                if task < tasks {
                    cx.table().begin_session(task)?;
                }
            }
            // All that matters of a substitute is the session that it is born into.
            Step::SiblingBirth { task, leader } | Step::OrphanBirth { task, leader }
                if task >= tasks =>
            {
                substitute(cx, task - tasks, leader, nodes[leader].parent.unwrap_or(leader))?;
            }
            Step::SiblingBirth { task, leader } => {
                bear(cx, task, leader, libc::CLONE_PARENT as u64)?;
                memory_of(cx, task, (leader < tasks).then_some(leader))?;
            }
            Step::OrphanBirth { task, leader } => {
                bear_orphan(cx, task, leader)?;
                memory_of(cx, task, (leader < tasks).then_some(leader))?;
            }
        }
    }
    Ok(())
}

/// Takes one step of a tree without substitutes: a birth.
///
/// # Errors
/// If the pid is taken, or no process can be started; if the husk that it is born from has ended.
pub(super) fn take(cx: &mut Restore<'_>, step: Step) -> Result<()> {
    match step {
        Step::Birth { task, from: Some(parent) } => {
            let flags = shared_with(&cx.tasks[task], &cx.tasks[parent]);
            bear(cx, task, parent, flags)
        }
        Step::SiblingBirth { task, leader } => bear(cx, task, leader, libc::CLONE_PARENT as u64),
        Step::OrphanBirth { task, leader } => bear_orphan(cx, task, leader),
        Step::Birth { from: None, .. } | Step::Setsid { .. } => Ok(()),
    }
}

/// Has a husk wait for a child of it that has ended, whose pid `pid` is to it; the task is told
/// nothing.
///
/// # Errors
/// If the husk is gone, or has no such child.
pub(super) fn wait_for(cx: &mut Restore<'_>, parent: usize, pid: i32) -> Result<()> {
    let pid = u64::from(pid.cast_unsigned());
    cx.tasks[parent].remote()?.call("wait4", (libc::SYS_wait4, [pid, 0, 0, 0]))?;
    forget_child_signals(cx, parent)
}

/// A task's or a substitute's husk.
pub(super) fn actor<'c>(cx: &'c mut Restore<'_>, index: usize) -> Result<&'c mut Tracee> {
    let tasks = cx.tasks.len();
    if index < tasks {
        return cx.tasks[index].remote();
    }
    let substitute = &mut cx.substitutes[index - tasks];
    let pid = substitute.leader.pid.cast_signed();
    substitute.husk.as_mut().ok_or(Error::Gone { pid })
}

/// The task whose namespaces and groups a husk has: a substitute those of its parent.
fn task_of(cx: &Restore<'_>, index: usize) -> usize {
    index.checked_sub(cx.tasks.len()).map_or(index, |i| cx.substitutes[i].leader.parent)
}

/// A substitute is born from the husk of `from`, as the child of task `parent`.
fn substitute(cx: &mut Restore<'_>, index: usize, from: usize, parent: usize) -> Result<()> {
    let pids = cx.substitutes[index].leader.pids.clone();
    // Tasks that are born as siblings of a substitute have its exit signal.
    let (flags, signal) =
        if from == parent { (0, libc::SIGCHLD) } else { (libc::CLONE_PARENT as u64, 0) };
    let place = place(cx, parent, parent, pids);
    cx.substitutes[index].husk = Some(numbers::spawn(cx, from, (flags, signal), &place)?);
    cx.substitutes[index].leader.parent = parent;
    Ok(())
}

/// Ends the substitutes: the tasks that they were needed for have been born and grouped.
fn dismiss(cx: &mut Restore<'_>) -> Result<()> {
    for Substitute { leader: MissingLeader { pids, parent, .. }, husk } in
        std::mem::take(&mut cx.substitutes)
    {
        let Some(husk) = husk else { continue };
        husk.exit_with(0)?;
        wait_for(cx, parent, pids.first().copied().unwrap_or(0))?;
    }
    Ok(())
}

fn memory_of(cx: &mut Restore<'_>, task: usize, parent: Option<usize>) -> Result<()> {
    let pid = cx.tasks[task].vpid;
    // A zombie has no memory, but what is parked for those that are born from it.
    if !cx.tasks[task].image.is_zombie() {
        memory::build(cx, task, parent).about(|| format!("memory of task {pid}"))?;
    }
    parent.map_or(Ok(()), |parent| memory::release(cx, parent, task))
}

/// What a child shares with its parent for ever: descriptor table, directories.
pub(super) fn shared_with(task: &Task, parent: &Task) -> u64 {
    let (a, b) = (&task.image.sharing, &parent.image.sharing);
    let mut flags = 0;
    if a.has_table_of(b) {
        flags |= libc::CLONE_FILES;
    }
    if a.has_directories_of(b) {
        flags |= libc::CLONE_FS;
    }
    u64::from(flags.cast_unsigned())
}

/// `task` is born from the husk of task `from`.
fn bear(cx: &mut Restore<'_>, task: usize, from: usize, flags: u64) -> Result<()> {
    let signal = if flags & libc::CLONE_PARENT as u64 == 0 { libc::SIGCHLD } else { 0 };
    let (pids, home) = (cx.tasks[task].image.pids(0), task_of(cx, from));
    let birth = pid::birth(&cx.tasks, &cx.ns, task, home)?;
    let known = if matches!(birth, pid::NamespaceBirth::Below(_)) { task } else { home };
    let mut place = place(cx, home, known, pids);
    let child = match birth {
        pid::NamespaceBirth::Same => numbers::spawn(cx, from, (flags, signal), &place)?,
        pid::NamespaceBirth::First => {
            let own = cx.tasks[task].image.homes.number(NsKind::Pid).unwrap_or(0);
            place.spaces.insert(0, own);
            match nested_user::birthplace(&cx.ns, place.user, own) {
                Some(owner) => {
                    let way = (place.user.replace(owner), owner);
                    let ids = cx.tasks[task].image.rights().cloned();
                    let enter = |spaces: &Namespaces, between: &mut Tracee| {
                        nested_user::enter_as(between, spaces, way, ids.as_ref())
                    };
                    numbers::spawn_within(cx, from, enter, (flags, true), &place)?
                }
                None => {
                    let flags = flags | NsKind::Pid.clone_flag();
                    numbers::spawn(cx, from, (flags, signal), &place)?
                }
            }
        }
        // It might not get back.
        pid::NamespaceBirth::Below(space) if place.user.is_some() => {
            let enter =
                |_: &Namespaces, between: &mut Tracee| send_into(between, NsKind::Pid, &space);
            numbers::spawn_within(cx, from, enter, (flags, false), &place)?
        }
        pid::NamespaceBirth::Below(space) => {
            let husk = actor(cx, from)?;
            let own = crate::proc::open(husk.pid(), "ns/pid")?.into();
            send_into(husk, NsKind::Pid, &space)?;
            let child = husk.spawn_child(flags, signal, &place.pids)?;
            send_into(husk, NsKind::Pid, &own)?;
            child
        }
    };
    cx.adopt(task, child)?;
    join_outer_group(cx, task, from)?;
    cx.settle(task, home, place.user)
}

/// Where somebody with the numbers `pids` is born from the husk of task `home`: in the pid namespaces
/// of task `known`.
fn place(cx: &Restore<'_>, home: usize, known: usize, pids: Vec<i32>) -> Birthplace {
    Birthplace {
        pids,
        spaces: pid::levels(&cx.tasks, &cx.ns, known),
        user: cx.ns.nested_user_of(&cx.tasks[home].image.homes),
    }
}

/// The parent of the husk of `from`.
pub(super) fn parent_of(cx: &Restore<'_>, from: usize) -> usize {
    match from.checked_sub(cx.tasks.len()) {
        Some(substitute) => cx.substitutes[substitute].leader.parent,
        None => {
            let ppid = cx.tasks[from].image.tree.ppid;
            cx.tasks.iter().position(|task| task.image.tree.pid == ppid).unwrap_or(from)
        }
    }
}

/// Ends a child of the husk of `parent` that is no task.
pub(super) fn end_child(cx: &mut Restore<'_>, parent: usize, child: Tracee) -> Result<()> {
    end_and_reap(actor(cx, parent)?, child)?;
    if parent < cx.tasks.len() { forget_child_signals(cx, parent) } else { Ok(()) }
}

/// Ends a child of a husk, which waits for it.
pub(super) fn end_and_reap(parent: &mut Tracee, child: Tracee) -> Result<()> {
    let numbers = crate::proc::status(child.pid())?.ns_pids();
    let depth = crate::proc::status(parent.pid())?.ns_pids().len();
    let number = numbers.get(depth.saturating_sub(1)).copied().unwrap_or_default();
    child.exit_with(0)?;
    let options = u64::from(libc::__WALL.cast_unsigned());
    let number = u64::from(number.cast_unsigned());
    parent.call("wait4", (libc::SYS_wait4, [number, 0, options, 0]))?;
    Ok(())
}

/// A process group of an outer pid namespace has no number for `task`, which was born from the
/// husk of `from`: that one puts it in, before it has children of its own, which inherit it. If
/// that cannot be done either, the group is found to be wrong in the end.
fn join_outer_group(cx: &mut Restore<'_>, task: usize, from: usize) -> Result<()> {
    let image = &cx.tasks[task].image;
    let pgid = image.tree.pgid;
    if pid::own_group(image) != Some(0) {
        return Ok(());
    }
    let leads = |task: &Task| task.image.tree.pid == pgid && !task.threads.is_empty();
    let (Some(leader), Some(parent)) =
        (cx.tasks.iter().position(leads), cx.tasks.get(from).map(|from| from.image.depth()))
    else {
        return Ok(());
    };
    let group_of = |task: usize| Ok::<_, Error>(crate::proc::stat(cx.tasks[task].pid)?.pgid);
    let (here, lead) = (cx.tasks[leader].pid, &cx.tasks[leader].image);
    let (is_in, is_led) = (group_of(task)? == here, group_of(leader)? == here);
    let (number, group) = (image.pid_at(parent), lead.pid_at(parent));
    if is_in || lead.depth() < parent {
        return Ok(());
    }
    if !is_led {
        set_group(cx, leader, 0, 0)?;
    }
    set_group(cx, from, number, group)
}

/// `task` is born from a child of task `leader` that ends at once.
fn bear_orphan(cx: &mut Restore<'_>, task: usize, from: usize) -> Result<()> {
    let (pids, home) = (cx.tasks[task].image.pids(0), task_of(cx, from));
    let place = place(cx, home, home, pids);
    let mut between: Tracee = actor(cx, from)?.spawn_child(0, 0, &[])?;
    let child = numbers::spawn_orphan(cx, &mut between, &place)?;
    between.exit_with(0)?;
    process::reap(actor(cx, from)?)?;
    cx.adopt(task, child)?;
    cx.settle(task, home, place.user)
}

/// Puts every task into its process group: leaders first.
///
/// # Errors
/// If the kernel refuses to put a task into its group; if a husk has ended.
pub(super) fn join_groups(cx: &mut Restore<'_>) -> Result<()> {
    let root = &cx.tasks[0].image.tree;
    // The job of a shell takes the place of the command that restores it: only then has it
    // the terminal in the foreground.
    let callers = (cx.opts.shell_job && root.sid != root.pid).then_some(root.pgid);
    let groups: Vec<(usize, u32, u32, u32)> = cx
        .tasks
        .iter()
        .enumerate()
        .map(|(i, t)| (i, t.image.tree.pid, t.image.tree.pgid, t.image.tree.sid))
        .filter(|&(.., pgid, _)| Some(pgid) != callers)
        .collect();
    for substitute in cx.substitutes.iter_mut().filter(|s| s.leader.of_group) {
        if let Some(husk) = &mut substitute.husk {
            husk.call("setpgid", (libc::SYS_setpgid, [0, 0]))?;
        }
    }
    // A session leader leads its group already, and cannot be moved.
    for &(task, pid, pgid, sid) in &groups {
        if pid == pgid && pid != sid {
            set_group(cx, task, 0, 0)?;
        }
    }
    for &(task, pid, pgid, _) in &groups {
        let number = pid::own_group(&cx.tasks[task].image).unwrap_or(0);
        // Into one of an outer pid namespace it was born.
        if pid == pgid || number == 0 {
            continue;
        }
        let leader = husk_of(cx, pgid).filter(|_| {
            groups.iter().any(|g| g.1 == pgid)
                || cx.substitutes.iter().any(|s| s.leader.pid == pgid)
        });
        // Most are in the group that they were born into.
        let is_in = |leader| group_of(cx.tasks[task].pid).is_ok_and(|now| now == leader);
        if leader.is_some_and(|leader| !is_in(leader)) {
            set_group(cx, task, 0, number.cast_signed())?;
        }
    }
    dismiss(cx)
}

/// The pid here of the husk of a task or of a substitute whose pid in the images is `pid`.
fn husk_of(cx: &Restore<'_>, pid: u32) -> Option<i32> {
    let of_task = cx.tasks.iter().find(|task| task.image.tree.pid == pid).map(|task| task.pid);
    let substitute = || cx.substitutes.iter().find(|s| s.leader.pid == pid)?.husk.as_ref();
    of_task.or_else(|| substitute().map(Tracee::pid))
}

/// Has a task put the process `pid`, or itself, into a group.
fn set_group(cx: &mut Restore<'_>, task: usize, pid: i32, pgid: i32) -> Result<()> {
    let args = [pid, pgid].map(|id| u64::from(id.cast_unsigned()));
    let name = format!("setpgid({pid}, {pgid})");
    cx.tasks[task].remote()?.call(&name, (libc::SYS_setpgid, args))?;
    Ok(())
}

/// Makes the threads of every task.
///
/// # Errors
/// If a thread id is taken, or no thread can be started (a limit); if a husk has ended.
pub(super) fn make_threads(cx: &mut Restore<'_>) -> Result<()> {
    for task in 0..cx.tasks.len() {
        for thread in 1..cx.tasks[task].image.tree.threads.len() {
            let pids = cx.tasks[task].image.pids(thread);
            let place = place(cx, task, task, pids);
            let flags = u64::from(process::SHARED.cast_unsigned());
            let thread = numbers::spawn(cx, task, (flags, 0), &place)?;
            cx.tasks[task].threads.push(thread);
        }
    }
    Ok(())
}

/// Ends the tasks that are zombies in the images, with the status they had.
///
/// # Errors
/// If a husk does not end, or its parent is gone.
pub(super) fn bury(cx: &mut Restore<'_>) -> Result<()> {
    for task in 0..cx.tasks.len() {
        if !cx.tasks[task].image.is_zombie() {
            continue;
        }
        let ProcessRest { exit_code, name, .. } = cx.tasks[task].image.process.clone();
        let Some(mut husk) = cx.tasks[task].threads.pop() else { continue };
        let pid = husk.pid();
        let mut batch = husk.batch();
        let name = batch.cstr(name);
        batch.call(syscall::prctl(libc::PR_SET_NAME, [name.0]));
        batch.run()?;
        husk.exit_with(exit_code).context_of(pid)?;
        let ppid = cx.tasks[task].image.tree.ppid;
        if let Some(parent) = cx.tasks.iter().position(|t| t.image.tree.pid == ppid) {
            forget_child_signals(cx, parent)?;
        }
    }
    Ok(())
}

/// Takes the `SIGCHLD` that the end of a husk has sent to its parent: the task has had
/// its own long ago. Everything is blocked during a batch, so that it is still pending.
fn forget_child_signals(cx: &mut Restore<'_>, parent: usize) -> Result<()> {
    if cx.tasks[parent].threads.is_empty() {
        return Ok(());
    }
    let mut batch = cx.tasks[parent].remote()?.batch();
    let set = place_words(&mut batch, &[1 << (libc::SIGCHLD - 1)]);
    let now = place_words(&mut batch, &[0, 0]);
    batch.call((libc::SYS_rt_sigtimedwait, [set.0, 0, now.0, 8]));
    batch.run()?;
    Ok(())
}

/// Names the zombie in an error.
trait ContextOf<T> {
    fn context_of(self, pid: i32) -> Result<T>;
}

impl<T> ContextOf<T> for torpor_tracee::Result<T> {
    fn context_of(self, pid: i32) -> Result<T> {
        self.map_err(|e| std::io::Error::other(e.to_string()))
            .context(|| format!("ending task {pid}, a zombie"))
    }
}
