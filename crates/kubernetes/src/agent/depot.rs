//! The store that the agents of all nodes share: a directory that all of them see, an object store, or
//! a registry. What lies there does not die with a node.
//!
//! A checkpoint has a name there that only its own object leads to: that of another namespace or cluster, or an
//! earlier one of the same name, is another one. Its digest stands in the status of the object.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};
use torpor_blobs::chunks::{self, keep};
use torpor_blobs::cut::Cutter;
use torpor_blobs::http::Login;
use torpor_blobs::oci::{Manifest, sha256};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as blobs, Store};

use super::parts::Parts;
use super::store::{pack, size};
use crate::api::Api;
use crate::error::{Context, Error, Result};
use crate::pod::text;

/// The media type of what says which checkpoint it is.
const CHECKPOINT: &str = "application/vnd.torpor.pod-checkpoint.v1+json";
/// The media type of a chunk of its files.
const CHUNK: &str = "application/vnd.torpor.pod-checkpoint.chunk.v1";
/// No checkpoint is larger, in bytes: the list of its chunks would be longer than registries have to take.
const LARGEST: u64 = 16 << 30;
/// What the names of checkpoints begin with: others may lie beside them.
const PREFIX: &str = "pod-checkpoint-";
/// The namespace that every cluster has: its uid tells clusters apart.
const EVERYWHERE: &str = "/api/v1/namespaces/kube-system";

/// The store, and what the names of this cluster's checkpoints in it begin with: those of another one are not its own to
/// remove.
#[derive(Debug)]
pub(super) struct Depot {
    place: Reference,
    prefix: String,
}

/// What has this name, for the first of `logins` that sees it, or else for whom this node is.
fn found(place: &Reference, logins: &[Login]) -> Result<(Box<dyn Store>, Vec<u8>)> {
    let what = || place.to_string();
    let mut tried = logins.iter().map(Some).chain([None]).peekable();
    loop {
        let store = blobs::open_as(place, tried.next().flatten()).context(what)?;
        match store.manifest() {
            Ok(Some(bytes)) => return Ok((store, bytes)),
            // A registry may say that there is nothing to whom must not see it.
            _ if tried.peek().is_some() => {}
            Ok(None) => return Err(Error::new(format!("{place} is not there"))),
            Err(error) => return Err(error).context(what),
        }
    }
}

impl Depot {
    /// The store that `dir:PATH`, `s3://BUCKET/PREFIX` or `HOST/NAME` names, as the cluster of `api` has it.
    ///
    /// # Errors
    /// If it names none, or the API server does not say which cluster this is.
    pub(super) fn at(place: &str, api: &Api) -> Result<Self> {
        let place = place.parse().context(|| format!("--store {place}"))?;
        let everywhere = api.get(EVERYWHERE)?.unwrap_or_default();
        let cluster = text(&everywhere, "/metadata/uid");
        if cluster.is_empty() {
            let which = "which tells one cluster from another in a store";
            return Err(Error::new(format!("the API server has no uid of {EVERYWHERE}, {which}")));
        }
        let digest = sha256(cluster.as_bytes());
        Ok(Self { place, prefix: format!("{PREFIX}{}-", &digest[7..23]) })
    }

    /// The name of a checkpoint in the store.
    #[must_use]
    pub(super) fn name_of(&self, object: &Value) -> String {
        let parts = ["namespace", "name", "uid"].map(|part| &object["metadata"][part]);
        let digest = sha256(json!(parts).to_string().as_bytes());
        format!("{}{}", self.prefix, &digest[7..])
    }

    fn named(&self, name: &str) -> Result<Box<dyn Store>> {
        blobs::open(&self.place.beside(name)).context(|| self.place.to_string())
    }

    /// Stores the files in `dir` of a checkpoint; returns where they are, for its status.
    ///
    /// # Errors
    /// If the checkpoint is not sealed, or the store does not take it.
    pub(super) fn put(&self, object: &Value, dir: &Path) -> Result<Value> {
        if text(object, "/status/wrappedKey").is_empty() {
            return Err(Error::new("a checkpoint that is not sealed does not leave its node"));
        }
        if size(dir) > LARGEST {
            return Err(Error::new(format!("more than {LARGEST} bytes cannot be stored")));
        }
        let place = self.place.beside(&self.name_of(object));
        let what = || place.to_string();
        let store = blobs::open(&place).context(what)?;
        let push = store.begin().context(what)?;
        let (mut layers, mut new) = (Vec::new(), 0);
        let mut cutter = Cutter::new(|chunk: &[u8]| {
            layers.push(keep(&*store, CHUNK, chunk, &mut new).map_err(io::Error::other)?);
            Ok(())
        });
        pack(dir, 0, &mut cutter as &mut dyn Write).and_then(|()| cutter.finish()).context(what)?;
        let metadata = &object["metadata"];
        let said = json!({ "namespace": metadata["namespace"], "name": metadata["name"] });
        let config = keep(&*store, CHECKPOINT, said.to_string().as_bytes(), &mut new);
        let parts = (config.context(what)?, layers);
        let (_, digest) = chunks::publish(&*store, &*push, parts, BTreeMap::new()).context(what)?;
        Ok(json!({ "reference": place.to_string(), "digest": digest }))
    }

    /// Whether it wants to know who calls, as registries do.
    #[must_use]
    pub(super) fn knows_logins(&self) -> bool {
        matches!(self.place, Reference::Registry { .. })
    }

    /// The files of a checkpoint, as one stream: as the first of `logins` sees it that the store lets, or else as this node does.
    ///
    /// # Errors
    /// If they are not in this store, or are others than its status says.
    pub(super) fn parts(&self, object: &Value, logins: &[Login]) -> Result<Parts> {
        let location = &object["status"]["checkpointLocation"]["ociImage"];
        let place = self.place.beside(&self.name_of(object));
        let what = || place.to_string();
        // Nothing is read elsewhere with what this node may read.
        if text(location, "/reference") != place.to_string() {
            return Err(Error::new(format!("the checkpoint is not stored as {place}")));
        }
        let (store, bytes) = found(&place, logins)?;
        if sha256(&bytes) != text(location, "/digest") {
            return Err(Error::new(format!("{place} is not what its checkpoint says")));
        }
        let manifest = Manifest::parse(&bytes).context(what)?;
        Ok(Parts::new(store, manifest.layers, place.to_string()))
    }

    /// The names of all checkpoints of this cluster there.
    ///
    /// # Errors
    /// If the store does not answer.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let what = || self.place.to_string();
        let all = blobs::open(&self.place).and_then(|store| store.names()).context(what)?;
        Ok(all.into_iter().filter(|name| name.starts_with(&self.prefix)).collect())
    }

    /// Takes a checkpoint away; whether it was there.
    ///
    /// # Errors
    /// If the store does not allow it.
    pub(super) fn remove(&self, name: &str) -> Result<bool> {
        self.named(name)?.remove().context(|| format!("remove {name} from {}", self.place))
    }

    /// Removes what no checkpoint needs any more. Registries do that by themselves.
    ///
    /// # Errors
    /// If the store does not allow it, or somebody stores something.
    pub(super) fn collect(&self) -> Result<()> {
        if matches!(self.place, Reference::Registry { .. }) {
            return Ok(());
        }
        let done = blobs::open(&self.place).and_then(|store| store.collect());
        done.map(drop).context(|| format!("collect in {}", self.place))
    }
}
