//! Checkpoints in an object store, or in a directory that several machines see.
//!
//! A checkpoint is what is handed over to another machine: the job, and its files as one stream
//! ([`Bundle`]). The stream is stored as [`chunks`]: what two jobs, or two checkpoints of one, have
//! in common is there once.

mod sealed;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::PathBuf;

use torpor_blobs::chunks::{self, Chunks, MAX_OBJECT, keep};
use torpor_blobs::cut::Cutter;
use torpor_blobs::error::{Context, Error, Result};
use torpor_blobs::oci::Manifest;
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as blobs, Store};

use crate::bundle::Bundle;
use sealed::Seal;
pub(crate) use sealed::try_keys;

/// The media type of what says which job it is.
const JOB: &str = "application/vnd.torpor.queue.job.v1+json";
/// The media type of a chunk.
const CHUNK: &str = "application/vnd.torpor.queue.chunk.v1";
/// The media type of the wrapped key of a checkpoint.
const SEAL: &str = "application/vnd.torpor.queue.seal.v1";
/// The annotation that names the class of the job.
const CLASS: &str = "torpor.queue.class";

/// A place for checkpoints.
#[derive(Debug, Clone)]
pub(crate) struct Objects(Reference);

/// What is stored of one checkpoint: the digests of its objects, and their bytes.
pub(crate) type Pieces = BTreeMap<String, u64>;

/// What is to be stored.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The class of the job.
    pub class: &'a str,
    /// Whom it is sealed for.
    pub recipient: Option<&'a str>,
    /// The job.
    pub job: &'a [u8],
    /// Its files.
    pub files: &'a Bundle,
}

impl Objects {
    /// The place that `dir:PATH` or `s3://BUCKET/PREFIX` names.
    ///
    /// # Errors
    /// If the text is neither `dir:PATH` nor `s3://BUCKET/PREFIX`.
    pub(crate) fn at(place: &str) -> Result<Self, String> {
        if !place.starts_with("dir:") && !place.starts_with("s3://") {
            return Err(format!("{place}: checkpoints lie in dir:PATH or s3://BUCKET/PREFIX"));
        }
        place.parse().map(Self)
    }

    fn named(&self, name: &str) -> Result<Box<dyn Store>> {
        blobs::open(&self.0.beside(name))
    }

    /// Stores a checkpoint under a name, in place of what has it; returns its objects, and how
    /// many bytes were not there before.
    ///
    /// # Errors
    /// If the place does not take it, or the files have changed meanwhile.
    pub(crate) fn put(&self, name: &str, parts: &Parts<'_>) -> Result<(Pieces, u64)> {
        let store = self.named(name)?;
        let push = store.begin()?;
        let (seal, wrapped) = Seal::create(parts.recipient)?;
        let mut new = 0;
        let mut layers = Vec::new();
        if let Some(wrapped) = wrapped {
            layers.push(keep(&*store, SEAL, &wrapped, &mut new)?);
        }
        let mut cutter = Cutter::new(|chunk: &[u8]| {
            let stored = seal.close(&chunk_name(layers.len()), chunk).map_err(io::Error::other)?;
            layers.push(keep(&*store, CHUNK, &stored, &mut new).map_err(io::Error::other)?);
            Ok(())
        });
        let written = parts.files.write(&mut cutter).and_then(|()| cutter.finish());
        written.context(|| "store the files of the job")?;
        let config = keep(&*store, JOB, &seal.close("job", parts.job)?, &mut new)?;
        let annotations = BTreeMap::from([(CLASS.to_owned(), parts.class.to_owned())]);
        let (manifest, _) = chunks::publish(&*store, &*push, (config, layers), annotations)?;
        Ok((pieces(&manifest), new))
    }

    /// Reads a checkpoint: `job` gets the description of the job, `files` the stream of its files.
    /// `identity` says which key a class has.
    ///
    /// # Errors
    /// If it is not there, or is not what its digests say.
    pub(crate) fn get<T>(
        &self,
        name: &str,
        identity: impl FnOnce(&str) -> Option<PathBuf>,
        take: impl FnOnce(&[u8], &mut dyn Read) -> io::Result<T>,
    ) -> Result<(T, Pieces)> {
        let store = self.named(name)?;
        let bytes = store.manifest()?.ok_or_else(|| Error::new(format!("{name} is not stored")))?;
        let manifest = Manifest::parse(&bytes)?;
        let class = manifest.annotations.get(CLASS).map_or("", String::as_str);
        let first = manifest.layers.first().filter(|layer| layer.media_type == SEAL);
        let seal = match first {
            None => Seal::default(),
            Some(wrapped) => {
                let identity = identity(class);
                Seal::open(&blobs::whole(&*store, wrapped, MAX_OBJECT)?, identity.as_deref())?
            }
        };
        let job = seal.reveal("job", blobs::whole(&*store, &manifest.config, MAX_OBJECT)?)?;
        let next = usize::from(first.is_some());
        let mut files = Chunks::new(&*store, &manifest.layers, next, |number, stored| {
            seal.reveal(&chunk_name(number), stored)
        });
        let taken = take(&job, &mut files).context(|| format!("take {name} in"))?;
        Ok((taken, pieces(&manifest)))
    }

    /// The names of all checkpoints there, with the classes of their jobs.
    ///
    /// # Errors
    /// If the place does not answer.
    pub(crate) fn names(&self) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for name in blobs::open(&self.0)?.names()? {
            // What is no checkpoint belongs to others; one may be removed meanwhile.
            let Some(bytes) = self.named(&name)?.manifest()? else { continue };
            let class =
                Manifest::parse(&bytes).ok().and_then(|m| m.annotations.get(CLASS).cloned());
            found.extend(class.map(|class| (name, class)));
        }
        Ok(found)
    }

    /// The names that have a sign.
    ///
    /// # Errors
    /// If the place does not answer.
    pub(crate) fn signs(&self) -> Result<Vec<String>> {
        blobs::open(&self.0)?.signs()
    }

    /// The sign of a name: of a daemon, that it lives; of a checkpoint, that it was adopted.
    ///
    /// # Errors
    /// If the place does not answer.
    pub(crate) fn sign(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.named(name)?.sign()
    }

    /// Gives a name a sign, or takes it away.
    ///
    /// # Errors
    /// If the place does not allow it.
    pub(crate) fn set_sign(&self, name: &str, sign: Option<&[u8]>) -> Result<()> {
        self.named(name)?.set_sign(sign)
    }

    /// Takes a name away; whether it was there.
    ///
    /// # Errors
    /// If the place does not allow it.
    pub(crate) fn remove(&self, name: &str) -> Result<bool> {
        self.named(name)?.remove()
    }

    /// Removes what no checkpoint needs any more.
    ///
    /// # Errors
    /// If the place does not allow it, or somebody stores something.
    pub(crate) fn collect(&self) -> Result<u64> {
        blobs::open(&self.0)?.collect()
    }
}

fn chunk_name(number: usize) -> String {
    format!("chunk-{number}")
}

fn pieces(manifest: &Manifest) -> Pieces {
    manifest.blobs().map(|blob| (blob.digest.clone(), blob.size)).collect()
}
