//! What the agent decides.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::store::Store;
use super::{AgentArgs, peer};
use crate::api::{Api, GROUP};
use crate::checkpoint::{self, begun, is_spent, name_of, objection, path, ready};
use crate::error::{Error, Result};
use crate::message::{Answer, Ask, Container};
use crate::pod::{RESTORE_FROM, RESTORE_POLICY, Replica, annotation, is_name, is_ours, text};
use crate::time;

/// What is left of the grace period for a pod that could not be saved, in seconds.
const RESERVE: i64 = 2;
/// How long a container waits for another's call to save the pod.
const WAIT: Duration = Duration::from_secs(3600);
/// How often an update is tried that others come in between of.
const ATTEMPTS: u32 = 5;

/// A node, as its agent sees it.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The API server.
    pub api: Api,
    /// Its checkpoints.
    pub store: Store,
    address: String,
    certificate: String,
    /// Pods that are being saved (`false`), or have been.
    saves: Mutex<HashMap<String, bool>>,
    saved: Condvar,
    /// Held while a checkpoint is fetched: the containers of a pod come one after the other.
    fetch: Mutex<()>,
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
            Ask::Saved { container, containers, error, frozen_ms } => {
                let result = self.saved(container, containers, error.as_deref(), *frozen_ms);
                self.ended(&container.uid);
                result
            }
        }
    }

    /// The pod of a container, as the API server knows it.
    fn pod(&self, container: &Container) -> Result<Option<Value>> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", container.namespace, container.pod);
        let pod = self.api.get(&path)?;
        Ok(pod.filter(|pod| text(pod, "/metadata/uid") == container.uid))
    }

    fn create(&self, container: &Container) -> Result<Answer> {
        let Some(pod) = self.pod(container)? else { return Ok(Answer::Plain) };
        let Some(name) = annotation(&pod, RESTORE_FROM) else { return Ok(Answer::Plain) };
        let always = annotation(&pod, RESTORE_POLICY) == Some("Always");
        match self.restorable(&pod, container, name) {
            Ok(None) => Ok(Answer::Plain),
            Ok(Some(dir)) => Ok(Answer::Restore { dir, always, identity: None }),
            Err(error) if always => Ok(Answer::Refused { reason: error.to_string() }),
            Err(error) => Err(error),
        }
    }

    /// The directory of the checkpoint `name`, if `container` continues from it.
    fn restorable(
        &self,
        pod: &Value,
        container: &Container,
        name: &str,
    ) -> Result<Option<PathBuf>> {
        if !is_name(name) {
            return Err(Error::new(format!("{name:?} is no name of a checkpoint")));
        }
        let object = self.api.get(&path(&container.namespace, name))?;
        let object = object.ok_or_else(|| Error::new(format!("no checkpoint {name}")))?;
        if let Some(objection) = objection(pod, &object) {
            return Err(Error::new(objection));
        }
        // One that has crashed since begins anew.
        if is_spent(&object, &container.name) {
            return Ok(None);
        }
        let all = object["status"]["checkpointedContainers"].as_array();
        if !all.is_some_and(|all| all.iter().any(|c| c["name"] == container.name.as_str())) {
            return Ok(None);
        }
        let _one = self.fetch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(dir) = self.store.find(&container.namespace, name) {
            return Ok(Some(dir));
        }
        let dir = self.store.begin(&container.namespace, name)?;
        peer::fetch(&self.api, &object, &dir)?;
        self.store.complete(&container.namespace, name)?;
        Ok(self.store.find(&container.namespace, name))
    }

    fn created(&self, container: &Container, restored: bool, reason: &str) -> Result<Answer> {
        let Some(pod) = self.pod(container)? else { return Ok(Answer::Noted) };
        let Some(name) = annotation(&pod, RESTORE_FROM).filter(|name| is_name(name)) else {
            return Ok(Answer::Noted);
        };
        self.change(&container.namespace, name, |status| {
            // Whether it was restored or not: it has begun, and begins anew if it is started again.
            let mut all = status["restoredContainers"].as_array().cloned().unwrap_or_default();
            let told = json!({ "name": container.name, "restored": restored, "message": reason });
            all.push(told);
            status["restoredContainers"] = json!(all);
        })?;
        Ok(Answer::Noted)
    }

    /// Changes the status of a checkpoint.
    fn change(&self, namespace: &str, name: &str, change: impl Fn(&mut Value)) -> Result<()> {
        let path = path(namespace, name);
        for attempt in 1.. {
            let Some(mut object) = self.api.get(&path)? else { break };
            change(&mut object["status"]);
            match self.api.replace(&format!("{path}/status"), &object) {
                Err(error) if error.is_conflict() && attempt < ATTEMPTS => {}
                result => return result.map(drop),
            }
        }
        Err(Error::new(format!("the checkpoint {namespace}/{name} is gone")))
    }

    fn stop(&self, container: &Container) -> Result<Answer> {
        let Some(pod) = self.pod(container)? else { return Ok(Answer::Plain) };
        let Some(seconds) = gives_way(&pod, time::now()) else { return Ok(Answer::Plain) };
        {
            let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            if saves.contains_key(&container.uid) {
                let still = |saves: &mut HashMap<String, bool>| {
                    saves.get(&container.uid).is_some_and(|done| !done)
                };
                // Whoever waits too long goes on.
                let _ = self.saved.wait_timeout_while(saves, WAIT, still);
                return Ok(Answer::Plain);
            }
            saves.insert(container.uid.clone(), false);
        }
        let begun = self.begin(container, &pod, seconds);
        if begun.is_err() {
            self.ended(&container.uid);
        }
        begun
    }

    fn begin(&self, container: &Container, pod: &Value, seconds: u64) -> Result<Answer> {
        let name = name_of(&container.pod, &container.uid);
        let object = checkpoint::new(pod, &name, seconds);
        let list = format!("{GROUP}/namespaces/{}/podcheckpoints", container.namespace);
        match self.api.create(&list, &object) {
            Err(error) if error.is_conflict() => {}
            result => drop(result?),
        }
        let status = begun(pod, &self.name);
        self.change(&container.namespace, &name, |now| *now = status.clone())?;
        let dir = self.store.begin(&container.namespace, &name)?;
        Ok(Answer::Save { dir, recipient: None, seconds })
    }

    fn saved(
        &self,
        container: &Container,
        containers: &[String],
        error: Option<&str>,
        frozen_ms: u64,
    ) -> Result<Answer> {
        let (namespace, name) = (&container.namespace, name_of(&container.pod, &container.uid));
        if let Some(error) = error {
            eprintln!("{namespace}/{}: not saved: {error}", container.pod);
            self.store.remove(namespace, &name)?;
            self.change(namespace, &name, |status| {
                status["conditions"] = json!([ready(false, "CheckpointFailed", error)]);
            })?;
            return Ok(Answer::Noted);
        }
        let size = self.store.complete(namespace, &name)?;
        let names: Vec<Value> = containers.iter().map(|name| json!({ "name": name })).collect();
        let complete = self.change(namespace, &name, |status| {
            status["checkpointedContainers"] = json!(names);
            status["completionTime"] = json!(time::format(time::now()));
            status["sizeBytes"] = json!(size);
            status["frozenMilliseconds"] = json!(frozen_ms);
            status["checkpointLocation"] = json!({
                "type": "Peer",
                "peer": { "address": self.address, "certificate": self.certificate },
            });
            status["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
        });
        if complete.is_err() {
            self.store.remove(namespace, &name)?;
        }
        complete.map(|()| Answer::Noted)
    }

    /// The saving of a pod has come to its end.
    fn ended(&self, uid: &str) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.insert(uid.to_owned(), true);
        // Pods are not told apart by their uids for ever.
        if saves.len() > 10_000 {
            saves.retain(|_, done| !*done);
        }
        self.saved.notify_all();
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

/// How many seconds there are to save a pod that has to go; `None` if it is not to be saved.
fn gives_way(pod: &Value, now: i64) -> Option<u64> {
    // A container that is only started again is none of our business.
    let end = time::parse(text(pod, "/metadata/deletionTimestamp"))?;
    if !is_ours(pod) || Replica::of(pod).is_none() {
        return None;
    }
    let left = end.saturating_sub(now).saturating_sub(RESERVE);
    u64::try_from(left).ok().filter(|left| *left > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gives_way() {
        let pod = json!({
            "metadata": {
                "deletionTimestamp": "2026-01-01T00:00:30Z",
                "ownerReferences": [{ "uid": "o", "controller": true }],
            },
            "spec": { "runtimeClassName": "torpor" },
        });
        let start = time::parse("2026-01-01T00:00:00Z").unwrap();
        assert_eq!(gives_way(&pod, start), Some(28));
        assert_eq!(gives_way(&pod, start + 28), None, "there is no time left");
        let mut other = pod.clone();
        other["metadata"].as_object_mut().unwrap().remove("deletionTimestamp");
        assert_eq!(gives_way(&other, start), None, "a probe has failed");
        let mut other = pod.clone();
        other["spec"]["runtimeClassName"] = json!("runc");
        assert_eq!(gives_way(&other, start), None);
        let mut other = pod;
        other["metadata"]["ownerReferences"] = json!([]);
        assert_eq!(gives_way(&other, start), None, "nobody replaces it");
    }
}
