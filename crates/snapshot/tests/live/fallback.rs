//! What cannot be started from its snapshot is started cold, and says why.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::Value;

use crate::place::{Place, shown, until};

/// The container is started cold, for this reason, and answers right.
#[track_caller]
fn cold(place: &Place, name: &str, why: &str) {
    let output = place.try_run(&place.reference(), name, &["--policy", "IfPresent"]);
    assert_eq!(output.status.code(), Some(3), "{}", shown(&output));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "cold");
    let reason = said["reason"].as_str().unwrap();
    assert!(reason.contains(why), "{reason}");
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(line.contains(&format!("is started cold: {reason}")), "{line}");
    until("it answers", || {
        let ask = place.runc(&["exec", &place.id(name), "/app", "ask", "page", "3"]).output();
        ask.unwrap().status.success()
    });
    assert_eq!(place.exec(name, &["hostname"]), place.id(name));
    place.delete(name);

    let output = place.try_run(&place.reference(), name, &["--policy", "Always"]);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let state = place.runc(&["state", &place.id(name)]).output().unwrap();
    assert!(!state.status.success(), "nothing was started");
    until("nothing is left", || !place.path("state/instances").join(place.id(name)).exists());
}

#[test]
fn what_does_not_fit_is_started_cold() {
    let place = Place::new("fits", 200);
    place.create(&place.reference(), &[]);
    let mut before = Value::Null;
    place.configure(|config| {
        before = config["process"]["env"].clone();
        config["process"]["env"].as_array_mut().unwrap().push("A=1".into());
    });
    cold(&place, "config", "another configuration");
    place.configure(|config| config["process"]["env"] = before);
    fs::write(place.path("bundle/rootfs/etc/new"), "").unwrap();
    cold(&place, "files", "another image");
}

#[test]
fn damage_is_found_before_anything_starts() {
    let place = Place::new("damage", 1000);
    let flip = |file: &std::path::Path, at: u64| {
        let file = fs::File::options().read(true).write(true).open(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    };
    place.create(&place.reference(), &[]);
    let (small, pack) = (place.layer(0), place.layer(1));
    let middle = fs::metadata(&pack).unwrap().len() / 2;
    flip(&pack, middle);
    cold(&place, "chunk", "is damaged at");
    let verify = place.torpor(&["verify", &place.reference()]).output().unwrap();
    assert!(shown(&verify).contains("is damaged"), "{}", shown(&verify));
    flip(&pack, middle);
    flip(&small, 100);
    cold(&place, "small", "is not what its digest says");
    flip(&small, 100);
    place.run(&place.reference(), "whole", "snapshot", &[]);
    fs::remove_file(&pack).unwrap();
    cold(&place, "missing", "No such file");
    fs::write(place.path("store/index.json"), "{").unwrap();
    cold(&place, "index", "index.json");
    fs::remove_dir_all(place.path("store")).unwrap();
    cold(&place, "gone", "there is no such snapshot");
}

/// Gives the snapshot in the store another description.
fn describe(place: &Place, change: impl FnOnce(&mut Value)) {
    let mut manifest = place.manifest();
    let config = place.blob(manifest["config"]["digest"].as_str().unwrap());
    let mut object: Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    change(&mut object["org.torpor.snapshot"]);
    let store = |object: &Value| {
        let bytes = serde_json::to_vec(object).unwrap();
        let digest = torpor_snapshot::oci::sha256(&bytes);
        fs::write(place.blob(&digest), &bytes).unwrap();
        (digest, bytes.len())
    };
    let (digest, size) = store(&object);
    manifest["config"]["digest"] = digest.into();
    manifest["config"]["size"] = size.into();
    let (digest, size) = store(&manifest);
    let file = place.path("store/index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    index["manifests"][0]["digest"] = digest.into();
    index["manifests"][0]["size"] = size.into();
    fs::write(file, serde_json::to_vec(&index).unwrap()).unwrap();
}

#[test]
fn another_machine_starts_cold() {
    let place = Place::new("machine", 200);
    place.create(&place.reference(), &[]);
    let here = place.manifest();
    describe(&place, |about| about["machine"]["architecture"] = "riscv64".into());
    assert_ne!(place.manifest(), here);
    cold(&place, "processor", "another processor");
    describe(&place, |about| {
        about["machine"]["architecture"] =
            torpor_snapshot::description::Machine::here().architecture.into();
        about["machine"]["kernel"] = "99.1.0".into();
    });
    cold(&place, "kernel", "a later kernel");
    describe(&place, |about| about["version"] = 9.into());
    cold(&place, "version", "version 9 is not known");
}

#[test]
fn a_full_disk_starts_cold() {
    let place = Place::new("full", 4000);
    place.create(&place.reference(), &[]);
    let state = place.path("state");
    let notes = fs::read_dir(state.join("notes")).unwrap().next().unwrap().unwrap();
    let (name, note) = (notes.file_name(), fs::read(notes.path()).unwrap());
    let mount = |words: &[&str]| {
        assert!(Command::new(words[0]).args(&words[1..]).arg(&state).status().unwrap().success());
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs"]);
    fs::create_dir(state.join("notes")).unwrap();
    fs::write(state.join("notes").join(name), note).unwrap();
    cold(&place, "full", "No space left");
    mount(&["umount", "-l"]);
}
