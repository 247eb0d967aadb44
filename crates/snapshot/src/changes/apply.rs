//! Unpacking the archive of what a container has changed.
//!
//! What is unpacked may be anybody's, and another container may have the directory mounted that it goes to. So
//! each name is looked up below that directory, with no link on the way, and what is made is made and dressed by
//! descriptors.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, XattrFlags, chownat, fchmod, fchown, fsetxattr,
    linkat, mkdirat, mknodat,
};
use rustix::io::Errno;
use tar::{EntryType, Header};
use torpor_kernel::tree::{self, Attributes, Tree};
use torpor_store::each_entry_as_it_was;

use super::{OPAQUE, OPAQUE_ATTRIBUTE, WHITEOUT, attributes};
use crate::error::{Context, Error, Result};

/// Whether programs are taken that run as another user or group than the one that runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetId {
    /// As any file.
    Taken,
    /// Not where they would be.
    Refused,
}

/// Bytes of the extended attributes of all directories that a file is in. Those of one are rarely more than a few hundred.
const MAX_KEPT: usize = 16 << 20;

/// Directories that are being filled, each in the one before it, and the extended attributes that they get when that is done:
/// what is made in a directory is not to get what the directory says that it gets.
type OpenDirs = Vec<(PathBuf, Attributes)>;

/// Unpacks what [`write`](super::write) has packed into `upper`, an empty layer of an overlay. A program with
/// capabilities is one that runs as another user.
///
/// # Errors
/// An archive that is damaged or leads out of the layer; a device; a program that is refused (named in the error);
/// no place.
pub fn apply(from: &mut dyn Read, upper: &Path, set_id: SetId) -> Result<()> {
    let what = || "the archive of changed files";
    let tree = Tree::at(upper).context(|| upper.display().to_string())?;
    let failed = |error| Error::failed(what(), &error);
    let mut open = OpenDirs::new();
    each_entry_as_it_was(from, failed, |entry| {
        let name = plain(&entry.path().context(what)?)?;
        // The layer itself is there.
        if name.as_os_str().is_empty() {
            return Ok(());
        }
        leave(&tree, &mut open, name.parent())?;
        let given = attributes::read(entry)?;
        unpack(&tree, entry, &name, &given, set_id).context(what)?;
        match entry.header().entry_type() {
            _ if given.is_empty() => {}
            EntryType::Directory => enter(&mut open, name, given)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                dress(&tree, &name, OFlags::NONBLOCK, &given).context(what)?;
            }
            // A link would give them to a file that was judged without them.
            _ => {
                let name = name.display();
                return Err(Error::new(format!(
                    "{name} has extended attributes, and is no file or directory"
                )));
            }
        }
        Ok(())
    })?;
    leave(&tree, &mut open, None)
}

/// What comes next is in this directory.
fn enter(open: &mut OpenDirs, name: PathBuf, given: Attributes) -> Result<()> {
    open.push((name, given));
    let all = open.iter().flat_map(|(_, given)| given);
    match all.map(|(name, value)| name.len() + value.len()).sum::<usize>() {
        0..=MAX_KEPT => Ok(()),
        more => Err(Error::new(format!(
            "directories in each other have {more} bytes of extended attributes: no more than {MAX_KEPT} are taken"
        ))),
    }
}

/// What comes next is in the directory `next`, or nothing comes: nothing more is made in the others that it is not in.
fn leave(tree: &Tree, open: &mut OpenDirs, next: Option<&Path>) -> Result<()> {
    while let Some((name, given)) =
        open.pop_if(|(name, _)| next.is_none_or(|next| !next.starts_with(name)))
    {
        dress(tree, &name, OFlags::DIRECTORY, &given).context(|| "the archive of changed files")?;
    }
    Ok(())
}

/// Gives what was unpacked its extended attributes.
fn dress(tree: &Tree, name: &Path, flags: OFlags, given: &Attributes) -> Result<()> {
    let made = tree.open(name, OFlags::RDONLY | flags);
    let dressed = made.and_then(|made| attributes::give(&made.into(), given));
    dressed.context(|| format!("the extended attributes of {}", name.display()))
}

/// A path in the archive as a name below the layer.
fn plain(path: &Path) -> Result<PathBuf> {
    let parts = path.components().filter(|part| *part != Component::CurDir);
    let leads_out = |part: &Component<'_>| !matches!(part, Component::Normal(_));
    if parts.clone().any(|part| leads_out(&part)) {
        return Err(Error::new(format!("changed files lead to {}", path.display())));
    }
    Ok(parts.collect())
}

fn unpack(
    tree: &Tree,
    entry: &mut tar::Entry<'_, impl Read>,
    name: &Path,
    given: &Attributes,
    set_id: SetId,
) -> Result<()> {
    let shown = || name.display().to_string();
    let (dir, own) = tree.parent(name).context(shown)?;
    if own == OPAQUE {
        return fsetxattr(&dir, OPAQUE_ATTRIBUTE, b"y", XattrFlags::empty()).context(shown);
    }
    if let Some(gone) = own.as_bytes().strip_prefix(WHITEOUT.as_bytes()) {
        let gone = OsStr::from_bytes(gone);
        return mknodat(&dir, gone, FileType::CharacterDevice, Mode::empty(), 0).context(shown);
    }
    // Where this process has the directory open nobody exchanges it.
    let place = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(own);
    match entry.header().entry_type() {
        EntryType::Directory => make_dir(&dir, own, entry.header()).context(shown),
        EntryType::Fifo => make_fifo(&dir, own, entry.header()).context(shown),
        EntryType::Link => {
            let to = plain(&entry.link_name().context(shown)?.unwrap_or_default())?;
            let (to_dir, to) = tree.parent(&to).context(shown)?;
            linkat(to_dir, to, &dir, own, AtFlags::empty()).context(shown)
        }
        EntryType::Symlink => entry.unpack(place).context(shown).map(drop),
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let mode = entry.header().mode().context(shown)?;
            let has_rights = mode & 0o6000 != 0 || attributes::give_rights(given);
            if set_id == SetId::Refused && has_rights {
                return Err(Error::new(format!(
                    "{} is a program that runs as another user or group, or with capabilities, which the container could \
                     not have made",
                    name.display()
                ))
                .hint(
                    "a snapshot may have it that was made here, or that somebody has signed who is believed (--trust, --cosign-key)",
                ));
            }
            entry.unpack(place).context(shown).map(drop)
        }
        other => Err(Error::new(format!("{} is of a kind that no layer has: {other:?}", shown()))),
    }
}

fn make_dir(parent: &File, own: &OsStr, header: &Header) -> std::io::Result<()> {
    match mkdirat(parent, own, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let made = tree::open(parent, Path::new(own), OFlags::RDONLY | OFlags::DIRECTORY)?;
    let (uid, gid) = owner(header)?;
    fchown(&made, uid, gid)?;
    Ok(fchmod(&made, Mode::from_raw_mode(header.mode()? & 0o7777))?)
}

fn make_fifo(parent: &File, own: &OsStr, header: &Header) -> std::io::Result<()> {
    let mode = Mode::from_raw_mode(header.mode()? & 0o777);
    mknodat(parent, own, FileType::Fifo, mode, 0)?;
    let (uid, gid) = owner(header)?;
    Ok(chownat(parent, own, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn owner(header: &Header) -> std::io::Result<(Option<Uid>, Option<Gid>)> {
    let id = |id: u64| {
        let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
        id.ok_or_else(|| std::io::Error::from(Errno::INVAL))
    };
    Ok((Some(Uid::from_raw(id(header.uid()?)?)), Some(Gid::from_raw(id(header.gid()?)?))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use tar::Builder;

    use super::*;
    use crate::archive::header;

    /// An archive of empty things of these kinds, names and modes.
    fn archive(all: &[(EntryType, &str, u32)]) -> Vec<u8> {
        let mut archive = Builder::new(Vec::new());
        for (kind, name, mode) in all {
            let mut header = header(*kind, 0, *mode);
            header.set_uid(7);
            header.set_gid(8);
            archive.append_data(&mut header, name, std::io::empty()).unwrap();
        }
        archive.into_inner().unwrap()
    }

    #[test]
    fn all_is_made_with_its_owner_and_mode() {
        let upper = tempfile::tempdir().unwrap();
        let all = [
            (EntryType::Directory, "d", 0o2750),
            (EntryType::Regular, "d/program", 0o4711),
            (EntryType::Regular, "d/.wh.gone", 0o600),
            (EntryType::Regular, "d/.wh..wh..opq", 0o600),
            (EntryType::Fifo, "d/pipe", 0o620),
        ];
        apply(&mut archive(&all).as_slice(), upper.path(), SetId::Taken).unwrap();
        for (kind, name, mode) in all {
            let Ok(meta) = fs::symlink_metadata(upper.path().join(name)) else { continue };
            // The mask of this process counts for a pipe.
            let counts = if kind == EntryType::Fifo { 0o700 } else { 0o7777 };
            assert_eq!(meta.mode() & counts, mode & counts, "{name}");
            assert_eq!((meta.uid(), meta.gid()), (7, 8), "{name}");
        }
        let gone = fs::symlink_metadata(upper.path().join("d/gone")).unwrap();
        assert_eq!(FileType::from_raw_mode(gone.mode()), FileType::CharacterDevice);
        let mut value = [0; 2];
        let dir = File::open(upper.path().join("d")).unwrap();
        assert_eq!(rustix::fs::fgetxattr(dir, OPAQUE_ATTRIBUTE, &mut value[..]), Ok(1));
    }

    #[test]
    fn nothing_is_made_over_a_link() {
        let (upper, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // As another container that has the directory mounted can have made it.
        symlink(outside.path(), upper.path().join("d")).unwrap();
        let below =
            ["d/file", "d/.wh.gone", "d/.wh..wh..opq"].map(|name| (EntryType::Regular, name));
        let more = [
            (EntryType::Fifo, "d/pipe"),
            (EntryType::Directory, "d/e"),
            (EntryType::Directory, "d"),
        ];
        for (kind, name) in below.into_iter().chain(more) {
            let archive = archive(&[(kind, name, 0o777)]);
            let said = apply(&mut archive.as_slice(), upper.path(), SetId::Taken).unwrap_err();
            assert!(said.to_string().contains(name), "{said}");
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert_ne!(fs::metadata(outside.path()).unwrap().uid(), 7);
    }

    /// An archive may have any number of them.
    #[test]
    fn attributes_of_a_directory_are_kept_as_long_as_it_is_filled() {
        let attribute = |len: usize| (b"user.a".to_vec(), vec![b'x'; len]);
        let packed = |names: &[String], len: usize| {
            let mut bytes = Vec::new();
            let mut archive = Builder::new(&mut bytes as &mut dyn std::io::Write);
            for name in names {
                attributes::write(&mut archive, &vec![attribute(len)]).unwrap();
                let mut header = header(EntryType::Directory, 0, 0o755);
                header.set_uid(7);
                header.set_gid(8);
                archive.append_data(&mut header, name, std::io::empty()).unwrap();
            }
            // No layer has one.
            archive
                .append_data(&mut header(EntryType::Block, 0, 0o600), "disk", std::io::empty())
                .unwrap();
            drop(archive);
            bytes
        };
        let names = ["d", "d/e", "d/f", "other"].map(str::to_owned);
        let upper = tempfile::tempdir().unwrap();
        let said = apply(&mut packed(&names, 3).as_slice(), upper.path(), SetId::Taken);
        assert!(said.unwrap_err().to_string().contains("disk"));
        for name in &names {
            let has = tree::attributes(File::open(upper.path().join(name)).unwrap()).unwrap();
            assert_eq!(has, [attribute(3)], "{name} was left before");
        }
        let upper = tempfile::tempdir().unwrap();
        let deep: Vec<String> = (1..9).map(|depth| vec!["d"; depth].join("/")).collect();
        let said = apply(&mut packed(&deep, 2 << 20).as_slice(), upper.path(), SetId::Taken);
        let said = said.unwrap_err().to_string();
        assert!(said.contains("bytes of extended attributes"), "{said}");
    }

    #[test]
    fn devices_and_programs_with_another_user_are_refused_by_name() {
        for (kind, name, mode) in [
            (EntryType::Block, "disk", 0o666),
            (EntryType::Char, "memory", 0o666),
            (EntryType::Regular, "setuid", 0o4755),
            (EntryType::Regular, "setgid", 0o2755),
        ] {
            let upper = tempfile::tempdir().unwrap();
            let archive = archive(&[(kind, name, mode)]);
            let said = apply(&mut archive.as_slice(), upper.path(), SetId::Refused).unwrap_err();
            assert!(said.to_string().contains(name), "{said}");
            assert_eq!(fs::read_dir(upper.path()).unwrap().count(), 0);
        }
        // A directory whose files get its group.
        let upper = tempfile::tempdir().unwrap();
        let archive = archive(&[(EntryType::Directory, "mail", 0o2775)]);
        apply(&mut archive.as_slice(), upper.path(), SetId::Refused).unwrap();
    }
}
