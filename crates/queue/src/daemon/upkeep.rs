//! What becomes due by time: limits, checkpoints, ends that were asked for.

use serde_json::json;
use signal_hook::consts::SIGTERM;

use super::core::Core;
use super::disk;
use super::link::Run;
use super::record::{Place, Record};
use crate::files;
use crate::preemption::{self, Means};
use crate::scheduler::{JobId, Millis};
use crate::shepherd;
use crate::shepherd::message::{Exit, Order};

/// Checkpoints that nobody needs yet leave so much of their file system free, and a tenth of it if that is less.
const SPARE: u64 = 1 << 30;

/// So long a job has that was killed, and hands over its files: as long as more of them is copied it has more.
const STUCK: Millis = 60_000;

impl Core {
    /// Does what has become due.
    pub(super) fn look_after(&mut self) {
        self.follow_clock();
        let now = files::now();
        // Tried again with the next change or beat.
        let _ = self.catch_up();
        let live: Vec<JobId> =
            self.jobs.values().filter(|job| job.place != Place::Ended).map(|job| job.id).collect();
        for id in live {
            self.enforce_time_limit(id, now);
            self.end_orphan(id, now);
            self.bring_to_an_end(id, now);
            self.save_if_due(id, now);
            self.sink_if_due(id, now);
            self.preempt_if_held(id, now);
            self.transfer_if_ready(id);
        }
        self.watch_memory();
        self.make_room();
        self.tend_store(now);
    }

    /// Gives up checkpoints on disk until all of them take no more than they may: those that are
    /// in the object store as well, then those that are there only because the machine might
    /// fail, the largest of each first. Those that jobs sleep in and that are nowhere else stay.
    fn make_room(&mut self) {
        while self.lacks_room() {
            let spare = self.jobs.values().filter(|job| {
                let busy = self.saving.contains(&job.id)
                    || self.is_storing(job.id)
                    || self.depot.has_brought(job.id);
                let running = job.place == Place::Running;
                let asleep = job.place == Place::Asleep && self.is_stored(job);
                (running || asleep) && job.durable.is_some() && !job.only_stored && !busy
            });
            let cheapest =
                |job: &&Record| (self.is_stored(job), job.place == Place::Running, job.image_bytes);
            let Some(id) = spare.max_by_key(cheapest).map(|job| job.id) else {
                return;
            };
            let gone = disk::take_all(&self.dir(id));
            let mut bytes = 0;
            if let Some(record) = self.jobs.get_mut(&id) {
                bytes = record.image_bytes;
                record.durable = record.stored.map(|stored| stored.seq);
                record.saved = record.stored.map_or(0, |stored| stored.saved);
                record.kept.clear();
                record.only_stored = record.stored.is_some();
                if !record.only_stored {
                    record.image_bytes = 0;
                }
            }
            self.dirt.remove(&id);
            self.save(id, Some(("evicted", json!({ "bytes": bytes }))));
            self.clear(gone);
        }
    }

    /// Whether checkpoints take more than they may. As long as something is being removed nobody knows how much of the disk will
    /// be free.
    fn lacks_room(&self) -> bool {
        match self.config.images {
            Some(most) => self.image_bytes() > most,
            None => self.clearing == 0 && self.has_less_than(0),
        }
    }

    /// Whether fewer bytes are free for checkpoints, but for what they leave free.
    fn has_less_than(&self, bytes: u64) -> bool {
        let Ok(system) = rustix::fs::statvfs(self.data.join("jobs")) else { return false };
        let of = |blocks: u64| blocks.saturating_mul(system.f_frsize);
        of(system.f_bavail) < SPARE.min(of(system.f_blocks) / 10).saturating_add(bytes)
    }

    /// A job that was told to stay where it is while it was being started gives way as soon
    /// as it runs.
    fn preempt_if_held(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id) else { return };
        let failed = self.not_before.get(&id).is_some_and(|&until| now < until);
        if record.held && record.place == Place::Running && !failed {
            // Fails if it has no means for it; then it runs on.
            if self.preempt(id, None).is_err() {
                self.set_held(id, false);
            }
        }
    }

    fn live(&self, id: JobId) -> Option<&Record> {
        self.jobs.get(&id).filter(|job| job.place != Place::Ended)
    }

    fn enforce_time_limit(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id) else { return };
        let Some(seconds) = record.spec.limits.time else { return };
        let limit = Millis::try_from(seconds.saturating_mul(1000)).unwrap_or(Millis::MAX);
        if record.ran_by(now) > limit && !self.ending.contains_key(&id) {
            if let Some(record) = self.jobs.get_mut(&id) {
                record.remark(&format!("it ran longer than its limit of {seconds} s"));
            }
            self.tell_to_end(id, SIGTERM, now);
        }
    }

    fn end_orphan(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id) else { return };
        if !record.spec.wait || record.cancelled {
            return;
        }
        let (count, since) = *self.followers.entry(id).or_insert((0, now));
        if count == 0 && now - since > self.config.orphan_after {
            self.cancel(id, SIGTERM, Some("who waited for it has vanished".to_owned()));
        }
    }

    /// Ends a job because somebody wants that.
    pub(super) fn cancel(&mut self, id: JobId, signal: i32, note: Option<String>) {
        let now = files::now();
        let Some(record) = self.jobs.get_mut(&id) else { return };
        if record.place == Place::Ended || record.cancelled {
            return;
        }
        if record.place == Place::Away {
            return self.cancel_away(id, signal);
        }
        record.cancelled = true;
        if let Some(note) = note {
            record.remark(&note);
        }
        self.save(id, Some(("cancelled", json!({ "signal": signal }))));
        self.tell_to_end(id, signal, now);
    }

    /// Ends a job that is on another machine. It ends here when it has ended there.
    pub(super) fn cancel_away(&mut self, id: JobId, signal: i32) {
        if let Some(record) = self.jobs.get_mut(&id) {
            record.cancelled = true;
        }
        self.save(id, Some(("cancelled", json!({ "signal": signal }))));
        self.tell_there(id, format!("cancel?signal={signal}"));
    }

    fn tell_to_end(&mut self, id: JobId, signal: i32, now: Millis) {
        self.ending.insert(id, now);
        let Some(record) = self.jobs.get(&id) else { return };
        match record.place {
            Place::Ended | Place::Away => {}
            // It may have arrived on the other machine already, where it is ended then.
            _ if self.transfers.contains(&id) => {}
            Place::Queued => self.end(id, Exit::Signal(signal), None),
            Place::Asleep if !record.shepherd => self.end(id, Exit::Signal(signal), None),
            Place::Stopped => self.order(id, &Order::Kill),
            _ => self.pass_on(id, signal, false),
        }
    }

    /// A job that was told to end and has not is killed a while after it has heard that.
    fn bring_to_an_end(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id).filter(|job| job.place != Place::Away) else { return };
        if self.transfers.contains(&id) {
            return;
        }
        if record.cancelled && !self.ending.contains_key(&id) {
            // The daemon was started anew in the meantime.
            return self.tell_to_end(id, SIGTERM, now);
        }
        let Some(&since) = self.ending.get(&id) else { return };
        let run = record.run;
        match record.place {
            Place::Queued => self.end(id, Exit::Signal(SIGTERM), None),
            Place::Asleep if !record.shepherd => self.end(id, Exit::Signal(SIGTERM), None),
            Place::Stopped | Place::Asleep => {
                self.order(id, &Order::Kill);
                self.end_stuck(id, run, now - since);
            }
            Place::Starting if record.durable.is_none() && !self.links.contains_key(&id) => {
                self.end_start(id, run, now - since);
            }
            // It is not there yet to hear it, or nobody could pass it on.
            place
                if matches!(place, Place::Starting | Place::Waking)
                    || !record.signals.is_empty() =>
            {
                self.ending.insert(id, now);
            }
            _ if now - since > self.config.grace => {
                let grace = self.config.grace;
                self.remark(
                    id,
                    &format!("it had not ended {grace} ms after it was told to: killed"),
                );
                self.order(id, &Order::Kill);
                self.end_stuck(id, run, now - since - grace);
            }
            _ => {}
        }
    }

    /// Kills what keeps a job that was killed so long ago, and is not over. Its user can make that last for ever: what copies its
    /// artefacts was stopped, or they are to go to where nothing is ever written.
    fn end_stuck(&self, id: JobId, run: u64, killed: Millis) {
        let dir = self.dir(id);
        if killed > STUCK && shepherd::progress(&dir).is_none() {
            Run { job: id, run, dir }.kill();
        }
    }

    /// Kills what begins a job that was told to end so long ago: nobody hears it meanwhile. The job's user can make that last
    /// for ever: the directory where it begins is on a file system that never answers.
    fn end_start(&self, id: JobId, run: u64, told: Millis) {
        if told > self.config.grace {
            Run { job: id, run, dir: self.dir(id) }.kill();
        }
    }

    /// Saves a job that runs when so much work would be lost that it pays, or when it will have to
    /// give way soon.
    fn save_if_due(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id) else { return };
        let failed = self.not_before.get(&id).is_some_and(|&until| now < until);
        if record.place != Place::Running
            || self.saving.contains(&id)
            || failed
            || self.ending.contains_key(&id)
            || self.refusal(&record.spec).is_some()
            || self.config.images.is_some_and(|most| self.image_bytes() >= most)
        {
            return;
        }
        let last = self.last_save.get(&id).copied().unwrap_or(record.since);
        if now - last < self.config.shortest_interval {
            return;
        }
        let memory = shepherd::cgroups(&self.dir(id)).memory().unwrap_or(0);
        let memory = self.to_save(id, memory, now);
        if self.config.images.is_none() && self.has_less_than(memory) {
            return;
        }
        let cost = self.speed.save_ms(memory);
        if now - last < Millis::try_from(self.interval_ms(id, cost)).unwrap_or(Millis::MAX) {
            return;
        }
        self.saving.insert(id);
        let order = self.checkpoint(id, true, preemption::rounds(memory));
        self.order(id, &order);
    }

    /// For how many milliseconds a job runs between two checkpoints that cost so many.
    fn interval_ms(&self, id: JobId, cost: u64) -> u64 {
        if self.expected.contains(&id) {
            return cost.saturating_mul(preemption::EXEMPT_FACTOR);
        }
        let told = self.config.mean_time_between_failures;
        let told = told.map(|mean| u64::try_from(mean).unwrap_or(u64::MAX));
        preemption::interval_ms(cost, told.unwrap_or_else(|| self.failures.mean_ms()))
    }

    /// Turns a job into a checkpoint, which needs no memory, that was frozen for long, or at once where memory
    /// becomes short.
    fn sink_if_due(&mut self, id: JobId, now: Millis) {
        let Some(record) = self.live(id) else { return };
        let means = &self.class_of(&record.spec.class).means;
        let failed = self.not_before.get(&id).is_some_and(|&until| now < until);
        if record.place != Place::Stopped
            || now - record.since < self.config.sink_after && self.memory_free() > 0
            || !means.contains(&Means::Checkpoint)
            || failed
            || self.saving.contains(&id)
            || self.refusal(&record.spec).is_some()
        {
            return;
        }
        self.saving.insert(id);
        let order = self.checkpoint(id, false, 0);
        self.order(id, &order);
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::os::unix::net::UnixStream;

    use super::super::config::Config;
    use super::*;
    use crate::shepherd::message::{self, Report};
    use crate::spec::Spec;

    #[test]
    fn jobs_are_saved_as_often_as_they_are_lost() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let open = |mean_time_between_failures| {
            let config = Config { mean_time_between_failures, ..Config::default() };
            Core::open(dir.path().to_owned(), config).unwrap()
        };
        let mut core = open(None);
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let at_first = core.interval_ms(id, 5_000);
        for place in [Place::Running, Place::Leaving, Place::Running] {
            core.jobs.get_mut(&id).unwrap().place = place;
            core.lose(id, "its shepherd has vanished");
        }
        // Neither what has not begun nor what has given way was lost.
        core.lose(id, "it could not be prepared");
        core.go(id, Place::Asleep, "preempted", json!({}));
        // Four times as often: the interval is a square root.
        assert_eq!(core.interval_ms(id, 5_000), at_first / 2);
        drop(core);
        assert_eq!(open(None).interval_ms(id, 5_000), at_first / 2);
        assert_eq!(open(Some(86_400_000)).interval_ms(id, 5_000), at_first);
    }

    /// But not the time in which the machine may have been off.
    #[test]
    fn what_a_lost_job_has_worked_counts() {
        const DAY: i64 = 86_400_000;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let hours = |core: &Core| core.failures.mean_ms() / 3_600_000;
        assert_eq!(hours(&core), 24);
        for (boot, mean) in [(crate::shepherd::checkpoint::boot(), 24), (String::new(), 16)] {
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.boot) = (Place::Running, boot);
            record.since = files::now() - DAY;
            core.lose(id, "its shepherd has vanished");
            assert_eq!(hours(&core), mean);
        }
    }

    /// Files are being removed as long as jobs come to their ends.
    #[test]
    fn images_that_are_more_than_they_may_be_are_given_up_at_once() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let config = Config { images: Some(100), ..Config::default() };
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let ids = [60, 70].map(|bytes| {
            let id = core.submit(spec.clone(), None).unwrap();
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.durable, record.image_bytes) = (Place::Running, Some(1), bytes);
            id
        });
        core.clearing = 1;
        core.make_room();
        assert_eq!(ids.map(|id| core.jobs[&id].durable), [Some(1), None]);
    }

    /// Whoever copies its artefacts is its user's, who can stop it: the job would have its slot for ever.
    #[test]
    fn a_job_that_never_ends_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        for place in [Place::Running, Place::Stopped] {
            let id = core.submit(spec.clone(), None).unwrap();
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.run, record.shepherd) = (place, 1, true);
            // What stands for its shepherd holds the lock, and hears nothing.
            let (job, run) = (core.dir(id), core.dir(id).run(1));
            std::fs::create_dir(&run).unwrap();
            let lock = std::fs::File::create(run.join(shepherd::LOCK)).unwrap();
            lock.lock().unwrap();
            let mut keeper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
            std::fs::write(run.join(shepherd::PID), keeper.id().to_string()).unwrap();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            core.connected(id, 1, ours);
            let (grace, now) = (core.config.grace, files::now());
            core.cancel(id, SIGTERM, None);
            let is_over = |core: &mut Core, later: Millis, keeper: &mut std::process::Child| {
                core.bring_to_an_end(id, now + later);
                std::thread::sleep(std::time::Duration::from_millis(50));
                keeper.try_wait().unwrap().is_some()
            };
            assert!(!is_over(&mut core, STUCK - 1000, &mut keeper), "{place:?}: it may take long");
            let told = r#"{"what":"artefact","bytes":1000,"files":7}"#;
            std::fs::write(job.copying(), told).unwrap();
            let late = 2 * grace + STUCK;
            assert!(!is_over(&mut core, late, &mut keeper), "{place:?}: it is copied");
            std::fs::remove_file(job.copying()).unwrap();
            core.bring_to_an_end(id, now + late);
            assert!(!keeper.wait().unwrap().success());
        }
    }

    /// Orders that its shepherd was given.
    fn orders(shepherd: &UnixStream) -> Vec<Order> {
        shepherd.set_nonblocking(true).unwrap();
        let mut reader = BufReader::new(shepherd);
        std::iter::from_fn(|| message::receive(&mut reader).ok().flatten()).collect()
    }

    /// It may take longer to come back than a job has time to end.
    #[test]
    fn who_is_brought_back_hears_that_it_is_to_end_before_it_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let (grace, now) = (core.config.grace, files::now());
        let term = Order::Signal { signal: SIGTERM, group: false };
        // With a shepherd that brings it back, and with one that was not met yet.
        for place in [Place::Waking, Place::Starting] {
            let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
            let id = core.submit(spec, None).unwrap();
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.run, record.shepherd, record.durable) = (place, 1, true, Some(1));
            let (ours, shepherd) = UnixStream::pair().unwrap();
            let mut heard = Vec::new();
            if place == Place::Waking {
                core.connected(id, 1, ours.try_clone().unwrap());
            }
            core.cancel(id, SIGTERM, None);
            core.bring_to_an_end(id, now + 2 * grace);
            core.connected(id, 1, ours);
            core.bring_to_an_end(id, now + 4 * grace);
            heard.extend(orders(&shepherd));
            core.report(id, 1, Report::Restored { took_us: 1 });
            heard.extend(orders(&shepherd));
            assert_eq!(heard, std::slice::from_ref(&term), "{place:?}");
            core.bring_to_an_end(id, now + 5 * grace);
            assert_eq!(orders(&shepherd), [], "it has time to end");
            core.bring_to_an_end(id, now + 5 * grace + 1);
            assert_eq!(orders(&shepherd), [Order::Kill]);
        }
    }
}
