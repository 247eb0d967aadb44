//! Containers that are not like most: with a network of their host, files that nobody may write to, users of their own, or
//! more mounts than others.

use std::fs;

use serde_json::{Value, json};

use super::support::{Host, wait_until};
use super::{Container, agent_apart};

/// Counts in a directory of the bundle that is mounted, since the root file system may be one to read only.
fn counts_in_a_mount(config: &mut Value) {
    let script =
        "i=0; while :; do i=$((i+1)); echo $i >/mnt/new; mv /mnt/new /mnt/count; sleep 0.01; done";
    config["process"]["args"] = json!(["sh", "-c", script]);
    config["root"]["readonly"] = json!(true);
    // Of the bundle, which is another one there.
    let options = ["bind", "rw"];
    let mount =
        json!({ "destination": "/mnt", "type": "bind", "source": "rootfs", "options": options });
    config["mounts"].as_array_mut().unwrap().push(mount);
}

fn without_namespace(config: &mut Value, kind: &str) {
    config["linux"]["namespaces"].as_array_mut().unwrap().retain(|it| it["type"] != kind);
}

#[test]
fn unusual_containers_move() {
    type Changes = fn(&mut Value);
    let kinds: [(&str, Changes); 4] = [
        ("the network of the host", |config| without_namespace(config, "network")),
        ("a root file system to read only", |config| counts_in_a_mount(config)),
        ("users of its own", |config| {
            config["linux"]["namespaces"].as_array_mut().unwrap().push(json!({ "type": "user" }));
            let all = json!([{ "containerID": 0, "hostID": 0, "size": 65536 }]);
            (config["linux"]["uidMappings"], config["linux"]["gidMappings"]) = (all.clone(), all);
        }),
        ("many mounts", |config| {
            let mounts = config["mounts"].as_array_mut().unwrap();
            mounts.extend((0..60).map(|number| {
                json!({ "destination": format!("/many/{number}"), "type": "tmpfs", "source": "tmpfs",
                    "options": ["nosuid", "size=64k"] })
            }));
        }),
    ];
    for (kind, change) in kinds {
        for mode in ["pre-copy", "pipelined", "hybrid"] {
            let container = Container::start(change);
            let (here, there) = (Host::new(), container.agent());
            let before = container.count();
            let report = container.moves(&here, mode, &there.address);
            let report = match report {
                // Its tasks may not wait for pages that the kernel needs.
                Err(error) if kind.starts_with("users") && mode == "hybrid" => {
                    assert!(error.contains("--mode pipelined"), "{error}");
                    container.goes_on();
                    continue;
                }
                report => report.unwrap_or_else(|e| panic!("{kind}, {mode}: {e}\n{}", there.log())),
            };
            assert!(!there.log().contains("built anew"), "{kind}, {mode}: {}", there.log());
            container.goes_on();
            assert!(container.count() > before, "{kind}, {mode}");
            assert_eq!(container.state(1)["pid"], report["pid"], "{kind}, {mode}");
            assert!(container.listed(0).is_empty(), "{kind}, {mode}");
            container.says(1, "exec", &[&container.id, "true"]);
            container.says(1, "delete", &["--force", &container.id]);
            wait_until("both tidy up", || here.is_clean() && there.is_clean());
        }
    }
}

/// One directory is mounted by itself, and is in another one that is, too: both come, and once.
#[test]
fn volumes_in_each_other_go_along() {
    let volumes = tempfile::tempdir().unwrap();
    let inner = volumes.path().join("data/in");
    fs::create_dir_all(&inner).unwrap();
    let container = Container::start(|config| {
        for (at, source) in [("/in", &*inner), ("/data", inner.parent().unwrap())] {
            let options = ["rbind", "rw"];
            let mount =
                json!({ "destination": at, "type": "bind", "source": source, "options": options });
            config["mounts"].as_array_mut().unwrap().push(mount);
        }
    });
    let allow = ["--allow-volume", volumes.path().to_str().unwrap()];
    let (here, there) = (Host::new(), agent_apart(&container, volumes.path(), &allow));
    container.says(
        0,
        "exec",
        &[&container.id, "sh", "-c", "echo in >/in/file; echo data >/data/file"],
    );
    let with = ["--with-volume", "/in", "--with-volume", "/data"];
    container.moves_with(&here, "pre-copy", &with, &there.address).unwrap();
    let look = "echo more >>/in/file; cat /data/file /data/in/file";
    let seen = container.says(1, "exec", &[&container.id, "sh", "-c", look]);
    assert_eq!(seen, "data\nin\nmore\n");
    assert_eq!(fs::read_to_string(inner.join("file")).unwrap(), "in\n", "it is another one there");
    container.says(1, "delete", &["--force", &container.id]);
}
