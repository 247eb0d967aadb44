//! Jobs that are over are forgotten: by hand, by their age, and by their number.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use common::{Daemon, ask, shown, until};
use serde_json::{Value, json};

/// The jobs that the daemon knows.
fn known(daemon: &Daemon) -> Vec<u64> {
    let list: Vec<Value> = serde_json::from_str(&daemon.ok(&["list", "--json"])).unwrap();
    list.iter().map(|job| job["id"].as_u64().unwrap()).collect()
}

/// The jobs that have a directory.
fn kept(daemon: &Daemon) -> Vec<u64> {
    let entries = std::fs::read_dir(daemon.data().join("jobs")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut ids: Vec<u64> = names.map(|name| name.parse().unwrap()).collect();
    ids.sort_unstable();
    ids
}

/// A counter among the metrics.
fn counter(daemon: &Daemon, name: &str) -> String {
    let (_, text) = ask(daemon, "GET", "/metrics", "", "");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("torpor_queue_{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).to_owned()
}

fn refused(daemon: &Daemon, id: u64, why: &str) {
    let output = daemon.queue(&["forget", &id.to_string()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(why), "{}", shown(&output));
}

#[test]
fn a_job_that_is_over_is_forgotten_by_hand() {
    let mut daemon = Daemon::configured(&json!({ "slots": 4 }), &[]);
    let first = daemon.submit(&[], &["echo", "hello"]);
    daemon.wait_for(first, "done");
    let lives = daemon.submit(&[], &["sleep", "1000"]);
    daemon.wait_for(lives, "running");
    let waits =
        daemon.submit(&["--after", &first.to_string(), "--after", &lives.to_string()], &["true"]);
    refused(&daemon, 99, "no job 99");
    refused(&daemon, lives, "is not over: running");
    refused(&daemon, first, "another job is to run after it");
    assert_eq!(known(&daemon), [first, lives, waits]);

    daemon.ok(&["cancel", &lives.to_string(), &waits.to_string()]);
    daemon.wait_for(lives, "cancelled");
    daemon.wait_for(waits, "cancelled");
    let before = ["runs_total", "work_seconds_total"].map(|name| counter(&daemon, name));
    let said: Value =
        serde_json::from_str(&daemon.ok(&["forget", "--json", &first.to_string()])).unwrap();
    assert_eq!(said, json!({ "forgotten": [first] }));
    assert_eq!(known(&daemon), [lives, waits]);
    until("what it has written is gone", || (kept(&daemon) == [lives, waits]).then_some(()));
    refused(&daemon, first, &format!("no job {first}"));
    assert!(!daemon.queue(&["logs", &first.to_string()]).output().unwrap().status.success());

    daemon.ok(&["forget", "--all"]);
    assert_eq!(known(&daemon), [0; 0]);
    // What all have cost is still counted, and no number is given twice; also by the daemon after it.
    until("what they have written is gone", || kept(&daemon).is_empty().then_some(()));
    daemon.kill();
    // What a power cut can leave.
    std::fs::create_dir(daemon.data().join("jobs/1")).unwrap();
    daemon.launch();
    assert_eq!(kept(&daemon), [0; 0]);
    let after = ["runs_total", "work_seconds_total"].map(|name| counter(&daemon, name));
    assert_eq!(after, before);
    assert_eq!(daemon.submit(&[], &["true"]), waits + 1);
}

#[test]
fn the_oldest_of_many_are_forgotten() {
    let config = json!({ "slots": 1, "orphan_after": 0, "retention": { "jobs": 2 } });
    let daemon = Daemon::configured(&config, &[]);
    let ids: Vec<u64> = (0..5).map(|_| daemon.submit(&[], &["true"])).collect();
    until("the first three are forgotten", || (known(&daemon) == ids[3..]).then_some(()));
    until("the last two are over", || {
        let list: Vec<Value> = serde_json::from_str(&daemon.ok(&["list", "--json"])).unwrap();
        list.iter().all(|job| job["state"] == "done").then_some(())
    });
    assert_eq!(known(&daemon), ids[3..]);
    let newest = daemon.ok(&["list", "--limit", "1", "--json"]);
    let newest: Vec<Value> = serde_json::from_str(&newest).unwrap();
    assert_eq!(newest.len(), 1);
    assert_eq!(newest[0]["id"], ids[4]);
}

/// However short jobs are known: a client that is the job gets its output and its end.
#[test]
fn a_client_reads_all_before_its_job_is_forgotten() {
    let config = json!({ "retention": { "age": 0 } });
    let daemon = Daemon::configured(&config, &[]);
    let output = daemon.queue(&["run", "--", "seq", "100000"]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    assert_eq!(output.stdout.iter().filter(|&&byte| byte == b'\n').count(), 100_000);
    // It may be asked about for as long as a client may take to come back.
    assert_eq!(known(&daemon), [1]);
}
