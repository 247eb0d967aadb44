//! Pods on a real Kubernetes: two nodes on this machine, with containerd, kubelets and a control plane
//! that scripts/kubernetes/build.sh has built. With `TORPOR_LONG=1` all of it runs, and is built first. Without, one
//! test runs where it was built before.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);
const IMAGE: &str = "docker.io/library/torpor-base:1";
/// Counts, in a file of the container and in an emptyDir, and tells what it chose when it began.
const COUNT: &str = "i=0; began=$(cat /proc/sys/kernel/random/uuid); while :; do i=$((i+1)); \
    echo $i > /data/count; echo $i > /file; echo tick $i $began; sleep 0.1; done";

/// Two clusters at a time are too much for a small machine.
static ONE: Mutex<()> = Mutex::new(());

struct Cluster {
    place: tempfile::TempDir,
    script: Child,
    _one: MutexGuard<'static, ()>,
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

fn is_long() -> bool {
    std::env::var("TORPOR_LONG").is_ok()
}

/// The cluster, for a test that takes long, where there can be one.
fn cluster(test: &str) -> Option<Cluster> {
    if !is_long() {
        eprintln!("{test}: skipped, since it takes minutes: set TORPOR_LONG=1");
        return None;
    }
    built(test)
}

/// The cluster, where there can be one: if the test is not to take long, where it was built before.
fn built(test: &str) -> Option<Cluster> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("{test}: skipped, since it takes root");
        return None;
    }
    let scripts = root().join("scripts/kubernetes");
    let mut build = Command::new(scripts.join("build.sh"));
    if !is_long() {
        build.arg("--built");
    }
    let built = build.stdin(Stdio::null()).stdout(Stdio::null()).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!(
            "{test}: skipped, since there is no Kubernetes: scripts/kubernetes/build.sh builds it"
        );
        return None;
    }
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let place = tempfile::Builder::new().prefix("tk8s-").tempdir_in("/tmp").unwrap();
    let script = Command::new(scripts.join("cluster.sh"))
        .arg(place.path())
        .arg(env!("CARGO_BIN_EXE_torpor"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut cluster = Cluster { place, script, _one: one };
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

    /// `kubectl torpor`, which finds its kubectl on the path.
    fn plugin(&self, words: &[&str]) -> Result<String, String> {
        let bin = self.place.path().join("bin");
        let path = format!("PATH={}:{}", bin.display(), std::env::var("PATH").unwrap());
        let output = Command::new(bin.join("inside"))
            .args(["env", &path])
            .arg(bin.join("kubectl-torpor"))
            .args(words)
            .stdin(Stdio::null())
            .output()
            .unwrap();
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
        let status = &mine.unwrap()["status"];
        eprintln!("{app}: frozen for {} ms", status["frozenMilliseconds"]);
        assert!(status["wrappedKey"].as_str().is_some_and(|key| !key.is_empty()), "not sealed");
        for node in ["node1", "node2"] {
            self.sealed(node);
        }
    }

    /// What a node keeps of checkpoints does not show what the programs knew.
    fn sealed(&self, node: &str) {
        let dir = self.place.path().join(node).join("torpor/checkpoints");
        let found = Command::new("grep").args(["-rl", "echo tick"]).arg(dir).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout), "", "memory in plain text");
    }

    /// Waits until another pod of `app` than that of the uid goes on after `told`, and was not begun anew.
    fn goes_on(&self, app: &str, uid: &Value, told: u64, began: &str) -> Value {
        let new = self.until(&format!("{app} is back"), || {
            self.running(app).into_iter().find(|pod| pod["metadata"]["uid"] != *uid)
        });
        let (first, _, since) = self.until(&format!("{app} goes on"), || {
            self.counts(&new).filter(|(first, last, _)| last > first)
        });
        assert!(first > told, "{app}: {first} after {told}");
        assert_eq!(since, began, "{app} began anew");
        new
    }

    /// The one pod of `app` that counts, what it has told, and when its program began.
    fn counting(&self, app: &str) -> (Value, u64, String) {
        let pod = self.until(&format!("{app} runs"), || self.running(app).pop());
        let (_, told, began) = self.until(&format!("{app} counts"), || {
            self.counts(&pod).filter(|(_, last, _)| *last >= 10)
        });
        (pod, told, began)
    }

    /// A move to a node that is not there fails, and leaves nothing behind.
    fn fails_to_move(&self, pod: &str) {
        self.apply(&json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "PodMigration",
            "metadata": { "name": "nowhere" },
            "spec": { "podName": pod, "targetNode": "nowhere", "timeoutSeconds": 10 },
        }));
        let message = self.until("the move fails", || {
            let one = self.get(&["pm", "nowhere"]);
            let failed = one["status"]["phase"] == "Failed";
            failed.then(|| one["status"]["message"].as_str().unwrap().to_owned())
        });
        assert!(message.contains("more than 10 s"), "{message}");
        let pods = self.get(&["pods", "-l", "torpor.dev/migration=nowhere"]);
        let saved = self.get(&["pcp", "-l", "torpor.dev/migration=nowhere"]);
        assert_eq!((&pods["items"], &saved["items"]), (&json!([]), &json!([])));
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

    cluster.apply(&job("job"));
    cluster.give_way("job");
    cluster.was_charged_nothing("job");
}

#[test]
fn the_image_holds_the_program_and_what_it_takes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("the_image_holds_the_program: skipped, since it takes root");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let archive = place.path().join("image.tar");
    let made = Command::new(root().join("scripts/kubernetes/image.sh"))
        .args(["example.org/torpor:1", archive.to_str().unwrap(), env!("CARGO_BIN_EXE_torpor")])
        .status()
        .unwrap();
    assert!(made.success());
    let unpack = |archive: &Path, into: &Path| {
        fs::create_dir(into).unwrap();
        let done = Command::new("tar").arg("-C").arg(into).arg("-xf").arg(archive).status();
        assert!(done.unwrap().success());
    };
    let image = place.path().join("image");
    unpack(&archive, &image);
    let config: Value =
        serde_json::from_slice(&fs::read(image.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/torpor"]));
    let below = place.path().join("root");
    unpack(&image.join("layer.tar"), &below);
    let run = Command::new("chroot")
        .arg(&below)
        .args(["/usr/bin/torpor", "kubernetes", "manifests", "--image", "example.org/torpor:1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && text.contains("image: example.org/torpor:1"), "{run:?}");
}

fn deployment(app: &str, share: usize) -> Value {
    let mut template = template(app);
    let request = json!({ "requests": { "cpu": format!("{share}m") } });
    template["spec"]["containers"][0]["resources"] = request;
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": app },
        "spec": { "replicas": 1, "selector": { "matchLabels": { "app": app } },
                  "template": template },
    })
}

/// An indexed Job, whose pods do not start a container again.
fn job(app: &str) -> Value {
    let mut work = template(app);
    work["spec"]["restartPolicy"] = json!("Never");
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": app },
        "spec": {
            "completions": 1, "completionMode": "Indexed", "backoffLimit": 0, "template": work,
        },
    })
}

impl Cluster {
    /// A Job has failed at nothing, and counts no pod twice.
    fn was_charged_nothing(&self, name: &str) {
        let job = self.get(&["job", name]);
        assert!(matches!(job["status"]["failed"].as_u64(), None | Some(0)), "{}", job["status"]);
    }

    fn drain(&self, node: &str) {
        let words =
            ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=170s"];
        self.kubectl("admin", &words, "").unwrap();
    }
}

#[test]
fn a_job_that_was_suspended_goes_on() {
    let Some(cluster) = built("a_job_that_was_suspended_goes_on") else { return };
    cluster.apply(&job("job"));
    let (old, told, began) = cluster.counting("job");
    let suspend = |value: bool| {
        let patch = json!({ "spec": { "suspend": value } }).to_string();
        cluster.kubectl("admin", &["patch", "job", "job", "-p", &patch], "").unwrap();
    };
    suspend(true);
    cluster.until("the job has no pod", || {
        let pods = cluster.get(&["pods", "-l", "app=job"]);
        pods["items"].as_array()?.is_empty().then_some(())
    });
    suspend(false);
    cluster.goes_on("job", &old["metadata"]["uid"], told, &began);
    cluster.was_charged_nothing("job");
}

/// How many replicas of each kind are on the nodes.
const REPLICAS: usize = 3;

#[test]
fn every_replica_of_a_drained_node_goes_on_once() {
    let Some(cluster) = cluster("every_replica_of_a_drained_node_goes_on_once") else { return };
    let mut deployment = deployment("alike", 20);
    deployment["spec"]["replicas"] = json!(REPLICAS);
    cluster.apply(&deployment);
    let mut set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "ordinal" },
        "spec": {
            "serviceName": "ordinal", "replicas": REPLICAS, "podManagementPolicy": "Parallel",
            "selector": { "matchLabels": { "app": "ordinal" } }, "template": template("ordinal"),
        },
    });
    let request = json!({ "requests": { "cpu": "20m" } });
    set["spec"]["template"]["spec"]["containers"][0]["resources"] = request;
    cluster.apply(&set);
    let apps = ["alike", "ordinal"];
    let all = |app: &str, elsewhere: Option<&str>| {
        let pods = cluster.until(&format!("{REPLICAS} of {app} run"), || {
            let mut pods = cluster.running(app);
            pods.retain(|pod| elsewhere.is_none_or(|node| pod["spec"]["nodeName"] != node));
            (pods.len() == REPLICAS).then_some(pods)
        });
        pods.into_iter().map(|pod| Replica::of(&cluster, &pod)).collect::<Vec<_>>()
    };
    let before = apps.map(|app| all(app, None));
    // One node empties, and then the other: every replica moves at least once.
    for (node, back) in [("node1", true), ("node2", false)] {
        cluster.drain(node);
        for app in apps {
            all(app, Some(node));
        }
        if back {
            cluster.kubectl("admin", &["uncordon", node], "").unwrap();
        }
    }
    for (app, before) in apps.iter().zip(before) {
        let mut after = all(app, Some("node2"));
        for was in before {
            let at = after.iter().position(|is| is.began == was.began);
            let is = after.swap_remove(at.unwrap_or_else(|| panic!("{app}: {was:?}: {after:?}")));
            assert!(is.told > was.told, "{app}: {is:?} after {was:?}");
            assert_eq!((is.restarts, &is.index), (0, &was.index), "{app}");
        }
    }
}

/// What can be seen of a replica.
#[derive(Debug)]
struct Replica {
    /// Its number, where it has one.
    index: String,
    /// What its program chose when it began: no two are the same.
    began: String,
    /// What it has told last.
    told: u64,
    restarts: u64,
}

impl Replica {
    fn of(cluster: &Cluster, pod: &Value) -> Self {
        let (_, told, began) = cluster.until("a replica counts", || {
            cluster.counts(pod).filter(|(first, last, _)| last > first)
        });
        let labels = &pod["metadata"]["labels"];
        let index = labels["apps.kubernetes.io/pod-index"].as_str().unwrap_or_default();
        let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap();
        Self { index: index.to_owned(), began, told, restarts }
    }
}

#[test]
fn pods_start_warm_by_policy_and_move_alive() {
    let Some(cluster) = cluster("pods_start_warm_by_policy_and_move_alive") else { return };
    cluster.apply(&deployment("moved", 100));
    let (old, told, began) = cluster.counting("moved");
    let name = old["metadata"]["name"].as_str().unwrap();
    cluster.fails_to_move(name);
    let target = cluster.plugin(&["migrate", name]).unwrap();
    let new = cluster.goes_on("moved", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["metadata"]["name"], target.trim());
    assert_ne!(new["spec"]["nodeName"], old["spec"]["nodeName"]);
    cluster.until("the source has gone", || {
        let found = cluster.get(&["pods", "-l", "app=moved"]);
        let all = found["items"].as_array()?;
        (all.len() == 1 && all[0]["metadata"]["uid"] == new["metadata"]["uid"]).then_some(())
    });
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.delete(&["deployment/moved"]);

    cluster.apply(&json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "PodSnapshotPolicy",
        "metadata": { "name": "warm" },
        "spec": { "selector": { "matchLabels": { "app": "warm" } }, "start": "IfPresent" },
    }));
    cluster.apply(&deployment("warm", 100));
    let (first, _, began) = cluster.counting("warm");
    cluster.until("there is a snapshot", || {
        let all = cluster.get(&["pcp", "-l", "torpor.dev/policy=warm"]);
        let ready = |one: &Value| {
            let conditions = one["status"]["conditions"].as_array()?;
            conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True").then_some(())
        };
        all["items"].as_array()?.iter().find_map(ready)
    });
    let (_, told, _) = cluster.counting("warm");
    cluster.until("it goes on after its snapshot", || {
        cluster.counts(&first).filter(|(_, last, _)| *last > told)
    });
    cluster.kubectl("admin", &["scale", "deployment/warm", "--replicas=3"], "").unwrap();
    let all = cluster
        .until("all three run", || Some(cluster.running("warm")).filter(|all| all.len() == 3));
    for pod in &all {
        let (_, _, since) = cluster.until("it counts", || cluster.counts(pod));
        assert_eq!(since, began, "it began anew");
    }
    costs(&cluster);
}

/// Says what the agents take, idle, and how long the API server has waited for the webhook.
fn costs(cluster: &Cluster) {
    let script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q 'kubernetes agent' && \
                  grep VmRSS $p/status && cut -d' ' -f14,15 $p/stat; sleep 0; done";
    let seen = || {
        let inside = Command::new(cluster.place.path().join("bin/inside"))
            .args(["sh", "-c", script])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        String::from_utf8_lossy(&inside.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let before = seen();
    sleep(Duration::from_secs(10));
    eprintln!("agents, memory and ticks: {before}; 10 s later: {}", seen());
    let metrics = cluster.kubectl("admin", &["get", "--raw", "/metrics"], "").unwrap();
    let of_webhook = "apiserver_admission_webhook_admission_duration_seconds_bucket";
    for line in metrics.lines() {
        let is_ours = line.starts_with(of_webhook) && line.contains("pods.torpor.dev");
        if is_ours
            && ["0.005", "0.01", "0.025", "+Inf"]
                .iter()
                .any(|le| line.contains(&format!("le=\"{le}\"")))
        {
            eprintln!("{line}");
        }
    }
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
    stolen(cluster, &saved["items"][0]);
    foreign(cluster, &name);
}

/// Asks the controller for the key of a checkpoint with the token of each node.
fn stolen(cluster: &Cluster, saved: &Value) {
    let pod = cluster.get(&["pod", saved["status"]["claimedBy"]["name"].as_str().unwrap()]);
    let there = pod["spec"]["nodeName"].as_str().unwrap();
    let name = saved["metadata"]["name"].as_str().unwrap();
    let pod = saved["status"]["claimedBy"]["name"].as_str().unwrap();
    let url = format!("https://10.77.0.1:9443/v1/keys/open/default/{name}?pod={pod}");
    for node in ["node1", "node2"] {
        let token = cluster.place.path().join(node).join("token");
        let header = format!("Authorization: Bearer {}", fs::read_to_string(token).unwrap().trim());
        // What comes back is all that counts here: the certificate is the controllers' own.
        let asked = Command::new(cluster.place.path().join("bin/inside"))
            .args(["curl", "-sk", "-X", "POST", "-d", "{}", "-H", &header, &url])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&asked.stdout);
        assert_eq!(said.contains("AGE-SECRET-KEY-1"), node == there, "{node}: {said}");
    }
}

/// A pod of another namespace that asks for a checkpoint by its name starts cold, or waits.
fn foreign(cluster: &Cluster, name: &str) {
    cluster.kubectl("admin", &["create", "namespace", "other"], "").unwrap();
    cluster.until("the namespace has an account", || {
        cluster.kubectl("admin", &["-n", "other", "get", "serviceaccount", "default"], "").ok()
    });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "foreign", "namespace": "other",
            "annotations": { "torpor.dev/restore-request": name },
        },
        "spec": template("foreign")["spec"],
    });
    cluster.apply(&pod);
    sleep(Duration::from_secs(3));
    let found = cluster.get(&["-n", "other", "pod", "foreign"]);
    assert!(found["metadata"]["annotations"]["torpor.dev/restore-from"].is_null(), "{found}");
    cluster.kubectl("admin", &["delete", "namespace", "other", "--wait=false"], "").unwrap();
}
