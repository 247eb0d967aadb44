//! Limits of tasks, and how they are scheduled.

use torpor_images::kind;
use torpor_images::proto::TaskCoreEntry;

use super::{Checkpoint, Requests};
use crate::passed::{NO_LOGIN, Passed};
use crate::request::{Ask, Word};

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

/// What is more than `RLIMIT_MEMLOCK`, as requests name it.
pub(crate) const LOCKED_MEMORY: Word = "locked memory";
/// More than `fs.pipe-max-size` for a pipe.
pub(super) const PIPE_SIZE: Word = "the size of a pipe";
/// The number of `RLIMIT_MEMLOCK`.
const MEMLOCK: usize = 8;

/// `SCHED_FIFO`, `SCHED_RR`, `SCHED_DEADLINE` (linux/sched.h), and the bit beside a policy.
const REAL_TIME: [u32; 3] = [1, 2, 6];
const RESET_ON_FORK: u32 = 0x4000_0000;
/// Where the class of a priority for I/O is, and `IOPRIO_CLASS_RT` (linux/ioprio.h).
const IO_CLASS: u32 = 13;
const IO_CLASSES: u32 = 7;
const IO_REAL_TIME: u32 = 1;

/// Asks for what is more than the caller has and the configuration gives.
pub(super) fn collect(checkpoint: &Checkpoint<'_>, passed: &Passed, all: &mut Requests) {
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        let image = kind::CORE.file_name(task.pid.into());
        let Some(tc) = task.cores.first().and_then(|core| core.tc.as_ref()) else { continue };
        let limits = tc.rlimits.iter().flat_map(|limits| &limits.rlimits).zip(LIMITS).enumerate();
        for (number, (limit, name)) in limits {
            if limit.max > most(passed, number, name) {
                let ask = Ask::Raise { name, to: limit.max.into() };
                all.add(&*image, Some(task.pid), ask);
            }
        }
        let login = login(tc);
        if let Some(id) = login.filter(|_| passed.login.is_some() && passed.login != login) {
            all.add(&*image, Some(task.pid), Ask::Login(id));
        }
        let least = passed.spec.as_ref().and_then(|spec| spec.process.oom_score_adj);
        let least = least.unwrap_or(0).min(passed.oom_score_adj).min(0);
        if let Some(score) = tc.oom_score_adj.filter(|&score| score < least) {
            let ask = Ask::Raise { name: "oom_score_adj", to: score.into() };
            all.add(&*image, Some(task.pid), ask);
        }
        for (&thread, core) in task.threads.iter().zip(task.cores) {
            let Some(core) = &core.thread_core else { continue };
            let policy = core.sched_policy.unwrap_or(0) & !RESET_ON_FORK;
            let nice = core.sched_nice.unwrap_or(0);
            let image = kind::CORE.file_name(thread.into());
            let io = core.torpor_ioprio.unwrap_or(0);
            // The kernel looks at no further bits.
            if io >> IO_CLASS & IO_CLASSES == IO_REAL_TIME {
                let text = format!("priority {io:#x} for I/O");
                all.add(&*image, Some(thread), Ask::Scheduling { text });
            }
            if core.torpor_io_flusher == Some(true) {
                all.add(&*image, Some(thread), Ask::Raise { name: "PR_SET_IO_FLUSHER", to: 1 });
            }
            let text = match (REAL_TIME.contains(&policy), nice < passed.nice.min(0)) {
                (true, _) => format!("policy {policy} of priority {}", core.sched_prio()),
                (false, true) => format!("nice {nice}"),
                (false, false) => continue,
            };
            all.add(image, Some(thread), Ask::Scheduling { text });
        }
    }
}

/// The user that a process is to have logged in as, by its id on the host that dumped it, which told it
/// the dumping program. If nobody has, it keeps the login of the restoring program: to take that away
/// would hide from audit records who has restored it.
#[must_use]
pub fn login(tc: &TaskCoreEntry) -> Option<u32> {
    tc.loginuid.filter(|&id| id != NO_LOGIN)
}

/// The most memory that a process may lock without a grant.
pub(super) fn most_locked(passed: &Passed) -> u64 {
    most(passed, MEMLOCK, LIMITS[MEMLOCK])
}

/// The highest hard limit that needs no grant.
fn most(passed: &Passed, number: usize, name: &str) -> u64 {
    let own = passed.limits.get(number).copied().unwrap_or(u64::MAX);
    let given = passed.spec.iter().flat_map(|spec| &spec.process.rlimits);
    let given = given.filter(|limit| limit.kind == name).map(|limit| limit.hard).max();
    given.map_or(own, |given| given.max(own))
}
