//! Checkpoints on disk: which there are, and which are needed no more.

use std::fs;
use std::io;

use crate::files::JobDir;
use crate::shepherd::engine;

/// The number of the newest checkpoint that is on stable storage.
#[must_use]
pub fn newest(dir: &JobDir) -> Option<u64> {
    numbers(dir).into_iter().filter(|&seq| dir.durable(seq).exists()).max()
}

/// Removes checkpoints that are older than `keep`, or all.
pub fn remove_checkpoints(dir: &JobDir, keep: Option<u64>) {
    for seq in numbers(dir) {
        if keep.is_none_or(|keep| seq < keep) {
            // What cannot be removed now is removed with the next one.
            let _ = fs::remove_dir_all(dir.checkpoint(seq));
        }
    }
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
