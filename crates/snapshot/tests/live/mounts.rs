//! Mounts that one container has of its own.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::fixture::{Fixture, shown, until};
use crate::running::create_of;
use crate::sealed;

/// A directory of the host that says which one it is.
fn directory(fixture: &Fixture, name: &str) -> String {
    let dir = fixture.path(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("which"), name).unwrap();
    dir.display().to_string()
}

/// A fixture whose bundle has a directory of the host at /data.
fn place_with_data(name: &str) -> Fixture {
    let fixture = Fixture::new(name, 200);
    let data = json!({
        "destination": "/data",
        "type": "bind",
        "source": directory(&fixture, "first"),
        "options": ["rbind"],
    });
    fixture.configure(|config| config["mounts"].as_array_mut().unwrap().push(data));
    fixture
}

fn mount(source: &str, rest: &str) -> String {
    format!("--mount=type=bind,source={source},{rest}")
}

/// How a mount is there.
fn options(fixture: &Fixture, name: &str, at: &str) -> String {
    let mounts = fixture.exec(name, &["cat", "/proc/self/mountinfo"]);
    let lines: Vec<Vec<&str>> = mounts.lines().map(|line| line.split(' ').collect()).collect();
    lines.iter().rfind(|words| words[4] == at).map(|words| words[5].to_owned()).unwrap()
}

const WAYS: [(&str, &[&str]); 2] = [("snapshot", &[]), ("cold", &["--policy", "Never"])];

#[test]
fn a_mount_of_the_bundle_gets_another_source() {
    let fixture = place_with_data("source");
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let second = directory(&fixture, "second");
    for (from, way) in WAYS {
        let name = format!("plain-{from}");
        fixture.run(&reference, &name, from, way);
        assert_eq!(fixture.exec(&name, &["cat", "/data/which"]), "first");
        fixture.exec(&name, &["sh", "-c", "echo x > /data/written"]);
        let name = format!("own-{from}");
        let own = mount(&second, "destination=/data/,options=ro:noexec");
        fixture.run(&reference, &name, from, &[way, &[&own]].concat());
        fixture.answers_right(&name);
        assert_eq!(fixture.exec(&name, &["cat", "/data/which"]), "second");
        let options = options(&fixture, &name, "/data");
        assert!(options.starts_with("ro,") && options.contains("noexec"), "{options}");
        let write = ["exec", &fixture.id(&name), "sh", "-c", "echo x > /data/written"];
        assert!(!fixture.runc(&write).output().unwrap().status.success());
    }
    assert!(!Path::new(&second).join("written").exists());
    let none = mount(&fixture.path("none").display().to_string(), "destination=/data");
    let output = fixture.try_run(&reference, "none", &[&none]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("/none of --mount: No such file"), "{}", shown(&output));
}

#[test]
fn a_container_gets_a_mount_that_its_snapshot_has_not() {
    let fixture = place_with_data("added");
    let (reference, next) = (fixture.reference(), fixture.reference() + ":next");
    fixture.create(&reference, &[]);
    let own = mount(&directory(&fixture, "own"), "destination=/srv/own");
    let file = fixture.path("own/which").display().to_string();
    let file = mount(&file, "destination=/data/file,options=ro");
    for (from, way) in WAYS {
        fixture.run(&reference, from, from, &[way, &[&own, &file]].concat());
        fixture.answers_right(from);
        assert_eq!(fixture.exec(from, &["cat", "/srv/own/which"]), "own");
        assert_eq!(fixture.exec(from, &["cat", "/data/file"]), "own");
        assert!(options(&fixture, from, "/srv/own").starts_with("rw,"));
        assert!(options(&fixture, from, "/data/file").starts_with("ro,"));
        fixture.exec(from, &["sh", "-c", "echo x > /srv/own/written"]);
        // It is part of what is made of the container later.
        create_of(&fixture, from, &next);
        fixture.run(&next, "next", "snapshot", &[]);
        assert_eq!(fixture.exec("next", &["cat", "/srv/own/which"]), "own");
        fixture.delete("next");
        fixture.delete(from);
    }
}

#[test]
fn many_of_one_template_have_them_too() {
    let fixture = place_with_data("many");
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let own = directory(&fixture, "own");
    let more = ["--count=2", &mount(&own, "dst=/data"), &mount(&own, "dst=/own,options=ro")];
    let output = fixture.try_run(&reference, "many", &more);
    assert!(output.status.success(), "{}", shown(&output));
    assert!(shown(&output).contains("\"template\":true"), "{}", shown(&output));
    for name in ["many-1", "many-2"] {
        assert_eq!(fixture.exec(name, &["cat", "/data/which"]), "own");
        assert!(options(&fixture, name, "/own").starts_with("ro,"));
    }
}

/// The container is started cold then, where it can have the mount.
#[track_caller]
fn cold_with_mount(fixture: &Fixture, at: &str, why: &str, more: &[&str]) {
    let own = mount(&fixture.path("own").display().to_string(), &format!("destination={at}"));
    let said: Value = fixture.run(&fixture.reference(), "cold", "cold", &[&[&*own], more].concat());
    let reason = said["reason"].as_str().unwrap();
    assert!(reason.contains(why) && reason.contains(at), "{reason}");
    until("it is there", || fixture.exec("cold", &["cat", &format!("{at}/which")]) == "own");
    fixture.delete("cold");
}

#[test]
fn what_a_snapshot_cannot_have_is_named() {
    let fixture = place_with_data("refused");
    fixture.create(&fixture.reference(), &[]);
    directory(&fixture, "own");
    cold_with_mount(&fixture, "/dev/shm/own", "the file system at /dev/shm comes from", &[]);
    cold_with_mount(&fixture, "/sys", "the snapshot has a mount at /sys", &[]);
}

#[test]
fn a_sealed_snapshot_has_the_mounts_that_it_was_made_with() {
    let fixture = place_with_data("sealed-mounts");
    let (key, recipient) = sealed::key(&fixture);
    fixture.create(&fixture.reference(), &["--recipient", &recipient]);
    let own = directory(&fixture, "own");
    let identity = ["--identity", &key];
    let replaced = mount(&own, "destination=/data");
    fixture.run(&fixture.reference(), "data", "snapshot", &[&[&*replaced][..], &identity].concat());
    assert_eq!(fixture.exec("data", &["cat", "/data/which"]), "own");
    cold_with_mount(&fixture, "/own", "it is sealed", &identity);
}
