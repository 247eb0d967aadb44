//! An address space that was built by an earlier checkpoint becomes that of the last one.
//!
//! What both have alike stays, with the pages in it: a part of a mapping stays if a mapping of
//! the same kind is to be there, whatever its protection, its advice and its ends are. The rest
//! is unmapped, and what is missing is mapped. Then those pages are filled in that differ.

use std::ops::Range;
use std::sync::Arc;

use rustix::mm::ProtFlags;
use torpor_images::kind;
use torpor_policy::memory::{AreaKind, MemoryArea};
use torpor_tracee::Mapping;
use torpor_tracee::syscall;

use super::survival::{are_one, can_join, span};
use super::{PROT_WRITE, Restore, clear, current, fill, map};
use crate::error::{Context, Result};
use crate::memory::aio;
use crate::memory::vma::PAGE;
use crate::ranges::Ranges;
use crate::restore::pages::{Pages, Search};
use crate::restore::rounds::{Applied, Start};
use crate::restore::tasks::Mapped;

/// Whether a mapping is made before the last round: it is the task's alone, and what it shows
/// will be the same.
pub(super) fn is_early(cx: &Restore<'_>, vma: &MemoryArea) -> bool {
    let is_late = match vma.kind {
        AreaKind::MemoryFile(_) | AreaKind::Segment(_) => true,
        AreaKind::File(file) => cx.temporary.is_remapped(file),
        kind => kind.is_ring(),
    };
    vma.is_private() && !is_late && vma.flock.is_none()
}

/// Makes the address space of `task`, whose husk has what `start` says, what its image says.
///
/// # Errors
/// If a mapping of the images cannot be made or moved, or there is no room for the stub; if pages
/// cannot be read; if the husk has ended.
pub(in crate::restore) fn refit(
    cx: &mut Restore<'_>,
    task: usize,
    start: Start,
) -> Result<Applied> {
    let wanted: Vec<MemoryArea> = cx.tasks[task].image.areas().copied().collect();
    let before = std::mem::take(&mut cx.tasks[task].mapped);
    let here = current(cx, task)?;
    let kept = kept(&before, &wanted, &here);
    clear(cx, task, &wanted, (&here, &kept))?;
    let id = u64::from(cx.tasks[task].image.tree.pid);
    let is_born = matches!(start, Start::Born);
    let all = || Pages::load(&cx.images, kind::PAGEMAP, id).map(Arc::new);
    let (pages, new, same) = match start {
        Start::Held(mut held) => {
            let (new, same) = held.changes_in(&cx.images, id)?;
            (held.pages, new, same)
        }
        Start::Nothing => (Ranges::default(), all()?, Ranges::default()),
        // Whatever its parent has there may be there.
        Start::Born => (kept.clone(), all()?, Ranges::default()),
    };
    let writes = new.ranges().or(&same.without(&pages.and(&kept)));
    let kept = remap(cx, task, (&before, kept), &wanted, &writes)?;
    // Those that have lost their mapping, or never had one.
    let valid = pages.and(&kept);
    let lost = same.without(&valid);
    let new = match lost.is_empty() {
        true => new,
        false => {
            let again = Search { within: Some(&lost), ..Search::default() };
            let (again, _) = Pages::find(&cx.images, kind::PAGEMAP, id, &again)?;
            Arc::new(new.with(again.stretches().to_vec()))
        }
    };

    let written = new.ranges();
    let left: Ranges =
        wanted.iter().filter(|v| cx.lazy.leaves(v)).map(|v| v.start..v.end).collect();
    // What the pager is to bring in must not be there.
    let gone = valid.without(&written).without(&same).or(&valid.and(&written).and(&left));
    forget(cx, task, &gone)?;
    let there = if is_born { fill::There::Alike } else { fill::There::Others };
    let filled =
        fill::fill(&cx.tasks[task], &cx.lazy, cx.opts.memory.workers(), &new, &wanted, there)?;
    cx.tasks[task].bequest = Arc::clone(&new);
    cx.tasks[task].image.pages = new;
    aio::restore(&mut cx.tasks[task], &[])?;
    Ok(Applied { written: filled / PAGE, dropped: gone.len() / PAGE })
}

/// The parts of mappings that can stay. Of each mapping it is a part of what is one for the kernel:
/// pages of mappings that came into being apart stay so for ever, and cannot be moved together
/// by mremap(2), as the task could. The largest one stays.
fn kept(before: &[Mapped], wanted: &[MemoryArea], here: &[Mapping]) -> Ranges {
    let mut all = Vec::new();
    for vma in wanted {
        let alike = parts(before, vma.range())
            .filter(|(_, old)| are_alike(&old.area, vma))
            .map(|(range, _)| range)
            .collect::<Ranges>();
        let first = here.partition_point(|line| line.end <= vma.start);
        let lines = here[first..].iter().take_while(|line| line.start < vma.end);
        let in_line = |line: &Mapping| alike.within(&(line.start..line.end)).collect::<Vec<_>>();
        let ranges = lines.flat_map(in_line);
        all.extend(ranges.max_by_key(|range| range.end - range.start));
    }
    all.into_iter().collect()
}

/// Whether a part of one mapping can be a part of the other.
pub(super) fn are_alike(old: &MemoryArea, new: &MemoryArea) -> bool {
    // What it is used for tells nothing apart. Locks come when the address space is finished.
    let kind = |v: &MemoryArea| (v.kind, v.form, v.watched, v.pinned, v.open_flags);
    let file = |v: &MemoryArea| v.kind.file().map(|_| v.start.wrapping_sub(v.offset));
    let is_special = old.kind.is_kernels() || old.kind.is_ring();
    !is_special && kind(old) == kind(new) && file(old) == file(new)
}

/// Maps what is missing, and gives to what was kept the protection that it is to have while the
/// pages in `writes` are written. Returns what was kept in the end.
fn remap(
    cx: &mut Restore<'_>,
    task: usize,
    (before, mut kept): (&[Mapped], Ranges),
    wanted: &[MemoryArea],
    writes: &Ranges,
) -> Result<Ranges> {
    let mut mapped = Vec::with_capacity(wanted.len());
    let mut batch = cx.tasks[task].remote()?.batch();
    for vma in wanted {
        let range = vma.range();
        let stays: Vec<_> = kept.within(&range).flat_map(|kept| parts(before, kept)).collect();
        // What was writable once counts as memory of the task for ever: what joins it has to.
        let was_open = stays.iter().any(|(_, old)| old.prot().contains(ProtFlags::WRITE));
        let opened = vma.is_private()
            && vma.prot & PROT_WRITE == 0
            && (was_open || vma.was_writable || writes.within(&range).next().is_some());
        let place = Mapped { area: *vma, opened };
        for (part, _) in stays.iter().filter(|(_, old)| old.prot() != place.prot()) {
            batch.must(syscall::mprotect(part.clone(), place.prot()));
        }
        mapped.push(place);
    }
    if let Some((_, e)) = batch.run()?.first_error() {
        return Err(e).context(|| "protecting memory that stays".to_owned());
    }
    map_missing(cx, task, &mapped, &kept)?;
    let broken = broken(&mapped, &kept, &current(cx, task)?);
    if !broken.is_empty() {
        tracing::debug!("made anew since they do not join: {broken:x?}");
        let mut batch = cx.tasks[task].remote()?.batch();
        for range in broken.as_slice() {
            batch.must(syscall::munmap(range.clone()));
        }
        if let Some((_, e)) = batch.run()?.first_error() {
            return Err(e).context(|| "unmapping memory that does not join".to_owned());
        }
        let all: Ranges = mapped.iter().map(|place| place.area.start..place.area.end).collect();
        map_missing(cx, task, &mapped, &all.without(&broken))?;
        kept = kept.without(&broken);
    }
    cx.tasks[task].mapped = mapped;
    Ok(kept)
}

/// Maps what is to be there and is not in `there`.
fn map_missing(cx: &mut Restore<'_>, task: usize, mapped: &[Mapped], there: &Ranges) -> Result<()> {
    let mut missing = Vec::new();
    for place in mapped {
        let whole: Ranges = std::iter::once(place.area.start..place.area.end).collect();
        let gaps = whole.without(there);
        missing.extend(gaps.as_slice().iter().map(|gap| place.part(gap)));
    }
    map(cx, task, &missing)
}

/// Those runs of mappings that could be one, with a part that was kept, that are not one for the kernel. They are all
/// as open as each other now, so that those which can join have done so.
fn broken(mapped: &[Mapped], kept: &Ranges, here: &[Mapping]) -> Ranges {
    let runs = mapped.chunk_by(can_join).filter(|run| !are_one(run, here)).filter_map(span);
    runs.filter(|run| kept.within(run).next().is_some()).collect()
}

/// The parts of the mappings in a range.
fn parts<'m>(
    mapped: &'m [Mapped],
    range: Range<u64>,
) -> impl Iterator<Item = (Range<u64>, &'m Mapped)> + use<'m> {
    let first = mapped.partition_point(|place| place.area.end <= range.start);
    let Range { start, end } = range;
    let over = mapped[first..].iter().take_while(move |place| place.area.start < end);
    over.map(move |place| (place.area.start.max(start)..place.area.end.min(end), place))
}

impl Mapped {
    /// A part of the mapping.
    fn part(&self, range: &Range<u64>) -> Mapped {
        let area = MemoryArea {
            start: range.start,
            end: range.end,
            offset: match self.area.kind.file() {
                Some(_) => self.area.offset + (range.start - self.area.start),
                None => self.area.offset,
            },
            ..self.area
        };
        Mapped { area, opened: self.opened }
    }
}

/// What the husk of a task has mapped so far.
pub(in crate::restore) fn mapped(task: &crate::restore::Task) -> Ranges {
    let ours = task.mapped.iter().filter(|m| !m.area.kind.is_kernels());
    ours.map(|m| m.area.start..m.area.end).collect()
}

/// Drops pages.
///
/// # Errors
/// If the husk is gone, or the kernel refuses.
pub(in crate::restore) fn forget(cx: &mut Restore<'_>, task: usize, gone: &Ranges) -> Result<()> {
    if gone.is_empty() {
        return Ok(());
    }
    Ok(cx.tasks[task].remote()?.discard(gone.as_slice())?)
}

/// Writes pages into the mappings that the husk has, as far as it has any for them.
///
/// # Errors
/// If a mapping cannot be opened for writing; if pages cannot be read, or are not those that were
/// sealed; if the husk has ended.
pub(in crate::restore) fn put(cx: &mut Restore<'_>, task: usize, pages: &Pages) -> Result<()> {
    let mut open = Vec::new();
    for place in &mut cx.tasks[task].mapped {
        let special = place.area.kind.is_kernels();
        if !special && !place.opened && super::needs_opening(&place.area, pages) {
            place.opened = true;
            open.push((place.area.start..place.area.end, place.prot()));
        }
    }
    if !open.is_empty() {
        let mut batch = cx.tasks[task].remote()?.batch();
        for (range, prot) in open {
            batch.must(syscall::mprotect(range, prot));
        }
        if let Some((_, e)) = batch.run()?.first_error() {
            return Err(e).context(|| "opening memory for a round".to_owned());
        }
    }
    let vmas: Vec<MemoryArea> = cx.tasks[task].mapped.iter().map(|place| place.area).collect();
    fill::fill(
        &cx.tasks[task],
        &cx.lazy,
        cx.opts.memory.workers(),
        pages,
        &vmas,
        fill::There::Others,
    )
    .map(drop)
}
