//! What the images of a snapshot need of its packs.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use torpor_blobs::oci::{Descriptor, Manifest};
use torpor_images::packed::Index;
use torpor_images::pagemap::{Pagemap, Run, page_size};
use torpor_images::proto::WorkingSetEntry;
use torpor_images::{ImageDir, kind};

use super::GAP;
use crate::archive::FIRST;
use crate::cache::Names;
use crate::description::Description;
use crate::error::{Error, Result};
use crate::pack::number_of;

/// What comes as a whole: a cluster of a pack, or a block of sealed pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    /// The number of the file that it belongs to.
    pub(crate) file: u32,
    /// Where it is in that.
    pub(crate) offset: u64,
    pub(crate) size: u64,
    /// Where it is in the archive of the pack.
    pub(crate) at: u64,
    /// How many pages are in it, for all tasks that have it.
    pub(crate) pages: u64,
    pub(crate) sum: [u8; 32],
    /// Whether it is of what is needed first.
    pub(crate) is_first: bool,
}

impl Chunk {
    /// Where it ends in its file.
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.size)
    }

    /// Where it is in the archive.
    pub(super) fn range(&self) -> Range<u64> {
        self.at..self.at.saturating_add(self.size)
    }
}

/// What is needed of a pack.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) blob: Descriptor,
    /// In the order of their files, and in those of their offsets.
    pub(crate) chunks: Vec<Chunk>,
    /// What its files are called in the cache, if they are there, by their numbers.
    pub(crate) cached: BTreeMap<u32, Option<String>>,
}

/// A part of a pack.
type Extent = (u32, Range<u64>);

/// The clusters of each pack by their offsets.
type Chunks = HashMap<u32, BTreeMap<u64, Chunk>>;

/// The clusters of the packs of `manifest` that the images need. They are `cached` under these names, if at all.
pub(super) fn wanted(
    description: &Description,
    manifest: &Manifest,
    images: &ImageDir,
    cached: Option<&Names>,
) -> Result<Vec<Wanted>> {
    let (mut all, first) = clusters(images)?;
    let mut wanted = Vec::new();
    for (pack, blob) in description.layers(manifest)? {
        let Some(chunks) = all.remove(&pack.number) else { continue };
        let mut chunks: Vec<Chunk> = chunks.into_values().collect();
        for chunk in &mut chunks {
            let before = |extent: &Extent| (extent.0, extent.1.end) <= (chunk.file, chunk.offset);
            let next = first.get(first.partition_point(before));
            chunk.is_first =
                next.is_some_and(|(file, part)| *file == chunk.file && part.start < chunk.end());
        }
        let name = cached.map(|names| names.name(&blob.digest));
        let cached = BTreeMap::from([(pack.number, name)]);
        wanted.push(Wanted { blob: blob.clone(), chunks, cached });
    }
    match all.keys().next() {
        Some(number) => Err(Error::new(format!("the snapshot lacks its pack {number}"))),
        None => Ok(wanted),
    }
}

/// The clusters that the images need, and the extents of those that are needed first.
fn clusters(images: &ImageDir) -> Result<(Chunks, Vec<Extent>)> {
    let mut all = Chunks::new();
    let mut first: Vec<Extent> = Vec::new();
    let mut sets = by_process(images.read_all_or_empty(kind::WORKING_SET, 0)?);
    for kind in [kind::PAGEMAP, kind::SHMEM_PAGEMAP] {
        for id in images.ids(kind)? {
            let map = Pagemap::read_unbacked(images, kind, id)?;
            if !map.packed || map.present_bytes() == 0 {
                continue;
            }
            let index = Index::read(images, &map)?;
            for cluster in index.clusters() {
                let (Some(pack), Ok(sum)) = (cluster.pack, cluster.sum.try_into()) else {
                    return Err(Error::new("the snapshot has pages that are in no pack"));
                };
                let chunk = Chunk {
                    file: pack,
                    offset: cluster.offset,
                    size: cluster.size,
                    at: FIRST.saturating_add(cluster.offset),
                    pages: 0,
                    sum,
                    is_first: false,
                };
                if kind == kind::SHMEM_PAGEMAP {
                    // It does not come later.
                    let end = cluster.offset.saturating_add(cluster.size);
                    first.push((pack, cluster.offset..end));
                }
                let known = all.entry(pack).or_default().entry(chunk.offset).or_insert(chunk);
                known.pages += cluster.pages;
            }
            if kind == kind::PAGEMAP {
                let runs: Vec<_> = map.offsets().collect();
                let set = sets.remove(&id).unwrap_or_default();
                let parts = needed(&set, map.present_bytes() / page_size());
                parts.for_each(|part| first.extend(extents(&runs, &index, part)));
            }
        }
    }
    first.sort_unstable_by_key(|(pack, range)| (*pack, range.start));
    first.dedup();
    Ok((all, merged(first)))
}

/// The working set of each process.
fn by_process(set: Vec<WorkingSetEntry>) -> HashMap<u64, Vec<WorkingSetEntry>> {
    let mut sets: HashMap<u64, Vec<WorkingSetEntry>> = HashMap::new();
    set.into_iter().for_each(|entry| sets.entry(entry.id).or_default().push(entry));
    sets
}

/// The parts of the working set of a process with so many `pages`, by their addresses and their numbers of pages. Each page is
/// needed first once: a list that is somebody else's could have the same ones without end.
fn needed(set: &[WorkingSetEntry], mut pages: u64) -> impl Iterator<Item = (u64, u64)> {
    set.iter().map(move |entry| {
        let count = entry.nr_pages.min(pages);
        pages -= count;
        (entry.vaddr, count)
    })
}

/// Where the pages of a part are stored.
fn extents(
    runs: &[(Run, Option<u64>)],
    index: &Index,
    (address, count): (u64, u64),
) -> Vec<Extent> {
    let pages = (0..count).filter_map(|number| {
        let address = address.checked_add(number * page_size())?;
        let cluster = index.at(number_of(runs, address)?)?;
        Some((cluster.pack?, cluster.offset..cluster.offset + cluster.size))
    });
    pages.collect()
}

/// Extents that are near to each other as one.
fn merged(sorted: Vec<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::new();
    for (pack, range) in sorted {
        match merged.last_mut() {
            Some((last, before)) if *last == pack && range.start <= before.end + GAP => {
                before.end = before.end.max(range.end);
            }
            _ => merged.push((pack, range)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A few bytes of a list would take all memory of whoever brings the pages.
    #[test]
    fn no_more_is_needed_first_than_there_is() {
        let entry = |id, vaddr, nr_pages| WorkingSetEntry { id, vaddr, nr_pages };
        let sets = by_process(vec![
            entry(7, 0x1000, 3),
            entry(8, 0x1000, 2),
            entry(7, 0x9000, u64::MAX),
            entry(7, 0x1000, 1),
        ]);
        let of = |id, pages| {
            let set = sets.get(&id).map_or(&[][..], Vec::as_slice);
            needed(set, pages).collect::<Vec<_>>()
        };
        assert_eq!(of(7, 10), [(0x1000, 3), (0x9000, 7), (0x1000, 0)]);
        assert_eq!(of(8, 10), [(0x1000, 2)]);
        assert_eq!(of(9, 10), []);
    }
}
