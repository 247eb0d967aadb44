//! Snapshots in an object store: a server that `scripts/object-store.sh` installs.

use std::process::Output;

use serde_json::Value;
use torpor_runtimes_tests::objects::ObjectStore;

use crate::fixture::{Fixture, shown};

/// A command, with the keys of the store.
fn torpor(store: &ObjectStore, fixture: &Fixture, words: &[&str]) -> Output {
    fixture.torpor(words).envs(store.environment()).output().unwrap()
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
    let list = torpor(&store, &fixture, &["list", "s3://bucket/team/app"]);
    assert!(shown(&list).contains("s3://bucket/team/app:v1"), "{}", shown(&list));
    assert!(torpor(&store, &fixture, &["rm", reference]).status.success());
    let gc = torpor(&store, &fixture, &["gc", "s3://bucket/team/app"]);
    assert!(gc.status.success() && shown(&gc).contains("MB are free again"), "{}", shown(&gc));
    let gone = torpor(&store, &fixture, &["inspect", reference]);
    assert!(shown(&gone).contains("there is no such snapshot"), "{}", shown(&gone));
}
