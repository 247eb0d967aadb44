//! Docker: `docker checkpoint create` and `docker start --checkpoint`.

use torpor_runtimes_tests::docker::{Docker, IMAGE};
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::runc::inner_processes;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

#[test]
fn checkpoint_and_start() {
    let scratch = Scratch::new("docker");
    let docker = Docker::start(&scratch, &["redis-server"]);
    let server = ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    docker.run(&[&["run", "--detach", "--name", "one", IMAGE], &server[..]].concat());
    let connect = || {
        let address = format!("{}:6379", docker.address("one"));
        docker.network().inside(|| until("the server answers", || Redis::connect(&address).ok()))
    };
    connect().number(&["INCRBY", "kept", "5"]);
    let processes = inner_processes(docker.pid("one"));

    // The container goes on with the first, and stops with the second.
    docker.run(&["checkpoint", "create", "--leave-running", "one", "early"]);
    assert_eq!(connect().number(&["INCR", "kept"]), 6);
    docker.run(&["checkpoint", "create", "one", "late"]);
    until_true("the container has stopped", || {
        docker.inspect("one")["State"]["Status"] == "exited"
    });
    let list = docker.run(&["checkpoint", "ls", "one"]);
    assert!(list.contains("early") && list.contains("late"), "{list}");

    docker.run(&["start", "--checkpoint", "late", "one"]);
    assert_eq!(inner_processes(docker.pid("one")), processes);
    assert_eq!(connect().number(&["INCR", "kept"]), 7);
    docker.run(&["kill", "one"]);
    until_true("the container has stopped", || {
        docker.inspect("one")["State"]["Status"] == "exited"
    });
    docker.run(&["start", "--checkpoint", "early", "one"]);
    assert_eq!(connect().number(&["INCR", "kept"]), 6);
}
