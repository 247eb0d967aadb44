//! The rest of a task: its directories, its program, the state of its threads.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_images::kind;
use torpor_policy::memory::{ProcessMemory, ProgramLayout};
use torpor_policy::process::Life;
use torpor_tracee::syscall;
use torpor_tracee::{Batch, SIDE_BY_SIDE, Tracee};

use super::places::FileOnMount;
use super::tasks::{Task, chosen};
use super::transport::{Transport, place_words};
use super::{Restore, process, tree};
use crate::error::{Context, Error, Result};
use crate::namespace::nested_user;
use crate::namespace::user::IdMaps;
use crate::{proc, task};

/// Sets root, working directory and umask of every task, and tells the kernel what it keeps of the
/// program: the executable, where code, heap, arguments and environment are.
/// Comes before the tasks have any descriptor.
///
/// # Errors
/// If root, working directory or executable are not in the images or cannot be opened; if the
/// kernel refuses one of them; if a husk has ended.
pub(super) fn restore_paths(cx: &mut Restore<'_>) -> Result<()> {
    let (mut plain, mut of_processes) = (Vec::new(), Vec::new());
    for (task, Task { image, .. }) in cx.tasks.iter().enumerate() {
        let (Some(_), Some(fs)) = (&image.memory, &image.fs) else { continue };
        match [fs.directory, fs.root].into_iter().find_map(|id| cx.temporary.process_of(id)) {
            None => plain.push(task),
            Some(pid) => of_processes.push((task, pid)),
        }
    }
    for some in apart(&cx.tasks, plain) {
        set_paths(cx, &some)?;
    }
    for (task, pid) in of_processes {
        let mut process = process::start(cx.tasks[0].remote()?, i32::try_from(pid).ok())?;
        cx.temporary.set_alive(Some((pid, process.pid())));
        let done = nested_user::follow(&mut process, &cx.tasks[task].image, &cx.ns)
            .and_then(|()| set_paths(cx, &[task]));
        cx.temporary.set_alive(None);
        process::end(cx.tasks[0].remote()?, process)?;
        done?;
    }
    Ok(())
}

/// Tasks that can work at the same time: no two of them share a table of descriptors, or directories.
fn apart(tasks: &[Task], numbers: Vec<usize>) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    for number in numbers {
        let shares = |other: &usize| tree::shared_with(&tasks[number], &tasks[*other]) != 0;
        match all.last_mut() {
            Some(some) if some.len() < SIDE_BY_SIDE && !some.iter().any(shares) => {
                some.push(number)
            }
            _ => all.push(vec![number]),
        }
    }
    all
}

/// Does this to some tasks, which work at the same time.
fn set_paths(cx: &mut Restore<'_>, tasks: &[usize]) -> Result<()> {
    let files = tasks.iter().map(|&task| open_places(cx, task));
    let files = files.collect::<Result<Vec<[OwnedFd; 3]>>>()?;
    let husks = chosen(&mut cx.tasks, tasks).map(|task| Ok((task.remote()?, 3)));
    let mut transports = Transport::open_all(husks.collect::<Result<Vec<_>>>()?)?;
    let (mut batches, mut before) = (Vec::new(), Vec::new());
    let sent = transports.iter_mut().zip(&files);
    for (task, (transport, files)) in chosen(&mut cx.tasks, tasks).zip(sent) {
        let Task { threads, image, vpid: pid, .. } = task;
        let (Some(husk), Some(memory), Some(fs)) = (threads.first_mut(), &image.memory, &image.fs)
        else {
            return Err(Error::Gone { pid: *pid });
        };
        let mut batch = husk.batch();
        transport.send(&mut batch, &files.each_ref().map(AsFd::as_fd))?;
        before.push(batch.len() - 1);
        let dot = batch.cstr(".").0;
        batch.must((libc::SYS_fchdir, [0]));
        batch.must((libc::SYS_chroot, [dot]));
        batch.must((libc::SYS_fchdir, [1]));
        if let Some(umask) = fs.umask {
            batch.must((libc::SYS_umask, [u64::from(umask)]));
        }
        set_program(&mut batch, memory);
        batch.call((libc::SYS_close_range, [0, 2, 0]));
        transport.close(&mut batch);
        batches.push(batch);
    }
    let done = Batch::run_all(batches)?.into_iter().zip(before).zip(files);
    for (task, ((out, before), files)) in chosen(&mut cx.tasks, tasks).zip(done) {
        if let Some((step, e)) = out.first_error() {
            let steps = ["receiving files", "fchdir to its root", "chroot", "fchdir"];
            let what = steps.get(step.saturating_sub(before)).copied().unwrap_or("PR_SET_MM_MAP");
            let name = kind::MM.file_name(u64::from(task.image.tree.pid));
            return Err(e).context(|| format!("{what} ({name})"));
        }
        let [root, cwd, exe] = files.each_ref().map(FileOnMount::of_file);
        task.places = Some([root?, cwd?, exe?]);
    }
    Ok(())
}

/// Root, working directory and executable of a task.
fn open_places(cx: &mut Restore<'_>, task: usize) -> Result<[OwnedFd; 3]> {
    let image = &cx.tasks[task].image;
    let (Some(memory), Some(fs)) = (&image.memory, &image.fs) else {
        return Err(Error::Gone { pid: cx.tasks[task].vpid });
    };
    let [root, cwd, exe] = [fs.root, fs.directory, memory.program].map(|id| {
        match cx.temporary.process_of(id) {
            // One that was opened for another task is that of a process which has ended.
            Some(_) => cx.table().open_apart(id, None),
            None => cx.table().open_for_mapping(id, None),
        }
    });
    Ok([root?, cwd?, exe?])
}

/// `PR_SET_MM` (prctl(2)) with a whole `struct prctl_mm_map`; the executable is
/// descriptor 2.
fn set_program(batch: &mut Batch<'_>, memory: &ProcessMemory) {
    const MM_MAP_SIZE: u64 = 104;
    let ProgramLayout { code, data, heap, stack, arguments, environment } = memory.layout;
    let auxv = place_words(batch, &memory.auxiliary);
    // Size of the auxiliary vector, then the descriptor: two 32-bit halves.
    let auxv_size = 8 * memory.auxiliary.len() as u64;
    let mut words = [code, data, heap].concat();
    words.push(stack);
    words.extend([arguments, environment].concat());
    words.extend([auxv.0, auxv_size | 2 << 32]);
    let map = place_words(batch, &words);
    batch.must(syscall::prctl(libc::PR_SET_MM, [libc::PR_SET_MM_MAP as u64, map.0, MM_MAP_SIZE]));
}

/// What is done to the husks of some tasks.
type HuskWork = fn(&mut [task::Husks<'_>]) -> Result<()>;

/// Gives the threads of all tasks the rest of their state. All that is left to do is to take the stubs out
/// and to let them go.
///
/// # Errors
/// If the images lack a part of the state, or the kernel refuses one (named in the error); if a
/// husk has ended.
pub(super) fn restore(cx: &mut Restore<'_>) -> Result<()> {
    in_parts(cx, task::restore)?;
    in_parts(cx, task::finish)
}

/// Does this to all tasks, to some of them at a time.
fn in_parts(cx: &mut Restore<'_>, work: HuskWork) -> Result<()> {
    for first in (0..cx.tasks.len()).step_by(SIDE_BY_SIDE) {
        let some = first..cx.tasks.len().min(first + SIDE_BY_SIDE);
        let tasks = cx.tasks[some.clone()].iter_mut();
        let mut threads: Vec<Vec<Tracee>> =
            tasks.map(|task| std::mem::take(&mut task.threads)).collect();
        let done = cx.rest_of(first, &mut threads, work);
        for (task, threads) in cx.tasks[some].iter_mut().zip(threads) {
            task.threads = threads;
        }
        done?;
    }
    Ok(())
}

impl Restore<'_> {
    /// Of the tasks from `first` on, which have these threads.
    fn rest_of(&self, first: usize, threads: &mut [Vec<Tracee>], work: HuskWork) -> Result<()> {
        let tasks = self.tasks[first..].iter().zip(threads);
        let own = self.tasks[first..].iter().map(|task| self.ns.ids_of(&task.image.homes));
        let own: Vec<IdMaps> = own.take(tasks.len()).collect();
        let processes = tasks.zip(&own).filter_map(|((task, threads), own)| {
            let image = &task.image;
            let images = task::Images {
                memory: image.memory.as_ref()?,
                process: &image.process,
                threads: &image.threads,
                maps: &self.id_maps,
                own,
                credentials: &image.credentials,
                seccomp: &image.seccomp,
                limits: &image.limits,
                scheduling: &image.scheduling,
                profile: self.opts.birth.lsm_profile.as_deref(),
                is_lazy: self.lazy.any(),
            };
            Some(task::Husks { threads, images })
        });
        work(&mut processes.collect::<Vec<_>>())
    }
}

/// Takes the stub out of every task and gives all threads the last of their state: what
/// the images say of it is checked here for the last time.
///
/// # Errors
/// If a husk has ended; if the registers or signals of the images cannot be.
pub(super) fn complete(cx: &mut Restore<'_>) -> Result<()> {
    // Whose child is stopped is told so, and has its stub still.
    let at_once = if cx.tasks.iter().any(is_stopped) { 1 } else { SIDE_BY_SIDE };
    let mut end = cx.tasks.len();
    while end > 0 {
        let some = end.saturating_sub(at_once)..end;
        end = some.start;
        drop_stubs(&mut cx.tasks[some.clone()])?;
        for index in some.rev() {
            let task = &mut cx.tasks[index];
            let Task { threads, image, .. } = task;
            let all = threads.iter_mut().zip(&image.threads).zip(&image.registers);
            for ((thread, rest), registers) in all {
                if let Some(registers) = registers {
                    task::dress(thread, rest, registers)?;
                }
            }
            let rests = (&image.process, &*image.threads);
            task::restore_stop(threads, rests, cx.opts.leave_stopped)?;
            report_stop(cx, index)?;
        }
    }
    Ok(())
}

/// Takes the stubs out of some tasks, which work at the same time.
fn drop_stubs(tasks: &mut [Task]) -> Result<()> {
    let mut last = Vec::new();
    for Task { threads, image, .. } in tasks.iter_mut().rev() {
        let mut threads = threads.iter_mut();
        let Some(mut first) = threads.next() else { continue };
        if image.process.leader_ended
            && let Some(second) = threads.next()
        {
            first.prepare_exit(image.process.exit_code)?;
            first = second;
        }
        last.push(first);
    }
    Ok(Tracee::drop_stubs(last)?)
}

/// Whether a task is to be stopped by job control.
fn is_stopped(task: &Task) -> bool {
    task.image.process.life == Life::Stopped
}

/// Lets all threads go, the children first: a parent that runs early could miss them. A
/// thread that is gone by then was ended by one that runs already, which is their affair.
pub(super) fn wake(cx: &mut Restore<'_>) {
    for task in cx.tasks.iter_mut().rev() {
        task.threads.drain(..).rev().for_each(release);
    }
}

/// Lets those leaders go that only have to end.
pub(super) fn end_leaders(cx: &mut Restore<'_>) {
    for task in cx.tasks.iter_mut().rev() {
        if task.image.process.leader_ended && !task.threads.is_empty() {
            release(task.threads.remove(0));
            await_end(task.pid);
        }
    }
}

fn release(thread: Tracee) {
    let tid = thread.tid();
    if let Err(error) = thread.release() {
        tracing::warn!("thread {tid}: {error}");
    }
}

/// Waits for a leader that only has to end: the others must not see it alive.
fn await_end(pid: i32) {
    /// It makes one system call.
    const PATIENCE: Duration = Duration::from_secs(5);
    let deadline = Instant::now() + PATIENCE;
    while proc::stat(pid).is_ok_and(|stat| stat.state != 'Z') && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Makes the parent of a stopped task, which has its stub still, forget what the stop has
/// told it just now: the signal, unless it waited for one, and the status that it had asked for.
fn report_stop(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    let image = &cx.tasks[task].image;
    if !is_stopped(&cx.tasks[task]) {
        return Ok(());
    }
    let had_asked = image.process.stop_reported;
    let (pid, ppid) = (u64::from(image.tree.pid), image.tree.ppid);
    let parent = cx.tasks.iter_mut().find(|t| t.image.tree.pid == ppid && !t.threads.is_empty());
    let Some(parent) = parent else { return Ok(()) };
    let waits = task::has_pending(&parent.image.process, &parent.image.threads, libc::SIGCHLD);
    let Some(leader) = parent.threads.first_mut() else { return Ok(()) };
    if had_asked {
        let options = libc::WUNTRACED | libc::WNOHANG | libc::__WALL;
        let options = u64::from(options.cast_unsigned());
        leader.call_alone("wait4", (libc::SYS_wait4, [pid, 0, options, 0]))?;
    }
    if !waits {
        task::take_signal(leader, libc::SIGCHLD)?;
    }
    Ok(())
}
