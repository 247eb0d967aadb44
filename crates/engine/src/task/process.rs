//! What prctl(2) and membarrier(2) set for a whole process.

use std::sync::LazyLock;

use libc::{PR_GET_MDWE, PR_GET_MEMORY_MERGE, PR_SET_MDWE, PR_SET_MEMORY_MERGE};
use torpor_images::proto::TaskCoreEntry;
use torpor_policy::memory::{Dumpable, ProcessMemory};
use torpor_policy::process::ProcessRest;
use torpor_sys::process::membarrier_commands;
use torpor_tracee::syscall;
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::keys;
use super::script::Script;
use crate::error::{Context, Error, Result};
use crate::proc;

/// `MEMBARRIER_CMD_GET_REGISTRATIONS` of linux/membarrier.h (Linux 6.3).
const MEMBARRIER_GET_REGISTRATIONS: u64 = 1 << 9;
/// Commands that fail for a process that is not registered for them: private, private with a synchronized core,
/// private with restarted sequences. To register for one is the command of the next bit.
const MEMBARRIER_OF_REGISTERED: [u64; 3] = [
    libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED as u64,
    libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE as u64,
    libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ as u64,
];
/// Any process may give the command before this, which so does not tell who is registered. To be
/// registered changes nothing for the process itself: it is reached by that command of others.
const MEMBARRIER_REGISTER_GLOBAL: u64 = libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED as u64;
/// `PR_GET_THP_DISABLE` can say more than yes and no since Linux 6.18: flags above this bit.
const THP_DISABLED: u64 = 1;
/// `MMF_DUMP_FILTER_DEFAULT` of linux/sched/coredump.h, as `/proc` shows it.
const DEFAULT_COREDUMP_FILTER: u32 = 0x33;

/// The questions to a process.
#[derive(Debug)]
pub(crate) struct Questions {
    subreaper: (Call, Slot),
    dumpable: Call,
    thp: Call,
    membarrier: Membarrier,
    mdwe: Call,
    memory_merge: Call,
    keys: keys::Questions,
    brk: Call,
}

/// What membarrier(2) the process is registered for.
#[derive(Debug)]
enum Membarrier {
    Told(Call),
    /// The registrations, and a command that fails for a process that has not made it.
    Tried([(u64, Call); 3]),
}

impl Membarrier {
    fn answer(&self, out: &Outcome) -> Option<u64> {
        match self {
            // Kernels without the call have none.
            Membarrier::Told(call) => out.result(*call).ok(),
            Membarrier::Tried(calls) => {
                let made = calls.iter().filter(|(_, call)| out.result(*call).is_ok());
                Some(made.fold(MEMBARRIER_REGISTER_GLOBAL, |mask, (made, _)| mask | made))
            }
        }
    }
}

/// Asks for everything.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    let subreaper = batch.space(8);
    let mut get = |option: i32, at: u64| batch.call(syscall::prctl(option, [at]));
    Questions {
        subreaper: (get(libc::PR_GET_CHILD_SUBREAPER, subreaper.addr.0), subreaper),
        dumpable: get(libc::PR_GET_DUMPABLE, 0),
        thp: get(libc::PR_GET_THP_DISABLE, 0),
        mdwe: get(PR_GET_MDWE, 0),
        memory_merge: get(PR_GET_MEMORY_MERGE, 0),
        keys: keys::ask(batch),
        brk: batch.call((libc::SYS_brk, [0])),
        membarrier: ask_membarrier(batch),
    }
}

fn ask_membarrier(batch: &mut Batch<'_>) -> Membarrier {
    /// Whether the kernel tells who is registered, or nobody is.
    static TELLS: LazyLock<bool> = LazyLock::new(|| {
        membarrier_commands().map_or(true, |known| known & MEMBARRIER_GET_REGISTRATIONS != 0)
    });
    let mut call = |command| batch.call((libc::SYS_membarrier, [command, 0, 0]));
    if *TELLS {
        Membarrier::Told(call(MEMBARRIER_GET_REGISTRATIONS))
    } else {
        Membarrier::Tried(MEMBARRIER_OF_REGISTERED.map(|command| (command << 1, call(command))))
    }
}

/// What belongs into the image of a process' memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MmFlags {
    /// Where the heap ends.
    pub brk: u64,
    /// `PR_GET_DUMPABLE`.
    pub dumpable: i32,
    /// `PR_GET_THP_DISABLE`.
    pub thp_disabled: bool,
    /// The further bits of that, if any.
    pub thp_flags: Option<u32>,
    /// `PR_GET_MDWE`, if any bit is set.
    pub mdwe: Option<u32>,
    /// `PR_GET_MEMORY_MERGE`: equal pages of all of it may be one (KSM).
    pub memory_merge: bool,
    /// The protection keys that are allocated, as bits, if there are any.
    pub keys: Option<u32>,
    /// What goes into core dumps, if it is not the default.
    pub coredump_filter: Option<u32>,
}

impl Questions {
    /// Fills in what was found.
    ///
    /// # Errors
    /// If the kernel has refused a call, by name.
    pub(crate) fn answer(
        self,
        out: &Outcome,
        coredump_filter: Option<u32>,
        tc: &mut TaskCoreEntry,
    ) -> Result<MmFlags> {
        out.expect(self.subreaper.0, || "PR_GET_CHILD_SUBREAPER".to_owned())?;
        tc.child_subreaper = Some(out.u32_at(self.subreaper.1, 0) != 0);
        let membarrier = self.membarrier.answer(out);
        let mask = membarrier.and_then(|mask| u32::try_from(mask).ok());
        tc.membarrier_registration_mask = mask.filter(|&mask| mask != 0);
        let dumpable = out.expect(self.dumpable, || "PR_GET_DUMPABLE".to_owned())?;
        let thp = out.expect(self.thp, || "PR_GET_THP_DISABLE".to_owned())?;
        let bits = |value: u64| u32::try_from(value).ok().filter(|&bits| bits != 0);
        Ok(MmFlags {
            brk: out.expect(self.brk, || "brk".to_owned())?,
            dumpable: i32::try_from(dumpable).unwrap_or_default(),
            thp_disabled: thp & THP_DISABLED != 0,
            thp_flags: bits(thp & !THP_DISABLED),
            // Kernels before 6.3 have none.
            mdwe: out.result(self.mdwe).ok().and_then(bits),
            memory_merge: out.result(self.memory_merge).is_ok_and(|on| on != 0),
            keys: self.keys.answer(out),
            coredump_filter: coredump_filter.filter(|&f| f != DEFAULT_COREDUMP_FILTER),
        })
    }
}

/// Which kinds of memory go into a core dump (core(5)); none for a kernel without them.
///
/// # Errors
/// If the task has ended; if what the kernel shows is no number.
pub(crate) fn coredump_filter(pid: i32) -> Result<Option<u32>> {
    let text = match proc::read(pid, "coredump_filter").map_err(Error::from) {
        Err(Error::Os { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        text => text?,
    };
    u32::from_str_radix(text.trim(), 16)
        .map(Some)
        .map_err(|_| Error::invalid(format!("/proc/{pid}/coredump_filter"), text))
}

/// Sets what goes into core dumps. A husk has inherited it from the supervisor.
///
/// # Errors
/// If the task has ended, or the kernel refuses the filter.
pub(crate) fn restore_coredump_filter(pid: i32, memory: &ProcessMemory) -> Result<()> {
    let wanted = memory.core_dump.unwrap_or(DEFAULT_COREDUMP_FILTER);
    if coredump_filter(pid)?.is_none_or(|now| now == wanted) {
        return Ok(());
    }
    std::fs::write(format!("/proc/{pid}/coredump_filter"), format!("{wanted:#x}"))
        .context(|| format!("task {pid}: setting coredump_filter to {wanted:#x}"))
}

/// Forbids the process to gain executable memory, if it was. Its stub can only be removed
/// after this.
pub(crate) fn restore_mdwe(script: &mut Script<'_>, memory: &ProcessMemory) {
    if let Some(bits) = memory.no_new_code {
        script.prctl("PR_SET_MDWE", PR_SET_MDWE, u64::from(bits));
    }
}

/// Restores all but the dumpable flag. The memory must be in place.
pub(crate) fn restore(script: &mut Script<'_>, rest: &ProcessRest, memory: &ProcessMemory) {
    if rest.subreaper {
        script.prctl("PR_SET_CHILD_SUBREAPER", libc::PR_SET_CHILD_SUBREAPER, 1);
    }
    if let Some(flags) = memory.no_huge_pages {
        let disable = syscall::prctl(libc::PR_SET_THP_DISABLE, [1, flags.into()]);
        script.step("PR_SET_THP_DISABLE", disable);
    }
    if memory.merges {
        script.prctl("PR_SET_MEMORY_MERGE", PR_SET_MEMORY_MERGE, 1);
    }
    let registered = |command: &u64| u64::from(rest.barriers) & command != 0;
    for command in (0..u32::BITS).map(|bit| 1u64 << bit).filter(registered) {
        script.step("membarrier", (libc::SYS_membarrier, [command, 0, 0]));
    }
}

/// What the dumpable flag is to be set to, if that is to be done: after the credentials of all
/// threads, since changing those resets it, to what the system wants for tasks that changed
/// theirs (`fs.suid_dumpable`). That is also the only way to the value 2.
///
/// # Errors
/// If the husk is gone.
pub(crate) fn dumpable(husk: &mut Tracee, memory: &ProcessMemory) -> Result<Option<u64>> {
    match memory.dumpable {
        Some(wanted @ (Dumpable::No | Dumpable::Yes)) => Ok(Some(wanted as u64)),
        Some(Dumpable::ByRoot) => {
            let get = syscall::prctl(libc::PR_GET_DUMPABLE, []);
            let now = husk.call("PR_GET_DUMPABLE", get)?;
            Ok((now != Dumpable::ByRoot as u64).then_some(0))
        }
        None => Ok(None),
    }
}
