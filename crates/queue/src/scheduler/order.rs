//! In which order jobs that wait are looked at.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Job, Millis, Phase, World, share};

/// A job that waits, with what it is ordered by.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    /// Its place in the world's list.
    pub index: usize,
    /// Whether its guarantee is due, or it was passed by one whose was.
    pub due: bool,
    /// Its level.
    pub level: i64,
}

/// Those that wait whose turn it is whatever their level, the first to be placed first; and the others, in no order.
pub(super) fn candidates(world: &World) -> (Vec<Candidate>, Vec<Candidate>) {
    let waiting = world.jobs.iter().enumerate().filter(|(_, job)| job.phase == Phase::Waiting);
    let (mut first, mut due, mut others) = (Vec::new(), Vec::new(), Vec::new());
    let slices = slices(world);
    for (index, job) in waiting {
        let (level, is_passed, is_due) =
            (level(world, job), is_passed(world, job, &slices), world.is_due(job));
        let kind = if is_passed {
            &mut first
        } else if is_due {
            &mut due
        } else {
            &mut others
        };
        kind.push(Candidate { index, due: is_passed || is_due, level });
    }
    sort(world, &mut first);
    first.extend(in_turn(world, due));
    (first, others)
}

/// Sorts those that are due: owners take turns, so that one with many jobs has no more than others. First comes whoever has
/// least of what is left alone now, then whose last slice was longest ago; and of those the lowest level: the others get
/// their turn by their level, however many of them there are.
fn in_turn(world: &World, mut due: Vec<Candidate>) -> Vec<Candidate> {
    due.sort_by_key(|one| {
        let job = &world.jobs[one.index];
        (one.level, job.since, job.id)
    });
    let mut held: BTreeMap<&str, u64> = BTreeMap::new();
    for job in world.jobs.iter().filter(|job| world.is_left_alone(job)) {
        *held.entry(&job.owner).or_default() += u64::from(job.slots);
    }
    let mut keyed = Vec::new();
    for one in due {
        let job = &world.jobs[one.index];
        let held = held.entry(&job.owner).or_default();
        keyed.push(((*held, world.usage.last_slice(&job.owner)), one));
        *held += u64::from(job.slots);
    }
    keyed.sort_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, one)| one).collect()
}

/// When the last slice began, by levels, that was guaranteed and is over.
fn slices(world: &World) -> BTreeMap<i64, Millis> {
    let mut begun = BTreeMap::new();
    for job in &world.jobs {
        if let Some(until) = job.guaranteed.filter(|&until| until <= world.now) {
            let at = until.saturating_sub(world.rules.guarantee.slice);
            let last = begun.entry(level(world, job)).or_insert(at);
            *last = at.max(*last);
        }
    }
    begun
}

/// Whether a job has waited for as long as one of a lower level had such a slice, and could not have run beside it: before
/// the next one gets a slice it is this one's turn.
fn is_passed(world: &World, job: &Job, slices: &BTreeMap<i64, Millis>) -> bool {
    let beside = world.slots.saturating_sub(world.most_guaranteed());
    let mut below = slices.range(..level(world, job));
    job.slots > beside && below.any(|(_, &at)| at >= job.since)
}

/// Sorts candidates by their level, and within that by shares, deadlines and turns.
pub(super) fn sort(world: &World, candidates: &mut Vec<Candidate>) {
    let keyed = std::mem::take(candidates).into_iter();
    let mut keyed: Vec<(Key, Candidate)> =
        keyed.map(|one| (Key::of(world, &world.jobs[one.index], one.level), one)).collect();
    keyed.sort_by(|(a, _), (b, _)| a.compare(b));
    candidates.extend(keyed.into_iter().map(|(_, candidate)| candidate));
}

/// The level of a job: higher goes first.
pub(super) fn level(world: &World, job: &Job) -> i64 {
    let class = world.class(job);
    let pressing = match (job.deadline, job.remaining) {
        (Some(deadline), Some(remaining)) => world.now >= pressing_from(deadline, remaining),
        _ => false,
    };
    let rise = if pressing { world.rules.deadline_rise } else { 0 };
    class.priority.saturating_add(job.priority).saturating_add(rise)
}

/// From when on a job must run without a pause to be done by its deadline, with a tenth to
/// spare.
pub(super) fn pressing_from(deadline: Millis, remaining: Millis) -> Millis {
    deadline.saturating_sub(remaining).saturating_sub(remaining / 10)
}

/// What jobs are compared by; the number of the job comes last, so that no two are equal.
struct Key {
    level: Reverse<i64>,
    share: Vec<f64>,
    deadline: Millis,
    turn: Millis,
    id: u64,
}

impl Key {
    fn of(world: &World, job: &Job, level: i64) -> Self {
        let class = world.class(job);
        let share = match class.fair {
            true => world.usage.ratios(&world.rules.shares, job),
            false => Vec::new(),
        };
        Self {
            level: Reverse(level),
            share,
            deadline: job.deadline.unwrap_or(Millis::MAX),
            turn: if class.slice.is_some() { job.since } else { job.submitted },
            id: job.id,
        }
    }

    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        self.level
            .cmp(&other.level)
            .then_with(|| share::compare(&self.share, &other.share))
            .then_with(|| self.deadline.cmp(&other.deadline))
            .then_with(|| self.turn.cmp(&other.turn))
            .then_with(|| self.id.cmp(&other.id))
    }
}
