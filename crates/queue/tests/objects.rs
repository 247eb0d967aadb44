//! Checkpoints in an object store: what is equal is there once, jobs go on from there when
//! nothing is left on the machine, and what fails there harms nobody.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Daemon, shepherds, until, words};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use torpor_runtimes_tests::objects::ObjectStore;

/// A store in a directory, and the option that names it.
fn directory() -> (TempDir, String) {
    let dir = tempfile::Builder::new().prefix("torpor-store-").tempdir().unwrap();
    let place = format!("dir:{}", dir.path().join("store").display());
    (dir, place)
}

/// When this is there jobs may end: none must before all has happened that is to happen to it.
fn may_end(dir: &Path) -> PathBuf {
    dir.join("may-end")
}

/// Lets the jobs end.
fn let_end(dir: &Path) {
    std::fs::write(may_end(dir), "").unwrap();
}

/// For a shell: waits until it may end.
fn wait(dir: &Path) -> String {
    format!("until [ -e {} ]; do sleep 0.02; done", may_end(dir).display())
}

/// Holds 24 MiB that are the same in each, and counts.
fn holder(dir: &Path, rounds: u32) -> Vec<String> {
    let script = format!(
        "import os, random, sys, time\nx = random.Random(7).randbytes(24 << 20)\nbefore = sum(x[::4096])\n\
         for i in range({rounds}):\n    print('round', i, flush=True)\n    time.sleep(0.02)\n\
         while not os.path.exists(sys.argv[1]):\n    time.sleep(0.02)\n\
         print(sum(x[::4096]) == before, flush=True)"
    );
    ["python3", "-c", &script, may_end(dir).to_str().unwrap()].map(str::to_owned).into()
}

fn held(rounds: u32) -> String {
    let lines: String = (0..rounds).map(|i| format!("round {i}\n")).collect();
    format!("{lines}True\n")
}

fn events(daemon: &Daemon, id: u64, kind: &str) -> Vec<Value> {
    let show = daemon.show(id);
    let all = show["events"].as_array().unwrap().clone();
    all.into_iter().filter(|event| event["kind"] == kind).map(|e| e["data"].clone()).collect()
}

fn stored_bytes(daemon: &Daemon) -> u64 {
    let machine: Value = serde_json::from_str(&daemon.ok(&["top", "--json"])).unwrap();
    machine["stored_bytes"].as_u64().unwrap()
}

/// Lets a job give way, and waits until its checkpoint is stored; what the event says.
fn put_away(daemon: &Daemon, id: u64) -> Value {
    let before = events(daemon, id, "stored").len();
    daemon.ok(&["preempt", &id.to_string()]);
    daemon.wait_for(id, "preempted");
    until("it is stored", || {
        let stored = events(daemon, id, "stored");
        let show = daemon.show(id);
        let is_newest = stored.len() > before && show["stored"] == show["checkpoint"];
        stored.last().filter(|_| is_newest).cloned()
    })
}

/// Fails as a machine does: the daemon and all jobs are gone at once.
fn fail(daemon: &mut Daemon) {
    daemon.kill();
    for pid in shepherds(&daemon.data()) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
}

/// The name of the only checkpoint of another daemon.
fn strange(daemon: &Daemon) -> String {
    let list = daemon.ok(&["adopt"]);
    let mut names = list.lines().filter_map(|line| line.split(' ').next());
    let name = names.next().unwrap().to_owned();
    assert_eq!(names.next(), None, "{list}");
    name
}

/// The names that have a sign in the store.
fn signs(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("store/signs")).unwrap().count()
}

/// Bytes of all objects in a directory.
fn in_place(store: &Path) -> u64 {
    let entries = std::fs::read_dir(store.join("store/blobs/sha256")).unwrap();
    entries.filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len())).sum()
}

#[test]
fn what_two_jobs_have_in_common_is_stored_once() {
    stored_once(Value::Null);
}

#[test]
fn compressed_it_is_stored_once_as_well() {
    stored_once(json!("lz4"));
}

fn stored_once(compress: Value) {
    let (dir, place) = directory();
    let config = json!({ "compress": compress, "shortest_interval": 1000 });
    let daemon = Daemon::configured(&config, &["--slots", "2", "--store", &place]);
    let mut stored = Vec::new();
    for _ in 0..2 {
        let id = daemon
            .submit(&["--class", "batch", "--owner", "ann"], &words(&holder(dir.path(), 100)));
        daemon.wait_for_output(id, "round 1\n");
        stored.push((id, put_away(&daemon, id)));
    }
    let bytes = |at: usize, key: &str| stored[at].1[key].as_u64().unwrap();
    assert!(bytes(0, "new") > 24 << 20 && bytes(1, "bytes") > 24 << 20, "{stored:?}");
    assert!(bytes(1, "new") + (16 << 20) < bytes(1, "bytes"), "{stored:?}");
    // What counts is what is there.
    let all = bytes(0, "bytes") + bytes(1, "new");
    assert!(stored_bytes(&daemon).abs_diff(all) < 64 << 10, "{all} {}", stored_bytes(&daemon));
    assert!(in_place(dir.path()).abs_diff(all) < 64 << 10, "{all} {}", in_place(dir.path()));
    // A later checkpoint of the same job shares it as well.
    let (first, _) = stored[0];
    daemon.ok(&["resume", &first.to_string()]);
    daemon.wait_for(first, "running");
    let again = put_away(&daemon, first);
    assert!(again["new"].as_u64().unwrap() < 16 << 20, "{again}");
    let_end(dir.path());
    for (id, _) in stored {
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "done");
        assert_eq!(daemon.output(id), held(100));
    }
    assert_eq!(stored_bytes(&daemon), 0);
    until("what nobody needs goes", || (in_place(dir.path()) == 0).then_some(()));
}

#[test]
fn a_job_goes_on_elsewhere_when_its_machine_is_lost() {
    let (dir, place) = directory();
    let input = dir.path().join("input");
    std::fs::create_dir(&input).unwrap();
    std::fs::write(input.join("kept"), "as it was").unwrap();
    let mut lost = Daemon::configured(&json!({ "lease": 500 }), &["--store", &place]);
    let wait = wait(dir.path());
    let script = format!(
        "cat kept; echo changed >kept; for i in $(seq 30); do echo $i; done; {wait}; cat kept"
    );
    let input = input.to_str().unwrap();
    let id = lost.submit(&["--class", "batch", "--input", input], &["bash", "-c", &script]);
    lost.wait_for_output(id, "3\n");
    put_away(&lost, id);
    fail(&mut lost);
    drop(lost);
    let_end(dir.path());
    let daemon = Daemon::start(&["--store", &place]);
    let name = strange(&daemon);
    assert_eq!(daemon.ok(&["adopt"]), format!("{name} batch\n"));
    let here: u64 = daemon.ok(&["adopt", &name]).trim().parse().unwrap();
    daemon.wait_for(here, "done");
    let lines: String = (1..=30).map(|i| format!("{i}\n")).collect();
    assert_eq!(daemon.output(here), format!("as it was{lines}changed\n"));
    // It is taken once.
    assert!(!daemon.queue(&["adopt", &name]).output().unwrap().status.success());
    assert_eq!(daemon.ok(&["adopt"]), "");
}

#[test]
fn a_daemon_that_lives_keeps_its_jobs() {
    let (dir, place) = directory();
    // Longer than a busy machine keeps it from saying something.
    let config = json!({ "lease": 12_000 });
    let [alive, other] = [0, 1].map(|_| Daemon::configured(&config, &["--store", &place]));
    let id = alive.submit(&["--class", "batch"], &words(&holder(dir.path(), 30)));
    alive.wait_for_output(id, "round 3\n");
    put_away(&alive, id);
    alive.ok(&["resume", &id.to_string()]);
    alive.wait_for(id, "running");
    let name = strange(&other);
    let refused = other.queue(&["adopt", &name]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("lives"), "{said}");
    assert_eq!(other.ok(&["list", "--json"]), "[]\n");
    assert_eq!(alive.job(id)["state"], "running");
    // Whoever insists has it, and then the first daemon has it no more.
    let here: u64 = other.ok(&["adopt", "--force", &name]).trim().parse().unwrap();
    let job = alive.wait_for(id, "cancelled");
    assert!(job["note"].as_str().unwrap().contains("another daemon"), "{job}");
    let_end(dir.path());
    other.wait_for(here, "done");
    assert_eq!(other.output(here), held(30));
    assert!(!alive.output(id).contains("True"));
    until("nothing is left of it", || (signs(dir.path()) == 2).then_some(()));
    until("no checkpoint is left", || {
        (alive.ok(&["adopt"]) + &other.ok(&["adopt"])).is_empty().then_some(())
    });
}

#[test]
fn a_daemon_that_comes_back_leaves_what_was_adopted() {
    let (dir, place) = directory();
    let mut lost = Daemon::configured(&json!({ "lease": 500 }), &["--store", &place]);
    // One sleeps when the machine fails, the other one runs.
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = lost.submit(&["--class", "batch"], &words(&holder(dir.path(), 30)));
        lost.wait_for_output(id, "round 3\n");
        put_away(&lost, id);
        ids.push(id);
    }
    lost.ok(&["resume", &ids[1].to_string()]);
    lost.wait_for(ids[1], "running");
    fail(&mut lost);
    let other = Daemon::start(&["--store", &place]);
    for line in other.ok(&["adopt"]).lines() {
        let name = line.split(' ').next().unwrap();
        other.ok(&["adopt", name]);
    }
    let_end(dir.path());
    lost.launch();
    for id in ids {
        let job = lost.wait_for(id, "cancelled");
        assert!(job["note"].as_str().unwrap().contains("another daemon"), "{job}");
        let output = lost.output(id);
        assert!(!output.contains("True"), "it ran here as well: {output}");
    }
    for id in [1, 2] {
        other.wait_for(id, "done");
        assert_eq!(other.output(id), held(30));
    }
}

#[test]
fn a_daemon_that_starts_waits_until_it_knows_who_has_its_jobs() {
    let (dir, place) = directory();
    let mut daemon = Daemon::start(&["--store", &place]);
    let id = daemon.submit(&["--class", "batch"], &words(&holder(dir.path(), 30)));
    daemon.wait_for_output(id, "round 3\n");
    put_away(&daemon, id);
    let_end(dir.path());
    fail(&mut daemon);
    // The store does not tell: what is there instead of signs is no directory.
    let signs = dir.path().join("store/signs");
    std::fs::remove_dir_all(&signs).unwrap();
    std::fs::write(&signs, "").unwrap();
    daemon.launch();
    daemon.ok(&["resume", &id.to_string()]);
    until("it is said", || {
        let why = daemon.ok(&["show", "--why", &id.to_string()]);
        (why.contains("has not told yet") && why.contains("store/signs")).then_some(())
    });
    assert_eq!(daemon.job(id)["state"], "preempted");
    std::fs::remove_file(&signs).unwrap();
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), held(30));
}

#[test]
fn what_is_only_in_an_object_store_comes_back() {
    let Some(store) = ObjectStore::start("what_is_only_in_an_object_store_comes_back") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    // On disk there is no place for a checkpoint.
    let config = json!({ "images": 1, "store": "s3://bucket/queue" });
    let daemon = Daemon::in_environment(&config, &[], &store.environment());
    let id = daemon.submit(&["--class", "batch"], &words(&holder(dir.path(), 60)));
    daemon.wait_for_output(id, "round 1\n");
    put_away(&daemon, id);
    until("it is nowhere else", || (daemon.show(id)["only_stored"] == true).then_some(()));
    let here = std::fs::read_dir(daemon.data().join("jobs").join(id.to_string())).unwrap();
    let mut names = here.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.any(|name| name.starts_with("checkpoint-")));
    let_end(dir.path());
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), held(60));
    assert_eq!(events(&daemon, id, "fetched").len(), 1);
    assert_eq!(daemon.job(id)["run"], 1);
}

#[test]
fn what_is_sealed_stays_so_in_the_store() {
    let (dir, place) = directory();
    let key: PathBuf = dir.path().join("key");
    let made = Command::new(common::torpor()).args(["key", "generate"]).arg(&key).output().unwrap();
    assert!(made.status.success(), "{}", common::shown(&made));
    let text = std::fs::read_to_string(&key).unwrap() + &String::from_utf8_lossy(&made.stdout);
    let recipient = text.split_whitespace().find(|word| word.starts_with("age1")).unwrap();
    let config = json!({
        "images": 1,
        "compress": null,
        "rules": { "classes": {
            "open": { "priority": 0 },
            "secret": { "priority": 0, "recipient": recipient, "identity": key },
        } },
    });
    let daemon = Daemon::configured(&config, &["--store", &place]);
    for (class, readable) in [("open", true), ("secret", false)] {
        let word = format!("very {class} words");
        let _ = std::fs::remove_file(may_end(dir.path()));
        let wait = wait(dir.path());
        let script = format!("echo {word}; for i in $(seq 20); do echo $i; done; {wait}");
        let id = daemon.submit(&["--class", class], &["bash", "-c", &script]);
        daemon.wait_for_output(id, "2\n");
        put_away(&daemon, id);
        let found =
            Command::new("grep").args(["-r", "-q", &word]).arg(dir.path()).status().unwrap();
        assert_eq!(found.success(), readable, "{class}");
        until("it is nowhere else", || (daemon.show(id)["only_stored"] == true).then_some(()));
        let_end(dir.path());
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "done");
        let lines: String = (1..=20).map(|i| format!("{i}\n")).collect();
        assert_eq!(daemon.output(id), format!("{word}\n{lines}"));
    }
}

#[test]
fn a_store_that_fails_harms_no_job_and_is_tried_again() {
    let (dir, place) = directory();
    // Nothing can be made there.
    std::fs::write(dir.path().join("store"), "").unwrap();
    let daemon = Daemon::start(&["--slots", "1", "--store", &place]);
    let id = daemon.submit(&["--class", "batch"], &words(&holder(dir.path(), 60)));
    daemon.wait_for_output(id, "round 3\n");
    let urgent = daemon.queue(&["submit", "--class", "urgent", "--wait", "--", "true"]).output();
    assert!(urgent.unwrap().status.success());
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    until("it is said", || (!events(&daemon, id, "not-stored").is_empty()).then_some(()));
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "running");
    std::fs::remove_file(dir.path().join("store")).unwrap();
    put_away(&daemon, id);
    // Its machine fails and the store does, too: it goes on from its own disk. At once: the daemon may be
    // writing there.
    std::fs::rename(dir.path().join("store"), dir.path().join("aside")).unwrap();
    let_end(dir.path());
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), held(60));
}

#[test]
fn a_job_waits_for_its_store_and_does_not_begin_again() {
    let (dir, place) = directory();
    // So long a lease that no sign is left while the store is away.
    let config = json!({ "images": 1, "lease": 3_600_000 });
    let daemon = Daemon::configured(&config, &["--store", &place]);
    let id = daemon.submit(&["--class", "batch"], &words(&holder(dir.path(), 30)));
    daemon.wait_for_output(id, "round 3\n");
    put_away(&daemon, id);
    until("it is nowhere else", || (daemon.show(id)["only_stored"] == true).then_some(()));
    let_end(dir.path());
    let (store, aside) = (dir.path().join("store"), dir.path().join("aside"));
    std::fs::rename(&store, &aside).unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    until("it is said", || (!events(&daemon, id, "not-fetched").is_empty()).then_some(()));
    let why = daemon.ok(&["show", "--why", &id.to_string()]);
    assert!(why.contains("object store"), "{why}");
    // Whoever looks there meanwhile may make it anew.
    until("it is back", || {
        let _ = std::fs::remove_dir_all(&store);
        std::fs::rename(&aside, &store).ok()
    });
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), held(30));
}
