//! Who runs, who waits, who gives way: a pure function of state and time.
//!
//! [`decide`] gets the [`World`] and says what to do now and why each job waits. It has no
//! clock and no memory of its own, so that simulations and the daemon run the same code.
//!
//! The rules, in the order in which they apply:
//!
//! 1. A job whose guarantee is due (it has waited for `guarantee.every`) goes before all
//!    others, by turns of their owners and the lowest level first, may displace anybody (but kill none that it would not
//!    by its level), and is then left alone for one slice.
//! 2. Else the level decides: the priority of the class plus that of the job; one that
//!    would miss its deadline rises.
//! 3. Within a level: fair shares where the class says so, then the earlier deadline, then
//!    the one that has waited longest (slices) or was submitted first.
//! 4. A job that finds no room displaces jobs of a lower level, those that cost least, but none
//!    that has run less than ten times what that costs, or what it has cost the last time; with
//!    `slices`, also jobs of its own level whose slice is over. Of those that cost about the same the one goes that has most left
//!    to do, and one that is about to end is left alone.
//! 5. A job that still waits keeps the free slots that it needs from all that it cannot displace,
//!    unless they will be done in time (back-fill). One that is due does not keep a job of a
//!    higher level from displacing what it cannot displace itself; and a slot that becomes free
//!    is for whom it was made free.

mod order;
pub mod share;
pub mod simulation;
mod victims;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::preemption::{Facts, Means, Price};
use order::Candidate;

/// A point in time or a duration, in milliseconds.
pub type Millis = i64;

/// A job's number.
pub type JobId = u64;

/// How the jobs of a class are scheduled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Class {
    /// The level of its jobs, to which their own priority is added.
    pub priority: i64,
    /// Whether its jobs displace others.
    pub preempts: bool,
    /// Whether its jobs give way to others of a higher level.
    pub preemptible: bool,
    /// Milliseconds after which a job gives way to another of its level that waits.
    pub slice: Option<Millis>,
    /// Whether its jobs are ordered by what their projects and owners have used.
    pub fair: bool,
    /// Whether its jobs may use the reserved slots.
    pub interactive: bool,
    /// By which means its jobs give way.
    pub means: Vec<Means>,
    /// Whether a job of it begins again of which all that was saved is lost; else it has failed.
    pub begins_again: bool,
    /// For whom its checkpoints are sealed, if they are.
    pub recipient: Option<String>,
    /// The file with the key that opens them again.
    pub identity: Option<PathBuf>,
}

impl Default for Class {
    fn default() -> Self {
        Self {
            priority: 0,
            preempts: true,
            preemptible: true,
            slice: None,
            fair: false,
            interactive: false,
            means: Means::ALL.to_vec(),
            begins_again: true,
            recipient: None,
            identity: None,
        }
    }
}

/// What every job gets, however much else there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guarantee {
    /// A job that waits this long is due.
    pub every: Millis,
    /// It then runs at least this long.
    pub slice: Millis,
}

impl Default for Guarantee {
    fn default() -> Self {
        Self { every: 4 * 3_600_000, slice: 5 * 60_000 }
    }
}

/// The rules of one machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rules {
    /// The classes by their names.
    pub classes: BTreeMap<String, Class>,
    /// The class of jobs whose class is not named there.
    pub other: Class,
    /// What every job gets.
    pub guarantee: Guarantee,
    /// Slots that only interactive classes may use.
    pub reserved: u32,
    /// How much a job rises that would miss its deadline.
    pub deadline_rise: i64,
    /// The rights of projects and owners.
    pub shares: share::Shares,
    /// What they may use at most.
    pub quotas: BTreeMap<String, share::Quota>,
}

impl Default for Rules {
    fn default() -> Self {
        let class = |priority: i64| Class { priority, ..Class::default() };
        let urgent = Class { interactive: true, ..class(1000) };
        let batch = Class { slice: Some(30 * 60_000), fair: true, ..class(0) };
        let classes = [
            ("interactive", urgent.clone()),
            ("urgent", urgent),
            ("short", class(600)),
            ("normal", class(500)),
            ("long", batch.clone()),
            ("batch", batch),
        ];
        Self {
            classes: classes.map(|(name, class)| (name.to_owned(), class)).into(),
            other: class(500),
            guarantee: Guarantee::default(),
            reserved: 0,
            deadline_rise: 450,
            shares: share::Shares::default(),
            quotas: BTreeMap::new(),
        }
    }
}

/// Where a job stands, as far as slots matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It needs slots to start, to be brought back or to go on.
    Waiting,
    /// It has slots and runs, or is about to.
    Running,
    /// It is giving way, for that job; it has its slots until it is gone.
    Leaving(Option<JobId>),
}

/// What the scheduler knows of a job that has not ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// Its class.
    pub class: String,
    /// Its own priority.
    pub priority: i64,
    /// Whose it is.
    pub owner: String,
    /// What it is for.
    pub project: String,
    /// How many slots it takes.
    pub slots: u32,
    /// When it was submitted.
    pub submitted: Millis,
    /// Where it stands.
    pub phase: Phase,
    /// Since when.
    pub since: Millis,
    /// Why it must not run at all for now, if so.
    pub held: Option<String>,
    /// How long it will still run, if anybody knows.
    pub remaining: Option<Millis>,
    /// When it should be done.
    pub deadline: Option<Millis>,
    /// Until when it is left alone because its guarantee was due.
    pub guaranteed: Option<Millis>,
    /// What it has cost that it gave way the last time and came back.
    pub paid: Millis,
    /// To whom it has given way, if it has, since it ran last.
    pub gave_way_to: Option<JobId>,
    /// Whether it is frozen in memory.
    pub in_memory: bool,
    /// Whether it has a checkpoint, which is gone when it has ended.
    pub has_images: bool,
    /// Bytes that it may use, as it was submitted.
    pub memory_wanted: u64,
    /// Bytes that it is thought to use: those, or what jobs like it have used.
    pub memory_expected: u64,
    /// Bytes that count for quotas: what it may use, or is thought to need at most.
    pub memory_counted: u64,
    /// What is known about letting it give way.
    pub facts: Facts,
}

/// All that a decision depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// Now.
    pub now: Millis,
    /// Slots of the machine.
    pub slots: u32,
    /// Bytes of memory that are free.
    pub memory_free: u64,
    /// Whether nothing new is to start, and what runs is to go.
    pub draining: bool,
    /// The rules.
    pub rules: Rules,
    /// What projects and owners have used.
    pub usage: share::Usage,
    /// The jobs that have not ended.
    pub jobs: Vec<Job>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start it, bring it back, or let it go on.
    Run {
        /// Which.
        job: JobId,
        /// Until when it is left alone, if its guarantee is due.
        guaranteed: Option<Millis>,
    },
    /// Let it give way.
    GiveWay {
        /// Which.
        job: JobId,
        /// For which other; nobody if the machine is being drained.
        to: Option<JobId>,
        /// At what price.
        price: Price,
    },
}

/// Why a job waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum Reason {
    /// Something of its own.
    Held {
        /// What.
        why: String,
    },
    /// The machine will never have as many slots.
    TooLarge {
        /// As many as there are for it.
        slots: u32,
    },
    /// Its owner or project has used up what it may.
    Quota {
        /// What is used up.
        why: String,
    },
    /// Others are giving way to it.
    GivingWay {
        /// Which.
        jobs: Vec<JobId>,
    },
    /// All slots are taken by jobs that it cannot displace.
    Busy {
        /// Which, and why not, where there is more to say than their level.
        jobs: Vec<JobId>,
        /// When one of them can be displaced at the latest, if time is what it takes.
        until: Option<Millis>,
    },
    /// Free slots are kept for a job before it.
    Behind {
        /// Which.
        job: JobId,
    },
    /// The machine is being drained.
    Draining,
}

/// A decision.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// What to do now.
    pub actions: Vec<Action>,
    /// Why each job that waits does.
    pub reasons: BTreeMap<JobId, Reason>,
    /// When to ask again at the latest, if nothing happens before.
    pub again: Option<Millis>,
}

impl World {
    /// The class of a job.
    #[must_use]
    pub fn class(&self, job: &Job) -> &Class {
        self.rules.classes.get(&job.class).unwrap_or(&self.rules.other)
    }

    /// Whether a job has waited for so long that it is its turn.
    #[must_use]
    pub fn is_due(&self, job: &Job) -> bool {
        job.phase == Phase::Waiting && self.now - job.since >= self.rules.guarantee.every
    }

    /// Whether a job runs and is left alone because its guarantee was due.
    #[must_use]
    pub(crate) fn is_left_alone(&self, job: &Job) -> bool {
        job.phase == Phase::Running && job.guaranteed.is_some_and(|until| until > self.now)
    }

    /// How many slots jobs have at most whose guarantee was due, unless one alone needs more. The others are for jobs of a
    /// higher level, however many are due.
    #[must_use]
    pub(crate) fn most_guaranteed(&self) -> u32 {
        (self.slots / 2).max(1)
    }
}

/// Says what to do now.
#[must_use]
pub fn decide(world: &World) -> Plan {
    let mut table = Table::new(world);
    table.keep_promises();
    if world.draining {
        table.drain();
        return table.plan;
    }
    let (due, mut others) = order::candidates(world);
    for candidate in due {
        if !table.place_due(&candidate) {
            others.push(Candidate { due: false, ..candidate });
        }
    }
    order::sort(world, &mut others);
    for candidate in others {
        table.place(&candidate);
    }
    table.plan.again = table.next_time();
    table.plan
}

/// A decision in the making.
struct Table<'w> {
    world: &'w World,
    plan: Plan,
    /// Those that run.
    running: Vec<&'w Job>,
    /// Slots that nobody has, or is promised.
    free: i64,
    /// Those of them that jobs have left to others, by these: a job that is due gets them no sooner.
    kept: BTreeMap<JobId, i64>,
    /// Those that were told to go for others before, and are not gone yet.
    promised: Vec<&'w Job>,
    /// Those that have been told to go in this decision.
    leaving: Vec<JobId>,
    /// Memory that is free, after those that start have taken theirs.
    memory_free: u64,
    /// Slots of jobs that are left alone because their guarantee was due, or get theirs for that.
    guaranteed: u32,
    /// Whether one that is due waits until these are fewer.
    is_due_full: bool,
    /// The first job that waits for free slots to become more, and when they will.
    blocked: Option<(Candidate, Option<Millis>)>,
    /// What projects and owners hold, with those that start.
    held: share::Holdings,
    /// Points in time at which a decision may change.
    times: Vec<Millis>,
}

impl<'w> Table<'w> {
    fn new(world: &'w World) -> Self {
        let taken: i64 = world
            .jobs
            .iter()
            .filter(|job| job.phase != Phase::Waiting)
            .map(|job| i64::from(job.slots))
            .sum();
        let left_alone = world.jobs.iter().filter(|job| world.is_left_alone(job));
        let leaving_now = |job: &&Job| matches!(job.phase, Phase::Leaving(Some(_)));
        Self {
            world,
            plan: Plan::default(),
            running: world.jobs.iter().filter(|job| job.phase == Phase::Running).collect(),
            free: i64::from(world.slots) - taken,
            kept: BTreeMap::new(),
            promised: world.jobs.iter().filter(leaving_now).collect(),
            leaving: Vec::new(),
            memory_free: world.memory_free,
            guaranteed: left_alone.map(|job| job.slots).sum(),
            is_due_full: false,
            blocked: None,
            held: share::Holdings::of(&world.jobs),
            times: Vec::new(),
        }
    }

    /// Keeps slots for those to whom others have given way since they wait, and who wait for nothing else.
    fn keep_promises(&mut self) {
        let waiting = || self.world.jobs.iter().filter(|job| job.phase == Phase::Waiting);
        let taker = |job: &Job| {
            let to = job.gave_way_to?;
            let since = |taker: &&Job| taker.id == to && job.since >= taker.since;
            waiting().find(since).filter(|taker| self.may_run(taker).is_ok())
        };
        let kept: Vec<(JobId, u32)> =
            waiting().filter_map(|job| Some((taker(job)?.id, job.slots))).collect();
        for (id, slots) in kept {
            *self.kept.entry(id).or_default() += i64::from(slots);
        }
    }

    /// Memory that is free for one that waits: who is due leaves what they need to those for whom slots are kept.
    fn memory_for(&self, candidate: &Candidate) -> u64 {
        if !candidate.due || self.kept.is_empty() {
            return self.memory_free;
        }
        let jobs = self.world.jobs.iter().enumerate();
        let others = jobs
            .filter(|(index, job)| *index != candidate.index && self.kept.contains_key(&job.id));
        others
            .filter(|(_, job)| !job.in_memory)
            .fold(self.memory_free, |free, (_, job)| free.saturating_sub(job.memory_expected))
    }

    /// Slots that a job may have at once: those that are free. One that is due leaves those to others that were made free for
    /// them; who passes one that is due has no other ones.
    fn free_for(&self, candidate: &Candidate, job: &Job, passes: bool) -> i64 {
        let own = self.kept.get(&job.id).copied().unwrap_or(0);
        if passes {
            return self.free.min(own + i64::from(self.reserved(job)));
        }
        let of_others = self.kept.values().sum::<i64>() - own;
        if candidate.due { self.free - of_others } else { self.free }
    }

    /// All that runs gives way to nobody, so that it can be moved or brought back later.
    fn drain(&mut self) {
        for job in &self.world.jobs {
            match job.phase {
                Phase::Waiting => {
                    let held = job.held.clone().map(|why| Reason::Held { why });
                    self.plan.reasons.insert(job.id, held.unwrap_or(Reason::Draining));
                }
                Phase::Running => {
                    let means = [Means::Checkpoint, Means::Command];
                    let price = victims::price(self.world, job, &means, job.memory_wanted);
                    if let Some(price) = price {
                        self.plan.actions.push(Action::GiveWay { job: job.id, to: None, price });
                    }
                }
                Phase::Leaving(_) => {}
            }
        }
    }

    fn place(&mut self, candidate: &Candidate) {
        let job = &self.world.jobs[candidate.index];
        let outcome = self.may_run(job).and_then(|()| self.try_to_place(candidate, job));
        if let Err(reason) = outcome {
            self.plan.reasons.insert(job.id, reason);
        }
    }

    /// Places a job that is due, unless those that are have so many slots already that others would have none: then it is
    /// placed by its level. Who is due after it does not go before it.
    fn place_due(&mut self, candidate: &Candidate) -> bool {
        let job = &self.world.jobs[candidate.index];
        if self.may_run(job).is_ok() {
            let sum = self.guaranteed.saturating_add(job.slots);
            self.is_due_full |= self.guaranteed > 0 && sum > self.world.most_guaranteed();
            if self.is_due_full {
                return false;
            }
            self.guaranteed = sum;
        }
        self.place(candidate);
        true
    }

    /// Slots that are kept for others.
    fn reserved(&self, job: &Job) -> u32 {
        if self.world.class(job).interactive { 0 } else { self.world.rules.reserved }
    }

    /// Whether nothing but slots is missing.
    fn may_run(&self, job: &Job) -> Result<(), Reason> {
        if let Some(why) = &job.held {
            return Err(Reason::Held { why: why.clone() });
        }
        let most = self.world.slots.saturating_sub(self.reserved(job));
        if job.slots > most {
            return Err(Reason::TooLarge { slots: most });
        }
        self.held.check(self.world, job).map_err(|why| Reason::Quota { why })
    }

    fn try_to_place(&mut self, candidate: &Candidate, job: &Job) -> Result<(), Reason> {
        let needed = i64::from(job.slots) + i64::from(self.reserved(job));
        let mut passed = None;
        if let Some((first, until)) = &self.blocked
            && !self.may_pass(first, *until, candidate, job)
        {
            if !first.due || candidate.due || candidate.level <= first.level {
                return Err(self.behind(first));
            }
            passed = Some(first.clone());
        }
        let free = self.free_for(candidate, job, passed.is_some());
        if needed <= free {
            self.run(candidate, job);
            return Ok(());
        }
        let promised = self.promised_to(job.id);
        let coming: i64 = promised.iter().map(|job| i64::from(job.slots)).sum();
        if needed <= free + coming {
            // Until those are gone, what is free now is this job's as well.
            self.free -= (i64::from(job.slots) - coming).max(0);
            return Err(Reason::GivingWay { jobs: promised.iter().map(|job| job.id).collect() });
        }
        Err(self.displace(candidate, job, needed - free - coming, passed))
    }

    fn behind(&self, first: &Candidate) -> Reason {
        Reason::Behind { job: self.world.jobs[first.index].id }
    }

    fn promised_to(&self, id: JobId) -> Vec<&'w Job> {
        let is_for = |job: &&&Job| job.phase == Phase::Leaving(Some(id));
        self.promised.iter().filter(is_for).copied().collect()
    }

    fn run(&mut self, candidate: &Candidate, job: &Job) {
        self.free -= i64::from(job.slots);
        self.held.add(job);
        self.kept.remove(&job.id);
        if !job.in_memory {
            self.memory_free = self.memory_free.saturating_sub(job.memory_expected);
        }
        let guaranteed = candidate.due.then(|| self.world.now.saturating_add(self.protection(job)));
        self.plan.actions.push(Action::Run { job: job.id, guaranteed });
    }

    /// How long a job whose guarantee was due is left alone: a slice, and never so short
    /// that going away again costs more than a tenth of it.
    fn protection(&self, job: &Job) -> Millis {
        let class = self.world.class(job);
        let price = victims::price(self.world, job, &class.means, 0);
        let exempt = price.as_ref().map_or(0, crate::preemption::exempt_ms);
        self.world.rules.guarantee.slice.max(Millis::try_from(exempt).unwrap_or(Millis::MAX))
    }

    /// Finds jobs that give way to `job`, so that at least `missing` slots become free; among those that one that it passes
    /// cannot have. Returns why it waits.
    fn displace(
        &mut self,
        candidate: &Candidate,
        job: &Job,
        missing: i64,
        passed: Option<Candidate>,
    ) -> Reason {
        let (running, leaving, not_of) = (&self.running, &self.leaving, passed.as_ref());
        let search = victims::Search { missing, running, leaving, not_of };
        let memory_free = self.memory_for(candidate);
        let found = victims::find(self.world, candidate, &search, memory_free);
        self.times.extend(found.later);
        match (found.chosen, passed) {
            (Some(chosen), _) => {
                let jobs = chosen.iter().map(|(id, _)| *id).collect();
                let slots = |id: &JobId| self.running.iter().find(|job| job.id == *id);
                let gained: i64 = chosen
                    .iter()
                    .filter_map(|(id, _)| slots(id))
                    .map(|job| i64::from(job.slots))
                    .sum();
                self.free -= (i64::from(job.slots) - gained).max(0);
                for (id, price) in chosen {
                    self.leaving.push(id);
                    let to = Some(job.id);
                    self.plan.actions.push(Action::GiveWay { job: id, to, price });
                }
                Reason::GivingWay { jobs }
            }
            (None, Some(passed)) => self.behind(&passed),
            (None, None) => {
                if self.blocked.is_none() {
                    let start = victims::planned_start(self.world, missing);
                    self.blocked = Some((candidate.clone(), start));
                }
                Reason::Busy { jobs: found.in_the_way, until: found.later }
            }
        }
    }

    /// Whether a job may take slots that `first`, which comes before it, waits for: if
    /// `first` can take them back, or if they are free again before it can start.
    fn may_pass(
        &self,
        first: &Candidate,
        until: Option<Millis>,
        candidate: &Candidate,
        job: &Job,
    ) -> bool {
        let before = &self.world.jobs[first.index];
        let can_take_back = self.world.class(before).preempts
            && self.world.class(job).preemptible
            && first.level > candidate.level
            && !candidate.due;
        let in_time = match (until, job.remaining) {
            (Some(until), Some(remaining)) => self.world.now.saturating_add(remaining) <= until,
            _ => false,
        };
        can_take_back || in_time
    }

    /// When something changes by itself: a guarantee falls due or ends, a slice is over, an
    /// exemption ends, a deadline comes near.
    fn next_time(&self) -> Option<Millis> {
        let mut times = self.times.clone();
        for job in &self.world.jobs {
            match job.phase {
                Phase::Waiting => {
                    times.push(job.since.saturating_add(self.world.rules.guarantee.every));
                }
                Phase::Running => {
                    times.extend(job.guaranteed);
                    let slice = self.world.class(job).slice;
                    times.extend(slice.map(|slice| job.since.saturating_add(slice)));
                }
                Phase::Leaving(_) => {}
            }
            if let (Some(deadline), Some(remaining)) = (job.deadline, job.remaining) {
                times.push(order::pressing_from(deadline, remaining));
            }
        }
        times.into_iter().filter(|&time| time > self.world.now).min()
    }
}
