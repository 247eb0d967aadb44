//! Snapshots in a directory.

use std::collections::HashSet;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::place::{Place, shown, until};

#[test]
fn a_container_starts_from_its_snapshot() {
    let place = Place::new("start", 2000);
    let reference = place.reference();
    place.create(&reference, &["--warmup", "echo warm > /warm; rm /etc/doomed"]);
    let left = fs::read_dir(place.path("state")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("create-")), "{left:?}");
    assert!(!place.path("bundle/rootfs/warm").exists(), "the bundle is as it was");

    let said = place.run(&reference, "one", "snapshot", &[]);
    assert!(said["reason"].is_null());
    assert!(said["first_instruction_ms"].as_f64().unwrap() > 0.0);
    let list = place.runc(&["list", "--format", "json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list[0]["id"], place.id("one"));
    assert_eq!(list[0]["status"], "running");
    assert_eq!(list[0]["pid"], said["pid"]);
    let again = place.try_run(&reference, "one", &[]);
    assert_eq!(again.status.code(), Some(1), "{}", shown(&again));
    assert!(shown(&again).contains("there is a container"), "{}", shown(&again));

    place.run(&reference, "cold", "cold", &["--policy", "Never"]);
    until("the cold one answers", || {
        let ask = place.runc(&["exec", &place.id("cold"), "/app", "ask", "sum"]).output();
        ask.unwrap().status.success()
    });
    let sum = place.exec("one", &["/app", "ask", "sum"]);
    assert_eq!(sum, place.exec("cold", &["/app", "ask", "sum"]), "the memory is what it was");
    // What was changed while it warmed up is there, and nowhere else.
    assert_eq!(place.exec("one", &["cat", "/warm"]), "warm");
    assert_eq!(place.exec("cold", &["cat", "/etc/doomed"]), "there");
    let doomed = place.runc(&["exec", &place.id("one"), "cat", "/etc/doomed"]).output().unwrap();
    assert!(!doomed.status.success(), "{}", shown(&doomed));

    // The files of a container go with it.
    place.delete("one");
    place.delete("cold");
    until("the files are gone", || {
        fs::read_dir(place.path("state/instances")).unwrap().next().is_none()
    });
}

/// Where the network has no rules a start runs no programs to look for the lock of a dump.
#[test]
fn a_start_runs_no_programs_to_look_for_locks() {
    let place = Place::new("locks", 100);
    let reference = place.reference();
    place.create(&reference, &[]);
    let (bin, called) = (place.path("bin"), place.path("called"));
    fs::create_dir(&bin).unwrap();
    for program in ["iptables-save", "ip6tables-save", "nft"] {
        let program = bin.join(program);
        fs::write(&program, format!("#!/bin/sh\necho $0 >>{}\n", called.display())).unwrap();
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut run = place.torpor(&["run", &reference, "--id", &place.id("one")]);
    run.arg("--runc-root").arg(place.path("runc")).env("PATH", path);
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    place.answers_right("one");
    let called = fs::read_to_string(called).unwrap_or_default();
    assert!(called.is_empty(), "{called}");
}

#[test]
fn two_of_one_differ() {
    let place = Place::new("differ", 100);
    let reference = place.reference();
    place.create(&reference, &[]);
    let output = place.try_run(&reference, "many", &["--count", "3"]);
    assert!(output.status.success(), "{}", shown(&output));
    let mut generations = HashSet::new();
    for number in 1..=3 {
        let name = format!("many-{number}");
        assert_eq!(place.exec(&name, &["hostname"]), place.id(&name));
        assert!(generations.insert(place.exec(&name, &["cat", "/run/torpor/restored"])));
        // What a fork would not have.
        assert_eq!(place.exec(&name, &["/app", "ask", "random"]), "0");
        place.exec(&name, &["sh", "-c", &format!("test ! -e /own && echo {number} > /own")]);
    }
    assert_eq!(generations.len(), 3);
    let environment = place.path("environment");
    fs::write(&environment, "# of this one\nCOLOUR=blue\n").unwrap();
    let more = ["--env-file", environment.to_str().unwrap(), "--hostname", "another"];
    let after = ["--after-restore", "cat /run/torpor/environment > /seen"];
    place.run(&reference, "own", "snapshot", &[&more[..], &after].concat());
    assert_eq!(place.exec("own", &["hostname"]), "another");
    assert_eq!(place.exec("own", &["cat", "/seen"]), "COLOUR=blue");
}

#[test]
fn snapshots_are_listed_verified_and_removed() {
    let place = Place::new("shelf", 500);
    let store = place.reference();
    let (first, second) = (format!("{store}:first"), format!("{store}:second"));
    place.create(&first, &[]);
    place.configure(|config| config["process"]["args"][4] = "2".into());
    place.create(&second, &[]);
    let said = |words: &[&str]| {
        let output = place.torpor(words).output().unwrap();
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
    said(&["verify", &first]);
    said(&["verify", &second]);

    // Other tools copy it, and it is still one.
    let copied = place.path("copied");
    let mut copy = Command::new("skopeo");
    copy.arg("--insecure-policy").arg("copy");
    copy.arg(format!("oci:{}:second", place.path("store").display()));
    copy.arg(format!("oci:{}:second", copied.display()));
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let copied = format!("dir:{}:second", copied.display());
    said(&["verify", &copied]);
    place.run(&copied, "copy", "snapshot", &[]);

    said(&["rm", &first]);
    let blobs = || fs::read_dir(place.path("store/blobs/sha256")).unwrap().count();
    let before = blobs();
    said(&["gc", &store]);
    assert!(blobs() < before, "what only the first one had is gone");
    said(&["verify", &second]);
    let none = place.torpor(&["inspect", &first]).output().unwrap();
    assert!(shown(&none).contains("there is no such snapshot"));
}

/// A release in which one page of twenty is new, here and there, brings little.
#[test]
fn a_second_release_brings_what_is_new() {
    let place = Place::new("release", 10_000);
    let reference = place.reference();
    let first = place.create(&reference, &[]);
    place.configure(|config| config["process"]["args"][4] = "2".into());
    let second = place.create(&reference, &[]);
    let (all, new) = (first["uploaded"].as_u64().unwrap(), second["uploaded"].as_u64().unwrap());
    assert!(new * 10 <= all, "{new} of {all} bytes");
    // Its memory is its own nevertheless.
    place.run(&reference, "warm", "snapshot", &[]);
    place.run(&reference, "cold", "cold", &["--policy", "Never"]);
    until("the cold one answers", || {
        let ask = place.runc(&["exec", &place.id("cold"), "/app", "ask", "sum"]).output();
        ask.unwrap().status.success()
    });
    let sum = place.exec("warm", &["/app", "ask", "sum"]);
    assert_eq!(sum, place.exec("cold", &["/app", "ask", "sum"]));
    // A third one that has little of them in common does not need them any more.
    place.configure(|config| {
        config["process"]["args"][2] = "9".into();
        config["process"]["args"][4] = "9".into();
    });
    place.create(&reference, &[]);
    assert_eq!(place.manifest()["layers"].as_array().unwrap().len(), 2);
}

/// What `runc spec` gives: a root that cannot be written, and a terminal that nobody takes; and
/// /run in memory.
#[test]
fn a_container_that_cannot_write_starts_too() {
    let place = Place::new("readonly", 50);
    let bundle = place.path("bundle/config.json");
    place.configure(|config| {
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
    std::os::unix::fs::symlink("busybox", place.path("bundle/rootfs/bin/sleep")).unwrap();
    let reference = place.reference();
    let output = place.try_create(&reference, &["--ready", "exec:test -d /run"]);
    assert!(output.status.success(), "{}", shown(&output));
    place.run(&reference, "one", "snapshot", &[]);
    let one = place.exec("one", &["cat", "/run/torpor/restored"]);
    place.run(&reference, "two", "snapshot", &[]);
    assert_ne!(one, place.exec("two", &["cat", "/run/torpor/restored"]));
    let write =
        place.runc(&["exec", &place.id("one"), "sh", "-c", "echo > /new"]).output().unwrap();
    assert!(!write.status.success(), "{}", shown(&write));
}

#[test]
fn lint_names_what_should_not_be_there() {
    let place = Place::new("lint", 10);
    let reference = place.reference();
    place.create(&reference, &[]);
    let lint = || place.torpor(&["lint", &reference]).output().unwrap();
    let clean = lint();
    assert!(clean.status.success(), "{}", shown(&clean));
    place.configure(|config| {
        config["process"]["env"].as_array_mut().unwrap().push("SHOP_PASSWORD=x".into());
    });
    place.create(&reference, &[]);
    let found = lint();
    assert_eq!(found.status.code(), Some(2), "{}", shown(&found));
    assert!(shown(&found).contains("SHOP_PASSWORD"), "{}", shown(&found));
}

/// Connections to outside are closed in the snapshot; what listens goes on.
#[test]
fn a_connection_to_outside_is_closed() {
    let place = Place::new("outside", 10);
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = |of: &TcpListener| of.local_addr().unwrap().port();
    let (to, own) = (port(&outside), port(&free));
    drop(free);
    // The network of this host.
    place.configure(|config| {
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "network");
        let environment = config["process"]["env"].as_array_mut().unwrap();
        environment.push(format!("OUTSIDE={to} {own}").into());
    });
    let reference = place.reference();
    place.create(&reference, &[]);
    let (connection, peer) = outside.accept().unwrap();
    place.run(&reference, "one", "snapshot", &[]);
    assert_eq!(place.exec("one", &["/app", "ask", "outside"]), "closed");
    TcpStream::connect(("127.0.0.1", own)).unwrap();
    drop(connection);

    let lint = place.torpor(&["lint", &reference]).output().unwrap();
    assert_eq!(lint.status.code(), Some(2), "{}", shown(&lint));
    let named = format!("connection: from port {}", peer.port());
    let said = String::from_utf8(lint.stdout).unwrap();
    assert!(said.contains(&named) && said.lines().count() == 1, "{said}");
}

#[test]
fn the_first_process_gets_a_signal_after_a_restore() {
    let place = Place::new("signal", 10);
    std::os::unix::fs::symlink("busybox", place.path("bundle/rootfs/bin/sleep")).unwrap();
    let waits =
        "trap 'echo woken >/woken' USR1; echo >/trapped; while :; do sleep 1000 & wait; done";
    let reference = place.reference();
    let ready = ["--ready", "exec:test -e /trapped", "--", "/bin/sh", "-c", waits];
    let output = place.try_create(&reference, &ready);
    assert!(output.status.success(), "{}", shown(&output));
    let is_woken = |name: &str| {
        let test = place.runc(&["exec", &place.id(name), "test", "-s", "/woken"]).output();
        test.unwrap().status.success()
    };
    place.run(&reference, "asleep", "snapshot", &[]);
    for (name, signal) in [("one", "SIGUSR1"), ("two", "USR1")] {
        place.run(&reference, name, "snapshot", &["--after-restore", signal]);
        until("it has got the signal", || is_woken(name));
        assert_eq!(place.exec(name, &["cat", "/woken"]), "woken");
    }
    assert!(!is_woken("asleep"), "it has got one that nobody has sent");
}
