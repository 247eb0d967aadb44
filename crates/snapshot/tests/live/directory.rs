//! Snapshots in a directory.

use std::collections::HashSet;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use torpor_runtimes_tests::port;

use crate::fixture::{Fixture, Noted, shown, until, write_script};
use crate::running::create_of;

#[test]
fn a_container_starts_from_its_snapshot() {
    let fixture = Fixture::new("start", 2000);
    let reference = fixture.reference();
    fixture.create(&reference, &["--warmup", "echo warm > /warm; rm /etc/doomed"]);
    let left = fs::read_dir(fixture.path("state")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("create-")), "{left:?}");
    assert!(!fixture.path("bundle/rootfs/warm").exists(), "the bundle is as it was");

    let said = fixture.run(&reference, "one", "snapshot", &[]);
    assert!(said["reason"].is_null());
    assert!(said["first_instruction_ms"].as_f64().unwrap() > 0.0);
    let list = fixture.runc(&["list", "--format", "json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list[0]["id"], fixture.id("one"));
    assert_eq!(list[0]["status"], "running");
    assert_eq!(list[0]["pid"], said["pid"]);
    let again = fixture.try_run(&reference, "one", &[]);
    assert_eq!(again.status.code(), Some(1), "{}", shown(&again));
    assert!(shown(&again).contains("there is a container"), "{}", shown(&again));

    fixture.run(&reference, "cold", "cold", &["--policy", "Never"]);
    until("the cold one answers", || {
        let ask = fixture.runc(&["exec", &fixture.id("cold"), "/app", "ask", "sum"]).output();
        ask.unwrap().status.success()
    });
    let sum = fixture.exec("one", &["/app", "ask", "sum"]);
    assert_eq!(sum, fixture.exec("cold", &["/app", "ask", "sum"]), "the memory is what it was");
    // What was changed while it warmed up is there, and nowhere else.
    assert_eq!(fixture.exec("one", &["cat", "/warm"]), "warm");
    assert_eq!(fixture.exec("cold", &["cat", "/etc/doomed"]), "there");
    let doomed =
        fixture.runc(&["exec", &fixture.id("one"), "cat", "/etc/doomed"]).output().unwrap();
    assert!(!doomed.status.success(), "{}", shown(&doomed));

    // The files of a container go with it.
    fixture.delete("one");
    fixture.delete("cold");
    until("the files are gone", || {
        fs::read_dir(fixture.path("state/instances")).unwrap().next().is_none()
    });
}

/// Where the network has no rules a start runs no programs to look for the lock of a dump.
#[test]
fn a_start_runs_no_programs_to_look_for_locks() {
    let fixture = Fixture::new("locks", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let (bin, called) = (fixture.path("bin"), fixture.path("called"));
    fs::create_dir(&bin).unwrap();
    for program in ["iptables-save", "ip6tables-save", "nft"] {
        let program = bin.join(program);
        write_script(&program, &format!("#!/bin/sh\necho $0 >>{}\n", called.display()));
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut run = fixture.torpor(&["run", &reference, "--id", &fixture.id("one")]);
    run.arg("--runc-root").arg(fixture.path("runc")).env("PATH", path);
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    fixture.answers_right("one");
    let called = fs::read_to_string(called).unwrap_or_default();
    assert!(called.is_empty(), "{called}");
}

/// A container that runs was started, whoever reads that: status 1 says that nothing was, and would have it started twice.
#[test]
fn containers_are_started_though_nobody_reads_it() {
    let fixture = Fixture::new("unread", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    for more in [&[] as &[&str], &["--json"]] {
        let name = format!("many{}", more.len());
        let mut run = fixture.torpor(&["run", &reference, "--id", &fixture.id(&name)]);
        run.args(["--count", "2"]).args(more).arg("--runc-root").arg(fixture.path("runc"));
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = run.stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
        for number in [1, 2] {
            let name = format!("{name}-{number}");
            fixture.answers_right(&name);
            let warning = format!("Warning: {} runs (snapshot) as process ", fixture.id(&name));
            assert!(shown(&output).contains(&warning), "{}", shown(&output));
        }
    }
}

/// What cannot be the name of a host is found before anything starts, and a cold start does not make it one.
#[test]
fn a_name_that_no_host_can_have_starts_nothing() {
    let fixture = Fixture::new("hostname", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    let long = "x".repeat(65);
    let wrong: [(&str, &[&str]); 3] =
        [(&long, &[]), ("one", &["--hostname", &long]), ("one", &["--hostname", "a\nb"])];
    for (name, more) in wrong {
        let output = fixture.try_run(&reference, name, more);
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains("cannot be the name of a host"), "{}", shown(&output));
    }
    assert!(!fixture.path("state/instances").exists());
    let said = fixture.run(&reference, &long, "snapshot", &["--hostname", "short"]);
    assert_eq!(said["id"], fixture.id(&long));
    assert_eq!(fixture.exec(&long, &["/bin/hostname"]), "short");
}

/// Which process it has started runc has noted: to ask it would hold up whoever waits for the first answer.
#[test]
fn a_start_calls_runc_once() {
    let fixture = Fixture::new("once", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let runc = Noted::new(fixture.dir.path(), "runc", &std::env::var_os("PATH").unwrap());
    for (name, policy, action) in [("warm", "Always", " restore "), ("cold", "Never", " run ")] {
        let mut run = fixture.torpor(&["run", &reference, "--id", &fixture.id(name)]);
        run.args(["--policy", policy]).arg("--runc-root").arg(fixture.path("runc"));
        let output = run.env("PATH", &runc.path).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let calls = runc.calls();
        assert!(calls.len() == 1 && calls[0].contains(action), "{calls:?}");
        fixture.answers_right(name);
    }
}

#[test]
fn two_of_one_differ() {
    let fixture = Fixture::new("differ", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let output = fixture.try_run(&reference, "many", &["--count", "3"]);
    assert!(output.status.success(), "{}", shown(&output));
    let mut generations = HashSet::new();
    for number in 1..=3 {
        let name = format!("many-{number}");
        assert_eq!(fixture.exec(&name, &["hostname"]), fixture.id(&name));
        assert!(generations.insert(fixture.exec(&name, &["cat", "/run/torpor/restored"])));
        // What a fork would not have.
        assert_eq!(fixture.exec(&name, &["/app", "ask", "random"]), "0");
        fixture.exec(&name, &["sh", "-c", &format!("test ! -e /own && echo {number} > /own")]);
    }
    assert_eq!(generations.len(), 3);
    let environment = fixture.path("environment");
    fs::write(&environment, "# of this one\nCOLOUR=blue\n").unwrap();
    let more = ["--env-file", environment.to_str().unwrap(), "--hostname", "another"];
    let after = ["--after-restore", "cat /run/torpor/environment > /seen"];
    fixture.run(&reference, "own", "snapshot", &[&more[..], &after].concat());
    assert_eq!(fixture.exec("own", &["hostname"]), "another");
    assert_eq!(fixture.exec("own", &["cat", "/seen"]), "COLOUR=blue");
}

#[test]
fn snapshots_are_listed_verified_and_removed() {
    let fixture = Fixture::new("shelf", 500);
    let store = fixture.reference();
    let (first, second) = (format!("{store}:first"), format!("{store}:second"));
    let made = fixture.create(&first, &[]);
    fixture.configure(|config| config["process"]["args"][4] = "2".into());
    fixture.create(&second, &[]);
    let said = |words: &[&str]| {
        let output = fixture.torpor(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let list: serde_json::Value = serde_json::from_str(&said(&["list", &store, "--json"])).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 2);
    let facts: serde_json::Value =
        serde_json::from_str(&said(&["inspect", &first, "--json"])).unwrap();
    assert!(facts["memory"].as_u64().unwrap() > 500 * 4096);
    assert!(facts["working_set"].as_u64().unwrap() > 0);
    assert!(facts["working_set"].as_u64() < facts["memory"].as_u64());
    assert!(said(&["inspect", &first]).contains("processes    1"));
    let verified: serde_json::Value =
        serde_json::from_str(&said(&["verify", &first, "--json"])).unwrap();
    let listed = list.as_array().unwrap().iter().find(|row| row["reference"] == first.as_str());
    let sizes = [&listed.unwrap()["size"], &facts["size"], &verified["verified"]];
    assert_eq!(sizes, [&made["size"]; 3], "one number wherever it is told");
    said(&["verify", &second]);

    // Other tools copy it, and it is still one.
    let copied = fixture.path("copied");
    let mut copy = Command::new("skopeo");
    copy.arg("--insecure-policy").arg("copy");
    copy.arg(format!("oci:{}:second", fixture.path("store").display()));
    copy.arg(format!("oci:{}:second", copied.display()));
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let copied = format!("dir:{}:second", copied.display());
    said(&["verify", &copied]);
    fixture.run(&copied, "copy", "snapshot", &[]);

    said(&["rm", &first]);
    let blobs = || fs::read_dir(fixture.path("store/blobs/sha256")).unwrap().count();
    let before = blobs();
    for command in ["list", "gc"] {
        let output = fixture.torpor(&[command, "dir:/nope"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains("there is no directory /nope"), "{}", shown(&output));
    }
    said(&["gc", &store]);
    assert!(blobs() < before, "what only the first one had is gone");
    said(&["verify", &second]);
    let none = fixture.torpor(&["inspect", &first]).output().unwrap();
    assert!(shown(&none).contains("there is no such snapshot"));
}

/// A name whose snapshot is damaged does not hide the others, and can be taken away.
#[test]
fn a_damaged_snapshot_can_be_removed() {
    let fixture = Fixture::new("damaged-shelf", 50);
    let store = fixture.reference();
    let first = format!("{store}:first");
    fixture.create(&first, &["--no-trial"]);
    let file = fixture.path("store/index.json");
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let mut second = index["manifests"][0].clone();
    second["annotations"]["org.opencontainers.image.ref.name"] = "second".into();
    second["digest"] = format!("sha256:{}", "0".repeat(64)).into();
    index["manifests"].as_array_mut().unwrap().push(second);
    fs::write(&file, serde_json::to_vec(&index).unwrap()).unwrap();
    let said = |words: &[&str], code: i32| {
        let output = fixture.torpor(words).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", shown(&output));
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (list, errors) = said(&["list", &store], 1);
    assert!(list.starts_with(&first) && list.lines().count() == 1, "{list}");
    assert!(errors.contains(&format!("{store}:second cannot be read")), "{errors}");
    said(&["gc", &store], 1);
    said(&["rm", &format!("{store}:second")], 0);
    said(&["gc", &store], 0);
    let (list, errors) = said(&["list", &store, "--json"], 0);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 1, "{errors}");
    let (facts, _) = said(&["inspect", &first, "--json"], 0);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&facts).unwrap()["tried"], false);
    assert!(said(&["inspect", &first], 0).0.contains("no trial start has shown"));
    // Nothing would be started, and all would be well.
    let (_, errors) = said(&["run", &first, "--id", &fixture.id("none"), "--count", "0"], 1);
    assert!(errors.contains("--count"), "{errors}");
}

/// A release in which one page of twenty is new, here and there, brings little.
#[test]
fn a_second_release_brings_what_is_new() {
    let fixture = Fixture::new("release", 10_000);
    let reference = fixture.reference();
    let first = fixture.create(&reference, &[]);
    fixture.configure(|config| config["process"]["args"][4] = "2".into());
    let second = fixture.create(&reference, &[]);
    let (all, new) = (first["uploaded"].as_u64().unwrap(), second["uploaded"].as_u64().unwrap());
    assert!(new * 10 <= all, "{new} of {all} bytes");
    // Its memory is its own nevertheless.
    fixture.run(&reference, "warm", "snapshot", &[]);
    fixture.run(&reference, "cold", "cold", &["--policy", "Never"]);
    until("the cold one answers", || {
        let ask = fixture.runc(&["exec", &fixture.id("cold"), "/app", "ask", "sum"]).output();
        ask.unwrap().status.success()
    });
    let sum = fixture.exec("warm", &["/app", "ask", "sum"]);
    assert_eq!(sum, fixture.exec("cold", &["/app", "ask", "sum"]));
    // A third one that has little of them in common does not need them any more.
    fixture.configure(|config| {
        config["process"]["args"][2] = "9".into();
        config["process"]["args"][4] = "9".into();
    });
    fixture.create(&reference, &[]);
    assert_eq!(fixture.manifest()["layers"].as_array().unwrap().len(), 2);
}

/// What `runc spec` gives: a root that cannot be written, and a terminal that nobody takes; and
/// /run in memory.
#[test]
fn a_container_that_cannot_write_starts_too() {
    let fixture = Fixture::new("readonly", 50);
    let bundle = fixture.path("bundle/config.json");
    fixture.configure(|config| {
        config["mounts"].as_array_mut().unwrap().push(serde_json::json!({
            "type": "tmpfs", "source": "tmpfs", "destination": "/run",
        }));
    });
    let mut config: serde_json::Value =
        serde_json::from_slice(&fs::read(&bundle).unwrap()).unwrap();
    config["root"]["readonly"] = true.into();
    config["process"]["terminal"] = true.into();
    config["process"]["args"] = serde_json::json!(["/bin/sh", "-c", "exec sleep 1000"]);
    fs::write(&bundle, serde_json::to_vec(&config).unwrap()).unwrap();
    std::os::unix::fs::symlink("busybox", fixture.path("bundle/rootfs/bin/sleep")).unwrap();
    let reference = fixture.reference();
    let output = fixture.try_create(&reference, &["--ready", "exec:test -d /run"]);
    assert!(output.status.success(), "{}", shown(&output));
    fixture.run(&reference, "one", "snapshot", &[]);
    let one = fixture.exec("one", &["cat", "/run/torpor/restored"]);
    fixture.run(&reference, "two", "snapshot", &[]);
    assert_ne!(one, fixture.exec("two", &["cat", "/run/torpor/restored"]));
    let write =
        fixture.runc(&["exec", &fixture.id("one"), "sh", "-c", "echo > /new"]).output().unwrap();
    assert!(!write.status.success(), "{}", shown(&write));
}

/// Another directory may have something else of the same name.
#[test]
fn a_relative_name_means_one_place() {
    let fixture = Fixture::new("relative", 50);
    ["a", "b"].iter().for_each(|dir| fs::create_dir(fixture.path(dir)).unwrap());
    let within = |dir: &str, words: &[&str]| {
        fixture.torpor(words).current_dir(fixture.path(dir)).output().unwrap()
    };
    let root = fixture.path("runc").display().to_string();
    let bundle = format!("runc:{}", fixture.path("bundle").display());
    let create = ["create", "dir:snap", "--from", &bundle, "--runc-root", &root];
    let made = within("a", &[&create[..], &["--ready", "exec:/app ask page 3"]].concat());
    assert!(made.status.success(), "{}", shown(&made));
    let cold = |dir: &str, reference: &str, name: &str| {
        let id = fixture.id(name);
        within(dir, &["run", reference, "--runc-root", &root, "--policy", "Never", "--id", &id])
    };
    let other = cold("b", "dir:snap", "other");
    assert_eq!(other.status.code(), Some(1), "{}", shown(&other));
    assert!(shown(&other).contains("there is no such snapshot"), "{}", shown(&other));

    let kept = within("a", &["keep", "dir:snap"]);
    assert!(kept.status.success(), "{}", shown(&kept));
    let release = ["keep", "dir:snap", "--release"];
    let other = within("b", &release);
    assert!(shown(&other).contains("there is no template"), "{}", shown(&other));
    let own = within("a", &release);
    assert!(own.status.success(), "{}", shown(&own));

    // What is known of the place is known of it by each of its names.
    fs::remove_dir_all(fixture.path("a/snap")).unwrap();
    let absolute = format!("dir:{}", fixture.path("a/snap").display());
    for (dir, reference, name) in [("a", "dir:snap", "one"), ("b", &absolute, "two")] {
        let started = cold(dir, reference, name);
        assert!(started.status.success(), "{}", shown(&started));
    }
}

/// A container that answers is not ended for want of its picture.
#[test]
fn a_report_that_cannot_be_written_is_a_warning() {
    let fixture = Fixture::new("reportless", 50);
    fixture.create(&fixture.reference(), &[]);
    let report = fixture.path("nowhere/report.html").display().to_string();
    let ready = ["--ready", "exec:/app ask page 3", "--report", &report];
    let output = fixture.try_run(&fixture.reference(), "one", &ready);
    assert!(output.status.success(), "{}", shown(&output));
    assert!(shown(&output).contains("\"started_from\":\"snapshot\""), "{}", shown(&output));
    assert!(shown(&output).contains("no picture (--report)"), "{}", shown(&output));
    fixture.answers_right("one");
}

/// Files that have several names, and extended attributes, come back so: from a container that was put to sleep, and
/// from one that goes on.
#[test]
fn changed_files_come_back_as_they_were() {
    let fixture = Fixture::new("files", 50);
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    let changed = |name: &str| {
        let root = fixture.path("state/instances").join(fixture.id(name)).join("rootfs/etc");
        let links = fs::metadata(root.join("shop")).unwrap().nlink();
        let same = fs::metadata(root.join("shop")).unwrap().ino()
            == fs::metadata(root.join("again")).unwrap().ino();
        let mut value = [0; 16];
        let len = rustix::fs::getxattr(root.join("shop"), "user.of", &mut value[..]);
        (links, same, len.map(|len| value[..len].to_vec()))
    };
    let link = "sh -c 'echo > /etc/shop && busybox ln /etc/shop /etc/again'";
    fixture.create(&first, &["--warmup", link]);
    fixture.run(&first, "one", "snapshot", &[]);
    assert_eq!(changed("one"), (2, true, Err(rustix::io::Errno::NODATA)));
    let file = fixture.path("state/instances").join(fixture.id("one")).join("rootfs/etc/shop");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(file, "user.of", b"two\nlines", flags).unwrap();
    create_of(&fixture, "one", &second);
    fixture.run(&second, "two", "snapshot", &[]);
    assert_eq!(changed("two"), (2, true, Ok(b"two\nlines".to_vec())));
    // A device is nothing that a start would take.
    fixture.configure(|config| {
        for set in config["process"]["capabilities"].as_object_mut().unwrap().values_mut() {
            set.as_array_mut().unwrap().push("CAP_MKNOD".into());
        }
    });
    let device = "busybox mknod /etc/device c 1 8";
    let refused =
        fixture.try_create(&first, &["--ready", "exec:/app ask page 3", "--warmup", device]);
    assert_eq!(refused.status.code(), Some(1), "{}", shown(&refused));
    assert!(shown(&refused).contains("the device /etc/device"), "{}", shown(&refused));
}

#[test]
fn lint_names_what_should_not_be_there() {
    let fixture = Fixture::new("lint", 10);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let lint = || fixture.torpor(&["lint", &reference]).output().unwrap();
    let clean = lint();
    assert!(clean.status.success(), "{}", shown(&clean));
    fixture.configure(|config| {
        config["process"]["env"].as_array_mut().unwrap().push("SHOP_PASSWORD=x".into());
    });
    let key = "sh -c 'echo -----BEGIN PRIVATE KEY----- > /etc/shop.key'";
    fixture.create(&reference, &["--warmup", key]);
    let found = lint();
    assert!(shown(&found).contains("/etc/shop.key has a private key"), "{}", shown(&found));
    assert_eq!(found.status.code(), Some(2), "{}", shown(&found));
    assert!(shown(&found).contains("SHOP_PASSWORD"), "{}", shown(&found));
}

/// Connections to outside are closed in the snapshot; what listens goes on.
#[test]
fn a_connection_to_outside_is_closed() {
    let fixture = Fixture::new("outside", 10);
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let (to, own) = (outside.local_addr().unwrap().port(), port::free());
    // The network of this host.
    fixture.configure(|config| {
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "network");
        let environment = config["process"]["env"].as_array_mut().unwrap();
        environment.push(format!("OUTSIDE={to} {own}").into());
    });
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let (connection, peer) = outside.accept().unwrap();
    fixture.run(&reference, "one", "snapshot", &[]);
    assert_eq!(fixture.exec("one", &["/app", "ask", "outside"]), "closed");
    TcpStream::connect(("127.0.0.1", own)).unwrap();
    drop(connection);

    let lint = fixture.torpor(&["lint", &reference]).output().unwrap();
    assert_eq!(lint.status.code(), Some(2), "{}", shown(&lint));
    let named = format!("connection: from port {}", peer.port());
    let said = String::from_utf8(lint.stdout).unwrap();
    assert!(said.contains(&named) && said.lines().count() == 1, "{said}");
}

#[test]
fn the_first_process_gets_a_signal_after_a_restore() {
    let fixture = Fixture::new("signal", 10);
    std::os::unix::fs::symlink("busybox", fixture.path("bundle/rootfs/bin/sleep")).unwrap();
    let waits =
        "trap 'echo woken >/woken' USR1; echo >/trapped; while :; do sleep 1000 & wait; done";
    let reference = fixture.reference();
    let ready = ["--ready", "exec:test -e /trapped", "--", "/bin/sh", "-c", waits];
    let output = fixture.try_create(&reference, &ready);
    assert!(output.status.success(), "{}", shown(&output));
    let is_woken = |name: &str| {
        let test = fixture.runc(&["exec", &fixture.id(name), "test", "-s", "/woken"]).output();
        test.unwrap().status.success()
    };
    fixture.run(&reference, "asleep", "snapshot", &[]);
    for (name, signal) in [("one", "SIGUSR1"), ("two", "USR1")] {
        fixture.run(&reference, name, "snapshot", &["--after-restore", signal]);
        until("it has got the signal", || is_woken(name));
        assert_eq!(fixture.exec(name, &["cat", "/woken"]), "woken");
    }
    assert!(!is_woken("asleep"), "it has got one that nobody has sent");
}

/// Earlier versions made some. A list has them as they are, and what it has can be removed.
#[test]
fn a_name_with_control_characters_can_be_removed() {
    let fixture = Fixture::new("odd-name", 1);
    let store = fixture.path("store");
    fs::create_dir(&store).unwrap();
    let digest = format!("sha256:{}", "0".repeat(64));
    let entry = |name: &str| {
        serde_json::json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1,
            "annotations": { "org.opencontainers.image.ref.name": name }
        })
    };
    let all = [entry("odd\u{7}\n"), entry("plain")];
    let index = serde_json::json!({ "schemaVersion": 2, "manifests": all });
    fs::write(store.join("index.json"), index.to_string()).unwrap();
    let odd = format!("{}:odd\u{7}\n", fixture.reference());
    let refused = fixture.torpor(&["inspect", &odd]).output().unwrap();
    assert!(shown(&refused).contains("has a control character"), "{}", shown(&refused));
    let removed = fixture.torpor(&["rm", &odd, "--json"]).output().unwrap();
    assert!(removed.status.success(), "{}", shown(&removed));
    let said: serde_json::Value = serde_json::from_slice(&removed.stdout).unwrap();
    assert_eq!(said["removed"], odd.as_str());
    let left = fs::read_to_string(store.join("index.json")).unwrap();
    assert!(left.contains("plain") && !left.contains("odd"), "{left}");
}
