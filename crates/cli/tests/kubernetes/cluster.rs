//! The cluster that the tests have, and what they run on it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub const LIMIT: Duration = Duration::from_secs(180);
pub const IMAGE: &str = "docker.io/library/torpor-base:1";
/// Counts, in a file of the container, in an emptyDir, and in a file that all pods have and that is called
/// what it chose when it began.
pub const COUNT: &str = "i=0; began=$(cat /proc/sys/kernel/random/uuid); while :; do i=$((i+1)); \
    echo $i > /data/count; echo $i > /file; read pod < /etc/hostname; echo $i $pod >> /shared/$began; \
    echo tick $i $began; sleep 0.1; done";

/// Two clusters at a time are too much for a small machine.
static ONE: Mutex<()> = Mutex::new(());

/// Whether there is a Kubernetes. If all tests run it is built first; where that fails it takes minutes, once for all of them.
static BUILT: LazyLock<bool> = LazyLock::new(|| {
    let mut build = Command::new(root().join("scripts/kubernetes/build.sh"));
    if !is_long() {
        build.arg("--built");
    }
    let built = build.stdin(Stdio::null()).stdout(Stdio::null()).status();
    built.is_ok_and(|status| status.success())
});

pub struct Cluster {
    pub place: tempfile::TempDir,
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

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

pub fn is_long() -> bool {
    std::env::var("TORPOR_LONG").is_ok()
}

/// A number of the environment.
pub fn given(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// The cluster, for a test that takes long, where there can be one.
pub fn cluster(test: &str) -> Option<Cluster> {
    cluster_with(test, &[])
}

/// The same, whose daemons have variables in their environment.
pub fn cluster_with(test: &str, variables: &[(&str, &str)]) -> Option<Cluster> {
    if !is_long() {
        eprintln!("{test}: skipped, since it takes minutes: set TORPOR_LONG=1");
        return None;
    }
    start(test, variables)
}

/// The cluster, where there can be one: if the test is not to take long, where it was built before.
pub fn built(test: &str) -> Option<Cluster> {
    start(test, &[])
}

fn start(test: &str, variables: &[(&str, &str)]) -> Option<Cluster> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("{test}: skipped, since it takes root");
        return None;
    }
    if !*BUILT {
        // Where everything is to be tested nothing may be left out.
        assert!(!is_long(), "{test}: scripts/kubernetes/build.sh fails; it needs Go 1.25");
        eprintln!(
            "{test}: skipped, since there is no Kubernetes: scripts/kubernetes/build.sh builds it"
        );
        return None;
    }
    let scripts = root().join("scripts/kubernetes");
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let place = tempfile::Builder::new().prefix("tk8s-").tempdir_in("/tmp").unwrap();
    let script = Command::new(scripts.join("cluster.sh"))
        .arg(place.path())
        .arg(env!("CARGO_BIN_EXE_torpor"))
        .envs(variables.iter().copied())
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
    pub fn kubectl(&self, user: &str, words: &[&str], input: &str) -> Result<String, String> {
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
    pub fn plugin(&self, user: &str, words: &[&str]) -> Result<String, String> {
        let bin = self.place.path().join("bin");
        let path = format!("PATH={}:{}", bin.display(), std::env::var("PATH").unwrap());
        let output = Command::new(bin.join("inside"))
            .args(["env", &path, &format!("KUBE_USER={user}")])
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

    /// Gives a user the rights of a role, and waits until that is so by an example of what they allow.
    pub fn bind(&self, user: &str, role: &str, [verb, resource]: [&str; 2]) {
        let [name, role] = [format!("{user}-{role}"), format!("--clusterrole={role}")];
        let to = format!("--user={user}");
        let words = ["create", "clusterrolebinding", &name, &role, &to];
        self.kubectl("admin", &words, "").unwrap();
        self.until(&format!("{user} may {verb} {resource}"), || {
            self.kubectl(user, &["auth", "can-i", verb, resource], "").ok()
        });
    }

    pub fn get(&self, words: &[&str]) -> Value {
        let words = [&["get", "-o", "json"], words].concat();
        let found = self.kubectl("admin", &words, "");
        found.ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    pub fn apply(&self, object: &Value) {
        self.kubectl("admin", &["apply", "-f", "-"], &object.to_string()).unwrap();
    }

    pub fn until<T>(&self, what: &str, found: impl Fn() -> Option<T>) -> T {
        self.within(LIMIT, what, found)
    }

    /// The same for what may take longer.
    pub fn within<T>(&self, limit: Duration, what: &str, found: impl Fn() -> Option<T>) -> T {
        let until = Instant::now() + limit;
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
    pub fn running(&self, app: &str) -> Vec<Value> {
        let list = self.get(&["pods", "-l", &format!("app={app}")]);
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        let runs = |pod: &Value| {
            pod["metadata"]["deletionTimestamp"].is_null()
                && pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
        };
        pods.into_iter().filter(runs).collect()
    }

    /// The first and the last count that a pod has told, and what its program chose when it began.
    pub fn counts(&self, pod: &Value) -> Option<(u64, u64, String)> {
        self.counts_of(pod, "c")
    }

    /// The same of a container.
    pub fn counts_of(&self, pod: &Value, container: &str) -> Option<(u64, u64, String)> {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let text = self.kubectl("admin", &["logs", name, "-c", container], "").ok()?;
        let count = |line: &str| -> Option<(u64, String)> {
            let mut words = line.strip_prefix("tick ")?.split(' ');
            Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
        };
        let mut lines = text.lines().filter_map(count);
        let first = lines.next()?;
        let last = lines.next_back()?;
        Some((first.0, last.0, first.1))
    }

    /// An urgent pod that takes the place of `app` on a node, since it needs so many processors.
    pub fn urgent(&self, node: &str, app: &str, share: &str) {
        let script = "echo runs; exec sleep 100000";
        let mut container = container(&["sh", "-c", script], false);
        container["resources"]["requests"]["cpu"] = json!(share);
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": format!("urgent-{app}") },
            "spec": {
                "priorityClassName": "urgent",
                "nodeSelector": { "kubernetes.io/hostname": node },
                "terminationGracePeriodSeconds": 0,
                "containers": [container],
            },
        }));
    }

    /// What a program that chose `began` has counted, with the names of the pods that it was in: nothing
    /// is left out, and nothing was done twice.
    pub fn works_once(&self, began: &str) -> Vec<(u64, String)> {
        let text = fs::read_to_string(self.place.path().join("shared").join(began)).unwrap();
        let counts: Vec<(u64, String)> = text
            .lines()
            .map(|line| {
                let (count, pod) = line.split_once(' ').unwrap();
                (count.parse().unwrap(), pod.to_owned())
            })
            .collect();
        for (expected, (count, pod)) in (1..).zip(&counts) {
            assert_eq!(*count, expected, "{began} in {pod}");
        }
        counts
    }

    /// Lets an urgent pod take the place of the one pod of `app`, and sees it come back.
    pub fn give_way(&self, app: &str) {
        let old = self.until(&format!("{app} runs"), || self.running(app).pop());
        let (_, told, began) = self.until(&format!("{app} counts"), || {
            self.counts(&old).filter(|(_, last, _)| *last >= 20)
        });
        let node = old["spec"]["nodeName"].as_str().unwrap();
        self.urgent(node, app, "1200m");
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
        for file in ["/data/count", "/file"] {
            let count = self.number(&new, "c", file);
            assert!(count >= first, "{file}: {count}");
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

    /// What a file of a container says.
    pub fn read(&self, pod: &Value, container: &str, file: &str) -> String {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let words = ["exec", name, "-c", container, "--", "cat", file];
        self.kubectl("admin", &words, "").unwrap().trim().to_owned()
    }

    /// The number in a file of a container, which is empty while it is written.
    pub fn number(&self, pod: &Value, container: &str, file: &str) -> u64 {
        self.until(&format!("there is a number in {file}"), || {
            self.read(pod, container, file).parse().ok()
        })
    }

    /// What a node keeps of checkpoints does not show what the programs knew.
    pub fn sealed(&self, node: &str) {
        let dir = self.place.path().join(node).join("torpor/checkpoints");
        let found = Command::new("grep").args(["-rl", "echo tick"]).arg(dir).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout), "", "memory in plain text");
    }

    /// Waits until another pod of `app` than that of the uid goes on after `told`, and was not begun anew.
    pub fn goes_on(&self, app: &str, uid: &Value, told: u64, began: &str) -> Value {
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
    pub fn counting(&self, app: &str) -> (Value, u64, String) {
        let pod = self.until(&format!("{app} runs"), || self.running(app).pop());
        let (_, told, began) = self.until(&format!("{app} counts"), || {
            self.counts(&pod).filter(|(_, last, _)| *last >= 10)
        });
        (pod, told, began)
    }

    /// Has pods of `app` start warm, as soon as there is a snapshot of one.
    pub fn starts_warm(&self, app: &str) {
        self.apply(&json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "PodSnapshotPolicy",
            "metadata": { "name": app },
            "spec": { "selector": { "matchLabels": { "app": app } }, "start": "IfPresent" },
        }));
    }

    /// A move to a node that is not there fails, and leaves nothing behind.
    pub fn fails_to_move(&self, pod: &str) {
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

    /// What the control groups of its nodes begin with.
    pub fn name(&self) -> String {
        format!("torpor-k8s-{}", self.script.id())
    }

    /// A program inside of the cluster.
    pub fn inside(&self, words: &[&str]) -> Output {
        let inside = self.place.path().join("bin/inside");
        Command::new(inside).args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// How often a daemon has read and written since it was started.
    pub fn work(&self, daemon: &str) -> u64 {
        let pid = fs::read_to_string(self.place.path().join("run").join(daemon)).unwrap();
        let io = self.inside(&["cat", &format!("/proc/{}/io", pid.trim())]).stdout;
        let io = String::from_utf8_lossy(&io).into_owned();
        let calls = |name: &str| io.lines().find_map(|line| line.strip_prefix(name));
        let calls =
            ["syscr: ", "syscw: "].map(|name| calls(name).and_then(|n| n.parse::<u64>().ok()));
        calls.map(Option::unwrap_or_default).iter().sum()
    }

    /// Kills a daemon, which comes back.
    pub fn kill(&self, daemon: &str) {
        let file = self.place.path().join("run").join(daemon);
        let pid = fs::read_to_string(file).unwrap();
        let hit = self.inside(&["kill", "-9", pid.trim()]);
        assert!(hit.status.success(), "{daemon} was not there to be killed");
    }

    /// Ends a daemon for good.
    pub fn lose(&self, daemon: &str) {
        fs::write(self.place.path().join("run").join(format!("{daemon}.lost")), "").unwrap();
        self.kill(daemon);
    }

    /// A counter of an agent.
    pub fn counter(&self, node: &str, name: &str) -> u64 {
        let url = format!("https://10.77.0.1{}:7690/metrics", node.trim_start_matches("node"));
        let text = self.inside(&["curl", "-sk", &url]).stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.and_then(|count| count.trim().parse().ok()).unwrap_or_default()
    }

    pub fn delete(&self, objects: &[&str]) {
        for object in objects {
            self.kubectl("admin", &["delete", object, "--wait", "--timeout=120s"], "").unwrap();
        }
    }
}

pub fn container(words: &[&str], data: bool) -> Value {
    let mut container = json!({
        "name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": words,
        "resources": { "requests": { "cpu": format!("{}m", Cluster::SHARE) } },
    });
    if data {
        container["volumeMounts"] = json!([
            { "name": "data", "mountPath": "/data" }, { "name": "shared", "mountPath": "/shared" },
        ]);
    }
    container
}

impl Cluster {
    /// More than half of a node's processors, so that two such pods do not fit on one.
    pub const SHARE: usize = 1200;
}

/// A pod that counts. What it writes to its node, for the tests to see, it can do without.
pub fn template(app: &str) -> Value {
    json!({
        "metadata": {
            "labels": { "app": app },
            "annotations": { "torpor.dev/unsaved-volumes": "Accept" },
        },
        "spec": {
            "runtimeClassName": "torpor",
            "dnsPolicy": "Default",
            "containers": [container(&["sh", "-c", COUNT], true)],
            "volumes": [
                { "name": "data", "emptyDir": {} },
                { "name": "shared", "hostPath": { "path": "/mnt" } },
            ],
        },
    })
}

/// A pod that is saved whoever deletes it.
pub fn always(mut template: Value) -> Value {
    template["metadata"]["annotations"]["torpor.dev/save"] = json!("Always");
    template
}

/// Changes the memory of a container in a checkpoint.
pub fn damage(checkpoint: &Path) {
    for file in fs::read_dir(checkpoint.join("containers/c")).unwrap().flatten() {
        if file.file_name().to_string_lossy().starts_with("pages-") {
            let mut bytes = fs::read(file.path()).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(file.path(), bytes).unwrap();
        }
    }
}

/// A StatefulSet.
pub fn set(app: &str, template: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": app },
        "spec": {
            "serviceName": app, "replicas": 1, "podManagementPolicy": "Parallel",
            "selector": { "matchLabels": { "app": app } }, "template": template,
        },
    })
}

pub fn urgency() -> Value {
    json!({
        "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
        "metadata": { "name": "urgent" }, "value": 1_000_000,
    })
}

pub fn deployment(app: &str, share: usize) -> Value {
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
pub fn job(app: &str) -> Value {
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
    pub fn was_charged_nothing(&self, name: &str) {
        let job = self.get(&["job", name]);
        assert!(matches!(job["status"]["failed"].as_u64(), None | Some(0)), "{}", job["status"]);
    }

    pub fn drain(&self, node: &str) {
        let words =
            ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=170s"];
        self.kubectl("admin", &words, "").unwrap();
    }
}
