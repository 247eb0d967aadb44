//! What is done about pods behind the gate, and about checkpoints: a pure function of the objects.

use std::collections::HashSet;

use serde_json::Value;

use crate::checkpoint::{claimed_by, is_in_progress, is_ready, is_used, replica};
use crate::pod::{RESTORE_REQUEST, Replica, annotation, is_gated, is_ours, template_hash, text};
use crate::time;

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// The pod continues from the checkpoint.
    Claim {
        /// The pod.
        pod: Value,
        /// The checkpoint.
        checkpoint: Value,
    },
    /// The pod starts cold.
    Ungate {
        /// The pod.
        pod: Value,
        /// Why.
        reason: String,
    },
    /// The checkpoint is for somebody else again: the pod that it was for is gone.
    Release {
        /// The checkpoint.
        checkpoint: Value,
    },
    /// Nobody needs the checkpoint any more.
    Remove {
        /// The checkpoint.
        checkpoint: Value,
    },
}

/// How long things may take, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Behind the gate.
    pub gate: i64,
    /// A checkpoint that nobody claims.
    pub unclaimed: i64,
    /// A checkpoint that has been used, for people to look at.
    pub used: i64,
}

/// Decides.
#[must_use]
pub fn decide(pods: &[Value], checkpoints: &[Value], limits: Limits, now: i64) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut taken = HashSet::new();
    for pod in pods.iter().filter(|pod| is_gated(pod) && !is_leaving(pod)) {
        match of_pod(pod, pods, checkpoints, &taken, limits, now) {
            Some(Action::Claim { pod, checkpoint }) => {
                taken.insert(text(&checkpoint, "/metadata/uid").to_owned());
                actions.push(Action::Claim { pod, checkpoint });
            }
            Some(action) => actions.push(action),
            None => {}
        }
    }
    actions.extend(checkpoints.iter().filter_map(|one| of_checkpoint(one, pods, limits, now)));
    actions
}

fn is_leaving(pod: &Value) -> bool {
    !text(pod, "/metadata/deletionTimestamp").is_empty()
}

fn age(object: &Value, now: i64) -> i64 {
    let created = time::parse(text(object, "/metadata/creationTimestamp"));
    created.map_or(0, |created| now.saturating_sub(created))
}

fn of_pod(
    pod: &Value,
    pods: &[Value],
    checkpoints: &[Value],
    taken: &HashSet<String>,
    limits: Limits,
    now: i64,
) -> Option<Action> {
    let cold = |reason: &str| Some(Action::Ungate { pod: pod.clone(), reason: reason.into() });
    let claim = |checkpoint: &Value| {
        Some(Action::Claim { pod: pod.clone(), checkpoint: checkpoint.clone() })
    };
    let uid = text(pod, "/metadata/uid");
    // The claim was made, and the gate is still there: the last controller did not get further.
    if let Some(mine) = checkpoints.iter().find(|one| claimed_by(one) == Some(uid)) {
        return claim(mine);
    }
    let hash = template_hash(pod);
    let is_free = |one: &Value| {
        is_ready(one)
            && claimed_by(one).is_none()
            && !taken.contains(text(one, "/metadata/uid"))
            && text(one, "/status/templateHash") == hash
            && text(one, "/metadata/namespace") == text(pod, "/metadata/namespace")
    };
    if let Some(name) = annotation(pod, RESTORE_REQUEST) {
        // The webhook has asked whether whoever made the pod may have this one.
        let found =
            checkpoints.iter().find(|one| text(one, "/metadata/name") == name && is_free(one));
        return match found {
            Some(found) => claim(found),
            None if age(pod, now) >= limits.gate => cold("the checkpoint asked for does not fit"),
            None => None,
        };
    }
    let Some(wanted) = Replica::of(pod) else { return cold("nobody owns it") };
    let of_ours = |one: &&Value| replica(one) == wanted;
    let free = checkpoints.iter().filter(of_ours).filter(|one| is_free(one));
    if let Some(newest) = free.max_by_key(|one| text(one, "/status/completionTime").to_owned()) {
        return claim(newest);
    }
    if age(pod, now) >= limits.gate {
        return cold("no checkpoint has come in time");
    }
    let comes = checkpoints.iter().filter(of_ours).any(is_in_progress)
        || pods.iter().any(|other| {
            is_leaving(other)
                && is_ours(other)
                && !is_gated(other)
                && Replica::of(other).as_ref() == Some(&wanted)
                && !matches!(text(other, "/status/phase"), "Succeeded" | "Failed" | "Pending")
                && !has_failed(other, checkpoints)
        });
    if comes { None } else { cold("there is no checkpoint for it") }
}

/// Whether a pod that leaves could not be saved, or has been already.
fn has_failed(pod: &Value, checkpoints: &[Value]) -> bool {
    let uid = text(pod, "/metadata/uid");
    checkpoints.iter().any(|one| text(one, "/status/sourcePodUID") == uid && !is_in_progress(one))
}

fn of_checkpoint(one: &Value, pods: &[Value], limits: Limits, now: i64) -> Option<Action> {
    let remove = || Some(Action::Remove { checkpoint: one.clone() });
    if is_used(one) {
        return if age(one, now) >= limits.used { remove() } else { None };
    }
    let Some(uid) = claimed_by(one) else {
        return if age(one, now) >= limits.unclaimed { remove() } else { None };
    };
    let there = pods.iter().any(|pod| text(pod, "/metadata/uid") == uid);
    let began = one["status"]["restoredContainers"].as_array().is_some_and(|all| !all.is_empty());
    match (there, began) {
        (true, _) => None,
        // What it was good for is done, or was begun by a pod that is gone.
        (false, true) => remove(),
        (false, false) => Some(Action::Release { checkpoint: one.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{begun, new, ready};
    use crate::pod::GATE;
    use serde_json::json;

    const LIMITS: Limits = Limits { gate: 120, unclaimed: 86_400, used: 600 };
    const NOW: &str = "2026-01-01T00:01:00Z";

    fn pod(uid: &str, index: &str, gated: bool) -> Value {
        let mut pod = json!({
            "metadata": {
                "namespace": "a", "name": format!("web-{uid}"), "uid": uid,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": { "apps.kubernetes.io/pod-index": index },
                "ownerReferences": [{ "uid": "o", "controller": true }],
            },
            "spec": {
                "runtimeClassName": "torpor",
                "containers": [{ "name": "c", "image": "i" }],
            },
            "status": { "phase": if gated { "Pending" } else { "Running" } },
        });
        if gated {
            pod["spec"]["schedulingGates"] = json!([{ "name": GATE }]);
        }
        pod
    }

    fn checkpoint(source: &Value) -> Value {
        let uid = text(source, "/metadata/uid");
        let mut one = new(source, &format!("c-{uid}"), 30);
        one["metadata"]["uid"] = json!(format!("c{uid}"));
        one["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        one["status"] = begun(source, "n1");
        one["status"]["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
        one["status"]["completionTime"] = json!(NOW);
        one["status"]["checkpointedContainers"] = json!([{ "name": "c" }]);
        one
    }

    fn decided(pods: &[Value], checkpoints: &[Value]) -> Vec<Action> {
        decide(pods, checkpoints, LIMITS, time::parse(NOW).unwrap())
    }

    fn leaving(mut pod: Value) -> Value {
        pod["metadata"]["deletionTimestamp"] = json!(NOW);
        pod
    }

    #[test]
    fn each_replica_gets_its_own_once() {
        let olds: Vec<Value> =
            (0..100).map(|n| pod(&format!("o{n}"), &n.to_string(), false)).collect();
        let news: Vec<Value> =
            (0..100).map(|n| pod(&format!("n{n}"), &n.to_string(), true)).collect();
        let saved: Vec<Value> = olds.iter().rev().map(checkpoint).collect();
        let actions = decided(&news, &saved);
        assert_eq!(actions.len(), 100);
        for action in actions {
            let Action::Claim { pod, checkpoint } = action else { panic!("{action:?}") };
            assert_eq!(Replica::of(&pod).unwrap(), replica(&checkpoint));
        }
    }

    #[test]
    fn replicas_that_are_alike_share_nothing() {
        let saved: Vec<Value> = ["a", "b"].map(|n| checkpoint(&pod(n, "", false))).into();
        let news: Vec<Value> = ["x", "y", "z"].map(|n| pod(n, "", true)).into();
        let actions = decided(&news, &saved);
        let mut claimed = HashSet::new();
        for action in &actions[..2] {
            let Action::Claim { checkpoint, .. } = action else { panic!("{action:?}") };
            assert!(claimed.insert(text(checkpoint, "/metadata/uid")));
        }
        assert!(matches!(actions[2], Action::Ungate { .. }));
    }

    #[test]
    fn a_replacement_waits_while_its_predecessor_is_saved() {
        let (old, new) = (leaving(pod("o", "0", false)), pod("n", "0", true));
        assert_eq!(decided(&[old.clone(), new.clone()], &[]), []);
        let mut saving = checkpoint(&old);
        saving["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
        assert_eq!(decided(std::slice::from_ref(&new), std::slice::from_ref(&saving)), []);
        saving["status"]["conditions"] = json!([ready(false, "CheckpointFailed", "x")]);
        let actions = decided(&[old, new.clone()], &[saving]);
        assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
        let mut late = new;
        late["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
        let actions = decided(&[leaving(pod("o", "0", false)), late], &[]);
        assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
    }

    #[test]
    fn foreign_and_changed_pods_get_nothing() {
        let saved = checkpoint(&pod("o", "0", false));
        let mut foreign = pod("n", "0", true);
        foreign["metadata"]["namespace"] = json!("b");
        let mut changed = pod("n", "0", true);
        changed["spec"]["containers"][0]["image"] = json!("other");
        for pod in [foreign, changed] {
            let actions = decided(std::slice::from_ref(&pod), std::slice::from_ref(&saved));
            assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
            let mut asks = pod;
            asks["metadata"]["annotations"] = json!({ RESTORE_REQUEST: "c-o" });
            assert_eq!(decided(&[asks], std::slice::from_ref(&saved)), []);
        }
    }

    #[test]
    fn claims_are_finished_released_and_removed() {
        let new = pod("n", "0", true);
        let mut saved = checkpoint(&pod("o", "0", false));
        saved["status"]["claimedBy"] = json!({ "name": "web-n", "uid": "n" });
        let actions = decided(std::slice::from_ref(&new), std::slice::from_ref(&saved));
        assert!(matches!(actions.as_slice(), [Action::Claim { .. }]));
        let actions = decided(&[], std::slice::from_ref(&saved));
        assert!(matches!(actions.as_slice(), [Action::Release { .. }]));
        saved["status"]["restoredContainers"] = json!([{ "name": "other" }]);
        let actions = decided(&[], std::slice::from_ref(&saved));
        assert!(matches!(actions.as_slice(), [Action::Remove { .. }]));
    }
}
