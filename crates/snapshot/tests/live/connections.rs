//! Connections of a container that is taken: those between its own processes stay.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use serde_json::json;

use crate::fixture::{Fixture, compile, shown, until};
use crate::running::create_of;

/// Waits until the processes of a container have talked to each other once more.
#[track_caller]
fn talks_on(fixture: &Fixture, name: &str) {
    let upper = fixture.path("state/instances").join(fixture.id(name)).join("upper");
    let count = || fs::read(upper.join("count")).unwrap();
    let before = count();
    until("they talk on", || count() != before);
}

/// One with somebody outside, who goes on, comes back closed.
#[test]
fn processes_of_a_container_stay_connected() {
    let fixture = Fixture::new("talkers", 50);
    compile("talkers", &fixture.path("bundle/rootfs/talkers"));
    fixture.configure(|config| config["process"]["args"] = json!(["/talkers"]));
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    let made = fixture.try_create(&first, &["--ready", "exec:test -s /count"]);
    assert!(made.status.success(), "{}", shown(&made));
    assert!(!shown(&made).contains("are closed"), "{}", shown(&made));
    let lint = fixture.torpor(&["lint", &first]).output().unwrap();
    assert!(lint.status.success(), "{}", shown(&lint));
    let said = fixture.run(&first, "warm", "snapshot", &[]);
    talks_on(&fixture, "warm");

    let mut outside = Command::new("nsenter");
    outside.args(["--net", "--target", &said["pid"].to_string(), "busybox", "nc"]);
    outside.args(["127.0.0.1", "7000"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut outside = outside.spawn().unwrap();
    let (mut to, mut from) = (outside.stdin.take().unwrap(), outside.stdout.take().unwrap());
    let mut ask = || {
        to.write_all(b"anything").unwrap();
        let mut answer = [0; 8];
        from.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"anything");
    };
    ask();
    create_of(&fixture, "warm", &second);
    ask();
    fixture.run(&second, "next", "snapshot", &[]);
    talks_on(&fixture, "next");
    let left = |name: &str| {
        let upper = fixture.path("state/instances").join(fixture.id(name)).join("upper");
        upper.join("left").exists()
    };
    until("it is gone", || left("next"));
    talks_on(&fixture, "warm");
    assert!(!left("warm"));
    drop((to, from));
    outside.wait().unwrap();
}
