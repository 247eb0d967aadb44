//! Sealed snapshots whose memory comes in parts, while the container runs.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use torpor_snapshot::archive::{FIRST, IMAGES};
use torpor_snapshot::sealed_pack::LIST;
use torpor_snapshot::stored::Store;

use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown, until};
use crate::registry::{Registry, count, feed_log};
use crate::sealed::{found, key, with_secrets};

/// The bytes of a block in the list.
const LISTED: usize = 48;

/// The files of the small layer in the store, by their names.
pub fn small(fixture: &Fixture) -> BTreeMap<String, Vec<u8>> {
    let plain = zstd::decode_all(fs::File::open(fixture.layer(0)).unwrap()).unwrap();
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(plain.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        if entry.header().entry_type() == tar::EntryType::Regular {
            files.insert(name, content);
        }
    }
    files
}

/// The archive of the pack in the store.
pub fn pack(fixture: &Fixture) -> Vec<u8> {
    zstd::decode_all(fs::File::open(fixture.layer(1)).unwrap()).unwrap()
}

/// The sum of these bytes, as lists have it.
pub fn sum_of(bytes: &[u8]) -> Vec<u8> {
    aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref().to_vec()
}

/// The blocks that a list has: the numbers of their files, where they are in these and in the archive of the pack.
fn blocks(list: &[u8]) -> Vec<(u32, std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut at = usize::try_from(FIRST).unwrap();
    let entries = list[8..].chunks_exact(LISTED);
    let block = |entry: &[u8]| {
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        let (size, offset) = (word(4) as usize, word(8) as usize);
        at += size;
        (word(0), offset..offset + size, at - size..at)
    };
    entries.map(block).collect()
}

/// The small layer with these files.
pub fn layer_of(small: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let mut archive = tar::Builder::new(zstd::Encoder::new(Vec::new(), 3).unwrap());
    for (name, content) in small {
        let mut head = tar::Header::new_gnu();
        head.set_size(content.len() as u64);
        head.set_mode(0o600);
        archive.append_data(&mut head, name, content.as_slice()).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap()
}

/// Gives the snapshot in the store other layers, as whoever may write there can.
fn put(fixture: &Fixture, small: &BTreeMap<String, Vec<u8>>, pack: Option<&[u8]>) {
    let small = layer_of(small);
    let mut packs = serde_json::json!([]);
    fixture.change("latest", |manifest| {
        let layers = manifest["layers"].as_array_mut().unwrap();
        layers.truncate(1 + pack.iter().count());
        fixture.put(&small, &mut layers[0]);
        if let Some(pack) = pack {
            let mut frame = Store::new(Vec::new()).unwrap();
            frame.write_all(pack).unwrap();
            fixture.put(&frame.finish().unwrap(), &mut layers[1]);
            packs = serde_json::json!([layers[1]["digest"]]);
        }
    });
    fixture.describe(|about| {
        let all = about["packs"].as_array_mut().unwrap();
        all.truncate(packs.as_array().unwrap().len());
        all.iter_mut().for_each(|pack| pack["layer"] = packs[0].clone());
    });
}

/// Makes the sealed snapshot in the store what an earlier version made: all of it in one layer.
pub fn make_whole(fixture: &Fixture) {
    let (mut small, pack) = (small(fixture), pack(fixture));
    let list = small.remove(LIST).unwrap();
    for (file, place, at) in blocks(&list) {
        let content = small.entry(format!("{IMAGES}/pages-packed-{file}.img")).or_default();
        content.resize(content.len().max(place.end), 0);
        content[place].copy_from_slice(&pack[at]);
    }
    put(fixture, &small, None);
    fixture.describe(|about| about["version"] = 2.into());
}

#[track_caller]
fn has_stopped(fixture: &Fixture, name: &str) {
    until("the container has ended", || {
        let state = fixture.runc(&["state", &fixture.id(name)]).output().unwrap();
        let state: Value = serde_json::from_slice(&state.stdout).unwrap();
        state["status"] == "stopped"
    });
}

#[test]
fn a_sealed_container_starts_from_a_registry_before_its_bytes_are_there() {
    let fixture = Fixture::new("sealed-registry", 20_000);
    let (key, recipient) = key(&fixture);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    let made = fixture.create(&reference, &["--recipient", &recipient]);
    let size = made["size"].as_u64().unwrap();
    fixture.run(&reference, "without", "cold", &[]);
    let report = fixture.path("report.html").display().to_string();
    let ready = ["--identity", &key, "--ready", "exec:/app ask page 3", "--report", &report];
    let said = fixture.run(&reference, "one", "snapshot", &ready);
    println!("of {size} bytes: {said}");
    let number = |key: &str| said[key].as_u64().unwrap();
    assert!((1..=64).contains(&number("requests")), "{said}");
    assert!(number("bytes") * 100 <= size * 15, "{said} of {made}");
    assert!(number("waits") > 0 && number("unforeseen") * 10 <= number("waits"), "{said}");
    fixture.answers_right("one");
    until("all is there", || feed_log(&fixture, "one").lines().count() > 1);
    let log = feed_log(&fixture, "one");
    assert!(count(&log, "the working set", "bytes") * 100 <= size * 15, "{log}");

    // What is in the cache is not fetched again; what is damaged there is.
    let kept = fs::read_dir(fixture.path("cache/packs")).unwrap().flatten();
    let kept = kept.max_by_key(|entry| entry.metadata().unwrap().len()).unwrap().path();
    let mut bytes = fs::read(&kept).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 64].fill(0);
    fs::write(&kept, bytes).unwrap();
    let identity = ["--identity", key.as_str()];
    fixture.run(&reference, "two", "snapshot", &identity);
    fixture.answers_right("two");
    until("all is there", || feed_log(&fixture, "two").lines().count() > 1);
    let log = feed_log(&fixture, "two");
    assert_eq!(count(&log, "the working set", "requests"), 0, "{log}");
    let all = log.lines().last().unwrap();
    assert!((1..=2).contains(&count(all, "requests brought", "requests")), "{log}");

    let all = [&identity[..], &["--prefetch", "all"]].concat();
    fixture.run(&reference, "whole", "snapshot", &all);
    fixture.answers_right("whole");
}

/// All kinds of memory, of several processes, are in the one pack.
#[test]
fn a_tree_starts_from_its_sealed_pack() {
    let fixture = Fixture::new("sealed-tree", 2000);
    let (key, recipient) = key(&fixture);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    let command = ["--", "/app", "2000", "1", "20", "1", "3", "50", "1", "kinds"];
    fixture.create(&reference, &[&["--recipient", &recipient][..], &command].concat());
    let identity = ["--identity", key.as_str()];
    let said = fixture.run(&reference, "warm", "snapshot", &identity);
    assert!((1..=64).contains(&said["requests"].as_u64().unwrap()), "{said}");
    fixture.run(&reference, "cold", "cold", &[&identity[..], &["--policy", "Never"]].concat());
    for child in ["", "1", "2", "3"] {
        let ask = if child.is_empty() {
            vec!["/app", "ask", "sum"]
        } else {
            vec!["/app", "ask-of", child, "sum"]
        };
        until("it answers", || {
            fixture
                .runc(&["exec", &fixture.id("cold")])
                .args(&ask)
                .output()
                .unwrap()
                .status
                .success()
        });
        assert_eq!(fixture.exec("warm", &ask), fixture.exec("cold", &ask), "{child}");
    }
}

/// Neither a registry nor the disk of a host that starts from it has anything of the container in plain.
#[test]
fn neither_a_registry_nor_a_cache_has_anything_in_plain() {
    let fixture = Fixture::new("sealed-cache", 300);
    let (key, recipient) = key(&fixture);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    with_secrets(&fixture, &reference, &["--recipient", &recipient]);
    fixture.run(&reference, "asked", "snapshot", &["--identity", &key]);
    fixture.answers_right("asked");
    until("all is there", || feed_log(&fixture, "asked").lines().count() > 1);
    let instance = fixture.path("state/instances").join(fixture.id("asked"));
    let places = [
        fixture.path("registry"),
        fixture.path("cache"),
        instance.join("images"),
        instance.join("work"),
        instance.join(LIST),
    ];
    let mut bytes = 0;
    assert_eq!(found(&fixture, &places, &mut bytes), [false; 3]);
    assert!(bytes > 300 * 4096 / 4, "there is what was looked through: {bytes} bytes");
}

/// Whoever may write where it lies, but has no key, changes a cluster and all digests, too.
#[test]
fn a_sealed_cluster_that_was_tampered_with_is_found() {
    let fixture = Fixture::new("sealed-tampered", 2000);
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    fixture.create(&reference, &["--recipient", &recipient]);
    let identity = ["--identity", key.as_str()];
    let all = [&identity[..], &["--prefetch", "all"]].concat();
    fixture.run(&reference, "good", "snapshot", &all);

    let (mut small, mut pack) = (small(&fixture), pack(&fixture));
    let middle = pack.len() / 2;
    pack[middle] ^= 1;
    put(&fixture, &small, Some(&pack));
    cold_with(&fixture, &reference, "damaged", "is damaged at", &all);

    let list = small.get_mut(LIST).unwrap();
    for (number, (_, _, at)) in blocks(list).into_iter().enumerate() {
        let end = 8 + (number + 1) * LISTED;
        list[end - 32..end].copy_from_slice(&sum_of(&pack[at]));
    }
    put(&fixture, &small, Some(&pack));
    cold_with(&fixture, &reference, "before", "was changed", &all);
    // One that runs already ends before it could see it.
    let registry = Registry::start(&fixture);
    let mut copy = Command::new("skopeo");
    copy.args(["--insecure-policy", "copy", "--dest-tls-verify=false"]);
    copy.arg(format!("oci:{}:latest", fixture.path("store").display()));
    let output = copy.arg(format!("docker://{}", registry.reference())).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let from = format!("runc:{}", fixture.path("bundle").display());
    let ready = ["--ready", "exec:/app ask page 3", "--from", &from];
    let ready = [&identity[..], &ready].concat();
    fixture.run(&registry.reference(), "lazy", "snapshot", &ready);
    let asked =
        fixture.runc(&["exec", &fixture.id("lazy"), "/app", "ask", "sum"]).output().unwrap();
    assert!(!asked.status.success());
    has_stopped(&fixture, "lazy");

    // A file of another length (its last block need not be the last in the pack: the trial start may have asked for
    // it), or a list that is not there.
    let list = small.get_mut(LIST).unwrap();
    let blocks = blocks(list).into_iter().enumerate();
    let (number, (.., at)) =
        blocks.max_by_key(|(_, (file, place, _))| (*file, place.start)).unwrap();
    let entry = 8 + number * LISTED;
    list.drain(entry..entry + LISTED);
    pack.drain(at);
    put(&fixture, &small, Some(&pack));
    cold_with(&fixture, &reference, "short", "were sealed", &identity);
    small.remove(LIST);
    put(&fixture, &small, Some(&pack));
    cold_with(&fixture, &reference, "listless", "the list of the sealed pages", &identity);
}

/// A container ends with the source of its sealed pages, as with one of plain ones.
#[test]
fn a_sealed_pack_that_is_damaged_in_the_registry_ends_its_tasks() {
    let fixture = Fixture::new("sealed-chunk", 20_000);
    let (key, recipient) = key(&fixture);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--recipient", &recipient]);
    let blobs = fixture.path("registry/docker/registry/v2/blobs/sha256");
    let files = fs::read_dir(blobs).unwrap().flatten();
    let files = files.flat_map(|dir| fs::read_dir(dir.path()).unwrap().flatten());
    let pack = files.map(|dir| dir.path().join("data")).max_by_key(|f| length(f)).unwrap();
    // Somewhere behind the working set.
    let mut bytes = fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pack, bytes).unwrap();
    fixture.run(&reference, "lazy", "snapshot", &["--identity", &key]);
    let asked =
        fixture.runc(&["exec", &fixture.id("lazy"), "/app", "ask", "sum"]).output().unwrap();
    assert!(!asked.status.success());
    has_stopped(&fixture, "lazy");
    assert!(feed_log(&fixture, "lazy").contains("is damaged at"));
}

fn length(file: &Path) -> u64 {
    file.metadata().unwrap().len()
}
