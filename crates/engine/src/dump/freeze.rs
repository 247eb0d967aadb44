//! Freezing a tree: every thread of every task stopped, and none escaped.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use torpor_sys::kcmp::{Object, kcmp};
use torpor_tracee::Tracee;

use super::freezer::Freezer;
use crate::error::{Error, Result};
use crate::guardian::Guardian;
use crate::proc;

/// How long a thread may take to stop before it is asked what it waits for.
const AT_ONCE: Duration = Duration::from_millis(20);

/// Threads that are bound to stop, by their processes.
pub(crate) type Seized = HashMap<i32, Vec<i32>>;

/// A task found in the tree.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Its pid here.
    pub pid: i32,
    /// The id of its first thread that has not ended, by which the kernel shows its memory and
    /// its files; its pid for a zombie.
    pub face: i32,
    /// `/proc/FACE/status` after it stopped.
    pub status: proc::Status,
    /// Its threads that have not ended, the leader first if it has not; empty for a zombie.
    pub threads: Vec<Tracee>,
}

/// Stops `root` and all its descendants, parents before children in the result. All that
/// are known are asked to stop before the first one is waited for. A paused tree is thawed as
/// soon as all of it is bound to stop.
///
/// A stopped task makes no others, but it can become the parent of one whose own has ended,
/// or of a sibling that a child of it makes. So when nobody new is found any more all are asked
/// for their children once more, the younger before the older: whoever loses its parent goes to
/// one that is asked later.
///
/// A parent in vfork(2) stops when its child runs another program. A child that is bound to stop
/// before it does (of a paused tree, or among the `first`) is let go until its parent has stopped,
/// and found anew.
///
/// `first` stops those of a running tree that are to stop before the others.
///
/// # Errors
/// A task that is traced by another program, that does not stop before
/// `deadline`: refused by name.
pub(crate) fn freeze(
    root: i32,
    freezer: &mut Freezer,
    guardian: &Guardian,
    (deadline, workers): (Instant, usize),
    first: impl FnOnce() -> Result<Seized>,
) -> Result<Vec<Stopped>> {
    let mut seized = if freezer.is_frozen() { seize_paused(root, workers)? } else { first()? };
    freezer.thaw(guardian)?;
    let mut stopped: Vec<Stopped> = Vec::new();
    let mut found = vec![root];
    while !found.is_empty() {
        let older = stopped.len();
        let bound = found.into_iter().map(|pid| (pid, seized.remove(&pid).unwrap_or_default()));
        let bound = bound.collect();
        stopped.extend(stop_all(root, bound, &mut seized, deadline)?);
        let known: HashSet<i32> = stopped.iter().map(|task| task.pid).collect();
        found = new_children(stopped[older..].iter(), &known, workers)?;
        if found.is_empty() {
            found = new_children(stopped[..older].iter().rev(), &known, workers)?;
        }
    }
    Ok(stopped)
}

/// Stops processes of which some threads may be seized already, with others of the tree:
/// `seized`. Those that have ended and are gone are left out.
fn stop_all(
    root: i32,
    bound: Vec<(i32, Vec<i32>)>,
    seized: &mut Seized,
    deadline: Instant,
) -> Result<Vec<Stopped>> {
    let unless_gone = |pid: i32, result: Result<bool>| match result {
        Err(Error::Gone { .. }) if pid != root => Ok(false),
        result => result,
    };
    let mut stopping: Vec<Stopping> = Vec::with_capacity(bound.len());
    for (pid, seized) in bound {
        let mut task = Stopping::new(pid, seized);
        let asked = task.seize().map(|()| true);
        if unless_gone(pid, asked)? {
            stopping.push(task);
        }
    }
    let mut stopped = Vec::with_capacity(stopping.len());
    for task in stopping {
        let pid = task.pid;
        let frozen = task.stop(seized, deadline).map(|frozen| stopped.push(frozen)).map(|()| true);
        unless_gone(pid, frozen)?;
    }
    Ok(stopped)
}

/// The children of processes that are not `known` yet, in the order of their parents.
fn new_children<'t>(
    parents: impl Iterator<Item = &'t Stopped>,
    known: &HashSet<i32>,
    workers: usize,
) -> Result<Vec<i32>> {
    let mut new = Vec::new();
    for parent in parents {
        let mut tids: Vec<i32> = parent.threads.iter().map(Tracee::tid).collect();
        if tids.is_empty() {
            tids.push(parent.pid);
        }
        let children = proc::children(parent.pid, &tids, workers)?;
        new.extend(children.into_iter().filter(|child| !known.contains(child)));
    }
    // One that has been given to another parent meanwhile may have been seen at both.
    let mut seen = HashSet::new();
    new.retain(|&child| seen.insert(child));
    Ok(new)
}

/// Seizes all threads of a tree that is paused by its cgroup: they make no others, and
/// stop when they are thawed.
fn seize_paused(root: i32, workers: usize) -> Result<Seized> {
    let mut seized = Seized::new();
    let mut order = vec![root];
    while let Some(pid) = order.pop() {
        let tids = proc::numbers(pid, "task")?;
        order.extend(proc::children(pid, &tids, workers)?);
        let bound = seized.entry(pid).or_default();
        for tid in tids {
            if seize(pid, tid)? {
                bound.push(tid);
            }
        }
    }
    Ok(seized)
}

/// Asks all threads of a process to stop, and returns those that are bound to.
///
/// # Errors
/// Refused if it dumps core, or another program traces it; gone.
pub(crate) fn seize_all(pid: i32) -> Result<Vec<i32>> {
    let mut task = Stopping::new(pid, Vec::new());
    task.seize()?;
    Ok(task.seized)
}

/// A process that is to stop.
struct Stopping {
    pid: i32,
    /// Its threads that were asked to, and have not been waited for.
    seized: Vec<i32>,
    /// Those that have stopped.
    threads: Vec<Tracee>,
    /// 1 if the leader has ended, and others have not.
    ended_leader: usize,
    /// Whether all have ended.
    is_zombie: bool,
    /// Threads of the kernel's own that work for it (io_uring): they run no program.
    workers: HashSet<i32>,
}

impl Stopping {
    fn new(pid: i32, seized: Vec<i32>) -> Self {
        Stopping {
            pid,
            seized,
            threads: Vec::new(),
            ended_leader: 0,
            is_zombie: false,
            workers: HashSet::new(),
        }
    }

    /// Asks all its threads to stop that were not asked yet.
    fn seize(&mut self) -> Result<()> {
        let pid = self.pid;
        check_core_dump(pid, &proc::status(pid)?)?;
        let known = self.threads.iter().map(Tracee::tid).chain(self.seized.iter().copied());
        let met: HashSet<i32> = known.chain(self.workers.iter().copied()).collect();
        let tids = proc::numbers(pid, "task")?;
        for &tid in &tids {
            if met.contains(&tid) {
                continue;
            }
            match seize(pid, tid) {
                Ok(true) => self.seized.push(tid),
                Ok(false) if tid == pid && tids.len() == 1 => self.is_zombie = true,
                Ok(false) if tid == pid => self.ended_leader = 1,
                Ok(false) => {}
                Err(Error::Gone { .. }) if tid != pid => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Waits until all its threads have stopped.
    ///
    /// The list of threads alone does not tell when all are stopped: one that ends while the
    /// kernel walks the list cuts it short there, and one that has ended before it could be
    /// seized may have made another behind the end. Their number does: it counts all that are
    /// stopped, and any other, also a leader that has ended before the rest.
    fn stop(mut self, others: &mut Seized, deadline: Instant) -> Result<Stopped> {
        let pid = self.pid;
        loop {
            for tid in self.seized.drain(..) {
                match wait_stopped(pid, tid, others, deadline) {
                    Ok(tracee) if is_worker(pid, &tracee) => {
                        tracee.finish()?;
                        self.workers.insert(tid);
                    }
                    Ok(tracee) => self.threads.push(tracee),
                    Err(Error::Gone { .. }) if tid != pid => {}
                    Err(e) => return Err(e),
                }
            }
            let status = proc::status(pid)?;
            // An unknown number is none that all of them could be.
            let all = status.number("Threads", 10).and_then(|n| usize::try_from(n).ok());
            // They come and go as the kernel likes.
            let workers = match self.workers.len() {
                0 => 0,
                _ => {
                    proc::numbers(pid, "task")?.iter().filter(|t| self.workers.contains(t)).count()
                }
            };
            if self.is_zombie || all == Some(self.threads.len() + self.ended_leader + workers) {
                return self.stopped(status);
            }
            if Instant::now() > deadline {
                return Err(Error::refused(
                    pid,
                    "its threads",
                    "did not come to rest in time, since they create and end others too quickly; dump \
                     again when they do that less, or give a longer --timeout",
                ));
            }
            self.seize()?;
        }
    }

    /// All threads are known. `status` is the leader's.
    fn stopped(mut self, status: proc::Status) -> Result<Stopped> {
        let pid = self.pid;
        self.threads.sort_by_key(|t| (t.tid() != pid, t.tid()));
        let others = self.threads.len() > 1;
        self.threads.iter_mut().take(1).for_each(|leader| leader.leads_others(others));
        let face = self.threads.first().map_or(pid, Tracee::tid);
        let status = if face == pid { status } else { proc::status(face)? };
        Ok(Stopped { pid, face, status, threads: self.threads })
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
        return Err(Error::refused(pid, format!("thread {tid}"), traced_by(tracer)));
    }
    let filtered = status.number("Seccomp", 10).unwrap_or(0) != 0;
    match Tracee::seize(tid, filtered) {
        Ok(()) => Ok(true),
        // It has ended since: it is not traced, but does not say so.
        Err(_) if has_ended(&proc::thread_status(pid, tid)?) => seize(pid, tid),
        Err(e) => Err(gone(e)),
    }
}

/// Whether a thread is one of the kernel's own, which do the work of io_uring where that would
/// block: it has no registers of a program.
fn is_worker(pid: i32, thread: &Tracee) -> bool {
    let registers = thread.registers();
    (registers.rip, registers.rsp) == (0, 0)
        && proc::thread_stat(pid, thread.tid()).is_ok_and(|stat| stat.is_worker())
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

/// The time until `deadline`; never none.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Waits until a thread has stopped. Children of its process that it waits for in vfork(2)
/// run on, if they are among the `seized`: they are not any more then.
fn wait_stopped(pid: i32, tid: i32, seized: &mut Seized, deadline: Instant) -> Result<Tracee> {
    if let Some(thread) = Tracee::stopped(pid, tid, left(deadline).min(AT_ONCE)).map_err(gone)? {
        return Ok(thread);
    }
    let borrowers: Vec<i32> = seized.keys().copied().filter(|&c| borrows(c, pid)).collect();
    for child in borrowers {
        let threads = seized.remove(&child).unwrap_or_default();
        let_go_process(child, threads, seized, deadline)?;
    }
    match Tracee::stopped(pid, tid, left(deadline)).map_err(gone)? {
        Some(thread) => Ok(thread),
        None => Err(Error::refused(pid, format!("thread {tid}"), awaited(pid, tid))),
    }
}

/// Why a thread does not stop.
fn awaited(pid: i32, tid: i32) -> &'static str {
    // The function of the kernel that it waits in, where that tells.
    let place = proc::read(pid, &format!("task/{tid}/wchan")).unwrap_or_default();
    if place.starts_with("autofs_") {
        return "did not stop in time, as it waits for an automatic mount (autofs), whose daemon may have stopped before it; \
                dump again when that is mounted, or leave one of both out of the tree";
    }
    "did not stop in time, as it waits inside the kernel (vfork, a page of a userfaultfd that a \
     system call needs, an automatic mount, a hung file system or device); dump again when it has \
     got what it waits for"
}

/// Lets processes go on that are bound to stop.
///
/// # Errors
/// If a thread does not stop before `deadline`, which it has to before it can go on.
pub(super) fn let_go(mut seized: Seized, deadline: Instant) -> Result<()> {
    while let Some(pid) = seized.keys().next().copied() {
        let threads = seized.remove(&pid).unwrap_or_default();
        let_go_process(pid, threads, &mut seized, deadline)?;
    }
    Ok(())
}

fn let_go_process(
    pid: i32,
    threads: Vec<i32>,
    others: &mut Seized,
    deadline: Instant,
) -> Result<()> {
    for thread in threads {
        match wait_stopped(pid, thread, others, deadline).map(Tracee::finish) {
            // One that has ended keeps nobody waiting.
            Ok(_) | Err(Error::Gone { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Whether a process lives in the memory of its parent `pid`, as after vfork(2) until it runs
/// another program.
pub(super) fn borrows(child: i32, pid: i32) -> bool {
    proc::stat(child).is_ok_and(|stat| stat.ppid == pid)
        && kcmp(child, pid, Object::Vm).is_ok_and(Ordering::is_eq)
}

/// Why a task that another one traces is refused, and what to do, in that program's own terms.
fn traced_by(tracer: u64) -> String {
    let pid = i32::try_from(tracer).unwrap_or_default();
    let comm = proc::stat(pid).map(|stat| stat.comm).unwrap_or_default();
    let how = match &*comm {
        b"gdb" => "type detach in it, or quit it",
        b"strace" | b"ltrace" => "end it with SIGINT, which lets its tasks go on",
        _ => "detach it",
    };
    format!("is traced by task {tracer} ({}); {how} first", String::from_utf8_lossy(&comm))
}
