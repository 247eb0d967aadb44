//! The address space of a husk becomes that of its task.
//!
//! A child husk starts with a copy of its parent's address space. What both have
//! alike stays, so that pages which were never written after the fork stay shared
//! copy-on-write; the rest is unmapped and made anew. Advice, locks and guard pages
//! come last, after the children have been made: some of them keep a mapping from
//! being inherited.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use torpor_images::kind;
use torpor_images::proto::VmaEntry;
use torpor_sys::vm;
use torpor_tracee::{Mapping, STUB_SIZE, parse_maps};

use super::Restore;
use super::layers::{Pages, Stretch};
use super::transport::Transport;
use crate::error::{Context, Error, Result};
use crate::file::{lock, memfd, regular};
use crate::memory::aio;
use crate::memory::vma::{MAP_DROPPABLE, PAGE, is_wiped_on_fork, status};
use crate::namespace::ipc;
use crate::proc;

const PROT_WRITE: u32 = libc::PROT_WRITE.cast_unsigned();
/// What the kernel maps into every task.
const KERNELS: u32 = status::VDSO | status::VVAR | status::VSYSCALL;
/// Lowest address at which a stub is placed.
const STUB_FROM: u64 = 1 << 20;

/// A mapping in place.
#[derive(Debug, Clone)]
pub struct Mapped {
    /// What it is to be.
    vma: VmaEntry,
    /// Whether it is writable for the time being, although the task may not write it:
    /// for its pages to be filled in. Others are mapped as they are right away, since a
    /// private mapping that was writable once counts as memory of the task for ever.
    opened: bool,
}

impl Mapped {
    fn new(vma: VmaEntry, pages: &Pages, lazy: bool) -> Self {
        let opened = !lazy && needs_opening(&vma, pages);
        Mapped { vma, opened }
    }

    fn prot(&self) -> u64 {
        u64::from(self.vma.prot | if self.opened { PROT_WRITE } else { 0 })
    }
}

fn is_private(vma: &VmaEntry) -> bool {
    vma.flags & libc::MAP_SHARED.cast_unsigned() == 0
}

/// Whether a mapping has pages to be filled in, but cannot be written.
fn needs_opening(vma: &VmaEntry, pages: &Pages) -> bool {
    let has_pages = || pages.within(vma.start..vma.end).next().is_some();
    is_private(vma) && vma.prot & PROT_WRITE == 0 && has_pages()
}

/// Makes those inherited mappings writable that have pages to be filled in, unless the
/// parent's need has made them so.
fn open_inherited(
    cx: &mut Restore<'_>,
    task: usize,
    kept: &[VmaEntry],
    inherited: &[Mapped],
    pages: &Pages,
) -> Result<Vec<Mapped>> {
    let mut out = Vec::new();
    let filled: Vec<bool> = kept.iter().map(|vma| !cx.leaves(vma)).collect();
    let mut batch = cx.remote(task)?.batch();
    for (vma, filled) in kept.iter().zip(filled) {
        let was_open = inherited.iter().any(|m| m.vma.start == vma.start && m.opened);
        let opened = was_open || filled && needs_opening(vma, pages);
        // The parent's protection may have been another.
        let prot = u64::from(vma.prot | if opened { PROT_WRITE } else { 0 });
        let differs = inherited.iter().any(|m| m.vma.start == vma.start && m.prot() != prot);
        if differs {
            batch.must(libc::SYS_mprotect, [vma.start, vma.end - vma.start, prot]);
        }
        out.push(Mapped { vma: *vma, opened });
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
/// The kernel's; contradictions in the images.
pub fn build(cx: &mut Restore<'_>, task: usize, parent: Option<usize>) -> Result<()> {
    let wanted: Vec<VmaEntry> = cx.tasks[task].image.vmas().cloned().collect();
    let inherited = parent.map(|p| cx.tasks[p].mapped.clone()).unwrap_or_default();
    let filled = Arc::clone(&cx.tasks[task].image.pages);
    let here = current(cx, task)?;
    let base = free_place(&wanted, &here)?;
    let old_stub = cx.remote(task)?.stub_range();
    cx.remote(task)?.move_stub(base)?;
    let (kept, fresh): (Vec<VmaEntry>, Vec<VmaEntry>) =
        wanted.iter().cloned().partition(|v| survives(v, &inherited));
    clear(cx, task, &here, &kept, old_stub)?;
    move_vdso(cx, task, &wanted, &here)?;
    let mapped = |v: VmaEntry| Mapped::new(v, &filled, cx.leaves(&v));
    let fresh: Vec<Mapped> = fresh.into_iter().map(mapped).collect();
    map(cx, task, &fresh)?;
    let kept_open = open_inherited(cx, task, &kept, &inherited, &filled)?;
    drop_absent(cx, task, parent, &kept)?;
    fill(cx, task, parent, &kept)?;
    aio::restore(cx, task, &kept)?;
    cx.tasks[task].mapped = fresh.into_iter().chain(kept_open).collect();
    Ok(())
}

/// The mappings that the husk has now.
fn current(cx: &mut Restore<'_>, task: usize) -> Result<Vec<Mapping>> {
    let pid = cx.remote(task)?.pid();
    Ok(parse_maps(&proc::read(pid, "maps")?))
}

fn is_special(name: &str) -> bool {
    name == "[vdso]" || name.starts_with("[vvar") || name == "[vsyscall]"
}

/// An address at which neither the task nor the husk has anything.
fn free_place(wanted: &[VmaEntry], here: &[Mapping]) -> Result<u64> {
    let mut taken: Vec<(u64, u64)> = wanted
        .iter()
        .map(|v| (v.start, v.end))
        .chain(here.iter().map(|m| (m.start, m.end)))
        .collect();
    taken.sort_unstable();
    // A stack that grows down wants a gap below it (the kernel's stack guard gap).
    const GAP: u64 = 256 * PAGE + 64 * PAGE;
    let mut at = STUB_FROM;
    for (start, end) in taken {
        if start.saturating_sub(GAP) >= at + STUB_SIZE {
            return Ok(at);
        }
        at = at.max(end + PAGE);
    }
    if at + STUB_SIZE < 1 << 47 {
        return Ok(at);
    }
    Err(Error::invalid("mm", "the address space has no room for the stub"))
}

/// Whether a mapping that the parent has can be kept as it is.
fn survives(vma: &VmaEntry, inherited: &[Mapped]) -> bool {
    // Whether pages may wait is to be the same in both: see `lazy::may_wait`.
    let kind =
        |v: &VmaEntry| (v.start, v.end, v.pgoff, v.shmid, v.flags, v.status, is_wiped_on_fork(v));
    vma.status & KERNELS == 0 && inherited.iter().any(|m| kind(&m.vma) == kind(vma))
}

/// Unmaps everything but what is kept, the stub and the vDSO.
fn clear(
    cx: &mut Restore<'_>,
    task: usize,
    here: &[Mapping],
    kept: &[VmaEntry],
    old_stub: Option<(u64, u64)>,
) -> Result<()> {
    let mut keep: Vec<(u64, u64)> = kept.iter().map(|v| (v.start, v.end)).collect();
    keep.extend(here.iter().filter(|m| is_special(&m.name)).map(|m| (m.start, m.end)));
    if let Some((base, len)) = cx.remote(task)?.stub_range() {
        keep.push((base, base + len));
    }
    keep.sort_unstable();
    let mut remove: Vec<(u64, u64)> = here.iter().map(|m| (m.start, m.end)).collect();
    remove.extend(old_stub.map(|(base, len)| (base, base + len)));
    let mut batch = cx.remote(task)?.batch();
    for (start, end) in remove {
        let mut at = start;
        for &(from, to) in keep.iter().filter(|k| k.1 > start && k.0 < end) {
            if from > at {
                batch.call(libc::SYS_munmap, [at, from - at]);
            }
            at = at.max(to);
        }
        if at < end {
            batch.call(libc::SYS_munmap, [at, end - at]);
        }
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| format!("clearing husk {task}")),
        None => Ok(()),
    }
}

/// Moves the kernel's vDSO and its data to where the task had them, or away.
fn move_vdso(
    cx: &mut Restore<'_>,
    task: usize,
    wanted: &[VmaEntry],
    here: &[Mapping],
) -> Result<()> {
    let special = |v: &&VmaEntry| v.status & (status::VDSO | status::VVAR) != 0;
    let targets: Vec<&VmaEntry> = wanted.iter().filter(special).collect();
    let sources: Vec<&Mapping> =
        here.iter().filter(|m| is_special(&m.name) && m.name != "[vsyscall]").collect();
    let moves = pair_vdso(&cx.tasks[task].image.vpid(), &sources, &targets)?;
    let Some(parking) = parking_place(wanted, here, sources.len()) else {
        return Err(Error::invalid("mm", "the address space has no room to move the vDSO"));
    };
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut batch = cx.remote(task)?.batch();
    let mut second = Vec::new();
    for (i, (from, to)) in moves.iter().enumerate() {
        let len = from.end - from.start;
        match to {
            Some(to) if *to == from.start => {}
            Some(to) => {
                let park = parking + i as u64 * PARKING;
                batch.call(libc::SYS_mremap, [from.start, len, len, flags, park]);
                second.push([park, len, len, flags, *to]);
            }
            None => {
                batch.call(libc::SYS_munmap, [from.start, len]);
            }
        }
    }
    for args in second {
        batch.call(libc::SYS_mremap, args);
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "moving the vDSO".to_owned()),
        None => Ok(()),
    }
}

/// Room for one part of the vDSO while the others move.
const PARKING: u64 = 1 << 20;

fn parking_place(wanted: &[VmaEntry], here: &[Mapping], parts: usize) -> Option<u64> {
    let mut taken: Vec<(u64, u64)> = wanted
        .iter()
        .map(|v| (v.start, v.end))
        .chain(here.iter().map(|m| (m.start, m.end)))
        .collect();
    taken.sort_unstable();
    let size = PARKING * (parts as u64 + 1);
    // Above the stub, which was placed by the same rule.
    let mut at = STUB_FROM + 4 * STUB_SIZE;
    for (start, end) in taken {
        if start >= at + size {
            return Some(at);
        }
        at = at.max(end + 2 * STUB_SIZE).next_multiple_of(PAGE);
    }
    (at + size < 1 << 47).then_some(at)
}

/// Says which part of the kernel's vDSO goes where: the parts must be the same, in
/// number and size, as those of the task, unless the task had none of them.
fn pair_vdso<'m>(
    pid: &i32,
    sources: &[&'m Mapping],
    targets: &[&VmaEntry],
) -> Result<Vec<(&'m Mapping, Option<u64>)>> {
    let differs = || {
        Error::invalid(
            format!("mm-{pid}.img"),
            "the vDSO differs from that of this kernel; restore on the kernel release of the dump",
        )
    };
    let of = |bit: u32| targets.iter().filter(move |v| v.status & bit != 0).collect::<Vec<_>>();
    let (vdso, vvar) = (of(status::VDSO), of(status::VVAR));
    let mut out = Vec::new();
    let (mut next_vdso, mut next_vvar) = (vdso.iter(), vvar.iter());
    for source in sources {
        let (list, next) =
            if source.name == "[vdso]" { (&vdso, &mut next_vdso) } else { (&vvar, &mut next_vvar) };
        if list.is_empty() {
            out.push((*source, None));
            continue;
        }
        let target = next.next().ok_or_else(differs)?;
        if target.end - target.start != source.end - source.start {
            return Err(differs());
        }
        out.push((*source, Some(target.start)));
    }
    if next_vdso.next().is_some() || next_vvar.next().is_some() {
        return Err(differs());
    }
    Ok(out)
}

/// Makes mappings.
fn map(cx: &mut Restore<'_>, task: usize, vmas: &[Mapped]) -> Result<()> {
    let (sysv, plain): (Vec<&Mapped>, Vec<&Mapped>) = vmas
        .iter()
        .filter(|m| m.vma.status & (KERNELS | status::AIO_RING) == 0)
        .partition(|m| m.vma.status & status::SYSVIPC != 0);
    let (anonymous, backed): (Vec<&Mapped>, Vec<&Mapped>) = plain.into_iter().partition(|m| {
        m.vma.status & status::ANON_PRIVATE != 0 && m.vma.status & status::MEMFD == 0
    });
    map_anonymous(cx, task, &anonymous)?;
    let sysv: Vec<&VmaEntry> = sysv.into_iter().map(|m| &m.vma).collect();
    ipc::attach(cx.remote(task)?, &sysv)?;
    // As many files at once as one message carries.
    for chunk in backed.chunks(200) {
        map_files(cx, task, chunk)?;
    }
    Ok(())
}

fn map_anonymous(cx: &mut Restore<'_>, task: usize, vmas: &[&Mapped]) -> Result<()> {
    let husk = cx.remote(task)?;
    let areas = joined(vmas);
    let mut batch = husk.batch();
    for Area { start, end, prot, flags } in &areas {
        batch.must(libc::SYS_mmap, [*start, end - start, *prot, u64::from(*flags), u64::MAX, 0]);
    }
    let place = |i: usize| areas.get(i).map(|area| area.start..area.end);
    failed_mapping(batch.run()?.first_error(), place)
}

/// Anonymous memory to be mapped by one call.
struct Area {
    start: u64,
    end: u64,
    prot: u64,
    flags: u32,
}

/// Joins neighbours that are alike while they are filled: the kernel would do it, too.
/// What tells them apart comes when the address space is finished.
fn joined(vmas: &[&Mapped]) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for place in vmas {
        let vma = &place.vma;
        let flags = mmap_flags(vma) | libc::MAP_ANONYMOUS.cast_unsigned();
        let alike = |last: &Area| {
            (last.end, last.prot, last.flags) == (vma.start, place.prot(), flags)
                && flags & libc::MAP_GROWSDOWN.cast_unsigned() == 0
        };
        match areas.last_mut() {
            Some(last) if alike(last) => last.end = vma.end,
            _ => areas.push(Area { start: vma.start, end: vma.end, prot: place.prot(), flags }),
        }
    }
    areas
}

/// The `mmap` flags of a mapping; locks come at the end.
fn mmap_flags(vma: &VmaEntry) -> u32 {
    let fixed = if vma.flags & libc::MAP_GROWSDOWN.cast_unsigned() != 0 {
        // The guard gap that MAP_FIXED_NOREPLACE looks at is no mapping of ours.
        libc::MAP_FIXED
    } else {
        libc::MAP_FIXED_NOREPLACE
    };
    let kind = if vma.flags & MAP_DROPPABLE != 0 && vma.flags & 3 == 0 {
        MAP_DROPPABLE
    } else {
        vma.flags & 3
    };
    let keep = (libc::MAP_GROWSDOWN | libc::MAP_NORESERVE | libc::MAP_HUGETLB).cast_unsigned()
        | (0x3f << libc::MAP_HUGE_SHIFT);
    kind | vma.flags & keep | fixed.cast_unsigned()
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
    let mut index: HashMap<(u64, u32, u32, Option<u32>), usize> = HashMap::new();
    let mut of: Vec<usize> = Vec::new();
    for vma in vmas.iter().map(|m| &m.vma) {
        let kind = vma.status & status::ANON_SHARED;
        let key = (vma.shmid, kind, vma.fdflags.unwrap_or(0), vma.torpor_flock);
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
    let transport = open_transport(cx, task)?;
    let husk = cx.remote(task)?;
    let mut batch = husk.batch();
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    transport.send(&mut batch, &borrowed)?;
    let skipped = batch.len();
    for (place, &file) in vmas.iter().zip(&of) {
        let vma = &place.vma;
        batch.must(
            libc::SYS_mmap,
            [
                vma.start,
                vma.end - vma.start,
                place.prot(),
                u64::from(mmap_flags(vma)),
                file as u64,
                vma.pgoff,
            ],
        );
    }
    // The task itself takes the locks: the kernel names who has.
    let locked: Vec<&VmaEntry> =
        vmas.iter().map(|m| &m.vma).filter(|v| v.torpor_flock.is_some()).collect();
    for (vma, &file) in vmas.iter().zip(&of) {
        if let Some(kind) = vma.vma.torpor_flock {
            batch.must(libc::SYS_flock, [file as u64, lock::flock_operation(kind)?]);
        }
    }
    batch.call(libc::SYS_close_range, [0, files.len() as u64 - 1, 0]);
    transport.close(&mut batch);
    let error = batch.run()?.first_error().map(|(i, e)| (i.wrapping_sub(skipped), e));
    let places: Vec<&VmaEntry> = vmas.iter().map(|m| &m.vma).chain(locked).collect();
    failed_mapping(error, |i| places.get(i).map(|vma| vma.start..vma.end))
}

/// A transport whose end lies above what is sent through it.
fn open_transport(cx: &mut Restore<'_>, task: usize) -> Result<Transport> {
    Transport::open(cx.remote(task)?, 300)
}

/// The file behind a mapping.
fn backing(cx: &mut Restore<'_>, task: usize, vma: &VmaEntry) -> Result<OwnedFd> {
    let id = u32::try_from(vma.shmid);
    if vma.status & (status::FILE_PRIVATE | status::FILE_SHARED) != 0 {
        let id = id.map_err(|_| Error::invalid("mm", "file number out of range"))?;
        // A lock belongs to the open file: no descriptor must have the same.
        return match vma.torpor_flock {
            Some(_) => regular::open_apart(cx, id, vma.fdflags),
            None => regular::open_for_mapping(cx, id, vma.fdflags),
        };
    }
    if vma.status & status::MEMFD != 0 {
        let id = id.map_err(|_| Error::invalid("mm", "file number out of range"))?;
        return memfd::open_for_mapping(cx, id, vma);
    }
    shared_object(cx, task, vma)
}

/// The object of shared anonymous memory with number `vma.shmid`. The first task that
/// maps it makes it, so that the kernel names it as it did; the supervisor takes a
/// descriptor of it and fills it.
fn shared_object(cx: &mut Restore<'_>, task: usize, vma: &VmaEntry) -> Result<OwnedFd> {
    if let Some(file) = cx.shared.get(&vma.shmid) {
        return file.try_clone().context(|| "dup".to_owned());
    }
    let size = cx
        .tasks
        .iter()
        .flat_map(|t| t.image.vmas())
        .filter(|v| v.shmid == vma.shmid && v.status & status::ANON_SHARED != 0)
        .map(|v| v.pgoff + (v.end - v.start))
        .max()
        .unwrap_or(0);
    let pages = Pages::load(&cx.images, kind::SHMEM_PAGEMAP, vma.shmid)?;
    let size = size.max(pages.end());
    let husk = cx.remote(task)?;
    let keep =
        (libc::MAP_HUGETLB | libc::MAP_NORESERVE).cast_unsigned() | 0x3f << libc::MAP_HUGE_SHIFT;
    let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS).cast_unsigned() | vma.flags & keep;
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let at = husk.call(
        "mmap of shared memory",
        libc::SYS_mmap,
        [0, size, prot, u64::from(flags), u64::MAX, 0],
    )?;
    let name = format!("/proc/{}/map_files/{at:x}-{:x}", husk.pid(), at + size);
    let file =
        File::options().read(true).write(true).open(&name).context(|| format!("open {name}"))?;
    fill_object(&pages, &file, 0)?;
    cx.remote(task)?.call("munmap", libc::SYS_munmap, [at, size])?;
    let clone = file.try_clone().context(|| "dup".to_owned())?;
    cx.shared.insert(vma.shmid, file.into());
    Ok(clone.into())
}

/// Writes the pages of a shared object into its file, or into memory where it begins
/// at `base`.
///
/// # Errors
/// The kernel's; the image files'.
pub fn fill_object(pages: &Pages, file: &File, base: u64) -> Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    // The object is new: what it does not hold yet is zero.
    for stretch in pages.stretches().iter().filter(|stretch| !stretch.is_zero()) {
        let mut at = stretch.range.start;
        while at < stretch.range.end {
            let len = usize::try_from(stretch.range.end - at).unwrap_or(CHUNK).min(CHUNK);
            stretch.read(at, &mut buffer[..len])?;
            write_object(file, &buffer[..len], base + at)
                .context(|| "filling shared memory".to_owned())?;
            at += len as u64;
        }
    }
    Ok(())
}

fn write_object(file: &File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    match file.write_all_at(bytes, offset) {
        // hugetlbfs can only be written through a mapping.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            vm::write_mapped(file.as_fd(), offset, bytes)
        }
        done => done,
    }
}

/// Bytes copied at once.
const CHUNK: usize = 256 * 1024;

/// Fills the private mappings with the pages of the image. In mappings that were
/// inherited, pages with the same content stay shared with the parent, and those
/// that the task does not have any more are dropped.
fn fill(cx: &mut Restore<'_>, task: usize, parent: Option<usize>, kept: &[VmaEntry]) -> Result<()> {
    let image = &cx.tasks[task].image;
    let husk = cx.tasks[task].threads.first().ok_or(Error::Gone { pid: image.vpid() })?;
    let own = status::VDSO | status::VVAR | status::AIO_RING;
    let writable = |vma: &VmaEntry| vma.status & own == 0 && !cx.leaves(vma);
    let vmas = image.vmas().filter(|v| writable(v));
    let inherited = parent
        .filter(|_| !kept.is_empty())
        .map(|p| Inherited { pages: &cx.tasks[p].image.pages, kept });
    let pieces = cut(&image.pages, vmas);
    let workers = cx.opts.workers();
    tracing::debug!("filling the memory of task {}, with up to {workers} threads", image.vpid());
    Filler { pid: husk.pid(), inherited }.run(&pieces, workers)
}

/// The pages that a husk has from its parent.
struct Inherited<'a> {
    pages: &'a Pages,
    kept: &'a [VmaEntry],
}

/// A part of a stretch of pages.
#[derive(Debug, Clone, Copy)]
struct Piece<'a> {
    vaddr: u64,
    len: usize,
    stretch: &'a Stretch,
}

/// Cuts the pages into pieces. Those of no mapping are the vDSO's, which the kernel
/// provides.
fn cut<'a>(pages: &'a Pages, vmas: impl Iterator<Item = &'a VmaEntry>) -> Vec<Piece<'a>> {
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    for vma in vmas {
        for (stretch, range) in pages.within(vma.start..vma.end) {
            let mut at = range.start;
            while at < range.end {
                let left = usize::try_from(range.end - at).unwrap_or(CHUNK);
                // A piece goes on in the next mapping, if the pages do.
                let len = match pieces.last_mut() {
                    Some(last) if last.goes_on_at(at, stretch) => {
                        let len = left.min(CHUNK - last.len);
                        last.len += len;
                        len
                    }
                    _ => {
                        let len = left.min(CHUNK);
                        pieces.push(Piece { vaddr: at, len, stretch });
                        len
                    }
                };
                at += len as u64;
            }
        }
    }
    pieces
}

impl Piece<'_> {
    /// Whether the pages of `stretch` at `address` follow it, and there is room for some.
    fn goes_on_at(&self, address: u64, stretch: &Stretch) -> bool {
        self.vaddr + self.len as u64 == address
            && std::ptr::eq(self.stretch, stretch)
            && self.len < CHUNK
    }
}

/// Drops the inherited pages that the task does not have: they read as zeroes, or as
/// the file, again.
fn drop_absent(
    cx: &mut Restore<'_>,
    task: usize,
    parent: Option<usize>,
    kept: &[VmaEntry],
) -> Result<()> {
    let Some(parent) = parent else { return Ok(()) };
    let (own, theirs) = (&cx.tasks[task].image.pages, &cx.tasks[parent].image.pages);
    let mut calls = Vec::new();
    for vma in kept.iter().filter(|v| is_private(v)) {
        for (_, Range { start, end }) in theirs.within(vma.start..vma.end) {
            let mut at = start;
            for (_, mine) in own.within(start..end) {
                if mine.start > at {
                    calls.push((at, mine.start - at));
                }
                at = mine.end;
            }
            if at < end {
                calls.push((at, end - at));
            }
        }
    }
    let mut batch = cx.remote(task)?.batch();
    for (at, len) in calls {
        batch.call(libc::SYS_madvise, [at, len, libc::MADV_DONTNEED as u64]);
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "dropping inherited pages".to_owned()),
        None => Ok(()),
    }
}

/// What only the finished address space can have: real protections, advice, locks,
/// guard pages. After the children have been made.
///
/// # Errors
/// The kernel's.
pub fn finish(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    const MADV_GUARD_INSTALL: u64 = 102;
    let Some(mm) = &cx.tasks[task].image.mm else { return Ok(()) };
    let vmas: Vec<VmaEntry> = mm.vmas.iter().filter(|v| v.status & KERNELS == 0).cloned().collect();
    let opened: HashSet<u64> =
        cx.tasks[task].mapped.iter().filter(|m| m.opened).map(|m| m.vma.start).collect();
    let mut batch = cx.remote(task)?.batch();
    for vma in &vmas {
        let len = vma.end - vma.start;
        if vma.status & status::GUARD != 0 {
            batch.must(libc::SYS_madvise, [vma.start, len, MADV_GUARD_INSTALL]);
            continue;
        }
        if opened.contains(&vma.start) {
            batch.must(libc::SYS_mprotect, [vma.start, len, u64::from(vma.prot)]);
        }
        for advice in (0..64).filter(|a| vma.madv.unwrap_or(0) >> a & 1 != 0) {
            batch.must(libc::SYS_madvise, [vma.start, len, advice]);
        }
        if vma.flags & libc::MAP_LOCKED.cast_unsigned() != 0 {
            let on_fault = vma.flags & libc::MAP_NONBLOCK.cast_unsigned() != 0;
            batch.must(libc::SYS_mlock2, [vma.start, len, u64::from(on_fault)]);
        }
    }
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| "protecting and advising memory".to_owned()),
        None => Ok(()),
    }
}

/// Copies pages into a husk, on all cores.
struct Filler<'a> {
    pid: i32,
    inherited: Option<Inherited<'a>>,
}

impl Filler<'_> {
    fn run(&self, pieces: &[Piece<'_>], workers: usize) -> Result<()> {
        let total: usize = pieces.iter().map(|p| p.len).sum();
        let next = AtomicUsize::new(0);
        // A thread is not worth its start for less.
        if total < 1 << 20 || workers == 1 {
            return self.work(pieces, &next);
        }
        let failed: Mutex<Result<()>> = Mutex::new(Ok(()));
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    if let Err(e) = self.work(pieces, &next) {
                        next.store(pieces.len(), Ordering::Relaxed);
                        if let Ok(mut failed) = failed.lock() {
                            *failed = Err(e);
                        }
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes pieces, several small ones at a time, until there are no more.
    fn work(&self, pieces: &[Piece<'_>], next: &AtomicUsize) -> Result<()> {
        let mut buffer = vec![0u8; CHUNK];
        let mut other = vec![0u8; if self.inherited.is_some() { CHUNK } else { 0 }];
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = &mut buffer[..piece.len];
            piece.stretch.read(piece.vaddr, bytes)?;
            match &self.inherited {
                None => self.put(piece.vaddr, bytes)?,
                Some(inherited) => {
                    self.put_changed(inherited, piece.vaddr, bytes, &mut other[..piece.len])?;
                }
            }
        }
        Ok(())
    }

    fn put(&self, vaddr: u64, bytes: &[u8]) -> Result<()> {
        let n = vm::write(self.pid, vaddr, bytes)
            .context(|| format!("write memory of task {} at {vaddr:x}", self.pid))?;
        if n == bytes.len() {
            return Ok(());
        }
        Err(Error::Os {
            what: format!("write memory of task {} at {vaddr:x}", self.pid),
            source: std::io::Error::from_raw_os_error(libc::EFAULT),
        })
    }

    /// Writes the pages that differ from those that were inherited.
    fn put_changed(
        &self,
        inherited: &Inherited<'_>,
        vaddr: u64,
        bytes: &[u8],
        other: &mut [u8],
    ) -> Result<()> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let known = inherited.read(vaddr, other)?;
        let mut start = 0;
        let mut at = 0;
        while at < bytes.len() {
            let same = known[at / page] && bytes[at..at + page] == other[at..at + page];
            if same {
                if at > start {
                    self.put(vaddr + start as u64, &bytes[start..at])?;
                }
                start = at + page;
            }
            at += page;
        }
        if at > start {
            self.put(vaddr + start as u64, &bytes[start..at])?;
        }
        Ok(())
    }
}

impl Inherited<'_> {
    /// Reads what the parent has at `vaddr`; says for each page whether it has any.
    fn read(&self, vaddr: u64, out: &mut [u8]) -> Result<Vec<bool>> {
        let page = usize::try_from(PAGE).unwrap_or(4096);
        let mut known = vec![false; out.len() / page];
        let end = vaddr + out.len() as u64;
        let kept = self.kept.iter().map(|vma| vma.start.max(vaddr)..vma.end.min(end));
        let kept = kept.filter(|range| !range.is_empty());
        for (stretch, Range { start, end }) in kept.flat_map(|range| self.pages.within(range)) {
            let at = usize::try_from(start - vaddr).unwrap_or(0);
            let len = usize::try_from(end - start).unwrap_or(0);
            stretch.read(start, &mut out[at..at + len])?;
            known[at / page..(at + len) / page].fill(true);
        }
        Ok(known)
    }
}
