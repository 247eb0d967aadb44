//! What a process may use, and how it stands in the kernel's accounts: read of its image once,
//! judged, and given to the process.

use torpor_images::proto::{CoreEntry, RlimitEntry};

/// The login id of a process that nobody has logged in for.
pub const NO_LOGIN: u32 = u32::MAX;

/// The kernel's names of the limits, by number (asm-generic/resource.h).
pub const LIMITS: [&str; 16] = [
    "RLIMIT_CPU",
    "RLIMIT_FSIZE",
    "RLIMIT_DATA",
    "RLIMIT_STACK",
    "RLIMIT_CORE",
    "RLIMIT_RSS",
    "RLIMIT_NPROC",
    "RLIMIT_NOFILE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_AS",
    "RLIMIT_LOCKS",
    "RLIMIT_SIGPENDING",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
];

/// Resource limits, OOM score and login of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// The resource limits, by number. A process keeps those that are not here.
    pub resources: Vec<ResourceLimit>,
    /// How willingly the kernel kills it when memory is short.
    pub oom_score_adj: Option<i32>,
    /// The user that it has logged in as, by its id on the host that dumped it, which told it the
    /// dumping program. If nobody has, it keeps the login of the restoring program: to take that
    /// away would hide from audit records who has restored it.
    pub login: Option<u32>,
}

/// A resource limit (getrlimit(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceLimit {
    /// The limit that counts.
    pub soft: u64,
    /// To what the process may raise it.
    pub hard: u64,
}

impl ProcessLimits {
    /// Takes them out of the image of a leader, so that nobody reads them there again.
    ///
    /// # Errors
    /// More limits than there are.
    pub fn take(leader: &mut CoreEntry) -> Result<Self, String> {
        let Some(tc) = &mut leader.tc else { return Ok(ProcessLimits::default()) };
        let entries = tc.rlimits.take().unwrap_or_default().rlimits;
        if entries.len() > LIMITS.len() {
            return Err(format!("{} resource limits", entries.len()));
        }
        let limit = |entry: &RlimitEntry| ResourceLimit { soft: entry.cur, hard: entry.max };
        Ok(ProcessLimits {
            resources: entries.iter().map(limit).collect(),
            oom_score_adj: tc.oom_score_adj.take(),
            login: tc.loginuid.take().filter(|&id| id != NO_LOGIN),
        })
    }
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{TaskCoreEntry, TaskRlimitsEntry};

    use super::*;

    #[test]
    fn limits_are_read_once_and_are_no_more_than_the_kernel_has() {
        let image = |count| {
            let rlimits = vec![RlimitEntry { cur: 1, max: 2 }; count];
            let rlimits = Some(TaskRlimitsEntry { rlimits });
            let tc = TaskCoreEntry { rlimits, loginuid: Some(NO_LOGIN), ..Default::default() };
            CoreEntry { tc: Some(tc), ..CoreEntry::default() }
        };
        let mut core = image(16);
        let all = vec![ResourceLimit { soft: 1, hard: 2 }; 16];
        let read = ProcessLimits { resources: all, ..ProcessLimits::default() };
        assert_eq!(ProcessLimits::take(&mut core), Ok(read));
        assert_eq!(ProcessLimits::take(&mut core), Ok(ProcessLimits::default()));
        assert_eq!(ProcessLimits::take(&mut image(17)), Err("17 resource limits".to_owned()));
    }
}
