//! Snapshots in an object store: a server that `scripts/object-store.sh` installs.

use std::process::Output;

use serde_json::Value;
use torpor_runtimes_tests::objects::ObjectStore;

use crate::place::{Place, shown};

/// A command, with the keys of the store.
fn torpor(store: &ObjectStore, place: &Place, words: &[&str]) -> Output {
    place.torpor(words).envs(store.environment()).output().unwrap()
}

#[test]
fn a_container_starts_from_an_object_store() {
    let Some(store) = ObjectStore::start("a_container_starts_from_an_object_store") else { return };
    let place = Place::new("s3", 20_000);
    let (reference, root) = ("s3://bucket/team/app:v1", place.path("runc").display().to_string());
    let bundle = format!("runc:{}", place.path("bundle").display());
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
    let output = torpor(&store, &place, &create);
    assert!(output.status.success(), "{}", shown(&output));
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    // More than is sent at once.
    assert!(made["size"].as_u64().unwrap() > 16 << 20, "{made}");
    let id = place.id("one");
    let run = ["run", reference, "--id", &id, "--json", "--runc-root", &root];
    let output = torpor(&store, &place, &run);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "snapshot", "{}", shown(&output));
    place.exec("one", &["/app", "ask", "sum"]);
    assert!(torpor(&store, &place, &["verify", reference]).status.success());
    let list = torpor(&store, &place, &["list", "s3://bucket/team/app"]);
    assert!(shown(&list).contains("s3://bucket/team/app:v1"), "{}", shown(&list));
    assert!(torpor(&store, &place, &["rm", reference]).status.success());
    let gc = torpor(&store, &place, &["gc", "s3://bucket/team/app"]);
    assert!(gc.status.success() && shown(&gc).contains("MB are free again"), "{}", shown(&gc));
    let gone = torpor(&store, &place, &["inspect", reference]);
    assert!(shown(&gone).contains("there is no such snapshot"), "{}", shown(&gone));
}
