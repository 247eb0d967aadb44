//! How much memory a job will use that has not said so: as much as jobs like it have used, or a share of the
//! machine's. A job that is stopped keeps its memory, which the other must not need.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use super::config::Config;
use super::core::Core;
use super::record::{Place, Record};
use super::store::{Store, StoreError};
use crate::files;
use crate::kind::Group;
use crate::scheduler::{JobId, Millis};
use crate::shepherd;

/// The name of what is known of them, among the facts.
const FACT: &str = "memory";

/// As many groups of jobs are known at most, the latest.
const MOST_GROUPS: usize = 1000;

/// The most memory that a job of a group has held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Peak {
    bytes: u64,
    /// When a job of the group has ended.
    at: Millis,
}

/// What jobs have been seen to hold.
#[derive(Debug)]
pub(super) struct Peaks {
    /// Bytes that a job uses for each slot of which nothing is known.
    usual: u64,
    groups: BTreeMap<Group, Peak>,
    /// The most that each job has held which has not ended.
    jobs: BTreeMap<JobId, u64>,
}

impl Peaks {
    /// What is known from before, on a daemon that is configured like this.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub(super) fn read(store: &Store, config: &Config) -> Result<Self, StoreError> {
        let groups = store.fact::<Vec<_>>(FACT)?.unwrap_or_default();
        let groups = groups.into_iter().collect();
        let share = || meminfo("MemTotal:") / 2 / u64::from(config.slots().max(1));
        let usual = config.usual_memory.unwrap_or_else(share);
        Ok(Self { usual, groups, jobs: BTreeMap::new() })
    }

    fn note(&mut self, id: JobId, bytes: u64) {
        let most = self.jobs.entry(id).or_default();
        *most = bytes.max(*most);
    }

    /// A job has ended: what it held is known of others of its group. Says whether there was anything.
    fn ended(&mut self, id: JobId, group: Group, at: Millis) -> bool {
        let Some(bytes) = self.jobs.remove(&id) else { return false };
        let peak = self.groups.entry(group).or_insert(Peak { bytes, at });
        *peak = Peak { bytes: bytes.max(peak.bytes), at };
        while self.groups.len() > MOST_GROUPS
            && let Some(oldest) = self.groups.iter().min_by_key(|(_, peak)| peak.at)
        {
            let oldest = oldest.0.clone();
            self.groups.remove(&oldest);
        }
        true
    }

    /// The most that jobs of the same group have held which have ended, if there were any.
    fn of_others(&self, record: &Record) -> Option<u64> {
        self.groups.get(&record.spec.group()).map(|peak| peak.bytes)
    }

    /// The most that a job has held itself, if anything is known of that.
    fn of_itself(&self, record: &Record) -> Option<u64> {
        let saved = Some(record.image_bytes).filter(|&bytes| bytes > 0);
        self.jobs.get(&record.id).copied().max(saved)
    }

    /// What a job uses for its slots of which nothing is known.
    fn usual_of(&self, record: &Record) -> u64 {
        self.usual.saturating_mul(record.spec.slots.into())
    }

    fn keep(&self, store: &Store) -> Result<(), StoreError> {
        store.keep_fact(FACT, &self.groups.iter().collect::<Vec<_>>())
    }
}

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

/// Bytes that the kernel tells under this word.
fn meminfo(word: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(word));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn of_many_groups_the_latest_are_known() {
        let mut peaks = Peaks { usual: 0, groups: BTreeMap::new(), jobs: BTreeMap::new() };
        for id in 0..=MOST_GROUPS as u64 {
            let group =
                Group { owner: String::new(), project: String::new(), kind: id.to_string() };
            peaks.note(id, id);
            assert!(peaks.ended(id, group, Millis::try_from(id).unwrap()));
        }
        assert_eq!(peaks.groups.len(), MOST_GROUPS);
        assert!(peaks.groups.keys().all(|group| group.kind != "0"));
    }
}
