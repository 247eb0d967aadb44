//! What the user wants to do when addresses move with the tasks.

use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Command, Stdio};

use crate::cancel::Cancel;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::host::boot;
use crate::record::{Ledger, Phase, Record};

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

/// Tells the script of a migration that is over where the tasks are, if it was told that addresses move.
pub(crate) fn settle(ledger: &mut Ledger) {
    let record = ledger.record();
    let stage = match record.phase {
        Phase::Moved => Stage::Moved,
        Phase::Stayed => Stage::Stayed,
        Phase::Preparing | Phase::Deciding => return,
    };
    // A host that was restarted has none of the tasks, and the addresses that it begins with.
    if record.script.is_none() || record.boot != boot() {
        return;
    }
    if let Err(error) = run(record.script.as_deref(), stage, &record.id, None) {
        tracing::warn!("{error}");
    }
    forget(ledger);
}

/// The script has been told.
pub(crate) fn forget(ledger: &mut Ledger) {
    let Record { phase, script: Some(_), .. } = *ledger.record() else { return };
    if let Err(error) = ledger.advance(phase, |record| record.script = None) {
        tracing::warn!("--script may be told once more: {error}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;
    use crate::record::Side;
    use crate::record::tests::record;

    #[test]
    fn a_script_is_told_once_where_the_tasks_are() {
        let this = boot();
        for (phase, boot, expected) in [
            (Phase::Moved, &*this, "moved\n"),
            (Phase::Stayed, &this, "stayed\n"),
            (Phase::Deciding, &this, ""),
            (Phase::Stayed, "another", ""),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let told = dir.path().join("told");
            let script = Some(format!("echo $TORPOR_STAGE >>{}", told.display()));
            let record = Record { phase, boot: boot.to_owned(), script, ..record() };
            let mut ledger = Ledger::create(dir.path(), Side::Source, record).unwrap();
            (0..2).for_each(|_| settle(&mut ledger));
            assert_eq!(fs::read_to_string(told).unwrap_or_default(), expected, "{phase:?} {boot}");
        }
    }
}
