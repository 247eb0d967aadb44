//! Work that leaves nothing frozen when it is killed.
//!
//! The work has a process of its own, and that has a guardian for its parent. Whoever kills the
//! call does not stop the work. If the work is killed, the guardian undoes what was done. Only if
//! both are killed, nobody does.
//!
//! Nothing that outlives the call keeps the call's standard streams. The shim reads them until they
//! are closed, and meanwhile says nothing of the container, to a containerd neither that was started
//! anew: after two seconds without a word that takes the container for lost and kills it.

use std::io::{ErrorKind, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, getpid, getsid, kill_process, set_child_subreaper, setsid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use torpor_kernel::proc;
use torpor_sys::process::{Status, fork, set_name, wait};

/// How often it is looked whether what the work has started has ended.
const STEP: Duration = Duration::from_millis(5);

/// What a call and the process beside it say to each other when they have done what the other waits for.
const DONE: u8 = 0;
/// What the call says when it has not.
const FAILED: u8 = 1;

/// How the work leaves word for its guardian.
#[derive(Debug)]
pub(super) struct Note(Option<UnixStream>);

impl Note {
    /// Leaves word for the guardian. It gets all that was written, in one piece.
    pub(super) fn leave(&self, text: &[u8]) {
        if let Some(mut line) = self.0.as_ref() {
            // Without a guardian nobody reads it.
            let _ = line.write_all(text);
        }
    }
}

/// Does `work` in a process of its own, which a kill of the call does not end, and waits until it has ended,
/// and all that it has left.
///
/// The caller must have one thread. Where no process can be made, the work is done by the caller.
pub(super) fn apart(work: impl Fn()) {
    let life = || {
        work();
        0
    };
    if start(life).is_err() {
        work();
    }
}

/// Does `work`, and waits for its end. If it is killed, `undo` is called with the words that it has
/// left. What the work has started may run still: [`quiet`] ends it.
///
/// The caller must have one thread. Where no process can be made, the work is done by the caller.
pub(super) fn guarded(work: impl Fn(&Note), undo: impl Fn(&[u8])) {
    if start(|| watch(&work, &undo)).is_err() {
        work(&Note(None));
    }
}

/// Does `work`. If this process is killed meanwhile, another one calls `undo`: what the work has started may run still. If
/// the work succeeds, that one calls `watch` and may live on for a while.
///
/// The caller must have one thread. Where no process can be made, nobody undoes anything.
pub(super) fn or_undone<T, E>(
    work: impl FnOnce() -> std::result::Result<T, E>,
    undo: impl FnOnce(),
    watch: impl FnOnce(),
) -> std::result::Result<T, E> {
    let guardian = beside(|line| match hears(line) {
        Some(FAILED) => {}
        Some(_) => watch(),
        None => undo(),
    });
    let done = work();
    if let Ok((guardian, mut line)) = guardian {
        // One that has ended undoes nothing.
        let _ = line.write_all(&[if done.is_ok() { DONE } else { FAILED }]);
        if done.is_err() {
            let _ = wait(guardian, true);
        }
    }
    done
}

/// Does `work` when the call has done what it was called for: not if it is killed before this returns, and whoever kills it
/// afterwards does not stop it.
///
/// The caller must have one thread.
///
/// # Errors
/// If no process can be made, or it has ended by itself.
pub(super) fn afterwards(work: impl FnOnce()) -> Result<()> {
    let life = |line| {
        if hears(line).is_some() {
            work();
        }
    };
    let (_, mut line) = beside(life)?;
    line.write_all(&[DONE])
}

/// Does `work` beside the call, which does not wait for it.
///
/// The caller must have one thread.
///
/// # Errors
/// If no process can be made.
pub(super) fn at_once(work: impl FnOnce()) -> Result<()> {
    beside(|_| work()).map(drop)
}

/// What the call says to a process beside it; nothing if it ends without a word.
fn hears(mut line: UnixStream) -> Option<u8> {
    let mut said = [0];
    line.read_exact(&mut said).ok().map(|()| said[0])
}

/// Starts a process beside the call, and its line to the call, which has let go of the call when this returns.
fn beside(life: impl FnOnce(UnixStream)) -> Result<(i32, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let (mut ours, mut theirs) = (Some(ours), Some(theirs));
    let child = fork(|| {
        // The end of the call is the end of its line.
        drop(ours.take());
        let _ = setsid().and_then(|_| quiet_streams());
        let _ = set_name(c"torpor-undo");
        if let Some(mut line) = theirs.take() {
            let _ = line.write_all(&[DONE]);
            life(line);
        }
        0
    })?;
    drop(theirs.take());
    let mut line = ours.take().ok_or(ErrorKind::BrokenPipe)?;
    // Until then it would end with the group of the call, and keep its streams. One that has ended says nothing.
    let _ = line.read_exact(&mut [0]);
    Ok((child, line))
}

/// Lets go of the standard streams, which are those of the call.
fn quiet_streams() -> rustix::io::Result<()> {
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    dup2_stdin(&null).and_then(|()| dup2_stdout(&null)).and_then(|()| dup2_stderr(&null))
}

/// Starts a process that lives `life`, and waits until it and its descendants have ended.
fn start(life: impl FnOnce() -> i32) -> Result<()> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let child = fork(|| {
        // Not to end with the group of the call.
        let _ = setsid();
        let _ = quiet_streams();
        life()
    })?;
    // The other end is closed when all of them have ended, in whatever order.
    drop(theirs);
    let _ = ours.read_to_end(&mut Vec::new());
    let _ = wait(child, true);
    Ok(())
}

/// The guardian's life.
fn watch(work: &impl Fn(&Note), undo: &impl Fn(&[u8])) -> i32 {
    // What the work has started becomes a child of the guardian when the work has ended. In the same way
    // the work gets what runc has started.
    let _ = set_child_subreaper(Some(getpid()));
    let Ok((mut ours, theirs)) = UnixStream::pair() else {
        work(&Note(None));
        return 0;
    };
    let note = Note(Some(theirs));
    let Ok(worker) = fork(|| {
        let _ = set_child_subreaper(Some(getpid()));
        work(&note);
        0
    }) else {
        work(&note);
        return 0;
    };
    drop(note);
    let _ = set_name(c"torpor-undo");
    if let Ok(Some((_, Status::Exited(0)))) = wait(worker, true) {
        return 0;
    }
    let mut words = Vec::new();
    // What cannot be read was not said.
    let _ = ours.read_to_end(&mut words);
    undo(&words);
    0
}

/// Ends what this process has started, and waits until the engine's own guardian has put right what the
/// engine has left. The last thing that it does is to freeze again what was frozen before.
pub(super) fn quiet() {
    // Until there is no child any more: what ends leaves its children here.
    while let Ok(ended) = wait(-1, false) {
        if ended.is_none() {
            end_children();
            sleep(STEP);
        }
    }
}

/// Kills the children but those that lead a session: the engine's guardian is one, and ends by itself.
fn end_children() {
    let children = proc::children_of(getpid().as_raw_nonzero().get());
    let children = children.into_iter().filter_map(Pid::from_raw);
    for child in children.filter(|child| getsid(Some(*child)).is_ok_and(|of| of != *child)) {
        // It may have ended by itself.
        let _ = kill_process(child, Signal::KILL);
    }
}
