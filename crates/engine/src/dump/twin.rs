//! Copy-on-write dumps: the tree is frozen only to take stock, and runs on while its
//! memory is copied as it was then.
//!
//! Each task makes a *twin*, a stopped copy of itself, and the kernel copies what either
//! of them writes from then on. Whatever the original does to its memory, be it to unmap
//! it, to execute another program or to end, is nothing to the twin. Memory that a twin
//! does not have, or not alone, is copied while the tree is frozen: mappings that are
//! shared or not inherited, and huge pages of a pool, of which there may be no second.
//!
//! Twins count as processes and memory of their tasks' cgroups, and give up what has been
//! copied. Where all of a tree's memory could not be there twice, none is made, and all is
//! copied at the freeze.

use std::sync::Arc;
use std::time::{Duration, Instant};

use torpor_tracee::Tracee;

use super::Dump;
use crate::cgroup;
use crate::error::{Error, Result};
use crate::guardian::{self, Turn, Undo, Way};
use crate::memory::frames;
use crate::memory::pages::{Job, PageSpan, Source};
use crate::memory::vma::{PAGE, Vma};
use crate::proc;

/// How long a task may take to stop that is to reap its twin.
const PATIENCE: Duration = Duration::from_secs(10);

/// The twins of a tree.
#[derive(Debug, Default)]
pub(crate) struct Twins {
    /// When the first could be made, as start times of tasks are counted, if they are to
    /// be made.
    since: Option<u64>,
    list: Vec<Twin>,
    /// What twins have and nobody copies: the pid of the twin, addresses and lengths.
    spare: Vec<(i32, Vec<(u64, usize)>)>,
    /// Bytes that there were only because of a twin, of what has been released.
    cost: u64,
}

#[derive(Debug)]
struct Twin {
    /// The pid of its original.
    original: i32,
    tracee: Tracee,
}

impl Twins {
    /// Whether the tree can run while its memory is copied.
    pub(crate) fn any(&self) -> bool {
        !self.list.is_empty()
    }

    /// Notes memory of a twin that is not copied: an older checkpoint has it.
    pub(crate) fn spare(&mut self, twin: i32, runs: impl Iterator<Item = PageSpan>) {
        let ranges = runs.map(|run| (run.start, usize::try_from(run.end - run.start).unwrap_or(0)));
        self.spare.push((twin, ranges.collect()));
    }

    /// Gives up what is not copied.
    pub(crate) fn release_spare(&mut self) {
        for (pid, ranges) in std::mem::take(&mut self.spare) {
            self.give_up(pid, &ranges);
        }
    }

    /// Gives up memory of a twin that has been copied.
    pub(crate) fn release(&mut self, job: &Job) {
        if let Some(pid) = job.twin() {
            self.give_up(pid, job.ranges());
        }
    }

    /// What the original still shares with its twin is the original's alone then, and is
    /// written without being copied first.
    fn give_up(&mut self, pid: i32, ranges: &[(u64, usize)]) {
        let Some(twin) = self.list.iter_mut().find(|twin| twin.tracee.pid() == pid) else { return };
        self.cost += alone(pid, ranges).unwrap_or(0);
        let ranges: Vec<_> = ranges.iter().map(|&(at, len)| at..at + len as u64).collect();
        if let Err(e) = twin.tracee.discard(&ranges) {
            tracing::debug!("memory that is not needed any more is kept: {e}");
        }
    }
}

/// Bytes of those pages of a process, given by addresses and lengths, that no other has.
fn alone(pid: i32, ranges: &[(u64, usize)]) -> Result<u64> {
    let pagemap = proc::open(pid, "pagemap")?;
    let mut found = 0;
    for &(at, len) in ranges {
        let entries = frames::entries(&pagemap, &(at..at + len as u64))?;
        found += entries.iter().filter(|entry| entry.is_alone()).count();
    }
    Ok(found as u64 * PAGE)
}

/// Decides whether the tasks get twins; says why not if they were asked for.
///
/// # Errors
/// If a task's cgroup cannot be read, or the guardian is gone.
pub(crate) fn prepare(cx: &mut Dump<'_>) -> Result<()> {
    if !cx.opts.memory.cow {
        return Ok(());
    }
    if !cx.opts.stop.leave_running {
        tracing::warn!("--cow has no effect without --leave-running");
        return Ok(());
    }
    let stored_as_is = cx.opts.trust.seal.is_some() || cx.opts.memory.compress.is_some();
    let why = if cx.opts.memory.page_server.is_some() && stored_as_is {
        Some("it is sent to a page server, sealed or compressed".to_owned())
    } else if cx.freezer.was_frozen() {
        Some("its cgroup stays paused in any case".to_owned())
    } else {
        lack_of_memory(cx)?
    };
    match why {
        Some(why) => tracing::warn!("the tree is frozen while its memory is copied: {why}"),
        None => cx.twins.since = Some(proc::stat(cx.guardian.pid())?.start_time),
    }
    Ok(())
}

/// What says that there is no room for all memory of the tree twice.
fn lack_of_memory(cx: &Dump<'_>) -> Result<Option<String>> {
    let own = |task: &super::Task| task.status.number("RssAnon", 10).unwrap_or(0) << 10;
    let need: u64 = cx.tasks.iter().map(own).sum();
    let pids = cx.tasks.iter().filter(|t| !t.is_zombie()).map(|t| t.pid);
    let (spare, whose) = cgroup::spare_memory(pids)?;
    let what = || {
        let [need, spare] = [need, spare].map(|bytes| bytes >> 20);
        format!("its {need} MiB may be needed twice, and {whose} leaves {spare} MiB")
    };
    Ok((spare < need).then(what))
}

/// Where the memory of a task is copied from that fork(2) hands on: its twin, which is
/// made here, or none if there is to be none or no room for one.
///
/// # Errors
/// If the task or the guardian is gone; if the memory of the twin cannot be opened.
pub(crate) fn memory_of(cx: &mut Dump<'_>, task: usize) -> Result<Option<Source>> {
    let Some(since) = cx.twins.since else { return Ok(None) };
    let original = cx.tasks[task].pid;
    if cx.kinds.userfaultfds.tells_of_forks(task) {
        tracing::warn!(
            "the memory of task {original} is copied at the freeze: a fork of it would wait for \
             the program to read of it (UFFD_FEATURE_EVENT_FORK)"
        );
        return Ok(None);
    }
    let undo = undo(original, since);
    cx.guardian.watch(&undo)?;
    let tracee = match cx.tasks.remote(task)?.spawn_twin() {
        Ok(tracee) => tracee,
        Err(e @ torpor_tracee::Error::Remote { .. }) => {
            tracing::warn!("the memory of task {original} is copied at the freeze: {e}");
            cx.guardian.forget(&undo)?;
            return Ok(None);
        }
        Err(e) => return Err(e.into()),
    };
    let pid = tracee.pid();
    cx.twins.list.push(Twin { original, tracee });
    Ok(Some(Source::Twin(Arc::new(proc::open(pid, "mem")?), pid)))
}

/// The twins that a process may have, younger than a start time. A task that is still in its stub
/// may be about to make one.
pub(crate) static TWIN: Way = Way {
    turn: Turn::After,
    ..Way::new("twin", |words, _| reap(words.number(0)?, words.number(1)?, guardian::PATIENCE))
};

/// What reaps the twins of a process.
pub(super) fn undo(pid: i32, since: u64) -> Undo {
    TWIN.undo(vec![pid.to_string(), since.to_string()])
}

/// Whether a twin has a mapping, and alone.
pub(crate) fn inherits(vma: &Vma) -> bool {
    vma.is_private() && ![b"dc", b"wf", b"ht"].iter().any(|flag| vma.has(flag))
}

/// Ends all twins, once their originals run again.
pub(crate) fn end(cx: &mut Dump<'_>) {
    let Some(since) = cx.twins.since.take() else { return };
    let mut bytes = cx.twins.cost;
    for Twin { original, tracee, .. } in std::mem::take(&mut cx.twins.list) {
        bytes += cost(tracee.pid()).unwrap_or(0);
        tracee.end_twin();
        match reap(original, since, Duration::ZERO) {
            Ok(()) | Err(Error::Gone { .. }) => {}
            Err(e) => {
                tracing::warn!("task {original} keeps a dead child that it does not know of: {e}");
            }
        }
        if let Err(e) = cx.guardian.forget(&undo(original, since)) {
            tracing::debug!("{e}");
        }
    }
    cx.stats.torpor_cow_bytes = Some(bytes);
    tracing::info!("Copy-on-write took {} KiB of memory", bytes >> 10);
}

/// Bytes of memory that there are at the end only because of a twin: pages that its original has
/// not, or not any more, and page tables.
fn cost(pid: i32) -> Result<u64> {
    let rollup = proc::Status::parse(&proc::read(pid, "smaps_rollup")?);
    let kib = |key: &str| rollup.number(key, 10).unwrap_or(0);
    let tables = proc::status(pid)?.number("VmPTE", 10).unwrap_or(0);
    Ok((kib("Private_Clean") + kib("Private_Dirty") + tables) << 10)
}

/// Has a task that runs again reap the twins that it has had `since` some start time.
/// They are the children whose end it is not told of (no exit signal); those that have not
/// ended yet are waited for as long as `patience` lasts.
///
/// # Errors
/// If the task is gone, or does not come to a stop to be told to wait.
pub(crate) fn reap(pid: i32, since: u64, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    let level = proc::status(pid)?.ns_pids().len().saturating_sub(1);
    for child in proc::children(pid, &proc::numbers(pid, "task")?, 1)? {
        let (Ok(stat), Ok(status)) = (proc::stat(child), proc::status(child)) else { continue };
        if stat.exit_signal != 0 || stat.start_time < since {
            continue;
        }
        // As its original knows it, whose children may live in a namespace below its own.
        let inside = status.ns_pids().get(level).copied().unwrap_or(child);
        while !wait_for(pid, inside)? && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Makes a task wait for a child; whether that is gone now.
fn wait_for(pid: i32, child: i32) -> Result<bool> {
    let child = i64::from(child).cast_unsigned();
    let options = u64::from((libc::__WALL | libc::WNOHANG).cast_unsigned());
    let call = (libc::SYS_wait4, [child, 0, options]);
    match torpor_tracee::call_once(pid, "wait4", call, PATIENCE) {
        Ok(0) => Ok(false),
        Ok(_) => Ok(true),
        Err(torpor_tracee::Error::Remote { .. }) => Ok(true),
        Err(e) => Err(e.into()),
    }
}
