//! Pods that the kubelet ends by itself, and what is none of them.

use super::*;

/// An event of the kubelet's: about the container `main` of the pod, or about the node.
fn told(server: &Server, reason: &str, message: &str, ago: i64) {
    let (namespace, object) = match reason {
        "Shutdown" => ("default", json!({ "kind": "Node", "name": "node1" })),
        "Killing" => {
            let field = "spec.containers{main}";
            ("a", json!({ "kind": "Pod", "uid": "old", "fieldPath": field }))
        }
        _ => ("a", json!({ "kind": "Pod", "uid": "old" })),
    };
    let event = json!({
        "metadata": { "namespace": namespace, "name": reason },
        "reason": reason, "message": message, "involvedObject": object,
        "lastTimestamp": time::format(time::now() - ago),
    });
    server.put(&format!("/api/v1/namespaces/{namespace}/events/{reason}"), event);
}

/// A cluster whose kubelet has a configuration, with a pod of node1 that nobody deletes.
fn kubelet(config: Value) -> (Arc<Server>, Arc<Node>, tempfile::TempDir) {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    server.put(POD, pod("old", "node1"));
    let desk = Arc::clone(&server);
    server.also(move |request| match request.path.as_str() {
        "/configz" => {
            assert_eq!(bearer(request), Some("agent:node1"));
            Some(Response::json(&json!({ "kubeletconfig": config })))
        }
        _ => key(&desk, request),
    });
    (server, node1, place)
}

fn soft() -> Value {
    json!({ "evictionSoft": { "memory.available": "1Gi" }, "evictionMaxPodGracePeriod": 20 })
}

fn asked(node: &Arc<Node>) -> Answer {
    node.answer(&Ask::Stop { container: container("old") }).unwrap()
}

const LOW: &str = "The node was low on resource: memory. Threshold quantity: 1Gi, available: 1Mi. ";

#[test]
fn a_pod_that_its_node_evicts_is_saved() {
    let (server, node1, _place) = kubelet(soft());
    let begun = Instant::now();
    told(&server, "Evicted", LOW, 1);
    told(&server, "Killing", "Stopping container main", 0);
    let answer = asked(&node1);
    let Answer::Save { seconds, .. } = &answer else { panic!("{answer:?}") };
    let least = 16_u64.saturating_sub(begun.elapsed().as_secs());
    assert!((least..=18).contains(seconds), "the kubelet gives 20 s, and its pod 30: {seconds}");
    assert_eq!(save(&node1, "old", &answer), Answer::Noted);
    let object = server.get(&path("a", &checkpoint::name_of("web-0", "old"))).unwrap();
    assert!(is_ready(&object));
    assert_eq!(object["metadata"]["labels"][checkpoint::GIVES_WAY], "true");
}

#[test]
fn what_the_api_server_takes_is_time_of_the_pod() {
    let (server, node1, _place) = kubelet(soft());
    told(&server, "Evicted", LOW, 1);
    told(&server, "Killing", "Stopping container main", 0);
    let desk = Arc::clone(&server);
    server.also(move |request| match request.path.as_str() {
        "/configz" => Some(Response::json(&json!({ "kubeletconfig": soft() }))),
        path => {
            if request.method == "POST" && path.ends_with("/podcheckpoints") {
                thread::sleep(Duration::from_secs(2));
            }
            key(&desk, request)
        }
    });
    let answer = asked(&node1);
    let Answer::Save { seconds, .. } = answer else { panic!("{answer:?}") };
    assert!(seconds <= 16, "the kubelet gives 20 s, of which 4 are not for this: {seconds}");
}

#[test]
fn a_pod_whose_node_is_shut_down_is_saved() {
    let config = json!({
        "shutdownGracePeriod": "1m0s", "shutdownGracePeriodCriticalPods": "10s",
    });
    let (server, node1, _place) = kubelet(config);
    let begun = Instant::now();
    // Others went first.
    told(&server, "Shutdown", "Shutdown manager detected shutdown event", 45);
    told(&server, "Killing", "Stopping container main", 0);
    let answer = asked(&node1);
    let Answer::Save { seconds, .. } = answer else { panic!("{answer:?}") };
    let least = 26_u64.saturating_sub(begun.elapsed().as_secs());
    assert!((least..=28).contains(&seconds), "its own grace is the shorter one: {seconds}");
}

#[test]
fn a_container_that_is_only_started_again_is_not_saved() {
    let (server, node1, _place) = kubelet(soft());
    let plain = |why: &str| assert_eq!(asked(&node1), Answer::Plain, "{why}");
    told(&server, "Killing", "Container main failed liveness probe, will be restarted", 0);
    plain("its probe has failed");
    told(&server, "Shutdown", "Shutdown manager detected shutdown cancellation", 5);
    plain("the node is not shut down any more");
    told(
        &server,
        "Evicted",
        "Container main exceeded its local ephemeral storage limit \"1Mi\". ",
        1,
    );
    plain("a pod that has used too much would do so again");
    told(&server, "Evicted", LOW, 3600);
    plain("an eviction that the kubelet has forgotten");
    told(&server, "Evicted", LOW, 1);
    let mut never = server.get(POD).unwrap();
    never["metadata"]["annotations"] = json!({ crate::disruption::SAVE: "Never" });
    server.put(POD, never);
    plain("it is not to be saved");
}

#[test]
fn a_hard_limit_gives_no_time() {
    let (server, node1, _place) = kubelet(json!({ "evictionHard": { "memory.available": "1Gi" } }));
    told(&server, "Evicted", LOW, 0);
    told(&server, "Killing", "Stopping container main", 0);
    assert_eq!(asked(&node1), Answer::Plain);
}

#[test]
fn what_nobody_replaces_is_not_saved() {
    let (server, node1, _place) = kubelet(soft());
    type Change = fn(&mut Value);
    let changes: [Change; 2] = [
        |pod| pod["spec"]["runtimeClassName"] = json!("runc"),
        |pod| pod["metadata"]["ownerReferences"] = json!([]),
    ];
    for change in changes {
        let mut other = pod("old", "node1");
        give_way(&mut other);
        change(&mut other);
        server.put(POD, other);
        assert_eq!(asked(&node1), Answer::Plain);
    }
}
