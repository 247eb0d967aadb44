//! What is kept on disk of each change, and what becomes of that where it cannot be.

use serde_json::Value;
use torpor_worker::tell;

use super::core::Core;
use super::kept::kept_with;
use super::store::{Along, StoreError};
use crate::files;
use crate::scheduler::JobId;

/// What is asked for once takes no more bytes of the disk, as a rule.
const CHANGES: u64 = 256 << 10;

impl Core {
    /// Keeps a job as it is now; `event` says what has happened to it. One that cannot be kept is kept as
    /// soon as there is room ([`catch_up`](Self::catch_up)).
    pub(super) fn save(&mut self, id: JobId, event: Option<(&str, Value)>) {
        if let Err(e) = self.keep(id, event) {
            tell!("torpor queue: {e}");
            self.unkept.insert(id);
            self.trouble = Some(e.to_string());
        }
    }

    /// Keeps a job as it is now, and all that has changed with it, at once.
    fn keep(&mut self, id: JobId, event: Option<(&str, Value)>) -> Result<(), StoreError> {
        let Some(record) = self.jobs.get_mut(&id) else { return Ok(()) };
        let withdrawals = kept_with(&self.withdrawals, &[id]);
        let usage = self.unkept_usage.then_some(&self.usage);
        let along = Along { usage, withdrawals: withdrawals.as_deref() };
        self.store.save(record, files::now(), event, along)?;
        if withdrawals.is_some() {
            self.were_kept_with(&[id]);
        }
        self.unkept_usage = false;
        self.unkept.remove(&id);
        self.trouble = None;
        Ok(())
    }

    /// Does what somebody asks for: what is answered as done is on disk. Where nothing can be written nothing
    /// is begun.
    ///
    /// # Errors
    /// What `work` refuses; if the database cannot be written, before or after.
    pub(super) fn asked<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, Undone> {
        self.has_room_for_changes().map_err(Undone::Unkept)?;
        self.store.try_to_write(files::now()).map_err(Undone::unkept)?;
        let done = work(self).map_err(Undone::Refused)?;
        self.catch_up().map_err(Undone::unkept)?;
        Ok(done)
    }

    /// Whether there is room on the disk for what is asked for. That something small can be written says little: it may take the
    /// place of what could not be, and then all else is done and not kept.
    fn has_room_for_changes(&self) -> Result<(), String> {
        let system = rustix::fs::statvfs(&self.data);
        // One that does not tell has room, as far as anybody knows.
        match system.is_ok_and(|system| system.f_bavail.saturating_mul(system.f_frsize) < CHANGES) {
            true => Err("the state of the queue: the disk is full: make room on it".to_owned()),
            false => Ok(()),
        }
    }

    /// Keeps the jobs that could not be kept when something happened to them.
    ///
    /// # Errors
    /// If the database does not take one of them: the disk is still full.
    pub(super) fn catch_up(&mut self) -> Result<(), StoreError> {
        while let Some(&id) = self.unkept.first() {
            self.keep(id, None)?;
            // It may have been forgotten.
            self.unkept.remove(&id);
        }
        Ok(())
    }

    /// Whether a job is on disk as it is here.
    pub(super) fn is_kept(&self, id: JobId) -> bool {
        !self.unkept.contains(&id)
    }

    /// Keeps what was learned.
    pub(super) fn keep_facts(&mut self) {
        let kept = self.store.keep_learned(&self.speed, &self.usage, &self.failures);
        if let Err(e) = kept {
            self.trouble = Some(e.to_string());
        }
    }
}

/// Why something was not done that somebody has asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Undone {
    /// It cannot be done; a sentence.
    Refused(String),
    /// It could not be kept on disk.
    Unkept(String),
}

impl Undone {
    fn unkept(error: StoreError) -> Self {
        Self::Unkept(error.to_string())
    }
}
