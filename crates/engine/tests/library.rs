//! The crates as a library, in one page: a program moves into other namespaces while it runs. Its checkpoint, three rounds
//! of memory and the last round lie in memory, and go through a pipe; it ends when the other one runs, and not before.
//! Dumps and restores need processes of one thread: each side is a process of its own, without the usual harness.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use torpor_engine::stages::Plan;
use torpor_engine::{NoHooks, Options, Session};
use torpor_store::{Shelf, receive, send};

/// The first and the last included.
const ROUNDS: u32 = 5;

fn main() {
    if std::env::args().any(|argument| argument == "--destination") {
        return destination();
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("written");
    let mut source = Command::new("setsid");
    source.args(["perl", "-e", "alarm 900; select $z, $z, $z, 0.002 while syswrite STDOUT, '.'"]);
    source.stdout(std::fs::File::create(&file).unwrap()).stdin(Stdio::null()).stderr(Stdio::null());
    let mut source = source.spawn().unwrap();
    goes_on(&file);

    let mut there = Command::new("unshare");
    there.args(["-nmpf", "--mount-proc"]).arg(std::env::current_exe().unwrap());
    there.arg("--destination").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut there = there.spawn().unwrap();
    let mut to = there.stdin.take().unwrap();
    let mut from = BufReader::new(there.stdout.take().unwrap()).lines();
    let shelf = Shelf::new();
    let options = |round: u32| {
        let images = shelf.place(&round.to_string()).unwrap();
        let mut wanted = Options { store: Some(std::sync::Arc::new(images)), ..Options::default() };
        wanted.pid = source.id().cast_signed();
        wanted.stop.leave_running = true;
        wanted.memory.parent = (round > 1).then(|| format!("../{}", round - 1).into());
        wanted.memory.track = round < ROUNDS;
        wanted
    };
    let first = options(1);
    let mut session = Session::open(&first).unwrap();
    let held = session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    held.resume(&mut NoHooks).unwrap();
    send(first.images().unwrap().store().as_ref(), &mut to).unwrap();
    for round in 2..ROUNDS {
        goes_on(&file);
        let round = options(round);
        session.round(&round, &mut NoHooks).unwrap();
        send(round.images().unwrap().store().as_ref(), &mut to).unwrap();
        assert_eq!(from.next().unwrap().unwrap(), "applied");
    }
    let last = options(ROUNDS);
    let held = session.freeze(&last, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    send(last.images().unwrap().store().as_ref(), &mut to).unwrap();
    assert_eq!(from.next().unwrap().unwrap(), "it runs");
    // The first one is still held: who writes is the other one.
    goes_on(&file);
    held.kill(&mut NoHooks).unwrap();
    assert!(source.wait().is_err(), "the first one was not ended and waited for");
    goes_on(&file);
    drop(to);
    assert!(there.wait().unwrap().success());
    println!("test library ... ok");
}

/// With this process, the first one of its pid namespace, all others end there.
fn destination() {
    let (shelf, mut from) = (Shelf::new(), std::io::stdin().lock());
    let mut next = |round: u32| {
        let images = shelf.place(&round.to_string()).unwrap();
        receive(&mut from, &images, 1 << 30).unwrap();
        Options { store: Some(std::sync::Arc::new(images)), ..Options::default() }
    };
    let first = next(1);
    let plan = Plan::read(&first).unwrap().for_rounds().unwrap();
    let mut skeleton = plan.build(&mut NoHooks).unwrap();
    for round in 2..ROUNDS {
        skeleton.apply(next(round).images().unwrap()).unwrap();
        println!("applied");
    }
    let last = next(ROUNDS);
    let complete = skeleton.complete(&last, &mut NoHooks).unwrap();
    complete.verify(&mut NoHooks).unwrap().wake(&mut NoHooks).unwrap();
    println!("it runs");
    // Until the other side has seen enough.
    assert_eq!(std::io::copy(&mut from, &mut std::io::sink()).unwrap(), 0);
}

fn goes_on(file: &std::path::Path) {
    let before = file.metadata().unwrap().len();
    let is_longer = |_| {
        std::thread::sleep(std::time::Duration::from_millis(1));
        file.metadata().unwrap().len() > before
    };
    assert!((0..60_000).any(is_longer), "nobody writes on");
}
