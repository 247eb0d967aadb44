//! Landlock domains: rules that a thread has put on itself (`landlock_restrict_self`), for good.
//!
//! The kernel shows nowhere that a thread is in a domain, let alone the rules of it, so a domain
//! cannot be kept; a restored task would come back without its confinement. So it is refused.
//!
//! That there is one shows when more are stacked on it: there are 16 layers, and a thread without a
//! domain can add them all. A *shadow* of the thread tries it, which has its credentials and ends.
//! The others need none as a rule: whoever may look into the shadow (`get_robust_list`) is in no
//! domain either, since out of one the kernel lets nobody look.
//!
//! Only threads with `no_new_privs` are asked, which `landlock_restrict_self` wants of all but
//! those with `CAP_SYS_ADMIN`, and these. A dumper that is killed while a shadow is there can leave
//! it behind, so none is made where nobody confines himself: not where the host's first process can
//! be looked into, either.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use torpor_tracee::syscall;
use torpor_tracee::{Batch, Outcome, Tracee};

use super::tasks::{Tasks, ask_all};
use super::{Dump, Task};
use crate::error::{Error, Result};
use crate::namespace::NsKind;
use crate::proc;

/// `LANDLOCK_MAX_NUM_LAYERS` of the kernel, since domains can be stacked at all.
const LAYERS: usize = 16;
/// `LANDLOCK_ACCESS_FS_EXECUTE`: a right that all versions know.
const HANDLED: u64 = 1;

/// The first process of a host, and the inode number of the pid namespace that it is seen in
/// (`PROC_PID_INIT_INO`).
const INIT: u64 = 1;
const PIDS_OF_HOST: u64 = 0xEFFF_FFFC;

/// Whether this kernel has Landlock, and has it switched on.
static EXISTS: LazyLock<bool> = LazyLock::new(torpor_sys::process::has_landlock);

/// Threads that may be in a domain: their tasks and their places in them.
type Open = BTreeSet<(usize, usize)>;

/// A shadow of a thread that is in no domain.
struct Witness {
    shadow: Tracee,
    /// Its pid as the tree knows it.
    pid: u64,
    /// The task that it is a child of.
    task: usize,
}

/// Refuses threads that are in a domain. All tasks have been asked for everything else.
///
/// # Errors
/// The refusal; Gone.
pub(super) fn check(cx: &mut Dump<'_>) -> Result<()> {
    if !*EXISTS {
        return Ok(());
    }
    let since = proc::stat(cx.guardian.pid())?.start_time;
    let mut open: Open = (cx.tasks.iter().enumerate())
        .flat_map(|(task, of)| (0..of.threads.len()).map(move |thread| (task, thread)))
        .filter(|&(task, thread)| cx.tasks[task].may_be_confined(thread))
        .collect();
    let pids_of_host = cx.ns.of_kind(NsKind::Pid).find(|ns| ns.inode == PIDS_OF_HOST);
    if let Some(space) = pids_of_host.map(|ns| ns.id) {
        let sees_host = |task: &Task| task.ids.pid_ns_id == Some(space);
        // Where the first one may not look there the others may not either, as a rule: to ask
        // thousands of them takes longer than a witness.
        let first = open.first().copied();
        let is_first = |thread| first == Some(thread);
        vouch(&mut cx.tasks, &mut open, |at, task| is_first(at) && sees_host(task), INIT)?;
        if first.is_some_and(|first| !open.contains(&first)) {
            vouch(&mut cx.tasks, &mut open, |_, task| sees_host(task), INIT)?;
        }
    }
    let (mut witness, mut checked) = (None, Ok(()));
    for task in cx.tasks.live() {
        checked = checked.and_then(|()| check_task(cx, task, since, &mut open, &mut witness));
    }
    checked.and(dismiss(cx, since, witness))
}

fn check_task(
    cx: &mut Dump<'_>,
    task: usize,
    since: u64,
    open: &mut Open,
    witness: &mut Option<Witness>,
) -> Result<()> {
    let last = |open: &Open| open.range((task, 0)..(task + 1, 0)).next_back().copied();
    // A witness of another user may be none for any of them, and so may one of the process itself
    // be if that is not dumpable.
    let mut helps = true;
    while last(open).is_some() {
        if helps && let Some(witness) = witness {
            let before = open.len();
            vouch(&mut cx.tasks, open, |(other, _), _| other == task, witness.pid)?;
            helps = open.len() < before || witness.task != task;
        }
        let Some(thread) = last(open) else { break };
        open.remove(&thread);
        dismiss(cx, since, witness.take())?;
        *witness = Some(testify(cx, task, thread.1, since)?);
    }
    Ok(())
}

/// Takes those of the chosen threads out of `open` that may look into the process with this pid.
fn vouch(
    tasks: &mut Tasks,
    open: &mut Open,
    is_chosen: impl Fn((usize, usize), &Task) -> bool,
    pid: u64,
) -> Result<()> {
    let (mut threads, mut keys) = (Vec::new(), Vec::new());
    let mut chosen = BTreeSet::new();
    for (task, of) in tasks.iter_mut().enumerate() {
        let own = (0..of.threads.len()).map(|thread| (task, thread));
        chosen.extend(own.clone().filter(|&at| open.contains(&at) && is_chosen(at, of)));
        keys.extend(own);
        threads.extend(&mut of.threads);
    }
    let ask = |_, batch: &mut Batch<'_>| {
        let (head, len) = (batch.space(8).addr, batch.space(8).addr);
        batch.call((libc::SYS_get_robust_list, [pid, head.0, len.0]))
    };
    let may_look = |call, out: &Outcome| out.result(call).is_ok();
    let found = ask_all(&mut threads, |number| chosen.contains(&keys[number]), ask, may_look)?;
    for (number, _) in found.into_iter().filter(|(_, may_look)| *may_look) {
        open.remove(&keys[number]);
    }
    Ok(())
}

/// Makes a shadow of a thread, which is refused if that is in a domain, or there is no room for one:
/// nobody may come back less confined.
fn testify(cx: &mut Dump<'_>, task: usize, thread: usize, since: u64) -> Result<Witness> {
    cx.guardian.watch(&super::twin::undo(cx.tasks[task].pid, since))?;
    let threads = &mut cx.tasks[task].threads;
    // The room of the first thread is the largest.
    if let (Some((first, others)), Some(other)) = (threads.split_first_mut(), thread.checked_sub(1))
        && let Some(other) = others.get_mut(other)
    {
        other.share_stub(first, 0);
    }
    let own = &mut threads[thread];
    let tid = own.tid();
    let born = own.spawn_shadow();
    if let (Some((first, others)), Some(other)) = (threads.split_first_mut(), thread.checked_sub(1))
        && let Some(other) = others.get_mut(other)
    {
        other.share_stub(first, thread);
    }
    let found = match born {
        Ok((shadow, pid)) => {
            let mut witness = Witness { shadow, pid, task };
            let found = layers(&mut witness.shadow);
            if !matches!(found, Ok(0)) {
                dismiss(cx, since, Some(witness))?;
                found
            } else {
                return Ok(witness);
            }
        }
        Err(e) => Err(e),
    };
    match found {
        Ok(layers) => {
            let object = format!("its Landlock domain ({layers} of {LAYERS} layers)");
            let reason = "cannot be kept: the kernel does not tell its rules, and without them the \
                          task would come back unconfined";
            Err(Error::refused(tid, object, reason))
        }
        // No room for a process more (`pids.max`, `RLIMIT_NPROC`), or no memory.
        Err(e @ torpor_tracee::Error::Remote { .. }) => {
            let object = "whether it is confined by Landlock";
            let reason = format!(
                "cannot be told: {e}; make room for one process more (pids.max, RLIMIT_NPROC)"
            );
            Err(Error::refused(tid, object, reason))
        }
        Err(e) => Err(e.into()),
    }
}

/// How many layers the domain of a shadow has; 0 if it has none.
fn layers(shadow: &mut Tracee) -> torpor_tracee::Result<usize> {
    let mut batch = shadow.batch();
    let rules = batch.bytes(&HANDLED.to_le_bytes()).0;
    let size = size_of_val(&HANDLED) as u64;
    let created = batch.must((libc::SYS_landlock_create_ruleset, [rules, size, 0]));
    let unprivileged = batch.must(syscall::prctl(libc::PR_SET_NO_NEW_PRIVS, [1]));
    // All files are closed in a shadow: the set of rules is number 0.
    let added = [(); LAYERS].map(|()| batch.call((libc::SYS_landlock_restrict_self, [0, 0])));
    let out = batch.run()?;
    out.expect(created, || "landlock_create_ruleset".to_owned())?;
    out.expect(unprivileged, || "PR_SET_NO_NEW_PRIVS".to_owned())?;
    let too_many = |e: std::io::Error| e.raw_os_error() == Some(libc::E2BIG);
    let missing = added.iter().filter(|&&layer| out.result(layer).is_err_and(too_many)).count();
    // Any other error is no sign of a domain.
    for layer in added.into_iter().take(LAYERS - missing) {
        out.expect(layer, || "landlock_restrict_self".to_owned())?;
    }
    Ok(missing)
}

/// Ends a shadow.
fn dismiss(cx: &mut Dump<'_>, since: u64, witness: Option<Witness>) -> Result<()> {
    let Some(Witness { shadow, pid, task }) = witness else { return Ok(()) };
    shadow.end_twin();
    let original = cx.tasks[task].pid;
    if let Some(first) = cx.tasks[task].threads.first_mut() {
        first.reap_shadow(pid)?;
    }
    cx.guardian.forget(&super::twin::undo(original, since))
}
