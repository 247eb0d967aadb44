//! Which kernel objects two tasks share (kcmp(2)).

use std::cmp::Ordering;

use crate::{Result, syscall};

/// What to compare; the values are `enum kcmp_type` of linux/kcmp.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// The open file descriptions behind two descriptors.
    File(i32, i32),
    /// Address spaces.
    Vm,
    /// Descriptor tables.
    Files,
    /// cwd, root and umask.
    Fs,
    /// Signal handler tables.
    Sighand,
    /// System V semaphore undo lists.
    Sysvsem,
}

/// Compares an object of two tasks. The order is the kernel's own, stable while
/// both live, so that it can sort.
///
/// # Errors
/// `ESRCH` for a task that is gone, `EBADF` for a descriptor that is closed.
pub fn kcmp(pid1: i32, pid2: i32, object: Object) -> Result<Ordering> {
    let (kind, a, b) = match object {
        Object::File(a, b) => (0, a, b),
        Object::Vm => (1, 0, 0),
        Object::Files => (2, 0, 0),
        Object::Fs => (3, 0, 0),
        Object::Sighand => (4, 0, 0),
        Object::Sysvsem => (6, 0, 0),
    };
    let arg = |v: i32| u64::from(v.cast_unsigned());
    // SAFETY: kcmp takes no pointers for these kinds.
    let ret = unsafe { syscall(libc::SYS_kcmp, [arg(pid1), arg(pid2), kind, arg(a), arg(b), 0]) }?;
    Ok(match ret {
        0 => Ordering::Equal,
        1 => Ordering::Less,
        _ => Ordering::Greater,
    })
}

/// Finds an object among others that stand in the kernel's order: its place, or else where it would stand. `compare`
/// is what [`kcmp`] says of the object and one of these.
///
/// # Errors
/// Those of `compare`.
pub fn search<T>(
    sorted: &[T],
    mut compare: impl FnMut(&T) -> Result<Ordering>,
) -> Result<std::result::Result<usize, usize>> {
    let (mut low, mut high) = (0, sorted.len());
    while low < high {
        let middle = low.midpoint(high);
        match compare(&sorted[middle])? {
            Ordering::Equal => return Ok(Ok(middle)),
            Ordering::Less => high = middle,
            Ordering::Greater => low = middle + 1,
        }
    }
    Ok(Err(low))
}

/// Compares a descriptor with the target of an entry of an epoll set
/// (`KCMP_EPOLL_TFD`): entry `toff` among those that `epfd` of `pid2` registered
/// under the number `tfd`.
///
/// # Errors
/// `ENOENT` if there is no such entry; else as [`kcmp`].
pub fn kcmp_epoll_target(
    pid1: i32,
    fd: i32,
    pid2: i32,
    epfd: i32,
    tfd: u32,
    toff: u32,
) -> Result<bool> {
    #[repr(C)]
    struct Slot {
        efd: u32,
        tfd: u32,
        toff: u32,
    }
    let slot = Slot { efd: epfd.cast_unsigned(), tfd, toff };
    let arg = |v: i32| u64::from(v.cast_unsigned());
    // SAFETY: `slot` is a kcmp_epoll_slot that outlives the call, which only reads it.
    let ret = unsafe {
        syscall(libc::SYS_kcmp, [arg(pid1), arg(pid2), 7, arg(fd), crate::addr(&raw const slot), 0])
    }?;
    Ok(ret == 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A dump asks this for each descriptor, of all that are open on the same file: thousands, perhaps.
    #[test]
    fn few_are_compared() {
        let sorted: Vec<u32> = (0..10_000).map(|number| 2 * number).collect();
        for wanted in [0, 1, 7_776, 9_999, 19_998, 20_001] {
            let mut compared = 0;
            let found = search(&sorted, |other| {
                compared += 1;
                Ok(wanted.cmp(other))
            });
            assert_eq!(found.unwrap(), sorted.binary_search(&wanted), "{wanted}");
            assert!(compared <= 14, "{wanted} is compared with {compared}");
        }
        assert_eq!(search(&[(); 0], |()| Ok(Ordering::Equal)).unwrap(), Err(0));
        let closed = |&(): &()| Err(std::io::Error::from_raw_os_error(libc::EBADF));
        assert!(search(&[()], closed).is_err());
    }
}
