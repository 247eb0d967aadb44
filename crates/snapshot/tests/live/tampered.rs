//! A snapshot whose list of pages was tampered with, and whose digests fit nevertheless: its next release takes pages by
//! that list. And one that says something else of a pack than other snapshots do that have the same pack.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_snapshot::archive::FIRST;
use torpor_snapshot::{oci, stored};

use crate::belief::copy;
use crate::fixture::{Fixture, shown, until};
use crate::sealed_pack::{self, layer_of, small};

/// The bytes of a cluster in the list, before its pages, and of the digest of a page.
const LISTED: usize = 48;
const PAGE_SUM: usize = 20;

/// Something that is done to a list.
type Tampering = fn(&mut [u8]);

/// Where the second cluster of a list is.
fn second(list: &[u8]) -> usize {
    LISTED + usize::from(list[12]) * PAGE_SUM
}

/// Where the list of a pack is in its archive.
fn place_of(pack: &serde_json::Value) -> std::ops::Range<usize> {
    let number = |key: &str| usize::try_from(pack[key].as_u64().unwrap()).unwrap();
    number("list_offset")..number("list_offset") + number("list_size")
}

/// Gives the snapshot in the store another list of the pages in its pack.
#[track_caller]
fn tamper(fixture: &Fixture, change: Tampering) {
    let mut plain = sealed_pack::pack(fixture);
    fixture.change("latest", |manifest| {
        let mut config = fixture.document(manifest["config"]["digest"].as_str().unwrap());
        let mut pack = config["org.torpor.snapshot"]["packs"][0].take();
        let place = place_of(&pack);
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

/// Whoever makes the snapshot in the store knows which pack another one needs, and gives bytes of his own for it: has it say
/// that the last cluster there is another one. What that is, and where.
fn other_cluster(fixture: &Fixture) -> (u64, Vec<u8>) {
    let plain = sealed_pack::pack(fixture);
    let config = fixture.document(fixture.manifest()["config"]["digest"].as_str().unwrap());
    let pack = &config["org.torpor.snapshot"]["packs"][0];
    let list = &plain[place_of(pack)];
    let (mut last, mut next) = (0, 0);
    while next < list.len() {
        last = next;
        next += LISTED + usize::from(list[last + 12]) * PAGE_SUM;
    }
    let offset = u64::from_le_bytes(list[last..last + 8].try_into().unwrap());
    let size = u32::from_le_bytes(list[last + 8..last + 12].try_into().unwrap());
    let sum = &list[last + 16..last + LISTED];
    let start = usize::try_from(FIRST + offset).unwrap();
    let mut cluster = plain[start..start + size as usize].to_vec();
    let middle = FIRST + offset + u64::from(size / 2);
    let byte = &mut cluster[size as usize / 2];
    *byte = !*byte;
    let blob = fs::File::options().write(true).open(fixture.layer(1)).unwrap();
    blob.write_all_at(&[*byte], stored::extent(&(middle..middle + 1)).start).unwrap();
    let other = sealed_pack::sum_of(&cluster);
    let (mut small, mut found) = (small(fixture), 0);
    for content in small.values_mut() {
        while let Some(at) = content.windows(sum.len()).position(|part| part == sum) {
            content[at..at + sum.len()].copy_from_slice(&other);
            found += 1;
        }
    }
    assert!(found > 0, "no image has the digest of the cluster");
    fixture.change("latest", |manifest| {
        fixture.put(&layer_of(&small), &mut manifest["layers"][0]);
    });
    (offset, cluster)
}

/// What a snapshot that nobody believes says of a pack, and brings for it, is nothing to others that have the same pack.
#[test]
fn a_stranger_puts_nothing_into_the_packs_of_others() {
    let fixture = Fixture::new("poisoned", 500);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    copy(&fixture.path("store"), &fixture.path("own"));
    let (offset, cluster) = other_cluster(&fixture);
    let packs = fixture.path("cache/packs");
    let _ = fs::remove_dir_all(&packs);
    let from = format!("runc:{}", fixture.path("bundle").display());
    // It may end when it needs that cluster.
    let stranger =
        fixture.try_run(&reference, "stranger", &["--policy", "Always", "--from", &from]);
    let has_it = |path: &Path| {
        let mut there = vec![0; cluster.len()];
        let file = fs::File::open(path).unwrap();
        file.read_exact_at(&mut there, offset).is_ok() && there == cluster
    };
    let kept = || fs::read_dir(&packs).unwrap().flatten().map(|entry| entry.path());
    until(&shown(&stranger), || kept().any(|path| has_it(&path)));
    // Its container needs the file, however long it lives.
    kept().enumerate().for_each(|(number, path)| {
        fs::hard_link(path, fixture.path(&format!("needed-{number}"))).unwrap();
    });
    let own = format!("dir:{}", fixture.path("own").display());
    fixture.run(&own, "own", "snapshot", &[]);
    fixture.answers_right("own");
}
