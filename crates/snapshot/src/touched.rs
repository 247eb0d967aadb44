//! The pages that trial starts have touched, which later starts bring in first.
//!
//! What a start touches is not the same each time: a collector of garbage runs before the first answer, or behind
//! it. So there is more than one trial, and the list has what any of them has touched.

use std::collections::BTreeSet;

use torpor_images::pagemap::page_size;
use torpor_images::proto::WorkingSetEntry;
use torpor_images::{ImageDir, kind};

use crate::eager::LONGEST;
use crate::error::Result;

/// The number of an address space, and an address in it.
type Page = (u64, u64);

/// Takes the list beside the images, if there is one, for another trial start to write its own.
///
/// # Errors
/// If it cannot be read or removed.
pub fn take(images: &ImageDir) -> Result<Option<Vec<WorkingSetEntry>>> {
    if !images.has(kind::WORKING_SET, 0)? {
        return Ok(None);
    }
    let entries = images.read_all_or_empty(kind::WORKING_SET, 0)?;
    images.remove(&kind::WORKING_SET.file_name(0))?;
    Ok(Some(entries))
}

/// Writes the list of what was touched, in one trial start after the other, if anything was.
///
/// # Errors
/// If the image cannot be written: the disk is full.
pub fn write(images: &ImageDir, entries: &[WorkingSetEntry]) -> Result<()> {
    match entries {
        [] => Ok(()),
        _ => Ok(images.write_all(kind::WORKING_SET, 0, &runs(&pages(entries)))?),
    }
}

/// The pages of a list, each once, when it was touched first.
fn pages(entries: &[WorkingSetEntry]) -> Vec<Page> {
    let mut seen = BTreeSet::new();
    let of = |entry: &WorkingSetEntry| {
        let (id, start) = (entry.id, entry.vaddr);
        (0..entry.nr_pages).map(move |number| (id, start + number * page_size()))
    };
    entries.iter().flat_map(of).filter(|page| seen.insert(*page)).collect()
}

/// Pages as entries.
fn runs(pages: &[Page]) -> Vec<WorkingSetEntry> {
    let mut runs: Vec<WorkingSetEntry> = Vec::new();
    for &(id, vaddr) in pages {
        match runs.last_mut() {
            Some(last)
                if (last.id, last.vaddr + last.nr_pages * page_size()) == (id, vaddr)
                    && last.nr_pages < LONGEST =>
            {
                last.nr_pages += 1;
            }
            _ => runs.push(WorkingSetEntry { id, vaddr, nr_pages: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_page_is_in_the_list_once() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let run = |id, first: u64, nr_pages| {
            let vaddr = first * page_size();
            WorkingSetEntry { id, vaddr, nr_pages }
        };
        let one = [run(7, 20, 2), run(7, 5, 1), run(8, 22, 1)];
        write(&images, &one).unwrap();
        let other = [run(7, 5, 1), run(7, 21, 2), run(7, 23, LONGEST)];
        let both = [take(&images).unwrap().unwrap(), other.to_vec()].concat();
        assert_eq!(take(&images).unwrap(), None, "it was taken");
        write(&images, &both).unwrap();
        let more = [run(7, 22, LONGEST), run(7, 22 + LONGEST, 1)];
        assert_eq!(take(&images).unwrap(), Some([&one[..], &more].concat()));
        write(&images, &[]).unwrap();
        assert!(!dir.path().join("working-set.img").exists(), "nothing was touched");
    }
}
