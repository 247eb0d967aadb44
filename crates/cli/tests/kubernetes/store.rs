//! Checkpoints that do not die with their node.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cluster::{Cluster, always, cluster, cluster_with, deployment, set, template};

/// A registry that both nodes see, and what is kept there.
const REGISTRY: &str = "10.77.0.1:5000";
const REPOSITORY: &str = "10.77.0.1:5000/team/checkpoints";

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

impl Cluster {
    fn scale(&self, set: &str, replicas: usize) {
        let words = ["scale", &format!("statefulset/{set}"), &format!("--replicas={replicas}")];
        self.kubectl("admin", &words, "").unwrap();
    }

    /// Waits until there are so many checkpoints, each of them in the store.
    fn stored(&self, count: usize) {
        self.until("all checkpoints are stored", || {
            let all = self.get(&["pcp"]);
            let all = all["items"].as_array()?;
            let is_stored = |one: &Value| {
                let location = &one["status"]["checkpointLocation"];
                location["type"] == "OCIImage" && location["ociImage"]["digest"].is_string()
            };
            (all.len() == count && all.iter().all(is_stored)).then_some(())
        });
    }

    /// Loses a node with its checkpoints, and the pods that were on it.
    fn lose_node(&self, node: &str, pods: &[&str]) {
        for daemon in ["agent", "kubelet", "containerd"] {
            self.lose(&node.replace("node", daemon));
        }
        fs::remove_dir_all(self.place.path().join(node).join("torpor")).unwrap();
        // Nobody but an administrator knows that it will not come back.
        for pod in pods {
            let force = ["delete", "pod", pod, "--force", "--grace-period=0", "--ignore-not-found"];
            self.kubectl("admin", &force, "").unwrap();
        }
        self.kubectl("admin", &["cordon", node], "").unwrap();
    }

    /// Gives the agent of a node a login to the registry.
    fn login(&self, node: &str) {
        let login = json!({ "auths": { REGISTRY: { "auth": "dGVhbTpyaWdodA==" } } });
        let file = self.place.path().join(node).join("store.json");
        fs::write(file, login.to_string()).unwrap();
    }

    /// Has Debian's registry, which knows one user: `team`, whose password is `right`.
    fn registry(&self) {
        let dir = self.place.path().join("registry");
        fs::create_dir(&dir).unwrap();
        let users = "team:$2b$04$abcdefghijklmnopqrstuuFmEfrkTQnczNzw475xE2VhDrK1uwJiC\n";
        fs::write(dir.join("users"), users).unwrap();
        let config = json!({
            "version": "0.1", "log": { "level": "error" }, "http": { "addr": REGISTRY },
            "storage": { "filesystem": { "rootdirectory": dir }, "delete": { "enabled": true } },
            "auth": { "htpasswd": { "realm": "team", "path": dir.join("users") } },
        });
        let file = dir.join("config.yml");
        fs::write(&file, config.to_string()).unwrap();
        let serve = format!(
            "setsid docker-registry serve {} >{} 2>&1 </dev/null &",
            file.display(),
            self.place.path().join("log/registry.log").display()
        );
        assert!(self.inside(&["sh", "-c", &serve]).status.success());
        let status = ["curl", "-s", "-o/dev/null", "-w%{http_code}", "http://10.77.0.1:5000/v2/"];
        self.until("docker-registry wants to know who calls", || {
            (self.inside(&status).stdout == b"401").then_some(())
        });
    }
}

#[test]
fn a_pod_whose_node_is_lost_goes_on_from_the_store() {
    let Some(cluster) = cluster("a_pod_whose_node_is_lost_goes_on_from_the_store") else { return };
    cluster.apply(&set("kept", &always(template("kept"))));
    let (old, told, began) = cluster.counting("kept");
    let lost = old["spec"]["nodeName"].as_str().unwrap();
    let other = if lost == "node1" { "node2" } else { "node1" };
    cluster.scale("kept", 0);
    cluster.stored(1);
    assert!(names(&cluster) == 1 && blobs(&cluster) > 2, "there is nothing in the store");
    sealed(&cluster.place.path().join("store"));
    cluster.lose_node(lost, &["kept-0"]);
    cluster.scale("kept", 1);
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

/// A cluster whose store is a registry.
fn registered(test: &str) -> Option<Cluster> {
    let variables = [("TORPOR_STORE", REPOSITORY), ("TORPOR_INSECURE_REGISTRIES", REGISTRY)];
    let cluster = cluster_with(test, &variables)?;
    cluster.registry();
    Some(cluster)
}

#[test]
fn a_pod_fetches_from_a_registry_as_its_namespace_lets_it() {
    let Some(cluster) = registered("a_pod_fetches_from_a_registry_as_its_namespace_lets_it") else {
        return;
    };
    // The node that stores has a login, the one that fetches has none: its pods have.
    cluster.login("node1");
    let secret = ["create", "secret", "docker-registry", "pull"];
    let says = ["--docker-server=10.77.0.1:5000", "--docker-username=team"];
    let words = [&secret[..], &says, &["--docker-password=right"]].concat();
    cluster.kubectl("admin", &words, "").unwrap();
    cluster.kubectl("admin", &["cordon", "node2"], "").unwrap();
    let [barred, welcome] = ["barred", "welcome"].map(|app| {
        let mut template = always(template(app));
        template["spec"]["imagePullSecrets"] = json!([{ "name": "pull" }]);
        template["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "50m" } });
        cluster.apply(&set(app, &template));
        let found = cluster.counting(app);
        cluster.scale(app, 0);
        found
    });
    cluster.stored(2);
    cluster.kubectl("admin", &["uncordon", "node2"], "").unwrap();
    cluster.lose_node("node1", &["barred-0", "welcome-0"]);

    // Nobody has let the controllers read the Secret.
    cluster.scale("barred", 1);
    let (_, _, began) = cluster.counting("barred");
    assert_ne!(began, barred.2);
    let why = cluster.until("it is said why it began anew", || {
        let events = cluster.get(&["events", "--field-selector=reason=NotRestored"]);
        events["items"][0]["message"].as_str().map(str::to_owned)
    });
    assert!(why.contains("the Secret pull: ") && why.contains("forbidden"), "{why}");

    for words in [
        "create role torpor-pull --verb=get --resource=secrets --resource-name=pull",
        "create rolebinding torpor-pull --role=torpor-pull \
         --serviceaccount=torpor-system:torpor-controller",
    ] {
        let words: Vec<&str> = words.split_whitespace().collect();
        cluster.kubectl("admin", &words, "").unwrap();
    }
    let who = "--as=system:serviceaccount:torpor-system:torpor-controller";
    cluster.until("the controllers may read it", || {
        cluster.kubectl("admin", &["auth", "can-i", "get", "secrets/pull", who], "").ok()
    });
    cluster.scale("welcome", 1);
    let (old, told, began) = welcome;
    let new = cluster.goes_on("welcome", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(cluster.counter("node2", "torpor_checkpoints_from_store_total"), 1);
}

#[test]
fn pods_start_warm_from_a_registry_when_the_node_of_their_snapshot_is_lost() {
    let test = "pods_start_warm_from_a_registry_when_the_node_of_their_snapshot_is_lost";
    let Some(cluster) = registered(test) else { return };
    for node in ["node1", "node2"] {
        cluster.login(node);
    }
    // No snapshot goes ahead to a node that takes no pods.
    cluster.kubectl("admin", &["cordon", "node2"], "").unwrap();
    cluster.starts_warm("warm");
    cluster.apply(&deployment("warm", 100));
    let (first, _, began) = cluster.counting("warm");
    cluster.stored(1);
    assert_eq!(cluster.counter("node1", "torpor_checkpoints_not_stored_total"), 0);
    cluster.kubectl("admin", &["uncordon", "node2"], "").unwrap();
    assert_eq!(cluster.counter("node2", "torpor_checkpoints_from_store_total"), 0);
    cluster.lose_node("node1", &[first["metadata"]["name"].as_str().unwrap()]);
    let new = cluster.goes_on("warm", &first["metadata"]["uid"], 0, &began);
    assert_eq!(new["spec"]["nodeName"], "node2");
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(cluster.counter("node2", "torpor_checkpoints_from_store_total"), 1);
}
