//! Memory: pages open where they were sealed, and nowhere else.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_possible_truncation)]
// Runs of pages are what is meant.
#![allow(clippy::single_range_in_vec_init)]

use torpor_seal::kdf::Keys;
use torpor_seal::page::{HEAD, PageOpener, PageSealer, PagesFile, Removed, Run, SUM, TAG};
use torpor_seal::{Secret, Suite};

const PAGE: usize = 4096;
const RUNS: [Run; 2] = [(0x1000, 2), (0x7000, 2)];

fn place(name: &str, owner: u64) -> PagesFile<'_> {
    PagesFile { name, owner, page: PAGE }
}

fn keys(id: u8, suite: Suite) -> Keys {
    Keys::new(&Secret::take(&mut [1; 32]), &[id; 32], suite)
}

fn plain() -> Vec<u8> {
    (0..4 * PAGE).map(|i| (i / PAGE * 3 + i % 256) as u8).collect()
}

/// A pages file and its tags file.
#[derive(Clone)]
struct Sealed {
    suite: Suite,
    pages: Vec<u8>,
    tags: Vec<u8>,
}

fn seal(suite: Suite) -> Sealed {
    let sealer = PageSealer::new(&keys(1, suite), place("pages-1.img", 5)).unwrap();
    let mut pages = plain();
    // In two spans, the later one first, as threads may do it.
    let (first, second) = (sealer.span(1), sealer.span(3));
    let (head, rest) = pages.split_at_mut(PAGE);
    let late = sealer.seal(&second, &[(0x2000, 1), (0x7000, 2)], rest).unwrap();
    let early = sealer.seal(&first, &[(0x1000, 1)], head).unwrap();
    let sum = sealer.sum().map(Vec::from).unwrap_or_default();
    let tags = [sealer.head().as_slice(), &early, &late, &sum].concat();
    Sealed { suite, pages, tags }
}

fn open_as(sealed: &Sealed, id: u8, at: PagesFile<'_>, runs: &[Run]) -> Option<Vec<u8>> {
    let keys = keys(id, sealed.suite);
    let head = &sealed.tags[..PageOpener::head_len(sealed.suite).min(sealed.tags.len())];
    let (runs, tags) = (runs.iter().copied(), (head, sealed.tags.len() as u64));
    let opener = PageOpener::new(&keys, at, runs, tags, &Removed::default()).ok()?;
    let mut pages = sealed.pages.clone();
    for (index, page) in pages.chunks_mut(PAGE).enumerate() {
        let tag = if opener.needs_tags() {
            sealed.tags.get(HEAD + index * TAG..HEAD + (index + 1) * TAG)?
        } else {
            &[]
        };
        opener.open(index as u64, page, tag).ok()?;
    }
    opener.finish().ok()?;
    Some(pages)
}

fn open(sealed: &Sealed) -> Option<Vec<u8>> {
    open_as(sealed, 1, place("pages-1.img", 5), &RUNS)
}

#[test]
fn round_trip() {
    for suite in Suite::ALL {
        let sealed = seal(suite);
        assert_eq!(sealed.pages.len(), plain().len());
        assert!(sealed.pages.chunks(PAGE).zip(plain().chunks(PAGE)).all(|(a, b)| a != b));
        assert!(open(&sealed).unwrap() == plain());
    }
}

#[test]
fn every_byte_counts() {
    for suite in Suite::ALL {
        let sealed = seal(suite);
        for at in 0..sealed.tags.len() {
            let mut changed = sealed.clone();
            changed.tags[at] ^= 1;
            assert!(open(&changed).is_none(), "{suite}: tags {at}");
        }
        for at in (0..sealed.pages.len()).step_by(61) {
            let mut changed = sealed.clone();
            changed.pages[at] ^= 0x80;
            assert!(open(&changed).is_none(), "{suite}: pages {at}");
        }
        for len in 0..sealed.tags.len() {
            let mut changed = sealed.clone();
            changed.tags.truncate(len);
            assert!(open(&changed).is_none(), "{suite}: {len} bytes of tags");
        }
    }
}

#[test]
fn pages_cannot_be_moved() {
    for suite in Suite::ALL {
        let sealed = seal(suite);
        let mut changed = sealed.clone();
        let (a, b) = changed.pages.split_at_mut(PAGE);
        a.swap_with_slice(&mut b[..PAGE]);
        assert!(open(&changed).is_none(), "{suite}");
        // Their tags go with them.
        if suite == Suite::Aes256Gcm {
            let (a, b) = changed.tags[HEAD..].split_at_mut(TAG);
            a.swap_with_slice(&mut b[..TAG]);
            assert!(open(&changed).is_none());
        }
        // Another file, task, checkpoint, address.
        let at = place("pages-1.img", 5);
        assert!(open_as(&sealed, 1, place("pages-2.img", 5), &RUNS).is_none(), "{suite}");
        assert!(open_as(&sealed, 1, place("pages-1.img", 6), &RUNS).is_none(), "{suite}");
        assert!(open_as(&sealed, 2, at, &RUNS).is_none(), "{suite}");
        assert!(open_as(&sealed, 1, at, &[(0x2000, 2), (0x7000, 2)]).is_none(), "{suite}");
    }
}

#[test]
fn no_span_is_sealed_twice() {
    for suite in Suite::ALL {
        let sealer = PageSealer::new(&keys(1, suite), place("pages-1.img", 5)).unwrap();
        let span = sealer.span(1);
        let mut page = vec![0; PAGE];
        assert!(sealer.seal(&span, &[(0, 2)], &mut page).is_err());
        sealer.seal(&span, &[(0, 1)], &mut page).unwrap();
        assert!(sealer.seal(&span, &[(0, 1)], &mut page).is_err());
        assert_eq!(sealer.span(1).first(), 1);
    }
}

#[test]
fn threads_get_different_places() {
    let sealer = PageSealer::new(&keys(1, Suite::Aes256Gcm), place("pages-1.img", 5)).unwrap();
    let mut taken: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| (0..100).map(|_| sealer.span(3).first()).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    taken.sort_unstable();
    assert_eq!(taken, (0..400).map(|i| i * 3).collect::<Vec<_>>());
}

#[test]
fn the_sum_needs_every_page_once() {
    let sealed = seal(Suite::Aes256XtsHmacSha256);
    let opener = opener_without(&sealed, &Removed::default()).unwrap();
    let read = |first: usize, count: usize| {
        let mut pages = sealed.pages[first * PAGE..(first + count) * PAGE].to_vec();
        opener.open(first as u64, &mut pages, &[]).unwrap();
    };
    read(1, 2);
    read(1, 1);
    assert!(opener.finish().is_err());
    assert_eq!(opener.unseen(0), Some((0, 1)));
    assert_eq!(opener.unseen(1), Some((3, 1)));
    read(0, 1);
    read(0, 4);
    assert_eq!(opener.unseen(0), None);
    opener.finish().unwrap();
}

/// Opens the pages of a file of which some are gone.
fn opener_without(sealed: &Sealed, removed: &Removed) -> Result<PageOpener, torpor_seal::Error> {
    let (keys, tags) = (keys(1, sealed.suite), (sealed.tags.as_slice(), sealed.tags.len() as u64));
    PageOpener::new(&keys, place("pages-1.img", 5), RUNS, tags, removed)
}

#[test]
fn pages_leave_a_sum() {
    let mut sealed = seal(Suite::Aes256XtsHmacSha256);
    let whole = opener_without(&sealed, &Removed::default()).unwrap();
    let sum = whole.share(1, &sealed.pages[PAGE..3 * PAGE]);
    // What is there in their place does not matter.
    sealed.pages[PAGE..3 * PAGE].fill(0);
    let read = |opener: &PageOpener, first: usize, count: usize| {
        let mut pages = sealed.pages[first * PAGE..(first + count) * PAGE].to_vec();
        opener.open(first as u64, &mut pages, &[]).map(|()| pages)
    };
    let removed = Removed { pages: vec![2..3, 1..2], sum };
    let opener = opener_without(&sealed, &removed).unwrap();
    assert_eq!(opener.kept(0..4), Some(0..1));
    assert_eq!(opener.kept(1..4), Some(3..4));
    assert_eq!(opener.kept(1..3), None);
    assert_eq!(read(&opener, 0, 1).unwrap(), plain()[..PAGE]);
    assert_eq!(opener.unseen(0), Some((3, 1)));
    assert_eq!(read(&opener, 3, 1).unwrap(), plain()[3 * PAGE..]);
    opener.finish().unwrap();
    for (first, count) in [(1, 1), (2, 2), (0, 4)] {
        let error = read(&opener, first, count).unwrap_err().to_string();
        assert!(error.contains("was removed"), "{error}");
    }
    // Those that are left have to be what they were, and no others may be missing.
    for (pages, sum) in [(vec![1..3], [0; SUM]), (vec![1..2], sum), (vec![1..4], sum)] {
        let opener = opener_without(&sealed, &Removed { pages, sum }).unwrap();
        while let Some((first, _)) = opener.unseen(0) {
            read(&opener, usize::try_from(first).unwrap(), 1).unwrap();
        }
        assert!(opener.finish().is_err());
    }
    for pages in [vec![1..2, 1..2], vec![3..5], vec![0..u64::MAX]] {
        let error = opener_without(&sealed, &Removed { pages, sum }).unwrap_err().to_string();
        assert!(error.contains("pages that there are not"), "{error}");
    }
    let tags = seal(Suite::Aes256Gcm);
    assert_eq!(opener_without(&tags, &Removed::default()).unwrap().kept(0..4), None);
}
