//! Policies of snapshots: which pods are saved so that others of the same template start warm, and which
//! snapshots are kept.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::decide::{Action, age, is_being_fetched, is_leaving};
use super::placement::holds;
use crate::checkpoint::{self, is_in_progress, is_ready, is_sealed, is_shared};
use crate::pod::{condition, is_gated, is_ours, template_hash, text};

/// The label of the snapshots of a policy.
pub(super) const POLICY: &str = "torpor.dev/policy";
/// How long after a snapshot has failed another one is tried, in seconds.
const AGAIN: i64 = 300;
/// How many snapshots are kept, if a policy does not say.
const COUNT: u64 = 1;

/// What a policy says about the start of its pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Warm if there is a snapshot, and cold else.
    IfPresent,
    /// Warm; a pod waits for its snapshot, but for the first one, of which it is taken.
    Always,
    /// Cold.
    Never,
}

/// The first policy of those that select `pod`, in the order of their names.
fn of<'p>(policies: &'p [Value], pod: &Value) -> Option<&'p Value> {
    let selecting = policies.iter().filter(|policy| selects(policy, pod));
    selecting.min_by_key(|policy| text(policy, "/metadata/name"))
}

/// How a pod is to start; nothing if no policy selects it.
#[must_use]
pub(super) fn start(policies: &[Value], pod: &Value) -> Option<Start> {
    Some(match text(of(policies, pod)?, "/spec/start") {
        "Always" => Start::Always,
        "Never" => Start::Never,
        _ => Start::IfPresent,
    })
}

fn selects(policy: &Value, pod: &Value) -> bool {
    let (selector, labels) = (&policy["spec"]["selector"], &pod["metadata"]["labels"]);
    let mut wanted = selector["matchLabels"].as_object().into_iter().flatten().peekable();
    let expressions = selector["matchExpressions"].as_array();
    let mut expressions = expressions.into_iter().flatten().peekable();
    // One without any selects nothing.
    let is_some = wanted.peek().is_some() || expressions.peek().is_some();
    is_some
        && text(policy, "/metadata/namespace") == text(pod, "/metadata/namespace")
        && wanted.all(|(name, value)| labels[name] == *value)
        && expressions.all(|one| holds(one, labels[text(one, "/key")].as_str()))
}

/// The newest snapshot that `pod` may start from.
#[must_use]
pub(super) fn snapshot<'c>(pod: &Value, checkpoints: &'c [Value]) -> Option<&'c Value> {
    let hash = template_hash(pod);
    let fits = |one: &&Value| {
        is_shared(one)
            && is_ready(one)
            && is_sealed(one)
            && text(one, "/status/templateHash") == hash
            && text(one, "/metadata/namespace") == text(pod, "/metadata/namespace")
    };
    let newest = checkpoints.iter().filter(fits);
    newest.max_by_key(|one| text(one, "/status/completionTime"))
}

/// Whether a pod has begun of which a snapshot for others of its template (by namespace and digest) may be taken, when it
/// is ready.
#[must_use]
pub(super) fn may_be_saved_for(
    pod: &Value,
    (namespace, hash): &(String, String),
    policies: &[Value],
) -> bool {
    is_ours(pod)
        && !is_gated(pod)
        && !is_leaving(pod)
        && !matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
        && text(pod, "/metadata/namespace") == namespace
        && start(policies, pod).is_some_and(|start| start != Start::Never)
        && template_hash(pod) == *hash
}

/// Orders snapshots that are missing, and removes those that are too many, too large or too old.
#[must_use]
pub(super) fn decide(
    policies: &[Value],
    pods: &[Value],
    checkpoints: &[Value],
    now: i64,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut ordered = HashSet::new();
    for pod in pods.iter().filter(|pod| is_source(pod)) {
        let Some(policy) = of(policies, pod) else { continue };
        if text(policy, "/spec/start") == "Never" {
            continue;
        }
        let key = (text(pod, "/metadata/namespace").to_owned(), template_hash(pod));
        let there = checkpoints.iter().any(|one| is_of(one, pod, &key.1, now));
        if !there && ordered.insert(key) {
            actions.push(Action::Order { object: order(policy, pod) });
        }
    }
    for policy in policies {
        actions.extend(excess(policy, pods, checkpoints, now));
    }
    actions
}

/// Whether a pod is ready, and so what others want to begin as.
fn is_source(pod: &Value) -> bool {
    is_ours(pod)
        && !is_gated(pod)
        && !is_leaving(pod)
        && condition(pod, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// Whether a checkpoint is a snapshot of the template of `pod`, or becomes one, or has just failed to.
fn is_of(one: &Value, pod: &Value, hash: &str, now: i64) -> bool {
    let same = match text(one, "/status/templateHash") {
        "" => text(one, "/spec/sourcePod/uid") == text(pod, "/metadata/uid"),
        found => found == hash,
    };
    let namespace = text(one, "/metadata/namespace") == text(pod, "/metadata/namespace");
    let counts = is_ready(one) || is_in_progress(one) || age(one, now) < AGAIN;
    is_shared(one) && same && namespace && counts
}

fn order(policy: &Value, pod: &Value) -> Value {
    let mut object = checkpoint::new(pod, "", 60);
    let name = text(policy, "/metadata/name");
    object["metadata"] = json!({
        "generateName": format!("{}-", name.chars().take(200).collect::<String>()),
        "namespace": pod["metadata"]["namespace"],
        "labels": { POLICY: name },
        "ownerReferences": [{
            "apiVersion": policy["apiVersion"], "kind": "PodSnapshotPolicy",
            "name": name, "uid": policy["metadata"]["uid"],
        }],
    });
    object["spec"]["postCheckpointState"] = json!("Running");
    object["spec"]["sharing"] = json!("Shared");
    object
}

/// The snapshots of a policy that are more than it keeps, but for those whose memory comes to pods that run already.
fn excess(policy: &Value, pods: &[Value], checkpoints: &[Value], now: i64) -> Vec<Action> {
    let retention = &policy["spec"]["retention"];
    let count = retention["count"].as_u64().unwrap_or(COUNT);
    let bytes = retention["bytes"].as_u64().unwrap_or(u64::MAX);
    let oldest = retention["ageSeconds"].as_i64().unwrap_or(i64::MAX);
    let is_its = |one: &&Value| {
        is_shared(one)
            && one["metadata"]["labels"][POLICY] == policy["metadata"]["name"]
            && text(one, "/metadata/namespace") == text(policy, "/metadata/namespace")
            && is_ready(one)
    };
    let mut all: Vec<&Value> = checkpoints.iter().filter(is_its).collect();
    all.sort_by_key(|one| std::cmp::Reverse(text(one, "/status/completionTime")));
    let (mut kept, mut size) = (0, 0_u64);
    let mut actions = Vec::new();
    for one in all {
        let more = one["status"]["sizeBytes"].as_u64().unwrap_or(0);
        if kept < count && size.saturating_add(more) <= bytes && age(one, now) <= oldest {
            kept += 1;
            size += more;
        } else if !is_being_fetched(one, pods) {
            actions.push(Action::Remove { checkpoint: one.clone() });
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{begun, ready};
    use crate::pod::RESTORE_FROM;
    use crate::time;

    const NOW: &str = "2026-01-01T00:10:00Z";

    fn policy(start: &str, retention: Value) -> Value {
        json!({
            "apiVersion": "torpor.dev/v1alpha1",
            "metadata": { "namespace": "a", "name": "warm", "uid": "w" },
            "spec": {
                "selector": { "matchLabels": { "app": "x" } },
                "start": start, "retention": retention,
            },
        })
    }

    fn pod(image: &str) -> Value {
        json!({
            "metadata": { "namespace": "a", "name": "p", "uid": image, "labels": { "app": "x" } },
            "spec": {
                "runtimeClassName": "torpor", "containers": [{ "name": "c", "image": image }],
            },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        })
    }

    fn taken(pod: &Value, second: u32, bytes: u64) -> Value {
        let mut one = order(&policy("IfPresent", Value::Null), pod);
        let made = format!("2026-01-01T00:00:{second:02}Z");
        one["metadata"]["name"] = json!(format!("s{second}"));
        one["metadata"]["creationTimestamp"] = json!(made);
        one["status"] = begun(pod, "n");
        one["status"]["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
        one["status"]["wrappedKey"] = json!("k");
        one["status"]["completionTime"] = json!(made);
        one["status"]["sizeBytes"] = json!(bytes);
        one
    }

    fn decided(policy: &Value, pods: &[Value], checkpoints: &[Value]) -> Vec<Action> {
        let now = time::parse(NOW).unwrap();
        decide(std::slice::from_ref(policy), pods, checkpoints, now)
    }

    #[test]
    fn one_snapshot_is_ordered_for_each_template() {
        let policy = policy("IfPresent", Value::Null);
        let pods = [pod("i"), pod("i"), pod("j")];
        let actions = decided(&policy, &pods, &[]);
        assert_eq!(actions.len(), 2);
        let Action::Order { object } = &actions[0] else { panic!("{actions:?}") };
        assert_eq!(object["spec"]["sharing"], "Shared");
        assert_eq!(object["metadata"]["labels"][POLICY], "warm");
        // The order itself is enough for the next turn.
        assert_eq!(decided(&policy, &pods[..1], std::slice::from_ref(object)), []);
        let mut waits = pod("i");
        waits["status"] = json!({});
        assert_eq!(decided(&policy, &[waits], &[]), []);
        let mut other = pod("i");
        other["metadata"]["namespace"] = json!("b");
        assert_eq!(decided(&policy, &[other], &[]), []);
        assert_eq!(decided(&super::tests::policy("Never", Value::Null), &pods, &[]), []);
    }

    #[test]
    fn a_pod_starts_from_the_newest_of_its_own_template_and_namespace() {
        let pod = pod("i");
        let all = [taken(&pod, 1, 1), taken(&pod, 2, 1)];
        assert_eq!(text(snapshot(&pod, &all).unwrap(), "/metadata/name"), "s2");
        assert_eq!(snapshot(&super::tests::pod("j"), &all), None);
        let mut forged = all[1].clone();
        forged["status"]["wrappedKey"] = Value::Null;
        assert_eq!(snapshot(&pod, &[forged]), None, "it is not sealed");
        let mut foreign = pod;
        foreign["metadata"]["namespace"] = json!("b");
        assert_eq!(snapshot(&foreign, &all), None);
    }

    #[test]
    fn retention_by_count_bytes_and_age() {
        let pod = pod("i");
        let all: Vec<Value> = (1..=4).map(|second| taken(&pod, second, 100)).collect();
        let removed = |retention: Value| -> Vec<String> {
            let actions = decided(&policy("IfPresent", retention), &[], &all);
            let name = |action: Action| match action {
                Action::Remove { checkpoint } => text(&checkpoint, "/metadata/name").to_owned(),
                other => panic!("{other:?}"),
            };
            actions.into_iter().map(name).collect()
        };
        assert_eq!(removed(json!({ "count": 2 })), ["s2", "s1"]);
        assert_eq!(removed(json!({ "count": 9, "bytes": 300 })), ["s1"]);
        assert_eq!(removed(json!({ "count": 9, "ageSeconds": 597 })), ["s2", "s1"]);
        assert_eq!(removed(Value::Null), ["s3", "s2", "s1"]);
    }

    #[test]
    fn what_comes_to_pods_that_run_already_is_kept() {
        let mut old = taken(&pod("i"), 1, 100);
        let new = taken(&pod("i"), 2, 100);
        checkpoint::set_memory_comes_to(&mut old, "n2", true);
        let begun = |node: &str, from: &str| {
            let mut pod = pod("j");
            pod["spec"]["nodeName"] = json!(node);
            pod["metadata"]["annotations"] = json!({ RESTORE_FROM: from });
            pod["status"] = Value::Null;
            pod
        };
        let removed = |pods: &[Value]| {
            let all = [old.clone(), new.clone()];
            decided(&policy("IfPresent", Value::Null), pods, &all).len()
        };
        assert_eq!(removed(&[begun("n2", "s1")]), 0);
        for other in [begun("n1", "s1"), begun("n2", "s2")] {
            assert_eq!(removed(&[other]), 1);
        }
        let mut foreign = begun("n2", "s1");
        foreign["metadata"]["namespace"] = json!("b");
        assert_eq!(removed(&[foreign]), 1);
    }

    #[test]
    fn the_first_policy_by_name_counts() {
        let mut never = policy("Never", Value::Null);
        never["metadata"]["name"] = json!("a");
        let all = [policy("Always", Value::Null), never];
        assert_eq!(start(&all, &pod("i")), Some(Start::Never));
        assert_eq!(start(&all[..1], &pod("i")), Some(Start::Always));
        assert_eq!(start(&[], &pod("i")), None);
        let mut all = policy("Always", Value::Null);
        all["spec"]["selector"] = json!({});
        assert_eq!(start(&[all], &pod("i")), None, "an empty selector selects nothing");
    }

    #[test]
    fn a_selector_of_a_policy_is_one_of_kubernetes() {
        let one = |key: &str, operator: &str, values: &[&str]| json!({ "key": key, "operator": operator, "values": values });
        let app = json!({ "app": "x" });
        for (selector, expected) in [
            (json!({ "matchExpressions": [one("app", "In", &["y", "x"])] }), true),
            (json!({ "matchExpressions": [one("app", "In", &["y"])] }), false),
            (json!({ "matchExpressions": [one("app", "NotIn", &["x"])] }), false),
            (json!({ "matchExpressions": [one("tier", "DoesNotExist", &[])] }), true),
            (
                json!({ "matchExpressions": [one("app", "Exists", &[]), one("tier", "Exists", &[])] }),
                false,
            ),
            (json!({ "matchLabels": app, "matchExpressions": [one("app", "Exists", &[])] }), true),
            (
                json!({ "matchLabels": app, "matchExpressions": [one("app", "NotIn", &["x"])] }),
                false,
            ),
            (json!({ "matchLabels": app }), true),
            (json!({ "matchLabels": {}, "matchExpressions": [] }), false),
        ] {
            let mut all = policy("Always", Value::Null);
            all["spec"]["selector"] = selector.clone();
            assert_eq!(start(&[all], &pod("i")).is_some(), expected, "{selector}");
        }
    }
}
