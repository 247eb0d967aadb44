//! What the kernel shows of the files of memory, from the verdict on images until their tasks wake.
//!
//! Pages and pagemaps are too large to be kept as other images are. Whoever writes to one of them, cuts it, or puts
//! another in its place changes the time at which its inode was changed last, and nobody can set that. It does
//! not show what is written through a mapping that was there before.

use std::time::Duration;

use rustix::fs::{AtFlags, statat};
use rustix::time::{ClockId, clock_getres, clock_gettime};
use torpor_images::ImageDir;

use crate::error::Result;

/// What each file of memory of some images was like; nothing of images that are in no directory.
#[derive(Debug, Default)]
pub(super) struct Stamps(Vec<(Option<InodeStamp>, String)>);

/// What a change of a file changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct InodeStamp {
    device: u64,
    inode: u64,
    size: i64,
    /// When it was changed last, in nanoseconds.
    changed: i128,
}

impl Stamps {
    /// Those of images, as they are now.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub(super) fn of(images: &ImageDir) -> Result<Self> {
        if images.store().directory().is_none() {
            return Ok(Stamps::default());
        }
        let names = images.memory_names()?.into_iter();
        Ok(Stamps(names.map(|name| (stamp(images, &name), name)).collect()))
    }

    /// The first file that is not as it was.
    pub(super) fn changed(&self, images: &ImageDir) -> Option<&str> {
        let is_other = |(was, name): &&(Option<InodeStamp>, String)| stamp(images, name) != *was;
        self.0.iter().find(is_other).map(|(_, name)| name.as_str())
    }

    /// How long it takes until a further change of each file shows: the kernel's clock stands still meanwhile.
    pub(super) fn rest(&self) -> Duration {
        let changed = self.0.iter().filter_map(|(stamp, _)| *stamp).map(|stamp| stamp.changed);
        let Some(last) = changed.max() else { return Duration::ZERO };
        let nanos = |time: rustix::time::Timespec| {
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        let step = 2 * nanos(clock_getres(ClockId::RealtimeCoarse));
        let age = nanos(clock_gettime(ClockId::Realtime)) - last;
        // A time to come is that of another clock.
        let rest = if age < 0 { 0 } else { step - age };
        Duration::from_nanos(u64::try_from(rest).unwrap_or(0))
    }
}

/// What a file of a directory is like; `None` if it is not there.
fn stamp(images: &ImageDir, name: &str) -> Option<InodeStamp> {
    let stat = statat(images.store().directory()?, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(InodeStamp {
        device: stat.st_dev,
        inode: stat.st_ino,
        size: stat.st_size,
        changed: i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec),
    })
}
