//! What has come ahead of jobs of other machines, and was compared.

use std::collections::BTreeMap;

use crate::scheduler::JobId;

/// What has come ahead and is what was saved. This daemon alone knows: what it finds when it starts it compares.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// The newest checkpoint, by the key under which the job is to come.
    pub(super) coming: BTreeMap<String, u64>,
    /// The same of jobs that have come, and were not brought back yet.
    here: BTreeMap<JobId, u64>,
}

impl Compared {
    /// A job is here, of which this has come ahead.
    pub(super) fn has_come(&mut self, id: JobId, seq: Option<u64>) {
        self.here.extend(seq.map(|seq| (id, seq)));
    }

    /// Up to which checkpoint a job need not be compared that is brought back now: this once.
    pub(super) fn take(&mut self, id: JobId) -> Option<u64> {
        self.here.remove(&id)
    }
}
