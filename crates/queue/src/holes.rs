//! Files with holes: only what is between those is sent.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;

use torpor_kernel::sparse::next_data;

use crate::order::Extent;

/// Whether a file may have holes: it takes less of its disk than it is long.
#[must_use]
pub(crate) fn may_have(meta: &impl MetadataExt) -> bool {
    meta.blocks().saturating_mul(512) < meta.size()
}

/// The parts of the first `size` bytes of a file that are no holes, in their order.
///
/// # Errors
/// `EIO` or the like, if the file system cannot say.
pub(crate) fn data(file: &File, size: u64) -> io::Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    let end = |&(at, len): &Extent| at + len;
    while let Some(next) = next_data(file, found.last().map_or(0, end), size)? {
        found.push(next);
    }
    Ok(found)
}

/// These parts, or as many at most: the smallest holes between them count as data then.
#[must_use]
pub(crate) fn at_most(most: usize, mut extents: Vec<Extent>) -> Vec<Extent> {
    let mut small = 4096;
    while extents.len() > most.max(1) {
        extents = without_holes_of(small, &extents);
        small = small.saturating_mul(2);
    }
    extents
}

/// These parts, and so small holes between them.
fn without_holes_of(small: u64, extents: &[Extent]) -> Vec<Extent> {
    let mut found: Vec<Extent> = Vec::new();
    for &(at, len) in extents {
        match found.last_mut() {
            Some((first, before)) if at - (*first + *before) <= small => {
                *before = at + len - *first
            }
            _ => found.push((at, len)),
        }
    }
    found
}

/// Writes what is read to the parts of an empty file of this size.
///
/// # Errors
/// If what is read ends before, or the file cannot be written.
pub(crate) fn fill(
    file: &mut File,
    size: u64,
    extents: &[Extent],
    from: &mut dyn Read,
) -> io::Result<()> {
    for &(at, len) in extents {
        file.seek(SeekFrom::Start(at))?;
        if io::copy(&mut Read::take(&mut *from, len), file)? != len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    file.flush()?;
    file.set_len(size)
}

/// Whether these parts follow one another, and lie within so many bytes.
#[must_use]
pub(crate) fn are_within(extents: &[Extent], size: u64) -> bool {
    let mut end = 0;
    extents.iter().all(|&(at, len)| {
        let follows = at >= end;
        end = at.saturating_add(len);
        follows && end <= size
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;

    /// So long is a file that has little in it.
    pub(crate) const LONG: u64 = 1 << 40;

    /// Makes one, with a word in the middle.
    pub(crate) fn make(path: &Path) {
        let file = File::create(path).unwrap();
        file.set_len(LONG).unwrap();
        file.write_all_at(b"word", LONG / 2).unwrap();
    }

    /// Whether this is such a file, and takes little.
    pub(crate) fn is_made(path: &Path) -> bool {
        let (file, mut word) = (File::open(path).unwrap(), [0; 4]);
        file.read_exact_at(&mut word, LONG / 2).unwrap();
        let meta = file.metadata().unwrap();
        (&word, meta.len()) == (b"word", LONG) && meta.blocks() * 512 < 1 << 20
    }

    /// A list of millions of parts would be refused where it is sent to.
    #[test]
    fn where_there_are_too_many_parts_the_smallest_holes_are_sent() {
        let parts = vec![(0, 10), (20, 10), (10_000, 10), (30_000, 10)];
        assert_eq!(at_most(4, parts.clone()), parts);
        assert_eq!(at_most(3, parts.clone()), [(0, 30), (10_000, 10), (30_000, 10)]);
        assert_eq!(at_most(2, parts.clone()), [(0, 10_010), (30_000, 10)]);
        assert_eq!(at_most(0, parts), [(0, 30_010)]);
    }

    #[test]
    fn parts_lie_within_a_file_or_not() {
        assert!(are_within(&[], 0) && are_within(&[(0, 4), (6, 4)], 10));
        for extents in [&[(0, 11)][..], &[(4, 2), (0, 2)], &[(0, 4), (3, 2)], &[(4, u64::MAX)]] {
            assert!(!are_within(extents, 10), "{extents:?}");
        }
    }
}
