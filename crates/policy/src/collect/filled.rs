//! Memory that the restore fills itself: files in memory, shared memory, and files of a tmpfs. It counts for the group
//! of the restoring program, which is not the container's with every runtime, and stays there: nothing else limits how much that is.

use std::collections::BTreeSet;

use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::{ImageDir, kind};

use super::checkpoint::Checkpoint;
use super::ipc;
use crate::error::Result;
use crate::ipc::{Segment, Segments};
use crate::memory::{AreaKind, MemoryArea};
use crate::memory_file::MemoryInode;
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::words::FILLED_MEMORY;

/// Asks for all of it, if it is more than the group of the container may have; `listed` is what images ask for
/// otherwise, with the archives that fill a tmpfs.
///
/// # Errors
/// If images are damaged.
pub fn filled(
    checkpoint: &Checkpoint<'_>,
    listed: &[Request],
    passed: &Passed,
) -> Result<Option<Request>> {
    let most = passed.most_memory();
    // Nothing has to be counted then.
    if most == u64::MAX {
        return Ok(None);
    }
    let files = listed.iter().map(|request| match &request.ask {
        Ask::Fill(totals) => totals.pages.saturating_mul(page_size()),
        _ => 0,
    });
    let areas = checkpoint.tasks.iter().flat_map(|task| task.areas);
    let spaces = ipc::made(checkpoint, passed);
    let objects = [objects(checkpoint.images, areas)?, segments(checkpoint.images, spaces)?];
    let to = files.chain(objects).fold(0, u64::saturating_add);
    let image = kind::INVENTORY.file_name(0);
    let ask = Ask::Raise { name: FILLED_MEMORY, to: to.into() };
    Ok((to > most).then_some(Request { image, task: None, ask }))
}

/// What fills files in memory and objects of shared memory; huge pages have a limit of their own.
fn objects<'a>(images: &ImageDir, areas: impl Iterator<Item = &'a MemoryArea>) -> Result<u64> {
    let inodes = MemoryInode::all(images)?.into_iter();
    let inodes = inodes.filter(|inode| inode.huge.is_none()).map(|inode| inode.pages.into());
    // Those that are no files in the images, once each.
    let numbers: BTreeSet<u64> = areas
        .filter_map(|area| match area.kind {
            AreaKind::SharedObject(number) if area.form.huge.is_none() => Some(number),
            _ => None,
        })
        .collect();
    inodes
        .chain(numbers)
        .try_fold(0, |sum: u64, object| Ok(sum.saturating_add(pages(images, object)?)))
}

/// Likewise, segments of System V.
fn segments(images: &ImageDir, spaces: impl Iterator<Item = u64>) -> Result<u64> {
    let mut sum = 0_u64;
    for space in spaces {
        let mut segments = Segments::of(images, space)?;
        while let Some(segment) = segments.next()? {
            sum = sum.saturating_add(match segment {
                Segment { huge: Some(_), .. } => 0,
                Segment { in_pagemap: true, object, .. } => pages(images, object.id.into())?,
                // The image has all of it.
                Segment { size, .. } => size,
            });
        }
    }
    Ok(sum)
}

/// The bytes of an object that are filled. Those of a restore in rounds come when it is judged for the last time.
fn pages(images: &ImageDir, object: u64) -> Result<u64> {
    if !images.has(kind::SHMEM_PAGEMAP, object)? {
        return Ok(0);
    }
    let map = Pagemap::read_unbacked(images, kind::SHMEM_PAGEMAP, object)?;
    // The others are zeros, which nobody writes.
    let runs = map.runs.iter().filter(|run| run.flags() != 0);
    Ok(runs.fold(0, |sum, run| run.bytes().saturating_add(sum)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::proto::{IpcDescEntry, IpcShmEntry, MemfdInodeEntry, VmaEntry};

    use super::*;
    use crate::memory::status::{ANON_SHARED, REGULAR};

    /// The pages of an object: three that are there, two of zeros, and one of an image before.
    fn write_pages(images: &ImageDir, object: u64) {
        let mut map = PagemapWriter::create(images, kind::SHMEM_PAGEMAP, object, 1).unwrap();
        for (at, pages, present, in_parent) in
            [(0, 3, true, false), (3, 2, false, false), (9, 1, false, true)]
        {
            let run = Run { vaddr: at * page_size(), pages, present, in_parent, ..Run::default() };
            map.push(run).unwrap();
        }
        map.finish().unwrap();
    }

    fn images() -> (tempfile::TempDir, ImageDir) {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        (dir, images)
    }

    /// Whatever size an object says that it has: what it does not hold takes no memory.
    #[test]
    fn files_in_memory_count_with_the_pages_that_are_written() {
        let (_dir, images) = images();
        [7, 8, 9].into_iter().for_each(|object| write_pages(&images, object));
        let inode = |shmid, hugetlb_flag| MemfdInodeEntry {
            name: b"rows".to_vec(),
            size: 1 << 40,
            inode_id: u64::from(shmid),
            shmid,
            hugetlb_flag,
            ..MemfdInodeEntry::default()
        };
        // That of huge pages is none, and the last one has no pages yet.
        let inodes = [inode(7, None), inode(8, Some(libc::MFD_HUGETLB)), inode(10, None)];
        images.write_all(kind::MEMFD_INODE, 0, &inodes).unwrap();
        let area = |start| VmaEntry {
            start,
            end: start + (1 << 20),
            shmid: 9,
            flags: libc::MAP_SHARED.cast_unsigned(),
            status: REGULAR | ANON_SHARED,
            ..VmaEntry::default()
        };
        // It is mapped twice.
        let areas = [area(1 << 20), area(2 << 20)].map(|area| MemoryArea::of(&area).unwrap());
        assert_eq!(objects(&images, [].iter()).unwrap(), 4 * page_size());
        assert_eq!(objects(&images, areas.iter()).unwrap(), 8 * page_size());
    }

    #[test]
    fn segments_count_with_the_pages_that_are_written() {
        let (_dir, images) = images();
        write_pages(&images, 11);
        let segment = |id, size, in_pagemaps, hugetlb_flag| {
            let desc = IpcDescEntry { id, ..IpcDescEntry::default() };
            IpcShmEntry { desc, size, in_pagemaps, hugetlb_flag }
        };
        let mut writer = images.writer(kind::IPCNS_SHM, 5).unwrap();
        writer.entry(&segment(10, 4, None, None)).unwrap();
        writer.padded(b"here", torpor_images::payload::SHM_ALIGN).unwrap();
        writer.entry(&segment(11, 1 << 40, Some(true), None)).unwrap();
        writer.entry(&segment(12, 1 << 40, Some(true), Some(1 << 11))).unwrap();
        writer.finish().unwrap();
        assert_eq!(segments(&images, [5, 6].into_iter()).unwrap(), 4 + 4 * page_size());
    }
}
