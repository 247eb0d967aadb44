//! Image directories: what is written is read back, and nothing else is.

#![allow(clippy::unwrap_used)]

use std::fs::Permissions;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use torpor_images::proto::{CoreEntry, InventoryEntry, PipeDataEntry, PstreeEntry};
use torpor_images::{Error, ImageDir, ParentElsewhere, kind};

fn dir() -> (tempfile::TempDir, ImageDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = ImageDir::open(temp.path()).unwrap();
    (temp, dir)
}

fn pstree(pid: u32) -> PstreeEntry {
    PstreeEntry { pid, ppid: 0, pgid: pid, sid: pid, threads: vec![pid] }
}

#[test]
fn file_names_carry_the_id_in_the_base_of_the_kind() {
    assert_eq!(kind::CORE.file_name(31), "core-31.img");
    assert_eq!(kind::GHOST_FILE.file_name(31), "ghost-file-1f.img");
    assert_eq!(kind::PAGEMAP.file_name(31), "pagemap-31.img");
    assert_eq!(kind::FILES.file_name(31), "files.img");
    assert_eq!(kind::TMPFS_IMG.file_name(3), "tmpfs-3.tar.gz.img");
    assert_eq!(kind::STATS_DUMP.file_name(0), "stats-dump");
}

#[test]
fn every_file_name_leads_back_to_its_kind() {
    for kind in kind::ALL {
        // Their names are those of kinds that came after them.
        if [kind::PAGES_OLD, kind::PSIGNAL].contains(kind) {
            continue;
        }
        let id = if kind.takes_id() { 0x2a } else { 0 };
        assert_eq!(kind::Kind::of_file(&kind.file_name(id)), Some((*kind, id)), "{kind:?}");
    }
    for name in ["core-01.img", "core-.img", "core-1", "core--1.img", "core-+1.img", "x"] {
        assert_eq!(kind::Kind::of_file(name), None, "{name}");
    }
}

#[test]
fn one_entry_is_read_back() {
    let (_temp, dir) = dir();
    let inventory = InventoryEntry { img_version: 2, ..Default::default() };
    dir.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    assert_eq!(dir.inventory().unwrap(), inventory);
    dir.remove_inventory().unwrap();
    dir.remove_inventory().unwrap();
    assert!(dir.inventory().unwrap_err().is_missing());
    assert_eq!(dir.read_opt::<CoreEntry>(kind::CORE, 1).unwrap(), None);
}

#[test]
fn a_checkpoint_is_more_than_its_images() {
    let (temp, dir) = dir();
    dir.write_one(kind::INVENTORY, 0, &InventoryEntry::default()).unwrap();
    for kind in [kind::SK_QUEUES, kind::CORE, kind::PAGES] {
        std::fs::write(temp.path().join(kind.file_name(7)), "old").unwrap();
    }
    std::fs::write(temp.path().join("dump.log"), "not an image").unwrap();
    dir.set_parent("../1".as_ref()).unwrap();
    let own = ["inventory.img", "core-7.img", "pages-7.img", "parent", "sk-queues.img"];
    assert_eq!(dir.own_names().unwrap(), own);
}

#[test]
fn entries_are_read_back_in_order() {
    let (_temp, dir) = dir();
    let entries = [pstree(1), pstree(2), pstree(3)];
    dir.write_all(kind::PSTREE, 0, &entries).unwrap();
    assert_eq!(dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap(), entries);
    let error = dir.read_one::<PstreeEntry>(kind::PSTREE, 0).unwrap_err();
    assert!(matches!(error, Error::Trailing { offset: 22, .. }), "{error}");
    assert!(dir.read_all_or_empty::<PipeDataEntry>(kind::PIPES_DATA, 0).unwrap().is_empty());
}

#[test]
fn data_follows_its_entry() {
    let (_temp, dir) = dir();
    let mut writer = dir.writer(kind::PIPES_DATA, 0).unwrap();
    for (id, data) in [(1, "hello"), (2, "")] {
        let bytes = u32::try_from(data.len()).unwrap();
        writer.entry(&PipeDataEntry { pipe_id: id, bytes, ..PipeDataEntry::default() }).unwrap();
        writer.raw(data.as_bytes()).unwrap();
    }
    writer.finish().unwrap();
    let mut reader = dir.reader(kind::PIPES_DATA, 0).unwrap().unwrap();
    let first: PipeDataEntry = reader.next().unwrap().unwrap();
    assert_eq!(reader.raw(first.bytes.into()).unwrap(), b"hello");
    let second: PipeDataEntry = reader.next().unwrap().unwrap();
    assert_eq!((second.pipe_id, second.bytes), (2, 0));
    reader.end().unwrap();
    assert!(dir.reader(kind::FIFO_DATA, 0).unwrap().is_none());
}

#[test]
fn streams_have_no_header() {
    let (_temp, dir) = dir();
    let mut writer = dir.writer(kind::IFADDR, 7).unwrap();
    writer.raw(b"raw").unwrap();
    writer.finish().unwrap();
    assert_eq!(std::fs::read(dir.path().join("ifaddr-7.img")).unwrap(), b"raw");
    let mut text = String::new();
    dir.reader(kind::IFADDR, 7).unwrap().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "raw");
}

#[test]
fn a_digest_is_that_of_what_was_written() {
    let (temp, mut dir) = dir();
    let path = temp.path().join("pstree.img");
    let digest = |dir: &ImageDir| dir.digest("pstree.img");
    let write = |dir: &ImageDir, pid| dir.write_one(kind::PSTREE, 0, &pstree(pid)).unwrap();
    write(&dir, 1);
    let first = digest(&dir).unwrap();
    dir.keep_digests();
    write(&dir, 1);
    std::fs::write(&path, "x").unwrap();
    assert_eq!(digest(&dir).unwrap(), first);
    write(&dir, 2);
    let second = digest(&dir).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_ne!(second, first);
    // Of what is written in another way nothing is kept.
    drop(dir.create_file("pstree.img").unwrap());
    assert_ne!(digest(&dir).unwrap(), second);
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(digest(&dir).unwrap(), second);
    write(&dir, 1);
    dir.remove("pstree.img").unwrap();
    assert!(digest(&dir).unwrap_err().is_missing());
    let unfinished = dir.writer(kind::PSTREE, 0).unwrap();
    drop(unfinished);
    assert_ne!(digest(&dir).unwrap(), first);
}

#[test]
fn a_link_is_neither_followed_nor_written_through() {
    let (temp, dir) = dir();
    let secret = temp.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    std::os::unix::fs::symlink(&secret, temp.path().join("pages-1.img")).unwrap();
    let error = dir.raw_file_open(kind::PAGES, 1).unwrap_err();
    assert!(matches!(error, Error::NotRegular { .. }), "{error}");
    drop(dir.raw_file_create(kind::PAGES, 1).unwrap());
    assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
    dir.raw_file_open(kind::PAGES, 1).unwrap();
    for name in ["../x", "", ".", "..", "a/b"] {
        assert!(matches!(dir.open_file(name), Err(Error::BadName { .. })), "{name}");
    }
}

#[test]
fn parents_are_followed_but_not_for_ever() {
    let (temp, dir) = dir();
    assert!(dir.parent().unwrap().is_none());
    let sub = ImageDir::create(temp.path().join("sub")).unwrap();
    sub.set_parent(Path::new("..")).unwrap();
    dir.write_one(kind::PSTREE, 0, &pstree(1)).unwrap();
    assert!(sub.parent().unwrap().unwrap().has(kind::PSTREE, 0).unwrap());
    sub.set_parent(Path::new("nowhere")).unwrap();
    assert!(sub.parent().unwrap_err().is_missing());

    sub.set_parent(Path::new(".")).unwrap();
    for keeps in [false, true] {
        let mut next = ImageDir::open(sub.path()).unwrap();
        if keeps {
            assert_eq!(next.keep_parents().unwrap(), []);
        }
        let error = loop {
            match next.parent() {
                Ok(parent) => next = parent.unwrap(),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::TooManyParents { .. }), "{error}");
    }
}

/// A link in the images of a stranger does not lead to the memory of somebody else.
#[test]
fn parents_are_near_or_named() {
    let temp = tempfile::tempdir().unwrap();
    let at = |path: &str| temp.path().join(path);
    let all = ["above/dir/images", "above/dir/images/inner", "above/dir/round", "above/rounds/2"];
    for dir in all.into_iter().chain(["other"]) {
        std::fs::create_dir_all(at(dir)).unwrap();
        let inventory = InventoryEntry { img_version: 2, ..InventoryEntry::default() };
        let dir = ImageDir::open(at(dir)).unwrap();
        dir.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    }
    // Two up is near where nobody else can lay out anything.
    for dir in ["above", "above/dir", "above/dir/images", "above/rounds", "above/rounds/2"] {
        std::fs::set_permissions(at(dir), Permissions::from_mode(0o755)).unwrap();
    }
    let images = at("above/dir/images");
    let link = |target: &str, name: &str| {
        let _ = std::fs::remove_file(images.join(name));
        std::os::unix::fs::symlink(target, images.join(name)).unwrap();
    };
    link("..", "up");
    link(at("other").to_str().unwrap(), "away");
    let dir = || ImageDir::open(&images).unwrap();
    for near in ["inner", ".", "./inner/../inner", "../round", "../../rounds/2", "../images"] {
        link(near, "parent");
        let kept = dir();
        assert_eq!(kept.keep_parents().unwrap(), [], "{near}");
        assert!(kept.parent().unwrap().unwrap().inventory().is_ok(), "{near}");
    }
    let (absolute, other) = (at("other"), std::fs::metadata(at("other")).unwrap());
    let elsewhere = ParentElsewhere { path: absolute, identity: (other.dev(), other.ino()) };
    let absolute = elsewhere.path.to_str().unwrap();
    for away in [
        absolute,
        "../../../other",
        "away",
        "up/round",
        "inner/../../round",
        "../images/../../../other",
    ] {
        link(away, "parent");
        let kept = dir();
        let told = kept.keep_parents().unwrap();
        assert_eq!(told.len(), 1, "{away}");
        assert!(told == [elsewhere.clone()] || told[0].path == at("above/dir/round"), "{away}");
        assert!(kept.parent().unwrap().is_some(), "{away}");
        // It comes later: nobody was asked for it.
        std::fs::remove_file(images.join("parent")).unwrap();
        let late = dir();
        assert_eq!(late.keep_parents().unwrap(), []);
        link(away, "parent");
        assert!(late.parent().is_err(), "{away}");
    }
    for way in ["above", "above/dir", "above/rounds", "above/rounds/2"] {
        link("../../rounds/2", "parent");
        for mode in [0o775, 0o757, 0o1755] {
            std::fs::set_permissions(at(way), Permissions::from_mode(mode)).unwrap();
            let told: Vec<_> =
                dir().keep_parents().unwrap().iter().map(|p| p.path.clone()).collect();
            assert_eq!(told, [at("above/rounds/2")], "{way} {mode:o}");
        }
        std::fs::set_permissions(at(way), Permissions::from_mode(0o755)).unwrap();
    }
    // What it builds on builds on something in turn.
    link("../round", "parent");
    std::os::unix::fs::symlink(absolute, at("above/dir/round/parent")).unwrap();
    assert_eq!(dir().keep_parents().unwrap(), std::slice::from_ref(&elsewhere));
}

/// Two further up from `/tmp/images` is everything that the host has.
#[test]
fn the_root_is_near_to_nobody() {
    let (temp, _) = dir();
    let images = ImageDir::open(temp.path()).unwrap();
    let top = temp.path().canonicalize().unwrap();
    let depth = top.components().count() - 1;
    let to_root = vec![".."; depth].join("/");
    let usr = std::fs::canonicalize("/usr").unwrap();
    images.set_parent(Path::new(&format!("{to_root}/usr"))).unwrap();
    let told: Vec<_> = images.keep_parents().unwrap().iter().map(|p| p.path.clone()).collect();
    assert_eq!(told, [usr]);
}

/// A hop in a place that is allowed does not lead to one that is not.
#[test]
fn all_parents_are_told_and_stay_what_they_were() {
    let temp = tempfile::tempdir().unwrap();
    let top = temp.path().canonicalize().unwrap();
    let at = |name: &str| top.join(name);
    let all = ["images/deep/own", "volume/hop", "volume/other", "victim", "second"];
    for (size, dir) in all.iter().enumerate() {
        std::fs::create_dir_all(at(dir)).unwrap();
        let inventory = InventoryEntry { img_version: 2, ..InventoryEntry::default() };
        ImageDir::open(at(dir)).unwrap().write_one(kind::INVENTORY, 0, &inventory).unwrap();
        std::fs::write(at(dir).join("pages-1.img"), vec![0; size]).unwrap();
    }
    let link = |target: &str, name: &str| {
        let _ = std::fs::remove_file(at(name));
        std::os::unix::fs::symlink(at(target), at(name)).unwrap();
    };
    link("volume/hop", "images/deep/own/parent");
    link("victim", "volume/hop/parent");
    let images = ImageDir::open(at("images/deep/own")).unwrap();
    let paths = |images: &ImageDir| -> Vec<_> {
        images.keep_parents().unwrap().iter().map(|parent| parent.path.clone()).collect()
    };
    assert_eq!(paths(&images), [at("volume/hop"), at("victim")]);

    // Relative, too: what is near to the hop is not near to the images.
    std::fs::remove_file(at("volume/hop/parent")).unwrap();
    std::os::unix::fs::symlink("../other", at("volume/hop/parent")).unwrap();
    let images = ImageDir::open(at("images/deep/own")).unwrap();
    assert_eq!(paths(&images), [at("volume/hop"), at("volume/other")]);

    // Links that change lead where they led.
    link("victim", "images/deep/own/parent");
    link("second", "volume/hop/parent");
    std::fs::rename(at("volume/other"), at("volume/gone")).unwrap();
    std::fs::rename(at("second"), at("volume/other")).unwrap();
    let size = |dir: &ImageDir| dir.open_file("pages-1.img").unwrap().metadata().unwrap().len();
    let hop = images.parent().unwrap().unwrap();
    assert_eq!(size(&hop), 1);
    let other = hop.parent().unwrap().unwrap();
    assert_eq!(size(&other), 2);
    // Nor does one come that was not there.
    std::os::unix::fs::symlink("../hop", at("volume/gone/parent")).unwrap();
    let error = other.parent().unwrap_err().to_string();
    assert!(error.contains("does not lie near") && error.contains("parent"), "{error}");
}

/// A file that has no bytes on the disk does not have any copied.
#[test]
fn what_is_too_large_is_refused_by_its_size() {
    let (temp, dir) = dir();
    dir.start_pinning();
    let file = std::fs::File::create(temp.path().join("files.img")).unwrap();
    file.set_len(5 << 30).unwrap();
    let error = dir.pin_all().unwrap_err().to_string();
    assert!(error.contains("files.img") && error.contains("of 5368709120 bytes"), "{error}");
}

#[test]
fn every_kind_is_in_the_documentation() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/image-format.md");
    let page = std::fs::read_to_string(page).unwrap();
    for kind in kind::ALL {
        let mut name = kind.template.to_owned();
        for conversion in ["%lu", "%ld", "%u", "%d", "%x"] {
            name = name.replace(conversion, "ID");
        }
        let row = page.lines().find(|line| line.contains(&name));
        let row = row.unwrap_or_else(|| panic!("{name} is not in the documentation"));
        if let (true, Some(magic)) = (row.starts_with('|'), kind.header.magic()) {
            assert!(row.contains(&format!("{magic:08x}")), "{row}");
        }
    }
}

#[test]
fn what_was_opened_stays_as_it_was() {
    let (temp, dir) = dir();
    let large = vec![7; (1 << 20) + 1];
    dir.write_one(kind::PSTREE, 0, &pstree(1)).unwrap();
    std::fs::write(temp.path().join("iptables-1.img"), &large).unwrap();
    std::fs::write(temp.path().join("pages-1.img"), "old").unwrap();
    let read = |name: &str| -> Result<Vec<u8>, Error> {
        let mut bytes = vec![];
        dir.open_file(name)?.read_to_end(&mut bytes).unwrap();
        Ok(bytes)
    };
    dir.start_pinning();
    assert_eq!(read("iptables-1.img").unwrap(), large);
    assert_eq!(dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap(), [pstree(1)]);
    assert!(read("nftables-1.img").unwrap_err().is_missing());
    assert_eq!(read("pages-1.img").unwrap(), b"old");
    for stopped in [false, true] {
        // In place, and by a new file of the same name.
        std::fs::write(temp.path().join("iptables-1.img"), "new").unwrap();
        dir.remove("pstree.img").unwrap();
        dir.write_one(kind::PSTREE, 0, &pstree(2)).unwrap();
        for name in ["nftables-1.img", "rule-1.img", "pages-1.img"] {
            std::fs::write(temp.path().join(name), "new").unwrap();
        }
        assert_eq!(read("iptables-1.img").unwrap(), large);
        assert_eq!(dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap(), [pstree(1)]);
        assert!(read("nftables-1.img").unwrap_err().is_missing());
        assert!(!dir.has(kind::NFTABLES, 1).unwrap());
        assert_eq!(read("pages-1.img").unwrap(), b"new");
        if !stopped {
            dir.stop_pinning(|name| name != "route-1.img");
        }
    }
    assert_eq!(read("rule-1.img").unwrap(), b"new");
    dir.stop_pinning(|name| name != "pstree.img");
    assert_eq!(dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap(), [pstree(2)]);
}

#[test]
fn what_is_added_later_is_not_there() {
    let (temp, dir) = dir();
    dir.write_one(kind::PSTREE, 0, &pstree(1)).unwrap();
    let add = |name: &str| std::fs::write(temp.path().join(name), "new").unwrap();
    dir.start_pinning();
    dir.pin_all().unwrap();
    add("nftables-1.img");
    dir.stop_pinning(|name| name != "pstree.img");
    add("iptables-1.img");
    add("pages-1.img");
    for kind in [kind::NFTABLES, kind::IPTABLES] {
        assert!(dir.reader(kind, 1).unwrap().is_none());
        assert!(dir.open_file(&kind.file_name(1)).unwrap_err().is_missing());
        assert!(!dir.has(kind, 1).unwrap());
        assert!(dir.ids(kind).unwrap().is_empty());
    }
    // It gives no rights, and may come late.
    assert!(dir.has(kind::PAGES, 1).unwrap());
    dir.open_file("pages-1.img").unwrap();
    assert_eq!(dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap(), [pstree(1)]);
}
