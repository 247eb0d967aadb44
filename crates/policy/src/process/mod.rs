//! What processes and their threads have besides memory, files, registers and what limits them: read of their images
//! once, and given to them.

pub mod state;
#[cfg(test)]
mod tests;
mod thread;

use torpor_images::kind;
use torpor_images::proto::core_entry::March;
use torpor_images::proto::{CoreEntry, SaEntry, SignalQueueEntry, TaskCoreEntry, UserX86RegsMode};

pub use thread::{NestedPids, RestartableSequences, RobustList, SignalStack, ThreadRest};

use crate::error::Error;
use crate::timers::Timers;

/// The highest signal number.
pub(super) const LAST_SIGNAL: u32 = 64;
/// The signals whose action nobody changes: `SIGKILL` and `SIGSTOP`.
const FIXED: [u32; 2] = [9, 19];
/// Those of job control: `SIGSTOP`, `SIGTSTP`, `SIGTTIN` and `SIGTTOU`. By any other one a process would go on, or end.
const STOPS: [u32; 4] = [19, 20, 21, 22];
/// Timer ids are positive ints for the kernel.
const MAX_TIMER: u32 = 0x7fff_ffff;
/// Longest name of a task without its NUL.
const LONGEST_NAME: usize = 15;
/// The bytes of a `siginfo_t`.
const SIGINFO: usize = 128;

/// What a process has besides its memory, its files and what limits it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessRest {
    /// Whether it runs.
    pub life: Life,
    /// Its name.
    pub name: Vec<u8>,
    /// The status that it has ended with, or its first thread has.
    pub exit_code: u32,
    /// Its first thread has ended, and others run on.
    pub leader_ended: bool,
    /// The signal that it was stopped by, if the image has it.
    pub stop_signal: Option<u32>,
    /// Its parent has been told of the stop.
    pub stop_reported: bool,
    /// What it does on signals, in the order of [`changeable`]; nothing of one that has ended.
    pub actions: Vec<SignalAction>,
    /// The signals that are pending for it.
    pub pending: Vec<PendingSignal>,
    /// The signals that its first thread blocks.
    pub blocked: u64,
    /// Its timers without a descriptor.
    pub timers: Timers,
    /// It is the parent of orphans below it (`PR_SET_CHILD_SUBREAPER`).
    pub subreaper: bool,
    /// What it has registered for by membarrier(2), a bit each.
    pub barriers: u32,
    /// Its personality (personality(2)).
    pub personality: u32,
    /// It runs a 32-bit program.
    pub is_32bit: bool,
}

/// Whether a process runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Life {
    /// It does.
    #[default]
    Runs,
    /// Job control has stopped it.
    Stopped,
    /// It has ended, and its parent has not waited for it.
    Ended,
}

/// What a process does on a signal: `struct sigaction` of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalAction {
    /// The handler, or `SIG_DFL` (0), or `SIG_IGN` (1).
    pub handler: u64,
    /// `SA_*` (sigaction(2)).
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: u64,
    /// The signals that are blocked meanwhile.
    pub mask: u64,
}

/// A signal that is pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingSignal([u8; SIGINFO]);

/// The signals whose action can be changed, in the order of the image.
pub fn changeable() -> impl Iterator<Item = u32> {
    (1..=LAST_SIGNAL).filter(|signal| !FIXED.contains(signal))
}

/// What the images of a process' threads, the leader first, say of it and of each of them.
///
/// # Errors
/// The image, and what is missing or cannot be in it.
pub fn read(
    threads: &[u32],
    cores: &[CoreEntry],
) -> crate::error::Result<(ProcessRest, Vec<ThreadRest>)> {
    let image = |index: usize| {
        let thread = threads.get(index).copied().unwrap_or_default();
        move |reason| Error::Invalid { image: kind::CORE.file_name(thread.into()), reason }
    };
    let process = ProcessRest::of(cores).map_err(image(0))?;
    let thread = |(index, core)| ThreadRest::of(core, &process).map_err(image(index));
    let threads = cores.iter().enumerate().map(thread).collect::<Result<_, _>>()?;
    Ok((process, threads))
}

impl ProcessRest {
    fn of(cores: &[CoreEntry]) -> Result<Self, String> {
        let tc = cores.first().and_then(|core| core.tc.as_ref()).ok_or("no task part")?;
        let life = match tc.task_state {
            state::ALIVE => Life::Runs,
            state::STOPPED => Life::Stopped,
            state::DEAD => Life::Ended,
            other => return Err(format!("has the state {other}, which there is not")),
        };
        let process = ProcessRest {
            life,
            name: name_of(&tc.comm)?,
            exit_code: tc.exit_code,
            ..ProcessRest::default()
        };
        match life {
            Life::Ended => Ok(process),
            Life::Runs | Life::Stopped => process.of_living(tc, cores),
        }
    }

    fn of_living(self, tc: &TaskCoreEntry, cores: &[CoreEntry]) -> Result<Self, String> {
        if let Some(core) = cores.iter().find(|core| core.mtype() != March::X8664) {
            return Err(format!("it is of the architecture {}", core.mtype().as_str_name()));
        }
        let has_ended = |core: &CoreEntry| {
            core.tc.as_ref().is_some_and(|tc| tc.torpor_leader_ended == Some(true))
        };
        if cores.iter().skip(1).any(has_ended) || cores.len() == 1 && cores.iter().any(has_ended) {
            return Err("a thread has ended that cannot have".to_owned());
        }
        let action = |action: &SaEntry| SignalAction {
            handler: action.sigaction,
            flags: action.flags,
            restorer: action.restorer,
            mask: action.mask,
        };
        // Images of old versions have actions and timers in files of their own.
        let actions: Vec<SignalAction> = tc.sigactions.iter().map(action).collect();
        if actions.len() != changeable().count() {
            return Err(format!("{} signal actions", actions.len()));
        }
        let mut timers = Timers::of(tc).ok_or("timers are missing")?;
        // Kernels that number timers themselves make them in this order.
        timers.posix.sort_by_key(|timer| timer.id);
        let mut last = None;
        let mut ids = timers.posix.iter().map(|timer| timer.id);
        if let Some(id) = ids.find(|&id| last.replace(id) == Some(id) || id > MAX_TIMER) {
            return Err(format!("timer {id} is there twice, or has no number that there can be"));
        }
        if let Some(signal) = tc.stop_signo.filter(|signal| !STOPS.contains(signal)) {
            return Err(format!("was stopped by signal {signal}"));
        }
        let mut infos = cores.iter().filter_map(|core| core.thread_info.as_ref());
        Ok(ProcessRest {
            leader_ended: cores.first().is_some_and(has_ended),
            stop_signal: tc.stop_signo,
            stop_reported: tc.torpor_stop_reported == Some(true),
            actions,
            pending: PendingSignal::all(tc.signals_s.as_ref())?,
            blocked: tc.blk_sigset,
            timers,
            subreaper: tc.child_subreaper == Some(true),
            barriers: tc.membarrier_registration_mask.unwrap_or_default(),
            personality: tc.personality,
            is_32bit: infos.any(|info| info.gpregs.mode() == UserX86RegsMode::Compat),
            ..self
        })
    }

    /// Whether it has nothing else to do on a signal than what is usual.
    #[must_use]
    pub fn has_default_action(&self, signal: u32) -> bool {
        let mut all = changeable().zip(&self.actions);
        all.any(|(number, action)| number == signal && action.handler == 0)
    }
}

impl PendingSignal {
    /// Those of a queue.
    fn all(queue: Option<&SignalQueueEntry>) -> Result<Vec<Self>, String> {
        let entries = queue.map(|queue| queue.signals.as_slice()).unwrap_or_default();
        let read = |bytes: &[u8]| match <[u8; SIGINFO]>::try_from(bytes).map(PendingSignal) {
            Ok(signal) if (1..=LAST_SIGNAL).contains(&signal.number()) => Ok(signal),
            Ok(signal) => Err(format!("pending signal {}", signal.number())),
            Err(_) => Err(format!("a pending signal of {} bytes", bytes.len())),
        };
        entries.iter().map(|entry| read(&entry.siginfo)).collect()
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        let [first, second, third, fourth, ..] = self.0;
        u32::from_le_bytes([first, second, third, fourth])
    }

    /// Its `siginfo_t`.
    #[must_use]
    pub fn info(&self) -> &[u8; SIGINFO] {
        &self.0
    }
}

/// The name of a task.
fn name_of(name: &[u8]) -> Result<Vec<u8>, String> {
    match name.len() > LONGEST_NAME || name.contains(&0) {
        true => Err("a task's name that is too long".to_owned()),
        false => Ok(name.to_vec()),
    }
}
