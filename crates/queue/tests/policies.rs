//! What the rules promise, on real daemons: turns, shares, deadlines, what is reserved, back-fill, and who gives way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc;
use std::thread;

use common::{Daemon, PATIENCE, until};
use serde_json::{Value, json};

const FOREVER: [&str; 2] = ["sleep", "1000"];

/// A daemon with these classes and one slot, or more.
fn with_classes(classes: &Value, slots: &str) -> Daemon {
    Daemon::configured(&json!({ "rules": { "classes": classes } }), &["--slots", slots])
}

/// A job that runs until the test ends.
fn submit(daemon: &Daemon, options: &[&str]) -> u64 {
    daemon.submit(options, &FOREVER)
}

/// Such a job, which has a slot.
fn running(daemon: &Daemon, options: &[&str]) -> u64 {
    let id = submit(daemon, options);
    until("it runs", || daemon.show(id)["started"].as_i64());
    id
}

fn number(daemon: &Daemon, id: u64, key: &str) -> i64 {
    daemon.job(id)[key].as_i64().unwrap()
}

/// To whom a job has given way, each time.
fn gave_way_to(daemon: &Daemon, id: u64) -> Vec<u64> {
    let events = daemon.events(id, "preempted");
    events.iter().map(|event| event["data"]["to"].as_u64().unwrap()).collect()
}

#[test]
fn equals_take_turns() {
    let daemon = with_classes(&json!({ "turn": { "slice": 300, "means": ["stop"] } }), "1");
    let both = [0; 2].map(|_| submit(&daemon, &["--class", "turn"]));
    let times = || both.map(|id| number(&daemon, id, "preemptions"));
    until("each has had some turns", || times().iter().all(|&times| times >= 3).then_some(()));
    for (id, other) in [(both[0], both[1]), (both[1], both[0])] {
        let to = gave_way_to(&daemon, id);
        assert!(to.len() >= 3 && to.iter().all(|&to| to == other), "{id}: {to:?}");
    }
}

/// A daemon where owners share one slot, turn by turn.
fn shared(owners: &Value) -> Daemon {
    let classes = json!({ "fair": { "slice": 200, "fair": true, "means": ["stop"] } });
    let rules = json!({ "classes": classes, "shares": { "owners": owners } });
    Daemon::configured(&json!({ "rules": rules }), &["--slots", "1"])
}

#[test]
fn shares_are_kept_by_weight_whichever_daemon_it_is() {
    let mut daemon = shared(&json!({ "ann": 3.0, "bob": 1.0 }));
    let of = |owner| submit(&daemon, &["--class", "fair", "--owner", owner]);
    let [ann, bob] = ["ann", "bob"].map(of);
    let ran = |daemon: &Daemon| [ann, bob].map(|id| number(daemon, id, "ran_ms"));
    let until_they_ran = |daemon: &Daemon, millis: i64| {
        until("they run", || (ran(daemon).iter().sum::<i64>() >= millis).then_some(()));
    };
    until_they_ran(&daemon, 3000);
    daemon.kill();
    daemon.launch();
    until_they_ran(&daemon, 8000);
    let [of_ann, of_bob] = ran(&daemon);
    // A turn is 200 ms.
    assert!(of_ann > 2 * of_bob && of_ann < 5 * of_bob, "ann {of_ann} ms, bob {of_bob} ms");
}

#[test]
fn what_was_used_is_known_to_the_next_daemon() {
    let mut daemon = shared(&json!({}));
    let ann = running(&daemon, &["--class", "fair", "--owner", "ann"]);
    until("it runs for a while", || (number(&daemon, ann, "ran_ms") > 2000).then_some(()));
    daemon.ok(&["preempt", &ann.to_string(), "--means", "stop"]);
    daemon.wait_for(ann, "preempted");
    let used = number(&daemon, ann, "ran_ms");
    daemon.kill();
    daemon.launch();
    let bob = running(&daemon, &["--class", "fair", "--owner", "bob"]);
    daemon.wait_for(ann, "preempted");
    daemon.ok(&["resume", &ann.to_string()]);
    // She has had her part.
    until("he runs", || (number(&daemon, bob, "ran_ms") > used / 2).then_some(()));
    assert_eq!(number(&daemon, ann, "ran_ms"), used, "{}", daemon.show(bob));
    until("it is her turn again", || (number(&daemon, ann, "ran_ms") > used).then_some(()));
    assert!(number(&daemon, bob, "ran_ms") >= used, "{}", daemon.show(bob));
}

#[test]
fn a_deadline_that_comes_near_lets_a_job_rise() {
    let classes = json!({
        "low": { "priority": 0 }, "high": { "priority": 100, "means": ["stop"] },
    });
    let daemon = with_classes(&classes, "1");
    let high = running(&daemon, &["--class", "high"]);
    let without = submit(&daemon, &["--class", "low"]);
    let late = submit(&daemon, &["--class", "low", "--estimate", "1", "--deadline", "3"]);
    daemon.wait_for(late, "running");
    let to = gave_way_to(&daemon, high);
    assert!(!to.is_empty() && to.iter().all(|&to| to == late), "{to:?}");
    assert_eq!(daemon.job(without)["state"], "queued");
    let at = |kind: &str| daemon.events(late, kind)[0]["at"].as_i64().unwrap();
    // It must run for 1.1 of the 3 seconds.
    assert!(at("starting") - at("submitted") >= 1900, "{}", daemon.show(late));
}

#[test]
fn reserved_slots_are_for_who_is_waited_for() {
    let config = json!({ "rules": { "reserved": 1 } });
    let daemon = Daemon::configured(&config, &["--slots", "2"]);
    let first = running(&daemon, &[]);
    let second = submit(&daemon, &[]);
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    assert_eq!(daemon.job(second)["state"], "queued");
    assert_eq!(number(&daemon, first, "preemptions"), 0);
    let large = submit(&daemon, &["--slots", "2"]);
    let why = daemon.ok(&["show", "--why", &large.to_string()]);
    assert!(why.contains("can never run here: its class has 1 slots"), "{why}");
}

/// Who is frozen keeps memory, which nobody can spare here.
#[test]
fn memory_that_is_reserved_is_nobodys() {
    let config = json!({ "memory_reserve": 1_u64 << 50, "sink_after": 1_i64 << 50 });
    let daemon = Daemon::configured(&config, &["--slots", "1"]);
    let machine: Value = serde_json::from_str(&daemon.ok(&["top", "--json"])).unwrap();
    assert_eq!(machine["memory_free"], 0);
    let frozen = running(&daemon, &[]);
    daemon.ok(&["preempt", &frozen.to_string(), "--means", "stop"]);
    let means = |id: u64| -> Vec<Value> {
        let events = daemon.events(id, "preempted");
        events.iter().map(|event| event["data"]["means"].clone()).collect()
    };
    until("it is a checkpoint", || (means(frozen) == ["stop", "checkpoint"]).then_some(()));
    let long = running(&daemon, &["--class", "batch"]);
    let urgent = daemon.submit(&["--class", "urgent", "--memory", "16M"], &["true"]);
    daemon.wait_for(urgent, "done");
    assert_eq!(means(long), ["checkpoint"]);
}

/// Options of a job that neither gives way nor makes others do so.
fn fixed<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&["--class", "fixed"], options].concat()
}

#[test]
fn slots_that_are_kept_for_another_are_filled_meanwhile() {
    let classes = json!({ "fixed": { "preempts": false, "preemptible": false } });
    let daemon = with_classes(&classes, "2");
    running(&daemon, &fixed(&["--estimate", "1000"]));
    let wide = submit(&daemon, &fixed(&["--slots", "2"]));
    let long = submit(&daemon, &fixed(&[]));
    let too_long = submit(&daemon, &fixed(&["--estimate", "2000"]));
    let short = daemon.submit(&fixed(&["--estimate", "20"]), &["true"]);
    daemon.wait_for(short, "done");
    for id in [wide, long, too_long] {
        assert_eq!(daemon.job(id)["state"], "queued");
    }
    let why = daemon.ok(&["show", "--why", &long.to_string()]);
    assert!(why.contains(&format!("waits behind job {wide} ")), "{why}");
}

#[test]
fn who_costs_less_to_save_gives_way() {
    let daemon = Daemon::start(&["--slots", "2", "--means", "checkpoint"]);
    let small = running(&daemon, &["--class", "batch"]);
    let script = "import os, time\nx = os.urandom(1 << 20) * 200\nprint('ready', flush=True)\n\
                  time.sleep(1000)";
    let large = daemon.submit(&["--class", "batch"], &["python3", "-c", script]);
    daemon.wait_for_output(large, "ready");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    assert_eq!(gave_way_to(&daemon, small), [urgent]);
    assert_eq!(number(&daemon, large, "preemptions"), 0);
}

/// Of jobs that are killed the one goes that has worked for less.
#[test]
fn who_loses_less_work_gives_way() {
    let daemon = Daemon::start(&["--slots", "2", "--means", "kill"]);
    let little = running(&daemon, &["--class", "batch"]);
    daemon.ok(&["preempt", &little.to_string(), "--means", "stop"]);
    let much = running(&daemon, &["--class", "batch"]);
    until("it works", || (number(&daemon, much, "ran_ms") > 5000).then_some(()));
    daemon.ok(&["resume", &little.to_string()]);
    // Nobody is made to give way again at once, but when they have run ten times as long as that took.
    let before = number(&daemon, little, "ran_ms");
    until("it runs again", || {
        let took = daemon.show(little)["overhead_ms"].as_i64().unwrap();
        (number(&daemon, little, "ran_ms") > before + 500.max(10 * took)).then_some(())
    });
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    let killed = daemon.events(little, "preempted").pop().unwrap();
    assert_eq!((&killed["data"]["means"], &killed["data"]["to"]), (&json!("kill"), &json!(urgent)));
    assert_eq!(number(&daemon, much, "preemptions"), 0);
}

/// A job waits for a quota, and says so in these words.
fn waits_for_quota(daemon: &Daemon, id: u64, words: &[&str]) {
    let why = daemon.ok(&["show", "--why", &id.to_string()]);
    assert!(why.contains("waits for its quota: owner:ann "), "{why}");
    assert!(words.iter().all(|word| why.contains(word)), "{why}");
    assert_eq!(daemon.job(id)["state"], "queued");
}

/// Jobs that name no memory count as they are thought to need, also when they have not taken that yet.
#[test]
fn a_quota_of_memory_counts_who_names_none_as_well() {
    let daemon = Daemon::configured(&json!({ "usual_memory": 800 << 20 }), &["--slots", "3"]);
    daemon.ok(&["quota", "owner:ann", "--memory", &(1 << 30).to_string()]);
    let first = running(&daemon, &["--owner", "ann"]);
    let second = submit(&daemon, &["--owner", "ann"]);
    let large = submit(&daemon, &["--owner", "ann", "--memory", "300M"]);
    let small = daemon.submit(&["--owner", "ann", "--memory", "64M"], &["true"]);
    daemon.wait_for(small, "done");
    // By then what it holds has been looked at.
    until("it runs for a while", || (number(&daemon, first, "ran_ms") > 1000).then_some(()));
    let other = daemon.submit(&["--owner", "bob"], &["true"]);
    daemon.wait_for(other, "done");
    waits_for_quota(&daemon, second, &["would have 1677721600 bytes", "names no --memory"]);
    waits_for_quota(&daemon, large, &["would have 1153433600 bytes"]);
    daemon.ok(&["cancel", &first.to_string()]);
    until("it runs", || daemon.show(second)["started"].as_i64());
}

/// What counts is the time for which jobs have their slots: others wait for these while one sleeps, too.
#[test]
fn a_quota_of_slot_seconds_holds_back_who_has_used_them() {
    let daemon = Daemon::start(&["--slots", "2"]);
    daemon.ok(&["quota", "owner:ann", "--cpu-seconds", "1"]);
    let first = running(&daemon, &["--owner", "ann"]);
    until("it runs for a while", || (number(&daemon, first, "ran_ms") > 1000).then_some(()));
    let second = daemon.submit(&["--owner", "ann"], &["true"]);
    let other = daemon.submit(&["--owner", "bob"], &["true"]);
    daemon.wait_for(other, "done");
    waits_for_quota(&daemon, second, &["has used", "seconds of slots"]);
    daemon.ok(&["quota", "owner:ann", "--cpu-seconds", "1000"]);
    daemon.wait_for(second, "done");
    // What runs is left alone.
    let job = daemon.job(first);
    assert_eq!((&job["state"], &job["preemptions"]), (&json!("running"), &json!(0)));
}

/// As systemd listens: at a path, or at a name of its own.
#[test]
fn the_service_manager_hears_when_it_is_ready_and_that_it_lives() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let name = format!("torpor-test-notify-{}", std::process::id());
    let named = SocketAddr::from_abstract_name(&name).unwrap();
    for (address, socket) in [
        (path.to_str().unwrap().to_owned(), UnixDatagram::bind(&path).unwrap()),
        (format!("@{name}"), UnixDatagram::bind_addr(&named).unwrap()),
    ] {
        let (said, heard) = mpsc::channel();
        let listener = socket.try_clone().unwrap();
        thread::spawn(move || {
            let mut word = [0; 100];
            // Until nobody wants to hear more.
            while let Ok(count) = listener.recv(&mut word)
                && said.send(String::from_utf8(word[..count].to_vec()).unwrap()).is_ok()
            {
            }
        });
        let daemon = Daemon::in_environment(&json!({}), &[], &[("NOTIFY_SOCKET", address)]);
        let next = || heard.recv_timeout(PATIENCE).unwrap();
        assert_eq!(next(), "READY=1");
        UnixStream::connect(daemon.dir.path().join("socket")).unwrap();
        assert_eq!([next(), next()], ["WATCHDOG=1", "WATCHDOG=1"]);
        // Jobs have nothing to say to it.
        let id = daemon.submit(&[], &["sh", "-c", "echo socket: $NOTIFY_SOCKET"]);
        daemon.wait_for(id, "done");
        assert_eq!(daemon.output(id), "socket:\n");
    }
}
