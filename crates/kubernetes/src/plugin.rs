//! What people call: `kubectl torpor`. It asks through kubectl, with its configuration.

use std::process::Command;

use clap::Args;
use serde_json::Value;

use crate::api::GROUP;
use crate::checkpoint::{claimed_by, objection, replica};
use crate::error::{Context, Error, Result};
use crate::pod::{
    GATE, RESTORE_FROM, Replica, annotation, condition, is_gated, is_name, is_ours, text,
};

/// The name that the program is called by.
pub const NAME: &str = "kubectl-torpor";

/// Which pod.
#[derive(Debug, Clone, Args)]
pub struct ExplainArgs {
    /// The pod
    #[arg(value_name = "POD")]
    pub pod: String,
    /// Its namespace
    #[arg(short, long, value_name = "NAME", default_value = "default")]
    pub namespace: String,
}

fn get(path: &str) -> Result<Value> {
    let output = Command::new("kubectl").args(["get", "--raw", path]).output();
    let output = output.context(|| "start kubectl")?;
    if !output.status.success() {
        return Err(Error::new(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).context(|| path)
}

/// Says what happened to a pod.
///
/// # Errors
/// If kubectl cannot ask.
pub fn explain(args: &ExplainArgs) -> Result<()> {
    if !is_name(&args.pod) || !is_name(&args.namespace) {
        return Err(Error::new("this is no name of a pod"));
    }
    let pod = get(&format!("/api/v1/namespaces/{}/pods/{}", args.namespace, args.pod))?;
    let list = get(&format!("{GROUP}/namespaces/{}/podcheckpoints", args.namespace))?;
    let checkpoints = list["items"].as_array().cloned().unwrap_or_default();
    for line in account(&pod, &checkpoints) {
        println!("{line}");
    }
    Ok(())
}

/// What there is to say of a pod.
#[must_use]
pub fn account(pod: &Value, checkpoints: &[Value]) -> Vec<String> {
    if !is_ours(pod) {
        return vec!["It does not run under the runtime class torpor: nothing is saved.".into()];
    }
    let mut lines = Vec::new();
    if is_gated(pod) {
        lines.push(format!("It waits behind the gate {GATE} for a checkpoint."));
    }
    match annotation(pod, RESTORE_FROM) {
        None => lines.push("It was not given a checkpoint: it has started cold.".into()),
        Some(name) => {
            let found = checkpoints.iter().find(|one| text(one, "/metadata/name") == name);
            lines.push(format!("It continues from the checkpoint {name}."));
            match found {
                None => lines.push("That is gone by now.".into()),
                Some(one) => lines.extend(of_checkpoint(pod, one)),
            }
        }
    }
    let Some(wanted) = Replica::of(pod) else {
        lines.push("Nobody replaces it when it goes: it is not saved then.".into());
        return lines;
    };
    for one in checkpoints.iter().filter(|one| replica(one) == wanted) {
        let condition = condition(one, "Ready").cloned().unwrap_or_default();
        lines.push(format!(
            "{}: {} {}{}",
            text(one, "/metadata/name"),
            text(&condition, "/reason"),
            text(&condition, "/message"),
            claimed_by(one).map_or(String::new(), |uid| format!("; for the pod of uid {uid}"))
        ));
    }
    lines
}

fn of_checkpoint(pod: &Value, one: &Value) -> Vec<String> {
    let mut lines: Vec<String> = objection(pod, one).into_iter().collect();
    for told in one["status"]["restoredContainers"].as_array().into_iter().flatten() {
        let name = text(told, "/name");
        lines.push(match told["restored"] == true {
            true => format!("{name}: restored"),
            false => format!("{name}: started cold: {}", text(told, "/message")),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn accounts() {
        let mut pod = json!({
            "metadata": { "namespace": "a", "uid": "u",
                "ownerReferences": [{ "uid": "o", "controller": true }] },
            "spec": { "runtimeClassName": "torpor" },
        });
        assert!(account(&json!({}), &[])[0].contains("runtime class"));
        assert!(account(&pod, &[])[0].contains("cold"));
        pod["metadata"]["annotations"] = json!({ RESTORE_FROM: "c" });
        let one = json!({
            "metadata": { "namespace": "a", "name": "c" },
            "status": {
                "ownerUID": "o", "index": "",
                "restoredContainers": [{ "name": "x", "restored": false, "message": "no" }],
            },
        });
        let lines = account(&pod, &[one]).join("\n");
        assert!(lines.contains("x: started cold: no") && lines.contains("not claimed"), "{lines}");
    }
}
