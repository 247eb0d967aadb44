//! Packs: files of pages in clusters, each compressed by itself, that can be read one by one.
//!
//! A pack holds each page once, the working set first. A later release refers to the clusters
//! of the packs that it has pages in common with, page by page, so that it brings only a pack
//! with the pages that are new. Beside its clusters a pack has the list of its pages, by which
//! the next release knows them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::digest::{self, SHA256};
use torpor_images::dir::EXTENDED_VERSION;
use torpor_images::kind::{self, Kind};
use torpor_images::packed::{CLUSTER, GATHERED};
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::pages::PagesReader;
use torpor_images::proto::{PackedEntry, PackedHead, WorkingSetEntry};
use torpor_images::{ImageDir, compress::Compression};

use crate::error::{Context, Error, Result};
use crate::page_list::{self, ListedCluster, PageSum};
use crate::{eager, progress};

/// How well pages are compressed.
const LEVEL: i32 = 3;
/// How well those of the working set are: each start waits for them. Level 19 saves as much again, and takes
/// seventeen times as long.
const LEVEL_FIRST: i32 = 9;
/// A pack of an earlier release of which less than this part is needed is left behind.
const WORTH: (u64, u64) = (1, 2);
/// How many packs a snapshot has at most: each costs requests.
const MAX_PACKS: usize = 8;
/// How many clusters an entry of the index has at most.
const MOST_CLUSTERS: usize = 64;
/// How many pages are read at once.
const WINDOW: u64 = 256;

/// A cluster that is stored.
#[derive(Debug, Clone, Copy)]
pub struct StoredCluster {
    pack: u32,
    offset: u64,
    size: u32,
    pages: u32,
    sum: [u8; 32],
}

/// Pages that are stored already.
#[derive(Debug, Default)]
pub struct Known {
    clusters: Vec<StoredCluster>,
    /// Number of the cluster, and of the page in it.
    pages: HashMap<PageSum, (u32, u32)>,
}

/// What has become of the pages of a dump.
#[derive(Debug, Default)]
pub struct Gathered {
    /// The list of the pages in the new pack.
    pub list: Vec<u8>,
    /// The length of the clusters in it.
    pub len: u64,
    /// The numbers of the packs that are needed, but for the new one.
    pub packs: Vec<u32>,
    /// Bytes of memory.
    pub memory: u64,
    /// The bytes of it that were touched first.
    pub working_set: u64,
}

impl Known {
    /// Adds the pages of a pack by its list.
    ///
    /// # Errors
    /// If the list makes no sense.
    pub fn add(&mut self, pack: u32, list: &[u8]) -> Result<()> {
        for ListedCluster { offset, size, sum, pages } in page_list::parse(list)? {
            let cluster = u32::try_from(self.clusters.len()).map_err(|_| many())?;
            for (skip, page) in (0..).zip(pages) {
                self.pages.entry(*page).or_insert((cluster, skip));
            }
            let pages = u32::try_from(pages.len()).map_err(|_| many())?;
            self.clusters.push(StoredCluster { pack, offset, size, pages, sum });
        }
        Ok(())
    }

    /// Forgets packs of which the pages with these sums need too little, and all but the ones
    /// that are needed most if they are too many.
    fn keep_worthy<'s>(&mut self, wanted: impl Iterator<Item = &'s PageSum>) {
        let mut needed = vec![false; self.clusters.len()];
        for (cluster, _) in wanted.filter_map(|sum| self.pages.get(sum)) {
            needed[*cluster as usize] = true;
        }
        let mut use_of: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (cluster, needed) in self.clusters.iter().zip(&needed) {
            let (used, all) = use_of.entry(cluster.pack).or_default();
            *used += if *needed { u64::from(cluster.size) } else { 0 };
            *all += u64::from(cluster.size);
        }
        use_of.retain(|_, (used, all)| *used * WORTH.1 >= *all * WORTH.0);
        let mut kept: Vec<(u64, u32)> = use_of.iter().map(|(p, (used, _))| (*used, *p)).collect();
        kept.sort_unstable();
        let kept: Vec<u32> = kept.iter().rev().take(MAX_PACKS - 1).map(|(_, pack)| *pack).collect();
        let clusters = &self.clusters;
        self.pages.retain(|_, (cluster, _)| kept.contains(&clusters[*cluster as usize].pack));
    }
}

fn many() -> Error {
    Error::new("too many pages")
}

/// The number of the page at an address, among those that are present; `runs` are those of a map
/// with their offsets.
#[must_use]
pub(crate) fn number_of(runs: &[(Run, Option<u64>)], address: u64) -> Option<u64> {
    let after = runs.partition_point(|(run, _)| run.vaddr <= address);
    let (run, offset) = runs.get(after.checked_sub(1)?)?;
    let inside = run.range().contains(&address);
    inside.then_some(((*offset)? + address - run.vaddr) / page_size())
}

/// The memory of a process, or an object of shared memory.
struct Memory {
    kind: Kind,
    id: u64,
    map: Pagemap,
    /// The runs of the map with their offsets in the pages file.
    runs: Vec<(Run, Option<u64>)>,
    reader: Option<PagesReader>,
    sums: Vec<PageSum>,
    /// Where each page is, when that is known.
    places: Vec<Option<(u32, u32)>>,
}

impl Memory {
    /// Reads pages, the first of which is `first`.
    fn read(&self, first: u64, data: &mut [u8]) -> Result<()> {
        match &self.reader {
            Some(reader) => Ok(reader.read_exact_at(data, first * page_size())?),
            None => Err(Error::new("pages that are nowhere")),
        }
    }

    /// The number of the page at an address.
    fn page_at(&self, address: u64) -> Option<usize> {
        usize::try_from(number_of(&self.runs, address)?).ok()
    }
}

/// Gathers the pages of the images in `dir`: those that `known` does not have go to `file`,
/// which becomes the pack `number`. The images then find all of them by their index.
///
/// # Errors
/// Damaged images; no place.
pub fn gather(dir: &ImageDir, mut known: Known, number: u32, file: &mut File) -> Result<Gathered> {
    eager::note(dir)?;
    let mut all = read_maps(dir)?;
    for memory in &mut all {
        memory.sums = sums_of(memory)?;
        memory.places = vec![None; memory.sums.len()];
    }
    known.keep_worthy(all.iter().flat_map(|memory| &memory.sums));
    let mut pack = PackWriter {
        number,
        file,
        known,
        done: Gathered::default(),
        open: Vec::new(),
        placed: Arc::default(),
        level: LEVEL_FIRST,
    };
    pack.done.memory = all.iter().map(|memory| memory.sums.len() as u64 * page_size()).sum();
    let (total, placed) = (pack.done.memory, Arc::clone(&pack.placed));
    progress::during("packing", total, &|| placed.load(Ordering::Relaxed), || {
        for (index, page) in working_set(dir, &all)? {
            if all[index].places[page].is_none() {
                pack.done.working_set += page_size();
                pack.place(&mut all[index], page, None)?;
            }
        }
        pack.close()?;
        pack.level = LEVEL;
        all.iter_mut().try_for_each(|memory| pack.place_rest(memory))?;
        pack.close()
    })?;
    let mut needed: Vec<u32> = Vec::new();
    for memory in &all {
        pack.write_index(dir, memory)?;
        for (cluster, _) in memory.places.iter().flatten() {
            needed.push(pack.known.clusters[*cluster as usize].pack);
        }
    }
    needed.sort_unstable();
    needed.dedup();
    needed.retain(|pack| *pack != number);
    pack.done.packs = needed;
    let mut inventory = dir.inventory()?;
    if inventory.img_version != EXTENDED_VERSION {
        // A reader that does not know of packs must not take the images for whole.
        inventory.img_version = EXTENDED_VERSION;
        dir.write_one(kind::INVENTORY, 0, &inventory)?;
    }
    Ok(pack.done)
}

/// The pagemaps of all memory.
fn read_maps(dir: &ImageDir) -> Result<Vec<Memory>> {
    let mut all = Vec::new();
    for kind in [kind::PAGEMAP, kind::SHMEM_PAGEMAP] {
        for id in dir.ids(kind)? {
            let map = Pagemap::read(dir, kind, id)?;
            let present = map.present_bytes() > 0;
            let reader = present.then(|| PagesReader::open(dir, &map)).transpose()?;
            let runs = map.offsets().collect();
            let (sums, places) = (Vec::new(), Vec::new());
            all.push(Memory { kind, id, map, runs, reader, sums, places });
        }
    }
    Ok(all)
}

fn sums_of(memory: &Memory) -> Result<Vec<PageSum>> {
    let count = memory.map.present_bytes() / page_size();
    let page = usize::try_from(page_size()).unwrap_or(4096);
    let mut sums = Vec::new();
    let mut data = Vec::new();
    for first in (0..count).step_by(usize::try_from(WINDOW).unwrap_or(1)) {
        let pages = usize::try_from(WINDOW.min(count - first)).unwrap_or(0);
        data.resize(pages * page, 0);
        memory.read(first, &mut data)?;
        sums.extend(data.chunks_exact(page).map(page_list::sum_of));
    }
    Ok(sums)
}

/// The pages of the working set in the order in which they are needed: the number of the
/// memory, and that of the page.
fn working_set(dir: &ImageDir, all: &[Memory]) -> Result<Vec<(usize, usize)>> {
    let entries: Vec<WorkingSetEntry> = dir.read_all_or_empty(kind::WORKING_SET, 0)?;
    let mut pages = Vec::new();
    for entry in entries {
        let Some(index) = all.iter().position(|m| m.kind == kind::PAGEMAP && m.id == entry.id)
        else {
            continue;
        };
        for number in 0..entry.nr_pages.min(1 << 20) {
            let address = entry.vaddr.saturating_add(number * page_size());
            pages.extend(all[index].page_at(address).map(|page| (index, page)));
        }
    }
    Ok(pages)
}

/// A pack that is written.
struct PackWriter<'f> {
    number: u32,
    file: &'f mut File,
    known: Known,
    done: Gathered,
    /// The pages of the cluster that is not full yet.
    open: Vec<(PageSum, Vec<u8>)>,
    /// The bytes of the pages that have a place.
    placed: Arc<AtomicU64>,
    /// How well the open cluster will be compressed.
    level: i32,
}

impl PackWriter<'_> {
    /// Says where a page is, and takes it in if it is nowhere yet. `data` is what it holds, if
    /// it has been read.
    fn place(&mut self, memory: &mut Memory, page: usize, data: Option<&[u8]>) -> Result<()> {
        self.placed.fetch_add(page_size(), Ordering::Relaxed);
        let sum = memory.sums[page];
        if let Some(place) = self.known.pages.get(&sum) {
            memory.places[page] = Some(*place);
            return Ok(());
        }
        let plain = match data {
            Some(data) => data.to_vec(),
            None => {
                let mut plain = vec![0; usize::try_from(page_size()).unwrap_or(4096)];
                memory.read(page as u64, &mut plain)?;
                plain
            }
        };
        let cluster = u32::try_from(self.known.clusters.len()).map_err(|_| many())?;
        let place = (cluster, u32::try_from(self.open.len()).map_err(|_| many())?);
        self.known.pages.insert(sum, place);
        memory.places[page] = Some(place);
        self.open.push((sum, plain));
        if self.open.len() == CLUSTER { self.close() } else { Ok(()) }
    }

    /// Places all pages that have no place yet.
    fn place_rest(&mut self, memory: &mut Memory) -> Result<()> {
        let page = usize::try_from(page_size()).unwrap_or(4096);
        let window = usize::try_from(WINDOW).unwrap_or(1);
        let mut data = Vec::new();
        for first in (0..memory.places.len()).step_by(window) {
            let here = first..(first + window).min(memory.places.len());
            let known = &self.known.pages;
            let new = |at: usize| !known.contains_key(&memory.sums[at]);
            if here.clone().any(|at| memory.places[at].is_none() && new(at)) {
                data.resize(here.len() * page, 0);
                memory.read(first as u64, &mut data)?;
            }
            for at in here {
                let from = (at - first) * page;
                if memory.places[at].is_none() {
                    self.place(memory, at, data.get(from..from + page))?;
                }
            }
        }
        Ok(())
    }

    /// Writes the open cluster.
    fn close(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let what = || "writing a pack";
        let plain: Vec<u8> = self.open.iter().flat_map(|(_, data)| data).copied().collect();
        let mut stored = zstd::bulk::compress(&plain, self.level).context(what)?;
        if stored.len() >= plain.len() {
            stored = plain;
        }
        self.file.write_all(&stored).context(what)?;
        let sum: [u8; 32] = digest::digest(&SHA256, &stored)
            .as_ref()
            .try_into()
            .map_err(|_| Error::new("a digest is too short"))?;
        let size = u32::try_from(stored.len()).map_err(|_| Error::new("a cluster is too long"))?;
        let (pack, offset) = (self.number, self.done.len);
        let pages: Vec<PageSum> = self.open.drain(..).map(|(sum, _)| sum).collect();
        ListedCluster { offset, size, sum, pages: &pages }.write(&mut self.done.list);
        let pages = u32::try_from(pages.len()).map_err(|_| many())?;
        self.known.clusters.push(StoredCluster { pack, offset, size, pages, sum });
        self.done.len += u64::from(size);
        Ok(())
    }

    /// Has the images find the pages of `memory` in the packs.
    fn write_index(&self, dir: &ImageDir, memory: &Memory) -> Result<()> {
        let map = &memory.map;
        let id = map.pages_id;
        if memory.places.is_empty() {
            return Ok(());
        }
        let mut pagemap = PagemapWriter::packed(dir, memory.kind, memory.id, id)?;
        map.runs.iter().try_for_each(|run| pagemap.push(*run))?;
        pagemap.finish()?;
        for form in [kind::PAGES, kind::PAGES_PACKED, kind::PAGES_INDEX] {
            dir.remove(&form.file_name(id.into()))?;
        }
        let mut index = dir.writer(kind::PAGES_INDEX, id.into())?;
        index.entry(&PackedHead {
            version: GATHERED,
            method: Compression::ZSTD.number(),
            cluster_pages: u32::try_from(CLUSTER).unwrap_or(u32::MAX),
            salt: None,
        })?;
        let mut parts = Vec::new();
        for part in memory.places.chunk_by(follows) {
            let (cluster, skip) = part[0].ok_or_else(|| Error::new("a page has no place"))?;
            let stored = self.known.clusters[cluster as usize];
            let pages = u32::try_from(part.len()).unwrap_or(u32::MAX);
            parts.push(Part { stored, skip, pages });
        }
        let mut first = 0;
        let stretches = parts.chunk_by(Part::goes_on_in).flat_map(|all| all.chunks(MOST_CLUSTERS));
        for stretch in stretches {
            let entry = entry_of(first, stretch);
            first += u64::from(entry.pages);
            index.entry(&entry)?;
        }
        Ok(index.finish()?)
    }
}

/// Pages that stand one behind the other in a cluster.
struct Part {
    stored: StoredCluster,
    /// How many come before them.
    skip: u32,
    pages: u32,
}

impl Part {
    /// Whether it is all of its cluster.
    fn is_whole(&self) -> bool {
        self.pages == self.stored.pages
    }

    /// Whether it is a full cluster, and `next` the one behind it: an entry has as many of these as there are. One for
    /// each takes a start of 1 GiB five milliseconds to read.
    fn goes_on_in(&self, next: &Self) -> bool {
        let (one, other) = (&self.stored, &next.stored);
        let is_full = self.is_whole() && one.pages as usize == CLUSTER;
        let follows = one.pack == other.pack && one.offset + u64::from(one.size) == other.offset;
        is_full && next.is_whole() && follows
    }
}

/// What the index says of parts that go on in each other; `first` is the number of their first page.
fn entry_of(first: u64, parts: &[Part]) -> PackedEntry {
    // Of a single one also what else is in its cluster.
    let single = (parts.len() == 1).then(|| &parts[0]);
    PackedEntry {
        first,
        pages: parts.iter().map(|part| part.pages).sum(),
        offset: parts[0].stored.offset,
        sizes: parts.iter().map(|part| part.stored.size).collect(),
        tags: None,
        pack: Some(parts[0].stored.pack),
        sums: Some(parts.iter().flat_map(|part| part.stored.sum).collect()),
        whole: single.map(|part| part.stored.pages),
        skip: single.map(|part| part.skip),
    }
}

/// Whether the second page stands behind the first in the same cluster.
fn follows(one: &Option<(u32, u32)>, other: &Option<(u32, u32)>) -> bool {
    matches!((one, other), (Some((a, x)), Some((b, y))) if a == b && x + 1 == *y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_clusters_one_behind_the_other_are_one_entry() {
        let part = |pack, offset, (pages, skip, whole)| {
            let stored = StoredCluster { pack, offset, size: 100, pages: whole, sum: [7; 32] };
            Part { stored, skip, pages }
        };
        let (full, short, half) = ((16, 0, 16), (5, 0, 5), (8, 8, 16));
        let parts = [
            part(1, 0, full),
            part(1, 100, full),
            part(1, 200, short),
            part(1, 300, full),
            part(2, 400, full),
            part(2, 600, full),
            part(2, 700, half),
        ];
        let mut first = 0;
        let all = parts.chunk_by(Part::goes_on_in).map(|stretch| {
            let entry = entry_of(first, stretch);
            first += u64::from(entry.pages);
            assert_eq!(entry.sums().len(), entry.sizes.len() * 32);
            (entry.first, entry.pages, entry.pack(), entry.offset, entry.sizes.len(), entry.whole)
        });
        let expected = [
            (0, 37, 1, 0, 3, None),
            (37, 16, 1, 300, 1, Some(16)),
            (53, 16, 2, 400, 1, Some(16)),
            (69, 16, 2, 600, 1, Some(16)),
            (85, 8, 2, 700, 1, Some(16)),
        ];
        assert_eq!(all.collect::<Vec<_>>(), expected);
    }
}
