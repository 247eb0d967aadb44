//! Checkpoints that do not die with their node.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::cluster::{Cluster, cluster, set, template};

/// The chunks and lists in the store.
fn blobs(cluster: &Cluster) -> usize {
    fs::read_dir(cluster.place.path().join("store/blobs/sha256")).map_or(0, Iterator::count)
}

/// The names in the store.
fn names(cluster: &Cluster) -> usize {
    let index = fs::read(cluster.place.path().join("store/index.json")).unwrap_or_default();
    let index: Value = serde_json::from_slice(&index).unwrap_or_default();
    index["manifests"].as_array().map_or(0, Vec::len)
}

#[test]
fn a_pod_whose_node_is_lost_goes_on_from_the_store() {
    let Some(cluster) = cluster("a_pod_whose_node_is_lost_goes_on_from_the_store") else { return };
    cluster.apply(&set("kept", &template("kept")));
    let (old, told, began) = cluster.counting("kept");
    let lost = old["spec"]["nodeName"].as_str().unwrap();
    let other = if lost == "node1" { "node2" } else { "node1" };
    let scale = |replicas: &str| {
        let words = ["scale", "statefulset/kept", &format!("--replicas={replicas}")];
        cluster.kubectl("admin", &words, "").unwrap();
    };
    scale("0");
    cluster.until("the checkpoint is stored", || {
        let all = cluster.get(&["pcp"]);
        let location = &all["items"][0]["status"]["checkpointLocation"];
        (location["type"] == "OCIImage" && location["ociImage"]["digest"].is_string()).then_some(())
    });
    assert!(names(&cluster) == 1 && blobs(&cluster) > 2, "there is nothing in the store");
    sealed(&cluster.place.path().join("store"));
    for daemon in ["agent", "kubelet", "containerd"] {
        cluster.lose(&lost.replace("node", daemon));
    }
    fs::remove_dir_all(cluster.place.path().join(lost).join("torpor")).unwrap();
    // Nobody but an administrator knows that it will not come back.
    let words = ["delete", "pod", "kept-0", "--force", "--grace-period=0", "--ignore-not-found"];
    cluster.kubectl("admin", &words, "").unwrap();
    cluster.kubectl("admin", &["cordon", lost], "").unwrap();
    scale("1");
    let new = cluster.goes_on("kept", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["spec"]["nodeName"], other);
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(cluster.counter(other, "torpor_checkpoints_from_store_total"), 1);
    cluster.kubectl("admin", &["delete", "statefulset/kept"], "").unwrap();
    cluster.until("the checkpoint goes with its owner", || {
        cluster.get(&["pcp"])["items"].as_array()?.is_empty().then_some(())
    });
    cluster.until("nothing is left in the store", || {
        (names(&cluster) == 0 && blobs(&cluster) == 0).then_some(())
    });
}

/// What is stored does not show what the programs knew.
fn sealed(store: &Path) {
    let found = std::process::Command::new("grep").args(["-rl", "echo tick"]).arg(store).output();
    assert_eq!(String::from_utf8_lossy(&found.unwrap().stdout), "", "memory in plain text");
}
