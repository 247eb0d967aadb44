//! What a dead supervisor has left behind in a task that runs on its own again: its stub, and
//! the signal mask of a batch.

use std::time::{Duration, Instant};

use torpor_sys::ptrace;
use torpor_sys::stub::{self, DONE};

use crate::lone::scratch;
use crate::stop::{BATCH_MASK, StopState, other_threads, stop_before};
use crate::stub::{STUB_SIZE, Stub};
use crate::{Error, Mapping, Result, Tracee, frame, parse_maps};

/// How long a task is left alone at most before it is stopped again to see where it is.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// The signals that no mask holds: SIGKILL, SIGSTOP.
const NEVER_BLOCKED: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

/// Removes the stub that a dead supervisor may have left behind at `base` in process
/// `pid`, which runs on its own again.
///
/// # Errors
/// Gone; `Unusable`, if a thread does not stop, or does not leave the stub, in time; `Os`, if
/// somebody else traces it.
pub fn remove_leftover(pid: i32, base: u64, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    let stub = Stub::at(base);
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(mut threads) = stop_again(pid, deadline)? {
            lead_back(&mut threads, stub, &read_maps(pid)?, deadline)?;
            // On that way it may have mapped the stub.
            let maps = read_maps(pid)?;
            if !in_use(&threads, stub, &maps) {
                for thread in &mut threads {
                    thread.take_back_mask(stub)?;
                }
                let gone = match threads.first_mut() {
                    Some(leader) if is_leftover(pid, base, &maps) => {
                        leader.stub = Some(stub);
                        leader.eject(&maps)
                    }
                    _ => Ok(()),
                };
                return finish_all(threads).and(gone);
            }
            finish_all(threads)?;
            // It would end its process to take away what one of its threads executes.
            if Instant::now() > deadline {
                let reason = format!("it does not leave the stub at {base:x}");
                return Err(Error::Unusable { pid, reason });
            }
        }
        // On a busy machine a task that is stopped too often never gets to its next instruction.
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

impl Tracee {
    /// Gives a thread its signal mask back whose supervisor died when it had set the thread's
    /// own registers already, and not yet its mask. The frame of its last batch is still there,
    /// and only those who run one block all but this signal.
    fn take_back_mask(&mut self, stub: Stub) -> Result<()> {
        if self.own_mask | NEVER_BLOCKED != BATCH_MASK | NEVER_BLOCKED {
            return Ok(());
        }
        for frame in stub.frames() {
            let mut head = [0; frame::HEAD];
            self.read(frame, &mut head)?;
            if let Some(mask) = frame::mask_of(&head, self.tid) {
                ptrace::set_signal_mask(self.tid, mask)
                    .map_err(Error::os(self.tid, "PTRACE_SETSIGMASK"))?;
                self.own_mask = mask;
            }
        }
        Ok(())
    }
}

/// Stops all threads of a process whose supervisor has just died, the leader first; `None`
/// if that has not let them go yet: it closes its files, by which others know of its end,
/// before. There may be more threads than the list of them has, if some of them end.
fn stop_again(pid: i32, deadline: Instant) -> Result<Option<Vec<Tracee>>> {
    let mut threads: Vec<Tracee> = Vec::new();
    loop {
        let mut ended_leader = 0;
        for tid in std::iter::once(pid).chain(other_threads(pid)) {
            if is_zombie(tid) {
                ended_leader = 1;
                continue;
            }
            if threads.iter().any(|t| t.tid == tid) {
                continue;
            }
            match stop_thread(pid, tid, deadline) {
                Ok(Some(thread)) => threads.push(thread),
                Ok(None) => return Ok(None),
                Err(Error::Gone { .. }) if tid != pid => {}
                Err(e) => return Err(e),
            }
        }
        if thread_count(pid)? <= threads.len() + ended_leader || Instant::now() > deadline {
            return Ok(Some(threads));
        }
    }
}

/// Stops a thread; `None` if somebody else has it.
pub(crate) fn stop_thread(pid: i32, tid: i32, deadline: Instant) -> Result<Option<Tracee>> {
    let filtered = !read_status(pid)?.contains("Seccomp:\t0\n");
    match Tracee::seize(tid, filtered) {
        Err(Error::Os { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied
                && Instant::now() < deadline =>
        {
            return Ok(None);
        }
        seized => seized?,
    }
    let left = deadline.saturating_duration_since(Instant::now());
    match Tracee::stopped(pid, tid, left)? {
        None => Err(Error::Unusable { pid: tid, reason: "it does not stop".to_owned() }),
        stopped => Ok(stopped),
    }
}

/// Lets all threads go; the first error of one that is not just gone.
fn finish_all(threads: Vec<Tracee>) -> Result<()> {
    let mut all = Ok(());
    for thread in threads {
        match thread.finish() {
            Ok(()) | Err(Error::Gone { .. }) => {}
            Err(e) => all = all.and(Err(e)),
        }
    }
    all
}

/// What the kernel tells of a process or thread.
///
/// # Errors
/// Gone, if there is none of that number.
pub(crate) fn read_status(pid: i32) -> Result<String> {
    std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|_| Error::Gone { pid })
}

/// Whether a thread has ended and is still there: the leader of others that run on.
pub(crate) fn is_zombie(tid: i32) -> bool {
    read_status(tid).is_ok_and(|status| status.contains("State:\tZ"))
}

fn thread_count(pid: i32) -> Result<usize> {
    let status = read_status(pid)?;
    let count = status.lines().find_map(|line| line.strip_prefix("Threads:"));
    count.and_then(|n| n.trim().parse().ok()).ok_or(Error::Gone { pid })
}

pub(crate) fn read_maps(pid: i32) -> Result<Vec<Mapping>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_err(Error::os(pid, "/proc/PID/maps"))?;
    Ok(parse_maps(&text))
}

/// Whether there is a stub at `base`: it begins with the code, or is anonymous memory
/// of just its size that is empty, where the supervisor died right after it had mapped it.
fn is_leftover(pid: i32, base: u64, maps: &[Mapping]) -> bool {
    let end = base + STUB_SIZE;
    let parts: Vec<_> = maps.iter().filter(|m| m.start < end && m.end > base).collect();
    let mut head = vec![0u8; stub::code().len()];
    let readable = torpor_sys::vm::read(pid, base, &mut head).is_ok_and(|n| n == head.len());
    let whole = parts.first().is_some_and(|m| m.start == base)
        && parts.last().is_some_and(|m| m.end == end);
    readable
        && parts.iter().all(|m| m.inode == 0 && m.name.is_empty())
        && (head == stub::code() || whole && head.iter().all(|&byte| byte == 0))
}

/// Whether one of these threads, the leader first, still is where its dead supervisor has
/// sent it: in the stub, or only just about to map it.
fn in_use(threads: &[Tracee], stub: Stub, maps: &[Mapping]) -> bool {
    threads.iter().enumerate().any(|(at, thread)| is_on_its_way(thread, at == 0, stub, maps))
}

fn is_on_its_way(thread: &Tracee, leads: bool, stub: Stub, maps: &[Mapping]) -> bool {
    let stack = maps.iter().find(|m| m.name == "[stack]").map_or(0, |m| m.start);
    leads && scratch::contains(thread.own.rsp, stack) || stub.code_contains(thread.own.rip)
}

/// Has the threads go their way back that job control would hold on it until somebody continues
/// their process: to their own registers, and no instruction further.
fn lead_back(
    threads: &mut [Tracee],
    stub: Stub,
    maps: &[Mapping],
    deadline: Instant,
) -> Result<()> {
    for (at, thread) in threads.iter_mut().enumerate() {
        if !matches!(thread.state, StopState::Group(_)) {
            continue;
        }
        while is_on_its_way(thread, at == 0, stub, maps) {
            // Its last call takes it back: it stops behind that.
            thread.to_next_syscall()?;
            let Some((signal, event)) = stop_before(thread.tid, deadline)? else {
                let reason = format!("it does not leave the stub at {:x}", stub.base);
                return Err(Error::Unusable { pid: thread.tid, reason });
            };
            if event == 0 && ![libc::SIGTRAP | 0x80, DONE].contains(&signal) {
                thread.held.push(signal);
            }
            thread.look_again()?;
        }
    }
    Ok(())
}
