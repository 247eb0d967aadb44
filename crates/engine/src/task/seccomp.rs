//! Seccomp: modes of threads, and the filters that tasks share.
//!
//! A dump keeps a filter once, with the number of the one that was installed before it;
//! a thread knows its newest. `torpor_policy::seccomp` reads that. Filters are installed while tracing suspends them, so
//! that they forbid nothing to the rest of the restore.

use std::sync::Arc;

use torpor_images::proto::{SeccompEntry, SeccompFilter, SeccompMode};
use torpor_images::{ImageDir, kind};
use torpor_policy::seccomp::{Filter, INSTRUCTION, Seccomp};
use torpor_sys::number::short;
use torpor_sys::ptrace::{seccomp_filter, seccomp_filter_flags};
use torpor_tracee::Tracee;

use super::script::Script;
use crate::error::{Context, Error, Result};
use crate::proc;

const SET_MODE_STRICT: u64 = libc::SECCOMP_SET_MODE_STRICT as u64;
const SET_MODE_FILTER: u64 = libc::SECCOMP_SET_MODE_FILTER as u64;
const FLAG_TSYNC: u64 = libc::SECCOMP_FILTER_FLAG_TSYNC;
const RET_ACTION: u32 = libc::SECCOMP_RET_ACTION;
const RET_USER_NOTIF: u32 = libc::SECCOMP_RET_USER_NOTIF;
const BPF_RET_K: u16 = short((libc::BPF_RET | libc::BPF_K).cast_signed());

/// All filters of a tree that is dumped.
#[derive(Debug, Default)]
pub struct Filters {
    all: Vec<SeccompFilter>,
}

impl Filters {
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

/// Restores the modes and filters of the threads of a process, the leader first,
/// before they lose the right to install any. Filters that all of them have are
/// installed for all at once: a program that wants to bring its threads in step later
/// (`SECCOMP_FILTER_FLAG_TSYNC`) can do so only if they are the same filters.
///
/// # Errors
/// `EACCES` without `CAP_SYS_ADMIN`.
pub(crate) fn restore(threads: &mut [Tracee], all: &[Seccomp]) -> Result<()> {
    let Some(leader) = all.first().filter(|_| all.iter().any(|one| *one != Seccomp::Free)) else {
        return Ok(());
    };
    for thread in threads.iter_mut() {
        thread.suspend_seccomp()?;
    }
    let is_common = |(position, filter): &(usize, &Arc<Filter>)| {
        all.iter()
            .all(|one| one.filters().get(*position).is_some_and(|own| Arc::ptr_eq(own, filter)))
    };
    let common = leader.filters().iter().enumerate().take_while(is_common).count();
    for (index, (thread, wanted)) in threads.iter_mut().zip(all).enumerate() {
        for (position, filter) in wanted.filters().iter().enumerate() {
            let shared = position < common;
            if !shared || index == 0 {
                install(thread, filter, if shared { FLAG_TSYNC } else { 0 })?;
            }
        }
        if *wanted == Seccomp::Strict {
            thread.call("seccomp strict mode", (libc::SYS_seccomp, [SET_MODE_STRICT, 0, 0]))?;
        }
    }
    Ok(())
}

fn install(thread: &mut Tracee, filter: &Filter, flags: u64) -> Result<()> {
    let mut script = Script::new(thread);
    let program = script.bytes(&filter.program).0;
    // struct sock_fprog: number of instructions, their address.
    let fprog = script.words(&[(filter.program.len() / INSTRUCTION) as u64, program]).0;
    let flags = flags | u64::from(filter.flags);
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
        assert_eq!(filters.all[b as usize].prev, Some(a));
    }

    #[test]
    fn filters_with_a_listener_are_noticed() {
        assert!(asks_listener(&[6, 0, 0, 0, 0, 0, 0xc0, 0x7f]));
        assert!(!asks_listener(&[6, 0, 0, 0, 0, 0, 0xff, 0x7f]));
    }
}
