//! Births in user namespaces without rights over a pid namespace (ADR 15): in those below that of the
//! root task, and in that of the root task itself where it has the caller's pid namespace.
//!
//! clone3(2) takes numbers only from a process that has rights over their pid namespaces. In those further
//! out the next number is chosen instead (`ns_last_pid`); others on this host may take it first, and
//! then it is tried again.

use std::cell::RefCell;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_tracee::Tracee;
use torpor_tracee::syscall;

use super::process::{live_in, with_process};
use super::transport::Transport;
use super::{Restore, tree};
use crate::error::{Context, Error, Result};
use crate::namespace::{Namespaces, NsKind};
use crate::proc;
use crate::task::Script;

/// How long a number is waited for that others have or take, as clone3(2) is where it takes numbers.
const PATIENCE: Duration = Duration::from_secs(20);
/// So often it is tried at once again: others may have taken it by chance.
const AT_ONCE: u32 = 20;
const LAST: &str = "/proc/sys/kernel/ns_last_pid";

/// Where and under which numbers somebody is born.
#[derive(Debug)]
pub(super) struct Birthplace {
    /// Its numbers, as clone3(2) takes them.
    pub pids: Vec<i32>,
    /// The pid namespaces that they are of.
    pub spaces: Vec<u32>,
    /// The nested user namespace that it is born in.
    pub user: Option<u32>,
}

impl Birthplace {
    /// How many of the numbers clone3(2) takes there.
    fn own(&self, cx: &Restore<'_>) -> usize {
        let has_rights = |space: &&u32| cx.ns.is_within(cx.ns.owner_of(**space), self.user);
        let own = self.spaces.iter().take_while(has_rights).count();
        // The tree's user namespace has none over the pid namespace of the caller.
        let root = &cx.tasks[0].image.homes;
        let callers = root.own(NsKind::User).is_some() && root.own(NsKind::Pid).is_none();
        own.min(self.pids.len() - usize::from(callers))
    }

    /// Whether a process has one of the numbers, in a namespace further out.
    fn is_taken_by(&self, cx: &Restore<'_>, other: &Tracee) -> Result<bool> {
        let above = proc::status(cx.tasks[0].pid)?.ns_pids().len() - 1;
        let now = proc::status(other.pid())?.ns_pids();
        Ok(now.iter().skip(above).zip(self.pids.iter().rev()).any(|(now, wanted)| now == wanted))
    }

    fn fits(&self, born: &Tracee) -> Result<bool> {
        let status = proc::thread_status(born.pid(), born.tid())?;
        let now: Vec<i32> = status.ns_pids().into_iter().rev().take(self.pids.len()).collect();
        if now != self.pids {
            tracing::debug!("It was born as {now:?}, and was to be {:?}", self.pids);
        }
        Ok(now == self.pids)
    }
}

/// Has the husk of `from` (a task or a substitute) bear somebody.
///
/// # Errors
/// If nobody can be born; if others have the number, or take it each time it is tried.
pub(super) fn spawn(
    cx: &mut Restore<'_>,
    from: usize,
    (flags, signal): (u64, i32),
    place: &Birthplace,
) -> Result<Tracee> {
    let parent = match flags & libc::CLONE_PARENT as u64 {
        0 => from,
        _ => tree::parent_of(cx, from),
    };
    until_it_fits(
        cx,
        place,
        |cx, pids| Ok(tree::actor(cx, from)?.spawn_child(flags, signal, pids)?),
        |cx, stray| match flags & libc::CLONE_THREAD as u64 {
            0 => tree::end_child(cx, parent, stray),
            _ => Ok(stray.exit_thread()?),
        },
    )
}

/// Has a child of the husk of `from` enter a namespace, by `enter`, and bear somebody, whose parent is
/// `from`. With `first` that is the first task of a new pid namespace.
///
/// # Errors
/// As [`spawn`].
pub(super) fn spawn_within(
    cx: &mut Restore<'_>,
    from: usize,
    enter: impl FnOnce(&Namespaces, &mut Tracee) -> Result<()>,
    (flags, first): (u64, bool),
    place: &Birthplace,
) -> Result<Tracee> {
    // A task that is born as a sibling has the exit signal of the one that bears it.
    let bear = |cx: &mut Restore<'_>| -> Result<Tracee> {
        Ok(tree::actor(cx, from)?.spawn_child(flags, libc::SIGCHLD, &[])?)
    };
    let mut between = bear(cx)?;
    // As long as it is there, the next one has another number.
    while place.is_taken_by(cx, &between)? {
        let next = bear(cx)?;
        tree::end_child(cx, from, std::mem::replace(&mut between, next))?;
    }
    enter(&cx.ns, &mut between)?;
    let new = if first { NsKind::Pid.clone_flag() } else { 0 };
    let flags = flags | new | libc::CLONE_PARENT as u64;
    let born = until_it_fits(
        cx,
        place,
        |_, pids| Ok(between.spawn_child(flags, 0, pids)?),
        |cx, stray| tree::end_child(cx, from, stray),
    )?;
    tree::end_child(cx, from, between)?;
    Ok(born)
}

/// Has `between`, who is no task, bear somebody.
///
/// # Errors
/// As [`spawn`].
pub(super) fn spawn_orphan(
    cx: &mut Restore<'_>,
    between: &mut Tracee,
    place: &Birthplace,
) -> Result<Tracee> {
    let between = RefCell::new(between);
    until_it_fits(
        cx,
        place,
        |_, pids| Ok(between.borrow_mut().spawn_child(0, libc::SIGCHLD, pids)?),
        |_, stray| tree::end_and_reap(&mut between.borrow_mut(), stray),
    )
}

/// Has somebody born, by `bear` with those of the numbers that clone3(2) takes, until the others are
/// right as well; a task that has others is ended by `end`.
fn until_it_fits(
    cx: &mut Restore<'_>,
    place: &Birthplace,
    mut bear: impl FnMut(&mut Restore<'_>, &[i32]) -> Result<Tracee>,
    mut end: impl FnMut(&mut Restore<'_>, Tracee) -> Result<()>,
) -> Result<Tracee> {
    let own = place.own(cx);
    if own == place.pids.len() {
        return bear(cx, &place.pids);
    }
    let deadline = Instant::now() + PATIENCE;
    for tried in 0.. {
        let moved = choose(cx, place)?;
        let born = bear(cx, &place.pids[..own]);
        moved.map_or(Ok(()), |moved| moved.back())?;
        let born = born?;
        if place.fits(&born)? {
            return Ok(born);
        }
        end(cx, born)?;
        if Instant::now() > deadline {
            break;
        }
        if tried > AT_ONCE {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Err(Error::Os {
        what: format!("give a task the numbers {:?}", place.pids),
        source: io::Error::from_raw_os_error(libc::EEXIST),
    })
}

/// Makes the numbers that clone3(2) would not take the next ones: the innermost first, for whoever
/// does it takes numbers further out.
fn choose(cx: &mut Restore<'_>, place: &Birthplace) -> Result<Option<Moved>> {
    let own = place.own(cx);
    let last = OpenOptions::new().read(true).write(true).open(LAST);
    let last: OwnedFd = last.context(|| format!("open {LAST}"))?.into();
    let mut moved = None;
    let is_callers = cx.tasks[0].image.homes.own(NsKind::Pid).is_none();
    for (&pid, &space) in place.pids.iter().zip(&place.spaces).skip(own) {
        let write = |husk: &mut Tracee| write_last(husk, &last, pid - 1);
        let nested = cx.ns.by_id(space).filter(|ns| ns.task != 0);
        match nested.and_then(|ns| ns.file.as_ref()) {
            Some(space) => live_in(cx.tasks[0].remote()?, space, write)?,
            // Others are born there all the time: the sooner the better.
            None if is_callers => {
                let dup = last.try_clone().context(|| "dup".to_owned())?;
                moved = Some(Moved::to(dup, pid - 1)?);
            }
            None => with_process(cx.tasks[0].remote()?, None, write)?,
        }
    }
    Ok(moved)
}

/// The last number of the caller's pid namespace was moved: whoever else is born there would take numbers
/// of the tree that are needed yet.
#[derive(Debug)]
#[must_use]
struct Moved {
    last: OwnedFd,
    was: Vec<u8>,
}

impl Moved {
    fn to(last: OwnedFd, number: i32) -> Result<Self> {
        let mut was = vec![0; 16];
        let read = rustix::io::pread(&last, &mut was, 0).context(|| format!("read {LAST}"))?;
        was.truncate(read);
        let text = number.to_string();
        rustix::io::pwrite(&last, text.as_bytes(), 0).context(|| format!("write {LAST}"))?;
        Ok(Self { last, was })
    }

    /// Has the next one get the number that it would have got.
    fn back(self) -> Result<()> {
        rustix::io::pwrite(&self.last, &self.was, 0).context(|| format!("write {LAST}"))?;
        Ok(())
    }
}

fn write_last(husk: &mut Tracee, file: &OwnedFd, last: i32) -> Result<()> {
    let mut transport = Transport::open(husk, 3)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[file.as_fd()])?;
    batch.run()?;
    let text = last.to_string();
    let mut script = Script::new(husk);
    let at = script.bytes(text.as_bytes()).0;
    // A setting is written at the start of its file only, and this one is used again.
    let write = (libc::SYS_pwrite64, [0, at, text.len() as u64, 0]);
    script.step(format!("write {text} to {LAST}"), write);
    script.run()?;
    let mut batch = husk.batch();
    batch.call(syscall::close(0.into()));
    transport.close(&mut batch);
    batch.run()?;
    Ok(())
}
