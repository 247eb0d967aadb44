//! Files that the caller names for what this program says of its work: logs, files with a pid, what a template is.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

/// Opens a file to write at its end; it is empty, and has these permissions if it was not there. A relative path leads into
/// the work directory, which is that of the images, as a rule, and may be somebody else's: whoever can write there must not
/// choose what root overwrites, or have it wait. So no symbolic link is followed there, and it is a regular file of one name.
///
/// # Errors
/// If the file cannot be made or opened. By a relative path also `ELOOP` if a link is on the way, and `ENXIO` or
/// [`io::ErrorKind::InvalidInput`] if it is no such file.
pub fn begin(path: &Path, permissions: u32) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(permissions);
    let file = match path.is_absolute() {
        true => File::from(rustix::fs::open(path, flags, mode)?),
        false => {
            let flags = flags | OFlags::NONBLOCK;
            let resolve = ResolveFlags::NO_SYMLINKS;
            File::from(rustix::fs::openat2(CWD, path, flags, mode, resolve)?)
        }
    };
    let meta = file.metadata()?;
    let is_plain = meta.is_file() && meta.nlink() == 1;
    if !path.is_absolute() && !is_plain {
        let why = "it is no regular file, or has other names";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    if meta.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}
