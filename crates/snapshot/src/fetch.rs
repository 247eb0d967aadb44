//! Bringing the packs of a snapshot to this machine: a part at a time, each verified before
//! anybody sees it.

use std::collections::BTreeMap;
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
use torpor_blobs::http;
use torpor_blobs::oci::{Descriptor, Manifest};
use torpor_images::{ImageDir, kind};
use torpor_worker::tell;

use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::events::Notes;
use crate::patience::patiently;
use crate::progress::{self, size};
use crate::stored::{extent, strip};
use crate::{cache, interrupt, sealed_pack};

mod wanted;

pub(crate) use wanted::{Chunk, Wanted};

/// How much is asked for at once in the background.
const LARGE: u64 = 4 << 20;
/// What is needed first comes in so many parts, by two connections, unless they were smaller than this: a part is verified
/// while the next ones come. More requests than that are too many for some registries.
const FIRST_PARTS: u64 = 24;
const FIRST_LEAST: u64 = 1 << 20;
/// How much is asked for at once while somebody waits.
pub const SMALL: u64 = 128 << 10;
/// A gap that is fetched as well, since another request costs more.
const GAP: u64 = 128 << 10;

/// So many waits for what is not of the working set show that it is larger than was expected.
const SURPRISES: u64 = 32;
/// How often it is looked whether a full disk has room again.
const GLANCE: Duration = Duration::from_secs(1);

/// A file of pages that comes here.
#[derive(Debug)]
struct Pages {
    file: File,
    /// What it is called in the cache.
    cached: String,
}

/// A pack that comes here.
#[derive(Debug)]
struct Pack {
    blob: Descriptor,
    /// By their numbers.
    files: BTreeMap<u32, Pages>,
    /// In the order of their files, and in those of their offsets.
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
    packs: Vec<Pack>,
    /// Whether they are in the cache as well.
    cached: bool,
    requests: AtomicU64,
    bytes: AtomicU64,
    /// How often somebody waited for what is not needed first.
    unforeseen: AtomicU64,
    /// Where is written down what happens.
    notes: Option<Notes>,
    /// As long as this file is there, room on a full disk is waited for, and a place that cannot be reached.
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
        let place = File::open(dir).context(|| dir.display().to_string())?;
        let wanted = match description.sealed {
            true => sealed_pack::wanted(description, manifest, dir)?,
            false => wanted::wanted(description, manifest, &ImageDir::open(dir)?)?,
        };
        let packs = wanted.into_iter().map(|wanted| Pack::open(dir, wanted, cached));
        let packs = packs.collect::<Result<Vec<_>>>()?;
        let (requests, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self {
            store,
            place,
            packs,
            cached,
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

    /// Has it wait for room where the disk is full, and for a place that cannot be reached, as long as the file `alive`
    /// is there: tasks run that need the pages.
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
        for pack in &self.packs {
            let all: u64 = pack.chunks.iter().map(|chunk| chunk.size).sum();
            let mut there = 0;
            for pages in pack.files.values() {
                there += pages.file.metadata().context(|| "a pack")?.blocks() * 512;
            }
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

    /// Has the packs stay where they are until all of them is here, as far as their place can do that.
    ///
    /// # Errors
    /// If it is known already that one of them is not there.
    pub fn hold(&self) -> Result<()> {
        Ok(self.packs.iter().try_for_each(|pack| self.store.hold(&pack.blob))?)
    }

    /// The pack with the file `number`.
    fn pack_of(&self, number: u32) -> Option<&Pack> {
        self.packs.iter().find(|pack| pack.files.contains_key(&number))
    }

    /// Whether `range` of the file `number` has been brought in, as far as that is known.
    #[must_use]
    pub fn has(&self, number: u32, range: &Range<u64>) -> bool {
        let Some(pack) = self.pack_of(number) else { return false };
        let here = pack.here.lock().unwrap_or_else(PoisonError::into_inner);
        here[pack.within(number, range)].iter().all(|here| *here)
    }

    /// Whether more is needed than was expected, so that pieces of [`SMALL`] are too small.
    #[must_use]
    pub fn is_surprised(&self) -> bool {
        self.unforeseen.load(Ordering::Relaxed) > SURPRISES
    }

    /// Writes down that somebody waits for a part of the file `number`.
    pub fn note_asked(&self, number: u32, range: &Range<u64>) {
        let asked = self.pack_of(number).map(|pack| &pack.chunks[pack.within(number, range)]);
        let asked = asked.unwrap_or_default();
        let unforeseen = asked.is_empty() || asked.iter().any(|chunk| !chunk.is_first);
        self.unforeseen.fetch_add(unforeseen.into(), Ordering::Relaxed);
        if let Some(notes) = self.notes.as_ref().filter(|_| !asked.is_empty()) {
            notes.asked(asked.iter().map(|chunk| chunk.pages).sum(), unforeseen);
        }
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

    /// Brings `range` of the file `number` in, and `more` bytes at most that follow.
    ///
    /// # Errors
    /// If they cannot be had, or are not what they should be.
    pub fn want(&self, number: u32, range: &Range<u64>, more: u64) -> Result<()> {
        let pack = self.pack_of(number).ok_or_else(|| Error::new("there is no such pack"))?;
        let end = range.end.max(range.start.saturating_add(more));
        let with_more = pack.within(number, &(range.start..end));
        let missing = self.missing(pack, pack.within(number, range))?;
        let Some(first) = missing.first() else { return Ok(()) };
        let missing = self.missing(pack, *first..with_more.end)?;
        self.bring(pack, missing)
    }

    /// Those of these chunks that are not in place; what is there from earlier is written down.
    fn missing(&self, pack: &Pack, chunks: impl IntoIterator<Item = usize>) -> Result<Vec<usize>> {
        let mut found = 0;
        let missing = pack.missing(chunks, &mut found)?;
        self.note_came(found);
        Ok(missing)
    }

    /// Brings chunks in, those that are near to each other in the archive by one request.
    fn bring(&self, pack: &Pack, mut missing: Vec<usize>) -> Result<()> {
        missing.sort_unstable_by_key(|number| pack.chunks[*number].at);
        let near = |a: &usize, b: &usize| {
            let (a, b) = (pack.chunks[*a], pack.chunks[*b]);
            b.at.saturating_sub(a.range().end) <= GAP
        };
        for part in missing.chunk_by(near) {
            let mut rest = part;
            while let Some(first) = rest.first() {
                let start = pack.chunks[*first].at;
                let fits = |number: &&usize| pack.chunks[**number].at - start < LARGE;
                let (here, others) = rest.split_at(rest.iter().take_while(fits).count());
                self.bring_together(pack, here)?;
                rest = others;
            }
        }
        Ok(())
    }

    fn bring_together(&self, pack: &Pack, numbers: &[usize]) -> Result<()> {
        let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { return Ok(()) };
        let part = pack.chunks[*first].at..pack.chunks[*last].range().end;
        let bytes = self.read(&pack.blob, &extent(&part))?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let bytes = strip(bytes, &part);
        let mut came = 0;
        for number in numbers {
            let chunk = pack.chunks[*number];
            let at = |at: u64| usize::try_from(at - part.start).unwrap_or(usize::MAX);
            let data = bytes.get(at(chunk.at)..at(chunk.range().end));
            let data = data.ok_or_else(|| Error::new("the answer is too short"))?;
            if digest::digest(&SHA256, data).as_ref() != chunk.sum {
                let text = format!("{} is damaged at {}", pack.blob.digest, chunk.at);
                return Err(Error::new(text).hint("torpor snapshot verify shows all of it"));
            }
            let pages = pack.pages(&chunk)?;
            pages.check_place(chunk.offset, data)?;
            self.keep(&pages.file, data, chunk.offset)?;
            came += pack.arrived(*number);
        }
        self.note_came(came);
        Ok(())
    }

    /// Reads a part of a pack. Where tasks run that need it, a place that cannot be reached is waited for as long as one that
    /// says nothing: it may be started anew.
    fn read(&self, blob: &Descriptor, range: &Range<u64>) -> Result<Vec<u8>> {
        let patience = if self.waits() { http::silence() } else { Duration::ZERO };
        Ok(patiently(patience, || self.store.read(blob, range.clone()))?)
    }

    /// Writes a part to its place. Where the disk is full, packs of the cache that nobody needs make room; where tasks
    /// run that need the part, room is waited for.
    fn keep(&self, file: &File, data: &[u8], offset: u64) -> Result<()> {
        let mut stored = file.write_all_at(data, offset);
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
            stored = file.write_all_at(data, offset);
        }
        stored.context(|| "storing a pack")?;
        if self.is_full.swap(false, Ordering::Relaxed) {
            tell!("the disk has room again");
        }
        Ok(())
    }

    /// Whether tasks run, for which it is waited.
    fn waits(&self) -> bool {
        self.waits_with.as_ref().is_some_and(|alive| alive.exists())
    }

    /// Brings in what is needed first.
    ///
    /// # Errors
    /// If it cannot be had, or is not what it should be.
    pub fn working_set(&self) -> Result<()> {
        let first = |chunk: &Chunk| chunk.is_first;
        let chunks = self.packs.iter().flat_map(|pack| &pack.chunks);
        let total: u64 = chunks.filter(|chunk| first(chunk)).map(|chunk| chunk.size).sum();
        let size = (total / FIRST_PARTS).clamp(FIRST_LEAST, LARGE);
        self.each_part(size, &first, &|pack, part| {
            self.bring(pack, self.missing(pack, part.iter().copied())?)
        })
    }

    /// Brings everything in, and shows how far it is.
    ///
    /// # Errors
    /// If it cannot be had, or is not what it should be.
    pub fn shown(&self) -> Result<()> {
        self.check_room()?;
        let chunks = self.packs.iter().flat_map(|pack| &pack.chunks);
        let total = chunks.map(|chunk| chunk.size).sum();
        let done = AtomicU64::new(0);
        let so_far = || done.load(Ordering::Relaxed);
        progress::during("fetching", total, &so_far, || {
            self.each_part(LARGE, &|_| true, &|pack, part| {
                self.bring(pack, self.missing(pack, part.iter().copied())?)?;
                let size = part.iter().map(|number| pack.chunks[*number].size).sum();
                done.fetch_add(size, Ordering::Relaxed);
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
        self.each_part(LARGE, &|_| true, &|pack, part| match stop() {
            true => Ok(()),
            false => self.bring(pack, self.missing(pack, part.iter().copied())?),
        })
    }

    /// Does something with each part of the packs, some chunks of those that are `wanted`, of about this size together, which
    /// follow each other in the archive; by two threads.
    fn each_part(
        &self,
        size: u64,
        wanted: &dyn Fn(&Chunk) -> bool,
        work: &(dyn Fn(&Pack, &[usize]) -> Result<()> + Sync),
    ) -> Result<()> {
        let parts = self.packs.iter().flat_map(|pack| {
            pack.parts(size, wanted).into_iter().map(move |numbers| (pack, numbers))
        });
        let parts: Vec<(&Pack, Vec<usize>)> = parts.collect();
        let todo = Mutex::new(parts.into_iter());
        let all = || {
            loop {
                interrupt::check()?;
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
                match next {
                    Some((pack, part)) => work(pack, &part)?,
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
    /// The files of `wanted` beside the images in `dir`, in the cache as well if they are `cached`.
    fn open(dir: &Path, wanted: Wanted, cached: bool) -> Result<Self> {
        let Wanted { blob, chunks, cached: names } = wanted;
        if chunks.iter().any(|chunk| extent(&chunk.range()).end > blob.size) {
            return Err(Error::new("the index of the pages leads out of a pack"));
        }
        let mut files = BTreeMap::new();
        for (number, name) in names {
            let of_file = chunks.iter().filter(|chunk| chunk.file == number);
            let len = of_file.map(Chunk::end).max().unwrap_or(0);
            let file = open(dir, number, len, cached.then_some(name.as_str()))?;
            files.insert(number, Pages { file, cached: name });
        }
        let here = Mutex::new(vec![false; chunks.len()]);
        Ok(Self { blob, files, chunks, here })
    }

    /// The chunks that are `wanted`, in the order of the archive, in parts of about this size.
    fn parts(&self, size: u64, wanted: &dyn Fn(&Chunk) -> bool) -> Vec<Vec<usize>> {
        let mut all: Vec<usize> =
            (0..self.chunks.len()).filter(|number| wanted(&self.chunks[*number])).collect();
        all.sort_unstable_by_key(|number| self.chunks[*number].at);
        let (mut parts, mut bytes) = (Vec::<Vec<usize>>::new(), 0);
        for number in all {
            match parts.last_mut().filter(|_| bytes < size) {
                Some(part) => part.push(number),
                None => {
                    parts.push(vec![number]);
                    bytes = 0;
                }
            }
            bytes += self.chunks[number].size;
        }
        parts
    }

    /// The chunks that have something of a range of the file `number`.
    fn within(&self, number: u32, range: &Range<u64>) -> Range<usize> {
        let start = self.chunks.partition_point(|c| (c.file, c.end()) <= (number, range.start));
        let end = self.chunks.partition_point(|c| (c.file, c.offset) < (number, range.end));
        start..end.max(start)
    }

    /// The file of a chunk.
    fn pages(&self, chunk: &Chunk) -> Result<&Pages> {
        self.files.get(&chunk.file).ok_or_else(|| Error::new("there is no such pack"))
    }

    /// A chunk is in place. How many pages that adds: others may have brought it meanwhile.
    fn arrived(&self, number: usize) -> u64 {
        let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut here[number], true) {
            true => 0,
            false => self.chunks[number].pages,
        }
    }

    /// Those of these chunks that are not in place. What is in the file from earlier is looked
    /// at once: nobody has to note what is there. Its pages are added to `found`.
    fn missing(
        &self,
        chunks: impl IntoIterator<Item = usize>,
        found: &mut u64,
    ) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        let mut data = Vec::new();
        for number in chunks {
            if self.here.lock().unwrap_or_else(PoisonError::into_inner)[number] {
                continue;
            }
            let chunk = self.chunks[number];
            data.resize(usize::try_from(chunk.size).unwrap_or(0), 0);
            let file = &self.pages(&chunk)?.file;
            file.read_exact_at(&mut data, chunk.offset).context(|| "reading a pack")?;
            // Holes are zeros, which no cluster is, and hardly ever a sealed block.
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

impl Pages {
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
        let name = &self.cached;
        cache::forget(name);
        let text = format!(
            "the cache has something else at {offset} of the pack {name}, which another container needs"
        );
        Err(Error::new(text).hint("the pack is taken out of the cache: another start fetches it"))
    }
}

/// Whether there was no room for what was written.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// A file of pages beside the images, as long as it will be; the one that is `cached` by this name.
fn open(dir: &Path, number: u32, len: u64, cached: Option<&str>) -> Result<File> {
    let path = dir.join(kind::PAGES_PACKED.file_name(number.into()));
    let shown = || path.display().to_string();
    if let Some(name) = cached.filter(|_| !path.exists()) {
        cache::link(name, &path)?;
    }
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.context(shown)?;
    if file.metadata().context(shown)?.len() < len {
        file.set_len(len).context(shown)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use torpor_blobs::error::{Error as Failure, Result as Answer};
    use torpor_blobs::{Alone, Push};

    use super::*;

    /// A place that cannot be reached for some requests, and then has zeros only.
    #[derive(Debug, Default)]
    struct Restarted {
        absent_for: AtomicU64,
        asked: AtomicU64,
    }

    impl Store for Restarted {
        fn read(&self, _: &Descriptor, range: Range<u64>) -> Answer<Vec<u8>> {
            if self.asked.fetch_add(1, Ordering::Relaxed) < self.absent_for.load(Ordering::Relaxed)
            {
                return Err(Failure::new("nobody").absent());
            }
            Ok(vec![0; usize::try_from(range.end - range.start).unwrap()])
        }
        fn manifest(&self) -> Answer<Option<Vec<u8>>> {
            Ok(None)
        }
        fn has(&self, _: &Descriptor) -> Answer<bool> {
            Ok(true)
        }
        fn begin(&self) -> Answer<Box<dyn Push + '_>> {
            Ok(Box::new(Alone))
        }
        fn put(&self, _: &Descriptor, _: &mut File) -> Answer<()> {
            Ok(())
        }
        fn publish(&self, _: &[u8]) -> Answer<()> {
            Ok(())
        }
        fn names(&self) -> Answer<Vec<String>> {
            Ok(Vec::new())
        }
        fn remove(&self) -> Answer<bool> {
            Ok(false)
        }
        fn collect(&self) -> Answer<u64> {
            Ok(0)
        }
    }

    /// A pack of so many chunks of this size, of which every other one is needed first; it comes to `dir`.
    fn pack(dir: &Path, count: u64, size: u64) -> Pack {
        let sum = digest::digest(&SHA256, &vec![0; usize::try_from(size).unwrap()]);
        let chunk = |number: u64| Chunk {
            file: 1,
            offset: number * size,
            size,
            at: number * size,
            pages: 1,
            sum: sum.as_ref().try_into().unwrap(),
            is_first: number.is_multiple_of(2),
        };
        let blob = Descriptor {
            media_type: String::new(),
            digest: String::new(),
            size: u64::MAX,
            annotations: BTreeMap::new(),
        };
        let chunks = (0..count).map(chunk).collect();
        Pack::open(dir, Wanted { blob, chunks, cached: [(1, String::new())].into() }, false)
            .unwrap()
    }

    fn fetch<'s>(store: &'s Restarted, dir: &Path, pack: Pack) -> Fetch<'s> {
        Fetch {
            store,
            place: File::open(dir).unwrap(),
            packs: vec![pack],
            cached: false,
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            unforeseen: AtomicU64::new(0),
            notes: None,
            waits_with: None,
            is_full: AtomicBool::new(false),
        }
    }

    /// A registry that is started anew, and cannot be reached meanwhile, is no reason to end tasks that run.
    #[test]
    fn tasks_that_run_wait_for_a_place_that_is_started_anew() {
        let dir = tempfile::tempdir().unwrap();
        let store = Restarted { absent_for: 2.into(), ..Restarted::default() };
        let starting = fetch(&store, dir.path(), pack(dir.path(), 1, 4096));
        assert!(starting.want(1, &(0..1), 0).unwrap_err().to_string().contains("nobody"));
        let running = starting.waiting_with(dir.path().to_owned());
        running.want(1, &(0..1), 0).unwrap();
        assert!(running.has(1, &(0..4096)));
        assert_eq!(store.asked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn what_is_needed_first_comes_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        let store = Restarted::default();
        let fetch = fetch(&store, dir.path(), pack(dir.path(), 101, 64 << 10));
        fetch.working_set().unwrap();
        // 51 chunks of 64 KiB that are near to each other: a megabyte at a time.
        assert_eq!(store.asked.load(Ordering::Relaxed), 4);
        let has = |number: u64| fetch.has(1, &(number << 16..(number + 1) << 16));
        assert!((0..101).all(|number| has(number) == number.is_multiple_of(2)));
        let pack = &fetch.packs[0];
        let all = pack.parts(1 << 20, &|_| true);
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 5]);
        assert_eq!(all.concat(), (0..101).collect::<Vec<_>>());
    }

    #[test]
    fn what_another_container_needs_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let [cached, own, other] = ["cached", "own", "other"].map(|name| dir.path().join(name));
        fs::write(&cached, b"good\0\0\0\0").unwrap();
        fs::hard_link(&cached, &own).unwrap();
        let file = File::options().read(true).write(true).open(&own).unwrap();
        let pages = Pages { file, cached: "none-of-the-cache".to_owned() };
        // Nobody else needs it: it may be damaged.
        pages.check_place(0, b"evil").unwrap();
        fs::hard_link(&cached, &other).unwrap();
        let said = pages.check_place(0, b"evil").unwrap_err().to_string();
        assert!(said.contains("another container needs"), "{said}");
        pages.check_place(0, b"good").unwrap();
        pages.check_place(4, b"more").unwrap();
    }
}
