//! What a lazy restore reads before the tasks run: memory that cannot come later, such as changed
//! pages of mapped files. A recorded working set does not have it, for nobody waits for it then.

use rustix::mm::MapFlags;
use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::proto::{MmEntry, VmaEntry, WorkingSetEntry};
use torpor_images::{ImageDir, kind};

use crate::error::Result;

/// The bit in the status of a mapping that is private and of no file.
const ANONYMOUS: u32 = 1 << 9;
/// The bits that one may have whose pages can come later: it is mapped, and may be the heap. The vDSO, for one, has
/// another.
const USUAL: u32 = 1 << 0 | 1 << 5 | ANONYMOUS;
/// How many pages an entry has at most, and how many entries a list: more are refused by their reader.
pub(crate) const LONGEST: u64 = 64;
const MOST: usize = 1 << 20;

/// Puts what is read before the tasks run in front of the working set of the images. The list is
/// advice: what is there by mistake comes a little earlier.
///
/// # Errors
/// Images that cannot be read or written.
pub fn note(images: &ImageDir) -> Result<()> {
    let mut list = Vec::new();
    for id in images.ids(kind::PAGEMAP)? {
        let mm: Option<MmEntry> = images.read_opt(kind::MM, id)?;
        let areas = mm.map(|mm| mm.vmas).unwrap_or_default();
        let map = Pagemap::read_unbacked(images, kind::PAGEMAP, id)?;
        for run in map.runs.iter().filter(|run| run.present) {
            for area in areas.iter().filter(|area| !may_wait(area)) {
                let start = run.vaddr.max(area.start);
                list.extend(entries(id, start, run.range().end.min(area.end)));
            }
        }
    }
    let recorded: Vec<WorkingSetEntry> = images.read_all_or_empty(kind::WORKING_SET, 0)?;
    list.extend(recorded);
    list.truncate(MOST);
    Ok(images.write_all(kind::WORKING_SET, 0, &list)?)
}

fn may_wait(area: &VmaEntry) -> bool {
    let at_once = MapFlags::GROWSDOWN | MapFlags::LOCKED | MapFlags::HUGETLB | MapFlags::SHARED;
    let is_usual = area.status & ANONYMOUS != 0 && area.status & !USUAL == 0;
    is_usual && area.flags & at_once.bits() == 0
}

/// The pages from `start` to `end`, if there are any, in entries that are short enough.
fn entries(id: u64, start: u64, end: u64) -> impl Iterator<Item = WorkingSetEntry> {
    let pages = end.saturating_sub(start) / page_size();
    (0..pages.div_ceil(LONGEST)).map(move |number| {
        let first = number * LONGEST;
        let vaddr = start + first * page_size();
        WorkingSetEntry { id, vaddr, nr_pages: (pages - first).min(LONGEST) }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use torpor_images::pagemap::{PagemapWriter, Run};

    #[test]
    fn what_cannot_wait_is_in_front() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let page = page_size();
        let area = |start: u64, end: u64, status| VmaEntry {
            start: start * page,
            end: end * page,
            status,
            ..VmaEntry::default()
        };
        // A mapped file is private, too, and has another bit.
        let mut vmas = vec![area(10, 100, 1 << 6), area(100, 200, ANONYMOUS)];
        // The vDSO, whose contents are compared.
        vmas.push(area(200, 202, 1 << 0 | 1 << 3 | ANONYMOUS));
        images.write_one(kind::MM, 7, &MmEntry { vmas, ..MmEntry::default() }).unwrap();
        let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 1).unwrap();
        for (first, pages) in [(20, 100), (200, 2)] {
            let vaddr = first * page;
            map.push(Run { vaddr, pages, present: true, ..Run::default() }).unwrap();
        }
        map.finish().unwrap();
        let entry = |first: u64, nr_pages| WorkingSetEntry { id: 7, vaddr: first * page, nr_pages };
        images.write_all(kind::WORKING_SET, 0, &[entry(110, 2)]).unwrap();
        note(&images).unwrap();
        let list: Vec<WorkingSetEntry> = images.read_all_or_empty(kind::WORKING_SET, 0).unwrap();
        assert_eq!(list, [entry(20, 64), entry(84, 16), entry(200, 2), entry(110, 2)]);
    }
}
