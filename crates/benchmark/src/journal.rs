//! The journal of a run: a line for each thing that happens, written before the next begins. All
//! results are computed from it, so that a run that was killed goes on where it was.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::catalogue::Group;
use crate::config::Config;
use crate::machine::{Machine, Ticks};
use crate::overhead::Overhead;
use crate::results::{Status, Target, is_false};

/// What a run begins with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The format, [`crate::results::SCHEMA`].
    pub schema: String,
    /// The version of the tool.
    pub tool: String,
    /// Which run this is.
    pub id: String,
    /// When it began.
    pub started: f64,
    /// The seed of its order.
    pub seed: u64,
    /// The sum of what is measured and in which order, see [`crate::plan::sum`]. Journals of before have
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// What it measures.
    pub config: Config,
    /// Where.
    pub machine: Machine,
}

/// A line of the journal after the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// The tool has been started again.
    Resumed {
        /// When.
        time: f64,
    },
    /// What was found out about the targets.
    Targets(Vec<Target>),
    /// The loop between samples has taken so many ms.
    Calibration(f64),
    /// What has passed of the processors' time since the last such line, or since the tool was started.
    Passed(Ticks),
    /// A piece of work begins.
    Begin(u64),
    /// It has ended, with this outcome.
    Done {
        /// Which, by its place in the order.
        item: u64,
        /// What that was. Journals of before do not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        work: Option<Work>,
        /// When it began.
        time: f64,
        /// What came of it.
        outcomes: Vec<Outcome>,
        /// What the tool itself took for it.
        #[serde(default)]
        overhead: Overhead,
    },
    /// All has been done.
    Complete,
}

/// What a piece of work is: samples are credited by it, whatever a tool of later would do at that place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The target, by its name.
    pub target: String,
    /// The group of benchmarks.
    pub group: Group,
    /// Whether its samples are warm-up.
    pub warmup: bool,
    /// Whether they are none, though nothing of the kind was done before them since the endpoint was opened:
    /// the first ones after an interruption, or after a runtime was started again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cold: bool,
}

/// What came of one benchmark in one piece of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The benchmark.
    pub benchmark: String,
    /// What came of it.
    pub status: Status,
    /// The value, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Why, where it is not [`Status::Ok`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A journal that lines are added to.
#[derive(Debug)]
pub struct Journal {
    file: File,
}

/// A journal as it was read.
#[derive(Debug)]
pub struct Past {
    /// Its first line.
    pub head: Head,
    /// The others.
    pub lines: Vec<Line>,
}

impl Past {
    /// The pieces of work that have ended.
    #[must_use]
    pub fn done(&self) -> BTreeSet<u64> {
        let done = self.lines.iter().filter_map(|line| match line {
            Line::Done { item, .. } => Some(*item),
            _ => None,
        });
        done.collect()
    }

    /// Whether the run went to its end.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.lines.contains(&Line::Complete)
    }
}

/// The longest line that is read.
const LONGEST: u64 = 16 << 20;

impl Journal {
    /// Begins a journal.
    ///
    /// # Errors
    /// If somebody else writes it, or the file cannot be made or written.
    pub fn create(path: &Path, head: &Head) -> io::Result<Self> {
        // What is there goes only when it is sure that nobody writes it.
        let options = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = alone(options?)?;
        file.set_len(0)?;
        let mut journal = Self { file };
        journal.line(head)?;
        Ok(journal)
    }

    /// Opens a journal to go on with it. A last line that was being written when the tool was
    /// killed is cut off.
    ///
    /// # Errors
    /// If it cannot be read or written, or is damaged elsewhere than in its last line.
    pub fn open(path: &Path) -> io::Result<(Self, Past)> {
        let mut file = alone(OpenOptions::new().write(true).open(path)?)?;
        let (past, length) = read(path)?;
        file.set_len(length)?;
        file.seek(SeekFrom::End(0))?;
        Ok((Self { file }, past))
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)?;
        self.file.sync_data()
    }

    /// Adds a line; it is on the disk when this returns.
    ///
    /// # Errors
    /// If the disk does not take it: it is full, or fails.
    pub fn add(&mut self, line: &Line) -> io::Result<()> {
        self.line(line)
    }
}

/// Takes a journal for this process alone, until it ends.
fn alone(file: File) -> io::Result<File> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::Error::other(
            "another run writes here; wait for its end, or choose another directory with --output",
        )),
        Err(error) => Err(error.into()),
    }
}

/// Reads a journal: what it says, and how long its whole lines are.
///
/// # Errors
/// If it cannot be read, or is damaged elsewhere than in its last line.
pub fn read(path: &Path) -> io::Result<(Past, u64)> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut length = 0;
    let mut head = None;
    let mut lines = Vec::new();
    loop {
        let mut text = Vec::new();
        let read = reader.by_ref().take(LONGEST).read_until(b'\n', &mut text)?;
        if read == 0 || text.last() != Some(&b'\n') {
            break;
        }
        if head.is_none() {
            head = Some(serde_json::from_slice(&text)?);
        } else {
            lines.push(serde_json::from_slice(&text)?);
        }
        length += u64::try_from(read).unwrap_or(0);
    }
    let none = || io::Error::new(io::ErrorKind::InvalidData, "the journal has no whole first line");
    Ok((Past { head: head.ok_or_else(none)?, lines }, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A journal that nobody writes any more. What another test has just borne holds all descriptors until it is
    /// another program, and so the lock.
    fn past(path: &Path) -> Past {
        for _ in 0..6000 {
            match Journal::open(path) {
                Err(error) if error.to_string().contains("another run writes here") => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                opened => return opened.unwrap().1,
            }
        }
        panic!("somebody writes {} all the time", path.display());
    }

    #[test]
    fn a_line_that_was_cut_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let head = Head {
            schema: crate::results::SCHEMA.into(),
            tool: "1".into(),
            id: "x".into(),
            started: 1.0,
            seed: 2,
            plan: None,
            config: Config::default(),
            machine: Machine::default(),
        };
        let mut journal = Journal::create(&path, &head).unwrap();
        journal.add(&Line::Begin(0)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let (outcomes, overhead) = (Vec::new(), Overhead::default());
        let work = Some(Work {
            target: "a/b".into(),
            group: Group::Scale { containers: 5 },
            warmup: true,
            cold: false,
        });
        journal.add(&Line::Done { item: 0, work, time: 1.0, outcomes, overhead }).unwrap();
        // Nobody else writes it meanwhile, or begins anew.
        assert!(Journal::open(&path).is_err() && Journal::create(&path, &head).is_err());
        drop(journal);
        let all = std::fs::read(&path).unwrap();
        for cut in whole.len()..all.len() {
            std::fs::write(&path, &all[..cut]).unwrap();
            let past = past(&path);
            assert_eq!(past.lines, [Line::Begin(0)]);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), whole.len() as u64);
        }
        std::fs::write(&path, &all).unwrap();
        assert_eq!(read(&path).unwrap().0.done(), BTreeSet::from([0]));
    }
}
