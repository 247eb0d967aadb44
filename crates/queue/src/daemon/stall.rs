//! A machine that can begin no run for now: it has no more processes, or no room on its disk.
//!
//! That is no fault of the job, and the next one would meet it as well: none is begun until a pause is over, which becomes
//! longer each time. Else all that wait would be given up, one after the other, within the moment for which it lasts.

use super::core::Core;
use super::record::{Place, Record};
use crate::files;
use crate::scheduler::{JobId, Millis};

/// The first pause.
const FIRST: Millis = 1000;

/// None is longer.
const LONGEST: Millis = 60_000;

/// Why no run is begun.
#[derive(Debug)]
pub(super) struct Stall {
    /// How often in a row none could be.
    times: u32,
    /// Until when none is tried.
    until: Millis,
    /// What was said the last time.
    why: String,
}

impl Core {
    /// The run ended before there was a shepherd to speak of.
    pub(super) fn run_failed_to_start(&mut self, id: JobId, run: u64, text: &str) {
        if !self.counts(id, run) {
            return;
        }
        let times = self.stall.as_ref().map_or(0, |stall| stall.times);
        let pause = (FIRST << times.min(16)).min(LONGEST);
        let (until, why) = (files::now() + pause, text.to_owned());
        self.stall = Some(Stall { times: times.saturating_add(1), until, why });
        if let Some(record) = self.jobs.get_mut(&id) {
            record.machine_losses += 1;
        }
        self.fall_back(id, text);
        self.give_up_if_lost_often(id, text);
    }

    /// A run was begun.
    pub(super) fn stall_is_over(&mut self) {
        self.stall = None;
    }

    /// Why a job that has no run is not to begin one.
    pub(super) fn waits_for_machine(&self, record: &Record) -> Option<String> {
        let needs_run = matches!(record.place, Place::Queued | Place::Asleep) && !record.shepherd;
        let stall = self.stall.as_ref().filter(|stall| needs_run && files::now() < stall.until)?;
        Some(format!("this machine could not begin a job, and tries it again soon: {}", stall.why))
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::spec::Spec;

    fn daemon() -> (tempfile::TempDir, Core, [JobId; 2]) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let ids = [(); 2].map(|()| {
            let command = vec!["x".to_owned()];
            core.submit(Spec { command, dir: "/".into(), ..Spec::default() }, None).unwrap()
        });
        (dir, core, ids)
    }

    /// It may last for a while, and is the same for all of them.
    #[test]
    fn a_machine_that_can_begin_nothing_costs_no_job() {
        const WHY: &str = "Resource temporarily unavailable (os error 11)";
        let (_dir, mut core, [id, other]) = daemon();
        let held = |core: &Core, id: JobId| core.hold(&core.jobs[&id]);
        let mut pauses = Vec::new();
        for run in 1..=12 {
            let record = core.jobs.get_mut(&id).unwrap();
            (record.run, record.place) = (run, Place::Starting);
            // One that is slow to fail was begun before.
            core.run_failed_to_start(id, run - 1, "late");
            core.run_failed_to_start(id, run, WHY);
            let job = &core.jobs[&id];
            assert_eq!((job.place, job.exit, job.losses), (Place::Queued, None, 0));
            for id in [id, other] {
                let why = held(&core, id).unwrap();
                assert!(why.ends_with(WHY), "{why}");
            }
            pauses.push(core.stall.as_ref().unwrap().until - files::now());
        }
        assert!(pauses[0] <= FIRST && pauses[3] > 4 * FIRST, "{pauses:?}");
        assert!(pauses[11] > LONGEST / 2 && pauses[11] <= LONGEST, "{pauses:?}");
        core.stall.as_mut().unwrap().until = files::now();
        assert_eq!(held(&core, id), None);
        // What has a shepherd needs no new process.
        core.stall.as_mut().unwrap().until = files::now() + LONGEST;
        let record = core.jobs.get_mut(&id).unwrap();
        (record.place, record.shepherd) = (Place::Asleep, true);
        assert_eq!(held(&core, id), None);
        assert!(held(&core, other).is_some());
        core.connected(id, 12, std::os::unix::net::UnixStream::pair().unwrap().0);
        assert_eq!(held(&core, other), None);
    }

    /// The next daemon would take its number for another run, beside this one.
    #[test]
    fn a_run_whose_number_is_not_on_disk_is_not_begun() {
        let (dir, mut core, [id, _]) = daemon();
        let db = rusqlite::Connection::open(dir.path().join("queue.db")).unwrap();
        let full =
            "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END";
        db.execute_batch(full).unwrap();
        core.start_run(id, None);
        assert_eq!(core.jobs[&id].place, Place::Queued);
        assert!(core.hold(&core.jobs[&id]).is_some());
    }
}
