//! A tree of files that somebody else may change while it is walked: a directory becomes a link, a file a FIFO.
//!
//! Whoever walks it holds its root open, and opens what is in it from there. No way leads out of the tree, over
//! a symbolic link, or into what is mounted in it. What is to be read is opened without effect at first, and
//! looked at: only a regular file that is still the one that was listed is opened to be read, so that no FIFO
//! makes the walker wait and no device notices it.

use std::ffi::{CString, OsStr};
use std::fs::{File, Metadata};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::vec::IntoIter;

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, fgetxattr, flistxattr, getxattr, listxattr,
    mkdirat, openat, openat2, readlinkat, unlinkat,
};
use rustix::io::{Errno, Result};
use rustix::process::geteuid;

/// Bytes of an extended attribute, and of all their names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX_ATTRIBUTE: usize = 64 << 10;

/// What names a file, whatever its names are: device and inode.
pub type Id = (u64, u64);

/// Names and values of extended attributes.
pub type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// Names of extended attributes that this process is not shown, and why not.
pub type KeptBack = Vec<(Vec<u8>, Errno)>;

/// A tree of files, by its root.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
}

/// Something in a tree.
#[derive(Debug)]
pub struct Entry {
    /// Its path in the tree.
    pub name: PathBuf,
    /// What it is.
    pub meta: Metadata,
    /// Where it leads, if it is a symbolic link.
    pub link: Option<PathBuf>,
}

impl Tree {
    /// The tree below a directory. Nobody else may be able to exchange that.
    ///
    /// # Errors
    /// If the directory cannot be opened; see openat(2).
    pub fn at(root: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: openat(CWD, root, flags, Mode::empty())? })
    }

    /// The tree below a directory that is open already.
    #[must_use]
    pub fn of(root: File) -> Self {
        Self { root: root.into() }
    }

    /// Opens what has a name in the tree; the tree itself has the empty name.
    ///
    /// # Errors
    /// `ELOOP` and `EXDEV` where the name leads over a link, or elsewhere; see openat2(2).
    pub fn open(&self, name: &Path, flags: OFlags) -> Result<OwnedFd> {
        open(&self.root, name, flags)
    }

    /// Opens a directory of the tree.
    ///
    /// # Errors
    /// As [`Tree::open`].
    pub fn dir(&self, name: &Path) -> Result<File> {
        Ok(self.open(name, OFlags::RDONLY | OFlags::DIRECTORY)?.into())
    }

    /// Opens the regular file that has a name in the tree to be read, if it is this one.
    ///
    /// # Errors
    /// As [`file()`].
    pub fn file(&self, name: &Path, id: Id) -> Result<File> {
        file(&self.root, name, id)
    }

    /// Opens the directory that something is in, and tells its name there.
    ///
    /// # Errors
    /// As [`Tree::open`].
    pub fn parent<'n>(&self, name: &'n Path) -> Result<(File, &'n OsStr)> {
        let own = name.file_name().ok_or(Errno::INVAL)?;
        Ok((self.dir(name.parent().unwrap_or(Path::new("")))?, own))
    }
}

/// Opens what has a name below a directory, as [`Tree::open`] does.
///
/// # Errors
/// As [`Tree::open`].
pub fn open(root: impl AsFd, name: &Path, flags: OFlags) -> Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let name = if name.as_os_str().is_empty() { Path::new(".") } else { name };
    openat2(root, name, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty(), resolve)
}

/// Opens the regular file that has a name below a directory to be read, if it is this one.
///
/// # Errors
/// `ENOENT` if something else has that name; as [`Tree::open`].
pub fn file(root: impl AsFd, name: &Path, id: Id) -> Result<File> {
    let found = File::from(open(root, name, OFlags::PATH)?);
    let meta = metadata(&found)?;
    if !meta.is_file() || self::id(&meta) != id {
        return Err(Errno::NOENT);
    }
    reopen(&found, OFlags::RDONLY)
}

/// Opens the file or directory of a descriptor once more, whatever has its name by now. That waits neither for the other end
/// of a FIFO nor for a process that has a lease of the file.
///
/// # Errors
/// If the kernel does not open it: a program that runs cannot be written (`ETXTBSY`), nor can a FIFO that nobody reads (`ENXIO`);
/// see open(2).
pub fn reopen(file: &File, flags: OFlags) -> Result<File> {
    let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(openat(CWD, by_descriptor(file), flags, Mode::empty())?.into())
}

/// A path that leads to what a descriptor has open, also if that is a symbolic link.
#[must_use]
pub fn by_descriptor(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Makes an empty directory that is this user's alone, and opens it.
///
/// # Errors
/// `ENOENT` if somebody else has exchanged it before it was open; as [`Tree::open`]; see mkdirat(2).
pub fn make_dir(parent: impl AsFd, own: &OsStr) -> Result<File> {
    mkdirat(&parent, own, Mode::RWXU)?;
    made_dir(parent, own)
}

/// Opens the directory that this process has just made. Whoever may write to the one above can have renamed another one
/// there: it has to be like the one that was made.
fn made_dir(parent: impl AsFd, own: &OsStr) -> Result<File> {
    let dir = File::from(open(parent, Path::new(own), OFlags::RDONLY | OFlags::DIRECTORY)?);
    let meta = metadata(&dir)?;
    let is_own = meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0;
    // "." and ".." are in each.
    let is_empty = Dir::read_from(&dir)?.take(3).collect::<Result<Vec<_>>>()?.len() < 3;
    if is_own && is_empty { Ok(dir) } else { Err(Errno::NOENT) }
}

/// Removes what has a name in a directory, and all below it; none of it need be there. What is mounted is somebody else's.
///
/// # Errors
/// `EXDEV` or `EBUSY` if something is mounted there, and that stays; see unlinkat(2).
pub fn remove(parent: &File, own: &OsStr) -> Result<()> {
    match unlinkat(parent, own, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(errno) => return Err(errno),
    }
    empty(&open(parent, Path::new(own), OFlags::RDONLY | OFlags::DIRECTORY)?.into())?;
    unlinkat(parent, own, AtFlags::REMOVEDIR)
}

/// The same of what is at a path.
///
/// # Errors
/// As [`remove`]; if the directory that it is in cannot be opened.
pub fn remove_at(path: &Path) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = openat(CWD, path.parent().ok_or(Errno::INVAL)?, flags, Mode::empty())?;
    remove(&parent.into(), path.file_name().ok_or(Errno::INVAL)?)
}

/// The names in a directory, in no order.
///
/// # Errors
/// If the directory cannot be read.
pub fn names(dir: &File) -> Result<Vec<CString>> {
    let is_own = |name: &CString| ![c".", c".."].contains(&name.as_c_str());
    let all = Dir::read_from(dir)?.map(|entry| Ok(entry?.file_name().to_owned()));
    all.filter(|name| name.as_ref().map_or(true, is_own)).collect()
}

/// A directory that is being emptied.
struct Emptying {
    id: Id,
    /// Its name in the one above it.
    own: CString,
    /// What is left in it.
    names: IntoIter<CString>,
}

impl Emptying {
    fn of(dir: &File, own: CString) -> Result<Self> {
        Ok(Self { id: id(&metadata(dir)?), own, names: names(dir)?.into_iter() })
    }
}

/// Removes all that is in a directory, as [`remove`] does. Whoever has made it may have made it deeper than there are descriptors, or
/// room on a stack.
///
/// # Errors
/// As [`remove`]; `ENOENT` if somebody moves a directory away meanwhile.
pub fn empty(dir: &File) -> Result<()> {
    let mut here =
        dir.try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let mut levels = vec![Emptying::of(dir, CString::default())?];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.names.next() {
            match unlinkat(&here, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => {
                    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
                    here = open(&here, path, OFlags::RDONLY | OFlags::DIRECTORY)?.into();
                    levels.push(Emptying::of(&here, name)?);
                }
                Err(errno) => return Err(errno),
            }
            continue;
        }
        let (emptied, above) = (levels.pop(), levels.last());
        if let Some((emptied, above)) = emptied.zip(above) {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            here = openat(&here, "..", flags, Mode::empty())?.into();
            if id(&metadata(&here)?) != above.id {
                return Err(Errno::NOENT);
            }
            unlinkat(&here, &emptied.own, AtFlags::REMOVEDIR)?;
        }
    }
    Ok(())
}

/// Lists a directory of a tree, which has this name there. What goes away meanwhile is left out, and what is
/// mounted.
///
/// # Errors
/// If the directory cannot be read, or something in it cannot be looked at.
pub fn list(dir: &File, name: &Path) -> Result<Vec<Entry>> {
    Ok(list_with_mounts(dir, name)?.0)
}

/// The same, and the names of what is mounted there.
///
/// # Errors
/// As [`list`].
pub fn list_with_mounts(dir: &File, name: &Path) -> Result<(Vec<Entry>, Vec<PathBuf>)> {
    let (mut found, mut mounted) = (Vec::new(), Vec::new());
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let own = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
        if own == Path::new(".") || own == Path::new("..") {
            continue;
        }
        match entry_of(dir, own, name.join(own)) {
            Ok(entry) => found.push(entry),
            Err(Errno::NOENT) => {}
            Err(Errno::XDEV) => mounted.push(name.join(own)),
            Err(errno) => return Err(errno),
        }
    }
    Ok((found, mounted))
}

/// Looks at what has this name in a directory.
///
/// # Errors
/// `ENOENT` if nothing has, `EXDEV` if it is mounted there.
pub fn entry(dir: &File, name: &Path) -> Result<Entry> {
    entry_of(dir, name, name.to_owned())
}

fn entry_of(dir: &File, own: &Path, name: PathBuf) -> Result<Entry> {
    open(dir, own, OFlags::PATH).and_then(|it| look(it, name))
}

fn look(it: OwnedFd, name: PathBuf) -> Result<Entry> {
    let it = File::from(it);
    let meta = metadata(&it)?;
    let link = match meta.is_symlink() {
        true => {
            let to = readlinkat(&it, "", Vec::new())?.into_bytes();
            Some(std::ffi::OsString::from_vec(to).into())
        }
        false => None,
    };
    Ok(Entry { name, meta, link })
}

/// What a file is, by its descriptor, which may be of any kind.
///
/// # Errors
/// If the file system cannot say it.
pub fn metadata(file: &File) -> Result<Metadata> {
    file.metadata().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// What names a file.
#[must_use]
pub fn id(meta: &Metadata) -> Id {
    (meta.dev(), meta.ino())
}

/// Whether an error says that what was listed is not there any more, or is something else.
#[must_use]
pub fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV)
}

/// The extended attributes of a file or directory.
///
/// # Errors
/// If the file system does not list them or show one, for another reason than that it has none.
pub fn attributes(file: impl AsFd) -> Result<Attributes> {
    let (shown, kept_back) = attributes_shown(file)?;
    kept_back.first().map_or(Ok(shown), |(_, errno)| Err(*errno))
}

/// The extended attributes of a file or directory that this process is shown; and the names of those that it is not, each
/// with the reason.
///
/// # Errors
/// If the file system does not list them, for another reason than that it has none.
pub fn attributes_shown(file: impl AsFd) -> Result<(Attributes, KeptBack)> {
    let list = |names: &mut Vec<u8>| flistxattr(&file, spare_capacity(names));
    shown_by(list, |name, value| fgetxattr(&file, name, spare_capacity(value)))
}

/// The same, also of what is open without effect (`O_PATH`), of whatever kind it is.
///
/// # Errors
/// As [`attributes_shown`].
pub fn attributes_of_any(file: &(impl AsFd + AsRawFd)) -> Result<(Attributes, KeptBack)> {
    match attributes_shown(file) {
        Err(Errno::BADF) => {}
        shown => return shown,
    }
    let path = by_descriptor(file);
    let list = |names: &mut Vec<u8>| listxattr(&path, spare_capacity(names));
    shown_by(list, |name, value| getxattr(&path, name, spare_capacity(value)))
}

fn shown_by(
    list: impl FnOnce(&mut Vec<u8>) -> Result<usize>,
    get: impl Fn(&[u8], &mut Vec<u8>) -> Result<usize>,
) -> Result<(Attributes, KeptBack)> {
    let mut names = Vec::with_capacity(MAX_ATTRIBUTE);
    match list(&mut names) {
        // This file system has none.
        Ok(_) | Err(Errno::NOTSUP) => {}
        Err(errno) => return Err(errno),
    }
    let (mut shown, mut kept_back) = (Vec::new(), Vec::new());
    let mut value = Vec::new();
    for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        value.clear();
        // Most files have none.
        value.reserve(MAX_ATTRIBUTE);
        match get(name, &mut value) {
            Ok(_) => shown.push((name.to_vec(), value.clone())),
            Err(Errno::NODATA) => {}
            Err(errno) => kept_back.push((name.to_vec(), errno)),
        }
    }
    Ok((shown, kept_back))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, chown, symlink};

    use rustix::fs::{FileType, mknodat};

    use super::*;

    fn scene() -> (tempfile::TempDir, PathBuf, Tree) {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("tree");
        fs::create_dir_all(root.join("dir")).unwrap();
        fs::write(root.join("dir/file"), "own").unwrap();
        fs::create_dir(place.path().join("outside")).unwrap();
        fs::write(place.path().join("outside/file"), "secret").unwrap();
        let tree = Tree::at(&root).unwrap();
        (place, root, tree)
    }

    #[test]
    fn what_is_listed_is_read() {
        let (_place, root, tree) = scene();
        symlink("../nowhere", root.join("dir/link")).unwrap();
        let mut all = list(&tree.dir(Path::new("dir")).unwrap(), Path::new("dir")).unwrap();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let [file, link] = &all[..] else { panic!("{all:?}") };
        assert_eq!(file.name, Path::new("dir/file"));
        assert_eq!(link.link.as_deref(), Some(Path::new("../nowhere")));
        let read = tree.file(&file.name, id(&file.meta)).unwrap();
        assert_eq!(std::io::read_to_string(read).unwrap(), "own");
        assert_eq!(list(&tree.dir(Path::new("")).unwrap(), Path::new("")).unwrap().len(), 1);
    }

    #[test]
    fn no_link_leads_out() {
        let (place, root, tree) = scene();
        let listed = id(&fs::metadata(root.join("dir/file")).unwrap());
        fs::rename(root.join("dir"), root.join("old")).unwrap();
        symlink(place.path().join("outside"), root.join("dir")).unwrap();
        let file = Path::new("dir/file");
        assert!(is_gone(tree.file(file, listed).unwrap_err()));
        assert!(is_gone(tree.dir(Path::new("dir")).unwrap_err()));
        assert!(is_gone(tree.parent(file).unwrap_err()));
        assert!(is_gone(tree.open(Path::new("../outside/file"), OFlags::PATH).unwrap_err()));
        // Another file that has the name by now is not the one that was listed.
        fs::remove_file(root.join("dir")).unwrap();
        fs::create_dir(root.join("dir")).unwrap();
        fs::hard_link(place.path().join("outside/file"), root.join(file)).unwrap();
        assert_eq!(tree.file(file, listed).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn what_is_open_is_opened_again_whatever_has_its_name() {
        let (place, root, tree) = scene();
        let outside = place.path().join("outside/file");
        let name = Path::new("dir/file");
        let found = File::from(tree.open(name, OFlags::PATH).unwrap());
        fs::rename(root.join(name), root.join("old")).unwrap();
        symlink(&outside, root.join(name)).unwrap();
        drop(reopen(&found, OFlags::WRONLY | OFlags::TRUNC).unwrap());
        assert_eq!(fs::read(root.join("old")).unwrap(), b"");
        assert_eq!(fs::read(&outside).unwrap(), b"secret");
        // A FIFO that nobody reads makes nobody wait.
        mknodat(CWD, root.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let fifo = File::from(tree.open(Path::new("fifo"), OFlags::PATH).unwrap());
        assert_eq!(reopen(&fifo, OFlags::WRONLY).unwrap_err(), Errno::NXIO);
    }

    /// A container or a job can make one that is deeper than any path is long.
    #[test]
    fn a_tree_is_removed_however_deep_it_is() {
        let (_place, root, tree) = scene();
        let mut here = tree.dir(Path::new("dir")).unwrap();
        for _ in 0..3000 {
            here = make_dir(&here, OsStr::new("deep")).unwrap();
            mknodat(&here, "fifo", FileType::Fifo, Mode::RUSR, 0).unwrap();
        }
        drop(here);
        remove_at(&root).unwrap();
        assert!(!root.exists());
    }

    /// What somebody else has put there between mkdir and open.
    #[test]
    fn a_directory_that_was_exchanged_is_not_taken_for_the_one_that_was_made() {
        let (place, root, tree) = scene();
        let top = tree.dir(Path::new("")).unwrap();
        let (own, path) = (OsStr::new("new"), root.join("new"));
        let made = make_dir(&top, own).unwrap();
        assert_eq!(id(&made.metadata().unwrap()), id(&path.metadata().unwrap()));
        assert_eq!(make_dir(&top, own).unwrap_err(), Errno::EXIST);
        let other = |script: &dyn Fn()| {
            fs::remove_dir_all(&path).unwrap();
            script();
            made_dir(&top, own).unwrap_err()
        };
        let make = |mode| fs::DirBuilder::new().mode(mode).create(&path).unwrap();
        assert_eq!(other(&|| make(0o755)), Errno::NOENT);
        let full = || {
            make(0o700);
            fs::write(path.join("file"), "").unwrap();
        };
        assert_eq!(other(&full), Errno::NOENT);
        let link = || symlink(place.path().join("outside"), &path).unwrap();
        assert!(is_gone(other(&link)));
        fs::remove_file(&path).unwrap();
        make(0o700);
        assert!(made_dir(&top, own).is_ok(), "nobody can tell it from the one that was made");
        chown(&path, Some(1), None).unwrap();
        assert_eq!(made_dir(&top, own).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn what_is_mounted_is_not_removed() {
        let (place, root, _) = scene();
        let (outside, at) = (place.path().join("outside"), root.join("dir/mount"));
        fs::create_dir(&at).unwrap();
        rustix::mount::mount_bind(&outside, &at).unwrap();
        let removed = remove_at(&root);
        let is_kept = outside.join("file").exists();
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
        assert_eq!((removed, is_kept), (Err(Errno::XDEV), true));
        symlink(&outside, root.join("link")).unwrap();
        remove_at(&root).unwrap();
        assert!(!root.exists() && outside.join("file").exists());
        remove_at(&root).unwrap();
    }

    /// Also of a link, and not of what it leads to.
    #[test]
    fn attributes_are_shown_of_what_is_not_opened() {
        let (_place, root, tree) = scene();
        symlink("dir", root.join("link")).unwrap();
        for (name, value) in [("dir", &b"directory"[..]), ("link", b"link")] {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(root.join(name), "trusted.it", value, flags).unwrap();
            let it = tree.open(Path::new(name), OFlags::PATH).unwrap();
            let shown = attributes_of_any(&it).unwrap().0;
            assert_eq!(shown, [(b"trusted.it".to_vec(), value.to_vec())], "{name}");
        }
    }

    #[test]
    fn pipes_are_not_opened() {
        let (_place, root, tree) = scene();
        let fifo = root.join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let listed = id(&fs::metadata(&fifo).unwrap());
        assert_eq!(tree.file(Path::new("fifo"), listed).unwrap_err(), Errno::NOENT);
    }
}
