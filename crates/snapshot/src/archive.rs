//! The archives that a snapshot consists of.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, getxattr, mknodat, setxattr};
use tar::{Builder, EntryType, Header};

use crate::error::{Context, Error, Result};

/// Where the data of the first file in an archive starts.
pub const FIRST: u64 = 512;
/// What marks a file that is gone, in front of its name.
const WHITEOUT: &str = ".wh.";
/// What marks a directory that hides the one below it.
const OPAQUE: &str = ".wh..wh..opq";
/// The most that the small files of a snapshot take.
pub const MAX_SMALL: u64 = 1 << 30;
/// The archive of what the container has changed in its files.
pub const CHANGES: &str = "rootfs-diff.tar";
/// The directory of the images in the archive.
pub const IMAGES: &str = "checkpoint";

fn header(kind: EntryType, size: u64, mode: u32) -> Header {
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
/// If it cannot be written.
pub fn write_pack(
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

/// Writes the archive of all that is small: the images in `images`, the archive of what was
/// changed, with its name, and `others`.
///
/// # Errors
/// If it cannot be written.
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
/// If it cannot be written.
pub fn write_all(file: &Path, dir: &Path) -> Result<()> {
    let shown = || file.display().to_string();
    let mut archive = Builder::new(io::BufWriter::new(File::create(file).context(shown)?));
    // Podman refuses archives with holes.
    archive.sparse(false);
    archive.append_dir_all("", dir).context(shown)?;
    archive.into_inner().and_then(|mut file| file.flush()).context(shown)
}

/// Unpacks what [`write_small`] has packed: images to `images`, other files to where `place` has them
/// by their names. What has no place is left out.
///
/// # Errors
/// An archive that is damaged; no room.
pub fn read_small(
    from: &mut dyn Read,
    images: &Path,
    place: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<()> {
    let what = || "unpacking the images";
    let mut archive = tar::Archive::new(from.take(MAX_SMALL));
    for entry in archive.entries().context(what)? {
        let mut entry = entry.context(what)?;
        if entry.header().entry_type() != EntryType::Regular {
            continue;
        }
        let path = entry.path().context(what)?.into_owned();
        let parts: Vec<Component<'_>> = path.components().collect();
        let target = match parts.as_slice() {
            [Component::Normal(dir), Component::Normal(name)] if *dir == IMAGES => {
                images.join(name)
            }
            [Component::Normal(name)] => match name.to_str().and_then(place) {
                Some(target) => target,
                None => continue,
            },
            _ => continue,
        };
        let shown = || target.display().to_string();
        let mut file = File::create_new(&target).context(shown)?;
        io::copy(&mut entry, &mut file).context(shown)?;
    }
    Ok(())
}

/// Writes the archive of what was changed in a root file system: the layer `upper` of an
/// overlay, its whiteouts as OCI has them. Sockets are left out: who restores one makes it.
///
/// # Errors
/// If it cannot be read or written.
pub fn write_changes(to: &mut dyn Write, upper: &Path) -> Result<()> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    let mut todo = vec![upper.to_owned()];
    while let Some(dir) = todo.pop() {
        let shown = || dir.display().to_string();
        let entries = fs::read_dir(&dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        for entry in entries.context(shown)? {
            let path = entry.path();
            let name = path.strip_prefix(upper).unwrap_or(&path).to_owned();
            let meta = fs::symlink_metadata(&path).context(shown)?;
            let kind = meta.file_type();
            if kind.is_char_device() && meta.rdev() == 0 {
                let base = entry.file_name().to_string_lossy().into_owned();
                let gone = name.with_file_name(format!("{WHITEOUT}{base}"));
                empty(&mut archive, &gone).context(shown)?;
            } else if kind.is_dir() {
                archive.append_dir(&name, &path).context(shown)?;
                if is_opaque(&path) {
                    empty(&mut archive, &name.join(OPAQUE)).context(shown)?;
                }
                todo.push(path);
            } else if kind.is_file() || kind.is_symlink() || kind.is_fifo() {
                archive.append_path_with_name(&path, &name).context(shown)?;
            }
        }
    }
    archive.finish().context(|| "the archive of changed files")
}

fn empty(archive: &mut Builder<&mut dyn Write>, path: &Path) -> io::Result<()> {
    archive.append_data(&mut header(EntryType::Regular, 0, 0o600), path, io::empty())
}

fn is_opaque(dir: &Path) -> bool {
    let mut value = [0; 4];
    let found = getxattr(dir, "trusted.overlay.opaque", &mut value[..]);
    found.is_ok_and(|len| &value[..len] == b"y")
}

/// Unpacks what [`write_changes`] has packed into `upper`, an empty layer of an overlay.
///
/// # Errors
/// An archive that is damaged or leads out of the layer; no place.
pub fn apply_changes(from: &mut dyn Read, upper: &Path) -> Result<()> {
    let what = || "the archive of changed files";
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    for entry in archive.entries().context(what)? {
        let mut entry = entry.context(what)?;
        let path = entry.path().context(what)?.into_owned();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent = path.parent().unwrap_or(Path::new(""));
        if path.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(Error::new(format!("changed files lead to {}", path.display())));
        }
        if name == OPAQUE {
            let dir = plain_dir(upper, parent)?;
            setxattr(&dir, "trusted.overlay.opaque", b"y", XattrFlags::empty()).context(what)?;
        } else if let Some(gone) = name.strip_prefix(WHITEOUT) {
            let place = plain_dir(upper, parent)?.join(gone);
            mknodat(CWD, &place, FileType::CharacterDevice, Mode::empty(), 0).context(what)?;
        } else if entry.header().entry_type() == EntryType::Fifo {
            let mode = Mode::from_raw_mode(entry.header().mode().context(what)? & 0o777);
            let place = plain_dir(upper, parent)?.join(name);
            mknodat(CWD, &place, FileType::Fifo, mode, 0).context(what)?;
        } else {
            entry.unpack_in(upper).context(what)?;
        }
    }
    Ok(())
}

/// A directory of the layer that no link leads to.
fn plain_dir(upper: &Path, dir: &Path) -> Result<PathBuf> {
    let mut path = upper.to_owned();
    for part in dir.components() {
        path.push(part);
        let meta = fs::symlink_metadata(&path).context(|| path.display().to_string())?;
        if !meta.is_dir() {
            return Err(Error::new(format!("{} is no directory", path.display())));
        }
    }
    Ok(path)
}
