//! How runs end, and what becomes of their jobs.

use serde_json::json;
use signal_hook::consts::SIGKILL;

use super::core::Core;
use super::disk;
use super::record::Place;
use crate::files;
use crate::preemption::Means;
use crate::scheduler::JobId;
use crate::shepherd;
use crate::shepherd::checkpoint;
use crate::shepherd::message::{Ending, Exit, LOST};
use crate::spec::Limits;

/// A run that is lost so often without a checkpoint in between is not started again.
const MOST_LOSSES: u32 = 3;

/// Nor is one that so many failures of the machine in a row have taken: it may be their cause.
const MOST_MACHINE_LOSSES: u32 = 30;

impl Core {
    /// The run would end at once, and so would any other of the job.
    pub(super) fn cannot_begin(&mut self, id: JobId, run: u64, why: String) {
        if self.counts(id, run) {
            self.abandon(id, why);
        }
    }

    /// A shepherd could not begin a run, as it has said: one that was to bring a checkpoint back has not done
    /// that.
    fn not_begun(&mut self, id: JobId, text: &str) {
        match self.jobs.get(&id).is_some_and(|record| record.durable.is_some()) {
            true => self.not_restored(id, text),
            false => self.lose(id, text),
        }
    }

    /// What a shepherd that ended without a last word has said about it.
    fn complaint(&self, id: JobId, run: u64) -> Option<String> {
        let log = self.dir(id).run(run).join(shepherd::LOG);
        let text = std::fs::read_to_string(log).unwrap_or_default();
        text.lines().next_back().map(|line| line.chars().take(500).collect())
    }

    /// A run is over, with its last word or without.
    pub(super) fn run_over(&mut self, id: JobId, run: u64, ending: Option<Ending>) {
        if !self.counts(id, run) {
            return;
        }
        self.met(id);
        self.links.remove(&id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        if !record.shepherd && matches!(record.place, Place::Asleep | Place::Queued) {
            // It was given up before: its job goes on in another run.
            return;
        }
        record.shepherd = false;
        let place = record.place;
        if ending.as_ref().is_some_and(|ending| ending.ran) {
            self.has_run(id);
        }
        let Some(record) = self.jobs.get(&id) else { return };
        let too_much = ending.as_ref().is_some_and(|ending| ending.out_of_disk);
        let killed = place == Place::Leaving
            && !too_much
            && record.giving_way.is_some_and(|way| way.means == Means::Kill);
        let wanted = record.cancelled || self.ending.contains_key(&id);
        // Its shepherd was told to go, which the daemon that did that has not lived to see: the job goes on in another run.
        let is_let_go = |ending: &Ending| {
            let slept = matches!(place, Place::Asleep | Place::Queued);
            slept && ending.exit == Exit::Signal(SIGKILL)
        };
        match ending {
            None => match (self.complaint(id, run), place) {
                (Some(why), Place::Starting) => self.not_begun(id, &why),
                (Some(why), _) => self.lose(id, &why),
                (None, _) => self.lose(id, "its shepherd has vanished"),
            },
            Some(ending) if is_let_go(&ending) && !wanted => self.save(id, None),
            Some(_) if killed && !wanted => self.start_over(id, Means::Kill),
            Some(ending) if ending.gave_way && !wanted => self.start_over(id, Means::Command),
            Some(ending) => self.finished(id, &ending),
        }
    }

    /// A job has run. One that was over before anybody listened is said to have begun here: the machine that it
    /// came from lets it begin again otherwise.
    fn has_run(&mut self, id: JobId) {
        let Some(record) = self.jobs.get_mut(&id) else { return };
        if !matches!(record.place, Place::Starting | Place::Waking) {
            return;
        }
        let first = record.started.is_none();
        record.started.get_or_insert_with(files::now);
        let event = if first { "started" } else { "running" };
        self.go(id, Place::Running, event, json!({}));
    }

    /// A job has given way by ending; it starts again later. One that has saved its state itself has it newer
    /// than any checkpoint.
    fn start_over(&mut self, id: JobId, means: Means) {
        let now = files::now();
        if means == Means::Command {
            self.begin_anew(id);
        }
        let Some(record) = self.jobs.get_mut(&id) else { return };
        record.preemptions += 1;
        let to = record.giving_way.and_then(|way| way.to);
        let place = if record.durable.is_some() { Place::Asleep } else { Place::Queued };
        record.go(place, now);
        let mut data = json!({ "means": means, "to": to });
        if means == Means::Command {
            record.saved = record.ran;
            // It has saved itself instead of working, since it was told to.
            let cost = (now - record.giving_way.map_or(now, |way| way.at)).max(0);
            record.overhead += cost;
            data["cost_ms"] = json!(cost);
        } else {
            let lost = record.ran - record.saved;
            record.lost += lost;
            record.ran = record.saved;
            data["lost_ms"] = json!(lost);
        }
        self.save(id, Some(("preempted", data)));
    }

    /// A run is gone without a last word: the machine or its shepherd has failed. The job
    /// goes on from its last checkpoint, or begins again; one that was told to end a moment ago is over.
    pub(super) fn lose(&mut self, id: JobId, why: &str) {
        if let Some((signal, at)) = self.signalled.remove(&id)
            && files::now() - at <= self.config.grace
        {
            // It was told to end, and has: nobody wants it to begin again.
            return self.end(id, Exit::Signal(signal), Some(why.to_owned()));
        }
        let Some(record) = self.jobs.get_mut(&id) else { return };
        let worked = matches!(record.place, Place::Running | Place::Leaving | Place::Stopping);
        let before = record.durable;
        if record.boot == checkpoint::boot() {
            record.losses += 1;
        } else {
            record.machine_losses += 1;
        }
        self.fall_back(id, why);
        if worked {
            self.failures.lost();
            self.keep_facts();
        }
        let left = self.jobs.get_mut(&id).filter(|record| record.place != Place::Ended);
        let Some(record) = left else { return };
        if record.durable > before {
            // It was saved before it was lost, and nobody was left to tell that.
            (record.losses, record.machine_losses) = (0, 0);
        }
        self.give_up_if_lost_often(id, why);
    }

    /// Gives a job up that was lost too often in a row.
    pub(super) fn give_up_if_lost_often(&mut self, id: JobId, why: &str) {
        let left = self.jobs.get(&id).filter(|record| record.place != Place::Ended);
        let Some(record) = left else { return };
        if record.losses > MOST_LOSSES || record.machine_losses > MOST_MACHINE_LOSSES {
            let losses = record.losses + record.machine_losses;
            self.abandon(id, format!("{why}, {losses} times without a checkpoint in between"));
        }
    }

    /// A job that has no run any more goes on from the newest checkpoint that there is, or begins again. Those that were
    /// complete when its run was lost were [adopted](disk::adopt) before, by whoever tells of that: all of them is read for it.
    pub(super) fn fall_back(&mut self, id: JobId, why: &str) {
        let dir = self.dir(id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        (record.shepherd, record.rewritten) = (false, true);
        let heard = record.durable;
        let here = disk::newest(&dir);
        record.durable = here.max(record.stored.map(|stored| stored.seq));
        record.only_stored = here < record.durable;
        if let Some(stored) = record.stored.filter(|_| record.only_stored) {
            record.saved = stored.saved;
        } else if let Some(kept) = record.kept.iter().find(|kept| Some(kept.seq) == here) {
            record.saved = kept.saved;
        } else if let Some(seq) = here.filter(|_| here > heard) {
            // Nobody was left to tell of it.
            record.saved = record.ran_by(checkpoint::made(&dir.checkpoint(seq)).unwrap_or(0));
            record.keep(seq, record.saved);
        }
        let now = files::now();
        let place = if record.durable.is_some() { Place::Asleep } else { Place::Queued };
        let before = record.ran;
        record.go(place, now);
        // How long it has worked until the machine went down, nobody knows.
        let is_known = record.boot == checkpoint::boot();
        let worked = if is_known { record.ran - before } else { 0 };
        if record.durable.is_none() {
            record.saved = 0;
        }
        let lost = (record.ran - record.saved).max(0);
        record.lost += lost;
        record.ran -= lost;
        let begins_again = place == Place::Queued && record.started.is_some();
        let (cancelled, class) = (record.cancelled, record.spec.class.clone());
        self.count_work(id, worked);
        self.saving.remove(&id);
        self.dirt.remove(&id);
        self.save(id, Some(("lost", json!({ "why": why, "lost_ms": lost }))));
        let cgroups = shepherd::cgroups(&dir);
        // What was frozen when its shepherd was killed stays there, killed and frozen, and so would the next run.
        let _ = cgroups.set_frozen(false);
        cgroups.remove();
        if cancelled {
            self.end(id, Exit::Signal(SIGKILL), None);
        } else if begins_again && !self.class_of(&class).begins_again {
            self.abandon(id, format!("{why}, and jobs of its class do not begin again"));
        }
    }

    /// The next run of a job is from its beginning, and adds to what the job has written.
    fn begin_anew(&mut self, id: JobId) {
        let lengths = self.output_lengths(id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        (record.durable, record.stored, record.only_stored) = (None, None, false);
        record.kept.clear();
        record.base = lengths;
        self.dirt.remove(&id);
        let gone = disk::take_all(&self.dir(id));
        self.clear(gone);
        self.count_stored();
    }

    fn finished(&mut self, id: JobId, ending: &Ending) {
        let Some(record) = self.jobs.get_mut(&id) else { return };
        let again = ending.exit != Exit::Code(0)
            && !record.cancelled
            && !self.ending.contains_key(&id)
            && record.failures < record.spec.retries;
        match again {
            true => self.try_again(id, ending.exit),
            false => {
                let note = note(ending, &record.spec.limits);
                self.end(id, ending.exit, note);
                if ending.out_of_disk {
                    // Others wait for the room, whatever of it is lost.
                    let own = disk::own(&self.dir(id));
                    self.clear(own);
                }
            }
        }
    }

    /// A job that has failed begins again, with all of its time.
    fn try_again(&mut self, id: JobId, exit: Exit) {
        self.begin_anew(id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        let before = record.ran;
        record.go(Place::Queued, files::now());
        let worked = record.ran - before;
        record.failures += 1;
        (record.ran, record.saved) = (0, 0);
        self.count_work(id, worked);
        self.save(id, Some(("retried", json!({ "exit": exit.number() }))));
    }
}

/// What there is to say about how a job ended.
fn note(ending: &Ending, limits: &Limits) -> Option<String> {
    let mut parts = Vec::new();
    if !ending.lost.is_empty() {
        parts.push(format!("{LOST}{}", ending.lost.join("; ")));
    }
    if ending.out_of_memory {
        parts.push("it was out of its memory".to_owned());
    }
    if ending.out_of_pids {
        parts.push(format!("it had as many processes and threads as {}", limits.of_pids()));
    }
    if ending.out_of_disk {
        parts.push(format!("it has written more than {}", limits.of_disk()));
    }
    if !ending.leftover.is_empty() {
        let mut names = ending.leftover.clone();
        names.sort();
        names.dedup();
        let count = ending.leftover.len();
        parts.push(format!("{count} of its processes were left and killed: {}", names.join(", ")));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::super::config::Config;
    use super::super::record::Stored;
    use super::*;
    use crate::spec::Spec;

    /// A job that runs in its first run since five seconds, and two thousand milliseconds of work before.
    fn running() -> (tempfile::TempDir, Core, JobId) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(Spec { retries: 1, ..spec }, None).unwrap();
        let record = core.jobs.get_mut(&id).unwrap();
        (record.run, record.place, record.shepherd) = (1, Place::Running, true);
        (record.ran, record.saved, record.since) = (2_000, 1_000, files::now() - 5_000);
        (dir, core, id)
    }

    /// Whoever would have told of it was lost.
    #[test]
    fn what_is_in_a_checkpoint_that_nobody_told_of_is_not_lost() {
        let (_dir, mut core, id) = running();
        let place = core.dir(id).checkpoint(1);
        std::fs::create_dir(&place).unwrap();
        std::fs::write(core.dir(id).durable(1), "").unwrap();
        let record = std::fs::File::create(place.join("record.json")).unwrap();
        let made = core.jobs[&id].since + 3_000;
        let made = Duration::from_millis(u64::try_from(made).unwrap());
        record.set_modified(SystemTime::UNIX_EPOCH + made).unwrap();
        core.run_over(id, 1, None);
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.durable), (Place::Asleep, Some(1)));
        assert_eq!((job.ran, job.saved), (5_000, 5_000));
        assert_eq!(job.kept, [Stored { seq: 1, saved: 5_000 }]);
        // What it has done since is.
        assert!(job.lost >= 2_000, "{} ms", job.lost);
    }

    /// A daemon has its shepherd go, since another run or another machine is to have the job, and is killed before it has gone.
    #[test]
    fn who_sleeps_does_not_end_with_its_shepherd() {
        for place in [Place::Asleep, Place::Queued] {
            for (exit, cancelled, ends) in [
                (Exit::Signal(SIGKILL), false, false),
                (Exit::Signal(SIGKILL), true, true),
                // It had run on, and that could not be kept.
                (Exit::Code(0), false, true),
            ] {
                let (_dir, mut core, id) = running();
                let record = core.jobs.get_mut(&id).unwrap();
                (record.place, record.shepherd, record.cancelled) = (place, false, cancelled);
                core.schedule_nothing_yet(&[id]);
                core.run_over(id, 1, Some(Ending { exit, ..Ending::good(id, 1) }));
                let job = &core.jobs[&id];
                assert_eq!(job.exit.is_some(), ends, "{place:?} {exit:?} {cancelled}");
                assert!(ends || job.place == place && !job.shepherd, "{job:?}");
            }
        }
    }

    /// What an attempt has run that has failed is no part of the next one's time, nor lost with it.
    #[test]
    fn each_attempt_has_all_of_its_time() {
        let (_dir, mut core, id) = running();
        let ending = Ending { exit: Exit::Code(1), ..Ending::good(id, 1) };
        core.run_over(id, 1, Some(ending));
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.failures), (Place::Queued, 1));
        assert_eq!((job.ran, job.saved, job.lost), (0, 0, 0));
        // Its owner has had that time all the same.
        let used: f64 = core.usage.owners.values().sum();
        assert!(used >= 5.0, "{used} s");
    }
}
