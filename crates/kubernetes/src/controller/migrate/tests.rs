//! A pod of a Deployment that moves, with a cluster that does what it is told.

use super::*;
use crate::checkpoint::{begun, ready, set, target_ready};
use crate::pod::template_hash;

const NOW: &str = "2026-01-01T00:00:30Z";

/// A pod of a Deployment on node1 that is to move, and what has come of it by now.
struct Move {
    migration: Value,
    pods: Vec<Value>,
    checkpoints: Vec<Value>,
}

impl Move {
    fn new(kind: &str) -> Self {
        let source = json!({
            "metadata": {
                "namespace": "a", "name": "web-x", "uid": "s",
                "labels": { "app": "web", "pod-template-hash": "1" },
                "ownerReferences": [{ "uid": "o", "kind": kind, "controller": true }],
            },
            "spec": {
                "runtimeClassName": "torpor", "nodeName": "node1",
                "containers": [{ "name": "c", "image": "i" }],
            },
            "status": { "phase": "Running" },
        });
        let migration = json!({
            "metadata": { "namespace": "a", "name": "m", "uid": "0123456789" },
            "spec": { "podName": "web-x" },
        });
        Self { migration, pods: vec![source], checkpoints: Vec::new() }
    }

    fn actions(&self) -> Vec<Action> {
        let all = std::slice::from_ref(&self.migration);
        decide(all, &self.pods, &self.checkpoints, time::parse(NOW).unwrap())
    }

    /// Takes steps until nothing is to be done, as the API server and the controller would.
    fn settle(&mut self) {
        for _ in 0..20 {
            let actions = self.actions();
            if actions.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| self.carry_out(action));
        }
        panic!("it does not settle: {:?}", self.actions());
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Phase { migration } => self.migration = migration,
            Action::Order { mut object } => {
                object["metadata"]["uid"] = json!("c");
                self.checkpoints.push(object);
            }
            Action::Create { mut pod, like } => {
                let named = self.migration["spec"]["targetNode"].is_string();
                assert_eq!(like, if named { "" } else { "node1" });
                pod["metadata"]["uid"] = json!("t");
                self.pods.push(pod);
            }
            Action::Reserve { pod, .. } => {
                self.checkpoints[0]["status"]["claimedBy"] =
                    json!({ "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"] });
            }
            Action::Assign { .. } => {
                self.checkpoints[0]["metadata"]["labels"][NODE_LABEL] = json!("node1");
            }
            Action::Delete { pod, .. } => {
                self.pods.retain(|one| one["metadata"]["uid"] != pod["metadata"]["uid"]);
            }
            Action::Remove { .. } => self.checkpoints.clear(),
            Action::Adopt { source, .. } => {
                self.pods.retain(|one| one["metadata"]["uid"] != source["metadata"]["uid"]);
            }
            other => panic!("{other:?}"),
        }
    }

    fn phase(&self) -> &str {
        text(&self.migration, "/status/phase")
    }

    fn names(&self) -> Vec<&str> {
        self.pods.iter().map(|pod| text(pod, "/metadata/uid")).collect()
    }

    /// The source has been saved.
    fn saved(&mut self) {
        let claimed = self.checkpoints[0]["status"]["claimedBy"].take();
        let mut status = begun(&self.pods[0], "node1");
        status["claimedBy"] = claimed;
        status["checkpointedContainers"] = json!([{ "name": "c" }]);
        self.checkpoints[0]["status"] = status;
        set(&mut self.checkpoints[0], target_ready());
        set(&mut self.checkpoints[0], ready(true, "CheckpointCompleted", ""));
    }

    /// The target has begun.
    fn began(&mut self, restored: bool, is_ready: &str) {
        self.checkpoints[0]["status"]["restoredContainers"] =
            json!([{ "name": "c", "podUID": "t", "restored": restored }]);
        self.pods[1]["status"] = json!({
            "phase": "Running",
            "containerStatuses": [{ "name": "c", "state": { "running": {} } }],
            "conditions": [{ "type": "Ready", "status": is_ready }],
        });
    }

    /// As far as the source is saved only when the target waits for it.
    fn until_running(&mut self) {
        self.settle();
        assert_eq!((self.phase(), self.names()), ("Scheduling", vec!["s", "t"]));
        self.pods[1]["spec"]["nodeName"] = json!("node2");
        self.settle();
        assert_eq!(
            (self.phase(), text(&self.migration, "/status/targetNode")),
            ("Scheduled", "node2")
        );
        assert!(self.checkpoints[0]["metadata"]["labels"][NODE_LABEL].is_null(), "too early");
        set(&mut self.checkpoints[0], target_ready());
        self.settle();
        assert_eq!(self.phase(), "TargetReady");
        assert_eq!(self.checkpoints[0]["metadata"]["labels"][NODE_LABEL], "node1");
        self.saved();
        self.settle();
        assert_eq!((self.phase(), self.names()), ("Running", vec!["s", "t"]));
    }
}

#[test]
fn the_source_ends_when_the_target_runs_and_not_before() {
    let mut scene = Move::new("ReplicaSet");
    scene.until_running();
    scene.began(true, "False");
    scene.settle();
    assert_eq!(scene.names(), ["s", "t"], "its owner would let go of the target");
    scene.began(true, "True");
    scene.settle();
    assert_eq!((scene.phase(), scene.names()), ("Succeeded", vec!["t"]));
    // Nothing else tells those who had a connection to it.
    assert_eq!(text(&scene.migration, "/status/message"), CONNECTIONS);
}

#[test]
fn the_target_is_the_same_elsewhere_and_never_starts_cold() {
    let mut scene = Move::new("ReplicaSet");
    scene.settle();
    let target = &scene.pods[1];
    assert_eq!(template_hash(target), template_hash(&scene.pods[0]));
    assert_eq!(target["metadata"]["annotations"][RESTORE_POLICY], "Always");
    assert!(target["metadata"]["labels"]["app"].is_null(), "its owner must not see it yet");
    assert!(target["spec"]["nodeName"].is_null());
    let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
                 /nodeSelectorTerms/0/matchFields/0/values/0";
    assert_eq!(text(target, terms), "node1");
}

#[test]
fn what_fails_is_undone_target_first() {
    type Failure = fn(&mut Move);
    let failures: [(&str, Failure); 4] = [
        ("not restored", |scene| scene.began(false, "True")),
        ("has ended", |scene| scene.pods[1]["status"] = json!({ "phase": "Failed" })),
        ("more than", |scene| {
            scene.migration["status"]["startTime"] = json!("2025-12-31T00:00:00Z");
        }),
        ("not saved", |scene| {
            set(&mut scene.checkpoints[0], ready(false, "CheckpointFailed", "x"));
        }),
    ];
    for (expected, failure) in failures {
        let mut scene = Move::new("ReplicaSet");
        scene.until_running();
        failure(&mut scene);
        let mut gone = false;
        while scene.phase() != "Failed" {
            for action in scene.actions() {
                match &action {
                    Action::Delete { pod, .. } => gone = pod["metadata"]["uid"] == "t",
                    Action::Remove { .. } => assert!(gone, "the source goes on too early"),
                    _ => {}
                }
                scene.carry_out(action);
            }
        }
        let message = text(&scene.migration, "/status/message").to_owned();
        assert!(message.contains(expected), "{expected}: {message}");
        assert_eq!(scene.names(), ["s"]);
        assert!(scene.checkpoints.is_empty());
    }
}

#[test]
fn pods_that_cannot_be_there_twice_are_refused() {
    for kind in ["StatefulSet", "Job", "DaemonSet"] {
        let mut scene = Move::new(kind);
        scene.settle();
        assert_eq!((scene.phase(), scene.names()), ("Failed", vec!["s"]));
        assert!(text(&scene.migration, "/status/message").contains(kind));
    }
    let mut scene = Move::new("ReplicaSet");
    scene.pods.clear();
    scene.settle();
    assert_eq!(scene.phase(), "Failed");
}

#[test]
fn few_move_at_a_time() {
    let scene = Move::new("ReplicaSet");
    let all: Vec<Value> = (0..9)
        .map(|n| {
            let mut one = scene.migration.clone();
            one["metadata"]["name"] = json!(format!("m{n}"));
            one
        })
        .collect();
    let actions = decide(&all, &scene.pods, &[], time::parse(NOW).unwrap());
    let begun = actions.iter().filter(|action| {
        matches!(action, Action::Phase { migration }
            if text(migration, "/status/phase") == "Scheduling")
    });
    assert_eq!((begun.count(), actions.len()), (FROM_NODE, 9));
}
