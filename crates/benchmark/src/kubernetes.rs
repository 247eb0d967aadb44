//! On Kubernetes: an agent as a Job on each node that a label selects. Everything goes through the API, by
//! `kubectl`: nodes are found, Jobs made, results read from their logs, and all of it is removed. That is
//! done by a process of its own, which outlives the coordinator whatever ends that.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::agent::{self, Request};
use crate::machine::HOST;
use crate::own;
use crate::program::{self, Patient};
use crate::results::Results;

/// Where Jobs are made.
#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    /// The label of nodes, as `kubectl --selector` takes it.
    pub selector: String,
    /// The namespace of Jobs; it must allow privileged pods.
    pub namespace: String,
    /// The image with the tool in it.
    pub image: String,
    /// How long a Job may take, in seconds.
    pub limit: u64,
}

/// The label of everything that is made here.
const LABEL: &str = "torpor.benchmark/run";
/// A directory that tool and runtime see under the same path: logs and images go through it.
const SHARED: &str = "/var/tmp/torpor-benchmark";
/// The name of a configuration in its volume.
const CONFIG: &str = "config.json";
/// How often the log of a Job whose pod is not there yet is asked for.
const POLL: Duration = Duration::from_secs(2);
/// How often in turn the API may fail to tell how a Job is: it may be starting again.
const FAILURES: u32 = 30;
/// How long the API may take for an answer.
const ANSWER: Duration = Duration::from_secs(60);
/// How long it may take until pods have ended, too.
const REMOVAL: Duration = Duration::from_secs(180);

fn kubectl(namespace: &str) -> Command {
    let mut command = Command::new("kubectl");
    command.args(["--namespace", namespace]).stdin(Stdio::null());
    command
}

fn done(what: &str, output: std::io::Result<Output>) -> Result<Vec<u8>, String> {
    let output = output.map_err(|e| format!("kubectl: {e}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{what}: {}", said.lines().last().unwrap_or("kubectl failed and said nothing")))
}

/// The names of all nodes with the label.
///
/// # Errors
/// If the API cannot be asked, or there are none.
pub(crate) fn nodes(cluster: &Cluster) -> Result<Vec<String>, String> {
    let mut command = kubectl(&cluster.namespace);
    command.args(["get", "nodes", "--selector", &cluster.selector, "--output", "json"]);
    let text = done("the nodes", program::output(&mut command, ANSWER))?;
    let list: Value = serde_json::from_slice(&text).map_err(|e| format!("the nodes: {e}"))?;
    let items = list["items"].as_array().into_iter().flatten();
    let names = items.filter_map(|node| node["metadata"]["name"].as_str());
    let plain = |name: &&str| {
        !name.starts_with('.')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
    };
    let names: Vec<String> = names.filter(plain).map(str::to_owned).collect();
    if names.is_empty() {
        return Err(format!("no node has the label {}", cluster.selector));
    }
    Ok(names)
}

/// The name of a Job: that of the work, which is different for each node.
fn name(request: &Request) -> String {
    format!("torpor-benchmark-{}", request.id)
}

fn labels(request: &Request) -> Value {
    json!({ LABEL: request.id, "app.kubernetes.io/name": "torpor-benchmark" })
}

fn metadata(cluster: &Cluster, request: &Request) -> Value {
    json!({
        "name": name(request), "namespace": cluster.namespace, "labels": labels(request),
    })
}

/// The configuration of a Job, which goes with it.
fn config_map(cluster: &Cluster, request: &Request, job: &str) -> Value {
    let mut metadata = metadata(cluster, request);
    metadata["ownerReferences"] =
        json!([{ "apiVersion": "batch/v1", "kind": "Job", "name": name(request), "uid": job }]);
    // JSON is YAML.
    let config = serde_json::to_string(&request.config).unwrap_or_default();
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": { CONFIG: config },
    })
}

/// The Job on a node. Its pod waits for its configuration.
fn job(cluster: &Cluster, node: &str, request: &Request) -> Value {
    let (name, labels) = (name(request), labels(request));
    let from_host = |name: &str, path: &str, kind: &str| json!({ "name": name, "hostPath": { "path": path, "type": kind } });
    let mounted = |name: &str, path: &str| json!({ "name": name, "mountPath": path });
    let mut arguments = vec!["run", "--agent"];
    if request.again {
        arguments.push("--again");
    }
    let config = format!("/config/{CONFIG}");
    let container = json!({
        "name": "benchmark",
        "image": cluster.image,
        "args": arguments.into_iter().chain([config.as_str()]).collect::<Vec<_>>(),
        "env": [{ "name": "TMPDIR", "value": SHARED }],
        // It reads the control groups and processes of what it measures.
        "securityContext": { "privileged": true },
        "volumeMounts": [
            mounted("config", "/config"),
            mounted("run", "/run"),
            mounted("shared", SHARED),
            mounted("cgroup", "/sys/fs/cgroup"),
            // Programs of the node: a containerd of theirs can be started.
            json!({ "name": "host", "mountPath": HOST, "readOnly": true }),
        ],
    });
    let pod = json!({
        "restartPolicy": "Never",
        "nodeName": node,
        // The registry of images is at the loopback device of the node.
        "hostNetwork": true,
        "hostPID": true,
        "automountServiceAccountToken": false,
        "tolerations": [{ "operator": "Exists" }],
        "containers": [container],
        "volumes": [
            { "name": "config", "configMap": { "name": name } },
            from_host("run", "/run", "Directory"),
            from_host("shared", SHARED, "DirectoryOrCreate"),
            from_host("cgroup", "/sys/fs/cgroup", "Directory"),
            from_host("host", "/", "Directory"),
        ],
    });
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(cluster, request),
        "spec": {
            // A second try would measure a machine that the first one has disturbed.
            "backoffLimit": 0,
            "activeDeadlineSeconds": cluster.limit,
            "ttlSecondsAfterFinished": 3600,
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    })
}

/// What is to be removed from a cluster.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    namespace: String,
    /// The value of its label.
    id: String,
}

/// Removes what was made on a cluster when its input ends: by then the coordinator has ended, for whatever
/// reason, or needs it no more.
///
/// # Errors
/// If it is not told what, or the API does not do it.
pub(crate) fn withdraw() -> Result<(), String> {
    // A signal from the terminal is for the coordinator; this process ends after it.
    let _ = rustix::process::setsid();
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    input.read_line(&mut line).map_err(|e| e.to_string())?;
    let made: Made = serde_json::from_str(&line).map_err(|e| e.to_string())?;
    let told = writeln!(io::stdout(), "ready").and_then(|()| io::stdout().flush());
    // Without a coordinator nothing was made yet.
    told.map_err(|e| e.to_string())?;
    let _ = io::copy(&mut input, &mut io::sink());
    let mut command = kubectl(&made.namespace);
    command.args(["delete", "jobs,configmaps", "--ignore-not-found", "--wait=true"]);
    command.args(["--cascade=foreground", "--selector", &format!("{LABEL}={}", made.id)]);
    done("removing the Job", program::output(&mut command, REMOVAL)).map(drop)
}

/// What is made on a cluster: the process that removes it.
struct OnCluster {
    remover: Child,
    input: Option<ChildStdin>,
}

impl OnCluster {
    /// Starts it; when this returns, nothing that is made from now on stays.
    fn start(cluster: &Cluster, request: &Request) -> Result<Self, String> {
        let failed = |e: io::Error| format!("the process that removes the Job: {e}");
        let made = Made { namespace: cluster.namespace.clone(), id: request.id.clone() };
        let mut remover = Command::new(own::executable().map_err(|e| e.to_string())?)
            .args(own::prefix())
            .arg("withdraw")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (mut input, output) = (remover.stdin.take(), remover.stdout.take());
        if let Some(input) = &mut input {
            let line = serde_json::to_string(&made).map_err(|e| e.to_string())?;
            writeln!(input, "{line}").map_err(failed)?;
        }
        let on_cluster = Self { remover, input };
        let mut said = String::new();
        if let Some(output) = output {
            BufReader::new(output).read_line(&mut said).map_err(failed)?;
        }
        if said.is_empty() { Err(failed(io::Error::other("it has ended"))) } else { Ok(on_cluster) }
    }
}

impl Drop for OnCluster {
    fn drop(&mut self) {
        drop(self.input.take());
        // What it cannot remove it says.
        let _ = self.remover.wait();
    }
}

/// Measures on a node.
///
/// # Errors
/// If the Job cannot be made, or its log holds no results.
pub(crate) fn on_node(
    cluster: &Cluster,
    node: &str,
    request: &Request,
    log: &Path,
) -> Result<Results, String> {
    let made = OnCluster::start(cluster, request)?;
    let job = apply(cluster, "the Job", &job(cluster, node, request))?;
    let uid = job["metadata"]["uid"].as_str().ok_or("the API tells no uid of the Job")?;
    apply(cluster, "the configuration of the Job", &config_map(cluster, request, uid))?;
    let mut last = "its pod has not begun".to_owned();
    let mut failures = 0;
    loop {
        let log = fs::File::create(log).map_err(|e| format!("{}: {e}", log.display()))?;
        let mut follow = follow(cluster, request, &log)?;
        let output = follow.stdout.take().ok_or("its log cannot be read")?;
        let output = Patient::new(output, request.silence());
        let results = agent::receive(output, node, log);
        let _ = follow.kill();
        let _ = follow.wait();
        match results {
            Ok(results) => {
                drop(made);
                return Ok(results);
            }
            Err(error) => last = if error.contains("no agent") { last } else { error },
        }
        // A log may end before its Job does: when the pod is not there yet, or the connection is lost. What
        // is asked for again comes from its beginning.
        match ended(cluster, request) {
            Ok(Some(reason)) => return Err(format!("the Job {reason}: {last}")),
            Ok(None) => failures = 0,
            Err(error) if failures == FAILURES => return Err(error),
            Err(_) => failures += 1,
        }
        std::thread::sleep(POLL);
    }
}

/// Makes an object; what the API says that it is.
fn apply(cluster: &Cluster, what: &str, manifest: &Value) -> Result<Value, String> {
    let mut command = kubectl(&cluster.namespace);
    command.args(["apply", "--output", "json", "--filename", "-"]);
    let output = program::answer(&mut command, Some(manifest.to_string().into()), ANSWER);
    let text = done(&format!("making {what}"), output)?;
    serde_json::from_slice(&text).map_err(|e| format!("{what}: {e}"))
}

fn follow(cluster: &Cluster, request: &Request, log: &fs::File) -> Result<Child, String> {
    let text = |e: std::io::Error| format!("kubectl: {e}");
    let mut command = kubectl(&cluster.namespace);
    command.args(["logs", "--follow", "--pod-running-timeout=1m"]);
    command.arg(format!("job/{}", name(request)));
    command.stdout(Stdio::piped()).stderr(log.try_clone().map_err(text)?);
    command.spawn().map_err(text)
}

/// How a Job has ended, if it has.
fn ended(cluster: &Cluster, request: &Request) -> Result<Option<String>, String> {
    let mut command = kubectl(&cluster.namespace);
    command.args(["get", "job", &name(request), "--output", "json"]);
    let text = done("the Job", program::output(&mut command, ANSWER))?;
    let job: Value = serde_json::from_slice(&text).map_err(|e| format!("the Job: {e}"))?;
    let conditions = job["status"]["conditions"].as_array().into_iter().flatten();
    let over = conditions
        .filter(|c| c["status"] == "True")
        .find(|c| c["type"] == "Failed" || c["type"] == "Complete");
    Ok(over.map(|condition| {
        let of = |key: &str| condition[key].as_str().unwrap_or_default();
        if of("type") == "Complete" {
            "has ended without results".to_owned()
        } else {
            format!("has failed ({} {})", of("reason"), of("message"))
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_job_is_bound_to_its_node_and_ends() {
        let cluster = Cluster {
            selector: "pool=a".into(),
            namespace: "bench".into(),
            image: "registry/benchmark:1".into(),
            limit: 600,
        };
        let request = Request { config: Config::default(), id: "0a".into(), again: false };
        let (job, map) = (job(&cluster, "node-1", &request), config_map(&cluster, &request, "u"));
        let config = map["data"][CONFIG].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Config>(config).unwrap(), request.config);
        let pod = &job["spec"]["template"]["spec"];
        assert_eq!((&pod["nodeName"], &pod["restartPolicy"]), (&json!("node-1"), &json!("Never")));
        assert_eq!(job["spec"]["activeDeadlineSeconds"], 600);
        assert_eq!(pod["volumes"][0]["configMap"]["name"], map["metadata"]["name"]);
        // It goes with its Job.
        let owner = &map["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["kind"], &owner["name"], &owner["uid"]),
            (&json!("Job"), &job["metadata"]["name"], &json!("u"))
        );
        for item in [map, job] {
            assert_eq!(item["metadata"]["labels"][LABEL], "0a");
        }
    }
}
