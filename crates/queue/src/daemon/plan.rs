//! From the daemon's state to the scheduler's world, and from its plan to orders.

use std::fs;

use serde_json::json;

use super::core::Core;
use super::link::Run;
use super::record::{GivingWay, Place, Record};
use crate::files;
use crate::preemption::{self, Facts, Means, Price};
use crate::scheduler::{self, Action, Class, JobId, Millis, Phase, World, share};
use crate::shepherd;
use crate::shepherd::message::{Order, Style};

/// A job's own command for giving way may take this long, in seconds.
const COMMAND_PATIENCE: u64 = 60;

impl Core {
    /// Decides, and does it. Called after each change.
    pub(super) fn schedule(&mut self) {
        self.look_after();
        // What is ordered here can be done at once for some, which changes what others can.
        for _ in 0..3 {
            let world = self.world();
            let plan = scheduler::decide(&world);
            self.reasons = plan.reasons;
            self.again = plan.again;
            let idle = plan.actions.is_empty();
            for action in plan.actions {
                self.act(action);
            }
            if idle {
                return self.foresee(world);
            }
        }
    }

    /// All that a decision depends on.
    #[must_use]
    pub(super) fn world(&self) -> World {
        let now = files::now();
        let mut usage = self.usage.clone();
        usage.decay(now, self.config.rules.shares.half_life);
        let live = || self.jobs.values().filter(|job| job.place != Place::Ended);
        for record in live() {
            let spec = &record.spec;
            // What runs now counts as it runs, not only when it stops.
            usage.add(&spec.project, &spec.owner, spec.slots, record.ran_by(now) - record.ran);
            if record.durable.is_some() && !record.only_stored {
                for name in share::names(&spec.owner, &spec.project) {
                    *usage.images.entry(name).or_default() += record.image_bytes;
                }
            }
        }
        for (name, bytes) in &self.depot.by_name {
            *usage.images.entry(name.clone()).or_default() += bytes;
        }
        World {
            now,
            slots: self.config.slots(),
            memory_free: self.memory_free(),
            draining: self.draining,
            rules: self.config.rules.clone(),
            usage,
            jobs: live().map(|record| self.view(record, now)).collect(),
        }
    }

    /// A job as the scheduler sees it.
    fn view(&self, record: &Record, now: Millis) -> scheduler::Job {
        let spec = &record.spec;
        let phase = match record.place {
            Place::Stopping | Place::Leaving => {
                Phase::Leaving(record.giving_way.and_then(|way| way.to))
            }
            place if place.holds_slots() => Phase::Running,
            _ => Phase::Waiting,
        };
        let in_memory = record.place == Place::Stopped;
        let ran = record.ran_by(now);
        let millis = |s: u64| Millis::try_from(s.saturating_mul(1000)).unwrap_or(Millis::MAX);
        let (estimate, limit) = (spec.estimate.map(millis), spec.limits.time.map(millis));
        let deadline = spec.deadline.map(millis);
        scheduler::Job {
            id: record.id,
            class: spec.class.clone(),
            priority: spec.priority.into(),
            owner: spec.owner.clone(),
            project: spec.project.clone(),
            slots: spec.slots,
            submitted: record.submitted,
            phase,
            since: record.since,
            held: self.hold(record),
            remaining: remaining(ran, estimate, limit),
            deadline: deadline.map(|deadline| record.submitted.saturating_add(deadline)),
            guaranteed: record.guaranteed,
            paid: record.paid,
            gave_way_to: record.giving_way.and_then(|way| way.to),
            in_memory,
            has_images: record.durable.is_some(),
            memory_wanted: spec.limits.memory.unwrap_or(0),
            memory_expected: self.memory_expected(record),
            memory_counted: self.memory_counted(record),
            facts: self.facts(record, phase, ran, now),
        }
    }

    /// What is known about letting a job give way.
    fn facts(&self, record: &Record, phase: Phase, ran: Millis, now: Millis) -> Facts {
        let spec = &record.spec;
        let failed = self.not_before.get(&record.id).is_some_and(|&until| now < until);
        let memory = if phase == Phase::Running {
            shepherd::cgroups(&self.dir(record.id)).memory().unwrap_or(0)
        } else {
            record.memory()
        };
        Facts {
            memory,
            to_save: self.to_save(record.id, memory, now),
            to_fill: self.to_fill(record.id, memory),
            unsaved_ms: u64::try_from(ran - record.saved).unwrap_or(0),
            refused: failed || self.refusal(spec).is_some(),
            has_command: spec.preempt_cmd.is_some() && !failed,
            speed: self.speed,
        }
    }

    /// Bytes that a checkpoint of a job has to write: all of its memory, or what has changed
    /// since the one before.
    pub(super) fn to_save(&self, id: JobId, memory: u64, now: Millis) -> u64 {
        let Some(dirt) = self.dirt.get(&id) else { return memory };
        dirt.by(now).min(memory)
    }

    /// Bytes of a job's memory that must be there before it runs again.
    pub(super) fn to_fill(&self, id: JobId, memory: u64) -> u64 {
        let container = self.jobs.get(&id).is_some_and(|record| record.spec.container.is_some());
        let lazy = shepherd::engine::is_lazy(memory, container, self.style(id).identity.is_some());
        if lazy { 0 } else { memory }
    }

    /// Why a job must not run for now.
    pub(super) fn hold(&self, record: &Record) -> Option<String> {
        if record.arriving {
            return Some("not all of it has come from the machine that hands it over".to_owned());
        }
        if record.held && record.destination.is_none() {
            let Some(unwoken) = &record.unwoken else {
                return Some("it was told to stay where it is (torpor queue resume)".to_owned());
            };
            let (id, why) = (record.id, &unwoken.why);
            return Some(format!(
                "its checkpoint could not be brought back: {why} (torpor queue resume {id} tries again)"
            ));
        }
        if record.place == Place::Queued
            && let Some(first) = self.first(record).next()
        {
            return Some(format!("it runs after job {first}"));
        }
        if let Some(there) = &record.destination {
            let machine = &there.machine;
            return Some(match there.job {
                Some(job) => format!("it is on {machine}, where it is job {job}"),
                None => format!("it is on its way to {machine}"),
            });
        }
        let id = record.id;
        let store = self.waits_for_look(id).or_else(|| self.waits_for_store(id));
        let preparation =
            || self.waits_for_preparation(id).or_else(|| self.waits_for_copies(record));
        store.or_else(preparation).or_else(|| self.waits_for_machine(record))
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Run { job, .. } if self.copies_first(job) => {}
            Action::Run { job, guaranteed } => {
                if let Some(record) = self.jobs.get_mut(&job) {
                    record.guaranteed = guaranteed;
                    if guaranteed.is_some() {
                        self.usage.begin_slice(&record.spec.owner, files::now());
                    }
                }
                self.let_run(job);
            }
            Action::GiveWay { job, to: Some(to), price } if self.prepare(to) => {
                self.expect(job, price.means);
            }
            Action::GiveWay { job, to, price } => self.let_give_way(job, to, price),
        }
    }

    fn let_run(&mut self, id: JobId) {
        let Some(record) = self.jobs.get(&id) else { return };
        match record.place {
            Place::Stopped => {
                self.go(id, Place::Waking, "continuing", json!({}));
                self.order(id, &Order::Continue);
            }
            Place::Asleep if self.must_fetch(id) => self.fetch(id),
            Place::Asleep if record.shepherd => {
                self.go(id, Place::Waking, "waking", json!({}));
                self.order(id, &Order::Restore);
            }
            Place::Asleep => self.start_run(id, record.durable),
            Place::Queued if self.is_preparing(id) => {}
            Place::Queued => self.start_run(id, None),
            _ => {}
        }
    }

    /// Starts a new run. Its number is on disk before anything of it exists.
    pub(super) fn start_run(&mut self, id: JobId, from: Option<u64>) {
        let dir = self.dir(id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        self.preparations.remove(&id);
        record.rewritten |= record.run > 0;
        record.run += 1;
        record.boot = shepherd::checkpoint::boot();
        let (run, base) = (record.run, record.base);
        self.go(id, Place::Starting, "starting", json!({ "from": from }));
        if !self.is_kept(id) {
            // The next daemon would give its number to another run, beside this one.
            return self.run_failed_to_start(id, run, "its state cannot be kept on disk");
        }
        let Some(queue) = self.queue.upgrade() else { return };
        let compared = self.compared.take(id);
        Run { job: id, run, dir }.start(queue, from, compared, base);
    }

    /// Lets a job give way, by the means of `price`.
    pub(super) fn let_give_way(&mut self, id: JobId, to: Option<JobId>, price: Price) {
        let now = files::now();
        let Some(record) = self.jobs.get_mut(&id) else { return };
        let means = price.means;
        record.giving_way = Some(GivingWay { to, means, at: now, price });
        record.overhead_before = record.overhead;
        let memory = shepherd::cgroups(&self.dir(id)).memory().unwrap_or(0);
        let memory = self.to_save(id, memory, now);
        let place = if means == Means::Stop { Place::Stopping } else { Place::Leaving };
        self.go(id, place, "giving-way", json!({ "means": means, "to": to }));
        let order = match means {
            Means::Stop => Order::Stop,
            Means::Checkpoint => self.checkpoint(id, false, preemption::rounds(memory)),
            Means::Command => Order::PreemptCommand { timeout: COMMAND_PATIENCE },
            Means::Kill => Order::Kill,
        };
        self.order(id, &order);
    }

    /// The order to save a job, with a number that no checkpoint of it has had.
    pub(super) fn checkpoint(&mut self, id: JobId, keep: bool, rounds: u32) -> Order {
        let (seq, deep) = self.jobs.get_mut(&id).map_or((0, false), |record| {
            record.next_checkpoint += 1;
            // What was sent ahead is built on, or all of it would have to be sent again.
            let is_sent = record.destination.as_ref().is_some_and(|there| there.ahead.is_some());
            (record.next_checkpoint - 1, is_sent)
        });
        self.save(id, None);
        Order::Checkpoint { seq, keep, rounds, deep, style: self.style(id) }
    }

    /// How the images of a job are written.
    pub(super) fn style(&self, id: JobId) -> Style {
        self.style_of(self.jobs.get(&id).map_or("", |record| record.spec.class.as_str()))
    }

    /// The class of that name, or the one of jobs whose class is not configured.
    pub(super) fn class_of(&self, name: &str) -> &Class {
        let rules = &self.config.rules;
        rules.classes.get(name).unwrap_or(&rules.other)
    }

    /// How the images of the jobs of a class are written.
    pub(super) fn style_of(&self, class: &str) -> Style {
        let class = self.class_of(class);
        Style {
            compress: self.config.compress.clone(),
            recipient: class.recipient.clone(),
            identity: class.identity.clone(),
        }
    }

    /// Bytes of a job's output so far.
    pub(super) fn output_lengths(&self, id: JobId) -> [u64; 2] {
        let dir = self.dir(id);
        let length = |path: std::path::PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
        [length(dir.out()), length(dir.err())]
    }
}

/// How long a job will still run, by what was declared: its estimate, or its time limit, which it
/// cannot exceed. One that has run for longer than was estimated may run to its limit.
fn remaining(ran: Millis, estimate: Option<Millis>, limit: Option<Millis>) -> Option<Millis> {
    let left = |most: Millis| most.saturating_sub(ran).max(0);
    let (estimate, limit) = (estimate.map(left), limit.map(left));
    let sooner = estimate.into_iter().chain(limit).filter(|&left| left > 0).min();
    sooner.or(estimate).or(limit)
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::preemption::{Pressure, Speed};
    use crate::shepherd::message::{Report, Saved};
    use crate::spec::{ContainerSource, Spec};

    #[test]
    fn a_job_ends_when_it_says_or_by_its_limit() {
        assert_eq!(remaining(10, None, None), None);
        assert_eq!(remaining(10, Some(30), None), Some(20));
        assert_eq!(remaining(10, None, Some(30)), Some(20));
        assert_eq!(remaining(10, Some(30), Some(50)), Some(20));
        assert_eq!(remaining(10, Some(30), Some(20)), Some(10));
        // It was to be done by now: what is sure is its limit.
        assert_eq!(remaining(40, Some(30), Some(50)), Some(10));
        assert_eq!(remaining(60, Some(30), None), Some(0));
    }

    #[test]
    fn only_memory_that_must_be_there_first_costs_on_the_way_back() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut config = Config::default();
        let sealed =
            scheduler::Class { identity: Some("key".into()), ..scheduler::Class::default() };
        config.rules.classes.insert("sealed".to_owned(), sealed);
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        let command = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let sealed = Spec { class: "sealed".to_owned(), ..command.clone() };
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        let container = Some(ContainerSource::Bundle(dir.path().to_owned()));
        let container = Spec { container, ..command.clone() };
        let [command, sealed, container] =
            [command, sealed, container].map(|spec| core.submit(spec, None).unwrap());
        let large = 2 << 30;
        assert_eq!(core.to_fill(command, large), 0);
        assert_eq!(core.to_fill(command, 1 << 20), 1 << 20);
        assert_eq!(core.to_fill(sealed, large), large);
        assert_eq!(core.to_fill(container, large), large);
    }

    /// What shepherds tell of checkpoints of jobs that run on decides what it costs to let those give way.
    #[test]
    fn how_fast_memory_changes_and_is_saved_is_in_the_price() {
        const WHOLE: u64 = 1 << 30;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let jobs = [8, 64].map(|mib: u64| (core.submit(spec.clone(), None).unwrap(), mib << 20));
        for (id, changed) in jobs {
            core.jobs.get_mut(&id).unwrap().place = Place::Running;
            // What the images take, packed, says nothing about that.
            let packed = Saved { bytes: 1 << 20, memory: WHOLE, ..Saved::default() };
            let whole = Saved { seq: 1, written: WHOLE, took_us: 700_000, ..packed };
            let since_ms = Some(10_000);
            let more = Saved { seq: 2, written: changed, since_ms, took_us: 50_000, ..whole };
            core.report(id, 0, Report::Saved(whole));
            assert_eq!(core.to_save(id, WHOLE, files::now()), WHOLE);
            core.report(id, 0, Report::Saved(more));
        }
        let later = files::now() + 10_000;
        let [slow, fast] = jobs.map(|(id, _)| {
            let facts = core.facts(&core.jobs[&id], Phase::Leaving(None), 0, later);
            assert_eq!((facts.memory, facts.speed), (WHOLE, core.speed));
            assert!(facts.to_save > 0 && facts.to_save < WHOLE / 8, "{facts:?}");
            let pressure = Pressure { memory_free: 0, memory_needed: WHOLE };
            preemption::choose(&facts, &[Means::Checkpoint], pressure).unwrap().total_ms()
        });
        assert!(slow < fast, "{slow} {fast}");
        assert_ne!(core.speed, Speed::default());
    }
}
