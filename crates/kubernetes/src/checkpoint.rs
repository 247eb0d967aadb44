//! PodCheckpoint, as an object of the API.

use serde_json::{Value, json};

use crate::api::GROUP;
use crate::pod::{Replica, condition, controller_of, template, template_hash, text};
use crate::time;

/// The reason of a checkpoint that was ordered of a pod whose name another one has by now.
pub(crate) const REPLACED: &str = "SourcePodReplaced";

/// The label by which the controller tells the agent of a node that a checkpoint is to be made there.
pub(crate) const NODE_LABEL: &str = "torpor.dev/node";

/// The label of the checkpoints of pods that had to go: nobody has ordered them, and their pods end by themselves.
pub(crate) const GIVES_WAY: &str = "torpor.dev/gives-way";

/// The label of the checkpoints that it was looked for which nodes are to have them before a pod that continues: whether there
/// are any.
pub const EXPECTED: &str = "torpor.dev/expected";

/// What is written of a container that could not be restored, and is tried again.
pub(crate) const AGAIN: &str = "again";

/// The path of a checkpoint.
#[must_use]
pub fn path(namespace: &str, name: &str) -> String {
    format!("{GROUP}/namespaces/{namespace}/podcheckpoints/{name}")
}

/// The name of the checkpoint of a pod that gives way.
#[must_use]
pub fn name_of(pod: &str, uid: &str) -> String {
    let short: String = uid.chars().filter(char::is_ascii_alphanumeric).take(10).collect();
    let pod: String = pod.chars().take(200).collect();
    format!("{}-{short}", pod.trim_end_matches(['-', '.']))
}

/// A checkpoint of `pod`, which is stopped afterwards.
#[must_use]
pub fn new(pod: &Value, name: &str, seconds: u64) -> Value {
    let mut object = json!({
        "apiVersion": "torpor.dev/v1alpha1",
        "kind": "PodCheckpoint",
        "metadata": { "name": name, "namespace": pod["metadata"]["namespace"] },
        "spec": {
            "sourcePod": { "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"] },
            "timeoutSeconds": seconds.clamp(1, 3600),
            "postCheckpointState": "Stopped",
        },
    });
    if let Some(owner) = controller_of(pod) {
        let mut owner = owner.clone();
        // It must not keep its owner from being removed.
        owner["controller"] = json!(false);
        owner["blockOwnerDeletion"] = json!(false);
        object["metadata"]["ownerReferences"] = json!([owner]);
    }
    object
}

/// The status of a checkpoint that has begun.
#[must_use]
pub fn begun(pod: &Value, node: &str) -> Value {
    let replica = Replica::of(pod);
    json!({
        "nodeName": node,
        "sourcePodUID": pod["metadata"]["uid"],
        "ownerUID": replica.as_ref().map(|r| r.owner.clone()).unwrap_or_default(),
        "index": replica.map(|r| r.index).unwrap_or_default(),
        "templateHash": template_hash(pod),
        "checkpointedPodTemplate": template(pod),
        "conditions": [ready(false, "CheckpointInProgress", "")],
    })
}

/// A condition that holds, or does not, from now on.
fn condition_of(kind: &str, holds: bool, reason: &str, message: &str) -> Value {
    json!({
        "type": kind,
        "status": if holds { "True" } else { "False" },
        "reason": reason,
        "message": message,
        "lastTransitionTime": time::format(time::now()),
    })
}

/// The condition that says whether there is one.
#[must_use]
pub fn ready(holds: bool, reason: &str, message: &str) -> Value {
    condition_of("Ready", holds, reason, message)
}

/// The condition of a checkpoint that moves: somebody waits for it on another node.
pub(crate) const TARGET_READY: &str = "TargetReady";

/// The condition that says that somebody waits for the checkpoint.
#[must_use]
pub(crate) fn target_ready() -> Value {
    condition_of(TARGET_READY, true, "TargetWaits", "")
}

/// The condition that says whether the checkpoint is in the store, where it does not die with its node.
pub const STORED: &str = "Stored";

/// The condition of a checkpoint that was stored, or why it was not.
#[must_use]
pub fn stored(error: Option<&str>) -> Value {
    match error {
        None => condition_of(STORED, true, "CheckpointStored", ""),
        Some(error) => condition_of(STORED, false, "StoreFailed", error),
    }
}

/// The condition of a checkpoint whose pod runs while its memory comes: as long as that does, it is needed.
const MEMORY_COMES: &str = "MemoryComes";
/// A snapshot remembers no more nodes that memory of it comes to: as many as its definition lets it.
const MOST_NODES: usize = 256;

/// Whether memory of a checkpoint comes while its pod runs.
#[must_use]
pub fn memory_comes(checkpoint: &Value) -> bool {
    condition(checkpoint, MEMORY_COMES).is_some_and(|condition| condition["status"] == "True")
}

/// Writes down whether it does. Returns whether that is news.
pub(crate) fn set_memory_comes(checkpoint: &mut Value, comes: bool) -> bool {
    let is_news = memory_comes(checkpoint) != comes;
    if is_news {
        let reason = if comes { "OnDemand" } else { "NothingToCome" };
        set(checkpoint, condition_of(MEMORY_COMES, comes, reason, ""));
    }
    is_news
}

/// Whether memory of a snapshot comes to a node while pods run there that have begun with it.
#[must_use]
pub(crate) fn memory_comes_to(snapshot: &Value, node: &str) -> bool {
    let all = snapshot["status"]["memoryComesTo"].as_array();
    all.is_some_and(|all| all.iter().any(|one| one == node))
}

/// Writes down whether it does. Returns whether that is news.
pub(crate) fn set_memory_comes_to(snapshot: &mut Value, node: &str, comes: bool) -> bool {
    let known = snapshot["status"]["memoryComesTo"].as_array().cloned().unwrap_or_default();
    if memory_comes_to(snapshot, node) == comes || comes && known.len() >= MOST_NODES {
        return false;
    }
    let others = known.into_iter().filter(|one| one != node);
    let all: Vec<Value> = others.chain(comes.then(|| json!(node))).collect();
    snapshot["status"]["memoryComesTo"] = json!(all);
    set_memory_comes(snapshot, !all.is_empty());
    true
}

/// Sets a condition of a checkpoint.
pub fn set(checkpoint: &mut Value, condition: Value) {
    let mut all = checkpoint["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.retain(|one| one["type"] != condition["type"]);
    all.push(condition);
    checkpoint["status"]["conditions"] = json!(all);
}

/// Whether a checkpoint is complete.
#[must_use]
pub fn is_ready(checkpoint: &Value) -> bool {
    condition(checkpoint, "Ready").is_some_and(|condition| condition["status"] == "True")
}

/// Whether it may still become complete.
#[must_use]
pub(crate) fn is_in_progress(checkpoint: &Value) -> bool {
    match condition(checkpoint, "Ready") {
        None => true,
        Some(condition) => {
            let is_over = matches!(text(condition, "/reason"), "CheckpointFailed" | REPLACED);
            condition["status"] != "True" && !is_over
        }
    }
}

/// The uid of the pod that it is for.
#[must_use]
pub(crate) fn claimed_by(checkpoint: &Value) -> Option<&str> {
    checkpoint["status"]["claimedBy"]["uid"].as_str()
}

/// Whether any number of pods may continue from it: a snapshot, for starting warm.
#[must_use]
pub fn is_shared(checkpoint: &Value) -> bool {
    checkpoint["spec"]["sharing"] == "Shared"
}

/// Whether the pod that it is of ends with it.
#[must_use]
pub(crate) fn ends_its_pod(checkpoint: &Value) -> bool {
    checkpoint["spec"]["postCheckpointState"] == "Stopped"
}

/// Whether its pod had to go, and nobody has ordered it.
#[must_use]
pub(crate) fn gives_way(checkpoint: &Value) -> bool {
    !checkpoint["metadata"]["labels"][GIVES_WAY].is_null()
}

/// How many seconds of work were lost, if its pod had to go and could not be saved.
#[must_use]
pub(crate) fn lost_work(checkpoint: &Value) -> Option<u64> {
    let is_failed = !is_ready(checkpoint) && !is_in_progress(checkpoint);
    checkpoint["status"]["lostWorkSeconds"].as_u64().filter(|_| is_failed)
}

/// Whether it has a key: what has none could have been written by anybody.
#[must_use]
pub fn is_sealed(checkpoint: &Value) -> bool {
    !text(checkpoint, "/status/wrappedKey").is_empty()
}

/// Whether `node` is to have a checkpoint before a pod that continues is there. It opens nothing with it.
#[must_use]
pub(crate) fn is_expected_on(checkpoint: &Value, node: &str) -> bool {
    let all = checkpoint["status"]["expectedOn"].as_array();
    is_ready(checkpoint)
        && is_sealed(checkpoint)
        && all.is_some_and(|all| all.iter().any(|one| one == node))
}

/// Whether nobody has begun to make it.
#[must_use]
pub(crate) fn is_ordered(checkpoint: &Value) -> bool {
    text(checkpoint, "/status/nodeName").is_empty() && is_in_progress(checkpoint)
}

/// Whose checkpoint it is.
#[must_use]
pub fn replica(checkpoint: &Value) -> Replica {
    Replica {
        namespace: text(checkpoint, "/metadata/namespace").to_owned(),
        owner: text(checkpoint, "/status/ownerUID").to_owned(),
        index: text(checkpoint, "/status/index").to_owned(),
    }
}

/// Why a container of `pod` must not be restored from `checkpoint`, if so.
#[must_use]
pub fn objection(pod: &Value, checkpoint: &Value) -> Option<String> {
    let name = text(checkpoint, "/metadata/name");
    let uid = text(pod, "/metadata/uid");
    if text(pod, "/metadata/namespace") != text(checkpoint, "/metadata/namespace") {
        return Some(format!("the checkpoint {name} is of another namespace"));
    }
    if uid.is_empty() || (!is_shared(checkpoint) && claimed_by(checkpoint) != Some(uid)) {
        return Some(format!("the checkpoint {name} is not claimed for this pod"));
    }
    if !is_ready(checkpoint) {
        return Some(format!("the checkpoint {name} is not complete"));
    }
    if !is_sealed(checkpoint) {
        return Some(format!("the checkpoint {name} is not sealed"));
    }
    if text(checkpoint, "/status/templateHash") != template_hash(pod) {
        return Some(format!(
            "the pod is made of something else than that of the checkpoint {name}"
        ));
    }
    None
}

/// Whether a container of the pod of a uid has been restored from a checkpoint already.
#[must_use]
pub(crate) fn is_spent(checkpoint: &Value, uid: &str, container: &str) -> bool {
    begun_with(checkpoint).any(|one| one["name"] == container && one["podUID"] == uid)
}

/// The containers that have begun with a checkpoint, restored or cold.
pub(crate) fn begun_with(checkpoint: &Value) -> impl Iterator<Item = &Value> {
    tried_with(checkpoint).filter(|one| one[AGAIN] != true)
}

/// The containers that were to begin with a checkpoint, also those that could not be restored and are tried again.
pub(crate) fn tried_with(checkpoint: &Value) -> impl Iterator<Item = &Value> {
    checkpoint["status"]["restoredContainers"].as_array().into_iter().flatten()
}

/// Whether it was restored then, and has not started cold.
#[must_use]
pub(crate) fn is_restored(checkpoint: &Value, uid: &str, container: &str) -> bool {
    let is_it = |c: &Value| c["name"] == container && c["podUID"] == uid && c["restored"] == true;
    tried_with(checkpoint).any(is_it)
}

/// Whether all containers of a checkpoint have begun in the pod that it is for.
#[must_use]
pub fn is_used(checkpoint: &Value) -> bool {
    claimed_by(checkpoint).is_some_and(|uid| is_used_by(checkpoint, uid))
}

/// Whether all containers of a checkpoint have begun in the pod of a uid.
#[must_use]
pub(crate) fn is_used_by(checkpoint: &Value, uid: &str) -> bool {
    let all = checkpoint["status"]["checkpointedContainers"].as_array();
    all.is_some_and(|all| {
        !all.is_empty() && all.iter().all(|c| is_spent(checkpoint, uid, text(c, "/name")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Value, Value) {
        let pod = json!({
            "metadata": {
                "namespace": "a", "name": "web-0", "uid": "u1",
                "ownerReferences": [{ "uid": "o", "controller": true }],
            },
            "spec": { "containers": [{ "name": "c", "image": "i" }] },
        });
        let mut checkpoint = new(&pod, "web-0-x", 30);
        checkpoint["status"] = begun(&pod, "node1");
        checkpoint["status"]["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
        checkpoint["status"]["wrappedKey"] = json!("k");
        let mut target = pod.clone();
        target["metadata"]["uid"] = json!("u2");
        checkpoint["status"]["claimedBy"] = json!({ "name": "web-0", "uid": "u2" });
        (target, checkpoint)
    }

    #[test]
    fn what_was_claimed_is_restored() {
        let (pod, checkpoint) = pair();
        assert_eq!(objection(&pod, &checkpoint), None);
        assert_eq!(replica(&checkpoint), Replica::of(&pod).unwrap());
    }

    #[test]
    fn attacks_are_refused() {
        type Attack = fn(&mut Value, &mut Value);
        let attacks: [(&str, Attack); 7] = [
            ("another namespace", |pod, _| pod["metadata"]["namespace"] = json!("b")),
            ("not claimed", |pod, _| pod["metadata"]["uid"] = json!("u3")),
            ("not claimed", |pod, _| pod["metadata"]["uid"] = json!("")),
            ("not claimed", |_, c| c["status"]["claimedBy"] = Value::Null),
            ("something else", |pod, _| {
                pod["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
            }),
            ("not sealed", |_, c| c["status"]["wrappedKey"] = Value::Null),
            ("not complete", |_, c| {
                c["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
            }),
        ];
        for (expected, attack) in attacks {
            let (mut pod, mut checkpoint) = pair();
            attack(&mut pod, &mut checkpoint);
            let found = objection(&pod, &checkpoint).unwrap_or_default();
            assert!(found.contains(expected), "{expected}: {found}");
        }
    }

    #[test]
    fn a_container_is_restored_once() {
        let (_, mut checkpoint) = pair();
        checkpoint["status"]["checkpointedContainers"] = json!([{ "name": "c" }]);
        assert!(!is_spent(&checkpoint, "u2", "c") && !is_used(&checkpoint));
        checkpoint["status"]["restoredContainers"] = json!([{ "name": "c", "podUID": "u2" }]);
        assert!(is_spent(&checkpoint, "u2", "c") && is_used(&checkpoint));
        assert!(!is_spent(&checkpoint, "u3", "c"), "another pod of a shared one");
        checkpoint["status"]["restoredContainers"][0][AGAIN] = json!(true);
        assert!(!is_spent(&checkpoint, "u2", "c") && !is_used(&checkpoint), "it is tried again");
    }

    #[test]
    fn it_is_told_once_that_memory_comes_and_that_it_does_not() {
        let (_, mut checkpoint) = pair();
        let before = checkpoint.clone();
        assert!(!set_memory_comes(&mut checkpoint, false) && checkpoint == before);
        for comes in [true, false] {
            assert!(set_memory_comes(&mut checkpoint, comes));
            assert!(!set_memory_comes(&mut checkpoint, comes));
            assert!(memory_comes(&checkpoint) == comes && is_ready(&checkpoint));
        }
    }

    #[test]
    fn memory_of_a_snapshot_comes_to_many_nodes() {
        let (_, mut one) = pair();
        let nodes = || (0..=MOST_NODES).map(|n| format!("node{n}"));
        for (node, is_known) in nodes().zip((0..=MOST_NODES).map(|n| n < MOST_NODES)) {
            assert_eq!(set_memory_comes_to(&mut one, &node, true), is_known);
            assert_eq!(memory_comes_to(&one, &node), is_known);
            assert!(!set_memory_comes_to(&mut one, &node, is_known), "it is known");
        }
        assert!(memory_comes(&one));
        for node in nodes().take(MOST_NODES) {
            assert!(memory_comes(&one));
            assert!(set_memory_comes_to(&mut one, &node, false));
            assert!(!memory_comes_to(&one, &node));
        }
        assert!(!memory_comes(&one));
    }

    #[test]
    fn nodes_expect_what_is_complete_and_sealed() {
        let (_, mut checkpoint) = pair();
        assert!(!is_expected_on(&checkpoint, "node2"));
        checkpoint["status"]["expectedOn"] = json!(["node2", "node3"]);
        assert!(is_expected_on(&checkpoint, "node2") && is_expected_on(&checkpoint, "node3"));
        assert!(!is_expected_on(&checkpoint, "node1") && !is_expected_on(&checkpoint, ""));
        let mut open = checkpoint.clone();
        open["status"]["wrappedKey"] = Value::Null;
        let mut begun = checkpoint;
        begun["status"]["conditions"] = json!([ready(false, "CheckpointInProgress", "")]);
        assert!(!is_expected_on(&open, "node2") && !is_expected_on(&begun, "node2"));
    }

    #[test]
    fn names_of_checkpoints() {
        let name = name_of("web-0", "0a1b2c3d-4e5f-6789");
        assert_eq!(name, "web-0-0a1b2c3d4e");
        assert!(crate::pod::is_name(&name));
    }
}
