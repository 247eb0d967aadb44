//! Commands that get so much time and no more.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// So often it is looked whether a command has ended.
const BEAT: Duration = Duration::from_millis(20);

/// Runs a command, and ends it if it has not ended by then.
///
/// # Errors
/// If the command cannot be started or waited for, fails, or has not ended by `deadline`.
pub(crate) fn run_until(command: &mut Command, deadline: Instant) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("run the command: {e}");
    let mut child = command.process_group(0).spawn().map_err(failed)?;
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("the command ended with {status}")),
            None if Instant::now() < deadline => thread::sleep(BEAT),
            None => break,
        }
    }
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let _ = child.wait();
    Err("the command did not end in time".to_owned())
}
