//! Bringing the packs of a snapshot to this machine: a part at a time, each verified before
//! anybody sees it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::Store;
use torpor_blobs::oci::{Descriptor, Manifest, hex_of};
use torpor_images::packed::Index;
use torpor_images::pagemap::{Pagemap, Run, page_size};
use torpor_images::proto::WorkingSetEntry;
use torpor_images::{ImageDir, kind};
use torpor_worker::tell;

use crate::archive::FIRST;
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::events::Notes;
use crate::pack::number_of;
use crate::progress::{self, size};
use crate::stored::{extent, strip};
use crate::{cache, interrupt};

/// How much is asked for at once in the background.
const LARGE: u64 = 4 << 20;
/// How much is asked for at once while somebody waits.
pub const SMALL: u64 = 128 << 10;
/// A gap that is fetched as well, since another request costs more.
const GAP: u64 = 128 << 10;

/// So many waits for what is not of the working set show that it is larger than was expected.
const SURPRISES: u64 = 32;
/// How often it is looked whether a full disk has room again.
const GLANCE: Duration = Duration::from_secs(1);

/// A cluster of a pack.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    offset: u64,
    size: u64,
    /// How many pages are in it, for all tasks that have it.
    pages: u64,
    sum: [u8; 32],
}

impl Chunk {
    /// Where it is in the archive.
    fn range(&self) -> Range<u64> {
        let start = FIRST.saturating_add(self.offset);
        start..start.saturating_add(self.size)
    }
}

/// A pack that comes here.
#[derive(Debug)]
struct Pack {
    blob: Descriptor,
    file: File,
    /// In the order of their offsets.
    chunks: Vec<Chunk>,
    /// Which of them are in place.
    here: Mutex<Vec<bool>>,
}

/// The packs of a snapshot, on their way here.
#[derive(Debug)]
pub struct Fetch<'s> {
    store: &'s dyn Store,
    /// The directory of the images.
    place: File,
    packs: HashMap<u32, Pack>,
    /// Whether they are in the cache as well.
    cached: bool,
    /// What is needed first: extents of packs.
    first: Vec<Extent>,
    requests: AtomicU64,
    bytes: AtomicU64,
    /// How often somebody waited for what is not needed first.
    unforeseen: AtomicU64,
    /// Where is written down what happens.
    notes: Option<Notes>,
    /// As long as this file is there, room on a full disk is waited for.
    waits_with: Option<PathBuf>,
    /// Whether the disk was full when it was written to last.
    is_full: AtomicBool,
}

impl<'s> Fetch<'s> {
    /// The packs of `manifest`, of which the images in `dir` say what they need. They are put
    /// there; into the cache as well, if `cached`.
    ///
    /// # Errors
    /// Damaged images; no place.
    pub fn new(
        store: &'s dyn Store,
        (description, manifest): (&Description, &Manifest),
        dir: &Path,
        cached: bool,
    ) -> Result<Self> {
        let images = ImageDir::open(dir)?;
        let place = File::open(dir).context(|| dir.display().to_string())?;
        let (mut chunks, first) = wanted(&images)?;
        let mut packs = HashMap::new();
        for (pack, blob) in description.layers(manifest)? {
            let number = pack.number;
            let Some(chunks) = chunks.remove(&number) else { continue };
            let file = open(dir, number, blob, cached)?;
            let here = Mutex::new(vec![false; chunks.len()]);
            let blob = blob.clone();
            let chunks: Vec<Chunk> = chunks.into_values().collect();
            if chunks.iter().any(|c| extent(&c.range()).end > blob.size) {
                return Err(Error::new("the index of the pages leads out of a pack"));
            }
            packs.insert(number, Pack { blob, file, chunks, here });
        }
        if let Some(number) = chunks.keys().next() {
            return Err(Error::new(format!("the snapshot lacks its pack {number}")));
        }
        let (requests, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self {
            store,
            place,
            packs,
            cached,
            first,
            requests,
            bytes,
            unforeseen: AtomicU64::new(0),
            notes: None,
            waits_with: None,
            is_full: AtomicBool::new(false),
        })
    }

    /// The same, which writes down what happens.
    #[must_use]
    pub fn noting(mut self, notes: Notes) -> Self {
        self.notes = Some(notes);
        self
    }

    /// Has it wait for room where the disk is full, as long as the file `alive` is there: tasks run that need the
    /// pages.
    #[must_use]
    pub fn waiting_with(mut self, alive: PathBuf) -> Self {
        self.waits_with = Some(alive);
        self
    }

    /// Fails if the disk has no room for what is not here yet. Packs of the cache that nobody needs make room.
    ///
    /// # Errors
    /// How much room is missing.
    pub fn check_room(&self) -> Result<()> {
        let mut need = 0;
        for pack in self.packs.values() {
            let all: u64 = pack.chunks.iter().map(|chunk| chunk.size).sum();
            let there = pack.file.metadata().context(|| "a pack")?.blocks() * 512;
            need += all.saturating_sub(there);
        }
        match cache::make_room(&self.place, need)? {
            true => Ok(()),
            false => Err(Error::new(format!(
                "No space left on the disk for the pages of the snapshot: {} more are needed",
                size(need)
            ))
            .hint("they lie where TORPOR_STATE says, in /var/lib/torpor without it")),
        }
    }

    /// Whether `range` of a pack has been brought in, as far as that is known.
    #[must_use]
    pub fn has(&self, number: u32, range: &Range<u64>) -> bool {
        let Some(pack) = self.packs.get(&number) else { return false };
        let first = pack.first_in(range);
        let chunks = pack.chunks[first..].iter().take_while(|chunk| chunk.offset < range.end);
        let here = pack.here.lock().unwrap_or_else(PoisonError::into_inner);
        here[first..first + chunks.count()].iter().all(|here| *here)
    }

    /// Whether more is needed than was expected, so that pieces of [`SMALL`] are too small.
    #[must_use]
    pub fn is_surprised(&self) -> bool {
        self.unforeseen.load(Ordering::Relaxed) > SURPRISES
    }

    /// Writes down that somebody waits for a part of a pack.
    pub fn note_asked(&self, number: u32, range: &Range<u64>) {
        let is_first = |(pack, first): &Extent| {
            *pack == number && first.start <= range.start && range.end <= first.end
        };
        let unforeseen = !self.first.iter().any(is_first);
        self.unforeseen.fetch_add(unforeseen.into(), Ordering::Relaxed);
        let (Some(notes), Some(pack)) = (&self.notes, self.packs.get(&number)) else { return };
        let chunks = &pack.chunks[pack.first_in(range)..];
        let asked = chunks.iter().take_while(|chunk| chunk.offset < range.end);
        notes.asked(asked.map(|chunk| chunk.pages).sum(), unforeseen);
    }

    fn note_came(&self, pages: u64) {
        if let Some(notes) = self.notes.as_ref().filter(|_| pages > 0) {
            notes.came(pages);
        }
    }

    /// How many requests were made, and how many bytes came.
    pub fn traffic(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Brings `range` of a pack in, and `more` bytes at most that follow.
    ///
    /// # Errors
    /// If they cannot be had, or are not what they should be.
    pub fn want(&self, number: u32, range: &Range<u64>, more: u64) -> Result<()> {
        let pack = self.packs.get(&number).ok_or_else(|| Error::new("there is no such pack"))?;
        let first = pack.first_in(range);
        let in_range = pack.chunks[first..].iter().take_while(|c| c.offset < range.end).count();
        let end = range.end.max(range.start.saturating_add(more));
        let with_more = pack.chunks[first..].iter().take_while(|c| c.offset < end).count();
        let mut found = 0;
        let missing = pack.missing(first..first + in_range, &mut found)?;
        self.note_came(found);
        let (Some(from), Some(_)) = (missing.first().copied(), missing.last()) else {
            return Ok(());
        };
        found = 0;
        let missing = pack.missing(from..first + with_more, &mut found)?;
        self.note_came(found);
        self.bring(pack, &missing)
    }

    /// Brings chunks in, those that are near to each other by one request.
    fn bring(&self, pack: &Pack, missing: &[usize]) -> Result<()> {
        let near = |a: &usize, b: &usize| {
            let (a, b) = (pack.chunks[*a], pack.chunks[*b]);
            b.offset.saturating_sub(a.offset + a.size) <= GAP
        };
        for part in missing.chunk_by(near) {
            let mut rest = part;
            while let Some(first) = rest.first() {
                let start = pack.chunks[*first].offset;
                let fits = |at: &&usize| pack.chunks[**at].offset - start < LARGE;
                let (here, others) = rest.split_at(rest.iter().take_while(fits).count());
                self.bring_together(pack, here)?;
                rest = others;
            }
        }
        Ok(())
    }

    fn bring_together(&self, pack: &Pack, numbers: &[usize]) -> Result<()> {
        let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { return Ok(()) };
        let (start, last) = (pack.chunks[*first].offset, pack.chunks[*last]);
        let part = FIRST + start..last.range().end;
        let bytes = self.store.read(&pack.blob, extent(&part))?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let bytes = strip(bytes, &part);
        let mut came = 0;
        for number in numbers {
            let chunk = pack.chunks[*number];
            let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
            let data = bytes.get(at(chunk.offset)..at(chunk.offset + chunk.size));
            let data = data.ok_or_else(|| Error::new("the answer is too short"))?;
            if digest::digest(&SHA256, data).as_ref() != chunk.sum {
                let text = format!("{} is damaged at {}", pack.blob.digest, FIRST + chunk.offset);
                return Err(Error::new(text).hint("torpor snapshot verify shows all of it"));
            }
            pack.check_place(chunk.offset, data)?;
            self.keep(pack, data, chunk.offset)?;
            came += pack.arrived(*number);
        }
        self.note_came(came);
        Ok(())
    }

    /// Writes a part to its place. Where the disk is full, packs of the cache that nobody needs make room; where tasks
    /// run that need the part, room is waited for.
    fn keep(&self, pack: &Pack, data: &[u8], offset: u64) -> Result<()> {
        let mut stored = pack.file.write_all_at(data, offset);
        let mut is_first = true;
        while stored.as_ref().is_err_and(is_full) && (is_first || self.waits()) {
            cache::make_room(&self.place, data.len() as u64)?;
            if !is_first {
                if !self.is_full.swap(true, Ordering::Relaxed) {
                    tell!("the disk is full: tasks that need more pages wait until it has room");
                }
                thread::sleep(GLANCE);
            }
            is_first = false;
            stored = pack.file.write_all_at(data, offset);
        }
        stored.context(|| "storing a pack")?;
        if self.is_full.swap(false, Ordering::Relaxed) {
            tell!("the disk has room again");
        }
        Ok(())
    }

    /// Whether room is waited for.
    fn waits(&self) -> bool {
        self.waits_with.as_ref().is_some_and(|alive| alive.exists())
    }

    /// Brings in what is needed first.
    ///
    /// # Errors
    /// If it cannot be had, or is not what it should be.
    pub fn working_set(&self) -> Result<()> {
        self.first.iter().try_for_each(|(number, range)| self.want(*number, range, 0))
    }

    /// Brings everything in, and shows how far it is.
    ///
    /// # Errors
    /// If it cannot be had, or is not what it should be.
    pub fn shown(&self) -> Result<()> {
        self.check_room()?;
        let chunks = self.packs.values().flat_map(|pack| &pack.chunks);
        let total = chunks.map(|chunk| chunk.size).sum();
        let done = AtomicU64::new(0);
        let so_far = || done.load(Ordering::Relaxed);
        progress::during("fetching", total, &so_far, || {
            self.each_part(&|number, range| {
                self.want(number, range, 0)?;
                done.fetch_add(range.end - range.start, Ordering::Relaxed);
                Ok(())
            })
        })?;
        if self.cached {
            // It is tried again the next time.
            let _ = cache::evict();
        }
        Ok(())
    }

    /// Brings everything in, until `stop` says so.
    ///
    /// # Errors
    /// If it cannot be had, or is not what it should be.
    pub fn all(&self, stop: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        self.each_part(&|number, range| match stop() {
            true => Ok(()),
            false => self.want(number, range, 0),
        })
    }

    /// Does something with each part of the packs, by two threads.
    fn each_part(&self, work: &(dyn Fn(u32, &Range<u64>) -> Result<()> + Sync)) -> Result<()> {
        let mut parts: Vec<Extent> = Vec::new();
        for (number, pack) in &self.packs {
            let end = pack.chunks.last().map_or(0, |chunk| chunk.offset + chunk.size);
            let starts = (0..end).step_by(usize::try_from(LARGE).unwrap_or(1));
            parts.extend(starts.map(|at| (*number, at..(at + LARGE).min(end))));
        }
        let todo = Mutex::new(parts.into_iter());
        let all = || {
            loop {
                interrupt::check()?;
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
                match next {
                    Some((number, range)) => work(number, &range)?,
                    None => return Ok(()),
                }
            }
        };
        thread::scope(|scope| {
            let other = scope.spawn(all);
            let own: Result<()> = all();
            own.and(other.join().unwrap_or_else(|_| Err(Error::new("a thread has ended"))))
        })
    }
}

impl Pack {
    /// The first chunk that ends behind the beginning of a range.
    fn first_in(&self, range: &Range<u64>) -> usize {
        self.chunks.partition_point(|c| c.offset + c.size <= range.start)
    }

    /// A chunk is in place. How many pages that adds: others may have brought it meanwhile.
    fn arrived(&self, number: usize) -> u64 {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut here[number], true) {
            true => 0,
            false => self.chunks[number].pages,
        }
    }

    /// Fails if a part would be written over another one that a container needs. Which pack a file of the cache is,
    /// and what has to be in it, are words of a snapshot, and another one's may be different.
    fn check_place(&self, offset: u64, data: &[u8]) -> Result<()> {
        if !cache::is_shared(&self.file)? {
            return Ok(());
        }
        let mut there = vec![0; data.len()];
        self.file.read_exact_at(&mut there, offset).context(|| "reading a pack")?;
        // Another start may be just writing the same.
        if there.iter().zip(data).all(|(old, new)| *old == 0 || old == new) {
            return Ok(());
        }
        let name = hex_of(&self.blob.digest).unwrap_or("none");
        cache::forget(name);
        let text = format!(
            "the cache has something else at {offset} of the pack {name}, which another container needs"
        );
        Err(Error::new(text).hint("the pack is taken out of the cache: another start fetches it"))
    }

    /// Those of these chunks that are not in place. What is in the file from earlier is looked
    /// at once: nobody has to note what is there. Its pages are added to `found`.
    fn missing(&self, range: Range<usize>, found: &mut u64) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        let mut data = Vec::new();
        for number in range {
            if self.here.lock().unwrap_or_else(PoisonError::into_inner)[number] {
                continue;
            }
            let chunk = self.chunks[number];
            data.resize(usize::try_from(chunk.size).unwrap_or(0), 0);
            self.file.read_exact_at(&mut data, chunk.offset).context(|| "reading a pack")?;
            // Holes are zeros, which no cluster is.
            let is_there = data.iter().take(8).any(|byte| *byte != 0)
                && digest::digest(&SHA256, &data).as_ref() == chunk.sum;
            match is_there {
                true => *found += self.arrived(number),
                false => missing.push(number),
            }
        }
        Ok(missing)
    }
}

/// Whether there was no room for what was written.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// The file of a pack beside the images, as long as it will be.
fn open(dir: &Path, number: u32, blob: &Descriptor, cached: bool) -> Result<File> {
    let path = dir.join(kind::PAGES_PACKED.file_name(number.into()));
    let shown = || path.display().to_string();
    if cached && !path.exists() {
        cache::link(hex_of(&blob.digest).unwrap_or("none"), &path)?;
    }
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.context(shown)?;
    if file.metadata().context(shown)?.len() < blob.size {
        file.set_len(blob.size).context(shown)?;
    }
    Ok(file)
}

/// A part of a pack.
type Extent = (u32, Range<u64>);

/// The clusters of each pack by their offsets.
type Chunks = HashMap<u32, BTreeMap<u64, Chunk>>;

/// The clusters that the images need, and the extents of those that are needed first.
fn wanted(images: &ImageDir) -> Result<(Chunks, Vec<Extent>)> {
    let mut all = Chunks::new();
    let mut first: Vec<Extent> = Vec::new();
    let set: Vec<WorkingSetEntry> = images.read_all_or_empty(kind::WORKING_SET, 0)?;
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
                let chunk = Chunk { offset: cluster.offset, size: cluster.size, pages: 0, sum };
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
                for entry in set.iter().filter(|entry| entry.id == id) {
                    first.extend(extents(&runs, &index, entry));
                }
            }
        }
    }
    first.sort_unstable_by_key(|(pack, range)| (*pack, range.start));
    first.dedup();
    Ok((all, merged(first)))
}

/// Where the pages of an entry are stored.
fn extents(runs: &[(Run, Option<u64>)], index: &Index, entry: &WorkingSetEntry) -> Vec<Extent> {
    let pages = (0..entry.nr_pages.min(1 << 20)).filter_map(|number| {
        let address = entry.vaddr.checked_add(number * page_size())?;
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
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    #[test]
    fn what_another_container_needs_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let [cached, own, other] = ["cached", "own", "other"].map(|name| dir.path().join(name));
        fs::write(&cached, b"good\0\0\0\0").unwrap();
        fs::hard_link(&cached, &own).unwrap();
        let file = File::options().read(true).write(true).open(&own).unwrap();
        let digest = "sha256:none-of-the-cache".to_owned();
        let (media_type, annotations) = (String::new(), BTreeMap::new());
        let blob = Descriptor { media_type, digest, size: 8, annotations };
        let pack = Pack { blob, file, chunks: Vec::new(), here: Mutex::default() };
        // Nobody else needs it: it may be damaged.
        pack.check_place(0, b"evil").unwrap();
        fs::hard_link(&cached, &other).unwrap();
        let said = pack.check_place(0, b"evil").unwrap_err().to_string();
        assert!(said.contains("another container needs"), "{said}");
        pack.check_place(0, b"good").unwrap();
        pack.check_place(4, b"more").unwrap();
    }
}
