//! Pods that are saved: because they have to go, or because somebody has ordered a checkpoint.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_worker::tell;

use super::node::Node;
use super::probes::{self, Budget};
use super::volumes;
use crate::api::GROUP;
use crate::checkpoint::{
    self, begun, ends_its_pod, gives_way, is_in_progress, is_ordered, is_ready, name_of, path,
    ready,
};
use crate::disruption::{Fate, fate};
use crate::error::{Context, Error, Result};
use crate::event::{self, Kind};
use crate::message::{Answer, Container, LOGS, TAKEN};
use crate::pod::{Replica, is_ours, runs, text};
use crate::time;

/// What is left of the grace period for a pod that could not be saved, in seconds.
const RESERVE: i64 = 2;
/// How often it is looked whether a pod that another call saves is saved.
const AGAIN: Duration = Duration::from_millis(500);
/// The file with an order, beside the logs of the engine.
const ORDER: &str = "order.json";
/// How much earlier than it says a wrapper that has saved a pod which gives way may let the pod go on, as it began to wait
/// before it was heard.
const SOONER: Duration = Duration::from_secs(1);
/// How long a pod that moves stays frozen until its target runs.
const HOLD: Duration = Duration::from_secs(120);
/// How often it is looked whether that runs, and whether the hooks of a pod have.
const STEP: Duration = Duration::from_millis(100);

/// A pod that is being saved.
#[derive(Debug)]
pub(super) struct Saving {
    /// Its checkpoint.
    name: String,
    /// What the wrapper is to do when the kubelet calls it, if the checkpoint was ordered.
    order: Option<Answer>,
    /// Whether it was ordered.
    ordered: bool,
    /// Whether it is over.
    done: bool,
    /// Until when it may take, if its turn has come.
    until: Option<Instant>,
}

/// What a wrapper says of the saving of a pod.
pub(super) struct SavedPod<'r> {
    /// The containers in the checkpoint.
    pub containers: &'r [String],
    /// What went wrong.
    pub error: Option<&'r str>,
    /// How long the pod was frozen, in milliseconds.
    pub frozen_ms: u64,
    /// For how many seconds the wrapper waits for what becomes of the pod.
    pub waits: u64,
}

/// What an agent has left of the saving of a pod.
enum Left {
    Nothing,
    /// Whoever was to save it asks once more.
    Unheard(Order),
    /// Another container's call saves it.
    Going,
    Over,
}

/// Who is to save a pod, and for whom its images are sealed: what the next agent has to know.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    container: String,
    dir: PathBuf,
    recipient: Option<String>,
}

impl Order {
    /// The order that is with a checkpoint in `dir`, if there is one.
    fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(LOGS).join(ORDER)).ok()?).ok()
    }

    fn write(&self) -> Result<()> {
        let file = self.dir.join(LOGS).join(ORDER);
        let text = serde_json::to_vec(self).context(|| ORDER)?;
        let made = fs::create_dir_all(self.dir.join(LOGS));
        made.and_then(|()| fs::write(&file, text)).context(|| file.display().to_string())
    }

    fn answer(self, seconds: u64) -> Answer {
        Answer::Save { dir: self.dir, recipient: self.recipient, seconds, ahead: false }
    }
}

impl Saving {
    /// Whether nothing is frozen for it any more.
    pub(super) fn is_over(&self) -> bool {
        self.done
    }

    /// Whether its pod is being saved, as far as is known: whoever saved it may have been killed.
    fn is_going(&self) -> bool {
        !self.done && self.until.is_some_and(|until| Instant::now() < until)
    }
}

impl Node {
    /// Begins to save the pod of `container`, if it has to go and nobody else has begun.
    pub(super) fn stop(&self, container: &Container) -> Result<Answer> {
        loop {
            let Some(pod) = self.pod(container)? else { return Ok(Answer::Plain) };
            let Some(seconds) = self.gives_way(&pod, container)? else { return Ok(Answer::Plain) };
            // What the API server takes from now on is time of the pod.
            let end = Instant::now() + Duration::from_secs(seconds);
            if self.has_a_hook_to_run(&pod, container) {
                sleep(STEP);
                continue;
            }
            let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            match saves.get(&container.uid) {
                Some(saving) if saving.done => return Ok(Answer::Plain),
                Some(saving) => {
                    if !saving.ordered
                        && let Some(order) = self.unheard(container, &saving.name)?
                    {
                        return Ok(order.answer(seconds));
                    }
                    let busy = |saves: &mut HashMap<String, Saving>| {
                        saves.get(&container.uid).is_some_and(|saving| !saving.done)
                    };
                    // Whoever saves it has no more time than this one.
                    drop(self.saved.wait_timeout_while(saves, AGAIN, busy));
                }
                None => {
                    let name = name_of(&container.pod, &container.uid);
                    let saving =
                        Saving { name, order: None, ordered: false, done: false, until: None };
                    saves.insert(container.uid.clone(), saving);
                    drop(saves);
                    let answer = match self.left(container) {
                        Ok(Left::Nothing) => self.begin(container, &pod, seconds),
                        Ok(Left::Unheard(order)) => Ok(order.answer(seconds)),
                        // The wrapper that saves it will say how that ends.
                        Ok(Left::Going) => continue,
                        Ok(Left::Over) => Ok(Answer::Plain),
                        Err(error) => Err(error),
                    };
                    if let Ok(Answer::Save { dir, recipient, ahead, .. }) = answer {
                        let seconds = self.in_turn(&container.uid, end);
                        return Ok(Answer::Save { dir, recipient, seconds, ahead });
                    }
                    self.ended(&container.uid);
                    return answer;
                }
            }
        }
    }

    /// Waits until a pod is one of the few that are saved at a time, for half of its time until `end` at most: all at once
    /// would take longer for each of them, and freeze it for longer. Returns how many seconds are left then.
    pub(super) fn in_turn(&self, uid: &str, end: Instant) -> u64 {
        let left = || end.saturating_duration_since(Instant::now());
        let is_full = |saves: &mut HashMap<String, Saving>| {
            saves.values().filter(|saving| saving.is_going()).count() >= self.at_once
        };
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.saved.wait_timeout_while(saves, left() / 2, is_full);
        let (mut saves, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(saving) = saves.get_mut(uid) {
            saving.until = Some(end);
        }
        left().as_secs().max(1)
    }

    /// How many seconds there are to save a pod that has to go; `None` if it is not to be saved.
    fn gives_way(&self, pod: &Value, container: &Container) -> Result<Option<u64>> {
        // Nobody replaces what has no owner.
        if !is_ours(pod) || Replica::of(pod).is_none() {
            return Ok(None);
        }
        let end = match time::parse(text(pod, "/metadata/deletionTimestamp")) {
            Some(end) if self.is_being_saved(&container.uid) || self.is_kept(pod)? => Some(end),
            Some(_) => None,
            None if fate(pod) == Fate::Ends => None,
            // A container that is only started again is none of our business.
            None => self.ends_by_itself(pod, container)?,
        };
        Ok(end.and_then(|end| left(end, time::now())))
    }

    /// Whether another container of a pod that ends has a preStop hook that has not ended: its own call comes after
    /// it, and what is frozen with the pod would not come to its end.
    fn has_a_hook_to_run(&self, pod: &Value, container: &Container) -> bool {
        if self.saves.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&container.uid) {
            return false;
        }
        let mut stopping = self.stopping.lock().unwrap_or_else(PoisonError::into_inner);
        // Pods are not told apart by their uids for ever.
        if stopping.len() > 10_000 {
            stopping.clear();
        }
        let asked = stopping.entry(container.uid.clone()).or_default();
        asked.insert(container.name.clone());
        let mut all = pod["spec"]["containers"].as_array().into_iter().flatten();
        all.any(|one| {
            let name = text(one, "/name");
            one["lifecycle"]["preStop"].is_object() && runs(pod, name) && !asked.contains(name)
        })
    }

    /// What the agent before this one, which was killed, has left of the saving of a pod.
    fn left(&self, container: &Container) -> Result<Left> {
        let (namespace, name) = (&container.namespace, name_of(&container.pod, &container.uid));
        let object = self.api.get(&path(namespace, &name))?;
        let object = object.filter(|one| text(one, "/status/sourcePodUID") == container.uid);
        let Some(object) = object else { return Ok(Left::Nothing) };
        if !is_in_progress(&object) {
            return Ok(Left::Over);
        }
        if let Some(order) = self.unheard(container, &name)? {
            return Ok(Left::Unheard(order));
        }
        let is_going = Order::read(&self.store.part(namespace, &name)?).is_some();
        Ok(if is_going { Left::Going } else { Left::Nothing })
    }

    /// The order that a call for this container was given and has not heard: a container has one call at a time, and
    /// the one before was killed, or the agent was.
    fn unheard(&self, container: &Container, name: &str) -> Result<Option<Order>> {
        let dir = self.store.part(&container.namespace, name)?;
        let order = Order::read(&dir).filter(|order| order.container == container.name);
        Ok(order.filter(|_| !dir.join(LOGS).join(TAKEN).exists()))
    }

    fn begin(&self, container: &Container, pod: &Value, seconds: u64) -> Result<Answer> {
        let name = name_of(&container.pod, &container.uid);
        let mut object = checkpoint::new(pod, &name, seconds);
        // Nobody has to be told to make it.
        object["metadata"]["labels"] =
            json!({ checkpoint::NODE_LABEL: self.name, checkpoint::GIVES_WAY: "true" });
        let list = format!("{GROUP}/namespaces/{}/podcheckpoints", container.namespace);
        match self.api.create(&list, &object) {
            Err(error) if error.is_conflict() => {}
            result => drop(result?),
        }
        let (dir, recipient) = self.prepare(&container.namespace, &name, pod)?;
        let order = Order { container: container.name.clone(), dir, recipient: Some(recipient) };
        order.write()?;
        Ok(order.answer(seconds))
    }

    /// Says that a checkpoint has begun, and makes a place and a key for it.
    fn prepare(&self, namespace: &str, name: &str, pod: &Value) -> Result<(PathBuf, String)> {
        let mut status = begun(pod, &self.name);
        status["machine"] = json!(self.machine);
        self.change(namespace, name, |object| {
            // What the controller writes alone stays as it is.
            let kept =
                ["claimedBy", "wrappedKey"].map(|name| (name, object["status"][name].take()));
            let target = crate::pod::condition(object, checkpoint::TARGET_READY).cloned();
            object["status"] = status.clone();
            for (name, value) in kept.into_iter().filter(|(_, value)| !value.is_null()) {
                object["status"][name] = value;
            }
            if let Some(target) = target {
                checkpoint::set(object, target);
            }
            // Whoever waits for it elsewhere fetches what there is of it while the pod runs.
            if checkpoint::claimed_by(object).is_some() {
                object["status"]["checkpointLocation"] = self.location();
            }
            Ok(())
        })?;
        let prepared = match volumes::objection(pod) {
            Some(why) => Err(Error::new(why)),
            None => self
                .keys
                .recipient(&self.api, namespace, name)
                .and_then(|recipient| Ok((self.store.begin(namespace, name)?, recipient))),
        };
        if let Err(error) = &prepared {
            self.failed(namespace, name, pod, &error.to_string())?;
        }
        prepared
    }

    /// Has a checkpoint made that somebody has ordered of a pod on this node, by way of the kubelet:
    /// it calls the runtime, and that is the wrapper.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub(super) fn carry_out(&self, object: &Value) -> Result<()> {
        let namespace = text(object, "/metadata/namespace");
        let name = text(object, "/metadata/name");
        let source = text(object, "/spec/sourcePod/name");
        let pod = self.api.get(&format!("/api/v1/namespaces/{namespace}/pods/{source}"))?;
        let Some(pod) = pod.filter(|pod| self.has(pod, object)) else {
            return Ok(());
        };
        let uid = text(&pod, "/metadata/uid").to_owned();
        {
            let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            if saves.contains_key(&uid) {
                // It is looked at again when that is over.
                return Ok(());
            }
            let name = name.to_owned();
            let saving = Saving { name, order: None, ordered: true, done: false, until: None };
            saves.insert(uid.clone(), saving);
        }
        let result = self.ordered(namespace, name, &pod);
        let reported = {
            let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            let reported = saves.remove(&uid).is_some_and(|saving| saving.done);
            self.saved.notify_all();
            reported
        };
        match result {
            // The kubelet gets nothing for itself, and says so.
            _ if reported => Ok(()),
            // Somebody was first.
            Ok(false) => Ok(()),
            Ok(true) => {
                self.failed(namespace, name, &pod, "the runtime of the pod is not Torpor's")
            }
            Err(error) => self.failed(namespace, name, &pod, &error.to_string()),
        }
    }

    /// Whether a pod runs here, and is that of an order.
    fn has(&self, pod: &Value, object: &Value) -> bool {
        let wanted = text(object, "/spec/sourcePod/uid");
        text(pod, "/spec/nodeName") == self.name
            && is_ours(pod)
            && text(pod, "/metadata/deletionTimestamp").is_empty()
            && (wanted.is_empty() || wanted == text(pod, "/metadata/uid"))
    }

    /// Makes the kubelet call the wrapper; `false` if the order is none any more.
    fn ordered(&self, namespace: &str, name: &str, pod: &Value) -> Result<bool> {
        let object = self.api.get(&path(namespace, name))?.filter(is_ordered);
        let Some(object) = object else { return Ok(false) };
        let seconds = object["spec"]["timeoutSeconds"].as_u64().unwrap_or(60).clamp(1, 3600);
        let seconds = probes::limited(pod, seconds)?;
        let (dir, recipient) = self.prepare(namespace, name, pod)?;
        // Whoever waits for a pod that moves waits for as long as it is frozen.
        let ahead = ends_its_pod(&object);
        let order = Answer::Save { dir, recipient: Some(recipient), seconds, ahead };
        {
            let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(saving) = saves.get_mut(text(pod, "/metadata/uid")) {
                saving.order = Some(order);
            }
        }
        let statuses = pod["status"]["containerStatuses"].as_array();
        let mut running = statuses.into_iter().flatten();
        let first = running.find(|status| status["state"]["running"].is_object());
        let first = first.ok_or_else(|| Error::new("no container of the pod runs"))?;
        let place = format!(
            "{}/checkpoint/{namespace}/{}/{}",
            self.kubelet,
            text(pod, "/metadata/name"),
            text(first, "/name")
        );
        let whole = Duration::from_secs(if ahead { 2 * seconds } else { seconds });
        let limit = whole + HOLD + Duration::from_secs(10);
        self.api.post_here(&format!("{place}?timeout={}", limit.as_secs()), limit)?;
        Ok(true)
    }

    /// What the wrapper is to do that the kubelet has called for a checkpoint.
    pub(super) fn checkpoint(&self, container: &Container) -> Answer {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let order = saves.get_mut(&container.uid).and_then(|saving| saving.order.take());
        order.unwrap_or(Answer::Plain)
    }

    pub(super) fn saved(&self, container: &Container, report: &SavedPod<'_>) -> Result<Answer> {
        let &SavedPod { containers, error, frozen_ms, waits } = report;
        let until = Instant::now() + Duration::from_secs(waits).saturating_sub(SOONER);
        let (name, ordered) = {
            let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            match saves.get(&container.uid) {
                Some(saving) => (saving.name.clone(), saving.ordered),
                // Begun by the agent before this one.
                None => (name_of(&container.pod, &container.uid), false),
            }
        };
        let namespace = &container.namespace;
        if let Some(error) = error {
            let pod = self.pod(container)?.unwrap_or_default();
            let hint = Budget::of(&pod).filter(|_| ordered).map(|budget| budget.hint());
            let error = [error].into_iter().chain(hint.as_deref()).collect::<Vec<_>>().join("; ");
            self.failed(namespace, &name, &pod, &error)?;
            return Ok(Answer::Noted);
        }
        let size = self.store.complete(namespace, &name)?;
        let complete = self.change(namespace, &name, |object| {
            let names = own(containers, &object["status"]["checkpointedPodTemplate"]["spec"]);
            let status = &mut object["status"];
            status["checkpointedContainers"] = json!(names);
            status["completionTime"] = json!(time::format(time::now()));
            status["sizeBytes"] = json!(size);
            status["frozenMilliseconds"] = json!(frozen_ms);
            status["checkpointLocation"] = self.location();
            checkpoint::set(object, ready(true, "CheckpointCompleted", ""));
            Ok(())
        });
        // The API server may have taken what it did not answer to, or the wrapper has not waited for: its pod goes on.
        let object = match complete {
            Ok(object) if ordered || Instant::now() < until => object,
            complete => {
                let late = "the API server has not answered in time: the pod was told to end";
                let error = complete.err().unwrap_or_else(|| Error::new(late));
                // First what is here, without which nobody continues from it.
                self.store.remove(namespace, &name)?;
                let pod = self.pod(container)?.unwrap_or_default();
                self.failed(namespace, &name, &pod, &error.to_string())?;
                return Err(error);
            }
        };
        self.counters.add("pods_saved_total", 1);
        self.counters.add("frozen_milliseconds_total", frozen_ms);
        self.counters.add("saved_bytes_total", size);
        match (ordered, ends_its_pod(&object)) {
            (true, true) => {
                let frozen = Duration::from_millis(frozen_ms);
                let budget = self.pod(container).ok().flatten().and_then(|pod| Budget::of(&pod));
                let whole = budget.map_or(HOLD, |budget| Duration::from_secs(budget.seconds));
                Ok(self.hold(container, &name, whole.saturating_sub(frozen).min(HOLD)))
            }
            (true, false) => Ok(Answer::Thaw),
            (false, _) => Ok(Answer::Noted),
        }
    }

    /// Where others ask for what was made here.
    fn location(&self) -> Value {
        let peer = json!({ "address": self.address, "certificate": self.identity().pem });
        json!({ "type": "Peer", "peer": peer })
    }

    /// Waits, with the pod frozen, for what becomes of it. Its end is its deletion, which the controller
    /// asks for when the target runs. Only if it is certain that no target does, it goes on.
    pub(super) fn hold(&self, container: &Container, name: &str, limit: Duration) -> Answer {
        let until = Instant::now() + limit;
        let place = path(&container.namespace, name);
        while Instant::now() < until {
            match self.pod(container) {
                Ok(None) => return Answer::Noted,
                Ok(Some(pod)) if !text(&pod, "/metadata/deletionTimestamp").is_empty() => {
                    return Answer::Noted;
                }
                // The API server may be back in time.
                _ => {}
            }
            match self.api.get(&place) {
                Ok(None) => return Answer::Thaw,
                Ok(Some(object)) if !is_ready(&object) => return Answer::Thaw,
                _ => {}
            }
            sleep(STEP);
        }
        let taken_back = self.change(&container.namespace, name, |object| {
            if text(object, "/status/restoringOn").is_empty() {
                let why = format!("its target has not come within {} s", limit.as_secs());
                checkpoint::set(object, ready(false, "CheckpointFailed", &why));
                return Ok(());
            }
            Err(Error::new("its target has begun"))
        });
        if taken_back.is_ok() { Answer::Thaw } else { Answer::Noted }
    }

    /// Says that a pod could not be saved.
    fn failed(&self, namespace: &str, name: &str, pod: &Value, error: &str) -> Result<()> {
        tell!("{namespace}/{}: not saved: {error}", text(pod, "/metadata/name"));
        self.counters.add("pods_not_saved_total", 1);
        self.store.remove(namespace, name)?;
        let lost = self.lost(namespace, pod)?;
        let changed = self.change(namespace, name, |object| {
            checkpoint::set(object, ready(false, "CheckpointFailed", error));
            // An order that nobody has begun to carry out.
            object["status"]["nodeName"] = json!(self.name);
            if gives_way(object) {
                object["status"]["lostWorkSeconds"] = json!(lost);
            }
            Ok(())
        })?;
        if gives_way(&changed) {
            self.counters.add("lost_work_seconds_total", lost);
        }
        if !pod.is_null() {
            event::tell(&self.api, Kind::ColdPod, pod, "NotSaved", error);
        }
        Ok(())
    }

    /// How many seconds of work a pod loses that ends now: since its last checkpoint, or since it has begun.
    fn lost(&self, namespace: &str, pod: &Value) -> Result<u64> {
        let all = self.api.list(&format!("{GROUP}/namespaces/{namespace}/podcheckpoints"))?;
        let is_of_it =
            |one: &&Value| text(one, "/status/sourcePodUID") == text(pod, "/metadata/uid");
        let saved = all.iter().filter(|one| is_ready(one)).filter(is_of_it);
        let saved = saved.filter_map(|one| time::parse(text(one, "/status/completionTime")));
        let since = saved.chain(time::parse(text(pod, "/status/startTime"))).max();
        let lost = since.map_or(0, |since| time::now().saturating_sub(since));
        Ok(u64::try_from(lost).unwrap_or(0))
    }

    /// The saving of a pod has come to its end.
    pub(super) fn ended(&self, uid: &str) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(saving) = saves.get_mut(uid) {
            saving.done = true;
        }
        // Pods are not told apart by their uids for ever.
        if saves.len() > 10_000 {
            saves.retain(|_, saving| !saving.done);
        }
        self.saved.notify_all();
    }
}

/// The containers that a pod like this one has again: those that debug it are not started in its replacement.
fn own(saved: &[String], spec: &Value) -> Vec<Value> {
    let list = |name: &str| spec[name].as_array().into_iter().flatten();
    let names: Vec<&str> =
        list("containers").chain(list("initContainers")).map(|one| text(one, "/name")).collect();
    let saved = saved.iter().filter(|name| names.contains(&name.as_str()));
    saved.map(|name| json!({ "name": name })).collect()
}

/// How many seconds there are to save a pod whose time is over at `end`; `None` if there are none.
fn left(end: i64, now: i64) -> Option<u64> {
    let left = end.saturating_sub(now).saturating_sub(RESERVE);
    u64::try_from(left).ok().filter(|left| *left > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debugger_is_no_container_of_the_pod() {
        let saved = ["debugger", "main", "sidecar"].map(str::to_owned);
        let spec = json!({
            "containers": [{ "name": "main" }], "initContainers": [{ "name": "sidecar" }],
        });
        assert_eq!(json!(own(&saved, &spec)), json!([{ "name": "main" }, { "name": "sidecar" }]));
    }

    #[test]
    fn some_of_the_time_is_for_who_cannot_be_saved() {
        assert_eq!(left(30, 0), Some(28));
        assert_eq!(left(30, 28), None, "there is no time left");
        assert_eq!(left(0, i64::MAX), None);
    }
}
