//! What files have beside their content: extended attributes, and the marks of an overlay.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, mknodat};
use torpor_kernel::tree;
pub(crate) use torpor_kernel::tree::Attributes;

/// The extended attributes of a file or directory that has this name, if it has them: no link and no pipe; but for
/// those by which an overlay remembers files of its other layers.
///
/// # Errors
/// If the file is gone, or its attributes cannot be read.
pub(crate) fn attributes(path: &Path) -> io::Result<Attributes> {
    of_file(&File::open(path)?)
}

/// The same of a file that is open.
///
/// # Errors
/// If the attributes cannot be read.
pub(crate) fn of_file(file: &File) -> io::Result<Attributes> {
    let mut all = tree::attributes(file)?;
    all.retain(|(name, _)| {
        ![&b"trusted.overlay.origin"[..], b"trusted.overlay.impure"].contains(&name.as_slice())
    });
    Ok(all)
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
