//! Which nodes pods go to that continue, and what the controller may change of nodes.

use std::fs;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, set, template, urgency};

/// The label of a node that names its kind of machine.
const MACHINE: &str = "torpor.dev/machine";

impl Cluster {
    /// What kind of machine a node is, when that is known.
    fn machine(&self, node: &str) -> String {
        self.until(&format!("{node} has a label"), || {
            let node = self.get(&["node", node]);
            node["metadata"]["labels"][MACHINE].as_str().map(str::to_owned)
        })
    }
}

/// The kinds of machines that a pod has to go to.
fn kept_to(pod: &Value) -> &Value {
    let required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
    let term = pod.pointer(required).map(|required| &required["nodeSelectorTerms"][0]);
    let one = &term.unwrap_or(&Value::Null)["matchExpressions"][0];
    assert!(one["key"] == MACHINE && one["operator"] == "In", "{}", pod["spec"]);
    &one["values"]
}

#[test]
fn a_pod_waits_for_a_node_that_fits() {
    let Some(cluster) = cluster("a_pod_waits_for_a_node_that_fits") else { return };
    let machine = cluster.machine("node1");
    // Both nodes are the same machine.
    assert_eq!(cluster.machine("node2"), machine);
    the_controller_labels_and_does_nothing_else(&cluster);
    cluster.apply(&urgency());
    cluster.apply(&set("set", &template("set")));
    let (old, told, began) = cluster.counting("set");
    let node = old["spec"]["nodeName"].as_str().unwrap();
    let other = if node == "node1" { "node2" } else { "node1" };
    // From now on the other one has room, and is something else.
    cluster.lose(&other.replace("node", "agent"));
    let label = format!("{MACHINE}=another");
    cluster.kubectl("admin", &["label", "--overwrite", "node", other, &label], "").unwrap();
    cluster.urgent(node, "set", &format!("{}m", Cluster::SHARE));
    let waits = cluster.until("it waits for room", || {
        let pod = cluster.get(&["pod", "set-0"]);
        let conditions = pod["status"]["conditions"].as_array()?;
        let waits = conditions.iter().any(|one| one["reason"] == "Unschedulable");
        waits.then_some(pod)
    });
    assert_eq!(kept_to(&waits), &json!([machine]));
    cluster.delete(&["pod/urgent-set"]);
    let new = cluster.goes_on("set", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["spec"]["nodeName"], node);
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    let used = cluster.get(&["pcp"]);
    let machine = &used["items"][0]["status"]["machine"];
    assert!(machine["instructions"].as_array().is_some_and(|all| !all.is_empty()), "{machine}");
}

/// With the controller's token.
fn the_controller_labels_and_does_nothing_else(cluster: &Cluster) {
    let token = fs::read_to_string(cluster.place.path().join("controller.token")).unwrap();
    let token = format!("--token={}", token.trim());
    let authority = cluster.place.path().join("pki/ca.crt");
    let authority = format!("--certificate-authority={}", authority.display());
    let server = "--server=https://10.77.0.1:6443";
    // `kubectl cordon` tells of what is refused, and succeeds.
    let cordon = r#"{ "spec": { "unschedulable": true } }"#;
    for (words, why) in [
        (&["label", "node", "node1", "zone=mine"][..], "of the labels of a node"),
        (&["label", "node", "node1", "kubernetes.io/hostname-"], "of the labels of a node"),
        (&["annotate", "node", "node1", "mine=yes"], "of the annotations of a node"),
        (&["patch", "node", "node1", "-p", cordon], "changes no node"),
        (&["taint", "node", "node1", "mine:NoExecute"], "changes no node"),
        (&["delete", "node", "node1"], "forbidden"),
    ] {
        let who = [token.as_str(), &authority, server, "--kubeconfig=/dev/null"];
        let said = cluster.kubectl("admin", &[&who, words].concat(), "");
        assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{words:?}: {said:?}");
    }
}
