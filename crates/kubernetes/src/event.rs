//! Events: what people are told about an object.

use serde_json::{Value, json};
use torpor_worker::tell;

use crate::api::Api;
use crate::pod::text;
use crate::time;

/// What an event is about, and so who tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A pod, by the controller.
    Pod,
    /// A pod that cannot be saved, or cannot have its checkpoint, by an agent.
    ColdPod,
    /// A pod that goes on from its checkpoint, by an agent.
    RestoredPod,
    /// A checkpoint that cannot be stored, by an agent.
    PodCheckpoint,
}

/// Tells people about an object. What cannot be told is done nevertheless.
pub(crate) fn tell(api: &Api, kind: Kind, object: &Value, reason: &str, message: &str) {
    let (version, name, by, severity) = match kind {
        Kind::Pod => ("v1", "Pod", "torpor-controller", "Normal"),
        Kind::RestoredPod => ("v1", "Pod", "torpor-agent", "Normal"),
        Kind::ColdPod => ("v1", "Pod", "torpor-agent", "Warning"),
        Kind::PodCheckpoint => ("torpor.dev/v1alpha1", "PodCheckpoint", "torpor-agent", "Warning"),
    };
    let namespace = text(object, "/metadata/namespace");
    let now = time::format(time::now());
    // The API server takes no longer ones.
    let message: String = message.chars().take(1000).collect();
    let event = json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "generateName": "torpor-", "namespace": namespace },
        "involvedObject": {
            "apiVersion": version, "kind": name, "namespace": namespace,
            "name": object["metadata"]["name"], "uid": object["metadata"]["uid"],
        },
        "type": severity, "reason": reason, "message": message,
        "source": { "component": by },
        "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    });
    if let Err(error) = api.create(&format!("/api/v1/namespaces/{namespace}/events"), &event) {
        tell!("{error}");
    }
}
