//! A process that can do nothing but compute, read what it was given and answer.

use std::io;
use std::os::fd::RawFd;

use crate::{Result, check};

/// The ids of nobody, which own nothing (the kernel's overflow ids).
const NOBODY: u32 = 65_534;

/// What a confined process may call: memory, the descriptors that it has, its own end.
const ALLOWED: [libc::c_long; 32] = [
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Those of them with protection bits (the third argument), which must not make code.
const WITH_PROTECTION: [libc::c_long; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

/// `AUDIT_ARCH_X86_64` of linux/audit.h.
const ARCHITECTURE: u32 = 0xc000_003e;

/// How much a confined process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Processor time in seconds; `SIGXCPU` ends it then.
    pub seconds: u64,
    /// How many seconds it lives at most, whatever it does; `SIGKILL` ends it then.
    pub lifetime: u32,
    /// Memory in bytes, beside what it has already; to allocate more fails.
    pub bytes: u64,
}

/// How many files a confined process may open beside those that it keeps. It can make some in memory, which counts for no
/// process.
const FILES: u64 = 256;
/// How long each of these may become.
const LONGEST: u64 = 4 << 20;

/// Takes from this process all that it can do: its descriptors but `keep`, its user, capabilities,
/// all system calls but the few that reading and computing need, and time and memory above `limits`.
/// Only for a process that is a fresh copy; none of it can be taken back.
///
/// # Errors
/// If one of these cannot be taken away. The process must end then, and do nothing before.
pub fn confine(keep: &[RawFd], limits: Limits) -> Result<()> {
    let [all, data] = mapped()?;
    limit(libc::RLIMIT_DATA, data.saturating_add(limits.bytes))?;
    // Memory that processes could share is no data.
    limit(libc::RLIMIT_AS, all.saturating_add(limits.bytes.saturating_mul(2)))?;
    let highest = keep.iter().max().map_or(0, |fd| u64::from(fd.cast_unsigned()) + 1);
    limit(libc::RLIMIT_NOFILE, highest + FILES)?;
    limit(libc::RLIMIT_FSIZE, LONGEST)?;
    limit(libc::RLIMIT_CPU, limits.seconds)?;
    end_after(limits.lifetime)?;
    close_all_but(keep);
    become_nobody()?;
    keep_capabilities(0)?;
    // SAFETY: numbers only.
    unsafe {
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0))?;
        // A change of the user ids would have undone it.
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
    }
    filter()
}

/// The memory of this process, and what of it can be written to and is its own, in bytes (proc_pid_statm(5)).
fn mapped() -> Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let number = |at| text.split(' ').nth(at)?.trim().parse::<u64>().ok();
    let pages = number(0).zip(number(5));
    let (all, data) = pages.ok_or_else(|| io::Error::other("statm has no sixth number"))?;
    Ok([all, data].map(|pages| pages.saturating_mul(4096)))
}

/// Lowers a limit; one that is lower already stays.
fn limit(which: libc::__rlimit_resource_t, most: u64) -> Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: places for two numbers, which the first call writes and the second one reads.
    unsafe {
        check(libc::getrlimit(which, &raw mut now))?;
        // A process that ignores the signal of the lower one ends at the other.
        now.rlim_cur = now.rlim_cur.min(most);
        now.rlim_max = now.rlim_max.min(most.saturating_add(1));
        check(libc::setrlimit(which, &raw const now)).map(drop)
    }
}

/// Has this process end after so many seconds, also while it waits: a signal that nobody can block or ignore, by a timer that
/// goes with the process, and that it has no system call to stop any more.
fn end_after(seconds: u32) -> Result<()> {
    // SAFETY: all zeros are numbers and null pointers, which the kernel takes for none.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGKILL);
    let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let then = libc::timespec { tv_sec: seconds.into(), tv_nsec: 0 };
    let when = libc::itimerspec { it_interval: never, it_value: then };
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: an event that the first call reads, a place for a timer, which it writes, and times that the second one reads.
    unsafe {
        check(libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer))?;
        check(libc::timer_settime(timer, 0, &raw const when, std::ptr::null_mut())).map(drop)
    }
}

fn close_all_but(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep.iter().map(|fd| fd.cast_unsigned()).collect();
    keep.sort_unstable();
    let mut from = 0;
    for fd in keep {
        if fd > from {
            close_range(from, fd - 1);
        }
        from = fd + 1;
    }
    close_range(from, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: numbers. The caller is a fresh fork that promises to use none of them; their
    // owners never run their destructors, since the process ends with _exit.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Where there are other users to become: without the right to it, or in a user namespace that
/// does not know them, it stays who it is.
fn become_nobody() -> Result<()> {
    // SAFETY: no list of groups, and numbers. This thread is the only one.
    let results = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()),
            libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY),
            libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY),
        ]
    };
    for result in results {
        match check(result).map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::EPERM | libc::EINVAL), _)) => {}
            Err((_, error)) => return Err(error),
        }
    }
    Ok(())
}

/// `struct __user_cap_header_struct` of linux/capability.h.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h.
const VERSION: u32 = 0x2008_0522;

/// Takes all capabilities but those whose bits are in `keep` from this thread, for good: a thread that
/// is started by it has not got them either. A program that a root user runs has those again that the
/// bounding set allows, which stays as it is.
///
/// # Errors
/// See capset(2) and `PR_CAPBSET_DROP` of prctl(2).
pub fn keep_capabilities(keep: u64) -> Result<()> {
    let mut sets = capability_sets()?;
    for (set, keep) in sets.0.chunks_mut(3).zip(words(keep)) {
        set.iter_mut().for_each(|word| *word &= keep);
    }
    set_capability_sets(&sets)
}

/// The sets of a thread. Effective, permitted and inheritable ones: the low words, then the high ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sets([u32; 6]);

impl Sets {
    /// The same, with none in the effective set but those whose bits are in `keep`.
    pub(crate) fn with_effective(&self, keep: u64) -> Self {
        let mut sets = self.clone();
        for (set, keep) in sets.0.chunks_mut(3).zip(words(keep)) {
            set.iter_mut().take(1).for_each(|word| *word &= keep);
        }
        sets
    }
}

/// The low word and the high one.
fn words(bits: u64) -> [u32; 2] {
    [bits & u64::from(u32::MAX), bits >> 32].map(|word| u32::try_from(word).unwrap_or_default())
}

/// Those of this thread.
pub(crate) fn capability_sets() -> Result<Sets> {
    let header = Header { version: VERSION, pid: 0 };
    let mut sets = [0_u32; 6];
    // SAFETY: a header, and a place for two sets of three words.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr()) })?;
    Ok(Sets(sets))
}

/// Gives them to this thread.
pub(crate) fn set_capability_sets(sets: &Sets) -> Result<()> {
    let header = Header { version: VERSION, pid: 0 };
    // SAFETY: a header and two sets of three words, which the call only reads.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.0.as_ptr()) }).map(drop)
}

/// A step of a filter (linux/filter.h).
fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
}

/// The steps: all calls but those in `ALLOWED` fail with `EPERM`.
fn steps() -> Result<Vec<libc::sock_filter>> {
    /// `offsetof` of `struct seccomp_data` (linux/seccomp.h): nr, arch, the third argument.
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    const THIRD: u32 = 32;
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let equal = |value, jt, jf| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, value);
    let end = |action| step(libc::BPF_RET | libc::BPF_K, 0, 0, action);
    let denied = end(libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned());
    let allowed = end(libc::SECCOMP_RET_ALLOW);
    let number = |call: libc::c_long| u32::try_from(call).map_err(io::Error::other);
    let mut steps = vec![
        load(ARCH),
        equal(ARCHITECTURE, 1, 0),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    for call in ALLOWED {
        if WITH_PROTECTION.contains(&call) {
            let code = libc::PROT_EXEC.cast_unsigned();
            steps.extend([
                equal(number(call)?, 0, 4),
                load(THIRD),
                step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, code),
                denied,
                allowed,
            ]);
        } else {
            steps.extend([equal(number(call)?, 0, 1), allowed]);
        }
    }
    steps.push(denied);
    Ok(steps)
}

fn filter() -> Result<()> {
    let mut steps = steps()?;
    let program = libc::sock_fprog {
        len: u16::try_from(steps.len()).map_err(io::Error::other)?,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: a program of as many steps as it says, which the call copies.
    let set = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    check(set).map(drop)
}
