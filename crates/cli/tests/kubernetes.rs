//! Pods on a real Kubernetes: two nodes on this machine, with containerd, kubelets and a control plane
//! that scripts/kubernetes/build.sh has built. It takes `TORPOR_LONG=1`.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);
const IMAGE: &str = "docker.io/library/torpor-base:1";
/// Counts, in a file of the container and in an emptyDir, and tells which pod it began in.
const COUNT: &str = "i=0; began=$(date +%s%N); while :; do i=$((i+1)); \
    echo $i > /data/count; echo $i > /file; echo tick $i $began; sleep 0.1; done";

struct Cluster {
    place: tempfile::TempDir,
    script: Child,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The end of its input is its signal.
        drop(self.script.stdin.take());
        let _ = self.script.wait();
        if std::thread::panicking() {
            for log in fs::read_dir(self.place.path().join("log")).into_iter().flatten().flatten() {
                let name = log.file_name().to_string_lossy().into_owned();
                if ["agent", "controller."].iter().any(|start| name.starts_with(start)) {
                    eprintln!("{name}: {}", fs::read_to_string(log.path()).unwrap_or_default());
                }
            }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// The cluster, where there can be one.
fn cluster(test: &str) -> Option<Cluster> {
    if std::env::var("TORPOR_LONG").is_err() {
        eprintln!("{test}: skipped, since it takes minutes: set TORPOR_LONG=1");
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("{test}: skipped, since it takes root");
        return None;
    }
    let scripts = root().join("scripts/kubernetes");
    let built = Command::new(scripts.join("build.sh")).stdin(Stdio::null()).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!(
            "{test}: skipped, since Kubernetes could not be built (scripts/kubernetes/build.sh)"
        );
        return None;
    }
    let place = tempfile::Builder::new().prefix("tk8s-").tempdir_in("/tmp").unwrap();
    let script = Command::new(scripts.join("cluster.sh"))
        .arg(place.path())
        .arg(env!("CARGO_BIN_EXE_torpor"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut cluster = Cluster { place, script };
    let until = Instant::now() + LIMIT * 2;
    while !cluster.place.path().join("ready").exists() {
        let ended = cluster.script.try_wait().unwrap();
        assert!(ended.is_none() && Instant::now() < until, "no cluster: {ended:?}");
        sleep(Duration::from_millis(200));
    }
    Some(cluster)
}

impl Cluster {
    fn kubectl(&self, user: &str, words: &[&str], input: &str) -> Result<String, String> {
        let mut child = Command::new(self.place.path().join("bin/inside"))
            .arg("env")
            .arg(format!("KUBE_USER={user}"))
            .arg(self.place.path().join("bin/kubectl"))
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It may not read what it is given.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    fn get(&self, words: &[&str]) -> Value {
        let words = [&["get", "-o", "json"], words].concat();
        let found = self.kubectl("admin", &words, "");
        found.ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    fn apply(&self, object: &Value) {
        self.kubectl("admin", &["apply", "-f", "-"], &object.to_string()).unwrap();
    }

    fn until<T>(&self, what: &str, found: impl Fn() -> Option<T>) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(found) = found() {
                return found;
            }
            if Instant::now() > until {
                let all =
                    self.kubectl("admin", &["get", "pods,pcp,events", "-A", "-o", "wide"], "");
                panic!("not in time: {what}\n{}", all.unwrap_or_default());
            }
            sleep(Duration::from_millis(300));
        }
    }

    /// The pods of an application that run.
    fn running(&self, app: &str) -> Vec<Value> {
        let list = self.get(&["pods", "-l", &format!("app={app}")]);
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        let runs = |pod: &Value| {
            pod["metadata"]["deletionTimestamp"].is_null()
                && pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
        };
        pods.into_iter().filter(runs).collect()
    }

    /// The first and the last count that a pod has told, and when its program began.
    fn counts(&self, pod: &Value) -> Option<(u64, u64, String)> {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let text = self.kubectl("admin", &["logs", name], "").ok()?;
        let count = |line: &str| -> Option<(u64, String)> {
            let mut words = line.strip_prefix("tick ")?.split(' ');
            Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
        };
        let mut lines = text.lines().filter_map(count);
        let first = lines.next()?;
        let last = lines.next_back()?;
        Some((first.0, last.0, first.1))
    }

    /// Lets an urgent pod take the place of the one pod of `app`, and sees it come back.
    fn give_way(&self, app: &str) {
        let old = self.until(&format!("{app} runs"), || self.running(app).pop());
        let (_, told, began) = self.until(&format!("{app} counts"), || {
            self.counts(&old).filter(|(_, last, _)| *last >= 20)
        });
        let node = old["spec"]["nodeName"].as_str().unwrap();
        let urgent = format!("urgent-{app}");
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": urgent },
            "spec": {
                "priorityClassName": "urgent",
                "nodeSelector": { "kubernetes.io/hostname": node },
                "terminationGracePeriodSeconds": 0,
                "containers": [container(&["sleep", "100000"], false)],
            },
        }));
        let uid = &old["metadata"]["uid"];
        let new = self.until(&format!("{app} is back"), || {
            self.running(app).into_iter().find(|pod| pod["metadata"]["uid"] != *uid)
        });
        let (first, last, since) = self.until(&format!("{app} goes on"), || {
            self.counts(&new).filter(|(first, last, _)| last > first)
        });
        assert!(first > told && last > first, "{app}: {first} after {told}");
        assert_eq!(since, began, "{app} began anew");
        assert_ne!(new["spec"]["nodeName"], old["spec"]["nodeName"]);
        assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
        let name = new["metadata"]["name"].as_str().unwrap();
        let read = |file| self.kubectl("admin", &["exec", name, "--", "cat", file], "");
        for file in ["/data/count", "/file"] {
            let count = read(file).unwrap();
            assert!(count.trim().parse::<u64>().unwrap_or(0) >= first, "{file}: {count}");
        }
        let saved = self.get(&["pcp"]);
        let saved = saved["items"].as_array().unwrap();
        let mine =
            saved.iter().find(|one| one["status"]["claimedBy"]["uid"] == new["metadata"]["uid"]);
        eprintln!("{app}: frozen for {} ms", mine.unwrap()["status"]["frozenMilliseconds"]);
    }

    fn delete(&self, objects: &[&str]) {
        for object in objects {
            self.kubectl("admin", &["delete", object, "--wait", "--timeout=120s"], "").unwrap();
        }
    }
}

fn container(words: &[&str], data: bool) -> Value {
    let mut container = json!({
        "name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": words,
        "resources": { "requests": { "cpu": format!("{}m", Cluster::SHARE) } },
    });
    if data {
        container["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    }
    container
}

impl Cluster {
    /// More than half of a node's processors, so that two such pods do not fit on one.
    const SHARE: usize = 1200;
}

fn template(app: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": app } },
        "spec": {
            "runtimeClassName": "torpor",
            "dnsPolicy": "Default",
            "containers": [container(&["sh", "-c", COUNT], true)],
            "volumes": [{ "name": "data", "emptyDir": {} }],
        },
    })
}

fn urgency() -> Value {
    json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": "urgent" }, "value": 1_000_000,
    })
}

#[test]
fn preempted_pods_come_back_elsewhere_with_their_state() {
    let Some(cluster) = cluster("preempted_pods_come_back_elsewhere_with_their_state") else {
        return;
    };
    cluster.apply(&urgency());
    let selector = |app: &str| json!({ "matchLabels": { "app": app } });
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "set" },
        "spec": { "serviceName": "set", "replicas": 1, "selector": selector("set"),
                  "template": template("set") },
    }));
    cluster.give_way("set");
    forged(&cluster);
    cluster.delete(&["statefulset/set", "pod/urgent-set"]);

    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "deployment" },
        "spec": { "replicas": 1, "selector": selector("deployment"),
                  "template": template("deployment") },
    }));
    cluster.give_way("deployment");
    cluster.delete(&["deployment/deployment", "pod/urgent-deployment"]);

    let mut work = template("job");
    work["spec"]["restartPolicy"] = json!("Never");
    cluster.apply(&json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "job" },
        "spec": { "completions": 1, "completionMode": "Indexed", "backoffLimit": 0, "template": work },
    }));
    cluster.give_way("job");
    let job = cluster.get(&["job/job"]);
    assert!(matches!(job["status"]["failed"].as_u64(), None | Some(0)), "{}", job["status"]);
}

/// What nobody but Torpor may do, tried with the checkpoint that is there.
fn forged(cluster: &Cluster) {
    let saved = cluster.get(&["pcp"]);
    let name = saved["items"][0]["metadata"]["name"].as_str().unwrap().to_owned();
    let pod = |annotation: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "forged", "annotations": { annotation: name } },
            "spec": template("forged")["spec"],
        })
        .to_string()
    };
    // Not even an administrator writes the controller's annotation.
    let refused = |user: &str, words: &[&str], input: &str, expected: &str| {
        let error = cluster.kubectl(user, words, input).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    };
    let create = ["create", "-f", "-"];
    refused("admin", &create, &pod("torpor.dev/restore-from"), "controller's");
    let own = "torpor.dev/restore-from=x";
    refused("admin", &["annotate", "pod", "set-0", "--overwrite", own], "", "controller's");
    // Alice may make pods, and may not restore.
    cluster
        .kubectl(
            "admin",
            &["create", "clusterrolebinding", "alice", "--clusterrole=edit", "--user=alice"],
            "",
        )
        .unwrap();
    cluster.until("alice may make pods", || {
        cluster.kubectl("alice", &["auth", "can-i", "create", "pods"], "").ok()
    });
    refused("alice", &create, &pod("torpor.dev/restore-request"), "may not restore");
    // The token of one node's agent does not move the checkpoint of another.
    let node = saved["items"][0]["status"]["nodeName"].as_str().unwrap();
    let other = if node == "node1" { "node2" } else { "node1" };
    let token = fs::read_to_string(cluster.place.path().join(other).join("token")).unwrap();
    let token = format!("--token={}", token.trim());
    let certificate =
        format!("--certificate-authority={}", cluster.place.path().join("pki/ca.crt").display());
    let address = "--server=https://10.77.0.1:6443";
    let mut object = saved["items"][0].clone();
    object["status"]["checkpointLocation"]["peer"]["address"] = json!("10.0.0.1:1");
    let path = format!("/apis/torpor.dev/v1alpha1/namespaces/default/podcheckpoints/{name}/status");
    let words = [
        &token,
        &certificate,
        address,
        "--kubeconfig=/dev/null",
        "replace",
        "--raw",
        &path,
        "-f",
        "-",
    ];
    let error = cluster.kubectl("admin", &words, &object.to_string()).unwrap_err();
    assert!(error.contains("agent of its node alone"), "{error}");
}
