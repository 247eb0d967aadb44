//! In which order jobs that wait are looked at.

use std::cmp::Reverse;

use super::{Job, Millis, Phase, World, share};

/// A job that waits, with what it is ordered by.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    /// Its place in the world's list.
    pub index: usize,
    /// Whether its guarantee is due.
    pub due: bool,
    /// Its level.
    pub level: i64,
}

/// Those that wait, the first to be placed first.
pub(super) fn candidates(world: &World) -> Vec<Candidate> {
    let waiting = world.jobs.iter().enumerate().filter(|(_, job)| job.phase == Phase::Waiting);
    let mut found: Vec<(Key, Candidate)> = waiting
        .map(|(index, job)| {
            let (due, level) = (world.is_due(job), level(world, job));
            (Key::of(world, job, due, level), Candidate { index, due, level })
        })
        .collect();
    found.sort_by(|(a, _), (b, _)| a.compare(b));
    found.into_iter().map(|(_, candidate)| candidate).collect()
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
    due: Option<Millis>,
    level: Reverse<i64>,
    share: Vec<f64>,
    deadline: Millis,
    turn: Millis,
    id: u64,
}

impl Key {
    fn of(world: &World, job: &Job, due: bool, level: i64) -> Self {
        let class = world.class(job);
        let share = match class.fair {
            true => world.usage.ratios(&world.rules.shares, job),
            false => Vec::new(),
        };
        Self {
            due: due.then_some(job.since),
            level: Reverse(level),
            share,
            deadline: job.deadline.unwrap_or(Millis::MAX),
            turn: if class.slice.is_some() { job.since } else { job.submitted },
            id: job.id,
        }
    }

    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        // Those that are due come first, and among them the lowest level: the others get
        // their turn by their level, however many of them there are.
        let due = |key: &Self| match key.due {
            Some(since) => (false, key.level.0, since),
            None => (true, 0, 0),
        };
        due(self)
            .cmp(&due(other))
            .then_with(|| self.level.cmp(&other.level))
            .then_with(|| share::compare(&self.share, &other.share))
            .then_with(|| self.deadline.cmp(&other.deadline))
            .then_with(|| self.turn.cmp(&other.turn))
            .then_with(|| self.id.cmp(&other.id))
    }
}
