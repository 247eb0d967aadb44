//! Pages of sealed images that no task gets: those of the kernel's own mappings, which the
//! restore takes from this kernel, and those that belong to no mapping.
//!
//! A seal covers every byte of a checkpoint. Pages are verified when they are read, so what
//! nobody needs is read here.

use torpor_images::ImageDir;

use super::fill::CHUNK;
use crate::error::Result;
use crate::ranges::gaps;
use crate::restore::tasks::Task;

/// Verifies them.
///
/// # Errors
/// Pages that do not fit their tags.
pub(crate) fn verify(images: &ImageDir, tasks: &[Task]) -> Result<()> {
    if images.seal_ref().is_none() {
        return Ok(());
    }
    let mut buffer = vec![0; CHUNK];
    for image in tasks.iter().map(|task| &task.image) {
        if !image.pages.are_verified_singly() {
            continue;
        }
        let filled = || image.areas().filter(|vma| !vma.kind.is_kernels() && !vma.kind.is_ring());
        let stretches = image.pages.stretches().iter();
        for stretch in stretches.filter(|stretch| !stretch.is_zero() && !stretch.is_remote()) {
            let range = &stretch.range;
            let parts = filled().map(|vma| vma.start.max(range.start)..vma.end.min(range.end));
            for gap in gaps(range, parts.filter(|part| !part.is_empty())) {
                let mut at = gap.start;
                while at < gap.end {
                    let len = usize::try_from(gap.end - at).unwrap_or(CHUNK).min(CHUNK);
                    stretch.read(at, &mut buffer[..len])?;
                    at += len as u64;
                }
            }
        }
    }
    Ok(())
}
