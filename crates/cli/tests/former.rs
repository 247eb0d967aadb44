//! A dump into a directory that holds a checkpoint: that one is gone only when the new one counts.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};

use torpor_sys::process::wait;

mod sleeper;

use sleeper::{Sleeper, criu, wait_until};

/// The images of a sleeper, and what is in them.
fn images(sleeper: &Sleeper) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(sleeper.dir.path()).unwrap().map(Result::unwrap);
    let images = entries.filter(|entry| entry.path().extension().is_some_and(|e| e == "img"));
    images
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// A checkpoint of a sleeper that goes on.
fn saved() -> (Sleeper, BTreeMap<String, Vec<u8>>) {
    let sleeper = Sleeper::start();
    assert!(sleeper.dump(&["--leave-running"]).status.success(), "{}", sleeper.log("dump.log"));
    let images = images(&sleeper);
    assert!(images.contains_key("inventory.img") && images.len() > 5, "{:?}", images.keys());
    (sleeper, images)
}

fn aside(sleeper: &Sleeper) -> bool {
    sleeper.dir.path().join(".former").exists()
}

/// What a dump of `pid` into the directory of a sleeper says, which does not work out.
fn refused(sleeper: &Sleeper, pid: i32) -> String {
    let mut dump = criu(&["dump", "-t", &pid.to_string(), "-D", sleeper.images()]);
    let output = dump.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// A dump that is held when its images are complete.
fn held(sleeper: &Sleeper) -> Child {
    let script = "[ $CRTOOLS_SCRIPT_ACTION != post-dump ] || \
                  { touch $CRTOOLS_IMAGE_DIR/held; while [ -e $CRTOOLS_IMAGE_DIR/held ]; do sleep 0.01; done; }";
    let pid = sleeper.pid.to_string();
    let mut dump = criu(&["dump", "-t", &pid, "-D", sleeper.images(), "-o", "held.log"]);
    let dump = dump.args(["--leave-running", "--action-script", script]);
    let dump = dump.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until(|| sleeper.dir.path().join("held").exists());
    dump
}

#[test]
#[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
fn a_dump_that_fails_leaves_the_checkpoint_before_it() {
    let (sleeper, before) = saved();
    let zombie = Command::new("true").spawn().unwrap();
    let ended = i32::try_from(zombie.id()).unwrap();
    let state = || fs::read_to_string(format!("/proc/{ended}/stat")).unwrap();
    wait_until(|| state().contains(") Z "));
    let own = i32::try_from(std::process::id()).unwrap();
    // The largest pid that there can be is above this one.
    for (pid, why) in [
        (i32::MAX, "is gone"),
        (ended, "it has ended: nothing is left but its exit status"),
        (own, "it has this command below it: that would be put to sleep"),
        (1, "Error"),
    ] {
        let said = refused(&sleeper, pid);
        assert!(said.contains(why), "{said}");
        assert!(images(&sleeper) == before && !aside(&sleeper), "{pid}");
    }
    wait(ended, true).unwrap();
    // Somebody says no, at first and at last.
    for action in ["pre-dump", "post-dump"] {
        let no = format!("[ $CRTOOLS_SCRIPT_ACTION != {action} ]");
        assert!(!sleeper.dump(&["--action-script", &no]).status.success());
        assert!(images(&sleeper) == before && !aside(&sleeper), "{action}");
    }
    // Another one takes its place.
    assert!(sleeper.dump(&["--leave-running"]).status.success(), "{}", sleeper.log("dump.log"));
    assert!(images(&sleeper) != before && !aside(&sleeper));
    sleeper.put_to_sleep(&[]);
    assert!(sleeper.restore(&["-d"]).status().unwrap().success(), "{}", sleeper.log("restore.log"));
    assert!(!aside(&sleeper) && sleeper.lives());
}

#[test]
fn one_dump_at_a_time_writes_to_a_directory() {
    let (sleeper, _) = saved();
    let other = Sleeper::start();
    let mut first = held(&sleeper);
    let said = refused(&sleeper, other.pid);
    assert!(said.contains("another dump writes there"), "{said}");
    fs::remove_file(sleeper.dir.path().join("held")).unwrap();
    assert!(first.wait().unwrap().success(), "{}", sleeper.log("held.log"));
    assert!(!aside(&sleeper) && sleeper.lives() && other.lives());
    // And when that is over, another one may, though a keeper counts changes of memory.
    let tracked = sleeper.dump(&["--leave-running", "--track-mem"]);
    assert!(tracked.status.success(), "{}", sleeper.log("dump.log"));
    assert!(sleeper.dump(&["--leave-running"]).status.success(), "{}", sleeper.log("dump.log"));
}

#[test]
fn what_a_killed_dump_leaves_aside_is_put_back() {
    let (sleeper, before) = saved();
    let mut killed = held(&sleeper);
    killed.kill().unwrap();
    killed.wait().unwrap();
    fs::remove_file(sleeper.dir.path().join("held")).unwrap();
    wait_until(|| sleeper.sleeps());
    assert!(aside(&sleeper));
    // The new one may be complete or not; without its inventory it is none.
    let _ = fs::remove_file(sleeper.dir.path().join("inventory.img"));
    let output = sleeper.restore(&["-d"]).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the one before it lies in .former"), "{said}");
    let vetoed = ["--action-script", "[ $CRTOOLS_SCRIPT_ACTION != pre-dump ]"];
    assert!(!sleeper.dump(&vetoed).status.success());
    assert!(images(&sleeper) == before && !aside(&sleeper));
}
