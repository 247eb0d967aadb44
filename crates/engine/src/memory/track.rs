//! Which pages have changed since the checkpoint before.
//!
//! Mappings are registered with a userfaultfd, and the kernel notes the first write to each of
//! their pages from then on: it takes a write-protection off, or sets a soft-dirty bit
//! ([`super::changes`]). What is not noted in a mapping that is still registered has not changed.
//! Everything else has, as far as a dump is concerned:
//!
//! - new mappings and moved ones (mremap(2)) are not registered;
//! - a child and a program after execve(2) have an address space that is not;
//! - what grows (the heap, stacks) has only pages that were written in its new part;
//! - pages that were dropped and touched again are noted.
//!
//! Only private anonymous memory is tracked: shared memory can also be written in ways
//! that no address space knows of.
//!
//! A userfaultfd belongs to the address space that made it, so the task makes it, by
//! remote call; it is fetched, closed there, and kept by a [`Keeper`].

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::ImageDir;
use torpor_images::dir::PARENT_LINK;
use torpor_images::pagemap::Run;
use torpor_sys::uffd;
use torpor_sys::vm::{self, PageRegion, Scan, page};
use torpor_tracee::syscall::{self, RemoteFd};

use super::changes::Means;
use super::keeper::{self, Keeper, Knowledge, Tracked};
use super::pages::{self, Census, PageSpan};
use super::vma::{self, Vma, status};
use super::{registered, scan};
use crate::dump::tasks::Tasks;
use crate::error::{Context, Error, Result};
use crate::file::userfaultfd;
use crate::guardian::{self, Guardian, Turn, Way};
use crate::proc;

/// What a dump knows of changes, and what the next one is to know.
#[derive(Debug, Default)]
pub(crate) struct Tracking {
    /// The userfaultfds of the keeper, by pid and start time of their tasks.
    known: HashMap<(i32, u64), OwnedFd>,
    /// The checkpoint that this one builds on, if changes are counted from it.
    parent: Option<ImageDir>,
    /// For the next dump.
    keeper: Option<Keeper>,
    next: Vec<Tracked>,
    /// Those that are of no more use. To close one takes the protection from all pages, which
    /// must not hold up stopped tasks: that happens when they run, or are gone.
    spent: Vec<OwnedFd>,
    /// Whether the tree uses userfaultfd itself, if that is known.
    in_the_way: Option<bool>,
}

/// The address space of a task, for the time of a dump.
#[derive(Debug)]
pub(crate) struct Tracker {
    known: Tracked,
    /// The pages that the parent has.
    base: Vec<Run>,
    /// Whether changes are to be counted from now on.
    goes_on: bool,
}

impl Tracking {
    /// Finds out what is known of the tree under `root`, and links `images` with
    /// their `parent`, if they have one. With `goes_on` changes are counted from this dump on. To be called
    /// before this process has a second thread.
    ///
    /// # Errors
    /// If there is no such parent, or no such task.
    pub(crate) fn prepare(
        root: i32,
        parent: Option<&Path>,
        images: &ImageDir,
        goes_on: bool,
    ) -> Result<Self> {
        images.remove(PARENT_LINK)?;
        let knowledge = keeper::take(root)?.unwrap_or_default();
        let parent = match parent {
            Some(path) => find_parent(images, path, &knowledge)?,
            None => None,
        };
        let tasks = knowledge.tasks.into_iter();
        let known = tasks.map(|t| ((t.pid, t.start_time), t.uffd)).collect();
        let keeper = match Means::of_this_kernel() {
            _ if !goes_on => None,
            Ok(means) => {
                tracing::info!("Changes of memory are tracked by {}", means.name());
                Some(Keeper::start(root)?)
            }
            Err(e) => {
                tracing::warn!("{e}: the next dump will save all memory");
                None
            }
        };
        Ok(Tracking { known, parent, keeper, ..Tracking::default() })
    }

    /// The images that this dump builds on.
    pub(crate) fn parent(&self) -> Option<&ImageDir> {
        self.parent.as_ref()
    }

    /// The images are complete: changes are counted from `round`. If that cannot be kept
    /// the next dump saves everything.
    pub(crate) fn commit(&mut self, round: &str) {
        let tasks = std::mem::take(&mut self.next);
        let Some(keeper) = self.keeper.take() else { return };
        if let Err(e) = keeper.keep(&Knowledge { round: round.to_owned(), tasks }) {
            tracing::warn!("{e}; the next dump will save all memory");
        }
    }
}

/// Links the images with the parent at `path`, if that has what the knowledge is about.
fn find_parent(images: &ImageDir, path: &Path, knowledge: &Knowledge) -> Result<Option<ImageDir>> {
    images.set_parent(path)?;
    let parent = images.parent()?;
    if let Some(parent) = &parent
        && let Some(own) = identity(images)?
        && identity(parent)? == Some(own)
    {
        // As some programs name the checkpoint before the first.
        tracing::info!("{} is the directory of these images: all memory is saved", path.display());
        images.remove(PARENT_LINK)?;
        return Ok(None);
    }
    let round = match &parent {
        Some(parent) => parent.inventory().map(|i| i.dump_criu_run_id.unwrap_or_default()),
        None => Ok(String::new()),
    };
    let why = match round {
        Ok(round) if !round.is_empty() && round == knowledge.round => {
            match parent.as_ref().map_or(Ok(false), |parent| is_built_on(images, parent)) {
                Ok(false) => {
                    tracing::info!("Changes of memory are counted from {}", path.display());
                    return Ok(parent);
                }
                Ok(true) => "it builds on what is overwritten now".to_owned(),
                Err(e) => format!("it cannot be restored: {e}"),
            }
        }
        Ok(_) => "no changes are known since then".to_owned(),
        Err(e) => e.to_string(),
    };
    tracing::warn!("All memory is saved, not only what differs from {}: {why}", path.display());
    images.remove(PARENT_LINK)?;
    Ok(None)
}

/// Whether `images`, which are about to be overwritten, are among those that `parent` builds on.
fn is_built_on(images: &ImageDir, parent: &ImageDir) -> Result<bool> {
    let own = identity(images)?;
    let mut next = parent.parent()?;
    while let Some(dir) = next {
        if own.is_some() && identity(&dir)? == own {
            return Ok(true);
        }
        next = dir.parent()?;
    }
    Ok(false)
}

/// What tells one directory from others, of images that lie in one.
fn identity(images: &ImageDir) -> Result<Option<(u64, u64)>> {
    let Some(directory) = images.directory() else { return Ok(None) };
    let stat = rustix::fs::fstat(directory).context(|| images.path().display().to_string())?;
    Ok(Some((stat.st_dev, stat.st_ino)))
}

/// Begins to look at the memory of a task; `None` if it is not tracked.
///
/// # Errors
/// If the task is gone; damaged images of the parent.
pub(crate) fn begin(
    tracking: &mut Tracking,
    tasks: &mut Tasks,
    task: usize,
    guardian: &Guardian,
    base: &mut dyn FnMut(&ImageDir) -> Result<Vec<Run>>,
) -> Result<Option<Tracker>> {
    let (pid, start_time) = (tasks[task].pid, tasks[task].stat.start_time);
    let goes_on = tracking.keeper.is_some();
    if let Some(uffd) = tracking.known.remove(&(pid, start_time))
        && belongs(tasks, task, &uffd)?
    {
        let base = tracking.parent.as_ref().map_or(Ok(Vec::new()), base)?;
        return Ok(Some(Tracker { known: Tracked { pid, start_time, uffd }, base, goes_on }));
    }
    if !goes_on {
        return Ok(None);
    }
    let in_the_way = match tracking.in_the_way {
        Some(known) => known,
        None => userfaultfd::is_used(tasks)?,
    };
    if tracking.in_the_way.replace(in_the_way).is_none() && in_the_way {
        tracing::warn!("{}: the next dump will save all memory", userfaultfd::IN_THE_WAY);
    }
    if in_the_way {
        return Ok(None);
    }
    match create(tasks, task, guardian) {
        Ok(uffd) => {
            let known = Tracked { pid, start_time, uffd };
            Ok(Some(Tracker { known, base: Vec::new(), goes_on }))
        }
        Err(e @ Error::Gone { .. }) => Err(e),
        Err(e) => {
            tracing::warn!("task {pid}: changes of its memory cannot be tracked: {e}");
            Ok(None)
        }
    }
}

/// Makes a userfaultfd of the task's address space that the task itself does not keep.
fn create(tasks: &mut Tasks, task: usize, guardian: &Guardian) -> Result<OwnedFd> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    // Its number will be the lowest that is free.
    let pid = tasks[task].pid;
    let taken = proc::numbers(pid, "fd")?;
    let free = (0..).zip(&taken).find_map(|(n, &fd)| (n != fd).then_some(n));
    let number = free.or(i32::try_from(taken.len()).ok()).unwrap_or(i32::MAX);
    let undo = USERFAULTFD.undo(vec![pid.to_string(), number.to_string()]);
    guardian.watch(&undo)?;
    let remote = tasks.remote(task)?;
    // Without privileges over faults of the kernel, which nobody is asked about here.
    let fd = remote.call("userfaultfd", (libc::SYS_userfaultfd, [flags | uffd::USER_MODE_ONLY]))?;
    let number = i32::try_from(fd).unwrap_or(-1);
    let fetched = pidfd_getfd(&tasks[task].pidfd, number, PidfdGetfdFlags::empty());
    tasks.remote(task)?.call("close", syscall::close(RemoteFd(fd)))?;
    guardian.forget(&undo)?;
    let fetched = fetched.context(|| "fetching a userfaultfd".to_owned())?;
    let enable = if by_soft_dirty() { uffd::enable_marking } else { uffd::enable_tracking };
    enable(fetched.as_fd()).context(|| "UFFDIO_API".to_owned())?;
    Ok(fetched)
}

/// A descriptor of a process that may be a userfaultfd which was not fetched yet.
pub(crate) static USERFAULTFD: Way = Way {
    turn: Turn::Patiently,
    ..Way::new("uffd", |words, _| {
        close_leftover(words.number(0)?, words.number(1)?, guardian::PATIENCE)
    })
};

/// Closes a userfaultfd that a dead supervisor has left in a task, which runs on.
///
/// # Errors
/// If the task has ended, or does not come to a stop in time; if the kernel refuses the call.
fn close_leftover(pid: i32, fd: i32, patience: Duration) -> Result<()> {
    let is_uffd = |link: &Path| link.as_os_str() == "anon_inode:[userfaultfd]";
    if !std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|link| is_uffd(&link)) {
        return Ok(());
    }
    let call = syscall::close(fd.into());
    Ok(torpor_tracee::call_once(pid, "close", call, patience).map(drop)?)
}

/// Whether a userfaultfd is one of the address space that the task has now: what is
/// registered through it must be registered there. The stub will do.
fn belongs(tasks: &mut Tasks, task: usize, uffd: &OwnedFd) -> Result<bool> {
    let Some((start, len)) = tasks.remote(task)?.stub_range() else { return Ok(false) };
    if uffd::register(uffd.as_fd(), start, len).is_err() {
        return Ok(false);
    }
    let pid = tasks[task].pid;
    let found = if by_soft_dirty() { has_flag(pid, start) } else { is_tracked(pid, start, len) };
    uffd::unregister(uffd.as_fd(), start, len).context(|| "UFFDIO_UNREGISTER".to_owned())?;
    found
}

fn has_flag(pid: i32, address: u64) -> Result<bool> {
    let vmas = vma::read(pid)?;
    Ok(vmas.iter().any(|v| (v.map.start..v.map.end).contains(&address) && v.has(b"uw")))
}

fn is_tracked(pid: i32, start: u64, len: u64) -> Result<bool> {
    let pagemap = proc::open(pid, "pagemap")?;
    let (any_of, report) = (page::IS_PRESENT, page::IS_PRESENT | page::IS_WPALLOWED);
    let what = Scan { start, end: start + len, any_of, report, ..Scan::default() };
    let mut found = [PageRegion::default()];
    let (count, _) = vm::scan(&pagemap, &what, &mut found).context(|| "PAGEMAP_SCAN".to_owned())?;
    Ok(count == 1 && found[0].categories & page::IS_WPALLOWED != 0)
}

fn by_soft_dirty() -> bool {
    Means::of_this_kernel() == Ok(Means::SoftDirty)
}

/// The task's memory has been looked at. Soft-dirty bits are cleared of all of it at once.
///
/// # Errors
/// If the bits cannot be cleared.
pub(crate) fn end(tracking: &mut Tracking, tracker: Option<Tracker>) -> Result<()> {
    /// Of `/proc/PID/clear_refs` (proc(5)).
    const SOFT_DIRTY: &str = "4";
    let Some(tracker) = tracker else { return Ok(()) };
    if !tracker.goes_on {
        tracking.spent.push(tracker.known.uffd);
        return Ok(());
    }
    if by_soft_dirty() {
        let path = format!("/proc/{}/clear_refs", tracker.known.pid);
        std::fs::write(&path, SOFT_DIRTY).context(|| path)?;
    }
    tracking.next.push(tracker.known);
    Ok(())
}

/// Takes stock of a mapping: as [`pages::census`], with pages that the parent has as
/// they are marked; changes are counted from now on where there will be a next dump.
///
/// # Errors
/// Refused, if somebody outside of the tree has registered the mapping; if the pagemap cannot be
/// scanned or read, or the pages not be protected.
pub(crate) fn survey(
    pid: i32,
    tracker: Option<&Tracker>,
    pagemap: &File,
    vma: &Vma,
) -> Result<Census> {
    if vma.is(status::USERFAULTFD) {
        return Ok(registered::look(pid, pagemap, vma)?.census);
    }
    let refuse = || {
        Err(Error::refused(
            pid,
            format!("mapping {:x}-{:x}", vma.map.start, vma.map.end),
            "it is registered with userfaultfd, by nobody in the tree; dump it when all pages are \
             there, if it was restored lazily",
        ))
    };
    if vma.has(b"um") || vma.has(b"ui") {
        return refuse();
    }
    let mut census = pages::census(pagemap, vma)?;
    let any_clean = census.pages.iter().any(|run| run.clean);
    let wanted = |t: &&Tracker| can_be_tracked(vma) && (t.goes_on || any_clean || vma.has(b"uw"));
    let own = tracker.filter(wanted).filter(|t| t.register(vma));
    if own.is_none() && vma.has(b"uw") {
        return refuse();
    }
    // Nothing shows what the kernel has written to pages that it holds.
    let base = own.filter(|_| !vma.is(status::PINNED)).map_or(&[][..], |t| &t.base);
    census.pages = compare(&census.pages, base);
    if own.is_some_and(|t| t.goes_on) && !by_soft_dirty() {
        protect(pagemap, vma)?;
    }
    Ok(census)
}

/// Private memory without a file. In private mappings of files the kernel leaves a marker
/// where a protected page was dropped, which looks like one that is swapped out.
fn can_be_tracked(vma: &Vma) -> bool {
    let special = vma.is(status::VDSO | status::VVAR | status::VSYSCALL);
    vma.is_private() && !special && !vma.has_file()
}

impl Tracker {
    /// Whether changes of a mapping are known to this tracker from now on; they have been
    /// before if the mapping was registered before.
    fn register(&self, vma: &Vma) -> bool {
        let (start, len) = (vma.map.start, vma.map.end - vma.map.start);
        uffd::register(self.known.uffd.as_fd(), start, len).is_ok()
    }
}

/// Write-protects the pages of a mapping, never holes: they would count as pages then.
fn protect(pagemap: &File, vma: &Vma) -> Result<()> {
    let not = page::IS_PFNZERO | page::IS_GUARD;
    let what = Scan {
        start: vma.map.start,
        end: vma.map.end,
        any_of: page::IS_PRESENT | page::IS_SWAPPED,
        all_of: page::IS_WRITTEN | not,
        inverted: not,
        report: page::IS_WRITTEN,
        protect: true,
    };
    // A caller that does not take the regions gets more protected than what matches: all that has a
    // place in a page table, holes as well (`pagemap_scan_pmd_entry` in fs/proc/task_mmu.c).
    scan::for_each_region(pagemap, &what, |_| ())
}

/// Leaves those runs clean that the parent has, cut where it has not.
fn compare(found: &[PageSpan], base: &[Run]) -> Vec<PageSpan> {
    let mut out = Vec::with_capacity(found.len());
    for run in found {
        let mut at = run.start;
        if run.clean {
            let first = base.partition_point(|b| b.range().end <= run.start);
            for has in base[first..].iter().take_while(|b| b.vaddr < run.end) {
                let (start, end) = (has.vaddr.max(run.start), has.range().end.min(run.end));
                if start > at {
                    pages::push(
                        &mut out,
                        PageSpan { start: at, end: start, ..PageSpan::default() },
                    );
                }
                pages::push(&mut out, PageSpan { start, end, clean: true, relative: None });
                at = end;
            }
        }
        if at < run.end {
            pages::push(&mut out, PageSpan { start: at, end: run.end, ..PageSpan::default() });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma::PAGE;
    use torpor_tests::wait::wait_for;
    use torpor_tracee::{Tracee, parse_maps, stub_place};

    #[test]
    fn a_userfaultfd_that_was_left_is_closed() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let patience = Duration::from_secs(60);
        // Not while its loader still opens and closes files.
        let asleep = || proc::read(pid, "stat").unwrap().contains("(sleep) S ");
        wait_for("it to sleep", patience, || Ok(asleep().then_some(()))).unwrap();
        Tracee::seize(pid, false).unwrap();
        let mut tracee = Tracee::stopped(pid, pid, patience).unwrap().unwrap();
        let maps = parse_maps(&proc::read(pid, "maps").unwrap());
        tracee.inject(&maps, stub_place(&maps).unwrap()).unwrap();
        let args = [uffd::USER_MODE_ONLY];
        let fd = tracee.call("userfaultfd", (libc::SYS_userfaultfd, args)).unwrap();
        tracee.eject(&maps).unwrap();
        tracee.finish().unwrap();
        let fd = i32::try_from(fd).unwrap();
        let before = proc::numbers(pid, "fd").unwrap();
        assert!(before.contains(&fd));
        close_leftover(pid, fd, patience).unwrap();
        let left: Vec<i32> = before.iter().copied().filter(|&other| other != fd).collect();
        assert_eq!(proc::numbers(pid, "fd").unwrap(), left);
        // What is no userfaultfd is nobody's business.
        close_leftover(pid, left[0], patience).unwrap();
        assert_eq!(proc::numbers(pid, "fd").unwrap(), left);
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_what_the_parent_has_is_clean() {
        let found = |list: &[(u64, u64, bool)]| -> Vec<PageSpan> {
            let page = |&(start, end, clean): &(u64, u64, bool)| PageSpan {
                start: start * PAGE,
                end: end * PAGE,
                clean,
                relative: None,
            };
            list.iter().map(page).collect()
        };
        let run = |first: u64, pages: u64| Run { vaddr: first * PAGE, pages, ..Run::default() };
        let base = [run(2, 2), run(4, 1), run(8, 10)];
        let runs = found(&[(1, 3, true), (3, 4, false), (4, 6, true), (9, 20, true)]);
        let expected = found(&[
            (1, 2, false),
            (2, 3, true),
            (3, 4, false),
            (4, 5, true),
            (5, 6, false),
            (9, 18, true),
            (18, 20, false),
        ]);
        assert_eq!(compare(&runs, &base), expected);
        assert_eq!(compare(&found(&[(1, 9, true)]), &[]), found(&[(1, 9, false)]));
    }
}
