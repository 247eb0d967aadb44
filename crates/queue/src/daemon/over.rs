//! Jobs that are over: what goes with them, and what becomes of those that were to run after them.

use std::collections::BTreeSet;

use serde_json::json;

use super::core::Core;
use super::disk::{self, Gone};
use super::record::{Place, Record, cut};
use super::threads;
use crate::files;
use crate::scheduler::JobId;
use crate::shepherd;
use crate::shepherd::message::{Exit, LOST};

impl Core {
    /// A job is over.
    pub(super) fn end(&mut self, id: JobId, exit: Exit, note: Option<String>) {
        let now = files::now();
        // One that runs, here or elsewhere, has what its last dump has left.
        let may_sleep = |job: &Record| !matches!(job.place, Place::Running | Place::Away);
        let asleep =
            self.jobs.get(&id).is_some_and(may_sleep).then(|| self.put_aside(id)).flatten();
        if let Some(record) = self.jobs.get_mut(&id) {
            record.exit = Some(exit);
            record.ended = Some(now);
            // What a client tells of a job that went well comes first.
            let earlier = record.note.take();
            for text in note.iter().chain(&earlier) {
                record.remark(text);
            }
            record.shepherd = false;
            record.stored = None;
        }
        let note = note.as_deref().map(cut);
        self.go(id, Place::Ended, "ended", json!({ "exit": exit.number(), "note": note }));
        self.links.remove(&id);
        self.ending.remove(&id);
        self.signalled.remove(&id);
        self.dirt.remove(&id);
        self.not_before.remove(&id);
        self.last_save.remove(&id);
        self.saving.remove(&id);
        self.preparations.remove(&id);
        self.compared.take(id);
        self.drop_ahead(id);
        self.count_stored();
        self.keep_facts();
        let dir = self.dir(id);
        let gone = disk::take_all(&dir);
        if let Some(asleep) = asleep {
            asleep.discard(self.names(id));
        }
        let is_lost = self.jobs.get(&id).is_some_and(|record| {
            // Its output may be what is lost, of which there is no more than that.
            let is_lost = record.note.as_deref().is_some_and(|note| note.starts_with(LOST));
            is_lost && !record.spec.artefacts.is_empty()
        });
        self.clear(if is_lost { gone } else { gone.and(disk::own(&dir)) });
        shepherd::cgroups(&dir).remove();
        // Followers look for it instead of asking all the time.
        let _ = std::fs::write(dir.path().join("ended"), "");
        self.end_dependents(id);
    }

    /// Removes what was taken away. Nobody waits for that but who [makes room](Self::make_room) on the disk.
    pub(super) fn clear(&mut self, gone: Gone) {
        let Some(queue) = self.queue.upgrade().filter(|_| !gone.is_empty()) else {
            return gone.remove();
        };
        self.clearing += 1;
        threads::run(move || {
            gone.remove();
            queue.lock().clearing -= 1;
        });
    }

    /// A job is over for a cause that is not its own.
    pub(super) fn abandon(&mut self, id: JobId, note: String) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.given_up = true;
        }
        self.end(id, Exit::Code(125), Some(note));
    }

    /// Jobs that were to run after one that has failed never will.
    fn end_dependents(&mut self, id: JobId) {
        if !self.has_failed(id) {
            return;
        }
        let waiting = self.waiting().filter(|job| job.spec.after.contains(&id));
        let ids: Vec<JobId> = waiting.map(|job| job.id).collect();
        for dependent in ids {
            self.end_dependent(dependent, id);
        }
    }

    /// The daemon before may have been killed before it came to that, or have judged otherwise whether one has failed.
    pub(super) fn end_dependents_of_all(&mut self) {
        let first: BTreeSet<JobId> =
            self.waiting().flat_map(|job| job.spec.after.iter().copied()).collect();
        for id in first {
            self.end_dependents(id);
        }
    }

    /// Jobs that have not begun. What has, as an earlier version let it, is not ended for how that judged.
    fn waiting(&self) -> impl Iterator<Item = &Record> {
        self.jobs.values().filter(|job| job.place.waits() && job.run == 0)
    }

    /// Whether nothing can run any more that is to run after a job.
    pub(super) fn has_failed(&self, id: JobId) -> bool {
        let ended = self.jobs.get(&id).filter(|job| job.place == Place::Ended);
        ended.is_some_and(|job| !job.has_succeeded())
    }

    pub(super) fn end_dependent(&mut self, id: JobId, failed: JobId) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.cancelled = true;
        }
        let is_cancelled = self.jobs.get(&failed).is_some_and(|job| job.cancelled);
        let how = if is_cancelled { "was cancelled" } else { "has failed" };
        let note = format!("job {failed}, which it was to run after, {how}");
        self.end(id, Exit::Code(125), Some(note));
    }
}
