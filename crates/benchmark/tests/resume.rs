//! A run that goes on later goes on with the same: on this machine, by this tool, of these programs. Samples
//! stay with what they were taken of.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;

use common::fake::Fake;
use common::{TestDir, row, samples, success};
use serde_json::{Value, json};

/// A run that was interrupted before its end, as the lines of its journal.
fn interrupted() -> (TestDir, Fake, Vec<Value>) {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let endpoint = fake.endpoint().replace("[{name: x}]", "[{name: x}, {name: y}]");
    test_dir.config(&format!("filters: [operations.image.*]\nruns: 3\nwarmup: 1\n{endpoint}"));
    success(&test_dir.run().output().unwrap());
    let journal = fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap();
    let lines = journal.lines().map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    // The end, and the last piece of work.
    assert_eq!(lines.pop(), Some(json!("complete")));
    while lines.pop().unwrap().get("done").is_none() {}
    for name in ["results.json", "report.html"] {
        fs::remove_file(test_dir.path("out").join(name)).unwrap();
    }
    (test_dir, fake, lines)
}

fn write(test_dir: &TestDir, lines: &[Value]) -> String {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(test_dir.path("out/journal.jsonl"), &text).unwrap();
    text
}

fn with(lines: &[Value], change: impl Fn(&mut Vec<Value>)) -> Vec<Value> {
    let mut lines = lines.to_vec();
    change(&mut lines);
    lines
}

/// What was found out about the first target.
fn target(lines: &mut [Value]) -> &mut Value {
    let line = lines.iter_mut().find(|line| line.get("targets").is_some()).unwrap();
    &mut line["targets"][0]
}

#[test]
fn it_goes_on_with_nothing_else() {
    let (test_dir, fake, lines) = interrupted();
    let this = std::env::current_exe().unwrap().canonicalize().unwrap();
    let this = this.to_str().unwrap();
    let cases: [(Vec<Value>, &str); 7] = [
        (with(&lines, |all| all[0]["machine"]["kernel"] = json!("1.0")), "kernel: 1.0 and "),
        (with(&lines, |all| all[0]["machine"]["hostname"] = json!("other")), "name: other and "),
        (with(&lines, |all| all[0]["tool"] = json!("0.0.1")), "version 0.0.1 of the tool"),
        (with(&lines, |all| all[0]["plan"] = json!("sha256:0")), "in another order"),
        (with(&lines, |all| all[0]["plan"] = Value::Null), "did not note what each sample is of"),
        (
            with(&lines, |all| target(all)["endpoint"] = json!("fake v1.1, CRI v1")),
            "the endpoint of fake/x: fake v1.1, CRI v1 and fake v1.2.3",
        ),
        (with(&lines, |all| target(all)["digests"][this] = json!("sha256:0")), "the program "),
    ];
    let pulls = fake.calls("PullImage");
    for (number, (lines, reason)) in cases.iter().enumerate() {
        let text = write(&test_dir, lines);
        let refused = test_dir.run().output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains(reason), "{number}: {said}");
        assert!(said.contains("--again") && said.contains("--output"), "{said}");
        // Nothing was measured, and nothing of what was there has gone.
        assert_eq!(fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap(), text);
        assert!(!test_dir.path("out/results.json").exists());
        test_dir.assert_clean();
    }
    // The images that every run begins with, but none as a sample: two times for each that was refused late.
    assert_eq!(fake.calls("PullImage"), pulls + 2 * 2);
    write(&test_dir, &lines);
    success(&test_dir.run().output().unwrap());
    let results = test_dir.results();
    assert_eq!((&results["interruptions"], &results["complete"]), (&json!(1), &json!(true)));
    for target in ["fake/x", "fake/y"] {
        assert_eq!(samples(row(&results, "operations.image.pull", target)), 3);
    }
    test_dir.assert_clean();
}

#[test]
fn what_is_complete_stays_as_it_is() {
    let (test_dir, fake, lines) = interrupted();
    write(&test_dir, &lines);
    success(&test_dir.run().output().unwrap());
    let path = test_dir.path("out/results.json");
    let before = fs::read(&path).unwrap();
    // As a tool of before has written it, on another machine: nobody would know whose samples these are.
    let journal = fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap();
    let mut old: Vec<Value> =
        journal.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    old[0].as_object_mut().unwrap().remove("plan");
    old[0]["machine"]["kernel"] = json!("1.0");
    for line in &mut old {
        if let Some(done) = line.get_mut("done") {
            done.as_object_mut().unwrap().remove("work");
        }
    }
    write(&test_dir, &old);
    let pulls = fake.calls("PullImage");
    success(&test_dir.run().output().unwrap());
    assert_eq!((fs::read(&path).unwrap(), fake.calls("PullImage")), (before, pulls));
    let read = test_dir.tool().arg("compare").args([&path, &path]).output().unwrap();
    assert!(read.status.code() == Some(2), "three samples tell nothing: {read:?}");
    fs::remove_file(&path).unwrap();
    let refused = test_dir.run().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("did not note"), "{said}");
    success(&test_dir.run().arg("--again").output().unwrap());
    assert_eq!(samples(row(&test_dir.results(), "operations.image.pull", "fake/x")), 3);
}

/// A journal of nothing would be in the way of the next run, or take the place of what was measured.
#[test]
fn what_measures_nothing_leaves_everything_as_it_is() {
    let (test_dir, _fake, lines) = interrupted();
    let text = write(&test_dir, &lines);
    let refused = |more: &[&str]| {
        let output = test_dir.run().args(["--filter", "!*"]).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains("nothing is left"), "{said}");
    };
    refused(&["--again"]);
    assert_eq!(fs::read_to_string(test_dir.path("out/journal.jsonl")).unwrap(), text);
    fs::remove_dir_all(test_dir.path("out")).unwrap();
    refused(&[]);
    assert!(!test_dir.path("out").exists());
}
