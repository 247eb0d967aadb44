//! Pages files: plain or compressed ([`crate::packed`]), and each of them sealed or not.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use torpor_seal::page::{self, PageOpener, PageSealer, PagesFile, Removed, TAG, xor};
use torpor_seal::{Checkpoint, Sum};

use crate::compress::Compression;
use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::holes;
use crate::kind::{self, Kind};
use crate::packed::{CLUSTER, Packed, PackedReader, PackedWriter, Packer};
use crate::page_sums::PageSums;
use crate::pagemap::{Pagemap, page_size};

/// The name of the file with the tags of `pages-ID.img`.
#[must_use]
fn tags_name(id: u32) -> String {
    format!("pages-tags-{id}.img")
}

/// Takes what is stored of pages, sealed or compressed as they may be, to where it is kept
/// instead of beside the other images; from any number of threads.
pub trait Depot: std::fmt::Debug + Send + Sync {
    /// Writes a part of the file of `kind` ([`kind::PAGES`] or [`kind::PAGES_PACKED`]) with
    /// the number `id`.
    ///
    /// # Errors
    /// If it cannot be taken there.
    fn write_all_at(&self, kind: Kind, id: u32, data: &[u8], offset: u64) -> std::io::Result<()>;
}

/// Where the bytes of a pages file go.
#[derive(Debug)]
pub(crate) enum Body {
    Here(File),
    There(Arc<dyn Depot>, Kind, u32),
}

impl Body {
    /// A file in `dir`, or in the depot if there is one.
    pub(crate) fn create(
        dir: &ImageDir,
        kind: Kind,
        id: u32,
        depot: Option<Arc<dyn Depot>>,
    ) -> Result<Self> {
        Ok(match depot {
            None => Self::Here(dir.create_file(&kind.file_name(id.into()))?),
            Some(depot) => {
                // An empty file is one as well.
                let made = depot.write_all_at(kind, id, &[], 0);
                let path = || dir.path().join(kind.file_name(id.into()));
                made.map_err(|error| Error::io(&path(), "create", error))?;
                Self::There(depot, kind, id)
            }
        })
    }

    pub(crate) fn write_all_at(&self, data: &[u8], offset: u64) -> std::io::Result<()> {
        match self {
            Self::Here(file) => file.write_all_at(data, offset),
            Self::There(depot, kind, id) => depot.write_all_at(*kind, *id, data, offset),
        }
    }
}

/// A pages file that is written, by any number of threads.
#[derive(Debug)]
pub struct PagesWriter {
    next: AtomicU64,
    to: To,
}

#[derive(Debug)]
enum To {
    Plain(Box<PlainWriter>),
    Packed(Box<PackedWriter>),
}

/// A pages file with each page in its place.
#[derive(Debug)]
struct PlainWriter {
    body: Body,
    path: PathBuf,
    id: u32,
    seal: Option<Seal>,
    sums: Option<Arc<PageSums>>,
}

#[derive(Debug)]
struct Seal {
    checkpoint: Arc<Checkpoint>,
    sealer: PageSealer,
    tags: File,
}

/// A stretch of a pages file that is written once.
#[derive(Debug)]
pub struct Span {
    offset: u64,
    sealed: Option<page::Span>,
}

impl PagesWriter {
    /// Creates `pages-ID.img`, or what stands for it if it is compressed, for the memory of
    /// `owner`: the id of its pagemap. What proves or finds its pages is written to `dir` even
    /// if they go to a depot.
    pub fn create(
        dir: &ImageDir,
        id: u32,
        owner: u64,
        compression: Option<Compression>,
        depot: Option<Arc<dyn Depot>>,
    ) -> Result<Self> {
        // What an earlier dump left in the other form would be taken for part of this one.
        let forms = [kind::PAGES, kind::PAGES_PACKED, kind::PAGES_INDEX, kind::PAGES_HOLES];
        forms.iter().try_for_each(|form| dir.remove(&form.file_name(id.into())))?;
        dir.remove(&tags_name(id))?;
        dir.page_sums().iter().for_each(|sums| sums.begin(id));
        let to = match compression {
            None => To::Plain(Box::new(PlainWriter::create(dir, id, owner, depot)?)),
            Some(how) => {
                let body = Body::create(dir, kind::PAGES_PACKED, id, depot)?;
                To::Packed(Box::new(PackedWriter::create(dir, body, (id, owner), how)?))
            }
        };
        Ok(Self { next: AtomicU64::new(0), to })
    }

    /// The next `pages` places of the file.
    pub fn span(&self, pages: u64) -> Span {
        let offset = self.next.fetch_add(pages * page_size(), Ordering::Relaxed);
        let sealed = match &self.to {
            To::Plain(plain) => plain.seal.as_ref().map(|seal| seal.sealer.span(pages)),
            To::Packed(packed) => packed.span(pages),
        };
        Span { offset, sealed }
    }

    /// Writes the pages of `runs` (their addresses, and how many) to `span`. If the
    /// checkpoint is sealed, they are sealed in `data` first, unless they are compressed.
    pub fn write(
        &self,
        span: &Span,
        runs: &[page::Run],
        data: &mut [u8],
        packer: &mut Packer,
    ) -> Result<()> {
        match &self.to {
            To::Plain(plain) => plain.write(span, runs, data),
            To::Packed(packed) => {
                let first = span.offset / page_size();
                packed.write(first, span.sealed.as_ref(), runs, data, packer)
            }
        }
    }

    /// Completes the file when all spans are written.
    pub fn finish(&self, dir: &ImageDir) -> Result<()> {
        match &self.to {
            To::Plain(plain) => plain.finish(dir, self.next.load(Ordering::Relaxed)),
            To::Packed(packed) => packed.finish(dir),
        }
    }

    /// What compressing has made of the pages so far, if they are compressed.
    #[must_use]
    pub fn packed(&self) -> Option<Packed> {
        match &self.to {
            To::Plain(_) => None,
            To::Packed(packed) => Some(packed.packed()),
        }
    }
}

impl PlainWriter {
    fn create(dir: &ImageDir, id: u32, owner: u64, depot: Option<Arc<dyn Depot>>) -> Result<Self> {
        let name = kind::PAGES.file_name(id.into());
        let body = Body::create(dir, kind::PAGES, id, depot)?;
        let seal = match dir.seal_ref() {
            None => None,
            Some(checkpoint) => {
                let page = usize::try_from(page_size()).unwrap_or(4096);
                let sealer = checkpoint
                    .page_sealer(PagesFile { name: &name, owner, page })
                    .map_err(|source| dir.unsealed(source))?;
                let tags_name = tags_name(id);
                let tags = dir.create_file(&tags_name)?;
                tags.write_all_at(sealer.head(), 0)
                    .map_err(|error| Error::io(&dir.path().join(tags_name), "write", error))?;
                Some(Seal { checkpoint: Arc::clone(checkpoint), sealer, tags })
            }
        };
        let sums = dir.page_sums().map(Arc::clone);
        Ok(Self { body, path: dir.path().join(name), id, seal, sums })
    }

    fn write(&self, span: &Span, runs: &[page::Run], data: &mut [u8]) -> Result<()> {
        let failed = |error| Error::io(&self.path, "write", error);
        if let (Some(seal), Some(span)) = (&self.seal, &span.sealed) {
            let pages = &seal.checkpoint.times.pages;
            let tags = pages
                .measure(|| seal.sealer.seal(span, runs, data))
                .map_err(|source| Error::Seal { dir: self.path.clone(), source })?;
            seal.tags.write_all_at(&tags, page::tag_offset(span.first())).map_err(failed)?;
        }
        if let Some(sums) = &self.sums {
            sums.add(self.id, span.offset, data).map_err(failed)?;
        }
        self.body.write_all_at(data, span.offset).map_err(failed)
    }

    fn finish(&self, dir: &ImageDir, len: u64) -> Result<()> {
        let Some(Seal { checkpoint, sealer, tags }) = &self.seal else { return Ok(()) };
        if let Some(sum) = sealer.sum() {
            let failed = |error| Error::io(&self.path, "write", error);
            tags.write_all_at(&sum, page::tag_offset(0)).map_err(failed)?;
        }
        let name = tags_name(self.id);
        checkpoint.wrote(&name, dir.sum_of(&name, true)?);
        checkpoint.wrote(&kind::PAGES.file_name(self.id.into()), Sum { len, sha256: None });
        Ok(())
    }
}

/// A pages file that is read, by any number of threads.
#[derive(Debug)]
pub struct PagesReader(From);

#[derive(Debug)]
enum From {
    Plain(PlainReader),
    Packed(Box<PackedReader>),
}

impl PagesReader {
    /// Opens the pages file of `map`.
    pub fn open(dir: &ImageDir, map: &Pagemap) -> Result<Self> {
        Ok(Self(if map.packed {
            From::Packed(Box::new(PackedReader::open(dir, map)?))
        } else {
            From::Plain(PlainReader::open(dir, map)?)
        }))
    }

    /// Whether a page that was read is known to be the one that was sealed, and not only
    /// when all have been.
    #[must_use]
    pub fn verifies_each(&self) -> bool {
        match &self.0 {
            From::Plain(PlainReader { seal: Some((_, opener, _)), .. }) => opener.needs_tags(),
            From::Plain(_) | From::Packed(_) => true,
        }
    }

    /// Where that begins and ends which is read at once with what stands at `offset`, if pages may have to be
    /// fetched from elsewhere when they are read ([`crate::feed`]).
    #[must_use]
    pub fn fed_piece(&self, offset: u64) -> Option<Range<u64>> {
        match &self.0 {
            From::Plain(plain) => plain.fed_piece(offset),
            From::Packed(packed) => packed.fed_piece(offset),
        }
    }

    /// Reads what stands at `offset`, or would if it were not compressed: whole pages, if
    /// the file is sealed.
    pub fn read_exact_at(&self, data: &mut [u8], offset: u64) -> Result<()> {
        match &self.0 {
            From::Plain(plain) => plain.read_exact_at(data, offset),
            From::Packed(packed) => packed.read_exact_at(data, offset),
        }
    }
}

/// A pages file with each page in its place.
#[derive(Debug)]
struct PlainReader {
    file: File,
    path: PathBuf,
    id: u32,
    feed: Option<Feed>,
    seal: Option<(Arc<Checkpoint>, Arc<PageOpener>, File)>,
}

impl PlainReader {
    fn open(dir: &ImageDir, map: &Pagemap) -> Result<Self> {
        let name = kind::PAGES.file_name(map.pages_id.into());
        let path = dir.path().join(&name);
        let file = dir.open_file(&name)?;
        let seal = match dir.seal_ref() {
            None => None,
            Some(checkpoint) => {
                let page = usize::try_from(page_size()).unwrap_or(4096);
                let place = PagesFile { name: &name, owner: map.owner, page };
                let tags_name = tags_name(map.pages_id);
                let tags_path = dir.path().join(&tags_name);
                let tags = dir.open_file(&tags_name)?;
                let failed = |error| Error::io(&tags_path, "read", error);
                let len = tags.metadata().map_err(failed)?.len();
                let mut head = vec![0; PageOpener::head_len(checkpoint.header().suite)];
                let have = head.len().min(usize::try_from(len).unwrap_or(usize::MAX));
                head.truncate(have);
                tags.read_exact_at(&mut head, 0).map_err(failed)?;
                let runs = map.runs.iter().filter(|run| run.present);
                let runs = runs.map(|run| (run.vaddr, run.pages));
                let removed = match checkpoint.header().suite.has_sum() {
                    true => holes::read(dir, map.pages_id)?,
                    false => Removed::default(),
                };
                let opener = checkpoint
                    .page_opener(place, runs, (&head, len), &removed)
                    .map_err(|source| dir.unsealed(source))?;
                if dir.is_parent() {
                    // Nobody comes back to it at the end, as to the checkpoint itself.
                    dir.verify_pages_of(&name, &opener)?;
                }
                Some((Arc::clone(checkpoint), opener, tags))
            }
        };
        Ok(Self { file, path, id: map.pages_id, feed: Feed::of(dir)?, seal })
    }

    /// What is fetched at once with what stands at `offset`, if somebody fetches what is read.
    fn fed_piece(&self, offset: u64) -> Option<Range<u64>> {
        let piece = CLUSTER as u64 * page_size();
        let start = offset / piece * piece;
        self.feed.as_ref().map(|_| start..start + piece)
    }

    fn read_exact_at(&self, data: &mut [u8], offset: u64) -> Result<()> {
        let failed = |error| Error::io(&self.path, "read", error);
        if let Some(feed) = &self.feed {
            feed.want(self.id, offset, data.len() as u64).map_err(failed)?;
        }
        self.file.read_exact_at(data, offset).map_err(failed)?;
        let Some((checkpoint, opener, tags)) = &self.seal else { return Ok(()) };
        if !offset.is_multiple_of(page_size()) {
            let reason = "pages are read in part, which sealed ones cannot be".to_owned();
            return Err(Error::Invalid { file: self.path.clone(), offset, reason });
        }
        let first = offset / page_size();
        let count = data.len() / usize::try_from(page_size()).unwrap_or(4096);
        let mut list = vec![0; if opener.needs_tags() { count * TAG } else { 0 }];
        tags.read_exact_at(&mut list, page::tag_offset(first)).map_err(failed)?;
        checkpoint
            .times
            .pages
            .measure(|| opener.open(first, data, &list))
            .map_err(|source| Error::Seal { dir: self.path.clone(), source })
    }
}

/// Takes pages out of the sum of the file that they are to be punched out of, if it has one.
/// `dir` is one that another builds on: so the sum is compared when the file is opened, and what
/// somebody has changed is never taken out. `gone` are places in the file, in bytes.
///
/// # Errors
/// If a pages file cannot be read, or its list of removed pages not be written; pages that are not
/// those that were sealed.
pub fn take_out(dir: &ImageDir, map: &Pagemap, gone: &[Range<u64>]) -> Result<()> {
    /// How many pages are read at once.
    const STEP: u64 = 64;
    if !dir.seal_ref().is_some_and(|seal| seal.header().suite.has_sum()) {
        return Ok(());
    }
    let PlainReader { file, path, seal: Some((_, opener, _)), .. } = PlainReader::open(dir, map)?
    else {
        return Ok(());
    };
    let mut removed = holes::read(dir, map.pages_id)?;
    let known = removed.pages.len();
    for range in gone {
        let (mut at, end) = (range.start / page_size(), range.end / page_size());
        while let Some(kept) = opener.kept(at..end) {
            let part = kept.start..kept.end.min(kept.start + STEP);
            let len = (part.end - part.start) * page_size();
            let mut stored = vec![0; usize::try_from(len).unwrap_or(0)];
            file.read_exact_at(&mut stored, part.start * page_size())
                .map_err(|error| Error::io(&path, "read", error))?;
            xor(&mut removed.sum, &opener.share(part.start, &stored));
            at = part.end;
            match removed.pages[known..].last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => removed.pages.push(part),
            }
        }
    }
    if removed.pages.len() == known {
        return Ok(());
    }
    holes::write(dir, map.pages_id, &removed)
}
