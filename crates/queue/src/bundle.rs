//! Files of a job on their way to another machine: a list of what comes, then the contents,
//! one after the other.
//!
//! What is unpacked was sent by another machine and is checked as such: names stay below
//! the directory, nothing that is there is written to, and links are made last, so that no
//! file is written through one. What lies in the directory itself is read and written later: that are files and
//! directories only.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{
    FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink,
};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, linkat, openat2};
use serde::{Deserialize, Serialize};

use crate::holes;
use crate::marks::{self, Attributes};
use crate::order::{self, Extent};
use crate::shepherd::pump::has_room;

/// No list is longer.
const MAX_LIST: u64 = 64 << 20;

/// A file is sent in no more parts, and where there are many such files in fewer.
const MOST_EXTENTS: usize = 10_000;

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
    /// A file of this size with holes: what is between those.
    Sparse(u64, Vec<Extent>),
    /// A file that came before, by its name in what came before.
    There(PathBuf),
    Link(PathBuf),
    Fifo,
    Whiteout,
}

/// Files that the other end has already: their names there, by device and inode here.
pub(crate) type There = HashMap<(u64, u64), PathBuf>;

/// What is to be sent, with its length.
#[derive(Debug)]
pub(crate) struct Bundle {
    root: PathBuf,
    list: Vec<u8>,
    entries: Vec<Entry>,
}

impl Bundle {
    /// All below `root` for which `wanted` says yes. Of what is `there` already only the names are
    /// sent.
    ///
    /// # Errors
    /// If a file cannot be looked at.
    pub(crate) fn of(
        root: &Path,
        there: &There,
        wanted: impl Fn(&Path) -> bool,
    ) -> io::Result<Self> {
        let mut entries = Vec::new();
        collect(root, Path::new(""), there, &wanted, &mut entries)?;
        let list = list_of(&mut entries, MAX_LIST)?;
        Ok(Self { root: root.to_owned(), list, entries })
    }

    /// Bytes that [`write`](Self::write) writes.
    #[must_use]
    pub(crate) fn length(&self) -> u64 {
        8 + self.list.len() as u64 + bytes_of(&self.entries)
    }

    /// Sends it. A file that has grown since is cut, one that has shrunk is an error.
    ///
    /// # Errors
    /// If a file cannot be read or has shrunk, or the other end is gone.
    pub(crate) fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&(self.list.len() as u64).to_be_bytes())?;
        to.write_all(&self.list)?;
        for entry in &self.entries {
            let whole = match &entry.what {
                What::File(size) => &[(0, *size)][..],
                What::Parts(_, extents) | What::Sparse(_, extents) => extents,
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

/// The list of what is sent, in at most so many bytes if it can be: holes are sent as data rather than make it longer.
fn list_of(entries: &mut [Entry], longest: u64) -> io::Result<Vec<u8>> {
    let mut most = MOST_EXTENTS;
    loop {
        let list = serde_json::to_vec(entries)?;
        if list.len() as u64 <= longest || most <= 1 {
            return Ok(list);
        }
        most /= 2;
        for entry in entries.iter_mut() {
            if let What::Sparse(_, extents) = &mut entry.what {
                *extents = holes::at_most(most, std::mem::take(extents));
            }
        }
    }
}

/// Bytes of all files that come with their content.
fn bytes_of(entries: &[Entry]) -> u64 {
    let sum = |extents: &[Extent]| extents.iter().map(|&(_, len)| len).fold(0, u64::saturating_add);
    let contents = entries.iter().map(|entry| match &entry.what {
        What::File(size) | What::Parts(size, _) => *size,
        What::Sparse(_, extents) => sum(extents),
        _ => 0,
    });
    contents.fold(0, u64::saturating_add)
}

fn collect(
    root: &Path,
    below: &Path,
    there: &There,
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
        } else if let Some(name) = there.get(&(meta.dev(), meta.ino())) {
            What::There(name.clone())
        } else if meta.is_symlink() {
            What::Link(fs::read_link(entry.path())?)
        } else if meta.is_file() {
            content(&entry.path(), &meta)?
        } else if meta.file_type().is_fifo() {
            What::Fifo
        } else if marks::is_whiteout(&meta) {
            What::Whiteout
        } else {
            continue;
        };
        let is_dir = what == What::Dir;
        let has_attributes =
            is_dir || matches!(what, What::File(_) | What::Parts(..) | What::Sparse(..));
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
            collect(root, &path, there, wanted, found)?;
        }
    }
    Ok(())
}

/// What is sent of a regular file.
fn content(path: &Path, meta: &fs::Metadata) -> io::Result<What> {
    let size = meta.len();
    if let Some(extents) = order::of_pages(path, size) {
        return Ok(What::Parts(size, extents));
    }
    if holes::may_have(meta) {
        let extents = holes::at_most(MOST_EXTENTS, holes::data(&File::open(path)?, size)?);
        // One that only its file system has made smaller has none.
        if extents != [(0, size)] {
            return Ok(What::Sparse(size, extents));
        }
    }
    Ok(What::File(size))
}

/// The files below directories of `root`, as the other end has them.
///
/// # Errors
/// If one cannot be looked at.
pub(crate) fn there(root: &Path, dirs: &[PathBuf]) -> io::Result<There> {
    let mut found = There::new();
    let mut left = dirs.to_vec();
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(root.join(&dir))? {
            let entry = entry?;
            let (meta, path) = (entry.metadata()?, dir.join(entry.file_name()));
            if meta.is_dir() {
                left.push(path);
            } else if meta.is_file() {
                found.insert((meta.dev(), meta.ino()), path);
            }
        }
    }
    Ok(found)
}

/// Unpacks what is read into `to`, which must be a new directory. What came before is below
/// `there`.
///
/// # Errors
/// If what comes ends early, has too long a list, more in its files than there is room for, or names what is not below `to` or `there`,
/// or has something else than files and directories at its top; if a file cannot be made.
pub(crate) fn unpack(from: &mut dyn Read, to: &Path, there: Option<&Path>) -> io::Result<()> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_be_bytes(length);
    if length > MAX_LIST {
        return Err(io::Error::other("the list of files is too long"));
    }
    let mut list = Vec::new();
    Read::take(&mut *from, length).read_to_end(&mut list)?;
    let entries: Vec<Entry> = serde_json::from_slice(&list)?;
    let bytes = bytes_of(&entries);
    if !has_room(&File::open(to)?, bytes)? {
        let text = format!("there is no room for its {bytes} bytes of files on the disk of jobs");
        return Err(io::Error::other(text));
    }
    if let Some(entry) = entries.iter().find(|entry| !is_below(&entry.path)) {
        return Err(io::Error::other(format!("{} is no name below", entry.path.display())));
    }
    if let Some(entry) = entries.iter().find(|entry| !is_plain(entry)) {
        let name = entry.path.display();
        return Err(io::Error::other(format!("{name} is neither a file nor a directory")));
    }
    for entry in &entries {
        let path = to.join(&entry.path);
        match &entry.what {
            What::Dir => fs::create_dir(&path)?,
            What::File(size) => {
                take_in(from, &path, *size, &[(0, *size)])?;
                adorn(&path, entry)?;
            }
            What::Parts(size, extents) if order::are_whole(extents, *size) => {
                take_in(from, &path, *size, extents)?;
                adorn(&path, entry)?;
            }
            What::Sparse(size, extents) if holes::are_within(extents, *size) => {
                take_in(from, &path, *size, extents)?;
                adorn(&path, entry)?;
            }
            What::Parts(..) | What::Sparse(..) => {
                let text = format!("{} does not come as a whole", entry.path.display());
                return Err(io::Error::other(text));
            }
            What::There(name) => {
                let there = there.ok_or_else(|| io::Error::other("nothing came before"))?;
                link(there, name, &path)?;
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
            What::File(_) | What::Parts(..) | What::Sparse(..) => {}
            What::There(_) | What::Fifo | What::Whiteout => {}
        }
    }
    Ok(())
}

/// Makes `path` one more name of the file `name` below `there`. Owner, mode and time are the same
/// file's, and so right already.
fn link(there: &Path, name: &Path, path: &Path) -> io::Result<()> {
    let root = File::open(there)?;
    let (flags, mode) = (OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    // What came before is as hostile as what comes now: through a link there it would be any file
    // of this machine.
    let file = openat2(root, name, flags, mode, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?;
    if !FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file() {
        return Err(io::Error::other(format!("{} did not come as a file", name.display())));
    }
    Ok(linkat(file, "", CWD, path, AtFlags::EMPTY_PATH)?)
}

/// Makes a new file of parts that come one after the other.
fn take_in(from: &mut dyn Read, path: &Path, size: u64, extents: &[Extent]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path)?;
    holes::fill(&mut file, size, extents, from)
}

fn is_below(path: &Path) -> bool {
    path.components().next().is_some()
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether it lies deeper, or is a file or a directory: what belongs to the queue is opened by its name.
fn is_plain(entry: &Entry) -> bool {
    entry.path.components().count() > 1
        || !matches!(entry.what, What::Link(_) | What::Fifo | What::Whiteout)
}

fn adorn(path: &Path, entry: &Entry) -> io::Result<()> {
    chown(path, Some(entry.uid), Some(entry.gid))?;
    fs::set_permissions(path, fs::Permissions::from_mode(entry.mode & 0o7777))?;
    marks::set_attributes(path, &entry.attributes)?;
    let (seconds, nanoseconds) = entry.mtime;
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    Ok(rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(root: &Path) -> Vec<u8> {
        let wanted = |path: &Path| path != Path::new("left-out");
        let bundle = Bundle::of(root, &There::new(), wanted).unwrap();
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
        unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
        assert_eq!(fs::read(to.path().join("a/b/file")).unwrap(), b"content");
        assert_eq!(fs::read_link(to.path().join("a/link")).unwrap(), Path::new("../file"));
        assert_eq!(fs::metadata(to.path().join("a")).unwrap().mode() & 0o7777, 0o750);
        assert!(!to.path().join("left-out").exists());
        let kind = |name: &str| fs::symlink_metadata(to.path().join(name)).unwrap();
        assert!(marks::is_whiteout(&kind("a/removed")) && kind("a/pipe").file_type().is_fifo());
        assert_eq!(marks::attributes(&to.path().join("a/b")).unwrap(), opaque);
        for cut in [0, 5, 20, bytes.len() - 1] {
            let to = tempfile::tempdir().unwrap();
            assert!(unpack(&mut &bytes[..cut], to.path(), None).is_err(), "{cut}");
        }
    }

    /// A file of a terabyte that takes a page is sent like one of a page.
    #[test]
    fn holes_are_not_sent() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        holes::tests::make(&from.path().join("file"));
        let bytes = packed(from.path());
        assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
        unpack(&mut bytes.as_slice(), to.path(), None).unwrap();
        assert!(holes::tests::is_made(&to.path().join("file")));
        let cut = tempfile::tempdir().unwrap();
        unpack(&mut &bytes[..bytes.len() - 1], cut.path(), None).unwrap_err();
    }

    /// The other end takes no list that is longer.
    #[test]
    fn many_files_with_many_holes_make_no_longer_a_list() {
        const LONGEST: u64 = 4096;
        let extents: Vec<Extent> = (0..1000).map(|n| (n << 20, 4096)).collect();
        let sparse = What::Sparse(1 << 30, extents.clone());
        let mut entries = ["a", "b", "c"].map(|name| entry(name, sparse.clone()));
        let whole = list_of(&mut entries, MAX_LIST).unwrap();
        assert!(entries.iter().all(|entry| entry.what == sparse));
        let list = list_of(&mut entries, LONGEST).unwrap();
        assert!(list.len() < whole.len() && list.len() as u64 <= LONGEST, "{}", list.len());
        assert_eq!(serde_json::from_slice::<Vec<Entry>>(&list).unwrap(), entries);
        for entry in &entries {
            let What::Sparse(size, parts) = &entry.what else { panic!("{entry:?}") };
            assert!(holes::are_within(parts, *size));
            let is_in = |&(at, len): &Extent| {
                parts.iter().any(|&(first, more)| first <= at && at + len <= first + more)
            };
            assert!(extents.iter().all(is_in), "{parts:?}");
        }
        // Names alone are as long as they are.
        let mut names = vec![entry(&"n".repeat(200), What::Dir); 100];
        assert!(list_of(&mut names, LONGEST).unwrap().len() as u64 > LONGEST);
    }

    #[test]
    fn what_came_before_is_there() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("first/sub")).unwrap();
        fs::create_dir(from.path().join("second")).unwrap();
        fs::write(from.path().join("first/sub/same"), "same").unwrap();
        fs::hard_link(from.path().join("first/sub/same"), from.path().join("second/kept")).unwrap();
        fs::write(from.path().join("second/new"), "new").unwrap();
        let before = there(from.path(), &["first".into()]).unwrap();
        let second = |path: &Path| path.starts_with("second");
        let mut bytes = Vec::new();
        Bundle::of(from.path(), &before, second).unwrap().write(&mut bytes).unwrap();
        unpack(&mut bytes.as_slice(), to.path(), Some(from.path())).unwrap();
        assert_eq!(fs::read(to.path().join("second/kept")).unwrap(), b"same");
        assert_eq!(fs::read(to.path().join("second/new")).unwrap(), b"new");
        // It is for lack of what came before that this fails.
        let other = to.path().join("other");
        fs::create_dir(&other).unwrap();
        assert!(unpack(&mut bytes.as_slice(), &other, None).is_err());
    }

    fn entry(path: &str, what: What) -> Entry {
        Entry {
            path: path.into(),
            what,
            mode: 0o600,
            uid: 0,
            gid: 0,
            mtime: (0, 0),
            attributes: Attributes::new(),
        }
    }

    /// What comes when these are sent with one byte.
    fn sent(entries: &[Entry]) -> Vec<u8> {
        let list = serde_json::to_vec(entries).unwrap();
        let length = (list.len() as u64).to_be_bytes();
        [&length, list.as_slice(), b"x"].concat()
    }

    /// Nothing is written of what has no room.
    #[test]
    fn no_more_comes_in_than_is_free() {
        let half = || What::File(u64::MAX / 2);
        for entries in [
            vec![entry("a", What::File(1)), entry("b", half())],
            vec![entry("a", half()), entry("b", half()), entry("c", half())],
            vec![entry("a", What::Parts(u64::MAX, vec![(0, u64::MAX)]))],
            vec![entry("a", What::Sparse(u64::MAX, vec![(0, u64::MAX)]))],
        ] {
            let to = tempfile::tempdir().unwrap();
            let error = unpack(&mut sent(&entries).as_slice(), to.path(), None).unwrap_err();
            assert!(error.to_string().contains("there is no room for its "), "{error}");
            assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn nothing_gets_out_of_its_directory() {
        let outside = tempfile::tempdir().unwrap();
        let before = tempfile::tempdir().unwrap();
        fs::write(before.path().join("secret"), "of somebody else").unwrap();
        fs::create_dir(before.path().join("came")).unwrap();
        symlink("..", before.path().join("came/up")).unwrap();
        symlink("../secret", before.path().join("came/link")).unwrap();
        let link = What::Link(outside.path().to_owned());
        for entries in [
            vec![entry("../x", What::File(1))],
            vec![entry("/tmp/x", What::File(1))],
            vec![entry("", What::Dir)],
            vec![entry("a/./../../x", What::File(1))],
            vec![entry("a", link.clone()), entry("a/x", What::File(1))],
            vec![entry("out", link.clone())],
            vec![entry("in", What::Fifo)],
            vec![entry("err", What::Whiteout)],
            vec![entry("a", What::File(0)), entry("a", What::File(1))],
            vec![entry("a", What::Parts(1, vec![(1 << 40, 1)]))],
            vec![entry("a", What::Sparse(1, vec![(1 << 40, 1)]))],
            vec![entry("a", What::There("../secret".into()))],
            vec![entry("a", What::There(before.path().join("secret")))],
            vec![entry("a", What::There("up/secret".into()))],
            vec![entry("a", What::There("link".into()))],
            vec![entry("a", What::There("nothing".into()))],
            vec![entry("a", What::There("".into()))],
        ] {
            let bytes = sent(&entries);
            let to = tempfile::tempdir().unwrap();
            let came = before.path().join("came");
            assert!(unpack(&mut bytes.as_slice(), to.path(), Some(&came)).is_err(), "{entries:?}");
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        }
        let long = u64::MAX.to_be_bytes();
        assert!(unpack(&mut long.as_slice(), outside.path(), None).is_err());
    }
}
