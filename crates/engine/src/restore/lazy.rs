//! What a lazy restore leaves to its pager.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::proto::VmaEntry;
use torpor_sys::uffd;

use super::{Restore, Task};
use crate::error::{Context, Error, Result};
use crate::lazy::{self, Handed};
use crate::namespace::NsKind;
use crate::proc;

/// Finds or starts the pager of a lazy restore. What cannot be lazy is not: the memory is
/// restored at once then. Before this process has a second thread.
///
/// # Errors
/// Pages that can only be fetched later; the pager's.
pub fn prepare(cx: &mut Restore<'_>) -> Result<()> {
    let why = if cx.opts.lazy_pages { obstacle(cx) } else { Some("--lazy-pages is not given") };
    if let Some(why) = why {
        if cx.tasks.iter().any(|task| task.image.pages.any_remote()) {
            let what = "the dump still has pages, which only a lazy restore can fetch";
            return Err(Error::Usage(format!("{what}: {why}")));
        }
        if !cx.opts.lazy_pages {
            return Ok(());
        }
        tracing::warn!("All memory is restored at once: {why}");
        return Ok(());
    }
    let tasks = cx.tasks.iter().map(|task| &task.image).filter(|image| !image.is_zombie());
    let pages: HashMap<u64, _> =
        tasks.map(|image| (u64::from(image.tree.pid), Arc::clone(&image.pages))).collect();
    cx.is_lazy = true;
    let is_served = |task: &Task| {
        let mut stacks = task.image.vmas().filter(|vma| lazy::stack_can_wait(vma));
        stacks.any(|v| task.image.pages.within(v.start..v.end).any(|(s, _)| s.is_remote()))
    };
    // All or none: what a child inherits is to be there in both or missing in both.
    cx.stacks_wait = cx.tasks.iter().any(is_served);
    cx.pager = Some(lazy::own_pager(cx.opts, &cx.images, &pages)?);
    Ok(())
}

fn obstacle(cx: &Restore<'_>) -> Option<&'static str> {
    let mut namespaces = cx.ns.all.iter();
    if namespaces.any(|ns| ns.kind == NsKind::User && !ns.is_host) {
        return Some("tasks in a user namespace may not wait for pages that the kernel needs");
    }
    let mut tasks = cx.tasks.iter();
    if tasks.any(|task| !task.image.pages.are_verified_singly()) {
        return Some("pages of this cipher can only be verified all together");
    }
    None
}

impl Restore<'_> {
    /// Whether the pages of a mapping are left to the pager.
    pub(super) fn leaves(&self, vma: &VmaEntry) -> bool {
        let may_wait = lazy::may_wait(vma) || self.stacks_wait && lazy::stack_can_wait(vma);
        self.is_lazy && may_wait
    }
}

/// Registers what is left to the pager, and hands it over. After everything that changes
/// the address spaces.
///
/// # Errors
/// The kernel's; the pager's.
pub fn hand_over(cx: &mut Restore<'_>) -> Result<()> {
    let Some(pager) = cx.pager.take() else { return Ok(()) };
    let mut spaces = Vec::new();
    for task in 0..cx.tasks.len() {
        let image = &cx.tasks[task].image;
        let has_pages = |v: &&VmaEntry| {
            image.pages.within(v.start..v.end).any(|(stretch, _)| !stretch.is_zero())
        };
        let lazy = image.vmas().filter(|v| cx.leaves(v)).filter(has_pages);
        let ranges: Vec<(u64, u64)> = lazy.map(|v| (v.start, v.end)).collect();
        if !ranges.is_empty() {
            spaces.push(register(cx, task, ranges)?);
        }
    }
    let images = lazy::id_of(&cx.images)?;
    pager.hand_over(&images, spaces)?;
    cx.pager = Some(pager);
    Ok(())
}

fn register(cx: &mut Restore<'_>, task: usize, ranges: Vec<(u64, u64)>) -> Result<Handed> {
    let id = u64::from(cx.tasks[task].image.tree.pid);
    let pidfd = proc::pidfd(cx.tasks[task].pid)?;
    let uffd = create(cx, task, &pidfd)?;
    for &(start, end) in &ranges {
        uffd::register_missing(uffd.as_fd(), start, end - start)
            .context(|| format!("registering {start:x}-{end:x} of task {id}"))?;
    }
    Ok(Handed { id, uffd, pidfd, ranges })
}

/// Makes a userfaultfd of the task's address space, which has to make it itself.
fn create(cx: &mut Restore<'_>, task: usize, pidfd: &OwnedFd) -> Result<OwnedFd> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let remote = cx.remote(task)?;
    let fd = remote.call("userfaultfd", libc::SYS_userfaultfd, [flags])?;
    let number = i32::try_from(fd).map_err(|_| Error::invalid("userfaultfd", "no descriptor"))?;
    let fetched = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty());
    cx.remote(task)?.call("close", libc::SYS_close, [fd])?;
    let fetched = fetched.context(|| "fetching a userfaultfd".to_owned())?;
    uffd::enable_paging(fetched.as_fd()).context(|| "UFFDIO_API".to_owned())?;
    Ok(fetched)
}
