//! What is read off a pod: whose replica it is, which one, and what it is made of.

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::{Value, json};

/// The runtime class, and the handler of containerd, of pods that can be saved.
pub(crate) const RUNTIME_CLASS: &str = "torpor";
/// The scheduling gate behind which a replacement waits.
pub(crate) const GATE: &str = "torpor.dev/restore";
/// The label of the pods that the controller looks after.
pub(crate) const GATED: &str = "torpor.dev/gated";
/// Names the migration that a pod is the target of, and that a checkpoint is for.
pub const MIGRATION: &str = "torpor.dev/migration";
/// Says what it cost to save a pod, or the pod before it, the last time, in milliseconds: how long it was frozen. Of one
/// that was never saved, what another one of its template cost.
pub(crate) const SAVE_COST: &str = "torpor.dev/save-cost-milliseconds";
/// Says how many bytes were saved then.
pub(crate) const SAVED_BYTES: &str = "torpor.dev/saved-bytes";
/// Says when the last checkpoint of a pod was made, or the one that it continues from: what it has done since is lost if it
/// cannot be saved.
pub(crate) const LAST_CHECKPOINT: &str = "torpor.dev/last-checkpoint";
/// Says how many seconds of work were lost, if the pod before it could not be saved.
pub(crate) const LOST_WORK: &str = "torpor.dev/lost-work-seconds";
/// Names the checkpoint that a pod continues from. Only the controller writes it.
pub(crate) const RESTORE_FROM: &str = "torpor.dev/restore-from";
/// Says when the gate of a pod that continues was opened. Only the controller writes it.
pub(crate) const LET_GO: &str = "torpor.dev/let-go";
/// Says since when a pod that could continue waits its turn behind the gate.
pub(crate) const WAITS_SINCE: &str = "torpor.dev/waits-since";
/// Names the checkpoint that whoever made the pod wants it to continue from.
pub(crate) const RESTORE_REQUEST: &str = "torpor.dev/restore-request";
/// What is done if a pod cannot be restored: `IfPresent` or `Always`.
pub(crate) const RESTORE_POLICY: &str = "torpor.dev/restore-policy";
/// When the memory of a pod that continues from a checkpoint of another node comes: before it does, or `OnDemand`, while it runs.
pub(crate) const RESTORE_MEMORY: &str = "torpor.dev/restore-memory";

/// What everybody is told whose pod goes on elsewhere, or later.
pub const CONNECTIONS: &str = "established connections were closed: the pod has another address";

/// Which replica of whom a pod is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Replica {
    /// The namespace.
    pub namespace: String,
    /// The uid of the pod's controller.
    pub owner: String,
    /// Its ordinal or completion index, or the node of a DaemonSet's; empty where replicas are all alike.
    pub index: String,
}

/// A text in an object; empty if it is not there.
#[must_use]
pub fn text<'v>(object: &'v Value, path: &str) -> &'v str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// An annotation.
#[must_use]
pub fn annotation<'v>(object: &'v Value, name: &str) -> Option<&'v str> {
    object["metadata"]["annotations"][name].as_str()
}

/// The reference to the controller of an object.
#[must_use]
pub(crate) fn controller_of(object: &Value) -> Option<&Value> {
    let all = object["metadata"]["ownerReferences"].as_array()?;
    all.iter().find(|owner| owner["controller"] == true)
}

impl Replica {
    /// Which one a pod is; `None` for a pod that nobody replaces.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let owner = controller_of(pod)?["uid"].as_str()?;
        let labels = &pod["metadata"]["labels"];
        let index = [
            node_of_daemon(pod),
            labels["apps.kubernetes.io/pod-index"].as_str(),
            labels["batch.kubernetes.io/job-completion-index"].as_str(),
            annotation(pod, "batch.kubernetes.io/job-completion-index"),
        ];
        Some(Self {
            namespace: text(pod, "/metadata/namespace").to_owned(),
            owner: owner.to_owned(),
            index: index.into_iter().flatten().next().unwrap_or_default().to_owned(),
        })
    }
}

/// The node that a pod of a DaemonSet is for: there is one for each, and what one of them does is no other one's.
fn node_of_daemon(pod: &Value) -> Option<&str> {
    if text(controller_of(pod)?, "/kind") != "DaemonSet" {
        return None;
    }
    let required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
    let terms = pod.pointer(required)?["nodeSelectorTerms"].as_array()?;
    let fields = terms.iter().filter_map(|term| term["matchFields"].as_array()).flatten();
    let is_name = |field: &&Value| field["key"] == "metadata.name" && field["operator"] == "In";
    fields.filter(is_name).find_map(|field| field["values"][0].as_str())
}

/// Whether a pod runs under our runtime class.
#[must_use]
pub fn is_ours(pod: &Value) -> bool {
    pod["spec"]["runtimeClassName"] == RUNTIME_CLASS
}

/// Whether the memory of a pod comes while it runs. That of one that moves goes to the other node before.
#[must_use]
pub fn is_lazy(pod: &Value) -> bool {
    annotation(pod, RESTORE_MEMORY) == Some("OnDemand")
        && pod["metadata"]["labels"][MIGRATION].is_null()
}

/// Whether a pod continues from this checkpoint, or begins with this snapshot.
#[must_use]
pub(crate) fn restores_from(pod: &Value, namespace: &str, name: &str) -> bool {
    annotation(pod, RESTORE_FROM) == Some(name) && text(pod, "/metadata/namespace") == namespace
}

/// Whether a pod waits behind our gate.
#[must_use]
pub(crate) fn is_gated(pod: &Value) -> bool {
    gates(pod).any(|name| name == GATE)
}

/// The names of the gates of a pod.
pub fn gates(pod: &Value) -> impl Iterator<Item = &str> {
    let all = pod["spec"]["schedulingGates"].as_array();
    all.into_iter().flatten().filter_map(|gate| gate["name"].as_str())
}

/// What of a specification says where and when a pod runs, and not what it is.
const PLACEMENT: &[&str] = &[
    "affinity",
    "nodeName",
    "nodeSelector",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "schedulingGates",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "hostname",
    "ephemeralContainers",
];

/// The labels that say which revision of its template a pod is of, what is beside its specification included.
const REVISIONS: [&str; 2] = ["controller-revision-hash", "pod-template-hash"];

/// The labels of a pod (or of its template) that say which revision it is of: none is told by others.
#[must_use]
pub fn revision(pod: &Value) -> Value {
    let labels = &pod["metadata"]["labels"];
    let of = |name: &&str| Some(((*name).to_owned(), json!(labels[name].as_str()?)));
    Value::Object(REVISIONS.iter().filter_map(of).collect())
}

/// A digest of what a pod is made of: of two pods with the same, one can continue the other.
#[must_use]
pub(crate) fn template_hash(pod: &Value) -> String {
    let mut spec = pod["spec"].clone();
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|name, _| !PLACEMENT.contains(&name.as_str()));
    }
    let revision = revision(pod);
    // Each pod has its own volume with its token, of a random name.
    let is_token = |name: &str| name.starts_with("kube-api-access-");
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.retain(|volume| !is_token(text(volume, "/name")));
        if volumes.is_empty() {
            spec["volumes"] = Value::Null;
        }
    }
    for list in ["containers", "initContainers"] {
        for container in spec[list].as_array_mut().into_iter().flatten() {
            // They change while a pod lives, and are those of the new one.
            container["resources"] = Value::Null;
            if let Some(mounts) = container["volumeMounts"].as_array_mut() {
                mounts.retain(|mount| !is_token(text(mount, "/name")));
                if mounts.is_empty() {
                    container["volumeMounts"] = Value::Null;
                }
            }
        }
    }
    let all = json!({ "revision": revision, "spec": spec });
    let hash = digest(&SHA256, canonical(&all).as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a pod like this one is made of, without what its own place and time have added.
#[must_use]
pub fn template(pod: &Value) -> Value {
    let mut spec = pod["spec"].clone();
    if let Some(fields) = spec.as_object_mut() {
        for name in ["nodeName", "hostname", "ephemeralContainers", "schedulingGates"] {
            fields.remove(name);
        }
    }
    json!({ "metadata": { "labels": pod["metadata"]["labels"] }, "spec": spec })
}

/// JSON with sorted names, without what is null.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().filter(|(_, value)| !value.is_null()).collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            let parts: Vec<String> =
                fields.iter().map(|(n, v)| format!("{}:{}", json!(n), canonical(v))).collect();
            format!("{{{}}}", parts.join(","))
        }
        Value::Array(items) => {
            let parts: Vec<String> = items.iter().map(canonical).collect();
            format!("[{}]", parts.join(","))
        }
        other => other.to_string(),
    }
}

/// Whether a condition of an object holds.
#[must_use]
pub fn condition<'v>(object: &'v Value, kind: &str) -> Option<&'v Value> {
    object["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)
}

/// Whether a container of a pod runs, by what its kubelet has said last.
#[must_use]
pub fn runs(pod: &Value, container: &str) -> bool {
    let mut all = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    all.any(|one| text(one, "/name") == container && one["state"]["running"].is_object())
}

/// Whether a name is one of Kubernetes' (and no path).
#[must_use]
pub fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    !name.is_empty()
        && name.len() <= 253
        && name.chars().all(plain)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(token: &str, node: &str, image: &str) -> Value {
        json!({
            "metadata": {
                "namespace": "a",
                "labels": { "apps.kubernetes.io/pod-index": "3" },
                "ownerReferences": [
                    { "uid": "x" }, { "uid": "u", "controller": true },
                ],
            },
            "spec": {
                "nodeName": node,
                "runtimeClassName": "torpor",
                "volumes": [{ "name": format!("kube-api-access-{token}") }],
                "containers": [{
                    "name": "c", "image": image,
                    "volumeMounts": [{ "name": format!("kube-api-access-{token}") }],
                }],
            },
        })
    }

    #[test]
    fn replicas() {
        let replica = Replica::of(&pod("a", "n", "i")).unwrap();
        assert_eq!((replica.owner.as_str(), replica.index.as_str()), ("u", "3"));
        assert_eq!(Replica::of(&json!({ "metadata": {} })), None);
    }

    #[test]
    fn the_pods_of_a_daemon_set_are_told_apart_by_their_nodes() {
        let of = |kind: &str, node: &str| {
            let mut pod = pod("a", "", "i");
            pod["metadata"]["labels"] = json!({});
            pod["metadata"]["ownerReferences"][1]["kind"] = json!(kind);
            let name = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
            pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                json!({ "nodeSelectorTerms": [{ "matchFields": [name] }] });
            Replica::of(&pod).unwrap().index
        };
        assert_eq!(of("DaemonSet", "n1"), "n1");
        assert_eq!(of("DaemonSet", "n2"), "n2");
        assert_eq!(of("ReplicaSet", "n1"), "", "any pod of it may be put on a node");
    }

    #[test]
    fn the_hash_is_of_what_a_pod_is() {
        let one = template_hash(&pod("abcde", "n1", "i"));
        assert_eq!(one, template_hash(&pod("fghij", "n2", "i")));
        assert_ne!(one, template_hash(&pod("abcde", "n1", "other")));
        let mut changed = pod("abcde", "n1", "i");
        changed["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
        assert_ne!(one, template_hash(&changed));
        let mut bare = pod("abcde", "n1", "i");
        bare["spec"]["volumes"] = Value::Null;
        bare["spec"]["containers"][0].as_object_mut().unwrap().remove("volumeMounts");
        assert_eq!(one, template_hash(&bare), "a volume for the token is none of the pod's own");
    }

    #[test]
    fn what_changes_in_a_living_pod_is_none_of_its_template() {
        let before = template_hash(&pod("abcde", "n1", "i"));
        let mut living = pod("abcde", "n1", "i");
        living["spec"]["ephemeralContainers"] = json!([{ "name": "debugger", "image": "d" }]);
        living["spec"]["containers"][0]["resources"] = json!({ "limits": { "cpu": "2" } });
        assert_eq!(template_hash(&living), before);
    }

    #[test]
    fn a_rollout_that_changes_annotations_alone_is_another_revision() {
        for label in REVISIONS {
            let of = |revision: &str| {
                let mut pod = pod("abcde", "n1", "i");
                pod["metadata"]["labels"][label] = json!(revision);
                pod
            };
            assert_eq!(template_hash(&of("1")), template_hash(&of("1")));
            assert_ne!(template_hash(&of("1")), template_hash(&of("2")), "{label}");
            let mut bare = pod("abcde", "n1", "i");
            bare["metadata"]["labels"] = revision(&of("1"));
            assert_eq!(template_hash(&bare), template_hash(&of("1")), "whoever names it may");
        }
        assert_eq!(revision(&pod("abcde", "n1", "i")), json!({}));
    }

    #[test]
    fn names_are_no_paths() {
        assert!(is_name("web-0.x1"));
        for bad in ["", "../x", "a/b", ".a", "a..b", "A", "a\0"] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }
}
