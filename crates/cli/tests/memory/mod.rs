//! A task that has memory and looks at it.

#![allow(dead_code, missing_docs, reason = "not every test needs all of it")]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use torpor_sys::process::wait;

use crate::sleeper::{criu, name_of, wait_until};

/// Enough that no restore is done with it at once.
pub const PAGES: u64 = 64 * 256;

/// A task with memory, which waits for its gate to open.
pub struct Task {
    pub dir: TempDir,
    pub pid: i32,
}

impl Task {
    pub fn start(pages: u64) -> Self {
        Self::start_with_relatives(pages, 0, 0)
    }

    /// With so many children that have its memory, too, but for the first `others` pages, which it
    /// has overwritten.
    #[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
    pub fn start_with_relatives(pages: u64, relatives: u64, others: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("memory");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/memory/memory.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&program).arg(source);
        assert!(compiler.status().unwrap().success());
        let mut command = Command::new("setsid");
        command
            .arg(&program)
            .args([pages, relatives, others].map(|n| n.to_string()))
            .current_dir(dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        wait_until(|| dir.path().join("ready").exists());
        Self { dir, pid: i32::try_from(child.id()).unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub fn command(&self, words: &[&str], log: &str) -> Command {
        let mut command = criu(words);
        command.args(["-v4", "-o", log, "-D"]).arg(self.dir.path());
        command
    }

    pub fn dump(&self, args: &[&str]) -> bool {
        let pid = self.pid.to_string();
        let mut dump = self.command(&["dump", "-t", &pid], "dump.log");
        dump.args(args).status().unwrap().success()
    }

    /// Dumps the task, which must be gone then.
    pub fn put_to_sleep(&self, args: &[&str]) {
        assert!(self.dump(args), "{}", self.log("dump.log"));
        wait(self.pid, true).unwrap();
    }

    pub fn restore(&self, args: &[&str]) {
        let mut restore = self.command(&["restore", "-d"], "restore.log");
        assert!(restore.args(args).status().unwrap().success(), "{}", self.log("restore.log"));
    }

    /// Lets the task look at its memory; what it found.
    pub fn look(&self) -> String {
        self.go();
        wait_until(|| self.log("report").ends_with('\n'));
        self.log("report")
    }

    pub fn go(&self) {
        fs::write(self.path("gate"), "").unwrap();
    }

    pub fn is_gone(&self) -> bool {
        name_of(self.pid).is_none()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if !self.is_gone() {
            let _ = kill_process(Pid::from_raw(self.pid).unwrap(), Signal::KILL);
        }
    }
}
