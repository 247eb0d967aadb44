//! Files and memory of a container that is taken while it runs: both are of one moment.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::json;

use crate::fixture::{Fixture, compile, shown, until};
use crate::running::create_of;

/// A container that always changes some files and looks whether they are as it knows them, beside
/// others that it has changed once.
#[test]
fn files_and_memory_are_of_one_moment() {
    let fixture = Fixture::new("ledger", 50);
    compile("ledger", &fixture.path("bundle/rootfs/ledger"));
    fixture.configure(|config| config["process"]["args"] = json!(["/ledger", "16"]));
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    let made = fixture.try_create(&first, &["--ready", "exec:test -s /mapped"]);
    assert!(made.status.success(), "{}", shown(&made));
    for (name, from, policy) in [("cold", "cold", "Never"), ("warm", "snapshot", "IfPresent")] {
        fixture.run(&first, name, from, &["--policy", policy]);
        let upper = fixture.path("state/instances").join(fixture.id(name)).join("upper");
        until("it has begun", || {
            fs::metadata(upper.join("mapped")).is_ok_and(|meta| meta.size() > 0)
        });
        for _ in 0..3 {
            create_of(&fixture, name, &second);
            fixture.run(&second, "next", "snapshot", &[]);
            goes_on(&fixture, "next");
            fixture.delete("next");
        }
        goes_on(&fixture, name);
        fixture.delete(name);
    }
}

/// Waits until a container has found that its files are as it knows them, and has changed them.
#[track_caller]
fn goes_on(fixture: &Fixture, name: &str) {
    let upper = fixture.path("state/instances").join(fixture.id(name)).join("upper");
    let number = || fs::read(upper.join("file-0")).unwrap();
    let before = number();
    until("it goes on", || number() != before);
    let bulk = fs::read(upper.join("bulk")).unwrap();
    let is_whole = (1..=16).zip(bulk.chunks(1 << 20)).all(|(i, block)| block == vec![i; 1 << 20]);
    assert!(bulk.len() == 16 << 20 && is_whole);
}
