//! Whether the tool can be trusted on this machine: two runs of the same agree, and a runtime that is
//! slower by a tenth is found. This takes long, and a machine with little else to do: TORPOR_LONG=1. The
//! tool says beforehand how many runs it takes; where that is more than are taken (100, or what
//! TORPOR_RUNS says), the rows that it promises nothing about are named and not judged; they may be half of all.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::{TestDir, row, success};
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

const RUNC: &str = "/usr/sbin/runc";

/// Measures runtimes, each under its name, in one run.
fn run(test_dir: &TestDir, name: &str, handlers: &[(&str, &Path)], runs: u64) -> PathBuf {
    let out = test_dir.path(name);
    let handlers: Vec<String> = handlers
        .iter()
        .map(|(name, binary)| format!("{{name: {name}, binary: {}}}", binary.display()))
        .collect();
    test_dir.config(&format!(
        "runs: {runs}\nwarmup: 1\nfilters: [{}]\nendpoints:\n- name: here\n  containerd: /usr/bin/containerd\n  \
         handlers: [{}]\n",
        ROWS.join(", "),
        handlers.join(", "),
    ));
    let mut tool = test_dir.tool();
    tool.arg("run").arg("--output").arg(&out).arg(test_dir.path("config.yaml"));
    eprint!("{}", success(&tool.output().unwrap()));
    out
}

/// The results of one runtime of a run, under the name `here/runc`.
fn only(test_dir: &TestDir, run: &Path, handler: &str) -> PathBuf {
    let mut all: Value =
        serde_json::from_slice(&fs::read(run.join("results.json")).unwrap()).unwrap();
    for (list, key) in [("rows", "target"), ("targets", "name")] {
        let list = all[list].as_array_mut().unwrap();
        list.retain(|one| one[key] == format!("here/{handler}"));
        list.iter_mut().for_each(|one| one[key] = "here/runc".into());
    }
    let path = test_dir.path(&format!("{}-{handler}.json", run.file_name().unwrap().display()));
    fs::write(&path, all.to_string()).unwrap();
    path
}

/// The rows whose change is, or is not, as it should be.
fn rows(test_dir: &TestDir, old: &Path, new: &Path, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let output = test_dir.tool().args(["compare", "--json"]).args([old, new]).output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = said["rows"].as_array().unwrap();
    assert_eq!(rows.len(), ROWS.len(), "{said}");
    let wanted = rows.iter().filter(|row| wanted(row["change"].as_str().unwrap()));
    wanted.map(ToString::to_string).collect()
}

/// How many runs each row takes, by the tool's own forecast; none if no number is enough.
fn forecast(test_dir: &TestDir, pilot: &Path) -> BTreeMap<String, Option<u64>> {
    let said = success(&test_dir.tool().arg("plan").arg(pilot).output().unwrap());
    eprint!("{said}");
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let (runs, name) = (words.next()?, words.next()?);
        name.starts_with("operations.").then(|| (name.to_owned(), runs.parse().ok()))
    };
    let rows: BTreeMap<_, _> = said.lines().filter_map(row).collect();
    assert_eq!(rows.len(), ROWS.len(), "{said}");
    rows
}

/// Makes a runc that is later by a tenth of what the longest row takes without it: every row is slower by
/// a tenth at least.
fn slower(test_dir: &TestDir, pilot: &Path) -> PathBuf {
    let results: Value =
        serde_json::from_slice(&fs::read(pilot.join("results.json")).unwrap()).unwrap();
    let median =
        |name: &str| row(&results, name, "here/runc")["summary"]["median"].as_f64().unwrap();
    // A life calls runc more often than any of its parts.
    let parts = ROWS.iter().filter(|name| !name.contains("life"));
    let longest = parts.map(|name| median(name)).fold(0.0, f64::max);
    let wrapper = test_dir.path("runc");
    let delay = longest / 10.0 / 1000.0;
    let text = format!("#!/bin/sh\nsleep {delay:.4}\nexec {RUNC} \"$@\"\n");
    fs::write(&wrapper, text).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    wrapper
}

/// The most runs that are taken, whatever the forecast says.
fn most() -> u64 {
    std::env::var("TORPOR_RUNS").map_or(100, |runs| runs.parse().unwrap())
}

/// Five of a hundred may be wrong; of a few rows, one.
fn may_be_wrong(rows: usize) -> usize {
    rows.div_ceil(20)
}

#[test]
fn a_tenth_is_found_and_nothing_else() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: a_tenth_is_found_and_nothing_else (TORPOR_LONG=1 runs it)");
        return;
    }
    let test_dir = TestDir::new();
    let runc = Path::new(RUNC);
    let pilot = run(&test_dir, "pilot", &[("runc", runc)], 10);
    let forecast = forecast(&test_dir, &pilot);
    let wanted = forecast.values().map(|runs| runs.unwrap_or(u64::MAX)).max().unwrap();
    let runs = wanted.clamp(10, most());
    let promised: Vec<&str> = ROWS
        .into_iter()
        .filter(|name| forecast[*name].is_some_and(|wanted| wanted <= runs))
        .collect();
    eprintln!("{runs} runs of each; a tenth will be found in {promised:?}");
    assert!(
        promised.len() * 2 >= ROWS.len(),
        "the machine is too noisy to say anything: with {runs} runs of each a tenth is promised to be found in {promised:?} only"
    );
    let slow = slower(&test_dir, &pilot);
    // One run of three, so that a drift of the machine is in all of them, and one more of the first.
    let first = run(&test_dir, "first", &[("runc", runc), ("again", runc), ("slow", &slow)], runs);
    let second = run(&test_dir, "second", &[("runc", runc)], runs);
    let base = only(&test_dir, &first, "runc");
    let missed =
        rows(&test_dir, &base, &only(&test_dir, &first, "slow"), |change| change != "worse");
    let is_promised =
        |row: &&String| promised.iter().any(|name| row.contains(&format!("{name}\"")));
    let missed: Vec<&String> = missed.iter().filter(is_promised).collect();
    assert!(
        missed.len() <= may_be_wrong(promised.len()),
        "not found with {runs} runs: {missed:#?}"
    );
    let equal = [only(&test_dir, &first, "again"), second.join("results.json")];
    let flagged =
        equal.map(|same| rows(&test_dir, &base, &same, |change| change != "none")).concat();
    assert!(
        flagged.len() <= may_be_wrong(2 * ROWS.len()),
        "flagged in two runs of the same: {flagged:#?}"
    );
    eprintln!("missed: {missed:?}, flagged: {flagged:?}");
    test_dir.assert_clean();
}
