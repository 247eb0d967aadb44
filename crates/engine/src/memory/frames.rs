//! Where pages are, and of what kind: the entries of `/proc/PID/pagemap`
//! (Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use torpor_sys::vm::{self, page};

use super::vma::PAGE;
use crate::error::{Context, Result};

/// What the kernel says of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(u64);

/// Bits of what [`Entry::marker`] says (`PTE_MARKER_*` in linux/swapops.h).
pub(crate) mod marker {
    /// Whoever touches it gets `SIGBUS`.
    pub(crate) const POISONED: u64 = 1 << 1;
    /// A guard page.
    pub(crate) const GUARD: u64 = 1 << 2;
}

/// The number of a page frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Frame(u64);

impl Entry {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    /// The page is one of a file, or of shared memory.
    const FILE: u64 = 1 << 61;
    /// Write-protected by userfaultfd.
    const PROTECTED: u64 = 1 << 57;
    const SOFT_DIRTY: u64 = 1 << 55;
    /// Mapped here only.
    const ALONE: u64 = 1 << 56;
    const FRAME: u64 = (1 << 55) - 1;

    /// Whether there is nothing.
    pub(crate) fn is_hole(self) -> bool {
        self.0 & (Self::PRESENT | Self::SWAPPED) == 0
    }

    /// Whether userfaultfd write-protects it.
    pub(crate) fn is_protected(self) -> bool {
        self.0 & Self::PROTECTED != 0
    }

    /// What stands in the place of a page that is not there and looks like one that is swapped out:
    /// bits of [`marker`]. None also if the kernel does not say it, which takes `CAP_SYS_ADMIN`.
    pub(crate) fn marker(self) -> Option<u64> {
        /// The last of the 32 types of swap entries (`SWP_PTE_MARKER` in linux/swap.h).
        const MARKER: u64 = 31;
        let (kind, bits) = (self.0 & MARKER, (self.0 & Self::FRAME) >> 5);
        let swapped = self.0 & (Self::PRESENT | Self::SWAPPED) == Self::SWAPPED;
        (swapped && kind == MARKER).then_some(bits)
    }

    /// Whether it is in swap, as far as the kernel says no more than that.
    pub(crate) fn is_swapped_somewhere(self) -> bool {
        self.0 & (Self::PRESENT | Self::SWAPPED) == Self::SWAPPED && self.0 & Self::FRAME == 0
    }

    /// The categories ([`page`]) of the page, as far as its entry tells them.
    pub(crate) fn categories(self) -> u64 {
        let bit = |mask: u64, category: u64| if self.0 & mask == 0 { 0 } else { category };
        let zero = self.0 & Self::PRESENT != 0 && is_zero(self.0 & Self::FRAME);
        bit(Self::PRESENT, page::IS_PRESENT)
            | bit(Self::SWAPPED, page::IS_SWAPPED)
            | bit(Self::FILE, page::IS_FILE)
            | bit(Self::SOFT_DIRTY, page::IS_SOFT_DIRTY)
            | if zero { page::IS_PFNZERO } else { 0 }
            | if self.0 & Self::PROTECTED == 0 { page::IS_WRITTEN } else { 0 }
    }

    /// Whether the page is in memory, and in that of no other process.
    pub(crate) fn is_alone(self) -> bool {
        self.0 & (Self::PRESENT | Self::ALONE) == Self::PRESENT | Self::ALONE
    }

    /// The number of its frame, if it is in memory. None also if the kernel does not say it, which takes
    /// `CAP_SYS_ADMIN`.
    pub(crate) fn frame(self) -> Option<u64> {
        let frame = self.0 & Self::FRAME;
        (self.0 & Self::PRESENT != 0 && frame != 0).then_some(frame)
    }

    /// Where a page is that other processes have, too. None also if the kernel does not say it,
    /// which takes `CAP_SYS_ADMIN`.
    pub(crate) fn shared_frame(self) -> Option<Frame> {
        let shared = self.0 & (Self::PRESENT | Self::ALONE) == Self::PRESENT;
        (shared && self.0 & Self::FRAME != 0).then_some(Frame(self.0 & Self::FRAME))
    }
}

/// Reads the entries of the pages in a range of addresses of a process.
///
/// # Errors
/// If the task is gone, or the pagemap may not be read.
pub(crate) fn entries(pagemap: &File, range: &Range<u64>) -> Result<Vec<Entry>> {
    const LEN: usize = size_of::<u64>();
    let count = usize::try_from((range.end - range.start) / PAGE).unwrap_or(usize::MAX);
    let mut entries = vec![[0; LEN]; count];
    let read = pagemap.read_exact_at(entries.as_flattened_mut(), range.start / PAGE * LEN as u64);
    read.context(|| format!("pagemap at {:x}", range.start))?;
    Ok(entries.into_iter().map(|entry| Entry(u64::from_le_bytes(entry))).collect())
}

/// Whether a frame is that of the zero page, or in that of the huge zero page.
fn is_zero(frame: u64) -> bool {
    /// Those frames, of pages of zeros that this process keeps mapped.
    static ZEROS: LazyLock<Vec<Range<u64>>> = LazyLock::new(|| {
        let Ok(pagemap) = File::open("/proc/self/pagemap") else { return Vec::new() };
        let frames = |huge: bool| {
            let start = vm::map_zero_page(huge).ok()?;
            let found = entries(&pagemap, &(start..start + 2 * PAGE)).ok()?;
            let [first, second] = [found[0], found[1]].map(|entry| entry.0 & Entry::FRAME);
            // Without huge pages it is a small one.
            let count = if second == first + 1 { vm::HUGE_PAGE as u64 / PAGE } else { 1 };
            (first != 0).then_some(first..first + count)
        };
        [false, true].into_iter().filter_map(frames).collect()
    });
    ZEROS.iter().any(|zeros| zeros.contains(&frame))
}
