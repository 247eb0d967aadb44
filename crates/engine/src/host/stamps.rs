//! What the kernel shows of the files of memory, from the verdict on images until their tasks wake.
//!
//! Pages and pagemaps are too large to be kept as other images are. Whoever writes to one of them, cuts it, or puts
//! another in its place changes the time at which its inode was changed last, and nobody can set that. It does
//! not show what is written through a mapping that was there before.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::fs::{AtFlags, fstatfs, statat};
use rustix::time::{ClockId, clock_getres, clock_gettime};
use torpor_images::ImageDir;

use crate::error::{Context, Result};

/// File systems that may give a file another number when it is looked up again (`f_type` of statfs(2)): FUSE, SMB,
/// CIFS, and SMB 2.
const RENUMBERING: [u32; 4] = [0x6573_5546, 0x517b, 0xff53_4d42, 0xfe53_4d42];

/// What each file of memory of some images was like; nothing of images that are in no directory.
#[derive(Debug, Default)]
pub(super) struct Stamps {
    files: Vec<(Option<InodeStamp>, String)>,
    /// Whether the number of a file stays.
    keeps_numbers: bool,
}

/// What a change of a file changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct InodeStamp {
    /// Its device and number, where they stay.
    inode: Option<(u64, u64)>,
    size: i64,
    /// When it was changed last, in nanoseconds.
    changed: i128,
}

impl Stamps {
    /// Those of images, as they are now.
    ///
    /// # Errors
    /// If the directory cannot be looked at or listed.
    pub(super) fn of(images: &ImageDir) -> Result<Self> {
        let Some(dir) = images.store().directory() else { return Ok(Stamps::default()) };
        let system = fstatfs(dir).context(|| format!("statfs {}", images.path().display()))?;
        let keeps_numbers = !RENUMBERING.map(i64::from).contains(&system.f_type);
        let names = images.memory_names()?.into_iter();
        let files = names.map(|name| (stamp(dir, &name, keeps_numbers), name)).collect();
        Ok(Stamps { files, keeps_numbers })
    }

    /// The first file that is not as it was.
    pub(super) fn changed(&self, images: &ImageDir) -> Option<&str> {
        let now = |name: &str| stamp(images.store().directory()?, name, self.keeps_numbers);
        let changed = self.files.iter().find(|(was, name)| now(name) != *was);
        changed.map(|(_, name)| name.as_str())
    }

    /// How long it takes until a further change of each file shows: the kernel's clock stands still meanwhile.
    pub(super) fn rest(&self) -> Duration {
        let changed = self.files.iter().filter_map(|(stamp, _)| *stamp).map(|stamp| stamp.changed);
        let Some(last) = changed.max() else { return Duration::ZERO };
        let nanos = |time: rustix::time::Timespec| {
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        // Some file systems keep whole seconds, or every second one.
        let step = match last % 1_000_000_000 {
            0 => 2_000_000_000,
            _ => 2 * nanos(clock_getres(ClockId::RealtimeCoarse)),
        };
        let age = nanos(clock_gettime(ClockId::Realtime)) - last;
        // A time to come is that of another clock.
        let rest = if age < 0 { 0 } else { step - age };
        Duration::from_nanos(u64::try_from(rest).unwrap_or(0))
    }
}

/// What a file of a directory is like; `None` if it is not there.
fn stamp(dir: BorrowedFd<'_>, name: &str, keeps_numbers: bool) -> Option<InodeStamp> {
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(InodeStamp {
        inode: keeps_numbers.then_some((stat.st_dev, stat.st_ino)),
        size: stat.st_size,
        changed: i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec),
    })
}
