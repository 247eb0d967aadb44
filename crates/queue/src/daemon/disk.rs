//! Checkpoints on disk: which there are, and which are needed no more.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use torpor_worker::tell;

use super::left::{self, Names};
use crate::bundle::{self, Bundle};
use crate::files::{self, JobDir};
use crate::shepherd::OWN;
use crate::shepherd::checkpoint::{self, chain, numbers};
use crate::shepherd::digests;

/// With this the names of checkpoints begin that are being removed.
const GONE: &str = "gone";

/// What was taken away of a job's directory, and is to be removed. That takes as long as a job likes that has files of its own.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Gone(Vec<PathBuf>);

impl Gone {
    /// Removes it. What cannot be removed goes when the job ends, or when the next daemon begins.
    pub(super) fn remove(self) {
        let _ = files::remove_trees(&self.0);
    }

    /// With what else is to be removed.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Whether there is nothing to remove.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The number of the newest checkpoint that is on stable storage.
#[must_use]
pub(super) fn newest(dir: &JobDir) -> Option<u64> {
    let whole = |&seq: &u64| chain(dir, seq).iter().all(|&seq| dir.durable(seq).exists());
    numbers(dir).into_iter().filter(whole).max()
}

/// Takes all checkpoints away but `keep`, those that it builds on, and those that are newer.
pub(super) fn keep_only(dir: &JobDir, keep: u64) -> Gone {
    let needed = chain(dir, keep);
    let is_old = |&seq: &u64| seq < keep && !needed.contains(&seq);
    take_away(dir, &numbers(dir).into_iter().filter(is_old).collect::<Vec<_>>())
}

/// Takes a checkpoint away, and those that build on it.
pub(super) fn take_with(dir: &JobDir, seq: u64) -> Gone {
    let is_useless = |&number: &u64| chain(dir, number).contains(&seq);
    take_away(dir, &numbers(dir).into_iter().filter(is_useless).collect::<Vec<_>>())
}

/// Takes all checkpoints away.
pub(super) fn take_all(dir: &JobDir) -> Gone {
    take_away(dir, &numbers(dir))
}

/// The files of a job that is over, but for what it has written and what is known of it.
pub(super) fn own(dir: &JobDir) -> Gone {
    entries(dir, |name| {
        let own = OWN.iter().chain(&["overlay", files::COPYING]).any(|own| name == own.as_bytes());
        own || name.starts_with(b"ready") || name.starts_with(GONE.as_bytes())
    })
}

/// What was taken away, and not removed by the daemon that did it.
pub(super) fn left_over(dir: &JobDir) -> Gone {
    entries(dir, |name| name.starts_with(GONE.as_bytes()))
}

/// What has such a name in a job's directory.
fn entries(dir: &JobDir, is_meant: impl Fn(&[u8]) -> bool) -> Gone {
    let entries = fs::read_dir(dir.path()).into_iter().flatten().flatten();
    let meant = entries.filter(|entry| is_meant(entry.file_name().as_encoded_bytes()));
    Gone(meant.map(|entry| entry.path()).collect())
}

/// Takes checkpoints away at once: somebody may still be writing to them, and wait for none of it to be removed.
fn take_away(dir: &JobDir, checkpoints: &[u64]) -> Gone {
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    let take = |&seq: &u64| {
        // Names that nothing has which was taken away before.
        let number = TAKEN.fetch_add(1, Ordering::Relaxed);
        let gone = dir.path().join(format!("{GONE}-{}-{number}", files::now()));
        let place = dir.checkpoint(seq);
        // What cannot be taken away, on a full disk, is removed where it is.
        if fs::rename(&place, &gone).is_ok() { gone } else { place }
    };
    Gone(checkpoints.iter().map(take).collect())
}

/// Bytes that all checkpoints of a job take. A file that several of them share counts once.
#[must_use]
pub(super) fn bytes(dir: &JobDir) -> u64 {
    let mut seen = HashSet::new();
    let size = |seq| files::size(&dir.checkpoint(seq), &mut seen).ok();
    numbers(dir).into_iter().filter_map(size).sum()
}

/// All that a job needs elsewhere to go on from a checkpoint, or to begin, but for what was sent
/// ahead: an earlier checkpoint.
///
/// # Errors
/// If a file of the job cannot be looked at.
pub(super) fn bundle(dir: &JobDir, seq: Option<u64>, ahead: Option<u64>) -> io::Result<Bundle> {
    let chain = seq.map(|seq| chain(dir, seq)).unwrap_or_default();
    rest_of(dir, &chain, ahead, &["out", "err", "in", "in.end", "container.json"])
}

/// A checkpoint and those that it builds on, without the rest of the job, and but for what was sent ahead before.
///
/// # Errors
/// If a file of the job cannot be looked at.
pub(super) fn bundle_ahead(dir: &JobDir, seq: u64, ahead: Option<u64>) -> io::Result<Bundle> {
    rest_of(dir, &chain(dir, seq), ahead, &[])
}

/// The checkpoints of a chain that come after `ahead`, and other files by their names.
fn rest_of(dir: &JobDir, chain: &[u64], ahead: Option<u64>, others: &[&str]) -> io::Result<Bundle> {
    let ahead = ahead.filter(|ahead| chain.contains(ahead));
    let (sent, names) = chain.iter().partition(|&&seq| ahead.is_some_and(|ahead| seq <= ahead));
    let (sent, names) = (named(sent), named(names));
    let own = sent.first().into_iter().flat_map(|name| OWN.map(|own| Path::new(name).join(own)));
    let own: Vec<PathBuf> = own.filter(|path| dir.path().join(path).exists()).collect();
    let there = bundle::there(dir.path(), &own)?;
    Bundle::of(dir.path(), &there, |path| {
        let mut parts = path.iter().filter_map(|part| part.to_str());
        match (parts.next(), parts.next()) {
            (Some(name), _) if others.contains(&name) => true,
            (Some(name), second) => is_needed(&names, name, second),
            _ => false,
        }
    })
}

/// The names of checkpoints' directories.
fn named(chain: Vec<u64>) -> Vec<String> {
    chain.into_iter().map(|seq| format!("checkpoint-{seq}")).collect()
}

/// Whether something in the directory `name` is needed of the checkpoints `names`, the newest first:
/// of the job's own files only what belongs to the newest one is.
fn is_needed(names: &[String], name: &str, second: Option<&str>) -> bool {
    let own = second.is_some_and(|second| OWN.contains(&second));
    let mut needed = names.iter().take(if own { 1 } else { names.len() });
    needed.any(|known| known == name)
}

/// Moves what was unpacked in `from` to a job's directory, which has lost its checkpoint. What is
/// there already is newer and stays.
///
/// # Errors
/// If a file cannot be moved, or the job's directory cannot be made.
pub(super) fn put_back(from: &Path, dir: &JobDir) -> io::Result<()> {
    fs::create_dir_all(dir.path())?;
    dir.close()?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = dir.path().join(entry.file_name());
        if entry.file_type()?.is_dir() {
            // One that is there is not whole.
            let _ = files::remove_trees(&[&to]);
        } else if to.exists() {
            continue;
        }
        fs::rename(entry.path(), to)?;
    }
    dir.hide();
    files::sync_dir(dir.path())?;
    files::remove_trees(&[from])
}

/// Makes checkpoints that were complete when their shepherd died durable ones, and removes
/// those that were not. Only for checkpoints of this boot: after a loss of power, files
/// may be empty that were written. So they may after a failure of the disk alone. One that is known to be damaged stays as it is,
/// with those that build on it.
pub(super) fn adopt(dir: &JobDir, damaged: Option<u64>) {
    let is_damaged = |seq| damaged.is_some_and(|damaged| chain(dir, seq).contains(&damaged));
    let is_meant = |&seq: &u64| !dir.durable(seq).exists() && !is_damaged(seq);
    for seq in numbers(dir).into_iter().filter(is_meant) {
        let place = dir.checkpoint(seq);
        let of_this_boot =
            checkpoint::record(&place).is_ok_and(|record| record.boot == checkpoint::boot());
        let whole = of_this_boot && digests::agree(dir, seq);
        if !whole || checkpoint::settle(dir, seq).is_err() {
            if let Err(e) = left::take_away(&place, Names::Stay) {
                tell!("torpor queue: {}: what its dump has left: {e}", place.display());
            }
            // What cannot be removed now is removed with the next one.
            let _ = files::remove_trees(&[place]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A shepherd that dies while it puts a checkpoint on stable storage leaves one that is whole; a disk that dies with
    /// it may have lost files whose digests it has.
    #[test]
    fn what_a_disk_has_lost_of_a_checkpoint_makes_it_useless() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temporary.path().to_owned());
        fs::write(dir.out(), "").unwrap();
        fs::write(dir.err(), "").unwrap();
        let image = |seq: u64| dir.checkpoint(seq).join("round-1/pages-1.img");
        for seq in 1..=5 {
            let (boot, record) = (checkpoint::boot(), checkpoint::CheckpointRecord::default());
            let record = checkpoint::CheckpointRecord { seq, boot, ..record };
            fs::create_dir_all(dir.checkpoint(seq).join("round-1")).unwrap();
            fs::write(image(seq), "pages").unwrap();
            let text = serde_json::to_vec(&record).unwrap();
            fs::write(dir.checkpoint(seq).join("record.json"), text).unwrap();
        }
        // Of the first nobody has taken digests yet.
        (2..=4).for_each(|seq| digests::take(&dir, seq).unwrap());
        fs::write(image(3), "").unwrap();
        fs::remove_file(image(4)).unwrap();
        adopt(&dir, Some(5));
        assert_eq!(numbers(&dir), [1, 2, 5]);
        assert_eq!([1, 2, 5].map(|seq| dir.durable(seq).exists()), [true, true, false]);
    }

    #[test]
    fn nothing_is_left_of_a_checkpoint_that_is_written_to_while_it_is_removed() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temporary.path().to_owned());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let settle = || {
                while !over.load(Ordering::Acquire) {
                    let _ = fs::write(dir.durable(1), "");
                }
            };
            scope.spawn(settle);
            for _ in 0..500 {
                fs::create_dir(dir.checkpoint(1)).unwrap();
                fs::write(dir.checkpoint(1).join("image"), "").unwrap();
                take_away(&dir, &[1]).remove();
                assert!(!dir.checkpoint(1).exists());
            }
            over.store(true, Ordering::Release);
        });
    }
}
