//! Where pages are: the entries of `/proc/PID/pagemap`
//! (Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::vma::PAGE;
use crate::error::{Context, Result};

/// What the kernel says of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry(u64);

/// The number of a page frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame(u64);

impl Entry {
    const PRESENT: u64 = 1 << 63;
    /// Mapped here only.
    const ALONE: u64 = 1 << 56;
    const FRAME: u64 = (1 << 55) - 1;

    /// Whether the page is in memory, and in that of no other process.
    pub fn is_alone(self) -> bool {
        self.0 & (Self::PRESENT | Self::ALONE) == Self::PRESENT | Self::ALONE
    }

    /// Where a page is that other processes have, too. None also if the kernel does not say it,
    /// which takes `CAP_SYS_ADMIN`.
    pub fn shared_frame(self) -> Option<Frame> {
        let shared = self.0 & (Self::PRESENT | Self::ALONE) == Self::PRESENT;
        (shared && self.0 & Self::FRAME != 0).then_some(Frame(self.0 & Self::FRAME))
    }
}

/// Reads the entries of the pages in a range of addresses of a process.
///
/// # Errors
/// The kernel's.
pub fn entries(pagemap: &File, pid: i32, range: &Range<u64>) -> Result<Vec<Entry>> {
    const LEN: usize = size_of::<u64>();
    let count = usize::try_from((range.end - range.start) / PAGE).unwrap_or(usize::MAX);
    let mut entries = vec![[0; LEN]; count];
    let read = pagemap.read_exact_at(entries.as_flattened_mut(), range.start / PAGE * LEN as u64);
    read.context(|| format!("pagemap of task {pid} at {:x}", range.start))?;
    Ok(entries.into_iter().map(|entry| Entry(u64::from_le_bytes(entry))).collect())
}
