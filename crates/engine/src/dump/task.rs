//! A task's own state: `core-*.img` and `fs-PID.img`.

use torpor_images::kind;
use torpor_images::proto::{CoreEntry, FsEntry, TaskCoreEntry, core_entry::March};
use torpor_tracee::Tracee;

use super::{Dump, Task};
use crate::error::{Error, Result};
use crate::file::regular;
use crate::proc;
use crate::task::{MmFlags, Process, ProcessState, Seen, Settings, Tree, state};

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
    cx.inject(tasks)?;
    let mut taken: Vec<Taken> = tasks.iter().map(|&task| Taken::of(&mut cx.tasks[task])).collect();
    let states = ask(cx, tasks, &mut taken);
    for (&task, taken) in tasks.iter().zip(taken) {
        cx.tasks[task].threads = taken.threads;
    }
    let mut flags = Vec::with_capacity(tasks.len());
    for (&task, mut state) in tasks.iter().zip(states?) {
        check_parent(cx, task, &state.cores)?;
        if cx.tasks[task].has_lost_leader() {
            write_lost_leader(cx, task, &mut state.cores)?;
        }
        write_cores(cx, task, state.cores);
        flags.push(state.mm);
    }
    Ok(flags)
}

/// What a task lends to those who ask its threads.
struct Taken {
    threads: Vec<Tracee>,
    statuses: Vec<proc::Status>,
    settings: Settings,
}

impl Taken {
    fn of(task: &mut Task) -> Self {
        let mut threads = std::mem::take(&mut task.threads);
        if let Some((leader, others)) = threads.split_first_mut() {
            others.iter_mut().enumerate().for_each(|(i, t)| t.share_stub(leader, i + 1));
        }
        let statuses = std::mem::take(&mut task.statuses);
        Taken { threads, statuses, settings: std::mem::take(&mut task.settings) }
    }
}

fn ask(cx: &mut Dump<'_>, tasks: &[usize], taken: &mut [Taken]) -> Result<Vec<ProcessState>> {
    let mut filters = std::mem::take(&mut cx.filters);
    let vtid = |tid: i32| cx.vtids.get(&tid).copied();
    let mut tree = Tree { maps: &cx.id_maps, vtid: &vtid, filters: &mut filters };
    let processes = tasks.iter().zip(taken).map(|(&task, taken)| {
        let Taken { threads, statuses, settings } = taken;
        Process { threads, seen: Seen { stat: &cx.tasks[task].stat, statuses, settings } }
    });
    let states = crate::task::dump(processes.collect(), &mut tree);
    cx.filters = filters;
    states
}

/// Refuses a thread that is to get a signal when its parent ends, and whose parent's leader has
/// ended: it would get it when that leader ends again, behind the restore.
fn check_parent(cx: &Dump<'_>, task: usize, cores: &[CoreEntry]) -> Result<()> {
    let t = &cx.tasks[task];
    let mut threads = cores.iter().filter_map(|core| core.thread_core.as_ref());
    let parent = cx.tasks.iter().find(|parent| parent.tgid == t.stat.ppid);
    if parent.is_some_and(Task::has_lost_leader) && threads.any(|t| t.pdeath_sig.is_some()) {
        return Err(Error::refused(
            t.tgid,
            "its parent-death signal",
            "would be sent by the restore: the main thread of its parent has ended, others run on",
        ));
    }
    Ok(())
}

/// Writes the image of a leader that has ended, with what its first living thread was asked for
/// about the process.
fn write_lost_leader(cx: &mut Dump<'_>, task: usize, cores: &mut [CoreEntry]) -> Result<()> {
    let t = &cx.tasks[task];
    let Some(first) = cores.first_mut() else { return Ok(()) };
    let stat = proc::stat(t.tgid)?;
    let status = proc::status(t.tgid)?;
    let mut tc = first.tc.take().unwrap_or_default();
    tc.torpor_leader_ended = Some(true);
    tc.exit_code = stat.exit_code.cast_unsigned();
    tc.cg_set = cx.cgroups.of(t.pid);
    let core = crate::task::ended_leader(t.tgid, &status, stat.comm, tc, &cx.id_maps)?;
    cx.later.add(kind::CORE, u64::from(t.vpid.cast_unsigned()), core);
    Ok(())
}

fn write_cores(cx: &mut Dump<'_>, task: usize, cores: Vec<CoreEntry>) {
    for (thread, mut core) in cx.tasks[task].threads.iter().zip(cores) {
        let set = cx.cgroups.of(thread.tid());
        if let Some(tc) = &mut core.tc {
            tc.cg_set = set;
        }
        if let Some(thread) = &mut core.thread_core {
            thread.cg_set = set;
        }
        let vtid = cx.vtids.get(&thread.tid()).copied().unwrap_or(thread.tid());
        cx.later.add(kind::CORE, u64::from(vtid.cast_unsigned()), core);
    }
}

/// Working directory, root and umask.
fn dump_fs(cx: &mut Dump<'_>, task: usize) -> Result<()> {
    let umask = cx.tasks[task].status.number("Umask", 8);
    let entry = FsEntry {
        cwd_id: regular::describe_path(cx, task, "cwd")?,
        root_id: regular::describe_path(cx, task, "root")?,
        umask: umask.and_then(|u| u32::try_from(u).ok()),
    };
    let vpid = u64::from(cx.tasks[task].vpid.cast_unsigned());
    cx.later.add(kind::FS, vpid, entry);
    Ok(())
}
