//! Pods that begin before their memory is on their node.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::cluster::{COUNT, Cluster, cluster, deployment, set, template, urgency};

/// Lines of random text that a program keeps in its memory, 60 MB in all. What it holds shows when it is asked, which takes
/// all of it.
const LARGE: &str = "large=$(head -c 45000000 /dev/urandom | base64); ";
const CHECK: &str = "if [ -e /shared/check ]; then echo whole $(echo \"$large\" | md5sum); fi; ";
/// Much less than what a node says to others besides, and much more than comes while a pod begins.
const SLOW: &str = "4mbit";

/// A pod that begins before its memory is there.
fn large(app: &str) -> Value {
    let mut template = template(app);
    template["metadata"]["annotations"]["torpor.dev/restore-memory"] = json!("OnDemand");
    let script = COUNT.replace("while :; do", &format!("while :; do {CHECK}"));
    template["spec"]["containers"][0]["command"][2] = json!(format!("{LARGE}{script}"));
    template
}

impl Cluster {
    /// Asks the programs what is in their memory, or does not ask any more.
    fn check(&self, asks: bool) {
        let file: PathBuf = self.place.path().join("shared/check");
        match asks {
            true => fs::write(file, "").unwrap(),
            false => fs::remove_file(file).unwrap(),
        }
    }

    /// What the program of a pod has said last of what is in its memory.
    fn whole(&self, pod: &Value) -> String {
        let name = pod["metadata"]["name"].as_str().unwrap();
        self.until("the program tells what is in its memory", || {
            let log = self.kubectl("admin", &["logs", name], "").ok()?;
            let told = log.lines().rev().find_map(|line| line.strip_prefix("whole "));
            told.map(str::to_owned)
        })
    }

    /// Lets a node say no more than so much to others, or as much as it can again.
    fn slow(&self, node: &str, rate: Option<&str>) {
        let netns = format!("--net=/run/netns/{node}");
        let tc = ["nsenter", &netns, "tc", "qdisc"];
        let words = match rate {
            Some(rate) => {
                let tbf = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"];
                [&tc[..], &["add", "dev", "eth0", "root"], &tbf].concat()
            }
            None => [&tc[..], &["del", "dev", "eth0", "root"]].concat(),
        };
        let said = self.inside(&words);
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
    }

    /// The condition of the checkpoint of a pod that says whether its memory comes.
    fn memory_comes(&self, pod: &Value) -> Option<bool> {
        let all = self.get(&["pcp"]);
        let uid = &pod["metadata"]["uid"];
        let mut all = all["items"].as_array()?.iter();
        let one = all.find(|one| one["status"]["claimedBy"]["uid"] == *uid)?;
        let mut conditions = one["status"]["conditions"].as_array()?.iter();
        conditions.find(|one| one["type"] == "MemoryComes").map(|one| one["status"] == "True")
    }
}

#[test]
fn a_preempted_pod_begins_before_its_memory_is_there() {
    let test = "a_preempted_pod_begins_before_its_memory_is_there";
    let Some(cluster) = cluster(test) else { return };
    cluster.apply(&urgency());
    cluster.check(true);
    cluster.apply(&set("large", &large("large")));
    let old = cluster.until("it runs", || cluster.running("large").pop());
    let before = cluster.whole(&old);
    cluster.check(false);
    let (_, told, began) = cluster.counting("large");
    let node = old["spec"]["nodeName"].as_str().unwrap();
    cluster.slow(node, Some(SLOW));
    cluster.urgent(node, "large", "1200m");
    let new = cluster.goes_on("large", &old["metadata"]["uid"], told, &began);
    let what = "the checkpoint says whether its memory comes";
    let comes = cluster.until(what, || cluster.memory_comes(&new));
    assert!(comes, "it has waited for its memory");
    cluster.check(true);
    cluster.slow(node, None);
    assert_eq!(cluster.whole(&new), before);
    cluster.until("nobody needs the checkpoint any more", || {
        (cluster.memory_comes(&new) == Some(false)).then_some(())
    });
    let new = cluster.get(&["pod", new["metadata"]["name"].as_str().unwrap()]);
    assert_ne!(new["spec"]["nodeName"], old["spec"]["nodeName"]);
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.works_once(&began);
    for node in ["node1", "node2"] {
        cluster.sealed(node);
    }
}

#[test]
fn pods_start_warm_before_their_memory_is_there() {
    let Some(cluster) = cluster("pods_start_warm_before_their_memory_is_there") else { return };
    cluster.check(true);
    let mut warm = deployment("large", 100);
    let share = warm["spec"]["template"]["spec"]["containers"][0]["resources"].take();
    warm["spec"]["template"] = large("large");
    warm["spec"]["template"]["spec"]["containers"][0]["resources"] = share;
    cluster.apply(&warm);
    let first = cluster.until("it runs", || cluster.running("large").pop());
    let before = cluster.whole(&first);
    cluster.check(false);
    let node = first["spec"]["nodeName"].as_str().unwrap();
    cluster.slow(node, Some(SLOW));
    cluster.apply(&json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "PodSnapshotPolicy",
        "metadata": { "name": "large" },
        "spec": { "selector": { "matchLabels": { "app": "large" } }, "start": "Always" },
    }));
    let status = || {
        let all = cluster.get(&["pcp", "-l", "torpor.dev/policy=large"]);
        Some(all["items"].as_array()?.first()?["status"].clone())
    };
    let ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
    cluster.until("there is a snapshot", || {
        status()?["conditions"].as_array()?.iter().any(ready).then_some(())
    });
    cluster.kubectl("admin", &["cordon", node], "").unwrap();
    cluster.kubectl("admin", &["scale", "deployment/large", "--replicas=3"], "").unwrap();
    let all = cluster
        .until("all three run", || Some(cluster.running("large")).filter(|all| all.len() == 3));
    let comes = cluster.until("the snapshot says whether its memory comes", || {
        status()?["memoryComesTo"].as_array().cloned()
    });
    let news = all.iter().filter(|pod| pod["metadata"]["uid"] != first["metadata"]["uid"]);
    let news: Vec<&Value> = news.collect();
    assert_eq!(comes, [news[0]["spec"]["nodeName"].clone()], "they have waited for their memory");
    cluster.check(true);
    cluster.slow(node, None);
    for new in news {
        assert_ne!(new["spec"]["nodeName"], first["spec"]["nodeName"]);
        assert_eq!(cluster.whole(new), before);
        let new = cluster.get(&["pod", new["metadata"]["name"].as_str().unwrap()]);
        assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    }
    cluster.until("all of it is there", || {
        status()?["memoryComesTo"].as_array()?.is_empty().then_some(())
    });
    for node in ["node1", "node2"] {
        cluster.sealed(node);
    }
}
