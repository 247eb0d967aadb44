//! Sealed checkpoints: with every kind of key, by a configuration file alone, and what is
//! said if a key is missing or wrong.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use prost::Message;
use torpor_images::pagemap::{Pagemap, Run};
use torpor_images::proto::{CriuOpts, CriuReqType, MmEntry};
use torpor_images::sealed::Unwrap;
use torpor_images::{ImageDir, kind};
use torpor_seal::keys::Identities;
use torpor_seal::manifest::Signed;
use torpor_seal::sign::Signature;
use torpor_sys::process::wait;

#[path = "../../seal/tests/common/mod.rs"]
mod authority;
#[path = "sealed/changed.rs"]
mod changed;
mod keys;
mod sleeper;

use authority::{Authority, NOW};
use keys::age_key;
use sleeper::{Client, SECRET, Sleeper, criu, request, wait_until, write_script};

/// A file of OpenSSL's, among those of the tests of keys.
fn fixture(name: &str) -> String {
    format!("{}/../seal/tests/keys/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn torpor(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    command.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE").args(args).output().unwrap()
}

/// The error of a command that must fail, in its one line.
fn sentence(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("Error: ").unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Restores a sleeper, which must live then, and kills it.
fn wakes(task: &Sleeper, args: &[&str]) {
    let output = task.restore(args).arg("-d").output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?} {}", task.log("restore.log"));
    assert!(task.lives());
    task.kill();
    wait_until(|| !Path::new(&format!("/proc/{}", task.pid)).exists());
}

/// A restore that fails, with what it says; nothing is left of it.
fn stays_asleep(task: &Sleeper, args: &[&str]) -> String {
    let said = sentence(&task.restore(args).arg("-d").output().unwrap());
    assert!(!Path::new(&format!("/proc/{}", task.pid)).exists(), "{said}");
    said
}

/// A key provider that keeps what it is given, as a toy: its spec.
fn provider(dir: &Path) -> String {
    let path = dir.join("vault");
    let text = "#!/bin/sh\nread -r request\n\
        case $request in\n\
        *'\"operation\":\"wrap\"'*) echo \"$request\" | sed 's/.*\"secret\":\"\\([^\"]*\\)\".*/{\"wrapped\":\"\\1\"}/' ;;\n\
        *) echo \"$request\" | sed 's/.*\"wrapped\":\"\\([^\"]*\\)\".*/{\"secret\":\"\\1\"}/' ;;\n\
        esac\n";
    write_script(&path, text);
    format!("provider:{}", path.display())
}

#[test]
fn every_kind_of_key_opens_what_is_sealed_for_it() {
    let keys = tempfile::tempdir().unwrap();
    let (age, recipient) = age_key(keys.path(), "age.key");
    let vault = provider(keys.path());
    let mut recipients = vec![recipient, format!("{vault}:main")];
    recipients.extend(["rsa.crt", "p256.crt", "p384.crt", "x25519.crt"].map(fixture));
    let args: Vec<&str> =
        recipients.iter().flat_map(|recipient| ["--recipient", recipient]).collect();

    let task = Sleeper::start();
    task.put_to_sleep(&[&["--encrypt"], args.as_slice()].concat());
    for key in ["rsa.key", "p256.key", "p384.key", "x25519.key"].map(fixture) {
        wakes(&task, &["--identity", &key]);
        wakes(&task, &["--tls-key", &key]);
    }
    wakes(&task, &["--identity", &age]);
    wakes(&task, &["--identity", &vault]);
    assert!(stays_asleep(&task, &["--identity", &fixture("ed25519.key")]).contains("cannot open"));
}

#[test]
fn a_tls_certificate_is_a_recipient() {
    let task = Sleeper::start();
    task.put_to_sleep(&["-e", "--tls-cert", &fixture("p256.crt")]);
    wakes(&task, &["--tls-key", &fixture("p256.key")]);
}

/// Whether the images show what is in the environment of a sleeper.
fn holds_environment(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().any(|entry| {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
    })
}

#[test]
fn a_configuration_file_alone_seals_what_a_runtime_does() {
    let keys = tempfile::tempdir().unwrap();
    let (age, recipient) = age_key(keys.path(), "age.key");
    let config = keys.path().join("default.conf");
    fs::write(&config, format!("encrypt\nrecipient {recipient}\nidentity {age}\n")).unwrap();

    let task = Sleeper::start();
    let dir = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts { images_dir_fd: dir.as_raw_fd(), ..CriuOpts::default() };
    let dump = |opts: CriuOpts, with: &[(&str, &Path)]| {
        let mut client = Client::start_with(with);
        let opts = CriuOpts { pid: Some(task.pid), ..opts };
        let response = client.ask(&request(CriuReqType::Dump, opts), "");
        assert!(response.success, "{}", response.cr_errmsg());
        client.finish();
    };
    // Plain, the environment of the task is there for all to see.
    dump(CriuOpts { leave_running: Some(true), ..opts.clone() }, &[]);
    assert!(holds_environment(task.dir.path()));
    for entry in fs::read_dir(task.dir.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    dump(opts.clone(), &[("CRIU_CONFIG_FILE", &config)]);
    wait(task.pid, true).unwrap();
    assert!(!holds_environment(task.dir.path()));
    assert!(task.dir.path().join("seal.img").exists());

    // Without the file nobody has the key; with it, nobody has to say anything.
    let restore =
        || request(CriuReqType::Restore, CriuOpts { rst_sibling: Some(true), ..opts.clone() });
    let mut client = Client::start();
    let response = client.ask(&restore(), "");
    assert!(response.cr_errmsg().contains("no key to open them is given"), "{response:?}");
    assert_eq!(response.cr_errno(), libc::ENOKEY);
    client.finish();
    let mut client = Client::start_with(&[("CRIU_CONFIG_FILE", &config)]);
    let response = client.ask(&restore(), "");
    assert!(response.success, "{}", response.cr_errmsg());
    client.finish();
    assert!(task.lives());
    task.kill();
    wait(task.pid, true).unwrap();
}

#[test]
fn a_request_brings_keys_in_its_tls_fields() {
    let task = Sleeper::start();
    let config = tempfile::tempdir().unwrap();
    let file = config.path().join("c.conf");
    fs::write(&file, "encrypt\n").unwrap();
    let dir = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts { images_dir_fd: dir.as_raw_fd(), ..CriuOpts::default() };
    let mut client = Client::start_with(&[("CRIU_CONFIG_FILE", &file)]);
    let tls_cert = Some(fixture("p256.crt"));
    let dump = CriuOpts { pid: Some(task.pid), tls_cert, ..opts.clone() };
    let response = client.ask(&request(CriuReqType::Dump, dump), "");
    assert!(response.success, "{}", response.cr_errmsg());
    client.finish();
    wait(task.pid, true).unwrap();
    let mut client = Client::start();
    let tls_key = Some(fixture("p256.key"));
    let restore = CriuOpts { rst_sibling: Some(true), tls_key, ..opts };
    let response = client.ask(&request(CriuReqType::Restore, restore), "");
    assert!(response.success, "{}", response.cr_errmsg());
    client.finish();
    task.kill();
    wait(task.pid, true).unwrap();
}

#[test]
fn a_request_s_own_file_may_not_name_keys() {
    let task = Sleeper::start();
    let dir = fs::File::open(task.dir.path()).unwrap();
    let file = task.dir.path().join("own.conf");
    for line in ["no-encrypt", "identity /etc/shadow", "action-script /bin/true", "trust /x"] {
        fs::write(&file, format!("{line}\n")).unwrap();
        let opts = CriuOpts {
            images_dir_fd: dir.as_raw_fd(),
            pid: Some(task.pid),
            config_file: Some(file.display().to_string()),
            ..CriuOpts::default()
        };
        let mut client = Client::start();
        let response = client.ask(&request(CriuReqType::Dump, opts), "");
        assert!(response.cr_errmsg().contains("own.conf, line 1: "), "{response:?}");
        assert!(response.cr_errmsg().contains("only in files below /etc"), "{response:?}");
        client.finish();
    }
    assert!(task.lives());
}

#[test]
fn a_dump_that_cannot_be_sealed_leaves_the_task_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let theirs = Authority::new(dir.path(), "theirs");
    let text = |path: &PathBuf| path.display().to_string();
    let (old, early) =
        (ours.issue("old", (2000, 2001), &[]), ours.issue("early", (2998, 2999), &[]));
    let (gone, foreign) = (ours.issue("gone", NOW, &[]), theirs.issue("foreign", NOW, &[]));
    let crl = text(&ours.revoke(&["gone"], 2999));
    let trust = ["--trust", &text(&ours.cert()), "--crl", &crl];
    let missing = dir.path().join("missing").display().to_string();

    let task = Sleeper::start();
    for (recipient, said) in [
        (text(&old.cert), "certificate \"old\" has expired on "),
        (text(&early.cert), "certificate \"early\" is not valid before "),
        (text(&gone.cert), "certificate \"gone\" has been revoked"),
        (text(&foreign.cert), "certificate \"foreign\" is not trusted: "),
        (missing.clone(), &format!("{missing}: No such file")),
        (format!("provider:{missing}"), &format!("key provider {missing}: it cannot be started: ")),
        ("provider:/bin/false".into(), "key provider /bin/false: it ended with exit status: 1"),
    ] {
        let output = task.dump(&[&trust[..], &["--recipient", &recipient]].concat());
        let error = sentence(&output);
        assert!(error.starts_with(said), "{error}");
        assert!(task.lives() && !task.dir.path().join("inventory.img").exists());
    }
    let error = sentence(&task.dump(&["--encrypt"]));
    assert_eq!(error, "--encrypt needs to know for whom the images are sealed");
    let key = fixture("p256.key");
    let error = sentence(&task.dump(&["--recipient", &fixture("rsa.crt"), "--sign-key", &key]));
    assert_eq!(error, "--sign-key and --sign-cert need each other");
    assert!(task.lives());
}

#[test]
fn a_restore_without_the_right_key_says_so_in_a_sentence() {
    let keys = tempfile::tempdir().unwrap();
    let missing = keys.path().join("missing").display().to_string();
    let task = Sleeper::start();
    task.put_to_sleep(&[
        "--recipient",
        &fixture("p256.crt"),
        "--recipient",
        &provider(keys.path()),
    ]);
    for (args, said) in [
        (
            &[][..],
            "the images are sealed, and no key to open them is given: name one with --identity",
        ),
        (&["--identity", &fixture("rsa.key")], "none of the given keys opens them (hpke-p256 "),
        (&["--identity", &missing], &format!("{missing}: No such file")),
        (&["--identity", "/"], "/: Is a directory"),
        (
            &["--identity", "provider:/nowhere/vault"],
            "key provider /nowhere/vault: it cannot be started",
        ),
        (&["--identity", &fixture("encrypted.key")], "protected by a passphrase"),
    ] {
        let error = stays_asleep(&task, args);
        assert!(error.contains(said), "{args:?}: {error}");
    }
    wakes(&task, &["--identity", &missing, "--identity", &fixture("p256.key")]);
}

#[test]
fn signatures_can_be_required() {
    let dir = tempfile::tempdir().unwrap();
    let text = |path: &PathBuf| path.display().to_string();
    let (ours, theirs) = (Authority::new(dir.path(), "ours"), Authority::new(dir.path(), "theirs"));
    let (good, foreign) = (ours.issue("good", NOW, &[]), theirs.issue("foreign", NOW, &[]));
    let crl = text(&ours.revoke(&["good"], 2999));
    let (trust, key) = (text(&ours.cert()), fixture("p256.key"));
    let open = ["--identity", key.as_str(), "--trust", &trust, "--require-signature"];
    let signed_by = |files: &authority::Files| {
        let task = Sleeper::start();
        let (key, cert) = (text(&files.key), text(&files.cert));
        let sign = ["--sign-key", &key, "--sign-cert", &cert];
        task.put_to_sleep(&[&sign[..], &["--recipient", &fixture("p256.crt")]].concat());
        task
    };

    let task = signed_by(&good);
    let error = stays_asleep(&task, &[&open[..], &["--crl", &crl]].concat());
    assert_eq!(error, "certificate \"good\" has been revoked");
    let error = stays_asleep(&task, &["--identity", &key, "--require-signature"]);
    assert!(error.contains("no authority is given whose signatures to trust"), "{error}");
    wakes(&task, &open);
    assert!(task.log("restore.log").contains("signed by \"good\""));

    let error = stays_asleep(&signed_by(&foreign), &open);
    assert!(error.starts_with("certificate \"foreign\" is not trusted"), "{error}");
    let task = Sleeper::start();
    task.put_to_sleep(&["--recipient", &fixture("p256.crt")]);
    let error = stays_asleep(&task, &open);
    assert!(error.contains("a signature is required, but these images are not signed"), "{error}");
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let error = stays_asleep(&task, &open);
    assert!(error.contains("a signature is required, but these images are not sealed"), "{error}");
}

/// The images of a sealed checkpoint, opened with a key, and who has signed them.
fn opened(images: &Path, identity: &str) -> (ImageDir, Signed) {
    let identities = Identities::new(&[identity.to_owned()]).unwrap();
    let unwrap: Arc<Unwrap> =
        Arc::new(move |header| Ok(identities.unwrap(&header.stanzas, &header.binding())?));
    let mut dir = ImageDir::open(images).unwrap();
    let signed = dir.unseal(&unwrap).unwrap();
    (dir, signed)
}

/// Puts another certificate into the signature of a checkpoint, as one of its recipients can: its
/// tags are made anew.
fn exchange_certificate(images: &Path, identity: &str, der: Vec<u8>) {
    let (dir, signed) = opened(images, identity);
    let mut signature = Signature::decode(signed.signature.unwrap().as_slice()).unwrap();
    signature.chain[0] = der;
    let signed = Signed { signature: Some(signature.encode_to_vec()), ..signed };
    let file = fs::File::create(images.join("manifest.img")).unwrap();
    let mut file = dir.seal_ref().unwrap().writer("manifest.img", file).unwrap();
    file.write_all(&signed.encode_to_vec()).unwrap();
    file.finish().unwrap();
}

/// The machine's files say whose signature there has to be; nobody gives an option. An audit says the
/// same without a restore.
#[test]
fn the_policy_requires_signatures() {
    let dir = tempfile::tempdir().unwrap();
    let text = |path: &Path| path.display().to_string();
    let (ours, theirs) = (Authority::new(dir.path(), "ours"), Authority::new(dir.path(), "theirs"));
    let crl = ours.revoke(&["bad"], 2999);
    let (age, recipient) = age_key(dir.path(), "age.key");
    let write = |name: &str, content: String| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let policy = write("policy.toml", "[signature]\nsigned = true\nsigners = ['ops']\n".into());
    let machine = write(
        "machine.conf",
        format!(
            "recipient {recipient}\nidentity {age}\ntrust {}\ncrl {}\npolicy {}\n",
            text(&ours.cert()),
            text(&crl),
            text(&policy)
        ),
    );
    let said = |command: &mut Command, allowed: bool| {
        let output = command.env("CRIU_CONFIG_FILE", &machine).output().unwrap();
        assert_eq!(output.status.success(), allowed, "{output:?}");
        String::from_utf8(if allowed { output.stdout } else { output.stderr }).unwrap()
    };
    let signed_by = |files: Option<&authority::Files>| {
        let task = Sleeper::start();
        let mut args = vec!["--recipient".to_owned(), recipient.clone()];
        if let Some(files) = files {
            let (key, cert) = (text(&files.key), text(&files.cert));
            args.extend(["--sign-key".to_owned(), key, "--sign-cert".to_owned(), cert]);
        }
        task.put_to_sleep(&args.iter().map(String::as_str).collect::<Vec<_>>());
        task
    };
    let audit = |task: &Sleeper| {
        let mut audit = Command::new(env!("CARGO_BIN_EXE_torpor"));
        audit.args(["image", "audit", task.images()]).env("HOME", "/nonexistent");
        audit
    };
    let refused = |task: &Sleeper, wanted: &str| {
        let text = said(task.restore(&["-d"]).env("HOME", "/nonexistent"), false);
        assert!(text.contains(wanted), "{wanted:?}: {text}");
        assert!(!Path::new(&format!("/proc/{}", task.pid)).exists());
        let output = audit(task).env("CRIU_CONFIG_FILE", &machine).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!output.status.success() && text.contains(wanted), "{wanted:?}: {text}");
    };

    let ops = ours.issue("ops", NOW, &[]);
    let task = signed_by(Some(&ops));
    assert!(said(&mut audit(&task), true).contains("everything is allowed"));
    said(&mut task.restore(&["-d"]), true);
    assert!(task.lives());
    task.kill();
    wait_until(|| !Path::new(&format!("/proc/{}", task.pid)).exists());
    exchange_certificate(task.dir.path(), &age, ours.issue_again(&ops, "ops", (2000, 2020)));
    refused(&task, "certificate \"ops\" has expired on Jan  1 00:00:00 2020");

    refused(&signed_by(None), "the images are not signed by anyone who is trusted (--trust)");
    let else_signed =
        |files: &authority::Files, wanted: &str| refused(&signed_by(Some(files)), wanted);
    else_signed(&theirs.issue("ops", NOW, &[]), "certificate \"ops\" is not trusted");
    else_signed(&ours.issue("bad", NOW, &[]), "certificate \"bad\" has been revoked");
    else_signed(
        &ours.issue("dev", NOW, &[]),
        "the images are signed by \"dev\" (certified by \"ours\"), who is not allowed",
    );

    // An authority that is trusted otherwise, but not for this.
    fs::write(&policy, "[signature]\nauthorities = ['theirs']\n").unwrap();
    else_signed(&ours.issue("ops", NOW, &[]), "(signature.authorities)");

    // Whoever has no key learns nothing.
    let output = audit(&task).arg("--identity").arg(fixture("p256.key")).output().unwrap();
    assert!(sentence(&output).contains("none of the given keys opens them"), "{output:?}");
}

/// What the second dump has again need not be in the first: it goes without being opened.
#[test]
fn repeated_pages_are_punched_out() {
    repeated_pages_go(&[]);
    repeated_pages_go(&["--suite", "aes-256-xts+hmac-sha256"]);
    repeated_pages_go(&["--compress", "lz4"]);
}

fn repeated_pages_go(options: &[&str]) {
    let (key, recipient) = (fixture("p256.key"), fixture("p256.crt"));
    let task = Sleeper::start();
    let top = task.dir.path().join("first");
    let (images, first) = (task.images(), top.to_str().unwrap());
    let pid = task.pid.to_string();
    let dump = [options, &["--recipient", &recipient, "--identity", &key]].concat();
    let output = torpor(&[&["pre-dump", "-t", &pid, "-D", first], &dump[..]].concat());
    assert!(output.status.success(), "{output:?}");
    task.put_to_sleep(&[&["--prev-images-dir", "first"], &dump[..]].concat());
    let said = sentence(&torpor(&["dedup", "-D", images]));
    assert!(said.contains("no key to open them is given"), "{said}");
    let output = torpor(&["dedup", "-v4", "-D", images, "--identity", &key]);
    assert!(output.status.success(), "{output:?}");
    wakes(&task, &["--identity", &key]);
}

#[test]
fn keys_are_made_once_for_their_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (file, recipient) = age_key(dir.path(), "age.key");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nAGE-SECRET-KEY-1"), "{text}");
    let again = torpor(&["key", "generate", &file]);
    assert!(sentence(&again).contains("File exists"), "{again:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text);

    let shown = torpor(&["key", "inspect", &file]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(&format!("opens X25519 {recipient}")), "{shown}");
    let ours = Authority::new(dir.path(), "ours");
    let old = ours.issue("old", (2000, 2001), &[]);
    let output = torpor(&["key", "inspect", old.cert.to_str().unwrap()]);
    let shown = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(
        shown.contains("hpke-p256 ") && shown.contains("refused: certificate \"old\""),
        "{shown}"
    );
    assert_eq!(sentence(&output), format!("not to be used: {}", old.cert.display()));
    // What is mistyped is no file that is missing.
    let mistyped = sentence(&torpor(&["key", "inspect", &recipient[..recipient.len() - 1]]));
    assert!(!mistyped.contains("No such file"), "{mistyped}");
}

/// Without root nobody may lock as much memory as this program has.
#[test]
fn a_user_who_may_lock_little_memory_makes_keys() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .args(["-c", "ulimit -l 64; exec setpriv --bounding-set=-ipc_lock \"$@\"", "sh"])
        .args([env!("CARGO_BIN_EXE_torpor"), "key", "generate"])
        .arg(dir.path().join("key"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout.starts_with(b"age1"), "{said}");
    assert!(said.contains("swap"), "{said}");
}

#[test]
fn what_private_keys_are_good_for_is_shown() {
    for (key, opens, signs) in [
        ("ed25519.key", false, Some("ed25519")),
        ("x25519.key", true, None),
        ("p256.key", true, Some("ecdsa-p256-sha256")),
        ("p384.key", true, Some("ecdsa-p384-sha384")),
        ("rsa.key", true, Some("rsa-pss-sha256")),
    ] {
        let output = torpor(&["key", "inspect", &fixture(key)]);
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{key}: {shown}");
        let lines: Vec<&str> = shown.lines().skip(1).map(str::trim).collect();
        assert_eq!(lines.iter().any(|line| line.starts_with("opens ")), opens, "{key}: {shown}");
        let found = lines.iter().find_map(|line| line.strip_prefix("signs "));
        assert_eq!(found, signs, "{key}: {shown}");
    }
}

#[test]
fn images_are_shown_to_who_has_the_key() {
    are_shown(&[]);
    are_shown(&["--compress", "zstd"]);
}

fn are_shown(options: &[&str]) {
    let task = Sleeper::start();
    task.put_to_sleep(&[options, &["--recipient", &fixture("p256.crt")]].concat());
    let (dir, key) = (task.images(), fixture("p256.key"));
    let pstree = format!("{dir}/pstree.img");
    let of_dir = ["show", "ps", "fds", "mems", "rss", "audit"].map(|command| [command, dir]);
    for args in of_dir.into_iter().chain([["show", &pstree], ["info", &pstree]]) {
        let args = [&["image"], &args[..]].concat();
        let output = torpor(&args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("the images are sealed, and no key to open them"), "{said}");
        assert!(output.stdout.is_empty() && !output.status.success());
        let output = torpor(&[&args[..], &["--identity", &fixture("rsa.key")]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("none of the given keys opens them"), "{said}");
        let output = torpor(&[&args[..], &["--identity", &key]].concat());
        assert!(output.status.success(), "{output:?}");
        assert!(!output.stdout.is_empty());
    }
    // As crit, too, and by the key that a configuration file names.
    let config = tempfile::NamedTempFile::new().unwrap();
    fs::write(&config, format!("identity {key}\n")).unwrap();
    let mut crit = Command::new(env!("CARGO_BIN_EXE_torpor"));
    crit.arg0("crit").args(["x", dir, "ps"]).env("HOME", "/nonexistent");
    let shown = crit.env("CRIU_CONFIG_FILE", config.path()).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(&task.pid.to_string()) && shown.contains("sleep"), "{shown}");
    // A file that was taken out of its checkpoint says what it is.
    let lost = tempfile::tempdir().unwrap();
    let copy = lost.path().join("pstree.img");
    fs::copy(&pstree, &copy).unwrap();
    let said =
        String::from_utf8(torpor(&["image", "show", copy.to_str().unwrap()]).stderr).unwrap();
    assert!(said.contains("sealed"), "{said}");
}

#[test]
fn recipients_come_and_go_without_the_memory_being_touched() {
    come_and_go(&[]);
    come_and_go(&["--compress", "lz4"]);
}

/// Whoever has only the key for the last of two checkpoints could restore neither.
#[test]
fn a_recipient_who_cannot_open_the_parent_is_named() {
    let keys = tempfile::tempdir().unwrap();
    let (age, recipient) = age_key(keys.path(), "age.key");
    let (_, other) = age_key(keys.path(), "other.key");
    let (p256, rsa) = (fixture("p256.crt"), fixture("rsa.crt"));
    let task = Sleeper::start();
    let first = task.dir.path().join("first");
    fs::create_dir(&first).unwrap();
    let first = first.to_str().unwrap();
    let pid = task.pid.to_string();
    let mut dump = criu(&["dump", "-t", &pid, "-D", first, "-R", "--track-mem"]);
    let dumped = dump.args(["--recipient", &recipient, "--recipient", &p256]).output().unwrap();
    assert!(dumped.status.success(), "{dumped:?}");
    let on_top = |recipients: &[&str]| {
        let options = ["-R", "--track-mem", "--prev-images-dir", "first", "--identity", &age];
        let named = recipients.iter().flat_map(|recipient| ["--recipient", recipient]);
        let output = task.dump(&options.into_iter().chain(named).collect::<Vec<_>>());
        (output.status.success(), String::from_utf8(output.stderr).unwrap() + &task.log("dump.log"))
    };
    let unable = "cannot open";
    let (done, said) = on_top(&[&recipient, &p256]);
    assert!(done && !said.contains(unable), "{said}");
    for stranger in [&other, &rsa] {
        let (done, said) = on_top(&[&recipient, stranger]);
        assert!(done && said.matches(unable).count() >= 1 && !said.contains(&recipient), "{said}");
        let output = task.dump(&[
            "-R",
            "--strict",
            "--prev-images-dir",
            "first",
            "--identity",
            &age,
            "--recipient",
            stranger,
        ]);
        assert!(!output.status.success());
        assert!(task.lives());
    }
    // As the warning says.
    let done =
        torpor(&["image", "rewrap", "--add", "--recipient", &other, "--identity", &age, first]);
    assert!(done.status.success(), "{done:?}");
    let (done, said) = on_top(&[&other]);
    assert!(done && !said.contains(unable), "{said}");
}

fn come_and_go(options: &[&str]) {
    let keys = tempfile::tempdir().unwrap();
    let (age, recipient) = age_key(keys.path(), "age.key");
    let old = Authority::new(keys.path(), "ours").issue("old", (2000, 2001), &[]);
    let task = Sleeper::start();
    task.put_to_sleep(&[options, &["--recipient", &fixture("p256.crt")]].concat());
    let others = |task: &Sleeper| -> Vec<(PathBuf, Vec<u8>)> {
        let paths = fs::read_dir(task.dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let images = paths.filter(|path| path.extension().is_some_and(|kind| kind == "img"));
        let images = images.filter(|path| !path.ends_with("seal.img"));
        let mut images: Vec<_> =
            images.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
        images.sort();
        images
    };
    let before = others(&task);
    let (p256, rsa) = (fixture("p256.key"), fixture("rsa.key"));
    let rewrap = |args: &[&str]| torpor(&[&["image", "rewrap", task.images()], args].concat());

    // Whoever cannot open it cannot give it to others; nor can it be given to anybody.
    let refused = rewrap(&["--identity", &rsa, "--recipient", &recipient]);
    assert!(String::from_utf8(refused.stderr).unwrap().contains("none of the given keys"));
    let refused = rewrap(&["--identity", &p256, "--recipient", old.cert.to_str().unwrap()]);
    assert!(String::from_utf8(refused.stderr).unwrap().contains("\"old\" has expired"));
    let done = rewrap(&["--identity", &p256, "--add", "--recipient", &recipient]);
    assert!(done.status.success(), "{done:?}");
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(said.contains("hpke-p256 ") && said.contains("an identity of age"), "{said}");
    wakes(&task, &["--identity", &p256]);
    wakes(&task, &["--identity", &age]);

    let done = rewrap(&["--identity", &age, "--recipient", &fixture("rsa.crt")]);
    assert!(done.status.success(), "{done:?}");
    for key in [&age, &p256] {
        let error = stays_asleep(&task, &["--identity", key]);
        assert!(error.contains("none of the given keys opens them (rsa-oaep-sha256 "), "{error}");
    }
    wakes(&task, &["--identity", &rsa]);
    assert_eq!(others(&task), before);
}

/// State of random number generators, which must not be there twice, is in no image.
#[test]
fn memory_that_may_be_dropped_is_not_stored() {
    // `MAP_DROPPABLE`, and a mapping like others.
    const PROGRAM: &str = "import mmap, time
def filled(flags, step):
    try:
        memory = mmap.mmap(-1, 65536, flags=flags | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    for i in range(65536):
        memory[i] = i * step % 251
    return memory
both = filled(8, 7), filled(mmap.MAP_PRIVATE, 11)
with open('/proc/self/comm', 'w') as name:
    name.write('sleep')
time.sleep(1000)";
    let task = Sleeper::start_as(&["python3", "-c", PROGRAM]);
    let maps = fs::read_to_string(format!("/proc/{}/smaps", task.pid)).unwrap();
    let Some(range) = droppable(&maps) else {
        eprintln!("left out: droppable memory (this kernel has none)");
        return;
    };
    task.put_to_sleep(&[]);
    let dir = ImageDir::open(task.images()).unwrap();
    let pid = u64::from(task.pid.cast_unsigned());
    let mm: MmEntry = dir.read_one(kind::MM, pid).unwrap();
    assert!(mm.vmas.iter().any(|vma| vma.start == range.start), "{range:x?} is no mapping");
    let map = Pagemap::read(&dir, kind::PAGEMAP, pid).unwrap();
    let stored = |run: &Run| run.vaddr < range.end && range.start < run.range().end;
    assert!(!map.runs.iter().any(stored), "{range:x?} of {map:x?}");
    let path = Path::new(task.images()).join(kind::PAGES.file_name(map.pages_id.into()));
    let pages = fs::read(path).unwrap();
    let holds = |step: u32| {
        let part: Vec<u8> = (4096..4096 + 64).map(|i| (i * step % 251).to_le_bytes()[0]).collect();
        pages.windows(64).any(|window| window == part)
    };
    assert_eq!((holds(7), holds(11)), (false, true));
    wakes(&task, &[]);
}

/// The mapping in a file such as `/proc/PID/smaps` that may be dropped.
fn droppable(maps: &str) -> Option<Range<u64>> {
    let mut range = None;
    for line in maps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        match first.split_once('-') {
            Some((start, end)) => {
                let number = |text| u64::from_str_radix(text, 16).ok();
                range = number(start).zip(number(end)).map(|(start, end)| start..end);
            }
            None if first == "VmFlags:" && rest.split(' ').any(|flag| flag == "dp") => {
                return range;
            }
            None => {}
        }
    }
    None
}
