//! Unpacking the small layer of a snapshot.

use std::fs;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use torpor_blobs::oci::Manifest;
use torpor_blobs::{self as store, Store};

use crate::changes::{self, SetId};
use crate::error::{Context, Error, Result};
use crate::sealed::{self, Opened};
use crate::{archive, places, sealed_pack};

/// Unpacks the small layer of a snapshot beside the layer `upper`, and what was changed into it,
/// which is `opened` if it is sealed; with programs that run as another user if they are taken.
///
/// # Errors
/// If it is damaged; a program that is not taken; no place.
pub fn container(
    store: &dyn Store,
    manifest: &Manifest,
    opened: Option<&Opened>,
    upper: &Path,
    set_id: SetId,
) -> Result<()> {
    let dir = upper.parent().unwrap_or(upper);
    let name = if opened.is_some() { sealed::CHANGES } else { archive::CHANGES };
    let changes = dir.join("work").join(name);
    small(store, manifest, &dir.join("images"), &|found| match found {
        sealed_pack::LIST => Some(dir.join(found)),
        _ => (found == name).then(|| changes.clone()),
    })?;
    if let Some(opened) = opened {
        opened.read_changes(&changes, &mut |from| changes::apply(from, upper, set_id))?;
    } else if changes.exists() {
        let mut file = fs::File::open(&changes).context(|| changes.display().to_string())?;
        changes::apply(&mut file, upper, set_id)?;
    }
    let _ = fs::remove_file(&changes);
    Ok(())
}

/// Unpacks the small layer of a snapshot: its images to `images`, and the archive of what was
/// changed in the container's files, by its name, to `changes`.
///
/// # Errors
/// If it is damaged; no place.
pub fn images(
    store: &dyn Store,
    manifest: &Manifest,
    images: &Path,
    changes: (&str, &Path),
) -> Result<()> {
    let (changed, changes) = changes;
    small(store, manifest, images, &|name| (name == changed).then(|| changes.to_owned()))
}

/// Unpacks the small layer of a snapshot to `dir`, as Podman exports a checkpoint: the files of these names,
/// and the images. Returns where those are.
///
/// # Errors
/// If it is damaged; no place.
pub fn exported(
    store: &dyn Store,
    manifest: &Manifest,
    dir: &Path,
    names: &[&str],
) -> Result<PathBuf> {
    let images = dir.join(archive::IMAGES);
    places::make(&images)?;
    small(store, manifest, &images, &|name| names.contains(&name).then(|| dir.join(name)))?;
    Ok(images)
}

fn small(
    store: &dyn Store,
    manifest: &Manifest,
    images: &Path,
    place: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<()> {
    let layer = manifest.layers.first().ok_or_else(|| Error::new("the snapshot has no layers"))?;
    // It is verified before anything is made of it, and may be larger than the memory.
    let what = || "unpacking the images";
    let mut packed = tempfile::tempfile_in(images).context(what)?;
    store::copy(store, layer, &mut packed).context(what)?;
    packed.rewind().context(what)?;
    let plain = zstd::Decoder::new(&packed).context(what)?;
    archive::read_small(&mut plain.take(archive::most(layer.size)), images, place)
}
