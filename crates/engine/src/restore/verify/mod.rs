//! Before anything wakes: whether what was made is what was judged.
//!
//! Everything is made and still stopped, and the kernel says what there is: namespaces, rights,
//! cgroups, mounts, directories, open files. A difference is a mistake of ours or somebody's doing, and
//! ends the restore; what was made goes with it.

mod files;
mod filters;
mod given;
pub(crate) mod mounts;
#[cfg(test)]
mod tests;
mod unix;

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;

use torpor_kernel::parallel;
use torpor_policy::seccomp::Filter;
use torpor_policy::{Capabilities, Credentials, LIMITS, OpenFile, Seccomp, Terminal};
use torpor_sys::ptrace::seccomp_filter;

use self::files::Opened;
use super::places::{FileOnMount, NAMES};
use super::tasks::{Task, real_pid};
use crate::cgroup::Groups;
use crate::error::{Context, Error, Result};
use crate::file::socket::tcp::Sleeping;
use crate::file::{OpenFiles, io_uring};
use crate::namespace::clocks::Offsets;
use crate::namespace::mount::Restored;
use crate::namespace::net::Routing;
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespace, Namespaces, NsKind, nested_user};
use crate::options::Options;
use crate::proc::{self, Status};
use crate::task;

/// What was made, and what it was made after.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made<'c> {
    /// What was asked for.
    pub opts: &'c Options,
    /// The tasks, and what their images say.
    pub tasks: &'c [Task],
    /// The namespaces.
    pub spaces: &'c Namespaces,
    /// The ids of the tree's user namespace.
    pub id_maps: &'c IdMaps,
    /// The mounts.
    pub mounts: &'c Restored,
    /// The control groups.
    pub cgroups: &'c Groups,
    /// The open files.
    pub files: &'c OpenFiles,
    /// What `files.img` says, by id.
    pub described: &'c HashMap<u32, OpenFile>,
    /// What the images say of terminals, by id.
    pub terminals: &'c HashMap<u32, Terminal>,
    /// Connections that wait for their tasks.
    pub sleeping: &'c [Sleeping],
}

/// Compares all of it.
///
/// # Errors
/// What differs, by task and kind.
pub(crate) fn check(cx: &Made<'_>) -> Result<()> {
    // Ids of this host count by it.
    id_maps(cx)?;
    let spaces = SpaceInodes::open(cx)?;
    let opened = Opened {
        tasks: cx.tasks,
        files: cx.files,
        described: cx.described,
        spaces: cx.spaces,
        id_maps: cx.id_maps,
        given: &cx.opts.given.inherit_fd,
        firsts: files::firsts(cx.tasks),
    };
    // The root task has no namespace below its own.
    let levels = proc::status(cx.tasks[0].pid)?.in_each_ns("NSpid").len();
    let level = levels.saturating_sub(1);
    let live = (0..cx.tasks.len()).filter(|&index| !cx.tasks[index].threads.is_empty());
    let live: Vec<usize> = live.collect();
    let filtered = parallel::map(&live, cx.opts.memory.workers(), |&index| {
        spaces.check(cx, index)?;
        nested(cx, index)?;
        let filtered = rights(cx, index, level)?;
        limits(&cx.tasks[index])?;
        places(cx, index)?;
        opened.descriptors(index)?;
        Ok::<_, Error>(filtered)
    })?;
    // The kernel shows them to the thread alone that traces the tasks.
    filtered.iter().flatten().try_for_each(compare_filters)?;
    let mut seen = HashSet::new();
    live.iter().try_for_each(|&index| clocks(cx, index, &mut seen))?;
    opened.sockets()?;
    filters::check(&opened, cx.sleeping)?;
    given::check(&opened, cx.terminals)?;
    nested_user::verify(cx.tasks, cx.spaces, cx.id_maps)?;
    mounts::check(cx.spaces, cx.mounts)?;
    networks(cx)?;
    cx.cgroups.verify(cx.tasks)
}

/// What was made is not what was judged.
fn wrong(reason: String) -> Error {
    Error::invalid("what was restored", reason)
}

fn differs(pid: i32, what: &str, wanted: impl Display, is: impl Display) -> Error {
    wrong(format!("task {pid}: {what} is {is} and was to be {wanted}"))
}

/// The inode numbers of namespaces.
struct SpaceInodes {
    /// The restoring program's, by kind.
    own: HashMap<NsKind, u64>,
    /// Those of the images, by number.
    made: HashMap<u32, u64>,
}

impl SpaceInodes {
    fn open(cx: &Made<'_>) -> Result<Self> {
        let pid = i32::try_from(std::process::id()).unwrap_or_default();
        let inode = |kind: NsKind| Ok((kind, proc::ns_inode(pid, kind.name())?));
        let own = NsKind::ALL.into_iter().map(inode).collect::<Result<_>>()?;
        let mut made = HashMap::new();
        for ns in &cx.spaces.all {
            if let Some(file) = &ns.file {
                let stat = rustix::fs::fstat(file).context(|| "fstat of a namespace".to_owned())?;
                made.insert(ns.id, stat.st_ino);
            }
        }
        Ok(SpaceInodes { own, made })
    }

    /// Each task is in the namespaces that it was to be in: the restoring program's own where
    /// the images say so, and only there.
    fn check(&self, cx: &Made<'_>, index: usize) -> Result<()> {
        let task = &cx.tasks[index];
        let given = |ns: &Namespace| cx.spaces.given.contains_key(&ns.id);
        for kind in NsKind::ALL {
            let Some(ns) = task.image.homes.number(kind).and_then(|id| cx.spaces.by_id(id)) else {
                continue;
            };
            let (now, own) = (proc::ns_inode(task.pid, kind.name())?, self.own.get(&kind).copied());
            let made = self.made.get(&ns.id).copied();
            let right = match ns.is_host {
                // The caller may have the tree join another one. Clocks that went on elsewhere are kept
                // by a namespace of their own.
                true => Some(now) == made.or(own) || kind == NsKind::Time,
                false => (Some(now) != own || given(ns)) && made.is_none_or(|made| made == now),
            };
            if !right {
                let wanted = if ns.is_host { "this host's" } else { "its own" };
                let what = format!("the {} namespace", kind.name());
                return Err(differs(task.vpid, &what, wanted, format!("inode {now}")));
            }
        }
        Ok(())
    }
}

/// The addresses, routes and routing rules of the network namespaces that were filled: those of the images, and
/// no more than the kernel or the caller has added.
fn networks(cx: &Made<'_>) -> Result<()> {
    for (id, callers) in cx.spaces.networks.all() {
        let wanted = Routing::planned(cx.spaces, id)?;
        let now = Routing::shown(cx.spaces, id)?;
        if let Some(what) = wanted.difference(&now, callers) {
            return Err(wrong(format!("network namespace {id}: {what}")));
        }
    }
    Ok(())
}

/// The clocks of a task are as far ahead as they were set to. Each namespace is `seen` once.
fn clocks(cx: &Made<'_>, index: usize, seen: &mut HashSet<(u32, u64)>) -> Result<()> {
    let task = &cx.tasks[index];
    let own = task.image.homes.own(NsKind::Time).unwrap_or(0);
    let Some(wanted) = cx.spaces.clocks.get(&own) else { return Ok(()) };
    let inode = proc::ns_inode(task.pid, "time")?;
    // The kernel tells those of its children only.
    if seen.contains(&(own, inode)) || inode != proc::ns_inode(task.pid, "time_for_children")? {
        return Ok(());
    }
    let now = Offsets::for_children(task.pid)?;
    if now != *wanted {
        return Err(differs(task.vpid, "its time", wanted, now));
    }
    seen.insert((own, inode));
    Ok(())
}

/// A task in a pid namespace below that of the root task has the numbers, the parent, the group and
/// the session that it was to have: those from further out it cannot ask for itself.
fn nested(cx: &Made<'_>, index: usize) -> Result<()> {
    let task = &cx.tasks[index];
    let Some(nested) = task.image.nested(0).filter(|nested| !nested.tids.is_empty()) else {
        return Ok(());
    };
    let status = proc::status(task.pid)?;
    let tree = &task.image.tree;
    let leads = |id: u32| cx.tasks.iter().any(|task| task.image.tree.pid == id);
    for (key, outer, wanted) in [
        ("NStgid", tree.pid, &nested.tids),
        ("NSpgid", tree.pgid, &nested.pgids),
        ("NSsid", tree.sid, &nested.sids),
    ] {
        let all = status.in_each_ns(key);
        let now = all.get(all.len().saturating_sub(wanted.len() + 1)..).unwrap_or_default();
        let now: Vec<u32> = now.iter().map(|id| id.cast_unsigned()).collect();
        // Those that lead groups outside of the tree are others now.
        let known = if leads(outer) { outer } else { now.first().copied().unwrap_or_default() };
        let wanted: Vec<u32> = [known].into_iter().chain(wanted.iter().copied()).collect();
        if now != wanted {
            let (wanted, now) = (format!("{wanted:?}"), format!("{now:?}"));
            return Err(differs(task.vpid, key, wanted, now));
        }
    }
    let parent = real_pid(cx.tasks, tree.ppid.cast_signed());
    let now = proc::stat(task.pid)?.ppid;
    match parent {
        Some(parent) if parent == now => Ok(()),
        _ => Err(differs(task.vpid, "its parent", tree.ppid, format!("{now} here"))),
    }
}

/// Where a task is in the file system, and what it runs.
fn places(cx: &Made<'_>, index: usize) -> Result<()> {
    let task = &cx.tasks[index];
    for (&wanted, (name, what)) in task.places.iter().flatten().zip(NAMES) {
        let now = FileOnMount::of_process(task.pid, name)?;
        if now != wanted {
            return Err(differs(task.vpid, &format!("its {what}"), wanted, now));
        }
    }
    Ok(())
}

/// Which ids of this host the user namespace of the root task has.
fn id_maps(cx: &Made<'_>) -> Result<()> {
    let nested = |ns: &Namespace| cx.spaces.nested_user(ns.id).is_some();
    for ns in cx.spaces.of_kind(NsKind::User).filter(|ns| !ns.is_host && !nested(ns)) {
        let Some(task) = cx.tasks.get(ns.task).filter(|task| !task.threads.is_empty()) else {
            continue;
        };
        let now = IdMaps::of(task.pid)?;
        if now != *cx.id_maps {
            return Err(differs(task.vpid, "the id map", cx.id_maps, now));
        }
    }
    Ok(())
}

/// A thread that has filters of system calls.
struct Filtered<'c> {
    /// Its process in the images, and its number here.
    pid: i32,
    tid: i32,
    /// How many filters it has that are older than those of its image.
    older: u64,
    /// Those of its image, the oldest first.
    filters: &'c [Arc<Filter>],
}

/// The numbers of the threads of a task in the pid namespace of the root task, which is the `level`th
/// from here, and what they may do. Those that have filters, which are still to be compared.
fn rights<'c>(cx: &Made<'c>, index: usize, level: usize) -> Result<Vec<Filtered<'c>>> {
    let task = &cx.tasks[index];
    let image = &task.image;
    let numbers = task.threads.iter().zip(&image.tree.threads);
    let all = numbers.zip(&image.credentials).zip(&image.seccomp);
    let mut filtered = Vec::new();
    for (index, (((thread, &number), given), wanted)) in all.enumerate() {
        if image.has_ended(index) {
            continue;
        }
        let status = proc::thread_status(task.pid, thread.tid())?;
        let now = status.in_each_ns("NSpid").get(level).copied().unwrap_or_default();
        if now != number.cast_signed() {
            return Err(differs(task.vpid, "the number of a thread", number, now));
        }
        if let Some(given) = given {
            credentials(cx, task.vpid, given, &status)?;
        }
        let older = seccomp(task.vpid, wanted, &status)?;
        let (pid, tid, filters) = (task.vpid, thread.tid(), wanted.filters());
        filtered.extend((!filters.is_empty()).then_some(Filtered { pid, tid, older, filters }));
    }
    fetchers(cx, task).map(|()| filtered)
}

/// What threads of the kernel may do that fetch requests of io_uring for a task: they work in its name.
fn fetchers(cx: &Made<'_>, task: &Task) -> Result<()> {
    let ring = |id: u32| cx.described.get(&id).and_then(OpenFile::io_uring);
    let is_polled = task.image.fds.iter().any(|fd| ring(fd.file).is_some_and(|r| r.is_polled()));
    let given = task.image.rights().filter(|_| is_polled);
    let Some(given) = given else { return Ok(()) };
    for tid in io_uring::fetchers(task.pid)? {
        credentials(cx, task.vpid, given, &proc::thread_status(task.pid, tid)?)?;
    }
    Ok(())
}

/// A thread has the seccomp mode of its image and as many filters, and no fewer. One that had none may have those
/// that all have whom this program starts: how many these are, which are older.
fn seccomp(pid: i32, wanted: &Seccomp, status: &Status) -> Result<u64> {
    let mode = wanted.mode();
    let now = status.number("Seccomp", 10).unwrap_or_default();
    if *wanted != Seccomp::Free && i64::from(mode as i32) != now.cast_signed() {
        return Err(differs(pid, "the seccomp mode", mode as i32, now));
    }
    // Linux 5.9 counts them.
    let (filters, now) = (wanted.filters(), status.number("Seccomp_filters", 10));
    let older = now.map_or(Some(0), |now| now.checked_sub(filters.len() as u64));
    older.ok_or_else(|| {
        let now = now.unwrap_or_default();
        differs(pid, "the number of seccomp filters", filters.len(), now)
    })
}

/// The filters of a thread are those of its image.
fn compare_filters(of: &Filtered<'_>) -> Result<()> {
    let Filtered { pid, tid, older, filters } = of;
    for (index, filter) in (*older..).zip(*filters) {
        let now = match seccomp_filter(*tid, index) {
            // A program that has filters itself is not shown those of others.
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => return Ok(()),
            now => now.context(|| format!("task {tid}: seccomp filter {index}"))?,
        };
        if now.as_ref() != Some(&filter.program) {
            let what = format!("seccomp filter {index}");
            return Err(differs(*pid, &what, "that of its image", "another"));
        }
    }
    Ok(())
}

/// A process may use no more than its image says, and the kernel spares it no more.
fn limits(task: &Task) -> Result<()> {
    let wanted = &task.image.limits;
    let now = task::hard_limits(task.pid)?;
    for ((name, wanted), now) in LIMITS.iter().zip(&wanted.resources).zip(now) {
        if now > wanted.hard {
            return Err(differs(task.vpid, &format!("the hard limit {name}"), wanted.hard, now));
        }
    }
    let now = task::oom_score_adj(task.pid)?;
    match (now, wanted.oom_score_adj) {
        (Some(now), Some(wanted)) if now < wanted => {
            Err(differs(task.vpid, "oom_score_adj", wanted, now))
        }
        _ => Ok(()),
    }
}

fn credentials(cx: &Made<'_>, pid: i32, given: &Credentials, status: &Status) -> Result<()> {
    let list = |ids: &[u64]| format!("{ids:?}");
    let users = given.users.map(|id| u64::from(cx.id_maps.uid_outside(id).unwrap_or(id)));
    let group = |id: u32| u64::from(cx.id_maps.gid_outside(id).unwrap_or(id));
    let groups = given.groups.map(group);
    for (key, wanted) in [("Uid", users), ("Gid", groups)] {
        let now = status.numbers(key, 10);
        if now != wanted {
            return Err(differs(pid, key, list(&wanted), list(&now)));
        }
    }
    let mut wanted: Vec<u64> = given.further.iter().map(|&id| group(id)).collect();
    let mut now = status.numbers("Groups", 10);
    wanted.sort_unstable();
    now.sort_unstable();
    if now != wanted {
        return Err(differs(pid, "Groups", list(&wanted), list(&now)));
    }
    let sets = given.capabilities;
    for (key, wanted) in [
        ("CapInh", sets.inheritable),
        ("CapPrm", sets.permitted),
        ("CapEff", sets.effective),
        ("CapBnd", sets.bounding),
        ("CapAmb", sets.ambient),
    ] {
        // A kernel with fewer capabilities has less to give.
        let now = Capabilities(status.number(key, 16).unwrap_or_default());
        if !now.without(wanted).is_empty() {
            return Err(differs(pid, key, wanted, now));
        }
    }
    let gives_up = given.no_new_privileges == Some(true);
    if gives_up && status.number("NoNewPrivs", 10) != Some(1) {
        return Err(differs(pid, "NoNewPrivs", 1, 0));
    }
    Ok(())
}
