//! Protection keys (pkeys(7)): those that a process has allocated, and the mappings that have one. What a thread may
//! do with a key is in its PKRU register, which comes with the rest of its processor's state.

use torpor_policy::memory::{KEYS, ProcessMemory};
use torpor_tracee::{Batch, Call, Outcome, Tracee};

use crate::error::{Context, Error, Result};

/// An address in the kernel's half: no process has a mapping there.
const NOWHERE: u64 = 1 << 63;

/// The questions to a process: one for each key.
#[derive(Debug)]
pub(crate) struct Questions(Vec<(u32, Call)>);

/// Asks which keys it has allocated.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    let ask = |key: u32| {
        let args = [NOWHERE, 4096, 0, u64::from(key)];
        (key, batch.call((libc::SYS_pkey_mprotect, args)))
    };
    Questions((1..KEYS).map(ask).collect())
}

impl Questions {
    /// The keys, as bits; `None` if there are none.
    pub(crate) fn answer(&self, out: &Outcome) -> Option<u32> {
        // The kernel looks for the key first (EINVAL), and for the mapping then (ENOMEM).
        let is_there = |call: Call| {
            out.result(call).is_err_and(|error| error.raw_os_error() == Some(libc::ENOMEM))
        };
        let keys = self.0.iter().filter(|(_, call)| is_there(*call));
        Some(keys.fold(0, |bits, (key, _)| bits | 1 << key)).filter(|&bits| bits != 0)
    }
}

/// Allocates the keys of a process and gives its mappings theirs, with the protections of the images. It is the last
/// that happens to its memory.
///
/// # Errors
/// If this processor has no such keys; if the husk has ended.
pub(crate) fn restore(husk: &mut Tracee, memory: &ProcessMemory) -> Result<()> {
    let keys = memory.keys;
    let areas: Vec<_> = memory.areas.iter().filter_map(|area| Some((area, area.key?))).collect();
    if keys == 0 && areas.is_empty() {
        return Ok(());
    }
    let mut batch = husk.batch();
    // The kernel gives the lowest that is free. To be allowed all by the calling thread is for the moment.
    let highest = u32::BITS - keys.leading_zeros();
    let allocated: Vec<(u32, Call)> =
        (1..highest).map(|key| (key, batch.must((libc::SYS_pkey_alloc, [0, 0])))).collect();
    for key in (1..highest).filter(|key| keys >> key & 1 == 0) {
        batch.must((libc::SYS_pkey_free, [u64::from(key)]));
    }
    for (area, key) in areas {
        let args = [area.start, area.len(), u64::from(area.prot), u64::from(key)];
        batch.must((libc::SYS_pkey_mprotect, args));
    }
    let out = batch.run()?;
    for (key, call) in allocated {
        let what = || format!("allocate protection key {key}, which this processor may not have");
        if out.expect(call, what)? != u64::from(key) {
            return Err(Error::Bug(format!("protection key {key} was not the next one")));
        }
    }
    match out.first_error() {
        Some((_, error)) => Err(error).context(|| "give memory its protection keys".to_owned()),
        None => Ok(()),
    }
}
