//! Signals: what is to happen on them, where their handlers run, which are pending,
//! and whether job control has stopped the process.
//!
//! Blocked signals are a thread's registers in this respect: the tracee knows them.
//! Pending signals are put back by the thread that they are pending for, since the
//! kernel lets a thread queue any `siginfo` to itself, but to nobody else one that
//! looks like the kernel's own.

use torpor_images::proto::{SaEntry, SiginfoEntry, SignalQueueEntry, ThreadSasEntry};
use torpor_policy::process::{
    Life, PendingSignal, ProcessRest, SignalAction, SignalStack, ThreadRest, changeable, state,
};
use torpor_sys::ptrace::{SigInfo, pending_signals};
use torpor_tracee::syscall::Syscall;
use torpor_tracee::{Batch, Call, Outcome, Slot, StopState, Tracee};

use super::ia32;
use super::script::Script;
use crate::error::{Context, Error, Result};

/// Bytes of a kernel signal set.
const SET_SIZE: u64 = 8;

/// Questions about the actions of a process.
#[derive(Debug)]
pub(crate) struct ActionQuestions(Vec<(u32, Call, Slot)>);

/// Asks for all actions.
pub(crate) fn ask_actions(batch: &mut Batch<'_>) -> ActionQuestions {
    ActionQuestions(
        changeable()
            .map(|signal| {
                let slot = batch.space(32);
                let args = [u64::from(signal), 0, slot.addr.0, SET_SIZE];
                let call = batch.call((libc::SYS_rt_sigaction, args));
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

/// Sets all actions: a husk inherits ignored signals from the supervisor.
///
/// # Errors
/// If those of a 32-bit program lie where it does not reach.
pub(crate) fn restore_actions(
    script: &mut Script<'_>,
    actions: &[SignalAction],
    is_32bit: bool,
) -> Result<()> {
    for (signal, action) in changeable().zip(actions) {
        if is_32bit {
            ia32::restore_action(script, signal.into(), action)?;
            continue;
        }
        let new = script.words(&[action.handler, action.flags, action.restorer, action.mask]);
        let what = format!("rt_sigaction of signal {signal}");
        script.step(what, (libc::SYS_rt_sigaction, [signal.into(), new.0, 0, SET_SIZE]));
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
pub(crate) fn restore_stack(script: &mut Script<'_>, stack: &SignalStack) {
    // A thread dumped on its alternate stack shows so here; the kernel finds out
    // by itself and refuses to be told.
    let on_stack = libc::SS_ONSTACK.cast_unsigned();
    let new = script.words(&[stack.start, u64::from(stack.flags & !on_stack), stack.size]);
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

/// Which of the pending signals to queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pending {
    /// All that do not interfere with batches.
    Most,
    /// The signal that ends a batch. Once it is pending, no batch must be run.
    Done,
}

impl Pending {
    fn has(self, signal: &PendingSignal) -> bool {
        match signal.number().cast_signed() {
            // It cannot be blocked: it comes at the very end, see `restore_stop`.
            libc::SIGSTOP => false,
            torpor_sys::stub::DONE => self == Pending::Done,
            _ => self == Pending::Most,
        }
    }
}

/// Queues signals that were pending for a thread, and with `process` those that were
/// pending for its process. Nothing is delivered while the husk is stopped.
///
/// # Errors
/// Those of rt_tgsigqueueinfo(2): `EAGAIN` beyond `RLIMIT_SIGPENDING`.
pub(crate) fn restore_pending(
    husk: &mut Tracee,
    rest: &ThreadRest,
    process: Option<&ProcessRest>,
    which: Pending,
) -> Result<()> {
    let private = rest.pending.iter().map(|signal| (false, signal));
    let shared = process.into_iter().flat_map(|process| &process.pending);
    let all = private.chain(shared.map(|signal| (true, signal)));
    let all: Vec<_> = all.filter(|(_, signal)| which.has(signal)).collect();
    if all.is_empty() {
        return Ok(());
    }
    let pid = husk.call("getpid", (libc::SYS_getpid, []))?;
    let tid = husk.call("gettid", (libc::SYS_gettid, []))?;
    if which == Pending::Done {
        for (shared, signal) in all {
            husk.write(husk.scratch(), signal.info())?;
            let call = queueing(shared, pid, tid, signal, husk.scratch().0);
            husk.call_alone("queueing a signal", call)?;
        }
        return Ok(());
    }
    for chunk in all.chunks(1000) {
        let mut script = Script::new(husk);
        for (shared, signal) in chunk {
            let at = script.bytes(signal.info()).0;
            let call = queueing(*shared, pid, tid, signal, at);
            script.step(format!("queueing signal {}", signal.number()), call);
        }
        script.run()?;
    }
    Ok(())
}

/// The call that queues the signal described at `at`, for a thread to itself.
fn queueing(shared: bool, pid: u64, tid: u64, signal: &PendingSignal, at: u64) -> Syscall {
    let signal = u64::from(signal.number());
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
/// stop signals that were pending in spite of it. Its threads (leader first, as what
/// the images say of them) must have been dressed; all they can do is to be let go. A leader that
/// has ended takes no part. `leave` stops also a process that ran.
///
/// # Errors
/// If the task is gone.
pub fn restore_stop(
    threads: &mut [Tracee],
    (process, rests): (&ProcessRest, &[ThreadRest]),
    leave: bool,
) -> Result<()> {
    let ended = usize::from(process.leader_ended);
    let (Some(threads), Some(rests)) = (threads.get_mut(ended..), rests.get(ended..)) else {
        return Ok(());
    };
    let Some((leader, others)) = threads.split_first_mut() else { return Ok(()) };
    if process.life == Life::Stopped || leave {
        // The kernel stops a process by another signal than SIGSTOP only where that
        // has its default action; the difference shows in its parent's wait status.
        let signal = process.stop_signal.filter(|signal| process.has_default_action(*signal));
        let signal = signal.map_or(libc::SIGSTOP, u32::cast_signed);
        let signal = leader.stop_group(signal)?;
        others.iter_mut().try_for_each(|thread| thread.join_stop(signal))?;
    }
    if has(&process.pending, libc::SIGSTOP) {
        leader.send(libc::SIGSTOP, true)?;
    }
    for (thread, rest) in threads.iter_mut().zip(rests) {
        if has(&rest.pending, libc::SIGSTOP) {
            thread.send(libc::SIGSTOP, false)?;
        }
    }
    Ok(())
}

/// Whether a signal was pending for a process or its leader, the first of its threads.
pub(crate) fn has_pending(process: &ProcessRest, threads: &[ThreadRest], signal: i32) -> bool {
    let leader = threads.first();
    leader.is_some_and(|leader| has(&leader.pending, signal)) || has(&process.pending, signal)
}

fn has(pending: &[PendingSignal], signal: i32) -> bool {
    pending.iter().any(|pending| pending.number() == signal.cast_unsigned())
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
