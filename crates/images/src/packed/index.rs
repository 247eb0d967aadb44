//! Where the clusters of a packed pages file are.

use std::collections::BTreeSet;
use std::ops::Range;

use torpor_seal::page::TAG;

use super::{VERSION, page};
use crate::compress::Compression;
use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::kind;
use crate::pagemap::{Pagemap, page_size};
use crate::proto::{PackedEntry, PackedHead};
use crate::reader::Reader;

/// The version of an index of gathered pages: clusters of several pack files, in parts, each
/// with its digest.
pub const GATHERED: u32 = 2;
/// The bytes of a digest.
const SUM: usize = 32;
/// How many pages a stretch of the index has at most.
const MAX_STRETCH: u32 = 1024;
/// How many pages a cluster may have that is read.
const MAX_CLUSTER: u32 = 64;

/// Where the clusters of a pages file are.
#[derive(Debug)]
pub struct Index {
    pub(super) how: Compression,
    gathered: bool,
    cluster: u64,
    pub(super) salt: Vec<u8>,
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
    /// The number of the file that it is stored in, if it is not that of the pagemap.
    pub pack: Option<u32>,
    /// How many pages of it come before the first.
    pub(super) skip: u64,
    /// How many pages it has in all.
    pub(super) whole: u64,
    pub(super) tag: &'i [u8],
    /// What SHA-256 gives for it as it is stored; empty where nobody says.
    pub sum: &'i [u8],
}

impl Index {
    /// Reads the index of the pages of `map`.
    pub fn read(dir: &ImageDir, map: &Pagemap) -> Result<Self> {
        let id = map.pages_id.into();
        let path = dir.path().join(kind::PAGES_PACKED.file_name(id));
        // Gathered pages may all lie in other files.
        let stored = dir.raw_file_open(kind::PAGES_PACKED, id);
        let len = match &stored {
            Ok(file) => file.metadata().map_err(|error| Error::io(&path, "stat", error))?.len(),
            Err(_) => u64::MAX,
        };
        let file = dir.path().join(kind::PAGES_INDEX.file_name(id));
        let mut reader = dir.reader(kind::PAGES_INDEX, id)?.ok_or(Error::Missing { file })?;
        let index = Self::from_reader(&mut reader, map.present_bytes() / page_size(), len)?;
        if index.stretches.iter().any(|stretch| stretch.pack.is_none()) {
            stored?;
        }
        Ok(index)
    }

    /// Reads an index up to the end of its file. It has to have each of `pages` pages once, in
    /// clusters that lie within the `len` bytes of what is stored, unless another file has them.
    pub fn from_reader(reader: &mut Reader, pages: u64, len: u64) -> Result<Self> {
        let head: PackedHead = reader.expect()?;
        let invalid = |reader: &Reader, at, reason: String| Err(reader.invalid(at, reason));
        if ![VERSION, GATHERED].contains(&head.version) {
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
        let gathered = head.version == GATHERED;
        Ok(Self { how, gathered, cluster: head.cluster_pages.into(), salt, stretches })
    }

    /// Whether clusters may hold pages of others, too, or may be in other files.
    #[must_use]
    pub fn is_gathered(&self) -> bool {
        self.gathered
    }

    /// The numbers of the files that clusters are in beside the one of the pagemap.
    #[must_use]
    pub fn packs(&self) -> BTreeSet<u32> {
        self.stretches.iter().filter_map(|stretch| stretch.pack).collect()
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
            let pages = cluster.min(u64::from(stretch.pages) - skip);
            Cluster {
                first: stretch.first + skip,
                pages,
                offset: at,
                size: size.into(),
                pack: stretch.pack,
                skip: stretch.skip().into(),
                whole: stretch.whole.map_or(pages, u64::from),
                tag: nth(stretch.tags(), number, TAG),
                sum: nth(stretch.sums(), number, SUM),
            }
        })
    }
}

/// The part number `number` of `parts`, which have `len` bytes each.
fn nth(parts: &[u8], number: u64, len: usize) -> &[u8] {
    let at = usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(len);
    parts.get(at..at.saturating_add(len)).unwrap_or_default()
}

/// What is wrong with a stretch of gathered pages by itself.
fn check_gathered(entry: &PackedEntry, head: &PackedHead) -> Result<(), String> {
    if head.version != GATHERED {
        let later = entry.pack.is_some() || entry.sums.is_some();
        return match later || entry.whole.is_some() || entry.skip.is_some() {
            true => Err(format!("gathered pages in version {}", head.version)),
            false => Ok(()),
        };
    }
    if head.salt.is_some() || entry.tags.is_some() {
        return Err("gathered pages that are sealed".to_owned());
    }
    if entry.sums().len() != entry.sizes.len() * SUM {
        return Err(format!("{} bytes of digests", entry.sums().len()));
    }
    let whole = entry.whole.unwrap_or(entry.pages);
    let end = u64::from(entry.skip()) + u64::from(entry.pages);
    if entry.whole.is_some() && (entry.sizes.len() != 1 || whole > head.cluster_pages)
        || entry.skip.is_some() && entry.whole.is_none()
        || end > whole.into()
    {
        return Err(format!("pages up to {end} of a cluster of {whole}"));
    }
    Ok(())
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
    check_gathered(entry, head)?;
    let mut left = entry.whole.unwrap_or(pages);
    for &size in sizes {
        let here = left.min(head.cluster_pages);
        left -= here;
        if !(1..=u64::from(here) * page_size()).contains(&size.into()) {
            return Err(format!("a cluster of {here} pages in {size} bytes"));
        }
    }
    let end = offset.checked_add(sizes.iter().map(|&size| u64::from(size)).sum());
    if end.is_none_or(|end| end > len && entry.pack.is_none()) {
        return Err(format!("clusters at {offset} lie behind the end of what is stored ({len})"));
    }
    Ok(())
}

impl Cluster<'_> {
    /// The bytes of its pages.
    pub(super) fn len(&self) -> usize {
        usize::try_from(self.pages).unwrap_or(usize::MAX).saturating_mul(page())
    }

    /// The bytes of all that is stored with it.
    pub(super) fn whole_len(&self) -> usize {
        usize::try_from(self.whole).unwrap_or(usize::MAX).saturating_mul(page())
    }

    /// The bytes that come before its pages in what is stored.
    pub(super) fn skipped(&self) -> usize {
        usize::try_from(self.skip).unwrap_or(usize::MAX).saturating_mul(page())
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
