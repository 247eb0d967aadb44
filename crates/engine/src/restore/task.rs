//! The rest of a task: its directories, its program, the state of its threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_images::kind;
use torpor_images::proto::{FsEntry, MmEntry};
use torpor_tracee::syscall;
use torpor_tracee::{Batch, Tracee};

use super::places::FileOnMount;
use super::transport::{Transport, place_words};
use super::{Restore, process};
use crate::error::{Context, Result};
use crate::namespace::nested_user;
use crate::{proc, task};

/// Sets root, working directory and umask, and tells the kernel what it keeps of the
/// program: the executable, where code, heap, arguments and environment are.
/// Comes before the task has any descriptor.
///
/// # Errors
/// If root, working directory or executable are not in the images or cannot be opened; if the
/// kernel refuses one of them; if the husk has ended.
pub(super) fn restore_paths(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    let image = &cx.tasks[task].image;
    let (Some(mm), Some(fs)) = (image.mm.clone(), image.fs) else { return Ok(()) };
    let directories = [fs.cwd_id, fs.root_id];
    let Some(pid) = directories.into_iter().find_map(|id| cx.temporary.process_of(id)) else {
        return set_paths(cx, task, &mm, &fs);
    };
    let mut process = process::start(cx.tasks[0].remote()?, i32::try_from(pid).ok())?;
    cx.temporary.set_alive(Some(pid));
    let done = nested_user::follow(&mut process, &cx.tasks[task].image, &cx.ns)
        .and_then(|()| set_paths(cx, task, &mm, &fs));
    cx.temporary.set_alive(None);
    process::end(cx.tasks[0].remote()?, process)?;
    done
}

fn set_paths(cx: &mut Restore<'_>, task: usize, mm: &MmEntry, fs: &FsEntry) -> Result<()> {
    let files: Vec<OwnedFd> = [fs.root_id, fs.cwd_id, mm.exe_file_id]
        .into_iter()
        .map(|id| match cx.temporary.process_of(id) {
            // One that was opened for another task is that of a process which has ended.
            Some(_) => cx.table().open_apart(id, None),
            None => cx.table().open_for_mapping(id, None),
        })
        .collect::<Result<_>>()?;
    let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let husk = cx.tasks[task].remote()?;
    let transport = Transport::open(husk, 3)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &borrowed)?;
    let dot = batch.cstr(".").0;
    batch.must((libc::SYS_fchdir, [0]));
    batch.must((libc::SYS_chroot, [dot]));
    batch.must((libc::SYS_fchdir, [1]));
    if let Some(umask) = fs.umask {
        batch.must((libc::SYS_umask, [u64::from(umask)]));
    }
    set_program(&mut batch, mm);
    batch.call((libc::SYS_close_range, [0, 2, 0]));
    transport.close(&mut batch);
    match batch.run()?.first_error() {
        None => {
            let [root, cwd, exe] = [&files[0], &files[1], &files[2]].map(FileOnMount::of_file);
            cx.tasks[task].places = Some([root?, cwd?, exe?]);
            Ok(())
        }
        Some((step, e)) => {
            let what = ["receiving files", "fchdir to its root", "chroot", "fchdir"];
            let what = what.get(step).copied().unwrap_or("PR_SET_MM_MAP");
            let name = kind::MM.file_name(u64::from(cx.tasks[task].image.tree.pid));
            Err(e).context(|| format!("{what} ({name})"))
        }
    }
}

/// `PR_SET_MM` (prctl(2)) with a whole `struct prctl_mm_map`; the executable is
/// descriptor 2.
fn set_program(batch: &mut Batch<'_>, mm: &MmEntry) {
    const MM_MAP_SIZE: u64 = 104;
    let auxv = place_words(batch, &mm.mm_saved_auxv);
    // Size of the auxiliary vector, then the descriptor: two 32-bit halves.
    let auxv_size = 8 * mm.mm_saved_auxv.len() as u64;
    let map = place_words(
        batch,
        &[
            mm.mm_start_code,
            mm.mm_end_code,
            mm.mm_start_data,
            mm.mm_end_data,
            mm.mm_start_brk,
            mm.mm_brk,
            mm.mm_start_stack,
            mm.mm_arg_start,
            mm.mm_arg_end,
            mm.mm_env_start,
            mm.mm_env_end,
            auxv.0,
            auxv_size | 2 << 32,
        ],
    );
    batch.must(syscall::prctl(libc::PR_SET_MM, [libc::PR_SET_MM_MAP as u64, map.0, MM_MAP_SIZE]));
}

/// Gives the threads of a task the rest of their state, and removes the stub. All that
/// is left to do is to let them go.
///
/// # Errors
/// If the images lack a part of the state, or the kernel refuses one (named in the error); if the
/// husk has ended.
pub(super) fn restore(cx: &mut Restore<'_>, task: usize) -> Result<()> {
    let mut threads = std::mem::take(&mut cx.tasks[task].threads);
    let done = cx.rest_of(task, &mut threads);
    cx.tasks[task].threads = threads;
    done
}

impl Restore<'_> {
    fn rest_of(&self, task: usize, threads: &mut [Tracee]) -> Result<()> {
        let image = &self.tasks[task].image;
        let Some(mm) = &image.mm else { return Ok(()) };
        let images = task::Images {
            mm,
            maps: &self.id_maps,
            own: &self.ns.ids_of(&image.homes),
            credentials: &image.credentials,
            seccomp: &image.seccomp,
            limits: &image.limits,
            scheduling: &image.scheduling,
            profile: self.opts.birth.lsm_profile.as_deref(),
        };
        task::restore(threads, &image.cores, &images)
    }
}

/// Takes the stub out of every task and gives all threads the last of their state: what
/// the images say of it is checked here for the last time.
///
/// # Errors
/// If a husk has ended; if the registers or signals of the images cannot be.
pub(super) fn complete(cx: &mut Restore<'_>) -> Result<()> {
    for index in (0..cx.tasks.len()).rev() {
        let task = &mut cx.tasks[index];
        let cores = &task.image.cores;
        let mut threads = task.threads.iter_mut();
        let Some(mut first) = threads.next() else { continue };
        if let Some(status) =
            cores.first().filter(|c| task::has_ended(c)).and_then(|c| c.tc.as_ref())
            && let Some(second) = threads.next()
        {
            first.prepare_exit(status.exit_code)?;
            first = second;
        }
        first.drop_stub()?;
        for (thread, core) in task.threads.iter_mut().zip(&task.image.cores) {
            task::dress(thread, core)?;
        }
        task::restore_stop(&mut task.threads, &task.image.cores, cx.opts.leave_stopped)?;
        report_stop(cx, index)?;
    }
    Ok(())
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
        let lost_leader = task.image.cores.first().is_some_and(task::has_ended);
        if lost_leader && !task.threads.is_empty() {
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
    let core = image.cores.first().and_then(|core| core.tc.as_ref());
    let Some(stop) = core.filter(|tc| tc.task_state == task::state::STOPPED) else { return Ok(()) };
    let had_asked = stop.torpor_stop_reported == Some(true);
    let (pid, ppid) = (u64::from(image.tree.pid), image.tree.ppid);
    let parent = cx.tasks.iter_mut().find(|t| t.image.tree.pid == ppid && !t.threads.is_empty());
    let Some(parent) = parent else { return Ok(()) };
    let waits = task::has_pending(&parent.image.cores, libc::SIGCHLD)?;
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
