//! What people call: `kubectl torpor`. It asks through kubectl, with its configuration.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::api::GROUP;
use crate::checkpoint::{
    AGAIN, claimed_by, is_in_progress, is_ready, objection, path, replica, tried_with,
};
use crate::error::{Context, Error, Result};
use crate::pod::{
    CONNECTIONS, GATE, RESTORE_FROM, RESTORE_REQUEST, Replica, WAITS_SINCE, annotation, condition,
    is_gated, is_name, is_ours, revision, text,
};

/// The name that the program is called by.
pub const NAME: &str = "kubectl-torpor";

/// How long an order is waited for.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often it is looked at.
const STEP: Duration = Duration::from_millis(500);

/// Which pod.
#[derive(Debug, Clone, Args)]
pub struct ExplainArgs {
    /// The pod
    #[arg(value_name = "POD")]
    pub pod: String,
    /// Its namespace (default: that of kubectl's context)
    #[arg(short, long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// A checkpoint of which pod.
#[derive(Debug, Clone, Args)]
pub struct CheckpointArgs {
    /// The pod
    #[command(flatten)]
    pub pod: ExplainArgs,
    /// End the pod with it: its replacement continues from the checkpoint
    #[arg(long)]
    pub stop: bool,
    /// Let any number of pods start from it
    #[arg(long, conflicts_with = "stop")]
    pub shared: bool,
}

/// A pod of which checkpoint.
#[derive(Debug, Clone, Args)]
pub struct RestoreArgs {
    /// The checkpoint
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: String,
    /// Its namespace (default: that of kubectl's context)
    #[arg(short, long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// The name of the new pod
    #[arg(long, value_name = "NAME")]
    pub pod: String,
}

/// Where a pod moves.
#[derive(Debug, Clone, Args)]
pub struct MigrateArgs {
    /// The pod
    #[command(flatten)]
    pub pod: ExplainArgs,
    /// The node that it moves to (default: any other that fits)
    #[arg(long, value_name = "NODE")]
    pub to: Option<String>,
}

fn kubectl(words: &[&str], input: &str) -> Result<Value> {
    serde_json::from_str(&said(words, input)?).context(|| words.join(" "))
}

/// The namespace that is named, or that kubectl is in.
fn namespace(named: Option<&String>) -> Result<String> {
    if let Some(named) = named {
        return Ok(named.clone());
    }
    let found = said(&["config", "view", "--minify", "--output=jsonpath={..namespace}"], "");
    // In a pod, and where there is no configuration, there is no context either.
    Ok(found.ok().filter(|name| !name.trim().is_empty()).unwrap_or_else(|| "default".into()))
}

fn said(words: &[&str], input: &str) -> Result<String> {
    let what = || "start kubectl, which has to be on the PATH";
    let mut child = Command::new("kubectl")
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context(what)?;
    if let Some(mut to) = child.stdin.take() {
        // It may not read what it is given, and then says why.
        let _ = to.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().context(what)?;
    if !output.status.success() {
        return Err(Error::new(refusal(&String::from_utf8_lossy(&output.stderr))));
    }
    String::from_utf8(output.stdout).context(|| words.join(" "))
}

/// What kubectl says that has failed, and what to do where it cannot know that.
fn refusal(said: &str) -> String {
    let said = said.trim();
    // It says the name of an object that is missing; if a kind is, that the server or its mapping has none.
    let has_no_kind = ["could not find the requested resource", "no matches for kind"];
    match has_no_kind.iter().any(|words| said.contains(words)) {
        true => format!(
            "{said}: this cluster does not have Torpor's objects; torpor kubernetes manifests | kubectl apply -f - \
             installs them"
        ),
        false => said.to_owned(),
    }
}

/// The pod that a checkpoint is ordered of: an order for another one is never carried out.
fn can_be_saved(pod: &Value) -> Result<()> {
    let name = text(pod, "/metadata/name");
    let why = if !is_ours(pod) {
        "it does not run under the runtime class torpor (spec.runtimeClassName)".to_owned()
    } else if !text(pod, "/metadata/deletionTimestamp").is_empty() {
        "it is being deleted".to_owned()
    } else if text(pod, "/status/phase") != "Running" {
        format!("it does not run: its phase is {}", text(pod, "/status/phase"))
    } else {
        return Ok(());
    };
    Err(Error::new(format!("the pod {name} cannot be saved: {why}")))
}

fn get(path: &str) -> Result<Value> {
    kubectl(&["get", "--raw", path], "")
}

fn create(object: &Value) -> Result<String> {
    let made = kubectl(&["create", "-o", "json", "-f", "-"], &object.to_string())?;
    Ok(text(&made, "/metadata/name").to_owned())
}

fn named<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<()> {
    match names.into_iter().find(|name| !is_name(name)) {
        Some(wrong) => Err(Error::new(format!(
            "{wrong:?} is no name of an object of Kubernetes: lower case letters, digits, - and . (give the name alone, \
             without its kind)"
        ))),
        None => Ok(()),
    }
}

/// Says what has come of it.
fn say(name: &str, json: bool) {
    match json {
        true => println!("{}", json!({ "name": name })),
        false => println!("{name}"),
    }
}

/// Waits until `outcome` finds one in the object at `path`.
fn awaited(path: &str, outcome: impl Fn(&Value) -> Option<Result<String>>) -> Result<String> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Some(outcome) = outcome(&get(path)?) {
            return outcome;
        }
        sleep(STEP);
    }
    let name = path.rsplit('/').next().unwrap_or_default();
    Err(Error::new(format!(
        "{name} is not complete after {} s, and is waited for no more; kubectl describe says how far it is, and kubectl \
         delete takes the order back",
        PATIENCE.as_secs()
    )))
}

/// Has a checkpoint of a pod made, and waits for it.
///
/// # Errors
/// If it may not be ordered, or fails.
pub fn checkpoint(args: &CheckpointArgs) -> Result<()> {
    let pod = &args.pod.pod;
    let namespace = &namespace(args.pod.namespace.as_ref())?;
    named([pod, namespace])?;
    can_be_saved(&get(&format!("/api/v1/namespaces/{namespace}/pods/{pod}"))?)?;
    let mut order = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "PodCheckpoint",
        "metadata": { "generateName": format!("{pod}-"), "namespace": namespace },
        "spec": {
            "sourcePod": { "name": pod },
            "postCheckpointState": if args.stop { "Stopped" } else { "Running" },
        },
    });
    if args.shared {
        order["spec"]["sharing"] = json!("Shared");
    }
    let name = create(&order)?;
    let made = awaited(&path(namespace, &name), |one| {
        let ready = condition(one, "Ready");
        match (is_ready(one), is_in_progress(one)) {
            (true, _) => Some(Ok(name.clone())),
            (false, true) => None,
            (false, false) => {
                let why = ready.map_or("", |ready| text(ready, "/message"));
                Some(Err(Error::new(format!("{name}: {why}"))))
            }
        }
    })?;
    say(&made, args.pod.json);
    Ok(())
}

/// Makes a pod that continues from a checkpoint.
///
/// # Errors
/// If there is none, or whoever asks may not restore it.
pub fn restore(args: &RestoreArgs) -> Result<()> {
    let namespace = namespace(args.namespace.as_ref())?;
    named([&args.checkpoint, &namespace, &args.pod])?;
    let checkpoint = get(&path(&namespace, &args.checkpoint))?;
    say(&create(&restored(&checkpoint, &namespace, args)?)?, args.json);
    Ok(())
}

fn restored(checkpoint: &Value, namespace: &str, args: &RestoreArgs) -> Result<Value> {
    let template = &checkpoint["status"]["checkpointedPodTemplate"];
    if !is_ready(checkpoint) || !template["spec"].is_object() {
        let ready = condition(checkpoint, "Ready").cloned().unwrap_or_default();
        let [reason, message] = ["/reason", "/message"].map(|place| text(&ready, place));
        let why = [reason, message].into_iter().filter(|word| !word.is_empty());
        let why = why.collect::<Vec<_>>().join(": ");
        return Err(Error::new(format!(
            "the checkpoint {} is not complete{}{why}",
            args.checkpoint,
            if why.is_empty() { "" } else { ": " }
        )));
    }
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": args.pod, "namespace": namespace,
            "annotations": { RESTORE_REQUEST: args.checkpoint },
        },
        "spec": template["spec"],
    });
    // All labels would have an owner take the pod for one of its own.
    let revision = revision(template);
    if revision != json!({}) {
        pod["metadata"]["labels"] = revision;
    }
    Ok(pod)
}

/// Moves a pod, and waits until it has moved.
///
/// # Errors
/// If kubectl cannot ask; if the controller says that the pod could not move, and why.
pub fn migrate(args: &MigrateArgs) -> Result<()> {
    let pod = &args.pod.pod;
    let namespace = &namespace(args.pod.namespace.as_ref())?;
    named([pod, namespace].into_iter().chain(&args.to))?;
    let mut order = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "PodMigration",
        "metadata": { "generateName": format!("{pod}-"), "namespace": namespace },
        "spec": { "podName": pod },
    });
    if let Some(node) = &args.to {
        order["spec"]["targetNode"] = json!(node);
    }
    let name = create(&order)?;
    let path = format!("{GROUP}/namespaces/{namespace}/podmigrations/{name}");
    let made = awaited(&path, |one| match text(one, "/status/phase") {
        "Succeeded" => Some(Ok(text(one, "/status/targetPod").to_owned())),
        "Failed" => Some(Err(Error::new(text(one, "/status/message")))),
        _ => None,
    })?;
    say(&made, args.pod.json);
    Ok(())
}

/// Says what happened to a pod.
///
/// # Errors
/// If kubectl cannot ask.
pub fn explain(args: &ExplainArgs) -> Result<()> {
    let namespace = namespace(args.namespace.as_ref())?;
    named([&args.pod, &namespace])?;
    let pod = get(&format!("/api/v1/namespaces/{namespace}/pods/{}", args.pod))?;
    let list = get(&format!("{GROUP}/namespaces/{namespace}/podcheckpoints"))?;
    let checkpoints = list["items"].as_array().cloned().unwrap_or_default();
    let lines = account(&pod, &checkpoints);
    match args.json {
        true => println!("{}", json!({ "pod": args.pod, "says": lines })),
        false => lines.iter().for_each(|line| println!("{line}")),
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
    let is_gated = is_gated(pod);
    if is_gated {
        lines.push(match annotation(pod, WAITS_SINCE) {
            Some(since) => format!(
                "It waits its turn behind the gate {GATE} since {since}: nodes restore few pods at a time."
            ),
            None => format!(
                "It waits behind the gate {GATE}: for its checkpoint, or for a snapshot of the first pod of its template."
            ),
        });
    }
    match annotation(pod, RESTORE_FROM) {
        None if is_gated => {}
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
        let words = ["/reason", "/message"].map(|place| text(&condition, place));
        lines.push(format!(
            "{}: {}{}",
            text(one, "/metadata/name"),
            words.join(" ").trim_end(),
            claimed_by(one).map_or(String::new(), |uid| format!("; for the pod of uid {uid}"))
        ));
    }
    lines
}

fn of_checkpoint(pod: &Value, one: &Value) -> Vec<String> {
    let mut lines: Vec<String> = objection(pod, one).into_iter().collect();
    for told in tried_with(one) {
        let name = text(told, "/name");
        let message = text(told, "/message");
        lines.push(match (told["restored"] == true, told[AGAIN] == true) {
            (true, _) => format!("{name}: restored; {CONNECTIONS}"),
            (false, true) => format!("{name}: not restored, and tried again: {message}"),
            (false, false) => format!("{name}: started cold: {message}"),
        });
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{begun, new, ready};

    #[test]
    fn accounts() {
        let mut pod = json!({
            "metadata": { "namespace": "a", "uid": "u",
                "ownerReferences": [{ "uid": "o", "controller": true }] },
            "spec": { "runtimeClassName": "torpor" },
        });
        assert!(account(&json!({}), &[])[0].contains("runtime class"));
        assert!(account(&pod, &[])[0].contains("cold"));
        let mut waits = pod.clone();
        waits["spec"]["schedulingGates"] = json!([{ "name": GATE }]);
        let lines = account(&waits, &[]);
        assert!(lines.len() == 1 && lines[0].contains("for its checkpoint"), "{lines:?}");
        waits["metadata"]["annotations"] = json!({ WAITS_SINCE: "2026-01-01T00:00:00Z" });
        let lines = account(&waits, &[]);
        assert!(lines.len() == 1 && lines[0].contains("its turn"), "{lines:?}");
        pod["metadata"]["annotations"] = json!({ RESTORE_FROM: "c" });
        let one = json!({
            "metadata": { "namespace": "a", "name": "c" },
            "status": {
                "ownerUID": "o", "index": "",
                "restoredContainers": [
                    { "name": "x", "restored": false, "message": "no" },
                    { "name": "y", "restored": true },
                    { "name": "z", "restored": false, "again": true, "message": "late" },
                ],
            },
        });
        let lines = account(&pod, &[one]).join("\n");
        assert!(lines.contains("x: started cold: no") && lines.contains("not claimed"), "{lines}");
        assert!(lines.contains(&format!("y: restored; {CONNECTIONS}")), "{lines}");
        assert!(lines.contains("z: not restored, and tried again: late"), "{lines}");
    }

    #[test]
    fn what_cannot_be_saved_is_not_ordered() {
        let pod = |class: &str, phase: &str| {
            let spec = json!({ "runtimeClassName": class });
            json!({ "metadata": { "name": "p" }, "spec": spec, "status": { "phase": phase } })
        };
        let why = |pod: &Value| can_be_saved(pod).err().map(|error| error.to_string());
        assert_eq!(why(&pod("torpor", "Running")), None);
        assert!(why(&pod("runc", "Running")).is_some_and(|why| why.contains("runtimeClassName")));
        assert!(why(&pod("torpor", "Pending")).is_some_and(|why| why.contains("Pending")));
        let mut goes = pod("torpor", "Running");
        goes["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        assert!(why(&goes).is_some_and(|why| why.contains("deleted")));
    }

    #[test]
    fn a_cluster_without_torpor_is_told_from_a_missing_object() {
        let missing = "Error from server (NotFound): podcheckpoints.torpor.dev \"c\" not found\n";
        assert_eq!(refusal(missing), missing.trim());
        for said in [
            "Error from server (NotFound): the server could not find the requested resource",
            "error: resource mapping not found: no matches for kind \"PodCheckpoint\"",
        ] {
            assert!(refusal(said).contains("kubernetes manifests"), "{said}");
        }
    }

    #[test]
    fn a_pod_of_a_checkpoint_asks_for_it() {
        let pod = json!({
            "metadata": { "namespace": "a", "name": "p", "labels": { "app": "x" } },
            "spec": { "nodeName": "n", "containers": [{ "name": "c", "image": "i" }] },
        });
        let mut one = new(&pod, "c", 30);
        one["status"] = begun(&pod, "n");
        let args =
            RestoreArgs { checkpoint: "c".into(), namespace: None, pod: "q".into(), json: false };
        let refused = restored(&one, "a", &args).unwrap_err().to_string();
        assert_eq!(refused, "the checkpoint c is not complete: CheckpointInProgress");
        one["status"]["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
        let made = restored(&one, "a", &args).unwrap();
        assert_eq!(annotation(&made, RESTORE_REQUEST), Some("c"));
        assert_eq!(crate::pod::template_hash(&made), crate::pod::template_hash(&pod));
        assert!(made["spec"]["nodeName"].is_null() && made["metadata"]["labels"].is_null());
        assert!(named([&"../x".to_owned()]).is_err());
        // It is of the revision of that pod, and of no owner.
        let mut revised = pod;
        revised["metadata"]["labels"] = json!({ "app": "x", "pod-template-hash": "1" });
        one["status"]["checkpointedPodTemplate"] = crate::pod::template(&revised);
        let made = restored(&one, "a", &args).unwrap();
        assert_eq!(made["metadata"]["labels"], json!({ "pod-template-hash": "1" }));
        assert_eq!(crate::pod::template_hash(&made), crate::pod::template_hash(&revised));
    }
}
