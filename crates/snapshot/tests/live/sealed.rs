//! Sealed and signed snapshots.

use std::fs;
use std::process::Command;

use crate::authority::Authority;
use crate::place::{Place, shown};

/// A new key: the file that opens, and who can be sealed for.
pub fn key(place: &Place) -> (String, String) {
    let torpor = place.torpor(&[]).get_program().to_owned();
    let key = place.path("key");
    let made = Command::new(torpor).args(["key", "generate"]).arg(&key).output().unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    let recipient = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    (key.display().to_string(), recipient)
}

#[test]
fn a_sealed_snapshot_is_of_no_use_without_its_key() {
    let place = Place::new("sealed", 300);
    let (key, recipient) = key(&place);
    let authority = Authority::new(&place, "ca");
    let (sign_key, sign_cert) = authority.signer("maker");
    let reference = place.reference();
    let signed = ["--sign-key", &sign_key, "--sign-cert", &sign_cert];
    place.create(&reference, &[&["--recipient", &recipient][..], &signed].concat());

    let without = place.run(&reference, "without", "cold", &[]);
    assert!(without["reason"].as_str().unwrap().contains("key"), "{without}");
    let with = ["--identity", &key, "--trust", &authority.certificate(), "--require-signature"];
    place.run(&reference, "with", "snapshot", &with);
    assert_eq!(place.exec("with", &["hostname"]), place.id("with"));
    place.exec("with", &["/app", "ask", "sum"]);
    // Another authority knows nobody of them.
    let other = Authority::new(&place, "other").certificate();
    let with = ["--identity", &key, "--trust", &other, "--require-signature"];
    place.run(&reference, "other", "cold", &with);
    let state = fs::read_dir(place.path("state")).unwrap().flatten();
    let left = state.filter(|entry| entry.file_name().to_string_lossy().starts_with("create-"));
    assert_eq!(left.count(), 0);
}

/// A create that is killed leaves a container, which `gc` removes.
#[test]
fn what_is_left_of_a_create_that_was_killed_goes() {
    let place = Place::new("killed", 50);
    let mut create = place.torpor(&["create", &place.reference(), "--ready", "exec:false"]);
    create.arg("--from").arg(format!("runc:{}", place.path("bundle").display()));
    let mut create = create.arg("--runc-root").arg(place.path("runc")).spawn().unwrap();
    let list = || {
        let output = place.runc(&["list", "--quiet"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    crate::place::until("it runs", || !list().is_empty());
    let gc = || {
        let mut gc = place.torpor(&["gc"]);
        let output = gc.arg("--runc-root").arg(place.path("runc")).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
    };
    gc();
    assert!(!list().is_empty(), "one that goes on is left alone");
    create.kill().unwrap();
    create.wait().unwrap();
    gc();
    assert_eq!(list(), "");
    let state = fs::read_dir(place.path("state")).unwrap().flatten();
    let left = state.filter(|entry| entry.file_name().to_string_lossy().starts_with("create-"));
    assert_eq!(left.count(), 0);
}

#[test]
fn nobody_seals_for_podman() {
    let place = Place::new("sealed-podman", 10);
    let mut create = place.torpor(&["create", &place.reference(), "--from", "podman:none"]);
    let output = create.args(["--recipient", "age1nobody"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("Podman restores no sealed snapshot"), "{}", shown(&output));
}
