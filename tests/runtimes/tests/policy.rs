//! Images that were not made on this host get no more than what the calling runtime passed, without
//! anybody having said so.

use std::fs;

use serde_json::{Value, json};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::podman::{IMAGE, Podman};
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::{COUNT, goes_on};

/// A machine that takes no images for its own.
const FOREIGN: &str = "host-key none\n";

/// Lists all that is too much.
#[track_caller]
fn names_all(said: &str, wanted: &[&str]) {
    for part in wanted {
        assert!(said.contains(part), "{part:?} is missing: {said}");
    }
}

#[test]
fn runc_gets_what_it_passed() {
    let scratch = Scratch::new("policy-runc");
    scratch.configure(FOREIGN);
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", COUNT]);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.sleep_and_wake(&[]);
    goes_on(&bundle.file("count"));
}

/// The images are of a container with a further capability and mount, and without a filter.
#[test]
fn runc_gets_no_more_than_it_passed() {
    let scratch = Scratch::new("policy-wider");
    scratch.configure(FOREIGN);
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", COUNT]).configure(|config| {
        for set in ["bounding", "permitted", "effective"] {
            let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
            set.push(json!("CAP_SYS_ADMIN"));
        }
        let extra = json!({"type": "proc", "source": "proc", "destination": "/extra"});
        config["mounts"].as_array_mut().unwrap().push(extra);
    });
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let file = scratch.join("bundle/config.json");
    let wide = fs::read_to_string(&file).unwrap();
    let mut narrow: Value = serde_json::from_str(&wide).unwrap();
    for set in ["bounding", "permitted", "effective"] {
        narrow["process"]["capabilities"][set].as_array_mut().unwrap().pop();
    }
    narrow["mounts"].as_array_mut().unwrap().pop();
    narrow["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ALLOW"});
    fs::write(&file, narrow.to_string()).unwrap();
    container.restore_call(&[]).args(["--detach", container.id()]).fail();
    let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
    names_all(&log, &["CAP_SYS_ADMIN", "\"/extra\"", "seccomp", "(foreign.capabilities.allow)"]);
    assert!(!cgroup_left(container.id()), "a cgroup is left");
    container.runc("state").arg(container.id()).fail();

    fs::write(&file, wide).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// An archive whose images are those of another container, which was given more.
#[test]
fn podman_gets_no_more_than_it_passed() {
    let scratch = Scratch::new("policy-podman");
    scratch.configure(FOREIGN);
    let podman = Podman::new(&scratch, &[], "10.97.17");
    let program = ["sh", "-c", "while :; do sleep 0.1; done"];
    podman.start("one", &program);
    let run = ["run", "--detach", "--name", "wide", "--network", scratch.name()];
    let wide =
        ["--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined", "--security-opt=unmask=ALL"];
    podman.run(&[&run[..], &wide, &[IMAGE], &program].concat());
    let archive = |name: &str| scratch.join(&format!("{name}.tar")).display().to_string();
    for name in ["one", "wide"] {
        let to = archive(name);
        podman.run(&["container", "checkpoint", "--compress", "none", "--export", &to, name]);
        podman.run(&["rm", name]);
        let dir = scratch.dir(name);
        command("tar", &["-xf", &to, "-C"]).arg(&dir).succeed();
    }
    let (images, others) = (scratch.join("one/checkpoint"), scratch.join("wide/checkpoint"));
    fs::remove_dir_all(&images).unwrap();
    fs::rename(others, images).unwrap();
    let forged = archive("forged");
    command("tar", &["-cf", &forged, "-C"]).arg(scratch.join("one")).arg(".").succeed();

    let said = podman.call(&["container", "restore", "--keep", "--import", &forged]).fail();
    // It names the log.
    let log = said.split("log file: ").nth(1).unwrap_or_default().lines().next().unwrap();
    let log = fs::read_to_string(log.trim_end_matches(['"', ':'])).unwrap_or(said);
    names_all(&log, &["CAP_SYS_ADMIN", "no seccomp filter", "which the calling runtime hides"]);
    let left = podman.run(&["ps", "--quiet"]);
    assert_eq!(left, "", "a container runs");
    podman.run(&["rm", "--force", "--ignore", "one"]);

    podman.run(&["container", "restore", "--import", &archive("one")]);
    podman.expect_running("one");
}
