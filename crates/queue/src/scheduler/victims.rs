//! Who gives way.

use std::cmp::Reverse;

use super::order::{self, Candidate};
use super::{Job, JobId, Millis, Phase, World};
use crate::preemption::{self, Means, Pressure, Price};

/// Which jobs are looked for.
#[derive(Debug)]
pub(super) struct Search<'s> {
    /// How many slots they must have between them.
    pub missing: i64,
    /// All that run. Those that wait may be very many, and this is done for each of them.
    pub running: &'s [&'s Job],
    /// Those that have been told to go already.
    pub leaving: &'s [JobId],
    /// One that is due, and cannot have them itself.
    pub not_of: Option<&'s Candidate>,
}

/// What a search for jobs that could give way has found.
#[derive(Debug, Default)]
pub(super) struct Victims {
    /// Those that give way, if there are enough.
    pub chosen: Option<Vec<(JobId, Price)>>,
    /// All that run, if there are not.
    pub in_the_way: Vec<JobId>,
    /// When one more could give way.
    pub later: Option<Millis>,
}

/// Finds jobs that give way to `candidate`: those that
/// cost least for each slot, and no more than are needed. Costs are estimates: of those of about the
/// same cost the one goes that has most left to do.
pub(super) fn find(
    world: &World,
    candidate: &Candidate,
    search: &Search<'_>,
    memory_free: u64,
) -> Victims {
    let running = search.running.iter().filter(|job| !search.leaving.contains(&job.id));
    let mut found = Victims::default();
    let mut able: Vec<(&Job, Price)> = Vec::new();
    for &job in running {
        found.in_the_way.push(job.id);
        let price = may_have(world, candidate, job, memory_free);
        let is_of = |other: &&Candidate| may_have(world, other, job, memory_free).is_some();
        let Some(price) = price.filter(|_| search.not_of.filter(is_of).is_none()) else {
            continue;
        };
        let from = free_from(world, candidate, job, &price);
        match done_before(world, job, &price).or((from > world.now).then_some(from)) {
            None => able.push((job, price)),
            Some(at) => found.later = Some(found.later.map_or(at, |later| later.min(at))),
        }
    }
    able.sort_by_key(|(job, price)| {
        let each = price.total_ms() / u64::from(job.slots.max(1));
        let left = Reverse(job.remaining.filter(|&left| left > 0).unwrap_or(Millis::MAX));
        (order::level(world, job), each.max(1).ilog2(), left, each, Reverse(job.id))
    });
    found.chosen = fewest(able, search.missing);
    found
}

/// At what price `job` gives way to the candidate, if it has to.
fn may_have(world: &World, candidate: &Candidate, job: &Job, memory_free: u64) -> Option<Price> {
    let taker = &world.jobs[candidate.index];
    let price =
        price_for(world, taker, job, memory_free).filter(|_| outranks(world, candidate, job))?;
    // A job that begins again each time that it is another's turn is never done.
    let is_spared = price.means == Means::Kill && !is_above(world, candidate, job);
    (!is_spared).then_some(price)
}

/// What it costs to let `job` give way to `taker`. What that is only thought to need decides between means,
/// but nobody is killed for it, and nobody waits.
fn price_for(world: &World, taker: &Job, job: &Job, memory_free: u64) -> Option<Price> {
    let means = &world.class(job).means;
    let of = |means: &[Means], needed: u64| {
        let memory_needed = if taker.in_memory { 0 } else { needed };
        preemption::choose(&job.facts, means, Pressure { memory_free, memory_needed })
    };
    let gentle: Vec<Means> = means.iter().copied().filter(|&means| means != Means::Kill).collect();
    of(&gentle, taker.memory_expected).or_else(|| of(means, taker.memory_wanted))
}

/// Takes from the front until there are enough slots, and puts back, from the most
/// expensive on, whoever is not needed after all.
fn fewest(able: Vec<(&Job, Price)>, missing: i64) -> Option<Vec<(JobId, Price)>> {
    let mut sum = 0;
    let mut taken = Vec::new();
    for (job, price) in able {
        if sum >= missing {
            break;
        }
        sum += i64::from(job.slots);
        taken.push((job, price));
    }
    if sum < missing {
        return None;
    }
    for place in (0..taken.len()).rev() {
        let slots = i64::from(taken[place].0.slots);
        if sum - slots >= missing {
            sum -= slots;
            taken.remove(place);
        }
    }
    Some(taken.into_iter().map(|(job, price)| (job.id, price)).collect())
}

/// Whether `job` has to give way to the candidate at all.
fn outranks(world: &World, candidate: &Candidate, job: &Job) -> bool {
    if candidate.due || is_above(world, candidate, job) {
        return true;
    }
    let of_job = world.class(job);
    let level = order::level(world, job);
    of_job.slice.is_some() && of_job.preemptible && candidate.level >= level
}

/// Whether `job` has to give way to the candidate for its level.
fn is_above(world: &World, candidate: &Candidate, job: &Job) -> bool {
    let taker = world.class(&world.jobs[candidate.index]);
    let is_lower = candidate.level > order::level(world, job);
    taker.preempts && world.class(job).preemptible && is_lower
}

/// From when on `job` can be made to give way to the candidate: not before it has run ten
/// times as long as that costs, or as it has cost before (who is stopped may have to be saved later, and
/// brought back), nor within the slice that it was guaranteed, nor, to
/// another of its level, before its own slice is over.
fn free_from(world: &World, candidate: &Candidate, job: &Job, price: &Price) -> Millis {
    let exempt = Millis::try_from(preemption::exempt_ms(price)).unwrap_or(Millis::MAX);
    let exempt = exempt.max(job.paid.saturating_mul(preemption::EXEMPT_FACTOR.cast_signed()));
    let mut from = job.since.saturating_add(exempt);
    if let Some(guaranteed) = job.guaranteed {
        from = from.max(guaranteed);
    }
    let level = order::level(world, job);
    if !candidate.due
        && candidate.level <= level
        && let Some(slice) = world.class(job).slice
    {
        from = from.max(job.since.saturating_add(slice));
    }
    from
}

/// When a job will be done, if that is no later than it could have given way and be back: a job that would
/// wait for that waits for its end. One that has run for longer than was thought says nothing about it.
fn done_before(world: &World, job: &Job, price: &Price) -> Option<Millis> {
    let both = Millis::try_from(price.away_ms + price.back_ms).unwrap_or(Millis::MAX);
    let remaining = job.remaining.filter(|&remaining| remaining > 0 && remaining <= both)?;
    Some(world.now.saturating_add(remaining))
}

/// What it costs to let a job give way by one of these means.
pub(super) fn price(world: &World, job: &Job, means: &[Means], needed: u64) -> Option<Price> {
    let pressure = Pressure { memory_free: world.memory_free, memory_needed: needed };
    preemption::choose(&job.facts, means, pressure)
}

/// When so many slots more will be free, if the jobs that run end as they are thought to.
pub(super) fn planned_start(world: &World, missing: i64) -> Option<Millis> {
    let mut ends: Vec<(Millis, i64)> = world
        .jobs
        .iter()
        .filter(|job| job.phase == Phase::Running)
        .filter_map(|job| Some((world.now.saturating_add(job.remaining?), i64::from(job.slots))))
        .collect();
    ends.sort_unstable();
    let mut sum = 0;
    ends.into_iter().find_map(|(end, slots)| {
        sum += slots;
        (sum >= missing).then_some(end)
    })
}
