//! What helm makes of the chart.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::cluster::{is_long, root};

/// The Kubernetes that the chart is for.
const VERSION: [&str; 2] = ["--kube-version", "1.34.4"];

/// The chart.
pub fn place() -> PathBuf {
    root().join("crates/kubernetes/chart")
}

/// The program helm, where it was built, or can be.
pub fn helm(test: &str) -> Option<PathBuf> {
    if is_long() {
        let mut build = Command::new(root().join("scripts/kubernetes/build.sh"));
        let built = build.arg("--helm").stdin(Stdio::null()).stdout(Stdio::null()).status();
        assert!(built.unwrap().success());
    }
    let helm = root().join("target/kubernetes/bin/helm");
    if !helm.exists() {
        eprintln!(
            "{test}: skipped, since there is no helm: scripts/kubernetes/build.sh --helm builds it"
        );
        return None;
    }
    Some(helm)
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {} {}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// The objects in a text, each as it is written there, whatever their order.
fn objects(all: &str) -> Vec<String> {
    let lines = all.lines().filter(|line| !line.starts_with("# Source: "));
    let text: Vec<&str> = lines.map(str::trim_end).collect();
    let parts = format!("\n{}\n", text.join("\n"));
    let mut objects: Vec<String> = parts
        .split("\n---\n")
        .map(|object| object.trim().to_owned())
        .filter(|object| !object.is_empty())
        .collect();
    objects.sort();
    objects
}

#[test]
fn helm_installs_what_the_command_prints() {
    let Some(helm) = helm("helm_installs_what_the_command_prints") else { return };
    let chart = place();
    let kinds = [
        ("torpor:latest", ""),
        ("example.org/torpor:1", "dir:/mnt/torpor"),
        ("localhost:5000/torpor:2", "s3://bucket/torpor"),
    ];
    for (image, store) in kinds {
        let rendered = said(
            Command::new(&helm)
                .args(["template", "torpor"])
                .arg(&chart)
                .arg("--include-crds")
                .args(VERSION)
                .args(["--set", &format!("image={image},store={store}")]),
        );
        let printed = said(
            Command::new(env!("CARGO_BIN_EXE_torpor"))
                .args(["kubernetes", "manifests", "--image", image])
                .args(["--store", store]),
        );
        assert!(objects(&printed).len() > 20);
        assert_eq!(objects(&rendered), objects(&printed), "{image} {store}");
    }
    said(Command::new(&helm).args(["lint", "--strict"]).arg(&chart).args(VERSION));
    let mut old = Command::new(&helm);
    old.args(["template", "torpor"]).arg(&chart).args(["--kube-version", "1.33.0"]);
    assert!(!old.output().unwrap().status.success(), "an older Kubernetes is refused");
}
