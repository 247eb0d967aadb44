//! An unmodified Podman starts a snapshot of one of its images.

use std::process::Command;

use torpor_runtimes_tests::podman::Podman;
use torpor_runtimes_tests::scratch::Scratch;

use crate::place::{Place, shown};

/// A program that uses the storage and the network of this Podman.
fn with_storage(podman: &Podman<'_>, program: &str) -> Command {
    let call = podman.call(&[]);
    let mut command = Command::new("nsenter");
    for (key, value) in call.get_envs() {
        command.env(key, value.unwrap());
    }
    command.args(call.get_args().take(1)).arg(program);
    command
}

#[test]
fn podman_restores_the_image() {
    let place = Place::new("podman", 10);
    let scratch = Scratch::new("snapshot-podman");
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], "10.97.61");
    let image = podman.run(&["images", "--quiet", "--no-trunc"]);
    let reference = place.reference();
    let mut create = with_storage(&podman, &place.torpor(&[]).get_program().to_string_lossy());
    create.env("TORPOR_STATE", place.path("state"));
    create.args(["snapshot", "create", &reference, "--ready", "exec:redis-cli ping"]);
    create.args(["--warmup", "redis-cli set kept warm", "--from"]);
    create.arg(format!("podman:{}", image.lines().next().unwrap()));
    create.args(["--", "redis-server", "--save", ""]);
    let output = create.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    assert!(podman.run(&["ps", "--all", "--quiet"]).is_empty(), "nothing of it is left");

    let mut copy = with_storage(&podman, "skopeo");
    copy.args(["--insecure-policy", "copy"]);
    copy.arg(format!("oci:{}:latest", place.path("store").display()));
    copy.arg("containers-storage:localhost/warm:1");
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    podman.run(&["container", "restore", "localhost/warm:1"]);
    let name = podman.run(&["ps", "--format", "{{.Names}}"]);
    assert_eq!(podman.run(&["exec", &name, "redis-cli", "get", "kept"]), "warm");
}
