//! Checkpoints on disk: which there are, and which are needed no more.

use std::fs;
use std::io;

use crate::files::{self, JobDir};
use crate::shepherd::engine;

/// The number of the newest checkpoint that is on stable storage.
#[must_use]
pub fn newest(dir: &JobDir) -> Option<u64> {
    let whole = |&seq: &u64| chain(dir, seq).iter().all(|&seq| dir.durable(seq).exists());
    numbers(dir).into_iter().filter(whole).max()
}

/// Removes all checkpoints but `keep`, those that it builds on, and those that are newer.
pub fn keep_only(dir: &JobDir, keep: u64) {
    let needed = chain(dir, keep);
    for seq in numbers(dir) {
        if seq < keep && !needed.contains(&seq) {
            remove(dir, seq);
        }
    }
}

/// Removes all checkpoints.
pub fn remove_all(dir: &JobDir) {
    numbers(dir).into_iter().for_each(|seq| remove(dir, seq));
}

fn remove(dir: &JobDir, seq: u64) {
    // What cannot be removed now is removed with the next one.
    let _ = fs::remove_dir_all(dir.checkpoint(seq));
}

/// A checkpoint and those that it builds on, the newest first.
#[must_use]
pub fn chain(dir: &JobDir, seq: u64) -> Vec<u64> {
    let mut found = vec![seq];
    let mut base = engine::record(&dir.checkpoint(seq)).ok().and_then(|record| record.base);
    // Numbers only grow, so that a damaged record leads to no circle.
    while let Some(seq) = base.filter(|seq| found.last().is_some_and(|last| seq < last)) {
        found.push(seq);
        base = engine::record(&dir.checkpoint(seq)).ok().and_then(|record| record.base);
    }
    found
}

/// Bytes of all checkpoints of a job.
#[must_use]
pub fn bytes(dir: &JobDir) -> u64 {
    numbers(dir).into_iter().filter_map(|seq| files::size(&dir.checkpoint(seq)).ok()).sum()
}

/// Makes checkpoints that were complete when their shepherd died durable ones, and removes
/// those that were not. Only for checkpoints of this boot: after a loss of power, files
/// may be empty that were written.
pub fn adopt(dir: &JobDir) {
    for seq in numbers(dir).into_iter().filter(|&seq| !dir.durable(seq).exists()) {
        let place = dir.checkpoint(seq);
        let whole = engine::record(&place).is_ok_and(|record| record.boot == engine::boot());
        if !whole || engine::settle(dir, seq).is_err() {
            // What cannot be removed now is removed with the next one.
            let _ = fs::remove_dir_all(place);
        }
    }
}

fn numbers(dir: &JobDir) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(dir.path()) else { return Vec::new() };
    let number = |entry: io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
    };
    entries.filter_map(number).collect()
}
