//! Unpacking the small layer of a snapshot.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use torpor_blobs::oci::Manifest;
use torpor_blobs::{self as store, Store};

use crate::changes::{self, SetId};
use crate::error::{Context, Error, Result};
use crate::sealed::{self, Opened};
use crate::{archive, places, sealed_pack};

/// What is said to be done where one of these fails.
const WHAT: &str = "unpacking the images";

/// Fetches the small layer of a snapshot, for as many containers as there are to be: a file without a name, on the disk of
/// `near`. It is verified before anything is made of it, and may be larger than the memory.
///
/// # Errors
/// If it cannot be had, or is damaged; no place.
pub fn fetch(store: &dyn Store, manifest: &Manifest, near: &Path) -> Result<File> {
    let layer = manifest.layers.first().ok_or_else(|| Error::new("the snapshot has no layers"))?;
    places::make(near)?;
    let mut packed = tempfile::tempfile_in(near).context(|| WHAT)?;
    store::copy(store, layer, &mut packed).context(|| WHAT)?;
    Ok(packed)
}

/// Unpacks the small layer `packed` beside the layer `upper`, and what was changed into it,
/// which is `opened` if it is sealed; with programs that run as another user if they are taken.
///
/// # Errors
/// If it is damaged; a program that is not taken; no place.
pub fn container(
    packed: &File,
    opened: Option<&Opened>,
    upper: &Path,
    set_id: SetId,
) -> Result<()> {
    let dir = upper.parent().unwrap_or(upper);
    let name = if opened.is_some() { sealed::CHANGES } else { archive::CHANGES };
    let changes = dir.join("work").join(name);
    small(packed, &dir.join("images"), &|found| match found {
        sealed_pack::LIST => Some(dir.join(found)),
        _ => (found == name).then(|| changes.clone()),
    })?;
    if let Some(opened) = opened {
        opened.read_changes(&changes, &mut |from| changes::apply(from, upper, set_id))?;
    } else if changes.exists() {
        let mut file = File::open(&changes).context(|| changes.display().to_string())?;
        changes::apply(&mut file, upper, set_id)?;
    }
    let _ = fs::remove_file(&changes);
    Ok(())
}

/// Unpacks the small layer `packed`: its images to `images`, and the archive of what was
/// changed in the container's files, by its name, to `changes`.
///
/// # Errors
/// If `packed` is damaged, or the disk has no room.
pub fn images(packed: &File, images: &Path, changes: (&str, &Path)) -> Result<()> {
    let (changed, changes) = changes;
    small(packed, images, &|name| (name == changed).then(|| changes.to_owned()))
}

/// Unpacks the small layer `packed` to `dir`, as Podman exports a checkpoint: the files of these names,
/// and the images. Returns where those are.
///
/// # Errors
/// If `packed` is damaged, or the disk has no room.
pub(crate) fn exported(packed: &File, dir: &Path, names: &[&str]) -> Result<PathBuf> {
    let images = dir.join(archive::IMAGES);
    places::make(&images)?;
    small(packed, &images, &|name| names.contains(&name).then(|| dir.join(name)))?;
    Ok(images)
}

fn small(packed: &File, images: &Path, place: &dyn Fn(&str) -> Option<PathBuf>) -> Result<()> {
    let size = packed.metadata().context(|| WHAT)?.len();
    let mut packed = packed;
    packed.rewind().context(|| WHAT)?;
    let plain = zstd::Decoder::new(packed).context(|| WHAT)?;
    archive::read_small(&mut plain.take(archive::most(size)), images, place)
}
