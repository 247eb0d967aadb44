//! Whose turn it is.

use serde_json::json;

use super::*;
use crate::checkpoint::{begun, new, ready};
use crate::controller::decide::decide;
use crate::machine::tests::machine;
use crate::pod::GATE;

const LIMITS: Limits = Limits { gate: 120, unclaimed: 86_400, used: 600, restores: 2 };
const NOW: &str = "2026-01-01T01:00:00Z";

/// A pod of an index behind the gate. It waits for so long that it would start cold if nothing were there for it.
fn pod(index: &str) -> Value {
    json!({
        "metadata": {
            "namespace": "a", "name": format!("web-{index}"), "uid": format!("new-{index}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": { "apps.kubernetes.io/pod-index": index },
            "ownerReferences": [{ "uid": "o", "controller": true }],
        },
        "spec": {
            "runtimeClassName": "torpor", "schedulingGates": [{ "name": GATE }],
            "containers": [{ "name": "c", "image": "i" }],
        },
        "status": { "phase": "Pending" },
    })
}

/// The checkpoint of the pod before it.
fn saved(pod: &Value) -> Value {
    let mut old = pod.clone();
    old["metadata"]["uid"] = json!(format!("old-{}", text(pod, "/metadata/name")));
    let name = text(pod, "/metadata/name");
    let mut one = new(&old, &format!("c-{name}"), 30);
    one["metadata"]["uid"] = json!(format!("checkpoint-{name}"));
    one["metadata"]["creationTimestamp"] = json!(NOW);
    one["status"] = begun(&old, "node0");
    one["status"]["conditions"] = json!([ready(true, "CheckpointCompleted", "")]);
    one["status"]["completionTime"] = json!(NOW);
    one["status"]["checkpointedContainers"] = json!([{ "name": "c" }]);
    one["status"]["wrappedKey"] = json!("k");
    one["status"]["machine"] = json!(machine("6.12", &["sse2"]));
    one
}

/// What is there.
#[derive(Default)]
struct Cluster {
    pods: Vec<Value>,
    checkpoints: Vec<Value>,
    nodes: Nodes,
}

impl Cluster {
    /// Pods of so many indexes behind the gate, with a checkpoint for each.
    fn of(count: usize) -> Self {
        let pods: Vec<Value> = (0..count).map(|index| pod(&index.to_string())).collect();
        let checkpoints = pods.iter().map(saved).collect();
        Self { pods, checkpoints, nodes: Nodes::default() }
    }

    /// The nodes of these names, alike.
    fn with_nodes(mut self, names: &[&str]) -> Self {
        let node = |name: &&str| {
            let labels = json!({ "kubernetes.io/hostname": name });
            json!({ "metadata": { "name": name, "labels": labels } })
        };
        let alike = |name| (node(name), machine("6.12", &["sse2"]));
        self.nodes = Nodes::of(names.iter().map(alike).collect());
        self
    }

    fn decided(&self) -> Vec<Action> {
        let Self { pods, checkpoints, nodes } = self;
        let world =
            World { pods, checkpoints, policies: &[], migrations: &[], drained: &[], nodes };
        decide(world, LIMITS, time::parse(NOW).unwrap())
    }

    /// What a controller does that knows nothing of before, as far as objects show it: the names of the pods that are let go,
    /// and of those that are told to wait.
    fn turn(&mut self) -> (Vec<String>, Vec<String>) {
        let (mut let_go, mut told) = (Vec::new(), Vec::new());
        for action in self.decided() {
            let (pod, checkpoint) = match &action {
                Action::Claim { pod, checkpoint } | Action::Queue { pod, checkpoint } => {
                    (pod.clone(), checkpoint)
                }
                // That of a pod that has failed.
                Action::Release { checkpoint } => {
                    let is_it = |one: &&mut Value| **one == *checkpoint;
                    let free = self.checkpoints.iter_mut().find(is_it).unwrap();
                    free["status"]["claimedBy"] = Value::Null;
                    continue;
                }
                other => panic!("{other:?}"),
            };
            let (name, uid) = (text(&pod, "/metadata/name"), text(&pod, "/metadata/uid"));
            let its = text(checkpoint, "/metadata/name").to_owned();
            assert_eq!(its, format!("c-{name}"), "it is of another one");
            let of_name = |one: &&mut Value| text(one, "/metadata/name") == its;
            let claimed = self.checkpoints.iter_mut().find(of_name).unwrap();
            claimed["status"]["claimedBy"] = json!({ "name": name, "uid": uid });
            let changed = self.pod(name);
            match action {
                Action::Claim { .. } => {
                    *changed = let_go_at(changed.clone(), &its, NOW);
                    let_go.push(name.to_owned());
                }
                _ => {
                    changed["metadata"]["annotations"] = json!({ WAITS_SINCE: NOW });
                    told.push(name.to_owned());
                }
            }
        }
        (let_go, told)
    }

    fn pod(&mut self, name: &str) -> &mut Value {
        self.pods.iter_mut().find(|pod| text(pod, "/metadata/name") == name).unwrap()
    }

    /// The pods that are let go next, when all that were told are known.
    fn next(&mut self) -> Vec<String> {
        let (let_go, told) = self.turn();
        assert!(told.is_empty(), "they know: {told:?}");
        let_go
    }
}

/// A pod as it is after its gate was opened.
fn let_go_at(mut pod: Value, checkpoint: &str, when: &str) -> Value {
    pod["spec"]["schedulingGates"] = json!([]);
    pod["metadata"]["annotations"] = json!({ RESTORE_FROM: checkpoint, LET_GO: when });
    pod
}

#[test]
fn few_are_let_go_at_a_time_and_each_gets_its_own_in_the_end() {
    let mut cluster = Cluster::of(5);
    let (let_go, told) = cluster.turn();
    assert_eq!((let_go.len(), told.len()), (2, 3), "{let_go:?} {told:?}");
    // They have waited for longer than anybody waits for a checkpoint, and none of them starts cold.
    assert_eq!(cluster.decided(), [], "they are told once");
    let mut done = let_go;
    while done.len() < 5 {
        // The first one that was let go runs; or all of its containers have begun, and its kubelet has not said so yet.
        let first = done[done.len() - 2].clone();
        if done.len() % 2 == 0 {
            cluster.pod(&first)["status"]["phase"] = json!("Running");
        } else {
            let name = format!("c-{first}");
            let uid = cluster.pod(&first)["metadata"]["uid"].clone();
            let all = &mut cluster.checkpoints;
            let its = all.iter_mut().find(|one| text(one, "/metadata/name") == name).unwrap();
            let began = json!({ "name": "c", "podUID": uid, "restored": false });
            its["status"]["restoredContainers"] = json!([began]);
        }
        let next = cluster.next();
        assert_eq!(next.len(), 1, "{next:?} after {done:?}");
        done.extend(next);
    }
    done.sort();
    assert_eq!(done, ["web-0", "web-1", "web-2", "web-3", "web-4"]);
}

#[test]
fn a_pod_that_cannot_be_restored_soon_holds_no_place() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, bool); 12] = [
        ("the scheduler has not looked yet", |_| {}, true),
        (
            "it was gated a moment ago",
            |pod| {
                let gated = json!({ "type": "PodScheduled", "status": "False", "reason": "SchedulingGated" });
                pod["status"]["conditions"] = json!([gated]);
            },
            true,
        ),
        ("it has a node", |pod| pod["spec"]["nodeName"] = json!("node1"), true),
        (
            "its container is made",
            |pod| {
                let waits = json!({ "waiting": { "reason": "ContainerCreating" } });
                pod["status"]["containerStatuses"] = json!([{ "name": "c", "state": waits }]);
            },
            true,
        ),
        (
            "its restore is tried again",
            |pod| {
                let waits = json!({ "waiting": { "reason": "RunContainerError" } });
                pod["status"]["containerStatuses"] = json!([{ "name": "c", "state": waits }]);
            },
            true,
        ),
        (
            "there is no room",
            |pod| {
                let none =
                    json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable" });
                pod["status"]["conditions"] = json!([none]);
            },
            false,
        ),
        (
            "there is no image",
            |pod| {
                let waits = json!({ "waiting": { "reason": "ImagePullBackOff" } });
                pod["status"]["containerStatuses"] = json!([{ "name": "c", "state": waits }]);
            },
            false,
        ),
        (
            "an init container fails",
            |pod| {
                let waits = json!({ "waiting": { "reason": "CrashLoopBackOff" } });
                pod["status"]["initContainerStatuses"] = json!([{ "name": "i", "state": waits }]);
            },
            false,
        ),
        ("it was deleted", |pod| pod["metadata"]["deletionTimestamp"] = json!(NOW), false),
        ("it has failed", |pod| pod["status"]["phase"] = json!("Failed"), false),
        ("it has ended", |pod| pod["status"]["phase"] = json!("Succeeded"), false),
        (
            "its checkpoint is gone, so that it starts cold",
            |pod| pod["metadata"]["annotations"][RESTORE_FROM] = json!("none"),
            false,
        ),
    ];
    for (what, change, holds) in cases {
        let mut cluster = Cluster::of(3);
        assert_eq!(cluster.turn().0.len(), 2);
        change(cluster.pod("web-0"));
        assert_eq!(cluster.next().is_empty(), holds, "{what}");
    }
}

#[test]
fn a_pod_that_is_gone_holds_no_place() {
    let mut cluster = Cluster::of(3);
    assert_eq!(cluster.turn().0, ["web-0", "web-1"]);
    cluster.pods.remove(0);
    let actions = cluster.decided();
    let claims = |action: &Action| matches!(action, Action::Claim { pod, .. } if text(pod, "/metadata/name") == "web-2");
    assert!(actions.iter().any(claims), "{actions:?}");
}

#[test]
fn nobody_holds_a_place_for_good() {
    for (when, holds) in [
        (NOW, true),
        ("2026-01-01T00:57:01Z", true),
        ("2026-01-01T00:57:00Z", false),
        // It was let go by a controller of before, and is an hour old.
        ("", false),
    ] {
        let mut cluster = Cluster::of(3);
        assert_eq!(cluster.turn().0.len(), 2);
        cluster.pod("web-0")["metadata"]["annotations"][LET_GO] = json!(when);
        assert_eq!(cluster.next().is_empty(), holds, "{when:?}");
    }
}

#[test]
fn the_highest_priority_goes_first_and_then_the_oldest() {
    let mut cluster = Cluster::of(5);
    for (name, priority, made) in [
        ("web-0", 0, "2026-01-01T00:00:09Z"),
        ("web-1", 0, "2026-01-01T00:00:01Z"),
        ("web-2", 7, "2026-01-01T00:00:08Z"),
        ("web-3", 7, "2026-01-01T00:00:02Z"),
        ("web-4", -7, "2026-01-01T00:00:00Z"),
    ] {
        let pod = cluster.pod(name);
        pod["spec"]["priority"] = json!(priority);
        pod["metadata"]["creationTimestamp"] = json!(made);
    }
    let (mut order, _) = cluster.turn();
    loop {
        for name in &order {
            cluster.pod(name)["status"]["phase"] = json!("Running");
        }
        let next = cluster.next();
        if next.is_empty() {
            break;
        }
        order.extend(next);
    }
    assert_eq!(order, ["web-3", "web-2", "web-1", "web-0", "web-4"]);
}

#[test]
fn no_node_restores_more_than_a_few_whichever_is_chosen() {
    let mut cluster = Cluster::of(9).with_nodes(&["node1", "node2", "node3"]);
    let place = |cluster: &mut Cluster, names: &[String], nodes: &[&str]| {
        for (name, node) in names.iter().zip(nodes) {
            cluster.pod(name)["spec"]["nodeName"] = json!(node);
        }
    };
    // As long as they have no node, both may go to the same one.
    let (first, _) = cluster.turn();
    assert_eq!(first.len(), 2);
    assert!(cluster.next().is_empty());
    // They have gone to two: on each node there is one more place, and it is not known which one the next pod takes.
    place(&mut cluster, &first, &["node1", "node2"]);
    let second = cluster.next();
    assert_eq!(second.len(), 1);
    place(&mut cluster, &second, &["node3"]);
    let third = cluster.next();
    assert_eq!(third.len(), 1);
    // A node is full: nobody is let go who may go there.
    place(&mut cluster, &third, &["node1"]);
    assert!(cluster.next().is_empty());
    // Who goes to another one in any case need not wait for it.
    let elsewhere = json!({ "kubernetes.io/hostname": "node2" });
    cluster.pod("web-8")["spec"]["nodeSelector"] = elsewhere;
    assert_eq!(cluster.next(), ["web-8"]);
    place(&mut cluster, &["web-8".to_owned()], &["node2"]);
    // A node that takes no pods (it was cordoned, or is not ready) holds nobody up, whatever waits there.
    let mut cluster = cluster.with_nodes(&["node3"]);
    assert_eq!(cluster.next().len(), 1);
    // Where nodes are not known, it may be any of them.
    assert!(cluster.with_nodes(&[]).next().is_empty());
}

#[test]
fn snapshots_take_places_and_cold_starts_do_not() {
    let mut cluster = Cluster::of(4);
    let policy = json!({
        "metadata": { "namespace": "a", "name": "p" },
        "spec": { "selector": { "matchExpressions": [
            { "key": "apps.kubernetes.io/pod-index", "operator": "Exists" },
        ] } },
    });
    let mut snapshot = cluster.checkpoints[0].clone();
    snapshot["spec"]["sharing"] = json!("Shared");
    snapshot["spec"]["postCheckpointState"] = json!("Running");
    snapshot["metadata"]["labels"] = json!({ crate::checkpoint::NODE_LABEL: "node0" });
    cluster.checkpoints = vec![snapshot];
    let decided = |cluster: &Cluster, policies: &[Value]| {
        let Cluster { pods, checkpoints, nodes } = cluster;
        let world = World { pods, checkpoints, policies, migrations: &[], drained: &[], nodes };
        decide(world, LIMITS, time::parse(NOW).unwrap())
    };
    let actions = decided(&cluster, std::slice::from_ref(&policy));
    let is_warm = |action: &Action| matches!(action, Action::Warm { .. });
    let is_told = |action: &Action| matches!(action, Action::Queue { .. });
    assert!(actions[..2].iter().all(is_warm) && actions[2..4].iter().all(is_told), "{actions:?}");
    for pod in &mut cluster.pods {
        pod["metadata"]["annotations"] = json!({ WAITS_SINCE: NOW });
    }
    let actions = decided(&cluster, &[policy]);
    assert!(!actions.iter().any(is_told), "{actions:?}");
    // What nobody restores takes no place.
    cluster.checkpoints.clear();
    let actions = decided(&cluster, &[]);
    assert!(actions.len() == 4 && actions.iter().all(|one| matches!(one, Action::Ungate { .. })));
}

#[test]
fn nodes_are_asked_for_only_if_it_depends_on_them() {
    let gated = pod("0");
    let open = let_go_at(pod("1"), "c", NOW);
    let mut bound = open.clone();
    bound["spec"]["nodeName"] = json!("node1");
    let mut runs = bound.clone();
    runs["status"]["phase"] = json!("Running");
    for (pods, asks) in [
        (vec![gated.clone()], false),
        (vec![gated.clone(), open], false),
        (vec![gated.clone(), runs], false),
        (vec![bound.clone()], false),
        (vec![gated, bound], true),
    ] {
        assert_eq!(ask_for_nodes(&pods), asks, "{pods:?}");
    }
}
