//! A containerd 2 whose configuration does not allow restores: what it says of itself is the reason in the cell. Debian has none; one
//! that `scripts/benchmark-runtimes.sh` has built is taken, or built first with TORPOR_LONG=1.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::daemon::{Bridged, Daemon};
use common::{TestDir, left_out, row, samples, success, torpor};

/// The containerd of the matrix.
fn built() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    if std::env::var_os("TORPOR_LONG").is_some() {
        let mut script = Command::new(root.join("scripts/benchmark-runtimes.sh"));
        success(&script.env("RUNTIMES", "containerd").output().unwrap());
    }
    Some(root.join("target/benchmark-runtimes/bin/containerd")).filter(|file| file.is_file())
}

#[test]
fn a_containerd_that_forbids_restores_says_so() {
    let dirs = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"].map(Path::new);
    let plugins = dirs.into_iter().find(|dir| dir.join("bridge").exists());
    let (Some(containerd), Some(plugins)) = (built(), plugins) else {
        return left_out(
            "a_containerd_that_forbids_restores_says_so",
            "containerd 2 and CNI plugins",
        );
    };
    let test_dir = TestDir::new();
    let bin = test_dir.path("bin");
    fs::create_dir(&bin).unwrap();
    // It looks for a `criu` itself, as its OCI runtime does; its own shim lies beside it.
    symlink(torpor(), bin.join("criu")).unwrap();
    symlink(
        containerd.with_file_name("containerd-shim-runc-v2"),
        bin.join("containerd-shim-runc-v2"),
    )
    .unwrap();
    let bridged = Bridged { plugins, bin: &bin };
    let daemon = Daemon::start(test_dir.path("daemon"), &containerd, Some(&bridged));
    daemon.import();
    test_dir.config(&format!(
        "runs: 1\nwarmup: 0\nmemory: [8]\nfilters: [operations.container.checkpoint*, operations.container.restore*]\n\
         criu: {}\nendpoints:\n- name: here\n  socket: {}\n  cgroup_parent: /{}\n  handlers: [{{name: runc}}]\n",
        torpor().display(),
        daemon.socket(),
        daemon.group,
    ));
    success(&daemon.inside(&test_dir.run()).output().unwrap());
    let results = test_dir.results();
    for name in ["checkpoint", "checkpoint-pause", "checkpoint-frozen", "checkpoint-bytes"] {
        let row = row(&results, &format!("operations.container.{name}"), "here/runc");
        assert_eq!((row["status"].as_str(), samples(row)), (Some("ok"), 1), "{row}");
    }
    for name in ["restore", "restore-answer"] {
        let row = row(&results, &format!("operations.container.{name}"), "here/runc");
        let reason = row["reason"].as_str().unwrap();
        assert_eq!(row["status"], "unsupported", "{row}");
        // Its own words, and which option that is.
        for part in
            ["is disabled by configuration", "enable_experimental_restore_via_create = true"]
        {
            assert!(reason.contains(part), "{row}");
        }
    }
    test_dir.assert_clean();
}
