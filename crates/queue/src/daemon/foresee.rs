//! Who will have to give way once the jobs have ended that others are to run after. They are saved
//! from time to time while they run, so that giving way then takes only what they have changed since.

use std::collections::BTreeSet;

use super::core::Core;
use super::record::{Place, Record};
use crate::preemption::Means;
use crate::scheduler::{self, Action, JobId, World};

impl Core {
    /// Finds them.
    pub(super) fn foresee(&mut self, mut world: World) {
        let announced = self.jobs.values().filter(|record| self.is_announced(record));
        let announced: BTreeSet<JobId> = announced.map(|record| record.id).collect();
        if announced.is_empty() {
            return self.expected.clear();
        }
        let records = announced.iter().filter_map(|id| self.jobs.get(id));
        let first: BTreeSet<JobId> = records.flat_map(|record| self.first(record)).collect();
        world.jobs.retain(|job| !first.contains(&job.id));
        for job in world.jobs.iter_mut().filter(|job| announced.contains(&job.id)) {
            job.held = None;
        }
        let victim = |action| match action {
            Action::GiveWay { job, price, .. } => (price.means == Means::Checkpoint).then_some(job),
            Action::Run { .. } => None,
        };
        self.expected = scheduler::decide(&world).actions.into_iter().filter_map(victim).collect();
    }

    /// The jobs that one which has not begun is to run after, and that have not ended well yet.
    pub(super) fn first(&self, record: &Record) -> impl Iterator<Item = JobId> {
        let after: &[JobId] = if record.run > 0 { &[] } else { &record.spec.after };
        let pending = move |id: &JobId| self.jobs.get(id).is_some_and(|job| !job.has_succeeded());
        after.iter().copied().filter(pending)
    }

    /// Whether a job waits for nothing but others that are at work.
    fn is_announced(&self, record: &Record) -> bool {
        let at_work = |id: JobId| {
            let place = self.jobs.get(&id).map(|job| job.place);
            place.is_some_and(|place| place.holds_slots() || place == Place::Away)
        };
        let free = !record.held && record.destination.is_none();
        let mut first = self.first(record).peekable();
        record.place == Place::Queued && free && first.peek().is_some() && first.all(at_work)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::spec::Spec;

    #[test]
    fn who_gives_way_when_a_job_has_ended_is_known_before() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut config = Config { slots: Some(2), ..Config::default() };
        config.allow_only(&[Means::Checkpoint]);
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        let submit = |core: &mut Core, class: &str, after: &[JobId]| {
            let (class, after) = (class.to_owned(), after.to_vec());
            let command = vec!["x".to_owned()];
            let spec = Spec { command, dir: "/".into(), class, after, ..Spec::default() };
            core.submit(spec, None).unwrap()
        };
        let expected = |core: &mut Core| {
            let world = core.world();
            core.foresee(world);
            core.expected.clone()
        };
        let (first, long) = (submit(&mut core, "urgent", &[]), submit(&mut core, "batch", &[]));
        for id in [first, long] {
            let record = core.jobs.get_mut(&id).unwrap();
            (record.place, record.since) = (Place::Running, record.since - 3_600_000);
        }
        let nobody = BTreeSet::new();
        assert_eq!(expected(&mut core), nobody);
        // One job takes the slot of the one that it runs after.
        submit(&mut core, "urgent", &[first]);
        assert_eq!(expected(&mut core), nobody);
        let second = submit(&mut core, "urgent", &[first]);
        assert_eq!(expected(&mut core), BTreeSet::from([long]));
        // What is told to wait is not expected, nor what runs after a job that waits itself.
        core.set_held(second, true);
        assert_eq!(expected(&mut core), nobody);
        core.set_held(second, false);
        core.jobs.get_mut(&first).unwrap().place = Place::Queued;
        assert_eq!(expected(&mut core), nobody);
    }
}
