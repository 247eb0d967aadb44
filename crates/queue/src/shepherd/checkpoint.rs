//! A checkpoint of a job on disk: its record, what it builds on, and how it comes to survive the loss
//! of power.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::digests;
use crate::files::{self, JobDir, checkpoint_number};

/// The name of its record in a checkpoint.
pub(crate) const RECORD: &str = "record.json";

/// What is kept beside the images of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CheckpointRecord {
    /// The number of the checkpoint.
    pub seq: u64,
    /// The job's first process, in its pid namespace.
    pub root: i32,
    /// Bytes of standard output and of standard error at that moment.
    pub written: [u64; 2],
    /// Bytes of standard input that the job had read.
    pub read: u64,
    /// Inodes of the pipes, by which the images know them.
    pub pipes: [u64; 3],
    /// The last process id that was given out, so that helpers get higher ones.
    pub last_pid: u64,
    /// The boot of the machine at which it was made.
    pub boot: String,
    /// Where the images are, relative to the checkpoint.
    pub images: PathBuf,
    /// The checkpoint that it builds on: it holds what has changed since that one.
    #[serde(default)]
    pub base: Option<u64>,
    /// How many checkpoints it builds on, one on the other.
    #[serde(default)]
    pub depth: u32,
    /// Bytes of memory that the job held.
    #[serde(default)]
    pub memory: u64,
    /// The key that opens it, if it is sealed.
    #[serde(default)]
    pub identity: Option<PathBuf>,
}

/// Makes a checkpoint that is complete survive the loss of power.
///
/// # Errors
/// If a file cannot be synced, or the checkpoint builds on a later one.
pub(crate) fn settle(dir: &JobDir, seq: u64) -> io::Result<()> {
    let place = dir.checkpoint(seq);
    if let Some(base) = record(&place)?.base
        && !dir.durable(base).exists()
    {
        // Depths are bounded where checkpoints are made, and numbers only grow.
        if base >= seq {
            return Err(io::Error::other(format!("checkpoint {seq} builds on a later one")));
        }
        settle(dir, base)?;
    }
    for stream in [dir.out(), dir.err()] {
        fs::File::open(stream)?.sync_all()?;
    }
    // What the job has read of its input may not be acknowledged yet.
    match fs::File::open(dir.stdin()) {
        Ok(input) => input.sync_all()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    // Those of one that could not be put there before are not taken again: they are of what was saved.
    if !digests::are_taken(dir, seq)? {
        digests::take(dir, seq)?;
    }
    files::sync_tree(&place)?;
    dir.sync_names()?;
    fs::write(dir.durable(seq), "")?;
    files::sync_dir(&place)
}

/// The record of a checkpoint, finished or not.
///
/// # Errors
/// If there is none, or it is damaged.
pub(crate) fn record(checkpoint: &Path) -> io::Result<CheckpointRecord> {
    Ok(serde_json::from_slice(&fs::read(checkpoint.join(RECORD))?)?)
}

/// When a checkpoint was complete, in milliseconds since 1970: its record comes last.
///
/// # Errors
/// If the checkpoint has no record: it is not complete, or gone.
pub(crate) fn made(checkpoint: &Path) -> io::Result<i64> {
    Ok(files::millis(fs::metadata(checkpoint.join(RECORD))?.modified()?))
}

/// A checkpoint and those that it builds on, the newest first.
#[must_use]
pub(crate) fn chain(dir: &JobDir, seq: u64) -> Vec<u64> {
    let mut found = vec![seq];
    let mut base = record(&dir.checkpoint(seq)).ok().and_then(|record| record.base);
    // Numbers only grow, so that a damaged record leads to no circle.
    while let Some(seq) = base.filter(|seq| found.last().is_some_and(|last| seq < last)) {
        found.push(seq);
        base = record(&dir.checkpoint(seq)).ok().and_then(|record| record.base);
    }
    found
}

/// What names this boot of the machine.
#[must_use]
pub(crate) fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The numbers of a job's checkpoints, complete or not, in their order.
#[must_use]
pub(crate) fn numbers(dir: &JobDir) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(dir.path()) else { return Vec::new() };
    let number = |entry: io::Result<fs::DirEntry>| checkpoint_number(&entry.ok()?.file_name());
    let mut found: Vec<u64> = entries.filter_map(number).collect();
    found.sort_unstable();
    found
}
