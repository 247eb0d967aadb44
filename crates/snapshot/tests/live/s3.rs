//! Snapshots in an object store: a server that `scripts/object-store.sh` installs.

use std::process::Output;
use std::sync::atomic::Ordering;

use serde_json::Value;
use torpor_runtimes_tests::objects::ObjectStore;

use crate::fixture::{Fixture, shown, until};
use crate::registry::{Interrupting, feed_log};
use crate::sealed;

/// A command, with the keys of the store.
fn torpor(store: &ObjectStore, fixture: &Fixture, words: &[&str]) -> Output {
    fixture.torpor(words).envs(store.environment()).output().unwrap()
}

/// One that is sealed starts as well, from parts of its memory.
#[track_caller]
fn starts_sealed(store: &ObjectStore, fixture: &Fixture, create: &[&str]) {
    let (key, recipient) = sealed::key(fixture);
    let (reference, id) = ("s3://bucket/team/app:sealed", fixture.id("sealed"));
    let mut create = [create, &["--recipient", &recipient]].concat();
    create[1] = reference;
    let output = torpor(store, fixture, &create);
    assert!(output.status.success(), "{}", shown(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let root = fixture.path("runc").display().to_string();
    let ready = ["--ready", "exec:/app ask page 3", "--identity", &key, "--runc-root", &root];
    let run = [&["run", reference, "--id", &id, "--json"], &ready[..]].concat();
    let output = torpor(store, fixture, &run);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "snapshot", "{}", shown(&output));
    let (bytes, size) = (said["bytes"].as_u64().unwrap(), made["size"].as_u64().unwrap());
    assert!(bytes * 100 <= size * 15, "{said} of {made}");
    fixture.answers_right("sealed");
    assert!(torpor(store, fixture, &["rm", reference]).status.success());
}

#[test]
fn a_container_starts_from_an_object_store() {
    let Some(store) = ObjectStore::start("a_container_starts_from_an_object_store") else { return };
    let fixture = Fixture::new("s3", 20_000);
    let (reference, root) = ("s3://bucket/team/app:v1", fixture.path("runc").display().to_string());
    let bundle = format!("runc:{}", fixture.path("bundle").display());
    let create = [
        "create",
        reference,
        "--from",
        &bundle,
        "--ready",
        "exec:/app ask page 3",
        "--json",
        "--runc-root",
        &root,
    ];
    let output = torpor(&store, &fixture, &create);
    assert!(output.status.success(), "{}", shown(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    // More than is sent at once.
    assert!(made["size"].as_u64().unwrap() > 16 << 20, "{made}");
    let id = fixture.id("one");
    let run = ["run", reference, "--id", &id, "--json", "--runc-root", &root];
    let output = torpor(&store, &fixture, &run);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "snapshot", "{}", shown(&output));
    fixture.exec("one", &["/app", "ask", "sum"]);
    assert!(torpor(&store, &fixture, &["verify", reference]).status.success());
    starts_sealed(&store, &fixture, &create);
    let list = torpor(&store, &fixture, &["list", "s3://bucket/team/app"]);
    assert!(shown(&list).contains("s3://bucket/team/app:v1"), "{}", shown(&list));
    assert!(torpor(&store, &fixture, &["rm", reference]).status.success());
    let gc = torpor(&store, &fixture, &["gc", "s3://bucket/team/app"]);
    assert!(gc.status.success() && shown(&gc).contains("MB are free again"), "{}", shown(&gc));
    let gone = torpor(&store, &fixture, &["inspect", reference]);
    assert!(shown(&gone).contains("there is no such snapshot"), "{}", shown(&gone));
}

/// What gets lost on the way to an object store, and on the way back, comes again.
#[test]
fn transfers_go_on_after_an_interruption() {
    let Some(store) = ObjectStore::start("transfers_go_on_after_an_interruption") else { return };
    let fixture = Fixture::new("s3-cut", 20_000);
    let (reference, id) = ("s3://bucket/team/app:cut", fixture.id("one"));
    let through = |front: &Interrupting, words: &[&str]| {
        let mut command = fixture.torpor(words);
        command.envs(store.environment()).arg("--runc-root").arg(fixture.path("runc"));
        let output = command.env("AWS_ENDPOINT_URL", format!("http://{}", front.host)).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", shown(&output));
    };
    let bundle = format!("runc:{}", fixture.path("bundle").display());
    let front = Interrupting::requests(store.host());
    through(&front, &["create", reference, "--from", &bundle, "--ready", "exec:/app ask page 3"]);
    assert!(front.cut.load(Ordering::Relaxed) > 0, "it was interrupted");
    let front = Interrupting::answers(store.host());
    through(&front, &["run", reference, "--id", &id, "--policy", "Always"]);
    fixture.answers_right("one");
    let end = "requests brought";
    until("all is there", || feed_log(&fixture, "one").matches(end).count() == 2);
    assert!(front.cut.load(Ordering::Relaxed) > 1, "it was interrupted");
}
