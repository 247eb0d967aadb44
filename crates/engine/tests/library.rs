//! The crates as a library, in one page: a program moves into other network and mount namespaces
//! while it runs. Its checkpoint, three rounds of memory and the last round lie in memory, and go
//! through a pipe; the first one ends when the other one runs, and not before.
//!
//! Dumps and restores need processes of one thread, so this is a program without the usual
//! harness, and each side is a process of its own.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use torpor_engine::options::{Memory, Stop};
use torpor_engine::stages::Plan;
use torpor_engine::{NoHooks, Options, Session};
use torpor_images::ImageDir;
use torpor_store::{Shelf, receive, send};

/// Counts, and says how far it is.
const SUBJECT: &str = r#"for (;;) {
    $i++;
    open F, ">", $ARGV[0] or die;
    print F $i;
    close F;
    select undef, undef, undef, 0.002;
}"#;
/// The rounds, the first and the last included.
const ROUNDS: u32 = 5;
/// More than a round of the subject has.
const MOST: u64 = 1 << 30;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("--destination") => destination(),
        _ => source(),
    }
}

fn source() {
    let dir = tempfile::tempdir().unwrap();
    let counter = dir.path().join("counter");
    let mut unshare = Command::new("unshare");
    unshare.args(["-p", "--fork", "--kill-child", "perl", "-e", SUBJECT]).arg(&counter);
    let mut subject = unshare.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    goes_on(&counter);
    let children = format!("/proc/{0}/task/{0}/children", subject.id());
    let pid = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();

    let mut there = Command::new("unshare")
        .args(["-nm", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .arg("--destination")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = there.stdin.take().unwrap();
    let mut from = BufReader::new(there.stdout.take().unwrap()).lines();

    let shelf = Shelf::new();
    let options = |round: u32| Options {
        store: Some(Arc::new(shelf.place(&round.to_string()).unwrap())),
        pid,
        stop: Stop { leave_running: true, ..Stop::default() },
        shell_job: true,
        memory: Memory {
            parent: (round > 1).then(|| format!("../{}", round - 1).into()),
            track: round < ROUNDS,
            ..Memory::default()
        },
        ..Options::default()
    };
    let first = options(1);
    let mut session = Session::open(&first).unwrap();
    let written = session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    written.resume(&mut NoHooks).unwrap();
    send(first.images().unwrap().store().as_ref(), &mut to).unwrap();
    for round in 2..ROUNDS {
        goes_on(&counter);
        let round = options(round);
        session.round(&round, &mut NoHooks).unwrap();
        send(round.images().unwrap().store().as_ref(), &mut to).unwrap();
        assert_eq!(from.next().unwrap().unwrap(), "applied");
    }
    let last = options(ROUNDS);
    let held = session.freeze(&last, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    let count = count(&counter);
    send(last.images().unwrap().store().as_ref(), &mut to).unwrap();
    assert_eq!(from.next().unwrap().unwrap(), "it runs");
    // The first one is still held: what counts on is the other one.
    assert!(goes_on(&counter) > count);
    held.kill(&mut NoHooks).unwrap();
    assert!(!subject.wait().unwrap().success());
    goes_on(&counter);
    drop(to);
    assert!(there.wait().unwrap().success());
    println!("test library ... ok");
}

fn destination() {
    let (shelf, mut from) = (Shelf::new(), std::io::stdin().lock());
    let mut next = |round: u32| {
        let images = shelf.place(&round.to_string()).unwrap();
        receive(&mut from, &images, MOST).unwrap();
        Options { store: Some(Arc::new(images)), shell_job: true, ..Options::default() }
    };
    let first = next(1);
    let plan = Plan::read(&first).unwrap().for_rounds().unwrap();
    let mut skeleton = plan.build(&mut NoHooks).unwrap();
    for round in 2..ROUNDS {
        let images: ImageDir = next(round).images().unwrap();
        skeleton.apply(images).unwrap();
        say("applied");
    }
    let last = next(ROUNDS);
    let complete = skeleton.complete(&last, &mut NoHooks).unwrap();
    let report = complete.verify(&mut NoHooks).unwrap().wake(&mut NoHooks).unwrap();
    say("it runs");
    // Until the other side has seen enough.
    assert_eq!(std::io::copy(&mut from, &mut std::io::sink()).unwrap(), 0);
    let pid = rustix::process::Pid::from_raw(report.pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn say(what: &str) {
    println!("{what}");
    std::io::stdout().flush().unwrap();
}

fn count(counter: &Path) -> u64 {
    std::fs::read_to_string(counter).unwrap_or_default().parse().unwrap_or(0)
}

/// Waits until it has counted on; returns how far it is.
fn goes_on(counter: &Path) -> u64 {
    let (before, deadline) = (count(counter), Instant::now() + Duration::from_secs(60));
    loop {
        let now = count(counter);
        if now > before + 5 {
            return now;
        }
        assert!(Instant::now() < deadline, "it does not go on at {now}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
