//! Sealed and signed snapshots.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use torpor_seal::keys::Identities;
use torpor_snapshot::description::Description;
use torpor_snapshot::sealed::Openers;
use torpor_snapshot::store;

use crate::authority::Authority;
use crate::fixture::{Fixture, shown};
use crate::sealed_pack::make_whole;

/// A new key: the file that opens, and the recipient that can be sealed for.
pub fn key(fixture: &Fixture) -> (String, String) {
    let torpor = fixture.torpor(&[]).get_program().to_owned();
    let key = fixture.path("key");
    let made = Command::new(torpor).args(["key", "generate"]).arg(&key).output().unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    let recipient = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    (key.display().to_string(), recipient)
}

#[test]
fn a_sealed_snapshot_is_of_no_use_without_its_key() {
    let fixture = Fixture::new("sealed", 300);
    let (key, recipient) = key(&fixture);
    let authority = Authority::new(&fixture, "ca");
    let (sign_key, sign_cert) = authority.signer("maker");
    let reference = fixture.reference();
    let signed = ["--sign-key", &sign_key, "--sign-cert", &sign_cert];
    fixture.create(&reference, &[&["--recipient", &recipient][..], &signed].concat());

    for (command, says) in [("list", "  sealed in "), ("inspect", "memory       sealed\n")] {
        let output = fixture.torpor(&[command, &reference]).output().unwrap();
        assert!(shown(&output).contains(says), "{}", shown(&output));
    }

    let without = fixture.run(&reference, "without", "cold", &[]);
    assert!(without["reason"].as_str().unwrap().contains("key"), "{without}");
    let with = ["--identity", &key, "--trust", &authority.certificate(), "--require-signature"];
    fixture.run(&reference, "with", "snapshot", &with);
    assert_eq!(fixture.exec("with", &["hostname"]), fixture.id("with"));
    // What a fork would not have.
    assert_eq!(fixture.exec("with", &["/app", "ask", "random"]), "0");
    fixture.exec("with", &["/app", "ask", "sum"]);
    // Another authority knows nobody of them.
    let other = Authority::new(&fixture, "other").certificate();
    let with = ["--identity", &key, "--trust", &other, "--require-signature"];
    fixture.run(&reference, "other", "cold", &with);
    let state = fs::read_dir(fixture.path("state")).unwrap().flatten();
    let left = state.filter(|entry| entry.file_name().to_string_lossy().starts_with("create-"));
    assert_eq!(left.count(), 0);
}

/// A sealed snapshot is started for a trial by whoever makes it, though the keys that open it are elsewhere.
#[test]
fn a_sealed_snapshot_that_does_not_start_is_not_published() {
    let fixture = Fixture::new("sealed-trial", 50);
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    // It is ready once, within this time also on a busy machine, and never again.
    let ready = ["--ready", "exec:busybox mkdir /once", "--timeout", "15"];
    let sealed = [&ready[..], &["--recipient", &recipient]].concat();
    let output = fixture.try_create(&reference, &sealed);
    assert!(!output.status.success(), "{}", shown(&output));
    assert!(shown(&output).contains("the trial start of the snapshot"), "{}", shown(&output));
    assert!(!fixture.path("store/index.json").exists(), "nothing is published");
    let output = fixture.try_create(&reference, &[&sealed[..], &["--no-trial"]].concat());
    assert!(output.status.success(), "{}", shown(&output));
    fixture.run(&reference, "with", "snapshot", &["--identity", &key]);
    fixture.answers_right("with");
}

/// What a snapshot must not tell: a variable, what the container has written to a file, and the
/// beginning of a page of its memory.
fn secrets(fixture: &Fixture) -> [Vec<u8>; 3] {
    let noise = fixture.exec("asked", &["/app", "ask", "page", "3"]);
    let noise = u64::from_str_radix(&noise, 16).unwrap();
    let page = [noise, 4, 4, 4].map(u64::to_le_bytes).concat();
    [b"s3cret-of-a-variable".to_vec(), b"s3cret-of-a-file".to_vec(), page]
}

/// The bundle and the arguments that make a snapshot which has [`secrets`].
pub fn with_secrets(fixture: &Fixture, reference: &str, more: &[&str]) {
    fixture.configure(|config| {
        let all = config["process"]["env"].as_array_mut().unwrap();
        all.push("HIDDEN=s3cret-of-a-variable".into());
    });
    // Not as it stands on the command line of the shell, which might be in memory.
    let write = "printf s3cret-%s of-a-file > /changed";
    fixture.create(reference, &[&["--warmup", write], more].concat());
}

/// The files at a place that is one, or a directory of them.
fn files(place: &Path) -> Vec<PathBuf> {
    match fs::read_dir(place) {
        Ok(entries) => entries.flatten().flat_map(|entry| files(&entry.path())).collect(),
        Err(_) => Vec::from_iter(place.is_file().then(|| place.to_owned())),
    }
}

/// Which secrets are in the files at some places, or in what is compressed or in base64 there. Their `bytes` are counted.
pub fn found(fixture: &Fixture, places: &[PathBuf], bytes: &mut usize) -> [bool; 3] {
    let secrets = secrets(fixture);
    let all = places.iter().flat_map(|place| files(place));
    let mut todo: Vec<Vec<u8>> = all.map(|file| fs::read(file).unwrap()).collect();
    *bytes = todo.iter().map(Vec::len).sum();
    let mut found = [false; 3];
    while let Some(text) = todo.pop() {
        for (found, secret) in found.iter_mut().zip(&secrets) {
            *found |= text.windows(secret.len()).any(|part| part == secret);
        }
        let frames = text.windows(4).enumerate().filter(|(_, part)| *part == b"\x28\xb5\x2f\xfd");
        for (at, _) in frames {
            let mut plain = Vec::new();
            let frame = zstd::Decoder::with_buffer(&text[at..]).unwrap().single_frame();
            // What looks like a frame may be none.
            if std::io::copy(&mut { frame }, &mut plain).is_ok() {
                todo.push(plain);
            }
        }
        if text.starts_with(b"{") {
            let words = text.split(|byte| *byte == b'"').filter(|word| word.len() > 64);
            todo.extend(words.filter_map(|word| STANDARD.decode(word).ok()));
        }
    }
    found
}

/// Where a store has its blobs.
fn blobs(fixture: &Fixture) -> [PathBuf; 1] {
    [fixture.path("store/blobs/sha256")]
}

#[test]
fn a_sealed_snapshot_tells_nothing_of_its_container() {
    let plain = Fixture::new("told", 100);
    with_secrets(&plain, &plain.reference(), &["--no-trial"]);
    plain.run(&plain.reference(), "asked", "snapshot", &[]);
    assert_eq!(found(&plain, &blobs(&plain), &mut 0), [true; 3], "the search finds what is there");

    let fixture = Fixture::new("untold", 100);
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    with_secrets(&fixture, &reference, &["--recipient", &recipient]);
    fixture.run(&reference, "asked", "snapshot", &["--identity", &key]);
    assert_eq!(found(&fixture, &blobs(&fixture), &mut 0), [false; 3]);
    assert_eq!(fixture.exec("asked", &["cat", "/changed"]), "s3cret-of-a-file");
    let about = fixture.document(fixture.manifest()["config"]["digest"].as_str().unwrap());
    let about = &about["org.torpor.snapshot"];
    for key in ["configuration", "configuration_digest", "files_digest"] {
        assert_eq!(about[key], "", "{key}");
    }
    let without = fixture.run(&reference, "without", "cold", &[]);
    assert!(without["reason"].as_str().unwrap().contains("no key to open"), "{without}");
    let other = Fixture::new("untold-other", 1);
    let (other, _) = self::key(&other);
    let without = fixture.run(&reference, "other", "cold", &["--identity", &other]);
    assert!(without["reason"].as_str().unwrap().contains("for others"), "{without}");
    // As all sealed images are opened.
    fs::create_dir_all(fixture.path("home/.criu")).unwrap();
    fs::write(fixture.path("home/.criu/default.conf"), format!("identity {key}\n")).unwrap();
    let mut run = fixture.torpor(&["run", &reference, "--id", &fixture.id("home")]);
    run.args(["--policy", "Always"]).env("HOME", fixture.path("home"));
    let output = run.arg("--runc-root").arg(fixture.path("runc")).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    // The configuration is compared, though it is sealed.
    fixture.configure(|config| config["process"]["cwd"] = "/tmp".into());
    let changed = fixture.run(&reference, "changed", "cold", &["--identity", &key]);
    assert!(changed["reason"].as_str().unwrap().contains("another configuration"), "{changed}");
}

/// Whoever has the key can have it looked through, and nobody else.
#[test]
fn lint_looks_into_a_sealed_snapshot_with_its_key() {
    let fixture = Fixture::new("sealed-lint", 10);
    let (key, recipient) = key(&fixture);
    fixture.configure(|config| {
        config["process"]["env"].as_array_mut().unwrap().push("SHOP_TOKEN=x".into());
    });
    let reference = fixture.reference();
    let write = "sh -c 'echo -----BEGIN PRIVATE KEY----- > /etc/shop.key'";
    fixture.create(&reference, &["--recipient", &recipient, "--warmup", write]);
    let without = fixture.torpor(&["lint", &reference]).output().unwrap();
    assert_eq!(without.status.code(), Some(1), "{}", shown(&without));
    assert!(shown(&without).contains("--identity"), "{}", shown(&without));
    let with = fixture.torpor(&["lint", &reference, "--identity", &key]).output().unwrap();
    assert_eq!(with.status.code(), Some(2), "{}", shown(&with));
    let said = String::from_utf8(with.stdout).unwrap();
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains("SHOP_TOKEN") && said.contains("/etc/shop.key"), "{said}");
}

/// What a container runs by its snapshot alone is sealed: whoever has no key does not start
/// another.
#[test]
fn a_command_is_sealed_with_the_snapshot() {
    let fixture = Fixture::new("sealed-command", 100);
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    let command = ["--", "/app", "100", "1", "20", "1", "s3cret-argument"];
    fixture.create(&reference, &[&["--recipient", &recipient][..], &command].concat());
    let about = fixture.document(fixture.manifest()["config"]["digest"].as_str().unwrap());
    assert!(!about.to_string().contains("s3cret-argument"), "{about}");
    // As on another machine.
    fs::remove_dir_all(fixture.path("state/notes")).unwrap();
    for policy in ["IfPresent", "Never"] {
        let output = fixture.try_run(&reference, "without", &["--policy", policy]);
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains("what the container runs is sealed"), "{}", shown(&output));
    }
    let from = format!("runc:{}", fixture.path("bundle").display());
    fixture.run(&reference, "named", "cold", &["--from", &from]);
    fixture.run(&reference, "never", "cold", &["--policy", "Never", "--identity", &key]);
    let line = fixture.exec("never", &["cat", "/proc/1/cmdline"]);
    assert!(line.contains("s3cret-argument"), "{line}");
    fixture.run(&reference, "with", "snapshot", &["--identity", &key]);
}

/// One whose memory is in its small layer; and one of which only the images are sealed.
#[test]
fn a_snapshot_that_an_earlier_version_sealed_starts() {
    let fixture = Fixture::new("sealed-earlier", 100);
    let (key, recipient) = key(&fixture);
    let reference = fixture.reference();
    fixture.create(&reference, &["--recipient", &recipient]);
    make_whole(&fixture);
    let inspected = fixture.torpor(&["inspect", &reference]).output().unwrap();
    assert!(shown(&inspected).contains("it comes whole"), "{}", shown(&inspected));
    fixture.run(&reference, "whole", "snapshot", &["--identity", &key]);
    fixture.answers_right("whole");
    let at = store::open(&reference.parse().unwrap()).unwrap();
    let sealed = Description::read(&*at, &store::manifest(&*at).unwrap()).unwrap();
    let openers = Openers { files: &[key.clone().into()], configured: Identities::default };
    let (open, _) = sealed.opened(&openers).unwrap();
    let earlier = Description { version: 1, ..open };
    fixture.change("latest", |manifest| {
        let config = earlier.to_config(&[], "2026-01-01T00:00:00Z").unwrap();
        fixture.put(&config, &mut manifest["config"]);
    });
    let inspected = fixture.torpor(&["inspect", &reference]).output().unwrap();
    assert!(shown(&inspected).contains("only its images"), "{}", shown(&inspected));
    fixture.run(&reference, "with", "snapshot", &["--identity", &key]);
    fixture.answers_right("with");
    let without = fixture.run(&reference, "without", "cold", &[]);
    assert!(without["reason"].as_str().unwrap().contains("key"), "{without}");
}

/// What is sealed of one snapshot is of no use in another.
#[test]
fn what_was_sealed_apart_does_not_go_together() {
    let fixture = Fixture::new("sealed-apart", 50);
    let (key, recipient) = key(&fixture);
    let second = format!("{}:second", fixture.reference());
    let more = ["--recipient", recipient.as_str()];
    fixture.create(&fixture.reference(), &[&more[..], &["--warmup", "echo > /else"]].concat());
    fixture.create(&second, &more);
    let mut layers = Value::Null;
    fixture.change("second", |manifest| layers = manifest["layers"].clone());
    fixture.change("latest", |manifest| manifest["layers"] = layers);
    let mixed = fixture.run(&fixture.reference(), "mixed", "cold", &["--identity", &key]);
    assert!(mixed["reason"].as_str().unwrap().contains("opening the snapshot"), "{mixed}");
}

/// A create that is killed leaves a container, which `gc` removes.
#[test]
fn what_is_left_of_a_create_that_was_killed_goes() {
    let fixture = Fixture::new("killed", 50);
    let mut create = fixture.torpor(&["create", &fixture.reference(), "--ready", "exec:false"]);
    create.arg("--from").arg(format!("runc:{}", fixture.path("bundle").display()));
    let mut create = create.arg("--runc-root").arg(fixture.path("runc")).spawn().unwrap();
    let list = || {
        let output = fixture.runc(&["list", "--quiet"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    crate::fixture::until("it runs", || !list().is_empty());
    // Who collects need not say where the runtime of the container has its state.
    let gc = || {
        let output = fixture.torpor(&["gc", "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        said["freed"].as_u64().unwrap()
    };
    gc();
    assert!(!list().is_empty(), "one that goes on is left alone");
    create.kill().unwrap();
    create.wait().unwrap();
    assert!(gc() > 0, "what went is counted");
    assert_eq!(list(), "");
    let state = fs::read_dir(fixture.path("state")).unwrap().flatten();
    let left = state.filter(|entry| entry.file_name().to_string_lossy().starts_with("create-"));
    assert_eq!(left.count(), 0);
}

#[test]
fn nobody_seals_for_podman() {
    let fixture = Fixture::new("sealed-podman", 10);
    let mut create = fixture.torpor(&["create", &fixture.reference(), "--from", "podman:none"]);
    let output = create.args(["--recipient", "age1nobody"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("Podman restores no sealed snapshot"), "{}", shown(&output));
}
