//! On Kubernetes: an agent as a Job on each node that a label selects. Everything goes through the API, by
//! `kubectl`: nodes are found, Jobs made, results read from their logs, and all of it is removed.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use torpor_worker::tell;

use crate::agent::{self, Request};
use crate::machine::HOST;
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

fn kubectl(cluster: &Cluster) -> Command {
    let mut command = Command::new("kubectl");
    command.args(["--namespace", &cluster.namespace]).stdin(Stdio::null());
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
    let mut command = kubectl(cluster);
    command.args(["get", "nodes", "--selector", &cluster.selector, "--output", "json"]);
    let text = done("the nodes", command.output())?;
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

/// The Job on a node, and its configuration.
#[must_use]
pub(crate) fn manifest(cluster: &Cluster, node: &str, request: &Request) -> Value {
    let name = name(request);
    let labels = json!({ LABEL: request.id, "app.kubernetes.io/name": "torpor-benchmark" });
    let metadata = json!({ "name": name, "namespace": cluster.namespace, "labels": labels });
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
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            // A second try would measure a machine that the first one has disturbed.
            "backoffLimit": 0,
            "activeDeadlineSeconds": cluster.limit,
            "ttlSecondsAfterFinished": 3600,
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    });
    // JSON is YAML.
    let config = serde_json::to_string(&request.config).unwrap_or_default();
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": { CONFIG: config },
    });
    json!({ "apiVersion": "v1", "kind": "List", "items": [map, job] })
}

/// What was made on a cluster; it is removed in the end.
struct OnCluster<'a>(&'a Cluster, String);

impl Drop for OnCluster<'_> {
    fn drop(&mut self) {
        let mut command = kubectl(self.0);
        command.args(["delete", "jobs,configmaps", "--ignore-not-found", "--wait=true"]);
        command.args(["--cascade=foreground", "--selector", &format!("{LABEL}={}", self.1)]);
        if let Err(error) = done("removing the Job", command.output()) {
            tell!("{error}");
        }
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
    let made = OnCluster(cluster, request.id.clone());
    apply(cluster, &manifest(cluster, node, request))?;
    let mut last = "its pod has not begun".to_owned();
    loop {
        let log = fs::File::create(log).map_err(|e| format!("{}: {e}", log.display()))?;
        let mut follow = follow(cluster, request, &log)?;
        let output = follow.stdout.take().ok_or("its log cannot be read")?;
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
        if let Some(reason) = ended(cluster, request)? {
            return Err(format!("the Job {reason}: {last}"));
        }
        std::thread::sleep(POLL);
    }
}

fn apply(cluster: &Cluster, manifest: &Value) -> Result<(), String> {
    let mut command = kubectl(cluster);
    command.args(["apply", "--filename", "-"]).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("kubectl: {e}"))?;
    if let Some(mut input) = child.stdin.take() {
        // If it does not read, its exit status tells why.
        let _ = input.write_all(manifest.to_string().as_bytes());
    }
    done("making the Job", child.wait_with_output()).map(drop)
}

fn follow(cluster: &Cluster, request: &Request, log: &fs::File) -> Result<Child, String> {
    let text = |e: std::io::Error| format!("kubectl: {e}");
    let mut command = kubectl(cluster);
    command.args(["logs", "--follow", "--pod-running-timeout=1m"]);
    command.arg(format!("job/{}", name(request)));
    command.stdout(Stdio::piped()).stderr(log.try_clone().map_err(text)?);
    command.spawn().map_err(text)
}

/// How a Job has ended, if it has.
fn ended(cluster: &Cluster, request: &Request) -> Result<Option<String>, String> {
    let mut command = kubectl(cluster);
    command.args(["get", "job", &name(request), "--output", "json"]);
    let text = done("the Job", command.output())?;
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
        let list = manifest(&cluster, "node-1", &request);
        let (map, job) = (&list["items"][0], &list["items"][1]);
        let config = map["data"][CONFIG].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Config>(config).unwrap(), request.config);
        let pod = &job["spec"]["template"]["spec"];
        assert_eq!((&pod["nodeName"], &pod["restartPolicy"]), (&json!("node-1"), &json!("Never")));
        assert_eq!(job["spec"]["activeDeadlineSeconds"], 600);
        assert_eq!(pod["volumes"][0]["configMap"]["name"], map["metadata"]["name"]);
        for item in [map, job] {
            assert_eq!(item["metadata"]["labels"][LABEL], "0a");
        }
    }
}
