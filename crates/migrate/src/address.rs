//! What the user wants to do when addresses move with the tasks.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::cancel::Cancel;
use crate::engine::wait_readable;
use crate::error::{Context, Error, Result};
use crate::group::Group;
use crate::host::boot;
use crate::record::{Ledger, Phase, Record};

/// How long a script may take. Tasks are stopped meanwhile, or somebody waits to be told where they are.
const PATIENCE: Duration = Duration::from_secs(60);

/// Has a shell run a script, its argument, in a process group that ends with whoever has started it: its standard input
/// is closed without a word then. Whoever settles the migration after that must not find an earlier script still at work,
/// so what ends the group has the lock of the record, which is the standard output here.
const LEASHED: &str = "exec 3<&0 4>&1 </dev/null >/dev/null
{ read -r word <&3 || kill -KILL 0; } &
exec 3<&- 4>&-
exec /bin/sh -c \"$1\"";

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
    begun: Instant,
    /// Ends it if this process is killed.
    leash: UnixStream,
}

impl Script {
    /// Starts the one of a migration, if it has one.
    ///
    /// # Errors
    /// If there is no shell, or the kernel starts no process.
    pub(crate) fn start(ledger: &Ledger, stage: Stage) -> Result<Option<Self>> {
        let Record { id, script: Some(script), .. } = ledger.record() else { return Ok(None) };
        let stage = stage.name();
        let what = format!("--script {script} at {stage}");
        let (leash, end) = UnixStream::pair().context(|| what.clone())?;
        let lock = ledger.lock().context(|| what.clone())?;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", LEASHED, "sh", script]);
        shell.env("TORPOR_STAGE", stage).env("TORPOR_MIGRATION", id);
        shell.stdin(Stdio::from(OwnedFd::from(end))).stdout(Stdio::from(lock));
        let group = Group::start(&mut shell, "--script")?;
        Ok(Some(Self { group, what, begun: Instant::now(), leash }))
    }

    /// How long it may still take.
    ///
    /// # Errors
    /// If that was too long.
    pub(crate) fn time_left(&self) -> Result<Duration> {
        let left = PATIENCE.checked_sub(self.begun.elapsed());
        left.ok_or_else(|| {
            Error::refused(format!("{} takes more than {} s", self.what, PATIENCE.as_secs()))
        })
    }

    /// Waits for its end; with `cancel`, or for somebody who cancels.
    ///
    /// # Errors
    /// If it ends with a status other than 0, or takes too long; if somebody cancels.
    pub(crate) fn finish(self, cancel: Option<&Cancel>) -> Result<()> {
        loop {
            let fds: Vec<_> = [self.as_fd()].into_iter().chain(cancel.map(AsFd::as_fd)).collect();
            if wait_readable(&fds, Some(self.time_left()?))?[0] {
                break;
            }
            if cancel.is_some_and(Cancel::is_due) {
                return Err(Error::Cancelled);
            }
        }
        let status = self.group.finish()?;
        // What it has left in the background may stay.
        let _ = (&self.leash).write_all(b"\n");
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

/// Runs the script of a migration. With `cancel`, it is ended with all that it has started when somebody cancels.
///
/// # Errors
/// If the script cannot be started, ends with a status other than 0, or takes too long; if somebody cancels.
pub(crate) fn run(ledger: &Ledger, stage: Stage, cancel: Option<&Cancel>) -> Result<()> {
    Script::start(ledger, stage)?.map_or(Ok(()), |script| script.finish(cancel))
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
    if let Err(error) = run(ledger, stage, None) {
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
