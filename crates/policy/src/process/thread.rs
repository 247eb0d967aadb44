//! What a thread has besides its registers and what limits it.

use torpor_images::proto::{CoreEntry, RseqEntry, ThreadSasEntry, TorporNestedEntry};

use super::{LAST_SIGNAL, Life, PendingSignal, ProcessRest, name_of};
use crate::groups::set_of;

/// Sizes of `struct robust_list_head` and `struct compat_robust_list_head` (linux/futex.h), the only ones accepted.
const ROBUST_HEAD: u32 = 24;
const ROBUST_HEAD_OF_32BIT: u32 = 12;

/// What a thread has besides its registers and what limits it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThreadRest {
    /// Its name.
    pub name: Vec<u8>,
    /// The signals that it blocks.
    pub blocked: u64,
    /// The signals that are pending for it.
    pub pending: Vec<PendingSignal>,
    /// Where its handlers run, if the image has it.
    pub stack: Option<SignalStack>,
    /// The address that the kernel clears when it ends.
    pub tid_address: u64,
    /// Its robust futexes.
    pub robust: Option<RobustList>,
    /// Its restartable sequences.
    pub sequences: Option<RestartableSequences>,
    /// The signal that it gets when its parent ends.
    pub parent_death: Option<u32>,
    /// The slack of its timers, in ns, if not the usual one (`PR_SET_TIMERSLACK`).
    pub timer_slack: Option<u64>,
    /// Whether it may read the time stamp counter, if not as usual (`PR_SET_TSC`).
    pub time_stamps: Option<u32>,
    /// When it is told of broken memory, if not as usual (`PR_MCE_KILL`).
    pub memory_errors: Option<u32>,
    /// The number of the set of cgroups that it is in.
    pub group_set: Option<u32>,
    /// How pid namespaces below that of the root task know it, if it is in any, or its children are.
    pub nested: Option<NestedPids>,
}

/// Where the handlers of a thread run (sigaltstack(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalStack {
    /// Where it begins.
    pub start: u64,
    /// `SS_*`.
    pub flags: u32,
    /// How many bytes it has.
    pub size: u64,
}

/// The head of a list of robust futexes (set_robust_list(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RobustList {
    /// Where it is.
    pub head: u64,
    /// It was set by a 32-bit program.
    pub of_32bit: bool,
}

/// What a thread has registered by rseq(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartableSequences {
    /// Where its structure is.
    pub address: u64,
    /// How many bytes that has.
    pub size: u32,
    /// What stands before each handler of an abort.
    pub signature: u32,
    /// The critical section that it is in.
    pub section: Option<u64>,
}

/// Numbers in pid namespaces below that of the root task, the outermost first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NestedPids {
    /// Those of the thread.
    pub tids: Vec<u32>,
    /// Of a process: those of its group, 0 where it is from further out.
    pub pgids: Vec<u32>,
    /// Likewise, of its session.
    pub sids: Vec<u32>,
    /// The pid namespace that its children are born into, if that is not its own.
    pub for_children: Option<u32>,
}

impl ThreadRest {
    pub(super) fn of(core: &CoreEntry, process: &ProcessRest) -> Result<Self, String> {
        let nested = |TorporNestedEntry { tids, pgids, sids, for_children }: &TorporNestedEntry| {
            let (tids, pgids, sids) = (tids.clone(), pgids.clone(), sids.clone());
            NestedPids { tids, pgids, sids, for_children: *for_children }
        };
        // One of the two places where versions of the format have it would go unread.
        let of_task = core.tc.as_ref().and_then(|tc| tc.cg_set).filter(|&set| set != 0);
        let group_set = set_of(core);
        if of_task.is_some() && of_task != group_set {
            return Err("it has two sets of cgroups".to_owned());
        }
        let nested = core.torpor_nested.as_ref().map(nested);
        let rest = ThreadRest { group_set, nested, ..ThreadRest::default() };
        match process.life {
            Life::Ended => Ok(rest),
            Life::Runs | Life::Stopped => rest.of_living(core, process),
        }
    }

    fn of_living(self, core: &CoreEntry, process: &ProcessRest) -> Result<Self, String> {
        let entry = core.thread_core.as_ref().ok_or("no thread part")?;
        let robust = match (entry.futex_rla, entry.futex_rla_len) {
            (head, ROBUST_HEAD_OF_32BIT) if process.is_32bit => {
                Some(RobustList { head, of_32bit: true })
            }
            (0, _) => None,
            (head, ROBUST_HEAD) if !process.is_32bit => Some(RobustList { head, of_32bit: false }),
            (_, len) => return Err(format!("a robust list of {len} bytes")),
        };
        if let Some(signal) = entry.pdeath_sig.filter(|signal| !(1..=LAST_SIGNAL).contains(signal))
        {
            return Err(format!("is to get signal {signal} when its parent ends"));
        }
        let stack =
            |&ThreadSasEntry { ss_sp: start, ss_flags: flags, ss_size: size }: &ThreadSasEntry| {
                SignalStack { start, flags, size }
            };
        let sequences = |entry: &RseqEntry| RestartableSequences {
            address: entry.rseq_abi_pointer,
            size: entry.rseq_abi_size,
            signature: entry.signature,
            section: entry.rseq_cs_pointer,
        };
        Ok(ThreadRest {
            // Images that have none for each thread have those of the process.
            name: entry.comm.as_deref().map_or_else(|| Ok(process.name.clone()), name_of)?,
            blocked: entry.blk_sigset.unwrap_or(process.blocked),
            pending: PendingSignal::all(entry.signals_p.as_ref())?,
            stack: entry.sas.as_ref().map(stack),
            tid_address: core.thread_info.as_ref().map_or(0, |info| info.clear_tid_addr),
            robust,
            sequences: entry.rseq_entry.as_ref().map(sequences),
            parent_death: entry.pdeath_sig,
            timer_slack: entry.torpor_timer_slack,
            time_stamps: entry.torpor_tsc,
            memory_errors: entry.torpor_mce_kill,
            ..self
        })
    }
}
