//! A machine that is simulated: the scheduler's decisions, carried out in a time of their
//! own. Tests of its properties and comparisons of policies run on it.

mod day;
mod summary;
pub mod swf;

use std::collections::BTreeMap;

pub use day::of_ci;
pub use summary::{Policy, Summary, summarize};

use super::{Action, Job, JobId, Millis, Phase, Rules, World, decide, share};
use crate::preemption::{Facts, Means, Price, Speed};

/// A job of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// When it is submitted.
    pub at: Millis,
    /// How long it works.
    pub work: Millis,
    /// Its class.
    pub class: String,
    /// Its own priority.
    pub priority: i64,
    /// Whose it is.
    pub owner: String,
    /// What it is for.
    pub project: String,
    /// Slots that it takes.
    pub slots: u32,
    /// Bytes of memory that it holds.
    pub memory: u64,
    /// Whether it can be saved.
    pub saveable: bool,
    /// How long it says that it will work.
    pub estimate: Option<Millis>,
    /// By when it should be done, from its submission.
    pub deadline: Option<Millis>,
}

impl Default for Task {
    fn default() -> Self {
        Self {
            at: 0,
            work: 1000,
            class: String::new(),
            priority: 0,
            owner: String::new(),
            project: String::new(),
            slots: 1,
            memory: 64 << 20,
            saveable: true,
            estimate: None,
            deadline: None,
        }
    }
}

/// What became of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fate {
    /// When it ran for the first time.
    pub started: Option<Millis>,
    /// When it was done.
    pub ended: Option<Millis>,
    /// How often it gave way.
    pub preemptions: u32,
    /// Time that giving way and coming back took.
    pub overhead: Millis,
    /// Work that was done again.
    pub lost: Millis,
    /// Each time that it ran: from, until, and at what price it then gave way.
    pub spells: Vec<(Millis, Millis, Option<Price>)>,
    /// What it had cost, each time that it ran, to give way before and to come back.
    pub paid: Vec<Millis>,
    /// The longest time that it waited at a stretch, also if that goes on at the end.
    pub longest_wait: Millis,
}

/// A simulated machine.
#[derive(Debug)]
pub struct Machine {
    now: Millis,
    slots: u32,
    memory: u64,
    rules: Rules,
    usage: share::Usage,
    tasks: Vec<Task>,
    /// How many of them have been submitted.
    arrived: usize,
    live: BTreeMap<JobId, State>,
    fates: Vec<Fate>,
    sink_after: Option<Millis>,
    /// Whether giving way and coming back take no time.
    is_free: bool,
}

#[derive(Debug, Clone)]
struct State {
    phase: Phase,
    since: Millis,
    done: Millis,
    saved: Millis,
    in_memory: bool,
    /// Until when coming back takes, and when giving way is over.
    ready: Millis,
    gave_way_to: Option<JobId>,
    back: Millis,
    guaranteed: Option<Millis>,
    /// For how long it stood still when it gave way, and what it has cost until it ran again.
    still: Millis,
    paid: Millis,
}

impl Machine {
    /// A machine on which nothing has happened yet.
    #[must_use]
    pub fn new(slots: u32, memory: u64, rules: Rules, mut tasks: Vec<Task>) -> Self {
        tasks.sort_by_key(|task| task.at);
        let fates = vec![Fate::default(); tasks.len()];
        let usage = share::Usage::default();
        let live = BTreeMap::new();
        let (now, arrived, sink_after, is_free) = (0, 0, None, false);
        Self { now, slots, memory, rules, usage, tasks, arrived, live, fates, sink_after, is_free }
    }

    /// One on which it costs no time to give way and to come back: what is left is what the rules cost.
    #[must_use]
    pub(crate) fn at_no_price(self) -> Self {
        Self { is_free: true, ..self }
    }

    /// One on which who was frozen for so long becomes a checkpoint, as a daemon does it.
    #[must_use]
    pub fn sinking(self, after: Millis) -> Self {
        Self { sink_after: Some(after), ..self }
    }

    /// Lets time pass until all is done, or until `end`; returns what became of each job,
    /// in the order of their submission.
    #[must_use]
    pub fn run(mut self, end: Millis) -> Vec<Fate> {
        while self.now < end {
            self.settle();
            let Some(next) = self.next_time() else { break };
            self.now = next.max(self.now + 1).min(end);
        }
        let waits = self.live.iter().filter(|(_, state)| state.phase == Phase::Waiting);
        for (&id, state) in waits {
            let fate = &mut self.fates[usize::try_from(id).unwrap_or(usize::MAX)];
            fate.longest_wait = fate.longest_wait.max(end - state.since);
        }
        self.fates
    }

    /// Does all that is to be done at this point in time.
    fn settle(&mut self) {
        self.arrive();
        self.finish();
        self.sink();
        // Orders are carried out at once; what that makes possible is decided again.
        for _ in 0..8 {
            let plan = decide(&self.world());
            if plan.actions.is_empty() {
                break;
            }
            for action in plan.actions {
                self.act(&action);
            }
            // Where giving way takes no time it is over.
            self.finish();
        }
    }

    fn arrive(&mut self) {
        while let Some(task) = self.tasks.get(self.arrived).filter(|task| task.at <= self.now) {
            let state = State {
                phase: Phase::Waiting,
                since: task.at,
                done: 0,
                saved: 0,
                in_memory: false,
                ready: 0,
                gave_way_to: None,
                back: 0,
                guaranteed: None,
                still: 0,
                paid: 0,
            };
            self.live.insert(self.arrived as JobId, state);
            self.arrived += 1;
        }
    }

    /// Ends what is done, and lets go what has given way.
    fn finish(&mut self) {
        let ids: Vec<JobId> = self.live.keys().copied().collect();
        for id in ids {
            let place = usize::try_from(id).unwrap_or(usize::MAX);
            let (now, task) = (self.now, &self.tasks[place]);
            let Some(state) = self.live.get_mut(&id) else { continue };
            match state.phase {
                Phase::Running if now >= state.ready => {
                    let done = state.done + (now - state.ready);
                    if done >= task.work {
                        self.fates[place].ended = Some(now);
                        self.fates[place].spells.push((state.since, now, None));
                        self.usage.decay(now, self.rules.shares.half_life);
                        self.usage.add(&task.project, &task.owner, task.slots, now - state.ready);
                        self.live.remove(&id);
                    }
                }
                Phase::Leaving(_) if now >= state.ready => {
                    state.phase = Phase::Waiting;
                    state.since = now;
                }
                _ => {}
            }
        }
    }

    /// Turns those into checkpoints that were frozen for long. They stand still anyway, but take longer to
    /// come back.
    fn sink(&mut self) {
        let (now, Some(after)) = (self.now, self.sink_after) else { return };
        for (&id, state) in &mut self.live {
            let task = &self.tasks[usize::try_from(id).unwrap_or(0)];
            let frozen = state.phase == Phase::Waiting && state.in_memory;
            if frozen && task.saveable && now - state.since >= after {
                let back = Speed::default().restore_ms(task.memory);
                state.back = Millis::try_from(back).unwrap_or(Millis::MAX);
                state.in_memory = false;
            }
        }
    }

    fn act(&mut self, action: &Action) {
        let (now, id) = match action {
            Action::Run { job, .. } | Action::GiveWay { job, .. } => (self.now, *job),
        };
        let place = usize::try_from(id).unwrap_or(usize::MAX);
        let fate = &mut self.fates[place];
        let Some(state) = self.live.get_mut(&id) else { return };
        match action {
            Action::Run { guaranteed, .. } => {
                assert_eq!(state.phase, Phase::Waiting, "only who waits can be started");
                fate.longest_wait = fate.longest_wait.max(now - state.since);
                fate.started.get_or_insert(now);
                state.guaranteed = *guaranteed;
                if guaranteed.is_some() {
                    self.usage.begin_slice(&self.tasks[place].owner, now);
                }
                state.phase = Phase::Running;
                state.since = now;
                state.ready = now + state.back;
                fate.overhead += state.back;
                state.paid = state.still + state.back;
                fate.paid.push(state.paid);
                (state.in_memory, state.back, state.still) = (false, 0, 0);
            }
            Action::GiveWay { to, price, .. } => {
                let free = Price { away_ms: 0, still_ms: 0, back_ms: 0, ..*price };
                let price = if self.is_free { &free } else { price };
                assert_eq!(state.phase, Phase::Running, "only who runs can give way");
                let worked = (now - state.ready).max(0);
                state.done += worked;
                let task = &self.tasks[place];
                self.usage.decay(now, self.rules.shares.half_life);
                self.usage.add(&task.project, &task.owner, task.slots, worked);
                if price.means == Means::Kill {
                    fate.lost += state.done - state.saved;
                    state.done = state.saved;
                } else {
                    state.saved = state.done;
                }
                fate.spells.push((state.since, now, Some(*price)));
                fate.preemptions += 1;
                let away = Millis::try_from(price.away_ms).unwrap_or(Millis::MAX);
                state.still = Millis::try_from(price.still_ms).unwrap_or(Millis::MAX);
                fate.overhead += state.still;
                state.back = Millis::try_from(price.back_ms).unwrap_or(Millis::MAX);
                state.in_memory = price.means == Means::Stop;
                state.phase = Phase::Leaving(*to);
                state.ready = now + away;
                state.gave_way_to = *to;
            }
        }
    }

    fn world(&self) -> World {
        let jobs: Vec<Job> = self.live.iter().map(|(&id, state)| self.view(id, state)).collect();
        let taken: u64 = self
            .live
            .iter()
            .filter(|(_, state)| state.phase != Phase::Waiting || state.in_memory)
            .map(|(&id, _)| self.tasks[usize::try_from(id).unwrap_or(0)].memory)
            .sum();
        let mut usage = self.usage.clone();
        usage.decay(self.now, self.rules.shares.half_life);
        World {
            now: self.now,
            slots: self.slots,
            memory_free: self.memory.saturating_sub(taken),
            draining: false,
            rules: self.rules.clone(),
            usage,
            jobs,
        }
    }

    fn view(&self, id: JobId, state: &State) -> Job {
        let task = &self.tasks[usize::try_from(id).unwrap_or(0)];
        let runs = state.phase == Phase::Running;
        let worked = if runs { (self.now - state.ready).max(0) } else { 0 };
        let unsaved = state.done + worked - state.saved;
        Job {
            id,
            class: task.class.clone(),
            priority: task.priority,
            owner: task.owner.clone(),
            project: task.project.clone(),
            slots: task.slots,
            submitted: task.at,
            phase: state.phase,
            since: state.since,
            held: None,
            remaining: task.estimate.map(|estimate| (estimate - state.done - worked).max(0)),
            deadline: task.deadline.map(|deadline| task.at + deadline),
            guaranteed: state.guaranteed,
            paid: state.paid,
            gave_way_to: state.gave_way_to,
            in_memory: state.in_memory,
            has_images: false,
            memory_wanted: task.memory,
            memory_expected: task.memory,
            memory_counted: task.memory,
            facts: Facts {
                memory: task.memory,
                to_save: if self.is_free { 0 } else { task.memory },
                to_fill: if self.is_free { 0 } else { task.memory },
                unsaved_ms: u64::try_from(unsaved).unwrap_or(0),
                refused: !task.saveable,
                has_command: false,
                speed: Speed::default(),
            },
        }
    }

    /// When something happens next.
    fn next_time(&self) -> Option<Millis> {
        let arrivals = self.tasks.get(self.arrived).map(|task| task.at);
        let ends = self.live.iter().filter_map(|(&id, state)| match state.phase {
            Phase::Running => {
                let work = self.tasks[usize::try_from(id).unwrap_or(0)].work;
                Some(state.ready + (work - state.done).max(0))
            }
            Phase::Leaving(_) => Some(state.ready),
            Phase::Waiting if state.in_memory => self.sink_after.map(|after| state.since + after),
            Phase::Waiting => None,
        });
        let again = decide(&self.world()).again;
        arrivals.into_iter().chain(ends).chain(again).filter(|&time| time > self.now).min()
    }
}
