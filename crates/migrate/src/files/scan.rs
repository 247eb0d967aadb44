//! What there is in a tree.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, Dir, FileType, Stat, fstat, readlinkat, statat};
use rustix::io::Errno;
use torpor_kernel::tree::{self, Tree};

use super::{Meta, Name, What, path};
use crate::error::{Error, Result};

/// Files of a tree.
pub(super) const MAX_FILES: usize = 1 << 22;

pub(super) use torpor_kernel::tree::Id;

/// Something in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scanned {
    pub name: Name,
    pub what: What,
    /// Bytes that it has on its disk.
    pub stored: u64,
    pub id: Id,
    /// When it was touched last: seconds and nanoseconds.
    pub touched: (i64, i64),
    /// All but extended attributes.
    pub meta: Meta,
}

/// All that is in a tree, what a directory holds behind it. What goes away meanwhile is left out.
///
/// # Errors
/// If the tree has too many files, or one cannot be read (named in the error).
pub(super) fn scan(root: &Tree) -> Result<Vec<Scanned>> {
    let found = root.dir(path(b"")).and_then(|dir| {
        let stat = fstat(&dir)?;
        Ok((stat, look(&dir, Vec::new(), b"", &stat)?))
    });
    let (stat, top) = found.map_err(|errno| failed(b"", errno))?;
    let mut all = vec![top];
    let mut next = 0;
    while let Some(it) = all.get(next) {
        next += 1;
        // Another device is mounted there.
        if it.what != What::Directory || it.id.0 != stat.st_dev {
            continue;
        }
        let name = it.name.clone();
        match list(root, &name, &mut all) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::XDEV | Errno::LOOP | Errno::NOTDIR) => {}
            Err(errno) => return Err(failed(&name, errno)),
        }
        if all.len() > MAX_FILES {
            return Err(Error::refused(format!("there are more than {MAX_FILES} files")));
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

fn list(root: &Tree, dir: &[u8], all: &mut Vec<Scanned>) -> std::result::Result<(), Errno> {
    let file = root.dir(path(dir))?;
    for entry in Dir::read_from(&file)? {
        let entry = entry?;
        let own = entry.file_name().to_bytes();
        if own == b"." || own == b".." {
            continue;
        }
        let name = if dir.is_empty() { own.to_vec() } else { [dir, b"/", own].concat() };
        let stat = statat(&file, OsStr::from_bytes(own), AtFlags::SYMLINK_NOFOLLOW);
        match stat.and_then(|stat| look(&file, name, own, &stat)) {
            Ok(found) => all.push(found),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn look(dir: &File, name: Name, own: &[u8], stat: &Stat) -> std::result::Result<Scanned, Errno> {
    let what = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => What::Directory,
        FileType::RegularFile => What::Regular { len: u64::try_from(stat.st_size).unwrap_or(0) },
        FileType::Symlink => {
            What::Symlink { to: readlinkat(dir, OsStr::from_bytes(own), Vec::new())?.into_bytes() }
        }
        other => What::Special { mode: other.as_raw_mode(), number: stat.st_rdev },
    };
    let nanos = |nanos| i64::try_from(nanos).unwrap_or(0);
    let meta = Meta {
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        changed: (stat.st_mtime, nanos(stat.st_mtime_nsec)),
        attributes: Vec::new(),
    };
    let touched = (stat.st_ctime, nanos(stat.st_ctime_nsec));
    let stored = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
    Ok(Scanned { name, what, stored, id: (stat.st_dev, stat.st_ino), touched, meta })
}

/// The extended attributes of a file.
///
/// # Errors
/// If the attributes cannot be read; `EILSEQ` if one has a name that is no text, as no program gives one.
pub(super) fn attributes(file: impl AsFd) -> std::result::Result<Vec<(String, Vec<u8>)>, Errno> {
    let named = |(name, value)| match String::from_utf8(name) {
        Ok(name) => Ok((name, value)),
        Err(_) => Err(Errno::ILSEQ),
    };
    tree::attributes(file)?.into_iter().map(named).collect()
}

/// What an error is about.
pub(super) fn failed(name: &[u8], errno: Errno) -> Error {
    let what = format!("root file system: /{}", String::from_utf8_lossy(name));
    Error::Io { what, source: errno.into() }
}
