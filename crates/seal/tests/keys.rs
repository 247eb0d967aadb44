//! Recipients and identities as people have them: files of OpenSSL and age, certificates
//! of authorities, and all that can be wrong with them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::{Path, PathBuf};

use common::{Authority, NOW};
use rcgen::KeyUsagePurpose;
use torpor_seal::keys::{AgeIdentity, Identities, Identity, Recipient, Trust};
use torpor_seal::sign::{Signature, Signer};
use torpor_seal::{MasterKey, Stanza};

/// A file of OpenSSL's, in `tests/keys`.
fn fixture(name: &str) -> String {
    format!("{}/tests/keys/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn key() -> MasterKey {
    MasterKey::take(&mut [9; 32])
}

fn recipient(spec: impl AsRef<Path>) -> Recipient {
    Recipient::parse(spec.as_ref().to_str().unwrap()).unwrap().remove(0)
}

fn identities(specs: &[impl AsRef<Path>]) -> Identities {
    let specs = specs.iter().map(|spec| spec.as_ref().to_str().unwrap().into());
    Identities::new(&specs.collect::<Vec<String>>()).unwrap()
}

fn refused(spec: &str) -> String {
    Recipient::parse(spec).unwrap_err().to_string()
}

#[test]
fn every_kind_of_openssl_key_opens_what_is_sealed_for_its_certificate() {
    for (cert, keys, kind) in [
        ("rsa.crt", &["rsa.key", "rsa-pkcs1.key"][..], "rsa-oaep-sha256"),
        ("p256.crt", &["p256.key", "p256-sec1.key"], "hpke-p256"),
        ("p384.crt", &["p384.key"], "hpke-p384"),
        ("x25519.crt", &["x25519.key"], "hpke-x25519"),
    ] {
        let recipient = recipient(fixture(cert));
        recipient.check(&Trust::default()).unwrap();
        let stanza = recipient.wrap(&key(), b"here").unwrap();
        assert_eq!((recipient.kind(), stanza.kind.as_str()), (kind, kind));
        for file in keys {
            let identity = Identity::load(&fixture(file)).unwrap().remove(0);
            assert_eq!(identity.name(), recipient.name(), "{file}");
            assert_eq!(identity.unwrap(&stanza, b"here").unwrap(), Some(key()), "{file}");
            let error = identity.unwrap(&stanza, b"there").unwrap_err().to_string();
            assert!(error.contains("damaged or exchanged"), "{error}");
        }
    }
}

#[test]
fn what_openssl_wraps_by_rsa_opens() {
    let identity = Identity::load(&fixture("rsa.key")).unwrap().remove(0);
    let own = recipient(fixture("rsa.crt")).wrap(&key(), b"here").unwrap();
    let body = std::fs::read(fixture("rsa-oaep.bin")).unwrap();
    let stanza = Stanza { body, ..own };
    assert_eq!(identity.unwrap(&stanza, b"here").unwrap(), Some(key()));
}

#[test]
fn the_right_identity_is_found_among_many() {
    let dir = tempfile::tempdir().unwrap();
    let (age, text) = AgeIdentity::generate().unwrap();
    let file = dir.path().join("age.txt");
    std::fs::write(&file, format!("# created: now\n# public key: x\n{}\n", *text)).unwrap();

    let mut stanzas: Vec<Stanza> = ["rsa.crt", "p256.crt"]
        .iter()
        .map(|cert| recipient(fixture(cert)).wrap(&key(), b"").unwrap())
        .collect();
    let to_age = recipient(age.recipient().to_string());
    stanzas.push(to_age.wrap(&key(), b"").unwrap());
    for identity in [fixture("rsa.key"), fixture("p256.key"), file.display().to_string()] {
        assert_eq!(identities(&[&identity]).unwrap(&stanzas, b"").unwrap(), key(), "{identity}");
    }
    // One that cannot be read does no harm beside one that opens.
    let missing = dir.path().join("missing").display().to_string();
    let some = identities(&[missing.clone(), fixture("p384.key"), fixture("p256.key")]);
    assert_eq!(some.unwrap(&stanzas, b"").unwrap(), key());

    let none = identities(&[fixture("p384.key")]).unwrap(&stanzas, b"").unwrap_err().to_string();
    let fingerprint = recipient(fixture("p256.crt")).name();
    assert!(none.contains("sealed for others") && none.contains("an identity of age"), "{none}");
    assert!(none.contains(&format!("hpke-p256 {fingerprint}")), "{none}");
    let none = identities(&[&missing]).unwrap(&stanzas, b"").unwrap_err().to_string();
    assert!(none.contains(&missing) && none.contains("No such file"), "{none}");
    // Directories may change between the options and their use.
    assert_eq!(identities(&["x"]), identities(&[std::path::absolute("x").unwrap()]));
    let none = Identities::default().unwrap(&stanzas, b"").unwrap_err().to_string();
    assert!(none.contains("--identity"), "{none}");
}

#[test]
fn files_of_age_recipients_name_several() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (AgeIdentity::generate().unwrap().0, AgeIdentity::generate().unwrap().0);
    let file = dir.path().join("recipients");
    let lines = format!("# us\n{}\n\n{}\n", one.recipient(), two.recipient());
    std::fs::write(&file, &lines).unwrap();
    let names: Vec<String> =
        Recipient::parse(file.to_str().unwrap()).unwrap().iter().map(Recipient::name).collect();
    assert_eq!(names, [one.recipient().to_string(), two.recipient().to_string()]);

    std::fs::write(&file, format!("{lines}nobody\n")).unwrap();
    assert!(refused(file.to_str().unwrap()).contains("recipients: nobody"));
    std::fs::write(&file, lines.repeat(33)).unwrap();
    assert!(refused(file.to_str().unwrap()).contains("more than 64 recipients"));
}

#[test]
fn what_cannot_be_used_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    assert!(refused(&fixture("ed25519.crt")).contains("can sign, but nothing can be sealed"));
    assert!(refused(&fixture("rsa.key")).contains("no certificate in it"));
    assert!(refused("/nowhere/x.crt").contains("/nowhere/x.crt: No such file"));
    assert!(refused("age1xyz").contains("mistyped"));
    assert!(refused("provider:vault").contains("absolute path"));
    assert!(refused(&file("der", &[0x30, 3, 1, 2, 3])).contains("damaged"));
    assert!(refused(&file("endless", &vec![0; (4 << 20) + 1])).contains("endless"));

    let identity = |spec: &str| Identity::load(spec).unwrap_err().to_string();
    assert!(identity(&fixture("encrypted.key")).contains("protected by a passphrase"));
    assert!(identity(&fixture("ed25519.key")).contains("this key cannot open"));
    assert!(identity(&fixture("p256.crt")).contains("no private key in it"));
    let (_, text) = AgeIdentity::generate().unwrap();
    let error = identity(&text);
    assert!(error.contains("command line") && !error.contains(&text[20..]), "{error}");
    let cut = file("cut", &text.as_bytes()[..text.len() - 1]);
    let error = identity(&cut);
    assert!(error.contains("mistyped or cut") && !error.contains(&text[20..60]), "{error}");
}

#[test]
fn certificates_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let theirs = Authority::new(dir.path(), "theirs");
    let sealing = [KeyUsagePurpose::KeyAgreement];
    let good = ours.issue("good", NOW, &sealing);
    let plain = ours.issue("plain", NOW, &[]);
    let trust = Trust::load(&[ours.cert()], &[]).unwrap();
    for cert in [&good.cert, &plain.cert] {
        recipient(cert).check(&trust).unwrap();
    }

    let why = |cert: &PathBuf, trust: &Trust| recipient(cert).check(trust).unwrap_err().to_string();
    let old = ours.issue("old", (2000, 2001), &sealing);
    let early = ours.issue("early", (2998, 2999), &sealing);
    for trust in [&trust, &Trust::default()] {
        let error = why(&old.cert, trust);
        assert!(error.starts_with("certificate \"old\" has expired on "), "{error}");
        assert!(error.contains("2001"), "{error}");
        let error = why(&early.cert, trust);
        assert!(error.starts_with("certificate \"early\" is not valid before "), "{error}");
        assert!(error.contains("2998"), "{error}");
    }
    let foreign = theirs.issue("foreign", NOW, &sealing);
    let error = why(&foreign.cert, &trust);
    assert_eq!(
        error,
        "certificate \"foreign\" is not trusted: it does not come from an authority given with \
         --trust"
    );
    // One that is named, without any authority, is trusted for being named.
    recipient(&foreign.cert).check(&Trust::default()).unwrap();
    // So is one that is its own authority: as OpenSSL makes them by default.
    let own = PathBuf::from(fixture("p256.crt"));
    assert!(why(&own, &trust).contains("not trusted"));
    recipient(&own).check(&Trust::load(std::slice::from_ref(&own), &[]).unwrap()).unwrap();
    let signing = ours.issue("signer", NOW, &[KeyUsagePurpose::DigitalSignature]);
    assert!(why(&signing.cert, &trust).contains("does not allow sealing"));
}

#[test]
fn revoked_certificates_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let (good, bad) = (ours.issue("good", NOW, &[]), ours.issue("bad", NOW, &[]));
    let list = ours.revoke(&["bad"], 2999);
    let trust = Trust::load(&[ours.cert()], std::slice::from_ref(&list)).unwrap();
    recipient(&good.cert).check(&trust).unwrap();
    let error = recipient(&bad.cert).check(&trust).unwrap_err().to_string();
    assert_eq!(error, "certificate \"bad\" has been revoked");

    let stale = Trust::load(&[ours.cert()], &[ours.revoke(&[], 2002)]).unwrap();
    let error = recipient(&good.cert).check(&stale).unwrap_err().to_string();
    assert!(error.contains("list of revocations is out of date"), "{error}");
    let error = Trust::load(&[], &[list]).unwrap_err().to_string();
    assert!(error.contains("--trust"), "{error}");
    let error = Trust::load(&[ours.cert()], &[good.cert]).unwrap_err().to_string();
    assert!(error.contains("no list of revocations in it"), "{error}");
    let error = Trust::load(&[good.key], &[]).unwrap_err().to_string();
    assert!(error.contains("no certificate in it"), "{error}");
}

#[test]
fn chains_lead_over_intermediate_authorities() {
    let dir = tempfile::tempdir().unwrap();
    let root = Authority::new(dir.path(), "root");
    let between = root.issue_authority("between", NOW);
    let leaf = between.issue("leaf", NOW, &[]);
    let trust = Trust::load(&[root.cert()], &[]).unwrap();
    assert!(recipient(&leaf.cert).check(&trust).is_err());
    let chain = dir.path().join("chain.pem");
    let both = [std::fs::read(&leaf.cert).unwrap(), std::fs::read(between.cert()).unwrap()];
    std::fs::write(&chain, both.concat()).unwrap();
    recipient(&chain).check(&trust).unwrap();

    let over = root.issue_authority("over", (2000, 2001));
    let leaf = over.issue("below", NOW, &[]);
    let both = [std::fs::read(&leaf.cert).unwrap(), std::fs::read(over.cert()).unwrap()];
    std::fs::write(&chain, both.concat()).unwrap();
    let error = recipient(&chain).check(&trust).unwrap_err().to_string();
    assert!(error.contains("on the way to its authority has expired"), "{error}");
}

fn own_trust(cert: &str) -> Trust {
    Trust::load(&[fixture(cert).into()], &[]).unwrap()
}

#[test]
fn every_kind_of_openssl_key_signs() {
    for (name, scheme) in [
        ("rsa", "rsa-pss-sha256"),
        ("p256", "ecdsa-p256-sha256"),
        ("p384", "ecdsa-p384-sha384"),
        ("ed25519", "ed25519"),
    ] {
        let (key, cert) = (fixture(&format!("{name}.key")), fixture(&format!("{name}.crt")));
        let trust = own_trust(&format!("{name}.crt"));
        let signer = Signer::load(key.as_ref(), cert.as_ref(), &trust).unwrap();
        let signature = signer.sign(b"message").unwrap();
        assert_eq!(signature.scheme, scheme);
        let who = signature.verify(b"message", &trust).unwrap();
        assert_eq!(who.name, format!("{name} of OpenSSL"));
        assert_eq!(who.authority, who.name);
        assert!(signature.verify(b"massage", &trust).is_err());

        // And what OpenSSL signs verifies here.
        let value = std::fs::read(fixture(&format!("{name}.sig"))).unwrap();
        let theirs = Signature { value, ..signature.clone() };
        theirs.verify(b"message", &trust).unwrap();
        for at in 0..theirs.value.len() {
            let mut changed = theirs.clone();
            changed.value[at] ^= 1;
            let error = changed.verify(b"message", &trust).unwrap_err().to_string();
            assert!(error.contains("does not fit the images"), "{error}");
        }
    }
}

#[test]
fn signatures_count_only_from_those_who_are_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let theirs = Authority::new(dir.path(), "theirs");
    let signing = [KeyUsagePurpose::DigitalSignature];
    let trust = Trust::load(&[ours.cert()], &[]).unwrap();
    let none = Trust::default();
    let sign = |files: &common::Files| {
        Signer::load(&files.key, &files.cert, &none).unwrap().sign(b"message").unwrap()
    };

    let good = ours.issue("good", NOW, &signing);
    let signature = sign(&good);
    let who = signature.verify(b"message", &trust).unwrap();
    assert_eq!((who.name.as_str(), who.authority.as_str()), ("good", "ours"));
    let error = signature.verify(b"message", &none).unwrap_err().to_string();
    assert!(error.contains("--trust"), "{error}");

    let error = sign(&theirs.issue("x", NOW, &signing)).verify(b"message", &trust).unwrap_err();
    assert!(error.to_string().contains("certificate \"x\" is not trusted"), "{error}");
    let list = ours.revoke(&["good"], 2999);
    let error = signature.verify(b"message", &Trust::load(&[ours.cert()], &[list]).unwrap());
    assert_eq!(error.unwrap_err().to_string(), "certificate \"good\" has been revoked");

    // Somebody else's certificate on one's own signature.
    let other =
        Signature { chain: sign(&ours.issue("y", NOW, &signing)).chain, ..signature.clone() };
    assert!(other.verify(b"message", &trust).unwrap_err().to_string().contains("\"y\""));
    let swapped = Signature { scheme: "ed25519".into(), ..signature.clone() };
    assert!(swapped.verify(b"message", &trust).is_err());
    for chain in [vec![], vec![vec![]], vec![vec![0x30, 3, 1, 2, 3]]] {
        assert!(Signature { chain, ..signature.clone() }.verify(b"message", &trust).is_err());
    }
}

#[test]
fn signers_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let trust = Trust::load(&[ours.cert()], &[]).unwrap();
    let one = ours.issue("one", NOW, &[]);
    let two = ours.issue("two", NOW, &[]);
    let old = ours.issue("old", (2000, 2001), &[]);
    let agreeing = ours.issue("agreeing", NOW, &[KeyUsagePurpose::KeyAgreement]);
    let why = |key: &Path, cert: &Path| Signer::load(key, cert, &trust).unwrap_err().to_string();
    assert!(why(&one.key, &two.cert).contains("this is not the key of"));
    assert!(why(&old.key, &old.cert).contains("\"old\" has expired"));
    assert!(why(&agreeing.key, &agreeing.cert).contains("does not allow signing"));
    assert!(why(fixture("x25519.key").as_ref(), &one.cert).contains("this key cannot sign"));
    assert!(
        why(fixture("p256.key").as_ref(), fixture("p256.crt").as_ref()).contains("not trusted")
    );
}
