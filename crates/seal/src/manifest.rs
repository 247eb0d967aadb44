//! `manifest.img`: the files of a checkpoint, as a whole.
//!
//! It is a sealed file with one message: the manifest, and the signature over it. Each
//! file of the checkpoint is named with its length and the SHA-256 of what is stored.
//! A pages file has no digest: its tags file is the root of its authenticity, and that
//! has one.

use std::collections::BTreeMap;
use std::io::{self, Read};

use aws_lc_rs::digest;
use prost::Message;

use crate::error::{Error, Result};
use crate::header::{CheckpointId, Header, Parent};

/// The name of the file.
pub const FILE_NAME: &str = "manifest.img";
/// The largest manifest, in bytes: some hundred thousand files.
pub const MAX_LEN: u64 = 64 << 20;

/// What a file of a sealed checkpoint is, as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    /// Its length in bytes.
    pub len: u64,
    /// SHA-256 of its bytes; none for pages files, see the module.
    pub sha256: Option<[u8; 32]>,
}

impl Sum {
    /// Reads all of `source`.
    ///
    /// # Errors
    /// Those of `source`.
    pub fn of(mut source: impl Read) -> io::Result<Self> {
        let mut summing = Summing::default();
        // Most files are small.
        let mut buffer = [0; 16 << 10];
        loop {
            match source.read(&mut buffer) {
                Ok(0) => return Ok(summing.finish()),
                Ok(count) => summing.add(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Takes a sum of bytes as they come.
pub struct Summing {
    len: u64,
    context: digest::Context,
}

impl std::fmt::Debug for Summing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Summing").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Default for Summing {
    fn default() -> Self {
        Self { len: 0, context: digest::Context::new(&digest::SHA256) }
    }
}

impl Summing {
    /// Adds what follows.
    pub fn add(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.len += bytes.len() as u64;
    }

    /// The sum of all that was added.
    #[must_use]
    pub fn finish(self) -> Sum {
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(self.context.finish().as_ref());
        Sum { len: self.len, sha256: Some(sha256) }
    }
}

/// The files of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The checkpoint's identity.
    pub id: CheckpointId,
    /// The suite, so that a signature covers it.
    pub suite: String,
    /// What it builds on.
    pub parent: Option<Parent>,
    /// Every file but `seal.img`, `manifest.img` and statistics.
    pub files: BTreeMap<String, Sum>,
}

#[derive(Clone, PartialEq, Message)]
struct FileEntry {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint64, tag = "2")]
    len: u64,
    #[prost(bytes = "vec", optional, tag = "3")]
    sha256: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct ManifestBody {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(string, tag = "2")]
    suite: String,
    #[prost(bytes = "vec", optional, tag = "3")]
    parent_id: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "4")]
    parent_manifest: Option<Vec<u8>>,
    #[prost(message, repeated, tag = "5")]
    files: Vec<FileEntry>,
}

/// A manifest as it stands in its file: the bytes that are signed, and the signature.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Signed {
    /// The encoded manifest.
    #[prost(bytes = "vec", tag = "1")]
    pub manifest: Vec<u8>,
    /// The encoded signature over it; none if nobody signed.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub signature: Option<Vec<u8>>,
}

impl Manifest {
    /// A manifest of no files of the checkpoint with `header`.
    #[must_use]
    pub fn new(header: &Header) -> Self {
        let (id, suite, parent) = (header.id, header.suite.to_string(), header.parent);
        Self { id, suite, parent, files: BTreeMap::new() }
    }

    /// The bytes that are signed.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let entry = |(name, sum): (&String, &Sum)| FileEntry {
            name: name.clone(),
            len: sum.len,
            sha256: sum.sha256.map(Vec::from),
        };
        ManifestBody {
            id: self.id.to_vec(),
            suite: self.suite.clone(),
            parent_id: self.parent.map(|p| p.id.to_vec()),
            parent_manifest: self.parent.map(|p| p.manifest.to_vec()),
            files: self.files.iter().map(entry).collect(),
        }
        .encode_to_vec()
    }

    /// Reads what [`Manifest::encode`] wrote, which must belong to `header`.
    ///
    /// # Errors
    /// If it is no manifest, or that of another checkpoint.
    pub fn decode(bytes: &[u8], header: &Header) -> Result<Self> {
        let body = ManifestBody::decode(bytes)
            .map_err(|error| damaged(format!("holds no manifest: {error}")))?;
        let mut manifest = Self::new(header);
        let parent = header.parent;
        let same = body.id == header.id
            && body.suite == manifest.suite
            && body.parent_id == parent.map(|p| p.id.to_vec())
            && body.parent_manifest == parent.map(|p| p.manifest.to_vec());
        if !same {
            return Err(damaged("is that of another checkpoint"));
        }
        for file in body.files {
            let sha256 = file.sha256.map(<[u8; 32]>::try_from).transpose();
            let sha256 = sha256.map_err(|_| damaged("holds a digest of a wrong length"))?;
            if manifest.files.insert(file.name, Sum { len: file.len, sha256 }).is_some() {
                return Err(damaged("names a file twice"));
            }
        }
        Ok(manifest)
    }

    /// Compares the names of what is there with those that must be.
    ///
    /// # Errors
    /// The first file that is missing, or there without having been in the checkpoint.
    pub fn check_names<'n>(&self, there: impl IntoIterator<Item = &'n str>) -> Result<()> {
        let there: std::collections::BTreeSet<&str> = there.into_iter().collect();
        if let Some(name) = self.files.keys().find(|name| !there.contains(name.as_str())) {
            return Err(Error::damaged(name, "is missing from the sealed checkpoint"));
        }
        match there.iter().find(|name| !self.files.contains_key(**name)) {
            Some(name) => Err(Error::damaged(*name, "is no part of the sealed checkpoint")),
            None => Ok(()),
        }
    }

    /// Compares one file with what it must be.
    ///
    /// # Errors
    /// If it differs.
    pub fn check(&self, name: &str, found: &Sum) -> Result<()> {
        match self.files.get(name) {
            None => Err(Error::damaged(name, "is no part of the sealed checkpoint")),
            Some(sum) if sum.len != found.len => {
                let reason = format!("has {} bytes, {} were sealed", found.len, sum.len);
                Err(Error::damaged(name, reason))
            }
            Some(sum) if sum.sha256 != found.sha256 => {
                Err(Error::damaged(name, "was changed or exchanged since it was sealed"))
            }
            Some(_) => Ok(()),
        }
    }
}

fn damaged(reason: impl Into<String>) -> Error {
    Error::damaged(FILE_NAME, reason)
}
