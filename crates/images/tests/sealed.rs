//! Sealed checkpoints as a whole: what anybody changed is found.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use torpor_images::compress::Compression;
use torpor_images::packed::Packer;
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::pages::{PagesReader, PagesWriter};
use torpor_images::proto::{InventoryEntry, PipeDataEntry, TaskKobjIdsEntry};
use torpor_images::sealed::Unwrap;
use torpor_images::{ImageDir, Result, kind};
use torpor_seal::{Header, MasterKey, Secret, Stanza, Suite};

const TASKS: [u64; 2] = [11, 12];

/// The suite, and whether memory is compressed before it is sealed.
type Form = (Suite, Option<Compression>);

const GCM: Form = (Suite::Aes256Gcm, None);
const FORMS: [Form; 4] = [
    GCM,
    (Suite::Aes256XtsHmacSha256, None),
    (Suite::Aes256Gcm, Some(Compression::LZ4)),
    (Suite::Aes256Gcm, Some(Compression::ZSTD)),
];

fn master() -> MasterKey {
    Secret::take(&mut [6; 32])
}

/// Gives the key to everybody whose stanza is as it was written.
fn unwrap() -> Arc<Unwrap> {
    Arc::new(|header: &Header| {
        let known = header.stanzas == [stanza()];
        known.then(master).ok_or(torpor_seal::Error::Crypto("finding an identity"))
    })
}

fn stanza() -> Stanza {
    Stanza { kind: "test".into(), args: vec![b"me".to_vec()], body: vec![7; 20] }
}

fn ids(task: u64) -> TaskKobjIdsEntry {
    let n = u32::try_from(task).unwrap();
    TaskKobjIdsEntry { vm_id: n, files_id: 1, fs_id: 1, sighand_id: n, ..Default::default() }
}

fn page(task: u64, index: u64) -> Vec<u8> {
    let fill = u8::try_from(task * 4 + index).unwrap();
    vec![fill; usize::try_from(page_size()).unwrap()]
}

/// Writes a checkpoint of two tasks with two pages each, a pipe and a stream.
fn dump(path: &Path, (suite, compression): Form, parent: Option<&str>) {
    std::fs::create_dir(path).unwrap();
    let mut dir = ImageDir::open(path).unwrap();
    let lower = parent.map(|parent| {
        dir.set_parent(Path::new(parent)).unwrap();
        ImageDir::open(path.join(parent)).unwrap().identity().unwrap()
    });
    let header = Header { stanzas: vec![stanza()], ..Header::new(suite, lower).unwrap() };
    dir.seal(header, &master()).unwrap();
    for task in TASKS {
        dir.write_one(kind::IDS, task, &ids(task)).unwrap();
        let number = u32::try_from(task - 10).unwrap();
        let start =
            if compression.is_some() { PagemapWriter::packed } else { PagemapWriter::create };
        let mut map = start(&dir, kind::PAGEMAP, task, number).unwrap();
        let (vaddr, pages) = (0x10_0000, 2);
        map.push(Run { vaddr, pages, present: true, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let pages = PagesWriter::create(&dir, number, task, compression, None).unwrap();
        let span = pages.span(2);
        let mut data = [page(task, 0), page(task, 1)].concat();
        pages.write(&span, &[(vaddr, 2)], &mut data, &mut Packer::default()).unwrap();
        pages.finish(&dir).unwrap();
    }
    let mut pipes = dir.writer(kind::PIPES_DATA, 0).unwrap();
    for id in [1, 2] {
        pipes.entry(&PipeDataEntry { pipe_id: id, bytes: 4, ..Default::default() }).unwrap();
        pipes.raw(b"data").unwrap();
    }
    pipes.finish().unwrap();
    let mut stream = dir.writer(kind::TMPFS_DEV, 5).unwrap();
    stream.write_all(b"an archive").unwrap();
    stream.finish().unwrap();
    let inventory = InventoryEntry { img_version: 2, ..Default::default() };
    dir.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    dir.finish_seal(None).unwrap();
}

/// Reads all of a checkpoint as a restore does, up to where tasks would run.
fn load(path: &Path) -> Result<()> {
    let mut dir = ImageDir::open(path)?;
    let signed = dir.unseal(&unwrap())?;
    dir.verify(&signed)?;
    dir.inventory()?;
    for task in TASKS {
        assert_eq!(dir.read_one::<TaskKobjIdsEntry>(kind::IDS, task)?, ids(task));
        let map = Pagemap::read(&dir, kind::PAGEMAP, task)?;
        let pages = PagesReader::open(&dir, &map)?;
        // The second one is left for the sum to find.
        let mut data = page(0, 0);
        let tagged = dir.seal_ref().unwrap().header().suite == Suite::Aes256Gcm;
        for index in 0..if tagged { 2 } else { 1 } {
            pages.read_exact_at(&mut data, index * page_size())?;
            // Without tags it is the sum that tells, later.
            if tagged {
                assert!(data == page(task, index));
            }
        }
    }
    let mut pipes = dir.reader(kind::PIPES_DATA, 0)?.unwrap();
    while pipes.next::<PipeDataEntry>()?.is_some() {
        assert_eq!(pipes.raw(4)?, b"data");
    }
    let mut text = String::new();
    let mut stream = dir.reader(kind::TMPFS_DEV, 5)?.unwrap();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "an archive");
    dir.verify_pages()?;
    dir.parent().map(|_| ())
}

type Files = BTreeMap<String, Vec<u8>>;

fn files(path: &Path) -> Files {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file() && !path.is_symlink());
    files
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect()
}

fn dump_both(top: &Path, form: Form) -> (std::path::PathBuf, Files, Files) {
    let (path, other) = (top.join("1"), top.join("2"));
    dump(&path, form, None);
    dump(&other, form, None);
    load(&path).unwrap();
    load(&other).unwrap();
    let (mine, theirs) = (files(&path), files(&other));
    assert_eq!(mine.len(), 13, "{:?}", mine.keys());
    (path, mine, theirs)
}

#[test]
fn every_byte_of_every_file_counts() {
    for form in FORMS {
        let top = tempfile::tempdir_in("/dev/shm").unwrap();
        let (path, mine, _) = dump_both(top.path(), form);
        for (name, bytes) in &mine {
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << (at % 8);
                std::fs::write(path.join(name), &changed).unwrap();
                assert!(load(&path).is_err(), "{form:?}: {name} {at}");
            }
            std::fs::write(path.join(name), bytes).unwrap();
        }
        load(&path).unwrap();
    }
}

#[test]
fn files_cannot_be_cut_lost_or_added() {
    for form in FORMS {
        let top = tempfile::tempdir_in("/dev/shm").unwrap();
        let (path, mine, _) = dump_both(top.path(), form);
        for (name, bytes) in &mine {
            let at = path.join(name);
            for len in [0, 1, bytes.len() / 2, bytes.len() - 1] {
                std::fs::write(&at, &bytes[..len]).unwrap();
                assert!(load(&path).is_err(), "{form:?}: {name} cut to {len}");
            }
            std::fs::write(&at, [bytes.as_slice(), &[0]].concat()).unwrap();
            assert!(load(&path).is_err(), "{form:?}: {name} longer");
            std::fs::remove_file(&at).unwrap();
            assert!(load(&path).is_err(), "{form:?}: {name} gone");
            std::fs::write(&at, bytes).unwrap();
        }
        std::fs::write(path.join("seccomp.img"), b"").unwrap();
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains("seccomp.img: is no part"), "{error}");
        std::fs::remove_file(path.join("seccomp.img")).unwrap();
        // What is no image is none of ours.
        std::fs::write(path.join("dump.log"), b"log").unwrap();
        std::fs::write(path.join("stats-dump"), b"").unwrap();
        load(&path).unwrap();
    }
}

#[test]
fn files_cannot_be_exchanged() {
    for form in FORMS {
        let top = tempfile::tempdir_in("/dev/shm").unwrap();
        let (path, mine, theirs) = dump_both(top.path(), form);
        // With those of another checkpoint for the same recipients, alone, and together
        // with its manifest or its head.
        for name in mine.keys() {
            for with in [None, Some("manifest.img"), Some("seal.img")] {
                std::fs::write(path.join(name), &theirs[name]).unwrap();
                with.iter()
                    .for_each(|with| std::fs::write(path.join(with), &theirs[*with]).unwrap());
                assert!(load(&path).is_err(), "{form:?}: {name} of another, {with:?}");
                std::fs::write(path.join(name), &mine[name]).unwrap();
                with.iter().for_each(|with| std::fs::write(path.join(with), &mine[*with]).unwrap());
            }
        }
        // With each other, those of two tasks among them.
        for (a, b) in mine.keys().flat_map(|a| mine.keys().map(move |b| (a, b))) {
            if a < b {
                std::fs::write(path.join(a), &mine[b]).unwrap();
                std::fs::write(path.join(b), &mine[a]).unwrap();
                assert!(load(&path).is_err(), "{form:?}: {a} and {b}");
                std::fs::write(path.join(a), &mine[a]).unwrap();
                std::fs::write(path.join(b), &mine[b]).unwrap();
            }
        }
        load(&path).unwrap();
    }
}

#[test]
fn without_a_key_it_says_so() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("1");
    dump(&path, GCM, None);
    let dir = ImageDir::open(&path).unwrap();
    let error = dir.inventory().unwrap_err().to_string();
    assert!(
        error.ends_with("inventory.img: is sealed; give an identity that can open it"),
        "{error}"
    );
}

#[test]
fn a_child_names_its_parent() {
    let top = tempfile::tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    dump(&at("1"), GCM, None);
    dump(&at("2"), GCM, Some("../1"));
    dump(&at("3"), GCM, None);
    load(&at("2")).unwrap();
    // Another parent with the same recipients.
    std::fs::rename(at("1"), at("old")).unwrap();
    std::fs::rename(at("3"), at("1")).unwrap();
    let error = load(&at("2")).unwrap_err().to_string();
    assert!(
        error.contains("is not that of the checkpoint which the next one builds on"),
        "{error}"
    );
    // A plain one, and none.
    std::fs::rename(at("1"), at("3")).unwrap();
    std::fs::create_dir(at("1")).unwrap();
    assert!(load(&at("2")).is_err());
    std::fs::remove_dir(at("1")).unwrap();
    assert!(load(&at("2")).is_err());
    // A parent that was changed.
    std::fs::rename(at("old"), at("1")).unwrap();
    load(&at("2")).unwrap();
    let inside = at("1").join("ids-11.img");
    let mut bytes = std::fs::read(&inside).unwrap();
    bytes[30] ^= 1;
    std::fs::write(&inside, bytes).unwrap();
    assert!(load(&at("2")).is_err());
}

#[test]
fn a_digest_is_that_of_what_is_stored() {
    let top = tempfile::tempdir().unwrap();
    let mut dir = ImageDir::open(top.path()).unwrap();
    dir.keep_digests();
    let header = Header { stanzas: vec![stanza()], ..Header::new(Suite::Aes256Gcm, None).unwrap() };
    dir.seal(header, &master()).unwrap();
    dir.write_one(kind::IDS, 1, &ids(1)).unwrap();
    let stored = ImageDir::open(top.path()).unwrap().digest("ids-1.img").unwrap();
    std::fs::write(top.path().join("ids-1.img"), "x").unwrap();
    assert_eq!(dir.digest("ids-1.img").unwrap(), stored);
}

/// A file of a failed attempt that was replaced is not in the manifest twice, and one
/// that was removed is not in it.
#[test]
fn files_can_be_written_again() {
    let top = tempfile::tempdir().unwrap();
    let mut dir = ImageDir::open(top.path()).unwrap();
    let header = Header { stanzas: vec![stanza()], ..Header::new(Suite::Aes256Gcm, None).unwrap() };
    dir.seal(header, &master()).unwrap();
    dir.write_one(kind::IDS, 1, &ids(1)).unwrap();
    let first = std::fs::read(top.path().join("ids-1.img")).unwrap();
    dir.write_one(kind::IDS, 1, &ids(1)).unwrap();
    let second = std::fs::read(top.path().join("ids-1.img")).unwrap();
    assert!(first[24..] != second[24..], "the key is another one each time");
    dir.write_one(kind::IDS, 2, &ids(2)).unwrap();
    dir.remove("ids-2.img").unwrap();
    dir.finish_seal(None).unwrap();
    let mut dir = ImageDir::open(top.path()).unwrap();
    let signed = dir.unseal(&unwrap()).unwrap();
    dir.verify(&signed).unwrap();
    std::fs::write(top.path().join("ids-1.img"), first).unwrap();
    assert!(dir.verify(&signed).is_err());
}
