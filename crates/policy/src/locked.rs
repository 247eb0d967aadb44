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

#[cfg(test)]
mod tests {
    use super::*;

    /// Guard pages have entries of their own, with the flags of the mapping around them.
    #[test]
    fn guard_pages_are_not_locked() {
        let vma = VmaEntry { start: 4096, end: 8192, flags: LOCKED, ..VmaEntry::default() };
        let locked = Locked { range: 4096..8192, on_fault: false };
        assert_eq!(Locked::of(&vma), Some(locked.clone()));
        let on_fault = VmaEntry { flags: LOCKED | ON_FAULT, ..vma };
        assert_eq!(Locked::of(&on_fault), Some(Locked { on_fault: true, ..locked }));
        assert_eq!(Locked::of(&VmaEntry { status: GUARD, ..vma }), None);
        assert_eq!(Locked::of(&VmaEntry { flags: 0, ..vma }), None);
    }
}
