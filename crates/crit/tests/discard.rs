//! A checkpoint that is thrown away takes the names with it that its dump has given to files.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;

use clap::Parser;
use torpor_crit::ImageCommand;
use torpor_images::proto::{FileEntry, RegFileEntry, RemapFilePathEntry, RemapType};
use torpor_images::{ImageDir, kind};
use torpor_seal::keys::Identities;

#[derive(Parser)]
struct Command {
    #[command(subcommand)]
    image: ImageCommand,
}

/// Images of files by these names, all of which the dump has given, as they say.
fn images(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let images = ImageDir::open(dir.path()).unwrap();
    let (mut files, mut remaps) = (vec![], vec![]);
    for (name, id) in names.iter().zip(1..) {
        let reg = RegFileEntry { id, name: name.as_bytes().to_vec(), ..RegFileEntry::default() };
        files.push(FileEntry { id, reg: Some(reg), ..FileEntry::default() });
        remaps.push(RemapFilePathEntry {
            orig_id: 100 + id,
            remap_id: id,
            remap_type: Some(RemapType::Linked.into()),
        });
    }
    images.write_all(kind::FILES, 0, &files).unwrap();
    images.write_all(kind::REMAP_FPATH, 0, &remaps).unwrap();
    dir
}

fn discard(images: &std::path::Path, root: &std::path::Path) -> bool {
    discard_with(&[], images, root)
}

fn discard_with(options: &[&str], images: &std::path::Path, root: &std::path::Path) -> bool {
    discard_of((images, true), options, root)
}

/// `images`, and whether this host has made them.
fn discard_of(
    (images, is_own): (&std::path::Path, bool),
    options: &[&str],
    root: &std::path::Path,
) -> bool {
    let words = ["image", "discard", images.to_str().unwrap(), "--root", root.to_str().unwrap()];
    let command = Command::parse_from(words.iter().chain(options)).image;
    torpor_crit::run(command, &Identities::default(), &|_| is_own).is_ok()
}

/// They could name what another checkpoint needs.
#[test]
fn no_name_goes_that_images_of_others_say() {
    let root = tempfile::tempdir().unwrap();
    let name = root.path().join("link_remap.1");
    for (options, stays) in [(&[][..], true), (&["--trusted"], false)] {
        fs::write(&name, "").unwrap();
        let images = images(&["/link_remap.1"]);
        assert!(discard_of((images.path(), false), options, root.path()));
        assert_eq!(name.exists(), stays, "{options:?}");
        assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
    }
}

/// Whoever removes the lock may be killed before that, and asks again.
#[test]
fn images_that_are_kept_are_asked_again() {
    let root = tempfile::tempdir().unwrap();
    let name = root.path().join("link_remap.1");
    fs::write(&name, "").unwrap();
    let images = images(&["/link_remap.1"]);
    let there = || fs::read_dir(images.path()).unwrap().count();
    let before = there();
    assert!(discard_with(&["--keep-images"], images.path(), root.path()) && !name.exists());
    assert!(discard_with(&["--keep-images"], images.path(), root.path()));
    assert_eq!(there(), before);
}

#[test]
fn names_and_images_go_and_nothing_else() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(root.path().join("dir")).unwrap();
    symlink(outside.path(), root.path().join("way")).unwrap();
    for file in ["dir/link_remap.1", "dir/link_remap.99", "dir/precious", "link_remap.4"] {
        fs::write(root.path().join(file), "").unwrap();
    }
    fs::write(outside.path().join("link_remap.3"), "").unwrap();
    let names = ["/dir/link_remap.1", "/dir/precious", "/way/link_remap.3", "/gone/link_remap.5"];
    let images = images(&[&names[..], &["link_remap.4"]].concat());
    fs::write(images.path().join("dump.log"), "").unwrap();
    assert!(discard(images.path(), root.path()));
    let there = |name: &str| root.path().join(name).exists();
    assert!(!there("dir/link_remap.1") && !there("link_remap.4"));
    assert!(there("dir/link_remap.99"), "not this checkpoint's");
    assert!(there("dir/precious"), "no name that a dump gives");
    assert!(outside.path().join("link_remap.3").exists(), "a link led out of the root");
    let left: Vec<_> =
        fs::read_dir(images.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["dump.log"]);
}

/// Whoever had the tasks can lay out a link to a directory where another checkpoint has its names, which are its own only
/// by their numbers.
#[test]
fn no_name_of_another_checkpoint_goes() {
    let root = tempfile::tempdir().unwrap();
    let others = root.path().join("others");
    fs::create_dir(&others).unwrap();
    fs::write(others.join("link_remap.1"), "").unwrap();
    symlink("others", root.path().join("own")).unwrap();
    fs::write(root.path().join("file"), "").unwrap();
    let images = images(&["/own/link_remap.1", "/file/link_remap.2"]);
    assert!(discard(images.path(), root.path()));
    assert!(others.join("link_remap.1").exists());
    assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
}

/// A directory that is mistyped may be somebody's.
#[test]
fn nothing_goes_that_is_no_image_of_a_checkpoint() {
    let (root, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let disk = others.path().join("ubuntu.img");
    fs::write(&disk, "a disk").unwrap();
    assert!(!discard(others.path(), root.path()));
    assert_eq!(fs::read_to_string(&disk).unwrap(), "a disk");
    let images = images(&["/link_remap.1"]);
    for name in ["ubuntu.img", "seal.img.old"] {
        fs::write(images.path().join(name), "").unwrap();
    }
    for name in ["pages-1.img", "working-set.img"] {
        fs::write(images.path().join(name), "").unwrap();
    }
    assert!(discard(images.path(), root.path()));
    let left = fs::read_dir(images.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = left.collect();
    left.sort();
    assert_eq!(left, ["seal.img.old", "ubuntu.img"]);
}

#[test]
fn images_stay_as_long_as_a_name_cannot_be_removed() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("link_remap.1")).unwrap();
    let images = images(&["/link_remap.1"]);
    assert!(!discard(images.path(), root.path()));
    assert!(ImageDir::open(images.path()).unwrap().has(kind::REMAP_FPATH, 0).unwrap());
}
