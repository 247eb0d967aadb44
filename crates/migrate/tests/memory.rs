//! A destination that has too little memory: the tasks go on where they are, nothing of them is left there, and both sides
//! say why.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use support::{Counter, Host, wait_until};

const MODES: [&str; 5] = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];
/// What the agent and all that it starts may have; the files of the programs are not of it for long.
const LIMIT: u64 = 48 << 20;
/// Pages of what moves: twice as much.
const PAGES: u64 = 2 * LIMIT / 4096;

/// A cgroup with a limit on memory. Whoever is in it in the end is killed.
struct Group {
    dir: PathBuf,
}

impl Group {
    /// `None`, and a word about it, where no cgroup limits memory.
    fn new(limit: u64) -> Option<Self> {
        let (version_1, version_2) =
            (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let controllers = fs::read_to_string(version_2.join("cgroup.subtree_control"));
        let has_2 = controllers.is_ok_and(|text| text.split_whitespace().any(|it| it == "memory"));
        let (root, file) = match (version_1.join("cgroup.procs").exists(), has_2) {
            (true, _) => (version_1, "memory.limit_in_bytes"),
            (_, true) => (version_2, "memory.max"),
            _ => {
                println!("left out: a destination with little memory (no cgroup limits it here)");
                return None;
            }
        };
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir = root.join(format!("torpor-test-memory-{}-{number}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let group = Self { dir };
        fs::write(group.dir.join(file), limit.to_string()).unwrap();
        Some(group)
    }

    /// A command that enters it and becomes what follows.
    fn entered(&self) -> [String; 4] {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.dir.display());
        ["sh".to_owned(), "-c".to_owned(), enter, "sh".to_owned()]
    }

    /// As it is called in the hierarchy.
    fn name(&self) -> String {
        format!("/{}", self.dir.file_name().unwrap().display())
    }

    /// From now on the kernel kills all of it when it would kill one. Whether it can do that: version 1 cannot.
    fn dies_as_one(&self) -> bool {
        let file = self.dir.join("memory.oom.group");
        file.exists() && fs::write(file, "1").is_ok()
    }

    /// Whether somebody was killed since the limit was met.
    fn is_short(&self) -> bool {
        let read = |name| fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        let lines = read("memory.oom_control") + &read("memory.events");
        let kills = lines.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.is_some_and(|number| number != "0")
    }

    fn kill_all(&self) {
        wait_until("the group is empty", || {
            for pid in self.procs().into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
            self.procs().is_empty()
        });
    }

    fn procs(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill_all();
        wait_until("the group can be removed", || fs::remove_dir(&self.dir).is_ok());
    }
}

/// Two hosts, of which the second one's agent is in a group with little memory, and tasks that do not fit there.
fn tight() -> Option<(Host, Host, Group, Counter)> {
    let (here, mut there) = (Host::new(), Host::new());
    let group = Group::new(LIMIT)?;
    there.prefix = group.entered().to_vec();
    there.start_agent();
    // They may have run there before their pages were.
    Some((here, there, group, Counter::start_lenient(PAGES, 10)))
}

#[test]
fn tasks_that_do_not_fit_there_stay_here() {
    for mode in MODES {
        let Some((here, there, group, counter)) = tight() else { return };
        let report = here.moves(counter.pid, mode, &there.address);
        let error = report.unwrap_err();
        let said = format!("memory ran out in cgroup {}", group.name());
        assert!(error.contains(&said) && error.contains("more memory"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let agent = there.agent.as_ref().unwrap().id().cast_signed();
        wait_until("only the agent is left there", || group.procs() == [agent]);
    }
}

/// The value that the kernel adds to how large a process is, where it looks for one to kill.
fn score(pid: i64) -> i32 {
    number(Path::new(&format!("/proc/{pid}/oom_score_adj")))
}

fn number(file: &Path) -> i32 {
    fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

/// Whether this test may have a process spared more than others (`CAP_SYS_RESOURCE`).
fn may_spare() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Where memory runs out a job of the agent's is killed, and not the agent. What tasks may bring is told by what the agent
/// has, and they have what they had.
#[test]
fn a_job_is_killed_before_its_agent() {
    // A job that were judged by what it has itself could not bring tasks that are spared.
    let given = if may_spare() { -200 } else { 20 };
    let with_score = format!("echo {given} >/proc/self/oom_score_adj && exec \"$@\"");
    for mode in MODES {
        let (here, mut there) = (Host::new(), Host::new());
        let seen = there.path("seen");
        // Who runs the script is the job.
        let script = format!(
            "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || cat /proc/$PPID/oom_score_adj >{}",
            seen.display()
        );
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.prefix = ["sh", "-c", &with_score, "sh"].map(str::to_owned).to_vec();
        there.start_agent();
        let counter = Counter::start_under(&["setsid", "sh", "-c", &with_score, "sh"], 100, 1);
        let report = here.moves(counter.pid, mode, &there.address).unwrap();
        let agent = there.agent.as_ref().unwrap().id();
        let all = [score(agent.into()), number(&seen), score(report["pid"].as_i64().unwrap())];
        assert_eq!(all, [given, given + 300, given], "{mode}: agent, job, task");
        counter.goes_on();
    }
}

/// The same of a disk there that is full: what comes goes into files.
#[test]
fn tasks_whose_images_do_not_fit_there_stay_here() {
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        let taken = there.path("taken");
        let script = format!(
            "mkdir {0} && mount -t tmpfs -o size=4M full {0} && exec \"$@\"",
            taken.display()
        );
        there.prefix =
            ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
        there.start_agent();
        let counter = Counter::start(5000, 10);
        let error = here.moves(counter.pid, mode, &there.address).unwrap_err();
        assert!(error.contains("No space left on device"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        assert_eq!(here.phases("source"), ["stayed"], "{mode}");
        let agent = there.agent.as_ref().unwrap().id();
        let taken = format!("/proc/{agent}/root{}", taken.display());
        wait_until("there is room again", || fs::read_dir(&taken).unwrap().next().is_none());
        assert_eq!(there.phases("destination"), ["stayed"], "{mode}");
        wait_until("the source tidies up", || here.is_clean());
        let small = Counter::start(100, 1);
        here.moves(small.pid, mode, &there.address).unwrap();
        small.goes_on();
    }
}

/// All that the agent is made of is killed when its limit is met (`memory.oom.group`, `OOMPolicy=kill`): the tasks go on
/// here, and the next agent finds nothing of them.
#[test]
fn an_agent_that_ends_with_all_it_has_started_leaves_nothing() {
    for mode in MODES {
        let Some((here, mut there, group, counter)) = tight() else { return };
        let by_the_kernel = group.dies_as_one();
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, &there.address];
        let mut migration = here.migrate(&args).spawn().unwrap();
        wait_until("one is killed", || group.is_short());
        match by_the_kernel {
            true => wait_until("all are killed", || group.procs().is_empty()),
            false => group.kill_all(),
        }
        there.stop_agent();
        there.prefix.clear();
        there.start_agent();
        assert!(!migration.wait().unwrap().success(), "{mode}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        wait_until("it is written down", || there.phases("destination") == ["stayed"]);
    }
}
