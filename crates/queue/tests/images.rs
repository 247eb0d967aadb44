//! Checkpoints on disk: built on one another, compressed, sealed, bounded, brought back
//! while their memory still comes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use common::{Daemon, shepherds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_runtimes_tests::command::write_script;

/// Holds so many MiB of its own, changes one byte of each in turn, and says how often it has
/// been through; the sum shows that nothing of it was lost.
fn holder(daemon: &Daemon, mib: u32, rounds: u32) -> Vec<String> {
    let script = format!(
        "import random\n{WAITING}n = {mib} << 20\nx = bytearray(random.Random(7).randbytes(1 << 20)) * {mib}\n\
         before = sum(x[::4096])\nfor i in range({rounds}):\n    x[(i % {mib}) << 20] = (x[(i % {mib}) << 20] + 1) % 256\n    \
         print('round', i, flush=True)\n    time.sleep(0.02)\nwait()\n\
         print((sum(x[::4096]) - before) % 256 == {rounds} % 256, flush=True)"
    );
    python(daemon, &script)
}

/// A job must not end before all that is to happen to it has happened, however slow the machine is.
const WAITING: &str = "import os, sys, time\ndef wait():\n    while not os.path.exists(sys.argv[1]):\n        time.sleep(0.02)\n";

fn python(daemon: &Daemon, script: &str) -> Vec<String> {
    let _ = std::fs::remove_file(may_end(daemon));
    let may_end = may_end(daemon).to_str().unwrap().to_owned();
    vec!["python3".to_owned(), "-c".to_owned(), script.to_owned(), may_end]
}

/// When this is there the jobs of a daemon may end.
fn may_end(daemon: &Daemon) -> PathBuf {
    daemon.data().join("may-end")
}

fn events(daemon: &Daemon, id: u64, kind: &str) -> Vec<Value> {
    let show = daemon.show(id);
    let all = show["events"].as_array().unwrap().clone();
    all.into_iter().filter(|event| event["kind"] == kind).map(|e| e["data"].clone()).collect()
}

fn whole(daemon: &Daemon, id: u64, rounds: u32) {
    std::fs::write(may_end(daemon), "").unwrap();
    daemon.wait_for(id, "done");
    let lines: String = (0..rounds).map(|i| format!("round {i}\n")).collect();
    assert_eq!(daemon.output(id), format!("{lines}True\n"));
}

#[test]
fn a_checkpoint_holds_what_has_changed_since_the_last() {
    let config = json!({ "shortest_interval": 300, "mean_time_between_failures": 500 });
    let daemon = Daemon::configured(&config, &[]);
    let command = holder(&daemon, 48, 1000);
    let id = daemon.submit(&["--class", "batch"], &common::words(&command));
    let bytes = |event: &Value| event["bytes"].as_u64().unwrap();
    // One has all of it (others may come before the job has), and a later one a page for each
    // byte that was changed.
    let small = until("a checkpoint of what has changed", || {
        let saved = events(&daemon, id, "saved");
        let whole = saved.iter().position(|event| bytes(event) > 40 << 20)?;
        saved[whole..].iter().find(|event| bytes(event) < 20 << 20)?["seq"].as_u64()
    });
    until("it is durable", || (daemon.show(id)["checkpoint"].as_u64()? >= small).then_some(()));
    // The machine fails; the job is put together from all of them.
    for pid in shepherds(&daemon.data()) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    whole(&daemon, id, 1000);
    assert!(daemon.job(id)["run"].as_u64().unwrap() >= 2);
}

/// However many checkpoints build on one another: somebody waits for the job that gives way.
#[test]
fn who_gives_way_is_saved_as_what_has_changed() {
    let config = json!({ "shortest_interval": 700, "mean_time_between_failures": 500 });
    let daemon = Daemon::configured(&config, &[]);
    let command = holder(&daemon, 48, 500);
    let id = daemon.submit(&["--class", "batch"], &common::words(&command));
    let depth = |seq: u64| {
        let record = daemon.data().join(format!("jobs/{id}/checkpoint-{seq}/record.json"));
        let record: Value = serde_json::from_slice(&std::fs::read(record).ok()?).ok()?;
        record["depth"].as_u64()
    };
    until("as many as may", || {
        let newest = events(&daemon, id, "saved").last()?["seq"].as_u64()?;
        (depth(newest)? == 8).then_some(())
    });
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    let preempted = events(&daemon, id, "preempted").remove(0);
    assert!(preempted["bytes"].as_u64() < Some(20 << 20), "{preempted}");
    daemon.ok(&["resume", &id.to_string()]);
    whole(&daemon, id, 500);
}

/// How long it takes to save a job follows from its memory, however little of the disk that takes once it is packed.
#[test]
fn what_is_written_is_told_apart_from_what_it_takes() {
    const MEMORY: u64 = 64 << 20;
    let daemon = Daemon::configured(&json!({}), &[]);
    let script =
        format!("{WAITING}x = bytearray(b'x') * {MEMORY}\nprint('there', flush=True)\nwait()");
    let id = daemon.submit(&["--class", "batch"], &common::words(&python(&daemon, &script)));
    until("it has its memory", || (daemon.output(id) == "there\n").then_some(()));
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    let preempted = events(&daemon, id, "preempted").remove(0);
    assert!(preempted["bytes"].as_u64() < Some(MEMORY / 4), "{preempted}");
    assert!(preempted["written"].as_u64() > Some(MEMORY - 1), "{preempted}");
    std::fs::write(may_end(&daemon), "").unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
}

#[test]
fn a_job_that_runs_on_is_copied_on_write() {
    let config = json!({ "shortest_interval": 300, "mean_time_between_failures": 500 });
    let daemon = Daemon::configured(&config, &[]);
    let command = holder(&daemon, 48, 500);
    let id = daemon.submit(&["--class", "batch"], &common::words(&command));
    // It has written on while its memory was copied: output and memory are of one moment.
    let seq = until("a checkpoint that was copied on write", || {
        let saved = events(&daemon, id, "saved");
        let copied = saved.iter().filter(|event| event["bytes"].as_u64() > Some(40 << 20));
        copied.filter(|event| event["cow_bytes"].is_u64()).find_map(|event| event["seq"].as_u64())
    });
    until("it is durable", || (daemon.show(id)["checkpoint"].as_u64()? >= seq).then_some(()));
    for pid in shepherds(&daemon.data()) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    whole(&daemon, id, 500);
    assert!(daemon.job(id)["run"].as_u64().unwrap() >= 2);
}

#[test]
fn a_job_runs_while_its_memory_still_comes() {
    let daemon = Daemon::start(&[]);
    let command = holder(&daemon, 300, 200);
    let id = daemon.submit(&["--class", "batch"], &common::words(&command));
    daemon.wait_for_output(id, "round 3\n");
    // Twice at once: the second must wait until all of its memory is there.
    for _ in 0..2 {
        daemon.ok(&["preempt", &id.to_string()]);
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "running");
    }
    whole(&daemon, id, 200);
    assert_eq!(daemon.job(id)["preemptions"], 2);
    assert!(daemon.ok(&["top", "--json"]).contains("\"refusals\":{}"));
}

#[test]
fn a_class_may_have_its_checkpoints_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    let made = Command::new(common::torpor()).args(["key", "generate"]).arg(&key).output().unwrap();
    assert!(made.status.success(), "{}", common::shown(&made));
    let text = std::fs::read_to_string(&key).unwrap() + &String::from_utf8_lossy(&made.stdout);
    let recipient = text.split_whitespace().find(|word| word.starts_with("age1")).unwrap();
    let config = json!({
        "compress": null,
        "rules": { "classes": {
            "open": { "priority": 0 },
            "secret": { "priority": 0, "recipient": recipient, "identity": key },
        } },
    });
    let daemon = Daemon::configured(&config, &["--slots", "2"]);
    let script = "x = bytes(reversed(b'terces yrev a')) * 9\nfor i in range(80):\n    \
                  print('round', i, flush=True)\n    time.sleep(0.03)\nwait()\nprint(len(x) == 117, flush=True)";
    for (class, readable) in [("open", true), ("secret", false)] {
        let command = python(&daemon, &format!("{WAITING}{script}"));
        let id = daemon.submit(&["--class", class], &common::words(&command));
        daemon.wait_for_output(id, "round 1\n");
        daemon.ok(&["preempt", &id.to_string()]);
        let place = daemon.data().join("jobs").join(id.to_string());
        let found = Command::new("grep")
            .args(["-r", "-q", "--include=*.img", "a very secret"])
            .arg(&place)
            .status()
            .unwrap();
        assert_eq!(found.success(), readable, "{class}");
        daemon.ok(&["resume", &id.to_string()]);
        whole(&daemon, id, 80);
    }
}

#[test]
fn checkpoints_that_only_protect_make_room() {
    let config = json!({
        "shortest_interval": 200, "mean_time_between_failures": 500, "images": 4 << 20,
    });
    let daemon = Daemon::configured(&config, &["--slots", "2"]);
    let command = holder(&daemon, 16, 300);
    let runs = daemon.submit(&["--class", "batch"], &common::words(&command));
    until("it is evicted", || (!events(&daemon, runs, "evicted").is_empty()).then_some(()));
    // A job that sleeps in its checkpoint keeps it, whatever the limit is.
    let command = holder(&daemon, 16, 20);
    let sleeps = daemon.submit(&["--class", "batch"], &common::words(&command));
    daemon.wait_for_output(sleeps, "round 1\n");
    daemon.ok(&["preempt", &sleeps.to_string()]);
    std::fs::write(may_end(&daemon), "").unwrap();
    daemon.wait_for(runs, "done");
    daemon.ok(&["resume", &sleeps.to_string()]);
    whole(&daemon, sleeps, 20);
}

/// A job may have any number of files of its own, in each of its checkpoints.
#[test]
fn what_is_removed_holds_nobody_up() {
    let bin = tempfile::tempdir().unwrap();
    let (may_begin, gave_up) = (bin.path().join("may-begin"), bin.path().join("gave-up"));
    let script = format!(
        "#!/bin/sh\nPATH=/usr/bin:/bin\nfor i in $(seq 1200); do\n[ -e {} ] && exec rm \"$@\"\nsleep 0.05\ndone\n\
         touch {}\n",
        may_begin.display(),
        gave_up.display()
    );
    write_script(&bin.path().join("rm"), &script);
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let config = json!({ "shortest_interval": 200, "mean_time_between_failures": 500 });
    let daemon = Daemon::in_environment(&config, &[], &[("PATH", path)]);
    let id = daemon.submit(&["--class", "batch"], &common::words(&holder(&daemon, 4, 10)));
    let is_removing = || {
        let names = std::fs::read_dir(daemon.data().join(format!("jobs/{id}"))).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.any(|name| name.starts_with("gone") || name.starts_with("checkpoint-"))
    };
    until("one is on disk", || (!events(&daemon, id, "durable").is_empty()).then_some(()));
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
    assert!(is_removing() && !gave_up.exists(), "somebody has waited for it");
    std::fs::write(may_begin, "").unwrap();
    until("all is removed", || (!is_removing()).then_some(()));
}

/// Without a limit of their own they leave the disk to what needs it.
#[test]
fn checkpoints_that_only_protect_do_not_fill_the_disk() {
    let disk = tempfile::tempdir().unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=160m", "none"];
    assert!(Command::new("mount").args(mount).arg(disk.path()).status().unwrap().success());
    let config = json!({ "shortest_interval": 200, "mean_time_between_failures": 500 });
    let mut daemon = Daemon::configured(&config, &[]);
    daemon.kill();
    let (link, jobs) = (daemon.data().join("jobs"), disk.path().join("jobs"));
    std::fs::rename(&link, link.with_extension("before")).unwrap();
    std::fs::create_dir(&jobs).unwrap();
    std::os::unix::fs::symlink(&jobs, &link).unwrap();
    daemon.launch();
    let id = daemon.submit(&["--class", "batch"], &common::words(&holder(&daemon, 16, 300)));
    until("it is saved", || (!daemon.show(id)["checkpoint"].is_null()).then_some(()));
    // Somebody else takes the disk, but for 4 MiB.
    let mut filler = std::fs::File::create(disk.path().join("filler")).unwrap();
    let is_free = || {
        let system = rustix::fs::statvfs(disk.path()).unwrap();
        system.f_bavail * system.f_frsize
    };
    while is_free() > 4 << 20 && filler.write_all(&[0; 1 << 20]).is_ok() {}
    until("it is evicted", || (!events(&daemon, id, "evicted").is_empty()).then_some(()));
    assert!(daemon.show(id)["checkpoint"].is_null());
    std::fs::remove_file(disk.path().join("filler")).unwrap();
    drop(filler);
    until("it is saved again", || (!daemon.show(id)["checkpoint"].is_null()).then_some(()));
    whole(&daemon, id, 300);
    drop(daemon);
    Command::new("umount").arg("-l").arg(disk.path()).status().unwrap();
}
