//! The pages of an address space by category: found by `PAGEMAP_SCAN` (Linux 6.7), which passes
//! over holes whatever their size, or, on older kernels, by reading each entry of the pagemap.

use std::fs::File;
use std::sync::LazyLock;

use torpor_sys::vm::{self, PageRegion, Scan, page};

use super::frames;
use super::vma::PAGE;
use crate::error::{Context, Result};

/// Whether the kernel has `PAGEMAP_SCAN`.
pub(crate) fn is_quick() -> bool {
    static QUICK: LazyLock<bool> = LazyLock::new(|| probe().is_ok());
    *QUICK
}

/// Tries `PAGEMAP_SCAN`.
///
/// # Errors
/// `ENOTTY` on kernels without it.
pub(crate) fn probe() -> std::io::Result<()> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let what = Scan { end: PAGE, any_of: page::IS_PRESENT, ..Scan::default() };
    vm::scan(&pagemap, &what, &mut [PageRegion::default()]).map(drop)
}

/// Walks all regions that match. `what` asks for pages that are there, in some sense.
///
/// # Errors
/// If the task is gone, or the pagemap may not be scanned or read.
pub(crate) fn for_each_region(
    pagemap: &File,
    what: &Scan,
    each: impl FnMut(&PageRegion),
) -> Result<()> {
    if is_quick() { quickly(pagemap, *what, each) } else { one_by_one(pagemap, what, each) }
}

fn quickly(pagemap: &File, mut what: Scan, mut each: impl FnMut(&PageRegion)) -> Result<()> {
    let mut out = [PageRegion::default(); 512];
    while what.start < what.end {
        let (n, walked) = vm::scan(pagemap, &what, &mut out)
            .context(|| format!("PAGEMAP_SCAN {:x}-{:x}", what.start, what.end))?;
        out[..n].iter().for_each(&mut each);
        what.start = walked;
    }
    Ok(())
}

/// Does not know of huge pages, nor where changes are tracked by write-protection.
fn one_by_one(pagemap: &File, what: &Scan, mut each: impl FnMut(&PageRegion)) -> Result<()> {
    /// Entries read at once: 64 KiB of them.
    const TOGETHER: u64 = 8192;
    let matches = |categories: u64| {
        let categories = categories ^ what.inverted;
        categories & what.all_of == what.all_of && categories & what.any_of != 0
    };
    let mut run = PageRegion::default();
    for first in (what.start..what.end).step_by(8192 * 4096) {
        let range = first..what.end.min(first + TOGETHER * PAGE);
        let entries = frames::entries(pagemap, &range)?;
        for (entry, start) in entries.iter().zip(range.step_by(4096)) {
            let categories = if entry.is_hole() { 0 } else { entry.categories() };
            if !matches(categories) {
                continue;
            }
            let categories = categories & what.report;
            if run.end != start || run.categories != categories {
                if run.end != 0 {
                    each(&run);
                }
                run = PageRegion { start, end: start, categories };
            }
            run.end = start + PAGE;
        }
    }
    if run.end != 0 {
        each(&run);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::vma;

    /// Both ways, of all memory of this process, which other tests work in meanwhile: what the one way
    /// finds twice the other must have found between, sooner or later.
    #[test]
    fn both_ways_find_the_same() {
        if !is_quick() {
            println!("left out: both_ways_find_the_same (this kernel has one way)");
            return;
        }
        let pid = i32::try_from(std::process::id()).unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let report = page::IS_FILE | page::IS_PFNZERO | page::IS_PRESENT | page::IS_SWAPPED;
        let mut compared = 0;
        let mappings = vma::read(pid).unwrap();
        for vma in mappings.iter().filter(|vma| !vma.is(vma::status::VSYSCALL)) {
            let (start, end) = (vma.map.start, vma.map.end);
            let any_of = page::IS_PRESENT | page::IS_SWAPPED;
            let what = Scan { start, end, any_of, report, ..Scan::default() };
            let all = |quick: bool| {
                let mut found = Vec::new();
                let each = |region: &PageRegion| found.push(*region);
                let done = if quick {
                    quickly(&pagemap, what, each)
                } else {
                    one_by_one(&pagemap, &what, each)
                };
                done.map(|()| found).unwrap_or_default()
            };
            let mut stable = false;
            let same = (0..100).find_map(|_| {
                let (before, between, after) = (all(true), all(false), all(true));
                stable |= before == after;
                (before == after && before == between).then_some(before.len())
            });
            assert!(same.is_some() || !stable, "{}", vma.map.name);
            compared += same.unwrap_or(0);
        }
        assert!(compared > 10, "{compared} regions were the same twice");
    }
}
