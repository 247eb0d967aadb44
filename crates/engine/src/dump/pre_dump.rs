//! Pre-dump: the memory of a tree, while it runs on.
//!
//! The tree is stopped only to take stock: which pages have changed since the round
//! before, and from now on count changes again. The pages are copied when it runs, and
//! what it writes meanwhile is of the next round anyway. A copy may hold a page from
//! after the stop, or half of a change; it does not matter, since such a page is not
//! protected any more and will be copied again.

use std::time::Instant;

use torpor_images::ImageDir;

use super::freezer::Freezer;
use super::outbox::Away;
use super::{Dump, End, freeze, memory, micros};
use crate::error::{Error, Result};
use crate::guardian::Guardian;
use crate::hooks::Hooks;
use crate::memory::changes::Means;
use crate::memory::track::Tracking;
use crate::memory::vma;
use crate::options::Options;
use crate::{DumpReport, support};

/// Saves the memory of the tree under `opts.pid` as far as it changed since the round
/// before (`opts.parent_img`), and lets the tree go on.
///
/// # Errors
/// As [`super::dump`].
pub fn pre_dump(opts: &Options, hooks: &mut dyn Hooks) -> Result<DumpReport> {
    support::check(opts)?;
    if opts.lazy_pages {
        return Err(Error::Unsupported("--lazy-pages of a pre-dump".to_owned()));
    }
    let mut images = ImageDir::create(&opts.images_dir)?;
    images.remove_inventory()?;
    crate::seal::begin(&mut images, opts)?;
    let mut guardian = Guardian::start()?;
    let tracking = Tracking::prepare(opts, &images, true)?;
    let away = Away::connect(opts)?;
    let start = Instant::now();
    let mut freezer = Freezer::of(opts.freeze_cgroup.as_deref())?;
    let (deadline, workers) = (start + opts.patience(), opts.workers());
    let frozen = freeze::freeze(opts.pid, &mut freezer, &mut guardian, deadline, workers)?;
    let freezing = start.elapsed();
    // Soft-dirty bits count only where the flags of a mapping say that it has been there since.
    let by_flags = Means::of_this_kernel() == Ok(Means::SoftDirty);
    let mappings = if by_flags { vma::read } else { vma::read_quickly };
    let mut cx = Dump::new(opts, images, frozen, guardian, mappings)?;
    cx.freezer = freezer;
    cx.tracking = tracking;
    cx.memory.away = away;
    let stock = take_stock(&mut cx);
    let tasks = cx.tasks.len();
    cx.let_go(End::GoOn);
    cx.stats.freezing_time = micros(freezing);
    cx.stats.frozen_time = micros(start.elapsed());
    stock?;
    memory::copy_pages(&mut cx, hooks)?;
    cx.seal()?;
    cx.finish_round()?;
    Ok(DumpReport { tasks })
}

fn take_stock(cx: &mut Dump<'_>) -> Result<()> {
    for task in 0..cx.tasks.len() {
        if !cx.tasks[task].is_zombie() {
            memory::pre_dump_pages(cx, task)?;
        }
    }
    Ok(())
}
