//! `--dry-run` says what a migration would be like, and moves nothing; what is refused then is refused to a migration as well.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use serde_json::{Value, json};
use support::{Counter, Host, judge, wait_until};

fn rehearse(here: &Host, pid: i32, mode: &str, to: &str) -> (bool, Value) {
    let pid = pid.to_string();
    let args = ["--pid", &pid, "--mode", mode, "--dry-run", "--json", to];
    let output = here.migrate(&args).output().unwrap();
    let said = serde_json::from_slice(&output.stdout);
    (output.status.success(), said.unwrap_or_else(|e| panic!("{e}: {output:?}")))
}

/// Nothing has moved, and nothing is left of the question.
fn stays(counter: &Counter, here: &Host, there: &Host) {
    counter.goes_on();
    assert_eq!(counter.running(), [(counter.pid, true)]);
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
    assert!(here.phases("source").is_empty() && there.phases("destination").is_empty());
}

#[test]
fn what_it_would_take() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(5000, 100);
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let (fine, said) = rehearse(&here, counter.pid, mode, &there.address);
        assert!(fine && said["refused"].as_array().unwrap().is_empty(), "{said}");
        assert_eq!(said["mode"], mode);
        let number = |name: &str| said[name].as_f64().unwrap();
        assert!(number("memory_bytes") >= 5000.0 * 4096.0, "{said}");
        assert!(number("written_bytes_per_s") > 0.0, "{said}");
        assert!(number("link_bytes_per_s") > 1e6, "{said}");
        assert!(number("state_bytes") > 1000.0 && number("stopped_ms") > 0.0, "{said}");
        let expected = &said["estimate"];
        let part = |name: &str| expected[name].as_f64().unwrap();
        let parts = part("freeze_ms") + part("transfer_ms") + part("restore_ms");
        assert!((parts - part("downtime_ms")).abs() < 1.0, "{said}");
        assert!(part("total_ms") >= part("downtime_ms"), "{said}");
        assert_eq!(expected["learned_from"], 0, "{said}");
        stays(&counter, &here, &there);
    }
    let args = ["--pid", &counter.pid.to_string(), "--dry-run", &there.address];
    let output = here.migrate(&args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("Nothing keeps it here.") && said.contains("stopped for about"),
        "{said}"
    );
    // And then it does move, and what that took is known to the next estimate.
    let report = here.moves(counter.pid, "pipelined", &there.address).unwrap();
    assert!(report["pid"].as_i64().is_some());
    counter.goes_on();
    assert_eq!(report["estimate"]["learned_from"], 0, "{report}");
    let other = Counter::start(5000, 100);
    let learned = |mode: &str| {
        let (fine, said) = rehearse(&here, other.pid, mode, &there.address);
        assert!(fine, "{said}");
        said["estimate"]["learned_from"].as_u64().unwrap()
    };
    assert_eq!([learned("pipelined"), learned("pre-copy")], [1, 0]);
    let report = here.moves(other.pid, "pipelined", &there.address).unwrap();
    assert_eq!(report["estimate"]["learned_from"], 1, "{report}");
    other.goes_on();
}

#[test]
fn what_would_be_refused() {
    // By the engine here.
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let (counter, root) = Counter::start_refused();
    let (fine, said) = rehearse(&here, root, "pipelined", &there.address);
    let refused = said["refused"].to_string();
    assert!(!fine && refused.contains("its time namespace"), "{said}");
    stays(&counter, &here, &there);

    // By the policy there.
    let (here, mut there) = (Host::new(), Host::new());
    for word in ["--policy-rule", "foreign.namespaces.require=[\"pid\"]"] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    let counter = Counter::start(100, 1);
    let (fine, said) = rehearse(&here, counter.pid, "pipelined", &there.address);
    let refused = said["refused"].to_string();
    assert!(!fine && refused.contains("the policy does not allow"), "{said}");
    stays(&counter, &here, &there);
}

/// What a migration could not be called a rehearsal refuses as well.
#[test]
fn a_number_that_another_migration_had() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let one = ["--pid", &pid, "--id", "one", "--json", &there.address];
    judge(&here.migrate(&one).output().unwrap()).unwrap();
    let other = Counter::start(100, 1);
    let pid = other.pid.to_string();
    for (number, is_free) in [("one", false), ("two", true)] {
        let args = ["--pid", &pid, "--id", number, "--dry-run", "--json", &there.address];
        let said: Value =
            serde_json::from_slice(&here.migrate(&args).output().unwrap().stdout).unwrap();
        let refused = said["refused"].to_string();
        assert_eq!(!refused.contains("migration one has been before"), is_free, "{said}");
    }
    other.goes_on();
}

/// The destination's policy says no: the tasks go on, whether they were stopped for it or not.
#[test]
fn a_policy_refuses_a_migration() {
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        // Another host, as far as images tell, though it is the same one.
        let rule = "foreign.namespaces.require=[\"pid\"]";
        for word in ["--host-key", "none", "--policy-rule", rule] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(100, 1);
        let error = here.moves(counter.pid, mode, &there.address).unwrap_err();
        assert!(error.contains("the policy does not allow"), "{mode}: {error}");
        assert!(
            error.contains("--restore-option=--policy-rule --restore-option=RULE"),
            "{mode}: {error}"
        );
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(here.phases("source"), ["stayed"], "{mode}");
        assert_eq!(there.phases("destination"), ["stayed"], "{mode}");
    }
}

/// A host whose processor can do less, as far as its kernel tells.
#[test]
fn a_processor_that_can_less_is_refused() {
    let here = Host::new();
    let info = here.path("cpuinfo");
    std::fs::write(&info, "processor\t: 0\nflags\t\t: fpu cmov\n").unwrap();
    let script = format!("mount --bind {} /proc/cpuinfo && exec \"$@\"", info.display());
    let mut there = Host::apart(&["unshare", "--mount", "sh", "-c", &script, "sh"]);
    there.start_agent();
    let counter = Counter::start(100, 1);
    let (fine, said) = rehearse(&here, counter.pid, "pipelined", &there.address);
    assert!(!fine && said["refused"].to_string().contains("the processor of"), "{said}");
    let error = here.moves(counter.pid, "pipelined", &there.address).unwrap_err();
    assert!(error.contains("the processor of") && error.contains("--ignore-cpu"), "{error}");
    stays(&counter, &here, &there);
    let args = ["--pid", &counter.pid.to_string(), "--ignore-cpu", "--json", &there.address];
    judge(&here.migrate(&args).output().unwrap()).unwrap();
    counter.goes_on();
    assert_eq!(there.phases("destination"), ["moved"]);
}

/// Rounds end when the whole pause is expected to be short enough, however short the last round was; or when they do not pay.
#[test]
fn rounds_end_by_the_expected_pause() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let moves = |writes: u64, most: f64| {
        let counter = Counter::start(2000, writes);
        let (pid, most) = (counter.pid.to_string(), format!("{most:.0}"));
        let args = ["--pid", &pid, "--mode", "pre-copy", "--max-downtime", &most, "--json"];
        let output = here.migrate(&args).args(["--max-rounds", "50", &there.address]).output();
        let report = judge(&output.unwrap()).unwrap();
        counter.goes_on();
        let rounds = report["rounds"].as_array().unwrap().len();
        (rounds, report["estimate"]["downtime_ms"].as_f64().unwrap())
    };
    let experience = here.path("state/experience.json");
    let (rounds, expected) = moves(1, 1e6);
    assert_eq!(rounds, 2, "one of tasks that run");
    // The rounds are as short, but the pause was a hundred times as long as that.
    let mut samples: Value = serde_json::from_slice(&std::fs::read(&experience).unwrap()).unwrap();
    samples[0]["factors"] = json!({"freeze": 100.0, "transfer": 100.0, "restore": 100.0});
    samples[0]["pace"] = Value::Null;
    std::fs::write(&experience, samples.to_string()).unwrap();
    // Far from both, since a busy machine is now slower and now faster.
    let most = 2.0 * expected;
    let (rounds, longer) = moves(1, most);
    assert!(longer > most && (3..50).contains(&rounds), "{rounds} {longer} {expected}");
    std::fs::remove_file(&experience).unwrap();
    let (rounds, _) = moves(2000, 0.0);
    assert!((3..50).contains(&rounds), "all is written again in each: {rounds}");
}

/// A dump that takes longer than anybody is silent for: the command says meanwhile that it lives.
#[test]
fn what_takes_long_is_no_silence() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let is_long = std::env::var_os("TORPOR_LONG").is_some();
    if !is_long {
        println!(
            "longer than any connection is waited for: left out, TORPOR_LONG=1 has it take 25 seconds"
        );
    }
    // The time itself is what is borne here.
    let (patience, time) = if is_long { ("10", 25) } else { ("3", 5) };
    let script = format!("test $CRTOOLS_SCRIPT_ACTION != pre-dump || sleep {time}");
    let options = ["--action-script", &script].map(|word| format!("--dump-option={word}"));
    let args = ["--pid", &counter.pid.to_string(), "--patience", patience, "--dry-run", "--json"];
    let output = here.migrate(&args).args(&options).arg(&there.address).output().unwrap();
    assert_eq!(judge(&output).unwrap()["refused"], json!([]));
    stays(&counter, &here, &there);
}

/// A link to an agent that passes on no more than 64 KiB in 3 ms, each way of a connection.
fn slow_link(here: &Host, there: &Host) -> String {
    let (path, agent) = (here.path("slow.socket"), there.path("agent.socket"));
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for near in listener.incoming().map(Result::unwrap) {
            let far = UnixStream::connect(&agent).unwrap();
            let ends = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || pass_slowly(near, far));
            std::thread::spawn(move || pass_slowly(ends.1, ends.0));
        }
    });
    format!("unix:{}", path.display())
}

fn pass_slowly(mut from: UnixStream, mut to: UnixStream) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        std::thread::sleep(Duration::from_millis(3));
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Where no round tells how fast the link is, it is measured before the tasks are stopped.
#[test]
fn what_is_expected_without_rounds_knows_the_link() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    // 20 MB, of which the link takes 22 in a second at most.
    let counter = Counter::start(5000, 1);
    let to = slow_link(&here, &there);
    let report = here.moves(counter.pid, "stop-and-copy", &to).unwrap();
    let expected = report["estimate"]["transfer_ms"].as_f64().unwrap();
    assert!(expected > 800.0, "{report}");
    counter.goes_on();
}
