//! `kubectl torpor` with a kubectl whose API server is a directory: objects by their paths.
// A test fails by a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

mod sleeper;

use sleeper::write_script;

const PODS: &str = "api/v1/namespaces/a/pods";
const CHECKPOINTS: &str = "apis/torpor.dev/v1alpha1/namespaces/a/podcheckpoints";
/// Keeps what it is to create, and names it `made`.
const KUBECTL: &str = r#"#!/bin/sh
cd "$(dirname "$0")/../server"
case "$1 $2" in
"get --raw")
	place=${3#/}
	if [ -d "$place" ]; then
		printf '{"items":['
		between=
		for file in "$place"/*; do printf %s "$between"; cat "$file"; between=,; done
		printf ']}'
	else
		cat "$place" 2>/dev/null || { echo "Error from server (NotFound): $place not found" >&2; exit 1; }
	fi
	;;
"config view") printf a ;;
"create -o") cat >created; echo '{ "metadata": { "name": "made" } }' ;;
*) exit 2 ;;
esac
"#;

struct Cluster(tempfile::TempDir);

impl Cluster {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        for dir in [bin.clone(), place.path().join("server").join(PODS)] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::create_dir_all(place.path().join("server").join(CHECKPOINTS)).unwrap();
        write_script(&bin.join("kubectl"), KUBECTL);
        symlink(env!("CARGO_BIN_EXE_torpor"), bin.join("kubectl-torpor")).unwrap();
        Self(place)
    }

    fn at(&self, place: &str) -> PathBuf {
        self.0.path().join("server").join(place)
    }

    fn put(&self, list: &str, name: &str, object: &Value) {
        fs::write(self.at(list).join(name), object.to_string()).unwrap();
    }

    fn call(&self, words: &[&str]) -> Output {
        self.call_in(words, &["-n", "a"])
    }

    /// The same in a namespace, or in that of kubectl's context.
    fn call_in(&self, words: &[&str], namespace: &[&str]) -> Output {
        let bin = self.0.path().join("bin");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut call = Command::new(Path::new(&bin).join("kubectl-torpor"));
        call.args(words).args(namespace).env("PATH", path).stdin(Stdio::null()).output().unwrap()
    }

    /// What a call says that succeeds.
    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let output = self.call(words);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// What was created last.
    fn created(&self) -> Value {
        serde_json::from_slice(&fs::read(self.at("created")).unwrap()).unwrap()
    }
}

fn pod() -> Value {
    json!({
        "metadata": {
            "namespace": "a", "name": "web-0", "uid": "u",
            "annotations": { "torpor.dev/restore-from": "made" },
            "ownerReferences": [{ "uid": "o", "controller": true }],
        },
        "spec": { "runtimeClassName": "torpor", "containers": [{ "name": "c", "image": "i" }] },
        "status": { "phase": "Running" },
    })
}

fn checkpoint(holds: &str, reason: &str, message: &str) -> Value {
    json!({
        "metadata": { "namespace": "a", "name": "made" },
        "status": {
            "ownerUID": "o", "index": "", "checkpointedPodTemplate": { "spec": pod()["spec"] },
            "restoredContainers": [{ "name": "c", "restored": true, "podUID": "u" }],
            "conditions": [
                { "type": "Ready", "status": holds, "reason": reason, "message": message },
            ],
        },
    })
}

#[test]
fn a_checkpoint_is_ordered_and_waited_for() {
    let cluster = Cluster::new();
    cluster.put(PODS, "web-0", &pod());
    cluster.put(CHECKPOINTS, "made", &checkpoint("True", "CheckpointCompleted", ""));
    for (words, state, sharing) in [
        (&["checkpoint", "web-0"][..], "Running", Value::Null),
        (&["checkpoint", "web-0", "--stop"][..], "Stopped", Value::Null),
        (&["checkpoint", "web-0", "--shared"][..], "Running", json!("Shared")),
    ] {
        assert_eq!(cluster.says(words), "made");
        let order = cluster.created();
        assert_eq!(order["kind"], "PodCheckpoint");
        assert_eq!(order["metadata"]["namespace"], "a");
        assert_eq!(order["spec"]["sourcePod"], json!({ "name": "web-0" }));
        assert_eq!(order["spec"]["postCheckpointState"], state, "{words:?}");
        assert_eq!(order["spec"]["sharing"], sharing, "{words:?}");
    }
    cluster.put(CHECKPOINTS, "made", &checkpoint("False", "CheckpointFailed", "no disk"));
    let failed = cluster.call(&["checkpoint", "web-0"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("made: no disk"), "{said}");
    let missing = cluster.call(&["checkpoint", "web-1"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("not found"), "{missing:?}");
}

#[test]
fn the_namespace_is_that_of_the_context() {
    let cluster = Cluster::new();
    cluster.put(PODS, "web-0", &pod());
    cluster.put(CHECKPOINTS, "made", &checkpoint("True", "CheckpointCompleted", ""));
    let made = cluster.call_in(&["checkpoint", "web-0", "--stop"], &[]);
    assert!(made.status.success(), "{made:?}");
    assert_eq!(cluster.created()["metadata"]["namespace"], "a");
    let other = cluster.call_in(&["checkpoint", "web-0", "--stop"], &["-n", "b"]);
    assert!(!other.status.success(), "{other:?}");
}

#[test]
fn a_pod_is_made_that_asks_for_a_checkpoint() {
    let cluster = Cluster::new();
    cluster.put(CHECKPOINTS, "made", &checkpoint("True", "CheckpointCompleted", ""));
    assert_eq!(cluster.says(&["restore", "made", "--pod", "again"]), "made");
    let made = cluster.created();
    assert_eq!((&made["kind"], &made["metadata"]["name"]), (&json!("Pod"), &json!("again")));
    assert_eq!(made["metadata"]["annotations"], json!({ "torpor.dev/restore-request": "made" }));
    assert_eq!(made["spec"], pod()["spec"]);
}

#[test]
fn what_a_pod_continues_from_is_explained() {
    let cluster = Cluster::new();
    cluster.put(PODS, "web-0", &pod());
    cluster.put(CHECKPOINTS, "made", &checkpoint("True", "CheckpointCompleted", ""));
    let said = cluster.says(&["explain", "web-0"]);
    assert!(said.contains("continues from the checkpoint made"), "{said}");
    assert!(said.contains("c: restored"), "{said}");
    let object: Value =
        serde_json::from_str(&cluster.says(&["explain", "web-0", "--json"])).unwrap();
    let lines = object["says"].as_array().unwrap().iter().filter_map(Value::as_str);
    assert_eq!(lines.collect::<Vec<_>>().join("\n"), said);
}
