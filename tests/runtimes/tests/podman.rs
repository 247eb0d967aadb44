//! Podman: containers on a bridge network, checkpointed in place and through archives.

use std::fs;

use torpor_runtimes_tests::load::{self, Load};
use torpor_runtimes_tests::podman::Podman;
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::runc::inner_processes;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until;

const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");
const SERVER: &[&str] =
    &["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];

/// A Podman with a Redis server in container `one`.
fn server<'a>(scratch: &'a Scratch, subnet: &str) -> Podman<'a> {
    let podman = Podman::new(scratch, &["redis-server", WORKLOAD], subnet);
    podman.start("one", SERVER);
    podman
}

fn connect(podman: &Podman, name: &str) -> Redis {
    let address = format!("{}:6379", podman.address(name));
    podman.network().inside(|| until("the server answers", || Redis::connect(&address).ok()))
}

#[test]
fn checkpoint_and_restore() {
    let scratch = Scratch::new("podman");
    let podman = server(&scratch, "10.97.1");
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    for expected in 6..8 {
        let processes = inner_processes(podman.pid("one"));
        podman.run(&["container", "checkpoint", "one"]);
        assert_eq!(podman.inspect("one")["State"]["Status"], "exited");
        podman.run(&["container", "restore", "one"]);
        podman.expect_running("one");
        assert_eq!(inner_processes(podman.pid("one")), processes);
        assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), expected);
    }
}

#[test]
fn keep_and_leave_running() {
    let scratch = Scratch::new("podman-keep");
    let podman = server(&scratch, "10.97.2");
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    let pid = podman.pid("one");
    podman.run(&["container", "checkpoint", "--leave-running", "one"]);
    assert_eq!(podman.pid("one"), pid);
    assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), 6);
    podman.run(&["container", "checkpoint", "--keep", "one"]);
    let static_dir = podman.inspect("one")["StaticDir"].as_str().unwrap().to_owned();
    assert!(fs::metadata(format!("{static_dir}/dump.log")).is_ok(), "--keep keeps the log");
    podman.run(&["container", "restore", "--keep", "one"]);
    assert!(
        fs::metadata(format!("{static_dir}/checkpoint/inventory.img")).is_ok(),
        "--keep keeps the images"
    );
    assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), 7);
}

#[test]
fn tcp_established() {
    let scratch = Scratch::new("podman-tcp");
    let podman = server(&scratch, "10.97.3");
    let address = format!("{}:6379", podman.address("one"));
    let mut client = connect(&podman, "one");
    let id = client.number(&["CLIENT", "ID"]);
    let clients = || (0..3).map(|n| load::redis(&address, &format!("key:{n}")).unwrap()).collect();
    let load = Load::start(podman.network().inside(clients));
    load.advance(50);
    // Podman brings the new network up before it starts the restore that locks it: in between
    // the kernel would answer whoever talks to the container by a reset.
    load.rest(true);
    podman.run(&["container", "checkpoint", "--tcp-established", "one"]);
    podman.run(&["container", "restore", "--tcp-established", "one"]);
    load.rest(false);
    assert_eq!(format!("{}:6379", podman.address("one")), address);
    load.advance(50);
    assert_eq!(client.number(&["CLIENT", "ID"]), id);
}

#[test]
fn file_locks() {
    let scratch = Scratch::new("podman-locks");
    let podman = Podman::new(&scratch, &[WORKLOAD], "10.97.4");
    podman.start("one", &[WORKLOAD, "lock", "posix", "/locked", "/count"]);
    let count =
        || podman.run(&["exec", "one", "tail", "-n1", "/count"]).parse::<u64>().unwrap_or(0);
    until("it counts", || (count() > 0).then_some(()));
    use torpor_runtimes_tests::command::Run;
    podman.call(&["container", "checkpoint", "one"]).fail();
    podman.expect_running("one");
    podman.run(&["container", "checkpoint", "--file-locks", "one"]);
    podman.run(&["container", "restore", "--file-locks", "one"]);
    let before = count();
    until("it counts on", || (count() > before).then_some(()));
    podman.call(&["exec", "one", WORKLOAD, "lock", "posix", "/locked", "/other"]).fail();
}

/// The archive holds all that a container needs: it comes back after the original is removed, and
/// under other names, several times.
#[test]
fn export_and_import() {
    let scratch = Scratch::new("podman-export");
    let podman = server(&scratch, "10.97.5");
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    podman.run(&["exec", "one", "sh", "-c", "echo changed > /file"]);
    let archive = scratch.join("archive.tar.gz");
    let archive = archive.to_str().unwrap();
    podman.run(&["container", "checkpoint", "--compress", "gzip", "--export", archive, "one"]);
    podman.run(&["rm", "one"]);
    podman.run(&["container", "restore", "--import", archive]);
    podman.expect_running("one");
    assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), 6);
    assert_eq!(podman.run(&["exec", "one", "cat", "/file"]), "changed");
    for name in ["two", "three"] {
        podman.run(&["container", "restore", "--import", archive, "--name", name]);
        assert_eq!(connect(&podman, name).number(&["INCR", "kept"]), 6);
        assert_eq!(podman.run(&["exec", name, "cat", "/file"]), "changed");
    }
    assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), 7);
}

/// Another Podman, with a storage and a network of its own, stands for the other host.
#[test]
fn import_on_another_host() {
    let here = Scratch::new("podman-here");
    let podman = server(&here, "10.97.8");
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    let archive = here.join("archive.tar.gz");
    let archive = archive.to_str().unwrap();
    podman.run(&["container", "checkpoint", "--export", archive, "one"]);

    let there = Scratch::new("podman-there");
    let other = Podman::new(&there, &["redis-server", WORKLOAD], "10.97.9");
    other.run(&["network", "create", "--subnet", "10.97.8.0/24", here.name()]);
    other.run(&["container", "restore", "--import", archive]);
    other.expect_running("one");
    let networks = &other.inspect("one")["NetworkSettings"]["Networks"];
    let address = format!("{}:6379", networks[here.name()]["IPAddress"].as_str().unwrap());
    let connect = || until("the server answers", || Redis::connect(&address).ok());
    assert_eq!(other.network().inside(connect).number(&["INCR", "kept"]), 6);
    other.run(&["rm", "--force", "--time", "0", "one"]);
    other.run(&["network", "rm", here.name()]);
}

#[test]
fn export_without_rootfs() {
    let scratch = Scratch::new("podman-rootfs");
    let podman = server(&scratch, "10.97.6");
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    podman.run(&["exec", "one", "sh", "-c", "echo changed > /file"]);
    let archive = scratch.join("archive.tar");
    let archive = archive.to_str().unwrap();
    let options = ["--compress", "none", "--ignore-rootfs", "--export", archive, "one"];
    podman.run(&[&["container", "checkpoint"], &options[..]].concat());
    podman.run(&["rm", "one"]);
    podman.run(&["container", "restore", "--ignore-rootfs", "--import", archive]);
    assert_eq!(connect(&podman, "one").number(&["INCR", "kept"]), 6);
    podman.run(&["exec", "one", "sh", "-c", "! test -e /file"]);
}

/// Memory first, while the container runs; then the rest.
#[test]
fn pre_checkpoint() {
    let scratch = Scratch::new("podman-pre");
    let podman = server(&scratch, "10.97.7");
    let mut client = connect(&podman, "one");
    client.text(&["SET", "large", &"x".repeat(5 << 20)]);
    drop(client);
    let (first, second) = (scratch.join("first.tar"), scratch.join("second.tar"));
    let (first, second) = (first.to_str().unwrap(), second.to_str().unwrap());
    let archive = |more: &[&str]| {
        podman.run(&[&["container", "checkpoint", "--compress", "none"], more].concat())
    };
    archive(&["--pre-checkpoint", "--export", first, "one"]);
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    archive(&["--with-previous", "--export", second, "one"]);
    podman.run(&["rm", "one"]);
    podman.run(&["container", "restore", "--import-previous", first, "--import", second]);
    let mut client = connect(&podman, "one");
    assert_eq!(client.number(&["INCR", "kept"]), 6);
    assert_eq!(client.text(&["GET", "large"]), "x".repeat(5 << 20));
}
