//! What prctl(2) and membarrier(2) set for a whole process.

use torpor_images::proto::{MmEntry, TaskCoreEntry};
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::script::Script;
use crate::error::{Error, Result};

// linux/prctl.h, linux/membarrier.h.
const PR_GET_TSC: u64 = 25;
const PR_GET_IO_FLUSHER: u64 = 58;
const MEMBARRIER_GET_REGISTRATIONS: u64 = 1 << 9;
const TSC_ENABLE: u32 = 1;
/// `PR_GET_THP_DISABLE` can say more than yes and no since Linux 6.18.
const THP_DISABLED: u64 = 1;

/// The questions to a process.
#[derive(Debug)]
pub(crate) struct Questions {
    subreaper: (Call, Slot),
    dumpable: Call,
    thp: Call,
    membarrier: Call,
    tsc: (Call, Slot),
    flusher: Call,
}

/// Asks for everything.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    let subreaper = batch.space(8);
    let tsc = batch.space(8);
    let mut get = |option: u64, at: u64| batch.call(libc::SYS_prctl, [option, at, 0, 0, 0]);
    let of = |option: i32| u64::from(option.cast_unsigned());
    Questions {
        subreaper: (get(of(libc::PR_GET_CHILD_SUBREAPER), subreaper.addr.0), subreaper),
        dumpable: get(of(libc::PR_GET_DUMPABLE), 0),
        thp: get(of(libc::PR_GET_THP_DISABLE), 0),
        tsc: (get(PR_GET_TSC, tsc.addr.0), tsc),
        flusher: get(PR_GET_IO_FLUSHER, 0),
        membarrier: batch.call(libc::SYS_membarrier, [MEMBARRIER_GET_REGISTRATIONS, 0, 0]),
    }
}

/// What belongs into the image of a process' memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MmFlags {
    /// `PR_GET_DUMPABLE`.
    pub dumpable: i32,
    /// `PR_GET_THP_DISABLE`.
    pub thp_disabled: bool,
}

impl Questions {
    /// Fills in what was found.
    ///
    /// # Errors
    /// A setting that the image has no place for is refused.
    pub(crate) fn answer(self, pid: i32, out: &Outcome, tc: &mut TaskCoreEntry) -> Result<MmFlags> {
        let refuse = |what: &str| {
            Err(Error::refused(pid, format!("prctl {what}"), "the image has no place for it"))
        };
        out.expect(self.subreaper.0, || "PR_GET_CHILD_SUBREAPER".to_owned())?;
        tc.child_subreaper = Some(out.u32_at(self.subreaper.1, 0) != 0);
        // Kernels before 6.3 do not tell, kernels without the call have none.
        tc.membarrier_registration_mask =
            out.result(self.membarrier).ok().and_then(|mask| u32::try_from(mask).ok());
        if out.result(self.tsc.0).is_ok() && out.u32_at(self.tsc.1, 0) != TSC_ENABLE {
            return refuse("PR_SET_TSC (reading the time stamp counter is forbidden)");
        }
        if out.result(self.flusher).is_ok_and(|on| on != 0) {
            return refuse("PR_SET_IO_FLUSHER");
        }
        let dumpable = out.expect(self.dumpable, || "PR_GET_DUMPABLE".to_owned())?;
        let thp = out.expect(self.thp, || "PR_GET_THP_DISABLE".to_owned())?;
        if thp > THP_DISABLED {
            return refuse("PR_SET_THP_DISABLE with flags");
        }
        Ok(MmFlags {
            dumpable: i32::try_from(dumpable).unwrap_or_default(),
            thp_disabled: thp == THP_DISABLED,
        })
    }
}

/// Restores all but the dumpable flag. The memory must be in place.
pub(crate) fn restore(script: &mut Script<'_>, tc: &TaskCoreEntry, mm: &MmEntry) {
    if tc.child_subreaper == Some(true) {
        script.prctl("PR_SET_CHILD_SUBREAPER", libc::PR_SET_CHILD_SUBREAPER, 1);
    }
    if mm.thp_disabled == Some(true) {
        script.prctl("PR_SET_THP_DISABLE", libc::PR_SET_THP_DISABLE, 1);
    }
    let mask = tc.membarrier_registration_mask.unwrap_or_default();
    for command in (0..u32::BITS).map(|bit| 1u64 << bit).filter(|c| u64::from(mask) & c != 0) {
        script.step("membarrier", libc::SYS_membarrier, [command, 0, 0]);
    }
}

/// Restores the dumpable flag, after the credentials of all threads: changing those
/// resets it, to what the system wants for tasks that changed theirs
/// (`fs.suid_dumpable`). That is also the only way to the value 2.
pub(crate) fn restore_dumpable(husk: &mut Tracee, mm: &MmEntry) -> Result<()> {
    let Some(wanted) = mm.dumpable else { return Ok(()) };
    let option = u64::from(libc::PR_GET_DUMPABLE.cast_unsigned());
    let now = husk.call("PR_GET_DUMPABLE", libc::SYS_prctl, [option, 0, 0, 0, 0])?;
    if i64::from(wanted) == now.cast_signed() {
        return Ok(());
    }
    let mut script = Script::new(husk);
    let value = u64::from(wanted == 1);
    script.prctl("PR_SET_DUMPABLE", libc::PR_SET_DUMPABLE, value);
    script.run()?;
    Ok(())
}
