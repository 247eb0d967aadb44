//! What it costs to take a pod away that runs: it stands on the pod, where whoever chooses among pods can read it.

use serde_json::Value;

use super::decide::{Action, is_leaving};
use crate::checkpoint::{claimed_by, is_ready};
use crate::pod::{
    LAST_CHECKPOINT, SAVE_COST, SAVED_BYTES, annotation, is_ours, template_hash, text,
};

/// What there is to say of the pods that run.
#[must_use]
pub(super) fn decide(pods: &[Value], checkpoints: &[Value]) -> Vec<Action> {
    let complete: Vec<&Value> = checkpoints.iter().filter(|one| is_ready(one)).collect();
    let runs =
        |pod: &&Value| is_ours(pod) && !is_leaving(pod) && text(pod, "/status/phase") == "Running";
    let news = pods.iter().filter(runs).filter_map(|pod| {
        let mut notes = known(pod, &complete);
        notes.retain(|(name, value)| annotation(pod, name) != Some(value.as_str()));
        (!notes.is_empty()).then(|| Action::Weigh { pod: pod.clone(), notes })
    });
    news.collect()
}

/// What is known of a pod: from its own last checkpoint, or for the first time from another one of its template.
fn known(pod: &Value, complete: &[&Value]) -> Vec<(&'static str, String)> {
    let uid = text(pod, "/metadata/uid");
    let is_own =
        |one: &&&Value| text(one, "/status/sourcePodUID") == uid || claimed_by(one) == Some(uid);
    if let Some(own) = newest(complete.iter().filter(is_own)) {
        return of_own(own);
    }
    if annotation(pod, SAVE_COST).is_some() {
        return Vec::new();
    }
    let of_namespace =
        |one: &&&Value| text(one, "/metadata/namespace") == text(pod, "/metadata/namespace");
    let mut alike = complete.iter().filter(of_namespace).peekable();
    if alike.peek().is_none() {
        return Vec::new();
    }
    let hash = template_hash(pod);
    let alike = alike.filter(|one| text(one, "/status/templateHash") == hash);
    newest(alike).map(of_alike).unwrap_or_default()
}

fn newest<'a>(all: impl Iterator<Item = &'a &'a Value>) -> Option<&'a Value> {
    all.copied().max_by_key(|one| text(one, "/status/completionTime"))
}

/// What the last checkpoint of a pod, or the one that it continues from, says of it.
#[must_use]
pub(super) fn of_own(checkpoint: &Value) -> Vec<(&'static str, String)> {
    let time = text(checkpoint, "/status/completionTime").to_owned();
    let mut notes = of_alike(checkpoint);
    notes.push((LAST_CHECKPOINT, time));
    notes
}

/// What the checkpoint of one pod says of others of its template: how long they would be frozen, and how much is saved.
fn of_alike(checkpoint: &Value) -> Vec<(&'static str, String)> {
    let number = |name: &str| checkpoint["status"][name].as_u64().unwrap_or(0).to_string();
    vec![(SAVE_COST, number("frozenMilliseconds")), (SAVED_BYTES, number("sizeBytes"))]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::{begun, new, ready, set};

    fn pod(uid: &str) -> Value {
        json!({
            "metadata": { "namespace": "a", "name": uid, "uid": uid },
            "spec": { "runtimeClassName": "torpor", "containers": [{ "name": "c", "image": "i" }] },
            "status": { "phase": "Running" },
        })
    }

    /// A complete checkpoint of a pod.
    fn saved(source: &Value, time: &str, frozen: u64, bytes: u64) -> Value {
        let mut one = new(source, time, 30);
        one["status"] = begun(source, "node1");
        one["status"]["completionTime"] = json!(time);
        one["status"]["frozenMilliseconds"] = json!(frozen);
        one["status"]["sizeBytes"] = json!(bytes);
        set(&mut one, ready(true, "CheckpointCompleted", ""));
        one
    }

    /// What is written on the only pod that there is something to say of.
    fn told(pod: &Value, checkpoints: &[Value]) -> Value {
        let actions = decide(std::slice::from_ref(pod), checkpoints);
        let mut told = json!({});
        for action in actions {
            let Action::Weigh { notes, .. } = action else { panic!("{action:?}") };
            notes.into_iter().for_each(|(name, value)| told[name] = json!(value));
        }
        told
    }

    #[test]
    fn a_pod_says_what_its_last_checkpoint_was() {
        let first = saved(&pod("u"), "2026-01-01T00:00:00Z", 50, 1000);
        let last = saved(&pod("u"), "2026-01-02T00:00:00Z", 70, 2000);
        let mut failed = saved(&pod("u"), "2026-01-03T00:00:00Z", 90, 3000);
        set(&mut failed, ready(false, "CheckpointFailed", ""));
        let expected = json!({
            LAST_CHECKPOINT: "2026-01-02T00:00:00Z", SAVE_COST: "70", SAVED_BYTES: "2000",
        });
        let all = [first, last, failed];
        assert_eq!(told(&pod("u"), &all), expected);
        // The pod that continues from one says the same, and nothing is written twice.
        let mut claimed = all[1].clone();
        claimed["status"]["claimedBy"] = json!({ "uid": "v" });
        let mut next = pod("v");
        assert_eq!(told(&next, &[claimed.clone()]), expected);
        next["metadata"]["annotations"] = expected;
        assert_eq!(told(&next, &[claimed]), json!({}));
    }

    #[test]
    fn a_pod_that_was_never_saved_is_estimated_once() {
        let other = saved(&pod("u"), "2026-01-01T00:00:00Z", 50, 1000);
        let expected = json!({ SAVE_COST: "50", SAVED_BYTES: "1000" });
        let mut new = pod("v");
        assert_eq!(told(&new, std::slice::from_ref(&other)), expected);
        new["metadata"]["annotations"] = expected;
        let later = saved(&pod("u"), "2026-01-02T00:00:00Z", 70, 2000);
        assert_eq!(told(&new, &[other.clone(), later]), json!({}));
        let mut different = pod("w");
        different["spec"]["containers"][0]["image"] = json!("j");
        let mut foreign = pod("w");
        foreign["metadata"]["namespace"] = json!("b");
        for pod in [different, foreign] {
            assert_eq!(told(&pod, std::slice::from_ref(&other)), json!({}));
        }
    }

    #[test]
    fn pods_that_do_not_run_are_left_alone() {
        let other = saved(&pod("u"), "2026-01-01T00:00:00Z", 50, 1000);
        let mut waits = pod("u");
        waits["status"]["phase"] = json!("Pending");
        let mut leaves = pod("u");
        leaves["metadata"]["deletionTimestamp"] = json!("2999-01-01T00:00:00Z");
        let mut strange = pod("u");
        strange["spec"]["runtimeClassName"] = json!("runc");
        for pod in [waits, leaves, strange] {
            assert_eq!(told(&pod, std::slice::from_ref(&other)), json!({}));
        }
    }
}
