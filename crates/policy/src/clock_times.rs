//! The clocks of time namespaces: read of their images once, listed, and set. They count in namespaces
//! that are made, which may have any.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{TimensEntry, Timespec};
use torpor_images::{ImageDir, kind};

/// What the clocks of a time namespace showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClockTimes {
    /// The number of the namespace; 0 is that of a root task whose clocks were the host's.
    pub space: u32,
    /// `CLOCK_MONOTONIC`: seconds and nanoseconds.
    pub monotonic: (u64, u64),
    /// `CLOCK_BOOTTIME`, likewise.
    pub boottime: (u64, u64),
    /// The task, by its pid in the images, whose children the namespace is for, if it does not live in
    /// it.
    pub maker: Option<u32>,
}

impl ClockTimes {
    /// Those of a namespace; `None` if there is no image of it.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn read(images: &ImageDir, space: u32) -> torpor_images::Result<Option<Self>> {
        let entry: Option<TimensEntry> = images.read_opt(kind::TIMENS, space.into())?;
        Ok(entry.map(|entry| Self::of(space, &entry)))
    }

    /// Those in the entry of a namespace.
    #[must_use]
    pub fn of(space: u32, entry: &TimensEntry) -> Self {
        let time = |time: &Timespec| (time.tv_sec, time.tv_nsec);
        ClockTimes {
            space,
            monotonic: time(&entry.monotonic),
            boottime: time(&entry.boottime),
            maker: entry.torpor_maker,
        }
    }
}

impl fmt::Display for ClockTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClockTimes { space, monotonic, boottime, maker } = self;
        let time = |(seconds, nanos): (u64, u64)| format!("{seconds}.{nanos:09}");
        let (monotonic, boottime) = (time(*monotonic), time(*boottime));
        write!(f, "clocks of time namespace {space}: monotonic {monotonic}, boottime {boottime}")?;
        maker.map_or(Ok(()), |maker| write!(f, ", for the children of task {maker}"))
    }
}
