//! Signatures of snapshots: of somebody who is trusted, of this snapshot, and good still.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use torpor_snapshot::signature;

use crate::authority::Authority;
use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown};
use crate::registry::Registry;

/// The name of the signature of the snapshot in the store.
fn name(fixture: &Fixture) -> String {
    signature::name_of(&fixture.digest())
}

#[test]
fn only_what_is_signed_is_started() {
    let fixture = Fixture::new("signed", 100);
    let (authority, other) = (Authority::new(&fixture, "ca"), Authority::new(&fixture, "other"));
    let (key, certificate) = authority.signer("maker");
    let signer = ["--sign-key", &key, "--sign-cert", &certificate];
    let reference = fixture.reference();
    let (ours, theirs) = (authority.certificate(), other.certificate());
    let trust = ["--trust", &ours, "--require-signature"];
    let said = |words: &[&str]| {
        let output = fixture.torpor(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    };

    fixture.create(&reference, &[]);
    cold_with(&fixture, &reference, "absent", "is not signed", &trust);
    assert!(said(&["inspect", &reference]).contains("signed by    nobody"));
    let sign = [&["sign", &reference][..], &signer].concat();
    said(&sign);
    fixture.run(&reference, "good", "snapshot", &trust);
    fixture.answers_right("good");
    fixture.delete("good");
    assert!(said(&["inspect", &reference]).contains("signed by    \"maker\", until "));
    let verify = [&["verify", &reference][..], &trust].concat();
    assert!(said(&verify).contains("signed by maker"));

    let untrusted = ["--trust", &theirs, "--require-signature"];
    cold_with(&fixture, &reference, "untrusted", "the signature of the snapshot", &untrusted);
    // A wrong one is worse than none, even where none is required.
    cold_with(
        &fixture,
        &reference,
        "unasked",
        "the signature of the snapshot",
        &["--trust", &theirs],
    );
    said(&[&sign[..], &["--expires", "0"]].concat());
    cold_with(&fixture, &reference, "expired", "has expired at", &trust);
    said(&[&sign[..], &["--expires", "7"]].concat());
    fixture.run(&reference, "week", "snapshot", &trust);
    fixture.delete("week");
}

/// Where nobody has vouched for a snapshot it does not say either what is started cold.
#[test]
fn what_is_not_signed_says_nothing() {
    let fixture = Fixture::new("unsigned", 100);
    let authority = Authority::new(&fixture, "ca").certificate();
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    std::fs::remove_dir_all(fixture.path("state/notes")).unwrap();
    let trust = ["--trust", &authority, "--require-signature"];
    let output = fixture.try_run(&reference, "one", &trust);
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("nothing says what to start"), "{}", shown(&output));
    let from = format!("runc:{}", fixture.path("bundle").display());
    cold_with(
        &fixture,
        &reference,
        "two",
        "is not signed",
        &[&trust[..], &["--from", &from]].concat(),
    );
}

/// Nobody lengthens a signature, or takes that of another snapshot.
#[test]
fn a_signature_is_not_changed() {
    let fixture = Fixture::new("forged", 100);
    let authority = Authority::new(&fixture, "ca");
    let (key, certificate) = authority.signer("maker");
    let reference = fixture.reference();
    let signed = ["--sign-key", &key, "--sign-cert", &certificate, "--expires", "1"];
    fixture.create(&reference, &signed);
    let ca = authority.certificate();
    let trust = ["--trust", &ca, "--require-signature"];
    let change = |change: &dyn Fn(&mut Value)| {
        fixture.change(&name(&fixture), |manifest| {
            let layer = &mut manifest["layers"][0];
            let mut stored = fixture.document(layer["digest"].as_str().unwrap());
            change(&mut stored);
            fixture.put(&serde_json::to_vec(&stored).unwrap(), layer);
        });
    };
    change(&|stored| {
        let mut statement: Value =
            serde_json::from_str(stored["statement"].as_str().unwrap()).unwrap();
        statement["expires"] = Value::Null;
        stored["statement"] = statement.to_string().into();
    });
    cold_with(&fixture, &reference, "longer", "the signature of the snapshot", &trust);
    change(&|stored| stored["value"] = STANDARD.encode([0; 64]).into());
    cold_with(&fixture, &reference, "zeros", "the signature of the snapshot", &trust);

    // That of another snapshot, which is as good as it ever was.
    let second = reference.clone() + ":second";
    let made = fixture.create(&second, &[&["--warmup", "echo > /else"], &signed[..]].concat());
    let other = signature::name_of(made["digest"].as_str().unwrap());
    let mut layers = Value::Null;
    fixture.change(&other, |manifest| layers = manifest["layers"].clone());
    fixture.change(&name(&fixture), |manifest| manifest["layers"] = layers);
    cold_with(&fixture, &reference, "another", "of another snapshot", &trust);
    fixture.run(&second, "second", "snapshot", &trust);

    // It goes with its snapshot.
    assert!(fixture.torpor(&["rm", &second]).status().unwrap().success());
    let index = std::fs::read_to_string(fixture.path("store/index.json")).unwrap();
    assert!(!index.contains(&other), "{index}");
}

#[test]
fn a_registry_has_signatures() {
    let fixture = Fixture::new("signed-registry", 100);
    let registry = Registry::start(&fixture);
    let authority = Authority::new(&fixture, "ca");
    let (key, certificate) = authority.signer("maker");
    let reference = registry.reference();
    fixture.create(&reference, &["--sign-key", &key, "--sign-cert", &certificate]);
    let ca = authority.certificate();
    fixture.run(&reference, "good", "snapshot", &["--trust", &ca, "--require-signature"]);
    fixture.answers_right("good");
    let list = fixture.torpor(&["list", &reference]).output().unwrap();
    assert_eq!(String::from_utf8(list.stdout).unwrap().lines().count(), 1, "signatures are none");
}
