//! Pages files that are compressed: clusters of pages, and an index that finds them.
//!
//! `pages-packed-N.img` stands in place of `pages-N.img` where the pagemap's head says so. It
//! holds clusters of at most [`CLUSTER`] pages, one behind the other in whatever order
//! threads came to write them. `pages-index-N.img` says for stretches of pages, counted in
//! the order of the pagemap, where their clusters are. A cluster that does not become smaller
//! is stored as it is. An index of gathered pages has clusters in other such files, too, with
//! their digests ([`GATHERED`]). If the checkpoint is sealed, clusters are sealed as they are stored,
//! and each is verified before it is decompressed.

mod index;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use torpor_seal::checkpoint::Timer;
use torpor_seal::cluster::{Cluster as Sealing, ClusterOpener, ClusterSealer};
use torpor_seal::page::{PagesFile, Run as PageRun, Span as SealSpan};
use torpor_seal::{Checkpoint, Sum};

use crate::compress::{Compression, Compressor, Decompressor, room};
use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::kind;
use crate::pagemap::{Pagemap, page_size};
use crate::pages::Body;
use crate::proto::{PackedEntry, PackedHead};
use crate::writer::Writer;

pub use self::index::{Cluster, GATHERED, Index};

/// The version of the index of a dump.
const VERSION: u32 = 1;
/// How many pages a cluster has, if it is not the last of its stretch: what has to be read
/// to have one of them.
pub const CLUSTER: usize = 16;

/// The size of a page in memory.
fn page() -> usize {
    usize::try_from(page_size()).unwrap_or(4096)
}

/// Room for what is compressed; each thread that writes has its own.
#[derive(Debug, Default)]
pub struct Packer {
    compressor: Compressor,
    out: Vec<u8>,
}

impl Packer {
    /// Compresses `data`; returns the sizes of its clusters of [`CLUSTER`] pages, and what they
    /// hold, one behind the other. One that does not become smaller is as it was.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn pack(
        &mut self,
        how: Compression,
        data: &[u8],
    ) -> std::io::Result<(Vec<u32>, &mut [u8])> {
        let mut sizes = Vec::new();
        let mut end = 0;
        for plain in data.chunks(CLUSTER * page()) {
            let need = end + room(plain.len());
            if self.out.len() < need {
                self.out.resize(need, 0);
            }
            let place = &mut self.out[end..need];
            let mut len = self.compressor.compress(how, plain, place)?;
            if len >= plain.len() {
                len = plain.len();
                place[..len].copy_from_slice(plain);
            }
            end += len;
            sizes.push(u32::try_from(len).map_err(std::io::Error::other)?);
        }
        Ok((sizes, &mut self.out[..end]))
    }
}

/// How much memory was compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Bytes before.
    pub from: u64,
    /// Bytes after.
    pub to: u64,
    /// How long it took, added up over all threads.
    pub time: Duration,
}

impl std::ops::AddAssign for Packed {
    fn add_assign(&mut self, other: Self) {
        self.from += other.from;
        self.to += other.to;
        self.time += other.time;
    }
}

/// A compressed pages file that is written, by any number of threads.
#[derive(Debug)]
pub(crate) struct PackedWriter {
    how: Compression,
    id: u32,
    body: Body,
    path: PathBuf,
    /// Gone when it is finished.
    index: Mutex<Option<Writer>>,
    from: AtomicU64,
    to: AtomicU64,
    time: Timer,
    seal: Option<(Arc<Checkpoint>, ClusterSealer)>,
}

impl PackedWriter {
    /// The memory of `owner` goes to `body`, which has the number `id`.
    pub(crate) fn create(
        dir: &ImageDir,
        body: Body,
        (id, owner): (u32, u64),
        how: Compression,
    ) -> Result<Self> {
        let name = kind::PAGES_PACKED.file_name(id.into());
        let seal = match dir.seal_ref() {
            None => None,
            Some(checkpoint) => {
                let sealer = checkpoint
                    .cluster_sealer(PagesFile { name: &name, owner, page: page() })
                    .map_err(|source| dir.unsealed(source))?;
                Some((Arc::clone(checkpoint), sealer))
            }
        };
        let mut index = dir.writer(kind::PAGES_INDEX, id.into())?;
        index.entry(&PackedHead {
            version: VERSION,
            method: how.number(),
            cluster_pages: u32::try_from(CLUSTER).unwrap_or(u32::MAX),
            salt: seal.as_ref().map(|(_, sealer)| sealer.salt().to_vec()),
        })?;
        Ok(Self {
            how,
            id,
            body,
            path: dir.path().join(name),
            index: Mutex::new(Some(index)),
            from: AtomicU64::new(0),
            to: AtomicU64::new(0),
            time: Timer::default(),
            seal,
        })
    }

    pub(crate) fn span(&self, pages: u64) -> Option<SealSpan> {
        self.seal.as_ref().map(|(_, sealer)| sealer.span(pages))
    }

    /// Writes the pages of `runs`, the first of which is page `first` of all.
    pub(crate) fn write(
        &self,
        first: u64,
        span: Option<&SealSpan>,
        runs: &[PageRun],
        data: &[u8],
        packer: &mut Packer,
    ) -> Result<()> {
        let failed = |error| Error::io(&self.path, "write", error);
        let (sizes, stored) = self.time.measure(|| packer.pack(self.how, data)).map_err(failed)?;
        let len = stored.len() as u64;
        let pages = data.len() / page();
        let tags = match (&self.seal, span) {
            (Some((checkpoint, sealer)), Some(span)) => {
                let clusters = cut(&mut *stored, &sizes, pages);
                let sealed = checkpoint.times.pages.measure(|| sealer.seal(span, runs, clusters));
                Some(sealed.map_err(|source| Error::Seal { dir: self.path.clone(), source })?)
            }
            _ => None,
        };
        let offset = self.to.fetch_add(len, Ordering::Relaxed);
        self.from.fetch_add(data.len() as u64, Ordering::Relaxed);
        self.body.write_all_at(stored, offset).map_err(failed)?;
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *index {
            Some(index) => {
                let plain = PackedEntry::default();
                index.entry(&PackedEntry { first, pages, offset, sizes, tags, ..plain })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn finish(&self, dir: &ImageDir) -> Result<()> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner).take();
        index.map_or(Ok(()), Writer::finish)?;
        if let (Some(sums), Body::Here(file)) = (dir.page_sums(), &self.body) {
            // Clusters begin anywhere in a block.
            let failed = |error| Error::io(&self.path, "read", error);
            sums.add_file(self.id, file).map_err(failed)?;
        }
        if let Some((checkpoint, _)) = &self.seal {
            let len = self.to.load(Ordering::Relaxed);
            let name = kind::PAGES_PACKED.file_name(self.id.into());
            checkpoint.wrote(&name, Sum { len, sha256: None });
        }
        Ok(())
    }

    pub(crate) fn packed(&self) -> Packed {
        Packed {
            from: self.from.load(Ordering::Relaxed),
            to: self.to.load(Ordering::Relaxed),
            time: self.time.total(),
        }
    }
}

/// Cuts what is stored into the clusters of these sizes.
fn cut<'d>(
    mut stored: &'d mut [u8],
    sizes: &[u32],
    mut pages: usize,
) -> impl Iterator<Item = Sealing<'d>> {
    sizes.iter().map(move |&size| {
        let size = usize::try_from(size).unwrap_or(usize::MAX).min(stored.len());
        let (data, rest) = std::mem::take(&mut stored).split_at_mut(size);
        stored = rest;
        let here = pages.min(CLUSTER);
        pages -= here;
        Sealing { pages: here, data }
    })
}

/// A compressed pages file that is read, by any number of threads.
#[derive(Debug)]
pub(crate) struct PackedReader {
    index: Index,
    /// By the number of the pack, which is none for the file of the pagemap.
    files: BTreeMap<Option<u32>, (File, PathBuf)>,
    feed: Option<Feed>,
    pages_id: u32,
    path: PathBuf,
    /// Tells it from all others of this process.
    number: u64,
    seal: Option<(Arc<Checkpoint>, ClusterOpener)>,
}

/// What a thread needs to read, with the cluster that it read last: pages that are read one
/// by one are often of the same.
#[derive(Default)]
struct Unpacker {
    decompressor: Decompressor,
    stored: Vec<u8>,
    plain: Vec<u8>,
    /// The number of the reader that `plain` is of, and where the cluster is.
    of: Option<(u64, Option<u32>, u64)>,
}

thread_local! {
    static UNPACKER: RefCell<Unpacker> = RefCell::default();
}

impl PackedReader {
    pub(crate) fn open(dir: &ImageDir, map: &Pagemap) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let index = Index::read(dir, map)?;
        let name = kind::PAGES_PACKED.file_name(map.pages_id.into());
        let seal = match dir.seal_ref() {
            None => None,
            Some(checkpoint) => {
                let place = PagesFile { name: &name, owner: map.owner, page: page() };
                let runs = map.runs.iter().filter(|run| run.present);
                let runs = runs.map(|run| (run.vaddr, run.pages));
                let opener = checkpoint
                    .cluster_opener(place, runs, &index.salt)
                    .map_err(|source| dir.unsealed(source))?;
                Some((Arc::clone(checkpoint), opener))
            }
        };
        let packs = index.packs();
        let mut files = BTreeMap::new();
        match dir.open_file(&name) {
            Ok(file) => drop(files.insert(None, (file, dir.path().join(&name)))),
            // Others have all of it.
            Err(error) if error.is_missing() && !packs.is_empty() => {}
            Err(error) => return Err(error),
        }
        for pack in packs {
            let name = kind::PAGES_PACKED.file_name(pack.into());
            files.insert(Some(pack), (dir.open_file(&name)?, dir.path().join(name)));
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let feed = Feed::of(dir)?;
        let pages_id = map.pages_id;
        Ok(Self { index, files, feed, pages_id, path: dir.path().join(name), number, seal })
    }

    /// Reads what would stand at `offset` if nothing were compressed.
    pub(crate) fn read_exact_at(&self, data: &mut [u8], offset: u64) -> Result<()> {
        UNPACKER.with_borrow_mut(|unpacker| {
            let mut data = data;
            let mut at = offset;
            while !data.is_empty() {
                let cluster = self.index.at(at / page_size()).ok_or_else(|| {
                    let left = 0;
                    let (file, what) = (self.path.clone(), "pages");
                    Error::Truncated { file, offset: at, what, wanted: data.len() as u64, left }
                })?;
                let skip = usize::try_from(at - cluster.first * page_size()).unwrap_or(usize::MAX);
                let len = cluster.len().saturating_sub(skip).min(data.len());
                let (part, rest) = data.split_at_mut(len);
                if len == cluster.whole_len() {
                    self.unpack(&cluster, unpacker.parts(), part)?;
                } else {
                    let skip = skip + cluster.skipped();
                    part.copy_from_slice(&self.whole(&cluster, unpacker)?[skip..skip + len]);
                }
                data = rest;
                at += len as u64;
            }
            Ok(())
        })
    }

    /// All pages of a cluster.
    fn whole<'u>(&self, cluster: &Cluster<'_>, unpacker: &'u mut Unpacker) -> Result<&'u [u8]> {
        let of = Some((self.number, cluster.pack, cluster.offset));
        if unpacker.of != of {
            unpacker.of = None;
            let mut plain = std::mem::take(&mut unpacker.plain);
            plain.resize(cluster.whole_len(), 0);
            let done = self.unpack(cluster, unpacker.parts(), &mut plain);
            unpacker.plain = plain;
            done?;
            unpacker.of = of;
        }
        Ok(&unpacker.plain)
    }

    /// Reads, verifies and decompresses a cluster, whose pages fill `plain`.
    fn unpack(
        &self,
        cluster: &Cluster<'_>,
        (decompressor, stored): (&mut Decompressor, &mut Vec<u8>),
        plain: &mut [u8],
    ) -> Result<()> {
        let size = usize::try_from(cluster.size).unwrap_or(usize::MAX);
        if size == plain.len() {
            return self.fetch(cluster, plain);
        }
        stored.resize(size, 0);
        self.fetch(cluster, stored)?;
        decompressor.decompress(self.index.how, stored, plain).map_err(|reason| {
            let reason = format!("the cluster of page {}: {reason}", cluster.first);
            let file = self.file(cluster).map_or(&self.path, |(_, path)| path).clone();
            Error::Invalid { file, offset: cluster.offset, reason }
        })
    }

    /// What is fetched at once with what would stand at `offset`, if somebody fetches what is read: its cluster.
    pub(crate) fn fed_piece(&self, offset: u64) -> Option<Range<u64>> {
        let cluster = self.feed.as_ref().and_then(|_| self.index.at(offset / page_size()))?;
        let pages = cluster.first..cluster.first + cluster.pages;
        Some(pages.start * page_size()..pages.end * page_size())
    }

    fn file(&self, cluster: &Cluster<'_>) -> Result<&(File, PathBuf)> {
        self.files.get(&cluster.pack).ok_or_else(|| Error::Missing { file: self.path.clone() })
    }

    /// Reads and verifies a cluster as it is stored.
    fn fetch(&self, cluster: &Cluster<'_>, stored: &mut [u8]) -> Result<()> {
        let (file, path) = self.file(cluster)?;
        let failed = |error| Error::io(path, "read", error);
        if let Some(feed) = &self.feed {
            let id = cluster.pack.unwrap_or(self.pages_id);
            feed.want(id, cluster.offset, cluster.size).map_err(failed)?;
        }
        file.read_exact_at(stored, cluster.offset).map_err(failed)?;
        if !cluster.sum.is_empty() && digest::digest(&SHA256, stored).as_ref() != cluster.sum {
            let reason = format!("the cluster of page {} is not what it was", cluster.first);
            return Err(Error::Invalid { file: path.clone(), offset: cluster.offset, reason });
        }
        let Some((checkpoint, opener)) = &self.seal else { return Ok(()) };
        let pages = usize::try_from(cluster.pages).unwrap_or(usize::MAX);
        let (first, offset) = (cluster.first, cluster.offset);
        let open = || opener.open(first, pages, stored, cluster.tag, offset);
        let opened = checkpoint.times.pages.measure(open);
        opened.map_err(|source| Error::Seal { dir: self.path.clone(), source })
    }
}

impl Unpacker {
    fn parts(&mut self) -> (&mut Decompressor, &mut Vec<u8>) {
        (&mut self.decompressor, &mut self.stored)
    }
}
