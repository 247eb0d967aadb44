//! The files that a container has changed, taken at the moment at which its memory is: while its tasks are
//! stopped.
//!
//! They are stopped for as long as that takes. So what is there is copied before, while they run, and at the
//! stop what has changed since. A file is known to be as it was by its size and its times. Two kinds of
//! changes would not show there. One comes within the clock's tick of the change before, so that both
//! have the same time: a file that was changed just before it was listed is taken again. The other is made
//! through a shared mapping: the kernel notices the first write to a page, and none after it, until the page
//! was written back. So each file is written back before it is copied, and the next write counts.

use std::collections::HashMap;
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Timespec, Timestamps, futimens, statfs};
use rustix::time::{ClockId, clock_gettime};
use torpor_kernel::sparse;
use torpor_kernel::tree::{Attributes, Id, id};
use torpor_sys::writeback::write_back;

use crate::changes::{self, Change, Content, What, attributes};
use crate::error::{Context, Result};
use crate::interrupt;

/// How often what has changed is copied while the tasks run.
const ROUNDS: usize = 4;
/// How many bytes the tasks may wait for.
const FEW: u64 = 4 << 20;
/// The longest tick of a file system whose times are whole seconds: that of FAT.
const SECONDS: Duration = Duration::from_secs(2);

/// The copy of a layer.
#[derive(Debug)]
pub struct Layer<'l> {
    upper: &'l Path,
    /// The directory of the copies.
    pool: &'l Path,
    copies: HashMap<Id, Copied>,
}

/// The copy of a file.
#[derive(Debug)]
struct Copied {
    path: PathBuf,
    /// Its extended attributes. Whoever changes these changes a time of the file.
    attributes: Attributes,
    /// What the file was when it was copied, unless it may have changed without a sign of it.
    was: Option<Stamp>,
}

/// What changes when a file does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified: Duration,
    changed: Duration,
}

impl Stamp {
    fn of(meta: &Metadata) -> Self {
        let time = |seconds: i64, nanoseconds: i64| {
            let nanoseconds = Duration::from_nanos(nanoseconds.try_into().unwrap_or(0));
            Duration::from_secs(seconds.try_into().unwrap_or(0)) + nanoseconds
        };
        Self {
            size: meta.len(),
            modified: time(meta.mtime(), meta.mtime_nsec()),
            changed: time(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// It, if whatever changes the file from `now` on changes it.
    fn settled(self, now: Duration) -> Option<Self> {
        let whole = self.changed.subsec_nanos() == 0;
        let tick = if whole { SECONDS } else { Duration::ZERO };
        (self.changed + tick < now).then_some(self)
    }
}

/// The clock by which the kernel gives files their times.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::RealtimeCoarse)).unwrap_or_default()
}

impl<'l> Layer<'l> {
    /// The layer `upper`, to be copied to the directory `pool`, which is empty.
    #[must_use]
    pub fn new(upper: &'l Path, pool: &'l Path) -> Self {
        Self { upper, pool, copies: HashMap::new() }
    }

    /// Copies what is there while the tasks run, until what they change meanwhile is little.
    ///
    /// # Errors
    /// If the layer cannot be listed; if somebody interrupts this.
    pub fn follow(&mut self) -> Result<()> {
        let kind = statfs(self.upper).context(|| self.upper.display().to_string())?.f_type;
        // Its pages are never written back.
        if kind == libc::TMPFS_MAGIC {
            return Ok(());
        }
        for _ in 0..ROUNDS {
            if self.round()? <= FEW {
                break;
            }
        }
        Ok(())
    }

    /// Copies what has changed since the round before, and tells how many bytes that was.
    fn round(&mut self) -> Result<u64> {
        let (now, mut copied) = (now(), 0);
        for change in changes::list(self.upper)? {
            interrupt::check()?;
            if let What::File(content) = &change.what
                && !self.has(&change.meta)
            {
                // What cannot be copied now, or is gone, is left to the stop.
                let file = change.open(content).and_then(|file| write_back(&file).map(|()| file));
                let settled = Stamp::of(&change.meta).settled(now);
                if file.and_then(|file| self.copy(&file, &change.meta, settled)).is_ok() {
                    copied += change.meta.len();
                }
            }
        }
        Ok(copied)
    }

    /// Copies the rest when the tasks are stopped: what was changed, with content that stays.
    ///
    /// # Errors
    /// If a file cannot be read or copied.
    pub fn take(&mut self) -> Result<Vec<Change>> {
        let mut all = changes::list(self.upper)?;
        for change in &mut all {
            let What::File(content) = &change.what else { continue };
            if !self.has(&change.meta) {
                let copied = change
                    .open(content)
                    .and_then(|file| self.copy(&file, &change.meta, Some(Stamp::of(&change.meta))));
                copied.context(|| change.name.display().to_string())?;
            }
            if let Some(copy) = self.copies.get(&id(&change.meta)) {
                let content = Content::Copy(copy.path.clone(), copy.attributes.clone());
                change.what = What::File(content);
            }
        }
        Ok(all)
    }

    /// Whether there is a copy of a file as it is.
    fn has(&self, meta: &Metadata) -> bool {
        let copy = self.copies.get(&id(meta));
        copy.and_then(|copy| copy.was).is_some_and(|was| was == Stamp::of(meta))
    }

    fn copy(&mut self, file: &File, meta: &Metadata, was: Option<Stamp>) -> io::Result<()> {
        let path = self.pool.join(format!("{}-{}", meta.dev(), meta.ino()));
        // One that is not finished is none.
        self.copies.remove(&id(meta));
        sparse::copy(file, &File::create(&path)?, &mut |_| Ok(()))?;
        let attributes = attributes::of(file)?;
        self.copies.insert(id(meta), Copied { path, attributes, was });
        Ok(())
    }
}

/// Gives the copies of files the owners, modes and times that these had.
///
/// # Errors
/// If the file system of the copies does not take them.
pub fn dress(changes: &[Change]) -> Result<()> {
    for change in changes {
        let What::File(content) = &change.what else { continue };
        let meta = &change.meta;
        let dressed = change.open(content).and_then(|file| {
            fchown(&file, Some(meta.uid()), Some(meta.gid()))?;
            file.set_permissions(Permissions::from_mode(meta.mode() & 0o7777))?;
            let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
            let last_access = time(meta.atime(), meta.atime_nsec());
            let last_modification = time(meta.mtime(), meta.mtime_nsec());
            Ok(futimens(&file, &Timestamps { last_access, last_modification })?)
        });
        dressed.context(|| change.name.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::time::SystemTime;

    use super::*;

    /// The content that each file of a layer is taken with.
    fn taken(layer: &mut Layer<'_>) -> Vec<Vec<u8>> {
        let all = layer.take().unwrap();
        dress(&all).unwrap();
        let files = all.iter().filter_map(|change| match &change.what {
            What::File(content) => {
                let mut read = Vec::new();
                io::Read::read_to_end(&mut change.open(content).unwrap(), &mut read).unwrap();
                Some(read)
            }
            _ => None,
        });
        files.collect()
    }

    #[test]
    fn what_has_changed_since_is_taken_again() {
        let (upper, pool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = upper.path().join("file");
        fs::write(&path, "before").unwrap();
        let mut layer = Layer::new(upper.path(), pool.path());
        layer.round().unwrap();
        // It has the same size, and may have the same time.
        fs::write(&path, "behind").unwrap();
        fs::write(upper.path().join("new"), "").unwrap();
        let mut found = taken(&mut layer);
        found.sort();
        assert_eq!(found, [&b""[..], b"behind"]);
        fs::remove_file(&path).unwrap();
        assert_eq!(taken(&mut layer), [b""]);
    }

    /// An attribute that is new changes none of the times by which the content is compared, but that of the change.
    #[test]
    fn attributes_are_taken_as_they_are_at_the_stop() {
        let (upper, pool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = upper.path().join("file");
        fs::write(&path, "content").unwrap();
        let mut layer = Layer::new(upper.path(), pool.path());
        layer.round().unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&path, "user.new", b"x", flags).unwrap();
        let all = layer.take().unwrap();
        let What::File(Content::Copy(_, found)) = &all[0].what else { panic!("{all:?}") };
        assert_eq!(*found, [(b"user.new".to_vec(), b"x".to_vec())]);
    }

    #[test]
    fn what_has_not_changed_is_copied_once() {
        let (upper, pool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(upper.path().join("file"), "content").unwrap();
        let mut layer = Layer::new(upper.path(), pool.path());
        // Until its change is in the past.
        while layer.copies.values().all(|copy| copy.was.is_none()) {
            layer.round().unwrap();
        }
        assert_eq!(layer.round().unwrap(), 0);
        let made = |layer: &Layer<'_>| -> Option<SystemTime> {
            fs::metadata(&layer.copies.values().next()?.path).ok()?.modified().ok()
        };
        let first = made(&layer);
        layer.take().unwrap();
        assert_eq!(made(&layer), first);
    }

    #[test]
    fn a_stamp_counts_when_the_next_change_has_another() {
        let at = |changed| Stamp { size: 1, modified: Duration::ZERO, changed };
        let (second, more) = (Duration::from_secs(100), Duration::from_millis(4));
        assert_eq!(at(second + more).settled(second + more), None);
        assert!(at(second + more).settled(second + more * 2).is_some());
        // Of whole seconds.
        assert_eq!(at(second).settled(second + more), None);
        assert!(at(second).settled(second + SECONDS + more).is_some());
    }
}
