//! What Torpor costs a node and a cluster. Nothing here is a condition: the figures are in docs/kubernetes.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::cluster::{Cluster, always, cluster, damage, given, set, template, urgency};

/// How long it is looked at agents that have nothing to do.
const IDLE: Duration = Duration::from_secs(60);
/// How many pods are reviewed.
const REVIEWS: usize = 400;
/// How many pods start, one after the other.
const STARTS: usize = 10;
/// How much memory a large pod has, in MiB, if `TORPOR_POD_MIB` says nothing else.
const LARGE: u64 = 2048;

#[test]
fn what_it_costs() {
    let Some(cluster) = cluster("what_it_costs") else { return };
    idle(&cluster);
    reviews(&cluster);
    starts(&cluster);
    idle(&cluster);
}

/// The memory, and that of it which is no part of a file, both in KiB, and the ticks of the processor, of each agent.
fn agents(cluster: &Cluster) -> Vec<([u64; 2], u64)> {
    ["agent1", "agent2"]
        .map(|name| {
            let pid = fs::read_to_string(cluster.place.path().join("run").join(name)).unwrap();
            let proc = Path::new("/proc").join(pid.trim());
            let read = |file: &str| {
                let path = proc.join(file).display().to_string();
                String::from_utf8(cluster.inside(&["cat", &path]).stdout).unwrap()
            };
            let status = read("status");
            let memory = ["VmRSS:", "RssAnon:"].map(|name| {
                let memory = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                memory.trim().trim_end_matches(" kB").parse().unwrap()
            });
            let stat = read("stat");
            let ticks = stat.split_whitespace().skip(13).take(2);
            (memory, ticks.map(|ticks| ticks.parse::<u64>().unwrap()).sum())
        })
        .into()
}

fn idle(cluster: &Cluster) {
    let before = agents(cluster);
    sleep(IDLE);
    for ((_, before), (memory, ticks)) in before.into_iter().zip(agents(cluster)) {
        let spent = ticks - before;
        let [all, own] = memory;
        eprintln!("an idle agent: {all} KiB, {own} its own; {spent} ticks of 10 ms in {IDLE:?}");
    }
}

/// The values in a page of metrics whose lines begin with `name` and hold `label`, by the whole of that.
fn metrics(text: &str, name: &str, label: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    let parse = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines.filter_map(parse).collect()
}

/// The limit of a bucket of a histogram.
fn limit(name: &str) -> &str {
    name.split("le=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default()
}

/// How long the API server waits for the webhook, and how long that takes by itself.
fn reviews(cluster: &Cluster) {
    let pod = |number: usize| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": format!("pod-{number}") },
            "spec": template("reviewed")["spec"],
        })
    };
    let all: Vec<Value> = (0..REVIEWS).map(pod).collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": all }).to_string();
    let words = ["create", "--dry-run=server", "-o", "name", "-f", "-"];
    let made = cluster.kubectl("admin", &words, &list).unwrap();
    assert_eq!(made.lines().count(), REVIEWS);
    let text = cluster.kubectl("admin", &["get", "--raw", "/metrics"], "").unwrap();
    let name = "apiserver_admission_webhook_admission_duration_seconds_bucket";
    for (name, value) in metrics(&text, name, "pods.torpor.dev") {
        eprintln!("the API server waits for the webhook: {value} within {} s", limit(&name));
    }
    let text = cluster.inside(&["curl", "-sk", "https://10.77.0.1:9443/metrics"]).stdout;
    let text = String::from_utf8_lossy(&text);
    for (name, value) in metrics(&text, "torpor_review_duration_seconds_bucket", "") {
        eprintln!("the webhook by itself: {value} within {} s", limit(&name));
    }
    in_person(cluster);
}

/// How long a client waits for the webhook, which says so with better steps than the API server has.
fn in_person(cluster: &Cluster) {
    let review = json!({ "request": {
        "uid": "r", "kind": { "kind": "Pod" }, "namespace": "default",
        "userInfo": { "username": "system:serviceaccount:kube-system:job-controller" },
        "object": { "metadata": { "name": "p" }, "spec": template("reviewed")["spec"] },
    } });
    let place = cluster.place.path();
    fs::write(place.join("review"), review.to_string()).unwrap();
    let one = format!(
        "url = https://10.77.0.1:9443/review\ninsecure\nsilent\noutput = /dev/null\n\
         data = @{}\nwrite-out = \"%{{http_code}} %{{time_total}}\\n\"\n",
        place.join("review").display()
    );
    fs::write(place.join("reviews"), vec![one; REVIEWS].join("next\n")).unwrap();
    // One connection for all of them, as the API server has.
    let said = cluster.inside(&["curl", "-K", place.join("reviews").to_str().unwrap()]).stdout;
    let said = String::from_utf8_lossy(&said);
    let times = said.lines().filter_map(|line| line.strip_prefix("200 ")?.parse::<f64>().ok());
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    assert_eq!(times.len(), REVIEWS, "{said}");
    for percent in [50, 90, 99, 100] {
        let millis = times[(REVIEWS * percent).div_ceil(100) - 1] * 1000.0;
        eprintln!("a client waits for the webhook: {percent} % within {millis:.1} ms");
    }
}

/// How often containers have started on the first node, and how long the kubelet has waited for that.
fn started(cluster: &Cluster) -> (f64, f64) {
    let url = "https://10.77.0.11:10250/metrics";
    let text = cluster.inside(&["curl", "-sk", "-H", "Authorization: Bearer admin", url]).stdout;
    let text = String::from_utf8_lossy(&text);
    let sum = |name: &str| -> f64 {
        let name = format!("kubelet_runtime_operations_duration_seconds_{name}");
        metrics(&text, &name, "\"start_container\"").values().sum()
    };
    (sum("count"), sum("sum"))
}

/// How long it takes to start a container cold, from a checkpoint that is damaged, and from one that is not.
fn starts(cluster: &Cluster) {
    cluster.kubectl("admin", &["cordon", "node2"], "").unwrap();
    let mut set = set("started", &always(template("started")));
    set["spec"]["podManagementPolicy"] = json!("OrderedReady");
    set["spec"]["replicas"] = json!(0);
    let request = json!({ "requests": { "cpu": "10m" } });
    set["spec"]["template"]["spec"]["containers"][0]["resources"] = request;
    cluster.apply(&set);
    let scale = |replicas: usize| {
        let words = ["scale", "statefulset/started", &format!("--replicas={replicas}")];
        cluster.kubectl("admin", &words, "").unwrap();
        cluster.until("all are there", || {
            let all = cluster.get(&["pods", "-l", "app=started"]);
            (all["items"].as_array()?.len() == replicas).then_some(())
        });
        cluster.until("all run", || (cluster.running("started").len() == replicas).then_some(()));
    };
    for what in ["cold", "from a damaged checkpoint", "from a checkpoint"] {
        let before = started(cluster);
        scale(STARTS);
        let after = started(cluster);
        let millis = (after.1 - before.1) * 1000.0 / (after.0 - before.0);
        eprintln!("{} containers started {what}: {millis:.0} ms each", after.0 - before.0);
        scale(0);
        if what == "cold" {
            let dir = cluster.place.path().join("node1/torpor/checkpoints/default");
            for checkpoint in fs::read_dir(dir).unwrap().flatten() {
                damage(&checkpoint.path());
            }
        }
    }
    let restored = cluster.counter("node1", "torpor_containers_restored_total");
    let cold = cluster.counter("node1", "torpor_containers_cold_total");
    assert_eq!((cold, restored), (STARTS as u64, STARTS as u64));
}

/// The seconds since 1970 at a time that Kubernetes writes: those of objects are whole seconds, those of logs are not.
fn seconds(time: &str) -> f64 {
    let date = Command::new("date").args(["+%s.%N", "-d", time]).output().unwrap();
    let text = String::from_utf8(date.stdout).unwrap();
    text.trim().parse().unwrap_or_else(|_| panic!("{time} is no time"))
}

/// A condition of an object.
fn condition<'o>(object: &'o Value, name: &str) -> Option<&'o Value> {
    object["status"]["conditions"].as_array()?.iter().find(|one| one["type"] == name)
}

#[test]
fn what_a_large_pod_costs() {
    let Some(cluster) = cluster("what_a_large_pod_costs") else { return };
    let program = cluster.place.path().join("shared/large");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kubernetes/large.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Werror", "-static", "-o"]).arg(&program).arg(source);
    assert!(compiler.status().unwrap().success());
    let size = given("TORPOR_POD_MIB").unwrap_or(LARGE).to_string();
    cluster.apply(&urgency());
    for memory in ["Whole", "OnDemand"] {
        let mut large = template("large");
        large["metadata"]["annotations"]["torpor.dev/restore-memory"] = json!(memory);
        large["spec"]["terminationGracePeriodSeconds"] = json!(120);
        large["spec"]["containers"][0]["command"] = json!(["/shared/large", size]);
        cluster.apply(&set("large", &large));
        preempted(&cluster, memory);
        cluster.delete(&["statefulset/large", "pod/urgent-large"]);
        cluster.until("it has ended", || {
            let pods = cluster.get(&["pods", "-l", "app=large"]);
            pods["items"].as_array()?.is_empty().then_some(())
        });
    }
    // What Kubernetes takes by itself, of a pod that ends at once.
    let mut other = template("large");
    other["spec"].as_object_mut().unwrap().remove("runtimeClassName");
    other["spec"]["containers"][0]["command"] = json!(["/shared/large", "1"]);
    cluster.apply(&set("large", &other));
    let (old, ..) = cluster.counting("large");
    let runs = urgent_runs(&cluster, &old);
    eprintln!("without Torpor, a pod that ends at once: the urgent pod runs after {runs:.1} s");
}

/// How many seconds after it was asked for an urgent pod runs that takes the place of another one.
fn urgent_runs(cluster: &Cluster, old: &Value) -> f64 {
    let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    cluster.urgent(old["spec"]["nodeName"].as_str().unwrap(), "large", "1200m");
    first_line(cluster, "urgent-large", "runs") - asked.as_secs_f64()
}

/// When a pod has said something first.
fn first_line(cluster: &Cluster, pod: &str, word: &str) -> f64 {
    let word = format!(" {word}");
    cluster.until(&format!("{pod} says {word}"), || {
        let log = cluster.kubectl("admin", &["logs", "--timestamps", pod], "").ok()?;
        log.lines().find_map(|line| Some(seconds(line.split_once(&word)?.0)))
    })
}

/// How long an urgent pod waits for a large one to give way, and that for its return.
fn preempted(cluster: &Cluster, memory: &str) {
    let (old, told, began) = cluster.counting("large");
    let runs = urgent_runs(cluster, &old);
    let new = cluster.goes_on("large", &old["metadata"]["uid"], told, &began);
    assert_ne!(new["spec"]["nodeName"], old["spec"]["nodeName"]);
    let bound = condition(&new, "PodScheduled").unwrap()["lastTransitionTime"].as_str().unwrap();
    let name = new["metadata"]["name"].as_str().unwrap();
    let first = first_line(cluster, name, "tick");
    let saved = cluster.until("all of it is there", || {
        let all = cluster.get(&["pcp"]);
        let mut all = all["items"].as_array()?.iter();
        let one =
            all.find(|one| one["status"]["claimedBy"]["uid"] == new["metadata"]["uid"])?.clone();
        let comes = condition(&one, "MemoryComes").is_some_and(|one| one["status"] == "True");
        (!comes).then_some(one)
    });
    eprintln!(
        "{memory}: {} bytes, frozen for {} ms; the urgent pod runs after {runs:.1} s, the other one counts {:.1} s \
         after it has a node (a second less, perhaps)",
        saved["status"]["sizeBytes"],
        saved["status"]["frozenMilliseconds"],
        first - seconds(bound),
    );
}
