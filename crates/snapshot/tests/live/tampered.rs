//! A snapshot whose list of pages was tampered with, and whose digests fit nevertheless: its next release takes pages by
//! that list.

use std::fs;
use std::io::Write;

use torpor_snapshot::{oci, stored};

use crate::fixture::{Fixture, shown};

/// The bytes of a cluster in the list, before its pages, and of the digest of a page.
const LISTED: usize = 48;
const PAGE_SUM: usize = 20;

/// Something that is done to a list.
type Tampering = fn(&mut [u8]);

/// Where the second cluster of a list is.
fn second(list: &[u8]) -> usize {
    LISTED + usize::from(list[12]) * PAGE_SUM
}

/// Gives the snapshot in the store another list of the pages in its pack.
#[track_caller]
fn tamper(fixture: &Fixture, change: Tampering) {
    let mut plain = zstd::decode_all(fs::read(fixture.layer(1)).unwrap().as_slice()).unwrap();
    fixture.change("latest", |manifest| {
        let mut config = fixture.document(manifest["config"]["digest"].as_str().unwrap());
        let mut pack = config["org.torpor.snapshot"]["packs"][0].take();
        let number = |key: &str| usize::try_from(pack[key].as_u64().unwrap()).unwrap();
        let place = number("list_offset")..number("list_offset") + number("list_size");
        change(&mut plain[place.clone()]);
        pack["list_digest"] = oci::sha256(&plain[place]).into();
        pack["plain"] = oci::sha256(&plain).into();
        config["rootfs"]["diff_ids"][1] = pack["plain"].clone();
        let mut frame = stored::Store::new(Vec::new()).unwrap();
        frame.write_all(&plain).unwrap();
        fixture.put(&frame.finish().unwrap(), &mut manifest["layers"][1]);
        pack["layer"] = manifest["layers"][1]["digest"].clone();
        config["org.torpor.snapshot"]["packs"][0] = pack;
        fixture.put(&serde_json::to_vec(&config).unwrap(), &mut manifest["config"]);
    });
}

/// What is found in the list of a base is found in that of a snapshot that has taken pages by it, too.
#[test]
fn a_list_that_names_other_pages_is_refused() {
    let fixture = Fixture::new("tampered", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    let verify = |reference: &str| fixture.torpor(&["verify", reference]).output().unwrap();
    let output = verify(&reference);
    assert!(output.status.success(), "{}", shown(&output));
    let index = fixture.path("store/index.json");
    let made = fs::read(&index).unwrap();
    // Another cluster where one is; a page in another's place.
    let changes: [(Tampering, &str); 2] = [
        (
            |list| {
                let second = second(list);
                (16..LISTED).for_each(|at| list.swap(at, second + at));
            },
            "the list of its pages names another cluster than that at 0\n",
        ),
        (
            |list| {
                let page = second(list) + LISTED;
                (page..page + PAGE_SUM).for_each(|at| list.swap(at, at + PAGE_SUM));
            },
            "page 0 of the cluster at ",
        ),
    ];
    for (number, (change, said)) in changes.into_iter().enumerate() {
        tamper(&fixture, change);
        let layer = fixture.manifest()["layers"][1]["digest"].as_str().unwrap().to_owned();
        let next = format!("{reference}:next-{number}");
        fixture.create(&next, &["--no-trial", "--base", &reference]);
        for reference in [&reference, &next] {
            let output = verify(reference);
            assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
            assert!(shown(&output).contains(&format!("{layer}: {said}")), "{}", shown(&output));
        }
        fs::write(&index, &made).unwrap();
    }
}
