//! What is in flight when the tasks are stopped: it is let be answered, for as long as [`PATIENCE`].

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_tracee::Tracee;

use super::refusal::{refuse, refuse_use};
use super::{Counts, GETEVENTS, MAX_SQ, SQ_WAKEUP, holders, polled};
use crate::dump::tasks::{Task, Tasks};
use crate::error::{Context, Result};
use crate::file::{FdInfo, Found};
use crate::proc;

/// How long requests may take that are in flight when the tasks are stopped.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two looks at them.
const PAUSE: Duration = Duration::from_millis(2);

/// Why one is refused that has more answers than requests, and what to do.
const ANSWERED_MORE: (&str, &str) = (
    "it has given more answers than it had requests (one may have many, as with IORING_ACCEPT_MULTISHOT or \
     IORING_OP_SEND_ZC, and other instances send it theirs by IORING_OP_MSG_RING), so that nobody can tell what is \
     in flight",
    "let the program ask for each answer, send without IORING_OP_SEND_ZC, and wake its other threads by an eventfd",
);

/// Waits until nothing is in flight in any instance of the tree, and says whether there is one. That comes before
/// anything else of a file is read: an answer may move a position, fill a pipe, or count an eventfd up.
///
/// # Errors
/// Refused, if requests stay in flight; if a task is gone.
pub(crate) fn settle(tasks: &mut Tasks) -> Result<bool> {
    let anonymous = anonymous_device()?;
    let mut settled = HashSet::new();
    for task in 0..tasks.len() {
        // Those of 32-bit tasks are refused.
        if tasks[task].is_zombie() || tasks[task].is_32bit() {
            continue;
        }
        let Task { pid, descriptors, .. } = &tasks[task];
        let listed = descriptors.iter().filter(|listed| listed.key.0 == anonymous);
        let own = listed.filter(|listed| is_instance(*pid, listed.fd));
        let own: Vec<i32> = own.filter(|own| settled.insert(own.key)).map(|own| own.fd).collect();
        for fd in own {
            let found = look(tasks, task, fd)?;
            let holders = holders(tasks, &found);
            wait(tasks, &found, &holders)?;
        }
    }
    Ok(!settled.is_empty())
}

/// The device of files without a file system.
fn anonymous_device() -> Result<u64> {
    let what =
        |call: &'static str| move || format!("the device of anon_inode:/ ({call} of an eventfd)");
    let any = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).context(what("making"))?;
    Ok(rustix::fs::fstat(any).context(what("fstat"))?.st_dev)
}

fn is_instance(pid: i32, fd: i32) -> bool {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}"));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]")
}

/// A descriptor of a task, as far as it takes to ask for answers.
fn look(tasks: &[Task], task: usize, fd: i32) -> Result<Found> {
    let Task { pid, pidfd, .. } = &tasks[task];
    let file = pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty())
        .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
    Ok(Found { task, ..Found::look(*pid, fd, file, FdInfo::default())? })
}

/// Whether a line of fdinfo is of a poll, or of an answer that waits for room.
fn is_waiting(line: &str) -> bool {
    line.starts_with("op=") || line.starts_with("user_data=")
}

/// Waits until nothing is in flight. Answers that need their task get it: it asks for them, and
/// wakes the thread that fetches requests. Returns what fdinfo shows then.
pub(super) fn wait(
    tasks: &mut Tasks,
    found: &Found,
    holders: &[(usize, i32)],
) -> Result<(Counts, FdInfo)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let info = FdInfo::parse(&proc::read(found.pid, &format!("fdinfo/{}", found.fd))?);
        // While somebody works with an instance, the kernel shows nothing of it.
        let counts = Counts::parse(&info)
            .filter(|counts| counts.sq_entries <= MAX_SQ && counts.cq_entries <= 2 * MAX_SQ);
        let in_flight = counts.map(|counts| counts.in_flight(polled::number(&info).is_some()));
        // Polls that stay after an answer, and answers that the ring has no room for.
        let lists = info.rest.iter().skip_while(|line| !line.starts_with("PollList"));
        let waits = lists.map(|line| line.trim_start()).any(is_waiting);
        if let (Some(counts), Some(0), false) = (counts, in_flight, waits) {
            return Ok((counts, info));
        }
        if in_flight.is_some_and(|in_flight| in_flight.cast_signed() < 0) {
            return Err(refuse_use(found, ANSWERED_MORE.0, ANSWERED_MORE.1));
        }
        if Instant::now() > deadline {
            let Some(in_flight) = in_flight else {
                return Err(refuse(found, "its fdinfo shows no rings"));
            };
            let some = if in_flight == 0 { "some".to_owned() } else { in_flight.to_string() };
            return Err(refuse(
                found,
                format!(
                    "{some} of its requests are in flight and were not answered in {} seconds (one that \
                     waits for a client, or a timeout, may take for ever); try again when it rests",
                    PATIENCE.as_secs(),
                ),
            ));
        }
        for &(task, fd) in holders {
            ask_for_answers(tasks, task, fd)?;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Has all threads of a task ask for answers: what a connection or a disk has answered waits for the
/// thread that has made the request.
fn ask_for_answers(tasks: &mut Tasks, task: usize, fd: i32) -> Result<()> {
    let fd = u64::from(fd.cast_unsigned());
    let ask = |thread: &mut Tracee| {
        let mut batch = thread.batch();
        batch.call((libc::SYS_io_uring_enter, [fd, 0, 0, GETEVENTS | SQ_WAKEUP, 0, 0]));
        batch.run().map(drop)
    };
    ask(tasks.remote(task)?)?;
    let Some((first, others)) = tasks[task].threads.split_first_mut() else { return Ok(()) };
    for thread in others {
        // One after the other: each has all the room.
        thread.share_stub(first, 0);
        ask(thread)?;
    }
    Ok(())
}
