//! The pages of mappings that a program has registered with userfaultfd.
//!
//! There a page of zeros is another thing than a missing one, and a page that is not there can be
//! write-protected or poisoned: the kernel keeps a marker in its place. So each entry of the pagemap
//! is looked at. What is missing must not be read: whoever does waits for the program.

use std::fs::File;
use std::ops::Range;

use torpor_sys::vm::{Scan, page};

use super::frames::{self, Entry, marker};
use super::pages::{Census, PageSpan, push};
use super::scan;
use super::vma::{PAGE, Vma};
use crate::error::{Error, Result};

/// What is in such a mapping.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// What is to be saved.
    pub census: Census,
    /// Pages that are zeros, and not missing.
    pub zero: Vec<PageSpan>,
    /// Pages, and holes, that are write-protected.
    pub protected: Vec<PageSpan>,
    /// Pages that nobody may touch any more.
    pub poisoned: Vec<PageSpan>,
}

/// Looks at all pages of a mapping of process `pid`, which is stopped.
///
/// # Errors
/// Refused, if this process may not see the marks of pages (`CAP_SYS_ADMIN`); if the pagemap cannot
/// be scanned or read.
pub(crate) fn look(pid: i32, pagemap: &File, vma: &Vma) -> Result<Marks> {
    let what = Scan {
        start: vma.map.start,
        end: vma.map.end,
        any_of: page::IS_PRESENT | page::IS_SWAPPED | page::IS_GUARD,
        report: page::IS_PRESENT,
        ..Scan::default()
    };
    let mut there = Vec::new();
    scan::for_each_region(pagemap, &what, |region| there.push(region.start..region.end))?;
    let mut marks = Marks::default();
    for range in there.iter().flat_map(in_parts) {
        for (entry, at) in frames::entries(pagemap, &range)?.into_iter().zip(range.step_by(4096)) {
            marks.add(vma, entry, at..at + PAGE).ok_or_else(|| {
                let object = format!("mapping {:x}-{:x}", vma.map.start, vma.map.end);
                let reason = "is registered with userfaultfd: to tell its pages from the marks of \
                              that takes CAP_SYS_ADMIN";
                Error::refused(pid, object, reason)
            })?;
        }
    }
    Ok(marks)
}

/// A long range, in parts whose entries are read at once.
fn in_parts(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    const TOGETHER: usize = 8192 * 4096;
    let Range { start, end } = *range;
    (start..end).step_by(TOGETHER).map(move |at| at..end.min(at + TOGETHER as u64))
}

impl Marks {
    /// Sorts a page in. `None` if the kernel does not tell what it is.
    fn add(&mut self, vma: &Vma, entry: Entry, place: Range<u64>) -> Option<()> {
        let page = PageSpan { start: place.start, end: place.end, ..PageSpan::default() };
        self.census.scanned += 1;
        if entry.is_protected() {
            push(&mut self.protected, page);
        }
        if let Some(bits) = entry.marker() {
            if bits & marker::GUARD != 0 {
                push(&mut self.census.guards, page);
            } else if bits & marker::POISONED != 0 {
                push(&mut self.poisoned, page);
            }
            return Some(());
        }
        let categories = entry.categories();
        let own = vma.is_private() && categories & page::IS_FILE == 0;
        if entry.is_hole() || !own {
            return Some(());
        }
        if entry.is_swapped_somewhere() {
            return None;
        }
        let list = match categories & page::IS_PFNZERO {
            0 => &mut self.census.pages,
            _ => &mut self.zero,
        };
        push(list, page);
        Some(())
    }
}
