//! Volumes that are in no checkpoint and are not there where a pod goes on: a pod that works with one is saved only if it
//! says that it can do without.

use serde_json::Value;

use crate::pod::{annotation, text};

/// The annotation of a pod that goes on without what was in such volumes: `Accept`.
const UNSAVED: &str = "torpor.dev/unsaved-volumes";

/// Why a pod would not go on with all that it had, if so.
#[must_use]
pub(super) fn objection(pod: &Value) -> Option<String> {
    if annotation(pod, UNSAVED) == Some("Accept") {
        return None;
    }
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let lost: Vec<String> = volumes
        .filter_map(|volume| Some(format!("{} ({})", text(volume, "/name"), loss(pod, volume)?)))
        .collect();
    let all = lost.join(", ");
    (!lost.is_empty()).then(|| {
        format!(
            "what is in these volumes would be lost: {all}; a pod that can do without says so: {UNSAVED}: Accept"
        )
    })
}

/// Why what is in a volume does not come with its pod, if so.
fn loss(pod: &Value, volume: &Value) -> Option<&'static str> {
    let name = text(volume, "/name");
    let mut uses = uses(pod).filter(|one| text(one, "/name") == name);
    let is = |kind: &str| volume[kind].is_object();
    // What is read alone was not written by the pod.
    let is_written = |one: &Value| one["readOnly"] != true;
    let is_part = |one: &Value| one["subPath"].is_string() || one["subPathExpr"].is_string();
    if is("emptyDir") {
        return uses.any(is_part).then_some("an emptyDir that is mounted by subPath");
    }
    if !uses.any(is_written) || volume["csi"]["readOnly"] == true {
        return None;
    }
    match () {
        () if is("ephemeral") => Some("ephemeral: made anew for each pod"),
        () if is("csi") => Some("csi: made anew for each pod"),
        () if is("hostPath") => Some("hostPath: the node's"),
        () => None,
    }
}

/// What containers have of volumes that do not run again from their beginning.
fn uses(pod: &Value) -> impl Iterator<Item = &Value> {
    let list = |name: &str| pod["spec"][name].as_array().into_iter().flatten();
    let sidecars = list("initContainers").filter(|one| one["restartPolicy"] == "Always");
    let containers = list("containers").chain(sidecars);
    containers.flat_map(|one| {
        let list = |name: &str| one[name].as_array().into_iter().flatten();
        list("volumeMounts").chain(list("volumeDevices"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A pod with a volume, which it mounts so.
    fn pod(volume: Value, mount: Value) -> Value {
        let mut volume = volume;
        volume["name"] = json!("data");
        let mut mount = mount;
        mount["name"] = json!("data");
        json!({ "spec": {
            "volumes": [volume],
            "containers": [{ "name": "c", "volumeMounts": [mount] }],
        } })
    }

    #[test]
    fn what_would_be_lost_is_named() {
        let lost = [
            (json!({ "emptyDir": {} }), json!({ "subPath": "x" }), "subPath"),
            (json!({ "emptyDir": {} }), json!({ "subPathExpr": "$(X)" }), "subPath"),
            (json!({ "ephemeral": {} }), json!({}), "ephemeral"),
            (json!({ "csi": { "driver": "d" } }), json!({}), "csi"),
            (json!({ "hostPath": { "path": "/mnt" } }), json!({}), "hostPath"),
        ];
        for (volume, mount, expected) in lost {
            let mut pod = pod(volume, mount);
            let why = objection(&pod).unwrap_or_default();
            assert!(why.contains("data (") && why.contains(expected), "{expected}: {why}");
            assert!(why.contains(UNSAVED), "what to do about it: {why}");
            // A sidecar goes on, an init container begins again.
            pod["spec"]["initContainers"] = pod["spec"]["containers"].take();
            assert_eq!(objection(&pod), None, "{expected}");
            pod["spec"]["initContainers"][0]["restartPolicy"] = json!("Always");
            assert!(objection(&pod).is_some(), "{expected}");
            pod["metadata"]["annotations"] = json!({ UNSAVED: "Accept" });
            assert_eq!(objection(&pod), None, "{expected}");
        }
    }

    #[test]
    fn what_comes_with_the_pod_or_is_only_read_is_no_loss() {
        let kept = [
            (json!({ "emptyDir": {} }), json!({})),
            (json!({ "persistentVolumeClaim": {} }), json!({ "subPath": "x" })),
            (json!({ "hostPath": {} }), json!({ "readOnly": true })),
            (json!({ "csi": { "readOnly": true } }), json!({})),
            (json!({ "configMap": {} }), json!({})),
            (json!({ "projected": {} }), json!({})),
        ];
        for (volume, mount) in kept {
            let pod = pod(volume, mount);
            assert_eq!(objection(&pod), None, "{pod}");
        }
        let mut unused = pod(json!({ "hostPath": {} }), json!({}));
        unused["spec"]["containers"] = json!([{ "name": "c" }]);
        assert_eq!(objection(&unused), None);
    }
}
