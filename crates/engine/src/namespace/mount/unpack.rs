//! Makes the content of a tmpfs again: what the policy has read in its archive, by the same
//! reader.
//!
//! Everything is made below the root of the new file system, which nobody else has open yet,
//! and by names that nothing has: what an archive says twice is an error.
//!
//! A file system that one archive has filled can become what a later one says ([`refill`]). What is
//! there already is compared with that, and stays, with its inode: something may be mounted there.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, SeekFrom, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use torpor_policy::Ask;
use torpor_policy::archive::{Archive, Entry, LISTS, Make, Stretch, Totals};

use super::collect::open_beneath;
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// Bytes copied at once.
const CHUNK: usize = 1 << 18;

/// What an archive is unpacked into.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnpackInto<'a> {
    /// The root of the file system.
    pub root: BorrowedFd<'a>,
    /// The image file that the archive is.
    pub name: &'a str,
    /// The user namespace whose ids the archive has.
    pub maps: &'a IdMaps,
    /// What the plan has of it: what a policy limits, and how much it is.
    pub judged: &'a HashSet<Ask>,
}

/// What an archive has made: its entries by their paths.
pub(super) type Contents = BTreeMap<Vec<u8>, Entry>;

/// Unpacks `archive` into a file system that is empty; `made` is called with all that was made.
///
/// # Errors
/// If the archive is damaged, leads out of the root, or has more than was judged; if a file cannot be
/// made, e.g. as the file system is full.
pub(super) fn unpack(
    target: UnpackInto<'_>,
    archive: impl Read,
    made: impl FnMut(Entry),
) -> Result<()> {
    let used = HashSet::new();
    Unpacking { target, earlier: Contents::new(), used: &used }.all(archive, made)
}

/// Makes what `archive` says of a file system that has `earlier`. Files whose inode numbers are in
/// `used` are mapped by tasks.
///
/// # Errors
/// As those of [`unpack`]; if a file that is mapped would change. The file system is neither what it was
/// nor what it is to be then.
pub(super) fn refill(
    target: UnpackInto<'_>,
    archive: impl Read,
    earlier: Contents,
    used: &HashSet<u64>,
) -> Result<()> {
    Unpacking { target, earlier, used }.all(archive, |_| ())
}

struct Unpacking<'a> {
    target: UnpackInto<'a>,
    /// What is there, and was not met again yet.
    earlier: Contents,
    used: &'a HashSet<u64>,
}

impl Unpacking<'_> {
    fn all(mut self, archive: impl Read, mut made: impl FnMut(Entry)) -> Result<()> {
        let UnpackInto { name, maps, judged, .. } = self.target;
        let mut archive = Archive::new(archive);
        let invalid = |reason: String| Error::invalid(name, reason);
        let outside = |group, id| {
            let known = if group { maps.gid_outside(id) } else { maps.uid_outside(id) };
            known.unwrap_or(id)
        };
        let _owner = maps.own_files().context(|| "become the owner of files".to_owned())?;
        let mut totals = Totals::default();
        // Directories change when something comes into them. There may be more than a process may have open.
        let mut directories: Vec<(Entry, Option<Entry>)> = vec![];
        while let Some(entry) = archive.next().map_err(invalid)? {
            if let Some(ask) = entry.asks(&outside).into_iter().find(|ask| !judged.contains(ask)) {
                return Err(invalid(format!("{ask}, which the plan does not list")));
            }
            totals.add(&entry);
            let was = self.earlier.remove(&entry.path);
            let was = self.make(&entry, was, &mut archive)?;
            if entry.make == Make::Directory {
                // What is made in it has its own lists.
                if was.as_ref().is_some_and(|was| was.lists[1].is_some()) {
                    let what = || self.what("make", &entry);
                    let dir = self.directory(&entry).context(what)?;
                    rustix::fs::removexattr(path_of(&dir), LISTS[1]).context(what)?;
                }
                directories.push((entry.clone(), was));
            }
            made(entry);
        }
        let is_other = |ask: &Ask| matches!(ask, Ask::Fill(listed) if *listed != totals);
        if judged.iter().any(is_other) {
            return Err(invalid(format!("{totals}, which the plan does not list")));
        }
        // What is in a directory goes before it.
        while let Some((_, gone)) = self.earlier.pop_last() {
            self.remove(&gone)?;
        }
        // One that is in another has its attributes first: they may close that.
        while let Some((entry, was)) = directories.pop() {
            let what = || self.what("set up", &entry);
            let dir = self.directory(&entry).context(what)?;
            set_attributes(&entry, was.as_ref(), path_of(&dir), maps).context(what)?;
        }
        Ok(())
    }

    /// Makes what an entry says where `was` is. Returns that if it stays.
    fn make<R: Read>(
        &mut self,
        entry: &Entry,
        mut was: Option<Entry>,
        archive: &mut Archive<R>,
    ) -> Result<Option<Entry>> {
        if let Some(gone) = was.take_if(|was| !self.can_stay(was, entry)) {
            self.remove_all(&gone)?;
        }
        let place = self.place(&entry.path)?;
        let what = || self.what("make", entry);
        let mut is_other = was.as_ref().is_none_or(|was| !have_same_attributes(was, entry));
        match &entry.make {
            Make::File { size, data } => {
                let file = place.open(was.is_none()).context(what)?;
                let filled = fill(&file, *size, data, archive).map_err(|error| match error {
                    Failed::Archive(reason) => Error::invalid(self.target.name, reason),
                    Failed::File(source) => Error::Os { what: what(), source },
                })?;
                is_other |= filled;
            }
            _ if was.is_some() => {}
            _ => make_other(entry, &place, self.target.root).context(what)?,
        }
        if !is_other || entry.make == Make::Directory {
            return Ok(was);
        }
        if was.is_some() {
            self.must_be_unused(&place, entry)?;
        }
        // What a link leads to has its attributes.
        if !matches!(entry.make, Make::Link(_)) {
            set_attributes(entry, was.as_ref(), place.path(), self.target.maps).context(what)?;
        }
        Ok(was)
    }

    /// Whether what is there is of the same kind; of a link, whether it leads to what its target is by
    /// now.
    fn can_stay(&self, was: &Entry, entry: &Entry) -> bool {
        match (&was.make, &entry.make) {
            (Make::File { .. }, Make::File { .. }) => true,
            (Make::Link(_), Make::Link(target)) => {
                let inode = |path: &[u8]| NameIn::of(self.target.root, path)?.inode();
                inode(target).ok() == inode(&entry.path).ok()
            }
            (was, make) => was == make,
        }
    }

    /// Removes what is there, and all below it.
    fn remove_all(&mut self, was: &Entry) -> Result<()> {
        let start = [&was.path[..], b"/"].concat();
        let mut below = self.earlier.split_off(&start);
        let behind = below.keys().find(|path| !path.starts_with(&start)).cloned();
        self.earlier.extend(behind.map(|path| below.split_off(&path)).unwrap_or_default());
        while let Some((_, gone)) = below.pop_last() {
            self.remove(&gone)?;
        }
        self.remove(was)
    }

    fn remove(&self, gone: &Entry) -> Result<()> {
        let place = self.place(&gone.path)?;
        self.must_be_unused(&place, gone)?;
        let flags = match gone.make {
            Make::Directory => AtFlags::REMOVEDIR,
            _ => AtFlags::empty(),
        };
        let what = || self.what("remove", gone);
        rustix::fs::unlinkat(&place.dir, &place.name, flags).context(what)
    }

    /// A task that maps a file maps that one, whatever has its name by now.
    fn must_be_unused(&self, place: &NameIn, entry: &Entry) -> Result<()> {
        let inode = || place.inode().context(|| self.what("look at", entry));
        if self.used.is_empty() || !self.used.contains(&inode()?) {
            return Ok(());
        }
        let path = String::from_utf8_lossy(&entry.path);
        Err(Error::invalid(self.target.name, format!("{path} is mapped, and has changed")))
    }

    /// Opens a directory that was made.
    fn directory(&self, entry: &Entry) -> rustix::io::Result<OwnedFd> {
        open_beneath(self.target.root, Path::new(OsStr::from_bytes(&entry.path)), false)
    }

    fn place(&self, path: &[u8]) -> Result<NameIn> {
        let what = || format!("{}: open {}", self.target.name, String::from_utf8_lossy(path));
        NameIn::of(self.target.root, path).context(what)
    }

    fn what(&self, do_what: &str, entry: &Entry) -> String {
        format!("{}: {do_what} {}", self.target.name, String::from_utf8_lossy(&entry.path))
    }
}

/// Makes what is no regular file, where nothing is.
fn make_other(entry: &Entry, place: &NameIn, root: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let node =
        |kind, number| rustix::fs::mknodat(&place.dir, &place.name, kind, Mode::RUSR, number);
    match &entry.make {
        Make::Link(target) => {
            let target = NameIn::of(root, target)?;
            let (from, to) = (target.dir.as_fd(), place.dir.as_fd());
            rustix::fs::linkat(from, &target.name, to, &place.name, AtFlags::empty())
        }
        // The root is there.
        Make::Directory if entry.path.is_empty() => Ok(()),
        Make::Directory => rustix::fs::mkdirat(&place.dir, &place.name, Mode::RWXU),
        Make::Symlink(target) => rustix::fs::symlinkat(&target[..], &place.dir, &place.name),
        Make::Device(device) => {
            let kind = if device.block { FileType::BlockDevice } else { FileType::CharacterDevice };
            let (major, minor) = device.major.zip(device.minor).unwrap_or_default();
            node(kind, rustix::fs::makedev(major, minor))
        }
        Make::Fifo => node(FileType::Fifo, 0),
        Make::File { .. } => Err(Errno::INVAL),
    }
}

/// A name in a directory.
struct NameIn {
    dir: OwnedFd,
    name: PathBuf,
}

impl NameIn {
    fn of(root: BorrowedFd<'_>, path: &[u8]) -> rustix::io::Result<Self> {
        let path = Path::new(OsStr::from_bytes(path));
        let dir = open_beneath(root, path.parent().unwrap_or(Path::new("")), false)?;
        Ok(NameIn { dir, name: path.file_name().unwrap_or_default().into() })
    }

    /// Opens the file that has the name, or makes one.
    fn open(&self, is_new: bool) -> rustix::io::Result<File> {
        let how = if is_new { OFlags::CREATE | OFlags::EXCL } else { OFlags::NOFOLLOW };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | how;
        rustix::fs::openat(&self.dir, &self.name, flags, Mode::RUSR | Mode::WUSR).map(File::from)
    }

    /// The inode number of what has the name.
    fn inode(&self) -> rustix::io::Result<u64> {
        let stat = rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        stat.map(|stat| stat.st_ino)
    }

    /// A path that leads there, and no further if it is a symbolic link that is not followed.
    fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(&self.name)
    }
}

/// A path that leads to an open directory, and is no link.
fn path_of(dir: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/.", dir.as_raw_fd()))
}

enum Failed {
    Archive(String),
    File(std::io::Error),
}

/// Makes the data of a file what the archive says. Returns whether it was anything else.
fn fill<R: Read>(
    file: &File,
    size: u64,
    data: &[Stretch],
    archive: &mut Archive<R>,
) -> std::result::Result<bool, Failed> {
    let was = file.metadata().map_err(Failed::File)?.len();
    let (mut changed, mut hole) = (was != size, 0);
    let (mut buffer, mut there) = (vec![0; CHUNK], Vec::new());
    for stretch in data {
        changed |= clear(file, hole..stretch.at.min(was)).map_err(Failed::File)?;
        let (mut at, end) = (stretch.at, stretch.at.saturating_add(stretch.len));
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            let read = archive.read(&mut buffer[..len]).map_err(Failed::Archive)?;
            if read == 0 {
                return Err(Failed::Archive("it has less data than it says".to_owned()));
            }
            changed |= put(file, &buffer[..read], at, was, &mut there).map_err(Failed::File)?;
            at += read as u64;
        }
        hole = end;
    }
    changed |= clear(file, hole..size.min(was)).map_err(Failed::File)?;
    if changed {
        file.set_len(size).map_err(Failed::File)?;
    }
    Ok(changed)
}

/// Writes what a file, which had `was` bytes, does not have at this place. Returns whether it had not.
/// What it had is read to `there`.
fn put(file: &File, data: &[u8], at: u64, was: u64, there: &mut Vec<u8>) -> io::Result<bool> {
    if at + data.len() as u64 <= was {
        there.resize(data.len(), 0);
        file.read_exact_at(there, at)?;
        if there == data {
            return Ok(false);
        }
    }
    file.write_all_at(data, at).map(|()| true)
}

/// Makes a range of a file, which has it, read as zeros. Returns whether it did not.
fn clear(file: &File, range: Range<u64>) -> io::Result<bool> {
    let (mut changed, mut at) = (false, range.start);
    while at < range.end {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(at) if at < range.end => at,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let len = usize::try_from(range.end - at).unwrap_or(CHUNK).min(CHUNK);
        let mut there = vec![0; len];
        file.read_exact_at(&mut there, at)?;
        if there.iter().any(|&byte| byte != 0) {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, how, at, len as u64)?;
            changed = true;
        }
        at += len as u64;
    }
    Ok(changed)
}

fn have_same_attributes(a: &Entry, b: &Entry) -> bool {
    let of = |it: &Entry| (it.mode, it.uid, it.gid, it.modified);
    of(a) == of(b) && a.attributes == b.attributes && a.lists == b.lists
}

/// Sets owner, mode, attributes and times of what is at `path`, whose last part is not
/// followed, and has those of `was` so far: the owner first, which takes set-uid bits and capabilities away, times last.
fn set_attributes(
    entry: &Entry,
    was: Option<&Entry>,
    path: PathBuf,
    maps: &IdMaps,
) -> rustix::io::Result<()> {
    let uid = Uid::from_raw(maps.uid_outside(entry.uid).ok_or(Errno::INVAL)?);
    let gid = Gid::from_raw(maps.gid_outside(entry.gid).ok_or(Errno::INVAL)?);
    let here = rustix::fs::CWD;
    let link = matches!(entry.make, Make::Symlink(_));
    if let Some(was) = was {
        take_attributes(entry, was, &path)?;
    }
    rustix::fs::chownat(here, &path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    if !link {
        rustix::fs::chmodat(here, &path, Mode::from_raw_mode(entry.mode), AtFlags::empty())?;
    }
    for (name, value) in &entry.attributes {
        match rustix::fs::lsetxattr(&path, &name[..], value, XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                let (name, path) = (String::from_utf8_lossy(name), path.display());
                tracing::warn!(%name, %path, "this kernel has no such attribute here");
            }
            other => other?,
        }
    }
    for (name, list) in LISTS.iter().zip(&entry.lists) {
        let Some(list) = list else { continue };
        let value = list.attribute(|uid| maps.uid_outside(uid), |gid| maps.gid_outside(gid));
        rustix::fs::lsetxattr(&path, *name, &value.ok_or(Errno::INVAL)?, XattrFlags::empty())?;
    }
    let (seconds, nanos) = entry.modified;
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(here, &path, &times, AtFlags::SYMLINK_NOFOLLOW)
}

/// Takes the attributes and lists away that it had, and is not to have any more.
fn take_attributes(entry: &Entry, was: &Entry, path: &Path) -> rustix::io::Result<()> {
    let is_gone = |name: &&[u8]| !entry.attributes.iter().any(|(kept, _)| kept == name);
    let attributes = was.attributes.iter().map(|(name, _)| &name[..]).filter(is_gone);
    let both = was.lists.iter().zip(&entry.lists);
    let lists = LISTS.iter().zip(both).filter(|(_, (was, now))| was.is_some() && now.is_none());
    for name in attributes.chain(lists.map(|(name, _)| name.as_bytes())) {
        match rustix::fs::lremovexattr(path, name) {
            // A kernel that has no such attribute did not set it.
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
