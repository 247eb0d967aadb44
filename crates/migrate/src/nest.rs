//! First processes of pid namespaces.
//!
//! Tasks keep their process ids. Where one of these is taken, a tree that had no pid
//! namespace of its own gets one:
//!
//! ```text
//!     agent ── nest ── init (the first process there) ── worker, which makes the tasks
//! ```
//!
//! *Nest* ends as the worker did, and *init* stays until all has ended that the worker has left. If *nest* is killed, *init*
//! kills the worker: whether the tasks end with that, or run already, is for the worker's last deed to decide, as it is without
//! a namespace.

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use torpor_sys::process::{Status, wait};
use torpor_worker::tell;

use crate::cancel::Cancel;
use crate::engine::{SELF, wait_readable};
use crate::error::{Context, Error, Result};

/// A process id that tasks rarely have, and processes ids that a restore uses up.
const ROOM: i32 = 2000;
/// What *init* says when the tasks run.
const RUNNING: u8 = b'.';
/// What it says when the worker has ended otherwise.
const FAILED: u8 = b'!';

/// *nest*: makes the namespace, and ends as the job in it does. A descriptor of the job is
/// its standard input.
#[must_use]
pub(crate) fn enter(above: i32) -> ExitCode {
    code(try_enter(above))
}

/// *init*: fills the namespace, runs the job, and waits for all that it leaves behind.
#[must_use]
pub(crate) fn run_first(above: i32) -> ExitCode {
    code(try_first(above))
}

/// The agent is itself the first process of a pid namespace, which is to take care of
/// orphans: another process does the agent's work. Whoever tells this one to end means that.
#[must_use]
pub(crate) fn stand_in() -> ExitCode {
    code(try_stand_in())
}

fn try_stand_in() -> Result<bool> {
    // The kernel gives a first process no signal that it has no handler for.
    let end = Cancel::of(&[SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let failed = || "start the agent".to_owned();
    let mut again = Command::new(SELF);
    // It hears of a terminal's Ctrl-C once, from here.
    again.args(std::env::args_os().skip(1)).process_group(0);
    let agent = again.spawn().context(failed)?;
    let pid = agent.id().cast_signed();
    let process = pidfd_open(Pid::from_child(&agent), PidfdFlags::empty()).context(failed)?;
    thread::spawn(move || pass_on(&end, &process));
    Ok(reap(|ended| ended == pid)? == Some(Status::Exited(0)))
}

/// Tells the agent to end each time that this process is told so.
fn pass_on(end: &Cancel, agent: &OwnedFd) {
    while wait_readable(&[end.as_fd()], None).is_ok() {
        if end.is_due()
            && let Err(error) = pidfd_send_signal(agent, Signal::TERM)
        {
            tracing::debug!("the agent is not told to end: {error}");
        }
    }
}

fn code(done: Result<bool>) -> ExitCode {
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            tell!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_enter(above: i32) -> Result<bool> {
    torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWPID | libc::CLONE_NEWNS)
        .context(|| "make a pid namespace".to_owned())?;
    let mut init = Command::new(SELF)
        .args(["agent", "init", &above.to_string()])
        .stdin(Stdio::inherit())
        .stdout(Stdio::piped())
        .spawn()
        .context(|| "start the first process of a pid namespace".to_owned())?;
    let mut said = [0];
    let mut from = init.stdout.take().ok_or_else(|| Error::refused("no pipe"))?;
    Ok(from.read(&mut said).is_ok_and(|len| len == 1) && said[0] == RUNNING)
}

fn try_first(above: i32) -> Result<bool> {
    // The session of tasks that had one outside.
    rustix::process::setsid().context(|| "setsid".to_owned())?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .context(|| "mounts of the new pid namespace".to_owned())?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None).context(|| "mount /proc".to_owned())?;
    let last = above.saturating_add(ROOM);
    fs::write("/proc/sys/kernel/ns_last_pid", last.to_string())
        .context(|| "/proc/sys/kernel/ns_last_pid".to_owned())?;
    let worker = Command::new(SELF)
        .arg(torpor_worker::COMMAND)
        .stdin(Stdio::inherit())
        .stdout(Stdio::null())
        .spawn()
        .context(|| "start a worker".to_owned())?;
    let pid = worker.id().cast_signed();
    let process = pidfd_open(Pid::from_child(&worker), PidfdFlags::empty());
    let process = process.context(|| "pidfd_open".to_owned())?;
    thread::spawn(move || end_with_nest(&process));
    let done = reap(|ended| ended == pid)? == Some(Status::Exited(0));
    // Until here it is as the worker has left it: whoever has the other end of the job's channel notices its end when what it
    // held has been killed. From here on nothing of whoever started this is to stay open as long as the tasks live.
    let null = fs::File::open("/dev/null").context(|| "/dev/null".to_owned())?;
    rustix::stdio::dup2_stdin(&null).context(|| "/dev/null".to_owned())?;
    // If it is gone, it is.
    let _ = rustix::io::write(rustix::stdio::stdout(), &[if done { RUNNING } else { FAILED }]);
    rustix::stdio::dup2_stdout(&null).context(|| "/dev/null".to_owned())?;
    rustix::stdio::dup2_stderr(&null).context(|| "/dev/null".to_owned())?;
    reap(|_| false)?;
    Ok(true)
}

/// Kills the worker when *nest* is gone, which reads what *init* says on its standard output.
fn end_with_nest(worker: &OwnedFd) {
    // A pipe that nobody reads any more has an error, which ends the wait.
    if wait_readable(&[rustix::stdio::stdout()], None).is_ok() {
        // It may have ended by now.
        let _ = pidfd_send_signal(worker, Signal::KILL);
    }
}

/// Takes note of children that end, until `is_last` says so of one, whose end is returned, or
/// there are none.
fn reap(is_last: impl Fn(i32) -> bool) -> Result<Option<Status>> {
    loop {
        match wait(-1, true) {
            Ok(Some((pid, status @ (Status::Exited(_) | Status::Signaled(_))))) if is_last(pid) => {
                return Ok(Some(status));
            }
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ECHILD) => return Ok(None),
            Err(e) => return Err(e).context(|| "wait".to_owned()),
        }
    }
}
