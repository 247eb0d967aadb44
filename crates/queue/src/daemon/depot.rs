//! What the daemon knows of the object store: [`super::objects`] fills and uses it.

use std::collections::{BTreeMap, BTreeSet};

use crate::objects::Pieces;
use crate::scheduler::{JobId, Millis};

/// What the daemon knows of the object store.
#[derive(Debug, Default)]
pub(super) struct Depot {
    /// The objects of each job's checkpoint.
    pub(super) pieces: BTreeMap<JobId, Pieces>,
    /// Bytes that they take, each counted once.
    pub bytes: u64,
    /// The same of what each owner and each project has.
    pub by_name: BTreeMap<String, u64>,
    /// The checkpoint that is being stored.
    pub(super) storing: Option<(JobId, u64)>,
    /// Whether something is done there.
    pub(super) busy: bool,
    /// When to try again what has failed, and how long was waited before.
    pub(super) again: (Millis, Millis),
    /// Why it has failed.
    pub trouble: Option<String>,
    /// Whether something there may be needed no more, and when that was last looked for.
    pub(super) garbage: (bool, Millis),
    /// Checkpoints that are on their way here, or are not to be had until then, and why.
    pub(super) fetches: BTreeMap<JobId, Option<(Millis, String)>>,
    /// Checkpoints that have come and are about to be used.
    pub(super) brought: BTreeSet<JobId>,
    /// Whether it was looked since the start which jobs others have adopted.
    pub(super) looked: bool,
    /// Why this daemon cannot show there that it lives.
    pub(super) silence: Option<String>,
}

impl Depot {
    /// Whether a checkpoint has come from the store, and its job has not run since.
    pub(super) fn has_brought(&self, id: JobId) -> bool {
        self.brought.contains(&id)
    }

    /// A job runs: if its checkpoint has come for that, it has served.
    pub(super) fn has_served(&mut self, id: JobId) {
        self.brought.remove(&id);
    }
}
