//! Scheduling of a thread (sched(7)).

use crate::{Result, addr, syscall};

/// `struct sched_attr` of linux/sched/types.h, its second published version (Linux 5.3).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SchedulingAttributes {
    size: u32,
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    pub flags: u64,
    /// Nice value, for `SCHED_OTHER` and `SCHED_BATCH`.
    pub nice: i32,
    /// Priority, for `SCHED_FIFO` and `SCHED_RR`.
    pub priority: u32,
    /// For `SCHED_DEADLINE`, in ns; a custom slice for `SCHED_OTHER`.
    pub runtime: u64,
    /// For `SCHED_DEADLINE`, in ns.
    pub deadline: u64,
    /// For `SCHED_DEADLINE`, in ns.
    pub period: u64,
    /// The least that the processor is to believe of how much it is used; 0 in a kernel without such clamps.
    pub util_min: u32,
    /// The most.
    pub util_max: u32,
}

/// Nothing changes but what other flags name.
const KEEP_ALL: u64 = libc::SCHED_FLAG_KEEP_ALL as u64;
/// Both clamps.
const UTIL_CLAMP: u64 = libc::SCHED_FLAG_UTIL_CLAMP as u64;

impl SchedulingAttributes {
    /// What changes the clamps alone; `u32::MAX` is for those that a thread has by itself.
    #[must_use]
    pub fn of_clamps(min: u32, max: u32) -> Self {
        SchedulingAttributes {
            flags: KEEP_ALL | UTIL_CLAMP,
            util_min: min,
            util_max: max,
            ..SchedulingAttributes::default()
        }
    }
}

/// How a thread is scheduled (sched_getattr(2)).
///
/// # Errors
/// `ESRCH` if the thread is gone.
pub fn attributes(tid: i32) -> Result<SchedulingAttributes> {
    let mut attr = SchedulingAttributes::default();
    let size = size_of::<SchedulingAttributes>() as u64;
    let args = [u64::from(tid.cast_unsigned()), addr(&raw mut attr), size, 0, 0, 0];
    // SAFETY: the kernel writes at most `size` bytes to `attr`.
    unsafe { syscall(libc::SYS_sched_getattr, args) }?;
    Ok(attr)
}

/// Changes how a thread is scheduled (sched_setattr(2)).
///
/// # Errors
/// `EPERM`, `EINVAL`, `ESRCH`.
pub fn set_attributes(tid: i32, attr: &SchedulingAttributes) -> Result<()> {
    let attr = SchedulingAttributes { size: 56, ..*attr };
    let args = [u64::from(tid.cast_unsigned()), addr(&raw const attr), 0, 0, 0, 0];
    // SAFETY: the kernel reads `attr.size` bytes, which is the size of `attr`.
    unsafe { syscall(libc::SYS_sched_setattr, args) }.map(drop)
}

/// Bytes of a set of processors: more than any kernel has (`CONFIG_NR_CPUS` is 8192 at
/// most).
const CPU_SET: usize = 1024;

/// The processors that a thread may run on (sched_getaffinity(2)): a bit each, the lowest
/// byte first, without trailing zeroes.
///
/// # Errors
/// `ESRCH` if the thread is gone.
pub fn affinity(tid: i32) -> Result<Vec<u8>> {
    let mut set = vec![0u8; CPU_SET];
    let args = [u64::from(tid.cast_unsigned()), CPU_SET as u64, addr(set.as_mut_ptr()), 0, 0, 0];
    // SAFETY: the kernel writes at most `CPU_SET` bytes to `set`, which has as many.
    unsafe { syscall(libc::SYS_sched_getaffinity, args) }?;
    set.truncate(set.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
    Ok(set)
}

/// Changes the processors that a thread may run on (sched_setaffinity(2)).
///
/// # Errors
/// `EINVAL` if none of them is there, or allowed by its cpuset; `EPERM`, `ESRCH`.
pub fn set_affinity(tid: i32, set: &[u8]) -> Result<()> {
    let args = [u64::from(tid.cast_unsigned()), set.len() as u64, addr(set.as_ptr()), 0, 0, 0];
    // SAFETY: the kernel reads as many bytes as `set` has.
    unsafe { syscall(libc::SYS_sched_setaffinity, args) }.map(drop)
}

/// The cookie of a thread that shares a core with none but those that have the same (`PR_SCHED_CORE`); 0 if it has
/// none, or if this kernel has no such thing.
#[must_use]
pub fn core_cookie(tid: i32) -> u64 {
    const CORE: u64 = libc::PR_SCHED_CORE as u64;
    const GET: u64 = libc::PR_SCHED_CORE_GET as u64;
    const OF_THREAD: u64 = libc::PR_SCHED_CORE_SCOPE_THREAD as u64;
    let mut cookie = 0u64;
    let args = [CORE, GET, u64::from(tid.cast_unsigned()), OF_THREAD, addr(&raw mut cookie), 0];
    // SAFETY: the kernel writes eight bytes to `cookie`, which has as many.
    match unsafe { syscall(libc::SYS_prctl, args) } {
        Ok(_) => cookie,
        Err(_) => 0,
    }
}

/// Whether the caller has chosen a priority for I/O (ioprio_set(2)), which children inherit.
#[must_use]
pub fn has_io_priority() -> bool {
    // IOPRIO_WHO_PROCESS, the caller; the class stands above 13 bits.
    // SAFETY: the call takes numbers only.
    let prio = unsafe { syscall(libc::SYS_ioprio_get, [1, 0, 0, 0, 0, 0]) };
    prio.is_ok_and(|prio| prio >> 13 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_the_kernels() {
        assert_eq!(size_of::<SchedulingAttributes>(), 56);
        assert_eq!(std::mem::offset_of!(SchedulingAttributes, util_min), 48);
        let own = attributes(0).unwrap();
        set_attributes(0, &own).unwrap();
        assert_eq!(attributes(0).unwrap(), own);
    }

    /// Clamps change nothing else; a kernel that has none says so.
    #[test]
    fn clamps_come_alone() {
        let own = attributes(0).unwrap();
        match set_attributes(0, &SchedulingAttributes::of_clamps(u32::MAX, u32::MAX)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP)),
        }
        assert_eq!(attributes(0).unwrap(), own);
    }

    #[test]
    fn affinity_comes_back() {
        let own = affinity(0).unwrap();
        let lowest = own.iter().position(|&byte| byte != 0).unwrap();
        let mut one = vec![0; lowest];
        one.push(own[lowest] & own[lowest].wrapping_neg());
        set_affinity(0, &one).unwrap();
        assert_eq!(affinity(0).unwrap(), one);
        set_affinity(0, &own).unwrap();
        assert_eq!(affinity(0).unwrap(), own);
    }
}
