//! Scheduling of a thread (sched(7)).

use crate::{Result, addr, syscall};

/// `struct sched_attr` of linux/sched/types.h, its first published version.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attributes {
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
}

/// How a thread is scheduled (sched_getattr(2)).
///
/// # Errors
/// `ESRCH`.
pub fn attributes(tid: i32) -> Result<Attributes> {
    let mut attr = Attributes::default();
    let size = size_of::<Attributes>() as u64;
    let args = [u64::from(tid.cast_unsigned()), addr(&raw mut attr), size, 0, 0, 0];
    // SAFETY: the kernel writes at most `size` bytes to `attr`.
    unsafe { syscall(libc::SYS_sched_getattr, args) }?;
    Ok(attr)
}

/// Changes how a thread is scheduled (sched_setattr(2)).
///
/// # Errors
/// `EPERM`, `EINVAL`, `ESRCH`.
pub fn set_attributes(tid: i32, attr: &Attributes) -> Result<()> {
    let attr = Attributes { size: 48, ..*attr };
    let args = [u64::from(tid.cast_unsigned()), addr(&raw const attr), 0, 0, 0, 0];
    // SAFETY: the kernel reads `attr.size` bytes, which is the size of `attr`.
    unsafe { syscall(libc::SYS_sched_setattr, args) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_the_kernels() {
        assert_eq!(size_of::<Attributes>(), 48);
        let own = attributes(0).unwrap();
        set_attributes(0, &own).unwrap();
        assert_eq!(attributes(0).unwrap(), own);
    }
}
