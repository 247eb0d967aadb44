//! Adjustments of System V semaphores that the kernel makes when a process ends (`SEM_UNDO`).
//!
//! They are shown nowhere. Whether a process has a list of them shows in a comparison (kcmp(2))
//! with one that has none, but whoever has started a thread has a list, mostly an empty one. What
//! it says of a semaphore shows in the operations that the kernel takes: an adjustment goes from
//! -32768 to 32767, and the range is looked at before anything is done. So the process is asked
//! for operations that would take it from 0 to the very end, which fails with `ERANGE` if it is
//! not 0, and behind them for one that cannot be done now, so that nothing is done in any case.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use torpor_sys::kcmp::{Object, kcmp};
use torpor_sys::number::short;
use torpor_tracee::{Batch, Call, Tracee};

use super::tasks::Tasks;
use crate::error::{Context, Result};

/// Commands of semctl(2).
const GET_VALUE: u64 = libc::GETVAL as u64;
const INFO: u64 = libc::SEM_INFO as u64;
const STAT_ANY: u64 = libc::SEM_STAT_ANY as u64;
/// Where `struct seminfo` has the number of sets, and its size.
const SETS_AT: usize = 28;
const INFO_SIZE: usize = 40;
/// Where `struct semid64_ds` has the number of semaphores, and its size.
const COUNT_AT: usize = 80;
const STAT_SIZE: usize = 104;
/// Flags of semop(2).
const NO_WAIT: u16 = short(libc::IPC_NOWAIT);
const UNDO: u16 = short(libc::SEM_UNDO);
/// Half of what a semaphore holds, rounded up: from any value one can go as far up or down.
const HALF: i16 = 16384;
/// How many semaphores, or sets, are asked for at once.
const AT_ONCE: usize = 200;

/// A semaphore: its set, and its number there.
type Semaphore = (u64, u64);

/// The pids of tasks that have adjustments. `none` is a process that has no list.
///
/// # Errors
/// If a task is gone.
pub(super) fn adjusting(tasks: &mut Tasks, none: i32) -> Result<Vec<i32>> {
    let mut spaces: HashMap<Option<u32>, Vec<Semaphore>> = HashMap::new();
    let mut found = Vec::new();
    for task in tasks.live() {
        // A comparison stops nobody, and most have no list.
        let own = lists(&tasks[task].threads, none)?;
        if matches!(own, Adjustments::None) {
            continue;
        }
        let semaphores = match spaces.entry(tasks[task].ids.ipc_ns_id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(semaphores(tasks.remote(task)?)?),
        };
        let has_adjustments = !semaphores.is_empty()
            && (matches!(own, Adjustments::OfThreads) || has_any(tasks.remote(task)?, semaphores)?);
        if has_adjustments {
            found.push(tasks[task].pid);
        }
    }
    Ok(found)
}

/// Who has a list of adjustments in a process.
enum Adjustments {
    None,
    /// All threads have the same.
    OfProcess,
    /// A thread that has not been made as threads are has one of its own, so it has asked for it.
    OfThreads,
}

fn lists(threads: &[Tracee], none: i32) -> Result<Adjustments> {
    let is_same = |tid: i32, other: i32| {
        kcmp(tid, other, Object::Sysvsem)
            .map(Ordering::is_eq)
            .context(|| format!("kcmp of tasks {tid} and {other}"))
    };
    let Some((leader, others)) = threads.split_first() else { return Ok(Adjustments::None) };
    for thread in others.iter().map(Tracee::tid) {
        if !is_same(thread, leader.tid())? && !is_same(thread, none)? {
            return Ok(Adjustments::OfThreads);
        }
    }
    let has_none = is_same(leader.tid(), none)?;
    Ok(if has_none { Adjustments::None } else { Adjustments::OfProcess })
}

/// All semaphores of the namespace that a task is in.
fn semaphores(leader: &mut Tracee) -> Result<Vec<Semaphore>> {
    let mut batch = leader.batch();
    let info = batch.space(INFO_SIZE);
    let call = batch.call((libc::SYS_semctl, [0, 0, INFO, info.addr.0]));
    let out = batch.run()?;
    // Kernels without System V IPC have none.
    let Ok(highest) = out.result(call) else { return Ok(Vec::new()) };
    if out.u32_at(info, SETS_AT) == 0 {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for first in (0..=highest).step_by(AT_ONCE) {
        let mut batch = leader.batch();
        let asked: Vec<_> = (first..=highest)
            .take(AT_ONCE)
            .map(|index| {
                let stat = batch.space(STAT_SIZE);
                (batch.call((libc::SYS_semctl, [index, 0, STAT_ANY, stat.addr.0])), stat)
            })
            .collect();
        let out = batch.run()?;
        for (call, stat) in asked {
            if let Ok(id) = out.result(call) {
                found.extend((0..u64::from(out.u32_at(stat, COUNT_AT))).map(|n| (id, n)));
            }
        }
    }
    Ok(found)
}

/// Whether a process is to undo anything to one of these semaphores. Of those that it must not
/// change it is not known.
fn has_any(leader: &mut Tracee, semaphores: &[Semaphore]) -> Result<bool> {
    for some in semaphores.chunks(AT_ONCE) {
        let mut batch = leader.batch();
        let ask = |&(set, number): &Semaphore| {
            batch.call((libc::SYS_semctl, [set, number, GET_VALUE, 0]))
        };
        let values: Vec<Call> = some.iter().map(ask).collect();
        let out = batch.run()?;
        let values: Vec<_> = values.into_iter().map(|value| out.result(value)).collect();
        let mut batch = leader.batch();
        let mut asked = Vec::new();
        for (semaphore, value) in some.iter().zip(values) {
            if let Ok(value) = value {
                asked.extend(
                    [true, false].map(|up| ask_for_range(&mut batch, *semaphore, value, up)),
                );
            }
        }
        let out = batch.run()?;
        let beyond = |e: std::io::Error| e.raw_os_error() == Some(libc::ERANGE);
        if asked.into_iter().any(|call| out.result(call).is_err_and(beyond)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Asks for operations that take an adjustment to the upper or the lower end, and are not done.
fn ask_for_range(batch: &mut Batch<'_>, (set, number): Semaphore, value: u64, up: bool) -> Call {
    // The end is one step nearer on the upper side.
    let steps = if up { [HALF, HALF - 1] } else { [HALF, HALF] };
    let has_room_above = value < HALF.cast_unsigned().into();
    let mut operations = Vec::new();
    for step in steps {
        // An adjustment goes up when the semaphore goes down.
        let undo = |change: i16| if (change < 0) == up { NO_WAIT | UNDO } else { NO_WAIT };
        let first = if has_room_above { step } else { -step };
        operations.extend([first, -first].map(|change| (change, undo(change))));
    }
    operations.push((i16::MIN, NO_WAIT));
    let number = u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes();
    let bytes: Vec<u8> = operations
        .iter()
        .flat_map(|(change, flags)| [number, change.to_le_bytes(), flags.to_le_bytes()].concat())
        .collect();
    let at = batch.bytes(&bytes).0;
    batch.call((libc::SYS_semop, [set, at, operations.len() as u64]))
}
