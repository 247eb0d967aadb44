//! The destination's side: does what the source tells, below one directory and nowhere else.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags,
    chmodat, chownat, fchmod, fchown, fremovexattr, fsetxattr, ftruncate, futimens, linkat,
    mkdirat, mknodat, openat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use torpor_kernel::tree::{self, Tree};

use super::scan::{attributes, failed};
use super::{Change, Meta, Name, PIECE, What, path, split};
use crate::error::{Context, Error, Result};

/// Bytes of a path.
const MAX_NAME: usize = libc::PATH_MAX as usize;

/// The bits of a mode by which a program runs as its owner, or in its group.
const SET_ID: u32 = 0o6000;

/// The tree of a destination.
#[derive(Debug)]
pub(crate) struct Replica {
    root: Tree,
    /// The file that pieces come for, and what it gets when it has them.
    open: Option<(Name, File, Meta)>,
    /// Whether others than root could use what is in it.
    forbids_rights: bool,
    /// Directories, which get their times when all that is in them is there.
    directories: Vec<(Name, Meta)>,
}

impl Replica {
    /// In an empty directory.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub(crate) fn new(root: &Path) -> Result<Self> {
        let root = Tree::at(root).context(|| root.display().to_string())?;
        Ok(Self { root, open: None, forbids_rights: false, directories: Vec::new() })
    }

    /// From now on it takes no devices, and no programs that give whoever runs them the rights of somebody else.
    pub(crate) fn forbid_rights(&mut self) {
        self.forbids_rights = true;
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
        if let Some(what) = rights(&change).filter(|_| self.forbids_rights) {
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
                remove(&parent, own)
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
        for (name, meta) in std::mem::take(&mut self.directories) {
            let directory = self.root.dir(path(&name));
            let set = directory.and_then(|directory| futimens(directory, &times(&meta)));
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
        let private = Mode::RUSR | Mode::WUSR;
        if what != What::Directory {
            clear(&parent, own)?;
        }
        match what {
            What::Directory => {
                mkdirat(&parent, own, private | Mode::XUSR)?;
                return self.update(name, None, meta);
            }
            What::Regular { len } => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let file = openat(&parent, own, flags | OFlags::CLOEXEC, private)?;
                ftruncate(&file, len)?;
                self.open = Some((name, file.into(), meta));
                return Ok(());
            }
            What::Symlink { to } => symlinkat(OsStr::from_bytes(&to), &parent, own)?,
            What::Special { mode, number } => {
                let kind = FileType::from_raw_mode(mode);
                if matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Symlink) {
                    return Err(Errno::INVAL);
                }
                mknodat(&parent, own, kind, Mode::empty(), number)?;
            }
        }
        attend(&parent, own, &meta)
    }

    fn update(&mut self, name: Name, len: Option<u64>, meta: Meta) -> Result<(), Errno> {
        let (parent, own) = if name.is_empty() {
            (self.root.dir(path(b""))?, OsStr::new("."))
        } else {
            self.parent(&name)?
        };
        let stat = statat(&parent, own, AtFlags::SYMLINK_NOFOLLOW)?;
        match (FileType::from_raw_mode(stat.st_mode), len) {
            (FileType::RegularFile, Some(len)) => {
                let file = self.root.file(path(&name), (stat.st_dev, stat.st_ino))?;
                if file.metadata().map_or(0, |meta| meta.len()) != len {
                    ftruncate(self.root.open(path(&name), OFlags::WRONLY)?, len)?;
                }
                self.open = Some((name, file, meta));
            }
            (FileType::Directory, None) => {
                equip(self.root.dir(path(&name))?, &meta)?;
                self.directories.push((name, meta));
            }
            (FileType::RegularFile | FileType::Directory, _) | (_, Some(_)) => {
                return Err(Errno::INVAL);
            }
            (_, None) => attend(&parent, own, &meta)?,
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
        let writable = self.root.open(path(name), OFlags::WRONLY);
        File::from(writable.map_err(|errno| failed(name, errno))?)
            .write_all_at(data, offset)
            .context(|| format!("root file system: /{}", String::from_utf8_lossy(name)))
    }

    fn close(&mut self) -> Result<()> {
        let Some((name, file, meta)) = self.open.take() else { return Ok(()) };
        let done = equip(&file, &meta).and_then(|()| futimens(&file, &times(&meta)));
        done.map_err(|errno| failed(&name, errno))
    }
}

/// What gives rights to whoever gets to it, in words.
fn rights(change: &Change) -> Option<&'static str> {
    match change {
        // The one with the number 0 is no device: it marks what an overlay has removed.
        Change::Make { what: What::Special { mode, number: 1.. }, .. } => {
            let kind = FileType::from_raw_mode(*mode);
            let is_device = matches!(kind, FileType::BlockDevice | FileType::CharacterDevice);
            is_device.then_some("a device")
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

/// Gives something that is neither file nor directory its attributes.
fn attend(parent: &File, own: &OsStr, meta: &Meta) -> Result<(), Errno> {
    let (uid, gid) = owner(meta);
    chownat(parent, own, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    let stat = statat(parent, own, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        chmodat(parent, own, Mode::from_bits_truncate(meta.mode), AtFlags::empty())?;
    }
    utimensat(parent, own, &times(meta), AtFlags::SYMLINK_NOFOLLOW)
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

fn times(meta: &Meta) -> Timestamps {
    let (tv_sec, tv_nsec) = meta.changed;
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

/// Removes something, and all below it; none of it need be there.
fn remove(parent: &File, own: &OsStr) -> Result<(), Errno> {
    match unlinkat(parent, own, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(errno) => return Err(errno),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let directory = File::from(tree::open(parent, Path::new(own), flags)?);
    let names: Vec<_> = Dir::read_from(&directory)?
        .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
        .collect::<Result<_, Errno>>()?;
    for name in names.iter().filter(|name| !matches!(name.to_bytes(), b"." | b"..")) {
        remove(&directory, OsStr::from_bytes(name.to_bytes()))?;
    }
    unlinkat(parent, own, AtFlags::REMOVEDIR)
}
