//! A day of CI on two slots, by three policies: first in first out, killing, and giving way
//! by stop and checkpoint; and traces of the Parallel Workloads Archive's format.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_precision_loss,
    missing_docs
)]

mod common;

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;
use torpor_queue::preemption::Means;
use torpor_queue::scheduler::simulation::{Policy, Summary, of_ci, summarize};
use torpor_queue::scheduler::{Class, Guarantee, Millis, Rules};

const SECOND: Millis = 1000;
const HOUR: Millis = 3600 * SECOND;
const GIB: u64 = 1 << 30;

fn rules() -> Rules {
    let means = vec![Means::Stop, Means::Checkpoint];
    let class = |priority| Class { priority, means: means.clone(), ..Class::default() };
    let classes = BTreeMap::from([("short".to_owned(), class(100)), ("long".to_owned(), class(0))]);
    let guarantee = Guarantee { every: 100_000 * HOUR, slice: SECOND };
    Rules { classes, guarantee, ..Rules::default() }
}

#[test]
fn a_day_by_three_policies() {
    let tasks = of_ci();
    let is_short = |class: &str| class == "short";
    let of = |policy| summarize((2, 6 * GIB), &rules(), policy, &tasks, &is_short);
    let all = Policy::ALL.map(of);
    println!(
        "| policy | short jobs wait, 95 % | longest | long jobs, mean | makespan | lost | waste |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let seconds = |millis: Millis| millis as f64 / SECOND as f64;
    let hours = |millis: Millis| millis as f64 / HOUR as f64;
    for one in &all {
        println!(
            "| {} | {:.1} s | {:.1} s | {:.2} h | {:.1} h | {:.0} s | {:.0} s |",
            one.policy.name(),
            seconds(one.wait_p95),
            seconds(one.wait_longest),
            hours(one.long_mean),
            hours(one.makespan),
            seconds(one.lost),
            seconds(one.waste)
        );
    }
    let [fifo, kill, ours, free]: &[Summary; 4] = &all;
    assert!(ours.wait_p95 <= 3 * SECOND, "short jobs wait {} ms", ours.wait_p95);
    assert!(fifo.wait_p95 > 60 * SECOND, "the trace is no test");
    assert!(ours.long_mean * 10 <= fifo.long_mean * 11, "{ours:?} {fifo:?}");
    assert!(ours.lost == 0 && kill.lost > 0);
    assert!(ours.waste * 10 <= kill.waste, "{ours:?} {kill:?}");
    assert!(all.iter().all(|one| one.undone == 0), "{all:?}");
    // What it costs to give way is a part of what it costs that others go first.
    assert!(free.waste == 0 && free.long_mean <= ours.long_mean, "{free:?} {ours:?}");
}

fn simulate(words: &[&str]) -> std::process::Output {
    let mut command = Command::new(common::torpor());
    command.args(["queue", "simulate"]).args(words).output().unwrap()
}

/// An urgent job of a minute comes every ten minutes to a machine that long ones of hours fill.
fn trace() -> String {
    let mut text = "; MaxProcs: 4\n".to_owned();
    let mut line = |number: i64, at: i64, work: i64, slots: i64, queue: i64| {
        let asked = work * 2;
        text += &format!(
            "{number} {at} 0 {work} {slots} -1 1024 {slots} {asked} -1 1 1 1 1 {queue} -1 -1 -1\n"
        );
    };
    for number in 0..8 {
        line(number, number, 7200, 2, 1);
    }
    for number in 8..30 {
        line(number, number * 600, 60, 1, 0);
    }
    // More than there is.
    line(30, 20_000, 60, 5, 1);
    text
}

#[test]
fn a_trace_of_the_archives_format_is_tried() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.swf");
    std::fs::write(&path, trace()).unwrap();
    let path = path.to_str().unwrap();
    let output = simulate(&["--trace", path, "--json"]);
    assert!(output.status.success(), "{}", common::shown(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["machine"]["slots"], &found["jobs"]), (&4.into(), &30.into()));
    assert_eq!(found["left_out"], 1);
    let of = |policy: usize, key: &str| found["policies"][policy][key].as_i64().unwrap();
    assert_eq!((of(0, "short"), of(0, "long")), (22, 8));
    // Interactive jobs wait for hours, or not at all; only a job that is killed loses anything.
    assert!(of(0, "wait_p95") > HOUR && of(2, "wait_p95") <= SECOND, "{found}");
    assert_eq!((of(0, "preemptions"), of(0, "waste"), of(2, "lost")), (0, 0, 0), "{found}");
    assert!(of(1, "lost") > 0 && of(2, "waste") * 10 <= of(1, "waste"), "{found}");
    // Classes, jobs and slots as they are asked for.
    let output =
        simulate(&["--trace", path, "--jobs", "10", "--queue", "1=urgent", "--slots", "2"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("10 jobs on 2 slots with 6144 MiB; 0 were left out\n"), "{text}");
    assert!(text.contains("waits are of the 10 short jobs, LONG of the 0 others"), "{text}");
    let text = String::from_utf8(simulate(&[]).stdout).unwrap();
    assert!(text.contains("on 2 slots") && text.contains("give way"), "{text}");
    assert!(text.contains("at no price"), "{text}");
}

/// Months of a real machine, whose best-effort jobs its own scheduler kills for others: the Gaia cluster, on a part of its
/// processors, so that there are never enough.
#[test]
fn a_real_trace_is_tried() {
    let Some(trace) = std::env::var_os("TORPOR_TEST_TRACE") else {
        println!("a_real_trace_is_tried: left out, set TORPOR_TEST_TRACE=$(scripts/trace.sh)");
        return;
    };
    let trace = trace.to_str().unwrap();
    let queues = ["--queue", "1=normal", "--queue", "2=batch"];
    let words = ["--trace", trace, "--jobs", "500", "--slots", "1000", "--json"];
    let output = simulate(&[&words[..], &queues].concat());
    assert!(output.status.success(), "{}", common::shown(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |policy: usize, key: &str| found["policies"][policy][key].as_i64().unwrap();
    let (fifo, kill, ours) = (0, 1, 2);
    assert!(
        of(ours, "short") > 30 && of(ours, "preemptions") > 100,
        "the trace is no test: {found}"
    );
    assert!((0..4).all(|policy| of(policy, "undone") == 0), "{found}");
    assert!(of(ours, "wait_p95") * 10 <= of(fifo, "wait_p95"), "{found}");
    assert_eq!(of(ours, "lost"), 0, "{found}");
    assert!(of(kill, "lost") > 0 && of(ours, "waste") * 10 <= of(kill, "waste"), "{found}");
}

#[test]
fn what_is_no_trace_is_named_by_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.swf");
    for (content, word) in [
        ("; only a head\n", "no job in the trace"),
        ("1 2 3\n", "trace.swf: line 1: it has 3 fields, and not 18"),
        ("1 2 3 4 x 6 7 8 9 10 11 12 13 14 15 16 17 18\n", "line 1: field 5 is no number"),
    ] {
        std::fs::write(&path, content).unwrap();
        let output = simulate(&["--trace", path.to_str().unwrap()]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(word), "{content:?}: {text}");
    }
}
