//! What is done to pods and jobs when they are made: pure functions of the requests.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::pod::{
    GATE, GATED, RESTORE_FROM, RESTORE_REQUEST, RUNTIME_CLASS, controller_of, gates, is_name,
    is_ours, text,
};

/// The account of the controllers.
pub(super) const CONTROLLER: &str = "system:serviceaccount:torpor-system:torpor-controller";

/// Who makes pods for the owners that they name. Whoever else names an owner is asked whether he may restore.
pub(crate) const MAKERS: [&str; 7] = [
    CONTROLLER,
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:daemon-set-controller",
    "system:serviceaccount:kube-system:job-controller",
    "system:serviceaccount:kube-system:replicaset-controller",
    "system:serviceaccount:kube-system:replication-controller",
    "system:serviceaccount:kube-system:statefulset-controller",
];

/// What whoever makes such a job is told: no more than 120 characters are sure to be shown.
const WAITS_FOR_ALL: &str = "pods that give way delay each other's return; set spec.backoffLimitPerIndex to have each index wait alone";

/// Who may restore: asked of the API server.
pub(super) trait Permits {
    /// Whether `user` (of an admission request) may `restore` a checkpoint; all of the namespace if the name is empty.
    fn may_restore(&self, user: &Value, namespace: &str, name: &str) -> Result<bool, String>;
}

/// Answers an AdmissionReview.
#[must_use]
pub(super) fn review(review: &Value, ask: &dyn Permits) -> Value {
    let request = &review["request"];
    let decided = match text(request, "/kind/kind") {
        "Pod" => pod(request, ask),
        "Job" => Ok(job(&request["object"])),
        _ => Ok(Vec::new()),
    };
    let mut response = json!({ "uid": request["uid"], "allowed": decided.is_ok() });
    match decided {
        Ok(patch) if patch.is_empty() => {}
        Ok(patch) => {
            response["patchType"] = json!("JSONPatch");
            response["patch"] = json!(BASE64_STANDARD.encode(Value::Array(patch).to_string()));
        }
        Err(reason) => response["status"] = json!({ "code": 403, "message": reason }),
    }
    if text(request, "/kind/kind") == "Job" && waits_for_all(&request["object"]) {
        response["warnings"] = json!([WAITS_FOR_ALL]);
    }
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response })
}

/// A pod of ours is known to the controller, and waits behind the gate until that has decided.
fn pod(request: &Value, ask: &dyn Permits) -> Result<Vec<Value>, String> {
    let pod = &request["object"];
    let annotations = &pod["metadata"]["annotations"];
    let is_controller = text(request, "/userInfo/username") == CONTROLLER;
    if annotations.get(RESTORE_FROM).is_some() && !is_controller {
        return Err(format!(
            "the annotation {RESTORE_FROM} is the controller's: ask with {RESTORE_REQUEST}"
        ));
    }
    if !is_ours(pod) {
        return Ok(Vec::new());
    }
    let wanted = annotations[RESTORE_REQUEST].as_str();
    if let Some(name) = wanted {
        if !is_name(name) {
            return Err(format!("{RESTORE_REQUEST}: {name:?} is no name of a checkpoint"));
        }
        if !ask.may_restore(&request["userInfo"], text(request, "/namespace"), name)? {
            return Err(format!(
                "{} may not restore podcheckpoints {name}",
                text(request, "/userInfo/username")
            ));
        }
    }
    let mut patch = Vec::new();
    // Nobody has saved anything for a pod that nobody replaces.
    let may_continue =
        wanted.is_some() || controller_of(pod).is_some() && stands_for_its_owner(request, ask)?;
    let is_gated = gates(pod).any(|name| name == GATE);
    if is_gated && !may_continue {
        return Err(format!("the gate {GATE} is Torpor's: leave it out of spec.schedulingGates"));
    }
    if may_continue && !is_gated {
        let gate = json!({ "name": GATE });
        patch.push(match pod["spec"]["schedulingGates"].is_array() {
            true => json!({ "op": "add", "path": "/spec/schedulingGates/-", "value": gate }),
            false => json!({ "op": "add", "path": "/spec/schedulingGates", "value": [gate] }),
        });
    }
    patch.push(put(pod, "labels", GATED, json!("true")));
    Ok(patch)
}

/// Whether whoever makes a pod is believed that it is of the owner that it names: it gets the memory of the one before it.
fn stands_for_its_owner(request: &Value, ask: &dyn Permits) -> Result<bool, String> {
    if MAKERS.contains(&text(request, "/userInfo/username")) {
        return Ok(true);
    }
    ask.may_restore(&request["userInfo"], text(request, "/namespace"), "")
}

/// The step of a patch that gives an object a label or an annotation.
#[must_use]
pub(super) fn put(object: &Value, map: &str, name: &str, value: Value) -> Value {
    let place = format!("/metadata/{map}");
    match object["metadata"][map].is_object() {
        true => json!({ "op": "add", "path": pointer(&place, name), "value": value }),
        false => json!({ "op": "add", "path": place, "value": { name: value } }),
    }
}

/// The place of a field whose name has a slash.
#[must_use]
pub(super) fn pointer(parent: &str, name: &str) -> String {
    format!("{parent}/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// A job whose pods give way waits with each replacement until the pod has ended, and is not
/// charged for it.
fn job(job: &Value) -> Vec<Value> {
    let spec = &job["spec"];
    if spec["template"]["spec"]["runtimeClassName"] != RUNTIME_CLASS {
        return Vec::new();
    }
    let mut patch = Vec::new();
    // The API server may have put its default in already.
    if spec["podReplacementPolicy"] != "Failed" {
        let value = json!("Failed");
        patch.push(json!({ "op": "add", "path": "/spec/podReplacementPolicy", "value": value }));
    }
    // It takes a template that never starts a container again.
    if spec["podFailurePolicy"].is_null() && spec["template"]["spec"]["restartPolicy"] == "Never" {
        let rule = json!({
            "action": "Ignore",
            "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }],
        });
        let value = json!({ "rules": [rule] });
        patch.push(json!({ "op": "add", "path": "/spec/podFailurePolicy", "value": value }));
    }
    patch
}

/// Whether the pods of a job of ours wait for each other: Kubernetes delays replacements more with each pod that has gone,
/// where a job does not say that it is to count for each index.
fn waits_for_all(job: &Value) -> bool {
    let spec = &job["spec"];
    let template = &spec["template"]["spec"];
    template["runtimeClassName"] == RUNTIME_CLASS
        && template["restartPolicy"] == "Never"
        && spec["completionMode"] == "Indexed"
        && spec["completions"].as_u64().is_some_and(|count| count > 1)
        && spec["backoffLimitPerIndex"].is_null()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Says(bool);

    impl Permits for Says {
        fn may_restore(&self, _: &Value, _: &str, _: &str) -> Result<bool, String> {
            Ok(self.0)
        }
    }

    const JOBS: &str = "system:serviceaccount:kube-system:job-controller";

    fn asked(kind: &str, object: Value, says: bool) -> (bool, Vec<Value>) {
        asked_by("alice", kind, object, says)
    }

    fn asked_by(user: &str, kind: &str, object: Value, says: bool) -> (bool, Vec<Value>) {
        let request = json!({ "request": {
            "uid": "r", "kind": { "kind": kind }, "namespace": "a", "object": object,
            "userInfo": { "username": user },
        } });
        let answer = review(&request, &Says(says));
        let response = &answer["response"];
        assert_eq!(response["uid"], "r");
        let patch = response["patch"]
            .as_str()
            .map(|text| serde_json::from_slice(&BASE64_STANDARD.decode(text).unwrap()).unwrap());
        (response["allowed"] == true, patch.unwrap_or_default())
    }

    fn pod() -> Value {
        json!({
            "metadata": { "ownerReferences": [{ "uid": "o", "controller": true }] },
            "spec": { "runtimeClassName": "torpor" },
        })
    }

    #[test]
    fn replacements_are_gated() {
        let (allowed, patch) = asked_by(JOBS, "Pod", pod(), false);
        assert!(allowed);
        assert_eq!(patch[0]["path"], "/spec/schedulingGates");
        assert_eq!(patch[1]["value"], json!({ GATED: "true" }));
        let mut other = pod();
        other["spec"]["schedulingGates"] = json!([{ "name": "x" }]);
        other["metadata"]["labels"] = json!({ "a": "b" });
        let (_, patch) = asked_by(JOBS, "Pod", other, false);
        assert_eq!(patch[0]["path"], "/spec/schedulingGates/-");
        assert_eq!(patch[1]["path"], "/metadata/labels/torpor.dev~1gated");
    }

    #[test]
    fn pods_of_others_are_left_alone() {
        let mut other = pod();
        other["spec"]["runtimeClassName"] = json!("runc");
        assert_eq!(asked("Pod", other, false), (true, vec![]));
        let mut bare = pod();
        bare["metadata"] = json!({});
        let (allowed, patch) = asked("Pod", bare, false);
        assert!(allowed && patch.len() == 1, "{patch:?}");
        assert_eq!(patch[0]["value"], json!({ GATED: "true" }));
    }

    #[test]
    fn an_owner_that_anybody_could_name_counts_for_nothing() {
        let alone =
            vec![json!({ "op": "add", "path": "/metadata/labels", "value": { GATED: "true" } })];
        assert_eq!(asked("Pod", pod(), false), (true, alone), "it starts cold, as it always could");
        let (allowed, patch) = asked("Pod", pod(), true);
        assert!(allowed && patch.len() == 2, "an operator that may restore: {patch:?}");
        // To wait behind the gate until an owner adopts it is no way round.
        let mut gated = pod();
        gated["spec"]["schedulingGates"] = json!([{ "name": GATE }]);
        assert!(!asked("Pod", gated.clone(), false).0);
        gated["metadata"]["ownerReferences"] = json!([]);
        assert!(!asked("Pod", gated.clone(), true).0);
        gated["metadata"]["annotations"] = json!({ RESTORE_REQUEST: "x" });
        assert!(asked("Pod", gated, true).0);
    }

    #[test]
    fn a_forged_annotation_is_refused() {
        for class in ["torpor", "runc"] {
            let mut forged = pod();
            forged["spec"]["runtimeClassName"] = json!(class);
            forged["metadata"]["annotations"] = json!({ RESTORE_FROM: "x" });
            assert!(!asked("Pod", forged, true).0);
        }
    }

    #[test]
    fn who_asks_must_be_allowed_to() {
        let mut asks = pod();
        asks["metadata"]["annotations"] = json!({ RESTORE_REQUEST: "x" });
        assert!(!asked("Pod", asks.clone(), false).0);
        let (allowed, patch) = asked("Pod", asks.clone(), true);
        assert!(allowed && patch.len() == 2);
        asks["metadata"]["annotations"] = json!({ RESTORE_REQUEST: "../x" });
        assert!(!asked("Pod", asks, true).0);
    }

    #[test]
    fn jobs_wait_and_are_not_charged() {
        let job = json!({ "spec": {
            "podReplacementPolicy": "TerminatingOrFailed",
            "template": { "spec": { "runtimeClassName": "torpor", "restartPolicy": "Never" } },
        } });
        let (_, patch) = asked("Job", job, false);
        assert_eq!(patch.len(), 2);
        assert_eq!(patch[0]["value"], "Failed");
        let other = json!({ "spec": { "template": { "spec": {} } } });
        assert_eq!(asked("Job", other, false), (true, vec![]));
    }

    #[test]
    fn whoever_makes_a_job_hears_what_its_pods_would_wait_for() {
        let job = json!({ "spec": {
            "completionMode": "Indexed", "completions": 30,
            "template": { "spec": { "runtimeClassName": "torpor", "restartPolicy": "Never" } },
        } });
        let warned = |change: fn(&mut Value)| {
            let mut job = job.clone();
            change(&mut job["spec"]);
            let request = json!({ "request": { "kind": { "kind": "Job" }, "object": job } });
            let answer = review(&request, &Says(false));
            assert_eq!(answer["response"]["allowed"], true);
            answer["response"]["warnings"][0].is_string()
        };
        assert!(warned(|_| {}));
        let quiet: [fn(&mut Value); 5] = [
            |spec| spec["backoffLimitPerIndex"] = json!(0),
            |spec| spec["completionMode"] = json!("NonIndexed"),
            |spec| spec["completions"] = json!(1),
            |spec| spec["template"]["spec"]["restartPolicy"] = json!("OnFailure"),
            |spec| spec["template"]["spec"]["runtimeClassName"] = json!("runc"),
        ];
        for change in quiet {
            assert!(!warned(change));
        }
        assert!(WAITS_FOR_ALL.len() <= 120);
    }
}
