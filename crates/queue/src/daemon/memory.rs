//! How much memory a job will use that has not said so: as much as jobs like it have used, or a share of the
//! machine's. A job that is stopped keeps its memory, which the other must not need.

use super::core::Core;
use super::peaks::meminfo;
use super::record::{Place, Record};
use crate::files;
use crate::scheduler::JobId;
use crate::shepherd;

impl Core {
    /// Notes what the jobs hold that run, and what those have held that have ended.
    pub(super) fn watch_memory(&mut self) {
        let running = self.jobs.values().filter(|job| job.place == Place::Running);
        for id in running.map(|job| job.id).collect::<Vec<_>>() {
            let bytes = shepherd::cgroups(&self.dir(id)).memory().unwrap_or(0);
            self.peaks.note(id, bytes);
        }
        let over = |id: &JobId| self.jobs.get(id).is_none_or(|job| job.place == Place::Ended);
        let over: Vec<JobId> = self.peaks.jobs.keys().copied().filter(over).collect();
        let mut learned = false;
        for id in over {
            match self.jobs.get(&id).map(|job| job.spec.group()) {
                Some(group) => learned |= self.peaks.ended(id, group, files::now()),
                None => drop(self.peaks.jobs.remove(&id)),
            }
        }
        if learned && let Err(e) = self.peaks.keep(&self.store) {
            self.trouble = Some(e.to_string());
        }
    }

    /// Bytes that a job may use, or is thought to use.
    #[must_use]
    pub(super) fn memory_expected(&self, record: &Record) -> u64 {
        if let Some(limit) = record.spec.limits.memory {
            return limit;
        }
        let seen = self.peaks.of_others(record).max(self.peaks.of_itself(record));
        seen.unwrap_or_else(|| self.peaks.usual_of(record))
    }

    /// Bytes of a job that count for quotas: what it may use, or what it is thought to need before it has begun, or more
    /// if it is seen to hold more. That it has not taken all of it yet gives nothing to others.
    #[must_use]
    pub(super) fn memory_counted(&self, record: &Record) -> u64 {
        if let Some(limit) = record.spec.limits.memory {
            return limit;
        }
        let before = self.peaks.of_others(record).unwrap_or_else(|| self.peaks.usual_of(record));
        before.max(self.peaks.of_itself(record).unwrap_or(0))
    }

    /// Bytes of memory that jobs could use.
    #[must_use]
    pub(super) fn memory_free(&self) -> u64 {
        meminfo("MemAvailable:").saturating_sub(self.config.memory_reserve)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::config::Config;
    use super::*;
    use crate::shepherd::message::Exit;
    use crate::spec::{Limits, Spec};

    fn open(dir: &std::path::Path) -> Core {
        fs::create_dir_all(dir.join("jobs")).unwrap();
        let config = Config { usual_memory: Some(1000), ..Config::default() };
        Core::open(dir.to_owned(), config).unwrap()
    }

    fn submit(core: &mut Core, program: &str, memory: Option<u64>) -> JobId {
        let limits = Limits { memory, ..Limits::default() };
        let command = vec![program.to_owned()];
        let spec = Spec { command, dir: "/".into(), slots: 2, limits, ..Spec::default() };
        core.submit(spec, None).unwrap()
    }

    #[test]
    fn a_job_is_thought_to_use_what_it_says_or_others_have_used_or_its_share() {
        let dir = tempfile::tempdir().unwrap();
        let mut core = open(dir.path());
        let [first, second] = [0; 2].map(|_| submit(&mut core, "a", None));
        let expected = |core: &Core, id| core.memory_expected(&core.jobs[&id]);
        assert_eq!(expected(&core, first), 2000);
        // What it holds while it runs says nothing of what others will.
        core.peaks.note(first, 70);
        core.peaks.note(first, 50);
        core.watch_memory();
        assert_eq!((expected(&core, first), expected(&core, second)), (70, 2000));
        core.end(first, Exit::Code(0), None);
        core.watch_memory();
        assert_eq!(expected(&core, second), 70);
        let mut core = open(dir.path());
        assert_eq!(expected(&core, second), 70);
        // It has its checkpoint in mind, too.
        core.jobs.get_mut(&second).unwrap().image_bytes = 90;
        assert_eq!(expected(&core, second), 90);
        let [other, limited] = [("b", None), ("a", Some(5))].map(|(p, m)| submit(&mut core, p, m));
        assert_eq!((expected(&core, other), expected(&core, limited)), (2000, 5));
    }

    /// What it holds when it has just begun frees nothing for others, and what it holds beyond that counts as well.
    #[test]
    fn for_quotas_a_job_counts_as_it_says_or_as_it_is_thought_to_need_or_holds() {
        let dir = tempfile::tempdir().unwrap();
        let mut core = open(dir.path());
        let [job, limited] = [None, Some(5)].map(|memory| submit(&mut core, "a", memory));
        let counted = |core: &Core, id| core.memory_counted(&core.jobs[&id]);
        assert_eq!((counted(&core, job), counted(&core, limited)), (2000, 5));
        core.peaks.note(job, 70);
        core.peaks.note(limited, 9000);
        assert_eq!((counted(&core, job), counted(&core, limited)), (2000, 5));
        core.peaks.note(job, 3000);
        assert_eq!(counted(&core, job), 3000);
        core.end(job, Exit::Code(0), None);
        core.watch_memory();
        let next = submit(&mut core, "a", None);
        assert_eq!(counted(&core, next), 3000);
    }
}
