//! Freezing a tree: every thread of every task stopped, and none escaped.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use torpor_tracee::{StopState, Tracee};

use super::freezer::Freezer;
use crate::error::{Error, Result};
use crate::guardian::Guardian;
use crate::proc;

/// A task found in the tree.
#[derive(Debug)]
pub struct Frozen {
    /// Its pid here.
    pub pid: i32,
    /// The id of its first thread that has not ended, by which the kernel shows its memory and
    /// its files; its pid for a zombie.
    pub face: i32,
    /// `/proc/FACE/stat` after it stopped.
    pub stat: proc::Stat,
    /// `/proc/FACE/status` after it stopped.
    pub status: proc::Status,
    /// Its threads that have not ended, the leader first if it has not; empty for a zombie.
    pub threads: Vec<Tracee>,
}

impl Frozen {
    /// The signal that job control had stopped it with, if any.
    pub fn stop_signal(&self) -> Option<i32> {
        match self.threads.first()?.state() {
            StopState::Group(signal) => Some(signal),
            StopState::Interrupted => None,
        }
    }
}

/// Stops `root` and all its descendants, parents before children in the result.
/// Passes are made until one finds no new task and no new thread, and no task that
/// ended before it could be stopped, whose children are now somebody else's: a stopped
/// task makes none. A paused tree is thawed as soon as all of it is bound to stop.
///
/// # Errors
/// A task that is traced by another program, that does not stop before
/// `deadline`: refused by name.
pub fn freeze(
    root: i32,
    freezer: &mut Freezer,
    guardian: &mut Guardian,
    deadline: Instant,
) -> Result<Vec<Frozen>> {
    let mut seized = if freezer.is_frozen() { seize_paused(root)? } else { HashMap::new() };
    freezer.thaw(guardian)?;
    let mut order = vec![root];
    let mut threads: HashMap<i32, Vec<Tracee>> = HashMap::new();
    loop {
        let mut news = false;
        let mut next = 0;
        while let Some(&pid) = order.get(next) {
            let bound = seized.remove(&pid).unwrap_or_default();
            match stop_threads(pid, bound, threads.entry(pid).or_default(), deadline) {
                Ok(more) => news |= more,
                Err(Error::Gone { .. }) if pid != root => {
                    order.remove(next);
                    threads.remove(&pid);
                    news = true;
                    continue;
                }
                Err(e) => return Err(e),
            }
            next += 1;
            news |= add_children(pid, &threads[&pid], &mut order)?;
        }
        if !news {
            break;
        }
    }
    order.into_iter().map(|pid| describe(pid, threads.remove(&pid).unwrap_or_default())).collect()
}

/// Adds the children of a process with these threads (none: a zombie) that are not
/// known yet. Whether there were any.
fn add_children(pid: i32, threads: &[Tracee], order: &mut Vec<i32>) -> Result<bool> {
    let mut tids: Vec<i32> = threads.iter().map(Tracee::tid).collect();
    if tids.is_empty() {
        tids.push(pid);
    }
    let before = order.len();
    for child in proc::children(pid, &tids)? {
        if !order.contains(&child) {
            order.push(child);
        }
    }
    Ok(order.len() > before)
}

/// Seizes all threads of a tree that is paused by its cgroup: they make no others, and
/// stop when they are thawed.
fn seize_paused(root: i32) -> Result<HashMap<i32, Vec<i32>>> {
    let mut seized: HashMap<i32, Vec<i32>> = HashMap::new();
    let mut order = vec![root];
    while let Some(pid) = order.pop() {
        let tids = proc::numbers(pid, "task")?;
        order.extend(proc::children(pid, &tids)?);
        let bound = seized.entry(pid).or_default();
        for tid in tids {
            if seize(pid, tid)? {
                bound.push(tid);
            }
        }
    }
    Ok(seized)
}

/// Stops the threads of a process that are not stopped yet, of which some may be seized
/// already. Whether there were any.
///
/// The list of threads alone does not tell when all are stopped: one that ends while the
/// kernel walks the list cuts it short there, and one that has ended before it could be
/// seized may have made another behind the end. Their number does: it counts all that are
/// stopped, and any other, also a leader that has ended before the rest.
fn stop_threads(
    pid: i32,
    mut seized: Vec<i32>,
    known: &mut Vec<Tracee>,
    deadline: Instant,
) -> Result<bool> {
    let (mut news, mut ended_leader) = (false, 0);
    loop {
        let status = proc::status(pid)?;
        check_core_dump(pid, &status)?;
        // An unknown number is none that all of them could be.
        let all = status.number("Threads", 10).and_then(|n| usize::try_from(n).ok());
        if seized.is_empty() && all == Some(known.len() + ended_leader) {
            return Ok(news);
        }
        let met: HashSet<i32> =
            known.iter().map(Tracee::tid).chain(seized.iter().copied()).collect();
        let tids = proc::numbers(pid, "task")?;
        for &tid in &tids {
            if met.contains(&tid) {
                continue;
            }
            match seize(pid, tid) {
                Ok(true) => seized.push(tid),
                Ok(false) if tid == pid && tids.len() == 1 => return Ok(news),
                Ok(false) if tid == pid => ended_leader = 1,
                Ok(false) => {}
                Err(Error::Gone { .. }) if tid != pid => {}
                Err(e) => return Err(e),
            }
        }
        news |= !seized.is_empty();
        for tid in seized.drain(..) {
            match wait_stopped(pid, tid, deadline) {
                Ok(tracee) => known.push(tracee),
                Err(Error::Gone { .. }) if tid != pid => {}
                Err(e) => return Err(e),
            }
        }
        if Instant::now() > deadline {
            return Err(Error::refused(
                pid,
                "its threads",
                "did not come to rest in time; they create and end others too quickly",
            ));
        }
    }
}

/// Refuses a process that dumps core, before it is seized: it does not stop before it has
/// ended, and a program that it writes its core to would get a part of it only.
fn check_core_dump(pid: i32, status: &proc::Status) -> Result<()> {
    // Kernels before 4.15 do not say.
    if status.number("CoreDumping", 10).is_none_or(|dumping| dumping == 0) {
        return Ok(());
    }
    let reason = "is dumping core, after which it will have ended; dump its tree then";
    Err(Error::refused(pid, "the task", reason))
}

/// Seizes a thread; `false` for a zombie.
fn seize(pid: i32, tid: i32) -> Result<bool> {
    if Tracee::seize(tid, true).is_ok() {
        return Ok(true);
    }
    // Why not? It may also be that we may not suspend filters.
    let status = proc::thread_status(pid, tid)?;
    if has_ended(&status) {
        return Ok(false);
    }
    if let Some(tracer) = status.number("TracerPid", 10).filter(|&t| t != 0) {
        return Err(Error::refused(
            pid,
            format!("thread {tid}"),
            format!("is traced by task {tracer}; detach the debugger first"),
        ));
    }
    let filtered = status.number("Seccomp", 10).unwrap_or(0) != 0;
    match Tracee::seize(tid, filtered) {
        Ok(()) => Ok(true),
        // It has ended since: it is not traced, but does not say so.
        Err(_) if has_ended(&proc::thread_status(pid, tid)?) => seize(pid, tid),
        Err(e) => Err(gone(e)),
    }
}

/// Whether a thread is a zombie.
fn has_ended(status: &proc::Status) -> bool {
    status.get("State").is_some_and(|state| state.starts_with(['Z', 'X']))
}

fn gone(e: torpor_tracee::Error) -> Error {
    match e {
        torpor_tracee::Error::Gone { pid } => Error::Gone { pid },
        other => other.into(),
    }
}

fn wait_stopped(pid: i32, tid: i32, deadline: Instant) -> Result<Tracee> {
    let patience = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    match Tracee::stopped(pid, tid, patience).map_err(gone)? {
        Some(tracee) => Ok(tracee),
        None => Err(Error::refused(
            pid,
            format!("thread {tid}"),
            "did not stop in time; it waits inside the kernel (vfork, a hung file system or device)",
        )),
    }
}

fn describe(pid: i32, mut threads: Vec<Tracee>) -> Result<Frozen> {
    threads.sort_by_key(|t| (t.tid() != pid, t.tid()));
    let face = threads.first().map_or(pid, Tracee::tid);
    Ok(Frozen { pid, face, stat: proc::stat(face)?, status: proc::status(face)?, threads })
}
