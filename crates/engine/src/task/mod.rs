//! Tasks: what the kernel keeps for a process and its threads that is neither memory
//! nor files. One file each for what belongs together, with its dump and its restore.
//!
//! Both halves are driven from here, because the order matters. A dump asks each
//! thread everything in one batch. A restore works through [`restore`] once the memory
//! and the files of a process are in place; then, when everything else of the whole
//! tree is done and the stub is gone from the process, each thread is [`dress`]ed and
//! job control put back by [`restore_stop`].

pub(crate) mod creds;
pub(crate) mod ia32;
pub(crate) mod keys;
mod limits;
pub(crate) mod onlookers;
mod process;
mod registers;
mod resources;
mod sched;
mod script;
mod seccomp;
mod signals;
mod thread;
mod timers;
pub(crate) mod unkept;

use torpor_images::proto::core_entry::March;
use torpor_images::proto::{CoreEntry, SeccompMode, TaskCoreEntry, ThreadCoreEntry};
use torpor_policy::memory::ProcessMemory;
use torpor_policy::process::{ProcessRest, ThreadRest};
use torpor_policy::{Credentials, ProcessLimits, Scheduling, Seccomp};
use torpor_tracee::{Batch, Call, Mapping, Outcome, SIDE_BY_SIDE, Tracee};

pub(crate) use creds::lsm;
pub(crate) use limits::{hard_limits, loginuid, oom_score_adj, own_hard_limits, raise_files};
pub use process::MmFlags;
pub use registers::ThreadRegisters;
pub(crate) use sched::processors;
pub(crate) use script::Script;
pub use seccomp::Filters;
#[cfg(test)]
pub(crate) use seccomp::restore as restore_filters;
pub use signals::restore_stop;
pub(crate) use signals::{has_pending, take_signal};
pub(crate) use thread::ask_to_look;

use crate::error::{Error, Result};
use crate::file::io_uring::UserQuestion;
use crate::namespace::user::IdMaps;
use crate::{oom, proc};
use signals::Pending;
use unkept::Unkept;

/// What the dump of a task needs to know about the tree.
pub struct AboutTree<'a> {
    /// Ids of the tree's user namespace.
    pub maps: &'a IdMaps,
    /// The id that a thread has for itself, for one in the supervisor's pid namespace.
    pub own_tid: &'a dyn Fn(i32) -> Option<i32>,
    /// Collects the seccomp filters of all tasks.
    pub filters: &'a mut Filters,
}

impl std::fmt::Debug for AboutTree<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AboutTree").field("maps", &self.maps).finish_non_exhaustive()
    }
}

/// The state of a process, as its images hold it.
#[derive(Debug)]
pub struct ProcessState {
    /// The leader's, with `tc`.
    pub leader: ThreadState,
    /// What belongs into `mm_entry`.
    pub mm: MmFlags,
    /// What the process has that is not kept.
    pub unkept: Unkept,
}

/// The state of a thread.
#[derive(Debug)]
pub struct ThreadState {
    /// As its image holds it. What is still to be filled in: `ids`, `cg_set`.
    pub core: CoreEntry,
    /// What it has that is not kept.
    pub unkept: Vec<&'static str>,
    /// Whether there is a process that it was to look into, and it may.
    pub may_look: bool,
    /// Whether it has used io_uring.
    pub uses_io_uring: bool,
}

/// What procfs says of a stopped process.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// `/proc/PID/stat`.
    pub stat: &'a proc::Stat,
    /// `/proc/PID/task/TID/status` of each thread.
    pub statuses: &'a [proc::Status],
    /// What has files of its own.
    pub proc_files: &'a ProcFiles,
    /// Its mappings.
    pub maps: &'a [Mapping],
    /// Whether it runs a 32-bit program.
    pub is_32bit: bool,
}

/// What each has a file of its own for in `/proc/PID`.
#[derive(Debug, Default)]
pub struct ProcFiles {
    /// The text of `timers`.
    timers: String,
    loginuid: Option<u32>,
    oom_score_adj: Option<i32>,
    coredump_filter: Option<u32>,
}

impl ProcFiles {
    /// Reads them.
    ///
    /// # Errors
    /// If the task is gone, or one of these files of procfs cannot be read.
    pub fn of(pid: i32) -> Result<Self> {
        Ok(ProcFiles {
            timers: proc::read(pid, "timers")?,
            loginuid: loginuid(pid)?,
            oom_score_adj: limits::oom_score_adj(pid)?,
            coredump_filter: process::coredump_filter(pid)?,
        })
    }
}

/// A process that is to be described: its stopped threads, the leader first, and what is known
/// of it.
#[derive(Debug)]
pub struct Process<'a> {
    /// They must have their stub, but nothing may have been run in them that pending signals
    /// could disturb.
    pub threads: &'a mut [Tracee],
    /// What procfs says.
    pub seen: Seen<'a>,
    /// The pid, as it knows it, of a process that its leader is to look into.
    pub look_into: Option<u64>,
}

/// Takes the state of a thread that does not lead its process, by the ids of both.
pub(crate) type OtherThread<'a> = dyn FnMut(i32, i32, ThreadState) -> Result<()> + 'a;

/// Describes all threads of a process but its leader: while one answers the next ones are asked.
/// What there is to say of them is handed over as it comes. `look_into` is the pid, as the process
/// knows it, of one that they are to look into.
///
/// # Errors
/// Gone; what cannot be kept is refused by name; those of `other`.
pub fn dump_others(
    Process { threads, seen, .. }: &mut Process<'_>,
    look_into: Option<u64>,
    tree: &mut AboutTree<'_>,
    other: &mut OtherThread<'_>,
) -> Result<()> {
    let mut threads: Vec<_> = threads.iter_mut().zip(seen.statuses).skip(1).collect();
    for some in threads.chunks_mut(SIDE_BY_SIDE) {
        let states = dump_threads(some, seen.is_32bit, look_into, tree)?;
        for ((thread, _), state) in some.iter().zip(states) {
            other(thread.pid(), thread.tid(), state)?;
        }
    }
    Ok(())
}

/// Describes some processes by their leaders: while one answers the next ones are asked.
///
/// # Errors
/// Gone; what cannot be kept is refused by name.
pub fn dump_leaders(
    processes: &mut [Process<'_>],
    tree: &mut AboutTree<'_>,
) -> Result<Vec<ProcessState>> {
    let (mut batches, mut asked) = (Vec::new(), Vec::new());
    for Process { threads, seen, look_into } in processes.iter_mut() {
        let Some((leader, status)) = threads.first_mut().zip(seen.statuses.first()) else {
            continue;
        };
        let (batch, questions) = ProcessQuestions::ask(leader, status, *seen, *look_into, tree)?;
        batches.push(batch);
        asked.push(questions);
    }
    let answers = asked.into_iter().zip(Batch::run_all(batches)?);
    let leaders = processes.iter_mut().filter_map(|Process { threads, seen, .. }| {
        threads.first_mut().map(|leader| (leader, seen.proc_files))
    });
    let states = leaders.zip(answers);
    states.map(|((leader, set), (asked, out))| asked.answer(leader, &out, set)).collect()
}

/// What only the process itself knows, with what is known of it by then.
struct ProcessQuestions {
    tc: TaskCoreEntry,
    outside: ThreadCoreEntry,
    inside: ThreadQuestions,
    personality: thread::PersonalityQuestion,
    actions: signals::ActionQuestions,
    timers: timers::Questions,
    limits: limits::Questions,
    process: process::Questions,
    unkept: unkept::OfProcess,
}

impl ProcessQuestions {
    fn ask<'t>(
        tracee: &'t mut Tracee,
        status: &proc::Status,
        Seen { stat, proc_files, maps, is_32bit, .. }: Seen<'_>,
        look_into: Option<u64>,
        tree: &mut AboutTree<'_>,
    ) -> Result<(Batch<'t>, Self)> {
        // Of a leader that has ended the kernel shows less than of its other threads.
        let pid = tracee.tid();
        let signals = signals::pending(tracee, true)?;
        let timers = timers::list(pid, &proc_files.timers, tree.own_tid)?;
        let (task_state, stop_signo) = signals::stop_state(tracee);
        let tc = TaskCoreEntry {
            task_state,
            stop_signo,
            flags: stat.flags,
            // The kernel forgets the signal once the parent has asked for it.
            torpor_stop_reported: (stop_signo.is_some() && stat.exit_code == 0).then_some(true),
            blk_sigset: tracee.signal_mask(),
            comm: stat.comm.clone(),
            signals_s: Some(signals),
            loginuid: proc_files.loginuid,
            oom_score_adj: proc_files.oom_score_adj,
            ..TaskCoreEntry::default()
        };
        let outside = seen_from_outside(tracee, status, tree)?;
        let mut batch = tracee.batch();
        let questions = ProcessQuestions {
            tc,
            inside: ThreadQuestions::ask(&mut batch, is_32bit, look_into, &outside),
            outside,
            personality: thread::ask_personality(&mut batch),
            actions: signals::ask_actions(&mut batch),
            timers: timers::ask(&mut batch, timers),
            limits: limits::ask(&mut batch, limits::all()),
            process: process::ask(&mut batch),
            unkept: unkept::OfProcess::ask(&mut batch, maps),
        };
        Ok((batch, questions))
    }

    fn answer(
        self,
        tracee: &mut Tracee,
        out: &Outcome,
        proc_files: &ProcFiles,
    ) -> Result<ProcessState> {
        let mut tc = self.tc;
        tc.personality = self.personality.answer(out)?;
        tc.sigactions = self.actions.answer(out, self.inside.robust_list.is_some())?;
        tc.timers = Some(self.timers.answer(out)?);
        tc.rlimits = Some(self.limits.answer(out)?);
        let mm = self.process.answer(out, proc_files.coredump_filter, &mut tc)?;
        let mut leader = self.inside.answer(tracee, out, self.outside)?;
        // It is the process' one.
        if let Some(thread) = &mut leader.core.thread_core {
            thread.blk_sigset = None;
        }
        leader.core.tc = Some(tc);
        Ok(ProcessState { leader, mm, unkept: self.unkept.answer(out) })
    }
}

/// Describes up to [`SIDE_BY_SIDE`] threads: while one answers the next ones are asked.
fn dump_threads(
    threads: &mut [(&mut Tracee, &proc::Status)],
    is_32bit: bool,
    look_into: Option<u64>,
    tree: &mut AboutTree<'_>,
) -> Result<Vec<ThreadState>> {
    let outside =
        threads.iter_mut().map(|(tracee, status)| seen_from_outside(tracee, status, tree));
    let outside = outside.collect::<Result<Vec<_>>>()?;
    let asked = threads.iter_mut().zip(&outside).map(|((tracee, _), outside)| {
        let mut batch = tracee.batch();
        let inside = ThreadQuestions::ask(&mut batch, is_32bit, look_into, outside);
        (batch, inside)
    });
    let (batches, inside): (Vec<_>, Vec<_>) = asked.unzip();
    let answers = inside.into_iter().zip(Batch::run_all(batches)?).zip(outside);
    let cores = threads.iter_mut().zip(answers);
    cores.map(|((tracee, _), ((inside, out), seen))| inside.answer(tracee, &out, seen)).collect()
}

/// The core of a leader that has ended while others run on, with what belongs to the process:
/// its name and its credentials are still seen, and decide who may signal the process.
///
/// # Errors
/// As [`dump_leaders`].
pub(crate) fn ended_leader(
    pid: i32,
    status: &proc::Status,
    comm: Vec<u8>,
    tc: TaskCoreEntry,
    maps: &IdMaps,
) -> Result<CoreEntry> {
    let thread = ThreadCoreEntry {
        creds: Some(creds::dump(pid, pid, status, maps)?),
        comm: Some(comm),
        ..ThreadCoreEntry::default()
    };
    Ok(CoreEntry {
        mtype: March::X8664.into(),
        tc: Some(tc),
        thread_core: Some(thread),
        ..CoreEntry::default()
    })
}

/// What ptrace and `/proc` tell about a thread.
fn seen_from_outside(
    tracee: &mut Tracee,
    status: &proc::Status,
    tree: &mut AboutTree<'_>,
) -> Result<ThreadCoreEntry> {
    let (pid, tid) = (tracee.pid(), tracee.tid());
    let (mode, filter) = seccomp::dump(tracee, status, tree.filters)?;
    let mut entry = ThreadCoreEntry {
        blk_sigset: Some(tracee.signal_mask()),
        signals_p: Some(signals::pending(tracee, false)?),
        creds: Some(creds::dump(pid, tid, status, tree.maps)?),
        seccomp_mode: (mode != SeccompMode::Disabled).then_some(mode.into()),
        seccomp_filter: filter,
        ..ThreadCoreEntry::default()
    };
    thread::dump(tracee, &mut entry)?;
    sched::dump(tracee, &mut entry)?;
    Ok(entry)
}

/// What only the thread itself knows.
struct ThreadQuestions {
    stack: signals::StackQuestion,
    thread: thread::Questions,
    creds: creds::Question,
    /// That of a 32-bit program.
    robust_list: Option<ia32::RobustQuestion>,
    unkept: unkept::OfThread,
    io_uring: UserQuestion,
    look: Option<Call>,
}

impl ThreadQuestions {
    fn ask(
        batch: &mut Batch<'_>,
        is_32bit: bool,
        look_into: Option<u64>,
        outside: &ThreadCoreEntry,
    ) -> Self {
        ThreadQuestions {
            look: look_into.map(|pid| thread::ask_to_look(batch, pid)),
            stack: signals::ask_stack(batch),
            thread: thread::ask(batch),
            creds: creds::ask(batch),
            robust_list: is_32bit.then(|| ia32::ask_robust_list(batch)),
            unkept: unkept::OfThread::ask(batch, outside.creds.as_ref()),
            io_uring: UserQuestion::ask(batch),
        }
    }

    fn answer(
        self,
        tracee: &mut Tracee,
        out: &Outcome,
        mut entry: ThreadCoreEntry,
    ) -> Result<ThreadState> {
        entry.sas = Some(self.stack.answer(out)?);
        let tid_address = self.thread.answer(out, &mut entry)?;
        let is_32bit = self.robust_list.is_some();
        if let Some(question) = self.robust_list {
            question.answer(out, &mut entry)?;
        }
        if let Some(creds) = &mut entry.creds {
            self.creds.answer(out, creds)?;
        }
        let core = CoreEntry {
            mtype: March::X8664.into(),
            thread_info: Some(registers::dump(tracee, tid_address, is_32bit)?),
            thread_core: Some(entry),
            ..CoreEntry::default()
        };
        let may_look = self.look.is_some_and(|look| out.result(look).is_ok());
        let uses_io_uring = self.io_uring.answer(out);
        Ok(ThreadState { core, unkept: self.unkept.answer(out), may_look, uses_io_uring })
    }
}

/// What the restore of a process needs besides its own images.
#[derive(Debug)]
pub struct Images<'a> {
    /// The process' memory, for the flags that the kernel keeps with it.
    pub memory: &'a ProcessMemory,
    /// What else there is of the process.
    pub process: &'a ProcessRest,
    /// What else there is of its threads, the leader first.
    pub threads: &'a [ThreadRest],
    /// Ids of the tree's user namespace, as the supervisor sees them.
    pub maps: &'a IdMaps,
    /// Ids of the user namespace that the process lives in, as that of the tree has them.
    pub own: &'a IdMaps,
    /// What each of its threads may do.
    pub credentials: &'a [Option<Credentials>],
    /// What limits their system calls.
    pub seccomp: &'a [Seccomp],
    /// What the process may use.
    pub limits: &'a ProcessLimits,
    /// How its threads are scheduled.
    pub scheduling: &'a [Scheduling],
    /// The security profile to use instead of those in the image.
    pub profile: Option<&'a str>,
    /// Whether some of its memory may come yet: nobody but its husks may wait for that.
    pub is_lazy: bool,
}

/// The husks of a process that is restored.
#[derive(Debug)]
pub struct Husks<'a> {
    /// The threads, the leader first.
    pub threads: &'a mut [Tracee],
    /// What the images say of them.
    pub images: Images<'a>,
}

/// Gives the husks of some processes most of what they are to be, their rights at last: while one of them works the next
/// ones are looked after. Memory must be mapped and files in place. [`finish`] them when all of the tree have come so far.
///
/// # Errors
/// If the images lack a part of the state; if the kernel refuses one, by name; if a husk has
/// ended.
pub fn restore(processes: &mut [Husks<'_>]) -> Result<()> {
    processes.iter_mut().try_for_each(Husks::prepare)?;
    let most = processes.iter().map(|process| process.threads.len()).max().unwrap_or(0);
    let bits = (0..most).map(|number| restore_threads(processes, number));
    let bits = bits.collect::<Result<Vec<_>>>()?;
    // From here on rights are given up.
    for process in processes.iter_mut() {
        seccomp::restore(process.threads, process.images.seccomp)?;
    }
    for (number, bits) in bits.into_iter().enumerate() {
        restore_rights(processes, number, bits)?;
    }
    Ok(())
}

/// Gives the husks of some processes the rest of what they are to be but registers and blocked signals. No task of the tree may
/// have any rights of this program still: with restartable sequences memory says where a husk goes on, and others may have
/// a part of it. After this no batch must be run in the processes: it could swallow a pending signal.
///
/// # Errors
/// If the kernel refuses a part, by name; if a husk has ended.
pub fn finish(processes: &mut [Husks<'_>]) -> Result<()> {
    let most = processes.iter().map(|process| process.threads.len()).max().unwrap_or(0);
    // A leader's come with its last script.
    for number in 1..most {
        let mut scripts = Vec::new();
        for (thread, rest, images) in numbered(processes, number) {
            if rest.sequences.is_some() {
                thread::leave_section(thread, rest, images.is_lazy)?;
                let mut script = Script::new(thread);
                thread::register_sequences(&mut script, rest);
                scripts.push(script);
            }
        }
        Script::run_all(scripts)?;
    }
    processes.iter_mut().try_for_each(|process| process.queue(Pending::Most))?;
    let scripts = processes.iter_mut().map(Husks::last).collect::<Result<Vec<_>>>()?;
    Script::run_all(scripts.into_iter().flatten().collect())?;
    // Nothing else is run in a process behind this: the signal of a timer that is due would end it early.
    for process in processes.iter_mut() {
        let timers = &process.images.process.timers;
        process.threads.first_mut().map_or(Ok(()), |leader| timers::arm(leader, timers))?;
    }
    processes.iter_mut().try_for_each(|process| process.queue(Pending::Done))
}

/// The threads with this number, of all processes that have so many, with what the images say of them and of
/// the whole process.
fn numbered<'p, 'a: 'p>(
    processes: &'p mut [Husks<'a>],
    number: usize,
) -> impl Iterator<Item = (&'p mut Tracee, &'a ThreadRest, &'p Images<'a>)> {
    processes.iter_mut().filter_map(move |process| {
        let Husks { threads, images } = process;
        Some((threads.get_mut(number)?, images.threads.get(number)?, &*images))
    })
}

/// Gives the threads with this number what their images say, and returns the security bits that each of them has
/// still. A leader gets what is its process'.
fn restore_threads(processes: &mut [Husks<'_>], number: usize) -> Result<Vec<u64>> {
    let (mut scripts, mut asked) = (Vec::new(), Vec::new());
    for (thread, rest, images) in numbered(processes, number) {
        let process = images.process;
        let scheduling = images.scheduling.get(number).ok_or_else(|| missing("scheduling"))?;
        sched::restore(thread, scheduling)?;
        let mut script = Script::new(thread);
        if number == 0 {
            onlookers::hide(&mut script);
            signals::restore_actions(&mut script, &process.actions, process.is_32bit)?;
            process::restore(&mut script, process, images.memory);
        }
        thread::restore(&mut script, rest, process.personality);
        resources::restore(&mut script, scheduling);
        if let Some(stack) = &rest.stack {
            signals::restore_stack(&mut script, stack);
        }
        asked.push(creds::ask_bits(&mut script));
        scripts.push(script);
    }
    let answers = asked.into_iter().zip(Script::run_all(scripts)?);
    let bits = answers.map(|(asked, out)| out.expect(asked, || "PR_GET_SECUREBITS".to_owned()));
    Ok(bits.collect::<torpor_tracee::Result<_>>()?)
}

/// Gives the threads with this number, which have these security bits now, their rights.
fn restore_rights(processes: &mut [Husks<'_>], number: usize, bits: Vec<u64>) -> Result<()> {
    let mut scripts = Vec::new();
    for ((thread, rest, images), bits) in numbered(processes, number).zip(bits) {
        let wanted = images.credentials.get(number).and_then(Option::as_ref);
        let change = match wanted {
            Some(wanted) => {
                Some(creds::Change::of(thread, bits, wanted, images.maps, images.profile)?)
            }
            None => None,
        };
        let mut script = Script::new(thread);
        change.map_or(Ok(()), |change| change.make(&mut script, images.own))?;
        thread::restore_pdeath(&mut script, rest);
        scripts.push(script);
    }
    Script::run_all(scripts).map(drop)
}

impl Husks<'_> {
    /// What is set from outside, and what all its threads are to have.
    fn prepare(&mut self) -> Result<()> {
        let Husks { threads, images } = self;
        let Some(leader) = threads.first_mut() else { return Ok(()) };
        if let Some(wanted) = images.limits.login {
            let inside = images.maps.uid_inside(wanted).and_then(|id| images.own.uid_inside(id));
            limits::restore_loginuid(leader, wanted, inside)?;
        }
        // A husk has that of this process.
        if let Some(wanted) = images.limits.oom_score_adj.or_else(oom::given) {
            limits::restore_oom_score_adj(leader.pid(), wanted)?;
        }
        process::restore_coredump_filter(leader.pid(), images.memory)?;
        limits::restore(leader, &images.limits.resources)?;
        let wanted = images.credentials.first().and_then(Option::as_ref);
        let user = wanted.and_then(|wanted| images.own.uid_inside(wanted.users[0]));
        timers::create(leader, &images.process.timers, user)
    }

    /// What can only come when all threads have their rights and their signals.
    fn last(&mut self) -> Result<Option<Script<'_>>> {
        let rests = self.images.threads;
        let Some((leader, rest)) = self.threads.first_mut().zip(rests.first()) else {
            return Ok(None);
        };
        let dumpable = process::dumpable(leader, self.images.memory)?;
        thread::leave_section(leader, rest, self.images.is_lazy)?;
        let mut script = Script::new(leader);
        timers::arm_intervals(&mut script, &self.images.process.timers);
        process::restore_mdwe(&mut script, self.images.memory);
        if let Some(value) = dumpable {
            script.prctl("PR_SET_DUMPABLE", libc::PR_SET_DUMPABLE, value);
        }
        thread::register_sequences(&mut script, rest);
        Ok(Some(script))
    }

    fn queue(&mut self, which: Pending) -> Result<()> {
        let Images { process, threads: rests, .. } = self.images;
        for (i, (thread, rest)) in self.threads.iter_mut().zip(rests).enumerate() {
            signals::restore_pending(thread, rest, (i == 0).then_some(process), which)?;
        }
        Ok(())
    }
}

/// Gives a thread that is there for a moment how a thread of the images is scheduled and what it may do:
/// it works in its name.
///
/// # Errors
/// If the kernel refuses a part of it, by name; if the husk has ended.
pub(crate) fn stand_in(
    thread: &mut Tracee,
    scheduling: &Scheduling,
    wanted: &Credentials,
    maps: (&IdMaps, &IdMaps),
    profile: Option<&str>,
) -> Result<()> {
    sched::restore(thread, scheduling)?;
    let mut script = Script::new(thread);
    resources::restore(&mut script, scheduling);
    script.run()?;
    creds::restore(thread, wanted, maps, profile)
}

/// Gives a restored thread its registers and blocked signals: the last thing before it
/// is released. Nothing may be run in its process any more.
///
/// # Errors
/// States that this processor refuses.
pub fn dress(husk: &mut Tracee, rest: &ThreadRest, registers: &ThreadRegisters) -> Result<()> {
    let xstate = registers.extended_for(husk)?;
    registers.restore_segments(husk)?;
    husk.become_task(&registers.general, &xstate, rest.blocked)?;
    // The kernel forgets a critical section whenever something else is run.
    if let Some(sequences) = &rest.sequences
        && let Some(section) = sequences.section
    {
        husk.write(thread::section_of(sequences), &section.to_le_bytes())?;
    }
    Ok(())
}

fn missing(what: &str) -> Error {
    Error::invalid("core", format!("{what} is missing"))
}
