//! A pod with all that pods have: an init container, a sidecar, two containers, an emptyDir, a
//! persistent volume, a token of its own, a `ConfigMap`, a Secret, probes.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use crate::cluster::{COUNT, Cluster, IMAGE, cluster, set, template, urgency};

/// The containers that count.
const CONTAINERS: [&str; 3] = ["c", "second", "sidecar"];

/// A container that counts in files of its own, is probed, and has the pod's token.
fn counting(name: &str, share: usize) -> Value {
    let script = COUNT
        .replace("/data/count", &format!("/data/{name}"))
        .replace("while :;", &format!("echo $began > /dev/shm/{name}; while :;"));
    let probe = json!({
        "exec": { "command": ["test", "-s", format!("/data/{name}")] }, "periodSeconds": 1,
        "timeoutSeconds": 10, "failureThreshold": 60,
    });
    json!({
        "name": name, "image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "resources": { "requests": { "cpu": format!("{share}m") } },
        "volumeMounts": [
            { "name": "data", "mountPath": "/data" }, { "name": "claim", "mountPath": "/shared" },
            { "name": "token", "mountPath": "/token" }, { "name": "config", "mountPath": "/config" },
            { "name": "secret", "mountPath": "/secret" },
        ],
        "startupProbe": probe, "readinessProbe": probe, "livenessProbe": probe,
    })
}

/// A pod of all that.
fn whole(app: &str) -> Value {
    let mut template = template(app);
    let spec = &mut template["spec"];
    let [config, secret] = volumes_outside();
    let mut sidecar = counting("sidecar", 10);
    sidecar["restartPolicy"] = json!("Always");
    let init = json!({
        "name": "init", "image": IMAGE, "imagePullPolicy": "Never",
        "command": ["sh", "-c", "cat /proc/sys/kernel/random/uuid > /data/init; echo > /data/left"],
        "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
    });
    spec["initContainers"] = json!([init, sidecar]);
    let mut hooked = counting("c", Cluster::SHARE);
    // The other container has none: it is told to end before this hook has ended.
    let hook = "sleep 1; cat /etc/hostname >> /shared/hook";
    hooked["lifecycle"] = json!({ "preStop": { "exec": { "command": ["sh", "-c", hook] } } });
    spec["containers"] = json!([hooked, counting("second", 10)]);
    spec["volumes"] = json!([
        { "name": "data", "emptyDir": {} },
        { "name": "claim", "persistentVolumeClaim": { "claimName": "claim" } },
        { "name": "token", "projected": { "sources": [
            { "serviceAccountToken": { "path": "token", "audience": "somebody" } },
        ] } },
        config, secret,
    ]);
    template
}

/// The volumes of what a pod reads that is not its own.
pub fn volumes_outside() -> [Value; 2] {
    [
        json!({ "name": "config", "configMap": { "name": "outside" } }),
        json!({ "name": "secret", "secret": { "secretName": "outside" } }),
    ]
}

/// A claim, and the volume for it.
fn claim(cluster: &Cluster) {
    let one = json!({ "storage": "1Mi" });
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "claim" },
        "spec": {
            "capacity": one, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "hostPath": { "path": "/mnt" },
        },
    }));
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "claim" },
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "claim",
            "resources": { "requests": one },
        },
    }));
}

/// What a pod reads that is not its own.
pub fn outside(cluster: &Cluster, value: &str) {
    for (kind, field) in [("ConfigMap", "data"), ("Secret", "stringData")] {
        let metadata = json!({ "name": "outside" });
        cluster.apply(&json!({
            "apiVersion": "v1", "kind": kind, "metadata": metadata, field: { "value": value },
        }));
    }
}

/// What can be seen of such a pod.
struct Seen {
    pod: Value,
    /// What each container has told first and last, and what it chose when it began.
    counts: Vec<(u64, u64, String)>,
    /// What the init container has left.
    init: String,
}

/// The pod of `app` that is another than `before`, as soon as it is ready and all its containers count.
fn seen(cluster: &Cluster, app: &str, before: Option<&Seen>) -> Seen {
    let pod = cluster.until(&format!("{app} is ready"), || {
        cluster.running(app).into_iter().find(|pod| {
            let conditions = pod["status"]["conditions"].as_array().unwrap();
            conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
                && before.is_none_or(|b| b.pod["metadata"]["uid"] != pod["metadata"]["uid"])
        })
    });
    let counts = CONTAINERS.map(|container| {
        cluster.until(&format!("{app}: {container} counts"), || {
            cluster.counts_of(&pod, container).filter(|(first, last, _)| *last > first + 5)
        })
    });
    let init = cluster.read(&pod, "c", "/data/init");
    Seen { pod, counts: counts.into(), init }
}

/// The uid of the pod that a token is for.
pub fn pod_of_token(token: &str) -> Value {
    let claims = token.split('.').nth(1).unwrap();
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).unwrap();
    let claims: Value = serde_json::from_slice(&claims).unwrap();
    claims["kubernetes.io"]["pod"]["uid"].clone()
}

/// The new pod goes on with all that the old one was, and has what is its own.
fn continues(cluster: &Cluster, app: &str, old: &Seen, value: &str) -> Seen {
    let new = seen(cluster, app, Some(old));
    for file in ["/config/value", "/secret/value"] {
        assert_eq!(cluster.read(&new.pod, "second", file), value, "{app}: {file}");
    }
    for ((container, was), is) in CONTAINERS.iter().zip(&old.counts).zip(&new.counts) {
        assert_eq!(was.2, is.2, "{app}: {container} began anew");
        assert!(is.0 > was.1, "{app}: {container}: {is:?} after {was:?}");
        for file in [format!("/data/{container}"), "/file".to_owned()] {
            let count = cluster.number(&new.pod, container, &file);
            assert!(count >= is.0, "{app}: {file} of {container}: {count}");
        }
        let token = cluster.read(&new.pod, container, "/token/token");
        assert_eq!(pod_of_token(&token), new.pod["metadata"]["uid"]);
        cluster.works_once(&is.2);
        let memory = cluster.read(&new.pod, container, &format!("/dev/shm/{container}"));
        assert_eq!(memory, is.2, "{app}: /dev/shm of {container}");
    }
    let ran = std::fs::read_to_string(cluster.place.path().join("shared/hook")).unwrap();
    let host = old.pod["spec"]["hostname"].as_str();
    let name = host.or(old.pod["metadata"]["name"].as_str()).unwrap();
    assert_eq!(ran.lines().filter(|line| *line == name).count(), 1, "the preStop hook: {ran}");
    assert_eq!(new.init, old.init, "{app}: what the new init container has left is seen");
    let status = &new.pod["status"];
    let all = ["containerStatuses", "initContainerStatuses"].map(|name| status[name].as_array());
    for one in all.into_iter().flatten().flatten() {
        assert_eq!(one["restartCount"], 0, "{one}");
    }
    new
}

#[test]
fn a_pod_with_all_that_pods_have_goes_on() {
    let Some(cluster) = cluster("a_pod_with_all_that_pods_have_goes_on") else { return };
    claim(&cluster);
    outside(&cluster, "first");
    let mut work = whole("job");
    work["spec"]["restartPolicy"] = json!("Never");
    let mut job = crate::cluster::job("job");
    job["spec"]["template"] = work;
    cluster.apply(&job);
    let first = seen(&cluster, "job", None);
    for suspend in [true, false] {
        let patch = json!({ "spec": { "suspend": suspend } }).to_string();
        cluster.kubectl("admin", &["patch", "job", "job", "-p", &patch], "").unwrap();
        if suspend {
            cluster.until("the job has no pod", || {
                let pods = cluster.get(&["pods", "-l", "app=job"]);
                pods["items"].as_array()?.is_empty().then_some(())
            });
            outside(&cluster, "second");
        }
    }
    continues(&cluster, "job", &first, "second");
    cluster.was_charged_nothing("job");
    cluster.delete(&["job/job"]);

    cluster.apply(&urgency());
    cluster.apply(&set("set", &whole("set")));
    let first = seen(&cluster, "set", None);
    cluster.urgent(first.pod["spec"]["nodeName"].as_str().unwrap(), "set", "1200m");
    let second = continues(&cluster, "set", &first, "second");
    assert_ne!(second.pod["spec"]["nodeName"], first.pod["spec"]["nodeName"]);
}
