//! Compressed pages: what is written is read back, page by page and as a whole, and what
//! somebody made up is refused.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use proptest::prelude::*;
use torpor_images::compress::Compression;
use torpor_images::packed::{CLUSTER, Index, Packer};
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::pages::{PagesReader, PagesWriter};
use torpor_images::proto::{PackedEntry, PackedHead};
use torpor_images::{ImageDir, kind};
use torpor_seal::{Header, MasterKey, Secret, Suite};

const BASE: u64 = 0x10_0000;

fn page() -> usize {
    usize::try_from(page_size()).unwrap()
}

/// Pages of which some are alike, some are noise and some are half of each.
fn memory(pages: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut noise = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::new();
    for _ in 0..pages {
        let random = [0, page() / 2, page()][usize::try_from(noise() % 3).unwrap()];
        let fill = noise().to_le_bytes()[0];
        bytes.extend((0..random).map(|_| noise().to_le_bytes()[0]));
        bytes.extend(std::iter::repeat_n(fill, page() - random));
    }
    bytes
}

/// Writes `memory` as that of task 7, in spans of these many pages, the last one first.
fn write(dir: &ImageDir, memory: &[u8], spans: &[usize], how: Option<Compression>) -> Pagemap {
    let start = if how.is_some() { PagemapWriter::packed } else { PagemapWriter::create };
    let mut map = start(dir, kind::PAGEMAP, 7, 1).unwrap();
    let pages = u64::try_from(memory.len() / page()).unwrap();
    map.push(Run { vaddr: BASE, pages, present: true, ..Run::default() }).unwrap();
    map.finish().unwrap();
    let writer = PagesWriter::create(dir, 1, 7, how, None).unwrap();
    let mut at = 0;
    let mut jobs = Vec::new();
    for &span in spans {
        jobs.push((writer.span(span as u64), at, span));
        at += span * page();
    }
    let mut packer = Packer::default();
    for (span, at, pages) in jobs.iter().rev() {
        let mut data = memory[*at..at + pages * page()].to_vec();
        let runs = [(BASE + *at as u64, *pages as u64)];
        writer.write(span, &runs, &mut data, &mut packer).unwrap();
    }
    writer.finish(dir).unwrap();
    let packed = writer.packed();
    assert_eq!(packed.map(|packed| packed.from), how.map(|_| memory.len() as u64));
    Pagemap::read(dir, kind::PAGEMAP, 7).unwrap()
}

fn master() -> MasterKey {
    Secret::take(&mut [6; 32])
}

fn new_dir(sealed: bool) -> (tempfile::TempDir, ImageDir) {
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut dir = ImageDir::open(temp.path()).unwrap();
    if sealed {
        dir.seal(Header::new(Suite::Aes256Gcm, None).unwrap(), &master()).unwrap();
    }
    (temp, dir)
}

/// The same, as it is opened for reading.
fn reopened(dir: &ImageDir) -> ImageDir {
    let mut again = ImageDir::open(dir.path()).unwrap();
    if dir.seal_ref().is_some() {
        dir.finish_seal(None).unwrap();
        let unwrap: Arc<torpor_images::sealed::Unwrap> = Arc::new(|_: &Header| Ok(master()));
        let signed = again.unseal(&unwrap).unwrap();
        again.verify(&signed).unwrap();
    }
    again
}

fn spans() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1..=3 * CLUSTER, 1..6)
}

fn way() -> impl Strategy<Value = Option<Compression>> {
    prop_oneof![Just(Some(Compression::LZ4)), Just(Some(Compression::ZSTD)), Just(None)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_part_is_read_back(
        spans in spans(),
        seed: u64,
        how in way(),
        sealed: bool,
        parts in proptest::collection::vec((any::<prop::sample::Index>(), 1..2 * CLUSTER), 1..40),
    ) {
        let pages: usize = spans.iter().sum();
        let memory = memory(pages, seed);
        let (_temp, dir) = new_dir(sealed);
        write(&dir, &memory, &spans, how);
        let dir = reopened(&dir);
        let map = Pagemap::read(&dir, kind::PAGEMAP, 7).unwrap();
        let reader = PagesReader::open(&dir, &map).unwrap();
        prop_assert!(reader.verifies_each());
        for (from, count) in parts {
            let from = from.index(pages);
            let (start, end) = (from * page(), (from + count).min(pages) * page());
            let mut part = vec![9; end - start];
            reader.read_exact_at(&mut part, start as u64).unwrap();
            prop_assert!(part == memory[start..end]);
        }
        prop_assert!(reader.read_exact_at(&mut vec![0; page()], memory.len() as u64).is_err());
    }

    /// Whatever an index says, it is refused or finds each page in its place.
    #[test]
    fn made_up_indexes_are_harmless(
        cluster_pages in 0..70u32,
        entries in proptest::collection::vec(
            (0..40u64, 0..40u32, 0..20_000u64, proptest::collection::vec(0..9000u32, 0..4)), 0..4),
        pages in 0..60u64,
    ) {
        let (_temp, dir) = new_dir(false);
        let mut writer = dir.writer(kind::PAGES_INDEX, 1).unwrap();
        writer.entry(&PackedHead { version: 1, method: 1, cluster_pages, salt: None }).unwrap();
        for (first, pages, offset, sizes) in entries {
            writer.entry(&PackedEntry { first, pages, offset, sizes, ..Default::default() }).unwrap();
        }
        writer.finish().unwrap();
        let mut reader = dir.reader(kind::PAGES_INDEX, 1).unwrap().unwrap();
        let Ok(index) = Index::from_reader(&mut reader, pages, 20_000) else { return Ok(()) };
        let mut next = 0;
        for cluster in index.clusters() {
            prop_assert_eq!(cluster.first, next);
            prop_assert!(cluster.stored().end <= 20_000);
            prop_assert_eq!(index.at(next), Some(cluster));
            next += cluster.pages;
            prop_assert_eq!(index.at(next - 1), Some(cluster));
        }
        prop_assert_eq!(next, pages);
        prop_assert_eq!(index.at(pages), None);
    }
}

/// The last cluster of a stretch can have room for pages that are none.
#[test]
fn behind_the_last_page_is_nothing() {
    let (_temp, dir) = new_dir(false);
    let map = write(&dir, &memory(21, 1), &[18, 3], Some(Compression::LZ4));
    let index = Index::read(&dir, &map).unwrap();
    let places: Vec<_> = index.clusters().map(|found| (found.first, found.pages)).collect();
    assert_eq!(places, [(0, 16), (16, 2), (18, 3)]);
    assert_eq!(index.at(21), None);
    assert_eq!(index.at(20), index.clusters().last());
    let reader = PagesReader::open(&dir, &map).unwrap();
    let error = reader.read_exact_at(&mut vec![0; page()], 21 * page_size()).unwrap_err();
    assert!(error.to_string().contains("pages-packed-1.img: offset"), "{error}");
}

/// Reads all pages; the error if that fails.
fn read_all(dir: &ImageDir, memory: &[u8]) -> Result<(), String> {
    let map = Pagemap::read(dir, kind::PAGEMAP, 7).map_err(|e| e.to_string())?;
    let reader = PagesReader::open(dir, &map).map_err(|e| e.to_string())?;
    let mut all = vec![0; memory.len()];
    reader.read_exact_at(&mut all, 0).map_err(|e| e.to_string())?;
    if all == memory { Ok(()) } else { Err("other pages".to_owned()) }
}

#[test]
fn a_cluster_that_was_changed_is_named() {
    let memory = vec![5; 2 * CLUSTER * page()];
    for (how, sealed) in
        [Compression::LZ4, Compression::ZSTD].map(|how| [(how, false), (how, true)]).concat()
    {
        let (temp, dir) = new_dir(sealed);
        write(&dir, &memory, &[2 * CLUSTER], Some(how));
        let dir = reopened(&dir);
        read_all(&dir, &memory).unwrap();
        let map = Pagemap::read(&dir, kind::PAGEMAP, 7).unwrap();
        let second = Index::read(&dir, &map).unwrap().clusters().nth(1).unwrap().stored();
        let file =
            std::fs::File::options().write(true).open(temp.path().join("pages-packed-1.img"));
        file.unwrap().write_all_at(&[0xff; 8], second.start).unwrap();
        let error = read_all(&dir, &memory).unwrap_err();
        assert!(error.contains("pages-packed-1.img"), "{error}");
        assert!(error.contains(&format!("offset {}", second.start)), "{how} {sealed}: {error}");
    }
}

#[test]
fn what_is_missing_is_named() {
    let memory = memory(40, 3);
    for name in ["pages-packed-1.img", "pages-index-1.img"] {
        let (temp, dir) = new_dir(false);
        write(&dir, &memory, &[40], Some(Compression::LZ4));
        let path = temp.path().join(name);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = read_all(&dir, &memory).unwrap_err();
        assert!(error.contains("pages-index-1.img: offset"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let error = read_all(&dir, &memory).unwrap_err();
        assert!(error.contains(&format!("{name}: no such image file")), "{error}");
    }
}

#[test]
fn other_versions_and_methods_are_refused() {
    let (_temp, dir) = new_dir(false);
    let map = write(&dir, &memory(1, 1), &[1], Some(Compression::LZ4));
    let head = PackedHead { version: 1, method: 1, cluster_pages: 16, salt: None };
    let error = |head: PackedHead| {
        dir.write_one(kind::PAGES_INDEX, 1, &head).unwrap();
        Index::read(&dir, &map).unwrap_err().to_string()
    };
    assert!(error(PackedHead { version: 3, ..head.clone() }).contains("version 3"));
    assert!(error(PackedHead { method: 9, ..head.clone() }).contains("method 9"));
    assert!(error(PackedHead { cluster_pages: 65, ..head }).contains("clusters of 65 pages"));
}

/// A dump leaves nothing of an earlier one in the other form.
#[test]
fn one_form_replaces_the_other() {
    let (temp, dir) = new_dir(false);
    let memory = memory(20, 5);
    let has = |name: &str| temp.path().join(name).exists();
    for how in [None, Some(Compression::LZ4), None] {
        write(&dir, &memory, &[20], how);
        read_all(&dir, &memory).unwrap();
        assert_eq!(has("pages-1.img"), how.is_none());
        assert_eq!(has("pages-packed-1.img"), how.is_some());
        assert_eq!(has("pages-index-1.img"), how.is_some());
    }
}
