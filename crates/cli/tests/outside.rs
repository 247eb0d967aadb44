//! Files that a task has opened before it entered a mount namespace: no mount of the tree's is theirs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};

mod sleeper;

use sleeper::{Sleeper, WITHOUT_MOUNTS_OF_OTHERS};

/// The mounts of this host come back as they are.
const MOUNTS: [&str; 2] = ["--external", "mnt[]:ms"];

/// A task that has opened `here/file`, and has made mounts in a namespace of its own since.
fn opened_before(dir: &Path, mounts: &str) -> Sleeper {
    for name in ["here", "there"] {
        fs::create_dir(dir.join(name)).unwrap();
    }
    fs::write(dir.join("here/file"), "text").unwrap();
    let inside =
        format!("{WITHOUT_MOUNTS_OF_OTHERS} cd {}; {mounts}; exec sleep 1000", dir.display());
    let script = "cd $1; exec 3<>here/file; exec unshare --mount sh -ec \"$2\"";
    Sleeper::start_as(&["sh", "-ec", script, "sh", dir.to_str().unwrap(), &inside])
}

fn third(task: &Sleeper) -> PathBuf {
    fs::read_link(format!("/proc/{}/fd/3", task.pid)).unwrap()
}

#[test]
fn another_mount_of_the_same_directory_leads_there() {
    let dir = tempfile::tempdir().unwrap();
    let task = opened_before(dir.path(), "mount --bind here there; mount -t tmpfs hides here");
    task.put_to_sleep(&MOUNTS);
    let output = task.restore(&MOUNTS).arg("-d").output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert_eq!(third(&task), dir.path().join("there/file"));
    assert_eq!(fs::read(format!("/proc/{}/fd/3", task.pid)).unwrap(), b"text");
}

#[test]
fn one_that_no_path_leads_to_is_left_to_the_caller_as_the_refusal_says() {
    let dir = tempfile::tempdir().unwrap();
    let task = opened_before(dir.path(), "mount -t tmpfs hides here");
    assert!(!task.dump(&MOUNTS).status.success());
    let log = task.log("dump.log");
    let (_, advice) = log.split_once("where no path leads to it; ").expect(&log);
    let words: Vec<&str> = advice.split_whitespace().collect();
    let after = |option: &str| words[words.iter().position(|word| *word == option).unwrap() + 1];
    let (external, inherit) = (after("--external"), after("--inherit-fd"));
    task.put_to_sleep(&[MOUNTS[0], MOUNTS[1], "--external", external]);

    let given = fs::File::options().read(true).write(true).open(dir.path().join("here/file"));
    // As its standard input: nothing else that is started meanwhile has it.
    let inherit = inherit.replace("[N]", "[0]");
    let mut restore = task.restore(&MOUNTS);
    let output = restore.args(["-d", "--inherit-fd", &inherit]).stdin(given.unwrap()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert_eq!(third(&task), dir.path().join("here/file"));
    assert_eq!(fs::read(format!("/proc/{}/fd/3", task.pid)).unwrap(), b"text");
}
