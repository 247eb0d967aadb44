//! By what means changes of memory are told.

use std::fs::File;
use std::sync::LazyLock;

use torpor_sys::vm::{self, page};

use super::vma::{PAGE, Vma};
use super::{frames, scan};

/// What the kernel offers for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// Asynchronous write-protection by userfaultfd (Linux 6.7): pages are protected, and the
    /// kernel takes that off at the first write to each.
    WriteProtection,
    /// Soft-dirty bits: all of an address space are cleared, and the kernel sets that of a page at
    /// the first write to it. A userfaultfd marks the mappings that have been there since.
    SoftDirty,
}

impl Means {
    /// What there is on this kernel.
    ///
    /// # Errors
    /// If the kernel has none: what it would need for one.
    pub fn of_this_kernel() -> Result<Self, &'static str> {
        static MEANS: LazyLock<Option<Means>> = LazyLock::new(|| {
            if scan::is_quick() {
                return Some(Means::WriteProtection);
            }
            has_soft_dirty().then_some(Means::SoftDirty)
        });
        MEANS.ok_or(
            "neither PAGEMAP_SCAN (Linux 6.7) nor soft-dirty bits (CONFIG_MEM_SOFT_DIRTY) are there",
        )
    }

    /// The means, in the words of the log.
    pub fn name(self) -> &'static str {
        match self {
            Means::WriteProtection => "write-protection (userfaultfd)",
            Means::SoftDirty => "soft-dirty bits",
        }
    }

    /// The categories of pages that tell.
    pub fn report(self) -> u64 {
        match self {
            Means::WriteProtection => page::IS_WPALLOWED | page::IS_WRITTEN,
            Means::SoftDirty => page::IS_SOFT_DIRTY,
        }
    }

    /// Whether a page of `categories` has not changed since changes of its mapping are tracked.
    pub fn is_clean(self, vma: &Vma, categories: u64) -> bool {
        match self {
            Means::WriteProtection => categories & self.report() == page::IS_WPALLOWED,
            // Where the kernel merges equal pages (KSM) it forgets the bits of those it replaces.
            Means::SoftDirty => {
                vma.has(b"uw") && !vma.has(b"mg") && categories & page::IS_SOFT_DIRTY == 0
            }
        }
    }
}

/// Whether the kernel has soft-dirty bits: those of a new mapping are set.
fn has_soft_dirty() -> bool {
    let Ok(start) = vm::map_zero_page(false) else { return false };
    let entries = File::open("/proc/self/pagemap")
        .map_err(drop)
        .and_then(|pagemap| frames::entries(&pagemap, &(start..start + PAGE)).map_err(drop));
    entries.is_ok_and(|all| all.iter().all(|entry| entry.categories() & page::IS_SOFT_DIRTY != 0))
}
