//! What the images of a round say of the memory of its tasks.

use std::path::Path;

use torpor_engine::inside::Pages;
use torpor_images::pagemap::Pagemap;
use torpor_images::{ImageDir, kind};
use torpor_tracee::Mapping;

use crate::memory::{Memory, PAGE};
use crate::{Ground, Tally};

/// Compares the memory of a player's tasks with the images of a round.
pub fn compare(
    images: &ImageDir,
    tasks: &[Memory],
    ground: &Ground,
    tally: &mut Tally,
) -> Result<(), String> {
    for task in tasks {
        let id = u64::from(task.pid.cast_unsigned());
        let pages = Pages::load(images, kind::PAGEMAP, id).map_err(|e| e.to_string())?;
        let own = Pagemap::read(images, kind::PAGEMAP, id).unwrap();
        let clean = own.runs.iter().filter(|run| run.in_parent).map(|run| run.pages);
        tally.clean += clean.sum::<u64>();
        let relatives = own.runs.iter().filter(|run| run.relative.is_some()).map(|run| run.pages);
        tally.relatives += relatives.sum::<u64>();
        tally.pages += own.runs.iter().map(|run| run.pages).sum::<u64>();
        tally.tasks += 1;
        compare_task(task, &pages, ground).map_err(|e| format!("task {}: {e}", task.pid))?;
    }
    Ok(())
}

fn compare_task(task: &Memory, pages: &Pages, ground: &Ground) -> Result<(), String> {
    // Shared memory has images of its own.
    for (mapping, memory) in task.mappings.iter().filter(|(mapping, _)| !mapping.shared) {
        let len = usize::try_from(mapping.end - mapping.start).unwrap();
        let mut expected = without_pages(ground, mapping, len);
        let mut saved = vec![false; len / PAGE];
        for (stretch, range) in pages.within(mapping.start..mapping.end) {
            let at = usize::try_from(range.start - mapping.start).unwrap();
            let end = usize::try_from(range.end - mapping.start).unwrap();
            stretch.read(range.start, &mut expected[at..end]).map_err(|e| e.to_string())?;
            saved[at / PAGE..end / PAGE].fill(true);
        }
        for (number, expected) in expected.chunks(PAGE).enumerate() {
            let address = mapping.start + (number * PAGE) as u64;
            let Some(page) = &memory[number] else { continue };
            // Files other than the history's are not looked at, where nothing is saved.
            let foreign = mapping.inode != 0 && !is_own(ground, mapping) && !saved[number];
            if page.as_slice() != expected && !foreign {
                let at = page.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
                return Err(format!(
                    "{address:x} in {:x}-{:x} {:?}: byte {at} is {:x}, {:x} in the images ({})",
                    mapping.start,
                    mapping.end,
                    mapping.name,
                    page[at],
                    expected[at],
                    if saved[number] { "saved" } else { "not saved" },
                ));
            }
        }
    }
    Ok(())
}

fn is_own(ground: &Ground, mapping: &Mapping) -> bool {
    Path::new(&mapping.name) == ground.file
}

/// What a mapping holds where no page is saved.
fn without_pages(ground: &Ground, mapping: &Mapping, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if is_own(ground, mapping) {
        let from = usize::try_from(mapping.offset).unwrap().min(ground.content.len());
        let n = len.min(ground.content.len() - from);
        bytes[..n].copy_from_slice(&ground.content[from..from + n]);
    }
    bytes
}
