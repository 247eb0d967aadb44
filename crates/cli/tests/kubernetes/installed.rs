//! Torpor as users have it: an image, and one apply, or helm.

use serde_json::{Value, json};

use crate::chart;
use crate::cluster::{Cluster, cluster_with, set, template, urgency};

impl Cluster {
    /// helm, with the rights of an administrator.
    fn helm(&self, words: &[&str]) -> String {
        let said =
            self.inside(&[&[self.place.path().join("bin/helm").to_str().unwrap()], words].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(said.status.success(), "{words:?}: {}", text(&said.stderr));
        text(&said.stdout)
    }

    /// The pods of Torpor itself, by what they are, that are ready.
    fn own(&self, app: &str) -> Vec<Value> {
        let list = self.get(&["-n", "torpor-system", "pods", "-l", &format!("app={app}")]);
        let pods = list["items"].as_array().cloned().unwrap_or_default();
        let is_ready = |pod: &Value| {
            pod["metadata"]["deletionTimestamp"].is_null()
                && pod["status"]["containerStatuses"][0]["ready"] == true
        };
        pods.into_iter().filter(is_ready).collect()
    }

    /// Has all pods of an owner exchanged, as an upgrade does.
    fn exchange(&self, owner: &str) {
        for words in [["rollout", "restart", owner], ["rollout", "status", owner]] {
            let words = [&["-n", "torpor-system"], &words[..]].concat();
            self.kubectl("admin", &words, "").unwrap();
        }
    }
}

#[test]
fn what_one_apply_installs_saves_pods_and_is_removed_without_harm() {
    let test = "what_one_apply_installs_saves_pods_and_is_removed_without_harm";
    let Some(cluster) = cluster_with(test, &[("TORPOR_IN_PODS", "apply")]) else { return };
    let nodes: Vec<Value> =
        cluster.own("torpor-agent").iter().map(|pod| pod["spec"]["nodeName"].clone()).collect();
    assert_eq!((nodes.len(), cluster.own("torpor-controller").len()), (2, 2), "{nodes:?}");
    assert_ne!(nodes[0], nodes[1]);
    cluster.apply(&urgency());
    cluster.apply(&set("set", &template("set")));
    cluster.give_way("set");
    // They are exchanged for others, which go on with what there is.
    cluster.exchange("daemonset/torpor-agent");
    cluster.exchange("deployment/torpor-controller");
    cluster.delete(&["pod/urgent-set"]);
    cluster.give_way("set");
    // A kubelet makes a checkpoint only if the API server tells it that the agent may have that.
    let name = cluster.plugin("admin", &["checkpoint", "set-0"]).unwrap();
    let order = cluster.until("the order is carried out", || {
        let order = cluster.get(&["pcp", name.trim()]);
        let all = order["status"]["conditions"].as_array()?;
        let ready = all.iter().find(|one| one["type"] == "Ready")?;
        (ready["reason"] != "Pending" && ready["reason"] != "CheckpointInProgress")
            .then(|| ready.clone())
    });
    assert_eq!(order["reason"], "CheckpointCompleted", "{order}");
    uninstalled(&cluster, || {
        let all = cluster.place.path().join("all.yaml");
        let words = ["delete", "--ignore-not-found", "--timeout=170s", "-f", all.to_str().unwrap()];
        cluster.kubectl("admin", &words, "").unwrap();
    });
}

#[test]
fn what_helm_installs_saves_pods_and_is_removed_without_harm() {
    let test = "what_helm_installs_saves_pods_and_is_removed_without_harm";
    if chart::helm(test).is_none() {
        return;
    }
    let Some(cluster) = cluster_with(test, &[("TORPOR_IN_PODS", "helm")]) else { return };
    assert_eq!((cluster.own("torpor-agent").len(), cluster.own("torpor-controller").len()), (2, 2));
    cluster.apply(&urgency());
    cluster.apply(&set("set", &template("set")));
    cluster.give_way("set");
    // Where nothing is new nothing is made anew.
    let chart = chart::place();
    cluster.helm(&["upgrade", "torpor", chart.to_str().unwrap(), "--reuse-values", "--wait"]);
    cluster.delete(&["pod/urgent-set"]);
    cluster.give_way("set");
    uninstalled(&cluster, || {
        cluster.helm(&["uninstall", "torpor", "--wait", "--timeout", "170s"]);
    });
    assert_eq!(cluster.helm(&["list", "--all", "--short"]), "");
    // Definitions stay where helm has made them, and with them what was saved.
    let definitions = cluster.get(&["crds"]);
    assert_eq!(definitions["items"].as_array().map(Vec::len), Some(3));
}

/// All of it is removed: what runs goes on, and ends when it is to.
fn uninstalled(cluster: &Cluster, remove: impl FnOnce()) {
    let (pod, _, began) = cluster.counting("set");
    let hooks = "mutatingwebhookconfiguration/torpor.dev";
    cluster.delete(&[hooks]);
    remove();
    assert_eq!(cluster.get(&["namespace", "torpor-system"]), json!(null));
    let (_, told, _) = cluster.counting("set");
    let (same, _, since) = cluster.until("it goes on", || {
        let (pod, count, began) = cluster.counting("set");
        (count > told).then_some((pod, count, began))
    });
    assert_eq!((&same["metadata"]["uid"], since), (&pod["metadata"]["uid"], began));
    assert_eq!(same["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.delete(&["statefulset/set"]);
    cluster.until("it ends", || {
        let pods = cluster.get(&["pods", "-l", "app=set"]);
        pods["items"].as_array()?.is_empty().then_some(())
    });
}
