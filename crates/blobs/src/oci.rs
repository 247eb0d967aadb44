//! The documents of the OCI image format, as far as snapshots use them.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{self, SHA256};
use serde::{Deserialize, Serialize};

use crate::error::{Context, Error, Result};

/// The media type of a manifest.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of a configuration.
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The media type of an index.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// The media type of a layer that is an archive in a Zstandard frame.
pub const TAR_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// The annotation of an index that names a manifest.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// What registries have to take of a manifest: none is longer.
pub const MAX_MANIFEST: u64 = 4 << 20;

/// What is known of a blob by those who refer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// `sha256:` and 64 digits.
    pub digest: String,
    /// Its length.
    pub size: u64,
    /// What else is said about it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// The manifest of an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// 2.
    pub schema_version: u32,
    /// [`MANIFEST`].
    #[serde(default)]
    pub media_type: String,
    /// The configuration.
    pub config: Descriptor,
    /// The layers, the lowest first.
    pub layers: Vec<Descriptor>,
    /// What is said about it.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

/// The index of a layout.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// 2.
    pub schema_version: u32,
    /// [`INDEX`].
    #[serde(default)]
    pub media_type: String,
    /// The manifests, which have their names as annotations.
    pub manifests: Vec<Descriptor>,
}

impl Default for Index {
    fn default() -> Self {
        Self { schema_version: 2, media_type: INDEX.to_owned(), manifests: Vec::new() }
    }
}

impl Index {
    /// The manifest of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Descriptor> {
        let named = |d: &&Descriptor| d.annotations.get(REF_NAME).is_some_and(|n| n == name);
        self.manifests.iter().find(named)
    }

    /// Has `name` be that of `manifest`, and of no other.
    pub fn set(&mut self, name: &str, mut manifest: Descriptor) {
        self.remove(name);
        manifest.annotations.insert(REF_NAME.to_owned(), name.to_owned());
        self.manifests.push(manifest);
    }

    /// Takes a name out; whether it was there.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.manifests.len();
        self.manifests.retain(|d| d.annotations.get(REF_NAME).is_none_or(|n| n != name));
        self.manifests.len() < before
    }
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// If it is none of an image, or of another kind.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let manifest: Self = serde_json::from_slice(bytes).context(|| "the manifest")?;
        if manifest.schema_version != 2 {
            return Err(Error::new(format!("a manifest of version {}", manifest.schema_version)));
        }
        let blobs = || manifest.layers.iter().chain([&manifest.config]);
        if let Some(wrong) = blobs().find(|blob| hex_of(&blob.digest).is_none()) {
            return Err(Error::new(format!("the manifest has the digest {:?}", wrong.digest)));
        }
        Ok(manifest)
    }

    /// All blobs that it needs.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        self.layers.iter().chain([&self.config])
    }
}

/// SHA-256 as it is written in documents.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    written(digest::digest(&SHA256, bytes).as_ref())
}

/// A digest as it is written in documents.
#[must_use]
pub fn written(sum: &[u8]) -> String {
    format!("sha256:{}", hex(sum))
}

/// Bytes in hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The digits of a digest, if it is one of SHA-256.
#[must_use]
pub fn hex_of(digest: &str) -> Option<&str> {
    digest.strip_prefix("sha256:").filter(|hex| is_hex(hex))
}

/// Whether these are the digits of a digest of SHA-256.
#[must_use]
pub(crate) fn is_hex(text: &str) -> bool {
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.len() == 64 && text.bytes().all(digit)
}

/// Fails unless `bytes` are those that `blob` is about.
///
/// # Errors
/// If they are others.
pub fn verify(blob: &Descriptor, bytes: &[u8]) -> Result<()> {
    match bytes.len() as u64 == blob.size {
        true => verify_sum(blob, digest::digest(&SHA256, bytes).as_ref()),
        false => Err(is_another(blob)),
    }
}

/// Fails unless `sum` is that of what `blob` is about.
pub(crate) fn verify_sum(blob: &Descriptor, sum: &[u8]) -> Result<()> {
    if written(sum) == blob.digest { Ok(()) } else { Err(is_another(blob)) }
}

fn is_another(blob: &Descriptor) -> Error {
    Error::new(format!("the content of {} is not what its digest says", blob.digest))
}

/// A time as RFC 3339 writes it.
#[must_use]
pub fn time(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Days since the first of March of the year 0, when each period of 400 years begins.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (year + era * 400, if month < 10 { month + 3 } else { month - 9 });
    let year = if month <= 2 { year + 1 } else { year };
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }
}
