//! System V shared memory.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::sync::Arc;

use rustix::mm::ProtFlags;
use torpor_images::proto::IpcShmEntry;
use torpor_images::{ImageDir, kind};
use torpor_policy::ipc::Segment;
use torpor_policy::memory::MemoryArea;
use torpor_sys::ipc::{self, Attached};
use torpor_tracee::syscall;
use torpor_tracee::{Tracee, parse_maps};

use super::{limits, make, owner, table};
use crate::error::{Context, Error, Result};
use crate::memory::pages::{PageSpan, Source, data_runs};
use crate::namespace::user::IdMaps;
use crate::restore::bulk::Bulk;
use crate::restore::object;

/// Where flags have the logarithm of the page size.
const HUGE_SHIFT: u32 = libc::MAP_HUGE_SHIFT.cast_unsigned();

/// A segment of the dumped namespace, with its content.
pub(super) struct ShmSegment {
    entry: IpcShmEntry,
    pages: Vec<PageSpan>,
    attached: Attached,
}

/// Opens all segments of the calling thread's namespace.
pub(super) fn open_all(maps: &IdMaps) -> Result<Vec<ShmSegment>> {
    let entries = table("shm", |line| {
        Ok(IpcShmEntry {
            desc: line.desc("shmid", maps)?,
            size: line.number("size")?,
            in_pagemaps: Some(true),
            hugetlb_flag: None,
        })
    })?;
    entries
        .into_iter()
        .map(|mut entry| {
            let id = entry.desc.id.cast_signed();
            let what = || format!("shared memory segment {id}");
            let attached = Attached::new(id, true).context(what)?;
            let file = file_of(&attached)?;
            let fs = rustix::fs::fstatfs(&file).context(what)?;
            if fs.f_type == libc::HUGETLBFS_MAGIC {
                let page = u64::try_from(fs.f_bsize).unwrap_or_default();
                let flags = libc::SHM_HUGETLB.cast_unsigned() | page.trailing_zeros() << HUGE_SHIFT;
                entry.hugetlb_flag = Some(flags);
            }
            Ok(ShmSegment { entry, pages: data_runs(&file)?, attached })
        })
        .collect()
}

/// The file behind attached memory, which shows its holes.
fn file_of(attached: &Attached) -> Result<File> {
    let maps = std::fs::read_to_string("/proc/thread-self/maps")
        .context(|| "read /proc/thread-self/maps".to_owned())?;
    let start = attached.address();
    let end = parse_maps(&maps).iter().find(|m| m.start == start).map_or(start, |m| m.end);
    let path = format!("/proc/self/map_files/{start:x}-{end:x}");
    File::open(&path).context(|| format!("open {path}"))
}

/// The pages of a segment, by its number, and where they are.
pub(crate) type SegmentPages = (u64, Vec<PageSpan>, Source);

/// Writes `ipcns-shm-ID.img`. The pages that the segments have are still to be saved.
pub(super) fn dump(
    images: &ImageDir,
    ns_id: u32,
    segments: Vec<ShmSegment>,
) -> Result<Vec<SegmentPages>> {
    let mut all = Vec::new();
    let mut writer = images.writer(kind::IPCNS_SHM, ns_id.into())?;
    for ShmSegment { entry, pages, attached } in segments {
        writer.entry(&entry)?;
        let source = Source::Segment(Arc::new(attached));
        all.push((entry.desc.id.into(), pages, source));
    }
    writer.finish()?;
    Ok(all)
}

/// Makes the segments of a namespace, with their content.
pub(super) fn restore(
    bulk: Bulk<'_>,
    ns_id: u32,
    segments: &[Segment],
    maps: &IdMaps,
) -> Result<()> {
    let mut contents = bulk.contents_of_segments(ns_id)?;
    for segment in segments {
        let object = &segment.object;
        if contents.next()?.as_ref() != Some(segment) {
            let image = kind::IPCNS_SHM.file_name(ns_id.into());
            let reason = format!("segment {} is not there any more as it was judged", object.id);
            return Err(Error::invalid(image, reason));
        }
        let flags = segment.huge.unwrap_or_default() | object.mode & 0o777;
        // A segment that is to be removed has lost its key to whoever asks next.
        let key = if segment.is_removed() { 0 } else { object.key.cast_signed() };
        let id = make(object, limits::NEXT_SHM, maps, || {
            ipc::shm_create(key, segment.size, flags.cast_signed())
        })?;
        let what = || format!("shared memory segment {id}");
        let attached = Attached::new(id, false).context(what)?;
        let mut memory = File::options()
            .write(true)
            .open("/proc/self/mem")
            .context(|| "own memory".to_owned())?;
        if segment.in_pagemap {
            let pages = bulk.pages_of_segment(object.id)?;
            if pages.end() > segment.size.next_multiple_of(4096) {
                let image = kind::SHMEM_PAGEMAP.file_name(object.id.into());
                return Err(Error::invalid(image, "pages behind the end of the segment"));
            }
            object::fill(&pages, &memory, attached.address())?;
        } else {
            memory.seek(SeekFrom::Start(attached.address())).context(what)?;
            contents.content(&mut memory)?;
        }
        ipc::shm_set_owner(id, owner(object, maps)?).context(what)?;
        if segment.is_locked() {
            ipc::shm_lock(id).context(what)?;
        }
    }
    Ok(())
}

/// Removes the segments that are to go with their last user.
pub(super) fn remove(segments: &[Segment]) -> Result<()> {
    segments.iter().filter(|segment| segment.is_removed()).try_for_each(|segment| {
        let id = segment.object.id;
        ipc::shm_remove(id.cast_signed()).context(|| format!("removing shared memory segment {id}"))
    })
}

/// Attaches a husk to its segments: `parts` are all of its mappings of such, with the ids of the segments.
///
/// What was attached at once must be so again, even if there are holes in it or its
/// protection differs from page to page: shmdt(2) goes by that. So a segment is
/// attached anywhere and its parts are then moved to where they were.
///
/// # Errors
/// If the husk has ended; if there is no such segment, or the husk may not attach it (`EACCES`); if the mappings are no
/// parts of the segment, or overlap.
pub(crate) fn attach(husk: &mut Tracee, parts: &[(u32, &MemoryArea)]) -> Result<()> {
    let mut groups: Vec<(u32, Vec<&MemoryArea>)> = Vec::new();
    for &(id, area) in parts {
        let same = |(of, group): &&mut (u32, Vec<&MemoryArea>)| {
            *of == id && base_of(group[0]) == base_of(area)
        };
        match groups.iter_mut().find(same) {
            Some((_, group)) => group.push(area),
            None => groups.push((id, vec![area])),
        }
    }
    groups.iter().try_for_each(|(id, group)| attach_group(husk, *id, group))
}

/// Where the first byte of the segment would be.
fn base_of(area: &MemoryArea) -> u64 {
    area.start.wrapping_sub(area.offset)
}

fn attach_group(husk: &mut Tracee, id: u32, group: &[&MemoryArea]) -> Result<()> {
    const PROT_WRITE: u32 = libc::PROT_WRITE.cast_unsigned();
    const PROT_EXEC: u32 = libc::PROT_EXEC.cast_unsigned();
    /// Where `struct shmid_ds` has the size, behind `struct ipc_perm`.
    const SIZE_AT: usize = 48;
    const SHMID_DS: usize = 112;
    let Some(first) = group.first() else { return Ok(()) };
    let writable = match first.open_flags {
        Some(flags) => flags & libc::O_ACCMODE.cast_unsigned() != libc::O_RDONLY.cast_unsigned(),
        None => group.iter().any(|area| area.prot & PROT_WRITE != 0),
    };
    let executable = group.iter().any(|area| area.prot & PROT_EXEC != 0);
    let read_only = if writable { 0 } else { libc::SHM_RDONLY };
    let flags = read_only | if executable { libc::SHM_EXEC } else { 0 };
    let mut batch = husk.batch();
    let stat = batch.space(SHMID_DS);
    let ask = batch.must((libc::SYS_shmctl, [id.into(), arg(libc::IPC_STAT), stat.addr.0]));
    let whole = batch.must((libc::SYS_shmat, [id.into(), 0, arg(flags)]));
    let out = batch.run()?;
    out.expect(ask, || format!("shmctl of segment {id}"))?;
    let at = out.expect(whole, || format!("shmat of segment {id}"))?;
    let size = out.u64_at(stat, SIZE_AT).next_multiple_of(4096);
    let mut batch = husk.batch();
    let mut steps = Vec::new();
    let mut end = 0;
    for area in group {
        if area.offset < end {
            let reason = format!("mapping {:x} is no part of segment {id}", area.start);
            return Err(Error::invalid("mm", reason));
        }
        if area.offset > end {
            steps.push(batch.must(syscall::munmap(at + end..at + area.offset)));
        }
        end = area.offset + area.len();
        steps.push(batch.must(syscall::mremap(at + area.offset..at + end, area.start)));
        let prot = ProtFlags::from_bits_retain(area.prot);
        steps.push(batch.must(syscall::mprotect(area.range(), prot)));
    }
    if end < size {
        steps.push(batch.must(syscall::munmap(at + end..at + size)));
    }
    let out = batch.run()?;
    for step in steps {
        out.expect(step, || format!("placing segment {id} at {:x}", first.start))?;
    }
    Ok(())
}

fn arg(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}
