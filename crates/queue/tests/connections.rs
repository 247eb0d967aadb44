//! A job that sleeps has its connections locked, and a job that never wakes leaves no lock.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{Daemon, connected, connected_with, leaks, shepherds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_images::{ImageDir, lock};
use torpor_runtimes_tests::command::write_script;

/// The job's only checkpoint: its place, and the table that locks its connections.
fn asleep(daemon: &Daemon, id: u64) -> (PathBuf, String) {
    daemon.ok(&["preempt", &id.to_string()]);
    until("it is on disk", || daemon.show(id)["checkpoint"].as_u64());
    let place = daemon.data().join(format!("jobs/{id}/checkpoint-1"));
    let record = fs::read(place.join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let images = place.join(record["images"].as_str().unwrap());
    let inventory = ImageDir::open(&images).unwrap().inventory().unwrap();
    let table = lock::table(&inventory.dump_criu_run_id.unwrap());
    assert!(tables().contains(&table), "{table}: {}", tables());
    (images, table)
}

fn tables() -> String {
    let output = Command::new("nft").args(["list", "tables"]).output().unwrap();
    assert!(output.status.success(), "{}", common::shown(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The connection has no other end any more, and whoever writes to it hears that.
fn is_reset(mut peer: TcpStream) {
    peer.write_all(b"is anybody there?").unwrap();
    let heard = peer.read(&mut [0]);
    let kind = heard.map_err(|error| error.kind());
    assert!(matches!(kind, Ok(0) | Err(std::io::ErrorKind::ConnectionReset)), "{kind:?}");
}

#[test]
fn the_lock_of_a_job_that_is_cancelled_in_its_sleep_goes_with_it() {
    let daemon = Daemon::start(&["--means", "checkpoint"]);
    let (id, _, peer) = connected(&daemon);
    let (_, table) = asleep(&daemon, id);
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
    daemon.ok(&["forget", &id.to_string()]);
    until("the lock is gone", || (!tables().contains(&table)).then_some(()));
    is_reset(peer);
    let left = daemon.data().join("jobs/discarded");
    until("so is the checkpoint", || fs::read_dir(&left).unwrap().next().is_none().then_some(()));
    let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(!log.contains("what its dump has left"), "{log}");
}

/// As does that of a job whose keeper is gone, and whose checkpoint is none any more.
#[test]
fn the_lock_of_a_job_that_begins_again_goes() {
    let config = json!({ "shortest_interval": i64::MAX });
    let daemon = Daemon::configured(&config, &["--means", "checkpoint"]);
    let (id, _, peer) = connected(&daemon);
    let (images, table) = asleep(&daemon, id);
    let mut entries = fs::read_dir(&images).unwrap().map(|entry| entry.unwrap().path());
    let core = entries.find(|path| path.to_str().unwrap().contains("/core-")).unwrap();
    let mut bytes = fs::read(&core).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&core, bytes).unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    until("it is found", || {
        daemon.show(id)["note"].as_str().filter(|note| note.contains("it begins again")).map(drop)
    });
    until("the lock is gone", || (!tables().contains(&table)).then_some(()));
    is_reset(peer);
}

/// What a daemon that was killed had put aside is discarded by the next one.
#[test]
fn what_a_daemon_has_put_aside_the_next_one_discards() {
    let mut daemon = Daemon::start(&["--means", "checkpoint"]);
    let (id, _, peer) = connected(&daemon);
    let (_, table) = asleep(&daemon, id);
    daemon.kill();
    let aside = daemon.data().join("jobs/discarded");
    fs::create_dir(&aside).unwrap();
    let place = daemon.data().join(format!("jobs/{id}/checkpoint-1"));
    fs::rename(place, aside.join(format!("{id}-1"))).unwrap();
    daemon.launch();
    until("the lock is gone", || (!tables().contains(&table)).then_some(()));
    is_reset(peer);
    daemon.ok(&["cancel", &id.to_string()]);
}

/// Also if it was killed between asking what removes a lock and removing it.
#[test]
fn a_lock_that_was_asked_for_and_not_removed_goes_as_well() {
    // The one that asks stands still there until it is killed.
    let bin = tempfile::tempdir().unwrap();
    let (nft, asked) = (bin.path().join("nft"), bin.path().join("asked"));
    let script = format!(
        "#!/bin/sh\n[ $1 = delete ] && [ ! -e {asked} ] && echo $$ >{asked} && exec sleep 1000\nPATH=${{PATH#*:}} exec nft \"$@\"\n",
        asked = asked.display()
    );
    write_script(&nft, &script);
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut daemon =
        Daemon::in_environment(&json!({}), &["--means", "checkpoint"], &[("PATH", path)]);
    let (id, _, peer) = connected(&daemon);
    let (_, table) = asleep(&daemon, id);
    daemon.ok(&["cancel", &id.to_string()]);
    let pid: i32 = until("it was asked", || fs::read_to_string(&asked).ok()?.trim().parse().ok());
    daemon.kill();
    // It may have ended with the daemon.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    assert!(tables().contains(&table), "{}", tables());
    daemon.launch();
    until("the lock is gone", || (!tables().contains(&table)).then_some(()));
    is_reset(peer);
}

/// A dump that is killed with all that would undo its work leaves a lock that no checkpoint names.
#[test]
fn the_lock_of_a_dump_that_was_cut_off_goes() {
    let daemon = Daemon::start(&["--means", "checkpoint"]);
    let (id, listener, _peer) = connected_with(&daemon, 64);
    let port = listener.local_addr().unwrap().port();
    let saved = || {
        let entries = fs::read_dir(daemon.data().join(format!("jobs/{id}"))).unwrap().flatten();
        let saved = entries.filter(|entry| entry.path().join("record.json").exists());
        saved.map(|entry| entry.file_name()).max()
    };
    for attempt in 0.. {
        assert!(attempt < 9, "no dump was met that had locked the connection and was not over");
        let running = || daemon.job(id)["state"] == "running";
        let shepherd =
            until("it runs", || shepherds(&daemon.data()).first().copied().filter(|_| running()));
        let before = saved();
        let mut preempt = daemon.queue(&["preempt", &id.to_string()]);
        let mut preempt = preempt.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        until("it is locked, or asleep", || {
            let is_over = preempt.try_wait().unwrap().is_some();
            (is_over || !leaks::locks(port).is_empty()).then_some(())
        });
        kill_process(Pid::from_raw(shepherd).unwrap(), Signal::KILL).ok();
        preempt.wait().unwrap();
        if saved() == before {
            break;
        }
        until("it is over", || (!shepherds(&daemon.data()).contains(&shepherd)).then_some(()));
        daemon.queue(&["resume", &id.to_string()]).output().unwrap();
    }
    // Should it have been complete after all, it goes with the checkpoint.
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
    leaks::assert_none(&daemon, &[port]);
}

/// Where nft does not work it is locked by rules of iptables.
#[test]
fn rules_of_iptables_go_as_well() {
    let bin = tempfile::tempdir().unwrap();
    let nft = bin.path().join("nft");
    write_script(&nft, "#!/bin/sh\nexit 1\n");
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let daemon = Daemon::in_environment(&json!({}), &["--means", "checkpoint"], &[("PATH", path)]);
    let (id, _, peer) = connected(&daemon);
    let port = peer.peer_addr().unwrap().port();
    daemon.ok(&["preempt", &id.to_string()]);
    until("it is on disk", || daemon.show(id)["checkpoint"].as_u64());
    let locks = leaks::locks(port);
    assert!(!locks.is_empty() && locks.iter().all(|lock| lock.contains("-j DROP")), "{locks:?}");
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
    leaks::assert_none(&daemon, &[port]);
    is_reset(peer);
    let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(!log.contains("what its dump has left"), "{log}");
}
