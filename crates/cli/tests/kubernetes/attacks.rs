//! What nobody but Torpor may do.

use std::fs;

use serde_json::{Value, json};

use crate::cluster::{Cluster, always, cluster, damage, set, template};

/// The other one of two nodes.
fn other(node: &str) -> &str {
    if node == "node1" { "node2" } else { "node1" }
}

/// A token of the agent of a node: `token` for the API server, `agents` and `controllers` for these.
fn token(cluster: &Cluster, node: &str, which: &str) -> String {
    let file = cluster.place.path().join(node).join(which);
    fs::read_to_string(file).unwrap().trim().to_owned()
}

/// What the API server says to somebody who has the token of a node's agent.
fn as_agent(cluster: &Cluster, node: &str, words: &[&str], input: &str) -> Result<String, String> {
    let token = format!("--token={}", token(cluster, node, "token"));
    let authority = cluster.place.path().join("pki/ca.crt");
    let authority = format!("--certificate-authority={}", authority.display());
    let server = "--server=https://10.77.0.1:6443";
    let who = [token.as_str(), authority.as_str(), server, "--kubeconfig=/dev/null"];
    cluster.kubectl("admin", &[&who, words].concat(), input)
}

/// What a controller or another agent says to somebody who has a token of a node's agent.
fn asked(cluster: &Cluster, node: &str, which: &str, method: &str, url: &str) -> String {
    asked_as(cluster, (node, which), "", method, url)
}

/// The same, to somebody who shows the certificate of an agent as well, and has its key.
fn asked_as(
    cluster: &Cluster,
    (node, which): (&str, &str),
    shown: &str,
    method: &str,
    url: &str,
) -> String {
    let header = format!("Authorization: Bearer {}", token(cluster, node, which));
    let file = cluster.place.path().join(shown).join("torpor/agent.pem").display().to_string();
    // What comes back is all that counts here: the certificate is the server's own. By HTTP/2 a kubelet resets the stream of
    // whoever it refuses before it has read what was sent, and curl then loses the answer now and then.
    let mut words = vec!["curl", "-sSk", "--http1.1", "-X", method, "-d", "{}", "-H", &header, url];
    if !shown.is_empty() {
        words.extend(["--cert", &file]);
    }
    let said = cluster.inside(&words);
    // Why there was no answer.
    String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned()
}

fn refused(said: Result<String, String>, expected: &str) {
    let error = said.unwrap_err();
    assert!(error.contains(expected), "{expected}: {error}");
}

/// A pod that names a checkpoint.
fn names(pod: &str, namespace: &str, annotation: &str, checkpoint: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod, "namespace": namespace, "labels": { "app": pod },
            "annotations": { annotation: checkpoint },
        },
        "spec": small(pod)["spec"],
    })
}

fn small(app: &str) -> Value {
    let mut template = always(template(app));
    let request = json!({ "requests": { "cpu": "50m" } });
    template["spec"]["containers"][0]["resources"] = request;
    template
}

/// The checkpoint of a pod, when it is ready.
fn checkpoint(cluster: &Cluster, pod: &Value) -> Value {
    cluster.until("there is a checkpoint", || {
        let all = cluster.get(&["pcp"]);
        let mut all = all["items"].as_array()?.iter();
        let of = |one: &&Value| {
            one["status"]["sourcePodUID"] == pod["metadata"]["uid"]
                && one["status"]["checkpointLocation"]["peer"].is_object()
        };
        all.find(of).cloned()
    })
}

#[test]
fn what_is_forged_is_refused() {
    let Some(cluster) = cluster("what_is_forged_is_refused") else { return };
    // One checkpoint that a pod on the other node has claimed, and one that nobody has.
    cluster.apply(&set("used", &small("used")));
    let (old, told, began) = cluster.counting("used");
    let node = old["spec"]["nodeName"].as_str().unwrap();
    cluster.kubectl("admin", &["cordon", node], "").unwrap();
    cluster.kubectl("admin", &["delete", "pod", "used-0"], "").unwrap();
    let new = cluster.goes_on("used", &old["metadata"]["uid"], told, &began);
    let used = checkpoint(&cluster, &old);
    assert_eq!(used["status"]["claimedBy"]["uid"], new["metadata"]["uid"]);
    cluster.kubectl("admin", &["uncordon", node], "").unwrap();
    cluster.apply(&set("free", &small("free")));
    let (source, _, began) = cluster.counting("free");
    cluster.kubectl("admin", &["scale", "statefulset/free", "--replicas=0"], "").unwrap();
    let free = checkpoint(&cluster, &source);

    let begins_anew = asks(&cluster, free["metadata"]["name"].as_str().unwrap());
    annotations(&cluster, &free);
    agents(&cluster, &used, &free);
    kubelets(&cluster);
    forged_archive(&cluster, &source, &free, &began);
    for (namespace, pod) in begins_anew {
        cluster.until(&format!("{pod} starts cold"), || {
            let text = cluster.kubectl("admin", &["-n", namespace, "logs", pod], "").ok()?;
            text.contains("tick 1 ").then_some(())
        });
        let pod = cluster.get(&["-n", namespace, "pod", pod]);
        assert!(pod["metadata"]["annotations"]["torpor.dev/restore-from"].is_null(), "{pod}");
    }
    let free = cluster.get(&["pcp", free["metadata"]["name"].as_str().unwrap()]);
    assert_ne!(free["status"]["claimedBy"]["name"], "foreign");
}

/// Pods that ask for a checkpoint that is none of theirs, and wait behind the gate: one of another namespace, and
/// one that wants more than the pod had.
fn asks(cluster: &Cluster, name: &str) -> [(&'static str, &'static str); 2] {
    cluster.kubectl("admin", &["create", "namespace", "other"], "").unwrap();
    cluster.until("the namespace has an account", || {
        cluster.kubectl("admin", &["-n", "other", "get", "serviceaccount", "default"], "").ok()
    });
    cluster.apply(&names("foreign", "other", "torpor.dev/restore-request", name));
    let mut changed = names("changed", "default", "torpor.dev/restore-request", name);
    changed["spec"]["containers"][0]["securityContext"] = json!({ "privileged": true });
    cluster.apply(&changed);
    [("other", "foreign"), ("default", "changed")]
}

/// What users write.
fn annotations(cluster: &Cluster, free: &Value) {
    let name = free["metadata"]["name"].as_str().unwrap();
    let create = ["create", "-f", "-"];
    // Not even an administrator writes the controller's annotation.
    let forged = names("forged", "default", "torpor.dev/restore-from", name);
    refused(cluster.kubectl("admin", &create, &forged.to_string()), "controller's");
    let mut other = forged;
    other["spec"].as_object_mut().unwrap().remove("runtimeClassName");
    refused(cluster.kubectl("admin", &create, &other.to_string()), "controller's");
    for own in ["torpor.dev/restore-from=x", "torpor.dev/let-go=2999-01-01T00:00:00Z"] {
        let own = ["annotate", "pod", "used-0", "--overwrite", own];
        refused(cluster.kubectl("admin", &own, ""), "controller's");
    }
    // Alice may make pods, and may not restore.
    cluster.bind("alice", "edit", ["create", "pods"]);
    let asks = names("asks", "default", "torpor.dev/restore-request", name);
    refused(cluster.kubectl("alice", &create, &asks.to_string()), "may not restore");
    // Nor does she by the name of an owner, or by asking for it later.
    let mut owned = names("owned", "default", "torpor.dev/nothing", name);
    owned["spec"]["schedulingGates"] = json!([{ "name": "torpor.dev/restore" }]);
    let owner = &free["metadata"]["ownerReferences"][0];
    owned["metadata"]["ownerReferences"] = json!([{
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["name"],
        "uid": owner["uid"], "controller": true,
    }]);
    refused(cluster.kubectl("alice", &create, &owned.to_string()), "is Torpor's");
    let later = ["annotate", "pod", "used-0", &format!("torpor.dev/restore-request={name}")];
    refused(cluster.kubectl("admin", &later, ""), "when a pod is made");
    // An object of another namespace does not become that checkpoint.
    let mut copy = free.clone();
    copy["metadata"] = json!({ "name": name, "namespace": "other" });
    cluster.apply(&copy);
    let made = cluster.get(&["-n", "other", "pcp", name]);
    copy["metadata"] = made["metadata"].clone();
    let path = format!("/apis/torpor.dev/v1alpha1/namespaces/other/podcheckpoints/{name}/status");
    let replace = ["replace", "--raw", &path, "-f", "-"];
    refused(cluster.kubectl("admin", &replace, &copy.to_string()), "written by Torpor alone");
}

/// What somebody who has stolen the token of an agent does.
fn agents(cluster: &Cluster, used: &Value, free: &Value) {
    let made_on = used["status"]["nodeName"].as_str().unwrap();
    let name = used["metadata"]["name"].as_str().unwrap();
    // It does not move the checkpoint of another node, and gives nobody one.
    let path = format!("/apis/torpor.dev/v1alpha1/namespaces/default/podcheckpoints/{name}/status");
    let replace = ["replace", "--raw", &path, "-f", "-"];
    let mut object = used.clone();
    object["status"]["checkpointLocation"]["peer"]["address"] = json!("10.0.0.1:1");
    let said = as_agent(cluster, other(made_on), &replace, &object.to_string());
    refused(said, "agent of its node alone");
    let mut object = used.clone();
    object["status"]["claimedBy"]["uid"] = free["metadata"]["uid"].clone();
    let said = as_agent(cluster, made_on, &replace, &object.to_string());
    refused(said, "by the controller alone");
    // It spoils no checkpoint of another node, takes none for itself, and orders none.
    for spoil in ["conditions", "restoringOn", "checkpointedContainers", "restoredContainers"] {
        let mut object = used.clone();
        object["status"][spoil] = match spoil {
            "restoringOn" => json!(other(made_on)),
            _ => json!([]),
        };
        let said = as_agent(cluster, other(made_on), &replace, &object.to_string());
        refused(said, "agent of its node alone");
    }
    let mut object = used.clone();
    object["status"]["restoringOn"] = json!("nowhere");
    let said = as_agent(cluster, made_on, &replace, &object.to_string());
    refused(said, "where a checkpoint is restored");
    let mut object = used.clone();
    object["status"]["expectedOn"] = json!(["nowhere"]);
    let said = as_agent(cluster, made_on, &replace, &object.to_string());
    refused(said, "where a checkpoint is restored");
    let create = ["create", "-f", "-"];
    for labels in [json!({}), json!({ "torpor.dev/node": made_on, "torpor.dev/gives-way": "true" })]
    {
        let order = json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "PodCheckpoint",
            "metadata": { "name": "theirs", "namespace": "default", "labels": labels },
            "spec": { "sourcePod": { "name": "used-0" }, "postCheckpointState": "Stopped" },
        });
        let said = as_agent(cluster, other(made_on), &create, &order.to_string());
        refused(said, "of its own node alone");
    }
    // Nobody but the controllers says which certificate an agent shows.
    let mine = ["annotate", "node", "node1", "--overwrite", "torpor.dev/agent=bWluZQ=="];
    refused(cluster.kubectl("node1", &mine, ""), "written by the controller");
    refused(cluster.kubectl("admin", &mine, ""), "written by the controller");
    // It reads no Secret, and makes and changes no pod.
    let pod = names("theirs", "default", "torpor.dev/restore-request", name).to_string();
    refused(as_agent(cluster, "node1", &create, &pod), "forbidden");
    let secrets = ["get", "secrets", "-n", "torpor-system"];
    refused(as_agent(cluster, "node1", &secrets, ""), "forbidden");
    let own = ["annotate", "pod", "used-0", "--overwrite", "torpor.dev/restore-from=x"];
    refused(as_agent(cluster, "node1", &own, ""), "forbidden");
    // The key, and the images, go to the node of the pod that has claimed them, and to no other.
    let pod = used["status"]["claimedBy"]["name"].as_str().unwrap();
    let there = cluster.get(&["pod", pod])["spec"]["nodeName"].clone();
    let key = |name: &str| format!("https://10.77.0.1:9443/v1/keys/open/default/{name}?pod={pod}");
    let images = |of: &Value| {
        let name = of["metadata"]["name"].as_str().unwrap();
        let address = of["status"]["checkpointLocation"]["peer"]["address"].as_str().unwrap();
        format!("https://{address}/v1/checkpoints/default/{name}?pod={pod}")
    };
    for node in ["node1", "node2"] {
        let to = "controllers";
        let said = asked(cluster, node, to, "POST", &key(name));
        assert_eq!(said.contains("AGE-SECRET-KEY-1"), there == node, "{node}: {said}");
        let of_free = key(free["metadata"]["name"].as_str().unwrap());
        let said = asked(cluster, node, to, "POST", &of_free);
        assert!(!said.contains("AGE-SECRET-KEY-1"), "{node}: {said}");
        // The token is nothing without the certificate that its node names.
        for shown in ["", "node1", "node2"] {
            let said = asked_as(cluster, (node, "agents"), shown, "GET", &images(used));
            let is_it = there == node && shown == node;
            assert_eq!(said.contains("inventory.img"), is_it, "{node} {shown}: {said}");
        }
        let said = asked_as(cluster, (node, "agents"), node, "GET", &images(free));
        assert!(!said.contains("inventory.img"), "{node}: {said}");
        // What one of them was shown is good for no other.
        for which in ["token", "agents"] {
            let said = asked(cluster, node, which, "POST", &key(name));
            assert!(!said.contains("AGE-SECRET-KEY-1"), "{node} {which}: {said}");
        }
        for which in ["token", "controllers"] {
            let said = asked_as(cluster, (node, which), node, "GET", &images(used));
            assert!(!said.contains("inventory.img"), "{node} {which}: {said}");
        }
    }
}

/// What kubelets say to somebody who has stolen the tokens of an agent: all that it may is have containers checkpointed,
/// and read how long the kubelet gives pods.
fn kubelets(cluster: &Cluster) {
    for node in ["node1", "node2"] {
        let address = format!("10.77.0.1{}:10250", node.trim_start_matches("node"));
        let url = |path: &str| format!("https://{address}{path}");
        let said = asked(cluster, node, "token", "GET", &url("/configz"));
        assert!(said.contains("kubeletconfig"), "{said}");
        for (method, path) in [
            ("GET", "/pods"),
            ("GET", "/runningpods/"),
            ("GET", "/metrics"),
            ("GET", "/stats/summary"),
            ("GET", "/logs/"),
            ("GET", "/containerLogs/default/used-0/c"),
            ("GET", "/exec/default/used-0/c?command=id&output=1"),
            ("POST", "/exec/default/used-0/c?command=id&output=1"),
            ("POST", "/run/default/used-0/c?cmd=id"),
            ("GET", "/attach/default/used-0/c?output=1"),
            ("GET", "/portForward/default/used-0"),
            ("POST", "/configz"),
            ("GET", "/checkpoint/default/used-0/c"),
        ] {
            let said = asked(cluster, node, "token", method, &url(path));
            assert!(said.contains("Forbidden"), "{method} {path}: {said}");
        }
        for which in ["agents", "controllers"] {
            let said = asked(cluster, node, which, "GET", &url("/configz"));
            assert_eq!(said, "Unauthorized", "{which}");
        }
        let proxied = ["get", "--raw", &format!("/api/v1/nodes/{node}/proxy/pods")];
        refused(as_agent(cluster, node, &proxied, ""), "forbidden");
    }
    for resource in ["pods/exec", "pods/attach", "pods/portforward", "pods/eviction"] {
        let path = format!("/api/v1/namespaces/default/{}", resource.replace('/', "/used-0/"));
        let words = ["create", "--raw", &path, "-f", "-"];
        refused(as_agent(cluster, "node1", &words, "{}"), "forbidden");
    }
}

/// The images are changed on the disk of their node: the pod that continues from them starts cold, in the same call.
fn forged_archive(cluster: &Cluster, source: &Value, free: &Value, began: &str) {
    let name = free["metadata"]["name"].as_str().unwrap();
    let node = free["status"]["nodeName"].as_str().unwrap();
    let dir = cluster.place.path().join(node).join("torpor/checkpoints/default").join(name);
    damage(&dir);
    cluster.kubectl("admin", &["scale", "statefulset/free", "--replicas=1"], "").unwrap();
    let new = cluster.until("it is back", || {
        let uid = &source["metadata"]["uid"];
        cluster.running("free").into_iter().find(|pod| pod["metadata"]["uid"] != *uid)
    });
    let (first, _, since) = cluster.until("it counts", || cluster.counts(&new));
    assert!(first == 1 && since != began, "{first}");
    assert_eq!(new["status"]["containerStatuses"][0]["restartCount"], 0);
    let free = cluster.get(&["pcp", name]);
    let restored = &free["status"]["restoredContainers"][0];
    assert_eq!(restored["restored"], false, "{free}");
    eprintln!("changed images: {}", restored["message"]);
}
