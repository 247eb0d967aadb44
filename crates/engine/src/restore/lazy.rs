//! What a lazy restore leaves to its pager.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::ImageDir;
use torpor_policy::memory::MemoryArea;
use torpor_sys::uffd;
use torpor_tracee::syscall::{self, RemoteFd, Syscall};
use torpor_tracee::{Batch, SIDE_BY_SIDE};

use super::tasks::Task;
use crate::error::{Context, Error, Result};
use crate::lazy::{self, Handed, PagerLine};
use crate::namespace::{Namespaces, NsKind};
use crate::options::Options;
use crate::page_server::Fetcher;
use crate::proc;
use crate::ranges::{Ranges, gaps};

/// What is left for later, and who brings it in.
#[derive(Debug, Default)]
pub(super) struct Lazy {
    pager: Option<PagerLine>,
    any: bool,
    /// Whether that goes for stacks, too.
    stacks_wait: bool,
    /// Who fetches what cannot be left.
    fetcher: Option<Arc<Fetcher>>,
}

impl Lazy {
    /// Finds or starts the pager of a lazy restore. What cannot be lazy is not: the memory is
    /// restored at once then. Before this process has a second thread.
    ///
    /// # Errors
    /// If there can be no pager, but pages can only be fetched later; if the pager cannot be
    /// started or reached.
    pub(super) fn prepare(
        opts: &Options,
        images: &ImageDir,
        tasks: &mut [Task],
        spaces: &Namespaces,
    ) -> Result<Self> {
        let why = match opts.memory.lazy {
            true => obstacle(tasks, spaces),
            false => Some("--lazy-pages is not given"),
        };
        if let Some(why) = why {
            if let Some(task) = tasks.iter().find(|task| task.image.pages.any_remote()) {
                let what = format!("pages of task {} are not here", task.vpid);
                if let Some(missing) = missing_parent(images) {
                    return Err(Error::Usage(format!("{what}: {missing}")));
                }
                let hint = "copy their file (pages-N.img), or restore with --lazy-pages from where \
                            they are served";
                return Err(Error::Usage(format!("{what}: {why}; {hint}")));
            }
            if opts.memory.lazy {
                tracing::warn!("All memory is restored at once: {why}");
            }
            return Ok(Lazy::default());
        }
        let live = tasks.iter().map(|task| &task.image).filter(|image| !image.is_zombie());
        let pages: HashMap<u64, _> =
            live.map(|image| (u64::from(image.tree.pid), Arc::clone(&image.pages))).collect();
        let is_served = |task: &Task| {
            let mut stacks = task.image.areas().filter(|vma| lazy::stack_can_wait(vma));
            stacks.any(|v| task.image.pages.within(v.start..v.end).any(|(s, _)| s.is_remote()))
        };
        // All or none: what a child inherits is to be there in both or missing in both.
        let stacks_wait = tasks.iter().any(is_served);
        let pager = Some(lazy::own_pager(opts, images, &pages)?);
        let mut lazy = Lazy { pager, any: true, stacks_wait, fetcher: None };
        for task in tasks {
            lazy.fetch_at_once(opts, images, task)?;
        }
        Ok(lazy)
    }

    /// Has the pages that are elsewhere and cannot wait fetched when they are read.
    fn fetch_at_once(&mut self, opts: &Options, images: &ImageDir, task: &mut Task) -> Result<()> {
        let pages = &task.image.pages;
        let mut at_once = Vec::new();
        for stretch in pages.stretches().iter().filter(|stretch| stretch.is_remote()) {
            let range = &stretch.range;
            let waits = task.image.areas().filter(|vma| self.leaves(vma));
            let waits = waits.map(|vma| vma.start.max(range.start)..vma.end.min(range.end));
            let gaps = gaps(range, waits.filter(|part| !part.is_empty()));
            at_once.extend(gaps.map(|gap| stretch.part(gap)));
        }
        if at_once.is_empty() {
            return Ok(());
        }
        let fetcher = match &mut self.fetcher {
            Some(fetcher) => fetcher,
            none => none.insert(Arc::new(lazy::fetcher(opts, images)?)),
        };
        let id = u64::from(task.image.tree.pid);
        let fetched = at_once.into_iter().map(|stretch| stretch.fetched_by(fetcher, id)).collect();
        task.image.pages = Arc::new(pages.with(fetched));
        task.bequest = Arc::clone(&task.image.pages);
        Ok(())
    }

    /// Whether anything is left.
    pub(super) fn any(&self) -> bool {
        self.any
    }

    /// Whether the pages of a mapping are left to the pager.
    pub(super) fn leaves(&self, vma: &MemoryArea) -> bool {
        self.any && (lazy::may_wait(vma) || self.stacks_wait && lazy::stack_can_wait(vma))
    }

    /// Registers what is left to the pager, and hands it over. After everything that changes
    /// the address spaces.
    ///
    /// # Errors
    /// If memory cannot be registered with a userfaultfd; if a husk or the pager has ended.
    pub(super) fn hand_over(&mut self, images: &ImageDir, tasks: &mut [Task]) -> Result<()> {
        let Some(pager) = &mut self.pager else { return Ok(()) };
        let (any, stacks_wait) = (self.any, self.stacks_wait);
        let leaves =
            |v: &&MemoryArea| any && (lazy::may_wait(v) || stacks_wait && lazy::stack_can_wait(v));
        let mut waiting = Vec::new();
        for task in tasks {
            let image = &task.image;
            let missing = |v: &MemoryArea| {
                let pages = image.pages.within(v.start..v.end);
                pages.filter(|(stretch, _)| !stretch.is_zero()).map(|(_, range)| range)
            };
            let lazy: Vec<&MemoryArea> =
                image.areas().filter(leaves).filter(|v| missing(v).next().is_some()).collect();
            let missing: Ranges = lazy.iter().flat_map(|v| missing(v)).collect();
            let ranges: Vec<(u64, u64)> = lazy.iter().map(|v| (v.start, v.end)).collect();
            if !ranges.is_empty() {
                waiting.push(WaitingTask { task, ranges, missing });
            }
        }
        pager.begin(&lazy::id_of(images)?)?;
        for some in waiting.chunks_mut(SIDE_BY_SIDE) {
            pager.hand_over(&register(some)?)?;
        }
        pager.finish()
    }

    /// The tasks run.
    pub(super) fn end(&mut self) {
        if let Some(fetcher) = self.fetcher.take() {
            fetcher.end();
        }
        if let Some(pager) = self.pager.take() {
            pager.restored();
        }
    }
}

/// What the images build on and is not there, if it is so.
fn missing_parent(images: &ImageDir) -> Option<String> {
    let mut lower: Option<ImageDir> = None;
    loop {
        let at = lower.as_ref().unwrap_or(images);
        match at.parent() {
            Ok(Some(next)) => lower = Some(next),
            Err(e) if e.is_missing() => {
                let (from, to) = (at.path().display(), at.store().parent_path().ok()??);
                let to = to.display();
                return Some(format!(
                    "{from} builds on {to}, which is not there; put it back where it was"
                ));
            }
            Ok(None) | Err(_) => return None,
        }
    }
}

fn obstacle(tasks: &[Task], spaces: &Namespaces) -> Option<&'static str> {
    let mut users = spaces.of_kind(NsKind::User);
    if users.any(|ns| !ns.is_host) {
        return Some("tasks in a user namespace may not wait for pages that the kernel needs");
    }
    if tasks.iter().any(|task| !task.image.pages.are_verified_singly()) {
        return Some("pages of this cipher can only be verified all together");
    }
    None
}

/// A task that waits for pages.
struct WaitingTask<'t> {
    task: &'t mut Task,
    /// Mappings, from where to where.
    ranges: Vec<(u64, u64)>,
    /// The pages, in these.
    missing: Ranges,
}

/// Registers mappings of tasks for those pages that are missing in them.
fn register(some: &mut [WaitingTask<'_>]) -> Result<Vec<Handed>> {
    let uffds = create(some)?;
    let handed = some.iter_mut().zip(uffds).map(|(waiting, (pidfd, uffd))| {
        let id = u64::from(waiting.task.image.tree.pid);
        for &(start, end) in &waiting.ranges {
            uffd::register_missing(uffd.as_fd(), start, end - start)
                .context(|| format!("registering {start:x}-{end:x} of task {id}"))?;
        }
        Ok(Handed { id, uffd, pidfd, missing: std::mem::take(&mut waiting.missing) })
    });
    handed.collect()
}

/// Makes a userfaultfd of the address space of each task, which has to make it itself. With a descriptor of the task.
fn create(some: &mut [WaitingTask<'_>]) -> Result<Vec<(OwnedFd, OwnedFd)>> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let made = call_all(some, "userfaultfd", |_| (libc::SYS_userfaultfd, [flags]).into())?;
    let fetch = |(waiting, &number): (&WaitingTask<'_>, &u64)| {
        let pidfd = proc::pidfd(waiting.task.pid)?;
        let number = i32::try_from(number);
        let number = number.map_err(|_| Error::invalid("userfaultfd", "no descriptor"))?;
        let uffd = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty())
            .context(|| "fetching a userfaultfd".to_owned())?;
        uffd::enable_paging(uffd.as_fd()).context(|| "UFFDIO_API".to_owned())?;
        Ok((pidfd, uffd))
    };
    let fetched = some.iter().zip(&made).map(fetch).collect::<Result<_>>()?;
    call_all(some, "close", |index| syscall::close(RemoteFd(made[index])))?;
    Ok(fetched)
}

/// Has each task make a system call, all at the same time. What they return.
fn call_all(
    some: &mut [WaitingTask<'_>],
    what: &str,
    call: impl Fn(usize) -> Syscall,
) -> Result<Vec<u64>> {
    let (mut batches, mut calls) = (Vec::new(), Vec::new());
    for (index, waiting) in some.iter_mut().enumerate() {
        let mut batch = waiting.task.remote()?.batch();
        calls.push(batch.call(call(index)));
        batches.push(batch);
    }
    let done = Batch::run_all(batches)?.into_iter().zip(calls);
    done.map(|(out, call)| Ok(out.expect(call, || what.to_owned())?)).collect()
}
