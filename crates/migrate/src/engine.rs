//! The engine's jobs that a migration is made of, each in a process of its own.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use torpor_worker::{Class, Event, Idle, Job, Level, Outcome, Worker};

use crate::error::{Error, Result};

/// This program.
pub(crate) const SELF: &str = "/proc/self/exe";

/// Bytes that are heard of what a program says.
const MAX_SAID: u64 = 16 << 20;

/// The number that a job finds the connection for pages under.
pub(crate) const PAGES: i32 = 40;
/// The number of what a job holds on to as long as it needs its directory.
pub(crate) const WORK: i32 = 41;

/// The number of the socket that a pager takes its restore from.
pub(crate) const PAGER: i32 = 42;

/// A descriptor that a job gets, and the number that it finds it under.
pub(crate) type Numbered<'a> = (i32, BorrowedFd<'a>);

/// The point at which the images are complete and the tasks still stopped.
pub(crate) const POST_DUMP: &str = "post-dump";
/// The point at which everything is made and nothing runs yet.
pub(crate) const POST_RESTORE: &str = "post-restore";
/// The point at which the tasks run. A file of that name in the directory of the job says that they did, with all their
/// memory, whatever has become of them since: nothing of the job ends them any more.
pub(crate) const POST_RESUME: &str = "post-resume";

/// Starts a job in `dir` with these descriptors; it waits at the points `holds`.
///
/// # Errors
/// If no process can be started.
pub(crate) fn start(
    args: Vec<String>,
    dir: &Path,
    holds: &[&str],
    fds: &[Numbered<'_>],
) -> Result<Worker> {
    start_in(idle()?, args, dir, (holds, &[]), fds)
}

/// A process for a job that comes later, so that nobody waits for it to start then.
///
/// # Errors
/// If this program cannot be executed.
pub(crate) fn idle() -> Result<Idle> {
    // Ctrl-C is for this process to deal with.
    let mut command = Command::new(SELF);
    Ok(Idle::start(command.arg(torpor_worker::COMMAND).process_group(0))?)
}

/// As [`start`], in a process that was started before; it leaves a file behind at the points `marks`.
///
/// # Errors
/// If the process has ended, or does not take the job.
pub(crate) fn start_in(
    idle: Idle,
    args: Vec<String>,
    dir: &Path,
    (holds, marks): (&[&str], &[&str]),
    fds: &[Numbered<'_>],
) -> Result<Worker> {
    tracing::debug!("torpor {}", args.join(" "));
    let job = Job {
        args,
        dir: dir.to_owned(),
        holds: words(holds),
        marks: words(marks),
        descriptors: fds.iter().map(|&(number, _)| number).collect(),
    };
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|&(_, fd)| fd).collect();
    Ok(idle.begin(&job, &fds)?)
}

/// Starts a restore in `dir` that waits when everything is made, and leaves a file behind at the points `marks`. With
/// `above`, in a pid namespace of its own with a first process that outlives the job, whose process id there is above that.
///
/// # Errors
/// If no process can be started.
pub(crate) fn start_restore(
    args: Vec<String>,
    dir: &Path,
    marks: &[&str],
    above: Option<i32>,
) -> Result<Worker> {
    let (holds, marks) = (words(&[POST_RESTORE]), words(marks));
    let job = Job { args, dir: dir.to_owned(), holds, marks, ..Job::default() };
    let mut command = Command::new(SELF);
    match above {
        Some(above) => command.args(["agent", "nest", &above.to_string()]),
        None => command.arg(torpor_worker::COMMAND),
    };
    Ok(Worker::start_as(command.process_group(0), &job, &[])?)
}

/// Runs a program to hear what it says of something that another host may have made: no more than [`MAX_SAID`] bytes each of its
/// output and its errors.
///
/// # Errors
/// If it cannot be started, or not be heard.
pub(crate) fn hear(command: &mut Command) -> io::Result<Output> {
    fn up_to_most(from: Option<impl Read>) -> io::Result<Vec<u8>> {
        let mut said = Vec::new();
        from.map_or(Ok(0), |from| from.take(MAX_SAID).read_to_end(&mut said)).map(|_| said)
    }
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn()?;
    let errors = child.stderr.take();
    let errors = thread::spawn(move || up_to_most(errors));
    // If there is more, it finds nobody who reads it.
    let stdout = up_to_most(child.stdout.take());
    let status = child.wait()?;
    let stderr = errors.join().unwrap_or_else(|_| Ok(Vec::new()));
    Ok(Output { status, stdout: stdout?, stderr: stderr? })
}

/// Points of a job, as it has them.
pub(crate) fn words(points: &[&str]) -> Vec<String> {
    points.iter().map(|&point| point.to_owned()).collect()
}

/// The options that let a job speak over its connection for pages.
#[must_use]
pub(crate) fn over_pages() -> [String; 2] {
    ["--ps-socket".to_owned(), PAGES.to_string()]
}

/// Repeats what a job logs, as far as it matters to a person.
pub(crate) fn repeat(event: &Event) {
    match event {
        Event::Log { level: Level::Error, text, .. } => tracing::debug!("{text}"),
        Event::Log { level: Level::Warn, text, .. } => tracing::warn!("{text}"),
        Event::Log { text, .. } => tracing::trace!("{text}"),
        _ => {}
    }
}

/// What has become of a job.
///
/// # Errors
/// If it has failed; `Link`, if the other end was lost.
pub(crate) fn judge(what: &str, outcome: Outcome) -> Result<Outcome> {
    match outcome.class {
        Class::Done => Ok(outcome),
        Class::PeerLost => Err(Error::Link(format!("{what}: {}", outcome.text))),
        _ => Err(Error::Refused { text: format!("{what}: {}", outcome.text), hint: outcome.hint }),
    }
}

/// Waits for the end of a job that has nothing to wait for any more.
///
/// # Errors
/// As [`judge`]; if the worker has ended without a word.
pub(crate) fn finish(what: &str, mut worker: Worker) -> Result<Outcome> {
    loop {
        match worker.next_event()? {
            Event::Ended(outcome) => return judge(what, outcome),
            event => repeat(&event),
        }
    }
}

/// Whether something can be read, of several; waits until then, or for `patience`.
///
/// # Errors
/// `EINVAL` for more of them than this process may have open, `ENOMEM`. A signal is no error.
pub(crate) fn wait_readable(
    fds: &[BorrowedFd<'_>],
    patience: Option<Duration>,
) -> Result<Vec<bool>> {
    let all: Vec<_> = fds.iter().map(|fd| (fd.as_fd(), PollFlags::IN)).collect();
    wait_ready(&all, patience)
}

/// Whether bytes can be written to `to`, and whether `end` can be read; waits until then, or for `patience`.
///
/// # Errors
/// As [`wait_readable`].
pub(crate) fn wait_writable(
    to: BorrowedFd<'_>,
    end: BorrowedFd<'_>,
    patience: Duration,
) -> Result<[bool; 2]> {
    let ready = wait_ready(&[(to, PollFlags::OUT), (end, PollFlags::IN)], Some(patience))?;
    Ok([ready[0], ready[1]])
}

fn wait_ready(
    fds: &[(BorrowedFd<'_>, PollFlags)],
    patience: Option<Duration>,
) -> Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|&(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
    let timeout = patience.map(|time| rustix::time::Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    });
    loop {
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => return Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::Io { what: "poll".to_owned(), source: e.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn who_says_too_much_is_not_heard_out() {
        let said =
            hear(Command::new("sh").args(["-c", "echo why >&2; echo what; exit 3"])).unwrap();
        assert_eq!((&said.stdout[..], &said.stderr[..]), (&b"what\n"[..], &b"why\n"[..]));
        assert_eq!(said.status.code(), Some(3));
        for to in ["1", "2"] {
            let said = hear(Command::new("sh").args(["-c", &format!("exec yes >&{to}")])).unwrap();
            assert!(!said.status.success());
            assert_eq!((said.stdout.len() + said.stderr.len()) as u64, MAX_SAID);
        }
    }
}
