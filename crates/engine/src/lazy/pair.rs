//! Two processes that bring pages in: the one that works, and the one that is there in
//! case it does not. They have one table of descriptors, so that a userfaultfd which the
//! kernel gives to one of them is held by both from the start.

use std::fs;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::process::{PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_send_signal};
use torpor_sys::process::{self, Status};
use torpor_sys::uffd;

use super::Remote;
use super::address_space::AddressSpace;
use super::pager;
use super::working_set::Recorder;
use crate::error::{Context, Error, Result};
use crate::proc;

/// How often it is looked whether killed tasks are gone.
const PAUSE: Duration = Duration::from_millis(20);

/// Brings in all pages of the address spaces of `tasks` (their pidfds), and calls
/// `started` when it has begun to. Pages that a dump still has are fetched from `remote`.
/// A `recorder` notes what is touched. Returns when nothing is missing any more.
///
/// # Errors
/// If a page cannot be brought in, as when the other end is lost or has none, or if the dump cannot be told that all are here
/// (and no mark says so): all tasks, and what they have forked, have been killed then.
pub(super) fn run(
    spaces: Vec<AddressSpace>,
    remote: Option<Remote<'_>>,
    recorder: Option<Recorder<'_>>,
    tasks: &[OwnedFd],
    started: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let own = proc::pidfd(rustix::process::getpid().as_raw_nonzero().get())?;
    let mark = remote.as_ref().and_then(|remote| remote.mark.clone());
    // They are the child's to close: for both.
    let held = ManuallyDrop::new((spaces, remote, recorder));
    let child = process::fork_with_files(|| {
        let _ = process::set_name(c"torpor-pager");
        let (mut spaces, remote, recorder) = ManuallyDrop::into_inner(held);
        match pager::run(&mut spaces, remote, recorder, &own) {
            Ok(()) => 0,
            Err(error) => {
                tracing::error!("lazy pages: {error}; the tasks are killed");
                stop(tasks);
                1
            }
        }
    });
    let child = child.context(|| "forking the pager".to_owned())?;
    let started = started();
    let status = process::wait(child, true).context(|| "waiting for the pager".to_owned())?;
    match status {
        Some((_, Status::Exited(0))) => started,
        // All pages are there, and the dump may have ended its tasks.
        _ if mark.is_some_and(|mark| mark.is_left()) => started,
        _ => {
            stop(tasks);
            Err(Error::Peer("the pager has ended; the tasks are killed".to_owned()))
        }
    }
}

/// Kills tasks and all that they have forked; returns when no address space is left that
/// a userfaultfd here belongs to.
fn stop(tasks: &[OwnedFd]) {
    loop {
        let mut below = Vec::new();
        for task in tasks {
            let _ = pidfd_send_signal(task, Signal::STOP);
            if let Some(pid) = pid_of(task) {
                stop_below(pid, &mut below);
            }
        }
        // None of them is left that could see another one's end.
        for task in below.iter().chain(tasks) {
            let _ = pidfd_send_signal(task, Signal::KILL);
        }
        if !any_left() {
            return;
        }
        // What was forked and has lost its parent waits for its pages for ever, or
        // until somebody kills it; it must not get others.
        std::thread::sleep(PAUSE);
    }
}

/// The pid of a process, by its pidfd; none if it is gone.
pub(super) fn pid_of(task: &OwnedFd) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", task.as_raw_fd())).ok()?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    pid.trim().parse().ok().filter(|&pid| pid > 0)
}

/// Stops all tasks below one that is stopped, and adds them.
fn stop_below(pid: i32, all: &mut Vec<OwnedFd>) {
    for child in proc::children_of(pid) {
        let Ok(pidfd) = proc::pidfd(child) else { continue };
        // Its pid may be another's by now.
        if proc::stat(child).is_ok_and(|stat| stat.ppid == pid) {
            let _ = pidfd_send_signal(&pidfd, Signal::STOP);
            all.push(pidfd);
            stop_below(child, all);
        }
    }
}

/// Whether a userfaultfd of this process belongs to an address space that is there.
fn any_left() -> bool {
    let own = rustix::process::getpid();
    let Ok(own) = proc::pidfd(own.as_raw_nonzero().get()) else { return true };
    let numbers = proc::numbers(rustix::process::getpid().as_raw_nonzero().get(), "fd");
    numbers.unwrap_or_default().into_iter().any(|number| {
        let link = fs::read_link(format!("/proc/self/fd/{number}"));
        if !link.is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]") {
            return false;
        }
        // The number has an owner, maybe in the other process: look through a duplicate.
        let copy = pidfd_getfd(&own, number, PidfdGetfdFlags::empty());
        copy.is_ok_and(|copy| !uffd::is_gone(copy.as_fd()))
    })
}
