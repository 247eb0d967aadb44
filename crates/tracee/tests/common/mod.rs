//! Processes that are traced.

// Each test program uses its own part of this.
#![allow(dead_code)]

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use torpor_tests::wait::wait_for;
use torpor_tracee::{Mapping, Tracee, parse_maps};

/// Until something that is bound to happen has happened.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn spawn(program: &str, args: &[&str]) -> (Killed, i32) {
    let child = Command::new(program)
        .args(args)
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    // Past execve and the dynamic loader: it sleeps in the kernel.
    let name = program.rsplit('/').next().unwrap();
    let is_it = || {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        (comm.trim() == name && is_asleep(pid, pid)).then_some(())
    };
    wait_for("the program to sleep", PATIENCE, || Ok(is_it())).unwrap();
    (Killed(child), pid)
}

/// Whether a thread sleeps, and is not stopped.
pub fn is_asleep(pid: i32, tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap();
    stat.contains(") S ")
}

/// Waits until a script has said that it is at work.
pub fn says_on(child: &mut Child) {
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
}

pub fn maps(pid: i32) -> Vec<Mapping> {
    parse_maps(&std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap())
}

pub fn threads(pid: i32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    entries.map(|e| e.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
}

pub fn stop(pid: i32) -> Tracee {
    stop_thread(pid, pid)
}

pub fn stop_thread(pid: i32, tid: i32) -> Tracee {
    Tracee::seize(tid, false).unwrap();
    Tracee::stopped(pid, tid, Duration::from_secs(60)).unwrap().unwrap()
}
