//! What people order: a pod that is saved, one that is restored by name, and one that must not start cold.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::cluster::{Cluster, always, cluster, damage, job, set, template};

impl Cluster {
    /// The checkpoint of a name that a pod has claimed.
    fn claimed(&self, name: &str, pod: &Value) -> Value {
        let one = self.get(&["pcp", name]);
        assert_eq!(one["status"]["claimedBy"]["uid"], pod["metadata"]["uid"], "{one}");
        one
    }

    /// Where the checkpoint of a pod lies on its node, when it is complete.
    fn kept(&self, pod: &Value) -> PathBuf {
        self.until("there is a checkpoint", || {
            let all = self.get(&["pcp"]);
            let mut all = all["items"].as_array()?.iter();
            let one = all.find(|one| {
                one["status"]["sourcePodUID"] == pod["metadata"]["uid"]
                    && one["status"]["checkpointLocation"]["peer"].is_object()
            })?;
            let node = self.place.path().join(one["status"]["nodeName"].as_str()?);
            Some(node.join("torpor/checkpoints/default").join(one["metadata"]["name"].as_str()?))
        })
    }
}

#[test]
fn what_was_ordered_is_restored_by_name() {
    let Some(cluster) = cluster("what_was_ordered_is_restored_by_name") else { return };
    cluster.apply(&set("web", &template("web")));
    let (old, told, began) = cluster.counting("web");
    cluster.bind("alice", "edit", ["create", "pods"]);
    cluster.bind("alice", "torpor-edit", ["create", "podcheckpoints"]);
    let name = cluster.plugin("alice", &["checkpoint", "web-0"]).unwrap();
    let restore = ["restore", name.trim(), "--pod", "again"];
    let refused = cluster.plugin("alice", &restore).unwrap_err();
    assert!(refused.contains("may not restore"), "{refused}");
    cluster.bind("alice", "torpor-restore", ["restore", "podcheckpoints"]);
    assert_eq!(cluster.plugin("alice", &restore).unwrap(), "again\n");
    let again = cluster.until("it runs", || {
        let pod = cluster.get(&["pod", "again"]);
        pod["status"]["containerStatuses"][0]["state"]["running"].is_object().then_some(pod)
    });
    let (first, _, since) = cluster
        .until("it goes on", || cluster.counts(&again).filter(|(first, last, _)| last > first));
    assert!(first > told && since == began, "{first} after {told}, {since} after {began}");
    assert_eq!(again["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.claimed(name.trim(), &again);
    // The pod that it is of goes on as well, until its end is ordered.
    let (same, told, _) = cluster.until("its source goes on", || {
        let now = cluster.counting("web");
        (now.1 > told).then_some(now)
    });
    assert_eq!(same["metadata"]["uid"], old["metadata"]["uid"]);
    let name = cluster.plugin("alice", &["checkpoint", "web-0", "--stop"]).unwrap();
    let new = cluster.goes_on("web", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.claimed(name.trim(), &new);
}

/// A pod of the first node that must not start cold.
fn persistent(app: &str) -> Value {
    let mut template = always(template(app));
    template["metadata"]["annotations"]["torpor.dev/restore-policy"] = json!("Always");
    template["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": "node1" });
    let request = json!({ "requests": { "cpu": "50m" } });
    template["spec"]["containers"][0]["resources"] = request;
    template
}

#[test]
fn what_must_not_start_cold_is_tried_again() {
    let Some(cluster) = cluster("what_must_not_start_cold_is_tried_again") else { return };
    let mut work = job("job");
    work["spec"]["backoffLimit"] = json!(1);
    work["spec"]["template"] = persistent("job");
    work["spec"]["template"]["spec"]["restartPolicy"] = json!("Never");
    for (object, stop, go_on) in [
        (set("set", &persistent("set")), json!({ "replicas": 0 }), json!({ "replicas": 1 })),
        (work, json!({ "suspend": true }), json!({ "suspend": false })),
    ] {
        cluster.apply(&object);
        let app = object["metadata"]["name"].as_str().unwrap();
        let kind = object["kind"].as_str().unwrap();
        let patch = |spec: &Value| {
            let spec = json!({ "spec": spec }).to_string();
            cluster.kubectl("admin", &["patch", kind, app, "-p", &spec], "").unwrap();
        };
        let (old, told, began) = cluster.counting(app);
        patch(&stop);
        let kept = cluster.kept(&old);
        damage(&kept);
        patch(&go_on);
        let name = kept.file_name().unwrap().to_str().unwrap();
        let failed = cluster.until("it is tried", || {
            let one = cluster.get(&["pcp", name]);
            let tried = &one["status"]["restoredContainers"][0];
            (tried["again"] == true).then(|| tried["podUID"].clone())
        });
        // The same change once more takes it back.
        damage(&kept);
        let new = cluster.goes_on(app, &old["metadata"]["uid"], told, &began);
        cluster.works_once(&began);
        let restarts = new["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap();
        let status = &cluster.get(&[kind, app])["status"];
        eprintln!("{kind}: {restarts} restarts, {} pods failed", status["failed"]);
        // The kubelet starts a container again, or a Job makes another pod, and each counts that.
        match kind {
            "Job" => assert_ne!(new["metadata"]["uid"], failed),
            _ => assert!(new["metadata"]["uid"] == failed && restarts > 0, "{new}"),
        }
    }
}
