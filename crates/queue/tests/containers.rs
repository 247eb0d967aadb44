//! Jobs that are containers: preempted and brought back with their files, and contained.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::Daemon;
use common::pair::pair;
use serde_json::{Value, json};

/// Counts in a file of the container's own, and removes one that its layers have; ends when it is told to.
const SCRIPT: &str = "trap 'may_end=yes' USR1; rm -r /etc; mkdir /etc; i=0; while [ $i -lt 60 ]; do echo $i | tee -a /count; \
                      i=$((i+1)); sleep 0.03; done; until [ \"$may_end\" ]; do sleep 0.05; done; \
                      echo end $(wc -l </count) $(ls -A /etc | wc -l) >&2; exit 5";

/// What `SCRIPT` writes.
fn counted() -> String {
    (0..60).map(|i| format!("{i}\n")).collect()
}

fn script(name: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    Command::new(root.join("scripts/rootfs").join(name))
}

/// What a job has written to its standard error.
fn errors(daemon: &Daemon, id: u64) -> String {
    std::fs::read_to_string(daemon.data().join(format!("jobs/{id}/err"))).unwrap()
}

/// Lets a container end that says so much before it waits for that.
fn let_end(daemon: &Daemon, id: u64, last: &str) {
    daemon.wait_for_output(id, last);
    let mut signal = Command::new("curl");
    signal.args(["--silent", "--show-error", "--fail", "--request", "POST", "--unix-socket"]);
    signal.arg(daemon.dir.path().join("socket"));
    signal.arg(format!("http://q/v1/jobs/{id}/signal?signal=10"));
    let output = signal.output().unwrap();
    assert!(output.status.success(), "{}", common::shown(&output));
}

/// A bundle as `runc spec` makes it, with busybox in it.
fn bundle(dir: &Path) -> PathBuf {
    let bundle = dir.join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    assert!(script("make").arg(bundle.join("rootfs")).status().unwrap().success());
    std::fs::create_dir_all(bundle.join("rootfs/etc")).unwrap();
    std::fs::write(bundle.join("rootfs/etc/lower"), "lower").unwrap();
    assert!(Command::new("runc").arg("spec").current_dir(&bundle).status().unwrap().success());
    let path = bundle.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["root"]["readonly"] = json!(false);
    config["process"]["args"] = json!(["sh", "-c", SCRIPT]);
    std::fs::write(&path, config.to_string()).unwrap();
    bundle
}

/// Lets a job that runs `SCRIPT` give way `times` times; it must end as if it had not.
fn preempted(daemon: &Daemon, id: u64, times: u32) {
    for round in 1..=times {
        daemon.wait_for_output(id, &format!("\n{}\n", round * 10));
        daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
        assert_eq!(daemon.job(id)["state"], "preempted");
        daemon.ok(&["resume", &id.to_string()]);
    }
    let_end(daemon, id, "\n59\n");
    let job = daemon.wait_for(id, "failed");
    assert_eq!((&job["exit"], &job["preemptions"]), (&json!(5), &json!(times)));
    assert_eq!(daemon.output(id), counted());
    assert_eq!(errors(daemon, id), "end 60 0\n");
}

#[test]
fn a_bundle_gives_way_and_keeps_its_files() {
    let daemon = Daemon::start(&[]);
    let bundle = bundle(daemon.dir.path());
    let bundle = bundle.to_str().unwrap();
    let id: u64 = daemon.ok(&["submit", "--bundle", bundle]).trim().parse().unwrap();
    preempted(&daemon, id, 3);
    // All of it was in its cgroup each time.
    assert!(daemon.job(id)["note"].is_null(), "{}", daemon.show(id));
    // What it has changed is its own.
    assert_eq!(std::fs::read(format!("{bundle}/rootfs/etc/lower")).unwrap(), b"lower");
    assert!(!Path::new(bundle).join("rootfs/count").exists());
}

#[test]
fn a_bundle_goes_on_from_its_checkpoint_when_all_of_it_is_killed() {
    let config = json!({ "shortest_interval": 200, "mean_time_between_failures": 1000 });
    let mut daemon = Daemon::configured(&config, &[]);
    let bundle = bundle(daemon.dir.path());
    let id = daemon.ok(&["submit", "--bundle", bundle.to_str().unwrap()]).trim().parse().unwrap();
    daemon.wait_for_output(id, "\n10\n");
    common::until("a checkpoint", || daemon.show(id)["checkpoint"].as_u64());
    daemon.kill();
    for pid in common::shepherds(&daemon.data()) {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    common::until("nothing is left", || common::shepherds(&daemon.data()).is_empty().then_some(()));
    daemon.launch();
    let_end(&daemon, id, "\n59\n");
    daemon.wait_for(id, "failed");
    assert_eq!(daemon.output(id), counted());
    assert_eq!(errors(&daemon, id), "end 60 0\n");
}

#[test]
fn a_bundle_goes_on_from_the_store_when_its_machine_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().join("store").display());
    let bundle = bundle(dir.path());
    let mut lost = Daemon::configured(&json!({ "lease": 500 }), &["--store", &store]);
    let id = lost.ok(&["submit", "--bundle", bundle.to_str().unwrap()]).trim().parse().unwrap();
    lost.wait_for_output(id, "\n10\n");
    lost.ok(&["preempt", &id.to_string()]);
    common::until("it is stored", || lost.show(id)["stored"].as_u64());
    lost.kill();
    drop(lost);
    let daemon = Daemon::start(&["--store", &store]);
    let list = daemon.ok(&["adopt"]);
    let name = list.split_whitespace().next().unwrap();
    let here = daemon.ok(&["adopt", name]).trim().parse().unwrap();
    let_end(&daemon, here, "\n59\n");
    let job = daemon.wait_for(here, "failed");
    assert_eq!(job["exit"], 5, "{}", daemon.show(here));
    assert_eq!(daemon.output(here), counted());
    // What it had removed is not there again.
    assert_eq!(errors(&daemon, here), "end 60 0\n");
}

/// What it was given is its own, also after it has slept, and what it is to leave comes back.
#[test]
fn a_container_has_its_input_and_leaves_artefacts() {
    let daemon = Daemon::start(&[]);
    let bundle = bundle(daemon.dir.path());
    let [given, back] = ["given", "back"].map(|name| daemon.dir.path().join(name));
    for dir in [&given, &back] {
        std::fs::create_dir(dir).unwrap();
    }
    std::fs::write(given.join("seed"), "seed\n").unwrap();
    let script = "trap 'may_end=yes' USR1; echo begun >found; pwd; cat seed; until [ \"$may_end\" ]; do sleep 0.05; done; \
                  cat seed >>found; rm seed; exit 3";
    let [bundle, input, dir] = [&bundle, &given, &back].map(|path| path.to_str().unwrap());
    let options = ["--bundle", bundle, "--input", input, "--artefact", "found", "--dir", dir];
    let id = daemon.submit(&options, &["sh", "-c", script]);
    daemon.wait_for_output(id, "seed\n");
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    daemon.ok(&["resume", &id.to_string()]);
    let_end(&daemon, id, "seed\n");
    let job = daemon.wait_for(id, "failed");
    assert_eq!(job["exit"], 3, "{}", daemon.show(id));
    assert_eq!(daemon.output(id), "/run/torpor/job\nseed\n");
    assert_eq!(std::fs::read_to_string(back.join("found")).unwrap(), "begun\nseed\n");
    assert_eq!(std::fs::read_to_string(given.join("seed")).unwrap(), "seed\n");
}

/// To another machine, and back while most of it is sent before.
#[test]
fn a_bundle_moves_with_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let bundle = bundle(dir.path());
    let go = |from: &Daemon, id: u64, words: &[&str]| -> u64 {
        let id = id.to_string();
        from.ok(&[&["move", &id, "--to"], words].concat()).trim().parse().unwrap()
    };
    let first = a.ok(&["submit", "--bundle", bundle.to_str().unwrap()]).trim().parse().unwrap();
    a.wait_for_output(first, "\n10\n");
    let there = go(&a, first, &["b"]);
    b.wait_for_output(there, "\n25\n");
    let back = go(&b, there, &["a", "--live"]);
    let_end(&a, back, "\n59\n");
    for (daemon, id) in [(&a, back), (&b, there), (&a, first)] {
        let job = daemon.wait_for(id, "failed");
        assert_eq!(job["exit"], 5, "{}", daemon.show(id));
        assert_eq!(daemon.output(id), counted());
        assert_eq!(errors(daemon, id), "end 60 0\n");
    }
    assert_eq!(std::fs::read(bundle.join("rootfs/etc/lower")).unwrap(), b"lower");
}

#[test]
fn an_image_has_the_limits_of_its_job() {
    let daemon = Daemon::start(&[]);
    let (root, archive) = (daemon.dir.path().join("root"), daemon.dir.path().join("image.tar"));
    assert!(script("make").arg(&root).status().unwrap().success());
    let name = format!("torpor-queue-{}", std::process::id());
    assert!(script("image").arg(&name).args([&root, &archive]).status().unwrap().success());
    let image = format!("docker-archive:{}", archive.display());
    let options = ["--image", &image, "--memory", "64M", "--pids", "20", "--env", "WORD=said"];
    let show = "trap 'may_end=yes' USR1; echo $WORD $TORPOR_JOB $$; for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.1; done; \
                until [ \"$may_end\" ]; do sleep 0.1; done; \
                dd if=/dev/zero of=/dev/null bs=100M count=1 2>/dev/null && echo not limited; \
                (n=0; until [ $n = 30 ]; do sleep 1 & n=$((n+1)); done; echo too many) 2>/dev/null; exit 3";
    let id = daemon.submit(&options, &["sh", "-c", show]);
    daemon.wait_for_output(id, "\n4\n");
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    daemon.ok(&["resume", &id.to_string()]);
    let_end(&daemon, id, "\n9\n");
    let job = daemon.wait_for(id, "failed");
    assert_eq!(job["exit"], 3, "{}", daemon.show(id));
    assert_eq!(daemon.output(id), "said 1 1\n1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    let inspected = Command::new("podman").args(["image", "rm", "--force", &name]).output();
    assert!(inspected.unwrap().status.success());
}

/// It is tried once: nothing would be found the next time.
#[test]
fn what_is_not_there_is_named() {
    let daemon = Daemon::start(&[]);
    let bundle = bundle(daemon.dir.path());
    let path = bundle.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["process"]["args"] = json!([]);
    std::fs::write(&path, config.to_string()).unwrap();
    // What a job before does not make.
    let first = daemon.submit(&[], &["true"]).to_string();
    for (options, word) in [
        (&["--bundle", "/nowhere", "--after", &first][..], "/nowhere/config.json"),
        (&["--bundle", bundle.to_str().unwrap()], "no command of its own"),
        (&["--image", "no-such-image"], "podman"),
    ] {
        let words = [&["submit", "--retries", "0"], options].concat();
        let id = daemon.ok(&words).trim().parse().unwrap();
        let job = daemon.wait_for(id, "failed");
        assert_eq!((&job["exit"], &job["run"]), (&json!(125), &json!(1)), "{}", daemon.show(id));
        let why = daemon.ok(&["show", "--why", &id.to_string()]);
        assert!(why.contains(word) && !why.contains("times without"), "{why}");
        assert!(daemon.events(id, "lost").is_empty(), "{why}");
    }
    let output = daemon.queue(&["submit", "--bundle", "/nowhere"]).output().unwrap();
    let said = common::shown(&output);
    assert!(!output.status.success() && said.contains("the bundle /nowhere has no"), "{said}");
}
