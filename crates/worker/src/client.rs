//! The daemon's side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::channel::{Channel, MAX_DESCRIPTORS};
use crate::message::{Answer, Class, Event, Job, Outcome, Report};

/// Why a worker cannot be spoken to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be started.
    #[error("start a worker ({}): {source}", program.display())]
    Start {
        /// The program that was to become the worker.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A job with more descriptors than a message carries, or not as many as numbers.
    #[error("a job with {given} descriptors for {named} numbers (at most {MAX_DESCRIPTORS})")]
    Descriptors {
        /// How many came along.
        given: usize,
        /// How many the job names.
        named: usize,
    },
    /// It cannot be told, or what it said is no message.
    #[error("speak to the worker: {0}")]
    Channel(#[from] io::Error),
}

/// A job that runs in a process of its own. Dropped before its end, it is cancelled.
#[derive(Debug)]
pub struct Worker {
    channel: Channel,
    child: Child,
    ended: bool,
}

impl Worker {
    /// Starts a worker: this program again, or the one that lies in its place.
    ///
    /// # Errors
    /// If this program cannot be executed, or ends before it has its job.
    pub fn start(job: &Job) -> Result<Self, Error> {
        Self::start_with(Path::new("/proc/self/exe"), job, &[])
    }

    /// Starts `program` as a worker, and hands it descriptors, one for each number that
    /// the job names. Restored tasks become children of this process if it is a
    /// subreaper (`PR_SET_CHILD_SUBREAPER`), or with `--restore-sibling`.
    ///
    /// # Errors
    /// If it cannot be started, or the descriptors are not those that the job names.
    pub fn start_with(program: &Path, job: &Job, fds: &[BorrowedFd<'_>]) -> Result<Self, Error> {
        Self::start_as(Command::new(program).arg(crate::COMMAND), job, fds)
    }

    /// Starts `command`, which becomes a worker in the end: it leaves its standard input to
    /// it, and ends after it in the same way.
    ///
    /// # Errors
    /// As [`start_with`](Self::start_with).
    pub fn start_as(
        command: &mut Command,
        job: &Job,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Self, Error> {
        Idle::start(command)?.begin(job, fds)
    }

    /// The worker's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for what the worker tells next. Not to be called after [`Event::Ended`].
    ///
    /// A worker that ends without a word yields [`Class::Died`]; what it had made has
    /// been or is being undone by the engine's guardian.
    ///
    /// # Errors
    /// If what it says is no message.
    pub fn next_event(&mut self) -> Result<Event, Error> {
        match self.channel.receive()? {
            Some((event, _)) => {
                if let Event::Ended(_) = event {
                    self.ended = true;
                    self.child.wait()?;
                }
                Ok(event)
            }
            None => {
                self.ended = true;
                let status = self.child.wait()?;
                Ok(Event::Ended(Outcome {
                    class: Class::Died,
                    errno: 0,
                    text: format!("the worker ended without a word ({status})"),
                    hint: None,
                    report: Report::default(),
                }))
            }
        }
    }

    /// Answers at a point at which the worker waits.
    ///
    /// # Errors
    /// If the worker is gone: [`next_event`](Self::next_event) tells how.
    pub fn answer(&self, go_on: bool) -> Result<(), Error> {
        Ok(self.channel.send(&Answer { go_on }, &[])?)
    }

    /// Goes on at all points, ignores all else, and returns how it ended.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub fn finish(mut self) -> Result<Outcome, Error> {
        loop {
            match self.next_event()? {
                Event::Ended(outcome) => return Ok(outcome),
                Event::Point { held: true, .. } => self.answer(true)?,
                _ => {}
            }
        }
    }

    /// Kills the worker. The tasks of a dump go on, those of a restore end: the engine's
    /// guardian sees to it.
    ///
    /// # Errors
    /// If the worker cannot be killed or waited for.
    pub fn cancel(mut self) -> Result<(), Error> {
        self.end()?;
        Ok(())
    }

    /// Leaves it to whoever has a duplicate of its descriptor ([`Heir`]): it goes on, and waits for an answer of that one.
    pub fn leave(mut self) {
        self.ended = true;
    }

    fn end(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.ended, true) {
            self.child.kill()?;
            self.child.wait()?;
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // There is nobody to tell; the kernel refuses neither to the parent of a child.
        let _ = self.end();
    }
}

/// A worker that has no job yet: it is started before there is one, when there is time for that.
#[derive(Debug)]
pub struct Idle(Worker);

impl Idle {
    /// Starts `command`, as [`Worker::start_as`] does.
    ///
    /// # Errors
    /// If the program is not there or cannot be executed.
    pub fn start(command: &mut Command) -> Result<Self, Error> {
        let (ours, theirs) = Channel::pair()?;
        let program = PathBuf::from(command.get_program());
        let child = command
            .stdin(Stdio::from(theirs.into_socket()))
            .spawn()
            .map_err(|source| Error::Start { program, source })?;
        Ok(Self(Worker { channel: ours, child, ended: false }))
    }

    /// Gives it its job and descriptors.
    ///
    /// # Errors
    /// If it has ended; if the descriptors are not those that the job names.
    pub fn begin(self, job: &Job, fds: &[BorrowedFd<'_>]) -> Result<Worker, Error> {
        if fds.len() != job.descriptors.len() || fds.len() > MAX_DESCRIPTORS {
            return Err(Error::Descriptors { given: fds.len(), named: job.descriptors.len() });
        }
        self.0.channel.send(job, fds)?;
        Ok(self.0)
    }
}

impl AsFd for Worker {
    /// Readable when [`next_event`](Worker::next_event) does not block.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// A worker as somebody sees it who has not started it: should whoever has end without an answer, this one can give it.
#[derive(Debug)]
pub struct Heir {
    channel: Channel,
}

impl Heir {
    /// `socket` is a duplicate of the descriptor of a [`Worker`]: as long as it is open, that waits for an answer, also if
    /// whoever has started it leaves it ([`Worker::leave`]).
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { channel: Channel::new(socket) }
    }

    /// Answers at the point at which the worker waits, and waits until it has ended, or says nothing for so long.
    ///
    /// # Errors
    /// If it has ended already, is silent, or says what is no message.
    pub fn answer(self, go_on: bool, patience: Duration) -> Result<(), Error> {
        self.channel.send(&Answer { go_on }, &[])?;
        let limit = Timespec { tv_sec: patience.as_secs().cast_signed(), tv_nsec: 0 };
        loop {
            let mut heard = [PollFd::new(&self.channel, PollFlags::IN)];
            match poll(&mut heard, Some(&limit)) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(io::Error::from(e).into()),
                Ok(_) => {}
            }
            match self.channel.receive()? {
                None | Some((Event::Ended(_), _)) => return Ok(()),
                Some(_) => {}
            }
        }
    }
}
