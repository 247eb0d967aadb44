//! Blobs, known by what is in them: in a directory, in a registry, in an object store.
//!
//! A place has what belongs together under names: a manifest of the OCI image format, and the
//! blobs that it lists. A blob that several manifests list is stored once, and is collected when
//! none does any more.

#![warn(unreachable_pub)]

#[cfg(test)]
mod answers;
pub mod chunks;
pub mod cut;
mod date;
pub mod dir;
pub mod error;
pub mod http;
pub mod interrupt;
pub mod oci;
pub mod reference;
pub mod registry;
pub mod s3;
pub mod traffic;
mod turns;

use std::collections::HashSet;
use std::fmt::Debug;
use std::fs::File;
use std::io::Write;
use std::ops::Range;

use aws_lc_rs::digest::{self, SHA256};

use crate::error::{Error, Result};
use crate::http::Login;
use crate::oci::{Descriptor, MAX_MANIFEST, Manifest, hex_of, verify};
use crate::reference::Reference;

/// A place that has snapshots under names.
pub trait Store: Debug + Send + Sync {
    /// The manifest of the snapshot, if there is one, as it is stored.
    ///
    /// # Errors
    /// If the place does not answer.
    fn manifest(&self) -> Result<Option<Vec<u8>>>;

    /// Reads a part of a blob.
    ///
    /// # Errors
    /// If the place does not have the blob, or has less of it.
    fn read(&self, blob: &Descriptor, range: Range<u64>) -> Result<Vec<u8>>;

    /// Has a blob stay readable by this value, whoever removes it from the place. Where that is far nothing is asked,
    /// and nothing held: it would cost a request.
    ///
    /// # Errors
    /// If it is known already that the blob is not there, or shorter.
    fn hold(&self, _blob: &Descriptor) -> Result<()> {
        Ok(())
    }

    /// Whether the place has a blob.
    ///
    /// # Errors
    /// If the place does not answer.
    fn has(&self, blob: &Descriptor) -> Result<bool>;

    /// Nothing is collected as long as the value is there, that is until what is stored has its
    /// manifest. Waits for those who collect.
    ///
    /// # Errors
    /// If the place does not answer, or does not allow it.
    fn begin(&self) -> Result<Box<dyn Push + '_>>;

    /// Stores a blob.
    ///
    /// # Errors
    /// If the store does not answer, refuses it, or is full; if `content` is not what `blob` says.
    fn put(&self, blob: &Descriptor, content: &mut File) -> Result<()>;

    /// Gives the snapshot its manifest, all blobs of which are stored.
    ///
    /// # Errors
    /// If the store does not answer, refuses it, or is full.
    fn publish(&self, manifest: &[u8]) -> Result<()>;

    /// The names of all snapshots there.
    ///
    /// # Errors
    /// If the place does not answer.
    fn names(&self) -> Result<Vec<String>>;

    /// The manifests that refer to the one with this digest, as far as the place lists such.
    ///
    /// # Errors
    /// If the place does not answer.
    fn referrers(&self, _digest: &str) -> Result<Vec<Descriptor>> {
        Ok(Vec::new())
    }

    /// The names that have a sign: a few words that anybody may change at any time, and that lie
    /// beside what is stored. Collecting leaves them alone.
    ///
    /// # Errors
    /// If the place does not answer, or keeps no signs.
    fn signs(&self) -> Result<Vec<String>> {
        Err(no_signs())
    }

    /// The sign of this name, if it has one.
    ///
    /// # Errors
    /// If the place does not answer, or keeps no signs.
    fn sign(&self) -> Result<Option<Vec<u8>>> {
        Err(no_signs())
    }

    /// Gives this name a sign, or takes it away.
    ///
    /// # Errors
    /// If the place does not allow it, or keeps no signs.
    fn set_sign(&self, _sign: Option<&[u8]>) -> Result<()> {
        Err(no_signs())
    }

    /// Takes the name of the snapshot away; whether it had it.
    ///
    /// # Errors
    /// If the place does not allow it.
    fn remove(&self) -> Result<bool>;

    /// Removes blobs that no snapshot needs; how many bytes that was. Never what somebody is about
    /// to need ([`Store::begin`]).
    ///
    /// # Errors
    /// If the place does not allow it; if it cannot wait for those who store something.
    fn collect(&self) -> Result<u64>;
}

/// The longest sign.
const MAX_SIGN: u64 = 4 << 10;

fn no_signs() -> Error {
    Error::new("this place keeps no signs; a directory and an object store do")
}

/// Something is being stored, until the value is dropped.
pub trait Push: Debug {
    /// Whether nothing has been collected so far. Asked right before a manifest is published.
    ///
    /// # Errors
    /// If it lasted so long that others believe it has failed; if the place does not answer.
    fn holds(&self) -> Result<()>;
}

/// Where nobody collects.
#[derive(Debug)]
pub struct Alone;

impl Push for Alone {
    fn holds(&self) -> Result<()> {
        Ok(())
    }
}

/// Opens the place of a snapshot.
///
/// # Errors
/// None of the places of today fails here: it is asked when it is used.
pub fn open(reference: &Reference) -> Result<Box<dyn Store>> {
    open_as(reference, None)
}

/// The same, a registry as `login` if there is one. Other places have no such logins.
///
/// # Errors
/// As [`open`].
pub fn open_as(reference: &Reference, login: Option<&Login>) -> Result<Box<dyn Store>> {
    Ok(match reference {
        Reference::Dir { path, name } => Box::new(dir::Dir::new(path, name)),
        Reference::Registry { host, repository, tag } => {
            Box::new(registry::Registry::new(host, repository, tag, login))
        }
        Reference::S3 { bucket, prefix, name } => Box::new(s3::S3::new(bucket, prefix, name)),
    })
}

/// The text of the manifest of a snapshot that has to be there.
///
/// # Errors
/// If there is none; if the place does not answer.
pub fn found(store: &dyn Store, reference: &Reference) -> Result<Vec<u8>> {
    store.manifest()?.ok_or_else(|| {
        let text = format!("there is no such snapshot: {reference}");
        Error::new(text).hint("torpor snapshot list names those that a place has")
    })
}

/// The manifest of a snapshot that has to be there.
///
/// # Errors
/// If it is not, or is none.
pub fn manifest(store: &dyn Store) -> Result<Manifest> {
    let bytes = store.manifest()?.ok_or_else(|| Error::new("there is no such snapshot"))?;
    Manifest::parse(&bytes)
}

/// All of a small blob, which is the one that it should be.
///
/// # Errors
/// If it is not, or is longer than `most`.
pub fn whole(store: &dyn Store, blob: &Descriptor, most: u64) -> Result<Vec<u8>> {
    if blob.size > most {
        let text = format!("{} has {} bytes, {most} are the most", blob.digest, blob.size);
        return Err(Error::new(text));
    }
    let bytes = store.read(blob, 0..blob.size)?;
    verify(blob, &bytes)?;
    Ok(bytes)
}

/// How much of a blob is read at once.
const PART: u64 = 8 << 20;

/// Writes all of a blob to `to`, a part at a time; fails in the end if it is not the one that it should be.
///
/// # Errors
/// If it is not, or cannot be written.
pub fn copy(store: &dyn Store, blob: &Descriptor, to: &mut dyn Write) -> Result<()> {
    let mut sum = digest::Context::new(&SHA256);
    let mut at = 0;
    while at < blob.size {
        let end = blob.size.min(at + PART);
        let part = store.read(blob, at..end)?;
        sum.update(&part);
        to.write_all(&part).map_err(|error| Error::new(error.to_string()))?;
        at = end;
    }
    oci::verify_sum(blob, sum.finish().as_ref())
}

/// What the names of the blobs end in that some manifests need, these themselves included.
///
/// # Errors
/// A manifest that cannot be read, or is none.
fn wanted(store: &dyn Store, manifests: &[Descriptor]) -> Result<HashSet<String>> {
    let mut wanted = HashSet::new();
    let mut want = |blob: &Descriptor| wanted.extend(hex_of(&blob.digest).map(str::to_owned));
    for entry in manifests {
        want(entry);
        let bytes = whole(store, entry, MAX_MANIFEST)?;
        Manifest::parse(&bytes)?.blobs().for_each(&mut want);
    }
    Ok(wanted)
}
