//! Gathered pages: clusters of several packs, in parts, fetched when they are read.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use aws_lc_rs::digest::{SHA256, digest};
use torpor_images::feed::{REQUEST, SOCKET};
use torpor_images::packed::{GATHERED, Index};
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::pages::PagesReader;
use torpor_images::proto::{PackedEntry, PackedHead};
use torpor_images::{ImageDir, kind};

fn page() -> usize {
    usize::try_from(page_size()).unwrap()
}

/// A page full of one number.
fn full(number: u8) -> Vec<u8> {
    vec![number; page()]
}

/// An entry for pages of a cluster that holds the pages with these numbers.
fn entry(
    dir: &ImageDir,
    pack: u32,
    offset: u64,
    numbers: &[u8],
    first: u64,
    part: (u32, u32),
) -> PackedEntry {
    let plain: Vec<u8> = numbers.iter().flat_map(|number| full(*number)).collect();
    let stored = zstd::bulk::compress(&plain, 1).unwrap();
    let name = kind::PAGES_PACKED.file_name(pack.into());
    let file = dir.path().join(name);
    let file =
        std::fs::File::options().create(true).truncate(false).write(true).open(file).unwrap();
    file.write_all_at(&stored, offset).unwrap();
    PackedEntry {
        first,
        pages: part.1,
        offset,
        sizes: vec![u32::try_from(stored.len()).unwrap()],
        tags: None,
        pack: Some(pack),
        sums: Some(digest(&SHA256, &stored).as_ref().to_vec()),
        whole: Some(u32::try_from(numbers.len()).unwrap()),
        skip: Some(part.0),
    }
}

/// Images of four pages: 3 and 4 of one pack, 9 of another, 4 again.
fn images(change: impl Fn(usize, &mut PackedEntry)) -> (tempfile::TempDir, ImageDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let mut map = PagemapWriter::packed(&dir, kind::PAGEMAP, 7, 1).unwrap();
    let run = Run { vaddr: 0x10000, pages: 4, present: true, ..Run::default() };
    map.push(run).unwrap();
    map.finish().unwrap();
    let mut entries = [
        entry(&dir, 900, 0, &[1, 2, 3, 4], 0, (2, 2)),
        entry(&dir, 800, 5000, &[9], 2, (0, 1)),
        entry(&dir, 900, 0, &[1, 2, 3, 4], 3, (3, 1)),
    ];
    for (number, entry) in entries.iter_mut().enumerate() {
        change(number, entry);
    }
    let mut index = dir.writer(kind::PAGES_INDEX, 1).unwrap();
    index
        .entry(&PackedHead { version: GATHERED, method: 2, cluster_pages: 16, salt: None })
        .unwrap();
    entries.iter().try_for_each(|entry| index.entry(entry)).unwrap();
    index.finish().unwrap();
    (temp, dir)
}

/// All pages, or the error.
fn read(dir: &ImageDir) -> Result<Vec<u8>, String> {
    let map = Pagemap::read(dir, kind::PAGEMAP, 7).map_err(|e| e.to_string())?;
    let reader = PagesReader::open(dir, &map).map_err(|e| e.to_string())?;
    let mut all = vec![0; 4 * page()];
    reader.read_exact_at(&mut all, 0).map_err(|e| e.to_string())?;
    Ok(all)
}

fn expected() -> Vec<u8> {
    [3, 4, 9, 4].iter().flat_map(|number| full(*number)).collect()
}

#[test]
fn pages_are_found_in_their_packs() {
    let (_temp, dir) = images(|_, _| {});
    assert_eq!(read(&dir).unwrap(), expected());
    let map = Pagemap::read(&dir, kind::PAGEMAP, 7).unwrap();
    let index = Index::read(&dir, &map).unwrap();
    assert!(index.is_gathered());
    assert_eq!(index.packs().into_iter().collect::<Vec<_>>(), [800, 900]);
    // One alone.
    let reader = PagesReader::open(&dir, &map).unwrap();
    let mut one = full(0);
    reader.read_exact_at(&mut one, page_size()).unwrap();
    assert_eq!(one, full(4));
}

/// Full clusters one behind the other have one entry.
#[test]
fn clusters_one_behind_the_other_are_read() {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    let mut map = PagemapWriter::packed(&dir, kind::PAGEMAP, 7, 1).unwrap();
    map.push(Run { vaddr: 0x10000, pages: 4, present: true, ..Run::default() }).unwrap();
    map.finish().unwrap();
    let one = entry(&dir, 900, 0, &[3, 4], 0, (0, 2));
    let other = entry(&dir, 900, one.sizes[0].into(), &[9, 4], 2, (0, 2));
    let both = PackedEntry {
        pages: 4,
        sizes: [one.sizes, other.sizes].concat(),
        sums: Some([one.sums.unwrap(), other.sums.unwrap()].concat()),
        whole: None,
        skip: None,
        ..one
    };
    let mut index = dir.writer(kind::PAGES_INDEX, 1).unwrap();
    let head = PackedHead { version: GATHERED, method: 2, cluster_pages: 2, salt: None };
    index.entry(&head).unwrap();
    index.entry(&both).unwrap();
    index.finish().unwrap();
    assert_eq!(read(&dir).unwrap(), expected());
}

#[test]
fn a_cluster_that_is_another_is_not_used() {
    let (temp, dir) = images(|_, _| {});
    let other = zstd::bulk::compress(&full(8), 1).unwrap();
    let file = std::fs::File::options().write(true).open(temp.path().join("pages-packed-800.img"));
    file.unwrap().write_all_at(&other, 5000).unwrap();
    let error = read(&dir).unwrap_err();
    assert!(error.contains("pages-packed-800.img: offset 5000"), "{error}");
    assert!(error.contains("not what it was"), "{error}");
}

type Change = fn(&mut PackedEntry);

#[test]
fn an_index_that_makes_no_sense_is_refused() {
    let wrong: [(Change, &str); 6] = [
        (|e| e.skip = Some(3), "pages up to 5 of a cluster of 4"),
        (|e| e.whole = Some(17), "of a cluster of 17"),
        (|e| e.whole = None, "of a cluster of 2"),
        (|e| e.sums = None, "0 bytes of digests"),
        (|e| e.tags = Some(vec![0; 16]), "sealed"),
        (|e| e.sizes = vec![10, 10], "2 clusters for 2 pages"),
    ];
    for (change, why) in wrong {
        let (_temp, dir) = images(|number, entry| {
            if number == 0 {
                change(entry);
            }
        });
        let error = read(&dir).unwrap_err();
        assert!(error.contains("pages-index-1.img: offset"), "{error}");
        assert!(error.contains(why), "{why}: {error}");
    }
    let (temp, dir) = images(|_, _| {});
    std::fs::remove_file(temp.path().join("pages-packed-900.img")).unwrap();
    let error = read(&dir).unwrap_err();
    assert!(error.contains("pages-packed-900.img: no such image file"), "{error}");
}

#[test]
fn what_is_read_is_asked_for_first() {
    let (temp, dir) = images(|_, _| {});
    let listener = UnixListener::bind(temp.path().join(SOCKET)).unwrap();
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, count) = (stream.unwrap(), Arc::clone(&count));
            std::thread::spawn(move || {
                let mut request = [0; REQUEST];
                while stream.read_exact(&mut request).is_ok() {
                    count.fetch_add(1, Ordering::Relaxed);
                    let there = request[..4] == 900_u32.to_le_bytes();
                    stream.write_all(&[u8::from(!there)]).unwrap();
                }
            });
        }
    });
    let error = read(&dir).unwrap_err();
    assert!(error.contains("pages-packed-800.img"), "{error}");
    assert!(error.contains("cannot be fetched"), "{error}");
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}
