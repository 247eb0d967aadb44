//! Typed wrappers of the kernel's interfaces; the only crate with `unsafe`.
//!
//! What `rustix` and the standard library offer safely is used from there. A
//! file here is one subject of the kernel, and each function one system call or
//! one documented sequence of them.

#![warn(unreachable_pub)]
#![allow(unsafe_code)]

pub mod bpf;
pub mod confine;
pub mod epoll;
pub mod event;
pub mod fcntl;
pub mod heap;
pub mod inherited;
pub mod io_uring;
pub mod ipc;
pub mod kcmp;
pub mod keepalive;
pub mod kernel_memory;
pub mod landlock;
pub mod mount;
pub mod mqueue;
pub mod notify;
pub mod ns;
pub mod number;
pub mod peer;
pub mod process;
pub mod ptrace;
pub mod rights;
pub mod sched;
pub mod secrecy;
pub mod socket;
pub mod stub;
pub mod tty;
pub mod tun;
pub mod uffd;
pub mod vm;
pub mod writeback;
pub mod xsave;

use std::io;

/// The result of a system call.
pub type Result<T> = io::Result<T>;

/// Turns the return value of a libc wrapper into a result.
fn check<T: PartialOrd + From<i8>>(ret: T) -> Result<T> {
    if ret < T::from(0) { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// Calls the kernel directly, for calls that libc has no wrapper for.
///
/// # Safety
/// As for the system call: pointers among `args` must be valid for what the call
/// reads and writes through them.
unsafe fn syscall(nr: libc::c_long, args: [u64; 6]) -> Result<u64> {
    // SAFETY: the caller answers for the arguments; libc's `syscall` passes them on.
    let ret = unsafe { libc::syscall(nr, args[0], args[1], args[2], args[3], args[4], args[5]) };
    check(ret).map(i64::cast_unsigned)
}

/// The value that a pointer has as a system call argument.
fn addr<T: ?Sized>(pointer: *const T) -> u64 {
    pointer.cast::<()>() as u64
}
