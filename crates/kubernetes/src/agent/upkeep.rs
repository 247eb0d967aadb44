//! What an agent does now and then: it brings the checkpoints that were made here to the store, and
//! removes what no object names any more, here and there.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_worker::tell;

use super::depot::Depot;
use super::late::is_awaited;
use super::node::Node;
use crate::api::GROUP;
use crate::bell::wait;
use crate::checkpoint::{self, STORED, is_ready, is_used};
use crate::error::{Error, Result};
use crate::event::{self, Kind};
use crate::pod::text;

/// How often it is looked after what is here.
const SWEEP: Duration = Duration::from_secs(30);
/// How often the names in the store are looked at, if nothing has been removed here: what a node that
/// was lost has left there.
const LOOK: Duration = Duration::from_secs(600);

/// How far an agent is with its store.
#[derive(Debug)]
pub(super) struct Upkeep {
    /// When the names there were looked at.
    looked: Option<Instant>,
    /// Whether something there may be needed no more.
    garbage: bool,
    /// Who removes that.
    pub(super) collector: Option<JoinHandle<Result<()>>>,
}

impl Default for Upkeep {
    fn default() -> Self {
        // An agent may have been lost between taking a name away and collecting.
        Self { looked: None, garbage: true, collector: None }
    }
}

impl Upkeep {
    /// Looks what has come of collecting, if it is over.
    fn collected(&mut self) {
        let over = self.collector.take_if(|collector| collector.is_finished());
        match over.map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => {
                tell!("{error}");
                self.garbage = true;
            }
            Some(Err(_)) => self.garbage = true,
        }
    }
}

impl Node {
    /// Waits until something was saved, or it is time to look.
    pub(super) fn rest(&self) {
        wait(&self.rung.lock().unwrap_or_else(PoisonError::into_inner), SWEEP);
    }

    /// Brings what was made here to the store, and removes what has no object any more.
    ///
    /// # Errors
    /// If the API server or the store does not answer.
    pub(super) fn sweep(self: &Arc<Self>) -> Result<()> {
        let here = self.store.all();
        let mut upkeep = self.upkeep.lock().unwrap_or_else(PoisonError::into_inner);
        upkeep.collected();
        let looks = upkeep.garbage || upkeep.looked.is_none_or(|at| at.elapsed() >= LOOK);
        let looked_at = self.depot.as_ref().filter(|_| looks);
        // A checkpoint that is here no more may say that its memory still comes.
        let says_memory = self.says_memory.swap(false, Ordering::Relaxed);
        if here.is_empty() && looked_at.is_none() && !says_memory {
            return Ok(());
        }
        // The names first: whatever is stored later has no name among them, and may have an object.
        let names = looked_at.map(Depot::names);
        let objects = self.api.list(&format!("{GROUP}/podcheckpoints")).inspect_err(|_| {
            self.says_memory.fetch_or(says_memory, Ordering::Relaxed);
        })?;
        let known: HashSet<(&str, &str)> = objects.iter().map(name).collect();
        for (namespace, name) in &here {
            // Whoever brings its memory finds out that it is gone, and tells the pods that lose it.
            let comes = || self.store.find(namespace, name).is_some_and(|dir| is_awaited(&dir));
            if !known.contains(&(namespace.as_str(), name.as_str())) && !comes() {
                self.store.remove(namespace, name)?;
                upkeep.looked = None;
            }
        }
        objects.iter().filter(|object| !is_used(object)).for_each(|object| self.retell(object));
        objects.iter().for_each(|object| self.tell_memory(object));
        let Some(depot) = &self.depot else { return Ok(()) };
        for object in objects.iter().filter(|object| self.is_due(object)) {
            self.put(depot, object)?;
        }
        let Some(names) = names else { return Ok(()) };
        let wanted: HashSet<String> = objects.iter().map(|object| depot.name_of(object)).collect();
        for name in names?.iter().filter(|name| !wanted.contains(*name)) {
            upkeep.garbage |= depot.remove(name)?;
        }
        upkeep.looked = Some(Instant::now());
        if upkeep.garbage && upkeep.collector.is_none() {
            upkeep.garbage = false;
            let node = Arc::clone(self);
            // Whoever collects in a directory waits until nobody stores anything there.
            let collect = move || node.depot.as_ref().map_or(Ok(()), Depot::collect);
            upkeep.collector = Some(thread::spawn(collect));
        }
        Ok(())
    }

    /// Whether a checkpoint is to go to the store: it was made here, and nothing is frozen for it.
    fn is_due(&self, object: &Value) -> bool {
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let saving = saves.get(text(object, "/status/sourcePodUID"));
        text(object, "/status/nodeName") == self.name
            && is_ready(object)
            && !is_used(object)
            && object["status"]["checkpointLocation"]["ociImage"].is_null()
            && saving.is_none_or(super::save::Saving::is_over)
    }

    /// Stores a checkpoint, and says so. What a store does not take is tried again; the pod is where it
    /// was, and what is there already is not sent twice.
    fn put(&self, depot: &Depot, object: &Value) -> Result<()> {
        let (namespace, name) = name(object);
        let Some(dir) = self.store.find(namespace, name) else { return Ok(()) };
        let put = depot.put(object, &dir);
        let failed = put.as_ref().err().map(Error::to_string);
        if let Some(error) = &failed {
            tell!("{namespace}/{name}: not stored: {error}");
            self.counters.add("checkpoints_not_stored_total", 1);
            let before = crate::pod::condition(object, STORED);
            if before.is_some_and(|before| text(before, "/message") == error) {
                return Ok(());
            }
            event::tell(&self.api, Kind::PodCheckpoint, object, "NotStored", error);
        } else {
            self.counters.add("checkpoints_stored_total", 1);
        }
        let changed = self.change(namespace, name, |object| {
            if let Ok(image) = &put {
                let location = &mut object["status"]["checkpointLocation"];
                location["type"] = json!("OCIImage");
                location["ociImage"] = image.clone();
            }
            checkpoint::set(object, checkpoint::stored(failed.as_deref()));
            Ok(())
        });
        match changed {
            // It was removed meanwhile: the next sweep finds its name.
            Err(_) if self.api.get(&checkpoint::path(namespace, name))?.is_none() => Ok(()),
            changed => changed.map(drop),
        }
    }
}

/// The namespace and the name of an object.
fn name(object: &Value) -> (&str, &str) {
    (text(object, "/metadata/namespace"), text(object, "/metadata/name"))
}
