//! Landlock domains: rules that a thread has put on itself (`landlock_restrict_self`), for good.
//!
//! The kernel shows nowhere that a thread is in a domain, let alone the rules of it, so a domain
//! cannot be kept; a restored task would come back without its confinement. So it is refused.
//!
//! That there is one shows when more are stacked on it: there are 16 layers, and a thread without a
//! domain can add them all. A *shadow* of the thread tries it, which has its credentials and ends.
//! The others need none as a rule: whoever may look into a process that is in no domain
//! (`get_robust_list`) is in none either, since out of one the kernel lets nobody look. Such
//! processes are the host's first one, the shadow itself, and any task that is found to be in no
//! domain.
//!
//! All threads are asked. That one has neither `no_new_privs` nor `CAP_SYS_ADMIN`, of which
//! `landlock_restrict_self` wants one, says nothing: a daemon confines itself as root and becomes
//! a user then. So one that has no room for a shadow is refused, whoever it is.
//!
//! To ask a thread takes longer than all that it is asked for, so most are asked to look with
//! everything else: leaders into the host's first process or a task with the same credentials,
//! other threads into that or a shadow of their leader. A process whose memory is not dumpable lets
//! nobody look, and its threads neither: each has a shadow.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use torpor_tracee::{Batch, SIDE_BY_SIDE, Tracee, syscall};

use super::{Dump, Task, twin};
use crate::error::{Error, Result};
use crate::guardian::{Guardian, Undo};
use crate::namespace::NsKind;
use crate::proc;
use crate::task::ask_to_look;

/// `LANDLOCK_MAX_NUM_LAYERS` of the kernel, since domains can be stacked at all.
const LAYERS: usize = 16;
/// `LANDLOCK_ACCESS_FS_EXECUTE`: a right that all versions know.
const HANDLED: u64 = 1;

/// What is said where there is no room for a shadow.
const OBJECT: &str = "whether it is confined by Landlock";
const NO_ROOM: &str = "cannot be told; make room for one process more (pids.max, RLIMIT_NPROC)";

/// The first process of a host, and the inode number of the pid namespace that it is seen in
/// (`PROC_PID_INIT_INO`).
const INIT: u64 = 1;
const PIDS_OF_HOST: u64 = 0xEFFF_FFFC;

/// Whether this kernel has Landlock, and has it switched on.
static EXISTS: LazyLock<bool> = LazyLock::new(torpor_sys::process::has_landlock);

/// Threads that may be in a domain.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    /// Their tasks and their places in them.
    open: BTreeSet<(usize, usize)>,
    /// Pids, in their namespaces, of tasks in no domain, by those who may look into them.
    free: BTreeMap<Kind, u64>,
    /// The number of the host's pid namespace, if tasks are in there.
    host: Option<u32>,
    /// Shadows are younger than this, as start times of tasks are counted.
    since: u64,
}

/// Tasks that may look into each other, as a rule: namespaces of pids and users, user, group and
/// capabilities.
type Kind = (Option<u32>, Option<u32>, [Option<String>; 3]);

fn kind_of(task: &Task) -> Kind {
    let status = |key| task.status.get(key).map(str::to_owned);
    (task.ids.pid_ns_id, task.ids.user_ns_id, ["Uid", "Gid", "CapPrm"].map(status))
}

/// How the other threads of a task show that they are in no domain: into what they look.
#[derive(Debug)]
pub(super) struct LookedInto {
    pub(super) pid: u64,
    shadow: Option<Shadow>,
}

impl LookedInto {
    /// Ends the shadow, if it is one.
    ///
    /// # Errors
    /// Those of [`Shadow::end`].
    pub(super) fn end(self, threads: &mut [Tracee]) -> Result<()> {
        self.shadow.map_or(Ok(()), |shadow| shadow.end(threads))
    }
}

impl Suspects {
    /// Those of the tree, before they have been asked for anything.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(super) fn of(cx: &Dump<'_>) -> Result<Self> {
        if !*EXISTS {
            return Ok(Self::default());
        }
        let all = cx.tasks.iter().enumerate();
        let open = all.flat_map(|(task, of)| (0..of.threads.len()).map(move |n| (task, n)));
        let host = cx.ns.of_kind(NsKind::Pid).find(|ns| ns.inode == PIDS_OF_HOST).map(|ns| ns.id);
        let since = proc::stat(cx.guardian.pid())?.start_time;
        Ok(Suspects { open: open.collect(), free: BTreeMap::new(), host, since })
    }

    /// The process that the leader of a task is to look into, if there is one that it knows.
    pub(super) fn known_to(&self, task: &Task) -> Option<u64> {
        let host = || (self.host.is_some() && task.ids.pid_ns_id == self.host).then_some(INIT);
        self.free.get(&kind_of(task)).copied().or_else(host)
    }

    /// Notes that a thread is in no domain.
    pub(super) fn clear(&mut self, task: usize, thread: usize) {
        self.open.remove(&(task, thread));
    }

    /// Notes that the leader of `task`, the task with this number, is in no domain: it could look
    /// into the process `looked`, or can into another one, or its shadow shows it. Returns what the
    /// other threads are to look into.
    ///
    /// # Errors
    /// Those of [`Shadow::of`].
    pub(super) fn witness(
        &mut self,
        (number, task): (usize, &Task),
        looked: Option<u64>,
        threads: &mut [Tracee],
        guardian: &Guardian,
    ) -> Result<Option<LookedInto>> {
        if !self.open.contains(&(number, 0)) {
            return Ok(None);
        }
        let kind = kind_of(task);
        let seen = match (looked, self.free.get(&kind).copied()) {
            (None, Some(pid)) => {
                self.vouch(number, threads.get_mut(..1).unwrap_or_default(), pid)?;
                (!self.open.contains(&(number, 0))).then_some(pid)
            }
            (looked, _) => looked,
        };
        let sight = match (seen, threads.first_mut()) {
            (Some(pid), _) => LookedInto { pid, shadow: None },
            (None, Some(leader)) => {
                let shadow = Shadow::of(leader, leader.tid(), guardian, self.since)?;
                LookedInto { pid: shadow.pid, shadow: Some(shadow) }
            }
            (None, None) => return Ok(None),
        };
        self.clear(number, 0);
        let own = task.status.ns_pids().last().copied().and_then(|pid| u64::try_from(pid).ok());
        if let Some(own) = own {
            self.free.entry(kind).or_insert(own);
        }
        Ok(Some(sight))
    }

    /// Clears those threads of a task that may look into the process with this pid.
    fn vouch(&mut self, task: usize, threads: &mut [Tracee], pid: u64) -> Result<()> {
        for (chunk, some) in threads.chunks_mut(SIDE_BY_SIDE).enumerate() {
            let numbered = (chunk * SIDE_BY_SIDE..).zip(some);
            let open = numbered.filter(|(number, _)| self.open.contains(&(task, *number)));
            let (mut asked, mut batches) = (Vec::new(), Vec::new());
            for (number, thread) in open {
                let mut batch = thread.batch();
                asked.push((number, ask_to_look(&mut batch, pid)));
                batches.push(batch);
            }
            for ((number, look), out) in asked.into_iter().zip(Batch::run_all(batches)?) {
                if out.result(look).is_ok() {
                    self.clear(task, number);
                }
            }
        }
        Ok(())
    }
}

/// Refuses threads that are in a domain. All tasks have been asked for everything else.
///
/// # Errors
/// The refusal; Gone.
pub(super) fn check(cx: &mut Dump<'_>) -> Result<()> {
    let (mut witness, mut checked) = (None, Ok(()));
    for task in cx.tasks.live() {
        checked = checked.and_then(|()| check_task(cx, task, &mut witness));
    }
    checked.and(dismiss(cx, witness))
}

/// A shadow of a thread of a task.
type Witness = (usize, Shadow);

fn check_task(cx: &mut Dump<'_>, task: usize, witness: &mut Option<Witness>) -> Result<()> {
    let last = |open: &BTreeSet<_>| open.range((task, 0)..(task + 1, 0)).next_back().copied();
    // A witness of another user may be none for any of them, and so may one of the process itself
    // be if that is not dumpable. In another pid namespace its pid is another process.
    let mut helps = true;
    while last(&cx.suspects.open).is_some() {
        if helps && let Some((of, shadow)) = witness {
            let before = cx.suspects.open.len();
            if cx.tasks[*of].ids.pid_ns_id == cx.tasks[task].ids.pid_ns_id {
                cx.suspects.vouch(task, &mut cx.tasks[task].threads, shadow.pid)?;
            }
            helps = cx.suspects.open.len() < before || *of != task;
        }
        let Some((_, thread)) = last(&cx.suspects.open) else { break };
        cx.suspects.clear(task, thread);
        dismiss(cx, witness.take())?;
        *witness = Some((task, testify(cx, task, thread)?));
    }
    Ok(())
}

/// Makes a shadow of any thread.
fn testify(cx: &mut Dump<'_>, task: usize, thread: usize) -> Result<Shadow> {
    let Task { pid, threads, .. } = &mut cx.tasks[task];
    let (pid, since) = (*pid, cx.suspects.since);
    let Some((first, others)) = threads.split_first_mut() else { return Err(Error::Gone { pid }) };
    let Some(other) = thread.checked_sub(1).and_then(|other| others.get_mut(other)) else {
        return Shadow::of(first, pid, &cx.guardian, since);
    };
    // The room of the first thread is the largest.
    other.share_stub(first, 0);
    let shadow = Shadow::of(other, pid, &cx.guardian, since);
    other.share_stub(first, thread);
    shadow
}

/// Ends a witness.
fn dismiss(cx: &mut Dump<'_>, witness: Option<Witness>) -> Result<()> {
    witness.map_or(Ok(()), |(task, shadow)| shadow.end(&mut cx.tasks[task].threads))
}

/// A shadow of a thread that is in no domain.
#[derive(Debug)]
pub(super) struct Shadow {
    shadow: Tracee,
    /// Its pid as its process knows it.
    pub(super) pid: u64,
    guardian: Guardian,
    undo: Undo,
}

impl Shadow {
    /// Makes one of a thread, whose process is known as `pid`. The thread is refused if it is in a
    /// domain, or there is no room for a shadow: nobody may come back less confined.
    fn of(own: &mut Tracee, pid: i32, guardian: &Guardian, since: u64) -> Result<Self> {
        let undo = twin::undo(pid, since);
        guardian.watch(&undo)?;
        let guardian = guardian.clone();
        let found = match own.spawn_shadow() {
            Ok((shadow, pid)) => {
                let mut shadow = Shadow { shadow, pid, guardian, undo };
                match layers(&mut shadow.shadow) {
                    Ok(0) => return Ok(shadow),
                    found => shadow.end(std::slice::from_mut(own)).map(|()| found)?,
                }
            }
            Err(e) => {
                // Nothing was made, and what is registered would be looked for to the end.
                guardian.forget(&undo)?;
                Err(e)
            }
        };
        match found {
            Ok(layers) => {
                let object = format!("its Landlock domain ({layers} of {LAYERS} layers)");
                let reason = "cannot be kept: the kernel does not tell its rules, and without them \
                              the task would come back unconfined; start it without Landlock";
                Err(Error::refused(own.tid(), object, reason))
            }
            // No room for a process more (`pids.max`, `RLIMIT_NPROC`), or no memory.
            Err(e @ torpor_tracee::Error::Remote { .. }) => {
                Err(Error::refused(own.tid(), OBJECT, format!("{NO_ROOM}: {e}")))
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Ends it, which the first of the threads of its process reaps.
    ///
    /// # Errors
    /// If the process or the guardian is gone.
    pub(super) fn end(self, threads: &mut [Tracee]) -> Result<()> {
        let Shadow { shadow, pid, guardian, undo } = self;
        shadow.end_twin();
        if let Some(first) = threads.first_mut() {
            first.reap_shadow(pid)?;
        }
        guardian.forget(&undo)
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
