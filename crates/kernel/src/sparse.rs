//! Files with holes: where between those the data is, and copies that have the same holes.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::{Errno, Result};

/// So many bytes are copied before it is told.
const STEP: u64 = 16 << 20;

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

/// Copies a file to an empty one: at once where their file system lets both have the same blocks (reflink), else what is
/// no hole. `copied` is told each time that some bytes of it are there. A file that says that it is empty is read to its
/// end: files of procfs and of some servers (FUSE) say so.
///
/// # Errors
/// If the file cannot be read, or the other cannot be written: its disk is full, for example; `UnexpectedEof` if the file
/// becomes shorter meanwhile; what `copied` fails with.
pub fn copy(
    from: &File,
    to: &File,
    copied: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let size = from.metadata()?.len();
    if ioctl_ficlone(to, from).is_ok() {
        return copied(size);
    }
    if size == 0 {
        return copy_to_end(from, to, copied);
    }
    let (mut source, mut target, mut next) = (from, to, 0);
    while let Some((start, len)) = next_data(from, next, size)? {
        next = start + len;
        source.seek(io::SeekFrom::Start(start))?;
        target.seek(io::SeekFrom::Start(start))?;
        let mut left = len;
        while left > 0 {
            let count = io::copy(&mut source.take(left.min(STEP)), &mut target)?;
            if count == 0 {
                return Err(shorter());
            }
            left -= count;
            copied(count)?;
        }
    }
    target.flush()?;
    if from.metadata()?.len() < size {
        return Err(shorter());
    }
    to.set_len(size)
}

fn copy_to_end(
    from: &File,
    mut to: &File,
    copied: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let (mut sum, mut limit) = (0, None);
    loop {
        let count = io::copy(&mut from.take(STEP), &mut to)?;
        if count > 0 {
            copied(count)?;
        }
        sum += count;
        // One that has a length by now is written to meanwhile, perhaps for ever.
        let limit = *limit.get_or_insert(from.metadata()?.len());
        if count == 0 || (limit > 0 && sum >= limit) {
            return to.flush();
        }
    }
}

fn shorter() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it has become shorter while it was copied")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::{FileExt, MetadataExt};

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

    #[test]
    fn what_is_copied_is_told_and_nothing_else_is_copied() {
        const SIZE: u64 = 1 << 40;
        let [from, to] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        from.set_len(SIZE).unwrap();
        let large = vec![b'x'; usize::try_from(STEP).unwrap() + 1];
        from.write_all_at(&large, SIZE / 2).unwrap();
        let mut told = Vec::new();
        copy(&from, &to, &mut |bytes| {
            told.push(bytes);
            Ok(())
        })
        .unwrap();
        let mut read = vec![0; large.len()];
        to.read_exact_at(&mut read, SIZE / 2).unwrap();
        let meta = to.metadata().unwrap();
        assert!(read == large && meta.len() == SIZE && meta.blocks() * 512 < SIZE / 2);
        // Where blocks are shared, all of it is there at once.
        assert!(told == [SIZE] || (told[0] == STEP && told.len() == 2), "{told:?}");
        let failed = copy(&from, &tempfile::tempfile().unwrap(), &mut |_| {
            Err(io::ErrorKind::BrokenPipe.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_becomes_shorter_is_not_filled_up() {
        // Where no blocks are shared.
        let new = || tempfile::tempfile_in("/dev/shm").unwrap();
        for left in [STEP / 2, STEP, STEP + 4096, 2 * STEP] {
            let from = new();
            // Data after which comes a hole.
            from.write_all_at(&vec![b'x'; usize::try_from(STEP).unwrap() + 8192], 0).unwrap();
            from.set_len(4 * STEP).unwrap();
            let mut is_cut = false;
            let cut = copy(&from, &new(), &mut |_| match std::mem::replace(&mut is_cut, true) {
                true => Ok(()),
                false => from.set_len(left),
            });
            assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{left}");
        }
    }

    #[test]
    fn what_says_that_it_is_empty_is_read() {
        let from = File::open("/proc/self/limits").unwrap();
        assert_eq!(from.metadata().unwrap().len(), 0);
        let to = tempfile::tempfile().unwrap();
        let mut told = 0;
        copy(&from, &to, &mut |bytes| {
            told += bytes;
            Ok(())
        })
        .unwrap();
        let mut read = vec![0; usize::try_from(told).unwrap()];
        to.read_exact_at(&mut read, 0).unwrap();
        assert!(read.starts_with(b"Limit ") && to.metadata().unwrap().len() == told);
        copy(&tempfile::tempfile().unwrap(), &tempfile::tempfile().unwrap(), &mut |_| Ok(()))
            .unwrap();
    }
}
