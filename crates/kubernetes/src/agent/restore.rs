//! Containers that come back.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use torpor_worker::tell;

use super::late::{comes_late, is_awaited};
use super::node::Node;
use crate::checkpoint::{
    self, claimed_by, is_in_progress, is_restored, is_shared, is_spent, memory_comes,
    memory_comes_to, objection, path,
};
use crate::error::{Error, Result};
use crate::event::{self, Kind};
use crate::message::{Answer, Ask, BEGUN, Container, Hidden, LOGS, begun};
use crate::pod::{RESTORE_FROM, RESTORE_POLICY, annotation, is_lazy, is_name, runs, text};
use crate::restoring::Report;

/// How long a container waits for the checkpoint that its pod has claimed: the wrapper waits 80 s in all.
const WAIT: Duration = Duration::from_secs(50);
/// How often it is looked whether it is there.
const STEP: Duration = Duration::from_millis(200);
/// How often a round of a pod that moves may be refused: then it comes with the rest.
const REFUSALS: u32 = 3;
/// How long nobody is told what a wrapper alone has written down of a pod that is there: if it was killed before the container
/// began, that is taken back when containerd has removed the container.
const SETTLES: Duration = Duration::from_secs(60);
/// How long a container that may have no checkpoint waits for an API server that does not answer.
const RETURNS: Duration = Duration::from_secs(20);

/// Asks again as long as the API server does not answer.
fn patiently<T>(until: Instant, ask: impl Fn() -> Result<T>) -> Result<T> {
    loop {
        match ask() {
            Err(error) if error.is_passing() && Instant::now() < until => sleep(STEP),
            result => return result,
        }
    }
}

/// Whether a pod is tried again in place of starting cold.
fn must_be_restored(pod: &Value) -> bool {
    annotation(pod, RESTORE_POLICY) == Some("Always")
}

/// Waits for memory that comes late, since another pod wants it so.
fn whole(dir: &Path, until: Instant) -> Result<()> {
    while comes_late(dir) {
        if !is_awaited(dir) {
            return Err(Error::new("the memory of the checkpoint is lost"));
        }
        if Instant::now() >= until {
            return Err(Error::new("the memory of the checkpoint has not come in time"));
        }
        sleep(STEP);
    }
    match dir.exists() {
        true => Ok(()),
        false => Err(Error::new("the memory of the checkpoint has not come")),
    }
}

impl Node {
    pub(super) fn create(self: &Arc<Self>, container: &Container) -> Result<Answer> {
        let began = Instant::now();
        let pod = patiently(began + RETURNS, || self.pod(container))?;
        let Some(pod) = pod else { return Ok(Answer::Plain) };
        let Some(name) = annotation(&pod, RESTORE_FROM) else { return Ok(Answer::Plain) };
        let always = must_be_restored(&pod);
        let until = began + self.patience;
        let answer = patiently(until, || self.restorable(&pod, container, name, always, until));
        if let Err(error) = &answer {
            let text = format!("{}: {error}", container.name);
            event::tell(&self.api, Kind::ColdPod, &pod, "NotRestored", &text);
        }
        match answer {
            Err(error) if always => Ok(Answer::Refused { reason: error.to_string() }),
            other => other,
        }
    }

    /// What there is of the checkpoint `name` for `container`.
    fn restorable(
        self: &Arc<Self>,
        pod: &Value,
        container: &Container,
        name: &str,
        always: bool,
        until: Instant,
    ) -> Result<Answer> {
        if !is_name(name) {
            return Err(Error::new(format!("{name:?} is no name of a checkpoint")));
        }
        let object = self.awaited(container, name)?;
        if let Some(objection) = objection(pod, &object) {
            return Err(Error::new(objection));
        }
        // One that has crashed since begins anew.
        let is_over = match always {
            // One that must not start cold is tried again, though an older controller, or an older definition, has no word
            // for that.
            true => is_restored(&object, &container.uid, &container.name),
            false => is_spent(&object, &container.uid, &container.name),
        };
        if is_over || self.has_begun(container, name) {
            return Ok(Answer::Plain);
        }
        let all = object["status"]["checkpointedContainers"].as_array();
        if !all.is_some_and(|all| all.iter().any(|c| c["name"] == container.name.as_str())) {
            return Ok(Answer::Plain);
        }
        let identity = self.keys.identity(&self.api, &container.namespace, name, &container.pod)?;
        self.be_introduced()?;
        let (dir, lazy) = self.at_hand(pod, &object, until)?;
        self.promise(container, name, &object, lazy)?;
        Ok(Answer::Restore { dir, always, identity: Some(Hidden::new(identity)), lazy })
    }

    /// The directory of a checkpoint that `pod` continues from, and whether its memory comes while that runs.
    ///
    /// # Errors
    /// If nobody who hands it out has it, or what the pod waits for does not come in time.
    fn at_hand(
        self: &Arc<Self>,
        pod: &Value,
        object: &Value,
        until: Instant,
    ) -> Result<(PathBuf, bool)> {
        loop {
            let dir = self.brought(object, text(pod, "/metadata/name"), until)?;
            if comes_late(&dir) && is_lazy(pod) {
                return Ok((dir, true));
            }
            match whole(&dir, until) {
                // What was on its way for nobody, or for a pod that does not wait for it, comes for this one.
                Err(_) if is_shared(object) && Instant::now() < until && !self.holds(object) => {}
                waited => return waited.map(|()| (dir, false)),
            }
        }
    }

    /// Whether a container has begun with a checkpoint that is here, though nobody could be told.
    fn has_begun(&self, container: &Container, name: &str) -> bool {
        let dir = self.store.find(&container.namespace, name);
        dir.is_some_and(|dir| begun(&dir, container).exists())
    }

    /// Tells the controllers what becomes here of the checkpoint `name`.
    fn report(&self, container: &Container, name: &str, report: &Report) -> Result<()> {
        self.keys.report(&self.api, &container.namespace, name, &container.pod, report)
    }

    /// The checkpoint `name`, complete, or as it is if it will not come. Whoever moves it here waits for a
    /// word that there is somebody to restore it.
    fn awaited(&self, container: &Container, name: &str) -> Result<Value> {
        let until = Instant::now() + WAIT;
        let (path, uid) = (path(&container.namespace, name), container.uid.as_str());
        let mut refused = 0;
        loop {
            let object = self.api.get(&path)?;
            let object = object.ok_or_else(|| Error::new(format!("no checkpoint {name}")))?;
            let waits = is_in_progress(&object) && claimed_by(&object) == Some(uid);
            if !waits || Instant::now() > until {
                return Ok(object);
            }
            if crate::pod::condition(&object, checkpoint::TARGET_READY).is_none() {
                self.report(container, name, &Report::Waits)?;
            }
            if refused < REFUSALS
                && let Err(error) = self.next_round(&object, &container.pod, until)
            {
                // A node that does not answer once may never: what is left of the time is for the rest, and for the store.
                refused = match error {
                    Error::Refused { .. } => refused + 1,
                    Error::Silent { .. } | Error::Other(_) => REFUSALS,
                };
                tell!("{}/{name}: what has been copied of it so far: {error}", container.namespace);
            }
            sleep(STEP);
        }
    }

    /// Writes down that the pod begins here, so that its source does not go on, and whether memory of the checkpoint still
    /// comes then, so that nobody removes it. The source of a snapshot goes on anyway.
    fn promise(&self, container: &Container, name: &str, object: &Value, lazy: bool) -> Result<()> {
        if is_shared(object) && !lazy {
            return Ok(());
        }
        self.says_memory.fetch_or(lazy, Ordering::Relaxed);
        match self.report(container, name, &Report::Promises { lazy }) {
            // Many nodes may say so at once. It is said again.
            Err(error) if is_shared(object) => {
                tell!("{}/{name}: {error}", container.namespace);
                Ok(())
            }
            told => told,
        }
    }

    /// Tells the controllers whether memory still comes to a pod that runs here, if its checkpoint says something else.
    pub(super) fn tell_memory(&self, object: &Value) {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        let says = match is_shared(object) {
            true => memory_comes_to(object, &self.name),
            false if text(object, "/status/restoringOn") != self.name => return,
            false if claimed_by(object).is_none() => return,
            false => memory_comes(object),
        };
        self.says_memory.fetch_or(says, Ordering::Relaxed);
        let comes = self.store.find(namespace, name).is_some_and(|dir| is_awaited(&dir));
        if comes == says {
            return;
        }
        let Some(pod) = self.speaks_for(object, comes) else { return };
        let told = self.keys.report(&self.api, namespace, name, &pod, &Report::Memory { comes });
        if let Err(error) = told {
            tell!("{namespace}/{name}: {error}");
        }
    }

    /// The pod in whose name it is told whether memory of a checkpoint comes here. That of a snapshot comes for nobody as long as no pod
    /// begins with it, and whether it is over is nobody's own.
    fn speaks_for(&self, object: &Value, comes: bool) -> Option<String> {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        match is_shared(object) {
            false => Some(text(object, "/status/claimedBy/name").to_owned()),
            true if comes => {
                let readers = self.readers(namespace, name).unwrap_or_default();
                readers.first().map(|pod| text(pod, "/metadata/name").to_owned())
            }
            true => Some(String::new()),
        }
    }

    pub(super) fn begins(
        &self,
        container: &Container,
        restored: bool,
        reason: &str,
    ) -> Result<Answer> {
        let pod = self.pod(container)?;
        // One that must not start cold has not begun.
        let again = !restored && pod.as_ref().is_some_and(must_be_restored);
        if !again {
            let counter =
                if restored { "containers_restored_total" } else { "containers_cold_total" };
            self.counters.add(counter, 1);
        }
        let Some(pod) = pod else { return Ok(Answer::Noted) };
        let Some(name) = annotation(&pod, RESTORE_FROM).filter(|name| is_name(name)) else {
            return Ok(Answer::Noted);
        };
        let report = match again {
            true => Report::failed(&container.name, reason),
            // Whether it was restored or not: it has begun, and begins anew if it is started again.
            false => Report::began(&container.name, restored, reason),
        };
        let told = self.report(container, name, &report);
        let (kind, why, text) = match restored {
            true => (Kind::RestoredPod, "RestoreSucceeded", format!("continues from {name}")),
            false => (Kind::ColdPod, "NotRestored", reason.to_owned()),
        };
        event::tell(&self.api, kind, &pod, why, &format!("{}: {text}", container.name));
        told.map(|()| Answer::Noted)
    }

    /// Tells the controllers of containers that have begun with a checkpoint here when they could not be told.
    pub(super) fn retell(&self, object: &Value) {
        let (namespace, name) =
            (text(object, "/metadata/namespace"), text(object, "/metadata/name"));
        // Of a snapshot it does not matter who has begun with it.
        let dir = self.store.find(namespace, name).filter(|_| !is_shared(object));
        let Some(dir) = dir else { return };
        for file in fs::read_dir(dir.join(LOGS).join(BEGUN)).into_iter().flatten().flatten() {
            let told = fs::read(file.path()).ok();
            let told = told.and_then(|bytes| serde_json::from_slice::<Ask>(&bytes).ok());
            let Some(Ask::Begins { container, restored, reason }) = told else { continue };
            if is_spent(object, &container.uid, &container.name) {
                continue;
            }
            let written = file.metadata().and_then(|meta| meta.modified());
            // A time to come shows that the clock was put back since.
            let is_young = written.is_ok_and(|at| at.elapsed().is_ok_and(|since| since < SETTLES));
            if is_young && self.may_be_taken_back(&container) {
                continue;
            }
            let report = Report::began(&container.name, restored, &reason);
            if let Err(error) = self.report(&container, name, &report) {
                tell!("{namespace}/{name}: {error}");
            }
        }
    }

    /// Whether it may still turn out that a container has not begun which is said to. Where its pod is gone, whatever
    /// was removed before it began has taken that back: then the next pod must not begin where this one did.
    fn may_be_taken_back(&self, container: &Container) -> bool {
        match self.pod(container) {
            Ok(Some(pod)) => !runs(&pod, &container.name),
            Ok(None) => false,
            // Whoever cannot be asked cannot be told.
            Err(_) => true,
        }
    }
}
