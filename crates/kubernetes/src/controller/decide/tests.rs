//! What is decided about pods and checkpoints.

use std::sync::LazyLock;

use super::*;
use crate::checkpoint::{begun, new, ready};
use crate::pod::GATE;
use serde_json::json;

const LIMITS: Limits = Limits { gate: 120, unclaimed: 86_400, used: 600, restores: 1000 };
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
    one["status"]["wrappedKey"] = json!("k");
    one
}

/// One with nothing but pods and checkpoints.
fn world<'a>(pods: &'a [Value], checkpoints: &'a [Value]) -> World<'a> {
    static NONE: LazyLock<Nodes> = LazyLock::new(Nodes::default);
    World { pods, checkpoints, policies: &[], migrations: &[], drained: &[], nodes: &NONE }
}

fn decided(pods: &[Value], checkpoints: &[Value]) -> Vec<Action> {
    decide(world(pods, checkpoints), LIMITS, time::parse(NOW).unwrap())
}

/// A pod that has to give way.
fn leaving(pod: Value) -> Value {
    let mut pod = deleted(pod);
    pod["status"]["conditions"] = json!([{ "type": "DisruptionTarget", "status": "True" }]);
    pod
}

/// A pod that somebody has deleted.
fn deleted(mut pod: Value) -> Value {
    pod["metadata"]["deletionTimestamp"] = json!(NOW);
    pod
}

#[test]
fn nobody_waits_for_a_pod_that_is_not_saved() {
    let new = pod("n", "0", true);
    let decided = |old: &Value, drained: &[String]| {
        let pods = [old.clone(), new.clone()];
        let world = World { drained, ..world(&pods, &[]) };
        decide(world, LIMITS, time::parse(NOW).unwrap())
    };
    let mut old = deleted(pod("o", "0", false));
    old["spec"]["nodeName"] = json!("node1");
    let at_once = decided(&old, &["node2".to_owned()]);
    assert!(matches!(at_once.as_slice(), [Action::Ungate { .. }]), "{at_once:?}");
    assert!(asks_for_its_node(&old));
    assert_eq!(decided(&old, &["node1".to_owned()]), [], "its node is drained");
    let mut of_job = old.clone();
    of_job["metadata"]["ownerReferences"][0]["kind"] = json!("Job");
    assert_eq!(decided(&of_job, &[]), [], "its Job may be suspended");
    for (save, waits) in [("Always", true), ("Never", false)] {
        let mut says = leaving(pod("o", "0", false));
        says["metadata"]["annotations"] = json!({ crate::disruption::SAVE: save });
        assert_eq!(decided(&says, &[]).is_empty(), waits, "{save}");
        assert!(!asks_for_its_node(&says));
    }
}

#[test]
fn what_is_not_sealed_is_given_to_nobody() {
    let mut forged = checkpoint(&pod("o", "0", false));
    forged["status"]["wrappedKey"] = Value::Null;
    let actions = decided(&[pod("n", "0", true)], &[forged]);
    assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
}

#[test]
fn where_pods_always_start_warm_the_first_one_starts_cold() {
    let policy = json!({
        "metadata": { "namespace": "a", "name": "p" },
        "spec": {
            "selector": { "matchLabels": { "apps.kubernetes.io/pod-index": "" } },
            "start": "Always",
        },
    });
    let decided = |pods: &[Value], checkpoints: &[Value]| {
        let policies = std::slice::from_ref(&policy);
        let world = World { policies, ..world(pods, checkpoints) };
        decide(world, LIMITS, time::parse(NOW).unwrap())
    };
    let waiting: Vec<Value> = ["x", "y", "z"].map(|uid| pod(uid, "", true)).into();
    let actions = decided(&waiting, &[]);
    let [Action::Ungate { pod: first, reason, .. }] = actions.as_slice() else {
        panic!("one, and one alone: {actions:?}")
    };
    assert!(text(first, "/metadata/uid") == "x" && reason.contains("first"), "{reason}");
    // It has begun: the others wait for what it will be.
    let mut pods = waiting.clone();
    pods[0] = pod("x", "", false);
    assert_eq!(decided(&pods, &[]), []);
    // When it is ready, it is saved for them.
    pods[0]["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" }]);
    let actions = decided(&pods, &[]);
    let [Action::Order { object }] = actions.as_slice() else { panic!("{actions:?}") };
    assert_eq!(object["spec"]["sourcePod"]["uid"], "x");
    let mut snapshot = checkpoint(&pods[0]);
    snapshot["spec"] = object["spec"].clone();
    snapshot["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
    let warm = decided(&pods, &[snapshot]);
    assert!(warm.len() == 2 && warm.iter().all(|a| matches!(a, Action::Warm { always: true, .. })));
    // It has ended before it was ready: the next one is the first.
    for ended in ["Failed", "gone"] {
        pods[0]["status"] = json!({ "phase": ended });
        if ended == "gone" {
            pods.remove(0);
        }
        let next = decided(&pods, &[]);
        assert!(matches!(next.as_slice(), [Action::Ungate { .. }]), "{ended}: {next:?}");
    }
    // A new template has a first of its own.
    let mut rolled = pod("r", "", true);
    rolled["spec"]["containers"][0]["image"] = json!("new");
    let actions = decided(&[pod("x", "", false), rolled], &[]);
    assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "it waits: {actions:?}");
}

#[test]
fn each_replica_gets_its_own_once() {
    let olds: Vec<Value> = (0..100).map(|n| pod(&format!("o{n}"), &n.to_string(), false)).collect();
    let news: Vec<Value> = (0..100).map(|n| pod(&format!("n{n}"), &n.to_string(), true)).collect();
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
    // Somebody has removed its pod by force meanwhile.
    saving["spec"]["timeoutSeconds"] = json!(90);
    assert_eq!(decided(std::slice::from_ref(&new), std::slice::from_ref(&saving)), []);
    saving["status"]["conditions"] = json!([ready(false, "CheckpointFailed", "x")]);
    let actions = decided(&[old, new.clone()], &[saving]);
    assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
    let mut late = new;
    late["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
    let old = leaving(pod("o", "0", false));
    let actions = decided(&[old.clone(), late.clone()], &[]);
    assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
    // What is being made is waited for as long as it may take.
    let mut slow = checkpoint(&old);
    slow["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
    slow["spec"]["timeoutSeconds"] = json!(90);
    assert_eq!(decided(&[old.clone(), late.clone()], std::slice::from_ref(&slow)), []);
    slow["spec"]["timeoutSeconds"] = json!(30);
    let actions = decided(&[old, late], &[slow]);
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

/// Its pod must not start cold, however often it has to be tried: what failed is no beginning.
#[test]
fn a_checkpoint_is_kept_for_whoever_tries_again() {
    let new = pod("n", "0", false);
    let mut one = checkpoint(&pod("o", "0", false));
    one["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
    one["status"]["claimedBy"] = json!({ "uid": "n" });
    let failed = json!({ "name": "c", "podUID": "n", "restored": false, "again": true });
    one["status"]["restoredContainers"] = json!([failed]);
    assert_eq!(decided(std::slice::from_ref(&new), std::slice::from_ref(&one)), []);
    let released = [Action::Release { checkpoint: one.clone() }];
    assert_eq!(decided(&[], std::slice::from_ref(&one)), released, "its pod is gone");
    // That of a Job fails, if it does not start its containers again.
    let mut failed = new;
    failed["status"]["phase"] = json!("Failed");
    one["status"]["restoringOn"] = json!("n2");
    let released = [Action::Release { checkpoint: one.clone() }];
    assert_eq!(decided(std::slice::from_ref(&failed), std::slice::from_ref(&one)), released);
    // One that was about to begin may have, and its agent has not said so.
    one["status"]["restoredContainers"][0]["podUID"] = json!("before");
    assert_eq!(decided(std::slice::from_ref(&failed), std::slice::from_ref(&one)), []);
    // One that no node has taken has not.
    one["status"]["restoringOn"] = Value::Null;
    let released = [Action::Release { checkpoint: one.clone() }];
    assert_eq!(decided(std::slice::from_ref(&failed), std::slice::from_ref(&one)), released);
}

#[test]
fn pods_start_warm_by_policy() {
    let mut snapshot = checkpoint(&pod("o", "", false));
    snapshot["spec"]["sharing"] = json!("Shared");
    snapshot["spec"]["postCheckpointState"] = json!("Running");
    snapshot["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
    let new = pod("n", "", true);
    let policy = |start: &str| {
        json!({
            "metadata": { "namespace": "a", "name": "p" },
            "spec": {
                "selector": { "matchLabels": { "apps.kubernetes.io/pod-index": "" } },
                "start": start,
            },
        })
    };
    let decided = |policies: &[Value], checkpoints: &[Value]| {
        let pods = std::slice::from_ref(&new);
        let world = World { policies, ..world(pods, checkpoints) };
        decide(world, LIMITS, time::parse(NOW).unwrap())
    };
    let all = std::slice::from_ref(&snapshot);
    let warm = decided(&[policy("IfPresent")], all);
    assert!(matches!(warm.as_slice(), [Action::Warm { always: false, .. }]), "{warm:?}");
    let warm = decided(&[policy("Always")], all);
    assert!(matches!(warm.as_slice(), [Action::Warm { always: true, .. }]), "{warm:?}");
    let first = decided(&[policy("Always")], &[]);
    assert!(matches!(first.as_slice(), [Action::Ungate { .. }]), "nobody else is there: {first:?}");
    for (policies, checkpoints) in
        [(vec![policy("Never")], all), (vec![], all), (vec![policy("IfPresent")], &[])]
    {
        let cold = decided(&policies, checkpoints);
        assert!(matches!(cold.as_slice(), [Action::Ungate { .. }]), "{cold:?}");
    }
    // Its own checkpoint is worth more.
    let own = checkpoint(&pod("o", "", false));
    let claim = decided(&[policy("Always")], &[snapshot, own]);
    assert!(matches!(claim.as_slice(), [Action::Claim { .. }]), "{claim:?}");
}

#[test]
fn orders_are_assigned_and_their_pods_end() {
    let source = pod("o", "0", false);
    let mut order = new(&source, "c", 30);
    let actions = decided(std::slice::from_ref(&source), std::slice::from_ref(&order));
    assert!(matches!(actions.as_slice(), [Action::Assign { .. }]), "{actions:?}");
    order["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
    assert_eq!(decided(std::slice::from_ref(&source), std::slice::from_ref(&order)), []);
    let mut done = checkpoint(&source);
    done["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
    let actions = decided(std::slice::from_ref(&source), std::slice::from_ref(&done));
    assert!(matches!(actions.as_slice(), [Action::Delete { .. }]), "{actions:?}");
    done["spec"]["postCheckpointState"] = json!("Running");
    assert_eq!(decided(std::slice::from_ref(&source), std::slice::from_ref(&done)), []);
    // One that never came makes room for the next.
    let mut lost = done.clone();
    lost["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
    lost["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
    let actions = decided(std::slice::from_ref(&source), &[lost]);
    assert!(matches!(actions.as_slice(), [Action::Remove { .. }]), "{actions:?}");
    // What its pod has outlived is no place to go back to by itself.
    let replacement = pod("n", "0", true);
    let actions = decided(&[replacement], &[done]);
    assert!(matches!(actions.as_slice(), [Action::Ungate { .. }]), "{actions:?}");
}

#[test]
fn a_checkpoint_lives_as_long_as_its_pod_waits_for_memory() {
    let new = pod("n", "0", false);
    let mut one = checkpoint(&pod("o", "0", false));
    one["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
    one["status"]["claimedBy"] = json!({ "uid": "n" });
    one["status"]["restoredContainers"] = json!([{ "name": "c", "podUID": "n" }]);
    for limit in [Value::Null, json!(1)] {
        one["spec"]["timeToLiveSeconds"] = limit;
        crate::checkpoint::set_memory_comes(&mut one, true);
        assert_eq!(decided(std::slice::from_ref(&new), &[one.clone()]), []);
        let removed = [Action::Remove { checkpoint: one.clone() }];
        assert_eq!(decided(&[], &[one.clone()]), removed, "its pod is gone");
        crate::checkpoint::set_memory_comes(&mut one, false);
        let removed = [Action::Remove { checkpoint: one.clone() }];
        assert_eq!(decided(std::slice::from_ref(&new), &[one.clone()]), removed);
    }
}

/// A suspended Job ends its pods, and makes new ones of the same indexes when it is resumed: hours
/// later, by a controller that knows nothing of before.
#[test]
fn a_job_that_is_resumed_finds_what_it_left() {
    let olds: Vec<Value> =
        (0..8).map(|n| leaving(pod(&format!("o{n}"), &n.to_string(), false))).collect();
    let saved: Vec<Value> = olds.iter().map(checkpoint).collect();
    assert_eq!(decided(&[], &saved), [], "they are kept while nobody wants them");
    let news: Vec<Value> = (0..8).map(|n| pod(&format!("n{n}"), &n.to_string(), true)).collect();
    let hours = time::parse(NOW).unwrap() + 3600 * 5;
    let world = world(&news, &saved);
    let mut seen = HashSet::new();
    for action in decide(world, Limits { gate: 1 << 40, ..LIMITS }, hours) {
        let Action::Claim { pod, checkpoint } = action else { panic!("{action:?}") };
        assert_eq!(Replica::of(&pod).unwrap(), replica(&checkpoint));
        assert!(seen.insert(text(&checkpoint, "/metadata/uid").to_owned()));
    }
    assert_eq!(seen.len(), 8);
}

#[test]
fn what_nobody_completes_is_not_waited_for() {
    let old = leaving(pod("old", "0", false));
    let new = pod("new", "0", true);
    let mut one = checkpoint(&old);
    one["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
    assert_eq!(decided(&[old, new.clone()], &[one.clone()]), []);
    // Its pod is gone, and in all the time that there was nobody has said how it went.
    let actions = decided(&[new], &[one.clone()]);
    assert!(matches!(actions[0], Action::Ungate { .. }), "{actions:?}");
    assert_eq!(actions[1], Action::Remove { checkpoint: one });
}

#[test]
fn a_pod_that_its_kubelet_has_ended_stays_as_it_is_and_is_continued() {
    let mut old = pod("o", "0", false);
    let mut saved = checkpoint(&old);
    saved["metadata"]["labels"] = json!({ NODE_LABEL: "n1", crate::checkpoint::GIVES_WAY: "true" });
    let new = pod("n", "0", true);
    // The kubelet says so only when its containers have ended.
    for phase in ["Running", "Failed"] {
        old["status"]["phase"] = json!(phase);
        let actions = decided(&[old.clone(), new.clone()], &[saved.clone()]);
        assert!(matches!(actions.as_slice(), [Action::Claim { .. }]), "{phase}: {actions:?}");
    }
    assert_eq!(decided(&[old.clone()], &[saved.clone()]), []);
    saved["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
    let actions = decided(&[old], &[saved]);
    assert!(matches!(actions.as_slice(), [Action::Delete { .. }]), "it was ordered: {actions:?}");
}

#[test]
fn a_checkpoint_lives_as_long_as_its_maker_wants() {
    // Sixty seconds ago, as ordered of a pod that goes on, and by a pod that had to go.
    let old = pod("o", "0", false);
    for state in ["Running", "Stopped"] {
        let mut one = checkpoint(&old);
        one["spec"]["postCheckpointState"] = json!(state);
        let kept = |one: &Value| decided(&[], std::slice::from_ref(one)).is_empty();
        one["metadata"]["labels"] = json!({ NODE_LABEL: "n1" });
        assert!(kept(&one), "{state}");
        one["spec"]["timeToLiveSeconds"] = json!(61);
        assert!(kept(&one), "{state}");
        one["spec"]["timeToLiveSeconds"] = json!(60);
        assert_eq!(decided(&[], &[one.clone()]), [Action::Remove { checkpoint: one.clone() }]);
        // Whoever is about to begin with it still can.
        let new = pod("n", "0", false);
        one["status"]["claimedBy"] = json!({ "uid": "n" });
        assert_eq!(decided(&[new], &[one]), [], "{state}");
    }
}
