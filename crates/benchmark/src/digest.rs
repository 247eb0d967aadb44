//! SHA-256 sums, written the way that images and lock files write them.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use aws_lc_rs::digest::{Context, SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// A sum in the making.
pub(crate) struct Digest(Context);

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Digest")
    }
}

impl Default for Digest {
    fn default() -> Self {
        Self::new()
    }
}

impl Digest {
    /// The sum of nothing yet.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self(Context::new(&SHA256))
    }

    /// Adds bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum as `sha256:` and hexadecimal digits.
    #[must_use]
    pub(crate) fn finish(self) -> String {
        let mut text = String::from("sha256:");
        for byte in self.0.finish().as_ref() {
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

/// The sum of some bytes.
#[must_use]
pub(crate) fn of_bytes(bytes: &[u8]) -> String {
    let mut digest = Digest::new();
    digest.update(bytes);
    digest.finish()
}

/// The sum of a script, as the policy of a page names it.
#[must_use]
pub(crate) fn of_script(text: &str) -> String {
    format!("sha256-{}", STANDARD.encode(digest(&SHA256, text.as_bytes())))
}

/// The sum of a file.
///
/// # Errors
/// If the file is not there or cannot be read.
pub(crate) fn of_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut digest = Digest::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(digest.finish()),
            n => digest.update(&buffer[..n]),
        }
    }
}
