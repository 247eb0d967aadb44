//! A stream as chunks: cut by its content ([`crate::cut`]), each stored under the digest of what is
//! in it. What two streams have in common is there once. The manifest is that of an OCI image, so
//! that whoever collects knows what is needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::error::{Context, Error, Result};
use crate::oci::{self, Descriptor, MANIFEST, MAX_MANIFEST, Manifest};
use crate::{Push, Store};

/// No object is longer: a chunk, and what sealing adds; or the description of a stream.
pub const MAX_OBJECT: u64 = 8 << 20;

/// Stores an object that is not there yet; `new` grows by its bytes if so.
///
/// # Errors
/// If the place does not take it.
pub fn keep(store: &dyn Store, kind: &str, bytes: &[u8], new: &mut u64) -> Result<Descriptor> {
    let size = bytes.len() as u64;
    let (media_type, digest) = (kind.to_owned(), oci::sha256(bytes));
    let blob = Descriptor { media_type, digest, size, annotations: BTreeMap::new() };
    if !store.has(&blob)? {
        let what = || "an object on its way";
        let file = memfd_create("torpor-object", MemfdFlags::CLOEXEC).context(what)?;
        let mut file = File::from(file);
        file.write_all(bytes).and_then(|()| file.seek(SeekFrom::Start(0))).context(what)?;
        store.put(&blob, &mut file)?;
        *new += size;
    }
    Ok(blob)
}

/// Gives the name of `store` a manifest of objects that are stored; returns it, and its digest.
///
/// # Errors
/// If there are too many objects, or the place does not take it.
pub fn publish(
    store: &dyn Store,
    push: &dyn Push,
    (config, layers): (Descriptor, Vec<Descriptor>),
    annotations: BTreeMap<String, String>,
) -> Result<(Manifest, String)> {
    let media_type = MANIFEST.to_owned();
    let manifest = Manifest { schema_version: 2, media_type, config, layers, annotations };
    let bytes = serde_json::to_vec(&manifest).context(|| "the manifest")?;
    if bytes.len() as u64 > MAX_MANIFEST {
        return Err(Error::new("the checkpoint is too large for the store"));
    }
    push.holds()?;
    store.publish(&bytes)?;
    Ok((manifest, oci::sha256(&bytes)))
}

/// A stream, read chunk by chunk; each is compared with its digest.
#[derive(Debug)]
pub struct Chunks<'a, F> {
    store: &'a dyn Store,
    layers: &'a [Descriptor],
    next: usize,
    reveal: F,
    open: Vec<u8>,
    at: usize,
}

impl<'a, F: FnMut(usize, Vec<u8>) -> Result<Vec<u8>>> Chunks<'a, F> {
    /// The stream of the chunks from number `next` on. `reveal` makes of a stored chunk, and its
    /// number, what it was.
    pub fn new(store: &'a dyn Store, layers: &'a [Descriptor], next: usize, reveal: F) -> Self {
        Self { store, layers, next, reveal, open: Vec::new(), at: 0 }
    }
}

impl<F: FnMut(usize, Vec<u8>) -> Result<Vec<u8>>> Read for Chunks<'_, F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.at == self.open.len() {
            let Some(layer) = self.layers.get(self.next) else { return Ok(0) };
            let stored = crate::whole(self.store, layer, MAX_OBJECT).map_err(io::Error::other)?;
            self.open = (self.reveal)(self.next, stored).map_err(io::Error::other)?;
            (self.at, self.next) = (0, self.next + 1);
        }
        let count = to.len().min(self.open.len() - self.at);
        to[..count].copy_from_slice(&self.open[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
