//! userfaultfds: read of their entries once, judged, and made.

use std::ops::Range;

use torpor_images::proto::{FileEntry, TorporUserfaultfdArea};

/// `UFFD_FEATURE_EVENT_FORK` (linux/userfaultfd.h).
const EVENT_FORK: u64 = 2;

/// A userfaultfd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Userfaultfd {
    /// Its number in the images.
    pub id: u32,
    /// The flags that it is open with.
    pub flags: u32,
    /// The process whose memory it is of.
    pub pid: u32,
    /// `UFFD_FEATURE_*` (linux/userfaultfd.h).
    pub features: u64,
    /// Whether it tells of no faults of the kernel.
    pub user_mode_only: bool,
    /// What is registered, and for which faults (`UFFDIO_REGISTER_MODE_*`).
    pub areas: Vec<(Range<u64>, u64)>,
    /// Pages in it that are zeros.
    pub zero: Vec<Range<u64>>,
    /// Pages that may not be written.
    pub protected: Vec<Range<u64>>,
    /// Pages that nobody may touch.
    pub poisoned: Vec<Range<u64>>,
}

impl Userfaultfd {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let uffd = entry.torpor_userfaultfd.as_ref()?;
        let range = |area: &TorporUserfaultfdArea| area.start..area.end;
        let ranges = |all: &[TorporUserfaultfdArea]| all.iter().map(range).collect();
        let areas = uffd.areas.iter().map(|area| (range(area), area.modes.unwrap_or(0).into()));
        Some(Userfaultfd {
            id: uffd.id,
            flags: uffd.flags,
            pid: uffd.pid,
            features: uffd.features,
            user_mode_only: uffd.user_mode_only,
            areas: areas.collect(),
            zero: ranges(&uffd.zero),
            protected: ranges(&uffd.protected),
            poisoned: ranges(&uffd.poisoned),
        })
    }

    /// Whether it is told of forks, and gets the memory of the child.
    #[must_use]
    pub(crate) fn sees_forks(&self) -> bool {
        self.features & EVENT_FORK != 0
    }
}
