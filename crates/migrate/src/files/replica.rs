//! The destination's side: does what the source tells, below one directory and nowhere else.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags,
    chmodat, chownat, fchmod, fchown, fremovexattr, fsetxattr, ftruncate, futimens, linkat,
    mknodat, openat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use torpor_kernel::tree::{self, Id, Tree};

use super::scan::{MAX_FILES, attributes, failed};
use super::{Change, Meta, Name, PIECE, What, path, split};
use crate::error::{Context, Error, Result};

/// Bytes of a path.
const MAX_NAME: usize = libc::PATH_MAX as usize;

/// Bytes of the names of directories that wait for their times.
const MAX_WAITING: usize = 256 << 20;
/// Files that are told from those of others: a tree has fewer, and not all of them come and go.
const MAX_MADE: usize = 2 * MAX_FILES;

/// The bits of a mode by which a program runs as its owner, or in its group.
const SET_ID: u32 = 0o6000;

/// The tree of a destination.
#[derive(Debug)]
pub(crate) struct Replica {
    root: Tree,
    /// The file that pieces come for, and what it gets when it has them.
    open: Option<(Name, File, Meta)>,
    /// What it has made, if others than root can get to what is in it.
    shared: Option<HashSet<Id>>,
    /// Directories, which get these times when all that is in them is there.
    directories: BTreeMap<Name, (i64, i64)>,
    /// Bytes of their names.
    waiting: usize,
}

impl Replica {
    /// In an empty directory.
    pub(crate) fn new(root: Tree) -> Self {
        Self { root, open: None, shared: None, directories: BTreeMap::new(), waiting: 0 }
    }

    /// From now on others than root can get to what is in it: it takes no devices, and no programs that give whoever runs them
    /// the rights of somebody else. What it has not made itself it leaves as it is: somebody may have moved a file there that
    /// is not theirs.
    ///
    /// # Errors
    /// If the file system cannot say what the tree is.
    pub(crate) fn share(&mut self) -> Result<()> {
        self.shared = Some(HashSet::new());
        let root = self.root.dir(Path::new(""));
        root.and_then(|root| self.note(&root)).map_err(|errno| failed(b"", errno))
    }

    /// Notes what was made.
    fn note(&mut self, made: &File) -> Result<(), Errno> {
        let Some(shared) = &mut self.shared else { return Ok(()) };
        if shared.len() >= MAX_MADE {
            return Err(Errno::NOMEM);
        }
        shared.insert(tree::id(&tree::metadata(made)?));
        Ok(())
    }

    /// A directory gets its time later. However often it is told of, it waits once.
    fn wait_for_time(&mut self, name: Name, meta: &Meta) -> Result<(), Errno> {
        let len = name.len();
        if self.waiting.saturating_add(len) > MAX_WAITING {
            return Err(Errno::NOMEM);
        }
        if self.directories.insert(name, meta.changed).is_none() {
            self.waiting += len;
        }
        Ok(())
    }

    /// Does a change; `data` brings the bytes of a piece.
    ///
    /// # Errors
    /// If the change makes no sense, or leads out of the tree; if it cannot be done (the error
    /// names the file).
    pub(crate) fn apply(
        &mut self,
        change: Change,
        data: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<()> {
        if let Change::Write { offset } = change {
            return self.write(offset, &data()?);
        }
        self.close()?;
        let (Change::Make { name, .. }
        | Change::Update { name, .. }
        | Change::Link { name, .. }
        | Change::Remove { name }) = &change
        else {
            return Ok(());
        };
        let is_tree = name.is_empty() && matches!(change, Change::Update { .. });
        if !is_tree {
            check(name)?;
        }
        if let Some(what) = rights(&change).filter(|_| self.shared.is_some()) {
            let name = String::from_utf8_lossy(name);
            return Err(Error::refused_with(
                format!("volume: /{name} is {what}, and users of the destination could reach it"),
                "there: have --allow-volume name a directory that is root's alone (chmod 700)",
            ));
        }
        let name = name.clone();
        self.carry_out(change).map_err(|errno| failed(&name, errno))
    }

    fn carry_out(&mut self, change: Change) -> Result<(), Errno> {
        match change {
            Change::Make { name, what, meta } => self.make(name, what, meta),
            Change::Update { name, len, meta } => self.update(name, len, meta),
            Change::Link { name, old } => {
                check(&old).map_err(|_| Errno::INVAL)?;
                let (from, from_name) = self.parent(&old)?;
                let (to, to_name) = self.parent(&name)?;
                clear(&to, to_name)?;
                linkat(from, from_name, to, to_name, AtFlags::empty())
            }
            Change::Remove { name } => {
                let (parent, own) = self.parent(&name)?;
                tree::remove(&parent, own)
            }
            Change::Write { .. } => Ok(()),
        }
    }

    /// All changes of a round are there.
    ///
    /// # Errors
    /// If a directory does not take its times.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.close()?;
        self.waiting = 0;
        for (name, changed) in std::mem::take(&mut self.directories) {
            let directory = self.root.dir(path(&name));
            let set = directory.and_then(|directory| futimens(directory, &times(changed)));
            match set {
                // Removed in the same round.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(errno) => return Err(failed(&name, errno)),
            }
        }
        Ok(())
    }

    fn parent<'n>(&self, name: &'n [u8]) -> Result<(File, &'n OsStr), Errno> {
        let (parent, own) = split(name);
        Ok((self.root.dir(path(parent))?, OsStr::from_bytes(own)))
    }

    fn make(&mut self, name: Name, what: What, meta: Meta) -> Result<(), Errno> {
        let (parent, own) = self.parent(&name)?;
        if what != What::Directory {
            clear(&parent, own)?;
        }
        match what {
            What::Directory => {
                let made = tree::make_dir(&parent, own)?;
                self.note(&made)?;
                equip(made, &meta)?;
                self.wait_for_time(name, &meta)
            }
            What::Regular { len } => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let private = Mode::RUSR | Mode::WUSR;
                let file = File::from(openat(&parent, own, flags | OFlags::CLOEXEC, private)?);
                self.note(&file)?;
                ftruncate(&file, len)?;
                self.open = Some((name, file, meta));
                Ok(())
            }
            What::Symlink { to } => {
                symlinkat(OsStr::from_bytes(&to), &parent, own)?;
                let made = made(&parent, own, FileType::Symlink)?;
                self.note(&made)?;
                attend(&made, &meta)
            }
            What::Special { mode, number } => {
                let kind = FileType::from_raw_mode(mode);
                if matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Symlink) {
                    return Err(Errno::INVAL);
                }
                mknodat(&parent, own, kind, Mode::empty(), number)?;
                let made = made(&parent, own, kind)?;
                self.note(&made)?;
                attend(&made, &meta)
            }
        }
    }

    fn update(&mut self, name: Name, len: Option<u64>, meta: Meta) -> Result<(), Errno> {
        // All that follows is done to what is opened here, whatever has the name by then.
        let found = File::from(self.root.open(path(&name), OFlags::PATH)?);
        let seen = tree::metadata(&found)?;
        if self.shared.as_ref().is_some_and(|made| !made.contains(&tree::id(&seen))) {
            return Err(Errno::PERM);
        }
        match (FileType::from_raw_mode(seen.mode()), len) {
            (FileType::RegularFile, Some(len)) => {
                if seen.len() != len {
                    ftruncate(tree::reopen(&found, OFlags::WRONLY)?, len)?;
                }
                self.open = Some((name, tree::reopen(&found, OFlags::RDONLY)?, meta));
            }
            (FileType::Directory, None) => {
                equip(tree::reopen(&found, OFlags::RDONLY)?, &meta)?;
                self.wait_for_time(name, &meta)?;
            }
            (FileType::RegularFile | FileType::Directory, _) | (_, Some(_)) => {
                return Err(Errno::INVAL);
            }
            (_, None) => attend(&found, &meta)?,
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let Some((name, file, _)) = &mut self.open else {
            return Err(Error::Protocol("bytes of no file".to_owned()));
        };
        let len = file.metadata().context(|| "fstat".to_owned())?.len();
        let end = offset.checked_add(data.len() as u64);
        if data.len() > PIECE || end.is_none_or(|end| end > len) {
            return Err(Error::Protocol(format!("{} bytes at {offset} of {len}", data.len())));
        }
        // One that is there was opened to be looked at: a program that runs cannot be written to, and need not be.
        let writable = tree::reopen(file, OFlags::WRONLY).map_err(|errno| failed(name, errno))?;
        writable
            .write_all_at(data, offset)
            .context(|| format!("root file system: /{}", String::from_utf8_lossy(name)))
    }

    fn close(&mut self) -> Result<()> {
        let Some((name, file, meta)) = self.open.take() else { return Ok(()) };
        let done = equip(&file, &meta).and_then(|()| futimens(&file, &times(meta.changed)));
        done.map_err(|errno| failed(&name, errno))
    }
}

/// What gives rights to whoever gets to it, in words.
fn rights(change: &Change) -> Option<&'static str> {
    match change {
        Change::Make { what: What::Special { mode, number }, .. } => {
            is_device(FileType::from_raw_mode(*mode), *number).then_some("a device")
        }
        Change::Make { what: What::Regular { .. }, meta, .. }
        | Change::Update { len: Some(_), meta, .. } => {
            let has_capabilities =
                |meta: &Meta| meta.attributes.iter().any(|(name, _)| name == "security.capability");
            match meta.mode & SET_ID != 0 {
                true => Some("a set-user-ID or set-group-ID program"),
                false => has_capabilities(meta).then_some("a program with capabilities"),
            }
        }
        _ => None,
    }
}

/// Whether something with this number is a device. The number 0 is none: it marks what an overlay has removed.
fn is_device(kind: FileType, number: u64) -> bool {
    number != 0 && matches!(kind, FileType::BlockDevice | FileType::CharacterDevice)
}

/// Opens, without effect, what was just made here. Whoever may write to the directory can have exchanged it: it has to be like
/// what was made.
fn made(parent: &File, own: &OsStr, kind: FileType) -> Result<File, Errno> {
    let it = File::from(tree::open(parent, Path::new(own), OFlags::PATH)?);
    let seen = tree::metadata(&it)?;
    let is_closed = kind == FileType::Symlink || seen.mode() & 0o7777 == 0;
    let is_own = seen.uid() == geteuid().as_raw() && is_closed;
    if is_own && FileType::from_raw_mode(seen.mode()) == kind { Ok(it) } else { Err(Errno::NOENT) }
}

/// Gives something that is neither file nor directory its attributes. It is the one that is open, whatever has its name: by
/// its name chmod would follow a symbolic link.
fn attend(it: &File, meta: &Meta) -> Result<(), Errno> {
    let (uid, gid) = owner(meta);
    chownat(it, "", uid, gid, AtFlags::EMPTY_PATH)?;
    if !tree::metadata(it)?.is_symlink() {
        let mode = Mode::from_bits_truncate(meta.mode);
        chmodat(CWD, tree::by_descriptor(it), mode, AtFlags::empty())?;
    }
    utimensat(it, "", &times(meta.changed), AtFlags::EMPTY_PATH)
}

/// Gives a file or directory all but its times.
fn equip(file: impl AsFd, meta: &Meta) -> Result<(), Errno> {
    let (uid, gid) = owner(meta);
    // This takes away capabilities and the bits that change the user.
    fchown(&file, uid, gid)?;
    fchmod(&file, Mode::from_bits_truncate(meta.mode))?;
    let is_meant = |name: &str| meta.attributes.iter().any(|(meant, _)| meant == name);
    for (name, _) in attributes(&file)?.iter().filter(|(name, _)| !is_meant(name)) {
        fremovexattr(&file, name.as_str())?;
    }
    let set = |(name, value): &(String, Vec<u8>)| {
        fsetxattr(&file, name.as_str(), value, XattrFlags::empty())
    };
    meta.attributes.iter().try_for_each(set)
}

fn owner(meta: &Meta) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(meta.uid)), Some(Gid::from_raw(meta.gid)))
}

fn times((tv_sec, tv_nsec): (i64, i64)) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec, tv_nsec },
    }
}

/// A name that leads to something below the tree.
fn check(name: &[u8]) -> Result<()> {
    let leads_on = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
    let is_right =
        name.len() < MAX_NAME && !name.contains(&0) && name.split(|&b| b == b'/').all(leads_on);
    if is_right {
        Ok(())
    } else {
        Err(Error::Protocol(format!("{:?} is no name in a tree", String::from_utf8_lossy(name))))
    }
}

/// Makes room for something that is no directory.
fn clear(parent: &File, own: &OsStr) -> Result<(), Errno> {
    match unlinkat(parent, own, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};

    use super::*;

    fn meta(mode: u32) -> Meta {
        Meta { mode, uid: 7, gid: 8, changed: (1, 0), attributes: Vec::new() }
    }

    /// A directory, and a file of somebody else beside it.
    fn scene() -> (tempfile::TempDir, File, std::path::PathBuf) {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("tree")).unwrap();
        let victim = place.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
        let dir = File::open(place.path().join("tree")).unwrap();
        (place, dir, victim)
    }

    #[test]
    fn what_is_exchanged_for_a_link_leads_to_no_other_file() {
        let (place, dir, victim) = scene();
        let at = |name: &str| place.path().join("tree").join(name);
        let own = OsStr::new("fifo");
        mknodat(&dir, own, FileType::Fifo, Mode::empty(), 0).unwrap();
        let it = made(&dir, own, FileType::Fifo).unwrap();
        fs::rename(at("fifo"), at("old")).unwrap();
        symlink(&victim, at("fifo")).unwrap();
        attend(&it, &meta(0o4777)).unwrap();
        let seen = victim.metadata().unwrap();
        assert_eq!((seen.mode() & 0o7777, seen.uid(), seen.gid()), (0o600, 0, 0));
        let link = at("fifo").symlink_metadata().unwrap();
        assert_eq!((link.uid(), link.gid()), (0, 0));
        let fifo = at("old").metadata().unwrap();
        assert_eq!((fifo.mode() & 0o7777, fifo.uid(), fifo.mtime()), (0o4777, 7, 1));
    }

    /// What somebody else has put there before it was looked at.
    #[test]
    fn what_is_not_like_what_was_made_is_not_touched() {
        let (place, dir, victim) = scene();
        let at = place.path().join("tree/it");
        let own = OsStr::new("it");
        let others: [&dyn Fn(); 3] =
            [&|| symlink(&victim, &at).unwrap(), &|| fs::hard_link(&victim, &at).unwrap(), &|| {
                mknodat(CWD, &at, FileType::Fifo, Mode::RUSR, 0).unwrap()
            }];
        for other in others {
            other();
            assert_eq!(made(&dir, own, FileType::Fifo).unwrap_err(), Errno::NOENT);
            fs::remove_file(&at).unwrap();
        }
    }

    #[test]
    fn bytes_come_to_the_file_that_was_made_and_no_fifo_in_its_place_is_opened() {
        let (place, dir, _) = scene();
        let at = |name: &str| place.path().join("tree").join(name);
        let mut replica = Replica::new(Tree::of(dir));
        let name = || b"file".to_vec();
        let what = What::Regular { len: 3 };
        let changes = [
            Change::Make { name: name(), what, meta: meta(0o640) },
            Change::Update { name: name(), len: Some(3), meta: meta(0o640) },
        ];
        for change in changes {
            replica.apply(change, || Ok(Vec::new())).unwrap();
            fs::rename(at("file"), at("old")).unwrap();
            mknodat(CWD, at("file"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            // With somebody who reads it, it would not even make the writer wait.
            let nonblock = libc::O_NONBLOCK;
            let mut reader =
                fs::OpenOptions::new().read(true).custom_flags(nonblock).open(at("file")).unwrap();
            replica.apply(Change::Write { offset: 0 }, || Ok(b"new".to_vec())).unwrap();
            replica.finish().unwrap();
            assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
            assert_eq!(fs::read(at("old")).unwrap(), b"new");
            assert_eq!(at("old").metadata().unwrap().mode() & 0o7777, 0o640);
            let fifo = at("file").metadata().unwrap();
            assert_eq!((fifo.uid(), fifo.mode() & 0o7777), (0, 0o600));
            fs::rename(at("old"), at("file")).unwrap();
        }
    }

    /// A source may tell of one as often as it likes before it says that this was all.
    #[test]
    fn what_waits_for_its_time_is_there_once() {
        let (place, dir, _) = scene();
        let mut replica = Replica::new(Tree::of(dir));
        let name = || b"dir".to_vec();
        let make = Change::Make { name: name(), what: What::Directory, meta: meta(0o755) };
        replica.apply(make, || Ok(Vec::new())).unwrap();
        for second in 1..=100 {
            let meta = Meta { changed: (second, 0), ..meta(0o755) };
            let update = Change::Update { name: name(), len: None, meta };
            replica.apply(update, || Ok(Vec::new())).unwrap();
        }
        assert_eq!((replica.directories.len(), replica.waiting), (1, 3));
        replica.waiting = MAX_WAITING;
        let update = Change::Update { name: name(), len: None, meta: meta(0o755) };
        assert!(replica.apply(update, || Ok(Vec::new())).is_err());
        replica.finish().unwrap();
        assert_eq!((replica.directories.len(), replica.waiting), (0, 0));
        assert_eq!(place.path().join("tree/dir").metadata().unwrap().mtime(), 100);
    }

    /// Where others than root have a part of the tree, they could move what they may not read to a name that gets it theirs.
    #[test]
    fn what_somebody_has_put_there_is_opened_to_nobody() {
        let (place, dir, victim) = scene();
        let at = |name: &str| place.path().join("tree").join(name);
        let mut replica = Replica::new(Tree::of(dir));
        replica.share().unwrap();
        let own = |what: What| Change::Make { name: b"it".to_vec(), what, meta: meta(0o644) };
        let update = |len| Change::Update { name: b"it".to_vec(), len, meta: meta(0o666) };
        let (file, fifo) =
            (What::Regular { len: 4 }, What::Special { mode: libc::S_IFIFO, number: 0 });
        for (what, len, old) in
            [(file, Some(4), "file"), (What::Directory, None, "dir"), (fifo, None, "fifo")]
        {
            replica.apply(own(what), || Ok(Vec::new())).unwrap();
            replica.apply(update(len), || Ok(Vec::new())).unwrap();
            replica.finish().unwrap();
            assert_eq!(at("it").metadata().unwrap().mode() & 0o777, 0o666);
            fs::rename(at("it"), at(old)).unwrap();
            match len {
                Some(_) => fs::rename(&victim, at("it")).unwrap(),
                None => {
                    mknodat(CWD, at("it"), FileType::CharacterDevice, Mode::RUSR, 0x103).unwrap()
                }
            }
            let before = at("it").metadata().unwrap();
            assert!(replica.apply(update(len), || Ok(Vec::new())).is_err());
            replica.finish().unwrap();
            let seen = at("it").metadata().unwrap();
            assert_eq!((seen.uid(), seen.mode()), (0, before.mode()));
            fs::remove_file(at("it")).unwrap();
        }
        let tree = Change::Update { name: Vec::new(), len: None, meta: meta(0o755) };
        replica.apply(tree, || Ok(Vec::new())).unwrap();
    }
}
