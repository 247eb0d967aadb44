//! Snapshots in a directory, whose containers run before their bytes are read.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use serde_json::Value;

use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown, until};
use crate::registry::{count, feed_log};

/// Where the images of a container are.
fn images(fixture: &Fixture, name: &str) -> PathBuf {
    fixture.path("state/instances").join(fixture.id(name)).join("images")
}

/// The file, by its number, that a container has its pack in.
fn pack(fixture: &Fixture, name: &str) -> u64 {
    let files = fs::read_dir(images(fixture, name)).unwrap().flatten();
    let is_pack =
        |file: &fs::DirEntry| file.file_name().to_string_lossy().starts_with("pages-packed-");
    let mut packs = files.filter(is_pack);
    packs.next().unwrap().metadata().unwrap().ino()
}

/// Little is read before the application answers, no container has a copy of its own, and what is taken out of the
/// directory meanwhile comes to its end.
#[test]
fn a_container_starts_from_a_directory_before_its_bytes_are_read() {
    let fixture = Fixture::new("near", 20_000);
    let reference = fixture.reference();
    let size = fixture.create(&reference, &[])["size"].as_u64().unwrap();
    let ready = ["--ready", "exec:/app ask page 3"];
    let mut packs = Vec::new();
    for (name, is_first) in [("one", true), ("two", false)] {
        let said = fixture.run(&reference, name, "snapshot", &ready);
        packs.push(pack(&fixture, name));
        assert_eq!(said["requests"], 0, "nobody is asked over a network: {said}");
        until("it reads", || feed_log(&fixture, name).contains("the working set"));
        let bytes = count(&feed_log(&fixture, name), "the working set", "bytes");
        assert_eq!(bytes > 0, is_first, "what is in the cache is not read again");
        assert!(bytes * 100 <= size * 15, "{bytes} of {size}");
        fixture.answers_right(name);
    }
    assert_eq!(packs[0], packs[1], "they have one file");

    fs::remove_dir_all(fixture.path("cache")).unwrap();
    fixture.run(&reference, "three", "snapshot", &[]);
    fs::remove_dir_all(fixture.path("store")).unwrap();
    fixture.answers_right("three");
    assert_ne!(pack(&fixture, "three"), packs[0]);
    if std::env::var_os("TORPOR_LONG").is_some() {
        until("the images go with the pager", || !images(&fixture, "three").exists());
    }
}

/// Who brings the pages of a container that was deleted leaves those of the next one of that name alone.
#[test]
fn a_name_is_free_when_its_container_is_deleted() {
    let fixture = Fixture::new("again", 500);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    for _ in 0..10 {
        fixture.run(&reference, "one", "snapshot", &[]);
        fixture.answers_right("one");
        fixture.delete("one");
    }
}

/// A place is known by its whole path to the process that reads it, too.
#[test]
fn a_relative_directory_is_read_from_anywhere() {
    let fixture = Fixture::new("relative-near", 2000);
    let store = ["dir:store", "--from", "runc:bundle", "--ready", "exec:/app ask page 3"];
    let torpor = |words: &[&str]| {
        let mut call = fixture.torpor(words);
        call.arg("--runc-root").arg(fixture.path("runc")).current_dir(fixture.dir.path());
        let output = call.output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
    };
    torpor(&[&["create"][..], &store].concat());
    torpor(&["run", "dir:store", "--policy", "Always", "--id", &fixture.id("one")]);
    fixture.answers_right("one");
}

/// So are the places of what belongs to containers, to the runtime and the process that brings pages.
#[test]
fn relative_places_are_known_from_anywhere() {
    let fixture = Fixture::new("relative-state", 2000);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let _ = fs::remove_dir_all(fixture.path("cache"));
    let mut run = fixture.torpor(&["run", &reference, "--id", &fixture.id("one")]);
    run.args(["--policy", "Always"]).arg("--runc-root").arg(fixture.path("runc"));
    run.env("TORPOR_STATE", "state").env("TORPOR_CACHE", "cache");
    let output = run.current_dir(fixture.dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    fixture.answers_right("one");
    assert!(fixture.path("cache/packs").read_dir().unwrap().next().is_some());
    fixture.delete("one");
    until("the files are gone", || {
        fixture.path("state/instances").read_dir().unwrap().next().is_none()
    });
}

/// Whoever runs already ends before it could see what is damaged. Where an answer is waited for it is started cold.
#[test]
fn damage_in_a_directory_is_never_seen() {
    let fixture = Fixture::new("near-damage", 20_000);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let pack = fs::File::options().read(true).write(true).open(fixture.layer(1)).unwrap();
    // Somewhere behind the working set.
    let middle = pack.metadata().unwrap().len() / 2;
    let mut byte = [0];
    pack.read_exact_at(&mut byte, middle).unwrap();
    pack.write_all_at(&[!byte[0]], middle).unwrap();
    let ready = ["--ready", "exec:/app ask sum", "--timeout", "60"];
    cold_with(&fixture, &reference, "asked", "", &ready);
    // Its pages are read at once, so that it may come that far before it is said to run.
    let output = fixture.try_run(&reference, "lazy", &[]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    if said["started_from"] == "snapshot" {
        let ask = fixture.runc(&["exec", &fixture.id("lazy"), "/app", "ask", "sum"]).output();
        assert!(!ask.unwrap().status.success(), "it has pages that nobody packed");
        until("the container has ended", || {
            let state = fixture.runc(&["state", &fixture.id("lazy")]).output().unwrap();
            let state: Value = serde_json::from_slice(&state.stdout).unwrap();
            state["status"] == "stopped"
        });
        assert!(feed_log(&fixture, "lazy").contains("is damaged at"));
    } else {
        fixture.answers_right("lazy");
    }
}
