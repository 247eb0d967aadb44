//! One real cell: Debian's containerd with runc, started by the tool in namespaces of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Place, group_exists, kill, row, samples, success, wait};
use serde_json::Value;

const CELL: &str = "endpoints:\n- name: here\n  containerd: /usr/bin/containerd\n  handlers:\n  \
                    - {name: runc, binary: /usr/sbin/runc}\n";

fn place(settings: &str) -> Place {
    let place = Place::new();
    place.config(&format!("{settings}\n{CELL}"));
    place
}

/// Starts a run, and waits until its containerd works; returns the names of its control groups.
fn started(place: &Place) -> (Child, Vec<String>) {
    let mut child = place.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let done = || {
        let journal = std::fs::read_to_string(place.path("out/journal.jsonl")).unwrap_or_default();
        journal.matches("\"done\"").count()
    };
    let before = done();
    wait(|| done() > before, || format!("no sample was taken; {:?}", place.processes()));
    assert!(child.try_wait().unwrap().is_none(), "it has ended too early");
    (child, place.groups())
}

fn assert_gone(place: &Place, groups: &[String]) {
    place.assert_clean();
    assert!(!groups.is_empty());
    for name in groups {
        wait(|| !group_exists(name), || format!("the control group {name} is left"));
    }
}

/// Waits for the end of a run that has been disturbed; its results, which are complete.
fn completed(child: &mut Child, place: &Place) -> Value {
    let until = Instant::now() + Duration::from_secs(240);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it does not end: {:?}", place.processes());
        std::thread::sleep(Duration::from_millis(50));
    }
    let results = place.results();
    assert_eq!(results["complete"], true);
    results
}

#[test]
fn every_suite_on_a_real_runtime() {
    let place = place(
        "runs: 1\nwarmup: 0\nscale: [3]\nmemory: [8]\neffort: 0.05\nfilters: ['!performance.cpu.*', \
         '!performance.memory.*', '!limits.raise.*']",
    );
    success(&place.run().output().unwrap());
    let results = place.results();
    assert!(results["targets"][0]["runtime"].as_str().unwrap().contains("runc"));
    assert!(results["targets"][0]["digests"].as_object().unwrap().len() >= 2);
    for name in [
        "operations.container.start",
        "operations.container.answer",
        "operations.bridge.create",
        "operations.image.pull",
        "performance.disk.random-read",
        "performance.syscall.getppid",
        "performance.loopback.latency",
        "performance.bridge.throughput",
        "limits.pids.refusal",
        "limits.charge.idle",
        "scalability.containers-3.start",
        "scalability.containers-3.pss",
        "scalability.containers-3.cgroup",
    ] {
        let row = row(&results, name, "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
    // A containerd that finds no mount of a hierarchy does not hear why a container has ended.
    let oom = row(&results, "limits.memory.oom", "here/runc");
    let reason = oom["reason"].as_str().unwrap_or_default();
    assert!(oom["status"] == "ok" || reason.contains("not OOMKilled"), "{oom}");
    // On a machine with other work the limit may not be exact; then the reason says so.
    let quota = row(&results, "limits.cpu.share", "here/runc");
    let reason = quota["reason"].as_str().unwrap_or_default();
    let judged = quota["status"] == "ok" || reason.contains("of a CPU were used under a quota");
    assert!(judged, "{quota}");
    for row in results["rows"].as_array().unwrap() {
        let told = row["status"] == "ok" || row["reason"].is_string();
        assert!(told, "every cell has a value or a reason: {row}");
    }
    let checkpoint = row(&results, "operations.container.checkpoint", "here/runc");
    assert_eq!(checkpoint["status"], "unsupported", "{checkpoint}");
    place.assert_clean();
}

#[test]
fn killed_it_leaves_nothing_and_goes_on() {
    let place = place("runs: 3\nwarmup: 0\nfilters: [operations.container.*, operations.bridge.*]");
    let (mut child, groups) = started(&place);
    kill(&mut child);
    assert_gone(&place, &groups);
    success(&place.run().output().unwrap());
    let results = place.results();
    assert_eq!(
        (results["complete"].as_bool(), results["interruptions"].as_u64()),
        (Some(true), Some(1))
    );
    assert!(results["repeated"].as_u64().unwrap() <= 1, "{}", results["repeated"]);
    for name in ["operations.container.start", "operations.bridge.create"] {
        assert_eq!(samples(row(&results, name, "here/runc")), 3);
    }
    place.assert_clean();
}

#[test]
fn the_keeper_killed_as_well_the_next_run_tidies_up() {
    let place = place("runs: 2\nwarmup: 0\nfilters: [operations.container.*]");
    let (mut child, groups) = started(&place);
    let keeper = format!("/proc/{0}/task/{0}/children", child.id());
    let keeper = std::fs::read_to_string(keeper).unwrap();
    let keeper = keeper.split_whitespace().next().unwrap().to_owned();
    // Both at once: nobody is left to remove anything but the kernel, which ends the processes.
    assert!(Command::new("kill").args(["-KILL", &keeper]).status().unwrap().success());
    kill(&mut child);
    success(&place.run().output().unwrap());
    assert_gone(&place, &groups);
    assert_eq!(samples(row(&place.results(), "operations.container.start", "here/runc")), 2);
}

#[test]
fn a_containerd_that_is_killed_is_started_again() {
    let place = place("runs: 4\nwarmup: 0\nfilters: [operations.container.*, operations.bridge.*]");
    let (mut child, groups) = started(&place);
    let daemons = || {
        let all = place.processes();
        all.into_iter()
            .filter(|(_, line)| line.starts_with("/usr/bin/containerd "))
            .collect::<Vec<_>>()
    };
    for (pid, _) in daemons() {
        assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
    }
    let results = completed(&mut child, &place);
    let start = row(&results, "operations.container.start", "here/runc");
    let bridge = row(&results, "operations.bridge.create", "here/runc");
    // One item may have met the end of the daemon; all others have their values.
    assert!(samples(start) + samples(bridge) >= 7, "{start} {bridge}");
    assert_gone(&place, &groups);
}

#[test]
fn without_its_network_and_its_shims_it_comes_to_an_end() {
    let place = place("runs: 4\nwarmup: 0\nfilters: [operations.life.*, operations.bridge.*]");
    let (mut child, groups) = started(&place);
    let run = |program: &str, arguments: &[&str]| {
        // What is to be ended may have ended by itself.
        let _ = Command::new(program).args(arguments).stderr(Stdio::null()).status();
    };
    let of = |what: &str| {
        let all = place.processes().into_iter().filter(|(_, line)| line.starts_with(what));
        all.map(|(pid, _)| pid.to_string()).collect::<Vec<_>>()
    };
    for pid in of("/usr/bin/containerd ") {
        run("nsenter", &["--net", "--target", &pid, "ip", "link", "delete", "bench0"]);
    }
    for pid in of("/usr/bin/containerd-shim") {
        run("kill", &["-KILL", &pid]);
    }
    let results = completed(&mut child, &place);
    for name in ["operations.life.total", "operations.bridge.create"] {
        let row = row(&results, name, "here/runc");
        // An item or two may have met the end of what was killed; then the reason is told.
        let failures = row["failures"].as_u64().unwrap();
        assert!(samples(row) as u64 + failures == 4 && failures <= 2, "{row}");
        assert!(failures == 0 || row["reason"].is_string(), "{row}");
    }
    assert_gone(&place, &groups);
}
