//! Signatures of cosign, in a registry that lists what refers to a snapshot under a name.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use torpor_snapshot::oci::{self, Descriptor, INDEX, MANIFEST};
use torpor_snapshot::reference::Reference;
use torpor_snapshot::store::http::{Call, Client};
use torpor_snapshot::store::{self, Store};

use crate::authority::Authority;
use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown};
use crate::registry::Registry;

const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";
const STATEMENT: &str = "application/vnd.in-toto+json";

/// The version of cosign that the long test builds and runs.
const VERSION: &str = "v3.1.3";

/// A key for P-256, as cosign makes them; the file of its public half.
fn key(fixture: &Fixture, name: &str) -> String {
    let (private, public) = (format!("{name}.key"), format!("{name}.pub"));
    let curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", &private];
    openssl(fixture, &[&["genpkey"][..], &curve].concat());
    openssl(fixture, &["pkey", "-in", &private, "-pubout", "-out", &public]);
    fixture.path(&public).display().to_string()
}

#[track_caller]
fn openssl(fixture: &Fixture, words: &[&str]) {
    let output =
        Command::new("openssl").args(words).current_dir(fixture.dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
}

/// A bundle that says that the key `name` has signed the manifest with this digest.
fn bundle(fixture: &Fixture, name: &str, digest: &str) -> Value {
    let payload = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://sigstore.dev/cosign/sign/v1",
        "predicate": {},
        "subject": [{ "digest": { "sha256": oci::hex_of(digest).unwrap() } }],
    });
    let payload = payload.to_string();
    let (message, signature) = (fixture.path("message"), fixture.path("signature"));
    let head = format!("DSSEv1 {} {STATEMENT} {} ", STATEMENT.len(), payload.len());
    fs::write(&message, head + &payload).unwrap();
    let key = format!("{name}.key");
    openssl(fixture, &["dgst", "-sha256", "-sign", &key, "-out", "signature", "message"]);
    json!({
        "mediaType": BUNDLE,
        "verificationMaterial": { "publicKey": { "hint": "" }, "tlogEntries": [] },
        "dsseEnvelope": {
            "payload": STANDARD.encode(payload),
            "payloadType": STATEMENT,
            "signatures": [{ "sig": STANDARD.encode(fs::read(signature).unwrap()) }],
        },
    })
}

fn blob(store: &dyn Store, media_type: &str, bytes: &[u8]) -> Descriptor {
    let blob = Descriptor {
        media_type: media_type.to_owned(),
        digest: oci::sha256(bytes),
        size: bytes.len() as u64,
        annotations: BTreeMap::new(),
    };
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    store.put(&blob, &mut file).unwrap();
    blob
}

/// Stores a bundle as what refers to the manifest `of`, and to nothing else.
fn attach(registry: &Registry, of: &Descriptor, bundle: &Value) {
    let reference: Reference = registry.reference().parse().unwrap();
    let store = store::open(&reference).unwrap();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": BUNDLE,
        "config": blob(&*store, EMPTY, b"{}"),
        "layers": [blob(&*store, BUNDLE, bundle.to_string().as_bytes())],
        "subject": of,
        "annotations": { "dev.sigstore.bundle.content": "dsse-envelope" },
    });
    let manifest = manifest.to_string();
    let digest = oci::sha256(manifest.as_bytes());
    let one = json!({
        "mediaType": MANIFEST,
        "artifactType": BUNDLE,
        "digest": digest,
        "size": manifest.len(),
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [one] }).to_string();
    let list = of.digest.replace(':', "-");
    for (name, kind, document) in [(&digest, MANIFEST, &manifest), (&list, INDEX, &index)] {
        let url = format!("http://{}/v2/team/app/manifests/{name}", registry.host);
        let headers = [("Content-Type", kind)];
        let call =
            Call { headers: &headers, body: Some(document.as_bytes()), ..Call::new("PUT", &url) };
        Client::new(&registry.host).expect(&call, &[201]).unwrap();
    }
}

#[test]
fn what_cosign_has_signed_is_started() {
    let fixture = Fixture::new("cosign", 100);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &[]);
    let (ours, theirs) = (key(&fixture, "ours"), key(&fixture, "theirs"));
    let trust = ["--cosign-key", &ours, "--require-signature"];
    cold_with(&fixture, &reference, "absent", "is not signed", &trust);

    let bytes = store::open(&reference.parse().unwrap()).unwrap().manifest().unwrap().unwrap();
    let of = Descriptor {
        media_type: MANIFEST.to_owned(),
        digest: oci::sha256(&bytes),
        size: bytes.len() as u64,
        annotations: BTreeMap::new(),
    };
    attach(&registry, &of, &bundle(&fixture, "ours", &of.digest));
    fixture.run(&reference, "good", "snapshot", &trust);
    fixture.answers_right("good");
    let verify = [&["verify", &reference][..], &trust].concat();
    let output = fixture.torpor(&verify).output().unwrap();
    assert!(shown(&output).contains(&format!("signed by {ours}")), "{}", shown(&output));
    let output = fixture.torpor(&["inspect", &reference]).output().unwrap();
    assert!(shown(&output).contains("signed by    cosign, with a key"), "{}", shown(&output));

    // Nor does a signature count against it that nobody believes, where one is believed.
    let (makers, others) = (Authority::new(&fixture, "ca"), Authority::new(&fixture, "other"));
    let (sign_key, sign_cert) = makers.signer("maker");
    let sign = ["sign", &reference, "--sign-key", &sign_key, "--sign-cert", &sign_cert];
    let output = fixture.torpor(&sign).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let others = others.certificate();
    let both = [&verify[..], &["--trust", &others]].concat();
    let output = fixture.torpor(&both).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    assert!(shown(&output).contains(&format!("signed by {ours}")), "{}", shown(&output));
    let neither = ["--cosign-key", &theirs, "--trust", &others];
    let output = fixture.torpor(&[&["verify", &reference][..], &neither].concat()).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));

    // Not by whom it should be; of something else; changed.
    let other = ["--cosign-key", &theirs];
    cold_with(&fixture, &reference, "other", "of none of the keys", &other);
    attach(&registry, &of, &bundle(&fixture, "ours", &oci::sha256(b"another")));
    cold_with(&fixture, &reference, "another", "of another snapshot", &trust);
    let mut changed = bundle(&fixture, "ours", &of.digest);
    let payload = STANDARD.decode(changed["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
    let payload =
        String::from_utf8(payload).unwrap().replace("\"predicate\":{}", "\"predicate\":7");
    changed["dsseEnvelope"]["payload"] = STANDARD.encode(payload).into();
    attach(&registry, &of, &changed);
    cold_with(&fixture, &reference, "changed", "of none of the keys", &trust);
}

/// cosign, which Debian does not have, built from its Go modules; `None` where it does not build.
fn build() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let dir = target.join(format!("cosign-{VERSION}"));
    let program = dir.join("cosign");
    if !program.exists() {
        let package = format!("github.com/sigstore/cosign/v3/cmd/cosign@{VERSION}");
        let mut go = Command::new("go");
        go.args(["install", "-trimpath", "-ldflags=-s -w", &package]).current_dir(target);
        match go.env("GOBIN", dir).env("CGO_ENABLED", "0").output() {
            Ok(output) => eprintln!("{go:?}: {}", shown(&output)),
            Err(error) => eprintln!("{go:?}: {error}"),
        }
    }
    program.exists().then_some(program)
}

/// Runs cosign, with the keys of the fixture and nothing of this machine's users.
#[track_caller]
fn cosign(fixture: &Fixture, program: &Path, words: &[&str]) {
    let mut cosign = Command::new(program);
    cosign.args(words).current_dir(fixture.dir.path()).env("HOME", fixture.dir.path());
    let output = cosign.env("COSIGN_PASSWORD", "").output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", shown(&output));
}

/// The same by cosign itself: with its keys, and the list that it keeps under a name beside the snapshot.
#[test]
fn cosign_itself_signs_what_is_started() {
    let name = "cosign_itself_signs_what_is_started";
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: {name} (TORPOR_LONG=1 runs it)");
        return;
    }
    let Some(program) = build() else {
        eprintln!("left out: {name} (cosign {VERSION} does not build here)");
        return;
    };
    let fixture = Fixture::new("cosign-itself", 100);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--no-trial"]);
    let bytes = store::open(&reference.parse().unwrap()).unwrap().manifest().unwrap().unwrap();
    let digest = oci::sha256(&bytes);
    let image = format!("{}/team/app@{digest}", registry.host);
    let [ours, theirs] = ["ours", "theirs"].map(|name| {
        cosign(&fixture, &program, &["generate-key-pair", "--output-key-prefix", name]);
        fixture.path(&format!("{name}.pub")).display().to_string()
    });
    // Files that name no service of Sigstore: cosign asks nobody but the registry.
    cosign(&fixture, &program, &["signing-config", "create", "--out", "none.json"]);
    cosign(&fixture, &program, &["trusted-root", "create", "--out", "no-root.json"]);
    let alone = ["--signing-config", "none.json", "--trusted-root", "no-root.json"];
    let sign = |key: &str| {
        cosign(
            &fixture,
            &program,
            &[&["sign", "--key", key][..], &alone, &[image.as_str()]].concat(),
        );
    };
    let trust = ["--cosign-key", &ours, "--require-signature"];
    let other = ["--cosign-key", &theirs, "--require-signature"];
    let said = |words: &[&str]| {
        let output = fixture.torpor(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", shown(&output));
        shown(&output)
    };
    let verify = |place: &str, trust: &[&str]| said(&[&["verify", place][..], trust].concat());

    cold_with(&fixture, &reference, "absent", "is not signed", &trust);
    sign("ours.key");
    fixture.run(&reference, "good", "snapshot", &trust);
    fixture.answers_right("good");
    assert!(verify(&reference, &trust).contains(&format!("signed by {ours}")));
    assert!(said(&["inspect", &reference]).contains("signed by    cosign, with "));
    cold_with(&fixture, &reference, "other", "of none of the keys", &other);

    // cosign adds to its list, and each of those who have signed is found there.
    sign("theirs.key");
    assert!(verify(&reference, &other).contains(&format!("signed by {theirs}")));
    assert!(verify(&reference, &trust).contains(&format!("signed by {ours}")));

    let copied = mirror(&registry, &["v1", &digest.replace(':', "-")]);
    assert!(verify(&format!("{copied}:v1"), &trust).contains(&format!("signed by {ours}")));
}

/// Copies what has these names in the repository of the tests to another one, and says which: a mirror has the signatures if it
/// has their list.
fn mirror(registry: &Registry, names: &[&str]) -> String {
    let to = format!("{}/mirror/app", registry.host);
    for name in names {
        let mut copy = Command::new("skopeo");
        copy.args(["--insecure-policy", "copy", "--all"]);
        copy.args(["--src-tls-verify=false", "--dest-tls-verify=false"]);
        copy.arg(format!("docker://{}/team/app:{name}", registry.host));
        let output = copy.arg(format!("docker://{to}:{name}")).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
    }
    to
}
