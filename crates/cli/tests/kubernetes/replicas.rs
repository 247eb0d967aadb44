//! Many replicas that give way at once.

use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use crate::cluster::{
    COUNT, Cluster, LIMIT, cluster, deployment, given, job, set, template, urgency,
};

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

/// How many replicas of each of three owners give way to one urgent pod, if `TORPOR_REPLICAS` says nothing else: a hundred in
/// all. A node has room for 109 pods beside it (`maxPods` of the kubelet): 36 of each.
const MANY: u64 = 34;
/// How many of each owner the usual limits are for.
const USUAL: u64 = 10;

/// Replicas of each owner that give way at once.
#[derive(Debug, Clone, Copy)]
struct Many {
    /// How many.
    count: usize,
    /// How many times as many as usual.
    times: u32,
}

impl Many {
    fn given() -> Self {
        let count = given("TORPOR_REPLICAS").unwrap_or(MANY);
        let times = u32::try_from(count.div_ceil(USUAL)).unwrap();
        Self { count: usize::try_from(count).unwrap(), times }
    }

    /// Waits as long as so many may take.
    fn until<T>(self, cluster: &Cluster, what: &str, found: impl Fn() -> Option<T>) -> T {
        cluster.within(LIMIT * self.times, what, found)
    }
}

/// The pods of an owner, when all of them run on a node: by their names, or for Jobs by their indexes.
fn all_on(cluster: &Cluster, many: Many, app: &str, node: &str) -> BTreeMap<String, Value> {
    let count = many.count;
    many.until(cluster, &format!("{count} of {app} run on {node}"), || {
        let mut pods = cluster.running(app);
        pods.retain(|pod| pod["spec"]["nodeName"] == node);
        let index = "batch.kubernetes.io/job-completion-index";
        let name = |pod: &Value| {
            let metadata = &pod["metadata"];
            let index = metadata["labels"][index].as_str().or(metadata["name"].as_str());
            index.unwrap().to_owned()
        };
        (pods.len() == count).then(|| pods.into_iter().map(|pod| (name(&pod), pod)).collect())
    })
}

/// What the programs in a pod read as the name of their host.
fn host_of(pod: &Value) -> &str {
    pod["spec"]["hostname"].as_str().or(pod["metadata"]["name"].as_str()).unwrap()
}

/// How far the programs have come: by what they chose when they began, the last count and its pod.
fn told(cluster: &Cluster) -> BTreeMap<String, (u64, String)> {
    let all = fs::read_dir(cluster.place.path().join("shared")).unwrap().flatten();
    let began = all.map(|file| file.file_name().into_string().unwrap());
    began.map(|began| (began.clone(), cluster.works_once(&began).pop().unwrap())).collect()
}

#[test]
fn many_replicas_give_way_at_once_and_each_goes_on_once() {
    let Some(cluster) = cluster("many_replicas_give_way_at_once_and_each_goes_on_once") else {
        return;
    };
    let replicas = Many::given();
    cluster.apply(&urgency());
    cluster.kubectl("admin", &["cordon", "node2"], "").unwrap();
    let many = |mut object: Value| {
        let pod = &mut object["spec"]["template"]["spec"];
        // All of them are saved within one grace period.
        pod["terminationGracePeriodSeconds"] = json!(300 * replicas.times);
        let container = &mut pod["containers"][0];
        container["command"][2] = json!(COUNT.replace("sleep 0.1", "sleep 1"));
        container["resources"] = json!({ "requests": { "cpu": "10m" } });
        cluster.apply(&object);
    };
    let apps = ["alike", "ordinal", "job"];
    let with = |mut object: Value, field: &str| {
        object["spec"][field] = json!(replicas.count);
        object
    };
    let mut jobs = with(with(job("job"), "completions"), "parallelism");
    // Each index by itself: else Kubernetes makes them later the more of them have gone.
    jobs["spec"].as_object_mut().unwrap().remove("backoffLimit");
    jobs["spec"]["backoffLimitPerIndex"] = json!(0);
    many(with(deployment("alike", 10), "replicas"));
    many(with(set("ordinal", &template("ordinal")), "replicas"));
    many(jobs);
    let old = apps.map(|app| all_on(&cluster, replicas, app, "node1"));
    let all = 3 * replicas.count;
    replicas.until(&cluster, "all of them count", || (told(&cluster).len() == all).then_some(()));
    let before = told(&cluster);
    cluster.kubectl("admin", &["uncordon", "node2"], "").unwrap();
    let since = Instant::now();
    let node = cluster.get(&["node", "node1"]);
    cluster.urgent("node1", "all", node["status"]["allocatable"]["cpu"].as_str().unwrap());
    replicas.until(&cluster, "the urgent pod runs", || {
        (cluster.get(&["pod", "urgent-all"])["status"]["phase"] == "Running").then_some(())
    });
    let free = since.elapsed();
    let new = apps.map(|app| all_on(&cluster, replicas, app, "node2"));
    let arrived = told(&cluster);
    replicas.until(&cluster, "all of them count again", || {
        told(&cluster).iter().all(|(began, (count, _))| *count > arrived[began].0).then_some(())
    });
    eprintln!(
        "{all} pods: the urgent one ran after {free:?}, all of them after {:?}",
        since.elapsed()
    );
    let after = told(&cluster);
    assert!(before.keys().eq(after.keys()), "some began anew");
    for (old, new) in old.iter().zip(&new) {
        for (name, pod) in new {
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{name}");
            let (began, _) = after.iter().find(|(_, (_, host))| host == host_of(pod)).unwrap();
            // Replicas of a Deployment are alike.
            if let Some(was) = old.get(name) {
                assert_eq!(before[began].1, host_of(was), "{name}");
            }
        }
    }
    cluster.was_charged_nothing("job");
}
