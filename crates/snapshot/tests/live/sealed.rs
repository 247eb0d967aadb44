//! Sealed and signed snapshots.

use std::fs;
use std::process::Command;

use crate::place::{Place, shown};

fn openssl(place: &Place, words: &[&str]) {
    let output =
        Command::new("openssl").args(words).current_dir(place.dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
}

#[test]
fn a_sealed_snapshot_is_of_no_use_without_its_key() {
    let place = Place::new("sealed", 300);
    let torpor = place.torpor(&[]).get_program().to_owned();
    let key = place.path("key");
    let made = Command::new(torpor).args(["key", "generate"]).arg(&key).output().unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    let recipient = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let (ca, sign) = (["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"], "sign");
    let root = ["req", "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"];
    openssl(&place, &[&root[..], &ca].concat());
    let leaf =
        ["req", "-x509", "-CA", "ca.crt", "-CAkey", "ca.key", "-newkey", "ed25519", "-noenc"];
    let names = ["-subj", "/CN=maker", "-keyout", "sign.key", "-out", "sign.crt"];
    let uses = [
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-addext",
        "keyUsage=critical,digitalSignature",
    ];
    openssl(&place, &[&leaf[..], &names, &uses].concat());
    let file = |name: &str| place.path(name).display().to_string();
    let (sign_key, sign_cert) = (file(&format!("{sign}.key")), file(&format!("{sign}.crt")));
    let reference = place.reference();
    let signed = ["--sign-key", &sign_key, "--sign-cert", &sign_cert];
    place.create(&reference, &[&["--recipient", &recipient][..], &signed].concat());

    let without = place.run(&reference, "without", "cold", &[]);
    assert!(without["reason"].as_str().unwrap().contains("key"), "{without}");
    let (key, ca) = (key.display().to_string(), file("ca.crt"));
    let with = ["--identity", &key, "--trust", &ca, "--require-signature"];
    place.run(&reference, "with", "snapshot", &with);
    assert_eq!(place.exec("with", &["hostname"]), place.id("with"));
    place.exec("with", &["/app", "ask", "sum"]);
    // Another authority knows nobody of them.
    openssl(
        &place,
        &[
            &["req", "-x509", "-subj", "/CN=other", "-keyout", "x.key", "-out", "x.crt"][..],
            &["-newkey", "ed25519", "-noenc"],
        ]
        .concat(),
    );
    let other = file("x.crt");
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
