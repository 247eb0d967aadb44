//! What the agent decides.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};

use serde_json::Value;

use super::AgentArgs;
use super::keys::Keys;
use super::save::Saving;
use super::store::Store;
use crate::api::{Api, GROUP};
use crate::checkpoint::path;
use crate::error::{Error, Result};
use crate::message::{Answer, Ask, Container};
use crate::metrics::Counters;
use crate::pod::text;

/// How often an update is tried that others come in between of.
const ATTEMPTS: u32 = 5;
/// The counters of an agent.
const COUNTERS: [(&str, &str); 8] = [
    ("pods_saved_total", "Pods that were saved."),
    ("pods_not_saved_total", "Pods that could not be saved."),
    ("frozen_milliseconds_total", "How long pods were frozen to be saved."),
    ("saved_bytes_total", "Bytes of checkpoints that were made here."),
    ("lost_work_seconds_total", "Work of pods that had to go and could not be saved."),
    ("containers_restored_total", "Containers that continue from a checkpoint."),
    ("containers_cold_total", "Containers that started cold though there was a checkpoint."),
    ("fetch_milliseconds_total", "How long checkpoints took to come from other nodes."),
];

/// A node, as its agent sees it.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The API server.
    pub api: Api,
    /// Its checkpoints.
    pub store: Store,
    /// What saving and restoring has cost here.
    pub counters: Counters<8>,
    pub(super) keys: Keys,
    pub(super) kubelet: String,
    pub(super) address: String,
    pub(super) certificate: String,
    /// Pods that are being saved, or have been, by their uids.
    pub(super) saves: Mutex<HashMap<String, Saving>>,
    pub(super) saved: Condvar,
    /// Held while a checkpoint is fetched: the containers of a pod come one after the other.
    pub(super) fetch: Mutex<()>,
}

impl Node {
    /// A node with nothing going on.
    ///
    /// # Errors
    /// If there is no place for checkpoints.
    pub fn new(args: &AgentArgs, api: Api, certificate: String) -> Result<Self> {
        Ok(Self {
            name: args.node.clone(),
            api,
            store: Store::open(&args.state.join("checkpoints"))?,
            counters: Counters::new(COUNTERS),
            keys: Keys { controller: args.controller.trim_end_matches('/').to_owned() },
            kubelet: args.kubelet.trim_end_matches('/').to_owned(),
            address: args.listen.to_string(),
            certificate,
            saves: Mutex::default(),
            saved: Condvar::new(),
            fetch: Mutex::default(),
        })
    }

    /// Answers the wrapper.
    ///
    /// # Errors
    /// If the API server or another node does not answer.
    pub fn answer(&self, ask: &Ask) -> Result<Answer> {
        match ask {
            Ask::Create { container } => self.create(container),
            Ask::Created { container, restored, reason } => {
                self.created(container, *restored, reason)
            }
            Ask::Stop { container } => self.stop(container),
            Ask::Checkpoint { container } => Ok(self.checkpoint(container)),
            Ask::Saved { container, containers, error, frozen_ms } => {
                let result = self.saved(container, containers, error.as_deref(), *frozen_ms);
                self.ended(&container.uid);
                result
            }
        }
    }

    /// The pod of a container, as the API server knows it.
    pub(super) fn pod(&self, container: &Container) -> Result<Option<Value>> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", container.namespace, container.pod);
        let pod = self.api.get(&path)?;
        Ok(pod.filter(|pod| text(pod, "/metadata/uid") == container.uid))
    }

    /// Changes the status of a checkpoint, if `change` does not object to what it is by then.
    pub(super) fn change(
        &self,
        namespace: &str,
        name: &str,
        change: impl Fn(&mut Value) -> Result<()>,
    ) -> Result<Value> {
        let path = path(namespace, name);
        for attempt in 1.. {
            let Some(mut object) = self.api.get(&path)? else { break };
            change(&mut object)?;
            match self.api.replace(&format!("{path}/status"), &object) {
                Err(error) if error.is_conflict() && attempt < ATTEMPTS => {}
                result => return result,
            }
        }
        Err(Error::new(format!("the checkpoint {namespace}/{name} is gone")))
    }

    /// Removes checkpoints that have no object any more.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub fn sweep(&self) -> Result<()> {
        let here = self.store.all();
        if here.is_empty() {
            return Ok(());
        }
        let objects = self.api.list(&format!("{GROUP}/podcheckpoints"))?;
        let known = |namespace: &str, name: &str| {
            objects.iter().any(|object| {
                text(object, "/metadata/namespace") == namespace
                    && text(object, "/metadata/name") == name
            })
        };
        for (namespace, name) in here.iter().filter(|(namespace, name)| !known(namespace, name)) {
            self.store.remove(namespace, name)?;
        }
        Ok(())
    }
}
