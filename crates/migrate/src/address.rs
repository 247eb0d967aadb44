//! What the user wants to do when addresses move with the tasks.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::cancel::Cancel;
use crate::engine::wait_readable;
use crate::error::{Context, Error, Result};

/// When a script is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The tasks are stopped at the source.
    Stopped,
    /// They are about to be made at the destination.
    Arriving,
    /// They run at the destination.
    Moved,
    /// They go on at the source.
    Stayed,
}

/// Runs the user's script. With `cancel`, it is ended with all that it has started when somebody cancels.
///
/// # Errors
/// If the script cannot be started, or ends with a status other than 0; if somebody cancels.
pub(crate) fn run(
    script: Option<&str>,
    stage: Stage,
    id: &str,
    cancel: Option<&Cancel>,
) -> Result<()> {
    let Some(script) = script else { return Ok(()) };
    let stage = match stage {
        Stage::Stopped => "stopped",
        Stage::Arriving => "arriving",
        Stage::Moved => "moved",
        Stage::Stayed => "stayed",
    };
    // Ctrl-C is for this process to deal with.
    let child = Command::new("/bin/sh")
        .args(["-c", script])
        .envs([("TORPOR_STAGE", stage), ("TORPOR_MIGRATION", id)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .context(|| "run --script".to_owned())?;
    let status = finish(child, cancel)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::refused(format!("--script {script} at {stage}: {status}")))
}

/// Waits for the end of a script, or for somebody who cancels.
fn finish(mut child: Child, cancel: Option<&Cancel>) -> Result<ExitStatus> {
    let failed = || "wait for --script".to_owned();
    if let Some(cancel) = cancel {
        let group = Pid::from_child(&child);
        let ended = pidfd_open(group, PidfdFlags::empty()).context(failed)?;
        while wait_readable(&[ended.as_fd(), cancel.as_fd()], None)? == [false, true] {
            if cancel.is_due() {
                // Nobody has waited for its leader: the number is still that group's.
                let _ = kill_process_group(group, Signal::KILL);
                child.wait().context(failed)?;
                return Err(Error::Cancelled);
            }
        }
    }
    child.wait().context(failed)
}
