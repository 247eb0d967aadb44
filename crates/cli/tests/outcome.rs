//! `--json`: each command prints how it went as one object, whether it went well or not.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Command, Output};

use serde_json::Value;

mod sleeper;

use sleeper::Sleeper;

/// The one object that a command has printed.
fn object(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// Runs a command of ours to its end.
fn said(args: &[&str]) -> (bool, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    let command = command.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE").args(args);
    let output = command.output().unwrap();
    (output.status.success(), object(&output))
}

#[test]
fn what_was_done() {
    let task = Sleeper::start();
    let dumped = object(&task.dump(&["--json", "--leave-running"]));
    assert_eq!(dumped["class"], "done", "{dumped}");
    assert_eq!(dumped["report"]["tasks"], 1);
    assert!(dumped["report"]["statistics"]["pages_written"].as_u64().unwrap() > 0, "{dumped}");
    // It was stopped, asked in batches, and looked at in procfs.
    for effort in ["stops", "procfs_reads", "allocations"] {
        assert!(dumped["report"]["statistics"][effort].as_u64().unwrap() > 1, "{effort}: {dumped}");
    }
    task.put_to_sleep(&[]);
    let restored = object(&task.restore(&["--json", "-d"]).output().unwrap());
    assert_eq!(restored["report"]["pid"], task.pid, "{restored}");
    assert!(restored["report"]["statistics"]["restore_time"].as_u64().unwrap() > 0);
    let (well, freed) = said(&["dedup", "--json", "-D", task.images()]);
    assert!(well && freed["report"]["statistics"]["freed_bytes"] == 0, "{freed}");
    let (well, _) = said(&["cpuinfo", "dump", "--json", "-D", task.images()]);
    assert!(well);
}

#[test]
fn what_went_wrong() {
    let (well, wrong) = said(&["dump", "--json", "--tree", "no-number"]);
    assert!(!well && wrong["class"] == "usage", "{wrong}");
    assert!(wrong["hint"].as_str().unwrap().contains("--help"));
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    let (well, gone) = said(&["dump", "--json", "-D", images, "--tree", "4194000"]);
    assert!(!well && gone["errno"] == libc::ESRCH, "{gone}");
    let (well, empty) = said(&["restore", "--json", "-d", "-D", images]);
    assert!(!well && empty["class"] == "bad_image", "{empty}");
    assert!(empty["text"].as_str().unwrap().contains("inventory.img"), "{empty}");
    let (well, nobody) = said(&["migrate", "--json", "--pid", "4194000", "127.0.0.1:1"]);
    assert!(!well && nobody["class"] == "refused" && nobody["hint"].is_string(), "{nobody}");
    for form in ["audit", "plan"] {
        let (well, none) = said(&["image", form, "--json", "/nonexistent"]);
        assert!(!well && none["class"] == "bad_image", "{none}");
        assert!(none["text"].as_str().unwrap().contains("/nonexistent"), "{none}");
    }
    let (well, unknown) = said(&["check", "--json", "--feature", "no-such-feature"]);
    assert!(!well && unknown["class"] == "usage", "{unknown}");
    assert!(said(&["check", "--json", "--feature", "mem_dirty_track"]).0);
}
