//! What cannot be started from its snapshot is started cold, and says why.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::Value;
use torpor_images::proto::InventoryEntry;
use torpor_images::{ImageDir, kind};
use torpor_snapshot::archive;

use crate::fixture::{Fixture, shown, until};

/// The container is started cold, for this reason, and answers right.
#[track_caller]
fn cold(fixture: &Fixture, name: &str, why: &str) {
    cold_with(fixture, &fixture.reference(), name, why, &[]);
}

/// The same of another snapshot, with more options.
#[track_caller]
pub fn cold_with(fixture: &Fixture, reference: &str, name: &str, why: &str, more: &[&str]) {
    let output = fixture.try_run(reference, name, &[&["--policy", "IfPresent"], more].concat());
    assert_eq!(output.status.code(), Some(3), "{}", shown(&output));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["started_from"], "cold");
    let reason = said["reason"].as_str().unwrap();
    assert!(reason.contains(why), "{reason}");
    let time = |of: &str| said[of].as_f64().unwrap();
    let sum = time("tried_ms") + time("fallback_ms");
    assert!(sum <= time("first_instruction_ms") + 0.01, "{said}");
    println!("{why}: the cold start began {} ms later", said["fallback_ms"].as_f64().unwrap());
    let line = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(line.contains(&format!("is started cold: {reason}")), "{line}");
    fixture.answers_right(name);
    assert_eq!(fixture.exec(name, &["hostname"]), fixture.id(name));
    fixture.delete(name);

    let output = fixture.try_run(reference, name, &[&["--policy", "Always"], more].concat());
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let state = fixture.runc(&["state", &fixture.id(name)]).output().unwrap();
    assert!(!state.status.success(), "nothing was started");
    until("nothing is left", || !fixture.path("state/instances").join(fixture.id(name)).exists());
}

#[test]
fn what_does_not_fit_is_started_cold() {
    let fixture = Fixture::new("fits", 200);
    fixture.create(&fixture.reference(), &[]);
    let mut before = Value::Null;
    fixture.configure(|config| {
        before = config["process"]["env"].clone();
        config["process"]["env"].as_array_mut().unwrap().push("A=1".into());
    });
    cold(&fixture, "config", "another configuration");
    fixture.configure(|config| config["process"]["env"] = before);
    fs::write(fixture.path("bundle/rootfs/etc/new"), "").unwrap();
    cold(&fixture, "files", "another image");
}

#[test]
fn damage_is_found_before_anything_starts() {
    let fixture = Fixture::new("damage", 1000);
    let flip = |file: &std::path::Path, at: u64| {
        let file = fs::File::options().read(true).write(true).open(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    };
    fixture.create(&fixture.reference(), &[]);
    let (small, pack) = (fixture.layer(0), fixture.layer(1));
    let middle = fs::metadata(&pack).unwrap().len() / 2;
    flip(&pack, middle);
    cold_with(&fixture, &fixture.reference(), "chunk", "is damaged at", &["--prefetch", "all"]);
    let verify = fixture.torpor(&["verify", &fixture.reference()]).output().unwrap();
    assert!(shown(&verify).contains("is damaged"), "{}", shown(&verify));
    flip(&pack, middle);
    flip(&small, 100);
    cold(&fixture, "small", "is not what its digest says");
    flip(&small, 100);
    fixture.run(&fixture.reference(), "whole", "snapshot", &[]);
    fs::remove_file(&pack).unwrap();
    cold(&fixture, "missing", "No such file");
    fs::write(fixture.path("store/index.json"), "{").unwrap();
    cold(&fixture, "index", "index.json");
    fs::remove_dir_all(fixture.path("store")).unwrap();
    cold(&fixture, "gone", "there is no such snapshot");
}

/// Gives the snapshot in the store other images.
fn other_images(fixture: &Fixture, change: impl FnOnce(&ImageDir)) {
    let dir = tempfile::tempdir().unwrap();
    let changes = dir.path().join("changes");
    let images = dir.path().join("images");
    fs::create_dir(&images).unwrap();
    let packed = fs::read(fixture.layer(0)).unwrap();
    let mut plain = zstd::Decoder::new(packed.as_slice()).unwrap();
    let place = |name: &str| (name == archive::CHANGES).then(|| changes.clone());
    archive::read_small(&mut plain, &images, &place).unwrap();
    change(&ImageDir::open(&images).unwrap());
    let mut packed = zstd::Encoder::new(Vec::new(), 1).unwrap();
    let changes = Some((archive::CHANGES, changes.as_path()));
    archive::write_small(&mut packed, &images, changes, &[]).unwrap();
    let packed = packed.finish().unwrap();
    fixture.change("latest", |manifest| fixture.put(&packed, &mut manifest["layers"][0]));
}

#[test]
fn another_machine_starts_cold() {
    let fixture = Fixture::new("machine", 200);
    fixture.create(&fixture.reference(), &[]);
    let here = fixture.manifest();
    fixture.describe(|about| about["machine"]["architecture"] = "riscv64".into());
    assert_ne!(fixture.manifest(), here);
    cold(&fixture, "processor", "another processor");
    fixture.describe(|about| {
        about["machine"]["architecture"] =
            torpor_snapshot::description::Machine::here().architecture.into();
        about["machine"]["kernel"] = "99.1.0".into();
    });
    cold(&fixture, "kernel", "a later kernel");
    fixture.describe(|about| about["version"] = 9.into());
    cold(&fixture, "version", "version 9 is not known");
}

/// One that has instructions which this one has not.
#[test]
fn another_processor_starts_cold() {
    let fixture = Fixture::new("processor", 200);
    fixture.create(&fixture.reference(), &[]);
    other_images(&fixture, |_| {});
    fixture.run(&fixture.reference(), "same", "snapshot", &[]);
    fixture.answers_right("same");
    other_images(&fixture, |images| {
        let mut inventory: InventoryEntry = images.read_one(kind::INVENTORY, 0).unwrap();
        let processor = inventory.torpor_cpuinfo.as_mut().unwrap();
        // PREFETCHWT1: only processors had it that are not made any more (Intel SDM, CPUID leaf 7,
        // ECX bit 0; the place in Linux's asm/cpufeatures.h).
        processor.x86_entry[0].capability[16] |= 1;
        images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    });
    cold(&fixture, "features", "processor");
}

/// A file of keys that is not there is mistyped, and no reason for a cold start.
#[test]
fn a_file_of_keys_that_is_not_there_starts_nothing() {
    let fixture = Fixture::new("keys", 10);
    let from = format!("runc:{}", fixture.path("bundle").display());
    let missing = fixture.path("none").display().to_string();
    let directory = fixture.path("bundle").display().to_string();
    for (option, file) in
        [("--trust", &missing), ("--cosign-key", &missing), ("--trust", &directory)]
    {
        let output = fixture.try_run(&fixture.reference(), "one", &["--from", &from, option, file]);
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        let what = format!("Error: {option}: {file}");
        assert!(shown(&output).contains(&what), "{}", shown(&output));
    }
    assert!(!fixture.path("state/instances").exists());
}

/// Nor is one believed that runs and does not answer.
#[test]
fn one_that_does_not_answer_starts_cold() {
    let fixture = Fixture::new("silent", 200);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    // The one that is started cold must be ready within this time, also on a busy machine.
    let ready = ["--ready", "exec:test ! -e /run/torpor/restored", "--timeout", "10"];
    cold_with(&fixture, &reference, "warm", "not ready (exec:test", &ready);
    let never = ["--ready", "exec:false", "--timeout", "1"];
    let output = fixture.try_run(&reference, "never", &never);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let always = ["--policy", "Always", "--timeout", "1", "--after-restore"];
    for (after, why) in [("sleep 1000", "it had not ended after 1s"), ("SIGNONE", "no such signal")]
    {
        let output = fixture.try_run(&reference, "hung", &[&always[..], &[after]].concat());
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains(why), "{}", shown(&output));
    }
    let list = fixture.runc(&["list", "--quiet"]).output().unwrap();
    assert!(list.stdout.is_empty(), "{}", shown(&list));
    let output = fixture.try_run(&reference, "told", &["--ready", "notify"]);
    assert!(shown(&output).contains("does not say again"), "{}", shown(&output));
}

#[test]
fn a_full_disk_starts_cold() {
    let fixture = Fixture::new("full", 4000);
    fixture.create(&fixture.reference(), &[]);
    let state = fixture.path("state");
    let notes = fs::read_dir(state.join("notes")).unwrap().next().unwrap().unwrap();
    let (name, note) = (notes.file_name(), fs::read(notes.path()).unwrap());
    let mount = |words: &[&str]| {
        assert!(Command::new(words[0]).args(&words[1..]).arg(&state).status().unwrap().success());
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs"]);
    fs::create_dir(state.join("notes")).unwrap();
    fs::write(state.join("notes").join(name), note).unwrap();
    cold(&fixture, "full", "No space left");
    mount(&["umount", "-l"]);
}
