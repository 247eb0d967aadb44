//! Pods that have to go because of their node: it has a taint, or is short of memory.

use std::fs;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, deployment};

impl Cluster {
    /// Has a kubelet find, from now on, that its node has too little memory, and give pods so many seconds.
    fn is_low(&self, node: &str, seconds: u64) {
        let file = self.place.path().join(node).join("kubelet.yaml");
        // A kubelet that does not look at file systems evicts nobody.
        let [not, looked] =
            ["false", "true"].map(|is| format!("localStorageCapacityIsolation: {is}"));
        let mut text = fs::read_to_string(&file).unwrap().replace(&not, &looked);
        text.push_str(&format!(
            "evictionSoft: {{ memory.available: \"1000Gi\" }}\n\
             evictionSoftGracePeriod: {{ memory.available: \"1s\" }}\n\
             evictionMaxPodGracePeriod: {seconds}\n"
        ));
        fs::write(&file, text).unwrap();
        self.kill(&node.replace("node", "kubelet"));
    }
}

fn node_of(pod: &Value) -> &str {
    pod["spec"]["nodeName"].as_str().unwrap()
}

#[test]
fn pods_that_their_node_evicts_go_on_elsewhere() {
    let Some(cluster) = cluster("pods_that_their_node_evicts_go_on_elsewhere") else { return };
    cluster.apply(&deployment("evicted", 100));
    let (first, told, began) = cluster.counting("evicted");
    let taint = |change: &str| {
        let words = ["taint", "node", node_of(&first), change];
        cluster.kubectl("admin", &words, "").unwrap();
    };
    taint("torpor.test/away=now:NoExecute");
    let second = cluster.goes_on("evicted", &first["metadata"]["uid"], told, &began);
    assert_ne!(node_of(&second), node_of(&first));
    taint("torpor.test/away-");

    // A pod that uses memory tolerates that its node has little of it.
    cluster.kubectl("admin", &["cordon", node_of(&second)], "").unwrap();
    let (_, told, _) = cluster.counting("evicted");
    cluster.is_low(node_of(&second), 25);
    let third = cluster.goes_on("evicted", &second["metadata"]["uid"], told, &began);
    assert_eq!(node_of(&third), node_of(&first));
    cluster.works_once(&began);
    let gone = cluster.get(&["pod", second["metadata"]["name"].as_str().unwrap()]);
    assert_eq!(
        (&gone["status"]["phase"], &gone["status"]["reason"]),
        (&json!("Failed"), &json!("Evicted"))
    );
}
