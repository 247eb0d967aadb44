//! Docker: `docker checkpoint create` and `docker start --checkpoint`.

use std::fs;

use torpor_runtimes_tests::command::Run;
use torpor_runtimes_tests::docker::{Docker, IMAGE};
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::runc::inner_processes;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{SECRET, check_images};
use torpor_runtimes_tests::wait::{until, until_true};

#[test]
fn checkpoint_and_start() {
    create_and_start(&Scratch::new("docker"));
}

#[test]
fn checkpoint_and_start_sealed() {
    create_and_start(&Scratch::sealed("docker-sealed"));
}

fn create_and_start(scratch: &Scratch) {
    let docker = Docker::start(scratch, &["redis-server"]);
    let server = ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    docker.run(&[&["run", "--detach", "--name", "one", IMAGE], &server[..]].concat());
    let connect = || {
        let address = format!("{}:6379", docker.address("one"));
        docker.network().inside(|| until("the server answers", || Redis::connect(&address).ok()))
    };
    // For a checkpoint Docker has containerd make an image, and then deletes it. The next step fails if
    // it has a part in common with one that containerd has not yet collected. By itself containerd collects when
    // fifty times as long has passed as that takes; but at once where a lease goes that says so.
    let blobs = "docker/data/containerd/daemon/io.containerd.content.v1.content/blobs/sha256";
    let blobs = scratch.join(blobs);
    let collected = || {
        let lease = |words: &[&str]| {
            let mut ctr = scratch.command("ctr");
            ctr.arg("--address").arg(scratch.join("docker/exec/containerd/containerd.sock"));
            ctr.arg("leases").args(words).succeed()
        };
        lease(&["create", "--id", "collect"]);
        lease(&["delete", "--sync", "collect"]);
        until_true("containerd collects what was deleted", || {
            fs::read_dir(&blobs).unwrap().next().is_none()
        });
    };
    connect().number(&["INCRBY", "kept", "5"]);
    connect().text(&["SET", "secret", SECRET]);
    let processes = inner_processes(docker.pid("one"));

    // The container goes on with the first, and stops with the second.
    docker.run(&["checkpoint", "create", "--leave-running", "one", "early"]);
    assert_eq!(connect().number(&["INCR", "kept"]), 6);
    collected();
    docker.run(&["checkpoint", "create", "one", "late"]);
    until_true("the container has stopped", || {
        docker.inspect("one")["State"]["Status"] == "exited"
    });
    let list = docker.run(&["checkpoint", "ls", "one"]);
    assert!(list.contains("early") && list.contains("late"), "{list}");
    let id = docker.inspect("one")["Id"].as_str().unwrap().to_owned();
    for name in ["early", "late"] {
        let images = format!("docker/data/containers/{id}/checkpoints/{name}");
        check_images(scratch, &scratch.join(&images));
    }

    collected();
    docker.run(&["start", "--checkpoint", "late", "one"]);
    assert_eq!(inner_processes(docker.pid("one")), processes);
    assert_eq!(connect().number(&["INCR", "kept"]), 7);
    docker.run(&["kill", "one"]);
    until_true("the container has stopped", || {
        docker.inspect("one")["State"]["Status"] == "exited"
    });
    collected();
    docker.run(&["start", "--checkpoint", "early", "one"]);
    assert_eq!(connect().number(&["INCR", "kept"]), 6);
}
