//! What of the memory that a husk has from its parent can stay.
//!
//! Mappings that were one when the task was born, and are told apart only by what the task did to them since,
//! can be one again: mprotect(2) joins them, and mremap(2) moves them as one. For that the kernel wants them to
//! have come into being together. They stay together therefore, or none of them does.

use std::ops::Range;

use torpor_policy::memory::MemoryArea;
use torpor_tracee::Mapping;

use super::has_backing;
use super::refit::are_alike;
use crate::ranges::Ranges;
use crate::restore::pages::Pages;
use crate::restore::tasks::Mapped;

/// What stays of the mappings `wanted` of a child that has `inherited` from its parent, where it is in the
/// mappings `here` for the kernel.
pub(super) fn surviving(wanted: &[Mapped], inherited: &[Mapped], here: &[Mapping]) -> Ranges {
    let stays = |run: &&[Mapped]| {
        let all = run.iter().all(|place| survives(&place.area, inherited));
        all && (run.len() == 1 || are_one(run, here))
    };
    let runs = wanted.chunk_by(can_join).filter(stays);
    runs.flatten().map(|place| place.area.start..place.area.end).collect()
}

/// The mappings `vmas` of a task, whose pages are `pages`, in runs of neighbours that can be one.
pub(in crate::restore) fn runs(
    vmas: impl Iterator<Item = MemoryArea>,
    pages: &Pages,
) -> Vec<Vec<MemoryArea>> {
    let mapped: Vec<Mapped> = vmas.map(|vma| Mapped::new(vma, pages, false)).collect();
    let runs = mapped.chunk_by(can_join);
    runs.map(|run| run.iter().map(|place| place.area).collect()).collect()
}

/// Whether two mappings can become one for the kernel.
pub(super) fn can_join(one: &Mapped, next: &Mapped) -> bool {
    // Nothing tells them apart: had they come into being together, they would be one.
    let stay_two = MemoryArea {
        start: one.area.start,
        end: one.area.end,
        offset: one.area.offset,
        ..next.area
    } == one.area;
    one.area.end == next.area.start
        && one.prot() == next.prot()
        && one.area.is_private()
        && are_alike(&one.area, &next.area)
        // The kernel keeps this apart, and neither a template nor a birth brings it.
        && one.area.advice.wipes_on_fork() == next.area.advice.wipes_on_fork()
        && !stay_two
}

/// Whether neighbours lie in one mapping.
pub(super) fn are_one(run: &[Mapped], here: &[Mapping]) -> bool {
    let Some(Range { start, end }) = span(run) else { return false };
    let line = here.partition_point(|line| line.end <= start);
    here.get(line).is_some_and(|line| line.start <= start && line.end >= end)
}

/// The addresses of neighbours.
pub(super) fn span(run: &[Mapped]) -> Option<Range<u64>> {
    let (first, last) = (run.first()?, run.last()?);
    Some(first.area.start..last.area.end)
}

/// Whether a mapping that the parent has can be kept as it is.
fn survives(vma: &MemoryArea, inherited: &[Mapped]) -> bool {
    inherited.iter().any(|m| survives_birth(&m.area, vma))
}

/// Whether a child's mapping can be the one that it has from its parent, or a part of that: a parent whose mapping
/// has grown since, or a child that has parted its own, share pages still.
pub(in crate::restore) fn survives_birth(parents: &MemoryArea, childs: &MemoryArea) -> bool {
    // Whether pages may wait is to be the same in both: see `lazy::may_wait`.
    let kind = |v: &MemoryArea| {
        let waits = (v.locked, v.watched, v.pinned, v.advice.wipes_on_fork());
        (v.kind, v.form, v.heap, waits)
    };
    !childs.kind.is_kernels() && kind(parents) == kind(childs) && is_part(parents, childs)
}

/// Whether a mapping is a part of another one. A shared one is the same or none.
fn is_part(whole: &MemoryArea, part: &MemoryArea) -> bool {
    let extent = |v: &MemoryArea| (v.start, v.end, v.offset);
    if !part.is_private() {
        return extent(whole) == extent(part);
    }
    let (lies, off) = (lies_in(part, whole), part.start.wrapping_sub(whole.start));
    lies && part.offset == whole.offset.wrapping_add(if has_backing(whole) { off } else { 0 })
}

/// Whether one mapping lies in another.
pub(super) fn lies_in(part: &MemoryArea, whole: &MemoryArea) -> bool {
    whole.start <= part.start && part.end <= whole.end
}
