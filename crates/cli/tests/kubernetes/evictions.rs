//! Pods that have to go because of their node: it has a taint, is short of memory, or is shut down.

use std::fs;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, deployment, root};

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

    /// Has a kubelet hear of it, from now on, when its node is shut down, and give pods so many seconds.
    fn heeds_shutdowns(&self, node: &str, seconds: u64) {
        let script = root().join("scripts/kubernetes/logind.sh");
        let words = [script.to_str().unwrap(), self.place.path().to_str().unwrap()];
        let made = self.inside(&words);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let file = self.place.path().join(node).join("kubelet.yaml");
        let mut text = fs::read_to_string(&file).unwrap();
        text.push_str(&format!("shutdownGracePeriod: {seconds}s\n"));
        fs::write(&file, text).unwrap();
        self.kill(&node.replace("node", "kubelet"));
        self.until("the kubelet delays a shutdown", || {
            // There are fifos, too, which the kubelet holds.
            let words = ["find", "/run/systemd/inhibit", "-type", "f", "-exec", "cat", "{}", "+"];
            let waits = self.inside(&words).stdout;
            String::from_utf8_lossy(&waits).contains("WHO=kubelet").then_some(())
        });
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

#[test]
fn pods_of_a_node_that_is_shut_down_go_on_elsewhere() {
    let Some(cluster) = cluster("pods_of_a_node_that_is_shut_down_go_on_elsewhere") else { return };
    // A kubelet refuses what it has not admitted since it was started: it is to have its pods by itself.
    cluster.heeds_shutdowns("node1", 30);
    cluster.kubectl("admin", &["cordon", "node2"], "").unwrap();
    cluster.apply(&deployment("stopped", 100));
    let (old, told, began) = cluster.counting("stopped");
    cluster.kubectl("admin", &["uncordon", "node2"], "").unwrap();
    // What logind says before it has systemd shut down, which there is not here. The kubelet may not listen yet.
    let place = "/org/freedesktop/login1";
    let signal = "org.freedesktop.login1.Manager.PrepareForShutdown";
    cluster.until("the kubelet ends its pods", || {
        let words = ["dbus-send", "--system", "--type=signal", place, signal, "boolean:true"];
        assert!(cluster.inside(&words).status.success());
        let told = cluster.get(&["events", "--field-selector=reason=Shutdown"]);
        told["items"].as_array().is_some_and(|all| !all.is_empty()).then_some(())
    });
    let new = cluster.goes_on("stopped", &old["metadata"]["uid"], told, &began);
    assert_eq!((node_of(&old), node_of(&new)), ("node1", "node2"));
    cluster.works_once(&began);
    let gone = cluster.get(&["pod", old["metadata"]["name"].as_str().unwrap()]);
    let status = &gone["status"];
    assert_eq!((&status["phase"], &status["reason"]), (&json!("Failed"), &json!("Terminated")));
}
