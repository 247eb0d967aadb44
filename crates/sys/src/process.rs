//! Creating processes and waiting for them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::{Result, addr, check, syscall};

/// `struct clone_args` of linux/sched.h, as far as it is used.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CloneArgs {
    /// `CLONE_*` flags.
    pub flags: u64,
    /// Where to store a pidfd (`CLONE_PIDFD`).
    pub pidfd: u64,
    /// Where to store the tid in the child.
    pub child_tid: u64,
    /// Where to store the tid in the parent.
    pub parent_tid: u64,
    /// Signal to the parent when the child ends.
    pub exit_signal: u64,
    /// Lowest address of the child's stack.
    pub stack: u64,
    /// Its size.
    pub stack_size: u64,
    /// TLS base.
    pub tls: u64,
    /// Array of pids, innermost namespace first.
    pub set_tid: u64,
    /// Their number.
    pub set_tid_size: u64,
    /// Descriptor of a cgroup directory (`CLONE_INTO_CGROUP`).
    pub cgroup: u64,
}

/// Whether the kernel has Landlock, and has it switched on.
#[must_use]
pub fn has_landlock() -> bool {
    // LANDLOCK_CREATE_RULESET_VERSION
    const VERSION: u64 = 1;
    // SAFETY: with this flag the kernel reads no memory, it answers with its version.
    unsafe { syscall(libc::SYS_landlock_create_ruleset, [0, 0, VERSION, 0, 0, 0]) }.is_ok()
}

/// Whether the kernel lets programs use ports of devices (ioperm(2), iopl(2)).
#[must_use]
pub fn has_ports() -> bool {
    // SAFETY: the kernel reads no memory; level 0 is that of a process that has asked for none.
    unsafe { syscall(libc::SYS_iopl, [0; 6]) }.is_ok()
}

/// Holds a new process back until its tracer is ready.
#[derive(Debug)]
pub struct Gate {
    wait: OwnedFd,
    open: OwnedFd,
}

impl Gate {
    /// A closed gate.
    ///
    /// # Errors
    /// See pipe2(2).
    pub fn new() -> Result<Self> {
        let (wait, open) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        Ok(Gate { wait, open })
    }

    /// Lets the process through.
    ///
    /// # Errors
    /// `EPIPE` if it is gone.
    pub fn open(self) -> Result<()> {
        rustix::io::write(&self.open, &[1])?;
        Ok(())
    }
}

/// Creates a process that stops right away in `read` on `gate`, and executes the
/// program in `image` (execveat of a descriptor) once a byte arrives there; it
/// ends when the gate closes instead. In a new user namespace it becomes user 0 first:
/// whoever does not, has no rights there after `execve`.
///
/// `set_tid` are the pids to give it, innermost namespace first. Returns its pid
/// here and a pidfd.
///
/// # Errors
/// See clone3(2); `EEXIST` when a pid is taken.
pub fn spawn_gated(
    flags: u64,
    set_tid: &[i32],
    gate: &Gate,
    image: BorrowedFd<'_>,
) -> Result<(i32, OwnedFd)> {
    let mut pidfd: i32 = -1;
    let args = CloneArgs {
        flags: flags | libc::CLONE_PIDFD as u64,
        pidfd: addr(&raw mut pidfd),
        // A sibling's exit signal is that of the caller (clone(2), CLONE_PARENT).
        exit_signal: if flags & libc::CLONE_PARENT as u64 == 0 { libc::SIGCHLD as u64 } else { 0 },
        set_tid: if set_tid.is_empty() { 0 } else { addr(set_tid.as_ptr()) },
        set_tid_size: set_tid.len() as u64,
        ..CloneArgs::default()
    };
    let empty: [*const libc::c_char; 1] = [std::ptr::null()];
    let (wait, open) = (gate.wait.as_raw_fd(), gate.open.as_raw_fd());
    let image = image.as_raw_fd();
    // SAFETY: without CLONE_VM the child runs on a copy of this address space.
    // `args` lives on this stack. The child below makes only raw system calls (it
    // may be the copy of one thread of many, so no lock may be taken, nothing
    // allocated) and never returns from this function.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    if pid == 0 {
        let mut byte = 0u8;
        // SAFETY: raw system calls on memory of this frame and descriptors that the
        // child inherited; execveat's arrays are NULL-terminated.
        unsafe {
            // Or else the child itself would keep the gate from closing.
            libc::close(open);
            let n = loop {
                let n = libc::read(wait, (&raw mut byte).cast(), 1);
                if n >= 0 || *libc::__errno_location() != libc::EINTR {
                    break n;
                }
            };
            if n == 1 {
                if flags & libc::CLONE_NEWUSER as u64 != 0 {
                    // Where user 0 or the right to change groups is missing, the
                    // husk will be told so by what it cannot do then.
                    libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>());
                    libc::syscall(libc::SYS_setresgid, 0, 0, 0);
                    libc::syscall(libc::SYS_setresuid, 0, 0, 0);
                }
                libc::syscall(
                    libc::SYS_execveat,
                    image,
                    c"".as_ptr(),
                    empty.as_ptr(),
                    empty.as_ptr(),
                    libc::AT_EMPTY_PATH,
                );
            }
            libc::_exit(127);
        }
    }
    let pid = check(pid)?;
    // SAFETY: the kernel stored a new descriptor that nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?, pidfd))
}

/// Forks this process; the child runs `work` and exits with its result.
/// For helpers such as the guardian, which outlive or supervise the caller.
///
/// The child has only the calling thread. Call it before threads exist: a lock
/// held by another thread would stay locked in the child for ever.
///
/// # Errors
/// `EBUSY` if this process has more than one thread; else see fork(2).
pub fn fork(work: impl FnOnce() -> i32) -> Result<i32> {
    // SAFETY: no memory is passed; see fork_by for the child.
    fork_by(work, || unsafe { libc::fork() })
}

fn fork_by(work: impl FnOnce() -> i32, fork: impl FnOnce() -> libc::pid_t) -> Result<i32> {
    // One that has been told to end may take a moment.
    let mut patience = 100;
    while threads()? != 1 {
        if patience == 0 {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        patience -= 1;
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Single-threaded (checked above), so that the child's copy of every lock and
    // allocator state is consistent.
    match check(fork())? {
        0 => {
            let code = work();
            // SAFETY: ends the child without running the parent's atexit handlers.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(pid),
    }
}

/// How many threads this process has but for those that are ending: they run none of its code any more, and
/// are listed after they have been joined, on a busy machine for long.
fn threads() -> Result<usize> {
    const THREADS: &str = "/proc/self/task";
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{THREADS}: {error}"));
    let mut count = 0;
    for entry in std::fs::read_dir(THREADS).map_err(named)? {
        // One that is gone by now has no such file.
        let stat = std::fs::read_to_string(entry.map_err(named)?.path().join("stat"));
        count += usize::from(stat.is_ok_and(|stat| !is_ending(&stat)));
    }
    Ok(count)
}

/// Whether a thread is ending, by its `stat`: `PF_EXITING` is among its flags (field 9).
fn is_ending(stat: &str) -> bool {
    const EXITING: u32 = libc::PF_EXITING.cast_unsigned();
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let flags = fields.split(' ').nth(6).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

/// As [`fork`], but both processes have one table of descriptors: what one of them opens
/// the other has too, and all of it stays open until both have ended.
///
/// # Errors
/// As [`fork`].
pub fn fork_with_files(work: impl FnOnce() -> i32) -> Result<i32> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    fork_by(work, || {
        // SAFETY: clone(2) without a stack of its own behaves as fork(2); no pointer is
        // passed. libc's notions of the process are those of the parent, which it does
        // not act upon.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
        libc::pid_t::try_from(pid).unwrap_or(-1)
    })
}

/// What a wait reported about a child or tracee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It exited with this code.
    Exited(i32),
    /// A signal ended it.
    Signaled(i32),
    /// It stopped: signal in the low byte, `PTRACE_EVENT_*` in the next.
    Stopped {
        /// The stop signal (`SIGTRAP | 0x80` at system calls with `TRACESYSGOOD`).
        signal: i32,
        /// `PTRACE_EVENT_*`, 0 for none.
        event: i32,
    },
    /// It was continued by `SIGCONT`.
    Continued,
}

impl Status {
    /// Decodes the status word of wait4(2).
    fn from_raw(status: i32) -> Self {
        if libc::WIFEXITED(status) {
            Status::Exited(libc::WEXITSTATUS(status))
        } else if libc::WIFSIGNALED(status) {
            Status::Signaled(libc::WTERMSIG(status))
        } else if libc::WIFSTOPPED(status) {
            Status::Stopped { signal: libc::WSTOPSIG(status), event: status >> 16 }
        } else {
            Status::Continued
        }
    }
}

/// Waits for a child or tracee, threads included (wait4(2) with `__WALL`).
/// Returns `None` if `block` is false and there is nothing.
///
/// # Errors
/// `ECHILD` when there is no such child or tracee.
pub fn wait(pid: i32, block: bool) -> Result<Option<(i32, Status)>> {
    wait_with(pid, if block { 0 } else { libc::WNOHANG })
}

/// Takes note of any one child or tracee of the calling thread that has something to
/// report by now. What other threads trace is theirs to wait for.
///
/// # Errors
/// `ECHILD` when there is no child or tracee.
pub fn wait_any() -> Result<Option<(i32, Status)>> {
    wait_with(-1, libc::WNOHANG | libc::__WNOTHREAD)
}

fn wait_with(pid: i32, flags: i32) -> Result<Option<(i32, Status)>> {
    let mut status = 0;
    let flags = libc::__WALL | flags;
    loop {
        // SAFETY: `status` is a valid place for the result.
        let ret = unsafe { libc::wait4(pid, &raw mut status, flags, std::ptr::null_mut()) };
        match check(ret) {
            Ok(0) => return Ok(None),
            Ok(found) => return Ok(Some((found, Status::from_raw(status)))),
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// The soft and the hard limit of a process for a resource, by its number (prlimit(2)).
///
/// # Errors
/// `ESRCH` if it is gone; `EPERM` for one of another user.
pub fn limit_of(pid: i32, resource: u32) -> Result<[u64; 2]> {
    let mut now = [0u64; 2];
    let args = [u64::from(pid.cast_unsigned()), resource.into(), 0, addr(&raw mut now), 0, 0];
    // SAFETY: the kernel writes a `struct rlimit64`, which is two words, to `now`.
    unsafe { syscall(libc::SYS_prlimit64, args) }?;
    Ok(now)
}

/// The process group of a process (getpgid(2)); 0 for one that has no number here.
///
/// # Errors
/// `ESRCH` if it is gone.
pub fn group_of(pid: i32) -> Result<i32> {
    // SAFETY: takes and returns numbers only.
    check(unsafe { libc::getpgid(pid) })
}

/// Sends a signal to one thread (tgkill(2)).
///
/// # Errors
/// `ESRCH` if it is gone, `EPERM`.
pub fn kill_thread(tgid: i32, tid: i32, signal: i32) -> Result<()> {
    let arg = |v: i32| u64::from(v.cast_unsigned());
    // SAFETY: takes numbers only.
    unsafe { syscall(libc::SYS_tgkill, [arg(tgid), arg(tid), arg(signal), 0, 0, 0]) }.map(drop)
}

/// Gives each signal its default action, and blocks none in this thread: programs that it executes would
/// inherit what is ignored and what is blocked. Signals that this process has handlers for lose them.
///
/// # Errors
/// See rt_sigaction(2) and rt_sigprocmask(2).
pub fn reset_signals() -> Result<()> {
    // The kernel is asked: it has actions for all 64, those that the C library keeps to itself included.
    const SET_SIZE: u64 = 8;
    let (default, none) = ([0_u64; 4], [0_u64; 1]);
    let fixed = [libc::SIGKILL, libc::SIGSTOP];
    for signal in (1..=64_i32).filter(|signal| !fixed.contains(signal)) {
        let args = [u64::from(signal.cast_unsigned()), addr(&raw const default), 0, SET_SIZE, 0, 0];
        // SAFETY: `default` is a whole sigaction of the kernel, which it only reads: handler, flags,
        // restorer and mask. By SIG_DFL no code of this process can be called.
        unsafe { syscall(libc::SYS_rt_sigaction, args) }?;
    }
    let how = u64::from(libc::SIG_SETMASK.cast_unsigned());
    let args = [how, addr(&raw const none), 0, SET_SIZE, 0, 0];
    // SAFETY: `none` is a whole set of signals of the kernel, which it only reads.
    unsafe { syscall(libc::SYS_rt_sigprocmask, args) }.map(drop)
}

/// Gives this thread, and what it forks or becomes, a session keyring of its own, with nothing in it. Where nobody may use keys, as the
/// kernel has none or a filter refuses them, there is none to give.
///
/// # Errors
/// `EDQUOT`, if its user has as many keys as it may.
pub fn join_new_keyring() -> Result<()> {
    let join = u64::from(libc::KEYCTL_JOIN_SESSION_KEYRING);
    // SAFETY: takes a number, and no name.
    let joined = unsafe { syscall(libc::SYS_keyctl, [join, 0, 0, 0, 0, 0]) };
    let is_nothing = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM));
    joined.map(drop).or_else(|e| if is_nothing(&e) { Ok(()) } else { Err(e) })
}

/// Asks for `signal` when the parent of this process ends (`PR_SET_PDEATHSIG`).
///
/// # Errors
/// See prctl(2).
fn set_parent_death_signal(signal: i32) -> Result<()> {
    // SAFETY: takes a number only.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) }).map(drop)
}

/// Makes a program that gets `signal` when the thread that starts it ends.
pub fn signal_with_parent(command: &mut Command, signal: i32) {
    let ask = move || set_parent_death_signal(signal);
    // SAFETY: between fork and exec the closure makes one system call: it takes no lock and allocates
    // nothing (an error carries just a number).
    unsafe { command.pre_exec(ask) };
}

/// The commands of membarrier(2) that the kernel has (`MEMBARRIER_CMD_QUERY`): a bit for each.
///
/// # Errors
/// `ENOSYS` on kernels without it.
pub fn membarrier_commands() -> Result<u64> {
    // SAFETY: the call takes numbers only.
    unsafe { syscall(libc::SYS_membarrier, [0; 6]) }
}

/// prctl(2): whether new timers get the numbers that their maker names (Linux 6.15).
pub const PR_TIMER_CREATE_RESTORE_IDS: i32 = 77;

/// Sets this thread's name.
///
/// # Errors
/// See prctl(2).
pub fn set_name(name: &CStr) -> Result<()> {
    // SAFETY: a NUL-terminated string that the call only reads.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) }).map(drop)
}

/// The robust futex list of a thread: address and length (get_robust_list(2)).
///
/// # Errors
/// `ESRCH`, or `EPERM` without ptrace rights over it.
pub fn robust_list(tid: i32) -> Result<(u64, u64)> {
    let (mut head, mut len) = (0u64, 0u64);
    let args = [u64::from(tid.cast_unsigned()), addr(&raw mut head), addr(&raw mut len), 0, 0, 0];
    // SAFETY: two places for the results.
    unsafe { syscall(libc::SYS_get_robust_list, args) }?;
    Ok((head, len))
}

/// Closes all descriptors of this process but `keep`: for a forked helper, which must
/// not hold open what its parent was given. Only for a process that is a fresh copy
/// and uses none of them.
pub fn close_but(keep: BorrowedFd<'_>) {
    let keep = keep.as_raw_fd().cast_unsigned();
    // SAFETY: close_range takes numbers. The caller is a fresh fork that promises to use
    // no descriptor but `keep`; owners of the others never run their destructors, since
    // the process ends with _exit.
    unsafe {
        if keep > 0 {
            libc::syscall(libc::SYS_close_range, 0, keep - 1, 0);
        }
        libc::syscall(libc::SYS_close_range, keep + 1, u32::MAX, 0);
    }
}

/// While this lives, files that the thread makes belong to another user and group; the
/// thread keeps its capabilities.
#[derive(Debug)]
pub struct FileOwner {
    bits: libc::c_int,
    uid: u32,
    gid: u32,
    /// It is about the thread that made it.
    here: std::marker::PhantomData<*const ()>,
}

impl FileOwner {
    /// Sets user and group (setfsuid(2)) of the calling thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SETPCAP`, `CAP_SETUID` and `CAP_SETGID`.
    pub fn set(uid: u32, gid: u32) -> Result<Self> {
        // SAFETY: takes no argument besides the number of the request.
        let bits = check(unsafe { libc::prctl(libc::PR_GET_SECUREBITS) })?;
        // Capabilities do not follow changes of user ids then.
        // SAFETY: takes a number only.
        check(unsafe {
            libc::prctl(libc::PR_SET_SECUREBITS, bits | libc::SECBIT_NO_SETUID_FIXUP)
        })?;
        let (old_uid, old_gid) = swap_file_ids(uid, gid);
        let owner = FileOwner { bits, uid: old_uid, gid: old_gid, here: std::marker::PhantomData };
        // The calls return what was before, whether or not they changed it.
        if swap_file_ids(uid, gid) == (uid, gid) {
            Ok(owner)
        } else {
            Err(io::Error::from_raw_os_error(libc::EPERM))
        }
    }
}

impl Drop for FileOwner {
    fn drop(&mut self) {
        swap_file_ids(self.uid, self.gid);
        // SAFETY: takes a number only.
        unsafe { libc::prctl(libc::PR_SET_SECUREBITS, self.bits) };
    }
}

/// Sets the ids for files; returns the ones before. No id has the number `u32::MAX`: it changes nothing.
pub(crate) fn swap_file_ids(uid: u32, gid: u32) -> (u32, u32) {
    // SAFETY: numbers only; the calls concern the calling thread alone.
    let (uid, gid) = unsafe { (libc::setfsuid(uid), libc::setfsgid(gid)) };
    (uid.cast_unsigned(), gid.cast_unsigned())
}

#[cfg(test)]
mod file_owner_tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn files_belong_to_another_for_a_while() {
        let dir = std::env::temp_dir().join(format!("torpor-owner-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let owner = |name: &str| {
            std::fs::write(dir.join(name), "").unwrap();
            let meta = std::fs::metadata(dir.join(name)).unwrap();
            (meta.uid(), meta.gid())
        };
        let before = owner("before");
        let other = FileOwner::set(100_000, 100_001).unwrap();
        // The directory is not theirs: capabilities must be there still.
        assert_eq!(owner("other"), (100_000, 100_001));
        crate::ipc::with_ids(33, 44, || Ok(())).unwrap();
        crate::ipc::with_real_user(33, || Ok(())).unwrap();
        assert_eq!(owner("still"), (100_000, 100_001));
        drop(other);
        assert_eq!(owner("after"), before);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;
    use std::thread::spawn;

    #[test]
    fn threads_that_are_ending_are_told_apart() {
        let line = |flags: u32| format!("7 (a) b) S 1 7 7 0 -1 {flags} 4 0 0 0 0 0 0 0 20 0 1 0 3");
        assert!(!is_ending(&line(0x0040_0040)) && is_ending(&line(0x0040_0044)));
        assert!(!is_ending("") && !is_ending("7 (a) S 1"));
    }

    #[test]
    fn children_of_other_threads_are_left_to_them() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        // Until it has ended; it stays to be waited for.
        let id = rustix::process::WaitId::Pid(rustix::process::Pid::from_raw(pid).unwrap());
        let look = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(id, look).unwrap();
        let found = spawn(wait_any).join().unwrap();
        assert_eq!(found.unwrap_err().raw_os_error(), Some(libc::ECHILD));
        assert!(child.wait().unwrap().success());
    }
}
