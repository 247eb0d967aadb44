//! The small blobs of a snapshot: what it says of itself, and its small layer. Those of registries and object stores are kept
//! on this machine, and come from there once.

use std::fs::File;
use std::io::{Read, Seek};

use torpor_blobs::oci::{Descriptor, Manifest};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};

use crate::description::{Description, MAX_CONFIG};
use crate::error::{Context, Result};
use crate::{cache, places, unpack};

/// The blob `wanted` of the snapshot `reference`, as it is kept here.
fn kept(reference: &Reference, wanted: Option<&Descriptor>) -> Option<File> {
    wanted.filter(|_| !reference.is_near()).and_then(cache::blob)
}

/// Keeps a blob. One that cannot be kept comes once more.
fn keep(reference: &Reference, blob: &Descriptor, content: &mut dyn Read) {
    if !reference.is_near() {
        let _ = cache::keep(blob, content);
    }
}

/// What a snapshot says of itself.
///
/// # Errors
/// As [`Description::read`].
pub fn description(
    reference: &Reference,
    store: &dyn Store,
    manifest: &Manifest,
) -> Result<Description> {
    let blob = &manifest.config;
    // What is too large is refused, whether or not it is here.
    if let Some(file) = kept(reference, Some(blob).filter(|blob| blob.size <= MAX_CONFIG)) {
        let mut text = Vec::new();
        file.take(MAX_CONFIG)
            .read_to_end(&mut text)
            .context(|| "what a snapshot says of itself")?;
        return Description::parse(&text);
    }
    let text = store::whole(store, blob, MAX_CONFIG)?;
    let description = Description::parse(&text)?;
    keep(reference, blob, &mut text.as_slice());
    Ok(description)
}

/// The small layer of a snapshot.
///
/// # Errors
/// As [`unpack::fetch`].
pub fn layer(reference: &Reference, store: &dyn Store, manifest: &Manifest) -> Result<File> {
    let blob = manifest.layers.first();
    if let Some(file) = kept(reference, blob) {
        return Ok(file);
    }
    let mut packed = unpack::fetch(store, manifest, &places::state())?;
    if let Some(blob) = blob {
        packed.rewind().context(|| "the small layer")?;
        keep(reference, blob, &mut packed);
    }
    Ok(packed)
}
