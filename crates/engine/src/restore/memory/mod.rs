//! The address space of a husk becomes that of its task.
//!
//! A child husk starts with a copy of its parent's address space. What both have
//! alike stays, so that pages which were never written after the fork stay shared
//! copy-on-write; the rest is unmapped and made anew. Of a mapping that the child has
//! only a part of that part stays. Advice, locks and guard pages
//! come last, after the children have been made: some of them keep a mapping from
//! being inherited.

mod bequest;
mod fill;
mod refit;
pub(crate) mod shared;
mod survival;
pub(crate) mod unfilled;
mod vdso;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use torpor_policy::LockMode;
use torpor_policy::memory::{AreaForm, AreaKind, MemoryArea, MemoryLock, ProcessMemory, Sharing};
use torpor_sys::vm::MADV_GUARD_INSTALL;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, Mapping, SIDE_BY_SIDE, STUB_SIZE, parse_maps};

pub(crate) use self::bequest::{forget as forget_bequests, plan};
use self::fill::{Inherited, There};
pub(super) use self::refit::{forget, mapped, put, refit};
use self::survival::{lies_in, surviving};
pub(super) use self::survival::{runs, survives_birth};
use self::vdso::{STUB_FROM, is_special};
use super::pages::Pages;
use super::parking::{Lot, Parking};
use super::process::{Rights, in_its_name};
use super::template::{self, Role};
use super::transport::Transport;
use super::{Restore, Task};
use crate::error::{Context, Error, Result};
use crate::file::{lock, memfd};
use crate::memory::vma::{MAP_DROPPABLE, PAGE};
use crate::memory::{aio, names};
use crate::namespace::{NsKind, ipc};
use crate::proc;
use crate::ranges::{Ranges, gaps};
use crate::restore::tasks::Mapped;
use crate::task::keys;

const PROT_WRITE: u32 = libc::PROT_WRITE.cast_unsigned();

impl Mapped {
    fn new(area: MemoryArea, pages: &Pages, lazy: bool) -> Self {
        let opened = !lazy && needs_opening(&area, pages);
        Mapped { area, opened }
    }

    /// What is opened can be read as well: it joins what the task can read and write.
    fn prot(&self) -> ProtFlags {
        let more =
            if self.opened { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::empty() };
        ProtFlags::from_bits_retain(self.area.prot) | more
    }
}

/// Whether a mapping cannot be written, and has pages to be filled in or could be written once. What
/// never could is another kind of mapping to the kernel than its neighbours: it would not join them
/// when it can, and the task could not move them as one (mremap(2)).
fn needs_opening(vma: &MemoryArea, pages: &Pages) -> bool {
    let has_pages = || pages.within(vma.range()).next().is_some();
    vma.is_private() && vma.prot & PROT_WRITE == 0 && (vma.was_writable || has_pages())
}

/// Makes those inherited mappings writable that have pages to be filled in, unless the
/// parent's need has made them so.
fn open_inherited(
    cx: &mut Restore<'_>,
    task: usize,
    kept: &[MemoryArea],
    inherited: &[Mapped],
    pages: &Pages,
) -> Result<Vec<Mapped>> {
    let mut out = Vec::new();
    let filled: Vec<bool> = kept.iter().map(|vma| !cx.lazy.leaves(vma)).collect();
    let mut batch = cx.tasks[task].remote()?.batch();
    for (vma, filled) in kept.iter().zip(filled) {
        let theirs = inherited.iter().find(|m| lies_in(vma, &m.area));
        let was_open = theirs.is_some_and(|m| m.opened);
        let opened = was_open || filled && needs_opening(vma, pages);
        // The parent's protection may have been another.
        let mapped = Mapped { area: *vma, opened };
        let prot = mapped.prot();
        if theirs.is_some_and(|m| m.prot() != prot) {
            batch.must(syscall::mprotect(vma.range(), prot));
        }
        out.push(mapped);
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "opening inherited memory".to_owned()),
        None => Ok(out),
    }
}

/// Builds the address space of `task`, whose husk is a fresh one or a fork of that
/// of `parent`, and fills it.
///
/// # Errors
/// If a mapping of the images cannot be made, or its file not be opened; if pages cannot be read;
/// if the husk has ended.
pub(crate) fn build(cx: &mut Restore<'_>, task: usize, parent: Option<usize>) -> Result<()> {
    let wanted = early(cx, task);
    let filled = Arc::clone(&cx.tasks[task].bequest);
    let (inherited, theirs) = match parent {
        Some(p) => (cx.tasks[p].mapped.clone(), Some(Arc::clone(&cx.tasks[p].bequest))),
        // A template has what this task has.
        None if cx.template == Role::Uses => (of_template(cx, task), Some(Arc::clone(&filled))),
        None => (Vec::new(), None),
    };
    let lots = cx.parking.of(task).to_vec();
    let (parked, others): (Vec<MemoryArea>, Vec<MemoryArea>) =
        wanted.iter().copied().partition(|vma| is_parked(vma, &lots));
    let here = current(cx, task)?;
    let mapped = |v: MemoryArea| Mapped::new(v, &filled, cx.lazy.leaves(&v));
    let others_mapped: Vec<Mapped> = others.iter().copied().map(mapped).collect();
    let staying = surviving(&others_mapped, &inherited, &here);
    let (kept, fresh): (Vec<MemoryArea>, Vec<MemoryArea>) =
        others.iter().copied().partition(|vma| staying.within(&vma.range()).next().is_some());
    let vpid = cx.tasks[task].image.vpid();
    for (vmas, how) in [(&kept, "its parent's"), (&parked, "the template's"), (&fresh, "made")] {
        for vma in vmas {
            let MemoryArea { start, end, kind, form, .. } = vma;
            tracing::debug!("task {vpid}: mapping {start:x}-{end:x} {kind:?}, {form:?}: {how}");
        }
    }
    let staying = staying.or(&cx.parking.below(task));
    clear(cx, task, &wanted, (&here, &staying))?;
    move_lots(cx, task, &here, lots.iter().map(|lot| (lot.place(), lot.home.start)))?;
    let mapped = |v: MemoryArea| Mapped::new(v, &filled, cx.lazy.leaves(&v));
    let fresh: Vec<Mapped> = fresh.into_iter().map(mapped).collect();
    map(cx, task, &fresh)?;
    let kept_open = open_inherited(cx, task, &kept, &inherited, &filled)?;
    let theirs = theirs.as_deref().map(|pages| Inherited { pages, kept: &kept });
    if let Some(theirs) = theirs {
        fill::drop_absent(cx.tasks[task].remote()?, &filled, theirs)?;
    }
    fill::fill(
        &cx.tasks[task],
        &cx.lazy,
        cx.opts.memory.workers(),
        &filled,
        &others,
        theirs.map_or(There::Others, There::Inherited),
    )?;
    if !cx.staged {
        aio::restore(&mut cx.tasks[task], &kept)?;
    }
    let parked = parked.into_iter().map(|vma| Mapped::new(vma, &filled, false));
    let mut mapped: Vec<Mapped> = fresh.into_iter().chain(kept_open).chain(parked).collect();
    mapped.sort_unstable_by_key(|place| place.area.start);
    cx.tasks[task].mapped = mapped;
    Ok(())
}

/// Clears the address space of a husk for the mappings `wanted`; what is in `staying` stays. The
/// kernel's own parts are where the task had them.
fn make_room(
    cx: &mut Restore<'_>,
    task: usize,
    wanted: &[MemoryArea],
    staying: &Ranges,
) -> Result<()> {
    let here = current(cx, task)?;
    clear(cx, task, wanted, (&here, staying))
}

/// Whether a mapping is one of those that are parked, or a part of one.
fn is_parked(vma: &MemoryArea, lots: &[Lot]) -> bool {
    let behind = lots.partition_point(|lot| lot.home.start <= vma.start);
    lots[..behind].last().is_some_and(|lot| vma.end <= lot.home.end)
}

/// Moves memory to other addresses, in the parts that it is in for the kernel, whose mappings are `here`.
fn move_lots(
    cx: &mut Restore<'_>,
    task: usize,
    here: &[Mapping],
    moves: impl Iterator<Item = (Range<u64>, u64)>,
) -> Result<()> {
    let mut batch = cx.tasks[task].remote()?.batch();
    for (from, to) in moves {
        let first = here.partition_point(|line| line.end <= from.start);
        let lines = here[first..].iter().take_while(|line| line.start < from.end);
        let parts = lines.map(|line| line.start.max(from.start)..line.end.min(from.end));
        if gaps(&from, parts.clone()).next().is_some() {
            return Err(Error::invalid("mm", "memory that a template holds for it is missing"));
        }
        for part in parts {
            batch.must(syscall::mremap(part.clone(), to + (part.start - from.start)));
        }
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "moving parked memory".to_owned()),
        None => Ok(()),
    }
}

/// The first husk, of which a template is to be made, gets what the other tasks have for themselves.
///
/// # Errors
/// If the parents of the tasks in the images make no tree; if memory cannot be mapped, or pages not
/// be read; if the husk has ended.
pub(crate) fn park(cx: &mut Restore<'_>) -> Result<()> {
    let here = current(cx, 0)?;
    cx.parking = Parking::plan(&cx.tasks, &here)?;
    let mut parked = Ranges::default();
    for task in 1..cx.tasks.len() {
        let lots = cx.parking.of(task).to_vec();
        if lots.is_empty() {
            continue;
        }
        // As long as this lasts the husk is that of the task.
        let husk = std::mem::take(&mut cx.tasks[0].threads);
        cx.tasks[task].threads = husk;
        let done = park_for(cx, task, &lots, &parked);
        cx.tasks[0].threads = std::mem::take(&mut cx.tasks[task].threads);
        done?;
        parked = parked.or(&lots.iter().map(Lot::place).collect());
    }
    Ok(())
}

/// The memory of `task` is made where it has it, and moved to its place from there: for the kernel
/// a mapping belongs to the address where its first page came into being, and joins new neighbours
/// only there.
fn park_for(cx: &mut Restore<'_>, task: usize, lots: &[Lot], parked: &Ranges) -> Result<()> {
    let pages = Arc::clone(&cx.tasks[task].bequest);
    let image = &cx.tasks[task].image;
    let special = |vma: &&MemoryArea| vma.kind.is_vdso();
    let wanted = image.areas().filter(|vma| special(vma) || is_parked(vma, lots));
    let wanted: Vec<MemoryArea> = wanted.copied().collect();
    let vmas: Vec<MemoryArea> = wanted.iter().filter(|vma| !special(vma)).copied().collect();
    make_room(cx, task, &wanted, parked)?;
    let mapped: Vec<Mapped> = vmas.iter().map(|vma| Mapped::new(*vma, &pages, false)).collect();
    map(cx, task, &mapped)?;
    let workers = cx.opts.memory.workers();
    fill::fill(&cx.tasks[task], &cx.lazy, workers, &pages, &vmas, There::Others)?;
    let here = current(cx, task)?;
    move_lots(cx, task, &here, lots.iter().map(|lot| (lot.home.clone(), lot.at)))
}

/// `task` has been born from `from` and built: what was parked for it, and for those that are born
/// from it, is of no more use to `from`.
///
/// # Errors
/// If `from` is gone, or cannot unmap it.
pub(crate) fn release(cx: &mut Restore<'_>, from: usize, task: usize) -> Result<()> {
    let places = cx.parking.below(task);
    if places.is_empty() {
        return Ok(());
    }
    let mut batch = cx.tasks[from].remote()?.batch();
    for place in places.as_slice() {
        batch.must(syscall::munmap(place.clone()));
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "unmapping parked memory".to_owned()),
        None => Ok(()),
    }
}

/// The mappings that a husk is built with: all, unless later rounds follow, or it is a template.
fn early(cx: &Restore<'_>, task: usize) -> Vec<MemoryArea> {
    let vmas = cx.tasks[task].image.areas();
    let is_early = |vma: &&MemoryArea| match cx.template {
        Role::Makes => template::is_made(vma),
        _ => !cx.staged || refit::is_early(cx, vma),
    };
    vmas.filter(is_early).copied().collect()
}

/// What a copy of the template has.
fn of_template(cx: &Restore<'_>, task: usize) -> Vec<Mapped> {
    let Task { image, bequest, .. } = &cx.tasks[task];
    let kept = image.areas().filter(|vma| template::has(vma));
    kept.map(|vma| Mapped::new(*vma, bequest, false)).collect()
}

/// The mappings that the husk has now.
fn current(cx: &mut Restore<'_>, task: usize) -> Result<Vec<Mapping>> {
    let pid = cx.tasks[task].remote()?.pid();
    Ok(parse_maps(&proc::read(pid, "maps")?))
}

/// The files that husks map: their inode numbers, by the devices that they are on (`st_dev`).
///
/// # Errors
/// If a husk has ended.
pub(super) fn mapped_files(tasks: &[Task]) -> Result<HashMap<u64, HashSet<u64>>> {
    let mut files: HashMap<u64, HashSet<u64>> = HashMap::new();
    for task in tasks.iter().filter(|task| !task.threads.is_empty()) {
        let maps = parse_maps(&proc::read(task.pid, "maps")?);
        for line in maps.iter().filter(|line| line.inode != 0) {
            files.entry(line.dev).or_default().insert(line.inode);
        }
    }
    Ok(files)
}

/// A stack that grows down wants a gap below it (the kernel's stack guard gap).
const STACK_GAP: u64 = 256 * PAGE + 64 * PAGE;

/// An address at which neither the task nor the husk has anything.
fn free_place(wanted: &[MemoryArea], here: &[Mapping]) -> Result<u64> {
    let mut taken: Vec<(u64, u64)> = wanted
        .iter()
        .map(|v| (v.start, v.end))
        .chain(here.iter().map(|m| (m.start, m.end)))
        .collect();
    taken.sort_unstable();
    let mut at = STUB_FROM;
    for (start, end) in taken {
        if start.saturating_sub(STACK_GAP) >= at + STUB_SIZE {
            return Ok(at);
        }
        at = at.max(end + PAGE);
    }
    if at + STUB_SIZE < 1 << 47 {
        return Ok(at);
    }
    Err(Error::invalid("mm", "the address space has no room for the stub"))
}

/// Whether a mapping is one of a file.
fn has_backing(vma: &MemoryArea) -> bool {
    vma.kind != AreaKind::Anonymous
}

/// Unmaps everything but what is `kept` of what is `here`, the stub and the vDSO. The kernel's own parts go to
/// where the task had them, and the stub to where it has nothing, unless it is there already: a child has
/// that of its parent.
fn clear(
    cx: &mut Restore<'_>,
    task: usize,
    wanted: &[MemoryArea],
    (here, kept): (&[Mapping], &Ranges),
) -> Result<()> {
    let husk = cx.tasks[task].remote()?;
    let stub = husk.stub_range();
    let moves = stub.is_none_or(|(base, len)| is_in_the_way(base, len, wanted));
    if moves {
        husk.move_stub(free_place(wanted, here)?)?;
    }
    unmap_others(cx, task, (here, kept), stub.filter(|_| moves))?;
    vdso::relocate(&mut cx.tasks[task], wanted, here)
}

/// Whether the stub is where a mapping is to be, or too close below a stack; or still the program that the first
/// husk has executed, which is a file that is mapped.
fn is_in_the_way(base: u64, len: u64, wanted: &[MemoryArea]) -> bool {
    let is_near = |vma: &MemoryArea| {
        vma.start.saturating_sub(STACK_GAP) < base + len && vma.end + PAGE > base
    };
    base < STUB_FROM || wanted.iter().any(is_near)
}

/// Unmaps everything but what is kept, the stub and the vDSO.
fn unmap_others(
    cx: &mut Restore<'_>,
    task: usize,
    (here, kept): (&[Mapping], &Ranges),
    old_stub: Option<(u64, u64)>,
) -> Result<()> {
    let mut keep: Vec<(u64, u64)> = kept.as_slice().iter().map(|v| (v.start, v.end)).collect();
    keep.extend(here.iter().filter(|m| is_special(&m.name)).map(|m| (m.start, m.end)));
    if let Some((base, len)) = cx.tasks[task].remote()?.stub_range() {
        keep.push((base, base + len));
    }
    keep.sort_unstable();
    let mut remove: Vec<(u64, u64)> = here.iter().map(|m| (m.start, m.end)).collect();
    remove.extend(old_stub.map(|(base, len)| (base, base + len)));
    let mut batch = cx.tasks[task].remote()?.batch();
    for (start, end) in remove {
        let mut at = start;
        for &(from, to) in keep.iter().filter(|k| k.1 > start && k.0 < end) {
            if from > at {
                batch.call(syscall::munmap(at..from));
            }
            at = at.max(to);
        }
        if at < end {
            batch.call(syscall::munmap(at..end));
        }
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| format!("clearing husk {task}")),
        None => Ok(()),
    }
}

/// Makes mappings.
fn map(cx: &mut Restore<'_>, task: usize, vmas: &[Mapped]) -> Result<()> {
    let (mut anonymous, mut segments, mut backed) = (Vec::new(), Vec::new(), Vec::new());
    for place in vmas {
        match place.area.kind {
            AreaKind::Anonymous => anonymous.push(place),
            AreaKind::Segment(id) => segments.push((id, &place.area)),
            kind if kind.is_kernels() || kind.is_ring() => {}
            _ => backed.push(place),
        }
    }
    map_anonymous(cx, task, &anonymous)?;
    attach(cx, task, &segments)?;
    // As many files at once as one message carries.
    for chunk in backed.chunks(200) {
        map_files(cx, task, chunk)?;
    }
    Ok(())
}

/// Attaches a husk to segments: in a namespace that the caller gives, which has those of others, with no more
/// rights than the task has.
fn attach(cx: &mut Restore<'_>, task: usize, segments: &[(u32, &MemoryArea)]) -> Result<()> {
    if segments.is_empty() {
        return Ok(());
    }
    let home = |task: usize| cx.tasks[task].image.homes.number(NsKind::Ipc);
    if !cx.verdict.passed.joins(NsKind::Ipc) || home(task) != home(0) {
        return ipc::attach(cx.tasks[task].remote()?, segments);
    }
    let profile = cx.opts.birth.lsm_profile.as_deref();
    let rights = Rights { maps: &cx.id_maps, spaces: &cx.ns, profile };
    in_its_name(&mut cx.tasks[task], rights, |thread| ipc::attach(thread, segments))
}

fn map_anonymous(cx: &mut Restore<'_>, task: usize, vmas: &[&Mapped]) -> Result<()> {
    let husk = cx.tasks[task].remote()?;
    let areas = joined(vmas);
    let mut batch = husk.batch();
    for Area { start, end, prot, flags } in &areas {
        batch.must(syscall::mmap_anonymous(*start..*end, *prot, *flags));
    }
    let place = |i: usize| areas.get(i).map(|area| area.start..area.end);
    failed_mapping(batch.run()?.first_error(), place)
}

/// Anonymous memory to be mapped by one call.
struct Area {
    start: u64,
    end: u64,
    prot: ProtFlags,
    flags: MapFlags,
}

/// Joins neighbours that are alike while they are filled: the kernel would do it, too.
/// What tells them apart comes when the address space is finished.
fn joined(vmas: &[&Mapped]) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for place in vmas {
        let vma = &place.area;
        let flags = mmap_flags(vma);
        let alike = |last: &Area| {
            (last.end, last.prot, last.flags) == (vma.start, place.prot(), flags)
                && !flags.contains(MapFlags::GROWSDOWN)
        };
        match areas.last_mut() {
            Some(last) if alike(last) => last.end = vma.end,
            _ => areas.push(Area { start: vma.start, end: vma.end, prot: place.prot(), flags }),
        }
    }
    areas
}

/// The `mmap` flags of a mapping; locks come at the end.
fn mmap_flags(vma: &MemoryArea) -> MapFlags {
    let AreaForm { sharing, grows_down, no_reserve, huge } = vma.form;
    let sharing = match sharing {
        Sharing::Private => MapFlags::PRIVATE,
        Sharing::Shared => MapFlags::SHARED,
        Sharing::Droppable => MapFlags::from_bits_retain(MAP_DROPPABLE),
    };
    let mut flags = sharing | shared::huge_flags(huge);
    flags.set(MapFlags::NORESERVE, no_reserve);
    // The guard gap that MAP_FIXED_NOREPLACE looks at is no mapping of ours.
    flags |= match grows_down {
        true => MapFlags::GROWSDOWN | MapFlags::FIXED,
        false => MapFlags::FIXED_NOREPLACE,
    };
    flags
}

fn failed_mapping(
    error: Option<(usize, std::io::Error)>,
    place: impl FnOnce(usize) -> Option<Range<u64>>,
) -> Result<()> {
    match error {
        None => Ok(()),
        Some((i, e)) => Err(e).context(|| match place(i) {
            Some(range) => format!("mapping {:x}-{:x}", range.start, range.end),
            None => "mapping memory".to_owned(),
        }),
    }
}

/// Maps files: they are opened here, sent over, mapped and closed again.
fn map_files(cx: &mut Restore<'_>, task: usize, vmas: &[&Mapped]) -> Result<()> {
    if vmas.is_empty() {
        return Ok(());
    }
    let mut files: Vec<OwnedFd> = Vec::new();
    let mut index: HashMap<(AreaKind, u32, Option<LockMode>), usize> = HashMap::new();
    let mut of: Vec<usize> = Vec::new();
    for vma in vmas.iter().map(|m| &m.area) {
        let key = (vma.kind, vma.open_flags.unwrap_or(0), vma.flock);
        let place = match index.get(&key) {
            Some(&place) => place,
            None => {
                files.push(backing(cx, task, vma)?);
                index.insert(key, files.len() - 1);
                files.len() - 1
            }
        };
        of.push(place);
    }
    let mut transport = open_transport(cx, task)?;
    let husk = cx.tasks[task].remote()?;
    let mut batch = husk.batch();
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    transport.send(&mut batch, &borrowed)?;
    let skipped = batch.len();
    for (place, &file) in vmas.iter().zip(&of) {
        let vma = &place.area;
        let of_file = (RemoteFd(file as u64), vma.offset);
        let range = vma.range();
        batch.must(syscall::mmap(range, place.prot(), mmap_flags(vma), of_file));
    }
    // The task itself takes the locks: the kernel names who has.
    let locked: Vec<&MemoryArea> =
        vmas.iter().map(|m| &m.area).filter(|v| v.flock.is_some()).collect();
    for (vma, &file) in vmas.iter().zip(&of) {
        if let Some(mode) = vma.area.flock {
            batch.must((libc::SYS_flock, [file as u64, lock::flock_operation(mode)]));
        }
    }
    batch.call((libc::SYS_close_range, [0, files.len() as u64 - 1, 0]));
    transport.close(&mut batch);
    let error = batch.run()?.first_error().map(|(i, e)| (i.wrapping_sub(skipped), e));
    let places: Vec<&MemoryArea> = vmas.iter().map(|m| &m.area).chain(locked).collect();
    failed_mapping(error, |i| places.get(i).map(|vma| vma.range()))
}

/// A transport whose end lies above what is sent through it.
fn open_transport(cx: &mut Restore<'_>, task: usize) -> Result<Transport> {
    let husk = cx.tasks[task].remote()?;
    let pid = husk.pid();
    Transport::open_all([(husk, 300)])?.pop().ok_or(Error::Gone { pid })
}

/// The file behind a mapping.
fn backing(cx: &mut Restore<'_>, task: usize, area: &MemoryArea) -> Result<OwnedFd> {
    match area.kind {
        AreaKind::PacketRing(file) => cx.table().duplicate(file),
        // In CRIU's images a memfd is a file besides.
        AreaKind::MemoryFile(file) => match cx.files.anonymous_memory(file) {
            Some(inode) => {
                let known = (&cx.images, &mut cx.shared);
                shared::open(known, cx.tasks[task].remote()?, Some(area), &inode)
            }
            None => memfd::open_for_mapping(cx.table().file(file)?, area.open_flags),
        },
        // A lock belongs to the open file: no descriptor must have the same.
        AreaKind::File(file) => match area.flock {
            Some(_) => cx.table().open_apart(file, area.open_flags),
            None => cx.table().open_for_mapping(file, area.open_flags),
        },
        AreaKind::SharedObject(number) => {
            let size = shared::length(&cx.tasks, area);
            let known = (&cx.images, &mut cx.shared);
            shared::open_old(known, cx.tasks[task].remote()?, &area.form, (number, size))
        }
        kind => Err(Error::Bug(format!("{kind:?} has no file behind it"))),
    }
}

/// The children have been made: the husk gets its own pages in place of those that it has held
/// for them.
///
/// # Errors
/// If a page cannot be dropped or written; if pages cannot be read, or are not those that were
/// sealed; if the husk has ended.
pub(crate) fn settle(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    let own = Arc::clone(&cx.tasks[task].image.pages);
    let held = Arc::clone(&cx.tasks[task].bequest);
    if Arc::ptr_eq(&own, &held) {
        return Ok(());
    }
    let kept = early(cx, task);
    let held = Inherited { pages: &held, kept: &kept };
    fill::drop_absent(cx.tasks[task].remote()?, &own, held)?;
    fill::fill(
        &cx.tasks[task],
        &cx.lazy,
        cx.opts.memory.workers(),
        &own,
        &kept,
        There::Inherited(held),
    )
    .map(drop)
}

/// What only finished address spaces can have: real protections, advice, locks, guard pages, names, keys.
/// After the children have been made.
///
/// # Errors
/// If a husk is gone, or mprotect(2) or madvise(2) fails in it.
pub(crate) fn finish(tasks: &mut [Task]) -> Result<()> {
    for some in tasks.chunks_mut(SIDE_BY_SIDE) {
        let batches = some.iter_mut().filter_map(protect).collect::<Result<Vec<_>>>()?;
        for out in Batch::run_all(batches)? {
            if let Some((_, e)) = out.first_error() {
                return Err(e).context(|| "protecting and advising memory".to_owned());
            }
        }
        for task in some {
            if let (Some(memory), Some(husk)) = (&task.image.memory, task.threads.first_mut()) {
                names::restore(husk, memory)?;
                keys::restore(husk, memory)?;
            }
        }
    }
    Ok(())
}

/// The calls for all but the keys; none for a zombie.
fn protect(task: &mut Task) -> Option<Result<Batch<'_>>> {
    let Task { image, threads, mapped, vpid: pid, .. } = task;
    let ProcessMemory { areas, guards, .. } = image.memory.as_ref()?;
    let Some(husk) = threads.first_mut() else { return Some(Err(Error::Gone { pid: *pid })) };
    let opened: HashSet<u64> = mapped.iter().filter(|m| m.opened).map(|m| m.area.start).collect();
    let mut batch = husk.batch();
    for area in areas.iter().filter(|area| !area.kind.is_kernels()) {
        if opened.contains(&area.start) {
            let prot = ProtFlags::from_bits_retain(area.prot);
            batch.must(syscall::mprotect(area.range(), prot));
        }
        for advice in area.advice.each() {
            batch.must((libc::SYS_madvise, [area.start, area.len(), advice]));
        }
        if let Some(lock) = area.locked {
            let on_fault = u64::from(lock == MemoryLock::OnFault);
            batch.must((libc::SYS_mlock2, [area.start, area.len(), on_fault]));
        }
    }
    for guard in guards {
        let args = [guard.start, guard.end - guard.start, MADV_GUARD_INSTALL];
        batch.must((libc::SYS_madvise, args));
    }
    Some(Ok(batch))
}

/// Seals what was sealed (mseal(2)), the kernel's own mappings too. From then on nobody can unmap, move or protect it,
/// nor drop its pages: nothing happens to the memory of a task after this, but that a pager brings in pages.
///
/// # Errors
/// If this kernel does not seal memory (before Linux 6.10); if the husk is gone.
pub(crate) fn seal(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    let sealed = cx.tasks[task].image.areas().filter(|area| area.sealed);
    let sealed: Vec<Range<u64>> = sealed.map(MemoryArea::range).collect();
    if sealed.is_empty() {
        return Ok(());
    }
    let mut batch = cx.tasks[task].remote()?.batch();
    for Range { start, end } in &sealed {
        batch.must((libc::SYS_mseal, [*start, end - start, 0]));
    }
    match batch.run()?.first_error() {
        None => Ok(()),
        Some((at, e)) => Err(e).context(|| match sealed.get(at) {
            Some(Range { start, end }) => format!("sealing {start:x}-{end:x} (mseal, Linux 6.10)"),
            None => "sealing memory".to_owned(),
        }),
    }
}
