//! Trees that move, agents that take them, and the program under test.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod proxy;
pub mod world;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;
use torpor_runtimes_tests::mounts::QUIET;

/// The program, built as the tests are; `TORPOR_BIN` names another one.
pub fn torpor() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(path) = std::env::var_os("TORPOR_BIN") {
            return PathBuf::from(path);
        }
        let me = std::env::current_exe().unwrap();
        let profile = me.parent().unwrap().parent().unwrap();
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--quiet", "--package", "torpor-cli"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        profile.join("torpor")
    })
}

/// A program of the tests, compiled; for 32 bits if its name ends so.
pub fn compiled(dir: &Path, name: &str) -> PathBuf {
    let program = dir.join(name);
    let narrow = name.strip_suffix("-32");
    let source = narrow.unwrap_or(name);
    let source = format!("{}/tests/programs/{source}.c", env!("CARGO_MANIFEST_DIR"));
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    compiler.args(narrow.map(|_| "-m32")).arg("-o").arg(&program);
    assert!(compiler.arg(source).status().unwrap().success());
    program
}

/// Whether there is what programs of 32 bits are made of.
pub fn makes_32_bits() -> bool {
    let mut compiler = Command::new("cc");
    compiler.args(["-m32", "-include", "stdio.h", "-x", "c", "-o", "/dev/null", "-"]);
    let mut compiler = compiler.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdin = compiler.stdin.take().unwrap();
    stdin.write_all(b"int main(void) { return 0; }\n").unwrap();
    drop(stdin);
    compiler.wait().unwrap().success()
}

pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    assert!(comes_true(condition), "it does not come true: {what}");
}

fn comes_true(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// A host: its directories, and its agent when it runs one.
pub struct Host {
    pub dir: TempDir,
    /// What is put before the agent's command.
    pub prefix: Vec<String>,
    pub options: Vec<String>,
    pub listen: String,
    pub address: String,
    pub agent: Option<Child>,
}

impl Host {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listen = format!("unix:{}", dir.path().join("agent.socket").display());
        Self {
            dir,
            prefix: Vec::new(),
            options: Vec::new(),
            address: listen.clone(),
            listen,
            agent: None,
        }
    }

    /// One whose agent has processes, mounts and a network of its own.
    pub fn apart(prefix: &[&str]) -> Self {
        let mut host = Self::new();
        host.prefix = prefix.iter().map(|&word| word.to_owned()).collect();
        host
    }

    /// Gives the agent, which is still to be started, mounts of its own, among them none that others change the content
    /// of: a tree that gets a pid namespace there has a copy of them, which comes along when it moves on.
    pub fn with_quiet_mounts(mut self) -> Self {
        let script = format!("{QUIET}; exec \"$@\"");
        self.prefix.extend(["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned));
        for rule in ["sources=\"all\"", "file-systems=\"all\""] {
            self.options.push("--restore-option=--policy-rule".to_owned());
            self.options.push(format!("--restore-option=foreign.mounts.{rule}"));
        }
        self
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn directories(&self, work: &str) -> [String; 4] {
        let [state, work] = ["state", work].map(|name| self.path(name).display().to_string());
        ["--state-dir".to_owned(), state, "--work-dir".to_owned(), work]
    }

    pub fn start_agent(&mut self) {
        let mut words: Vec<String> = self.prefix.clone();
        words.extend([torpor().display().to_string(), "agent".to_owned()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["--listen", &self.listen]).args(self.directories("taken"));
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("agent.log"));
        command.args(&self.options).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut agent = command.stderr(log.unwrap()).process_group(0).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(agent.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("Listening at ");
        self.address = address.unwrap_or_else(|| panic!("{}", self.log())).to_owned();
        self.agent = Some(agent);
    }

    pub fn stop_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            agent.kill().unwrap();
            agent.wait().unwrap();
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("agent.log")).unwrap_or_default()
    }

    /// `torpor migrate` with this host's directories.
    pub fn migrate(&self, args: &[&str]) -> Command {
        let mut command = Command::new(torpor());
        command.arg("migrate").args(self.directories("work")).args(args).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Moves a tree from this host to the agent at `to`.
    pub fn moves(&self, pid: i32, mode: &str, to: &str) -> Result<Value, String> {
        let pid = pid.to_string();
        let output = self.migrate(&["--pid", &pid, "--mode", mode, "--json", to]).output().unwrap();
        judge(&output)
    }

    /// No migration has left anything in the work directory.
    pub fn is_clean(&self) -> bool {
        let empty = |dir: PathBuf| {
            let entries = fs::read_dir(dir);
            entries.map_or(true, |mut entries| entries.next().is_none())
        };
        empty(self.path("work/source")) && empty(self.path("taken"))
    }

    /// The phase of each migration that this host has a record of.
    pub fn phases(&self, side: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path("state").join(side)).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path());
        let records = files.filter(|path| path.extension().is_some_and(|ext| ext == "json"));
        let read = records
            .map(|path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() });
        read.map(|record| record["phase"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop_agent();
    }
}

pub fn judge(output: &Output) -> Result<Value, String> {
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).expect("one JSON object"))
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// A program that counts, wherever it runs.
pub struct Counter {
    program: &'static str,
    pub dir: TempDir,
    pub child: Child,
    pub pid: i32,
}

impl Counter {
    pub fn start(pages: u64, writes: u64) -> Self {
        Self::start_under(&["setsid"], pages, writes)
    }

    /// One that may have to go on from where it was before it moved.
    pub fn start_lenient(pages: u64, writes: u64) -> Self {
        Self::start_with(&["setsid"], pages, writes, &["again"])
    }

    /// The last of its descendants is what counts.
    pub fn start_under(prefix: &[&str], pages: u64, writes: u64) -> Self {
        Self::start_with(prefix, pages, writes, &[])
    }

    /// One whose tree no dump takes, and the first process of that: its time namespace for children has no
    /// task, since the one that counts was born before.
    pub fn start_refused() -> (Self, i32) {
        const FIRST: &str = "import ctypes, os, sys\n\
            there, here = os.pipe()\n\
            child = os.fork()\n\
            if not child:\n    os.read(there, 1)\n    os.execv(sys.argv[1], sys.argv[1:])\n\
            ctypes.CDLL(None).unshare(0x80)  # CLONE_NEWTIME\n\
            os.write(here, b'x')\n\
            os.waitpid(child, 0)";
        let mut counter = Self::start_under(&["setsid", "python3", "-c", FIRST], 100, 1);
        let root = std::mem::replace(&mut counter.pid, child_of(counter.child.id()));
        (counter, root)
    }

    fn start_with(prefix: &[&str], pages: u64, writes: u64, more: &[&str]) -> Self {
        let (pages, writes) = (pages.to_string(), writes.to_string());
        Self::start_program(prefix, "counter", &[&[pages.as_str(), &writes], more].concat())
    }

    /// Another program that counts, with words behind the name of the file.
    pub fn start_program(prefix: &[&str], program: &'static str, words: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = compiled(dir.path(), program);
        let mut command = Command::new(prefix[0]);
        command.args(&prefix[1..]).arg(path).arg(dir.path().join("count")).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let pid = child.id().cast_signed();
        let counter = Self { dir, child, pid, program };
        wait_until("the counter counts", || counter.count() > 0);
        counter
    }

    pub fn count(&self) -> u64 {
        let bytes = fs::read(self.dir.path().join("count")).unwrap_or_default();
        bytes.try_into().map_or(0, u64::from_le_bytes)
    }

    /// Processes that count, as this test sees them, and whether each of them can run. A process that has been killed
    /// does nothing any more, and is gone as soon as it gets a processor.
    pub fn running(&self) -> Vec<(i32, bool)> {
        let path = self.dir.path().join("count").display().to_string();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let counts = pids.filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = words.split(|&byte| byte == 0).next().unwrap_or_default();
            program.ends_with(format!("/{}", self.program).as_bytes())
                && String::from_utf8_lossy(&words).contains(&path)
        });
        let state = |pid: &i32| {
            let state = state_of(*pid)?;
            Some(if has_been_killed(*pid) { 'X' } else { state })
        };
        counts
            .filter_map(|pid| state(&pid).map(|state| (pid, state)))
            .filter(|(_, state)| !matches!(state, 'Z' | 'X'))
            .map(|(pid, state)| (pid, matches!(state, 'R' | 'S' | 'D')))
            .collect()
    }

    /// One counts, and one only.
    pub fn goes_on(&self) {
        let before = self.count();
        assert!(
            comes_true(|| self.count() > before + 5),
            "it does not count on: {}",
            self.held_by()
        );
        let running = self.running();
        assert_eq!(running.iter().filter(|(_, runs)| *runs).count(), 1, "{running:?}");
        // Those that the other end has made, and that stand still, may have yet to end.
        assert!(comes_true(|| self.running().len() == 1), "{:?}", self.running());
    }

    /// What the kernel tells of those that count, and of whoever traces them.
    fn held_by(&self) -> String {
        let read = |pid: i32, file: &str| {
            let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\0', " ")
        };
        let told = |pid: i32| {
            let all = ["cmdline", "wchan", "syscall", "stack", "status"];
            all.map(|file| format!("{pid} {file}: {}", read(pid, file))).join("\n")
        };
        let with_tracer = |(pid, _): (i32, bool)| {
            let status = read(pid, "status");
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
            let tracer = tracer.and_then(|pid| pid.trim().parse().ok()).filter(|&pid| pid != 0);
            [told(pid), tracer.map(told).unwrap_or_default()].join("\n")
        };
        self.running().into_iter().map(with_tracer).collect::<Vec<_>>().join("\n")
    }

    pub fn has_ended_here(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        for (pid, _) in self.running() {
            let pid = Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process is about to end by a signal that it cannot do anything about.
fn has_been_killed(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let pending = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    pending.is_some_and(|mask| mask >> (Signal::KILL.as_raw() - 1) & 1 == 1)
}

/// A process that is killed in the end.
pub struct Killed(pub i32);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// The state of a process, as `ps` has it; none if there is none.
pub fn state_of(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// The child of a process, once it has one.
pub fn child_of(pid: u32) -> i32 {
    let mut found = None;
    wait_until("it has a child", || {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        found = children.split_whitespace().next().and_then(|word| word.parse().ok());
        found.is_some()
    });
    found.unwrap()
}

/// Processes with all these words on their command line.
pub fn pids_of(words: &[&str]) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let has_all = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let given: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        words.iter().all(|word| given.contains(&word.as_bytes()))
    };
    pids.filter(has_all).filter_map(Pid::from_raw).collect()
}

/// A descendant of a process that has this word on its command line: the first of those, not one that it has forked.
pub fn descendant(of: u32, word: &str) -> Option<i32> {
    let parent = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let has_it: Vec<i32> =
        pids_of(&[word]).into_iter().map(|pid| pid.as_raw_nonzero().get()).collect();
    let is_below = |pid: i32| {
        let mut above = std::iter::successors(parent(pid), |&pid| parent(pid));
        above.any(|above| above == of.cast_signed())
    };
    let is_first = |pid: i32| parent(pid).is_none_or(|parent| !has_it.contains(&parent));
    has_it.iter().copied().find(|&pid| is_first(pid) && is_below(pid))
}
