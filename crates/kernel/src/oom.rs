//! Which process the kernel kills where memory runs out.
//!
//! The largest one, as a rule: a daemon may be larger than the job that fills the memory, and then all of its jobs lose
//! it. So a job counts as larger than it is. What it makes is not to be that: the tasks have the value of their images,
//! or that which the job was given.

use std::fs;
use std::sync::OnceLock;

/// A process's own value.
const OWN: &str = "/proc/self/oom_score_adj";
/// By how much a job counts as larger than it is: three tenths of the memory of its cgroup, or of the host where no
/// cgroup has a limit. With that the smallest process of a job comes before its daemon in a cgroup of 48 MiB, which is as little
/// as jobs work in; and somebody else who uses most of the memory of the host comes before a job nevertheless.
const MORE: i32 = 300;
/// The highest value that the kernel takes.
const HIGHEST: i32 = 1000;

/// The value that this process came with, once it was raised.
static GIVEN: OnceLock<i32> = OnceLock::new();

/// From now on the kernel kills this process, and what it starts, before whoever it works for. Where that cannot be, or
/// this process might not be able to give what it makes another value, all stays as it is.
pub fn go_first() {
    if given().is_some() || !may_lower() {
        return;
    }
    let read: Option<i32> = fs::read_to_string(OWN).ok().and_then(|text| text.trim().parse().ok());
    let Some(given) = read else { return };
    if fs::write(OWN, HIGHEST.min(given + MORE).to_string()).is_ok() {
        GIVEN.get_or_init(|| given);
    }
}

/// Whether this process may lower the value of whatever it makes: the files of a task that has become another user are
/// those of the host's root.
fn may_lower() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    rustix::process::geteuid().is_root() && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The value that was this process's own, if it was raised.
#[must_use]
pub fn given() -> Option<i32> {
    GIVEN.get().copied()
}

/// This process, which has just been forked, is none that uses much, and stays for others when the job has ended, or is
/// killed.
pub fn give_back() {
    if let Some(given) = given() {
        // Who has raised it may lower it; at the worst it is killed as the job is.
        let _ = fs::write(OWN, given.to_string());
    }
}
