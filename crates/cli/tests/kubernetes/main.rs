//! Pods on a real Kubernetes: two nodes on this machine, with containerd, kubelets and a control plane
//! that scripts/kubernetes/build.sh has built. With `TORPOR_LONG=1` all of it runs, and is built first. Without, one
//! test runs where it was built before.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attacks;
mod benchmark;
mod chart;
mod cluster;
mod costs;
mod evictions;
mod installed;
mod kills;
mod memory;
mod nodes;
mod orders;
mod pod;
mod replicas;
mod store;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use cluster::{Cluster, built, cluster, deployment, job, root, template, urgency};
use pod::{outside, pod_of_token, volumes_outside};

#[test]
fn preempted_pods_come_back_elsewhere_with_their_state() {
    let Some(cluster) = cluster("preempted_pods_come_back_elsewhere_with_their_state") else {
        return;
    };
    cluster.apply(&urgency());
    let selector = |app: &str| json!({ "matchLabels": { "app": app } });
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "set" },
        "spec": { "serviceName": "set", "replicas": 1, "selector": selector("set"),
                  "template": template("set") },
    }));
    cluster.give_way("set");
    cluster.delete(&["statefulset/set", "pod/urgent-set"]);

    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "deployment" },
        "spec": { "replicas": 1, "selector": selector("deployment"),
                  "template": template("deployment") },
    }));
    cluster.give_way("deployment");
    cluster.delete(&["deployment/deployment", "pod/urgent-deployment"]);

    cluster.apply(&job("job"));
    cluster.give_way("job");
    cluster.was_charged_nothing("job");
}

#[test]
fn the_image_holds_the_program_and_what_it_takes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("the_image_holds_the_program: skipped, since it takes root");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let archive = place.path().join("image.tar");
    let made = Command::new(root().join("scripts/kubernetes/image.sh"))
        .args(["example.org/torpor:1", archive.to_str().unwrap(), env!("CARGO_BIN_EXE_torpor")])
        .status()
        .unwrap();
    assert!(made.success());
    let unpack = |archive: &Path, into: &Path| {
        fs::create_dir(into).unwrap();
        let done = Command::new("tar").arg("-C").arg(into).arg("-xf").arg(archive).status();
        assert!(done.unwrap().success());
    };
    let image = place.path().join("image");
    unpack(&archive, &image);
    let config: Value =
        serde_json::from_slice(&fs::read(image.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/torpor"]));
    let below = place.path().join("root");
    unpack(&image.join("layer.tar"), &below);
    let run = Command::new("chroot")
        .arg(&below)
        .args(["/usr/bin/torpor", "kubernetes", "manifests", "--image", "example.org/torpor:1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && text.contains("image: example.org/torpor:1"), "{run:?}");
}

#[test]
fn a_job_that_was_suspended_goes_on() {
    let Some(cluster) = built("a_job_that_was_suspended_goes_on") else { return };
    cluster.apply(&job("job"));
    let (old, told, began) = cluster.counting("job");
    let suspend = |value: bool| {
        let patch = json!({ "spec": { "suspend": value } }).to_string();
        cluster.kubectl("admin", &["patch", "job", "job", "-p", &patch], "").unwrap();
    };
    suspend(true);
    cluster.until("the job has no pod", || {
        let pods = cluster.get(&["pods", "-l", "app=job"]);
        pods["items"].as_array()?.is_empty().then_some(())
    });
    suspend(false);
    cluster.goes_on("job", &old["metadata"]["uid"], told, &began);
    cluster.was_charged_nothing("job");
}

#[test]
fn pods_start_warm_by_policy_and_move_alive() {
    let Some(cluster) = cluster("pods_start_warm_by_policy_and_move_alive") else { return };
    cluster.apply(&deployment("moved", 100));
    let (old, told, began) = cluster.counting("moved");
    let name = old["metadata"]["name"].as_str().unwrap();
    cluster.fails_to_move(name);
    let target = cluster.plugin("admin", &["migrate", name]).unwrap();
    let new = cluster.goes_on("moved", &old["metadata"]["uid"], told, &began);
    assert_eq!(new["metadata"]["name"], target.trim());
    assert_ne!(new["spec"]["nodeName"], old["spec"]["nodeName"]);
    cluster.until("the source has gone", || {
        let found = cluster.get(&["pods", "-l", "app=moved"]);
        let all = found["items"].as_array()?;
        (all.len() == 1 && all[0]["metadata"]["uid"] == new["metadata"]["uid"]).then_some(())
    });
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    says_that_connections_are_closed(&cluster, name, target.trim());
    cluster.delete(&["deployment/moved"]);

    cluster.starts_warm("warm");
    outside(&cluster, "first");
    let mut warm = deployment("warm", 100);
    let pod = &mut warm["spec"]["template"]["spec"];
    pod["volumes"].as_array_mut().unwrap().extend(volumes_outside());
    let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({ "name": "config", "mountPath": "/config" }));
    mounts.push(json!({ "name": "secret", "mountPath": "/secret" }));
    cluster.apply(&warm);
    let (first, _, began) = cluster.counting("warm");
    cluster.until("there is a snapshot", || {
        let all = cluster.get(&["pcp", "-l", "torpor.dev/policy=warm"]);
        let ready = |one: &Value| {
            let conditions = one["status"]["conditions"].as_array()?;
            conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True").then_some(())
        };
        all["items"].as_array()?.iter().find_map(ready)
    });
    let (_, told, _) = cluster.counting("warm");
    cluster.until("it goes on after its snapshot", || {
        cluster.counts(&first).filter(|(_, last, _)| *last > told)
    });
    outside(&cluster, "second");
    cluster.kubectl("admin", &["scale", "deployment/warm", "--replicas=3"], "").unwrap();
    let all = cluster
        .until("all three run", || Some(cluster.running("warm")).filter(|all| all.len() == 3));
    for pod in &all {
        let (_, _, since) = cluster.until("it counts", || cluster.counts(pod));
        assert_eq!(since, began, "it began anew");
        if pod["metadata"]["uid"] != first["metadata"]["uid"] {
            has_what_is_its_own(&cluster, pod, "second");
        }
    }
}

/// Whoever has a connection to a pod that moves hears that it is closed.
fn says_that_connections_are_closed(cluster: &Cluster, source: &str, target: &str) {
    let moves = cluster.get(&["pm"]);
    let mut moves = moves["items"].as_array().unwrap().iter();
    let done =
        moves.find(|one| one["spec"]["podName"] == source && one["spec"]["targetNode"].is_null());
    let message = done.unwrap()["status"]["message"].as_str().unwrap();
    let events = cluster.get(&["events", "--field-selector=reason=Moved"]);
    let event = events["items"][0]["message"].as_str().unwrap();
    let told = cluster.plugin("admin", &["explain", target]).unwrap();
    for text in [message, event, &told] {
        assert!(text.contains("established connections were closed"), "{text}");
    }
}

/// A pod that was restored has its own name, address and token, and reads of others what holds now.
fn has_what_is_its_own(cluster: &Cluster, pod: &Value, value: &str) {
    let read = |file: &str| cluster.read(pod, "c", file);
    assert_eq!(read("/proc/sys/kernel/hostname"), pod["metadata"]["name"].as_str().unwrap());
    let addresses = read("/proc/net/fib_trie");
    let own = format!("-- {}\n", pod["status"]["podIP"].as_str().unwrap());
    assert!(addresses.contains(&own), "{own}: {addresses}");
    for file in ["/config/value", "/secret/value"] {
        assert_eq!(read(file), value, "{file}");
    }
    let token = read("/var/run/secrets/kubernetes.io/serviceaccount/token");
    assert_eq!(pod_of_token(&token), pod["metadata"]["uid"]);
}
