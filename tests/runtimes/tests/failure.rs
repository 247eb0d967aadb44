//! Dumps and restores that fail at one step or another: the container goes on, or nothing of it is
//! there.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;
use torpor_runtimes_tests::command::{Run, command, write_script};
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::LIMIT;

use crate::counting::goes_on;

/// Counts over a connection, and holds a file that is gone.
const SCRIPT: &str = "exec 3>/ghost; rm /ghost; nc -l -p 7000 -e cat & \
    until (i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done) | \
    nc 127.0.0.1 7000 > /count; do sleep 0.1; done";

/// A container in a network namespace that is not its own, with a limit, a mount of the host's and a
/// tmpfs. An action script fails at the step that the file `fail-at` names.
fn bundle(scratch: &Scratch, network: &Network) -> Bundle {
    let path = scratch.path().display();
    let script = scratch.join("action");
    let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != \"$(cat {path}/fail-at)\" ]\n");
    write_script(&script, &text);
    scratch.configure(&format!("action-script {path}/action\n"));
    fail_at(scratch, "nothing");
    Bundle::new(scratch, &[], &["sh", "-c", SCRIPT])
        .network(network)
        .bind(&scratch.dir("shared"), "/shared", "rw")
        .configure(|config| {
            config["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
        })
}

fn fail_at(scratch: &Scratch, step: &str) {
    fs::write(scratch.join("fail-at"), format!("{step}\n")).unwrap();
}

/// All that could be left of a container: files, mounts, processes, cgroups, devices, rules.
fn traces(scratch: &Scratch, network: &Network, id: &str) -> BTreeSet<String> {
    let bundle = scratch.join("bundle");
    // It fails if a file goes while it looks around: then there is more to go, and it looks again.
    let files = command("find", &[bundle.to_str().unwrap()])
        .args(["-printf", "%p %y %m %U %G %n %s %l\n"])
        .finish();
    let mut found: BTreeSet<String> = files.stdout.lines().map(str::to_owned).collect();
    found.insert(format!("find: {}", files.status));
    // Of the container's root, and of the PATH of all that this test has started.
    let path = format!("{}/", scratch.path().display());
    let names = |file: &str| fs::read(file).is_ok_and(|bytes| contains(&bytes, &path));
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    // But for the /etc of `Scratch::configure`.
    if mounts.lines().any(|mount| mount.contains(&path) && !mount.contains(" /etc ")) {
        found.insert("a mount".to_owned());
    }
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let is_ours = ["mountinfo", "environ"].map(|file| format!("/proc/{pid}/{file}"));
        if pid.parse::<u32>().is_ok() && is_ours.iter().any(|file| names(file)) {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            found.insert(format!("process {pid} {name}"));
        }
    }
    if cgroup_left(id) {
        found.insert("a cgroup".to_owned());
    }
    found.insert(network.inside(|| command("nft", &["list", "ruleset"]).succeed()));
    found.insert(network.ip(&["-oneline", "link"]));
    found
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

#[test]
fn failed_dumps() {
    let scratch = Scratch::new("failed-dump");
    let network = Network::new(scratch.name());
    let bundle = bundle(&scratch, &network);
    let container = Container::start(&scratch, &bundle);
    let rules = || network.inside(|| command("nft", &["list", "ruleset"]).succeed());
    goes_on(&bundle.file("count"));
    for step in ["pre-dump", "network-lock", "post-dump"] {
        fail_at(&scratch, step);
        container.checkpoint_call(&["--tcp-established"]).arg(container.id()).fail();
        assert!(!scratch.join("images/inventory.img").exists(), "{step}: half a checkpoint");
        assert_eq!(rules(), "", "{step}");
        assert_eq!(container.state()["status"], "running", "{step}");
        goes_on(&bundle.file("count"));
    }
}

#[test]
fn failed_restores() {
    let scratch = Scratch::new("failed-restore");
    let network = Network::new(scratch.name());
    let bundle = bundle(&scratch, &network);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    let processes = container.processes();
    container.checkpoint(&["--tcp-established"]);
    let before = traces(&scratch, &network, container.id());
    let fail = |why: &str| {
        container.restore_call(&["--tcp-established", "--detach"]).arg(container.id()).fail();
        let _ = container.runc("delete").args(["--force", container.id()]).finish();
        let end = Instant::now() + LIMIT;
        let mut after = traces(&scratch, &network, container.id());
        while after != before && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            after = traces(&scratch, &network, container.id());
        }
        let change: Vec<_> = after.symmetric_difference(&before).collect();
        assert!(change.is_empty(), "{why}: {change:#?}");
    };
    for step in
        ["pre-restore", "setup-namespaces", "post-setup-namespaces", "post-restore", "pre-resume"]
    {
        fail_at(&scratch, step);
        fail(step);
    }
    fail_at(&scratch, "nothing");
    // Each of these is needed at another step. What is there of it is right as far as it goes.
    for prefix in ["inventory", "core-", "mountpoints", "tmpfs-dev", "files", "tty-info", "pages-"]
    {
        let image = fs::read_dir(scratch.join("images"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(prefix));
        let Some(image) = image.filter(|path| path.metadata().unwrap().len() > 16) else {
            continue;
        };
        let bytes = fs::read(&image).unwrap();
        fs::write(&image, &bytes[..bytes.len() - 10]).unwrap();
        fail(prefix);
        fs::write(&image, &bytes).unwrap();
    }
    container.restore(&["--tcp-established"]);
    assert_eq!(container.processes(), processes);
    goes_on(&bundle.file("count"));
}
