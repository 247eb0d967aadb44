//! How a thread is scheduled, and on which processors.

use std::sync::LazyLock;

use rustix::process::Pid;
use torpor_images::proto::ThreadCoreEntry;
use torpor_policy::Scheduling;
use torpor_policy::scheduling::Class;
use torpor_sys::sched::{SchedulingAttributes, affinity, attributes, set_affinity, set_attributes};
use torpor_tracee::Tracee;

use crate::cgroup;
use crate::error::{Context, Error, Result};

/// The flag of sched_setscheduler(2) that is or-ed to the policy, also in images.
const RESET_ON_FORK: u32 = libc::SCHED_RESET_ON_FORK.cast_unsigned();
/// The same in `struct sched_attr`.
const FLAG_RESET_ON_FORK: u64 = libc::SCHED_FLAG_RESET_ON_FORK as u64;
const SCHED_OTHER: u32 = libc::SCHED_OTHER.cast_unsigned();
const SCHED_FIFO: u32 = libc::SCHED_FIFO.cast_unsigned();
const SCHED_RR: u32 = libc::SCHED_RR.cast_unsigned();
const SCHED_BATCH: u32 = libc::SCHED_BATCH.cast_unsigned();
const SCHED_IDLE: u32 = libc::SCHED_IDLE.cast_unsigned();
const SCHED_DEADLINE: u32 = libc::SCHED_DEADLINE.cast_unsigned();
/// linux/sched.h.
const SCHED_EXT: u32 = 7;

/// How many processors this machine has.
static PROCESSORS: LazyLock<u32> = LazyLock::new(|| {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    list.trim().split(',').filter_map(range).sum()
});

/// How many processors this machine has.
pub(crate) fn processors() -> u32 {
    *PROCESSORS
}

/// The slice of this machine, in ns, which each thread has that has chosen none; 0 of a kernel that
/// has no others (before Linux 6.12). The kernel does not tell who has chosen his.
static SLICE: LazyLock<u64> = LazyLock::new(|| {
    let ask = || {
        let mut own = attributes(0)?;
        if !is_fair(own.policy) {
            (own.policy, own.priority) = (SCHED_OTHER, 0);
        }
        own.runtime = 0;
        set_attributes(0, &own)?;
        attributes(0)
    };
    // It is this thread's alone.
    let asked = std::thread::spawn(ask).join();
    asked.ok().and_then(std::result::Result::ok).map_or(0, |own| own.runtime)
});

/// The least utilization that real-time threads have that have chosen none; `None` of a kernel that does not clamp
/// it (`CONFIG_UCLAMP_TASK`).
static LEAST_OF_REAL_TIME: LazyLock<Option<u32>> = LazyLock::new(|| {
    let path = "/proc/sys/kernel/sched_util_clamp_min_rt_default";
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
});

/// Whether threads of a policy have a slice.
fn is_fair(policy: u32) -> bool {
    [SCHED_OTHER, SCHED_BATCH, SCHED_IDLE, SCHED_EXT].contains(&policy)
}

/// The clamps of a thread, unless they are those that it has by itself. The kernel does not tell who has chosen them.
fn chosen_clamps(
    now: &SchedulingAttributes,
    least_of_real_time: Option<u32>,
) -> Option<(u32, u32)> {
    /// `SCHED_CAPACITY_SCALE`: a whole processor.
    const WHOLE: u32 = 1024;
    let least = least_of_real_time?;
    let least = if [SCHED_FIFO, SCHED_RR].contains(&now.policy) { least } else { 0 };
    let clamps = (now.util_min, now.util_max);
    (clamps != (least, WHOLE)).then_some(clamps)
}

/// The length of a range like `0-3`, or of a single number.
fn range(text: &str) -> Option<u32> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(last.parse::<u32>().ok()? - first.parse::<u32>().ok()? + 1)
}

/// Fills in policy, nice value, priority, and the processors if they are not all.
///
/// # Errors
/// Gone; a deadline policy is refused.
pub(crate) fn dump(tracee: &Tracee, entry: &mut ThreadCoreEntry) -> Result<()> {
    let tid = tracee.tid();
    let now = attributes(tid).context(|| format!("task {tid}: sched_getattr"))?;
    if now.policy == SCHED_DEADLINE {
        let reason = "the image has no place for it";
        return Err(Error::refused(tid, "scheduling policy SCHED_DEADLINE", reason));
    }
    let reset = if now.flags & FLAG_RESET_ON_FORK == 0 { 0 } else { RESET_ON_FORK };
    entry.sched_policy = Some(now.policy | reset);
    entry.sched_nice = Some(match now.policy {
        // sched_getattr(2) does not show the nice value that a real-time thread keeps.
        SCHED_FIFO | SCHED_RR => rustix::process::getpriority_process(Pid::from_raw(tid))
            .context(|| format!("task {tid}: getpriority"))?,
        _ => now.nice,
    });
    entry.sched_prio = (now.priority != 0).then_some(now.priority);
    let has_own = is_fair(now.policy) && now.runtime != *SLICE;
    entry.torpor_slice = has_own.then_some(now.runtime);
    let clamps = chosen_clamps(&now, *LEAST_OF_REAL_TIME);
    (entry.torpor_util_min, entry.torpor_util_max) = clamps.unzip();
    let set = affinity(tid).context(|| format!("task {tid}: sched_getaffinity"))?;
    let pinned = set.iter().map(|byte| byte.count_ones()).sum::<u32>() < *PROCESSORS;
    // What its cpuset gives it is the cpuset's matter, here and on the next host.
    if pinned && !cgroup::mirrors_cpuset(tid, &set)? {
        entry.torpor_affinity = Some(set);
    }
    Ok(())
}

/// Sets them, if they are different now.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE` or the limits that allow it.
pub(crate) fn restore(husk: &Tracee, wanted: &Scheduling) -> Result<()> {
    if let Some(processors) = &wanted.affinity {
        restore_affinity(husk, processors)?;
    }
    restore_class(husk, wanted.class)?;
    restore_clamps(husk, wanted.clamps)
}

fn restore_class(husk: &Tracee, wanted: Option<Class>) -> Result<()> {
    let Some(Class { policy, reset_on_fork, nice, priority, slice }) = wanted else {
        return Ok(());
    };
    let tid = husk.tid();
    let now = attributes(tid).context(|| format!("task {tid}: sched_getattr"))?;
    let reset = if reset_on_fork { FLAG_RESET_ON_FORK } else { 0 };
    let old = rustix::process::getpriority_process(Pid::from_raw(tid));
    if old != Ok(nice) {
        rustix::process::setpriority_process(Pid::from_raw(tid), nice)
            .context(|| format!("task {tid}: setpriority to {nice}"))?;
    }
    let mut wanted = now;
    wanted.policy = policy;
    wanted.flags = now.flags & !FLAG_RESET_ON_FORK | reset;
    wanted.nice = nice;
    wanted.priority = priority;
    // A husk may have inherited one.
    wanted.runtime = if slice == 0 && is_fair(policy) { *SLICE } else { slice };
    if wanted == now {
        return Ok(());
    }
    // That of the machine is not its own.
    wanted.runtime = slice;
    set_attributes(tid, &wanted).context(|| format!("task {tid}: sched_setattr to {wanted:?}"))
}

/// A husk may have inherited clamps. A kernel that has none does without: they say how fast a processor is to be, and
/// not what a thread may do.
fn restore_clamps(husk: &Tracee, wanted: Option<(u32, u32)>) -> Result<()> {
    let tid = husk.tid();
    let now = attributes(tid).context(|| format!("task {tid}: sched_getattr"))?;
    if chosen_clamps(&now, *LEAST_OF_REAL_TIME) == wanted {
        return Ok(());
    }
    let (min, max) = wanted.unwrap_or((u32::MAX, u32::MAX));
    match set_attributes(tid, &SchedulingAttributes::of_clamps(min, max)) {
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            tracing::warn!("task {tid}: this kernel has no clamps of utilization (sched_setattr)");
            Ok(())
        }
        set => set.context(|| format!("task {tid}: sched_setattr to clamps {min} and {max}")),
    }
}

/// A machine without any of the processors gets the thread on all that it has, as the
/// kernel does it when processors are taken away.
fn restore_affinity(husk: &Tracee, wanted: &[u8]) -> Result<()> {
    let tid = husk.tid();
    if affinity(tid).is_ok_and(|now| now == *wanted) {
        return Ok(());
    }
    match set_affinity(tid, wanted) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            tracing::warn!("task {tid}: none of the processors that it ran on is here");
            Ok(())
        }
        set => set.context(|| format!("task {tid}: sched_setaffinity")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clamps_are_told_from_those_that_everyone_has() {
        let of = |policy, util_min, util_max| {
            let mut now = SchedulingAttributes::of_clamps(util_min, util_max);
            now.policy = policy;
            [None, Some(1024)].map(|least| chosen_clamps(&now, least))
        };
        assert_eq!(of(SCHED_OTHER, 0, 1024), [None, None]);
        assert_eq!(of(SCHED_OTHER, 0, 0), [None, Some((0, 0))]);
        assert_eq!(of(SCHED_BATCH, 100, 1024), [None, Some((100, 1024))]);
        assert_eq!(of(SCHED_FIFO, 1024, 1024), [None, None]);
        assert_eq!(of(SCHED_RR, 0, 1024), [None, Some((0, 1024))]);
    }

    #[test]
    fn processors_are_counted() {
        assert_eq!((range("0-3"), range("7"), range("")), (Some(4), Some(1), None));
        assert!(*PROCESSORS > 0);
    }
}
