//! What the tests run inside of containers: small programs for which busybox has none.
// This crate is part of the tests alone: here a panic is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, fcntl_lock, flock};
use torpor_runtimes_tests::load;
use torpor_runtimes_tests::secret::Kind;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["redis", address, key, log] => redis(address, key, log),
        ["lock", kind, file, log] => lock(kind, file, log),
        ["datagrams", socket] => datagrams(socket),
        ["secrets", tmpfs, log] => secrets(Path::new(tmpfs), log),
        _ => panic!(
            "redis ADDRESS KEY LOG | lock posix|flock FILE LOG | datagrams SOCKET | secrets TMPFS LOG"
        ),
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

/// Keeps a secret of each kind, says that it is ready, and whether it still has them once the log says
/// `check`, all of it: whoever writes that makes the log empty first.
fn secrets(tmpfs: &Path, log: &str) {
    let memory = Kind::Memory.secret();
    let (mut output, mut input) = std::io::pipe().unwrap();
    input.write_all(&Kind::Pipe.secret()).unwrap();
    let (sender, receiver) = UnixDatagram::pair().unwrap();
    sender.send(&Kind::Socket.secret()).unwrap();
    let (named, ghost) = (tmpfs.join("named"), tmpfs.join("ghost"));
    fs::write(&named, Kind::Tmpfs.secret()).unwrap();
    fs::write(&ghost, Kind::Ghost.secret()).unwrap();
    let mut open = File::open(&ghost).unwrap();
    fs::remove_file(&ghost).unwrap();
    fs::write(log, "ready\n").unwrap();
    while fs::read_to_string(log).unwrap() != "check\n" {
        std::thread::sleep(Duration::from_millis(5));
    }
    let holds = |kind: Kind, source: &mut dyn Read| {
        let mut bytes = vec![0; kind.secret().len()];
        source.read_exact(&mut bytes).is_ok() && bytes == kind.secret()
    };
    let mut datagram = vec![0; 64 << 10];
    let received = receiver.recv(&mut datagram).unwrap();
    let kept = [
        memory == Kind::Memory.secret(),
        holds(Kind::Pipe, &mut output),
        datagram[..received] == Kind::Socket.secret(),
        fs::read(&named).unwrap() == Kind::Tmpfs.secret(),
        holds(Kind::Ghost, &mut open),
    ];
    fs::write(log, format!("{kept:?}\n")).unwrap();
}
