//! What the daemon keeps on disk beside its jobs.

use serde::{Deserialize, Serialize};

use super::record::Record;
use crate::scheduler::{JobId, Millis};

/// What jobs have cost together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Totals {
    /// Milliseconds of work.
    pub work: Millis,
    /// Milliseconds that preemptions have taken.
    pub overhead: Millis,
    /// Milliseconds of work that was done again.
    pub lost: Millis,
    /// Preemptions.
    pub preemptions: u64,
    /// Runs that were started.
    pub runs: u64,
}

impl Totals {
    /// With one job more, as it is now.
    #[must_use]
    pub(super) fn with(self, job: &Record, now: Millis) -> Self {
        Self {
            work: self.work + job.ran_by(now),
            overhead: self.overhead + job.overhead,
            lost: self.lost + job.lost,
            preemptions: self.preemptions + u64::from(job.preemptions),
            runs: self.runs + job.run,
        }
    }
}

/// Why jobs of a kind cannot be saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Refused {
    /// When that was found out.
    pub at: Millis,
    /// What has found it out: Torpor and the kernel.
    pub version: String,
    /// Why.
    pub why: String,
}

impl Refused {
    /// Whether it is known of this version.
    #[must_use]
    pub(super) fn still_counts(&self) -> bool {
        self.version == version()
    }
}

/// What saves jobs here.
pub(super) fn version() -> String {
    let kernel = rustix::system::uname();
    let release = kernel.release().to_string_lossy();
    format!("torpor {}, Linux {release}", env!("CARGO_PKG_VERSION"))
}

/// The name of those that were not heard of yet, among the facts.
pub(super) const WITHDRAWN: &str = "withdrawn";

/// A job that another machine is to give up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Withdrawal {
    /// The machine's name in the pool.
    pub(super) machine: String,
    /// The key under which the job was handed over.
    pub(super) key: String,
    /// The job, until it is on disk that it stays.
    #[serde(skip)]
    pub(super) of: Option<JobId>,
}

/// Those that are to be on disk when the jobs `ids` are, if one of them is of these.
#[must_use]
pub(super) fn kept_with<'w>(all: &'w [Withdrawal], ids: &[JobId]) -> Option<Vec<&'w Withdrawal>> {
    let is_own = |of: &JobId| ids.contains(of);
    let has_own = all.iter().any(|one| one.of.as_ref().is_some_and(is_own));
    has_own.then(|| all.iter().filter(|one| one.of.as_ref().is_none_or(is_own)).collect())
}
