//! What jobs have been seen to hold of memory: themselves, and others of their group.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use super::config::Config;
use super::record::Record;
use super::store::{Store, StoreError};
use crate::kind::Group;
use crate::scheduler::{JobId, Millis};

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
    pub(super) jobs: BTreeMap<JobId, u64>,
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

    /// Notes what a job holds that runs.
    pub(super) fn note(&mut self, id: JobId, bytes: u64) {
        let most = self.jobs.entry(id).or_default();
        *most = bytes.max(*most);
    }

    /// A job has ended: what it held is known of others of its group. Says whether there was anything.
    pub(super) fn ended(&mut self, id: JobId, group: Group, at: Millis) -> bool {
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
    pub(super) fn of_others(&self, record: &Record) -> Option<u64> {
        self.groups.get(&record.spec.group()).map(|peak| peak.bytes)
    }

    /// The most that a job has held itself, if anything is known of that.
    pub(super) fn of_itself(&self, record: &Record) -> Option<u64> {
        let saved = Some(record.memory()).filter(|&bytes| bytes > 0);
        self.jobs.get(&record.id).copied().max(saved)
    }

    /// What a job uses for its slots of which nothing is known.
    pub(super) fn usual_of(&self, record: &Record) -> u64 {
        self.usual.saturating_mul(record.spec.slots.into())
    }

    /// Keeps what is known of groups.
    ///
    /// # Errors
    /// If the database cannot be written to.
    pub(super) fn keep(&self, store: &Store) -> Result<(), StoreError> {
        store.keep_fact(FACT, &self.groups.iter().collect::<Vec<_>>())
    }
}

/// Bytes that the kernel tells under this word.
pub(super) fn meminfo(word: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(word));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

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
