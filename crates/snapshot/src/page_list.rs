//! The list of the pages in a pack, by which the next release knows them.
//!
//! It has one entry for each cluster, one behind the other as they are stored: where the cluster is, its size, the number of
//! its pages, its digest, and the digests of its pages. A snapshot takes pages of its base at the word of this list, so
//! `verify` compares it with what the clusters hold.

use std::iter::Peekable;
use std::ops::Range;
use std::vec::IntoIter;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::Store;
use torpor_blobs::oci::{self, Descriptor};
use torpor_images::compress::{Compression, Decompressor};
use torpor_images::packed::CLUSTER;
use torpor_images::pagemap::page_size;

use crate::archive::FIRST;
use crate::description::Pack;
use crate::error::{Error, Result};
use crate::stored::{extent, strip};

/// The longest list of pages that is read.
const MAX_LIST: u64 = 1 << 30;
/// The bytes of a cluster in the list, before its pages.
const LISTED: usize = 48;
/// The bytes of the digest that a page is known by.
const PAGE_SUM: usize = 20;

/// What a page is known by.
pub(crate) type PageSum = [u8; PAGE_SUM];

/// What a page is known by that holds these bytes.
pub(crate) fn sum_of(page: &[u8]) -> PageSum {
    let mut sum = [0; PAGE_SUM];
    sum.copy_from_slice(&digest::digest(&SHA256, page).as_ref()[..PAGE_SUM]);
    sum
}

/// The list of the pages in a pack.
///
/// # Errors
/// If the list is not within the layer, cannot be read, or is not what its digest says.
pub(crate) fn read(store: &dyn Store, pack: &Pack, layer: &Descriptor) -> Result<Vec<u8>> {
    let wrong = || Error::new(format!("the list of the pages in {} is damaged", layer.digest));
    let end = pack.list_offset.checked_add(pack.list_size);
    let end = end.filter(|end| (1..=MAX_LIST).contains(&pack.list_size) && *end <= layer.size);
    let part = pack.list_offset..end.ok_or_else(wrong)?;
    let list = strip(store.read(layer, extent(&part))?, &part);
    match oci::sha256(&list) == pack.list_digest {
        true => Ok(list),
        false => Err(wrong()),
    }
}

/// A cluster as a list has it.
#[derive(Debug)]
pub(crate) struct ListedCluster<'l> {
    /// Where it is in the file of the pack.
    pub(crate) offset: u64,
    pub(crate) size: u32,
    /// The digest of what is stored.
    pub(crate) sum: [u8; 32],
    pub(crate) pages: &'l [PageSum],
}

impl ListedCluster<'_> {
    /// Appends it to a list.
    pub(crate) fn write(&self, list: &mut Vec<u8>) {
        list.extend_from_slice(&self.offset.to_le_bytes());
        list.extend_from_slice(&self.size.to_le_bytes());
        list.extend_from_slice(&u32::try_from(self.pages.len()).unwrap_or(0).to_le_bytes());
        list.extend_from_slice(&self.sum);
        list.extend_from_slice(self.pages.as_flattened());
    }

    /// Where it is in the archive of the pack.
    fn part(&self) -> Range<u64> {
        let start = FIRST + self.offset;
        start..start + u64::from(self.size)
    }

    /// Where it is in the layer.
    fn place(&self) -> Range<u64> {
        extent(&self.part())
    }
}

/// The clusters of a list.
///
/// # Errors
/// If an entry is cut off, has no pages or too many, or a size that these cannot have, or does not begin where the one
/// before it ends.
pub(crate) fn parse(list: &[u8]) -> Result<Vec<ListedCluster<'_>>> {
    let (mut rest, mut next, mut found) = (list, 0, Vec::new());
    while !rest.is_empty() {
        let at = list.len() - rest.len();
        let wrong = || Error::new(format!("the list of a pack's pages is damaged at {at}"));
        let (head, behind) = rest.split_first_chunk::<LISTED>().ok_or_else(wrong)?;
        let (words, _) = head.as_chunks::<4>();
        let [low, high, size, count] = [0, 1, 2, 3].map(|word| u32::from_le_bytes(words[word]));
        let (offset, pages) = (u64::from(high) << 32 | u64::from(low), count as usize);
        let is_size = (1..=u64::from(count) * page_size()).contains(&u64::from(size));
        if offset != next || !(1..=CLUSTER).contains(&pages) || !is_size {
            return Err(wrong());
        }
        let (sums, behind) = behind.split_at_checked(pages * PAGE_SUM).ok_or_else(wrong)?;
        let sum = head[LISTED - 32..].try_into().map_err(|_| wrong())?;
        let (pages, _) = sums.as_chunks();
        found.push(ListedCluster { offset, size, sum, pages });
        next += u64::from(size);
        rest = behind;
    }
    Ok(found)
}

/// A list that is compared with its pack, while somebody reads that.
pub(crate) struct Comparison<'l> {
    /// Those that have not come yet.
    clusters: Peekable<IntoIter<ListedCluster<'l>>>,
    /// What has come of the layer and is not compared yet, and where in the layer that begins.
    open: Vec<u8>,
    at: u64,
    /// What was found first.
    wrong: Option<Error>,
    decompressor: Decompressor,
    /// The pages of a cluster.
    plain: Vec<u8>,
}

impl<'l> Comparison<'l> {
    /// Begins to compare a list.
    ///
    /// # Errors
    /// If the list makes no sense.
    pub(crate) fn new(list: &'l [u8]) -> Result<Self> {
        Ok(Self {
            clusters: parse(list)?.into_iter().peekable(),
            open: Vec::new(),
            at: 0,
            wrong: None,
            decompressor: Decompressor::default(),
            plain: Vec::new(),
        })
    }

    /// Compares what the next part of the layer brings.
    pub(crate) fn take(&mut self, part: &[u8]) {
        self.open.extend_from_slice(part);
        let end = self.at + self.open.len() as u64;
        while let Some(cluster) = self.clusters.next_if(|next| next.place().end <= end) {
            let place = self.within(cluster.place());
            let stored = strip(self.open[place].to_vec(), &cluster.part());
            if self.wrong.is_none() {
                self.wrong = self.compare(&cluster, &stored).err();
            }
        }
        // The head of the list's file and the list itself are behind the last one.
        let next = self.clusters.peek().map_or(end, |next| next.place().start.min(end));
        let done = self.within(self.at..next);
        self.open.drain(done);
        self.at = next;
    }

    /// Where a part of the layer is in what has come.
    fn within(&self, place: Range<u64>) -> Range<usize> {
        let at = |place: u64| usize::try_from(place - self.at).unwrap_or(usize::MAX);
        at(place.start)..at(place.end)
    }

    fn compare(&mut self, cluster: &ListedCluster<'_>, stored: &[u8]) -> Result<()> {
        let offset = cluster.offset;
        if digest::digest(&SHA256, stored).as_ref() != cluster.sum {
            let text = format!("the list of its pages names another cluster than that at {offset}");
            return Err(Error::new(text));
        }
        let page = usize::try_from(page_size()).unwrap_or(4096);
        self.plain.resize(cluster.pages.len() * page, 0);
        if stored.len() == self.plain.len() {
            self.plain.copy_from_slice(stored);
        } else {
            let unpacked = self.decompressor.decompress(Compression::ZSTD, stored, &mut self.plain);
            unpacked.map_err(|why| Error::new(format!("the cluster at {offset}: {why}")))?;
        }
        let mut pages = self.plain.chunks_exact(page).zip(cluster.pages);
        match pages.position(|(page, sum)| sum_of(page) != *sum) {
            None => Ok(()),
            Some(number) => Err(Error::new(format!(
                "page {number} of the cluster at {offset} is not the one that the list of its pages names"
            ))),
        }
    }

    /// Fails if anything was found, now that all of the layer has come.
    ///
    /// # Errors
    /// If a cluster, or a page of one, is another one than the list names, or the list names one behind the end of the layer.
    pub(crate) fn finish(mut self) -> Result<()> {
        match (self.wrong, self.clusters.next()) {
            (Some(error), _) => Err(error),
            (None, Some(ListedCluster { offset, .. })) => Err(Error::new(format!(
                "the list of its pages names a cluster at {offset}, behind its end"
            ))),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;
    use std::io::{Seek, Write};

    use super::*;
    use crate::archive;
    use crate::stored;

    /// Pages that are all different, each `noisy` one like noise.
    fn pages(count: usize, noisy: bool) -> Vec<u8> {
        let page = usize::try_from(page_size()).unwrap();
        let mut state = count as u64 + 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        };
        let fill = |at: usize| at.is_multiple_of(page) || noisy;
        (0..count * page).map(|at| if fill(at) { next() } else { 7 }).collect()
    }

    /// Clusters with so many pages each, of which every other one cannot be made smaller; and their list.
    fn pack(counts: &[usize]) -> (Vec<u8>, Vec<u8>) {
        let (mut clusters, mut list) = (Vec::new(), Vec::new());
        for (number, count) in counts.iter().enumerate() {
            let noisy = number.is_multiple_of(2);
            let plain = pages(*count, noisy);
            let stored =
                if noisy { plain.clone() } else { zstd::bulk::compress(&plain, 3).unwrap() };
            let page = usize::try_from(page_size()).unwrap();
            let sums: Vec<PageSum> = plain.chunks_exact(page).map(sum_of).collect();
            let offset = clusters.len() as u64;
            let size = u32::try_from(stored.len()).unwrap();
            let sum = digest::digest(&SHA256, &stored).as_ref().try_into().unwrap();
            ListedCluster { offset, size, sum, pages: &sums }.write(&mut list);
            clusters.extend(stored);
        }
        (clusters, list)
    }

    /// The layer of a pack.
    fn layer(clusters: &[u8], list: &[u8]) -> Vec<u8> {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(clusters).unwrap();
        file.rewind().unwrap();
        let mut to = stored::Store::new(Vec::new()).unwrap();
        archive::write_pack(&mut to, 1, &mut file, clusters.len() as u64, list).unwrap();
        to.finish().unwrap()
    }

    /// What is found in a layer that comes in parts of this size.
    fn found(layer: &[u8], list: &[u8], part: usize) -> Result<()> {
        let mut comparison = Comparison::new(list)?;
        layer.chunks(part).for_each(|part| comparison.take(part));
        comparison.finish()
    }

    const COUNTS: [usize; 7] = [16, 16, 16, 3, 16, 16, 1];
    /// Where the second entry of that list begins.
    const SECOND: usize = LISTED + 16 * PAGE_SUM;

    #[test]
    fn a_list_is_compared_with_what_the_clusters_hold() {
        let (clusters, list) = pack(&COUNTS);
        let layer = layer(&clusters, &list);
        for part in [1000, 100_000, layer.len()] {
            found(&layer, &list, part).unwrap();
        }
        let second = 16 * page_size();
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut list = list.clone();
            change(&mut list);
            found(&layer, &list, 100_000).unwrap_err().to_string()
        };
        // Another cluster, at another place, of another page.
        let said = changed(&|list| list[SECOND + 16] ^= 1);
        assert_eq!(
            said,
            format!("the list of its pages names another cluster than that at {second}")
        );
        let moved = |list: &mut Vec<u8>| {
            // The second one begins a byte earlier, and is longer by that.
            let first = u32::try_from(second).unwrap() - 1;
            list[8..12].copy_from_slice(&first.to_le_bytes());
            list[SECOND..SECOND + 8].copy_from_slice(&u64::from(first).to_le_bytes());
            let size = &mut list[SECOND + 8..SECOND + 12];
            let longer = u32::from_le_bytes((&*size).try_into().unwrap()) + 1;
            size.copy_from_slice(&longer.to_le_bytes());
        };
        assert_eq!(changed(&moved), "the list of its pages names another cluster than that at 0");
        let said = changed(&|list| list[SECOND + LISTED + 2 * PAGE_SUM] ^= 1);
        let page = format!(
            "page 2 of the cluster at {second} is not the one that the list of its pages names"
        );
        assert_eq!(said, page);
        // What is no cluster, and a cluster that is not there.
        let offset = clusters.len() as u64;
        let more = ListedCluster { offset, size: 1000, sum: [0; 32], pages: &[[0; PAGE_SUM]] };
        let said = changed(&|list| more.write(list));
        assert!(said.ends_with(&format!("another cluster than that at {offset}")), "{said}");
        let cut = found(&layer[..layer.len() / 2], &list, 100_000).unwrap_err().to_string();
        assert!(cut.ends_with("behind its end"), "{cut}");
    }

    #[test]
    fn a_list_that_makes_no_sense_is_refused() {
        let (_, list) = pack(&COUNTS);
        assert_eq!(parse(&list).unwrap().len(), COUNTS.len());
        let changed = |at: usize, byte: u8| {
            let mut list = list.clone();
            list[at] = byte;
            list
        };
        let last = list.len() - LISTED - PAGE_SUM;
        // Cut off; a cluster elsewhere, of no size or of too much, with no pages or with too many.
        let wrong = [
            (list[..20].to_vec(), 0),
            (list[..list.len() - 1].to_vec(), last),
            (changed(SECOND, 1), SECOND),
            (changed(10, 0), 0),
            (changed(11, 1), 0),
            (changed(12, 0), 0),
            (changed(12, 17), 0),
        ];
        for (list, at) in wrong {
            let said = parse(&list).unwrap_err().to_string();
            assert_eq!(said, format!("the list of a pack's pages is damaged at {at}"));
        }
    }
}
