//! Pages files that are compressed: clusters of pages, and an index that finds them.
//!
//! `pages-packed-N.img` stands in place of `pages-N.img` where the pagemap's head says so. It
//! holds clusters of at most [`CLUSTER`] pages, one behind the other in whatever order
//! threads came to write them. `pages-index-N.img` says for stretches of pages, counted in
//! the order of the pagemap, where their clusters are. A cluster that does not become smaller
//! is stored as it is. If the checkpoint is sealed, clusters are sealed as they are stored,
//! and each is verified before it is decompressed.

use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use torpor_seal::checkpoint::Timer;
use torpor_seal::cluster::{Cluster as Sealing, ClusterOpener, ClusterSealer};
use torpor_seal::page::{Place, Run as PageRun, Span as SealSpan, TAG};
use torpor_seal::{Checkpoint, Sum};

use crate::compress::{Compression, Compressor, Decompressor, room};
use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::kind;
use crate::pagemap::{Pagemap, page_size};
use crate::pages::Body;
use crate::proto::{PackedEntry, PackedHead};
use crate::reader::Reader;
use crate::writer::Writer;

/// The version of the index.
const VERSION: u32 = 1;
/// How many pages a cluster has, if it is not the last of its stretch: what has to be read
/// to have one of them.
pub const CLUSTER: usize = 16;
/// How many pages a stretch of the index has at most.
const MAX_STRETCH: u32 = 1024;
/// How many pages a cluster may have that is read.
const MAX_CLUSTER: u32 = 64;

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
                    .cluster_sealer(Place { name: &name, owner, page: page() })
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
            Some(index) => index.entry(&PackedEntry { first, pages, offset, sizes, tags }),
            None => Ok(()),
        }
    }

    pub(crate) fn finish(&self) -> Result<()> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner).take();
        index.map_or(Ok(()), Writer::finish)?;
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

/// Where the clusters of a pages file are.
#[derive(Debug)]
pub struct Index {
    how: Compression,
    cluster: u64,
    salt: Vec<u8>,
    /// In the order of their pages, without a gap.
    stretches: Vec<PackedEntry>,
}

/// A cluster that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster<'i> {
    /// Its first page, counted in the order of the pagemap.
    pub first: u64,
    /// How many pages it has.
    pub pages: u64,
    /// Where it is stored.
    pub offset: u64,
    /// In how many bytes.
    pub size: u64,
    tag: &'i [u8],
}

impl Index {
    /// Reads the index of the pages of `map`.
    pub fn read(dir: &ImageDir, map: &Pagemap) -> Result<Self> {
        let id = map.pages_id.into();
        let path = dir.path().join(kind::PAGES_PACKED.file_name(id));
        let stored = dir.raw_file_open(kind::PAGES_PACKED, id)?;
        let len = stored.metadata().map_err(|error| Error::io(&path, "stat", error))?.len();
        let file = dir.path().join(kind::PAGES_INDEX.file_name(id));
        let mut reader = dir.reader(kind::PAGES_INDEX, id)?.ok_or(Error::Missing { file })?;
        Self::from_reader(&mut reader, map.present_bytes() / page_size(), len)
    }

    /// Reads an index up to the end of its file. It has to have each of `pages` pages once, in
    /// clusters that lie within the `len` bytes of what is stored.
    pub fn from_reader(reader: &mut Reader, pages: u64, len: u64) -> Result<Self> {
        let head: PackedHead = reader.expect()?;
        let invalid = |reader: &Reader, at, reason: String| Err(reader.invalid(at, reason));
        if head.version != VERSION {
            let reason = format!("version {} of compressed pages is not known", head.version);
            return invalid(reader, 0, reason);
        }
        let Some(how) = Compression::of_number(head.method) else {
            return invalid(reader, 0, format!("compression method {} is not known", head.method));
        };
        if !(1..=MAX_CLUSTER).contains(&head.cluster_pages) {
            return invalid(reader, 0, format!("clusters of {} pages", head.cluster_pages));
        }
        let mut stretches: Vec<PackedEntry> = Vec::new();
        loop {
            let offset = reader.offset();
            let Some(entry) = reader.next::<PackedEntry>()? else { break };
            if let Err(reason) = check(&entry, &head, len) {
                return invalid(reader, offset, reason);
            }
            stretches.push(entry);
        }
        stretches.sort_unstable_by_key(|stretch| stretch.first);
        let mut next = 0;
        for stretch in &stretches {
            if stretch.first != next {
                let reason = format!("page {} follows page {next}", stretch.first);
                return invalid(reader, reader.offset(), reason);
            }
            next += u64::from(stretch.pages);
        }
        if next != pages {
            let reason = format!("it has {next} pages, the pagemap has {pages}");
            return invalid(reader, reader.offset(), reason);
        }
        let salt = head.salt.unwrap_or_default();
        Ok(Self { how, cluster: head.cluster_pages.into(), salt, stretches })
    }

    /// The cluster of page `page`, if there is such a page.
    #[must_use]
    pub fn at(&self, page: u64) -> Option<Cluster<'_>> {
        let after = self.stretches.partition_point(|stretch| stretch.first <= page);
        let stretch = self.stretches.get(after.checked_sub(1)?)?;
        let number = usize::try_from((page - stretch.first) / self.cluster).ok()?;
        self.clusters_of(stretch).nth(number).filter(|found| page < found.first + found.pages)
    }

    /// All clusters, in the order of their pages.
    pub fn clusters(&self) -> impl Iterator<Item = Cluster<'_>> {
        self.stretches.iter().flat_map(|stretch| self.clusters_of(stretch))
    }

    fn clusters_of<'i>(
        &self,
        stretch: &'i PackedEntry,
    ) -> impl Iterator<Item = Cluster<'i>> + use<'i> {
        let cluster = self.cluster;
        let mut offset = stretch.offset;
        (0..).zip(&stretch.sizes).map(move |(number, &size)| {
            let skip: u64 = number * cluster;
            let at = offset;
            offset += u64::from(size);
            let tag = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(TAG);
            Cluster {
                first: stretch.first + skip,
                pages: cluster.min(u64::from(stretch.pages) - skip),
                offset: at,
                size: size.into(),
                tag: stretch.tags().get(tag..tag + TAG).unwrap_or_default(),
            }
        })
    }
}

/// What is wrong with a stretch by itself.
fn check(entry: &PackedEntry, head: &PackedHead, len: u64) -> Result<(), String> {
    let PackedEntry { first, pages, offset, ref sizes, .. } = *entry;
    if !(1..=MAX_STRETCH).contains(&pages) || first.checked_add(pages.into()).is_none() {
        return Err(format!("{pages} pages from page {first} on"));
    }
    if sizes.len() as u64 != u64::from(pages.div_ceil(head.cluster_pages)) {
        return Err(format!("{} clusters for {pages} pages", sizes.len()));
    }
    let mut left = pages;
    for &size in sizes {
        let here = left.min(head.cluster_pages);
        left -= here;
        if !(1..=u64::from(here) * page_size()).contains(&size.into()) {
            return Err(format!("a cluster of {here} pages in {size} bytes"));
        }
    }
    let end = offset.checked_add(sizes.iter().map(|&size| u64::from(size)).sum());
    if end.is_none_or(|end| end > len) {
        return Err(format!("clusters at {offset} lie behind the end of what is stored ({len})"));
    }
    Ok(())
}

/// A compressed pages file that is read, by any number of threads.
#[derive(Debug)]
pub(crate) struct PackedReader {
    index: Index,
    file: File,
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
    /// The number of the reader that `plain` is of, and the first page in it.
    of: Option<(u64, u64)>,
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
                let place = Place { name: &name, owner: map.owner, page: page() };
                let runs = map.runs.iter().filter(|run| run.present);
                let runs = runs.map(|run| (run.vaddr, run.pages));
                let opener = checkpoint
                    .cluster_opener(place, runs, &index.salt)
                    .map_err(|source| dir.unsealed(source))?;
                Some((Arc::clone(checkpoint), opener))
            }
        };
        let file = dir.open_file(&name)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Ok(Self { index, file, path: dir.path().join(name), number, seal })
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
                if len == cluster.len() {
                    self.unpack(&cluster, unpacker.parts(), part)?;
                } else {
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
        let of = Some((self.number, cluster.first));
        if unpacker.of != of {
            unpacker.of = None;
            let mut plain = std::mem::take(&mut unpacker.plain);
            plain.resize(cluster.len(), 0);
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
            Error::Invalid { file: self.path.clone(), offset: cluster.offset, reason }
        })
    }

    /// Reads and verifies a cluster as it is stored.
    fn fetch(&self, cluster: &Cluster<'_>, stored: &mut [u8]) -> Result<()> {
        let failed = |error| Error::io(&self.path, "read", error);
        self.file.read_exact_at(stored, cluster.offset).map_err(failed)?;
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

impl Cluster<'_> {
    /// The bytes of its pages.
    fn len(&self) -> usize {
        usize::try_from(self.pages).unwrap_or(usize::MAX).saturating_mul(page())
    }

    /// The bytes that its pages would take in a file that is not compressed.
    #[must_use]
    pub fn plain(&self) -> Range<u64> {
        let first = self.first * page_size();
        first..first + self.pages * page_size()
    }

    /// The bytes that it is stored in.
    #[must_use]
    pub fn stored(&self) -> Range<u64> {
        self.offset..self.offset + self.size
    }
}
