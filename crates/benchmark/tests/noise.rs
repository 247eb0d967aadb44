//! Whether the tool can be trusted on this machine: two runs of the same agree, and a runtime that is
//! slower by a tenth is found. This takes long, and a machine with nothing else to do: TORPOR_LONG=1.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::{Place, row, success};
use serde_json::Value;

/// The rows in which runc has a part; CreateContainer and RemovePodSandbox do not call it.
const ROWS: [&str; 9] = [
    "operations.sandbox.create",
    "operations.container.start",
    "operations.container.answer",
    "operations.container.exec",
    "operations.container.stop",
    "operations.sandbox.stop",
    "operations.life.total",
    "operations.bridge.create",
    "operations.bridge.stop",
];

fn run(place: &Place, name: &str, runc: &Path, runs: u64) -> PathBuf {
    let out = place.path(name);
    place.config(&format!(
        "runs: {runs}\nwarmup: 1\nfilters: [{}]\nendpoints:\n- name: here\n  containerd: /usr/bin/containerd\n  \
         handlers: [{{name: runc, binary: {}}}]\n",
        ROWS.join(", "),
        runc.display(),
    ));
    let mut tool = place.tool();
    tool.arg("run").arg("--output").arg(&out).arg(place.path("config.yaml"));
    eprint!("{}", success(&tool.output().unwrap()));
    out
}

fn compare(place: &Place, old: &Path, new: &Path) -> Vec<(String, String)> {
    let output = place.tool().args(["compare", "--json"]).args([old, new]).output().unwrap();
    eprint!("{}", success(&place.tool().args(["plan"]).arg(old).output().unwrap()));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = said["rows"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    rows.iter().map(|row| (text(&row["benchmark"]), text(&row["change"]))).collect()
}

/// How many runs it takes, by the tool's own forecast.
fn forecast(place: &Place, pilot: &Path) -> u64 {
    let said = success(&place.tool().arg("plan").arg(pilot).output().unwrap());
    let numbers = said.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
    numbers.max().unwrap_or(8)
}

#[test]
fn a_tenth_is_found_and_nothing_else() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: a_tenth_is_found_and_nothing_else (TORPOR_LONG=1 runs it)");
        return;
    }
    let place = Place::new();
    let runc = Path::new("/usr/sbin/runc");
    let pilot = run(&place, "pilot", runc, 10);
    let runs = forecast(&place, &pilot).min(100);
    eprintln!("{runs} runs of each");
    let first = run(&place, "first", runc, runs);
    let again = run(&place, "again", runc, runs);
    let same = compare(&place, &first, &again);
    let flagged: Vec<_> = same.iter().filter(|(_, change)| change != "none").collect();
    // Each call of runc is later by a tenth of what the longest row takes without it, so that every row is
    // slower by a tenth at least.
    let results: Value =
        serde_json::from_slice(&fs::read(first.join("results.json")).unwrap()).unwrap();
    let median =
        |name: &str| row(&results, name, "here/runc")["summary"]["median"].as_f64().unwrap();
    let delay = ROWS
        .iter()
        .filter(|name| !name.contains("life"))
        .map(|name| median(name))
        .fold(0.0, f64::max)
        / 10.0
        / 1000.0;
    let wrapper = place.path("runc");
    fs::write(&wrapper, format!("#!/bin/sh\nsleep {delay:.4}\nexec {} \"$@\"\n", runc.display()))
        .unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let slow = run(&place, "slow", &wrapper, runs);
    let found = compare(&place, &first, &slow);
    let missed: Vec<_> = found.iter().filter(|(_, change)| change != "worse").collect();
    assert!(missed.is_empty(), "not found with {runs} runs: {missed:?}");
    assert!(flagged.is_empty(), "flagged in two runs of the same: {flagged:?}");
    place.assert_clean();
}
