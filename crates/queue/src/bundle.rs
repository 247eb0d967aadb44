//! Files of a job on their way to another machine: a list of what comes, then the contents,
//! one after the other.
//!
//! What is unpacked was sent by another machine and is checked as such: names stay below
//! the directory, nothing that is there is written to, and links are made last, so that no
//! file is written through one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{
    FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink,
};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::marks::{self, Attributes};
use crate::order::{self, Extent};

/// No list is longer.
const MAX_LIST: u64 = 64 << 20;

/// One thing that is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    path: PathBuf,
    what: What,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: (i64, i64),
    #[serde(default)]
    attributes: Attributes,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum What {
    Dir,
    File(u64),
    /// A file whose content comes in another order.
    Parts(u64, Vec<Extent>),
    Link(PathBuf),
    Fifo,
    Whiteout,
}

/// What is to be sent, with its length.
#[derive(Debug)]
pub struct Bundle {
    root: PathBuf,
    list: Vec<u8>,
    entries: Vec<Entry>,
}

impl Bundle {
    /// All below `root` for which `wanted` says yes.
    ///
    /// # Errors
    /// If a file cannot be looked at.
    pub fn of(root: &Path, wanted: impl Fn(&Path) -> bool) -> io::Result<Self> {
        let mut entries = Vec::new();
        collect(root, Path::new(""), &wanted, &mut entries)?;
        let list = serde_json::to_vec(&entries)?;
        Ok(Self { root: root.to_owned(), list, entries })
    }

    /// Bytes that [`write`](Self::write) writes.
    #[must_use]
    pub fn length(&self) -> u64 {
        let contents = self.entries.iter().map(|entry| match entry.what {
            What::File(size) | What::Parts(size, _) => size,
            _ => 0,
        });
        8 + self.list.len() as u64 + contents.sum::<u64>()
    }

    /// Sends it. A file that has grown since is cut, one that has shrunk is an error.
    ///
    /// # Errors
    /// If a file cannot be read or has shrunk, or the other end is gone.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&(self.list.len() as u64).to_be_bytes())?;
        to.write_all(&self.list)?;
        for entry in &self.entries {
            let whole = match &entry.what {
                What::File(size) => &[(0, *size)][..],
                What::Parts(_, extents) => extents,
                _ => continue,
            };
            let mut file = File::open(self.root.join(&entry.path))?;
            for &(offset, len) in whole {
                file.seek(SeekFrom::Start(offset))?;
                if io::copy(&mut Read::take(&mut file, len), to)? != len {
                    return Err(io::Error::other(format!("{} has shrunk", entry.path.display())));
                }
            }
        }
        Ok(())
    }
}

fn collect(
    root: &Path,
    below: &Path,
    wanted: &impl Fn(&Path) -> bool,
    found: &mut Vec<Entry>,
) -> io::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let (path, meta) = (below.join(entry.file_name()), entry.metadata()?);
        if !wanted(&path) {
            continue;
        }
        let what = if meta.is_dir() {
            What::Dir
        } else if meta.is_symlink() {
            What::Link(fs::read_link(entry.path())?)
        } else if meta.is_file() {
            match order::of_pages(&entry.path(), meta.len()) {
                Some(extents) => What::Parts(meta.len(), extents),
                None => What::File(meta.len()),
            }
        } else if meta.file_type().is_fifo() {
            What::Fifo
        } else if marks::is_whiteout(&meta) {
            What::Whiteout
        } else {
            continue;
        };
        let is_dir = what == What::Dir;
        let has_attributes = is_dir || matches!(what, What::File(_) | What::Parts(..));
        let attributes =
            if has_attributes { marks::attributes(&entry.path())? } else { Attributes::new() };
        found.push(Entry {
            path: path.clone(),
            what,
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            attributes,
        });
        if is_dir {
            collect(root, &path, wanted, found)?;
        }
    }
    Ok(())
}

/// Unpacks what is read into `to`, which must be a new directory.
///
/// # Errors
/// If what comes ends early, has too long a list, or names what is not below `to`; if a file cannot
/// be made.
pub fn unpack(from: &mut dyn Read, to: &Path) -> io::Result<()> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_be_bytes(length);
    if length > MAX_LIST {
        return Err(io::Error::other("the list of files is too long"));
    }
    let mut list = Vec::new();
    Read::take(&mut *from, length).read_to_end(&mut list)?;
    let entries: Vec<Entry> = serde_json::from_slice(&list)?;
    if let Some(entry) = entries.iter().find(|entry| !is_below(&entry.path)) {
        return Err(io::Error::other(format!("{} is no name below", entry.path.display())));
    }
    for entry in &entries {
        let path = to.join(&entry.path);
        match &entry.what {
            What::Dir => fs::create_dir(&path)?,
            What::File(size) => {
                take_in(from, &path, &[(0, *size)])?;
                adorn(&path, entry)?;
            }
            What::Parts(size, extents) if order::are_whole(extents, *size) => {
                take_in(from, &path, extents)?;
                adorn(&path, entry)?;
            }
            What::Parts(..) => {
                let text = format!("{} does not come as a whole", entry.path.display());
                return Err(io::Error::other(text));
            }
            What::Fifo => {
                marks::make_fifo(&path)?;
                adorn(&path, entry)?;
            }
            What::Whiteout => marks::make_whiteout(&path)?,
            What::Link(_) => {}
        }
    }
    for entry in entries.iter().rev() {
        let path = to.join(&entry.path);
        match &entry.what {
            What::Link(target) => {
                symlink(target, &path)?;
                lchown(&path, Some(entry.uid), Some(entry.gid))?;
            }
            What::Dir => adorn(&path, entry)?,
            What::File(_) | What::Parts(..) | What::Fifo | What::Whiteout => {}
        }
    }
    Ok(())
}

/// Makes a new file of parts that come one after the other.
fn take_in(from: &mut dyn Read, path: &Path, extents: &[Extent]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    for &(offset, len) in extents {
        file.seek(SeekFrom::Start(offset))?;
        if io::copy(&mut Read::take(&mut *from, len), &mut file)? != len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

fn is_below(path: &Path) -> bool {
    path.components().next().is_some()
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

fn adorn(path: &Path, entry: &Entry) -> io::Result<()> {
    chown(path, Some(entry.uid), Some(entry.gid))?;
    fs::set_permissions(path, fs::Permissions::from_mode(entry.mode & 0o7777))?;
    marks::set_attributes(path, &entry.attributes)?;
    let (seconds, nanoseconds) = entry.mtime;
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(root: &Path) -> Vec<u8> {
        let bundle = Bundle::of(root, |path| path != Path::new("left-out")).unwrap();
        let mut bytes = Vec::new();
        bundle.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, bundle.length());
        bytes
    }

    #[test]
    fn what_is_sent_arrives() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("a/b")).unwrap();
        fs::write(from.path().join("a/b/file"), "content").unwrap();
        fs::write(from.path().join("left-out"), "content").unwrap();
        symlink("../file", from.path().join("a/link")).unwrap();
        fs::set_permissions(from.path().join("a"), fs::Permissions::from_mode(0o750)).unwrap();
        // What a container has removed, and a directory that hides the one below it.
        marks::make_whiteout(&from.path().join("a/removed")).unwrap();
        marks::make_fifo(&from.path().join("a/pipe")).unwrap();
        let opaque = vec![(b"trusted.overlay.opaque".to_vec(), b"y".to_vec())];
        marks::set_attributes(&from.path().join("a/b"), &opaque).unwrap();
        let bytes = packed(from.path());
        unpack(&mut bytes.as_slice(), to.path()).unwrap();
        assert_eq!(fs::read(to.path().join("a/b/file")).unwrap(), b"content");
        assert_eq!(fs::read_link(to.path().join("a/link")).unwrap(), Path::new("../file"));
        assert_eq!(fs::metadata(to.path().join("a")).unwrap().mode() & 0o7777, 0o750);
        assert!(!to.path().join("left-out").exists());
        let kind = |name: &str| fs::symlink_metadata(to.path().join(name)).unwrap();
        assert!(marks::is_whiteout(&kind("a/removed")) && kind("a/pipe").file_type().is_fifo());
        assert_eq!(marks::attributes(&to.path().join("a/b")).unwrap(), opaque);
        for cut in [0, 5, 20, bytes.len() - 1] {
            let to = tempfile::tempdir().unwrap();
            assert!(unpack(&mut &bytes[..cut], to.path()).is_err(), "{cut}");
        }
    }

    #[test]
    fn nothing_gets_out_of_its_directory() {
        let entry = |path: &str, what: What| Entry {
            path: path.into(),
            what,
            mode: 0o600,
            uid: 0,
            gid: 0,
            mtime: (0, 0),
            attributes: Attributes::new(),
        };
        let outside = tempfile::tempdir().unwrap();
        let link = What::Link(outside.path().to_owned());
        for entries in [
            vec![entry("../x", What::File(1))],
            vec![entry("/tmp/x", What::File(1))],
            vec![entry("", What::Dir)],
            vec![entry("a/./../../x", What::File(1))],
            vec![entry("a", link.clone()), entry("a/x", What::File(1))],
            vec![entry("a", What::File(0)), entry("a", What::File(1))],
            vec![entry("a", What::Parts(1, vec![(1 << 40, 1)]))],
        ] {
            let list = serde_json::to_vec(&entries).unwrap();
            let mut bytes = (list.len() as u64).to_be_bytes().to_vec();
            bytes.extend(list);
            bytes.push(b'x');
            let to = tempfile::tempdir().unwrap();
            assert!(unpack(&mut bytes.as_slice(), to.path()).is_err(), "{entries:?}");
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        }
        let long = u64::MAX.to_be_bytes();
        assert!(unpack(&mut long.as_slice(), outside.path()).is_err());
    }
}
