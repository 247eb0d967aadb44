//! `compare` on results that are made up: its exit statuses are what scripts rely on.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::TestDir;
use serde_json::{Value, json};

/// Results with values around 100 that deviate by `noise`, times `factor`.
fn results(test_dir: &TestDir, name: &str, seed: u64, noise: f64, factor: f64) -> PathBuf {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sample = |order: u64, base: f64| {
        let normal = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        json!({"order": order, "time": 1.0, "warmup": false, "value": base * (normal * noise).exp()})
    };
    let (mut benchmarks, mut rows) = (Vec::new(), Vec::new());
    for number in 0..40 {
        let higher = number % 2 == 1;
        let name = format!("operations.row.n{number}");
        benchmarks.push(json!({
            "name": name, "unit": "ms", "direction": if higher { "higher" } else { "lower" },
            "measures": "", "isolates": "", "needs": [], "group": "life",
        }));
        let base = 100.0 * if higher { 1.0 / factor } else { factor };
        let samples: Vec<Value> = (0..20).map(|order| sample(order, base)).collect();
        rows.push(json!({
            "benchmark": name, "target": "e/h", "status": "ok", "reason": null, "failures": 0,
            "summary": null, "samples": samples,
        }));
    }
    let all = json!({
        "schema": "torpor-benchmark/1", "tool": "1", "id": seed.to_string(), "started": 1.0, "finished": 2.0,
        "complete": true, "seed": 1, "interruptions": 0, "repeated": 0, "settings": {},
        "machine": {
            "hostname": "h", "cpu": "c", "cpus": 2, "architecture": "a", "memory": 1, "kernel": "k",
            "cgroup": "v2", "governor": "", "system": "s", "facts": {},
        },
        "calibration": {"samples": [5.0], "median": 5.0, "deviation": 0.0, "noisy": false},
        "targets": [{"name": "e/h", "endpoint": "", "runtime": "", "facts": {}, "digests": {}}],
        "benchmarks": benchmarks, "rows": rows,
    });
    let path = test_dir.path(name);
    fs::write(&path, all.to_string()).unwrap();
    path
}

fn changed(path: &Path, change: impl Fn(&mut Value)) -> PathBuf {
    let mut all: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut all);
    let other = path.with_extension("changed");
    fs::write(&other, all.to_string()).unwrap();
    other
}

fn compare(test_dir: &TestDir, arguments: &[&Path]) -> (i32, String) {
    let output = test_dir.tool().arg("compare").args(arguments).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}

#[test]
fn two_runs_of_the_same_differ_in_few_rows() {
    let test_dir = TestDir::new();
    let mut flagged = 0;
    for seed in 0..10 {
        let a = results(&test_dir, "a", 100 + seed, 0.1, 1.0);
        let b = results(&test_dir, "b", 200 + seed, 0.1, 1.0);
        let output = test_dir.tool().args(["compare", "--json"]).args([&a, &b]).output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = said["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 40);
        flagged += rows.iter().filter(|row| row["change"] != "none").count();
    }
    assert!(flagged <= 20, "{flagged} of 400 rows: more than 5 %");
}

#[test]
fn equal_results_are_the_same() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    assert_eq!(compare(&test_dir, &[&a, &a]).0, 0);
}

#[test]
fn a_slowdown_of_ten_percent_is_found() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.04, 1.0);
    let b = results(&test_dir, "b", 2, 0.04, 1.1);
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert_eq!(status, 1, "{said}");
    assert!(said.matches("Worse: ").count() >= 38, "fewer than 95 % of 40 rows: {said}");
    // The other way round all is better, which is no reason for a script to stop.
    let (status, said) = compare(&test_dir, &[&b, &a]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("Better: "), "{said}");
    // Below the threshold it does not count, however sure it is.
    let output =
        test_dir.tool().args(["compare", "--threshold", "30"]).args([&a, &b]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
}

/// Gives results a machine on which the same loop takes about so long, and deviates.
fn on_machine(path: &Path, seed: u64, time: f64) -> PathBuf {
    let mut random = fastrand::Rng::with_seed(seed);
    let samples: Vec<f64> = (0..150).map(|_| time * (0.7 + 0.6 * random.f64())).collect();
    changed(path, |all| {
        all["calibration"] =
            json!({"samples": samples, "median": time, "deviation": 0.2, "noisy": true});
    })
}

#[test]
fn what_a_noisy_machine_does_is_not_the_runtimes() {
    let test_dir = TestDir::new();
    let a = on_machine(&results(&test_dir, "a", 1, 0.04, 1.0), 1, 5.0);
    // All is slower by eight of a hundred, the machine itself as well.
    let b = on_machine(&results(&test_dir, "b", 2, 0.04, 1.08), 2, 5.4);
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("the machine itself may have differed"), "{said}");
    // The loop may be as fast as before, and other work hit containers harder.
    let c = on_machine(&results(&test_dir, "c", 4, 0.04, 1.15), 4, 5.0);
    let (status, said) = compare(&test_dir, &[&a, &c]);
    assert_eq!(status, 0, "{said}");
    // Twice as slow is more than that machine does.
    let slow = on_machine(&results(&test_dir, "slow", 3, 0.04, 2.0), 3, 5.4);
    assert_eq!(compare(&test_dir, &[&a, &slow]).0, 1);
    // Both of one run: the machine was the same.
    let id = serde_json::from_slice::<Value>(&fs::read(&a).unwrap()).unwrap()["id"].clone();
    let same = changed(&b, |all| all["id"] = id.clone());
    let (status, said) = compare(&test_dir, &[&a, &same]);
    assert_eq!(status, 1, "{said}");
}

#[test]
fn a_row_that_is_lost_is_worse() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let b = changed(&a, |all| {
        all["rows"][3]["status"] = json!("failed");
        all["rows"][3]["reason"] = json!("it broke");
        all["rows"][3]["samples"] = json!([]);
    });
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("it broke"), "{said}");
}

/// A runtime that begins to fail gives values first, and is given up after some failures.
#[test]
fn a_row_that_fails_is_worse_when_too_few_samples_are_left() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let failing = |left: usize, complete: bool| {
        changed(&a, |all| {
            all["complete"] = json!(complete);
            let row = &mut all["rows"][3];
            row["samples"].as_array_mut().unwrap().truncate(left);
            (row["failures"], row["reason"]) = (json!(3), json!("it broke"));
        })
    };
    let (status, said) = compare(&test_dir, &[&a, &failing(4, true)]);
    assert_eq!(status, 1, "{said}");
    let line = said.lines().find(|line| line.starts_with("Lost: operations.row.n3 of e/h"));
    assert!(
        line.is_some_and(|line| line.contains("3 of its samples have failed: it broke")),
        "{said}"
    );
    // It may come yet.
    assert_eq!(compare(&test_dir, &[&a, &failing(4, false)]).0, 2);
    // With enough of them it is as it was, and that it fails is said.
    let (status, said) = compare(&test_dir, &[&a, &failing(5, true)]);
    let told =
        "warning: 1 rows fail more often than before, and have values: operations.row.n3 of e/h";
    assert!(status == 0 && said.contains(told), "{said}");
    // What failed before as well is no news.
    let before = test_dir.path("before");
    fs::rename(failing(5, true), &before).unwrap();
    let (status, said) = compare(&test_dir, &[&before, &before]);
    assert!(status == 0 && !said.contains("fail more often"), "{said}");
}

#[test]
fn rows_that_are_gone_are_told() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let b = changed(&a, |all| {
        let rows = all["rows"].as_array_mut().unwrap();
        rows.drain(3..5);
    });
    let (status, said) = compare(&test_dir, &[&a, &b]);
    let told = "warning: 2 rows of the old run are not in the new one";
    assert!(
        status == 0 && said.contains(told) && said.contains("n3 of e/h is the first"),
        "{said}"
    );
    // What is new has nothing that it could be compared with.
    let (status, said) = compare(&test_dir, &[&b, &a]);
    assert!(status == 0 && !said.contains("not in the new one"), "{said}");
}

/// Whether a limit held, or a clock was fine enough, is not how fast a runtime is.
#[test]
fn a_row_that_is_invalid_is_told_and_not_worse() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let b = changed(&a, |all| {
        all["rows"][3]["status"] = json!("invalid");
        all["rows"][3]["reason"] = json!("the limit is not exact");
    });
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("Invalid: operations.row.n3 of e/h"), "{said}");
    assert!(said.contains("the limit is not exact"), "{said}");
    // One sample that is invalid among others is not counted: the row is as it was.
    let c = changed(&a, |all| {
        let sample = &mut all["rows"][3]["samples"][0];
        (sample["invalid"], sample["value"]) = (json!(true), json!(1e9));
        all["rows"][3]["invalid"] = json!(1);
    });
    let (status, said) = compare(&test_dir, &[&a, &c]);
    assert!(status == 0 && !said.contains("row.n3"), "{said}");
}

/// A run that is interrupted shows what has become worse so far, and not that nothing has.
#[test]
fn what_has_not_come_yet_is_not_the_same() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let b = results(&test_dir, "b", 2, 0.02, 1.3);
    let cut = |path: &Path, left: usize| {
        changed(path, |all| {
            all["complete"] = json!(false);
            let row = &mut all["rows"][3];
            row["samples"].as_array_mut().unwrap().truncate(left);
            row["status"] = json!(if left > 0 { "ok" } else { "pending" });
        })
    };
    for left in [0, 4] {
        let (status, said) = compare(&test_dir, &[&a, &cut(&a, left)]);
        assert_eq!(status, 2, "{left}: {said}");
        assert!(said.contains("the new run is not complete: 1 rows of the old one"), "{said}");
        assert!(said.contains("goes on with it"), "{said}");
        let (status, said) = compare(&test_dir, &[&a, &cut(&b, left)]);
        assert_eq!(status, 1, "what is worse is worse already: {said}");
    }
    // Each row has enough samples, though there may be more.
    let (status, said) = compare(&test_dir, &[&a, &cut(&a, 5)]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("warning: the new run is not complete"), "{said}");
    // The old one may lack what it likes: nothing is measured by it.
    assert_eq!(compare(&test_dir, &[&cut(&a, 0), &a]).0, 0);
}

/// Values like the memory that a machine has less available can be zero, and below.
#[test]
fn values_that_are_not_above_zero_are_compared_by_their_difference() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    // Row 2 is better if it is lower. Its samples go from about zero to as many more.
    let with = |name: &str, more: f64| {
        let path = test_dir.path(name);
        let other = changed(&a, |all| {
            for (n, sample) in
                all["rows"][2]["samples"].as_array_mut().unwrap().iter_mut().enumerate()
            {
                sample["value"] = json!(more + f64::from(u32::try_from(n % 3).unwrap()) - 1.0);
            }
        });
        fs::rename(other, &path).unwrap();
        path
    };
    let (zero, same, more) = (with("zero", 0.0), with("same", 0.0), with("more", 50.0));
    assert_eq!(compare(&test_dir, &[&zero, &same]).0, 0);
    let (status, said) = compare(&test_dir, &[&zero, &more]);
    assert_eq!(status, 1, "{said}");
    let line = said.lines().find(|line| line.starts_with("Worse: operations.row.n2 ")).unwrap();
    assert!(line.contains(", by 50.0000 ("), "{line}");
    let (status, said) = compare(&test_dir, &[&more, &zero]);
    assert!(status == 0 && said.contains("Better: operations.row.n2 "), "{said}");
}

#[test]
fn what_cannot_be_compared_is_not() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    for (what, value) in [("hostname", json!("other")), ("cpus", json!(4)), ("kernel", json!("9"))]
    {
        let b = changed(&a, |all| all["machine"][what] = value.clone());
        let (status, said) = compare(&test_dir, &[&a, &b]);
        assert_eq!(status, 2, "{said}");
    }
    let b = changed(&a, |all| all["benchmarks"][0]["unit"] = json!("s"));
    assert_eq!(compare(&test_dir, &[&a, &b]).0, 2);
    let b = changed(&a, |all| all["settings"]["effort"] = json!(3.0));
    assert_eq!(compare(&test_dir, &[&a, &b]).0, 2);
    let b = changed(&a, |all| all["targets"][0]["facts"]["pulled image"] = json!("sha256:7"));
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert!(status == 2 && said.contains("the tool's own and sha256:7"), "{said}");
    let b = changed(&a, |all| all["rows"] = json!([]));
    assert_eq!(compare(&test_dir, &[&a, &b]).0, 2);
    let b = changed(&a, |all| {
        for row in all["rows"].as_array_mut().unwrap() {
            row["samples"].as_array_mut().unwrap().truncate(3);
        }
    });
    let (status, said) = compare(&test_dir, &[&a, &b]);
    assert_eq!(status, 2, "three samples tell nothing: {said}");
}

#[test]
fn what_is_broken_is_named() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.02, 1.0);
    let text = fs::read_to_string(&a).unwrap();
    let broken = [
        text[..text.len() / 2].to_owned(),
        String::new(),
        "[]".into(),
        text.replace("torpor-benchmark/1", "torpor-benchmark/9"),
        text.replacen("\"e/h\"", "\"other\"", 1),
        text.replacen("\"samples\":[{", "\"samples\":\"x\",\"s\":[{", 1),
    ];
    for (number, content) in broken.iter().enumerate() {
        let b = test_dir.path("broken");
        fs::write(&b, content).unwrap();
        let (status, said) = compare(&test_dir, &[&a, &b]);
        assert_eq!(status, 3, "{number}: {said}");
        assert_eq!(compare(&test_dir, &[&b, &a]).0, 3, "{number}");
    }
    let nowhere = test_dir.path("nowhere");
    assert_eq!(compare(&test_dir, &[&a, &nowhere]).0, 3);
}

/// A script takes status 1 for a regression.
#[test]
fn only_what_is_worse_has_status_1() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.04, 1.0);
    let b = results(&test_dir, "b", 2, 0.04, 1.3);
    let (name, wrong) = (Path::new("--frobnicate"), Path::new("--threshold=nan"));
    for arguments in [&[&*a][..], &[&a, &b, name], &[&a, &b, wrong], &[]] {
        let (status, said) = compare(&test_dir, arguments);
        assert_eq!(status, 2, "{arguments:?}: {said}");
    }
    for format in [&["compare"][..], &["compare", "--json"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = test_dir.tool().args(format).args([&a, &b]).stdout(full).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("standard output: No space left"), "{said}");
    }
    assert_eq!(compare(&test_dir, &[&a, &b]).0, 1);
}

/// A row of zeros has no deviation in percent.
#[test]
fn a_plan_has_numbers() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.05, 1.0);
    let zero = changed(&a, |all| {
        let samples = all["rows"][0]["samples"].as_array_mut().unwrap();
        samples.iter_mut().for_each(|sample| sample["value"] = json!(0.0));
    });
    let output = test_dir.tool().arg("plan").arg(&zero).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let line = said.lines().find(|line| line.contains("operations.row.n0 ")).unwrap();
    assert!(line.contains("never") && line.contains("its median is 0"), "{line}");
    assert!(!said.contains("NaN") && !said.contains("inf"), "{said}");
    for difference in ["nan", "inf", "0", "-10"] {
        let difference = format!("--difference={difference}");
        let output = test_dir.tool().args(["plan", &difference]).arg(&a).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{difference}");
    }
}

#[test]
fn a_plan_says_how_many_runs_it_takes() {
    let test_dir = TestDir::new();
    let a = results(&test_dir, "a", 1, 0.05, 1.0);
    let output = test_dir.tool().arg("plan").arg(&a).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said.lines().filter(|line| line.contains("operations.row")).count(), 40, "{said}");
}

#[test]
fn the_list_is_for_scripts() {
    let test_dir = TestDir::new();
    let output = test_dir.tool().args(["list", "--json"]).output().unwrap();
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    for one in list.as_array().unwrap() {
        for key in ["name", "unit", "direction", "measures", "isolates", "needs"] {
            assert!(!one[key].is_null(), "{key}: {one}");
        }
    }
    let has = |name: &str| list.as_array().unwrap().iter().any(|one| one["name"] == name);
    for name in ["operations.container.start", "performance.cpu.total", "limits.cpu.share"] {
        assert!(has(name), "{name}");
    }
}
