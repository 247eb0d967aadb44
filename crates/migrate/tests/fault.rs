//! Whatever ends too early, at every message: the tasks run at one of the two places, and at
//! one only.
//!
//! A proxy stands between source and agent, reads the frames of the conversation, and at one of
//! them, at a byte of all that passes, or at a system call of one of the two, cuts the link or kills one of them.
//! `TORPOR_LONG=1` does so hundreds of times; else a few of these points are hit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use support::proxy::{Fault, Plan, Point, Proxy, Seen};
use support::{Counter, Host, judge, pids_of, wait_until};
use torpor_runtimes_tests::mounts::QUIET;
use torpor_tests::random::Random;

/// Until something that is bound to happen has happened.
const PATIENCE: Duration = Duration::from_secs(60);

const ALL: [Fault; 3] = [Fault::CutLink, Fault::KillSource, Fault::KillAgent];

/// One migration with a fault.
fn run(mode: &str, plan: Option<Plan>) -> Seen {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let agent = there.path("agent.socket");
    let proxy = Proxy::start(here.path("proxy.socket"), agent, plan);
    // Tasks that lack pages when an end is killed go on from where they were stopped.
    let start = if is_lazy(mode) { Counter::start_lenient } else { Counter::start };
    let counter = start(500, 5);
    let to = format!("unix:{}", proxy.path.display());
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--mode", mode, &to];
    let migration = here.migrate(&args).args(["--max-rounds", "2"]).spawn().unwrap();
    let output = proxy.disturb(migration, &mut there);
    let said = String::from_utf8_lossy(&output.stderr);
    let told = format!("{mode} {plan:?}: {said}\n{}", there.log());
    wait_until(&format!("it is decided: {told}"), || {
        let phases = here.phases("source");
        phases.is_empty() || phases == ["moved"] || phases == ["stayed"]
    });
    let start = Instant::now();
    while !matches!(counter.running().as_slice(), [(_, true)]) {
        assert!(
            start.elapsed() < PATIENCE,
            "{:?} run, {:?} and {:?}: {told}",
            counter.running(),
            here.phases("source"),
            there.phases("destination"),
        );
        thread::sleep(Duration::from_millis(1));
    }
    counter.goes_on();
    let running = counter.running();
    let is_here = running[0].0 == counter.pid;
    let phases = here.phases("source");
    assert!(phases.is_empty() || (phases == ["stayed"]) == is_here, "{phases:?} {told}");
    wait_until(&format!("both know: {told}"), || {
        let there = there.phases("destination");
        there.is_empty() || there == [if is_here { "stayed" } else { "moved" }]
    });
    wait_until(&format!("both tidy up: {told}"), || here.is_clean() && there.is_clean());
    proxy.seen()
}

/// Whether pages are fetched when the tasks run there.
fn is_lazy(mode: &str) -> bool {
    ["post-copy", "hybrid"].contains(&mode)
}

/// Hits messages of migrations of one mode.
fn one_runs(mode: &str) {
    let whole = run(mode, None);
    assert!(whole.messages > 10, "{whole:?}");
    let mut plans = Vec::new();
    for at in 0..whole.messages {
        for fault in ALL {
            for passed in [false, true] {
                plans.push(Plan { fault, point: Point::Message { at, passed } });
            }
        }
    }
    let is_long = std::env::var_os("TORPOR_LONG").is_some();
    // The messages about the decision are the last five: the images are there, everything is
    // made, go, it runs, it has ended.
    let decisive = plans.len() - 2 * ALL.len() * 5;
    let step = if is_lazy(mode) { 5 } else { 2 };
    for (number, plan) in plans.into_iter().enumerate() {
        if is_long || number % 41 == 0 || (number >= decisive && number % step == 1) {
            run(mode, Some(plan));
        }
    }
    // Between two messages, wherever that is.
    let random = Random::printed();
    let count = if is_long { 35 } else { 1 };
    hit(mode, count, &random, "bytes", || whole.byte(&random));
    hit(mode, count, &random, "system calls of workers", || whole.call(&random));
    if !is_long {
        println!("most messages before the decision: left out, TORPOR_LONG=1 hits all");
    }
}

/// Hits so many points that are drawn. Not every one that is drawn is reached.
fn hit(mode: &str, count: usize, random: &Random, what: &str, draw: impl Fn() -> Point) {
    let (mut drawn, mut struck) = (0, 0);
    while struck < count {
        assert!(drawn < 10 * (count + 1), "{mode}: {struck} of {drawn} {what} were hit");
        let plan = Plan { fault: ALL[random.place(ALL.len())], point: draw() };
        struck += usize::from(run(mode, Some(plan)).struck);
        drawn += 1;
    }
    println!("{mode}: {struck} of {drawn} {what} were hit");
}

#[test]
fn one_runs_in_pre_copy() {
    one_runs("pre-copy");
}

#[test]
fn one_runs_in_pipelined() {
    one_runs("pipelined");
}

#[test]
fn one_runs_in_post_copy() {
    one_runs("post-copy");
}

#[test]
fn one_runs_in_hybrid() {
    one_runs("hybrid");
}

/// An end that is killed while pages are being fetched takes the tasks there along: they go on here from where they
/// were stopped, with all their memory. Two at a time would find each other's counts more than once.
#[test]
fn they_go_on_here_if_the_pages_cannot_come_any_more() {
    const SOME: u64 = 300_000;
    for (mode, round) in [("post-copy", 1), ("hybrid", 2)] {
        for fault in [Fault::KillAgent, Fault::KillSource] {
            let (here, mut there) = (Host::new(), Host::new());
            there.start_agent();
            let plan = Plan { fault, point: Point::Short };
            let paths = (here.path("proxy.socket"), there.path("agent.socket"));
            let proxy = Proxy::start_with(paths.0, paths.1, Some(plan), Some((round, SOME)));
            let counter = Counter::start_lenient(1000, 500);
            let to = format!("unix:{}", proxy.path.display());
            let pid = counter.pid.to_string();
            let args = ["--pid", &pid, "--mode", mode, "--max-rounds", "1", &to];
            let mut migration = here.migrate(&args).spawn().unwrap();
            wait_until("pages are being fetched", || proxy.due.load(Ordering::SeqCst));
            match fault {
                Fault::KillAgent => {
                    there.stop_agent();
                    there.start_agent();
                }
                _ => migration.kill().unwrap(),
            }
            proxy.cut();
            proxy.due.store(false, Ordering::SeqCst);
            let output = migration.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let told = format!("{mode} {fault:?}: {said}\n{}", there.log());
            assert!(!output.status.success(), "{told}");
            wait_until(&format!("it runs here: {told}"), || {
                let running = counter.running();
                running == [(counter.pid, true)] && here.phases("source") == ["stayed"]
            });
            let before = counter.count();
            wait_until("it has seen its pages", || counter.count() > before + 20);
            counter.goes_on();
            assert_eq!(there.phases("destination"), ["stayed"], "{told}");
            wait_until("both tidy up", || here.is_clean() && there.is_clean());
        }
    }
}

/// Files in memory are on their way in the pause when the link takes nothing any more: whoever cancels does not wait for it.
#[test]
fn what_hangs_in_the_pause_can_be_cancelled() {
    const FILES: &str =
        "mount -t tmpfs files /mnt && head -c 48M /dev/urandom >/mnt/file && exec \"$@\"";
    // Behind all memory, and before the end of the files.
    let plan = Plan { fault: Fault::HangLink, point: Point::Byte(24 << 20) };
    let (here, mut there) = (Host::new(), Host::new().with_quiet_mounts());
    there.start_agent();
    let proxy = Proxy::start(here.path("proxy.socket"), there.path("agent.socket"), Some(plan));
    let script = format!("{QUIET}; {FILES}");
    let counter =
        Counter::start_under(&["setsid", "unshare", "--mount", "sh", "-c", &script, "sh"], 100, 1);
    let to = format!("unix:{}", proxy.path.display());
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--id", "one", "--mode", "stop-and-copy", "--patience", "3600", &to];
    // A limit keeps the link from being measured.
    let mut migration = here
        .migrate(&args)
        .args(["--bandwidth", "1G", "--dump-option=--store-tmpfs"])
        .spawn()
        .unwrap();
    wait_until("the link hangs", || {
        assert!(migration.try_wait().unwrap().is_none(), "{}", there.log());
        proxy.seen().struck
    });
    assert_eq!(counter.running(), [(counter.pid, false)]);
    let mut cancel = here.migrate(&["--cancel", "one"]).spawn().unwrap();
    wait_until("somebody has cancelled", || cancel.try_wait().unwrap().is_some());
    counter.goes_on();
    assert!(!migration.wait().unwrap().success());
    assert_eq!(here.phases("source"), ["stayed"]);
    proxy.end();
    wait_until("the agent notices", || there.phases("destination") == ["stayed"]);
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// One of several connections that is cut is the loss of the link: before the decision the tasks stay.
#[test]
fn one_connection_of_several_that_is_lost_leaves_the_tasks_here() {
    const SOME: u64 = 500_000;
    for (mode, round) in [("stop-and-copy", 1), ("pre-copy", 1), ("pipelined", 1), ("pre-copy", 2)]
    {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let paths = (here.path("proxy.socket"), there.path("agent.socket"));
        let proxy = Proxy::start_with(paths.0, paths.1, None, Some((round, SOME)));
        let counter = Counter::start(2000, 1500);
        let to = format!("unix:{}", proxy.path.display());
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--connections", "3", "--json", &to];
        let error = judge(&here.migrate(&args).output().unwrap()).unwrap_err();
        assert_eq!(proxy.joined.load(Ordering::SeqCst), 3);
        // If the job was killed before it had stopped them, its guardian lets them go on, some time later.
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}: {error}");
        assert_eq!(here.phases("source"), ["stayed"]);
        wait_until("the agent notices", || there.phases("destination") == ["stayed"]);
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
    }
}

/// Tasks that run there and lack pages wait for them, whatever becomes of the connection.
#[test]
fn pages_come_over_as_many_connections_as_it_takes() {
    const SHORT: u64 = 400_000;
    for (mode, round, connections) in
        [("post-copy", 1, "1"), ("hybrid", 2, "1"), ("hybrid", 2, "3")]
    {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let agent = there.path("agent.socket");
        let short = Some((round, SHORT));
        let proxy = Proxy::start_with(here.path("proxy.socket"), agent, None, short);
        // What is written from then on is fetched: nearly all, and it looks at each page before.
        let counter = Counter::start(1000, 500);
        let to = format!("unix:{}", proxy.path.display());
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--connections", connections, "--json", &to];
        let mut migrate = here.migrate(&args);
        let report = judge(&migrate.args(["--max-rounds", "1"]).output().unwrap()).unwrap();
        assert_ne!(report["pid"].as_i64().unwrap(), i64::from(counter.pid));
        let least = 2 * connections.parse::<usize>().unwrap();
        assert!(proxy.joined.load(Ordering::SeqCst) > least, "{mode}: {report}");
        counter.goes_on();
        let before = counter.count();
        wait_until("it has seen its pages", || counter.count() > before + 20);
        assert_eq!((here.phases("source"), there.phases("destination")), both("moved"));
        wait_until("the destination tidies up", || there.is_clean());
    }
}

/// Pages that somebody waits for come before those that nobody waits for: in the order of their addresses those of one count
/// would hardly be there before the last ones are.
#[test]
fn what_is_waited_for_comes_first() {
    const PAGES: u64 = 10_000;
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let proxy = Proxy::start(here.path("proxy.socket"), there.path("agent.socket"), None);
    proxy.slow_down(Duration::from_millis(3));
    let counter = Counter::start(PAGES, 5);
    let (pid, to) = (counter.pid.to_string(), format!("unix:{}", proxy.path.display()));
    let args = ["--pid", &pid, "--mode", "post-copy", "--json", &to];
    let migration = here.migrate(&args).spawn().unwrap();
    let is_there = |&(pid, runs): &(i32, bool)| runs && pid != counter.pid;
    wait_until("it runs there", || counter.running().iter().any(is_there));
    let (before, half) = (counter.count(), proxy.seen().bytes + PAGES * 4096 / 2);
    wait_until("half of its pages are there", || proxy.seen().bytes > half);
    assert!(counter.count() > before, "{}", there.log());
    judge(&migration.wait_with_output().unwrap()).unwrap();
    counter.goes_on();
    wait_until("the destination tidies up", || there.is_clean());
}

/// What makes the tasks begins when the images are there, and not when whoever brings their pages has been answered by the
/// source.
#[test]
fn the_restore_does_not_wait_for_its_pager() {
    let (here, mut there) = (Host::new(), Host::new());
    let begun = here.path("begun");
    let script =
        format!("test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || touch {}", begun.display());
    for word in ["--action-script", &script] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    let proxy = Proxy::start(here.path("proxy.socket"), there.path("agent.socket"), None);
    proxy.hold_pages_until(begun);
    let counter = Counter::start(1000, 10);
    let to = format!("unix:{}", proxy.path.display());
    here.moves(counter.pid, "post-copy", &to).unwrap_or_else(|error| panic!("{error}"));
    counter.goes_on();
    assert_eq!((here.phases("source"), there.phases("destination")), both("moved"));
    wait_until("the destination tidies up", || there.is_clean());
}

/// When nobody is left who could tidy up, the next migration does.
#[test]
fn what_a_killed_source_leaves_goes_with_the_next_one() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let mut counter = Counter::start(4000, 10);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--id", "one", "--bandwidth", "1M", &there.address];
    let mut migration = here.migrate(&args).spawn().unwrap();
    wait_until("it takes a round", || here.path("work/source/one/1").exists());
    // For a moment the words of a process that has just begun are not to be seen.
    let state = here.path("state");
    let watches = || pids_of(&["--watch", "one", state.to_str().unwrap()]);
    wait_until("it is watched", || watches().len() == 1);
    let name = format!("/proc/{}/comm", watches()[0].as_raw_nonzero());
    wait_until("it has its name", || {
        std::fs::read_to_string(&name).is_ok_and(|name| name == "torpor-watch\n")
    });
    kill_process(watches()[0], Signal::KILL).unwrap();
    migration.kill().unwrap();
    migration.wait().unwrap();
    assert!(!here.is_clean());
    wait_until("the agent notices", || there.phases("destination") == ["stayed"]);
    here.moves(counter.pid, "stop-and-copy", &there.address).unwrap();
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
    wait_until("it has ended here", || counter.has_ended_here());
    counter.goes_on();
}

fn both(phase: &str) -> (Vec<String>, Vec<String>) {
    (vec![phase.to_owned()], vec![phase.to_owned()])
}
