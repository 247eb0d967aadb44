//! A task's own state: `core-*.img` and `fs-PID.img`.

use torpor_images::kind;
use torpor_images::proto::{CoreEntry, FsEntry, TaskCoreEntry, core_entry::March};
use torpor_policy::process::state;
use torpor_tracee::Tracee;

use super::later::Later;
use super::lost::Asking;
use super::{Dump, Task, files};
use crate::error::{Error, Result};
use crate::proc;
use crate::task::{AboutTree, MmFlags, ProcFiles, Process, ProcessState, Seen, ThreadState};

/// Writes the images of a zombie: its name and how it ended.
pub(super) fn dump_zombie(cx: &mut Dump<'_>, task: usize) {
    let t = &cx.tasks[task];
    let core = CoreEntry {
        mtype: March::X8664.into(),
        tc: Some(TaskCoreEntry {
            task_state: state::DEAD,
            exit_code: t.stat.exit_code.cast_unsigned(),
            comm: t.stat.comm.clone(),
            ..TaskCoreEntry::default()
        }),
        torpor_nested: cx.pids.nested(t.tgid).cloned(),
        ..CoreEntry::default()
    };
    cx.later.add(kind::CORE, u64::from(t.vpid.cast_unsigned()), core);
}

/// Writes the images of some live tasks but for their memory. Returns what the kernel keeps
/// with their memory.
pub(super) fn dump(cx: &mut Dump<'_>, tasks: &[usize]) -> Result<Vec<MmFlags>> {
    for &task in tasks {
        dump_fs(cx, task)?;
    }
    cx.tasks.inject(tasks)?;
    let mut taken: Vec<Taken> = tasks.iter().map(|&task| Taken::of(&mut cx.tasks[task])).collect();
    let states = ask(cx, tasks, &mut taken);
    for (&task, taken) in tasks.iter().zip(taken) {
        cx.tasks[task].threads = taken.threads;
    }
    let mut flags = Vec::with_capacity(tasks.len());
    for (&task, mut state) in tasks.iter().zip(states?) {
        let core = &mut state.leader.core;
        if cx.tasks[task].has_lost_leader() {
            write_lost_leader(cx, task, core)?;
        }
        let first = cx.tasks[task].pid;
        let vtid = cx.pids.thread(first).unwrap_or(first);
        core.torpor_nested = cx.pids.nested(first).cloned();
        write_core(&mut cx.later, vtid, state.leader.core, cx.cgroups.of(first));
        let of_process = Some(state.unkept);
        cx.found.push(Asking { task, tid: first, of_thread: state.leader.unkept, of_process });
        if state.leader.uses_io_uring {
            cx.kinds.note_io_uring(task, first);
        }
        flags.push(state.mm);
    }
    Ok(flags)
}

/// What a task lends to those who ask its threads.
struct Taken {
    threads: Vec<Tracee>,
    statuses: Vec<proc::Status>,
    proc_files: ProcFiles,
    is_32bit: bool,
}

impl Taken {
    fn of(task: &mut Task) -> Self {
        let is_32bit = task.is_32bit();
        let mut threads = std::mem::take(&mut task.threads);
        if let Some((leader, others)) = threads.split_first_mut() {
            others.iter_mut().enumerate().for_each(|(i, t)| t.share_stub(leader, i + 1));
        }
        let statuses = std::mem::take(&mut task.statuses);
        Taken { threads, statuses, proc_files: std::mem::take(&mut task.proc_files), is_32bit }
    }
}

/// Asks all threads, and has the images of all but the first ones written meanwhile.
fn ask(cx: &mut Dump<'_>, tasks: &[usize], taken: &mut [Taken]) -> Result<Vec<ProcessState>> {
    let lost = without_parent(cx, tasks);
    let Dump {
        tasks: all,
        pids,
        id_maps,
        filters,
        cgroups,
        later,
        guardian,
        suspects,
        found,
        kinds,
        ..
    } = cx;
    let own_tid = |tid: i32| pids.own_tid(tid);
    let mut tree = AboutTree { maps: id_maps, own_tid: &own_tid, filters };
    let processes = tasks.iter().zip(taken).map(|(&task, taken)| {
        let Taken { threads, statuses, proc_files, is_32bit } = taken;
        let (is_32bit, look_into) = (*is_32bit, suspects.known_to(&all[task]));
        let Task { stat, maps, .. } = &all[task];
        Process { threads, seen: Seen { stat, statuses, proc_files, maps, is_32bit }, look_into }
    });
    let mut processes: Vec<_> = processes.collect();
    let states = crate::task::dump_leaders(&mut processes, &mut tree)?;
    for ((&task, process), ProcessState { leader, .. }) in
        tasks.iter().zip(&mut processes).zip(&states)
    {
        check_parent(&lost, all[task].tgid, &leader.core)?;
        let known = process.look_into.filter(|_| leader.may_look);
        let sight = suspects.witness((task, &all[task]), known, process.threads, guardian)?;
        let look_into = sight.as_ref().map(|sight| sight.pid);
        let mut number = 0;
        let mut other = |pid: i32, tid: i32, state: ThreadState| {
            number += 1;
            if state.may_look {
                suspects.clear(task, number);
            }
            let ThreadState { core, unkept, uses_io_uring, .. } = state;
            if uses_io_uring {
                kinds.note_io_uring(task, tid);
            }
            if !unkept.is_empty() {
                found.push(Asking { task, tid, of_thread: unkept, of_process: None });
            }
            check_parent(&lost, pid, &core)?;
            let core = CoreEntry { torpor_nested: pids.nested(tid).cloned(), ..core };
            write_core(later, pids.thread(tid).unwrap_or(tid), core, cgroups.of(tid));
            later.begin()
        };
        let asked = crate::task::dump_others(process, look_into, &mut tree, &mut other);
        asked.and(sight.map_or(Ok(()), |sight| sight.end(process.threads)))?;
    }
    Ok(states)
}

/// The processes among `tasks` whose parent's leader has ended.
fn without_parent(cx: &Dump<'_>, tasks: &[usize]) -> Vec<i32> {
    let mut lost = cx.tasks.iter().filter(|parent| parent.has_lost_leader()).peekable();
    if lost.peek().is_none() {
        return Vec::new();
    }
    let lost: Vec<i32> = lost.map(|parent| parent.tgid).collect();
    let children = tasks.iter().map(|&task| &cx.tasks[task]);
    children.filter(|t| lost.contains(&t.stat.ppid)).map(|t| t.tgid).collect()
}

/// Refuses a thread that is to get a signal when its parent ends, and whose parent's leader has
/// ended, which those of `lost` have: it would get it when that leader ends again, behind the
/// restore.
fn check_parent(lost: &[i32], pid: i32, core: &CoreEntry) -> Result<()> {
    let wants = core.thread_core.as_ref().is_some_and(|thread| thread.pdeath_sig.is_some());
    if wants && lost.contains(&pid) {
        return Err(Error::refused(
            pid,
            "its parent-death signal",
            "would be sent by the restore: the main thread of its parent has ended, others run on",
        ));
    }
    Ok(())
}

/// Writes the image of a leader that has ended, with what its first living thread was asked for
/// about the process.
fn write_lost_leader(cx: &mut Dump<'_>, task: usize, first: &mut CoreEntry) -> Result<()> {
    let t = &cx.tasks[task];
    let stat = proc::stat(t.tgid)?;
    let status = proc::status(t.tgid)?;
    let mut tc = first.tc.take().unwrap_or_default();
    if let Some(thread) = &mut first.thread_core {
        thread.blk_sigset = Some(tc.blk_sigset);
    }
    tc.torpor_leader_ended = Some(true);
    tc.exit_code = stat.exit_code.cast_unsigned();
    let mut core = crate::task::ended_leader(t.tgid, &status, stat.comm, tc, &cx.id_maps)?;
    core.torpor_nested = cx.pids.nested(t.tgid).cloned();
    let (vpid, set) = (t.vpid, cx.cgroups.of(t.pid));
    write_core(&mut cx.later, vpid, core, set);
    Ok(())
}

/// Writes the image of a thread, which is in the set of cgroups with the number `set`.
fn write_core(later: &mut Later, vtid: i32, mut core: CoreEntry, set: Option<u32>) {
    if let Some(thread) = &mut core.thread_core {
        thread.cg_set = set;
    }
    later.add(kind::CORE, u64::from(vtid.cast_unsigned()), core);
}

/// Working directory, root and umask.
fn dump_fs(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let umask = cx.tasks[task].status.number("Umask", 8);
    let entry = FsEntry {
        cwd_id: files::describe_path(cx, task, "cwd")?,
        root_id: files::describe_path(cx, task, "root")?,
        umask: umask.and_then(|u| u32::try_from(u).ok()),
    };
    let vpid = u64::from(cx.tasks[task].vpid.cast_unsigned());
    cx.later.add(kind::FS, vpid, entry);
    Ok(())
}
