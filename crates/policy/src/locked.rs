//! Memory that is locked: read of the mappings once, judged, and locked.

use std::ops::Range;

use torpor_images::proto::VmaEntry;

/// `MAP_LOCKED` and `MAP_NONBLOCK` of mmap(2), which images have in the place of what mlock2(2) took.
const LOCKED: u32 = 0x2000;
const ON_FAULT: u32 = 0x1_0000;
/// Guard pages inside another mapping, which have an entry of their own (`VmaEntry.status`).
const GUARD: u32 = 1 << 16;

/// Memory that is locked (mlock2(2)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Locked {
    /// Where it is.
    pub range: Range<u64>,
    /// Whether only pages that are there count (`MLOCK_ONFAULT`).
    pub on_fault: bool,
}

impl Locked {
    /// What of a mapping is locked.
    #[must_use]
    pub fn of(vma: &VmaEntry) -> Option<Self> {
        let is_locked = vma.flags & LOCKED != 0 && vma.status & GUARD == 0;
        is_locked
            .then_some(Locked { range: vma.start..vma.end, on_fault: vma.flags & ON_FAULT != 0 })
    }
}
