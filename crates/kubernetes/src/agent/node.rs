//! What the agent decides.

use std::collections::{HashMap, HashSet};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::AgentArgs;
use super::depot::Depot;
use super::fetch::{Coming, FETCH};
use super::identity::Identity;
use super::keys::KeySource;
use super::rounds::RoundsHere;
use super::save::{SavedPod, Saving};
use super::store::Store;
use super::upkeep::Upkeep;
use crate::api::Api;
use crate::checkpoint::path;
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::message::{Answer, Ask, Container};
use crate::metrics::Counters;
use crate::pod::text;

/// How many pods are saved at a time for each processor, of which there are two at least.
const AT_ONCE: usize = 2;
/// How often an update is tried that others come in between of.
const ATTEMPTS: u32 = 5;
/// The counters of an agent.
const COUNTERS: [(&str, &str); 11] = [
    ("pods_saved_total", "Pods that were saved."),
    ("pods_not_saved_total", "Pods that could not be saved."),
    ("frozen_milliseconds_total", "How long pods were frozen to be saved."),
    ("saved_bytes_total", "Bytes of checkpoints that were made here."),
    ("lost_work_seconds_total", "Work of pods that had to go and could not be saved."),
    ("containers_restored_total", "Containers that continue from a checkpoint."),
    ("containers_cold_total", "Containers that started cold though there was a checkpoint."),
    ("fetch_milliseconds_total", "How long checkpoints took to come here."),
    ("checkpoints_stored_total", "Checkpoints that were brought to the store."),
    ("checkpoints_not_stored_total", "Attempts to store a checkpoint that have failed."),
    ("checkpoints_from_store_total", "Checkpoints that came from the store."),
];

/// What comes of telling the controllers, for all who wait for that.
type Told = Arc<OnceLock<Result<()>>>;

/// A node, as its agent sees it.
#[derive(Debug)]
pub(super) struct Node {
    /// Its name.
    pub name: String,
    /// The API server.
    pub api: Api,
    /// Its checkpoints.
    pub store: Store,
    /// What saving and restoring has cost here.
    pub counters: Counters<11>,
    /// What it is to the programs on it.
    pub(super) machine: Machine,
    pub(super) keys: KeySource,
    /// The file with the token that is shown to other agents.
    pub(super) token: PathBuf,
    pub(super) kubelet: String,
    pub(super) address: String,
    /// What it shows to other agents.
    identity: Mutex<Arc<Identity>>,
    /// Whether the controllers have been told of it, so that the agents of other nodes believe it.
    is_introduced: AtomicBool,
    /// There while somebody tells them, which may take long if none answers: whoever comes meanwhile is told what comes
    /// of it. Of two that make a new certificate, one would be told and the other shown.
    pub(super) introducing: Mutex<Option<Told>>,
    /// The new certificate, until they have been told of it.
    renewed: Mutex<Option<Arc<Identity>>>,
    /// Pods that are being saved, or have been, by their uids.
    pub(super) saves: Mutex<HashMap<String, Saving>>,
    pub(super) saved: Condvar,
    /// How many pods that give way are saved at a time.
    pub(super) at_once: usize,
    /// The containers that are told to end, by the uids of their pods.
    pub(super) stopping: Mutex<HashMap<String, HashSet<String>>>,
    /// Checkpoints that are on their way here.
    pub(super) coming: Coming,
    /// What has come of those that are still being made.
    pub(super) rounds: RoundsHere,
    /// How long a container that is created waits for its checkpoint.
    pub(super) patience: Duration,
    /// Where checkpoints do not die with their node.
    pub(super) depot: Option<Depot>,
    pub(super) upkeep: Mutex<Upkeep>,
    /// Whether a checkpoint may say that memory of it comes here.
    pub(super) says_memory: AtomicBool,
    /// Rung when something was saved.
    pub(super) bell: Sender<()>,
    pub(super) rung: Mutex<Receiver<()>>,
}

fn locked<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// A node with nothing going on.
    ///
    /// # Errors
    /// If there is no place for checkpoints, or the store is none.
    pub(super) fn new(args: &AgentArgs, api: Api, identity: Identity) -> Result<Self> {
        let depot = (!args.store.is_empty()).then(|| Depot::at(&args.store, &api)).transpose()?;
        let (bell, rung) = channel();
        Ok(Self {
            name: args.node.clone(),
            api,
            store: Store::open(&args.state.join("checkpoints"))?,
            counters: Counters::new(COUNTERS),
            machine: Machine::this(),
            keys: KeySource {
                controller: args.controller.trim_end_matches('/').to_owned(),
                token: args.controllers_token_file.clone(),
            },
            token: args.agents_token_file.clone(),
            kubelet: args.kubelet.trim_end_matches('/').to_owned(),
            address: args.listen.to_string(),
            identity: Mutex::new(Arc::new(identity)),
            is_introduced: AtomicBool::new(false),
            introducing: Mutex::default(),
            renewed: Mutex::default(),
            saves: Mutex::default(),
            saved: Condvar::new(),
            at_once: thread::available_parallelism().map_or(1, NonZero::get).max(2) * AT_ONCE,
            stopping: Mutex::default(),
            coming: Coming::default(),
            rounds: RoundsHere::default(),
            patience: FETCH,
            depot,
            upkeep: Mutex::default(),
            // The agent before this one may have said so.
            says_memory: AtomicBool::new(true),
            bell,
            rung: Mutex::new(rung),
        })
    }

    /// What this agent shows to others.
    pub(super) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&locked(&self.identity))
    }

    /// Shows another certificate from now on.
    pub(super) fn show(&self, identity: impl Into<Arc<Identity>>) {
        *locked(&self.identity) = identity.into();
    }

    /// Tells the controllers what this node is, and which certificate its agent shows: a new one, if that is old, which
    /// is used and kept when they have been told. If somebody does so already, waits for what comes of it.
    ///
    /// # Errors
    /// If no controller answers, or it refuses; if a new certificate cannot be made or written.
    pub(super) fn introduce(&self) -> Result<()> {
        let told = Arc::clone(locked(&self.introducing).get_or_insert_with(Told::default));
        let result = told.get_or_init(|| {
            let result = self.tell();
            *locked(&self.introducing) = None;
            result
        });
        result.clone()
    }

    fn tell(&self) -> Result<()> {
        let used = self.identity();
        let shown = if used.is_old() { self.renewed(&used)? } else { used };
        self.keys.tell(&self.api, &self.machine, &shown.certificate)?;
        self.show(shown);
        self.is_introduced.store(true, Ordering::Relaxed);
        let renewed = locked(&self.renewed).take();
        renewed.map_or(Ok(()), |renewed| renewed.keep())
    }

    /// The certificate that takes the place of one that is old: the same, until the controllers have been told of it.
    fn renewed(&self, old: &Identity) -> Result<Arc<Identity>> {
        let mut renewed = locked(&self.renewed);
        if let Some(renewed) = &*renewed {
            return Ok(Arc::clone(renewed));
        }
        Ok(Arc::clone(renewed.insert(Arc::new(old.renewed()?))))
    }

    /// The same, if nobody has been told yet: without it no other agent hands anything out.
    ///
    /// # Errors
    /// As [`Node::introduce`].
    pub(super) fn be_introduced(&self) -> Result<()> {
        match self.is_introduced.load(Ordering::Relaxed) {
            true => Ok(()),
            false => self.introduce(),
        }
    }

    /// Answers the wrapper.
    ///
    /// # Errors
    /// If the API server or another node does not answer.
    pub(super) fn answer(self: &Arc<Self>, ask: &Ask) -> Result<Answer> {
        match ask {
            Ask::Create { container } => self.create(container),
            Ask::Begins { container, restored, reason } => {
                self.begins(container, *restored, reason)
            }
            Ask::Stop { container } => self.stop(container),
            Ask::Checkpoint { container } => Ok(self.checkpoint(container)),
            Ask::Saved { container, containers, error, frozen_ms, waits } => {
                let error = error.as_deref();
                let report = SavedPod { containers, error, frozen_ms: *frozen_ms, waits: *waits };
                let result = self.saved(container, &report);
                self.ended(&container.uid);
                // The other end is there as long as this one is.
                let _ = self.bell.send(());
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
}
