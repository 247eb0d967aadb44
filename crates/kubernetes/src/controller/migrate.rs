//! Pods that move: the target comes first, and waits; the source is saved, and stays frozen until the
//! target runs; only then does it end. What fails before is undone: the target goes, then the source
//! goes on.

use serde_json::{Value, json};

use super::decide::{Action, is_leaving};
use super::nodes::keep_away;
use crate::checkpoint::{
    self, NODE_LABEL, TARGET_READY, claimed_by, is_in_progress, is_ready, is_used,
};
use crate::pod::{
    CONNECTIONS, GATED, MIGRATION, RESTORE_FROM, RESTORE_POLICY, condition, controller_of,
    is_gated, is_ours, revision, template, text,
};
use crate::time;

/// How many pods leave a node at a time.
const FROM_NODE: usize = 2;
/// How many move in a cluster at a time.
const AT_A_TIME: usize = 5;
/// How long a pod may take to move, in seconds, if nothing else is said.
const LIMIT: i64 = 150;

/// Decides.
#[must_use]
pub(super) fn decide(
    migrations: &[Value],
    pods: &[Value],
    checkpoints: &[Value],
    now: i64,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut moving: Vec<&str> =
        migrations.iter().filter(|one| moves(one)).map(|m| text(m, "/status/sourceNode")).collect();
    for migration in migrations {
        let sight = Sight::of(migration, pods, checkpoints, now);
        match text(migration, "/status/phase") {
            "Succeeded" | "Failed" => {}
            "" | "Pending" => {
                let node = sight.source.map_or("", |pod| text(pod, "/spec/nodeName"));
                let from = moving.iter().filter(|other| **other == node).count();
                if moving.len() < AT_A_TIME && from < FROM_NODE {
                    let action = sight.begin();
                    if moves(action.migration()) {
                        moving.push(node);
                    }
                    actions.push(action.into());
                } else if text(migration, "/status/phase").is_empty() {
                    actions.push(sight.phase("Pending", "others move").into());
                }
            }
            _ => actions.extend(sight.go_on()),
        }
    }
    actions
}

fn moves(migration: &Value) -> bool {
    !matches!(text(migration, "/status/phase"), "" | "Pending" | "Succeeded" | "Failed")
}

/// The status that a migration gets.
struct Phase(Value);

impl Phase {
    fn migration(&self) -> &Value {
        &self.0
    }
}

impl From<Phase> for Action {
    fn from(phase: Phase) -> Self {
        Self::Phase { migration: phase.0 }
    }
}

/// A migration, and what it is about.
struct Sight<'a> {
    migration: &'a Value,
    source: Option<&'a Value>,
    target: Option<&'a Value>,
    checkpoint: Option<&'a Value>,
    now: i64,
}

impl<'a> Sight<'a> {
    fn of(migration: &'a Value, pods: &'a [Value], checkpoints: &'a [Value], now: i64) -> Self {
        let namespace = text(migration, "/metadata/namespace");
        let find = |all: &'a [Value], name: &str| {
            all.iter().find(|one| {
                text(one, "/metadata/namespace") == namespace && text(one, "/metadata/name") == name
            })
        };
        let uid = text(migration, "/status/sourceUID");
        let source = find(pods, text(migration, "/spec/podName"));
        Self {
            migration,
            source: source.filter(|pod| uid.is_empty() || text(pod, "/metadata/uid") == uid),
            target: find(pods, text(migration, "/status/targetPod")),
            checkpoint: find(checkpoints, text(migration, "/status/checkpoint")),
            now,
        }
    }

    fn phase(&self, phase: &str, message: &str) -> Phase {
        let mut changed = self.migration.clone();
        changed["status"]["phase"] = json!(phase);
        changed["status"]["message"] = json!(message);
        if matches!(phase, "Succeeded" | "Failed") {
            changed["status"]["completionTime"] = json!(time::format(self.now));
        }
        Phase(changed)
    }

    fn begin(&self) -> Phase {
        let Some(source) = self.source else { return self.phase("Failed", "there is no such pod") };
        if !is_ours(source) || is_gated(source) || is_leaving(source) {
            return self.phase("Failed", "the pod does not run under the runtime class torpor");
        }
        if text(source, "/status/phase") != "Running" {
            return self.phase("Failed", "the pod does not run");
        }
        match controller_of(source).map(|owner| text(owner, "/kind")) {
            None | Some("ReplicaSet") => {}
            Some(kind) => {
                let why = format!(
                    "a pod of a {kind} cannot be there twice: evict it, and it continues elsewhere"
                );
                return self.phase("Failed", &why);
            }
        }
        let uid: String = text(self.migration, "/metadata/uid").chars().take(8).collect();
        let stem: String = text(source, "/metadata/name").chars().take(200).collect();
        let mut begun = self.phase("Scheduling", "").0;
        let status = &mut begun["status"];
        status["sourceUID"] = source["metadata"]["uid"].clone();
        status["sourceNode"] = source["spec"]["nodeName"].clone();
        status["targetPod"] = json!(format!("{stem}-{uid}"));
        status["checkpoint"] = json!(format!("{stem}-{uid}"));
        status["startTime"] = json!(time::format(self.now));
        Phase(begun)
    }

    fn go_on(&self) -> Vec<Action> {
        if self.migration["status"]["aborting"] == true {
            return self.abort();
        }
        if let Some(why) = self.failure() {
            let mut changed = self.migration.clone();
            changed["status"]["aborting"] = json!(true);
            changed["status"]["message"] = json!(why);
            return vec![Action::Phase { migration: changed }];
        }
        let Some(source) = self.source.filter(|pod| !is_leaving(pod)) else {
            return vec![self.phase("Succeeded", CONNECTIONS).into()];
        };
        let Some(checkpoint) = self.checkpoint else {
            return vec![Action::Order { object: self.order(source) }];
        };
        let Some(target) = self.target else {
            // Whoever names a node knows it.
            let named = !text(self.migration, "/spec/targetNode").is_empty();
            let like = if named { "" } else { text(source, "/spec/nodeName") };
            return vec![Action::Create { pod: self.twin(source), like: like.to_owned() }];
        };
        if claimed_by(checkpoint) != Some(text(target, "/metadata/uid")) {
            return vec![Action::Reserve { pod: target.clone(), checkpoint: checkpoint.clone() }];
        }
        let mut actions = Vec::new();
        let waits = condition(checkpoint, TARGET_READY).is_some();
        if waits && checkpoint["metadata"]["labels"][NODE_LABEL].is_null() {
            actions.push(Action::Assign { checkpoint: checkpoint.clone() });
        }
        if self.runs() {
            actions.push(Action::Adopt { source: source.clone(), target: target.clone() });
        }
        let phase = match () {
            () if is_ready(checkpoint) => "Running",
            () if waits => "TargetReady",
            () if condition(target, "PodReadyToStartContainers")
                .is_some_and(|one| one["status"] == "True") =>
            {
                "PreparingTarget"
            }
            () if !text(target, "/spec/nodeName").is_empty() => "Scheduled",
            () => "Scheduling",
        };
        let node = &target["spec"]["nodeName"];
        let known = &self.migration["status"];
        if known["phase"] != phase || known["targetNode"] != *node {
            let mut changed = self.phase(phase, "").0;
            changed["status"]["targetNode"] = node.clone();
            actions.push(Action::Phase { migration: changed });
        }
        actions
    }

    /// Why it has failed, if it has.
    fn failure(&self) -> Option<String> {
        if self.runs() {
            return None;
        }
        let began = time::parse(text(self.migration, "/status/startTime")).unwrap_or(self.now);
        let limit = self.migration["spec"]["timeoutSeconds"].as_i64().unwrap_or(LIMIT);
        if self.now.saturating_sub(began) > limit {
            return Some(format!("it has taken more than {limit} s"));
        }
        if let Some(failed) = self.checkpoint.filter(|one| !is_ready(one) && !is_in_progress(one)) {
            let ready = condition(failed, "Ready").map(|ready| text(ready, "/message"));
            return Some(format!("the pod was not saved: {}", ready.unwrap_or_default()));
        }
        let ended = |pod: &Value| {
            is_leaving(pod) || matches!(text(pod, "/status/phase"), "Failed" | "Succeeded")
        };
        if self.target.is_some_and(ended) {
            return Some("the target has ended".into());
        }
        if self.source.is_none_or(is_leaving) {
            return Some("the source has gone meanwhile".into());
        }
        let cold = self.checkpoint.and_then(|one| one["status"]["restoredContainers"].as_array());
        let cold = cold.into_iter().flatten().find(|one| one["restored"] == false);
        cold.map(|one| format!("the target was not restored: {}", text(one, "/message")))
    }

    /// First the target goes, then the source goes on.
    fn abort(&self) -> Vec<Action> {
        match (self.target, self.checkpoint) {
            (Some(target), _) if is_leaving(target) => Vec::new(),
            (Some(target), _) => vec![Action::Delete { pod: target.clone(), seconds: Some(1) }],
            (None, Some(checkpoint)) => vec![Action::Remove { checkpoint: checkpoint.clone() }],
            (None, None) => {
                let why = text(self.migration, "/status/message").to_owned();
                vec![self.phase("Failed", &why).into()]
            }
        }
    }

    /// Whether the target runs, restored.
    fn runs(&self) -> bool {
        let (Some(target), Some(checkpoint)) = (self.target, self.checkpoint) else { return false };
        let statuses = target["status"]["containerStatuses"].as_array();
        let containers = target["spec"]["containers"].as_array().map_or(0, Vec::len);
        let running = |all: &Vec<Value>| {
            all.len() == containers && all.iter().all(|one| one["state"]["running"].is_object())
        };
        let restored = checkpoint["status"]["restoredContainers"].as_array();
        let restored = restored.is_some_and(|all| all.iter().all(|one| one["restored"] == true));
        // An owner lets go of those of its pods that are not ready.
        let ready = condition(target, "Ready").is_some_and(|ready| ready["status"] == "True");
        statuses.is_some_and(running)
            && is_used(checkpoint)
            && restored
            && !is_leaving(target)
            && (ready || self.source.is_none_or(|source| controller_of(source).is_none()))
    }

    fn order(&self, source: &Value) -> Value {
        let name = text(self.migration, "/status/checkpoint");
        let mut object = checkpoint::new(source, name, 60);
        object["metadata"]["labels"] = json!({ MIGRATION: self.migration["metadata"]["name"] });
        object
    }

    /// The target: what the source is, elsewhere.
    fn twin(&self, source: &Value) -> Value {
        let mut spec = template(source)["spec"].take();
        keep_away(&mut spec, text(source, "/spec/nodeName"));
        let node = text(self.migration, "/spec/targetNode");
        if !node.is_empty() {
            spec["nodeSelector"]["kubernetes.io/hostname"] = json!(node);
        }
        let name = &self.migration["status"]["targetPod"];
        // It is of the same revision; an owner needs more labels than these to take it for one of its own.
        let mut labels = revision(source);
        labels[GATED] = json!("true");
        labels[MIGRATION] = self.migration["metadata"]["name"].clone();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": source["metadata"]["namespace"],
                "labels": labels,
                "annotations": {
                    RESTORE_FROM: self.migration["status"]["checkpoint"],
                    RESTORE_POLICY: "Always",
                },
            },
            "spec": spec,
        })
    }
}

#[cfg(test)]
mod tests;
