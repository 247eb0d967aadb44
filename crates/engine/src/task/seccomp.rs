//! Seccomp: modes of threads, and the filters that tasks share.
//!
//! A filter is kept once, with the number of the one that was installed before it;
//! a thread knows its newest. Filters are installed while tracing suspends them, so
//! that they forbid nothing to the rest of the restore.

use torpor_images::proto::{CoreEntry, SeccompEntry, SeccompFilter, SeccompMode};
use torpor_images::{ImageDir, kind};
use torpor_sys::ptrace::{seccomp_filter, seccomp_filter_flags};
use torpor_tracee::Tracee;

use super::script::Script;
use crate::error::{Context, Error, Result};
use crate::proc;

// linux/seccomp.h, linux/bpf_common.h, linux/filter.h.
const SET_MODE_STRICT: u64 = 0;
const SET_MODE_FILTER: u64 = 1;
const FLAG_TSYNC: u64 = 1;
const RET_ACTION: u32 = 0x7fff_0000;
const RET_USER_NOTIF: u32 = 0x7fc0_0000;
const BPF_RET_K: u16 = 0x06;
/// Bytes of one instruction, and how many a filter can have (`BPF_MAXINSNS`).
const INSTRUCTION: usize = 8;
const MAX_INSTRUCTIONS: usize = 4096;

/// All filters of a tree.
#[derive(Debug, Default)]
pub struct Filters {
    all: Vec<SeccompFilter>,
}

impl Filters {
    /// As many, one on top of the other, that allow everything.
    #[cfg(test)]
    pub(crate) fn allowing(count: u32) -> Self {
        let filter = [BPF_RET_K.to_le_bytes(), [0; 2], [0; 2], [0xff, 0x7f]].concat();
        let filter = |id: u32| SeccompFilter {
            filter: filter.clone(),
            prev: id.checked_sub(1),
            flags: None,
        };
        Filters { all: (0..count).map(filter).collect() }
    }

    /// Reads the filters of an image directory.
    ///
    /// # Errors
    /// Damaged images.
    pub fn load(images: &ImageDir) -> Result<Self> {
        let entry: SeccompEntry = images.read_opt(kind::SECCOMP, 0)?.unwrap_or_default();
        for filter in &entry.seccomp_filters {
            let len = filter.filter.len();
            if len == 0 || len % INSTRUCTION != 0 || len > MAX_INSTRUCTIONS * INSTRUCTION {
                return Err(Error::invalid("seccomp.img", format!("a filter of {len} bytes")));
            }
        }
        Ok(Filters { all: entry.seccomp_filters })
    }

    /// Writes them.
    ///
    /// # Errors
    /// If the image cannot be written.
    pub fn save(&self, images: &ImageDir) -> Result<()> {
        let entry = SeccompEntry { seccomp_filters: self.all.clone() };
        Ok(images.write_one(kind::SECCOMP, 0, &entry)?)
    }

    /// Adds a filter on top of `prev`; one that is there already is shared.
    fn add(&mut self, prev: Option<u32>, filter: Vec<u8>, flags: u32) -> Result<u32> {
        let new = SeccompFilter { filter, prev, flags: (flags != 0).then_some(flags) };
        let at = self.all.iter().position(|f| *f == new).unwrap_or_else(|| {
            self.all.push(new);
            self.all.len() - 1
        });
        u32::try_from(at).map_err(|_| Error::invalid("seccomp.img", "too many filters"))
    }

    /// The mode that a thread is given, and the numbers of its filters, the oldest first.
    ///
    /// # Errors
    /// A mode or a filter that does not exist; filters in a circle.
    pub fn of(&self, core: &CoreEntry, leader: &CoreEntry) -> Result<(SeccompMode, Vec<u32>)> {
        match wanted(core, leader)? {
            (SeccompMode::Filter, Some(newest)) => Ok((SeccompMode::Filter, self.chain(newest)?)),
            (SeccompMode::Filter, None) => {
                Err(Error::invalid("core", "seccomp filters without a number"))
            }
            (mode, _) => Ok((mode, vec![])),
        }
    }

    /// The numbers of a thread's filters, the oldest first.
    fn chain(&self, newest: u32) -> Result<Vec<u32>> {
        let mut chain = vec![];
        let mut next = Some(newest);
        while let Some(id) = next {
            next = self.get(id)?.prev;
            chain.push(id);
            if chain.len() > self.all.len() {
                return Err(Error::invalid("seccomp.img", "filters in a circle"));
            }
        }
        chain.reverse();
        Ok(chain)
    }

    fn get(&self, id: u32) -> Result<&SeccompFilter> {
        usize::try_from(id)
            .ok()
            .and_then(|at| self.all.get(at))
            .ok_or_else(|| Error::invalid("seccomp.img", format!("there is no filter {id}")))
    }
}

/// The mode of a thread and its newest filter.
///
/// # Errors
/// Gone; refused if a filter asks another program.
pub(crate) fn dump(
    tracee: &Tracee,
    status: &proc::Status,
    filters: &mut Filters,
) -> Result<(SeccompMode, Option<u32>)> {
    let (pid, tid) = (tracee.pid(), tracee.tid());
    match status.number("Seccomp", 10) {
        None | Some(0) => return Ok((SeccompMode::Disabled, None)),
        Some(1) => return Ok((SeccompMode::Strict, None)),
        Some(_) => {}
    }
    let mut newest = None;
    for index in 0.. {
        let read = seccomp_filter(tid, index);
        let Some(filter) = read.context(|| format!("task {tid}: seccomp filter {index}"))? else {
            break;
        };
        if asks_listener(&filter) {
            let reason = "it asks a listener, which cannot be connected again";
            return Err(Error::refused(pid, format!("seccomp filter {index}"), reason));
        }
        let flags = seccomp_filter_flags(tid, index)
            .context(|| format!("task {tid}: flags of seccomp filter {index}"))?;
        newest = Some(filters.add(newest, filter, u32::try_from(flags).unwrap_or_default())?);
    }
    Ok((SeccompMode::Filter, newest))
}

/// Whether a filter can return `SECCOMP_RET_USER_NOTIF`. Only constant results are
/// looked at; nobody computes this one.
fn asks_listener(filter: &[u8]) -> bool {
    filter.chunks_exact(INSTRUCTION).any(|i| {
        let code = u16::from_le_bytes([i[0], i[1]]);
        let k = u32::from_le_bytes([i[4], i[5], i[6], i[7]]);
        code == BPF_RET_K && k & RET_ACTION == RET_USER_NOTIF
    })
}

/// Mode and newest filter as an image gives them; older images have them for the
/// process only.
fn wanted(core: &CoreEntry, leader: &CoreEntry) -> Result<(SeccompMode, Option<u32>)> {
    let thread = core.thread_core.as_ref();
    let tc = leader.tc.as_ref();
    let (mode, filter) = match thread.and_then(|t| t.seccomp_mode) {
        Some(mode) => (mode, thread.and_then(|t| t.seccomp_filter)),
        None => (
            tc.and_then(|t| t.old_seccomp_mode).unwrap_or_default(),
            tc.and_then(|t| t.old_seccomp_filter),
        ),
    };
    let mode = SeccompMode::try_from(mode)
        .map_err(|_| Error::invalid("core", format!("seccomp mode {mode}")))?;
    Ok((mode, filter))
}

/// Restores the modes and filters of the threads of a process, the leader first,
/// before they lose the right to install any. Filters that all of them have are
/// installed for all at once: a program that wants to bring its threads in step later
/// (`SECCOMP_FILTER_FLAG_TSYNC`) can do so only if they are the same filters.
///
/// # Errors
/// `EACCES` without `CAP_SYS_ADMIN`.
pub(crate) fn restore(
    threads: &mut [Tracee],
    cores: &[CoreEntry],
    filters: &Filters,
) -> Result<()> {
    let Some(leader) = cores.first() else { return Ok(()) };
    let mut modes = vec![];
    let mut chains = vec![];
    for core in cores {
        let (mode, chain) = filters.of(core, leader)?;
        modes.push(mode);
        chains.push(chain);
    }
    if modes.iter().all(|&mode| mode == SeccompMode::Disabled) {
        return Ok(());
    }
    for thread in threads.iter_mut() {
        thread.suspend_seccomp()?;
    }
    let common = (0..chains[0].len())
        .take_while(|&i| chains.iter().all(|c| c.get(i) == chains[0].get(i)))
        .count();
    for (i, ((thread, chain), mode)) in threads.iter_mut().zip(&chains).zip(modes).enumerate() {
        for (position, &id) in chain.iter().enumerate() {
            let shared = position < common;
            if !shared || i == 0 {
                install(thread, filters.get(id)?, if shared { FLAG_TSYNC } else { 0 })?;
            }
        }
        if mode == SeccompMode::Strict {
            thread.call("seccomp strict mode", (libc::SYS_seccomp, [SET_MODE_STRICT, 0, 0]))?;
        }
    }
    Ok(())
}

fn install(thread: &mut Tracee, filter: &SeccompFilter, flags: u64) -> Result<()> {
    let mut script = Script::new(thread);
    let program = script.bytes(&filter.filter).0;
    // struct sock_fprog: number of instructions, their address.
    let fprog = script.words(&[(filter.filter.len() / INSTRUCTION) as u64, program]).0;
    let flags = flags | u64::from(filter.flags.unwrap_or_default());
    script
        .step("installing a seccomp filter", (libc::SYS_seccomp, [SET_MODE_FILTER, flags, fprog]));
    script.run()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn equal_filters_on_equal_ground_are_shared() {
        let mut filters = Filters::default();
        let a = filters.add(None, vec![1; 8], 0).unwrap();
        let b = filters.add(Some(a), vec![2; 8], 0).unwrap();
        assert_eq!(filters.add(None, vec![1; 8], 0).unwrap(), a);
        assert_eq!(filters.add(Some(a), vec![2; 8], 0).unwrap(), b);
        assert_ne!(filters.add(None, vec![2; 8], 0).unwrap(), b);
        assert_ne!(filters.add(Some(a), vec![2; 8], 2).unwrap(), b);
        assert_eq!(filters.chain(b).unwrap(), [a, b]);
    }

    #[test]
    fn bad_chains_are_refused() {
        let filter = |prev| SeccompFilter { filter: vec![0; 8], prev, flags: None };
        let filters = Filters { all: vec![filter(Some(1)), filter(Some(0)), filter(Some(9))] };
        assert!(filters.chain(0).is_err());
        assert!(filters.chain(2).is_err());
        assert!(filters.chain(7).is_err());
    }

    #[test]
    fn filters_with_a_listener_are_noticed() {
        assert!(asks_listener(&[6, 0, 0, 0, 0, 0, 0xc0, 0x7f]));
        assert!(!asks_listener(&[6, 0, 0, 0, 0, 0, 0xff, 0x7f]));
    }
}
