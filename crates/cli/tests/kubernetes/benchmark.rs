//! The benchmark of runtimes on the nodes of a cluster.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::cluster::{Cluster, cluster, root};

const IMAGE: &str = "docker.io/library/torpor-benchmark:1";
/// What the pod needs of its image, beside the program itself.
const PROGRAMS: [&str; 11] = [
    "bash",
    "ldd",
    "setpriv",
    "unshare",
    "mount",
    "umount",
    "ip",
    "losetup",
    "/usr/lib/cni/bridge",
    "/usr/lib/cni/host-local",
    "/usr/lib/cni/loopback",
];

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout) + &text(&output.stderr)
}

/// Makes the image and gives it to the first node.
fn image(cluster: &Cluster) {
    let (scripts, place) = (root().join("scripts/rootfs"), cluster.place.path());
    let (files, archive) = (place.join("benchmark"), place.join("benchmark.tar"));
    let torpor = env!("CARGO_BIN_EXE_torpor");
    run(Command::new(scripts.join("make")).arg(&files).args(PROGRAMS).arg("runc").arg(torpor));
    fs::create_dir_all(files.join("usr/bin")).unwrap();
    fs::copy("/usr/bin/bash", files.join("bin/bash")).unwrap();
    let entry = format!("#!/bin/bash\nexec {torpor} benchmark \"$@\"\n");
    fs::write(files.join("entry"), entry).unwrap();
    run(Command::new("chmod").arg("755").arg(files.join("entry")));
    run(Command::new(scripts.join("image")).arg(IMAGE).arg(files).arg(&archive).arg("/entry"));
    let socket = place.join("node1/c.sock");
    let ctr = root().join("target/kubernetes/bin/ctr");
    run(Command::new(ctr)
        .arg("-a")
        .arg(socket)
        .args(["-n", "k8s.io", "images", "import"])
        .arg(archive));
}

#[test]
fn the_benchmark_measures_on_a_node() {
    let Some(cluster) = cluster("the_benchmark_measures_on_a_node") else { return };
    image(&cluster);
    cluster.kubectl("admin", &["label", "node", "node1", "bench=yes"], "").unwrap();
    let place = cluster.place.path();
    let containerd = root().join("target/kubernetes/bin/containerd").canonicalize().unwrap();
    let config = json!({
        "runs": 2, "warmup": 0, "effort": 0.05,
        "filters": [
            "operations.container.start", "performance.syscall.*", "operations.sandbox.create",
            "operations.bridge.create",
        ],
        "endpoints": [{
            "name": "node",
            "containerd": format!("/host{}", containerd.display()),
            "handlers": [{ "name": "runc", "binary": "/host/usr/sbin/runc" }],
        }],
    });
    fs::write(place.join("config.yaml"), config.to_string()).unwrap();
    let path = format!("PATH={}:{}", place.join("bin").display(), std::env::var("PATH").unwrap());
    let (out, config) = (place.join("out"), place.join("config.yaml"));
    let said = run(Command::new(place.join("bin/inside"))
        .args(["env", &path, env!("CARGO_BIN_EXE_torpor"), "benchmark", "run"])
        .args(["--kubernetes", "bench=yes", "--namespace", "default", "--image", IMAGE, "--output"])
        .args([&out, &config]));
    let log = fs::read_to_string(out.join("node1/log")).unwrap_or_default();
    let results = fs::read(out.join("node1/results.json")).unwrap_or_default();
    let results: Value = serde_json::from_slice(&results).unwrap_or_default();
    let rows = results["rows"].as_array().unwrap_or_else(|| panic!("{said}{log}"));
    assert!(rows.len() >= 5, "{said}{log}");
    for row in rows {
        // Samples that take longer than a kubelet lets strangers live.
        let samples = row["samples"].as_array().map(Vec::len);
        assert_eq!((row["status"].as_str(), samples), (Some("ok"), Some(2)), "{row}\n{log}");
    }
    assert!(fs::read_to_string(out.join("report.html")).unwrap().contains("node/runc"));
    let made =
        cluster.get(&["jobs,configmaps,pods", "-l", "app.kubernetes.io/name=torpor-benchmark"]);
    assert_eq!(made["items"], json!([]));
}
