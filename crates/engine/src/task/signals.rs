//! Signals: what is to happen on them, where their handlers run, which are pending,
//! and whether job control has stopped the process.
//!
//! Blocked signals are a thread's registers in this respect: the tracee knows them.
//! Pending signals are put back by the thread that they are pending for, since the
//! kernel lets a thread queue any `siginfo` to itself, but to nobody else one that
//! looks like the kernel's own.

use torpor_images::proto::{
    CoreEntry, SaEntry, SiginfoEntry, SignalQueueEntry, TaskCoreEntry, ThreadCoreEntry,
    ThreadSasEntry,
};
use torpor_sys::ptrace::{SigInfo, pending_signals};
use torpor_tracee::syscall::Syscall;
use torpor_tracee::{Batch, Call, Outcome, Slot, StopState, Tracee};

use super::script::Script;
use super::{ia32, state};
use crate::error::{Context, Error, Result};

/// The highest signal number.
const LAST: i32 = 64;

/// Bytes of a kernel signal set.
const SET_SIZE: u64 = 8;

/// The signals whose action can be changed, in the order of the image.
fn changeable() -> impl Iterator<Item = i32> {
    (1..=LAST).filter(|s| ![libc::SIGKILL, libc::SIGSTOP].contains(s))
}

/// Questions about the actions of a process.
#[derive(Debug)]
pub(crate) struct ActionQuestions(Vec<(i32, Call, Slot)>);

/// Asks for all actions.
pub(crate) fn ask_actions(batch: &mut Batch<'_>) -> ActionQuestions {
    ActionQuestions(
        changeable()
            .map(|signal| {
                let slot = batch.space(32);
                let number = u64::from(signal.cast_unsigned());
                let call = batch.call((libc::SYS_rt_sigaction, [number, 0, slot.addr.0, SET_SIZE]));
                (signal, call, slot)
            })
            .collect(),
    )
}

impl ActionQuestions {
    /// The actions, in the order of the image.
    pub(crate) fn answer(self, out: &Outcome, is_32bit: bool) -> Result<Vec<SaEntry>> {
        let mut all = Vec::new();
        for (signal, call, slot) in self.0 {
            out.expect(call, || format!("rt_sigaction of signal {signal}"))?;
            all.push(SaEntry {
                sigaction: out.u64_at(slot, 0),
                flags: out.u64_at(slot, 8),
                restorer: out.u64_at(slot, 16),
                mask: out.u64_at(slot, 24),
                compat_sigaction: Some(is_32bit),
                ..SaEntry::default()
            });
        }
        Ok(all)
    }
}

/// Checks the actions of an image.
pub(crate) fn check_actions(actions: &[SaEntry]) -> Result<()> {
    if actions.len() != changeable().count() {
        return Err(Error::invalid("core", format!("{} signal actions", actions.len())));
    }
    Ok(())
}

/// Sets all actions: a husk inherits ignored signals from the supervisor.
///
/// # Errors
/// If those of a 32-bit program lie where it does not reach.
pub(crate) fn restore_actions(
    script: &mut Script<'_>,
    actions: &[SaEntry],
    is_32bit: bool,
) -> Result<()> {
    for (signal, action) in changeable().zip(actions) {
        if is_32bit {
            ia32::restore_action(script, u64::from(signal.cast_unsigned()), action)?;
            continue;
        }
        let new = script.words(&[action.sigaction, action.flags, action.restorer, action.mask]);
        let number = u64::from(signal.cast_unsigned());
        let what = format!("rt_sigaction of signal {signal}");
        script.step(what, (libc::SYS_rt_sigaction, [number, new.0, 0, SET_SIZE]));
    }
    Ok(())
}

/// The question where the handlers of a thread run.
#[derive(Debug)]
pub(crate) struct StackQuestion(Call, Slot);

/// Asks for the alternate stack of a thread.
pub(crate) fn ask_stack(batch: &mut Batch<'_>) -> StackQuestion {
    let slot = batch.space(24);
    StackQuestion(batch.call((libc::SYS_sigaltstack, [0, slot.addr.0])), slot)
}

impl StackQuestion {
    /// The alternate stack.
    pub(crate) fn answer(self, out: &Outcome) -> Result<ThreadSasEntry> {
        out.expect(self.0, || "sigaltstack".to_owned())?;
        Ok(ThreadSasEntry {
            ss_sp: out.u64_at(self.1, 0),
            ss_flags: out.u32_at(self.1, 8),
            ss_size: out.u64_at(self.1, 16),
        })
    }
}

/// Sets the alternate stack of a thread.
pub(crate) fn restore_stack(script: &mut Script<'_>, stack: &ThreadSasEntry) {
    // A thread dumped on its alternate stack shows so here; the kernel finds out
    // by itself and refuses to be told.
    let on_stack = libc::SS_ONSTACK.cast_unsigned();
    let new = script.words(&[stack.ss_sp, u64::from(stack.ss_flags & !on_stack), stack.ss_size]);
    script.step("sigaltstack", (libc::SYS_sigaltstack, [new.0, 0]));
}

/// The signals that are pending for a thread, or (`shared`) for its process. To be
/// called before any remote call: the signal that ends a batch must be unblocked.
///
/// # Errors
/// Gone; a pending `SIGTRAP` is refused.
pub(crate) fn pending(tracee: &Tracee, shared: bool) -> Result<SignalQueueEntry> {
    let tid = tracee.tid();
    let infos =
        pending_signals(tid, shared).context(|| format!("task {tid}: PTRACE_PEEKSIGINFO"))?;
    if infos.iter().any(|info| number(info) == libc::SIGTRAP) {
        let reason = "cannot be told from those of tracing; let the task handle it first";
        return Err(Error::refused(tracee.pid(), "a pending SIGTRAP", reason));
    }
    let signals = infos.into_iter().map(|info| SiginfoEntry { siginfo: info.to_vec() }).collect();
    Ok(SignalQueueEntry { signals })
}

fn number(info: &SigInfo) -> i32 {
    i32::from_le_bytes([info[0], info[1], info[2], info[3]])
}

/// The pending signals of an image, checked.
fn queued(queue: Option<&SignalQueueEntry>) -> Result<Vec<SigInfo>> {
    let entries = queue.map(|q| q.signals.as_slice()).unwrap_or_default();
    entries
        .iter()
        .map(|entry| match SigInfo::try_from(entry.siginfo.as_slice()) {
            Ok(info) if (1..=LAST).contains(&number(&info)) => Ok(info),
            Ok(info) => Err(Error::invalid("core", format!("pending signal {}", number(&info)))),
            Err(_) => {
                let len = entry.siginfo.len();
                Err(Error::invalid("core", format!("a pending signal of {len} bytes")))
            }
        })
        .collect()
}

/// Which of the pending signals to queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pending {
    /// All that do not interfere with batches.
    Most,
    /// The signal that ends a batch. Once it is pending, no batch must be run.
    Done,
}

impl Pending {
    fn has(self, info: &SigInfo) -> bool {
        match number(info) {
            // It cannot be blocked: it comes at the very end, see `restore_stop`.
            libc::SIGSTOP => false,
            torpor_sys::stub::DONE => self == Pending::Done,
            _ => self == Pending::Most,
        }
    }
}

/// Queues signals that were pending for a thread, and with `tc` those that were
/// pending for its process. Nothing is delivered while the husk is stopped.
///
/// # Errors
/// Those of rt_tgsigqueueinfo(2): `EAGAIN` beyond `RLIMIT_SIGPENDING`.
pub(crate) fn restore_pending(
    husk: &mut Tracee,
    entry: &ThreadCoreEntry,
    tc: Option<&TaskCoreEntry>,
    which: Pending,
) -> Result<()> {
    let private = queued(entry.signals_p.as_ref())?.into_iter().map(|info| (false, info));
    let shared =
        queued(tc.and_then(|t| t.signals_s.as_ref()))?.into_iter().map(|info| (true, info));
    let all: Vec<_> = private.chain(shared).filter(|(_, info)| which.has(info)).collect();
    if all.is_empty() {
        return Ok(());
    }
    let pid = husk.call("getpid", (libc::SYS_getpid, []))?;
    let tid = husk.call("gettid", (libc::SYS_gettid, []))?;
    if which == Pending::Done {
        for (shared, info) in all {
            husk.write(husk.scratch(), &info)?;
            let call = queueing(shared, pid, tid, number(&info), husk.scratch().0);
            husk.call_alone("queueing a signal", call)?;
        }
        return Ok(());
    }
    for chunk in all.chunks(1000) {
        let mut script = Script::new(husk);
        for (shared, info) in chunk {
            let at = script.bytes(info).0;
            let call = queueing(*shared, pid, tid, number(info), at);
            script.step(format!("queueing signal {}", number(info)), call);
        }
        script.run()?;
    }
    Ok(())
}

/// The call that queues the signal described at `at`, for a thread to itself.
fn queueing(shared: bool, pid: u64, tid: u64, signal: i32, at: u64) -> Syscall {
    let signal = u64::from(signal.cast_unsigned());
    match shared {
        true => (libc::SYS_rt_sigqueueinfo, [pid, signal, at]).into(),
        false => (libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal, at]).into(),
    }
}

/// The state of a process in the image: alive, or stopped and by which signal.
pub(crate) fn stop_state(tracee: &Tracee) -> (u32, Option<u32>) {
    match tracee.state() {
        StopState::Interrupted => (state::ALIVE, None),
        StopState::Group(signal) => (state::STOPPED, Some(signal.cast_unsigned())),
    }
}

/// Puts a process back into a job control stop, if it was in one, and sends the
/// stop signals that were pending in spite of it. Its threads (leader first, with
/// their cores) must have been dressed; all they can do is to be let go. A leader that
/// has ended takes no part. `leave` stops also a process that ran.
///
/// # Errors
/// If the task is gone.
pub fn restore_stop(threads: &mut [Tracee], cores: &[CoreEntry], leave: bool) -> Result<()> {
    let Some(tc) = cores.first().and_then(|c| c.tc.as_ref()) else { return Ok(()) };
    let ended = usize::from(cores.first().is_some_and(super::has_ended));
    let (Some(threads), Some(cores)) = (threads.get_mut(ended..), cores.get(ended..)) else {
        return Ok(());
    };
    let Some((leader, others)) = threads.split_first_mut() else { return Ok(()) };
    if tc.task_state == state::STOPPED || leave {
        // The kernel stops a process by another signal than SIGSTOP only where that
        // has its default action; the difference shows in its parent's wait status.
        let signal = tc.stop_signo.map_or(libc::SIGSTOP, u32::cast_signed);
        let signal = if has_default_action(tc, signal) { signal } else { libc::SIGSTOP };
        leader.stop_group(signal)?;
        others.iter_mut().try_for_each(|thread| thread.join_stop(signal))?;
    }
    let waits = |queue: Option<&SignalQueueEntry>| -> Result<bool> {
        Ok(queued(queue)?.iter().any(|info| number(info) == libc::SIGSTOP))
    };
    if waits(tc.signals_s.as_ref())? {
        leader.send(libc::SIGSTOP, true)?;
    }
    for (thread, core) in threads.iter_mut().zip(cores) {
        if waits(core.thread_core.as_ref().and_then(|t| t.signals_p.as_ref()))? {
            thread.send(libc::SIGSTOP, false)?;
        }
    }
    Ok(())
}

/// Whether a signal was pending for a process or its leader.
///
/// # Errors
/// If a pending signal of the images has a number or a length that none has.
pub(crate) fn has_pending(cores: &[CoreEntry], signal: i32) -> Result<bool> {
    let Some(leader) = cores.first() else { return Ok(false) };
    let private = leader.thread_core.as_ref().and_then(|t| t.signals_p.as_ref());
    let shared = leader.tc.as_ref().and_then(|t| t.signals_s.as_ref());
    let all = queued(private)?.into_iter().chain(queued(shared)?);
    Ok(all.into_iter().any(|info| number(&info) == signal))
}

/// Takes a signal that is pending for a husk or its process, if one is.
///
/// # Errors
/// If the task is gone.
pub(crate) fn take_signal(husk: &mut Tracee, signal: i32) -> Result<()> {
    // The set, and the time to wait: none.
    let mut words = [0u8; 24];
    words[..8].copy_from_slice(&(1u64 << (signal - 1)).to_le_bytes());
    let at = husk.scratch();
    husk.write(at, &words)?;
    match husk.call_alone("rt_sigtimedwait", (libc::SYS_rt_sigtimedwait, [at.0, 0, at.0 + 8, 8])) {
        Ok(_) | Err(torpor_tracee::Error::Remote { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn has_default_action(tc: &TaskCoreEntry, signal: i32) -> bool {
    changeable().zip(&tc.sigactions).any(|(s, a)| s == signal && a.sigaction == 0)
}
