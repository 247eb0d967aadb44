//! What shepherds tell, and what that means for their jobs.

use std::os::unix::net::UnixStream;

use serde_json::json;

use super::core::Core;
use super::discard::Discarded;
use super::left::Names;
use super::record::{Place, Record, Unwoken};
use super::{disk, threads};
use crate::files;
use crate::preemption::Dirt;
use crate::scheduler::{JobId, Millis};
use crate::shepherd::checkpoint;
use crate::shepherd::digests::Damage;
use crate::shepherd::message::{Order, Report, RunPhase, Saved};

/// A checkpoint that so many shepherds in a row could not bring back is left as it is until somebody has
/// seen to the cause.
const MOST_TRIES: u32 = 4;

/// After a failure that is not the job's own, the same is not tried for so long.
const BACK_OFF: Millis = 30_000;

impl Core {
    /// Whether a word of that run still counts.
    pub(super) fn counts(&self, id: JobId, run: u64) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.run == run && job.place != Place::Ended)
    }

    /// A shepherd is there.
    pub(super) fn connected(&mut self, id: JobId, run: u64, stream: UnixStream) {
        if self.counts(id, run) {
            self.stall_is_over();
            self.links.insert(id, stream);
        }
    }

    /// A shepherd tells something.
    pub(super) fn report(&mut self, id: JobId, run: u64, report: Report) {
        if !self.counts(id, run) {
            return;
        }
        match report {
            Report::State { phase, checkpoint, .. } => self.found(id, phase, checkpoint),
            Report::Stopped { took_us } => self.stopped(id, took_us),
            Report::Continued => self.back(id, "continued", json!({}), 0),
            Report::Saved(saved) => self.saved(id, &saved),
            Report::Durable { seq } => self.durable(id, seq),
            Report::NotDurable { seq, text } => {
                if let Some(record) = self.jobs.get_mut(&id) {
                    record.kept.retain(|kept| kept.seq != seq);
                }
                self.save(id, Some(("not-durable", json!({ "seq": seq, "why": text }))));
            }
            Report::NotSaved { refused, text } => self.not_saved(id, refused, &text),
            Report::Restored { took_us } => self.restored(id, took_us),
            Report::NotRestored { text, damaged: Some(seq) } => {
                self.damaged(id, run, &Damage { seq, text });
            }
            Report::NotRestored { text, damaged: None } => self.not_restored(id, &text),
            Report::NotVacated { text } => self.not_saved(id, false, &text),
            Report::Remark { text } => self.remark(id, &text),
            Report::BroughtBack { names } => {
                let names = names.into_iter().collect::<Vec<_>>().join(", ");
                self.remark(id, &format!("it left its cgroup and was brought back: {names}"));
            }
            Report::Ended(_) => {}
        }
    }

    /// Adds a sentence to what there is to say about a job.
    pub(super) fn remark(&mut self, id: JobId, text: &str) {
        if self.jobs.get_mut(&id).is_some_and(|record| record.remark(text)) {
            self.save(id, None);
        }
    }

    /// How a job is, when its shepherd is met for the first time or the daemon's view was
    /// old.
    fn found(&mut self, id: JobId, phase: RunPhase, checkpoint: Option<u64>) {
        self.met(id);
        match phase {
            // Another order would not be heard.
            RunPhase::Saving => self.saving.insert(id),
            // What was ordered is done, or was not for how the job is.
            _ => self.saving.remove(&id),
        };
        let durable = checkpoint.filter(|&seq| self.dir(id).durable(seq).exists());
        let Some(record) = self.jobs.get_mut(&id) else { return };
        record.shepherd = true;
        let place = record.place;
        let unheard = durable > record.durable;
        if phase == RunPhase::Asleep && place == Place::Leaving
            || phase == RunPhase::Stopped && place == Place::Stopping
        {
            // It has given way while there was no daemon to hear of it. How long that took nobody knows.
            record.preemptions += 1;
            if let Some(seq) = checkpoint.filter(|_| phase == RunPhase::Asleep) {
                record.saved = record.ran;
                record.keep(seq, record.saved);
            }
        }
        let first = record.started.is_none();
        if first {
            record.started = Some(files::now());
        }
        match (phase, place) {
            (RunPhase::Running, Place::Running) | (RunPhase::Saving, _) => {
                self.save(id, None);
                self.pass_kept_signals(id);
            }
            (RunPhase::Running, _) if first => self.go(id, Place::Running, "started", json!({})),
            (RunPhase::Running, _) => self.runs_again(id),
            (RunPhase::Stopped, Place::Stopped) => self.save(id, None),
            (RunPhase::Stopped, _) => self.go(id, Place::Stopped, "stopped", json!({})),
            (RunPhase::Asleep, Place::Asleep) => self.save(id, None),
            (RunPhase::Asleep, _) => self.go(id, Place::Asleep, "asleep", json!({})),
            (RunPhase::Waking, _) => self.go(id, Place::Waking, "waking", json!({})),
        }
        if let Some(seq) = durable.filter(|_| unheard) {
            self.durable(id, seq);
        }
    }

    /// A job has begun again that gave way by ending, or was lost: that it had to is a cost.
    fn runs_again(&mut self, id: JobId) {
        let mut cost = 0;
        // One that is tried again because it has failed has to anyway.
        let had_to =
            |job: &Record| job.place == Place::Starting && (job.preemptions > 0 || job.lost > 0);
        if let Some(record) = self.jobs.get_mut(&id).filter(|job| had_to(job)) {
            cost = (files::now() - record.since).max(0);
            record.overhead += cost;
            record.paid = record.overhead - record.overhead_before;
        }
        self.go(id, Place::Running, "running", json!({ "cost_ms": cost }));
    }

    fn stopped(&mut self, id: JobId, took_us: u64) {
        let Some(record) = self.jobs.get_mut(&id) else { return };
        record.preemptions += 1;
        record.overhead += millis(took_us);
        let to = record.giving_way.and_then(|way| way.to);
        let cost = millis(took_us);
        let data = json!({ "means": "stop", "to": to, "took_us": took_us, "cost_ms": cost });
        self.go(id, Place::Stopped, "preempted", data);
    }

    /// A job runs again.
    fn back(&mut self, id: JobId, event: &str, mut data: serde_json::Value, took_us: u64) {
        data["cost_ms"] = json!(millis(took_us));
        if let Some(record) = self.jobs.get_mut(&id) {
            record.overhead += millis(took_us);
            // A job that was frozen may have become a checkpoint since, which costs more than was thought.
            record.paid = record.overhead - record.overhead_before;
            (record.unwoken, record.returns) = (None, false);
        }
        self.last_save.insert(id, files::now());
        self.go(id, Place::Running, event, data);
    }

    fn saved(&mut self, id: JobId, saved: &Saved) {
        self.saving.remove(&id);
        let now = files::now();
        self.last_save.insert(id, now);
        self.speed.saved(saved.written, saved.took_us);
        self.note_dirt(id, saved, now);
        if let Some(spec) = self.jobs.get(&id).map(|record| record.spec.clone()) {
            self.was_saved(&spec);
        }
        let Some(record) = self.jobs.get_mut(&id) else { return };
        // One that was frozen before stands still all the time, and one that is copied on write hardly.
        if record.place != Place::Stopped && saved.ended_tasks {
            self.speed.stood_still(saved.written, saved.frozen_us, saved.took_us);
        }
        record.image_bytes = record.image_bytes.max(saved.bytes);
        record.memory = saved.memory;
        (record.losses, record.machine_losses) = (0, 0);
        record.overhead += millis(saved.frozen_us);
        let data = json!({
            "means": "checkpoint", "seq": saved.seq, "bytes": saved.bytes, "written": saved.written,
            "frozen_us": saved.frozen_us, "took_us": saved.took_us, "cow_bytes": saved.cow_bytes,
            "cost_ms": millis(saved.frozen_us),
            "to": record.giving_way.and_then(|way| way.to),
        });
        if !saved.ended_tasks {
            record.saved = record.ran_by(now);
            record.keep(saved.seq, record.saved);
            return self.save(id, Some(("saved", data)));
        }
        // It was frozen before and becomes a checkpoint now: that is one preemption.
        if record.place == Place::Leaving {
            record.preemptions += 1;
        }
        self.go(id, Place::Asleep, "preempted", data);
        if let Some(record) = self.jobs.get_mut(&id) {
            record.saved = record.ran;
            record.keep(saved.seq, record.saved);
        }
        self.save(id, None);
        self.keep_facts();
    }

    /// What a job that runs on has changed since it was saved before says how fast it does.
    fn note_dirt(&mut self, id: JobId, saved: &Saved, now: Millis) {
        if saved.ended_tasks {
            self.dirt.remove(&id);
            return;
        }
        let dirt = match (self.dirt.get(&id), saved.since_ms) {
            (Some(dirt), Some(since)) => dirt.changed(now, saved.written, since),
            _ => Dirt::whole(now),
        };
        self.dirt.insert(id, dirt);
    }

    fn durable(&mut self, id: JobId, seq: u64) {
        let dir = self.dir(id);
        let newest = self.jobs.get(&id).and_then(|record| record.durable);
        if newest.is_some_and(|newest| newest > seq) || !dir.durable(seq).exists() {
            // Its news was overtaken, or it was removed.
            return;
        }
        let gone = disk::keep_only(&dir, self.oldest_needed(id, seq));
        let there = checkpoint::numbers(&dir);
        if let Some(record) = self.jobs.get_mut(&id) {
            record.kept.retain(|kept| there.contains(&kept.seq));
            record.durable = Some(seq);
            record.only_stored = false;
        }
        self.save(id, Some(("durable", json!({ "seq": seq }))));
        self.clear(gone);
        self.count(id, seq);
    }

    /// Counts what the checkpoints of a job take on disk, of which this is the newest. Nobody waits for that: its own files in
    /// them are as many as it likes.
    fn count(&mut self, id: JobId, seq: u64) {
        let dir = self.dir(id);
        let Some(queue) = self.queue.upgrade() else {
            return self.counted(id, seq, disk::bytes(&dir));
        };
        threads::run(move || {
            let bytes = disk::bytes(&dir);
            queue.change(|core| core.counted(id, seq, bytes));
        });
    }

    /// Notes what they take, if there is no newer one, and they were not given up.
    fn counted(&mut self, id: JobId, seq: u64, bytes: u64) {
        let counts = |job: &&mut Record| {
            job.durable == Some(seq) && !job.only_stored && job.image_bytes != bytes
        };
        if let Some(record) = self.jobs.get_mut(&id).filter(counts) {
            record.image_bytes = bytes;
            self.save(id, None);
        }
    }

    /// A job could not give way as it was told to, or be saved: it goes on.
    fn not_saved(&mut self, id: JobId, refused: bool, text: &str) {
        let now = files::now();
        self.saving.remove(&id);
        self.last_save.insert(id, now);
        self.not_before.insert(id, now + BACK_OFF);
        let Some(record) = self.jobs.get(&id) else { return };
        let (place, group) = (record.place, record.spec.group());
        if refused {
            self.refuse(group, text);
        }
        let data = json!({ "why": text, "refused": refused });
        match place {
            Place::Leaving | Place::Stopping => {
                self.go(id, Place::Running, "not-saved", data);
                self.set_held(id, false);
            }
            _ => self.save(id, Some(("not-saved", data))),
        }
    }

    fn restored(&mut self, id: JobId, took_us: u64) {
        let bytes = self.jobs.get(&id).map_or(0, Record::memory);
        self.speed.restored(self.to_fill(id, bytes), took_us);
        self.back(id, "resumed", json!({ "took_us": took_us }), took_us);
        self.keep_facts();
    }

    /// A checkpoint could not be brought back, which is no failure of the job: the next try is with a new
    /// shepherd. When several have failed it is held as it is, until somebody has seen to the cause, or goes
    /// back to the machine that it came from.
    pub(super) fn not_restored(&mut self, id: JobId, text: &str) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.remark(&format!("bring it back: {text}"));
        }
        self.go(id, Place::Asleep, "not-resumed", json!({ "why": text }));
        self.order(id, &Order::Kill);
        let what = "its checkpoint could not be brought back";
        self.fall_back(id, what);
        let asleep = self.jobs.get_mut(&id).filter(|record| record.place == Place::Asleep);
        let Some(record) = asleep else { return };
        let tries = record.unwoken.as_ref().map_or(0, |unwoken| unwoken.tries) + 1;
        record.unwoken = Some(Unwoken { tries, why: text.to_owned() });
        let returns = record.returns;
        match tries < MOST_TRIES {
            true => self.save(id, None),
            false if returns => self.abandon(id, what.to_owned()),
            false => self.set_held(id, true),
        }
    }

    /// A checkpoint is not what was saved: the job goes on from an older one, or from that of the
    /// object store, or begins again.
    pub(super) fn damaged(&mut self, id: JobId, run: u64, damage: &Damage) {
        if !self.counts(id, run) {
            return;
        }
        self.remark(id, &damage.text);
        let brought = self.depot.has_brought(id);
        if let Some(record) = self.jobs.get_mut(&id).filter(|_| brought) {
            // It came from the store like that.
            record.stored = None;
        }
        self.save(id, Some(("damaged", json!({ "seq": damage.seq, "why": damage.text }))));
        let asleep = self.put_aside_if_useless(id, damage.seq);
        let gone = disk::take_with(&self.dir(id), damage.seq);
        self.clear(gone);
        self.order(id, &Order::Kill);
        self.fall_back(id, &damage.text);
        let begins_again = self.jobs.get(&id).is_some_and(|record| record.place == Place::Queued);
        if begins_again {
            self.remark(id, "no checkpoint of it is whole: it begins again");
        }
        if let Some(asleep) = asleep {
            asleep.discard(if begins_again { self.names(id) } else { Names::Stay });
        }
    }

    /// Puts the checkpoint aside that a job sleeps in, if it builds on a damaged one, or is that.
    fn put_aside_if_useless(&self, id: JobId, damaged: u64) -> Option<Discarded> {
        let dir = self.dir(id);
        let newest = checkpoint::numbers(&dir).pop()?;
        checkpoint::chain(&dir, newest).contains(&damaged).then(|| self.put_aside(id)).flatten()
    }
}

fn millis(micros: u64) -> Millis {
    Millis::try_from(micros / 1000).unwrap_or(Millis::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::super::record::Stored;
    use super::*;
    use crate::shepherd::message::{Ending, Exit};
    use crate::spec::Spec;

    /// A daemon with one job, in its second run.
    fn daemon(place: Place) -> (tempfile::TempDir, Core, JobId) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let record = core.jobs.get_mut(&id).unwrap();
        (record.run, record.place, record.shepherd) = (2, place, true);
        record.started = Some(record.since);
        (dir, core, id)
    }

    /// How a job stands, as a shepherd tells a daemon that it meets for the first time.
    #[test]
    fn what_happened_without_a_daemon_is_learned() {
        let (_dir, mut core, id) = daemon(Place::Leaving);
        let dir = core.dir(id);
        std::fs::create_dir(dir.checkpoint(3)).unwrap();
        std::fs::write(dir.durable(3), "").unwrap();
        core.jobs.get_mut(&id).unwrap().ran = 700;
        core.saving.insert(id);
        let state = |phase, checkpoint| Report::State { job: id, run: 2, phase, checkpoint };
        core.report(id, 2, state(RunPhase::Asleep, Some(3)));
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.preemptions, job.durable), (Place::Asleep, 1, Some(3)));
        assert_eq!((job.saved, core.saving.len()), (700, 0));
        // What is told again counts once, and a checkpoint that is not on disk yet does not.
        core.report(id, 2, state(RunPhase::Asleep, Some(4)));
        let job = &core.jobs[&id];
        assert_eq!((job.preemptions, job.durable), (1, Some(3)));
        // One that is being saved is not to be saved meanwhile.
        let (_dir, mut core, id) = daemon(Place::Running);
        core.report(id, 2, state(RunPhase::Saving, None));
        assert!(core.saving.contains(&id));
        let saved = Saved { seq: 4, ..Saved::default() };
        core.report(id, 2, Report::Saved(saved));
        assert!(core.saving.is_empty());
        let (_dir, mut core, id) = daemon(Place::Stopping);
        core.report(id, 2, state(RunPhase::Stopped, None));
        assert_eq!((core.jobs[&id].place, core.jobs[&id].preemptions), (Place::Stopped, 1));
    }

    #[test]
    fn a_new_daemon_does_not_make_a_job_wait_from_the_beginning() {
        for (place, phase) in
            [(Place::Asleep, RunPhase::Asleep), (Place::Stopped, RunPhase::Stopped)]
        {
            let (_dir, mut core, id) = daemon(place);
            core.jobs.get_mut(&id).unwrap().since = 7;
            core.schedule_nothing_yet(&[id]);
            assert_eq!(core.jobs[&id].place, Place::Starting);
            core.report(id, 2, Report::State { job: id, run: 2, phase, checkpoint: None });
            assert_eq!((core.jobs[&id].place, core.jobs[&id].since), (place, 7));
            // Nor does a machine that fails.
            core.jobs.get_mut(&id).unwrap().stored = Some(Stored { seq: 1, saved: 0 });
            core.run_over(id, 2, None);
            assert_eq!((core.jobs[&id].place, core.jobs[&id].since), (Place::Asleep, 7));
        }
    }

    #[test]
    fn all_that_there_is_to_say_is_kept() {
        let (_dir, mut core, id) = daemon(Place::Running);
        core.remark(id, "one");
        core.remark(id, "one");
        core.cancel(id, 15, Some("two".to_owned()));
        core.report(id, 2, Report::NotRestored { text: "three".to_owned(), damaged: None });
        let ending = Ending { lost: vec!["four".to_owned()], ..Ending::good(id, 2) };
        let note = core.jobs[&id].note.clone().unwrap();
        assert!(note.starts_with("one; two; bring it back: three"), "{note}");
        let (_dir, mut core, id) = daemon(Place::Running);
        core.remark(id, "one");
        core.run_over(id, 2, Some(ending));
        assert_eq!(core.jobs[&id].note.as_deref(), Some("lost: four; one"));
    }

    #[test]
    fn who_was_told_to_end_and_vanishes_does_not_begin_again() {
        let lost_after = |signal: i32| {
            let (dir, mut core, id) = daemon(Place::Running);
            core.pass_signal(id, signal, false);
            core.run_over(id, 2, None);
            let job = &core.jobs[&id];
            let found = (job.place, job.exit);
            drop(dir);
            found
        };
        assert_eq!(lost_after(15), (Place::Ended, Some(Exit::Signal(15))));
        assert_eq!(lost_after(10), (Place::Queued, None));
        // Its shepherd is not there yet.
        let (_dir, mut core, id) = daemon(Place::Starting);
        core.pass_signal(id, 15, false);
        assert_eq!(core.jobs[&id].state(), "running");
        assert!(core.jobs[&id].cancelled);
        core.run_over(id, 2, None);
        assert_eq!(core.jobs[&id].state(), "cancelled");
    }

    #[test]
    fn signals_wait_until_the_job_can_get_them() {
        use std::io::BufReader;
        use std::os::unix::net::UnixStream;
        for place in [Place::Asleep, Place::Stopped, Place::Leaving, Place::Waking] {
            let (dir, mut core, id) = daemon(place);
            for (signal, group) in [(10, false), (12, true), (10, false)] {
                core.pass_signal(id, signal, group);
            }
            assert_eq!(core.jobs[&id].signals, [(10, false), (12, true)]);
            drop(core);
            let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
            let (link, shepherd) = UnixStream::pair().unwrap();
            core.links.insert(id, link);
            core.go(id, Place::Running, "resumed", json!({}));
            assert!(core.jobs[&id].signals.is_empty());
            core.links.clear();
            let mut orders = BufReader::new(shepherd);
            for sent in [(10, false), (12, true)] {
                let order = crate::shepherd::message::receive::<Order>(&mut orders).unwrap();
                let Some(Order::Signal { signal, group }) = order else { panic!("{order:?}") };
                assert_eq!((signal, group), sent);
            }
        }
        // What begins anew is another process, which may not be ready for them.
        let (_dir, mut core, id) = daemon(Place::Running);
        core.pass_signal(id, 10, false);
        assert_eq!(core.jobs[&id].signals, [(10, false)]);
        core.lose(id, "its shepherd has vanished");
        assert_eq!((core.jobs[&id].place, core.jobs[&id].signals.len()), (Place::Queued, 0));
    }

    /// A daemon that lets a job run for another machine must be able to tell it whether it has.
    #[test]
    fn one_that_was_over_before_anybody_listened_has_run() {
        let kinds = |place: Place, ran: bool| {
            let (dir, mut core, id) = daemon(place);
            core.jobs.get_mut(&id).unwrap().started = None;
            core.run_over(id, 2, Some(Ending { ran, ..Ending::good(id, 2) }));
            let events = core.store.events(Some(id), 0, 100).unwrap();
            drop(dir);
            events.into_iter().map(|event| event.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(Place::Starting, true), ["submitted", "started", "ended"]);
        assert_eq!(kinds(Place::Starting, false), ["submitted", "ended"]);
        assert_eq!(kinds(Place::Running, true), ["submitted", "ended"]);
    }

    /// Without a checkpoint there is nothing to wake.
    #[test]
    fn a_job_that_comes_back_without_a_checkpoint_is_to_start() {
        for (durable, place) in [(None, Place::Queued), (Some(1), Place::Asleep)] {
            let (_dir, mut core, id) = daemon(Place::Away);
            core.jobs.get_mut(&id).unwrap().durable = durable;
            core.stay(id, "b: it did not run there");
            assert_eq!(core.jobs[&id].place, place);
        }
    }

    /// The world around it has changed: neither the job nor its shepherds have failed.
    #[test]
    fn what_cannot_be_brought_back_waits_for_somebody_or_goes_where_it_came_from() {
        let failed = || Report::NotRestored { text: "no file".to_owned(), damaged: None };
        let tried = |tries: u32, returns: bool| {
            let (dir, mut core, id) = daemon(Place::Waking);
            let job = core.dir(id);
            std::fs::create_dir(job.checkpoint(3)).unwrap();
            std::fs::write(job.durable(3), "").unwrap();
            core.jobs.get_mut(&id).unwrap().returns = returns;
            for _ in 0..tries {
                core.jobs.get_mut(&id).unwrap().place = Place::Waking;
                core.report(id, 2, failed());
            }
            (dir, core, id)
        };
        let (_dir, core, id) = tried(MOST_TRIES - 1, false);
        assert_eq!((core.jobs[&id].place, core.jobs[&id].held), (Place::Asleep, false));
        let (_dir, mut core, id) = tried(MOST_TRIES, false);
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.held, job.losses), (Place::Asleep, true, 0));
        assert_eq!(job.durable, Some(3));
        core.schedule();
        let why = core.explain(&core.reasons[&id]);
        assert!(why.contains("could not be brought back: no file"), "{why}");
        core.resume(id).unwrap();
        assert_eq!((core.jobs[&id].held, &core.jobs[&id].unwoken), (false, &None));
        let (_dir, core, id) = tried(MOST_TRIES, true);
        assert_eq!(core.jobs[&id].exit, Some(Exit::Code(125)));
        // Once it has run here this is its place.
        let (_dir, mut core, id) = tried(1, true);
        core.report(id, 2, Report::Restored { took_us: 1 });
        assert_eq!((core.jobs[&id].returns, &core.jobs[&id].unwoken), (false, &None));
    }

    /// How much of its work is done again follows from the checkpoint that is taken.
    #[test]
    fn an_older_checkpoint_has_less_of_the_work() {
        let (_dir, mut core, id) = daemon(Place::Running);
        let dir = core.dir(id);
        for (seq, ran) in [(1, 1000), (2, 5000)] {
            let record = core.jobs.get_mut(&id).unwrap();
            (record.ran, record.since) = (ran, files::now());
            let place = dir.checkpoint(seq);
            std::fs::create_dir(&place).unwrap();
            let base = (seq > 1).then(|| seq - 1);
            let record = checkpoint::CheckpointRecord {
                seq,
                base,
                ..checkpoint::CheckpointRecord::default()
            };
            let text = serde_json::to_vec(&record).unwrap();
            std::fs::write(place.join("record.json"), text).unwrap();
            std::fs::write(dir.durable(seq), "").unwrap();
            core.report(id, 2, Report::Saved(Saved { seq, ..Saved::default() }));
            core.report(id, 2, Report::Durable { seq });
        }
        let damage = Damage { seq: 2, text: "checkpoint 2 is damaged: x".to_owned() };
        core.damaged(id, 2, &damage);
        let job = core.jobs[&id].clone();
        assert_eq!((job.place, job.durable, job.losses), (Place::Asleep, Some(1), 0));
        assert!(job.lost >= 4000 && job.ran >= 1000, "{job:?}");
        assert!(!dir.checkpoint(2).exists() && job.note.unwrap().contains("is damaged"));
    }

    /// Whoever has displaced it need not wait for the disk.
    #[test]
    fn the_slots_of_a_job_are_free_before_its_checkpoint_is_on_disk() {
        let (_dir, mut core, id) = daemon(Place::Leaving);
        assert!(core.jobs[&id].place.holds_slots());
        core.report(id, 2, Report::Saved(Saved { seq: 1, ended_tasks: true, ..Saved::default() }));
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.durable), (Place::Asleep, None));
        assert!(!job.place.holds_slots());
    }

    #[test]
    fn the_word_of_an_earlier_run_changes_nothing() {
        let (_dir, mut core, id) = daemon(Place::Running);
        let before = core.jobs[&id].clone();
        let say = |core: &mut Core, run: u64| {
            let state = Report::State { job: id, run, phase: RunPhase::Asleep, checkpoint: None };
            let saved = Saved { seq: 9, ended_tasks: true, ..Saved::default() };
            core.report(id, run, state);
            core.report(id, run, Report::Saved(saved));
            core.report(id, run, Report::Durable { seq: 9 });
            core.run_over(id, run, Some(Ending::good(id, run)));
        };
        say(&mut core, 1);
        assert_eq!(core.jobs[&id], before);
        say(&mut core, 2);
        assert_eq!(
            (core.jobs[&id].place, core.jobs[&id].exit),
            (Place::Ended, Some(Exit::Code(0)))
        );
        // Nor does one that comes when it is over.
        let before = core.jobs[&id].clone();
        say(&mut core, 2);
        assert_eq!(core.jobs[&id], before);
    }
}
