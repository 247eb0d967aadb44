//! Containers that come back.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::node::Node;
use crate::checkpoint::{self, is_in_progress, is_ready, is_shared, is_spent, objection, path};
use crate::error::{Error, Result};
use crate::event::{self, Kind};
use crate::message::{Answer, Container, Hidden};
use crate::pod::{RESTORE_FROM, RESTORE_POLICY, annotation, is_name, text};

/// How long a container waits for the checkpoint that its pod has claimed: the wrapper waits 80 s in all.
const WAIT: Duration = Duration::from_secs(50);
/// How often it is looked whether it is there.
const STEP: Duration = Duration::from_millis(200);
/// How long a container that may have no checkpoint waits for an API server that does not answer.
const RETURNS: Duration = Duration::from_secs(20);
/// How many restores a checkpoint remembers: as many as its definition lets it.
const MOST: usize = 256;

/// Asks again as long as the API server does not answer.
fn patiently<T>(until: Instant, ask: impl Fn() -> Result<T>) -> Result<T> {
    loop {
        match ask() {
            Err(error) if error.is_passing() && Instant::now() < until => sleep(STEP),
            result => return result,
        }
    }
}

impl Node {
    pub(super) fn create(self: &Arc<Self>, container: &Container) -> Result<Answer> {
        let began = Instant::now();
        let pod = patiently(began + RETURNS, || self.pod(container))?;
        let Some(pod) = pod else { return Ok(Answer::Plain) };
        let Some(name) = annotation(&pod, RESTORE_FROM) else { return Ok(Answer::Plain) };
        let always = annotation(&pod, RESTORE_POLICY) == Some("Always");
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
        let object = self.awaited(&container.namespace, name, &container.uid)?;
        if let Some(objection) = objection(pod, &object) {
            return Err(Error::new(objection));
        }
        // One that has crashed since begins anew.
        if is_spent(&object, &container.uid, &container.name) {
            return Ok(Answer::Plain);
        }
        let all = object["status"]["checkpointedContainers"].as_array();
        if !all.is_some_and(|all| all.iter().any(|c| c["name"] == container.name.as_str())) {
            return Ok(Answer::Plain);
        }
        let identity = match text(&object, "/status/wrappedKey") {
            "" => None,
            _ => Some(self.keys.identity(&self.api, &container.namespace, name, &container.pod)?),
        };
        let dir = self.brought(&object, &container.pod, until)?;
        self.promise(&container.namespace, name, &object)?;
        Ok(Answer::Restore { dir, always, identity: identity.map(Hidden::new) })
    }

    /// The checkpoint `name`, complete, or as it is if it will not come. Whoever moves it here waits for a
    /// word that there is somebody to restore it.
    fn awaited(&self, namespace: &str, name: &str, uid: &str) -> Result<Value> {
        let until = Instant::now() + WAIT;
        let path = path(namespace, name);
        loop {
            let object = self.api.get(&path)?;
            let object = object.ok_or_else(|| Error::new(format!("no checkpoint {name}")))?;
            let waits = is_in_progress(&object) && checkpoint::claimed_by(&object) == Some(uid);
            if !waits || Instant::now() > until {
                return Ok(object);
            }
            if crate::pod::condition(&object, checkpoint::TARGET_READY).is_none() {
                self.change(namespace, name, |object| {
                    checkpoint::set(object, checkpoint::target_ready());
                    Ok(())
                })?;
            }
            sleep(STEP);
        }
    }

    /// Writes down that the pod begins here, so that its source does not go on.
    fn promise(&self, namespace: &str, name: &str, object: &Value) -> Result<()> {
        if is_shared(object) {
            return Ok(());
        }
        let done = self.change(namespace, name, |object| {
            if !is_ready(object) {
                return Err(Error::new("the checkpoint was taken back"));
            }
            object["status"]["restoringOn"] = json!(self.name);
            Ok(())
        });
        done.map(drop)
    }

    pub(super) fn begins(
        &self,
        container: &Container,
        restored: bool,
        reason: &str,
    ) -> Result<Answer> {
        let counter = if restored { "containers_restored_total" } else { "containers_cold_total" };
        self.counters.add(counter, 1);
        let Some(pod) = self.pod(container)? else { return Ok(Answer::Noted) };
        let Some(name) = annotation(&pod, RESTORE_FROM).filter(|name| is_name(name)) else {
            return Ok(Answer::Noted);
        };
        self.change(&container.namespace, name, |object| {
            // Whether it was restored or not: it has begun, and begins anew if it is started again.
            let status = &mut object["status"];
            let mut all = status["restoredContainers"].as_array().cloned().unwrap_or_default();
            all.push(json!({
                "name": container.name, "podUID": container.uid,
                "restored": restored, "message": reason,
            }));
            let first = all.len().saturating_sub(MOST);
            status["restoredContainers"] = json!(all[first..]);
            Ok(())
        })?;
        Ok(Answer::Noted)
    }
}
