//! Which pods that are deleted are saved: those that give way to others, or to what is done with their node or their Job,
//! and not those that somebody is done with (a rollout, a scale-down, `kubectl delete pod`).

use serde_json::Value;

use crate::pod::{annotation, condition, controller_of};

/// The annotation of a pod that says when it is saved: `Always` when it is deleted, by whomever, `Never`, or, if it is
/// not there, when it gives way.
pub(crate) const SAVE: &str = "torpor.dev/save";

/// What becomes of the work of a pod that is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is saved.
    Kept,
    /// It ends as it ever would.
    Ends,
    /// It is saved if its node is drained or its Job suspended: the pod does not say so itself.
    Open,
}

/// What a pod says of its fate.
#[must_use]
pub(crate) fn fate(pod: &Value) -> Fate {
    match annotation(pod, SAVE) {
        Some("Never") => Fate::Ends,
        Some("Always") => Fate::Kept,
        _ if is_disrupted(pod) => Fate::Kept,
        _ => Fate::Open,
    }
}

/// Whether the scheduler, the API of evictions (a drain), a taint or the collector of pods has said that the pod has to go.
/// Each of them says so before it deletes it.
fn is_disrupted(pod: &Value) -> bool {
    condition(pod, "DisruptionTarget").is_some_and(|one| one["status"] == "True")
}

/// The reference of a pod to its Job, if it is of one.
#[must_use]
pub(crate) fn job_of(pod: &Value) -> Option<&Value> {
    controller_of(pod).filter(|owner| owner["kind"] == "Job")
}

/// Whether a node takes no more pods: it is being drained, and whatever is deleted there has to go.
#[must_use]
pub(crate) fn is_cordoned(node: &Value) -> bool {
    node["spec"]["unschedulable"] == true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_pod_says_of_its_fate() {
        let mut pod = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
        assert_eq!(fate(&pod), Fate::Open, "who has deleted it?");
        for (holds, expected) in [("True", Fate::Kept), ("False", Fate::Open)] {
            let condition = json!({ "type": "DisruptionTarget", "status": holds });
            pod["status"]["conditions"] = json!([condition]);
            assert_eq!(fate(&pod), expected, "{holds}");
        }
        pod["status"] = Value::Null;
        pod["metadata"]["annotations"] = json!({ SAVE: "Always" });
        assert_eq!(fate(&pod), Fate::Kept);
        pod["status"]["conditions"] = json!([{ "type": "DisruptionTarget", "status": "True" }]);
        pod["metadata"]["annotations"] = json!({ SAVE: "Never" });
        assert_eq!(fate(&pod), Fate::Ends);
    }
}
