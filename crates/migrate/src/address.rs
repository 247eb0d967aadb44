//! What the user wants to do when addresses move with the tasks.

use std::process::{Command, Stdio};

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

/// Runs the user's script.
///
/// # Errors
/// If the script cannot be started, or ends with a status other than 0.
pub(crate) fn run(script: Option<&str>, stage: Stage, id: &str) -> Result<()> {
    let Some(script) = script else { return Ok(()) };
    let stage = match stage {
        Stage::Stopped => "stopped",
        Stage::Arriving => "arriving",
        Stage::Moved => "moved",
        Stage::Stayed => "stayed",
    };
    let status = Command::new("/bin/sh")
        .args(["-c", script])
        .envs([("TORPOR_STAGE", stage), ("TORPOR_MIGRATION", id)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context(|| "run --script".to_owned())?;
    if status.success() {
        return Ok(());
    }
    Err(Error::refused(format!("--script {script} at {stage}: {status}")))
}
