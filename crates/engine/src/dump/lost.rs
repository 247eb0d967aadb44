//! What is not kept, and can be done without as a rule: it is named in a warning, and refused if
//! everything is wanted (`--strict`).

use std::collections::HashSet;

use torpor_sys::ptrace;
use torpor_tracee::syscall;
use torpor_tracee::{Batch, Call, Outcome, Slot, Tracee};

use super::tasks::ask_all;
use super::{Dump, Task};
use crate::error::Result;
use crate::proc;

/// `MPOL_F_ADDR`: the policy of the mapping at an address.
const OF_ADDRESS: u64 = 2;
/// How many mappings are asked for at once: their answers must find room, beside others.
const AT_ONCE: usize = 4000;
/// Operations of keyctl(2).
const GET_KEYRING_ID: u64 = 0;
const DESCRIBE: u64 = 6;
const READ: u64 = 11;
/// The keyrings of a thread, of its process, of its session, as keyctl(2) names them.
const OF_THREAD: u64 = (-1i64).cast_unsigned();
const OF_PROCESS: u64 = (-2i64).cast_unsigned();
const OF_SESSION: u64 = (-3i64).cast_unsigned();
/// `ARCH_GET_CPUID` and `ARCH_GET_UNTAG_MASK` of arch_prctl(2).
const GET_CPUID: u64 = 0x1011;
const GET_UNTAG_MASK: u64 = 0x4001;
/// `PR_SPEC_PRCTL` (it can be chosen), `PR_SPEC_ENABLE`, and that it is off in any way.
const SPEC_OWN: u64 = 1;
const SPEC_ENABLED: u64 = 1 << 1;
const SPEC_DISABLED: u64 = 1 << 2 | 1 << 3 | 1 << 4;
/// How many keys of a keyring are looked at, and how much of a description.
const KEYS: usize = 64;
const TEXT: usize = 128;

/// What processes and threads have asked the kernel for.
///
/// Who asks for the keyring of its session, and has none, gets that of its user, which is where its
/// keys are searched for in any case.
pub(super) fn check(cx: &mut Dump<'_>) -> Result<()> {
    let (mut threads, mut leads) = (Vec::new(), Vec::new());
    for (task, Task { threads: all, maps, .. }) in cx.tasks.iter_mut().enumerate() {
        let starts = || maps.iter().map(|map| map.start).collect::<Vec<u64>>();
        leads.extend((0..all.len()).map(|thread| (thread == 0).then(|| (task, starts()))));
        threads.extend(all);
    }
    let tids: Vec<i32> = threads.iter().map(|thread| thread.tid()).collect();
    let ask = |number: usize, batch: &mut Batch<'_>| {
        let lead = leads[number].as_ref();
        (OfThread::ask(batch), lead.map(|(_, maps)| OfProcess::ask(batch, first_of(maps).0)))
    };
    let answer = |(thread, process): (OfThread, Option<OfProcess>), out: &Outcome| {
        (thread.answer(out), process.map(|process| process.answer(out)))
    };
    let found = ask_all(&mut threads, |_| true, ask, answer)?;
    let mut sessions = HashSet::new();
    for (number, (of_thread, of_process)) in found {
        let leave_out = |object| cx.leave_out(tids[number], object, "is not kept");
        of_thread.into_iter().try_for_each(leave_out)?;
        if let (Some((task, maps)), Some(found)) = (&leads[number], of_process) {
            found.lost.into_iter().try_for_each(leave_out)?;
            check_policies(cx, *task, found.chosen, first_of(maps).1)?;
            check_session(cx, *task, found.session.filter(|&ring| sessions.insert(ring)))?;
        }
    }
    cx.tasks.iter().try_for_each(|task| check_threads(cx, task))
}

/// Mappings that are asked for with everything else, and the others.
fn first_of(maps: &[u64]) -> (&[u64], &[u64]) {
    maps.split_at(maps.len().min(AT_ONCE))
}

/// Mappings that take their pages from chosen nodes of memory (mbind(2)): so many are known to, and
/// those of `others` were not asked for yet.
fn check_policies(cx: &mut Dump<'_>, task: usize, mut chosen: usize, others: &[u64]) -> Result<()> {
    for maps in others.chunks(AT_ONCE) {
        let mut batch = cx.tasks.remote(task)?.batch();
        let policies = Policies::ask(&mut batch, maps);
        chosen += policies.chosen(&batch.run()?);
    }
    if chosen == 0 {
        return Ok(());
    }
    let reason = format!("is not kept for {chosen} of them");
    cx.leave_out(cx.tasks[task].pid, "the NUMA policy of its mappings (mbind)", &reason)
}

/// What the session of a task has: its keyring, if nobody has looked at that, and a nice value.
fn check_session(cx: &mut Dump<'_>, task: usize, keyring: Option<u64>) -> Result<()> {
    if let Some(ring) = keyring {
        check_keyring(cx, task, ring)?;
    }
    let pid = cx.tasks[task].pid;
    let leads = cx.tasks[task].stat.sid == pid;
    if leads && proc::read(pid, "autogroup").is_ok_and(|text| !text.trim().ends_with(" 0")) {
        cx.leave_out(pid, "the nice value of its session (autogroup)", "is not kept")?;
    }
    Ok(())
}

/// What a tracer sees of each thread.
fn check_threads(cx: &Dump<'_>, task: &Task) -> Result<()> {
    for tid in task.threads.iter().map(Tracee::tid) {
        let lost = [
            (
                ptrace::has_dispatch(tid),
                "its system calls that come back (PR_SET_SYSCALL_USER_DISPATCH)",
            ),
            (ptrace::has_ports(tid), "its ports of devices (ioperm)"),
        ];
        let mut lost = lost.into_iter().filter(|(is, _)| *is);
        lost.try_for_each(|(_, object)| cx.leave_out(tid, object, "is not kept"))?;
    }
    Ok(())
}

/// Whether a call has answered, and `test` holds of its answer.
fn is(out: &Outcome, call: Call, test: fn(u64) -> bool) -> bool {
    out.result(call).is_ok_and(test)
}

fn those_of<const N: usize>(lost: [(bool, &'static str); N]) -> Vec<&'static str> {
    lost.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect()
}

/// The questions about the policies of mappings.
struct Policies(Vec<(Call, Slot)>);

impl Policies {
    /// Asks for the mappings at these addresses.
    fn ask(batch: &mut Batch<'_>, maps: &[u64]) -> Self {
        let of = |&map: &u64| {
            let mode = batch.space(4);
            (batch.call((libc::SYS_get_mempolicy, [mode.addr.0, 0, 0, map, OF_ADDRESS])), mode)
        };
        Policies(maps.iter().map(of).collect())
    }

    /// How many mappings have one of their own.
    fn chosen(&self, out: &Outcome) -> usize {
        let has = |(call, mode): &&(_, _)| out.result(*call).is_ok() && out.u32_at(*mode, 0) != 0;
        self.0.iter().filter(has).count()
    }
}

/// What a process has.
struct FoundOfProcess {
    /// The keyring of its session.
    session: Option<u64>,
    /// What is there and is not kept.
    lost: Vec<&'static str>,
    /// How many of the mappings that were asked for have a policy of their own.
    chosen: usize,
}

/// The questions to a process.
struct OfProcess {
    policies: Policies,
    keyrings: [Call; 2],
    segments: Call,
    tags: (Call, Slot),
}

impl OfProcess {
    fn ask(batch: &mut Batch<'_>, maps: &[u64]) -> Self {
        let descriptor = batch.space(8).addr.0;
        let mask = batch.space(8);
        OfProcess {
            policies: Policies::ask(batch, maps),
            keyrings: [OF_PROCESS, OF_SESSION]
                .map(|ring| batch.call((libc::SYS_keyctl, [GET_KEYRING_ID, ring, 0]))),
            segments: batch.call((libc::SYS_modify_ldt, [0, descriptor, 8])),
            tags: (batch.call((libc::SYS_arch_prctl, [GET_UNTAG_MASK, mask.addr.0])), mask),
        }
    }

    fn answer(self, out: &Outcome) -> FoundOfProcess {
        let [process, session] = self.keyrings;
        let (tags, mask) = self.tags;
        let tagged = out.result(tags).is_ok() && out.u64_at(mask, 0) != u64::MAX;
        let lost = those_of([
            (is(out, process, |_| true), "its own keyring"),
            (is(out, self.segments, |v| v > 0), "its table of segments (modify_ldt)"),
            (tagged, "its tagged addresses (ARCH_ENABLE_TAGGED_ADDR)"),
        ]);
        let session = out.result(session).ok();
        FoundOfProcess { session, lost, chosen: self.policies.chosen(out) }
    }
}

/// The questions to a thread.
struct OfThread {
    keyring: Call,
    speculation: [Call; 3],
    cpuid: Call,
}

impl OfThread {
    fn ask(batch: &mut Batch<'_>) -> Self {
        let speculation = |what| syscall::prctl(libc::PR_GET_SPECULATION_CTRL, [what]);
        OfThread {
            keyring: batch.call((libc::SYS_keyctl, [GET_KEYRING_ID, OF_THREAD, 0])),
            speculation: [0, 1, 2].map(|what| batch.call(speculation(what))),
            cpuid: batch.call((libc::SYS_arch_prctl, [GET_CPUID, 0])),
        }
    }

    /// What is there and is not kept.
    fn answer(self, out: &Outcome) -> Vec<&'static str> {
        let [store, branch, flush] = self.speculation;
        let disabled = |call| is(out, call, |v| v & SPEC_OWN != 0 && v & SPEC_DISABLED != 0);
        let flushed = is(out, flush, |v| v & SPEC_OWN != 0 && v & SPEC_ENABLED != 0);
        those_of([
            (is(out, self.keyring, |_| true), "its thread's own keyring"),
            (disabled(store) || disabled(branch) || flushed, "its rules for speculation (prctl)"),
            (is(out, self.cpuid, |v| v == 0), "the fault that it gets from CPUID (arch_prctl)"),
        ])
    }
}

/// The keys in the keyring of a session that a task is in.
fn check_keyring(cx: &mut Dump<'_>, task: usize, ring: u64) -> Result<()> {
    let leader = cx.tasks.remote(task)?;
    let mut batch = leader.batch();
    let ids = batch.space(KEYS * 4);
    let read = batch.call((libc::SYS_keyctl, [READ, ring, ids.addr.0, (KEYS * 4) as u64]));
    let out = batch.run()?;
    let len = out.result(read).unwrap_or(0);
    let count = usize::try_from(len / 4).unwrap_or(0).min(KEYS);
    let keys = (0..count).map(|n| u64::from(out.u32_at(ids, n * 4)));
    let mut batch = leader.batch();
    let asked: Vec<_> = std::iter::once(ring)
        .chain(keys)
        .map(|key| {
            let text = batch.space(TEXT);
            let args = [DESCRIBE, key, text.addr.0, TEXT as u64];
            (batch.call((libc::SYS_keyctl, args)), text)
        })
        .collect();
    let out = batch.run()?;
    // Type, owner, rights, and last the name.
    let name = |&(call, text): &(Call, Slot)| {
        out.result(call).ok()?;
        let text = out.bytes(text).split(|&byte| byte == 0).next()?;
        String::from_utf8_lossy(text).splitn(5, ';').last().map(str::to_owned)
    };
    let names: Vec<String> = asked.iter().map(|key| name(key).unwrap_or_default()).collect();
    // Everybody has the user's keyrings, by name.
    let own = names.iter().skip(1).filter(|name| !name.starts_with("_uid")).count();
    if own == 0 || names.first().is_some_and(|ring| ring.starts_with("_uid_ses.")) {
        return Ok(());
    }
    let object = format!("the keyring of its session ({})", names[0]);
    cx.leave_out(cx.tasks[task].pid, &object, &format!("is not kept, with its keys ({own})"))
}
