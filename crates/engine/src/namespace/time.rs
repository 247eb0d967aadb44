//! Time namespaces: `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` go on where they were when
//! the tree was dumped, whatever they show on the machine that it is restored on.
//!
//! A tree that lives in the host's time namespace gets one of its own when it is
//! restored; its clocks are in `timens-0.img`.
//!
//! Some of its tasks may live in others. A task that makes a time namespace does not live in it, only
//! children that are born later do: it makes it again when its children are there.

use std::os::fd::OwnedFd;

use torpor_images::{ImageDir, kind};
use torpor_policy::ClockTimes;
use torpor_tracee::Tracee;

use super::clocks::{Clocks, Offsets, own_pid};
use super::nested_user::as_owner;
use super::{Namespace, Namespaces, NsKind, send_into};
use crate::dump::tasks::Task;
use crate::error::{Error, Result};
use crate::proc;
use crate::restore::process::with_process;
use crate::restore::tasks;

/// Checks where tasks live as far as clocks go, and finds out who can be asked for those of each
/// namespace.
///
/// # Errors
/// Refused, where a task could not live again.
pub(crate) fn note(tasks: &[Task], spaces: &mut Namespaces) -> Result<()> {
    let live = || tasks.iter().filter(|task| !task.is_zombie());
    let Some(root) = live().next() else { return Ok(()) };
    for task in live() {
        check(task, root, spaces)?;
    }
    for ns in spaces.all.iter_mut().filter(|ns| ns.kind == NsKind::Time && !ns.is_host) {
        let refuse = |why| Err(Error::refused(ns.pid, "its time namespace", why));
        if live().filter(|task| makes(task, ns)).count() > 1 {
            return refuse("is that of the children of two tasks outside of it; end one of them");
        }
        // A task shows the offsets of its children.
        let Some(task) = live().find(|task| task.time_for_children == ns.inode) else {
            return refuse(
                "cannot be looked at, since all its tasks have made others for their children; \
                 end one of them first",
            );
        };
        ns.pid = task.pid;
    }
    Ok(())
}

/// Whether the children of a task are born into a namespace that it does not live in itself.
fn makes(task: &Task, ns: &Namespace) -> bool {
    task.time_for_children == ns.inode && task.ids.time_ns_id != Some(ns.id)
}

fn check(task: &Task, root: &Task, spaces: &Namespaces) -> Result<()> {
    let refuse = |what: &str, why: &str| Err(Error::refused(task.pid, what, why));
    let (own, roots) = (task.ids.time_ns_id, root.ids.time_ns_id);
    let own_inode = own.and_then(|id| spaces.by_id(id)).map(|ns| (ns.inode, ns.is_host));
    let is_apart = own != roots;
    if is_apart && own_inode.is_none_or(|(_, is_host)| is_host) {
        let why = "is this host's, and that of the root task is not, which is not supported; end \
                   that task first";
        return refuse("its time namespace", why);
    }
    let is_maker = own_inode.is_some_and(|(inode, _)| inode != task.time_for_children);
    let for_children = spaces.by_inode(task.time_for_children);
    if is_maker && for_children.is_none_or(|ns| ns.is_host || ns.task == 0) {
        let why = "has no task, which is not supported; let it have a child";
        return refuse("its time namespace for children", why);
    }
    Ok(())
}

/// Checks that tasks can get into their time namespaces again, and make those of their children, once it
/// is known which user namespaces these belong to.
///
/// # Errors
/// Refused, where a task has not the rights that it takes.
pub(crate) fn check_rights(tasks: &[Task], spaces: &Namespaces) -> Result<()> {
    let others = || spaces.of_kind(NsKind::Time).filter(|ns| ns.task != 0 && !ns.is_host);
    for task in tasks.iter().filter(|task| !task.is_zombie()) {
        let user = task.ids.user_ns_id.filter(|&user| spaces.nested_user(user).is_some());
        let may = |ns: &Namespace| {
            let owner = spaces.owner_of(ns.id);
            let lives_there = task.ids.time_ns_id == Some(ns.id);
            (!lives_there || spaces.is_within(owner, user)) && (!makes(task, ns) || owner == user)
        };
        if !others().all(may) {
            let why = "or that of its children belongs to another user namespace, where it has no rights \
                       to enter or to make it again, which is not supported; end that task first";
            return Err(Error::refused(task.pid, "its time namespace", why));
        }
    }
    Ok(())
}

/// Writes `timens-ID.img` of each: what the clocks of the tasks show now. To be called when all timers
/// have been read.
///
/// The clocks run while tasks are frozen, and so do their timers. An image has what each timer has left,
/// and how often it has fired. Were the clocks noted first, the restored tree would be taken back to before
/// the last expirations that are in the images, and would see timers fire before their time: a
/// `timerfd` of 1 ms more often than milliseconds go by. Clocks that were noted last let timers be a
/// little late, as a busy machine does, and never early.
///
/// # Errors
/// If the offsets cannot be read, or an image cannot be written.
pub(crate) fn dump(images: &ImageDir, tasks: &[Task], spaces: &Namespaces) -> Result<()> {
    let now = Clocks::now();
    let roots = |ns: &&Namespace| ns.task == 0 && !ns.is_host;
    if spaces.of_kind(NsKind::Time).find(roots).is_none() {
        images.write_one(kind::TIMENS, 0, &now.to_entry())?;
    }
    let here = Clocks::offsets(own_pid())?;
    for ns in spaces.of_kind(NsKind::Time).filter(|ns| !ns.is_host) {
        let mut entry = now.minus(here).plus(Clocks::offsets(ns.pid)?).to_entry();
        let maker = tasks.iter().find(|task| !task.is_zombie() && makes(task, ns));
        entry.torpor_maker = maker.map(|task| task.vpid.cast_unsigned());
        images.write_one(kind::TIMENS, ns.id.into(), &entry)?;
    }
    Ok(())
}

impl Offsets {
    /// Those of the root task; `None` if it is to share the caller's clocks.
    ///
    /// # Errors
    /// If the namespace is none that is made; if this process cannot read its own offsets.
    pub(crate) fn of_root(spaces: &Namespaces) -> Result<Option<Self>> {
        let own = of_root(spaces);
        if own == 0 && std::fs::metadata("/proc/self/ns/time").is_err() {
            // A kernel without time namespaces: the clocks are the host's.
            return Ok(None);
        }
        let filling = &spaces.filling;
        let times = if own == 0 { filling.clocks_of_host() } else { Some(filling.clocks(own)?) };
        times.map(Offsets::of).transpose()
    }
}

/// The number of the time namespace of the root task; 0 is that of the host.
pub(super) fn of_root(spaces: &Namespaces) -> u32 {
    let roots = |ns: &&Namespace| ns.task == 0 && !ns.is_host;
    spaces.of_kind(NsKind::Time).find(roots).map_or(0, |ns| ns.id)
}

/// A namespace that the root task does not live in, as it is to be made.
struct Other {
    id: u32,
    clocks: Offsets,
    /// The task whose children it is for, and which does not live in it.
    maker: Option<usize>,
}

impl Other {
    fn of(times: &ClockTimes, tasks: &[tasks::Task]) -> Result<Self> {
        let id = times.space;
        let maker = times.maker.map(|pid| {
            let is_maker =
                |task: usize| tasks[task].image.tree.pid == pid && !tasks[task].threads.is_empty();
            (0..tasks.len()).find(|&task| is_maker(task)).ok_or_else(|| {
                let reason = format!("task {pid}, whose children it is for, does not live");
                Error::invalid(kind::TIMENS.file_name(id.into()), reason)
            })
        });
        Ok(Other { id, clocks: Offsets::of(times)?, maker: maker.transpose()? })
    }
}

/// Makes the time namespaces that the root task does not live in, and has the husks enter them. To be
/// called when all children of tasks are there, before they have descriptors (which the way in takes
/// for itself) and threads (a husk that has any cannot enter).
///
/// # Errors
/// If the images have no living maker for a namespace; if a husk has ended; if the kernel refuses a namespace or an offset.
pub(crate) fn restore_others(spaces: &mut Namespaces, tasks: &mut [tasks::Task]) -> Result<()> {
    let others = spaces.of_kind(NsKind::Time).filter(|ns| ns.task != 0 && !ns.is_host);
    let other = |ns: &Namespace| Other::of(spaces.filling.clocks(ns.id)?, tasks);
    let mut others: Vec<Other> = others.map(other).collect::<Result<_>>()?;
    while !others.is_empty() {
        // A task that enters a namespace has its children be born there: makers live where they are to first.
        let home = |task: usize| tasks[task].image.homes.number(NsKind::Time);
        let waits = |maker: usize| others.iter().any(|other| Some(other.id) == home(maker));
        let next = others.iter().position(|other| !other.maker.is_some_and(waits));
        let next = next.ok_or_else(|| {
            let reason = "its maker lives in what is made in it";
            Error::invalid(kind::TIMENS.file_name(others[0].id.into()), reason)
        })?;
        let other = others.remove(next);
        let made = other.make(tasks, spaces)?;
        if let Some(ns) = spaces.all.iter_mut().find(|ns| ns.id == other.id) {
            ns.file = Some(made);
        }
        spaces.clocks.insert(other.id, other.clocks);
    }
    Ok(())
}

impl Other {
    /// Makes it, and has those enter it who lived there.
    fn make(&self, tasks: &mut [tasks::Task], spaces: &Namespaces) -> Result<OwnedFd> {
        let husk = tasks[self.maker.unwrap_or(0)].remote()?;
        let made = match self.maker {
            Some(_) => self.unshare(husk)?,
            // Not the husk: it would have to enter its own again, which is refused where that belongs to a
            // user namespace above, as one does that is made for a tree of the host's clocks.
            None => with_process(husk, None, |child| {
                as_owner(child, spaces, (None, self.id), |maker| self.unshare(maker))
            })?,
        };
        for task in tasks.iter_mut() {
            let lives_there = task.image.homes.number(NsKind::Time) == Some(self.id);
            if lives_there && !task.threads.is_empty() {
                send_into(task.remote()?, NsKind::Time, &made)?;
            }
        }
        Ok(made)
    }

    /// Has a process make it for its children.
    fn unshare(&self, maker: &mut Tracee) -> Result<OwnedFd> {
        maker.call("unshare time namespace", (libc::SYS_unshare, [NsKind::Time.clone_flag()]))?;
        self.clocks.set(maker.pid())?;
        Ok(proc::open(maker.pid(), "ns/time_for_children")?.into())
    }
}
