//! Mounts that one container has of its own.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::place::{Place, shown, until};
use crate::running::create_of;
use crate::sealed;

/// A directory of the host that says which one it is.
fn directory(place: &Place, name: &str) -> String {
    let dir = place.path(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("which"), name).unwrap();
    dir.display().to_string()
}

/// A place whose bundle has a directory of the host at /data.
fn place_with_data(name: &str) -> Place {
    let place = Place::new(name, 200);
    let data = json!({
        "destination": "/data",
        "type": "bind",
        "source": directory(&place, "first"),
        "options": ["rbind"],
    });
    place.configure(|config| config["mounts"].as_array_mut().unwrap().push(data));
    place
}

fn mount(source: &str, rest: &str) -> String {
    format!("--mount=type=bind,source={source},{rest}")
}

/// How a mount is there.
fn options(place: &Place, name: &str, at: &str) -> String {
    let mounts = place.exec(name, &["cat", "/proc/self/mountinfo"]);
    let lines: Vec<Vec<&str>> = mounts.lines().map(|line| line.split(' ').collect()).collect();
    lines.iter().rfind(|words| words[4] == at).map(|words| words[5].to_owned()).unwrap()
}

const WAYS: [(&str, &[&str]); 2] = [("snapshot", &[]), ("cold", &["--policy", "Never"])];

#[test]
fn a_mount_of_the_bundle_gets_another_source() {
    let place = place_with_data("source");
    let reference = place.reference();
    place.create(&reference, &[]);
    let second = directory(&place, "second");
    for (from, way) in WAYS {
        let name = format!("plain-{from}");
        place.run(&reference, &name, from, way);
        assert_eq!(place.exec(&name, &["cat", "/data/which"]), "first");
        place.exec(&name, &["sh", "-c", "echo x > /data/written"]);
        let name = format!("own-{from}");
        let own = mount(&second, "destination=/data/,options=ro:noexec");
        place.run(&reference, &name, from, &[way, &[&own]].concat());
        place.answers_right(&name);
        assert_eq!(place.exec(&name, &["cat", "/data/which"]), "second");
        let options = options(&place, &name, "/data");
        assert!(options.starts_with("ro,") && options.contains("noexec"), "{options}");
        let write = ["exec", &place.id(&name), "sh", "-c", "echo x > /data/written"];
        assert!(!place.runc(&write).output().unwrap().status.success());
    }
    assert!(!Path::new(&second).join("written").exists());
    let none = mount(&place.path("none").display().to_string(), "destination=/data");
    let output = place.try_run(&reference, "none", &[&none]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("/none of --mount: No such file"), "{}", shown(&output));
}

#[test]
fn a_container_gets_a_mount_that_its_snapshot_has_not() {
    let place = place_with_data("added");
    let (reference, next) = (place.reference(), place.reference() + ":next");
    place.create(&reference, &[]);
    let own = mount(&directory(&place, "own"), "destination=/srv/own");
    let file = place.path("own/which").display().to_string();
    let file = mount(&file, "destination=/data/file,options=ro");
    for (from, way) in WAYS {
        place.run(&reference, from, from, &[way, &[&own, &file]].concat());
        place.answers_right(from);
        assert_eq!(place.exec(from, &["cat", "/srv/own/which"]), "own");
        assert_eq!(place.exec(from, &["cat", "/data/file"]), "own");
        assert!(options(&place, from, "/srv/own").starts_with("rw,"));
        assert!(options(&place, from, "/data/file").starts_with("ro,"));
        place.exec(from, &["sh", "-c", "echo x > /srv/own/written"]);
        // It is part of what is made of the container later.
        create_of(&place, from, &next);
        place.run(&next, "next", "snapshot", &[]);
        assert_eq!(place.exec("next", &["cat", "/srv/own/which"]), "own");
        place.delete("next");
        place.delete(from);
    }
}

#[test]
fn many_of_one_template_have_them_too() {
    let place = place_with_data("many");
    let reference = place.reference();
    place.create(&reference, &[]);
    let own = directory(&place, "own");
    let more = ["--count=2", &mount(&own, "dst=/data"), &mount(&own, "dst=/own,options=ro")];
    let output = place.try_run(&reference, "many", &more);
    assert!(output.status.success(), "{}", shown(&output));
    assert!(shown(&output).contains("\"template\":true"), "{}", shown(&output));
    for name in ["many-1", "many-2"] {
        assert_eq!(place.exec(name, &["cat", "/data/which"]), "own");
        assert!(options(&place, name, "/own").starts_with("ro,"));
    }
}

/// The container is started cold then, where it can have the mount.
#[track_caller]
fn cold_with_mount(place: &Place, at: &str, why: &str, more: &[&str]) {
    let own = mount(&place.path("own").display().to_string(), &format!("destination={at}"));
    let said: Value = place.run(&place.reference(), "cold", "cold", &[&[&*own], more].concat());
    let reason = said["reason"].as_str().unwrap();
    assert!(reason.contains(why) && reason.contains(at), "{reason}");
    until("it is there", || place.exec("cold", &["cat", &format!("{at}/which")]) == "own");
    place.delete("cold");
}

#[test]
fn what_a_snapshot_cannot_have_is_named() {
    let place = place_with_data("refused");
    place.create(&place.reference(), &[]);
    directory(&place, "own");
    cold_with_mount(&place, "/dev/shm/own", "the file system at /dev/shm comes from", &[]);
    cold_with_mount(&place, "/sys", "the snapshot has a mount at /sys", &[]);
}

#[test]
fn a_sealed_snapshot_has_the_mounts_that_it_was_made_with() {
    let place = place_with_data("sealed-mounts");
    let (key, recipient) = sealed::key(&place);
    place.create(&place.reference(), &["--recipient", &recipient]);
    let own = directory(&place, "own");
    let identity = ["--identity", &key];
    let replaced = mount(&own, "destination=/data");
    place.run(&place.reference(), "data", "snapshot", &[&[&*replaced][..], &identity].concat());
    assert_eq!(place.exec("data", &["cat", "/data/which"]), "own");
    cold_with_mount(&place, "/own", "it is sealed", &identity);
}
