//! Files with holes: where between those the data is.

use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, Result};

/// The first stretch of data at or behind `at` in the first `size` bytes of a file: offset and length. Where the file
/// system does not tell holes, it is all the rest. The position of the file is another one afterwards.
///
/// # Errors
/// As lseek(2): `EIO`, if the file system cannot say.
pub fn next_data(file: impl AsFd, at: u64, size: u64) -> Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let start = match seek(&file, SeekFrom::Data(at)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL) => return Ok(Some((at, size - at))),
        Err(e) => return Err(e),
    };
    let end = seek(&file, SeekFrom::Hole(start))?;
    Ok(Some((start, end.min(size).saturating_sub(start))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn stretches_lie_within_the_size_that_is_asked_for() {
        const HOLE: u64 = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        for place in [HOLE, 3 * HOLE] {
            file.write_all_at(b"word", place).unwrap();
        }
        file.set_len(4 * HOLE).unwrap();
        let next = |at, size| next_data(&file, at, size).unwrap();
        let (start, len) = next(0, 4 * HOLE).unwrap();
        assert!(start <= HOLE && start + len >= HOLE + 4 && start + len < 3 * HOLE);
        assert_eq!(next(HOLE + 1, HOLE + 3), Some((HOLE + 1, 2)));
        assert_eq!(next(HOLE + len, 3 * HOLE), None);
        assert_eq!((next(HOLE, HOLE), next(4 * HOLE, 4 * HOLE)), (None, None));
    }
}
