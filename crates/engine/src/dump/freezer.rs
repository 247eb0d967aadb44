//! The cgroup that a runtime has paused its container with before it asks for a dump, as
//! containerd does.
//!
//! Paused tasks can be seized, but neither stop nor make a system call for the tracer until
//! they are thawed. The pause is taken back once all are seized, and put in force again
//! before those that go on are let go.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use torpor_kernel::cgroup::Freezer as Pause;

use crate::error::{Context, Result};
use crate::guardian::{Guardian, Turn, Undo, Way};

/// The state that a cgroup had: a file, and what was in it. Tasks that are paused again can do
/// nothing for what else is undone.
pub(crate) static STATE: Way = Way {
    turn: Turn::Last,
    ..Way::new("write", |words, _| {
        let (file, state) = (words.text(0)?, words.text(1)?);
        std::fs::write(file, state).context(|| format!("write {file}"))
    })
};

/// A frozen cgroup, or none.
#[derive(Debug, Default)]
pub(crate) struct Freezer {
    pause: Option<Pause>,
    thawed: bool,
}

impl Freezer {
    /// The cgroup at `dir`, as far as it is frozen.
    ///
    /// # Errors
    /// If its state cannot be read.
    pub(crate) fn of(dir: Option<&Path>) -> Result<Self> {
        let Some(dir) = dir else { return Ok(Self::default()) };
        let pause = Pause::of(dir);
        let frozen = pause.is_set()?;
        Ok(Self { pause: frozen.then_some(pause), thawed: false })
    }

    /// Whether its tasks are paused now.
    pub(crate) fn is_frozen(&self) -> bool {
        self.pause.is_some() && !self.thawed
    }

    /// Whether its tasks were paused by somebody else, and will be again.
    pub(crate) fn was_frozen(&self) -> bool {
        self.pause.is_some()
    }

    /// Device and inode of the file of a group that was frozen: what it says meanwhile
    /// is not what it said.
    pub(crate) fn frozen_before(&self) -> Option<(u64, u64)> {
        let file = std::fs::metadata(&self.pause.as_ref()?.file).ok()?;
        Some((file.dev(), file.ino()))
    }

    /// Lets its tasks run into the stops that await them.
    ///
    /// # Errors
    /// If the group cannot be told, or the guardian is gone.
    pub(crate) fn thaw(&mut self, guardian: &Guardian) -> Result<()> {
        let Some(pause) = &self.pause else { return Ok(()) };
        guardian.watch(&undo(pause))?;
        pause.set(false)?;
        self.thawed = true;
        Ok(())
    }

    /// Pauses the tasks again, which are to be let go next.
    ///
    /// # Errors
    /// If the group cannot be told.
    pub(crate) fn freeze_again(&mut self, guardian: &Guardian) -> Result<()> {
        match &self.pause {
            Some(pause) if std::mem::take(&mut self.thawed) => {
                pause.set(true)?;
                guardian.forget(&undo(pause))
            }
            _ => Ok(()),
        }
    }

    /// The tasks are dead: nobody is to be paused again.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn abandon(&mut self, guardian: &Guardian) -> Result<()> {
        self.thawed = false;
        self.pause.take().map_or(Ok(()), |pause| guardian.forget(&undo(&pause)))
    }
}

fn undo(pause: &Pause) -> Undo {
    let file = pause.file.to_string_lossy().into_owned();
    STATE.undo(vec![file, pause.frozen.to_owned()])
}

/// Only the net below, for a dump that ended before it had a tree to let go.
impl Drop for Freezer {
    fn drop(&mut self) {
        if let (Some(pause), true) = (&self.pause, self.thawed)
            && let Err(e) = pause.set(true)
        {
            tracing::warn!("{e}");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_what_was_frozen_is_frozen_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("freezer.state");
        let state = || std::fs::read_to_string(&file).unwrap();
        let guardian = Guardian::default();

        std::fs::write(&file, "THAWED\n").unwrap();
        let mut freezer = Freezer::of(Some(dir.path())).unwrap();
        assert!(!freezer.is_frozen());
        freezer.freeze_again(&guardian).unwrap();
        drop(freezer);
        assert_eq!(state(), "THAWED\n");

        std::fs::write(&file, "FROZEN\n").unwrap();
        let mut freezer = Freezer::of(Some(dir.path())).unwrap();
        assert!(freezer.is_frozen());
        freezer.thaw(&guardian).unwrap();
        assert_eq!(state(), "THAWED");
        drop(freezer);
        assert_eq!(state(), "FROZEN");

        let mut freezer = Freezer::of(Some(dir.path())).unwrap();
        freezer.thaw(&guardian).unwrap();
        freezer.abandon(&guardian).unwrap();
        drop(freezer);
        assert_eq!(state(), "THAWED");
    }
}
