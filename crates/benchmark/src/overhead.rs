//! What the tool itself takes of the machine while it measures.

use std::fs;
use std::ops::AddAssign;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// CPU time of the tool and its keepers, and the time in which they took it: both in seconds, of all samples that
/// count, with the work of starting and ending what is measured, without reports and images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// The CPU time.
    pub cpu: f64,
    /// The time on the clock.
    pub time: f64,
    /// The CPU time, which is not in the first, of reading what many processes take: while it is read no call is
    /// under way.
    #[serde(default)]
    pub weighing: f64,
}

impl Overhead {
    /// The percentage of one processor, or nothing where no time is known.
    #[must_use]
    pub fn percent(self) -> Option<f64> {
        (self.time > 0.0).then(|| 100.0 * self.cpu / self.time)
    }

    /// The same of weighing, if there was any.
    #[must_use]
    pub(crate) fn percent_weighing(self) -> Option<f64> {
        (self.time > 0.0 && self.weighing > 0.0).then(|| 100.0 * self.weighing / self.time)
    }
}

impl AddAssign for Overhead {
    fn add_assign(&mut self, other: Self) {
        self.cpu += other.cpu;
        self.time += other.time;
        self.weighing += other.weighing;
    }
}

/// The CPU time of this process.
pub(crate) fn own() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The CPU time of all threads of another process; none where the kernel does not account for it.
pub(crate) fn of(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let used = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(used.sum())
}
