//! Processes that run a 32-bit program under this 64-bit kernel.
//!
//! What they ask the kernel for comes by system calls with numbers and structures of their own,
//! and of two things the kernel keeps by which kind of call they came: the actions on signals,
//! whose handlers get the frames of that kind, and the lists of robust futexes. All else is the
//! same, so that a husk, which is born with 64-bit code, becomes such a process by its registers
//! and its vDSO. What tells the two apart then: a core file of it has the 64-bit format.

use torpor_images::proto::ThreadCoreEntry;
use torpor_policy::process::SignalAction;
use torpor_tracee::{Batch, Call, Mapping, Outcome, Slot, Tracee};

use super::script::Script;
use crate::error::{Error, Result};

/// Numbers of system calls, of asm/unistd_32.h.
const RT_SIGACTION: libc::c_long = 174;
const SET_ROBUST_LIST: libc::c_long = 311;
const GET_ROBUST_LIST: libc::c_long = 312;
/// Size of `struct compat_robust_list_head` (linux/futex.h), the only one accepted.
const ROBUST_HEAD: u64 = 12;
/// Behind the addresses that 32-bit code can reach.
const END: u64 = 1 << 32;

/// Whether a process with these threads and mappings runs a 32-bit program. A 64-bit one may run
/// 32-bit code as well, and has memory elsewhere.
pub(crate) fn is_process(threads: &[Tracee], maps: &[Mapping]) -> bool {
    threads.iter().any(|thread| thread.registers().is_32bit())
        && maps.iter().all(|map| map.end <= END || map.name == "[vsyscall]")
}

/// The question for the robust futexes of a thread.
#[derive(Debug)]
pub(super) struct RobustQuestion(Call, Slot);

/// Asks for them.
pub(super) fn ask_robust_list(batch: &mut Batch<'_>) -> RobustQuestion {
    let slot = batch.space(8);
    let at = slot.addr.0;
    RobustQuestion(batch.call_of_32bit((GET_ROBUST_LIST, [0, at, at + 4])), slot)
}

impl RobustQuestion {
    /// Fills them in.
    pub(super) fn answer(self, out: &Outcome, entry: &mut ThreadCoreEntry) -> Result<()> {
        out.expect(self.0, || "get_robust_list of 32-bit programs".to_owned())?;
        entry.futex_rla = out.u32_at(self.1, 0).into();
        entry.futex_rla_len = out.u32_at(self.1, 4);
        Ok(())
    }
}

/// Gives a thread its robust futexes.
pub(super) fn restore_robust_list(script: &mut Script<'_>, head: u64) {
    let args = [head, ROBUST_HEAD];
    script.step_of_32bit("set_robust_list of 32-bit programs", (SET_ROBUST_LIST, args));
}

/// Sets the action on a signal.
pub(super) fn restore_action(
    script: &mut Script<'_>,
    signal: u64,
    action: &SignalAction,
) -> Result<()> {
    let words = [action.handler, action.flags, action.restorer];
    let words = words.map(u32::try_from);
    let [Ok(handler), Ok(flags), Ok(restorer)] = words else {
        let what = format!("the action on signal {signal} lies out of the reach of 32-bit code");
        return Err(Error::invalid("core", what));
    };
    let mut bytes = [handler, flags, restorer].map(u32::to_le_bytes).as_flattened().to_vec();
    bytes.extend(action.mask.to_le_bytes());
    let new = script.bytes(&bytes).0;
    let what = format!("rt_sigaction of signal {signal} of 32-bit programs");
    script.step_of_32bit(what, (RT_SIGACTION, [signal, new, 0, 8]));
    Ok(())
}
