//! System calls as values. Those that tasks are often made to do have a function each, whose
//! arguments cannot be swapped; any other is a number with its arguments.

use std::ops::Range;

use rustix::fs::{Mode, OFlags};
use rustix::io::DupFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::RemoteAddr;
use crate::stub::PAGE;

/// A system call with its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Syscall {
    pub(crate) number: u64,
    pub(crate) args: [u64; 6],
}

impl Syscall {
    /// The same call as 32-bit programs make it; `None` if it is none of those that a task is
    /// made to do without a stub.
    pub(crate) fn of_32bit(self) -> Option<Self> {
        let Syscall { number, mut args } = self;
        // An address that they cannot name: a 64-bit program that runs 32-bit code.
        u32::try_from(args[0]).ok()?;
        // asm/unistd_32.h; of `mmap2` the offset is in pages.
        let number = match libc::c_long::try_from(number).ok()? {
            libc::SYS_close => 6,
            libc::SYS_munmap => 91,
            libc::SYS_wait4 => 114,
            libc::SYS_mmap => {
                args[5] /= PAGE;
                192
            }
            _ => return None,
        };
        Some(Syscall { number, args })
    }
}

impl<const N: usize> From<(libc::c_long, [u64; N])> for Syscall {
    fn from((number, first): (libc::c_long, [u64; N])) -> Self {
        const { assert!(N <= 6) };
        let mut args = [0; 6];
        args[..N].copy_from_slice(&first);
        Self { number: number.cast_unsigned(), args }
    }
}

/// A descriptor of another task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteFd(pub u64);

impl RemoteFd {
    /// The working directory.
    pub const CWD: Self = Self(libc::AT_FDCWD.cast_unsigned() as u64);
}

impl From<u32> for RemoteFd {
    fn from(number: u32) -> Self {
        Self(number.into())
    }
}

impl From<i32> for RemoteFd {
    fn from(number: i32) -> Self {
        number.cast_unsigned().into()
    }
}

/// mmap(2) of a file.
pub fn mmap(
    at: Range<u64>,
    prot: ProtFlags,
    flags: MapFlags,
    (fd, offset): (RemoteFd, u64),
) -> Syscall {
    let bits = [prot.bits(), flags.bits()].map(u64::from);
    let args = [at.start, at.end - at.start, bits[0], bits[1], fd.0, offset];
    (libc::SYS_mmap, args).into()
}

/// mmap(2) of memory without a file. Without `MAP_FIXED` the kernel may choose another place.
pub fn mmap_anonymous(at: Range<u64>, prot: ProtFlags, flags: MapFlags) -> Syscall {
    let flags = flags | MapFlags::from_bits_retain(libc::MAP_ANONYMOUS.cast_unsigned());
    mmap(at, prot, flags, (RemoteFd(u64::MAX), 0))
}

/// mprotect(2).
pub fn mprotect(range: Range<u64>, prot: ProtFlags) -> Syscall {
    (libc::SYS_mprotect, [range.start, range.end - range.start, prot.bits().into()]).into()
}

/// munmap(2).
pub fn munmap(range: Range<u64>) -> Syscall {
    (libc::SYS_munmap, [range.start, range.end - range.start]).into()
}

/// mremap(2) to another place, of which what is mapped there is unmapped.
pub fn mremap(from: Range<u64>, to: u64) -> Syscall {
    let len = from.end - from.start;
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED).cast_unsigned();
    (libc::SYS_mremap, [from.start, len, len, flags.into(), to]).into()
}

/// openat(2).
pub fn openat(dir: RemoteFd, path: RemoteAddr, flags: OFlags, mode: Mode) -> Syscall {
    let bits = [flags.bits(), mode.bits()].map(u64::from);
    (libc::SYS_openat, [dir.0, path.0, bits[0], bits[1]]).into()
}

/// close(2).
pub fn close(fd: RemoteFd) -> Syscall {
    (libc::SYS_close, [fd.0]).into()
}

/// dup3(2): `fd` gets the further number `to`, of which what it was is closed.
pub fn dup3(fd: RemoteFd, to: u32, flags: DupFlags) -> Syscall {
    (libc::SYS_dup3, [fd.0, to.into(), flags.bits().into()]).into()
}

/// fcntl(2): one of `F_*`, and its argument.
pub fn fcntl(fd: RemoteFd, command: i32, arg: u64) -> Syscall {
    (libc::SYS_fcntl, [fd.0, command.cast_unsigned().into(), arg]).into()
}

/// ioctl(2): a request, and where its argument is.
pub fn ioctl(fd: RemoteFd, request: libc::Ioctl, arg: RemoteAddr) -> Syscall {
    (libc::SYS_ioctl, [fd.0, request, arg.0]).into()
}

/// prctl(2): one of `PR_*`, and its arguments; those that are left out are 0.
pub fn prctl<const N: usize>(option: i32, rest: [u64; N]) -> Syscall {
    const { assert!(N <= 4) };
    let mut args = [0; 5];
    args[0] = option.cast_unsigned().into();
    args[1..=N].copy_from_slice(&rest);
    (libc::SYS_prctl, args).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two arguments of one type the compiler would take either for the other.
    #[test]
    fn no_call_has_two_arguments_of_one_type() {
        let _: fn(Range<u64>, ProtFlags, MapFlags, (RemoteFd, u64)) -> Syscall = mmap;
        let _: fn(Range<u64>, ProtFlags, MapFlags) -> Syscall = mmap_anonymous;
        let _: fn(Range<u64>, ProtFlags) -> Syscall = mprotect;
        let _: fn(Range<u64>, u64) -> Syscall = mremap;
        let _: fn(RemoteFd, RemoteAddr, OFlags, Mode) -> Syscall = openat;
        let _: fn(RemoteFd, i32, u64) -> Syscall = fcntl;
        let _: fn(RemoteFd, libc::Ioctl, RemoteAddr) -> Syscall = ioctl;
        let _: fn(i32, [u64; 4]) -> Syscall = prctl;
        let dup3: fn(RemoteFd, u32, DupFlags) -> Syscall = dup3;
        let args = [3, 7, libc::O_CLOEXEC.cast_unsigned().into()];
        assert_eq!(dup3(RemoteFd(3), 7, DupFlags::CLOEXEC), (libc::SYS_dup3, args).into());
    }
}
