//! What the controller does about what it has decided.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::Controller;
use super::cost;
use super::decide::Action;
use super::nodes::{keep_to, machine_of};
use super::webhook::{pointer, put};
use crate::api::GROUP;
use crate::checkpoint::{
    EXPECTED, NODE_LABEL, REPLACED, claimed_by, is_shared, lost_work, path, ready, set,
    set_memory_comes,
};
use crate::error::Result;
use crate::event::{self, Kind};
use crate::pod::{
    CONNECTIONS, GATE, LET_GO, LOST_WORK, RESTORE_FROM, RESTORE_POLICY, WAITS_SINCE, controller_of,
    gates, is_ours, text,
};
use crate::time;

impl Controller {
    /// Carries an action out.
    ///
    /// # Errors
    /// If the API server refuses it, or somebody was first (a conflict).
    pub(super) fn carry_out(&self, action: &Action) -> Result<()> {
        match action {
            Action::Claim { pod, checkpoint } => {
                let name = text(checkpoint, "/metadata/name");
                let is_expected = self.claim(pod, checkpoint)?;
                let mut notes = cost::of_own(checkpoint);
                notes.push((RESTORE_FROM, name.to_owned()));
                let places = self.ungate(pod, &notes, Some(checkpoint))?;
                self.counters.add("pods_continued_total", 1);
                let text = format!("continues from {name}{places}");
                self.note(pod, "CheckpointClaimed", &text);
                // Last of all: where there is room, the pod has a node by then, and the others leave it alone.
                if is_expected {
                    self.announce(checkpoint, true)?;
                }
            }
            Action::Queue { pod, checkpoint } => self.queue(pod, checkpoint)?,
            Action::Warm { pod, checkpoint, always } => {
                let name = text(checkpoint, "/metadata/name");
                let mut notes = vec![(RESTORE_FROM, name.to_owned())];
                if *always {
                    notes.push((RESTORE_POLICY, "Always".to_owned()));
                }
                let places = self.ungate(pod, &notes, Some(checkpoint))?;
                self.counters.add("pods_warm_total", 1);
                self.note(pod, "SnapshotChosen", &format!("starts from {name}{places}"));
            }
            Action::Ungate { pod, reason, lost } => {
                let mut notes = Vec::new();
                if let Some((one, seconds)) = lost.as_ref().and_then(|o| Some((o, lost_work(o)?))) {
                    self.reserve(pod, one)?;
                    notes.push((LOST_WORK, seconds.to_string()));
                }
                self.ungate(pod, &notes, None)?;
                self.counters.add("pods_cold_total", 1);
                self.note(pod, "ColdStart", reason);
            }
            Action::Release { checkpoint } => {
                let mut free = checkpoint.clone();
                if let Some(status) = free["status"].as_object_mut() {
                    status.remove("claimedBy");
                    status.remove("expectedOn");
                }
                set_memory_comes(&mut free, false);
                self.status(&free)?;
            }
            Action::Remove { checkpoint } => self.api.delete(&place(checkpoint))?,
            Action::Order { object } => {
                let namespace = text(object, "/metadata/namespace");
                let list = format!("{GROUP}/namespaces/{namespace}/podcheckpoints");
                self.api.create(&list, object)?;
            }
            Action::Assign { checkpoint } => self.assign(checkpoint)?,
            Action::Reserve { pod, checkpoint } => self.reserve(pod, checkpoint)?,
            Action::Phase { migration } => self.phase(migration)?,
            Action::Create { pod, like } => self.create(pod, like)?,
            Action::Spread { checkpoint } => self.spread(checkpoint)?,
            Action::Weigh { pod, notes } => self.annotate(pod, notes, Vec::new())?,
            Action::Adopt { source, target } => self.adopt(source, target)?,
            Action::Delete { pod, seconds } => self.delete(pod, *seconds)?,
        }
        Ok(())
    }

    /// Writes down that a checkpoint is for a pod, and which nodes are to have it before that one is there. Returns whether
    /// there are any, which are to be told.
    fn claim(&self, pod: &Value, checkpoint: &Value) -> Result<bool> {
        // Nodes were told when the pod began to wait its turn.
        if claimed_by(checkpoint) == Some(text(pod, "/metadata/uid")) {
            return Ok(false);
        }
        let expected = self.expected(checkpoint, &pod["spec"]);
        self.reserve(pod, expected.as_ref().unwrap_or(checkpoint))?;
        Ok(expected.is_some())
    }

    /// Has a pod wait its turn: its checkpoint is kept for it, and comes to where it may go.
    fn queue(&self, pod: &Value, checkpoint: &Value) -> Result<()> {
        let is_expected = !is_shared(checkpoint) && self.claim(pod, checkpoint)?;
        self.annotate(pod, &[(WAITS_SINCE, time::format(time::now()))], Vec::new())?;
        self.counters.add("pods_queued_total", 1);
        let name = text(checkpoint, "/metadata/name");
        let message = format!("goes on from {name} when nodes have restored others");
        self.note(pod, "WaitsItsTurn", &message);
        match is_expected {
            true => self.announce(checkpoint, true),
            false => Ok(()),
        }
    }

    /// Writes down whom a checkpoint is for, if nobody else was first.
    fn reserve(&self, pod: &Value, checkpoint: &Value) -> Result<()> {
        let mut claimed = checkpoint.clone();
        let claim = json!({ "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"] });
        if claimed["status"]["claimedBy"] == claim {
            return Ok(());
        }
        claimed["status"]["claimedBy"] = claim;
        self.status(&claimed)
    }

    /// A checkpoint that says which nodes are to have it before a pod of a specification is there; nothing if none are.
    fn expected(&self, checkpoint: &Value, spec: &Value) -> Option<Value> {
        let nodes = self.nodes.few_that_fit(checkpoint, spec);
        (!nodes.is_empty()).then(|| {
            let mut expected = checkpoint.clone();
            expected["status"]["expectedOn"] = json!(nodes);
            expected
        })
    }

    /// Has the nodes where the pods of a snapshot may go fetch it before there are any, if those are few. Where no node is
    /// known, nothing is said: it is looked again.
    fn spread(&self, snapshot: &Value) -> Result<()> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let template = &snapshot["status"]["checkpointedPodTemplate"];
        let expected = self.expected(snapshot, &template["spec"]);
        if let Some(expected) = &expected {
            self.status(expected)?;
        }
        self.announce(snapshot, expected.is_some())
    }

    /// Says whether nodes are to fetch a checkpoint before anybody needs it there: their agents look at those alone of
    /// which it is said.
    fn announce(&self, checkpoint: &Value, is_expected: bool) -> Result<()> {
        let said = json!(is_expected.to_string());
        let patch = json!([put(checkpoint, "labels", EXPECTED, said)]);
        self.api.patch(&place(checkpoint), &patch).map(drop)
    }

    /// Tells the agent of the node that the pod is on to make a checkpoint.
    fn assign(&self, checkpoint: &Value) -> Result<()> {
        let namespace = text(checkpoint, "/metadata/namespace");
        let source = text(checkpoint, "/spec/sourcePod/name");
        let pod = self.api.get(&format!("/api/v1/namespaces/{namespace}/pods/{source}"))?;
        let uid = text(checkpoint, "/spec/sourcePod/uid");
        let failed = "CheckpointFailed";
        let why = match &pod {
            None => Some((failed, "there is no such pod")),
            Some(pod) if !uid.is_empty() && text(pod, "/metadata/uid") != uid => {
                Some((REPLACED, "another pod has its name by now"))
            }
            Some(pod) if !is_ours(pod) => {
                Some((failed, "the pod does not run under the runtime class torpor"))
            }
            Some(pod) if text(pod, "/spec/nodeName").is_empty() => {
                Some((failed, "the pod is on no node"))
            }
            Some(_) => None,
        };
        if let Some((reason, message)) = why {
            let mut failed = checkpoint.clone();
            set(&mut failed, ready(false, reason, message));
            return self.status(&failed);
        }
        let node = pod.map(|pod| pod["spec"]["nodeName"].clone());
        let patch = json!([put(checkpoint, "labels", NODE_LABEL, json!(node))]);
        let mut told = self.api.patch(&place(checkpoint), &patch)?;
        // If the agent was first, that is a conflict, and it has more to say.
        set(&mut told, ready(false, "Pending", "the agent of its node is told"));
        self.status(&told)
    }

    fn phase(&self, migration: &Value) -> Result<()> {
        let (namespace, name) =
            (text(migration, "/metadata/namespace"), text(migration, "/metadata/name"));
        let place = format!("{GROUP}/namespaces/{namespace}/podmigrations/{name}/status");
        self.api.replace(&place, migration)?;
        match text(migration, "/status/phase") {
            "Succeeded" => self.counters.add("pods_moved_total", 1),
            "Failed" => self.counters.add("moves_failed_total", 1),
            _ => {}
        }
        Ok(())
    }

    /// Makes a pod, which goes to nodes alone that are like one, if that is named.
    fn create(&self, pod: &Value, like: &str) -> Result<()> {
        let mut pod = pod.clone();
        if !like.is_empty() {
            let fit = self.nodes.that_fit(&machine_of(&self.api, like), &pod["spec"]);
            if let Some(fit) = fit.filter(|fit| !fit.is_empty()) {
                keep_to(&mut pod["spec"], &fit);
            }
        }
        let namespace = text(&pod, "/metadata/namespace");
        self.api.create(&format!("/api/v1/namespaces/{namespace}/pods"), &pod).map(drop)
    }

    /// Lets the target take the place of the source among the pods of its owner, and ends the source.
    fn adopt(&self, source: &Value, target: &Value) -> Result<()> {
        if controller_of(source).is_some() {
            // The owner sees one pod too many, and lets the cheapest go.
            let cost = "controller.kubernetes.io/pod-deletion-cost";
            self.annotate(source, &[(cost, "-2147483648".to_owned())], Vec::new())?;
        }
        let mut labels = target["metadata"]["labels"].as_object().cloned().unwrap_or_default();
        labels.extend(source["metadata"]["labels"].as_object().cloned().unwrap_or_default());
        let labels = json!({ "op": "add", "path": "/metadata/labels", "value": labels });
        self.annotate(target, &[], vec![labels])?;
        let name = text(source, "/metadata/name");
        self.note(target, "Moved", &format!("continues {name}; {CONNECTIONS}"));
        self.delete(source, None)
    }

    fn delete(&self, pod: &Value, seconds: Option<u64>) -> Result<()> {
        // Nothing is done to a pod that is not the one that was seen.
        let mut options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions",
            "preconditions": { "uid": pod["metadata"]["uid"] },
        });
        if let Some(seconds) = seconds {
            options["gracePeriodSeconds"] = json!(seconds);
        }
        self.api.delete_with(&of_pod(pod), &options)
    }

    fn status(&self, checkpoint: &Value) -> Result<()> {
        self.api.replace(&format!("{}/status", place(checkpoint)), checkpoint).map(drop)
    }

    /// Takes the gate away, says what the pod continues from, and keeps it to the nodes where that goes on: in one
    /// step. Returns what there is to tell of the nodes.
    fn ungate(
        &self,
        pod: &Value,
        notes: &[(&str, String)],
        checkpoint: Option<&Value>,
    ) -> Result<&'static str> {
        let left: Vec<Value> =
            gates(pod).filter(|name| *name != GATE).map(|name| json!({ "name": name })).collect();
        let gates = json!({ "op": "replace", "path": "/spec/schedulingGates", "value": left });
        let mut changes = vec![gates];
        let machine = checkpoint.map(|one| &one["status"]["machine"]);
        let fit = machine.and_then(|machine| self.nodes.that_fit(machine, &pod["spec"]));
        let nowhere = fit.as_ref().is_some_and(BTreeSet::is_empty);
        if let Some(fit) = fit.filter(|fit| !fit.is_empty()) {
            let mut spec = json!({ "affinity": pod["spec"]["affinity"] });
            keep_to(&mut spec, &fit);
            let affinity = &spec["affinity"];
            changes.push(json!({ "op": "add", "path": "/spec/affinity", "value": affinity }));
        }
        let mut notes = notes.to_vec();
        if checkpoint.is_some() {
            notes.push((LET_GO, time::format(time::now())));
        }
        self.annotate(pod, &notes, changes)?;
        // To wait for a node that may never come would be worse than a cold start.
        Ok(if nowhere {
            ", and may start cold: no node that takes pods is known to fit"
        } else {
            ""
        })
    }

    /// Annotates a pod, and changes it in other ways, in one step.
    fn annotate(
        &self,
        pod: &Value,
        notes: &[(&str, String)],
        mut changes: Vec<Value>,
    ) -> Result<()> {
        let uid = &pod["metadata"]["uid"];
        // Nothing is done to a pod that is not the one that was seen.
        changes.insert(0, json!({ "op": "test", "path": "/metadata/uid", "value": uid }));
        if pod["metadata"]["annotations"].is_object() {
            changes.extend(notes.iter().map(|(name, value)| {
                let place = pointer("/metadata/annotations", name);
                json!({ "op": "add", "path": place, "value": value })
            }));
        } else if !notes.is_empty() {
            let all: serde_json::Map<String, Value> =
                notes.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
            changes.push(json!({ "op": "add", "path": "/metadata/annotations", "value": all }));
        }
        self.api.patch(&of_pod(pod), &Value::Array(changes)).map(drop)
    }

    /// Tells people. What cannot be told is done nevertheless.
    fn note(&self, pod: &Value, reason: &str, message: &str) {
        // What has nothing to continue is nobody's news.
        if reason == "ColdStart" && controller_of(pod).is_some() && message.starts_with("there is")
        {
            return;
        }
        event::tell(&self.api, Kind::Pod, pod, reason, message);
    }
}

fn place(checkpoint: &Value) -> String {
    path(text(checkpoint, "/metadata/namespace"), text(checkpoint, "/metadata/name"))
}

fn of_pod(pod: &Value) -> String {
    let (namespace, name) = (text(pod, "/metadata/namespace"), text(pod, "/metadata/name"));
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}
