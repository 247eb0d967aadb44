//! Podman: containers on a bridge network, checkpointed in place and through archives.

use std::fs;
use std::path::{Path, PathBuf};

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::load::{self, Load};
use torpor_runtimes_tests::podman::Podman;
use torpor_runtimes_tests::redis::Redis;
use torpor_runtimes_tests::runc::inner_processes;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{SECRET, check_images};
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
    in_place(&Scratch::new("podman"), "10.97.1");
}

#[test]
fn checkpoint_and_restore_sealed() {
    in_place(&Scratch::sealed("podman-sealed"), "10.97.11");
}

fn in_place(scratch: &Scratch, subnet: &str) {
    let podman = server(scratch, subnet);
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    keep_secret(&podman);
    for expected in 6..8 {
        let processes = inner_processes(podman.pid("one"));
        podman.run(&["container", "checkpoint", "one"]);
        assert_eq!(podman.inspect("one")["State"]["Status"], "exited");
        check_images(scratch, &images(&podman));
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
    with_connections(&Scratch::new("podman-tcp"), "10.97.3");
}

#[test]
fn tcp_established_sealed() {
    with_connections(&Scratch::sealed("podman-tcp-sealed"), "10.97.12");
}

fn with_connections(scratch: &Scratch, subnet: &str) {
    let podman = server(scratch, subnet);
    let address = format!("{}:6379", podman.address("one"));
    let mut client = connect(&podman, "one");
    let id = client.number(&["CLIENT", "ID"]);
    keep_secret(&podman);
    let clients = || (0..3).map(|n| load::redis(&address, &format!("key:{n}")).unwrap()).collect();
    let load = Load::start(podman.network().inside(clients));
    load.advance(50);
    // Podman brings the new network up before it starts the restore that locks it: in between
    // the kernel would answer whoever talks to the container by a reset.
    load.rest(true);
    podman.run(&["container", "checkpoint", "--tcp-established", "one"]);
    check_images(scratch, &images(&podman));
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
    // None, before it has made the file.
    let count = || {
        let end = podman.call(&["exec", "one", "tail", "-n1", "/count"]).finish();
        end.stdout.trim().parse::<u64>().unwrap_or(0)
    };
    until("it counts", || (count() > 0).then_some(()));
    podman.call(&["container", "checkpoint", "one"]).fail();
    podman.expect_running("one");
    podman.run(&["container", "checkpoint", "--file-locks", "one"]);
    podman.run(&["container", "restore", "--file-locks", "one"]);
    let before = count();
    until("it counts on", || (count() > before).then_some(()));
    podman.call(&["exec", "one", WORKLOAD, "lock", "posix", "/locked", "/other"]).fail();
}

/// Puts the secret into the memory of the server.
fn keep_secret(podman: &Podman) {
    connect(podman, "one").text(&["SET", "secret", SECRET]);
}

/// Where Podman keeps the images of a container that sleeps.
fn images(podman: &Podman) -> PathBuf {
    Path::new(podman.inspect("one")["StaticDir"].as_str().unwrap()).join("checkpoint")
}

/// Unpacks an archive and checks the images in it.
fn check_archive(scratch: &Scratch, archive: &str, images: &str) {
    let dir = scratch.dir("unpacked");
    command("tar", &["--extract", "--file", archive, "--directory"]).arg(&dir).succeed();
    check_images(scratch, &dir.join(images));
    fs::remove_dir_all(dir).unwrap();
}

/// The archive holds all that a container needs: it comes back after the original is removed, and
/// under other names, several times.
#[test]
fn export_and_import() {
    by_archive(&Scratch::new("podman-export"), "10.97.5");
}

#[test]
fn export_and_import_sealed() {
    by_archive(&Scratch::sealed("podman-export-sealed"), "10.97.13");
}

fn by_archive(scratch: &Scratch, subnet: &str) {
    let podman = server(scratch, subnet);
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    keep_secret(&podman);
    podman.run(&["exec", "one", "sh", "-c", "echo changed > /file"]);
    let archive = scratch.join("archive.tar.gz");
    let archive = archive.to_str().unwrap();
    podman.run(&["container", "checkpoint", "--compress", "gzip", "--export", archive, "one"]);
    check_archive(scratch, archive, "checkpoint");
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
    on_another_host(&Scratch::new("podman-here"), ["10.97.8", "10.97.9"]);
}

/// The other host has been given the key.
#[test]
fn import_on_another_host_sealed() {
    on_another_host(&Scratch::sealed("podman-here-sealed"), ["10.97.15", "10.97.16"]);
}

fn on_another_host(here: &Scratch, subnets: [&str; 2]) {
    let podman = server(here, subnets[0]);
    connect(&podman, "one").number(&["INCRBY", "kept", "5"]);
    let archive = here.join("archive.tar.gz");
    let archive = archive.to_str().unwrap();
    podman.run(&["container", "checkpoint", "--export", archive, "one"]);

    let there = Scratch::new("podman-there");
    if let Some(options) = here.configuration() {
        there.configure(&options);
    }
    let other = Podman::new(&there, &["redis-server", WORKLOAD], subnets[1]);
    let subnet = format!("{}.0/24", subnets[0]);
    other.run(&["network", "create", "--subnet", &subnet, here.name()]);
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
    in_two_archives(&Scratch::new("podman-pre"), "10.97.7");
}

#[test]
fn pre_checkpoint_sealed() {
    in_two_archives(&Scratch::sealed("podman-pre-sealed"), "10.97.14");
}

fn in_two_archives(scratch: &Scratch, subnet: &str) {
    let podman = server(scratch, subnet);
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
    keep_secret(&podman);
    archive(&["--with-previous", "--export", second, "one"]);
    check_archive(scratch, second, "checkpoint");
    podman.run(&["rm", "one"]);
    podman.run(&["container", "restore", "--import-previous", first, "--import", second]);
    let mut client = connect(&podman, "one");
    assert_eq!(client.number(&["INCR", "kept"]), 6);
    assert_eq!(client.text(&["GET", "large"]), "x".repeat(5 << 20));
}
