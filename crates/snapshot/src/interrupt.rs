//! Ctrl-C, and what else asks a command to end. A command that has started something notices it, and removes that
//! first; one that is asked a second time ends at once.

use std::fs;
use std::os::fd::AsFd;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{Context, Error, Result};

/// Whether it was asked.
static ASKED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// How often it is looked while a command runs.
const GLANCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// From now on signals that would end this process are noticed by [`check`] instead.
pub fn heed() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        torpor_blobs::interrupt::heed(ASKED.clone());
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // Whoever has started this process with nohup means it.
            if !is_ignored(&status, signal) {
                // They fail for signals only that nobody may catch.
                let _ = flag::register_conditional_shutdown(signal, 128 + signal, ASKED.clone());
                let _ = flag::register(signal, ASKED.clone());
            }
        }
    });
}

/// Whether `/proc/PID/status` says that a signal is ignored.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Fails when somebody has asked for the end.
///
/// # Errors
/// That it was interrupted.
pub fn check() -> Result<()> {
    match ASKED.load(Ordering::Relaxed) {
        true => Err(Error::new("interrupted: what was started is removed")),
        false => Ok(()),
    }
}

/// Why something failed: programs that were started from a terminal have got the signal as well.
#[must_use]
pub fn cause(error: Error) -> Error {
    check().err().unwrap_or(error)
}

/// Runs a command to its end, or until somebody asks for that of this process, or until it is too late: then there is
/// no status, and it is gone.
///
/// # Errors
/// If it cannot be started, or was interrupted: it is gone then.
pub fn status(call: &mut Command, end: Instant) -> Result<Option<ExitStatus>> {
    let program = call.get_program().display().to_string();
    let what = || format!("starting {program}");
    let mut child = call.spawn().context(what)?;
    let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).context(what)?;
    while poll(&mut [PollFd::new(&process.as_fd(), PollFlags::IN)], Some(&GLANCE)) != Ok(1) {
        let asked = check();
        if asked.is_err() || Instant::now() >= end {
            // It may have ended just now.
            let _ = child.kill();
            let _ = child.wait();
            return asked.map(|()| None);
        }
    }
    child.wait().map(Some).context(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_was_started_with_nohup_is_not_interrupted_by_it() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\nSigCgt:\t0\n";
        assert!(is_ignored(status, SIGHUP) && !is_ignored(status, SIGINT));
        assert!(!is_ignored("", SIGHUP));
    }

    #[test]
    fn a_command_has_its_own_status() {
        let late = Instant::now() + Duration::from_secs(600);
        let ended = status(Command::new("sh").args(["-c", "exit 7"]), late).unwrap();
        assert_eq!(ended.unwrap().code(), Some(7));
        assert!(status(&mut Command::new("/nope"), late).is_err());
    }

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let ended = status(Command::new("sleep").arg("1000"), Instant::now()).unwrap();
        assert_eq!(ended, None);
    }
}
