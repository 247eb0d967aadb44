//! What the user wants to do when addresses move with the tasks.

use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::group::Group;

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

impl Stage {
    /// Its name, for the script.
    fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Arriving => "arriving",
            Self::Moved => "moved",
            Self::Stayed => "stayed",
        }
    }
}

/// A script of the user's that runs. It is ended, with all that it has started, if nobody waits for its end.
#[derive(Debug)]
pub(crate) struct Script {
    group: Group,
    /// What it is, for errors.
    what: String,
}

impl Script {
    /// Starts it, if there is one.
    ///
    /// # Errors
    /// If there is no shell, or the kernel starts no process.
    pub(crate) fn start(script: Option<&str>, stage: Stage, id: &str) -> Result<Option<Self>> {
        let Some(script) = script else { return Ok(None) };
        let stage = stage.name();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).envs([("TORPOR_STAGE", stage), ("TORPOR_MIGRATION", id)]);
        let group = Group::start(shell.stdin(Stdio::null()).stdout(Stdio::null()), "--script")?;
        Ok(Some(Self { group, what: format!("--script {script} at {stage}") }))
    }

    /// Waits for its end; with `cancel`, or for somebody who cancels.
    ///
    /// # Errors
    /// If it ends with a status other than 0; if somebody cancels.
    pub(crate) fn finish(self, cancel: Option<&Cancel>) -> Result<()> {
        let status = match cancel {
            Some(cancel) => self.group.finish_unless(cancel)?,
            None => self.group.finish()?,
        };
        if status.success() {
            return Ok(());
        }
        Err(Error::refused(format!("{}: {status}", self.what)))
    }
}

impl AsFd for Script {
    /// Readable when it has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }
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
    Script::start(script, stage, id)?.map_or(Ok(()), |script| script.finish(cancel))
}
