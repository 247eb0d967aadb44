//! The archives that a snapshot consists of.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use tar::{Builder, EntryType, Header};

use crate::error::{Context, Result};

/// Where the data of the first file in an archive starts.
pub const FIRST: u64 = 512;
/// The most that the small files of a snapshot take.
pub const MAX_SMALL: u64 = 1 << 30;
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
