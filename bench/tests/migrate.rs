//! The benchmark of migrations, small: Redis moves in every mode, and its clients get every answer right.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn redis_moves_in_every_mode() {
    let bench = Path::new(env!("CARGO_BIN_EXE_torpor-bench"));
    let torpor = bench.with_file_name("torpor");
    assert!(torpor.exists(), "cargo build --package torpor-cli");
    let dir = tempfile::tempdir().unwrap();
    let results = tempfile::tempdir().unwrap();
    let mut command = Command::new(bench);
    command.arg(torpor).arg(dir.path()).arg(results.path().join("bench.json")).arg("migrate");
    for (name, value) in [
        ("BENCH_MIB", "16"),
        ("MIGRATE_GBITS", "1"),
        ("MIGRATE_READS", "10"),
        ("MIGRATE_TIMES", "1"),
        ("MIGRATE_MARGIN", "200"),
    ] {
        command.env(name, value);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // What was built early is what runs.
    assert!(!said.contains("built anew"), "{said}");
    let table = fs::read_to_string(results.path().join("migration.md")).unwrap();
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let row = table.lines().find(|line| line.starts_with(&format!("| {mode} |")));
        let row = row.unwrap_or_else(|| panic!("no {mode} in {table}"));
        let numbers: Vec<f64> =
            row.split('|').filter_map(|cell| cell.trim().parse().ok()).collect();
        let [_, _, sent, downtime, expected, rehearsed, .., memory_here, memory_there] =
            numbers[..]
        else {
            panic!("{row}")
        };
        assert!(numbers.len() == 17 && sent > 16.0 && downtime > 0.0, "{row}");
        assert!(expected > 0.0 && rehearsed > 0.0, "{row}");
        assert!(memory_here > 1.0 && memory_there > 16.0, "{row}");
    }
    let judged = fs::read_to_string(results.path().join("bench.json")).unwrap();
    for name in ["estimates", "estimates of --dry-run"] {
        assert!(judged.contains(&format!("migration: {name} within 20 %, of 5")), "{judged}");
    }
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none(), "something is left");
}
