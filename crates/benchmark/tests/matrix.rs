//! Every cell that this machine can have: both versions of containerd, each with runc, crun, youki and gVisor.
//! `scripts/benchmark-runtimes.sh` builds those that Debian lacks, which takes minutes: TORPOR_LONG=1.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{TestDir, row, success, torpor};
use serde_json::Value;

/// The cells in which containers live and end. Debian's crun does not know the version of the specification that
/// containerd 2.2 asks for, and containerd 1.6 does not understand gVisor's shim of 2026.
const CELLS: [&str; 6] = [
    "containerd-1.6/runc",
    "containerd-1.6/crun",
    "containerd-1.6/youki",
    "containerd-2.2/runc",
    "containerd-2.2/youki",
    "containerd-2.2/runsc",
];

fn assert_ok(results: &Value, benchmark: &str, target: &str) {
    let row = row(results, benchmark, target);
    assert_eq!(row["status"], "ok", "{row}");
}

#[test]
fn every_cell_has_values_or_reasons() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: every_cell_has_values_or_reasons (TORPOR_LONG=1 runs it)");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = root.join("scripts/benchmark-runtimes.sh");
    let made = success(&Command::new(script).env("TORPOR_LONG", "1").output().unwrap());
    let endpoints = fs::read_to_string(made.lines().last().unwrap()).unwrap();
    let test_dir = TestDir::new();
    let settings = "runs: 1\nwarmup: 0\neffort: 0.05\nscale: [3]\nmemory: [8]\npatience: 60";
    test_dir.config(&format!("{settings}\ncriu: {}\n{endpoints}", torpor().display()));
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    for row in results["rows"].as_array().unwrap() {
        let told = row["status"] == "ok" || row["reason"].is_string();
        assert!(told, "every cell has a value or a reason: {row}");
    }
    // Whose figures these are is told of every cell.
    for target in results["targets"].as_array().unwrap() {
        let name = target["name"].as_str().unwrap();
        let runtime = name.rsplit('/').next().unwrap();
        assert!(target["runtime"].as_str().unwrap().contains(runtime), "{target}");
        assert!(target["digests"].as_object().unwrap().len() >= 2, "{target}");
        let shim = if runtime == "runsc" { "runsc-v1" } else { "runc-v2" };
        let mut programs = target["digests"].as_object().unwrap().keys();
        assert!(
            programs.any(|path| path.ends_with(&format!("/containerd-shim-{shim}"))),
            "{target}"
        );
    }
    for cell in CELLS {
        for name in ["operations.life.total", "performance.syscall.getppid"] {
            assert_ok(&results, name, cell);
        }
        assert_ok(&results, "scalability.containers-3.start", cell);
        for name in ["disk-bind.sequential-write", "disk-bind.random-read"] {
            assert_ok(&results, &format!("performance.{name}"), cell);
        }
    }
    // The kernel is asked whether a limit holds: gVisor puts no limit on the group of a container.
    for name in ["limits.cpu.share", "limits.memory.oom"] {
        let row = row(&results, name, "containerd-2.2/runsc");
        assert!(row["status"] == "invalid" && row["reason"].is_string(), "{row}");
    }
    // What each can do with checkpoints.
    for of in ["container", "container-sealed-8m"] {
        for name in
            ["checkpoint", "checkpoint-pause", "checkpoint-storage", "restore", "restore-answer"]
        {
            assert_ok(&results, &format!("operations.{of}.{name}"), "containerd-2.2/runc");
        }
    }
    assert_ok(&results, "operations.checkpoint-plain-8m.restore", "containerd-2.2/runsc");
    let youki = row(&results, "operations.checkpoint-plain-8m.checkpoint", "containerd-2.2/youki");
    let reason = youki["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("has no checkpoint, and no restore"), "{youki}");
    for cell in CELLS.iter().filter(|&&cell| cell != "containerd-2.2/runc") {
        let row = row(&results, "operations.container.checkpoint", cell);
        assert_eq!(row["status"], "unsupported", "{row}");
    }
    // Each with its reason.
    let sealed = "operations.checkpoint-sealed-8m.checkpoint";
    for (benchmark, cell, reason) in [
        ("operations.container.checkpoint", "containerd-1.6/runc", "containerd does from 2.0 on"),
        ("operations.container.checkpoint", "containerd-1.6/crun", "containerd does from 2.0 on"),
        ("operations.container.checkpoint", "containerd-1.6/youki", "containerd does from 2.0 on"),
        (
            "operations.container.checkpoint",
            "containerd-2.2/runsc",
            "the shim of this runtime makes no checkpoints",
        ),
        (
            "operations.container.checkpoint",
            "containerd-2.2/youki",
            "this OCI runtime has no such command",
        ),
        ("operations.life.total", "containerd-2.2/crun", "older versions of the specification"),
        ("operations.life.total", "containerd-1.6/runsc", "newer versions of the endpoint only"),
        (sealed, "containerd-1.6/crun", "has no checkpoint, and no restore"),
        (sealed, "containerd-2.2/runsc", "gVisor checkpoints by itself, and does not seal"),
    ] {
        let row = row(&results, benchmark, cell);
        assert_eq!(row["status"], "unsupported", "{row}");
        assert!(row["reason"].as_str().unwrap().contains(reason), "{row}");
    }
    test_dir.assert_clean();
}
