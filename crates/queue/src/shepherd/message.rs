//! What the daemon and a shepherd say to each other: one JSON object a line.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// No line is longer.
const MAX_LINE: u64 = 1 << 20;

/// What the daemon asks a shepherd to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Send a signal to the job's first process, or to its process group.
    Signal {
        /// The signal's number.
        signal: i32,
        /// Whether the whole process group gets it.
        group: bool,
    },
    /// Freeze the job where it is; it keeps its memory.
    Stop,
    /// Let a frozen job go on.
    Continue,
    /// Save the job as checkpoint `seq`, and end its tasks unless `keep` is set.
    Checkpoint {
        /// The number of the checkpoint.
        seq: u64,
        /// Whether the job runs on.
        keep: bool,
        /// How many rounds of written pages come before, while it runs.
        rounds: u32,
        /// Whether it builds on the one before however many that builds on: that was sent to another machine.
        #[serde(default)]
        deep: bool,
        /// How the images are written.
        #[serde(default)]
        style: Style,
    },
    /// Bring the job back from the checkpoint that it sleeps in.
    Restore,
    /// Run the job's own command for giving way, and wait for the job to end.
    PreemptCommand {
        /// Seconds after which it has failed.
        timeout: u64,
    },
    /// End the job and all that belongs to it.
    Kill,
}

/// How images are written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Style {
    /// By which method they are compressed.
    pub compress: Option<String>,
    /// For whom they are sealed.
    pub recipient: Option<String>,
    /// The key that opens them again.
    pub identity: Option<PathBuf>,
}

/// How the job is, as a shepherd tells everyone who connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RunPhase {
    /// It runs, or is about to.
    Running,
    /// It is frozen, with its memory.
    Stopped,
    /// It is being saved.
    Saving,
    /// It is a checkpoint and no process.
    Asleep,
    /// It is being brought back.
    Waking,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Exit {
    /// With an exit code.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl Exit {
    /// The number that a shell shows for it.
    #[must_use]
    pub(crate) fn number(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => 128 + signal,
        }
    }
}

/// With this a note begins that a client tells even of a job that went well.
pub(crate) const LOST: &str = "lost: ";

/// The last word of a run, which outlives its shepherd on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ending {
    /// The job.
    pub job: u64,
    /// Its run; the word of an earlier run is ignored.
    pub run: u64,
    /// How its first process ended.
    pub exit: Exit,
    /// Names of processes that were still there and had to be killed.
    pub leftover: Vec<String>,
    /// Whether it was out of its memory.
    pub out_of_memory: bool,
    /// Whether it was refused a process or a thread because it had as many as it may.
    #[serde(default)]
    pub out_of_pids: bool,
    /// Whether it had written more than it may.
    #[serde(default)]
    pub out_of_disk: bool,
    /// What of its output or its artefacts could not be kept, and why.
    #[serde(default)]
    pub lost: Vec<String>,
    /// Whether it ended because the command for giving way told it to.
    pub gave_way: bool,
    /// Whether it has run: one that could not be brought back has not.
    #[serde(default)]
    pub ran: bool,
    /// When, in milliseconds since 1970.
    pub at: i64,
}

#[cfg(test)]
impl Ending {
    /// Of a run that has done all that it was to do.
    pub(crate) fn good(job: u64, run: u64) -> Self {
        Self {
            job,
            run,
            exit: Exit::Code(0),
            leftover: Vec::new(),
            out_of_memory: false,
            out_of_pids: false,
            out_of_disk: false,
            lost: Vec::new(),
            gave_way: false,
            ran: true,
            at: 0,
        }
    }
}

/// A checkpoint, as its shepherd has measured it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// Its number.
    pub seq: u64,
    /// How long the job stood still, in microseconds; all of the dump unless it ran on.
    pub frozen_us: u64,
    /// How long it took altogether, in microseconds.
    pub took_us: u64,
    /// Bytes of its images, as they are on the disk.
    pub bytes: u64,
    /// Bytes of memory that were written to them, in all rounds, before they were packed.
    #[serde(default)]
    pub written: u64,
    /// Bytes of memory that the job held.
    #[serde(default)]
    pub memory: u64,
    /// Milliseconds since the checkpoint that it builds on, if it does.
    pub since_ms: Option<u64>,
    /// Whether the job's tasks ended with it.
    pub ended_tasks: bool,
    /// Bytes of memory that were there twice while it was copied on write, if it was.
    #[serde(default)]
    pub cow_bytes: Option<u64>,
}

/// What a shepherd tells the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Report {
    /// First word of each connection: how things are.
    State {
        /// The job.
        job: u64,
        /// Its run.
        run: u64,
        /// How the job is.
        phase: RunPhase,
        /// The checkpoint that it sleeps in or was last saved as.
        checkpoint: Option<u64>,
    },
    /// The job is frozen.
    Stopped {
        /// How long that took, in microseconds.
        took_us: u64,
    },
    /// A frozen job goes on.
    Continued,
    /// The job is saved.
    Saved(Saved),
    /// The checkpoint is on stable storage, and older ones are needed no more.
    Durable {
        /// Its number.
        seq: u64,
    },
    /// The checkpoint could not be put on stable storage, which is tried again.
    NotDurable {
        /// Its number.
        seq: u64,
        /// Why.
        text: String,
    },
    /// The job could not be saved, and goes on.
    NotSaved {
        /// Whether it is the job that cannot be saved, so that trying again is useless.
        refused: bool,
        /// What and where.
        text: String,
    },
    /// The job is back.
    Restored {
        /// How long that took, in microseconds.
        took_us: u64,
    },
    /// The job could not be brought back; its checkpoint is untouched.
    NotRestored {
        /// Why.
        text: String,
        /// The checkpoint that is not what was saved, if that is why.
        #[serde(default)]
        damaged: Option<u64>,
    },
    /// There is something to say about the job.
    Remark {
        /// What.
        text: String,
    },
    /// Processes of the job had gone to other cgroups, and were brought back.
    BroughtBack {
        /// What they are called.
        names: BTreeSet<String>,
    },
    /// The job's own command for giving way failed or took too long; the job goes on.
    NotVacated {
        /// Why.
        text: String,
    },
    /// The run is over.
    Ended(Ending),
}

/// Writes one message as a line.
///
/// # Errors
/// If the other end is gone.
pub(crate) fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads the next line; `None` when the other end is closed.
///
/// # Errors
/// If what comes is no such message, or is longer than any.
pub(crate) fn receive<T: DeserializeOwned>(stream: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let mut bounded = io::Read::take(stream, MAX_LINE);
    match bounded.read_until(b'\n', &mut line)? {
        0 => Ok(None),
        _ if line.last() != Some(&b'\n') => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(Some(serde_json::from_slice(&line)?)),
    }
}
