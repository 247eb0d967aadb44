//! A sealed checkpoint: what its files are sealed and opened with.

use std::collections::BTreeMap;
use std::io::{Read, Seek, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::{ClusterOpener, ClusterSealer};
use crate::error::Result;
use crate::header::Header;
use crate::kdf::Keys;
use crate::manifest::{Manifest, Sum};
use crate::page::{PageOpener, PageSealer, PagesFile, Removed, Run};
use crate::record::{RecordReader, RecordWriter};
use crate::secret::{MasterKey, random};
use crate::transit::{self, Transit};

/// A sealed checkpoint that is being written or read.
#[derive(Debug)]
pub struct Checkpoint {
    header: Header,
    keys: Keys,
    files: Mutex<BTreeMap<String, Sum>>,
    openers: Mutex<BTreeMap<String, Arc<PageOpener>>>,
    /// How long sealing and opening took, added up over all threads.
    pub times: Times,
}

/// How long the cipher worked on each kind of data.
#[derive(Debug, Default)]
pub struct Times {
    /// Entries and streams.
    pub records: Timer,
    /// Memory.
    pub pages: Timer,
    /// Comparing files with the manifest, and pages with their sum.
    pub verifying: Timer,
}

/// Adds up times, from any number of threads.
#[derive(Debug, Default)]
pub struct Timer(AtomicU64);

impl Timer {
    /// Runs `work` and adds the time that it takes.
    pub fn measure<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
        done
    }

    /// The sum.
    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

impl Checkpoint {
    /// The checkpoint with `header`, which must be authentic, and its key.
    #[must_use]
    pub fn new(header: Header, master: &MasterKey) -> Self {
        let keys = header.keys(master);
        let (files, openers) = (Mutex::default(), Mutex::default());
        Self { header, keys, files, openers, times: Times::default() }
    }

    /// What its `seal.img` says.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Starts to seal the file `name`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn writer<W: Write>(&self, name: &str, out: W) -> Result<RecordWriter<W>> {
        RecordWriter::new(&self.keys, self.header.cipher, name, out)
    }

    /// Starts to open the file `name`.
    ///
    /// # Errors
    /// If it is no sealed file, or another one.
    pub fn reader<R: Read + Seek>(&self, name: &str, source: R) -> Result<RecordReader<R>> {
        RecordReader::new(&self.keys, self.header.cipher, name, source)
    }

    /// Starts to seal a pages file.
    ///
    /// # Errors
    /// If there are no random bytes.
    pub fn page_sealer(&self, place: PagesFile<'_>) -> Result<PageSealer> {
        PageSealer::new(&self.keys, place)
    }

    /// Starts to open a pages file, or goes on doing so: all who read one file share
    /// what is known of it. See [`PageOpener::new`].
    ///
    /// # Errors
    /// If its tags do not fit it.
    pub fn page_opener(
        &self,
        place: PagesFile<'_>,
        runs: impl IntoIterator<Item = Run>,
        tags: (&[u8], u64),
        removed: &Removed,
    ) -> Result<Arc<PageOpener>> {
        let mut openers = lock(&self.openers);
        if let Some(known) = openers.get(place.name) {
            return Ok(Arc::clone(known));
        }
        let opener = Arc::new(PageOpener::new(&self.keys, place, runs, tags, removed)?);
        openers.insert(place.name.to_owned(), Arc::clone(&opener));
        Ok(opener)
    }

    /// Starts to seal a file of compressed memory.
    ///
    /// # Errors
    /// A suite that cannot; if there are no random bytes.
    pub fn cluster_sealer(&self, place: PagesFile<'_>) -> Result<ClusterSealer> {
        ClusterSealer::new(&self.keys, place)
    }

    /// Starts to open a file of compressed memory. See [`ClusterOpener::new`].
    ///
    /// # Errors
    /// A salt that is none.
    pub fn cluster_opener(
        &self,
        place: PagesFile<'_>,
        runs: impl IntoIterator<Item = Run>,
        salt: &[u8],
    ) -> Result<ClusterOpener> {
        ClusterOpener::new(&self.keys, place, runs, salt)
    }

    /// The end that pages of `page` bytes are sent from, over a connection that has had no
    /// other, and the salt that the other end has to be told.
    ///
    /// # Errors
    /// If there are no random bytes, or the cipher library refuses.
    pub fn send_pages(&self, page: usize) -> Result<(Transit, [u8; transit::SALT])> {
        let salt = random()?;
        Ok((self.receive_pages(page, &salt)?, salt))
    }

    /// The end that such pages are received at.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn receive_pages(&self, page: usize, salt: &[u8; transit::SALT]) -> Result<Transit> {
        Transit::new(&self.keys, self.header.cipher, salt, page)
    }

    /// The pages files that were opened.
    #[must_use]
    pub fn page_openers(&self) -> Vec<(String, Arc<PageOpener>)> {
        let openers = lock(&self.openers);
        openers.iter().map(|(name, opener)| (name.clone(), Arc::clone(opener))).collect()
    }

    /// Notes that the file `name` was written; it may have been written before.
    pub fn wrote(&self, name: &str, sum: Sum) {
        lock(&self.files).insert(name.to_owned(), sum);
    }

    /// Notes that the file `name` was removed.
    pub fn removed(&self, name: &str) {
        lock(&self.files).remove(name);
    }

    /// The manifest of all that was written.
    #[must_use]
    pub fn manifest(&self) -> Manifest {
        Manifest { files: lock(&self.files).clone(), ..Manifest::new(&self.header) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
