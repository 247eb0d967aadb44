//! What the kernel keeps for one thread: its name, robust futexes, the address it
//! clears when it ends, restartable sequences, personality, the signal it gets
//! when its parent ends, and what else prctl(2) sets for it.

use libc::{PR_GET_TID_ADDRESS, PR_GET_TSC, PR_SET_TSC};
use torpor_images::proto::{RseqEntry, ThreadCoreEntry};
use torpor_policy::process::{RestartableSequences, RobustList, ThreadRest};
use torpor_sys::process::robust_list;
use torpor_tracee::syscall;
use torpor_tracee::{Batch, Call, Outcome, RemoteAddr, Slot, Tracee};

use super::script::Script;
use super::{ia32, resources};
use crate::error::{Context, Result};

/// Size of `struct robust_list_head` (linux/futex.h), the only one accepted.
const ROBUST_HEAD: u64 = 24;
/// Longest name of a task without its NUL.
const NAME_MAX: usize = 15;
/// What a thread has that nobody changed; the last is 50 µs (init_task.c).
const DEFAULT_TSC: u32 = libc::PR_TSC_ENABLE.cast_unsigned();
const DEFAULT_MCE_KILL: u64 = libc::PR_MCE_KILL_DEFAULT as u64;
const DEFAULT_SLACK: u64 = 50_000;

/// What only the thread itself can be asked for.
#[derive(Debug)]
pub(crate) struct Questions {
    tid_address: (Call, Slot),
    pdeath: (Call, Slot),
    tsc: (Call, Slot),
    name: (Call, Slot),
    slack: Call,
    mce_kill: Call,
    resources: resources::Questions,
}

/// Asks a thread.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    let mut get = |option: i32| {
        let slot = batch.space(NAME_MAX + 1);
        (batch.call(syscall::prctl(option, [slot.addr.0])), slot)
    };
    let tid_address = get(PR_GET_TID_ADDRESS);
    let pdeath = get(libc::PR_GET_PDEATHSIG);
    let tsc = get(PR_GET_TSC);
    let name = get(libc::PR_GET_NAME);
    let mut value = |option: i32| batch.call(syscall::prctl(option, []));
    let slack = value(libc::PR_GET_TIMERSLACK);
    let mce_kill = value(libc::PR_MCE_KILL_GET);
    let resources = resources::ask(batch);
    Questions { tid_address, pdeath, tsc, name, slack, mce_kill, resources }
}

impl Questions {
    /// Fills in the answers, and returns the address that the kernel clears when the
    /// thread ends (`clear_tid_addr`). What this kernel or machine does not have stays
    /// empty.
    pub(crate) fn answer(self, out: &Outcome, entry: &mut ThreadCoreEntry) -> Result<u64> {
        out.expect(self.tid_address.0, || "PR_GET_TID_ADDRESS".to_owned())?;
        out.expect(self.pdeath.0, || "PR_GET_PDEATHSIG".to_owned())?;
        out.expect(self.name.0, || "PR_GET_NAME".to_owned())?;
        let name = out.bytes(self.name.1);
        entry.comm = Some(name.split(|&byte| byte == 0).next().unwrap_or(name).to_vec());
        let signal = out.u32_at(self.pdeath.1, 0);
        entry.pdeath_sig = (signal != 0).then_some(signal);
        let set = |call, default| out.result(call).ok().filter(|&value| value != default);
        entry.torpor_timer_slack = set(self.slack, DEFAULT_SLACK);
        entry.torpor_mce_kill =
            set(self.mce_kill, DEFAULT_MCE_KILL).and_then(|policy| u32::try_from(policy).ok());
        self.resources.answer(out, entry);
        let tsc = out.u32_at(self.tsc.1, 0);
        entry.torpor_tsc = (out.result(self.tsc.0).is_ok() && tsc != DEFAULT_TSC).then_some(tsc);
        Ok(out.u64_at(self.tid_address.1, 0))
    }
}

/// Fills in what can be seen from outside.
///
/// # Errors
/// If the task is gone.
pub(crate) fn dump(tracee: &mut Tracee, entry: &mut ThreadCoreEntry) -> Result<()> {
    let tid = tracee.tid();
    let (head, len) = robust_list(tid).context(|| format!("task {tid}: get_robust_list"))?;
    entry.futex_rla = head;
    entry.futex_rla_len = u32::try_from(len).unwrap_or_default();
    entry.rseq_entry = tracee.rseq()?.map(|config| RseqEntry {
        rseq_abi_pointer: config.address,
        rseq_abi_size: config.size,
        signature: config.signature,
        rseq_cs_pointer: tracee.critical_section(),
    });
    Ok(())
}

/// Has a thread look into the process with this pid: get_robust_list(2) is for those who may trace
/// it.
pub(crate) fn ask_to_look(batch: &mut Batch<'_>, pid: u64) -> Call {
    let (head, len) = (batch.space(8).addr, batch.space(8).addr);
    batch.call((libc::SYS_get_robust_list, [pid, head.0, len.0]))
}

/// The question for the personality, personality(2).
#[derive(Debug)]
pub(crate) struct PersonalityQuestion(Call);

/// Asks for it: this value changes nothing.
pub(crate) fn ask_personality(batch: &mut Batch<'_>) -> PersonalityQuestion {
    PersonalityQuestion(batch.call((libc::SYS_personality, [0xffff_ffff])))
}

impl PersonalityQuestion {
    /// The personality.
    pub(crate) fn answer(self, out: &Outcome) -> Result<u32> {
        let persona = out.expect(self.0, || "personality".to_owned())?;
        Ok(u32::try_from(persona).unwrap_or_default())
    }
}

/// Restores all but the parent-death signal and restartable sequences; the thread's memory must be in place.
/// `personality` is that of its process.
pub(crate) fn restore(script: &mut Script<'_>, rest: &ThreadRest, personality: u32) {
    script.step("personality", (libc::SYS_personality, [u64::from(personality)]));
    let name = script.bytes(&[&*rest.name, &[0]].concat()).0;
    script.prctl("PR_SET_NAME", libc::PR_SET_NAME, name);
    script.step("set_tid_address", (libc::SYS_set_tid_address, [rest.tid_address]));
    match rest.robust {
        Some(RobustList { head, of_32bit: true }) => ia32::restore_robust_list(script, head),
        Some(RobustList { head, of_32bit: false }) => {
            script.step("set_robust_list", (libc::SYS_set_robust_list, [head, ROBUST_HEAD]));
        }
        None => {}
    }
    restore_settings(script, rest);
}

/// Registers the restartable sequences of a thread, which has [left](leave_section) its section.
pub(crate) fn register_sequences(script: &mut Script<'_>, rest: &ThreadRest) {
    let Some(sequences) = &rest.sequences else { return };
    let RestartableSequences { address, size, signature, .. } = *sequences;
    let args = [address, u64::from(size), 0, u64::from(signature)];
    script.step("rseq", (libc::SYS_rseq, args));
}

/// Has a thread be in no critical section, if it is to have restartable sequences. Its memory may say that it is in one that is
/// everywhere: the kernel would send the husk to the abort handler of that. Older kernels do not forget what stands there.
///
/// Memory that is still to come is left as it comes: whoever writes to it waits for it, and would for ever if the husk is
/// killed. What a husk is sent to then it does with the rights of its task.
pub(crate) fn leave_section(thread: &mut Tracee, rest: &ThreadRest, is_lazy: bool) -> Result<()> {
    match &rest.sequences {
        Some(sequences) if !is_lazy => Ok(thread.write(section_of(sequences), &[0; 8])?),
        _ => Ok(()),
    }
}

/// Where `struct rseq` (linux/rseq.h) points to the critical section.
pub(crate) fn section_of(sequences: &RestartableSequences) -> RemoteAddr {
    RemoteAddr(sequences.address.wrapping_add(8))
}

/// A husk may have inherited other settings from the supervisor than the default ones.
fn restore_settings(script: &mut Script<'_>, rest: &ThreadRest) {
    let slack = rest.timer_slack.unwrap_or(DEFAULT_SLACK);
    script.prctl("PR_SET_TIMERSLACK", libc::PR_SET_TIMERSLACK, slack);
    if let Some(policy) = rest.memory_errors {
        let args = [u64::from(libc::PR_MCE_KILL_SET.cast_unsigned()), u64::from(policy)];
        script.step("PR_MCE_KILL", syscall::prctl(libc::PR_MCE_KILL, args));
    }
    if let Some(tsc) = rest.time_stamps {
        script.prctl("PR_SET_TSC", PR_SET_TSC, u64::from(tsc));
    }
}

/// Restores the parent-death signal. After the credentials: changing those clears it.
pub(crate) fn restore_pdeath(script: &mut Script<'_>, rest: &ThreadRest) {
    if let Some(signal) = rest.parent_death {
        script.prctl("PR_SET_PDEATHSIG", libc::PR_SET_PDEATHSIG, u64::from(signal));
    }
}
