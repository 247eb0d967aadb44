//! Kills at points of the work: at a system call of the process that is killed, counted, not at a moment of the
//! clock. A fast machine and a slow one so test the same.
//!
//! Run once without a point, work says how many it has; then it is run again and killed at one of them.

use anyhow::{Context, Error, Result, ensure};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use torpor_sys::process::{self, Status, wait};
use torpor_sys::ptrace::{self, option};

/// How a stop at a system call shows with [`option::TRACESYSGOOD`].
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;

/// What became of a command that was watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// It came to its end after this many stops at system calls.
    Ended {
        /// Each call counts twice: when it is entered, and when it is left.
        stops: u64,
        /// Whether it says that all went well.
        success: bool,
    },
    /// It was killed at the stop that was asked for.
    Killed,
    /// It was let go there.
    Left,
}

/// Whose system calls are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// Those of the first thread only: a restore bears tasks that it traces itself.
    First,
    /// Those of all threads: the pages of a dump are copied by several.
    All,
}

/// Runs `command`, and kills it at its stop number `at` if it comes that far.
///
/// With [`Threads::All`] whoever else this process waits for is taken from it: that is for a process
/// that has no other children ([`crate::alone`]).
///
/// # Errors
/// It cannot be started or traced; it dies of something else.
pub fn watch(command: &mut Command, threads: Threads, at: Option<u64>) -> Result<Watched> {
    let pid = command.spawn()?.id().cast_signed();
    let clones = if threads == Threads::All { option::TRACECLONE } else { 0 };
    ptrace::seize(pid, option::TRACESYSGOOD | option::EXITKILL | clones)?;
    count(pid, threads, is(at), || Then::Dies)
}

/// Does the same with a process that somebody else has started: its first thread counts, from now on.
///
/// # Errors
/// It cannot be traced, since it has ended ([`has_ended`]); it dies of something else.
pub fn watch_other(pid: i32, at: Option<u64>) -> Result<Watched> {
    ptrace::seize(pid, option::TRACESYSGOOD | option::EXITKILL)?;
    count(pid, Threads::First, is(at), || Then::Dies)
}

/// Does the same `more` stops after the first one at which something has happened.
///
/// # Errors
/// As [`watch_other`].
pub fn watch_since(pid: i32, mut has_happened: impl FnMut() -> bool, more: u64) -> Result<Watched> {
    ptrace::seize(pid, option::TRACESYSGOOD | option::EXITKILL)?;
    let mut since = None;
    let is_there = |stops| {
        if since.is_none() && has_happened() {
            since = Some(stops);
        }
        since.is_some_and(|since| stops == since + more)
    };
    count(pid, Threads::First, is_there, || Then::Dies)
}

/// Does the same, but the process goes on: something else happens while it stands at its stop number `at`.
/// Whether it came that far.
///
/// # Errors
/// As [`watch_other`].
pub fn while_at(pid: i32, at: u64, happens: impl FnOnce()) -> Result<bool> {
    ptrace::seize(pid, option::TRACESYSGOOD | option::EXITKILL)?;
    let mut happens = Some(happens);
    count(pid, Threads::First, is(Some(at)), || {
        happens.take().into_iter().for_each(|happens| happens());
        Then::GoesOn
    })?;
    Ok(happens.is_none())
}

/// Does the same, and leaves the process alone from there on: nobody watches what it does then, nor who else harms it.
/// Whether it came that far.
///
/// # Errors
/// As [`watch_other`].
pub fn leave_at(pid: i32, at: u64, happens: impl FnOnce()) -> Result<bool> {
    ptrace::seize(pid, option::TRACESYSGOOD)?;
    let mut happens = Some(happens);
    let watched = count(pid, Threads::First, is(Some(at)), || {
        happens.take().into_iter().for_each(|happens| happens());
        Then::IsLeft
    })?;
    Ok(watched == Watched::Left)
}

/// Whether somebody could not be traced: gone, or ended and not yet waited for.
#[must_use]
pub fn has_ended(error: &Error) -> bool {
    let number = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    matches!(number, Some(libc::ESRCH | libc::EPERM))
}

/// Does the same with `work` in a child of this process, from when it begins.
///
/// # Errors
/// This process has threads; the child dies of something else.
pub fn watch_work(work: impl FnOnce(), at: Option<u64>) -> Result<Watched> {
    let (gate, open) = rustix::pipe::pipe()?;
    let pid = process::fork(|| {
        let begins = rustix::io::read(&gate, &mut [0]).is_ok();
        i32::from(!begins || catch_unwind(AssertUnwindSafe(work)).is_err())
    })?;
    ptrace::seize(pid, option::TRACESYSGOOD | option::EXITKILL)?;
    rustix::io::write(&open, &[1])?;
    count(pid, Threads::First, is(at), || Then::Dies)
}

/// Whether a stop is the one of this number.
fn is(at: Option<u64>) -> impl FnMut(u64) -> bool {
    move |stops| at == Some(stops)
}

/// What becomes of a process at the stop that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Dies,
    GoesOn,
    IsLeft,
}

fn count(
    pid: i32,
    threads: Threads,
    mut is_there: impl FnMut(u64) -> bool,
    mut there: impl FnMut() -> Then,
) -> Result<Watched> {
    // A process that ends just now says so below.
    let _ = ptrace::interrupt(pid);
    let (mut stops, mut at) = (0, None);
    // Of all threads only this one may have children: waiting for any would take those of others.
    let whom = if threads == Threads::All { -1 } else { pid };
    loop {
        let (tid, status) = wait(whom, true)?.context("nobody to wait for")?;
        match status {
            Status::Exited(code) if tid == pid => {
                return Ok(Watched::Ended { stops, success: code == 0 });
            }
            Status::Signaled(signal) if tid == pid => {
                ensure!(signal == libc::SIGKILL && at == Some(stops), "it died of {signal}");
                return Ok(Watched::Killed);
            }
            Status::Stopped { signal: SYSCALL_STOP, .. } => {
                stops += 1;
                at = is_there(stops).then_some(stops);
                let then = if at.is_some() { there() } else { Then::GoesOn };
                match then {
                    Then::Dies => {
                        process::kill_thread(pid, pid, libc::SIGKILL)?;
                        return killed(pid, whom);
                    }
                    Then::IsLeft => {
                        // One that was killed meanwhile cannot be left. Whoever waits for it learns of its end when this
                        // process has.
                        if ptrace::detach(tid, 0).is_err() {
                            killed(pid, whom)?;
                        }
                        return Ok(Watched::Left);
                    }
                    Then::GoesOn => go_on(tid, 0),
                }
            }
            // A signal of its own: it is to have it. Other stops are of the tracing.
            Status::Stopped { signal, event: 0 } => go_on(tid, signal),
            Status::Stopped { .. } => go_on(tid, 0),
            // Other threads, and orphans that come to the first process of this world.
            Status::Exited(_) | Status::Signaled(_) | Status::Continued => {}
        }
    }
}

/// Waits for the end of the process: it comes when its other threads, too, have been waited for.
fn killed(pid: i32, whom: i32) -> Result<Watched> {
    loop {
        if let Some((tid, Status::Signaled(_) | Status::Exited(_))) = wait(whom, true)?
            && tid == pid
        {
            return Ok(Watched::Killed);
        }
    }
}

/// A thread that has been killed meanwhile cannot go on, and need not.
fn go_on(tid: i32, signal: i32) {
    let _ = ptrace::cont_to_syscall(tid, signal);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    /// Whoever has started it waits for it, and learns that it has ended.
    #[test]
    fn one_that_is_killed_where_it_is_left_has_ended_for_its_parent() {
        let script = "yes >/dev/null & echo $!; wait $!; echo ended";
        let mut shell = Command::new("sh");
        let mut shell = shell.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let pid = lines.next().unwrap().unwrap().parse().unwrap();
        let kill = || process::kill_thread(pid, pid, libc::SIGKILL).unwrap();
        assert!(leave_at(pid, 20, kill).unwrap());
        assert_eq!(lines.next().unwrap().unwrap(), "ended");
        shell.wait().unwrap();
    }
}
