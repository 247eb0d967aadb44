//! Pagemaps: what is written is read back, what makes no sense is refused.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::proto::{PagemapEntry, PagemapHead};
use torpor_images::{Error, ImageDir, kind};

fn dir() -> (tempfile::TempDir, ImageDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    (temp, dir)
}

fn run(page: u64, pages: u64, flags: u32) -> Run {
    Run {
        vaddr: page * page_size(),
        pages,
        in_parent: flags & 1 != 0,
        lazy: flags & 2 != 0,
        present: flags & 4 != 0,
        relative: None,
    }
}

fn of_relative(page: u64, pages: u64, relative: u32) -> Run {
    Run { relative: Some(relative), ..run(page, pages, 0) }
}

fn entry(page: u64, pages: u64, flags: u32) -> PagemapEntry {
    run(page, pages, flags).to_entry()
}

/// Writes and reads a pagemap of `entries` with a pages file of `pages`.
fn read(entries: &[PagemapEntry], pages: u64) -> torpor_images::Result<Pagemap> {
    let (_temp, dir) = dir();
    let mut writer = dir.writer(kind::PAGEMAP, 5).unwrap();
    writer.entry(&PagemapHead { pages_id: 1, torpor_packed: None }).unwrap();
    for entry in entries {
        writer.entry(entry).unwrap();
    }
    writer.finish().unwrap();
    dir.raw_file_create(kind::PAGES, 1).unwrap().set_len(pages * page_size()).unwrap();
    Pagemap::read(&dir, kind::PAGEMAP, 5)
}

#[test]
fn adjacent_runs_are_joined() {
    let (_temp, dir) = dir();
    let mut writer = PagemapWriter::create(&dir, kind::PAGEMAP, 5, 1).unwrap();
    for run in [run(1, 1, 4), run(2, 3, 4), run(5, 1, 1), run(9, 1, 6), run(10, 2, 4)] {
        writer.push(run).unwrap();
    }
    writer.finish().unwrap();
    let map = Pagemap::read_unbacked(&dir, kind::PAGEMAP, 5).unwrap();
    assert_eq!(map.runs, [run(1, 4, 4), run(5, 1, 1), run(9, 1, 6), run(10, 2, 4)]);
    let offsets: Vec<_> = map.offsets().map(|(_, offset)| offset).collect();
    let at = |pages| Some(pages * page_size());
    assert_eq!(offsets, [at(0), None, at(4), at(5)]);
}

#[test]
fn pages_of_relatives_are_told_apart() {
    let (_temp, dir) = dir();
    let mut writer = PagemapWriter::create(&dir, kind::PAGEMAP, 5, 1).unwrap();
    let of = of_relative;
    for run in [of(1, 2, 7), of(3, 1, 7), of(4, 1, 8), run(5, 1, 0), run(6, 1, 4), of(7, 1, 8)] {
        writer.push(run).unwrap();
    }
    writer.finish().unwrap();
    let map = Pagemap::read_unbacked(&dir, kind::PAGEMAP, 5).unwrap();
    assert_eq!(map.runs, [of(1, 3, 7), of(4, 1, 8), run(5, 1, 0), run(6, 1, 4), of(7, 1, 8)]);
    assert_eq!(map.present_bytes(), page_size());
}

#[test]
fn the_pages_file_holds_what_is_present() {
    let entries = [entry(1, 4, 4), entry(9, 100, 2), entry(200, 1, 6)];
    assert_eq!(read(&entries, 5).unwrap().present_bytes(), 5 * page_size());
    let error = read(&entries, 4).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
}

#[test]
fn entries_from_before_the_flags_are_understood() {
    let old = |in_parent| PagemapEntry {
        vaddr: page_size(),
        compat_nr_pages: 2,
        in_parent,
        flags: None,
        nr_pages: None,
        torpor_relative: None,
    };
    assert_eq!(read(&[old(None)], 2).unwrap().runs, [run(1, 2, 4)]);
    assert_eq!(read(&[old(Some(true))], 0).unwrap().runs, [run(1, 2, 1)]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let misaligned = PagemapEntry { vaddr: 1, ..entry(0, 1, 4) };
    let unknown = PagemapEntry { flags: Some(8), ..entry(1, 1, 4) };
    let nobodys = PagemapEntry { torpor_relative: None, ..of_relative(1, 1, 7).to_entry() };
    let without_flag = PagemapEntry { torpor_relative: Some(7), ..entry(1, 1, 0) };
    let of_both = PagemapEntry { flags: Some(1 << 16 | 4), ..of_relative(1, 1, 7).to_entry() };
    let of_parent = PagemapEntry { in_parent: Some(true), ..of_relative(1, 1, 7).to_entry() };
    let overlap = [entry(1, 2, 4), entry(2, 1, 4)];
    let unsorted = [entry(2, 1, 4), entry(1, 1, 4)];
    let huge = [entry(1, u64::MAX / page_size(), 4)];
    let wrapping = [entry(1, u64::MAX, 4)];
    for bad in [
        &[misaligned][..],
        &[unknown],
        &[nobodys],
        &[without_flag],
        &[of_both],
        &[of_parent],
        &overlap,
        &unsorted,
        &huge,
        &wrapping,
        &[entry(1, 0, 4)],
        &[entry(1, 1, 5)],
    ] {
        let error = read(bad, 8).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{bad:?}: {error}");
    }
}

proptest! {
    #[test]
    fn runs_are_read_back(steps in prop::collection::vec((1u64..9, 1u64..9, 0u32..8), 0..20)) {
        let (_temp, dir) = dir();
        let mut writer = PagemapWriter::create(&dir, kind::SHMEM_PAGEMAP, 5, 1).unwrap();
        let (mut page, mut runs) = (0, vec![]);
        // A gap before each run keeps them apart.
        for (gap, pages, flags) in steps {
            let flags = if flags & 5 == 5 { flags & 3 } else { flags };
            runs.push(run(page + gap, pages, flags));
            writer.push(run(page + gap, pages, flags)).unwrap();
            page += gap + pages;
        }
        writer.finish().unwrap();
        let map = Pagemap::read_unbacked(&dir, kind::SHMEM_PAGEMAP, 5).unwrap();
        prop_assert_eq!(map.runs, runs);
    }
}
