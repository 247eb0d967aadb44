//! What files have beside their content: extended attributes, and the marks of an overlay.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, lgetxattr, llistxattr, lsetxattr, mknodat};

/// The kernel allows no longer value of an extended attribute, and no longer list of names (`limits.h`).
const MAX_ATTRIBUTE: usize = 64 << 10;

/// Names and values of extended attributes.
pub(crate) type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// The extended attributes of a file, but for those by which an overlay remembers files of its
/// other layers.
///
/// # Errors
/// If the file is gone, or its attributes cannot be read.
pub(crate) fn attributes(path: &Path) -> io::Result<Attributes> {
    let mut names = vec![0_u8; MAX_ATTRIBUTE];
    let length = match llistxattr(path, &mut names) {
        // This file system has none.
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        length => length?,
    };
    let mut found = Vec::new();
    let names = names.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    for name in names.filter(|name| !name.is_empty()) {
        if [&b"trusted.overlay.origin"[..], b"trusted.overlay.impure"].contains(&name) {
            continue;
        }
        let mut value = vec![0_u8; MAX_ATTRIBUTE];
        let length = lgetxattr(path, name, &mut value)?;
        value.truncate(length);
        found.push((name.to_vec(), value));
    }
    Ok(found)
}

/// Gives a file extended attributes.
///
/// # Errors
/// If the file system does not take an attribute.
pub(crate) fn set_attributes(path: &Path, attributes: &Attributes) -> io::Result<()> {
    let mut each = attributes.iter();
    Ok(each.try_for_each(|(name, value)| {
        lsetxattr(path, name.as_slice(), value, XattrFlags::empty())
    })?)
}

/// Whether this marks, in the upper directory of an overlay, that there is nothing.
#[must_use]
pub(crate) fn is_whiteout(meta: &Metadata) -> bool {
    meta.file_type().is_char_device() && meta.rdev() == 0
}

/// Makes such a mark.
///
/// # Errors
/// If the mark cannot be made: mknod(2) needs privileges.
pub(crate) fn make_whiteout(path: &Path) -> io::Result<()> {
    Ok(mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0)?)
}

/// Makes a named pipe.
///
/// # Errors
/// If the name is taken, or the file system has no pipes.
pub(crate) fn make_fifo(path: &Path) -> io::Result<()> {
    Ok(mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?)
}
