//! A checkpoint that is not what was saved brings no job back: it is named, an older one is taken, or the
//! job begins again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::{Path, PathBuf};

use common::{Daemon, shepherds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Saves often, so that a job has checkpoints that build on one another.
fn daemon(class: &Value) -> Daemon {
    let config = json!({
        "shortest_interval": 200, "mean_time_between_failures": 500,
        "rules": { "classes": { "batch": class } },
    });
    Daemon::configured(&config, &["--means", "checkpoint"])
}

/// Counts, in its own directory as well if it has one, until there is a file `end`.
fn job(daemon: &Daemon, own: bool) -> u64 {
    let input = daemon.dir.path().join("input");
    std::fs::create_dir(&input).unwrap();
    let end = daemon.dir.path().join("end");
    let script = "import os, sys, time\ni = 0\nwhile not os.path.exists(sys.argv[1]):\n    \
                  print(i, flush=True)\n    if sys.argv[2] == 'own':\n        \
                  open('count', 'w').write(str(i))\n    i += 1\n    time.sleep(0.02)\n\
                  print('end', flush=True)";
    let (options, word): (&[&str], &str) = match own {
        true => (&["--class", "batch", "--input", input.to_str().unwrap()], "own"),
        false => (&["--class", "batch"], "none"),
    };
    let id = daemon.submit(options, &["python3", "-c", script, end.to_str().unwrap(), word]);
    // On a busy machine it is saved more than once before it has begun.
    until("it counts", || (daemon.output(id).lines().count() > 1).then_some(()));
    id
}

fn end(daemon: &Daemon, id: u64) -> Value {
    std::fs::write(daemon.dir.path().join("end"), "").unwrap();
    daemon.wait_for(id, "done");
    let output = daemon.output(id);
    // No line is lost, and none is there twice.
    let last = u32::try_from(output.lines().count() - 1).unwrap();
    assert_eq!(output, common::counted(last));
    daemon.show(id)
}

fn place(daemon: &Daemon, id: u64, seq: u64) -> PathBuf {
    daemon.data().join(format!("jobs/{id}/checkpoint-{seq}"))
}

/// The checkpoint that one builds on.
fn base(daemon: &Daemon, id: u64, seq: u64) -> Option<u64> {
    let record = std::fs::read(place(daemon, id, seq).join("record.json")).unwrap();
    serde_json::from_slice::<Value>(&record).unwrap()["base"].as_u64()
}

/// The number of the newest checkpoint that there is.
fn newest(daemon: &Daemon, id: u64) -> u64 {
    let entries = std::fs::read_dir(daemon.data().join(format!("jobs/{id}"))).unwrap();
    let number = |entry: std::fs::DirEntry| {
        entry.file_name().to_str()?.strip_prefix("checkpoint-")?.parse().ok()
    };
    entries.filter_map(|entry| number(entry.unwrap())).max().unwrap()
}

/// Lets the job give way by a checkpoint that builds on another; its number, when it is on disk.
fn asleep(daemon: &Daemon, id: u64) -> u64 {
    let mut before = 0;
    loop {
        until("it is saved", || daemon.show(id)["checkpoint"].as_u64().filter(|&now| now > before));
        daemon.ok(&["preempt", &id.to_string()]);
        let seq = newest(daemon, id);
        until("it is on disk", || (daemon.show(id)["checkpoint"] == seq).then_some(()));
        if base(daemon, id, seq).is_some() {
            return seq;
        }
        // It was the first of a chain.
        before = seq;
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "running");
    }
}

/// Changes one bit of a file in a checkpoint; returns its name.
fn damage(place: &Path, name: &str) -> String {
    let mut left = vec![place.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                left.push(path);
            } else if path.file_name().unwrap().to_str().unwrap().starts_with(name) {
                // Another checkpoint may have the same file.
                let mut bytes = std::fs::read(&path).unwrap();
                // One that was being written is empty.
                match bytes.last_mut() {
                    Some(last) => *last ^= 1,
                    None => bytes.push(1),
                }
                std::fs::remove_file(&path).unwrap();
                std::fs::write(&path, bytes).unwrap();
                return path.strip_prefix(place).unwrap().display().to_string();
            }
        }
    }
    panic!("no {name} in {}", place.display());
}

/// The machine fails: the daemon and all of its jobs are gone.
fn fail(daemon: &mut Daemon) {
    daemon.kill();
    for pid in shepherds(&daemon.data()) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    until("nothing is left", || shepherds(&daemon.data()).is_empty().then_some(()));
}

fn damaged(shown: &Value) -> Vec<u64> {
    let events = shown["events"].as_array().unwrap().iter();
    let damaged = events.filter(|event| event["kind"] == "damaged");
    damaged.map(|event| event["data"]["seq"].as_u64().unwrap()).collect()
}

#[test]
fn an_older_checkpoint_takes_the_place_of_a_damaged_one() {
    let daemon = daemon(&json!({}));
    let id = job(&daemon, false);
    let seq = asleep(&daemon, id);
    // Its keeper lives and brings it back.
    let name = damage(&place(&daemon, id, seq), "core-");
    daemon.ok(&["resume", &id.to_string()]);
    until("it is found", || (!damaged(&daemon.show(id)).is_empty()).then_some(()));
    daemon.wait_for(id, "running");
    let shown = end(&daemon, id);
    assert_eq!(damaged(&shown), [seq]);
    let note = shown["note"].as_str().unwrap();
    let wanted = format!("checkpoint {seq} is damaged: {name} is not what was saved");
    assert!(note.contains(&wanted), "{note}");
    let starting = shown["events"].as_array().unwrap().iter();
    let from: Vec<&Value> =
        starting.filter(|event| event["kind"] == "starting").map(|e| &e["data"]["from"]).collect();
    assert!(from.last().unwrap().as_u64().is_some_and(|from| from < seq), "{from:?}");
    assert!(shown["lost_ms"].as_i64().unwrap() > 0, "{shown}");
}

#[test]
fn files_of_the_job_are_compared_as_well() {
    let mut daemon = daemon(&json!({}));
    let id = job(&daemon, true);
    let seq = asleep(&daemon, id);
    fail(&mut daemon);
    let name = damage(&place(&daemon, id, seq), "count");
    assert_eq!(name, "work/count");
    daemon.launch();
    daemon.ok(&["resume", &id.to_string()]);
    until("it is found", || (!damaged(&daemon.show(id)).is_empty()).then_some(()));
    daemon.wait_for(id, "running");
    let shown = end(&daemon, id);
    assert_eq!(damaged(&shown), [seq]);
    assert!(
        shown["note"].as_str().unwrap().contains("work/count is not what was saved"),
        "{shown}"
    );
}

/// What is left of a checkpoint that was being removed is none.
#[test]
fn what_is_left_of_a_checkpoint_does_not_stand_in_the_way() {
    let daemon = Daemon::start(&["--means", "checkpoint"]);
    let id = job(&daemon, false);
    daemon.wait_for_output(id, "0\n");
    daemon.ok(&["preempt", &id.to_string()]);
    let seq = until("it is on disk", || daemon.show(id)["checkpoint"].as_u64());
    for entry in std::fs::read_dir(place(&daemon, id, seq)).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => std::fs::remove_dir_all(path).unwrap(),
            false if path.ends_with("durable") => {}
            false => std::fs::remove_file(path).unwrap(),
        }
    }
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "running");
    assert!(!place(&daemon, id, seq).exists());
    let shown = end(&daemon, id);
    let note = shown["note"].as_str().unwrap();
    assert!(note.contains("record.json is missing") && note.contains("it begins again"), "{note}");
}

#[test]
fn a_job_of_which_nothing_is_whole_begins_again_or_fails() {
    for begins_again in [true, false] {
        let mut daemon = daemon(&json!({ "begins_again": begins_again }));
        let id = job(&daemon, false);
        let seq = asleep(&daemon, id);
        fail(&mut daemon);
        // All build on the first.
        let mut first = seq;
        while let Some(before) = base(&daemon, id, first) {
            first = before;
        }
        damage(&place(&daemon, id, first), "core-");
        daemon.launch();
        daemon.ok(&["resume", &id.to_string()]);
        let wanted = format!("checkpoint {first} is damaged");
        if begins_again {
            until("it is found", || (!damaged(&daemon.show(id)).is_empty()).then_some(()));
            daemon.wait_for(id, "running");
            let shown = end(&daemon, id);
            assert!(shown["note"].as_str().unwrap().contains(&wanted), "{shown}");
        } else {
            let job = daemon.wait_for(id, "failed");
            let note = job["note"].as_str().unwrap();
            assert!(note.contains(&wanted) && note.contains("do not begin again"), "{note}");
            assert_eq!(job["exit"], 125);
        }
    }
}
