//! Writing pages of files back, sync_file_range(2), which rustix lacks.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Result, check};

/// Writes back what of a file's content is only in memory, and waits for that: `fdatasync` without
/// the journal's part of it. Pages that are mapped shared are read-only for the kernel afterwards, so
/// that it notices the next write to each, and the file has another time then.
///
/// # Errors
/// `ESPIPE` for what is no file, directory or block device; `EIO` and `ENOSPC` from the disk.
pub fn write_back(file: impl AsFd) -> Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no memory is passed, and the descriptor is open as long as `file` is borrowed.
    let done = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, flags) };
    check(done).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    #[allow(clippy::unwrap_used)]
    fn files_are_written_back() {
        write_back(std::fs::File::open("/proc/self/exe").unwrap()).unwrap();
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(write_back(socket).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
    }
}
