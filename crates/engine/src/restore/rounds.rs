//! Rounds: the memory of a skeleton follows that of tasks which still run elsewhere.
//!
//! Of each task it is known what its husk holds: the pages of one checkpoint of the chain, as
//! far as it had a mapping for them. A further round is a checkpoint on top of it, so that only
//! those pages are read that some checkpoint in between has itself. Pages that it does not know
//! any more are dropped: the task has given them back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use torpor_images::{ImageDir, kind};

use super::order::Step;
use super::pages::{Identity, Pages, Search};
use super::{Restore, Task, births, memory, tree};
use crate::error::Result;
use crate::memory::vma::PAGE;
use crate::ranges::Ranges;

/// What a round has changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Pages that were written.
    pub written: u64,
    /// Pages that were dropped.
    pub dropped: u64,
}

/// What a husk holds.
#[derive(Debug)]
pub(super) struct HuskPages {
    /// The checkpoint that it is from.
    pub of: Identity,
    /// The pages.
    pub pages: Ranges,
    /// What the last round has on top of it, and what it has as this, if that was looked for.
    pub last: Option<(Arc<Pages>, Ranges)>,
}

impl HuskPages {
    /// What `images`, which build on it, have on top of it, and what they have as it is.
    ///
    /// # Errors
    /// Damaged images; pages that none of them has.
    pub(super) fn changes_in(
        &mut self,
        images: &ImageDir,
        id: u64,
    ) -> Result<(Arc<Pages>, Ranges)> {
        if let Some(found) = self.last.take() {
            return Ok(found);
        }
        let search = Search { above: Some(self.of), ..Search::default() };
        let (new, same) = Pages::find(images, kind::PAGEMAP, id, &search)?;
        Ok((Arc::new(new), same))
    }
}

/// What the memory of a husk is before the last round.
#[derive(Debug)]
pub(super) enum Start {
    /// None that is known.
    Nothing,
    /// That of an earlier round.
    Held(HuskPages),
    /// A copy of what its parent has in the end: it was born from that just now.
    Born,
}

/// What the husks hold, by the pids of the images.
#[derive(Debug, Default)]
pub(super) struct Rounds(HashMap<i32, HuskPages>);

impl Rounds {
    /// What they hold when they have just been built.
    pub(super) fn begin(cx: &Restore<'_>) -> Result<Self> {
        if !cx.staged {
            return Ok(Rounds::default());
        }
        let of = Identity::of(&cx.images)?;
        let live = cx.tasks.iter().filter(|task| !task.image.is_zombie());
        let held = live.map(|task| {
            let pages = task.image.pages.ranges().and(&memory::mapped(task));
            (task.vpid, HuskPages { of, pages, last: None })
        });
        Ok(Rounds(held.collect()))
    }

    /// Brings all husks to the state of the checkpoint in `images`.
    pub(super) fn apply(&mut self, cx: &mut Restore<'_>, mut images: ImageDir) -> Result<Applied> {
        crate::seal::open(&mut images, cx.opts)?;
        // Without an inventory it is not complete.
        images.inventory()?;
        let of = Identity::of(&images)?;
        let mut done = Applied::default();
        for task in 0..cx.tasks.len() {
            let vpid = cx.tasks[task].vpid;
            let id = u64::from(vpid.cast_unsigned());
            let Some(held) = self.0.get_mut(&vpid) else { continue };
            if !images.has(kind::PAGEMAP, id)? {
                continue;
            }
            let (new, same) = held.changes_in(&images, id)?;
            let mapped = memory::mapped(&cx.tasks[task]);
            let here = new.ranges().and(&mapped);
            let gone = held.pages.without(&here).without(&same);
            memory::forget(cx, task, &gone)?;
            memory::put(cx, task, &new)?;
            held.pages = here.or(&same.and(&held.pages));
            held.of = of;
            done.written += here.len() / PAGE;
            done.dropped += gone.len() / PAGE;
        }
        images.verify_pages()?;
        tracing::debug!("round {}: {done:?}", images.path().display());
        Ok(done)
    }

    /// Finds those pages of the last round, which `cx` is to be, that the husks do not hold: a pager
    /// has to know them before it is known what becomes of each mapping.
    pub(super) fn find_missing(&mut self, cx: &mut Restore<'_>) -> Result<()> {
        for task in cx.tasks.iter_mut().filter(|task| !task.image.is_zombie()) {
            let id = u64::from(task.image.tree.pid);
            task.image.pages = match self.0.get_mut(&task.vpid) {
                Some(held) => {
                    let found = held.changes_in(&cx.images, id)?;
                    let missing = Arc::clone(&found.0);
                    held.last = Some(found);
                    missing
                }
                None => Arc::new(Pages::load(&cx.images, kind::PAGEMAP, id)?),
            };
        }
        Ok(())
    }

    /// The images of `cx` are the last ones now: makes the memory of all tasks what they say, and
    /// the tasks that were born meanwhile.
    pub(super) fn complete(&mut self, cx: &mut Restore<'_>) -> Result<Applied> {
        let mut done = Applied::default();
        let mut fitted = HashSet::new();
        let mut fit = |cx: &mut Restore<'_>, task: usize, from: Option<usize>| {
            if cx.tasks[task].image.is_zombie() || !fitted.insert(task) {
                return Ok(());
            }
            let start = match from {
                Some(parent) => {
                    cx.tasks[task].mapped = cx.tasks[parent].mapped.clone();
                    Start::Born
                }
                None => self.0.remove(&cx.tasks[task].vpid).map_or(Start::Nothing, Start::Held),
            };
            let applied = memory::refit(cx, task, start)?;
            done.written += applied.written;
            done.dropped += applied.dropped;
            Ok(())
        };
        bear(cx, &mut fit)?;
        for task in 0..cx.tasks.len() {
            fit(cx, task, None)?;
        }
        tracing::debug!("last round: {done:?}");
        Ok(done)
    }
}

/// Ends the husks of tasks that `last` does not have.
///
/// # Errors
/// If a husk does not end, or its parent is gone.
pub(super) fn end_husks(cx: &mut Restore<'_>, last: &[Task]) -> Result<()> {
    // Children first: their parents have to wait for them.
    for task in (0..cx.tasks.len()).rev() {
        let vpid = cx.tasks[task].vpid;
        if last.iter().any(|task| task.vpid == vpid) {
            continue;
        }
        tracing::debug!("task {vpid} has ended");
        let ppid = cx.tasks[task].image.tree.ppid;
        let Some(husk) = cx.tasks[task].threads.pop() else { continue };
        husk.exit_with(0)?;
        if let Some(parent) = cx.tasks.iter().position(|task| task.image.tree.pid == ppid) {
            let pid = cx.tasks[task].image.pid_at(cx.tasks[parent].image.depth());
            tree::wait_for(cx, parent, pid)?;
        }
    }
    Ok(())
}

/// Makes the tasks that have no husk yet. Before one is born `prepare` is called for the task that
/// it is born from, and then, with that, for itself.
///
/// # Errors
/// If a pid is taken, or no process can be started; if a husk ends; what `prepare` returns.
fn bear(
    cx: &mut Restore<'_>,
    mut prepare: impl FnMut(&mut Restore<'_>, usize, Option<usize>) -> Result<()>,
) -> Result<()> {
    for step in births::steps(&cx.tasks, |task| !cx.tasks[task].threads.is_empty())? {
        let (task, from) = match step {
            Step::Birth { task, from: Some(from) }
            | Step::SiblingBirth { task, leader: from }
            | Step::OrphanBirth { task, leader: from } => (task, from),
            Step::Birth { from: None, .. } => continue,
            Step::Setsid { task } => {
                cx.tasks[task].remote()?.call("setsid", (libc::SYS_setsid, []))?;
                continue;
            }
        };
        tracing::debug!("task {} was born", cx.tasks[task].vpid);
        prepare(cx, from, None)?;
        tree::take(cx, step)?;
        prepare(cx, task, Some(from))?;
    }
    Ok(())
}
