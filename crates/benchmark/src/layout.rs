//! An image that is not made here: a directory in the OCI image layout, as `skopeo copy docker://… oci:DIR` writes it.
//! The registry of the run serves it, so that what is pulled is the same everywhere, and no other registry is asked.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::image::{ImageError, PULLED, TAG, architecture, at, blob, tag};
use crate::registry::is_digest;

/// The largest index or manifest that is read; registries take no larger ones.
const LARGEST: u64 = 4 << 20;
/// How deep indexes may lie in each other.
const DEPTH: usize = 4;

/// What refers to a blob.
#[derive(Debug, Deserialize)]
struct BlobRef {
    digest: String,
    size: u64,
    platform: Option<BlobPlatform>,
}

/// What an image is for.
#[derive(Debug, Deserialize)]
struct BlobPlatform {
    os: String,
    architecture: String,
}

/// An index, which has manifests, or a manifest, which has a configuration and layers.
#[derive(Debug, Deserialize)]
struct ImageDocument {
    #[serde(default)]
    manifests: Vec<BlobRef>,
    config: Option<BlobRef>,
    #[serde(default)]
    layers: Vec<BlobRef>,
}

impl BlobRef {
    /// Whether it is for this machine, or does not say what for.
    fn is_for_here(&self) -> bool {
        let here = |on: &BlobPlatform| on.os == "linux" && on.architecture == architecture();
        self.platform.as_ref().is_none_or(here)
    }

    /// Its file, which has as many bytes as it says.
    fn file(&self, layout: &Path) -> Result<PathBuf, ImageError> {
        let wrong = |text: String| ImageError::Layout(layout.to_owned(), text);
        let digest = Some(&self.digest).filter(|digest| is_digest(digest));
        let hex = digest.and_then(|digest| digest.strip_prefix("sha256:"));
        let hex = hex.ok_or_else(|| wrong(format!("`{}` is no SHA-256 digest", self.digest)))?;
        let path = layout.join("blobs/sha256").join(hex);
        match fs::metadata(&path).map_err(at(&path))?.len() {
            size if size == self.size => Ok(path),
            size => Err(wrong(format!("{} has {size} of {} bytes", self.digest, self.size))),
        }
    }
}

/// The blobs of the one image of a layout that is for this machine, its manifest first.
fn blobs(layout: &Path) -> Result<Vec<BlobRef>, ImageError> {
    let wrong = |text: String| ImageError::Layout(layout.to_owned(), text);
    let mut document = read(layout, &layout.join("index.json"))?;
    for _ in 0..DEPTH {
        document.manifests.retain(BlobRef::is_for_here);
        let count = document.manifests.len();
        let (Some(manifest), 1) = (document.manifests.pop(), count) else {
            return Err(wrong(format!(
                "it holds {count} images for linux/{}, and must hold one",
                architecture()
            )));
        };
        document = read(layout, &manifest.file(layout)?)?;
        if let Some(config) = document.config {
            let all = [manifest, config].into_iter().chain(document.layers);
            return Ok(all.collect());
        }
    }
    Err(wrong("its indexes lie in each other".into()))
}

fn read(layout: &Path, path: &Path) -> Result<ImageDocument, ImageError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(at(path))?;
    file.take(LARGEST).read_to_end(&mut bytes).map_err(at(path))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        ImageError::Layout(layout.to_owned(), format!("{}: {error}", path.display()))
    })
}

/// Whether a directory holds one image for this machine, with all of its blobs.
///
/// # Errors
/// If a file is missing, cannot be read, or has another size than is said of it; if there is no image, or several.
pub(crate) fn check(layout: &Path) -> Result<(), ImageError> {
    blobs(layout)?.iter().try_for_each(|one| one.file(layout).map(drop))
}

/// Puts the image of a directory into `store`, the directory of a registry, as the one that is pulled; returns what it is.
///
/// # Errors
/// As [`check`], and if the store cannot be written.
pub(crate) fn put(layout: &Path, store: &Path) -> Result<String, ImageError> {
    let blobs = blobs(layout)?;
    for one in &blobs {
        let (from, to) = (one.file(layout)?, blob(store, &one.digest));
        let from = from.canonicalize().map_err(at(&from))?;
        // Layers may be the same.
        if !to.exists() {
            fs::hard_link(&from, &to)
                .or_else(|_| fs::copy(&from, &to).map(drop))
                .map_err(at(&from))?;
        }
    }
    let path = tag(store, PULLED, TAG);
    fs::write(&path, &blobs[0].digest).map_err(at(&path))?;
    let bytes: u64 = blobs.iter().map(|one| one.size).sum();
    Ok(format!("{}, {bytes} bytes", blobs[0].digest))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::digest::of_bytes;

    /// Writes a blob into a layout; what refers to it.
    fn written(layout: &Path, content: &[u8]) -> Value {
        let digest = of_bytes(content);
        let dir = layout.join("blobs/sha256");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(digest.strip_prefix("sha256:").unwrap()), content).unwrap();
        json!({ "digest": digest, "size": content.len() })
    }

    fn on(mut one: Value, architecture: &str) -> Value {
        one["platform"] = json!({ "os": "linux", "architecture": architecture });
        one
    }

    /// An image with such a layer.
    fn image(layout: &Path, layer: &[u8]) -> Value {
        let (config, layer) = (written(layout, b"{}"), written(layout, layer));
        let manifest = json!({ "config": config, "layers": [layer, layer] });
        written(layout, manifest.to_string().as_bytes())
    }

    fn index(layout: &Path, manifests: &[Value]) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests });
        fs::write(layout.join("index.json"), index.to_string()).unwrap();
    }

    fn said(layout: &Path) -> String {
        check(layout).unwrap_err().to_string()
    }

    #[test]
    fn the_image_for_this_machine_is_served() {
        let (layout, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(store.path().join("blobs")).unwrap();
        let ours = image(layout.path(), b"ours");
        let theirs = image(layout.path(), b"theirs");
        // As images for several machines are saved: an index in the index.
        let all = json!({ "manifests": [on(theirs, "other"), on(ours.clone(), architecture())] });
        let all = written(layout.path(), all.to_string().as_bytes());
        index(layout.path(), &[all]);
        check(layout.path()).unwrap();
        let told = put(layout.path(), store.path()).unwrap();
        let digest = ours["digest"].as_str().unwrap();
        assert!(told.starts_with(&format!("{digest}, ")), "{told}");
        assert_eq!(fs::read_to_string(tag(store.path(), PULLED, TAG)).unwrap(), digest);
        let blobs = fs::read_dir(store.path().join("blobs")).unwrap().count();
        assert_eq!(blobs, 3, "a manifest, a configuration and a layer");
        assert_eq!(fs::read(blob(store.path(), &of_bytes(b"ours"))).unwrap(), b"ours");
    }

    #[test]
    fn what_is_no_single_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path();
        assert!(said(layout).contains("index.json"));
        let one = image(layout, b"one");
        index(layout, &[on(one.clone(), "other")]);
        assert!(said(layout).contains("it holds 0 images for linux/"), "{}", said(layout));
        index(layout, &[one.clone(), image(layout, b"two")]);
        assert!(said(layout).contains("it holds 2 images"), "{}", said(layout));
        index(layout, &[json!({ "digest": "sha256:../../../etc/passwd", "size": 1 })]);
        assert!(said(layout).contains("is no SHA-256 digest"), "{}", said(layout));
        let mut short = one.clone();
        short["size"] = json!(1);
        index(layout, &[short]);
        assert!(said(layout).contains("of 1 bytes"), "{}", said(layout));
        index(layout, &[one]);
        let layer = of_bytes(b"one");
        fs::remove_file(layout.join("blobs/sha256").join(layer.strip_prefix("sha256:").unwrap()))
            .unwrap();
        assert!(said(layout).contains("No such file"), "{}", said(layout));
    }
}
