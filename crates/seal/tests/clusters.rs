//! Compressed memory: clusters open where they were sealed, and nowhere else.
#![allow(clippy::unwrap_used)]

use torpor_seal::cluster::{Cluster, ClusterOpener, ClusterSealer};
use torpor_seal::kdf::Keys;
use torpor_seal::page::{PagesFile, Run, TAG};
use torpor_seal::{Secret, Suite};

const RUNS: [Run; 2] = [(0x1000, 2), (0x7000, 3)];
/// How many pages are in each cluster, and what is stored of it.
const CLUSTERS: [(usize, &[u8]); 3] = [(2, b"first"), (2, b"the second"), (1, b"")];

fn place(owner: u64) -> PagesFile<'static> {
    PagesFile { name: "pages-packed-1.img", owner, page: 4096 }
}

fn keys(id: u8, suite: Suite) -> Keys {
    Keys::new(&Secret::take(&mut [1; 32]), &[id; 32], suite)
}

struct Sealed {
    salt: Vec<u8>,
    clusters: Vec<(Vec<u8>, Vec<u8>)>,
}

fn seal() -> Sealed {
    let sealer = ClusterSealer::new(&keys(1, Suite::Aes256Gcm), place(5)).unwrap();
    let mut stored = CLUSTERS.map(|(_, data)| data.to_vec());
    let (early, late) = (sealer.span(2), sealer.span(3));
    let (head, rest) = stored.split_at_mut(1);
    let clusters = |data: &mut [Vec<u8>], span, runs: &[Run], from: usize| {
        let clusters = data.iter_mut().zip(&CLUSTERS[from..]);
        let clusters = clusters.map(|(data, (pages, _))| Cluster { pages: *pages, data });
        sealer.seal(span, runs, clusters).unwrap()
    };
    // The later one first, as threads may do it.
    let behind = clusters(rest, &late, &[(0x7000, 3)], 1);
    let before = clusters(head, &early, &[(0x1000, 2)], 0);
    let again = sealer.seal(&early, &[(0x1000, 2)], []);
    assert!(again.is_err(), "a span is sealed once");
    let tags = [before, behind].concat();
    let tags = tags.chunks(TAG).map(<[u8]>::to_vec);
    Sealed { salt: sealer.salt().to_vec(), clusters: stored.into_iter().zip(tags).collect() }
}

fn open(sealed: &Sealed, id: u8, owner: u64, runs: &[Run]) -> Option<Vec<Vec<u8>>> {
    let keys = keys(id, Suite::Aes256Gcm);
    let opener =
        ClusterOpener::new(&keys, place(owner), runs.iter().copied(), &sealed.salt).ok()?;
    let mut first = 0;
    let clusters = sealed.clusters.iter().zip(CLUSTERS);
    let opened = clusters.map(|((data, tag), (pages, _))| {
        let mut data = data.clone();
        opener.open(first, pages, &mut data, tag, 0).ok()?;
        first += pages as u64;
        Some(data)
    });
    opened.collect()
}

#[test]
fn clusters_open_as_they_were() {
    let sealed = seal();
    let plain: Vec<_> = CLUSTERS.iter().map(|(_, data)| data.to_vec()).collect();
    assert_ne!(sealed.clusters[0].0, plain[0]);
    assert_eq!(open(&sealed, 1, 5, &RUNS), Some(plain));
}

#[test]
fn they_open_nowhere_else() {
    let sealed = seal();
    assert_eq!(open(&sealed, 2, 5, &RUNS), None, "another checkpoint");
    assert_eq!(open(&sealed, 1, 6, &RUNS), None, "another owner");
    for moved in [[(0x1000, 2), (0x8000, 3)], [(0x2000, 2), (0x7000, 3)]] {
        assert_eq!(open(&sealed, 1, 5, &moved), None, "another address");
    }
    assert_eq!(open(&sealed, 1, 5, &[(0x1000, 2), (0x7000, 2)]), None, "fewer pages");
    // Two that each fit a tag, but not their places.
    let mut swapped = seal();
    swapped.clusters.swap(0, 1);
    assert_eq!(open(&swapped, 1, 5, &RUNS), None);
    // Another writing of the same file has another key.
    let other = Sealed { salt: seal().salt, ..seal() };
    assert_eq!(open(&other, 1, 5, &RUNS), None);
    let none = Sealed { salt: vec![], ..seal() };
    assert_eq!(open(&none, 1, 5, &RUNS), None);
}

#[test]
fn every_bit_counts() {
    for cluster in 0..CLUSTERS.len() {
        let (data, tag) = &seal().clusters[cluster];
        for bit in 0..(data.len() + tag.len()) * 8 {
            let mut sealed = seal();
            let (data, tag) = &mut sealed.clusters[cluster];
            let at = bit / 8;
            let len = data.len();
            let byte = if at < len { &mut data[at] } else { &mut tag[at - len] };
            *byte ^= 1 << (bit % 8);
            assert_eq!(open(&sealed, 1, 5, &RUNS), None);
        }
    }
}

#[test]
fn a_suite_without_tags_cannot() {
    assert!(ClusterSealer::new(&keys(1, Suite::Aes256XtsHmacSha256), place(5)).is_err());
}
