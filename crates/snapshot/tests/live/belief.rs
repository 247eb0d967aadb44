//! What a snapshot that nobody vouches for asks for: the caller gives it, or nothing does.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::authority::Authority;
use crate::fixture::{Fixture, shown};
use crate::running::create_of;

/// The start is refused, and says so; nothing was started.
#[track_caller]
fn refused(fixture: &Fixture, more: &[&str], words: &[&str]) {
    for policy in ["IfPresent", "Always", "Never"] {
        let more = [&["--policy", policy][..], more].concat();
        let output = fixture.try_run(&fixture.reference(), "victim", &more);
        assert_eq!(output.status.code(), Some(1), "{policy}: {}", shown(&output));
        for word in words {
            assert!(shown(&output).contains(word), "{policy}: {word}: {}", shown(&output));
        }
        let list = fixture.runc(&["list", "--quiet"]).output().unwrap();
        assert!(list.stdout.is_empty(), "{}", shown(&list));
    }
}

#[track_caller]
pub fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

/// A directory of the host that is nothing for a container.
fn private(fixture: &Fixture) -> String {
    let dir = fixture.path("private");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("secret"), "of the host").unwrap();
    dir.display().to_string()
}

/// What the bundle says is started, without what the snapshot asks for beyond.
#[track_caller]
fn own(fixture: &Fixture, more: &[&str]) {
    let said = fixture.run(&fixture.reference(), "own", "cold", more);
    assert!(said["reason"].as_str().unwrap().contains("asks for a mount"), "{said}");
    fixture.answers_right("own");
    let mounts = fixture.exec("own", &["cat", "/proc/self/mountinfo"]);
    assert!(!mounts.contains("/spare"), "{mounts}");
    fixture.delete("own");
}

#[test]
fn a_stranger_starts_nothing_by_what_the_snapshot_says() {
    let fixture = Fixture::new("stranger", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let from = format!("runc:{}", fixture.path("bundle").display());
    let private = private(&fixture);
    fixture.describe(|about| {
        about["origin"]["command"] = json!(["sh", "-c", "cat /spare/secret > /stolen"]);
        about["origin"]["mounts"] =
            json!([{ "source": private, "destination": "/spare", "options": [] }]);
    });
    // What this machine knows of the place is not that: what it knows is started.
    own(&fixture, &[]);
    fixture.move_away();
    let all = [&*format!("{from:?}"), "--from runc:", "--mount type=bind,source=", "-- sh -c 'cat"];
    refused(&fixture, &[], &all);
    own(&fixture, &["--from", &from]);
    // It was noted nowhere meanwhile. Nor is an image of Podman started.
    refused(&fixture, &[], &all);
    fixture.describe(|about| about["origin"] = json!({ "from": "podman:localhost/evil" }));
    refused(&fixture, &[], &["\"podman:localhost/evil\"", "--from podman:localhost/evil"]);
}

#[test]
fn a_mount_of_the_snapshot_is_the_callers() {
    let fixture = Fixture::new("vouched", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let from = format!("runc:{}", fixture.path("bundle").display());
    let private = private(&fixture);
    let mount = |source: &str| format!("--mount=type=bind,source={source},destination=/spare");
    fixture.run(&reference, "first", "snapshot", &[&mount(&private)]);
    create_of(&fixture, "first", &reference);
    fixture.delete("first");
    fixture.move_away();
    let own = fixture.path("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("secret"), "of the caller").unwrap();
    let said = fixture.run(&reference, "without", "cold", &["--from", &from]);
    assert!(said["reason"].as_str().unwrap().contains("asks for a mount"), "{said}");
    fixture.delete("without");
    let own = mount(&own.display().to_string());
    fixture.run(&reference, "with", "snapshot", &["--from", &from, &own]);
    assert_eq!(fixture.exec("with", &["cat", "/spare/secret"]), "of the caller");
    fixture.delete("with");
    // The word was for that start.
    let said = fixture.run(&reference, "without", "cold", &[]);
    assert!(said["reason"].as_str().unwrap().contains("asks for a mount"), "{said}");
}

#[test]
fn who_is_believed_says_what_is_started() {
    let fixture = Fixture::new("believed", 100);
    let reference = fixture.reference();
    let command = ["/app", "100", "1", "20", "1", "word"];
    fixture.create(&reference, &[&["--"][..], &command].concat());
    let runs_it = |name: &str| {
        assert!(fixture.exec(name, &["cat", "/proc/1/cmdline"]).ends_with("word\0"), "{name}");
        fixture.delete(name);
    };
    // Where it was made it is known wherever it lies.
    copy(&fixture.path("store"), &fixture.path("copied"));
    let copied = format!("dir:{}", fixture.path("copied").display());
    fixture.run(&copied, "copied", "snapshot", &[]);
    runs_it("copied");
    fixture.move_away();
    let from = format!("runc:{}", fixture.path("bundle").display());
    refused(&fixture, &[], &["--from runc:", "-- /app 100 1 20 1 word"]);
    // By its caller, which is remembered of the place.
    let said = [&["--from", &from, "--"][..], &command].concat();
    fixture.run(&reference, "said", "snapshot", &said);
    runs_it("said");
    fixture.run(&reference, "noted", "snapshot", &[]);
    runs_it("noted");
    fixture.move_away();
    // By a signature, if it is one that is believed.
    let authority = Authority::new(&fixture, "ca");
    let (key, certificate) = authority.signer("maker");
    let sign = ["sign", &reference, "--sign-key", &key, "--sign-cert", &certificate];
    let output = fixture.torpor(&sign).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    refused(&fixture, &[], &["--trust"]);
    fixture.run(&reference, "signed", "snapshot", &["--trust", &authority.certificate()]);
    runs_it("signed");
}
