//! A shepherd keeps one job: the small process that is the job's init and outlives the
//! daemon.
//!
//! It is process 1 of a pid namespace that it makes for the job, together with a mount
//! namespace where `/proc` shows that namespace. So the job's process ids are its own and
//! always free when it is brought back; nothing that the job starts can get away; and if
//! the shepherd is killed, the kernel ends all of the job at once, never a part of it.
//! Dumps and restores run in the same namespaces, as children of the shepherd, and find
//! plain processes there.
//!
//! The shepherd takes orders on a socket in the directory of its run ([`message`]), and
//! leaves its last word there ([`ending`]), on stable storage, before it says it.

pub(crate) mod checkpoint;
pub(crate) mod digests;
pub(crate) mod disk;
mod ending;
pub(crate) mod engine;
mod entry;
mod launch;
pub(crate) mod message;
mod orders;
pub(crate) mod pump;
mod work;

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

pub(crate) use ending::{ENDING, keep_room};
pub(crate) use entry::{LOCK, LOG, PID, SOCKET, enter, start};
pub(crate) use launch::{launch, not_found, vacate};
pub(crate) use work::{COPY, IsWanted, OWN, copy, prepare, progress, unprepare};

use crate::cgroup::Cgroups;
use crate::container::Container;
use crate::files::JobDir;
use crate::spec::Spec;
use checkpoint::CheckpointRecord;
use engine::{Base, NotWoken, SaveEnd, Streams};
use message::{Exit, Order, Report, RunPhase};
use pump::{Input, Output};

/// The hidden subcommand that is a shepherd.
pub(crate) const SHEPHERD: &str = "shepherd";
/// The hidden subcommand that becomes the job.
pub(crate) const LAUNCH: &str = "launch";
/// The hidden subcommand that becomes the job's command for giving way.
pub(crate) const VACATE: &str = "vacate";

/// What was submitted for the job in `dir`.
///
/// # Errors
/// If the job has no such file, or that is no description of a job.
pub(crate) fn read_spec(dir: &JobDir) -> io::Result<Spec> {
    Ok(serde_json::from_slice(&fs::read(dir.spec())?)?)
}

/// The cgroups of the job in `dir`: named after the data directory and the job.
#[must_use]
pub(crate) fn cgroups(dir: &JobDir) -> Cgroups {
    // FNV-1a: two data directories on one machine must not share cgroups.
    let bytes = dir.path().as_os_str().as_encoded_bytes();
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Cgroups::named(&format!("{hash:016x}"))
}

/// What can happen to a shepherd.
enum Happening {
    /// A child has ended, or many have.
    Child,
    /// Somebody has connected.
    Connected(UnixStream),
    /// The daemon wants something.
    Order(Order),
    /// Saving is over.
    Saved(SaveEnd),
    /// A checkpoint is on stable storage, or could not be put there after such a pause.
    Settled(u64, Duration, io::Result<()>),
    /// Bringing back is over.
    Woken(Result<u64, NotWoken>),
    /// All memory of a job that was brought back is there.
    MemoryCame,
    /// The job has written more than it may.
    DiskUsed,
    /// The command for giving way has succeeded; or it has failed, or the job has not ended in time.
    Vacated(Result<(), String>),
}

/// How far the command for giving way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vacating {
    /// It is at work.
    AtWork,
    /// It has succeeded, and the job is to end.
    Told,
}

/// One job, and where it stands.
struct Shepherd {
    dir: JobDir,
    job: u64,
    run: u64,
    spec: Spec,
    cgroups: Cgroups,
    /// The container that the job is, if it is one.
    container: Option<Container>,
    streams: Streams,
    inputs: Sender<Happening>,
    daemon: Option<UnixStream>,
    phase: RunPhase,
    /// Whether the job is frozen for the time of a checkpoint that is to be kept.
    was_stopped: bool,
    /// The job's first process.
    root: i32,
    /// Whether it has run in this run.
    ran: bool,
    /// How it ended, if it did while it was not clear what that means.
    exit: Option<Exit>,
    /// The newest checkpoint.
    checkpoint: Option<u64>,
    /// What the next checkpoint can build on.
    base: Option<Box<Base>>,
    /// Whether memory of the job was still coming in when that was last looked at.
    lazy: bool,
    /// Whether the job was lost by whoever saved it, when that was done.
    lost: bool,
    /// Whether the job has written more than it may.
    out_of_disk: bool,
    /// How far the command for giving way is, if it was told to the job.
    vacating: Option<Vacating>,
    /// An order that came while the job was saved and is to run on.
    deferred: Option<Order>,
    /// Signals that came while it was brought back, and whether they are for its process group.
    signals: Vec<(i32, bool)>,
}

impl Shepherd {
    /// A shepherd of a new run, with the job not started yet.
    fn new(
        dir: JobDir,
        run: u64,
        from: Option<&CheckpointRecord>,
        base: [u64; 2],
        inputs: Sender<Happening>,
    ) -> io::Result<Self> {
        let spec = read_spec(&dir)?;
        let written = from.map_or(base, |record| record.written);
        let input = spec.stdin.then(|| {
            let offset = from.map_or(0, |record| record.read);
            Input::open(&dir, offset).map(Arc::new)
        });
        let streams = Streams {
            input: input.transpose()?,
            out: Arc::new(Output::open(&dir.out(), written[0])?),
            err: Arc::new(Output::open(&dir.err(), written[1])?),
        };
        let name = dir.path().file_name().and_then(|name| name.to_str());
        let job = name.and_then(|name| name.parse().ok()).unwrap_or(0);
        let cgroups = cgroups(&dir);
        cgroups.create(&spec.limits)?;
        Ok(Self {
            dir,
            job,
            run,
            spec,
            cgroups,
            container: None,
            streams,
            inputs,
            daemon: None,
            phase: RunPhase::Running,
            was_stopped: false,
            root: 0,
            ran: false,
            exit: None,
            checkpoint: from.map(|record| record.seq),
            base: None,
            lazy: false,
            lost: false,
            out_of_disk: false,
            vacating: None,
            deferred: None,
            signals: Vec::new(),
        })
    }

    /// Starts the job from its beginning.
    fn start_job(&mut self) -> io::Result<()> {
        work::create(&self.dir, &self.spec)?;
        self.mount()?;
        let end = |fd: &OwnedFd| fd.try_clone().map(Stdio::from);
        let input = match &self.streams.input {
            Some(input) => end(input.job_end())?,
            None => Stdio::null(),
        };
        if let Some(container) = &self.container {
            let (out, err) = (end(self.streams.out.job_end())?, end(self.streams.err.job_end())?);
            container.start(input, out, err)?;
            self.root = container.root()?;
            self.ran = true;
            return Ok(());
        }
        // The job's end of this pipe closes when it has become the job. Before, it is a
        // process that cannot be saved: its program was opened in another mount namespace.
        let (ready, launching) = rustix::pipe::pipe()?;
        rustix::io::fcntl_setfd(&ready, rustix::io::FdFlags::CLOEXEC)?;
        let child = Command::new("/proc/self/exe")
            .args(["queue", LAUNCH])
            .arg(self.dir.path())
            .arg(launching.as_raw_fd().to_string())
            // It has the rights of the daemon until it has become the job's user. What the job's environment says, to the
            // dynamic loader for one, must not count before.
            .env_clear()
            .env(launch::NUMBER, self.job.to_string())
            .current_dir("/")
            .stdin(input)
            .stdout(end(self.streams.out.job_end())?)
            .stderr(end(self.streams.err.job_end())?)
            .spawn()?;
        self.root = i32::try_from(child.id()).unwrap_or(i32::MAX);
        drop(launching);
        while rustix::io::read(&ready, &mut [0_u8; 1]) == Err(rustix::io::Errno::INTR) {}
        self.ran = true;
        Ok(())
    }

    /// Mounts what only the job sees.
    fn mount(&mut self) -> io::Result<()> {
        work::show(&self.dir)?;
        let cgroup = self.cgroups.path();
        self.container = Container::mount(&self.dir, &self.spec, self.job, &cgroup)?;
        Ok(())
    }

    /// Takes what happens, one after the other, until the job is over.
    fn watch(mut self, inputs: &Receiver<Happening>) -> io::Result<()> {
        while let Ok(input) = inputs.recv() {
            match input {
                Happening::Child => self.reap(),
                Happening::Connected(stream) => self.connected(stream),
                Happening::Order(order) => self.order(order),
                Happening::Saved(end) => self.saved(end),
                Happening::Settled(seq, after, outcome) => self.settled(seq, after, outcome),
                Happening::Woken(outcome) => self.woken(outcome),
                Happening::MemoryCame => self.lazy = false,
                Happening::DiskUsed => self.disk_used(),
                Happening::Vacated(outcome) => self.vacated(outcome),
            }
            if let Some(exit) = self.is_over() {
                // What is left of it ends with this process, and it goes on from its checkpoint.
                if self.lost_its_memory(exit) {
                    return Err(io::Error::other("what brought its memory in was killed"));
                }
                if self.lost {
                    return Err(io::Error::other("what saved it was killed when it was to end it"));
                }
                return self.end(exit);
            }
        }
        Ok(())
    }

    /// How the job ended, once that is sure. While it is saved or brought back, its first
    /// process may end because of that.
    fn is_over(&self) -> Option<Exit> {
        let settled = matches!(self.phase, RunPhase::Running | RunPhase::Stopped);
        // Whether it has given way depends on what comes of its command.
        let is_told = self.vacating != Some(Vacating::AtWork) || self.out_of_disk;
        self.exit.filter(|_| settled && is_told)
    }

    /// Whether the job was killed because nobody could give it its memory any more.
    fn lost_its_memory(&self, exit: Exit) -> bool {
        let killed = exit == Exit::Signal(rustix::process::Signal::KILL.as_raw());
        killed && self.lazy && !engine::is_memory_coming()
    }

    /// Takes note of children of this thread that have ended: the job's first process,
    /// and orphans. Workers are children of other threads.
    fn reap(&mut self) {
        use torpor_sys::process::{Status, wait_any};
        if self.container.is_some() && self.phase == RunPhase::Waking {
            // Which process is its first one is known when it is back.
            return;
        }
        while let Ok(Some((pid, status))) = wait_any() {
            if pid == self.root {
                self.exit = match status {
                    Status::Exited(code) => Some(Exit::Code(code)),
                    Status::Signaled(signal) => Some(Exit::Signal(signal)),
                    _ => self.exit,
                };
            }
        }
    }

    fn connected(&mut self, stream: UnixStream) {
        self.daemon = Some(stream);
        self.tell(&Report::State {
            job: self.job,
            run: self.run,
            phase: self.phase,
            checkpoint: self.checkpoint,
        });
    }

    /// Tells the daemon. If there is none, the next one learns how things stand.
    fn tell(&mut self, report: &Report) {
        if let Some(stream) = &mut self.daemon
            && message::send(stream, report).is_err()
        {
            self.daemon = None;
        }
    }
}

/// Microseconds since then.
fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
