//! The archives that a snapshot consists of.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use tar::{Builder, EntryType, Header};
use torpor_store::{each_entry, each_entry_with_seek};

use crate::error::{Context, Error, Result};

/// Where the data of the first file in an archive starts.
pub const FIRST: u64 = 512;
/// What the small files of a snapshot may take, however small they are when they are packed.
const ANYWAY: u64 = if cfg!(test) { 16 << 20 } else { 1 << 30 };
/// How many times their size when they are packed they may take.
const TIMES: u64 = 64;
/// The archive of what the container has changed in its files.
pub const CHANGES: &str = "rootfs-diff.tar";
/// The directory of the images in the archive.
pub const IMAGES: &str = "checkpoint";

pub(crate) fn header(kind: EntryType, size: u64, mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header
}

/// Writes the archive of a pack: its clusters, and the list of its pages. Returns where the
/// list is.
///
/// # Errors
/// If `clusters` ends before its length, or `to` does not take what is written.
pub(crate) fn write_pack(
    to: &mut dyn Write,
    number: u32,
    clusters: &mut File,
    len: u64,
    list: &[u8],
) -> Result<u64> {
    let what = || "writing a pack";
    let mut archive = Builder::new(to);
    let mut head = header(EntryType::Regular, len, 0o600);
    let name = torpor_images::kind::PAGES_PACKED.file_name(number.into());
    archive.append_data(&mut head, format!("{IMAGES}/{name}"), clusters.take(len)).context(what)?;
    let mut head = header(EntryType::Regular, list.len() as u64, 0o600);
    archive.append_data(&mut head, format!("{IMAGES}/pages-list-{number}"), list).context(what)?;
    archive.finish().context(what)?;
    Ok(FIRST + len.next_multiple_of(512) + 512)
}

/// Writes the archive of a pack of sealed pages, `len` bytes.
///
/// # Errors
/// If `pages` ends before its length, or `to` does not take what is written.
pub(crate) fn write_sealed_pack(to: &mut dyn Write, pages: &mut File, len: u64) -> Result<()> {
    let what = || "writing a pack";
    let mut archive = Builder::new(to);
    let mut head = header(EntryType::Regular, len, 0o600);
    let name = format!("{IMAGES}/pages-sealed");
    archive.append_data(&mut head, name, pages.take(len)).context(what)?;
    archive.finish().context(what)
}

/// Writes the archive of all that is small: the images in `images`, the archive of what was
/// changed, with its name, and `others`.
///
/// # Errors
/// If an image or another file cannot be read, or `to` does not take what is written.
pub fn write_small(
    to: &mut dyn Write,
    images: &Path,
    changes: Option<(&str, &Path)>,
    others: &[(&str, Vec<u8>)],
) -> Result<()> {
    let what = || "packing the images";
    let mut archive = Builder::new(to);
    for (name, content) in others {
        let mut head = header(EntryType::Regular, content.len() as u64, 0o600);
        archive.append_data(&mut head, name, content.as_slice()).context(what)?;
    }
    let mut head = header(EntryType::Directory, 0, 0o700);
    archive.append_data(&mut head, format!("{IMAGES}/"), io::empty()).context(what)?;
    let entries = fs::read_dir(images).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut entries = entries.context(what)?;
    entries.sort_unstable_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let meta = entry.metadata().context(what)?;
        if meta.is_file() && !name.ends_with(".log") && !name.ends_with(".conf") {
            let mut head = header(EntryType::Regular, meta.len(), 0o600);
            let file = File::open(entry.path()).context(what)?;
            archive.append_data(&mut head, format!("{IMAGES}/{name}"), file).context(what)?;
        }
    }
    if let Some((name, changes)) = changes {
        let file = File::open(changes).context(what)?;
        let len = file.metadata().context(what)?.len();
        archive
            .append_data(&mut header(EntryType::Regular, len, 0o600), name, file)
            .context(what)?;
    }
    archive.finish().context(what)
}

/// Writes an archive of all that is in a directory.
///
/// # Errors
/// If a file of the directory cannot be read, or the archive cannot be made or written: a full disk.
pub fn write_all(file: &Path, dir: &Path) -> Result<()> {
    let shown = || file.display().to_string();
    let mut archive = Builder::new(io::BufWriter::new(File::create(file).context(shown)?));
    // Podman refuses archives with holes.
    archive.sparse(false);
    archive.append_dir_all("", dir).context(shown)?;
    archive.into_inner().and_then(|mut file| file.flush()).context(shown)
}

/// How many bytes the small files of a snapshot may take that are `packed` bytes when they are packed: whoever sends
/// little does not fill a disk.
#[must_use]
pub fn most(packed: u64) -> u64 {
    ANYWAY.max(packed.saturating_mul(TIMES))
}

/// The largest file in an archive, and its size.
///
/// # Errors
/// If the archive is gone or damaged.
pub fn largest(archive: &Path) -> Result<Option<(PathBuf, u64)>> {
    let what = || archive.display().to_string();
    let mut largest: Option<(PathBuf, u64)> = None;
    let file = File::open(archive).context(what)?;
    let failed = |error| Error::failed(what(), &error);
    each_entry_with_seek(file, failed, |entry| {
        if largest.as_ref().is_none_or(|(_, size)| *size < entry.size()) {
            largest = Some((entry.path().context(what)?.into_owned(), entry.size()));
        }
        Ok(())
    })?;
    Ok(largest)
}

/// Unpacks what [`write_small`] has packed: images to `images`, other files to where `place` has them
/// by their names. What has no place is left out.
///
/// # Errors
/// An archive that is damaged, or describes a file by more than any needs; no room.
pub fn read_small(
    from: &mut dyn Read,
    images: &Path,
    place: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<()> {
    let what = || "unpacking the images";
    let failed = |error| Error::failed(what(), &error);
    each_entry(from, failed, |entry| {
        if entry.header().entry_type() != EntryType::Regular {
            return Ok(());
        }
        let path = entry.path().context(what)?.into_owned();
        let parts: Vec<Component<'_>> = path.components().collect();
        let target = match parts.as_slice() {
            [Component::Normal(dir), Component::Normal(name)] if *dir == IMAGES => {
                images.join(name)
            }
            [Component::Normal(name)] => match name.to_str().and_then(place) {
                Some(target) => target,
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        let shown = || target.display().to_string();
        let mut file = File::create_new(&target).context(shown)?;
        io::copy(entry, &mut file).context(shown).map(drop)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_largest_file_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut archive = Builder::new(file.as_file());
        for (name, size) in [("a", 3_u64), ("var/b", 2000), ("c", 40)] {
            let mut header = header(EntryType::Regular, size, 0o600);
            archive.append_data(&mut header, name, io::repeat(0).take(size)).unwrap();
        }
        archive.finish().unwrap();
        drop(archive);
        assert_eq!(largest(file.path()).unwrap(), Some(("var/b".into(), 2000)));
    }

    /// What is packed into a few bytes may be a gigabyte long.
    #[test]
    fn no_name_fills_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        for kind in [EntryType::GNULongName, EntryType::XHeader] {
            let mut archive = Builder::new(Vec::new());
            let mut long = header(kind, 16 << 20, 0o600);
            long.set_cksum();
            archive.append(&long, io::repeat(b'x').take(16 << 20)).unwrap();
            let mut last = header(EntryType::Regular, 0, 0o600);
            archive.append_data(&mut last, "rootfs-diff.tar", io::empty()).unwrap();
            let archive = archive.into_inner().unwrap();
            let small = read_small(&mut archive.as_slice(), dir.path(), &|_| None);
            let (upper, set_id) = (dir.path(), crate::changes::SetId::Taken);
            let changes = crate::changes::apply(&mut archive.as_slice(), upper, set_id);
            for read in [small, changes] {
                let said = read.unwrap_err().to_string();
                assert!(said.contains("is described by more than"), "{kind:?}: {said}");
            }
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_large_may_be_unpacked_and_what_is_small_not_for_ever() {
        assert_eq!(most(100), ANYWAY);
        assert!(most(4 << 30) > 100 << 30);
        assert_eq!(most(u64::MAX), u64::MAX);
    }
}
