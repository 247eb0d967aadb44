//! The pages of an object of shared memory, and how they get there.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use torpor_sys::vm;

use super::pages::Pages;
use crate::error::{Context, Result};

/// How much is copied at once.
const CHUNK: usize = 256 * 1024;

/// Writes the pages of a shared object into its file, or into memory where it begins
/// at `base`.
///
/// # Errors
/// If pages cannot be read, or are not those that were sealed; if the object cannot be written to
/// (memory is short).
pub(crate) fn fill(pages: &Pages, file: &File, base: u64) -> Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    // The object is new: what it does not hold yet is zero.
    for stretch in pages.stretches().iter().filter(|stretch| !stretch.is_zero()) {
        let mut at = stretch.range.start;
        while at < stretch.range.end {
            let len = usize::try_from(stretch.range.end - at).unwrap_or(CHUNK).min(CHUNK);
            stretch.read(at, &mut buffer[..len])?;
            write_object(file, &buffer[..len], base + at)
                .context(|| "filling shared memory".to_owned())?;
            at += len as u64;
        }
    }
    Ok(())
}

fn write_object(file: &File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    match file.write_all_at(bytes, offset) {
        // hugetlbfs can only be written through a mapping.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            vm::write_mapped(file.as_fd(), offset, bytes)
        }
        done => done,
    }
}
