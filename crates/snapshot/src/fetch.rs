//! Bringing the packs of a snapshot to this machine: a part at a time, each verified before
//! anybody sees it.

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
use torpor_images::ImageDir;
use torpor_worker::tell;

use crate::cache::Names;
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::events::Notes;
use crate::patience::patiently;
use crate::progress::{self, size};
use crate::stored::{extent, strip};
use crate::{cache, interrupt, sealed_pack};

mod pack;
mod wanted;

use pack::ComingPack;
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

/// How long somebody waits for what others bring already, before he asks for it himself: about as long as that takes on a fast
/// network.
const SOON: Duration = Duration::from_millis(5);
/// So many waits for what is not of the working set show that it is larger than was expected.
const SURPRISES: u64 = 32;
/// How often it is looked whether a full disk has room again.
const GLANCE: Duration = Duration::from_secs(1);

/// The packs of a snapshot, on their way here.
#[derive(Debug)]
pub struct Fetch<'s> {
    store: &'s dyn Store,
    /// The directory of the images.
    place: File,
    packs: Vec<ComingPack>,
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
    /// there; into the cache as well, if they are `cached` under these names.
    ///
    /// # Errors
    /// Damaged images; no place.
    pub fn new(
        store: &'s dyn Store,
        (description, manifest): (&Description, &Manifest),
        dir: &Path,
        cached: Option<&Names>,
    ) -> Result<Self> {
        let place = File::open(dir).context(|| dir.display().to_string())?;
        let wanted = match description.sealed {
            true => sealed_pack::wanted(description, manifest, dir, cached.is_some())?,
            false => wanted::wanted(description, manifest, &ImageDir::open(dir)?, cached)?,
        };
        let packs = wanted.into_iter().map(|wanted| ComingPack::open(dir, wanted));
        let packs = packs.collect::<Result<Vec<_>>>()?;
        let (requests, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self {
            store,
            place,
            packs,
            cached: cached.is_some(),
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
    pub(crate) fn waiting_with(mut self, alive: PathBuf) -> Self {
        self.waits_with = Some(alive);
        self
    }

    /// Fails if the disk has no room for what is not here yet. Packs of the cache that nobody needs make room.
    ///
    /// # Errors
    /// If the disk has not enough room: how much is missing. If the packs or the disk cannot be looked at.
    pub(crate) fn check_room(&self) -> Result<()> {
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
    fn pack_of(&self, number: u32) -> Option<&ComingPack> {
        self.packs.iter().find(|pack| pack.files.contains_key(&number))
    }

    /// Waits until `range` of the file `number` has been brought in, for so long at most; whether there is nothing to wait
    /// for any more.
    #[must_use]
    pub fn comes(&self, number: u32, range: &Range<u64>, time: Duration) -> bool {
        self.pack_of(number).is_none_or(|pack| pack.comes(pack.within(number, range), time))
    }

    /// Whether more is needed than was expected, so that pieces of [`SMALL`] are too small.
    #[must_use]
    pub(crate) fn is_surprised(&self) -> bool {
        self.unforeseen.load(Ordering::Relaxed) > SURPRISES
    }

    /// Writes down that somebody waits for a part of the file `number`.
    pub(crate) fn note_asked(&self, number: u32, range: &Range<u64>) {
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
        self.want_after(SOON, (number, range), more)
    }

    /// The same; what others bring already is waited for, so long at most.
    fn want_after(
        &self,
        patience: Duration,
        (number, range): (u32, &Range<u64>),
        more: u64,
    ) -> Result<()> {
        let pack = self.pack_of(number).ok_or_else(|| Error::new("there is no such pack"))?;
        let wanted = pack.within(number, range);
        let missing = self.missing(pack, wanted.clone())?;
        let Some(first) = missing.first() else { return Ok(()) };
        if missing.iter().all(|chunk| pack.is_coming(*chunk))
            && pack.comes(wanted.clone(), patience)
        {
            return Ok(());
        }
        let end = range.end.max(range.start.saturating_add(more));
        let with_more = *first..pack.within(number, &(range.start..end)).end;
        let mut missing = self.missing(pack, with_more)?;
        // Behind what is waited for others bring what they have asked for.
        let is_brought = |chunk: &usize| *chunk >= wanted.end && pack.is_coming(*chunk);
        missing.truncate(missing.iter().position(is_brought).unwrap_or(missing.len()));
        self.bring(pack, missing)
    }

    /// Those of these chunks that are not in place; what is there from earlier is written down.
    fn missing(
        &self,
        pack: &ComingPack,
        chunks: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<usize>> {
        let mut found = 0;
        let missing = pack.missing(chunks, &mut found)?;
        self.note_came(found);
        Ok(missing)
    }

    /// Brings chunks in, those that are near to each other in the archive by one request.
    fn bring(&self, pack: &ComingPack, mut missing: Vec<usize>) -> Result<()> {
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

    fn bring_together(&self, pack: &ComingPack, numbers: &[usize]) -> Result<()> {
        let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { return Ok(()) };
        let part = pack.chunks[*first].at..pack.chunks[*last].range().end;
        let _coming = pack.expect(numbers);
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
        work: &(dyn Fn(&ComingPack, &[usize]) -> Result<()> + Sync),
    ) -> Result<()> {
        let parts = self.packs.iter().flat_map(|pack| {
            pack.parts(size, wanted).into_iter().map(move |numbers| (pack, numbers))
        });
        let parts: Vec<(&ComingPack, Vec<usize>)> = parts.collect();
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

/// Whether there was no room for what was written.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use torpor_blobs::error::{Error as Failure, Result as Answer};
    use torpor_blobs::{Alone, Push};

    use super::*;

    /// A place that cannot be reached for some requests, and then has zeros only. The first of all it tells of, and answers
    /// when it is told to, if there is somebody to talk to.
    #[derive(Debug, Default)]
    struct Restarted {
        absent_for: AtomicU64,
        asked: AtomicU64,
        held: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    }

    impl Store for Restarted {
        fn read(&self, _: &Descriptor, range: Range<u64>) -> Answer<Vec<u8>> {
            if self.asked.fetch_add(1, Ordering::Relaxed) < self.absent_for.load(Ordering::Relaxed)
            {
                return Err(Failure::new("nobody").absent());
            }
            let held = self.held.lock().unwrap().take();
            if let Some((asked, goes)) = held {
                asked.send(()).unwrap();
                goes.recv().unwrap();
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
    fn pack(dir: &Path, count: u64, size: u64) -> ComingPack {
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
        ComingPack::open(dir, Wanted { blob, chunks, cached: [(1, None)].into() }).unwrap()
    }

    fn fetch<'s>(store: &'s Restarted, dir: &Path, pack: ComingPack) -> Fetch<'s> {
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
        assert!(running.comes(1, &(0..4096), Duration::ZERO));
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
        let has = |n: u64| fetch.comes(1, &(n << 16..(n + 1) << 16), Duration::ZERO);
        assert!((0..101).all(|number| has(number) == number.is_multiple_of(2)));
        let pack = &fetch.packs[0];
        let all = pack.parts(1 << 20, &|_| true);
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 16, 16, 16, 16, 5]);
        assert_eq!(all.concat(), (0..101).collect::<Vec<_>>());
    }

    /// Who waits for a part hears when it comes, and does not look from time to time.
    #[test]
    fn who_waits_for_a_part_hears_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Restarted::default();
        let fetch = fetch(&store, dir.path(), pack(dir.path(), 1, 4096));
        let long = Duration::from_secs(3600);
        thread::scope(|scope| {
            let waits = scope.spawn(|| fetch.comes(1, &(0..4096), long));
            fetch.want(1, &(0..4096), 0).unwrap();
            assert!(waits.join().unwrap());
        });
        assert!(fetch.comes(2, &(0..4096), long), "no such pack ever comes");
    }

    /// What is on its way already is not asked for once more.
    #[test]
    fn what_others_bring_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let ((asked, was_asked), (go, goes)) = (channel(), channel());
        let held = Mutex::new(Some((asked, goes)));
        let store = Restarted { held, ..Restarted::default() };
        let fetch = fetch(&store, dir.path(), pack(dir.path(), 5, 4096));
        let (long, chunk) = (Duration::from_secs(3600), |n: u64| n * 4096..(n + 1) * 4096);
        // Whatever fails in there, nobody waits for the end of it.
        thread::scope(|scope| {
            let go = go;
            let first = scope.spawn(|| fetch.working_set());
            was_asked.recv().unwrap();
            // Nobody brings this one, and what lies behind it others do.
            fetch.want(1, &chunk(1), SMALL).unwrap();
            assert_eq!((fetch.traffic().0, fetch.comes(1, &chunk(1), Duration::ZERO)), (1, true));
            assert!(
                !fetch.comes(1, &chunk(2), Duration::ZERO)
                    && !fetch.comes(1, &chunk(3), Duration::ZERO)
            );
            let waits = scope.spawn(|| fetch.want_after(long, (1, &chunk(2)), 0));
            // It may begin to wait now.
            thread::sleep(Duration::from_millis(50));
            go.send(()).unwrap();
            waits.join().unwrap().unwrap();
            first.join().unwrap().unwrap();
        });
        assert_eq!(store.asked.load(Ordering::Relaxed), 2);
        // What has been there for long, or comes from nobody, is asked for at once.
        fetch.want_after(long, (1, &chunk(3)), 0).unwrap();
        assert_eq!(store.asked.load(Ordering::Relaxed), 3);
    }
}
