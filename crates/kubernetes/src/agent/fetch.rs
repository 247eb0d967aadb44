//! Checkpoints that come to this node: from the node that has made them, or, if that is lost, from the
//! store. Each comes once at a time, in a thread of its own, so that whoever waits for it can give up.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use torpor_blobs::http::Login;

use super::depot::Depot;
use super::late::{self, Late};
use super::node::Node;
use super::parts::Parts;
use super::peer::{self, Caller};
use super::store::{unpack, unpack_early};
use crate::checkpoint::{is_shared, is_used, objection, path};
use crate::error::{Error, Result};
use crate::pod::{GATED, RESTORE_FROM, annotation, is_lazy, is_name, text};

/// How long a container that is created waits for its checkpoint: the wrapper waits 80 s in all.
pub(super) const FETCH: Duration = Duration::from_secs(70);

/// The pod of a checkpoint that comes before any: no pod has this name.
const NOBODY: &str = "";

/// The checkpoints that are on their way, by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Coming(pub(super) Mutex<HashMap<(String, String), Arc<Arrival>>>);

/// What comes of one.
#[derive(Debug, Default)]
pub(super) struct Arrival {
    /// Whether it comes for no pod: there was none here when it began.
    is_early: bool,
    /// Nothing as long as it comes; an error as a sentence.
    done: Mutex<Option<std::result::Result<(), String>>>,
    changed: Condvar,
}

impl Arrival {
    fn end(&self, result: std::result::Result<(), String>) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.changed.notify_all();
    }

    /// Waits for the end of it.
    fn wait(&self, until: Instant) -> Result<()> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(done, left, |done| done.is_none());
        let (done, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &*done {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(Error::new(error.as_str())),
            None => Err(Error::new("the checkpoint has not come in time")),
        }
    }
}

/// Neither the node of a checkpoint nor the store has given what was asked for.
pub(super) fn neither(node: &Error, store: &Error) -> Error {
    Error::new(format!("not from its node: {node}; nor from the store: {store}"))
}

impl Node {
    /// The list of the pods on this node that may continue from a checkpoint.
    pub(super) fn pods_here(&self) -> String {
        let here = format!("fieldSelector=spec.nodeName%3D{}", self.name);
        format!("/api/v1/pods?labelSelector={GATED}%3Dtrue&{here}")
    }

    /// Begins to bring the checkpoints of pods that are about to start here: it takes as long as their
    /// images do, or less. Those of `seen` were looked at before.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub(super) fn prefetch(self: &Arc<Self>, seen: &mut HashSet<String>) -> Result<()> {
        let pods = self.api.list(&self.pods_here())?;
        let uid = |pod: &Value| text(pod, "/metadata/uid").to_owned();
        let there: HashSet<String> = pods.iter().map(uid).collect();
        seen.retain(|uid| there.contains(uid));
        for pod in pods.iter().filter(|pod| text(pod, "/spec/nodeName") == self.name) {
            let Some(name) = annotation(pod, RESTORE_FROM).filter(|name| is_name(name)) else {
                continue;
            };
            if !matches!(text(pod, "/status/phase"), "" | "Pending") || !seen.insert(uid(pod)) {
                continue;
            }
            let object = self.api.get(&path(text(pod, "/metadata/namespace"), name))?;
            let fits = |object: &Value| !is_used(object) && objection(pod, object).is_none();
            if let Some(object) = object.filter(fits) {
                self.be_introduced()?;
                // Whoever creates the container waits for it, and hears if it does not come.
                let _ = self.arrival(&object, text(pod, "/metadata/name"));
            }
        }
        Ok(())
    }

    /// The directory of a checkpoint that `pod` continues from, which is brought here if it is not.
    ///
    /// # Errors
    /// If nobody who hands it out has it, or it does not come in time.
    pub(super) fn brought(
        self: &Arc<Self>,
        object: &Value,
        pod: &str,
        until: Instant,
    ) -> Result<PathBuf> {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        while let Some(arrival) = self.arrival(object, pod) {
            match arrival.wait(until) {
                // What nobody could have for itself, the pod may.
                Err(_) if arrival.is_early && Instant::now() < until => {}
                arrived => {
                    arrived?;
                    break;
                }
            }
        }
        let found = self.store.find(namespace, name);
        found.ok_or_else(|| Error::new(format!("the checkpoint {name} is gone")))
    }

    /// Brings a checkpoint here that a pod may continue from which is not here yet.
    ///
    /// # Errors
    /// If nobody who hands it out has it, or it does not come in time.
    pub(super) fn bring_early(self: &Arc<Self>, object: &Value) -> Result<()> {
        let arrival = self.arrival(object, NOBODY);
        arrival.map_or(Ok(()), |arrival| arrival.wait(Instant::now() + self.patience))
    }

    /// Whether a checkpoint is here, all of it or what comes first. A snapshot with memory that does not come any more is not: other
    /// pods than those that have lost it may begin with it yet.
    pub(super) fn holds(&self, object: &Value) -> bool {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let dir = self.store.find(namespace, name);
        dir.is_some_and(|dir| !is_shared(object) || !late::is_lost(&dir))
    }

    /// A checkpoint that is on its way, from now on if not before; nothing if it is here.
    fn arrival(self: &Arc<Self>, object: &Value, pod: &str) -> Option<Arc<Arrival>> {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let key = (namespace.to_owned(), name.to_owned());
        let mut coming = self.coming.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.holds(object) {
            return None;
        }
        if let Some(arrival) = coming.get(&key) {
            return Some(Arc::clone(arrival));
        }
        let arrival = Arc::new(Arrival { is_early: pod == NOBODY, ..Arrival::default() });
        coming.insert(key.clone(), Arc::clone(&arrival));
        let (node, object, pod) = (Arc::clone(self), object.clone(), pod.to_owned());
        let told = Arc::clone(&arrival);
        thread::spawn(move || {
            let result = node.fetch(&object, &pod).map_err(|error| error.to_string());
            node.rounds.forget(&object);
            node.coming.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
            told.end(result);
        });
        Some(arrival)
    }

    /// Fetches a checkpoint from its node, or else from the store. If the pod that begins with it wants it so, its memory
    /// comes after all else, so that the pod need not wait for that. So does that of a snapshot which no pod here waits for yet:
    /// the first one may want it so.
    fn fetch(self: &Arc<Self>, object: &Value, pod: &str) -> Result<()> {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let began = Instant::now();
        let rounds = self.rounds.of(object);
        let mut count = rounds.lock().unwrap_or_else(PoisonError::into_inner);
        // From now on nobody brings rounds into the directory: those who wait for the number hold old objects.
        let here = count.take().unwrap_or_default();
        let dir = match here {
            0 => self.store.begin(namespace, name)?,
            _ => self.store.part(namespace, name)?,
        };
        let owner = if pod == NOBODY { text(object, "/status/claimedBy/name") } else { pod };
        let is_for_nobody = is_shared(object) && pod == NOBODY;
        let is_early = here == 0 && (is_for_nobody || self.is_lazy(object, owner));
        let mut fetched = self.of_peer(|caller| match is_early {
            true => peer::fetch_early(caller, object, pod, &dir, self.silence()),
            false => peer::fetch(caller, object, pod, here, &dir, self.silence()),
        });
        let mut is_of_store = false;
        if let Err(error) = &fetched
            && let Some(depot) = self.depot_of(object)
        {
            let dir = self.store.begin(namespace, name)?;
            let stored = self.of_store(depot, object, pod, |parts| match is_early {
                true => unpack_early(parts.reader(), &dir),
                false => unpack(parts.reader(), &dir),
            });
            fetched = stored.map_err(|other| neither(error, &other));
            is_of_store = fetched.is_ok();
            self.counters.add("checkpoints_from_store_total", u64::from(is_of_store));
        }
        let reader = if is_shared(object) { NOBODY } else { owner };
        let late =
            fetched.and_then(|()| late::prepare(&dir, reader)).and_then(|()| Late::open(&dir));
        let late = match late {
            Ok(late) => late,
            Err(error) => {
                // Half of it serves nobody.
                self.store.remove(namespace, name)?;
                return Err(error);
            }
        };
        self.store.complete(namespace, name)?;
        if let Some(late) = late {
            self.supply(late, namespace, name, is_of_store);
        }
        let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.counters.add("fetch_milliseconds_total", millis);
        Ok(())
    }

    /// Whether the memory of `pod` may come while it runs.
    fn is_lazy(&self, object: &Value, pod: &str) -> bool {
        crate::peer::reader(&self.api, object, pod).is_ok_and(|pod| is_lazy(&pod))
    }

    /// Asks another agent, and once more if that does not believe this one: the object of this node may have been made anew,
    /// and name no certificate.
    pub(super) fn of_peer<T>(&self, ask: impl Fn(&Caller<'_>) -> Result<T>) -> Result<T> {
        let once = || {
            let identity = self.identity();
            ask(&Caller { api: &self.api, token: &self.token, identity: &identity })
        };
        match once() {
            Err(error) if error.is_forbidden() && self.introduce().is_ok() => once(),
            asked => asked,
        }
    }

    /// How long another agent may say nothing: there is to be time for the store then.
    pub(super) fn silence(&self) -> Duration {
        self.patience / 3
    }

    /// The store, if a checkpoint is there.
    pub(super) fn depot_of(&self, object: &Value) -> Option<&Depot> {
        let is_stored = object["status"]["checkpointLocation"]["ociImage"].is_object();
        self.depot.as_ref().filter(|_| is_stored)
    }

    /// Reads a checkpoint in the store, as `pod` may.
    ///
    /// # Errors
    /// If it is not there, is another one, or cannot be read; with what is wrong with the pull Secrets of the pod.
    pub(super) fn of_store<T>(
        &self,
        depot: &Depot,
        object: &Value,
        pod: &str,
        read: impl FnOnce(Parts) -> Result<T>,
    ) -> Result<T> {
        let (logins, problems) = self.logins(depot, object, pod);
        depot.parts(object, &logins).and_then(read).map_err(|error| {
            let said: Vec<String> = [error.to_string()].into_iter().chain(problems).collect();
            Error::new(said.join("; "))
        })
    }

    /// Who `pod` is to the store, as its namespace has it, and what is wrong with that.
    fn logins(&self, depot: &Depot, object: &Value, pod: &str) -> (Vec<Login>, Vec<String>) {
        if !depot.knows_logins() || pod == NOBODY {
            return (Vec::new(), Vec::new());
        }
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let logins = self.keys.logins(&self.api, namespace, name, pod);
        logins.unwrap_or_else(|error| (Vec::new(), vec![error.to_string()]))
    }
}
