//! Tasks that end where they move to.

use std::fs;
use std::process::{Child, Command, Stdio};

use super::held::both;
use super::support::{Host, judge, wait_until};

/// A program whose last deed is done where it moves to.
struct LastDeed {
    dir: tempfile::TempDir,
    child: Child,
}

impl LastDeed {
    /// It looks all the time whether it is to do it, and ends then.
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = "touch begun; while ! test -e go; do :; done; echo done >>out";
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", script]).current_dir(dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        wait_until("it has begun", || dir.path().join("begun").exists());
        Self { dir, child }
    }

    fn done(&self) -> String {
        fs::read_to_string(self.dir.path().join("out")).unwrap_or_default()
    }
}

impl Drop for LastDeed {
    fn drop(&mut self) {
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// Two hosts, of which the restores of the second one wait at a point, for as long as a file of the first one is missing.
fn waiting_at(point: &str) -> (Host, Host) {
    let (here, mut there) = (Host::new(), Host::new());
    let script = format!(
        "test $CRTOOLS_SCRIPT_ACTION != {point} || {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
        here.path("reached").display(),
        here.path("released").display(),
    );
    for word in ["--action-script", &script] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    (here, there)
}

/// Tasks that end right after they were woken have moved: what they have done is not done again here.
#[test]
fn what_ends_when_it_runs_has_moved() {
    for mode in ["stop-and-copy", "pipelined", "post-copy"] {
        let (here, there) = waiting_at("pre-resume");
        let deed = LastDeed::start();
        let args = ["--pid", &deed.child.id().to_string(), "--mode", mode, "--json"];
        let migration = here.migrate(&args).arg(&there.address).spawn().unwrap();
        wait_until("it is about to run", || here.path("reached").exists());
        fs::write(deed.dir.path().join("go"), "").unwrap();
        fs::write(here.path("released"), "").unwrap();
        judge(&migration.wait_with_output().unwrap()).unwrap();
        wait_until("it has done it", || !deed.done().is_empty());
        assert_eq!(deed.done(), "done\n", "{mode}");
        assert_eq!(here.phases("source"), ["moved"], "{mode}");
        wait_until("it is written down", || there.phases("destination") == ["moved"]);
    }
}

/// The same if the agent ends before it has written that down.
#[test]
fn what_ends_with_the_agent_has_moved() {
    for mode in ["pre-copy", "post-copy", "hybrid"] {
        let (here, mut there) = waiting_at("post-resume");
        let deed = LastDeed::start();
        let pid = deed.child.id().to_string();
        let args = ["--pid", &pid, "--mode", mode, "--id", "one", "--json", &there.address];
        let migration = here.migrate(&args).spawn().unwrap();
        wait_until("it runs there", || here.path("reached").exists());
        let mark = there.path("taken/one/post-resume");
        wait_until("it lacks nothing", || mark.exists());
        fs::write(deed.dir.path().join("go"), "").unwrap();
        wait_until("it has done it", || deed.done() == "done\n");
        there.stop_agent();
        fs::write(here.path("released"), "").unwrap();
        there.start_agent();
        judge(&migration.wait_with_output().unwrap()).unwrap();
        assert_eq!(deed.done(), "done\n");
        assert_eq!((here.phases("source"), there.phases("destination")), both("moved"), "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
    }
}
