//! A migration that somebody ends, or whose programs end, in one of its phases: who has the tasks afterwards, and how it is
//! found out.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{Counter, Host, Killed, child_of, judge, pids_of, state_of, wait_until};

/// A migration whose restore has come to a point, and waits there.
struct Held {
    here: Host,
    there: Host,
    counter: Counter,
    migration: Child,
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
    fn start(mode: &str, point: &str, then: &str) -> Self {
        Self::start_with(mode, point, then, &[])
    }

    fn start_with(mode: &str, point: &str, then: &str, more: &[&str]) -> Self {
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

    fn release(&self) {
        fs::write(self.here.path("released"), "").unwrap();
    }

    /// Whether it counts here, and nowhere else.
    fn is_here(&self, runs: bool) -> bool {
        self.counter.running() == [(self.counter.pid, runs)]
    }

    fn is_clean(&self) -> bool {
        let agent = self.there.agent.as_ref().map(Child::id);
        self.here.is_clean() && self.there.is_clean() && agent.is_none_or(has_no_children)
    }

    /// Lets the destination go on: it writes down that the tasks stayed, both ends tidy up, and nothing is left.
    fn ends_here(&self, mode: &str, point: &str) {
        self.release();
        wait_until("it is written down", || self.there.phases("destination") == ["stayed"]);
        wait_until(&format!("{mode} at {point}: both tidy up"), || self.is_clean());
        assert!(self.is_here(true), "{mode} at {point}");
        self.leaves_nothing_around();
    }

    /// No mount and no rule is left at either end.
    fn leaves_nothing_around(&self) {
        assert_eq!(both_around(&self.here, &self.there, &self.counter), self.before);
    }

    /// Kills the command and the process that looks on: nobody is left to decide, and the tasks stay stopped.
    fn abandon(&mut self) {
        wait_until("it is written down", || self.here.phases("source") == ["deciding"]);
        let watches = pids_of(&["--watch", "one", self.here.path("state").to_str().unwrap()]);
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
    fn resolve(&self, more: &[&str]) -> String {
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

/// Phases before the decision: the mode, the point that the restore waits at, whether the tasks are stopped here.
const PHASES: [(&str, &str, bool); 5] = [
    // The tree is being built while it still runs here.
    ("pipelined", "setup-namespaces", false),
    ("hybrid", "setup-namespaces", false),
    // All of it is there, and is being made.
    ("stop-and-copy", "setup-namespaces", true),
    ("pre-copy", "setup-namespaces", true),
    // The same, and its pages are being fetched.
    ("post-copy", "setup-namespaces", true),
];

/// The tasks go on at once, whatever the destination is at; then nothing is left there.
#[test]
fn cancelled_in_each_phase_it_goes_on_here() {
    for (mode, point, is_stopped) in PHASES {
        let mut held = Held::start(mode, point, "true");
        let stopped = (held.counter.pid, false);
        assert!(!is_stopped || held.counter.running().contains(&stopped), "{mode} at {point}");
        let (begun, count) = (Instant::now(), held.counter.count());
        let cancel = held.here.migrate(&["--cancel", "one"]).spawn().unwrap();
        if is_stopped {
            wait_until("it counts on", || held.counter.count() > count);
            println!(
                "{mode}: it counts {:.0} ms after --cancel",
                begun.elapsed().as_secs_f64() * 1e3
            );
        }
        let cancelled = cancel.wait_with_output().unwrap();
        assert!(cancelled.status.success(), "{mode} at {point}: {cancelled:?}");
        assert!(String::from_utf8_lossy(&cancelled.stdout).contains("it goes on here"));
        held.counter.goes_on();
        assert!(!held.migration.wait().unwrap().success());
        assert_eq!(held.here.phases("source"), ["stayed"]);
        assert!(held.is_here(true), "{mode} at {point}");
        held.ends_here(mode, point);
    }
}

/// An agent that neither ends nor goes on: the tasks go on without it, and when it does, nothing is left there.
#[test]
fn an_agent_that_hangs_is_not_waited_for() {
    for (mode, point, _) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        let agent = Pid::from_child(held.there.agent.as_ref().unwrap());
        kill_process(agent, Signal::STOP).unwrap();
        let failed = held.migration.wait().unwrap();
        assert!(!failed.success(), "{mode} at {point}");
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode} at {point}");
        kill_process(agent, Signal::CONT).unwrap();
        held.ends_here(mode, point);
    }
}

/// Neither the agent nor the command goes on, and the destination has not been told to go: nobody need be asked.
#[test]
fn an_agent_and_a_command_that_hang_are_not_waited_for() {
    for (mode, point, is_stopped) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        if mode == "post-copy" {
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        }
        let agent = Pid::from_child(held.there.agent.as_ref().unwrap());
        [agent, Pid::from_child(&held.migration)]
            .into_iter()
            .for_each(|pid| kill_process(pid, Signal::STOP).unwrap());
        assert!(!is_stopped || held.counter.running().contains(&(held.counter.pid, false)));
        assert!(!held.migration.wait().unwrap().success(), "{mode} at {point}");
        held.counter.goes_on();
        wait_until(&format!("{mode} at {point}: it is decided"), || {
            held.here.phases("source") == ["stayed"]
        });
        kill_process(agent, Signal::CONT).unwrap();
        held.ends_here(mode, point);
    }
}

/// A command that neither ends nor goes on is ended by the process that looks on: the tasks go on, and the agent has
/// let them go.
#[test]
fn a_command_that_hangs_is_ended() {
    for (mode, point, _) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        kill_process(Pid::from_child(&held.migration), Signal::STOP).unwrap();
        wait_until(&format!("{mode} at {point}: it is decided"), || {
            held.here.phases("source") == ["stayed"]
        });
        held.counter.goes_on();
        assert!(!held.migration.wait().unwrap().success());
        held.ends_here(mode, point);
    }
}

/// Agent and command say that they live while they are busy with something that takes longer than is waited for.
#[test]
fn who_is_busy_does_not_hang() {
    let (here, mut there) = (Host::new(), Host::new());
    // The time itself is what is borne here.
    let long = "--script=test $TORPOR_STAGE = moved || sleep 5";
    there.options.push(long.to_owned());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let args = ["--pid", &counter.pid.to_string(), "--patience", "3", "--json", long];
    judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap();
    counter.goes_on();
    assert_eq!(there.phases("destination"), ["moved"]);
}

/// A tree is built for longer than anybody would wait for an answer, and the agent says meanwhile that it lives.
#[test]
fn building_takes_as_long_as_it_takes() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        println!("left out, TORPOR_LONG=1 has it take more than two minutes");
        return;
    }
    let (here, mut there) = (Host::new(), Host::new());
    // The time itself is what is borne here.
    let script = "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || sleep 130";
    for word in ["--action-script", script] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    let counter = Counter::start(100, 1);
    here.moves(counter.pid, "pipelined", &there.address).unwrap();
    counter.goes_on();
    assert_eq!(there.phases("destination"), ["moved"]);
}

/// Somebody cancels while a script of the user's hangs: it ends, with what it has started.
#[test]
fn a_script_that_hangs_can_be_cancelled() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    // Nobody else sleeps for so long.
    let sleeps = format!("100000.{}", std::process::id());
    let script = format!(
        "test $TORPOR_STAGE != stopped || {{ sleep {sleeps} & touch {}; wait; }}",
        here.path("reached").display()
    );
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--script", &script];
    let mut migration = here.migrate(&args).arg(&there.address).spawn().unwrap();
    wait_until("the script hangs", || here.path("reached").exists());
    assert_eq!(counter.running(), [(counter.pid, false)]);
    let cancelled = here.migrate(&["--cancel", "one"]).output().unwrap();
    assert!(cancelled.status.success(), "{cancelled:?}");
    assert!(!migration.wait().unwrap().success());
    counter.goes_on();
    assert_eq!(here.phases("source"), ["stayed"]);
    wait_until("nothing of the script is left", || pids_of(&["sleep", &sleeps]).is_empty());
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// The same of a script of the agent's, when the source has given up: nothing is left there.
#[test]
fn a_script_of_the_agent_that_hangs_is_ended() {
    for mode in ["pre-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        // Nobody else sleeps for so long.
        let sleeps = format!("200000.{}", std::process::id());
        let [reached, back] = ["reached", "back"].map(|name| here.path(name));
        there.options.push(format!(
            "--script=case $TORPOR_STAGE in arriving) sleep {sleeps} & touch {}; wait;; stayed) touch {};; esac",
            reached.display(),
            back.display()
        ));
        there.start_agent();
        let counter = Counter::start(100, 1);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--id", "one", "--mode", mode, &there.address];
        let mut migration = here.migrate(&args).spawn().unwrap();
        wait_until("the script hangs", || reached.exists());
        let cancelled = here.migrate(&["--cancel", "one"]).output().unwrap();
        assert!(cancelled.status.success(), "{mode}: {cancelled:?}");
        assert!(!migration.wait().unwrap().success());
        counter.goes_on();
        wait_until("it has ended", || pids_of(&["sleep", &sleeps]).is_empty());
        wait_until("the addresses go back", || back.exists());
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(there.phases("destination"), ["stayed"]);
    }
}

/// The round after which the tree is built, and what rounds bring of its structure.
#[test]
fn it_is_built_when_that_was_asked_for() {
    for (more, rounds, is_stopped) in [
        (&["--max-downtime", "0"][..], 1, false),
        (&["--max-downtime", "0", "--start-restore-after", "2"], 2, false),
        (&["--max-downtime", "0", "--max-rounds", "2", "--start-restore-after", "9"], 3, true),
    ] {
        for state in ["global", "full"] {
            let more = [more, &["--state", state]].concat();
            let held = Held::start_with("pipelined", "setup-namespaces", "true", &more);
            let stopped = (held.counter.pid, false);
            assert_eq!(held.counter.running().contains(&stopped), is_stopped, "{more:?}");
            let round = |number: u32| held.here.path(&format!("work/source/one/{number}"));
            assert!(round(rounds).exists() && !round(rounds + 1).exists(), "{more:?}");
            if rounds > 1 {
                let images = fs::read_dir(round(2)).unwrap().flatten();
                let has_core = images
                    .map(|it| it.file_name())
                    .any(|name| name.to_str().is_some_and(|name| name.starts_with("core-")));
                assert_eq!(has_core, state == "full", "{more:?}");
            }
        }
    }
}

/// An agent is gone before its tasks have their pages: the user is told for how long another one is waited for, and what to
/// do. The next agent says that they have stayed.
#[test]
fn who_waits_for_pages_to_go_is_told_until_when() {
    for mode in ["post-copy", "hybrid"] {
        let mut held = Held::start_with(mode, "pre-resume", "false", &["--patience", "3"]);
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        held.there.stop_agent();
        let mut said = BufReader::new(held.migration.stderr.take().unwrap()).lines();
        let is_lost = |line: &String| line.contains("is lost: the tasks wait for another one");
        let lost = said.by_ref().map(Result::unwrap).find(is_lost).expect("it says nothing");
        assert!(lost.contains(&format!("the connection to {}", held.there.address)), "{lost}");
        let is_told = |line: &String| line.contains("wait for their pages");
        let told = said.by_ref().map(Result::unwrap).find(is_told).expect("it says nothing");
        assert!(told.contains(&format!("one: no connection to {}", held.there.address)), "{told}");
        assert!(told.contains("it is tried for another 23 h 59 min"), "{told}");
        let kill = format!("kill -KILL {}", held.migration.id());
        assert!(told.contains(&format!("{kill}; torpor migrate --resolve one --keep-here")));
        held.release();
        held.there.start_agent();
        let asked = format!("asking the agent at {} what it has done", held.there.address);
        assert!(said.map(Result::unwrap).any(|line| line.contains(&asked)), "{mode}");
        assert!(!held.migration.wait().unwrap().success());
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode}");
        assert_eq!(held.there.phases("destination"), ["stayed"], "{mode}");
        assert!(held.is_here(true), "they run on");
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
    }
}

/// Processes of the destination that can be killed by themselves, each by the way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Agent,
    /// What stands between the agent and the pid namespace of the tasks.
    Nest,
    /// What makes the tasks.
    Restore,
    /// What brings the pages in.
    Pager,
    /// What looks after the pager.
    Watcher,
    BothPagers,
}

impl Held {
    /// Processes below the agent.
    fn below_agent(&self) -> Vec<i32> {
        let agent = self.there.agent.as_ref().unwrap().id().cast_signed();
        let mut all = vec![agent];
        let mut next = 0;
        while let Some(&pid) = all.get(next) {
            next += 1;
            all.extend(torpor_kernel::proc::children_of(pid));
        }
        all.split_off(1)
    }

    /// The two processes of the pager, the one that works first.
    fn pagers(&self) -> [i32; 2] {
        let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let all = self.below_agent();
        let pager = *all.iter().find(|&&pid| name(pid) == "torpor-pager\n").expect("no pager");
        [pager, torpor_kernel::proc::stat(pager).unwrap().ppid]
    }

    /// Waits until the tasks there have all their memory, whether they run yet or not.
    fn wait_for_pages(&self) {
        let [pager, _] = self.pagers();
        let lacks = || {
            let fds = fs::read_dir(format!("/proc/{pager}/fd")).unwrap().flatten();
            let mut links = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
            links.any(|link| link.as_os_str() == "anon_inode:[userfaultfd]")
        };
        wait_until("all pages are there", || !lacks());
    }

    fn kill(&mut self, victim: Victim) {
        let agent = self.there.agent.as_ref().unwrap().id();
        let find = |word| support::descendant(agent, word).unwrap();
        let pids = match victim {
            Victim::Agent => return self.there.stop_agent(),
            Victim::Nest => vec![find("nest")],
            Victim::Restore => vec![child_of(find("init").cast_unsigned())],
            Victim::Pager => vec![self.pagers()[0]],
            Victim::Watcher => vec![self.pagers()[1]],
            Victim::BothPagers => self.pagers().to_vec(),
        };
        let pids: Vec<Pid> = pids.into_iter().filter_map(Pid::from_raw).collect();
        pids.iter().for_each(|&pid| kill_process(pid, Signal::KILL).unwrap());
        let is_over =
            |pid: &Pid| !matches!(state_of(pid.as_raw_nonzero().get()), Some('R' | 'S' | 'D'));
        wait_until("they have ended", || pids.iter().all(is_over));
    }

    /// Both hosts come to the same end, an agent that was killed being followed by another one.
    fn has_moved(&mut self, what: &str) {
        if self.there.agent.is_none() {
            self.there.start_agent();
        }
        let mut said = String::new();
        self.migration.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.migration.wait().unwrap().success(), "{what}: {said}");
        assert!(self.counter.running().iter().all(|&(pid, _)| pid != self.counter.pid), "{what}");
        self.counter.goes_on();
        wait_until("it is written down", || self.there.phases("destination") == ["moved"]);
        assert_eq!(self.here.phases("source"), ["moved"], "{what}");
        wait_until("both tidy up", || self.here.is_clean() && self.there.is_clean());
    }
}

/// Whatever has made the tasks can be killed when they run: they go on. In the lazy modes the source has ended its own by then.
#[test]
fn who_is_killed_when_the_tasks_run_takes_none_along() {
    for mode in ["pre-copy", "pipelined", "post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Nest, Victim::Restore] {
            let mut held = Held::start(mode, "post-resume", "true");
            if ["post-copy", "hybrid"].contains(&mode) {
                wait_until("it has ended here", || {
                    held.counter.running().iter().all(|&(pid, _)| pid != held.counter.pid)
                });
            }
            held.kill(victim);
            held.release();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// All pages are there when the agent is killed, or who looks after the pager, and then the tasks begin to run: they go on there.
#[test]
fn who_has_all_pages_goes_on_there() {
    for mode in ["post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Watcher] {
            let mut held = Held::start(mode, "pre-resume", "true");
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
            held.wait_for_pages();
            held.kill(victim);
            held.release();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// The source has been told that all pages are there, and has not ended its tasks yet: nobody at the destination ends those there.
#[test]
fn nobody_ends_what_the_source_may_have_given_up() {
    for mode in ["post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Pager, Victim::Watcher, Victim::BothPagers] {
            let mut held = Held::start(mode, "pre-resume", "true");
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
            held.wait_for_pages();
            let dump = support::descendant(held.migration.id(), "worker").unwrap();
            let dump = Pid::from_raw(dump).unwrap();
            kill_process(dump, Signal::STOP).unwrap();
            held.release();
            let mark = held.there.path("taken/one/post-resume");
            wait_until("they run there, and lack nothing", || mark.exists());
            held.kill(victim);
            kill_process(dump, Signal::CONT).unwrap();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// A pager that is killed before they run ends them, though all pages are there: the source has not been told so.
#[test]
fn a_pager_that_is_killed_before_the_tasks_run_has_them_go_on_here() {
    for mode in ["post-copy", "hybrid"] {
        let mut held = Held::start(mode, "pre-resume", "true");
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        held.wait_for_pages();
        held.kill(Victim::Pager);
        wait_until("none is left there", || held.is_here(false));
        held.release();
        assert!(!held.migration.wait().unwrap().success(), "{mode}");
        held.counter.goes_on();
        assert!(held.is_here(true), "{mode}");
        assert_eq!((held.here.phases("source"), held.there.phases("destination")), both("stayed"));
        wait_until("both tidy up", || held.is_clean());
    }
}

/// The destination was told to let the tasks run: the command waits for what becomes of that.
#[test]
fn when_it_is_decided_it_is_too_late_to_cancel() {
    let mut held = Held::start("pipelined", "pre-resume", "true");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    let mut cancel = held.here.migrate(&["--cancel", "one"]);
    let cancel = cancel.spawn().unwrap();
    held.release();
    let output = cancel.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("too late: it has moved"), "{said}");
    assert!(held.migration.wait().unwrap().success());
    held.counter.goes_on();
    assert_eq!(held.here.phases("source"), ["moved"]);
    wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
}

/// A destination that was told to let the tasks run and does not say whether they do: the user is told what to do.
#[test]
fn who_waits_for_the_decision_is_told_what_to_do() {
    for mode in ["pre-copy", "post-copy"] {
        let mut held = Held::start_with(mode, "pre-resume", "true", &["--patience", "3"]);
        let mut said = BufReader::new(held.migration.stderr.take().unwrap()).lines();
        let is_told = |line: &String| line.contains("has not said whether they do");
        let told = said.by_ref().map(Result::unwrap).find(is_told).expect("it says nothing");
        let status = format!("torpor agent status {}", held.there.address);
        assert!(told.contains(&status), "{told}");
        let kill = format!("kill -KILL {}", held.migration.id());
        assert!(told.contains(&format!("{kill}; torpor migrate --resolve one --keep-here")));
        assert!(!held.is_here(true), "they run on");
        held.release();
        assert!(held.migration.wait().unwrap().success());
        held.counter.goes_on();
    }
}

/// The destination was told to let the tasks run when everything of the source ended.
#[test]
fn what_is_undecided_is_resolved_by_asking() {
    for (then, decided, phase) in
        [("true", "it has moved", "moved"), ("false", "it goes on here", "stayed")]
    {
        let mut held = Held::start("pre-copy", "pre-resume", then);
        held.abandon();
        held.release();
        assert_eq!(held.resolve(&[]), decided);
        held.counter.goes_on();
        assert_eq!(held.is_here(true), phase == "stayed");
        assert_eq!(held.here.phases("source"), [phase]);
        assert_eq!(held.there.phases("destination"), [phase]);
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
        // Asked again, it says the same.
        assert!(held.resolve(&[]).contains(if phase == "moved" { "moved" } else { "here" }));
    }
}

/// What is decided counts though one of both cannot write it down, and the record says so when it can be written again.
#[test]
fn what_is_decided_counts_without_a_record() {
    for (mode, side, then) in [
        ("pre-copy", "source", "true"),
        ("pre-copy", "source", "false"),
        ("post-copy", "source", "true"),
        ("pre-copy", "destination", "true"),
        ("post-copy", "destination", "true"),
        ("pre-copy", "destination", "false"),
    ] {
        let mut held = Held::start(mode, "pre-resume", then);
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        let host = if side == "source" { &held.here } else { &held.there };
        let new = host.path(&format!("state/{side}/one.new"));
        fs::create_dir(&new).unwrap();
        held.release();
        let has_moved = then == "true";
        assert_eq!(held.migration.wait().unwrap().success(), has_moved, "{mode} {side}");
        held.counter.goes_on();
        assert_eq!(held.is_here(true), !has_moved, "{mode} {side}");
        wait_until("both tidy up", || held.here.is_clean() && held.there.is_clean());
        fs::remove_dir(new).unwrap();
        held.there.stop_agent();
        held.there.start_agent();
        held.resolve(&[]);
        let phase = if has_moved { "moved" } else { "stayed" };
        assert_eq!(held.here.phases("source"), [phase], "{mode} {side}");
        assert_eq!(held.there.phases("destination"), [phase], "{mode} {side}");
        held.counter.goes_on();
    }
}

/// An agent that has lost its records, or is another one, decides nothing, and so the tasks run at one place only.
#[test]
fn who_does_not_know_does_not_decide() {
    let mut held = Held::start("pre-copy", "pre-resume", "true");
    held.abandon();
    held.release();
    wait_until("it runs there", || held.there.phases("destination") == ["moved"]);
    let (state, away) = (held.there.path("state"), held.there.path("away"));
    let stays = |held: &Held| {
        let error = judge(&held.here.migrate(&["--resolve", "one"]).output().unwrap()).unwrap_err();
        assert!(error.contains("does not know of it"), "{error}");
        assert!(
            error.contains("--state-dir that it had") && error.contains("--keep-here"),
            "{error}"
        );
        assert_eq!(held.here.phases("source"), ["deciding"]);
        let (here, there): (Vec<_>, Vec<_>) =
            held.counter.running().into_iter().partition(|&(pid, _)| pid == held.counter.pid);
        assert_eq!(here, [(held.counter.pid, false)]);
        assert!(there.len() == 1 && there[0].1, "{there:?}");
    };
    held.there.stop_agent();
    fs::rename(&state, &away).unwrap();
    held.there.start_agent();
    stays(&held);
    // Another one that has the number of the migration, and says that it has not come.
    let record = fs::read_to_string(away.join("destination/one.json")).unwrap();
    let other = record.replace("\"moved\"", "\"stayed\"");
    assert_ne!(record, other);
    fs::create_dir_all(state.join("destination")).unwrap();
    fs::write(state.join("destination/one.json"), other).unwrap();
    stays(&held);
    held.there.stop_agent();
    fs::remove_dir_all(&state).unwrap();
    fs::rename(&away, &state).unwrap();
    held.there.start_agent();
    assert_eq!(held.resolve(&[]), "it has moved");
    wait_until("it has ended here", || held.counter.running().len() == 1);
    assert!(!held.is_here(true));
    held.counter.goes_on();
}

/// While a process looks on that asks an agent that is gone, the user may know better.
#[test]
fn a_lost_destination_is_not_waited_for() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
    held.migration.kill().unwrap();
    held.migration.wait().unwrap();
    held.there.stop_agent();
    held.release();
    assert_eq!(held.resolve(&["--keep-here"]), "it goes on here");
    held.counter.goes_on();
    let state = held.here.path("state");
    wait_until("nobody looks on any more", || {
        pids_of(&["--watch", "one", state.to_str().unwrap()]).is_empty()
    });
}

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

fn both(phase: &str) -> (Vec<String>, Vec<String>) {
    (vec![phase.to_owned()], vec![phase.to_owned()])
}

/// What the user has stopped stays stopped when a migration fails, and everything else goes on.
#[test]
fn what_was_stopped_before_stays_so() {
    const STOPS: &str = "sleep 100000 & kill -STOP $!; exec \"$@\"";
    let plain = ["setsid", "sh", "-c", STOPS, "sh"];
    let own_pids = [&["setsid", "unshare", "--pid", "--fork"], &plain[1..]].concat();
    for (prefix, mode) in
        [(&plain[..], "stop-and-copy"), (&plain, "post-copy"), (&own_pids, "pipelined")]
    {
        let (here, mut there) = (Host::new(), Host::new());
        for word in ["--action-script", "test $CRTOOLS_SCRIPT_ACTION != pre-resume"] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let mut counter = Counter::start_under(prefix, 100, 1);
        if prefix == own_pids {
            counter.pid = child_of(counter.child.id());
        }
        let stopped = Killed(child_of(counter.pid.cast_unsigned()));
        wait_until("it is stopped", || state_of(stopped.0) == Some('T'));
        let error = here.moves(counter.pid, mode, &there.address).unwrap_err();
        assert!(error.contains("they go on here"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        assert_eq!(state_of(stopped.0), Some('T'), "{mode}");
        assert_eq!(here.phases("source"), ["stayed"]);
        // Nothing but that keeps it.
        kill_process(Pid::from_raw(stopped.0).unwrap(), Signal::CONT).unwrap();
        wait_until("it goes on", || state_of(stopped.0) == Some('S'));
    }
}

/// Only the user can know that the other host is lost for good.
#[test]
fn a_lost_destination_is_not_asked_on_demand() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.there.stop_agent();
    held.release();
    wait_until("the restore has ended", || held.counter.running().len() == 1);
    assert!(held.is_here(false), "nobody has decided");
    assert_eq!(held.resolve(&["--keep-here"]), "it goes on here");
    held.counter.goes_on();
    assert!(held.is_here(true));
    // When it comes back, its agent says the same.
    held.there.start_agent();
    assert_eq!(held.there.phases("destination"), ["stayed"]);
}

/// A host that was restarted has none of the tasks: whoever has their ids now is left alone.
#[test]
fn after_a_restart_of_the_host_nothing_is_signalled() {
    let mut held = Held::start("pre-copy", "pre-resume", "false");
    held.abandon();
    held.release();
    let path = held.here.path("state/source/one.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert!(record["boot"].is_string(), "{record}");
    record["boot"] = json!("another");
    fs::write(&path, record.to_string()).unwrap();
    assert!(held.resolve(&[]).contains("ended when this host was restarted"));
    assert!(held.is_here(false), "it is another task now, and was not told to go on");
    kill_process(Pid::from_raw(held.counter.pid).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn an_agent_lists_what_has_come_and_what_has_not() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let refused = Counter::start(100, 1);
    let pid = refused.pid.to_string();
    let args = ["--pid", &pid, "--id", "first", "--dump-option=--no-such-option"];
    judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap_err();
    let counter = Counter::start(100, 1);
    let report = here.moves(counter.pid, "pre-copy", &there.address).unwrap();
    let mut status = std::process::Command::new(support::torpor());
    status.args(["agent", "status", &there.address]);
    let text = String::from_utf8(status.output().unwrap().stdout).unwrap();
    let output = status.arg("--json").output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = said.as_array().unwrap();
    assert_eq!(all.len(), 2, "{said}");
    for (id, phase, pid) in [
        (json!("first"), "stayed", Value::Null),
        (report["id"].clone(), "moved", report["pid"].clone()),
    ] {
        let it = all.iter().find(|it| it["id"] == id).unwrap();
        assert_eq!((&it["phase"], &it["pid"]), (&json!(phase), &pid), "{said}");
        let line = text.lines().find(|line| line.contains(id.as_str().unwrap())).unwrap();
        assert!(line.contains(phase) && line.contains("process"), "{text}");
    }
    counter.goes_on();
}

/// An agent of a later time, which speaks nothing that this program does.
#[test]
fn another_version_of_the_protocol_is_refused() {
    let here = Host::new();
    let path = here.path("later.socket");
    let listener = UnixListener::bind(&path).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let versions = [900_u16, 901].map(u16::to_le_bytes).concat();
        stream.write_all(&[b"torpor-m".as_slice(), &versions].concat()).unwrap();
        // Until the other end has gone.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let counter = Counter::start(100, 1);
    let to = format!("unix:{}", path.display());
    let error = here.moves(counter.pid, "pipelined", &to).unwrap_err();
    assert!(error.contains("version") && error.contains("900"), "{error}");
    answering.join().unwrap();
    counter.goes_on();
    assert!(here.phases("source").is_empty() && here.is_clean());
}
