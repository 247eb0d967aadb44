//! What a daemon and its worker say to each other.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What a worker is to do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The command line, without the program's name: `dump --tree 7 --images-dir x`.
    /// Commands are those that work on images: dump, pre-dump, restore, page-server,
    /// lazy-pages, dedup. A worker of `service` serves one client, on the first of the descriptors.
    pub args: Vec<String>,
    /// The directory that paths are relative to.
    pub dir: PathBuf,
    /// The points at which the worker waits for an [`Answer`]; it only tells of the
    /// others. Names as in `CRTOOLS_SCRIPT_ACTION`: `post-dump`, `post-restore`, …
    #[serde(default)]
    pub holds: Vec<String>,
    /// The points at which the worker leaves an empty file of that name in `dir`, so that they are known to have been
    /// reached when nobody is left who was told. `lazy-pages` has one such point: the tasks run and have all their memory. It
    /// never ends them from then on.
    #[serde(default)]
    pub marks: Vec<String>,
    /// The numbers under which the worker finds the descriptors that come along, in
    /// their order (`--inherit-fd fd[5]:key`).
    #[serde(default)]
    pub descriptors: Vec<i32>,
}

/// What the daemon says at a point where the worker waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Whether the work goes on. If not, it is undone: the tasks of a dump go on, those
    /// of a restore end.
    pub go_on: bool,
}

/// What a worker tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A record of the log.
    Log {
        /// How much it matters.
        level: Level,
        /// What it says, its fields included.
        text: String,
        /// Names and values of its fields.
        fields: Vec<(String, String)>,
    },
    /// How much of the memory has been worked on, in bytes.
    Progress {
        /// So far.
        done: u64,
        /// In the end.
        total: u64,
    },
    /// The work has come to a point at which others may want to do something.
    Point {
        /// Its name in CRIU's interfaces.
        name: String,
        /// The root task, in the worker's pid namespace, where there is one.
        pid: Option<i32>,
        /// The port that a lazy dump listens on, at `status-ready`.
        port: Option<u16>,
        /// Whether the worker waits for an answer.
        held: bool,
    },
    /// The work is over; nothing comes after this.
    Ended(Outcome),
}

/// How much a record of the log matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Why something failed.
    Error,
    /// What may be a surprise.
    Warn,
    /// What is done.
    Info,
    /// Each object.
    Debug,
    /// Each step.
    Trace,
}

/// How a job went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// In which way.
    pub class: Class,
    /// The kernel's number nearest to it, 0 for [`Class::Done`]; CRIU's `cr_errno`.
    pub errno: i32,
    /// What happened, in a sentence.
    pub text: String,
    /// What to try.
    pub hint: Option<String>,
    /// What was done.
    pub report: Report,
}

impl Outcome {
    /// All was done.
    #[must_use]
    pub fn done(report: Report) -> Self {
        Self { class: Class::Done, errno: 0, text: String::new(), hint: None, report }
    }

    /// It was not, because of what `text` says.
    #[must_use]
    pub fn failed(class: Class, text: impl Into<String>) -> Self {
        let report = Report::default();
        Self { class, errno: class.errno(), text: text.into(), hint: None, report }
    }

    /// Prints it on the standard output, as one object on a line of its own. Where that cannot be written
    /// the exit status has to say it all.
    pub fn print(&self) {
        let _ = writeln!(std::io::stdout(), "{}", serde_json::json!(self));
    }
}

/// A refusal, in a sentence.
impl From<String> for Outcome {
    fn from(text: String) -> Self {
        Self::failed(Class::Refused, text)
    }
}

/// The ways in which a job ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// All was done.
    Done,
    /// The caller, or a script of its, said no.
    Vetoed,
    /// The other end of a connection went away.
    PeerLost,
    /// The other end said what it must not.
    Protocol,
    /// Something cannot be kept; the text names the task, the object and what to do.
    Refused,
    /// The images are damaged, or contradict each other or this host.
    BadImage,
    /// The policy forbids what the images ask for, or a key is missing or wrong.
    Forbidden,
    /// The kernel, or a program that the engine runs (nft, ip), refused an operation; a task
    /// has ended meanwhile.
    Kernel,
    /// The command line makes no sense.
    Usage,
    /// Torpor is wrong: something of its own has panicked, or was asked for what it must not be.
    Bug,
    /// The worker ended without a word: it was killed.
    Died,
}

impl Class {
    /// The kernel's number that says most of it, where nothing says more.
    #[must_use]
    pub fn errno(self) -> i32 {
        let errno = match self {
            Self::Done => return 0,
            Self::Vetoed => Errno::CANCELED,
            Self::PeerLost => Errno::CONNRESET,
            Self::Protocol => Errno::PROTO,
            Self::Refused => Errno::OPNOTSUPP,
            Self::BadImage => Errno::BADMSG,
            Self::Forbidden => Errno::PERM,
            Self::Kernel | Self::Bug | Self::Died => Errno::IO,
            Self::Usage => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}

/// What a job did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The root task of a restore, in the worker's pid namespace.
    pub pid: Option<i32>,
    /// How many tasks were dumped.
    pub tasks: Option<u64>,
    /// The statistics of a dump or restore, by the names of their fields
    /// (`frozen_time`, `pages_written`, …); times in microseconds.
    #[serde(default)]
    pub statistics: BTreeMap<String, u64>,
}
