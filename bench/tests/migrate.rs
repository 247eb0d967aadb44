//! The benchmark of migrations, small: services move in every mode, and who uses them gets every answer right.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// What it says, its table, and what it judges.
fn measured(settings: &[(&str, &str)]) -> [String; 3] {
    let (said, results) = run("migrate", settings);
    let read = |name: &str| fs::read_to_string(results.path().join(name)).unwrap();
    [said, read("migration.md"), read("bench.json")]
}

/// What a part says, and its results.
fn run(part: &str, settings: &[(&str, &str)]) -> (String, TempDir) {
    let bench = Path::new(env!("CARGO_BIN_EXE_torpor-bench"));
    let torpor = bench.with_file_name("torpor");
    assert!(torpor.exists(), "cargo build --package torpor-cli");
    let dir = tempfile::tempdir().unwrap();
    let results = tempfile::tempdir().unwrap();
    let mut command = Command::new(bench);
    command.arg(torpor).arg(dir.path()).arg(results.path().join("bench.json")).arg(part);
    let program = dir.path().join("target");
    let source = format!("{}/target.c", env!("CARGO_MANIFEST_DIR"));
    let compiled = Command::new("gcc").args(["-pthread", "-o"]).arg(&program).arg(source).status();
    assert!(compiled.unwrap().success());
    let usual = [("MIGRATE_GBITS", "1"), ("MIGRATE_TIMES", "1"), ("MIGRATE_MARGIN", "200")];
    command.envs(usual).envs(settings.iter().copied());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    fs::remove_file(program).unwrap();
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none(), "something is left");
    (said, results)
}

/// The numbers of the row of a mode in a table.
fn numbers(table: &str, mode: &str) -> Vec<f64> {
    let row = table.lines().find(|line| line.starts_with(&format!("| {mode} |")));
    let row = row.unwrap_or_else(|| panic!("no {mode} in {table}"));
    row.split('|').filter_map(|cell| cell.trim().parse().ok()).collect()
}

#[test]
fn redis_moves_in_every_mode() {
    let [said, table, judged] =
        measured(&[("MIGRATE_SERVICES", "redis"), ("BENCH_MIB", "16"), ("MIGRATE_READS", "10")]);
    // What was built early is what runs.
    assert!(!said.contains("built anew"), "{said}");
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let numbers = numbers(&table, mode);
        let [_, _, sent, downtime, expected, rehearsed, .., memory_here, memory_there] =
            numbers[..]
        else {
            panic!("{table}")
        };
        assert!(numbers.len() == 17 && sent > 16.0 && downtime > 0.0, "{table}");
        assert!(expected > 0.0 && rehearsed > 0.0, "{table}");
        assert!(memory_here > 1.0 && memory_there > 16.0, "{table}");
        let stall = format!("no answer beyond the downtime, {mode}");
        assert!(judged.contains(&stall), "{judged}");
    }
    for mode in ["pipelined", "hybrid"] {
        assert!(
            judged.contains(&format!("of the kernel, the disk and the link, {mode}")),
            "{judged}"
        );
    }
    for name in ["estimates", "estimates of --dry-run"] {
        assert!(judged.contains(&format!("migration: {name} within 20 %, of 5")), "{judged}");
    }
}

#[test]
fn other_services_move() {
    let [said, table, judged] = measured(&[
        ("MIGRATE_SERVICES", "mariadb graph tree"),
        ("MIGRATE_PROCESSES", "20"),
        ("MIGRATE_MODES", "pipelined hybrid"),
        ("MIGRATE_BANDWIDTH", "100M"),
        ("BENCH_MIB", "4"),
    ]);
    for title in ["MariaDB", "graph", "20 processes"] {
        if said.contains(&format!("{title}: left out")) {
            println!("left out: {title} moves in the benchmark (it is not here)");
            continue;
        }
        let heading = format!("{title}, 1 Gbit/s:");
        let (_, table) = table.split_once(&heading).unwrap_or_else(|| panic!("{table}"));
        for mode in ["pipelined", "hybrid"] {
            let numbers = numbers(table, mode);
            assert!(numbers.len() == 17 && numbers[2] > 0.0 && numbers[3] > 0.0, "{table}");
            // There were answers before and after it.
            assert!(numbers[10] > 0.0 && numbers[12] > 0.0, "{table}");
        }
        for what in ["downtime, hybrid", "answers during rounds, of those before, pipelined"] {
            assert!(judged.contains(&format!("migration, {heading} {what}")), "{judged}");
        }
    }
}

#[test]
fn sizes_are_compared() {
    let [_, table, judged] = measured(&[
        ("MIGRATE_SERVICES", "graph"),
        ("MIGRATE_MODES", "pipelined"),
        ("MIGRATE_MIB", "1 8"),
        ("MIGRATE_GBITS", "10"),
    ]);
    for mib in [1, 8] {
        assert!(table.contains(&format!("graph, {mib} MiB, 10 Gbit/s:")), "{table}");
    }
    let what = "migration, graph, 10 Gbit/s: restore of most data : of least, pipelined";
    assert!(judged.contains(what), "{judged}");
}

/// A mode may have options: they have rows of their own. What it costs there is compared with the baseline.
#[test]
fn a_mode_has_options() {
    const LATER: &str = "pipelined+state=full+start-restore-after=2";
    let [said, table, judged] = measured(&[
        ("MIGRATE_SERVICES", "graph"),
        ("MIGRATE_MODES", &format!("pre-copy pipelined {LATER}")),
        ("BENCH_MIB", "1"),
    ]);
    for mode in ["pre-copy", "pipelined", LATER] {
        assert!(numbers(&table, mode).len() == 17, "{table}");
        assert!(said.contains(&format!("{mode}, graph, 1 Gbit/s: ")), "{said}");
    }
    for what in ["memory", "CPU"] {
        let what = format!("migration, graph, 1 Gbit/s: {what} there, pipelined : pre-copy");
        assert!(judged.contains(&what), "{judged}");
    }
}

/// A program that touches its memory at random when it runs there finds all of it as it was, and how long it waited is told.
#[test]
fn faults_are_measured() {
    let (_, results) = run("fetched", &[("BENCH_MIB", "16"), ("BENCH_ROUNDS", "1")]);
    let judged = fs::read(results.path().join("bench.json")).unwrap();
    let lines: Vec<serde_json::Value> = serde_json::from_slice(&judged).unwrap();
    let value = |name: &str| {
        let name = format!("post-copy under random faults, 1 Gbit/s: {name}");
        let line = lines.iter().find(|line| line["what"] == name);
        line.unwrap_or_else(|| panic!("no {name} in {lines:?}"))["value"].as_f64().unwrap()
    };
    // It waits for some of its pages, and for none of them twice.
    let faults = value("faults");
    assert!(faults > 0.0, "{lines:?}");
    for share in [value("of the link"), value("faults within 2 ms")] {
        assert!(share > 0.0, "{lines:?}");
    }
    assert!(value("faults within 2 ms") <= 100.0 && value("99 of 100 faults within") > 0.0);
}

/// Tasks that are stopped go on when somebody cancels, though a script hangs.
#[test]
fn the_end_of_a_migration_is_measured() {
    let (_, results) = run("cancelled", &[("BENCH_MIB", "16"), ("BENCH_ROUNDS", "1")]);
    let judged = fs::read_to_string(results.path().join("bench.json")).unwrap();
    assert!(
        judged.contains("they go on after") && judged.contains("\"at_most\": 100.0"),
        "{judged}"
    );
}

/// Memory goes in each way, and each is compared.
#[test]
fn the_stream_is_measured() {
    let (_, results) = run("stream", &[("BENCH_MIB", "16"), ("BENCH_ROUNDS", "1")]);
    let judged = fs::read(results.path().join("bench.json")).unwrap();
    let lines: Vec<serde_json::Value> = serde_json::from_slice(&judged).unwrap();
    let value = |name: &str| {
        let line = lines.iter().find(|line| line["what"] == name);
        line.unwrap_or_else(|| panic!("no {name} in {lines:?}"))["value"].as_f64().unwrap()
    };
    for name in ["a bare copy over loopback", "AES-256-GCM alone, one thread"] {
        assert!(value(name) > 0.0);
    }
    for way in ["plain", "encrypted", "sealed and encrypted"] {
        let rate = value(&format!("stream, {way}"));
        let ratio = rate / value("a bare copy over loopback");
        assert!(rate > 0.0 && (value(&format!("stream, {way} : bare copy")) - ratio).abs() < 1e-9);
    }
    for [way, like] in [
        ["encrypted", "plain"],
        ["sealed and encrypted", "plain"],
        ["encrypted, 4 connections", "plain, 4 connections"],
    ] {
        assert!(value(&format!("stream, {way} : {like}")) > 0.0);
    }
}
