//! What decides where tasks run is on stable storage before anything follows from it: a library notes what both hosts
//! sync (the one that the queue's tests lose power with). And if it cannot be written, the tasks run all the same.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use support::{Counter, Host, judge, wait_until};
use tempfile::TempDir;

/// What was synced, by inodes.
struct Noted {
    dir: TempDir,
}

impl Noted {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../queue/tests/power/disk.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-shared", "-fPIC", "-o"]).arg(dir.path().join("disk.so"));
        assert!(cc.arg(source).arg("-ldl").status().unwrap().success());
        fs::create_dir(dir.path().join("synced")).unwrap();
        Self { dir }
    }

    /// The environment of what notes what it syncs below the directory of a host.
    fn env(&self, host: &Host) -> [(&'static str, PathBuf); 3] {
        [
            ("LD_PRELOAD", self.dir.path().join("disk.so")),
            ("TORPOR_DISK", host.dir.path().to_owned()),
            ("TORPOR_DISK_SYNCED", self.dir.path().join("synced")),
        ]
    }

    fn of(&self, path: &Path) -> Vec<u8> {
        fs::read(self.dir.path().join("synced").join(inode(path))).unwrap_or_default()
    }

    /// Whether a record is on stable storage as it is, under its name, and says so.
    fn says(&self, record: &Path, phase: &str) -> bool {
        let text = String::from_utf8(self.of(record)).unwrap();
        let names = String::from_utf8(self.of(record.parent().unwrap())).unwrap();
        let name = record.file_name().unwrap().to_str().unwrap();
        let own = format!("{} f {name}", inode(record));
        text.contains(&format!("\"phase\": \"{phase}\"")) && names.lines().any(|line| line == own)
    }
}

/// What the library calls a file.
fn inode(path: &Path) -> String {
    let meta = fs::symlink_metadata(path).unwrap();
    let born = meta.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    let born = born.unwrap_or_default();
    format!("{}-{}-{}", meta.ino(), born.as_secs(), born.subsec_nanos())
}

#[test]
fn the_decision_is_on_disk_before_it_counts() {
    let noted = Noted::new();
    let (here, mut there) = (Host::new(), Host::new());
    let words = noted.env(&there).map(|(name, value)| format!("{name}={}", value.display()));
    there.prefix = ["env".to_owned()].into_iter().chain(words).collect();
    let [reached, released] = ["reached", "released"].map(|name| here.path(name));
    let script = format!(
        "test $CRTOOLS_SCRIPT_ACTION != pre-resume || \
         {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        reached.display(),
        released.display()
    );
    there.options.extend(["--action-script", &script].map(|it| format!("--restore-option={it}")));
    there.start_agent();
    let mut counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "pre-copy", "--id", "one", "--json", &there.address];
    let migration = here.migrate(&args).envs(noted.env(&here)).spawn().unwrap();
    wait_until("it is about to run there", || reached.exists());
    let records = [(&here, "source"), (&there, "destination")]
        .map(|(host, side)| host.path("state").join(side).join("one.json"));
    for record in &records {
        assert!(noted.says(record, "deciding"), "{}", record.display());
    }
    fs::write(&released, "").unwrap();
    judge(&migration.wait_with_output().unwrap()).unwrap();
    wait_until("it has ended here", || counter.has_ended_here());
    counter.goes_on();
    for record in &records {
        assert!(noted.says(record, "moved"), "{}", record.display());
    }
}

/// The record cannot be written any more when the tasks are stopped: nothing is decided, they go on here, and whoever has taken
/// their addresses away brings them back.
#[test]
fn a_decision_that_cannot_be_written_is_none() {
    for mode in ["pre-copy", "post-copy"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let counter = Counter::start(100, 1);
        let (new, back) = (here.path("state/source/one.new"), here.path("back"));
        let script = format!(
            "case $TORPOR_STAGE in stopped) mkdir {};; stayed) touch {};; esac",
            new.display(),
            back.display()
        );
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--id", "one", "--mode", mode, "--script", &script];
        let error = judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap_err();
        assert!(error.contains("record"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        assert!(back.exists(), "{mode}: nobody has brought the addresses back: {error}");
        wait_until("the agent notices", || there.phases("destination") == ["stayed"]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        // There is room again.
        fs::remove_dir(new).unwrap();
        let said = judge(&here.migrate(&["--resolve", "one", "--json"]).output().unwrap()).unwrap();
        assert_eq!(
            (said["decided"].as_str().unwrap(), here.phases("source")),
            ("it has stayed here", vec!["stayed".to_owned()])
        );
    }
}
