//! What the tests run inside of containers: small programs for which busybox has none.
// This crate is part of the tests alone: here a panic is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::fs::{FlockOperation, fcntl_lock, flock};
use torpor_runtimes_tests::load;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["redis", address, key, log] => redis(address, key, log),
        ["lock", kind, file, log] => lock(kind, file, log),
        ["datagrams", socket] => datagrams(socket),
        _ => panic!("redis ADDRESS KEY LOG | lock posix|flock FILE LOG | datagrams SOCKET"),
    }
}

/// Counts up a key on one connection, and logs each step.
fn redis(address: &str, key: &str, log: &str) {
    let mut log = File::create(log).unwrap();
    let mut step = load::redis(address, key).unwrap();
    for count in 1.. {
        match step() {
            Ok(()) => writeln!(log, "{count}").unwrap(),
            Err(error) => {
                writeln!(log, "broken: {error}").unwrap();
                panic!("{error}");
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Holds a lock on a file, and logs that it goes on.
fn lock(kind: &str, file: &str, log: &str) {
    let file = File::create(file).unwrap();
    match kind {
        "posix" => fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap(),
        "flock" => flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap(),
        _ => panic!("no such lock: {kind}"),
    }
    let mut log = File::create(log).unwrap();
    for count in 1.. {
        writeln!(log, "{count}").unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends numbers on a connected datagram socket.
fn datagrams(socket: &str) {
    let sender = UnixDatagram::unbound().unwrap();
    sender.connect(socket).unwrap();
    for count in 1_u64.. {
        sender.send(count.to_string().as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}
