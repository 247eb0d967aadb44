//! A migration that somebody ends, or whose programs end, in one of its phases: who has the tasks afterwards, and how it is
//! found out.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "phases/decision.rs"]
mod decision;
#[path = "phases/hanging.rs"]
mod hanging;
#[path = "phases/held.rs"]
mod held;
#[path = "phases/killed.rs"]
mod killed;
#[path = "phases/last_deed.rs"]
mod last_deed;
mod support;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::time::Instant;

use held::Held;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{Counter, Host, Killed, child_of, judge, state_of, wait_until};

/// Phases before the decision: the mode, the point that the restore waits at, whether the tasks are stopped here.
const PHASES: [(&str, &str, bool); 5] = [
    // The tree is being built while it still runs here.
    ("pipelined", "setup-namespaces", false),
    ("hybrid", "setup-namespaces", false),
    // All of it is there, and is being made.
    ("stop-and-copy", "setup-namespaces", true),
    ("pre-copy", "setup-namespaces", true),
    // The same, and its pages are being fetched.
    ("post-copy", "setup-namespaces", true),
];

/// The tasks go on at once, whatever the destination is at; then nothing is left there.
#[test]
fn cancelled_in_each_phase_it_goes_on_here() {
    for (mode, point, is_stopped) in PHASES {
        let mut held = Held::start(mode, point, "true");
        let stopped = (held.counter.pid, false);
        assert!(!is_stopped || held.counter.running().contains(&stopped), "{mode} at {point}");
        let (begun, count) = (Instant::now(), held.counter.count());
        let cancel = held.here.migrate(&["--cancel", "one"]).spawn().unwrap();
        if is_stopped {
            wait_until("it counts on", || held.counter.count() > count);
            println!(
                "{mode}: it counts {:.0} ms after --cancel",
                begun.elapsed().as_secs_f64() * 1e3
            );
        }
        let cancelled = cancel.wait_with_output().unwrap();
        assert!(cancelled.status.success(), "{mode} at {point}: {cancelled:?}");
        assert!(String::from_utf8_lossy(&cancelled.stdout).contains("it goes on here"));
        held.counter.goes_on();
        assert!(!held.migration.wait().unwrap().success());
        assert_eq!(held.here.phases("source"), ["stayed"]);
        assert!(held.is_here(true), "{mode} at {point}");
        held.ends_here(mode, point);
    }
}

/// Ctrl-C does the same.
#[test]
fn interrupted_in_the_pause_it_goes_on_here() {
    for (mode, point, _) in PHASES.into_iter().filter(|(.., is_stopped)| *is_stopped) {
        let mut held = Held::start(mode, point, "true");
        assert!(held.counter.running().contains(&(held.counter.pid, false)), "{mode} at {point}");
        kill_process(Pid::from_child(&held.migration), Signal::INT).unwrap();
        held.counter.goes_on();
        assert!(!held.migration.wait().unwrap().success(), "{mode} at {point}");
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode} at {point}");
        held.ends_here(mode, point);
    }
}

/// An agent that neither ends nor goes on: the tasks go on without it, and when it does, nothing is left there.
#[test]
fn an_agent_that_hangs_is_not_waited_for() {
    for (mode, point, _) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        let agent = Pid::from_child(held.there.agent.as_ref().unwrap());
        kill_process(agent, Signal::STOP).unwrap();
        let failed = held.migration.wait().unwrap();
        assert!(!failed.success(), "{mode} at {point}");
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["stayed"], "{mode} at {point}");
        kill_process(agent, Signal::CONT).unwrap();
        held.ends_here(mode, point);
    }
}

/// Neither the agent nor the command goes on, and the destination has not been told to go: nobody need be asked.
#[test]
fn an_agent_and_a_command_that_hang_are_not_waited_for() {
    for (mode, point, is_stopped) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        if mode == "post-copy" {
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        }
        let agent = Pid::from_child(held.there.agent.as_ref().unwrap());
        [agent, Pid::from_child(&held.migration)]
            .into_iter()
            .for_each(|pid| kill_process(pid, Signal::STOP).unwrap());
        assert!(!is_stopped || held.counter.running().contains(&(held.counter.pid, false)));
        assert!(!held.migration.wait().unwrap().success(), "{mode} at {point}");
        held.counter.goes_on();
        wait_until(&format!("{mode} at {point}: it is decided"), || {
            held.here.phases("source") == ["stayed"]
        });
        kill_process(agent, Signal::CONT).unwrap();
        held.ends_here(mode, point);
    }
}

/// A command that neither ends nor goes on is ended by the process that looks on: the tasks go on, and the agent has
/// let them go.
#[test]
fn a_command_that_hangs_is_ended() {
    for (mode, point, _) in PHASES {
        let mut held = Held::start_with(mode, point, "true", &["--patience", "3"]);
        kill_process(Pid::from_child(&held.migration), Signal::STOP).unwrap();
        wait_until(&format!("{mode} at {point}: it is decided"), || {
            held.here.phases("source") == ["stayed"]
        });
        held.counter.goes_on();
        assert!(!held.migration.wait().unwrap().success());
        held.ends_here(mode, point);
    }
}

/// The round after which the tree is built, and what rounds bring of its structure.
#[test]
fn it_is_built_when_that_was_asked_for() {
    for (more, rounds, is_stopped) in [
        (&["--max-downtime", "0"][..], 1, false),
        (&["--max-downtime", "0", "--start-restore-after", "2"], 2, false),
        (&["--max-downtime", "0", "--max-rounds", "2", "--start-restore-after", "9"], 3, true),
    ] {
        for state in ["global", "full"] {
            let more = [more, &["--state", state]].concat();
            let held = Held::start_with("pipelined", "setup-namespaces", "true", &more);
            let stopped = (held.counter.pid, false);
            assert_eq!(held.counter.running().contains(&stopped), is_stopped, "{more:?}");
            let round = |number: u32| held.here.path(&format!("work/source/one/{number}"));
            assert!(round(rounds).exists() && !round(rounds + 1).exists(), "{more:?}");
            if rounds > 1 {
                let images = fs::read_dir(round(2)).unwrap().flatten();
                let has_core = images
                    .map(|it| it.file_name())
                    .any(|name| name.to_str().is_some_and(|name| name.starts_with("core-")));
                assert_eq!(has_core, state == "full", "{more:?}");
            }
        }
    }
}

/// What the user has stopped stays stopped when a migration fails, and everything else goes on.
#[test]
fn what_was_stopped_before_stays_so() {
    const STOPS: &str = "sleep 100000 & kill -STOP $!; exec \"$@\"";
    let plain = ["setsid", "sh", "-c", STOPS, "sh"];
    let own_pids = [&["setsid", "unshare", "--pid", "--fork"], &plain[1..]].concat();
    for (prefix, mode) in
        [(&plain[..], "stop-and-copy"), (&plain, "post-copy"), (&own_pids, "pipelined")]
    {
        let (here, mut there) = (Host::new(), Host::new());
        for word in ["--action-script", "test $CRTOOLS_SCRIPT_ACTION != pre-resume"] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let mut counter = Counter::start_under(prefix, 100, 1);
        if prefix == own_pids {
            counter.pid = child_of(counter.child.id());
        }
        let stopped = Killed(child_of(counter.pid.cast_unsigned()));
        wait_until("it is stopped", || state_of(stopped.0) == Some('T'));
        let error = here.moves(counter.pid, mode, &there.address).unwrap_err();
        assert!(error.contains("they go on here"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        // Who let it go has woken it, to be stopped by the signal that waits for it.
        wait_until("it stays stopped", || state_of(stopped.0) == Some('T'));
        assert_eq!(here.phases("source"), ["stayed"]);
        // Nothing but that keeps it.
        kill_process(Pid::from_raw(stopped.0).unwrap(), Signal::CONT).unwrap();
        wait_until("it goes on", || state_of(stopped.0) == Some('S'));
    }
}

/// The same of what the user stops while the other host makes it, which then cannot let it run.
#[test]
fn what_is_stopped_in_the_pause_stays_so() {
    for mode in ["stop-and-copy", "pre-copy"] {
        let (here, mut there) = (Host::new(), Host::new());
        let [reached, released] = ["reached", "released"].map(|name| here.path(name));
        let script = format!(
            "case $CRTOOLS_SCRIPT_ACTION in \
             setup-namespaces) touch {}; until test -e {}; do sleep 0.01; done;; pre-resume) false;; esac",
            reached.display(),
            released.display()
        );
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(100, 1);
        let pid = Pid::from_raw(counter.pid).unwrap();
        let args = ["--pid", &counter.pid.to_string(), "--mode", mode, &there.address];
        let mut migration = here.migrate(&args).spawn().unwrap();
        wait_until("it is being made", || reached.exists());
        kill_process(pid, Signal::STOP).unwrap();
        fs::write(&released, "").unwrap();
        assert!(!migration.wait().unwrap().success(), "{mode}");
        assert_eq!(here.phases("source"), ["stayed"], "{mode}");
        wait_until("it is stopped", || state_of(counter.pid) == Some('T'));
        kill_process(pid, Signal::CONT).unwrap();
        counter.goes_on();
    }
}

/// It has moved as it would have without that, and is stopped there.
#[test]
fn what_is_stopped_there_before_it_runs_has_moved() {
    for mode in ["pre-copy", "pipelined", "post-copy"] {
        let mut held = Held::start(mode, "pre-resume", "true");
        let is_there = |&(pid, _): &(i32, bool)| pid != held.counter.pid;
        let root = held.counter.running().into_iter().find(is_there).expect("it is made").0;
        let root = Pid::from_raw(root).unwrap();
        kill_process(root, Signal::STOP).unwrap();
        held.release();
        assert!(held.migration.wait().unwrap().success(), "{mode}");
        let root_pid = root.as_raw_nonzero().get();
        wait_until("it is stopped", || state_of(root_pid) == Some('T'));
        kill_process(root, Signal::CONT).unwrap();
        held.counter.goes_on();
        assert_eq!(held.here.phases("source"), ["moved"], "{mode}");
        wait_until("both tidy up", || held.is_clean());
    }
}

#[test]
fn an_agent_lists_what_has_come_and_what_has_not() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let refused = Counter::start(100, 1);
    let pid = refused.pid.to_string();
    let args = ["--pid", &pid, "--id", "first", "--dump-option=--no-such-option"];
    judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap_err();
    let counter = Counter::start(100, 1);
    let report = here.moves(counter.pid, "pre-copy", &there.address).unwrap();
    let mut status = std::process::Command::new(support::torpor());
    status.args(["agent", "status", &there.address]);
    let text = String::from_utf8(status.output().unwrap().stdout).unwrap();
    let output = status.arg("--json").output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let all = said.as_array().unwrap();
    assert_eq!(all.len(), 2, "{said}");
    for (id, phase, pid) in [
        (json!("first"), "stayed", Value::Null),
        (report["id"].clone(), "moved", report["pid"].clone()),
    ] {
        let it = all.iter().find(|it| it["id"] == id).unwrap();
        assert_eq!((&it["phase"], &it["pid"]), (&json!(phase), &pid), "{said}");
        let line = text.lines().find(|line| line.contains(id.as_str().unwrap())).unwrap();
        assert!(line.contains(phase) && line.contains("process"), "{text}");
    }
    counter.goes_on();
}

/// An agent of a later time, which speaks nothing that this program does.
#[test]
fn another_version_of_the_protocol_is_refused() {
    let here = Host::new();
    let path = here.path("later.socket");
    let listener = UnixListener::bind(&path).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let versions = [900_u16, 901].map(u16::to_le_bytes).concat();
        stream.write_all(&[b"torpor-m".as_slice(), &versions].concat()).unwrap();
        // Until the other end has gone.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let counter = Counter::start(100, 1);
    let to = format!("unix:{}", path.display());
    let error = here.moves(counter.pid, "pipelined", &to).unwrap_err();
    assert!(error.contains("version") && error.contains("900"), "{error}");
    answering.join().unwrap();
    counter.goes_on();
    assert!(here.phases("source").is_empty() && here.is_clean());
}
