//! A migration whose restore waits at a point of its work.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, kill_process};

use super::support::{Counter, Host, judge, pids_of, wait_until};

/// A migration whose restore has come to a point, and waits there.
pub(super) struct Held {
    pub(super) here: Host,
    pub(super) there: Host,
    pub(super) counter: Counter,
    pub(super) migration: Child,
    /// Mounts and rules of both ends before it began.
    before: [Around; 2],
}

/// The mounts of a test and the rules around a process.
type Around = Vec<String>;

/// What is around a process that has a network of its own. Mounts below other directories than these come and go with
/// other tests.
fn around(pid: i32, dirs: [&Path; 3]) -> Around {
    let rules = Command::new("nsenter")
        .args(["--net", "--target", &pid.to_string(), "nft", "list", "ruleset"])
        .output()
        .unwrap();
    assert!(rules.status.success(), "{rules:?}");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let is_own = |line: &&str| dirs.iter().any(|dir| line.contains(dir.to_str().unwrap()));
    let own = mounts.lines().filter(is_own);
    let mut all: Vec<String> = own.map(|line| line.split(' ').skip(3).collect()).collect();
    all.push(String::from_utf8(rules.stdout).unwrap());
    all
}

/// What is around the tasks here, and around the agent.
fn both_around(here: &Host, there: &Host, counter: &Counter) -> [Around; 2] {
    let agent = there.agent.as_ref().unwrap().id().cast_signed();
    let dirs = [&here.dir, &there.dir, &counter.dir].map(|dir| dir.path());
    [counter.pid, agent].map(|pid| around(pid, dirs))
}

impl Held {
    /// What the restore does at `point` when it is let go: `true` or `false`.
    pub(super) fn start(mode: &str, point: &str, then: &str) -> Self {
        Self::start_with(mode, point, then, &[])
    }

    pub(super) fn start_with(mode: &str, point: &str, then: &str, more: &[&str]) -> Self {
        // Its mounts and rules are nobody else's.
        let (here, mut there) = (Host::new(), Host::apart(&["unshare", "--mount", "--net"]));
        let [reached, released] = ["reached", "released"].map(|name| here.path(name));
        let script = format!(
            "test $CRTOOLS_SCRIPT_ACTION != {point} || \
             {{ touch {}; until test -e {}; do sleep 0.01; done; {then}; }}",
            reached.display(),
            released.display()
        );
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start_under(&["setsid", "unshare", "--net"], 2000, 10);
        let pid = counter.pid.to_string();
        let before = both_around(&here, &there, &counter);
        let args = ["--pid", &pid, "--mode", mode, "--id", "one", &there.address];
        let migration = here.migrate(&args).args(more).spawn().unwrap();
        wait_until(&format!("{mode}: it comes to {point}"), || reached.exists());
        Self { here, there, counter, migration, before }
    }

    pub(super) fn release(&self) {
        fs::write(self.here.path("released"), "").unwrap();
    }

    /// Whether it counts here, and nowhere else.
    pub(super) fn is_here(&self, runs: bool) -> bool {
        self.counter.running() == [(self.counter.pid, runs)]
    }

    pub(super) fn is_clean(&self) -> bool {
        let agent = self.there.agent.as_ref().map(Child::id);
        self.here.is_clean() && self.there.is_clean() && agent.is_none_or(has_no_children)
    }

    /// Lets the destination go on: it writes down that the tasks stayed, both ends tidy up, and nothing is left.
    pub(super) fn ends_here(&self, mode: &str, point: &str) {
        self.release();
        wait_until("it is written down", || self.there.phases("destination") == ["stayed"]);
        wait_until(&format!("{mode} at {point}: both tidy up"), || self.is_clean());
        assert!(self.is_here(true), "{mode} at {point}");
        wait_until("nobody looks on any more", || self.watches().is_empty());
        self.leaves_nothing_around();
    }

    /// No mount and no rule is left at either end.
    pub(super) fn leaves_nothing_around(&self) {
        assert_eq!(both_around(&self.here, &self.there, &self.counter), self.before);
    }

    /// Who looks on.
    pub(super) fn watches(&self) -> Vec<Pid> {
        pids_of(&["--watch", "one", self.here.path("state").to_str().unwrap()])
    }

    /// Kills the command and the process that looks on: nobody is left to decide, and the tasks stay stopped.
    pub(super) fn abandon(&mut self) {
        wait_until("it is written down", || self.here.phases("source") == ["deciding"]);
        let watches = self.watches();
        assert_eq!(watches.len(), 1);
        kill_process(watches[0], Signal::KILL).unwrap();
        self.migration.kill().unwrap();
        self.migration.wait().unwrap();
        // It is woken by the end of the job, to be stopped by the signal that waits for it.
        wait_until("it stays stopped", || {
            self.counter.running().contains(&(self.counter.pid, false))
        });
    }

    /// What `--resolve` says.
    pub(super) fn resolve(&self, more: &[&str]) -> String {
        let args = ["--resolve", "one", "--json"];
        let said = judge(&self.here.migrate(&args).args(more).output().unwrap()).unwrap();
        assert_eq!(said["id"], "one");
        said["decided"].as_str().unwrap().to_owned()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
        let _ = (self.migration.kill(), self.migration.wait());
        if std::thread::panicking() {
            eprintln!("{}", self.there.log());
        }
    }
}

/// Whether none of a process's threads has a child.
fn has_no_children(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    threads
        .map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default())
        .all(|children| children.trim().is_empty())
}

/// What a record says at both ends.
pub(super) fn both(phase: &str) -> (Vec<String>, Vec<String>) {
    (vec![phase.to_owned()], vec![phase.to_owned()])
}
