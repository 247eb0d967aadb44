//! The daemon over HTTP: description, events, tokens, TLS, metrics, and GitLab's driver.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;
#[path = "interface/gitlab.rs"]
mod gitlab;
#[path = "interface/listening.rs"]
mod listening;
#[path = "interface/page.rs"]
mod page;
#[path = "interface/prices.rs"]
mod prices;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use common::{Daemon, ask, shown, until};
use serde_json::{Value, json};

#[test]
fn what_is_described_is_there_and_the_other_way_round() {
    let daemon = Daemon::start(&[]);
    let [id, spare] = [0; 2].map(|_| daemon.submit(&[], &["true"]));
    daemon.wait_for(id, "done");
    daemon.wait_for(spare, "done");
    let (status, text) = ask(&daemon, "GET", "/openapi.json", "", "");
    assert_eq!(status, 200);
    let description: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(description["openapi"], "3.1.0");
    let paths = description["paths"].as_object().unwrap();
    for (path, methods) in paths {
        for method in methods.as_object().unwrap().keys() {
            // What is deleted is there no more.
            let id = if method == "delete" { spare } else { id };
            let real = path.replace("{id}", &id.to_string()).replace("{name}", "owner:ann");
            let real = if real == "/v1/events" { "/v1/events?follow=0".to_owned() } else { real };
            let (status, body) = ask(&daemon, &method.to_uppercase(), &real, "", "{}");
            assert_ne!(status, 404, "{method} {path}: {body}");
            let known = methods[method]["responses"].as_object().unwrap();
            assert!(known.contains_key(&status.to_string()), "{method} {path}: {status} {body}");
        }
    }
    // Each field of a job that the description names is taken, and no other.
    let spec = &description["components"]["schemas"]["Spec"]["properties"];
    for field in spec.as_object().unwrap().keys() {
        let (_, body) = ask(&daemon, "POST", "/v1/jobs", "", &json!({ field: null }).to_string());
        assert!(!body.contains("unknown field"), "{field}: {body}");
    }
    let (status, body) = ask(&daemon, "POST", "/v1/jobs", "", r#"{"nonsense": 1}"#);
    assert!(status == 400 && body.contains("unknown field"));
    assert_eq!(ask(&daemon, "GET", "/v1/jobs/999", "", "").0, 404);
    assert_eq!(ask(&daemon, "POST", "/v1/jobs/1/signal?signal=99", "", "").0, 400);
}

/// A page that is open asks all the time, and thousands of jobs may be over.
#[test]
fn who_asks_for_the_newest_jobs_gets_no_others() {
    let daemon = Daemon::start(&[]);
    let all: Vec<u64> = (0..3).map(|_| daemon.submit(&[], &["true"])).collect();
    let listed = |query: &str| {
        let (status, text) = ask(&daemon, "GET", &format!("/v1/jobs{query}"), "", "");
        assert_eq!(status, 200, "{text}");
        let jobs: Vec<Value> = serde_json::from_str(&text).unwrap();
        jobs.iter().map(|job| job["id"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(["", "?limit=2", "?limit=0"].map(listed), [&all[..], &all[1..], &[]]);
}

/// A misspelt class is told of, and the number of the job stands alone on standard output all the same.
#[test]
fn a_class_that_nobody_has_configured_is_told_of() {
    let daemon = Daemon::start(&[]);
    let submit = |class: &str| {
        let output = daemon.queue(&["submit", "--class", class, "--", "true"]).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(output.stdout).trim().parse::<u64>().is_ok(), text(output.stderr))
    };
    assert_eq!(submit("batch"), (true, String::new()));
    let (is_number, said) = submit("bacth");
    assert!(is_number && said.contains("no class \"bacth\" is configured"), "{said}");
}

/// What is there, but not by that method.
#[test]
fn another_method_is_told_of_those_that_there_are() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &["true"]);
    for (method, path, status, allow) in [
        ("PUT", "/v1/jobs".to_owned(), 405, Some("GET, POST")),
        ("POST", "/".to_owned(), 405, Some("GET")),
        ("GET", "/v1/import".to_owned(), 405, Some("POST")),
        ("PATCH", format!("/v1/jobs/{id}"), 405, Some("DELETE, GET")),
        ("GET", format!("/v1/jobs/{id}/cancel"), 405, Some("POST")),
        ("GET", format!("/v1/jobs/{id}/nonsense"), 404, None),
        ("PATCH", "/v1/jobs/9999".to_owned(), 404, None),
        ("GET", "/nonsense".to_owned(), 404, None),
    ] {
        let mut answer = String::new();
        common::begin_to_ask(&daemon, method, &path, "", "").read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{method} {path}: {answer}");
        let said = answer.lines().find_map(|line| line.strip_prefix("Allow: "));
        assert_eq!(said, allow, "{method} {path}: {answer}");
    }
}

/// A path with `{}` in place of what differs.
fn template(path: &str) -> String {
    let part = |part: &str| if part.starts_with('{') { "{}".to_owned() } else { part.to_owned() };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// The methods and paths that are matched in a part of the source: each line that begins with a
/// method has the parts of its paths in brackets, alternatives between bars.
fn matched(source: &str, before: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in source.lines().filter_map(|line| line.trim().strip_prefix("(\"")) {
        let (method, rest) = line.split_once("\", ").unwrap();
        let (patterns, _) = rest.split_once(')').unwrap();
        for pattern in patterns.split('[').skip(1) {
            let (parts, _) = pattern.split_once(']').unwrap();
            let alternatives: Vec<&str> = match parts.contains('|') {
                true => parts.split('|').collect(),
                false => vec![parts],
            };
            for parts in alternatives {
                let words = parts.split(',').map(str::trim).filter(|word| !word.is_empty());
                let part = |word: &str| match word.strip_prefix('"') {
                    Some(word) => format!("/{}", word.trim_end_matches('"')),
                    None => "/{}".to_owned(),
                };
                let path: String = words.map(part).collect();
                found.push(format!("{method} {before}{path}"));
            }
        }
    }
    found
}

#[test]
fn every_route_is_described() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(manifest.join("src/daemon/api.rs")).unwrap();
    let (_, routes) = source.split_once("fn handle(").unwrap();
    let (all, rest) = routes.split_once("\nfn job(").unwrap();
    let (of_jobs, _) = rest.split_once("\n}").unwrap();
    let mut there = [matched(all, ""), matched(of_jobs, "/v1/jobs/{}")].concat();
    // What comes in without being held in memory goes another way.
    there.push("POST /v1/import".to_owned());
    there.iter_mut().filter(|route| route.as_str() == "GET ").for_each(|route| route.push('/'));
    there.sort();
    let text = std::fs::read_to_string(manifest.join("src/daemon/openapi.json")).unwrap();
    let description: Value = serde_json::from_str(&text).unwrap();
    let mut described = Vec::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        let methods = methods.as_object().unwrap().keys();
        described.extend(methods.map(|m| format!("{} {}", m.to_uppercase(), template(path))));
    }
    described.sort();
    assert_eq!(there, described);
}

#[test]
fn a_quota_holds_back_says_so_and_stays() {
    let mut daemon = Daemon::start(&["--slots", "2"]);
    daemon.ok(&["quota", "owner:ann", "--slots", "1"]);
    let first = daemon.submit(&["--owner", "ann"], &["sleep", "1000"]);
    daemon.wait_for(first, "running");
    daemon.kill();
    daemon.launch();
    assert!(daemon.ok(&["quota"]).contains("owner:ann"));
    let second = daemon.submit(&["--owner", "ann"], &["true"]);
    let other = daemon.submit(&["--owner", "bob"], &["true"]);
    daemon.wait_for(other, "done");
    assert_eq!(daemon.job(second)["state"], "queued");
    let why = daemon.ok(&["show", "--why", &second.to_string()]);
    assert!(why.contains("waits for its quota"), "{why}");
    daemon.ok(&["quota", "owner:ann", "--slots", "2"]);
    daemon.wait_for(second, "done");
    daemon.ok(&["cancel", &first.to_string()]);
}

#[test]
fn quotas_that_were_set_leave_the_others_to_the_configuration() {
    let config = |slots: u32| json!({ "rules": { "quotas": { "owner:ann": { "slots": slots }, "owner:bob": { "slots": slots } } } });
    let mut daemon = Daemon::configured(&config(1), &[]);
    daemon.ok(&["quota", "owner:ann", "--slots", "5"]);
    daemon.kill();
    std::fs::write(daemon.dir.path().join("config.json"), config(2).to_string()).unwrap();
    daemon.launch();
    let slots = |name: &str| {
        let quota: Value = serde_json::from_str(&daemon.ok(&["quota", name])).unwrap();
        quota["slots"].as_u64()
    };
    assert_eq!((slots("owner:ann"), slots("owner:bob")), (Some(5), Some(2)));
}

#[test]
fn processors_are_limited_and_labels_kept() {
    let daemon = Daemon::start(&[]);
    let options = ["--cpu", "0.25", "--label", "branch=main", "--label", "of=ann"];
    let id = daemon.submit(&options, &["sh", "-c", "cat /proc/self/cgroup; echo all; sleep 1000"]);
    daemon.wait_for_output(id, "all\n");
    assert_eq!(daemon.job(id)["labels"], json!({ "branch": "main", "of": "ann" }));
    let output = daemon.output(id);
    let group = output.lines().find_map(|line| line.split_once("/torpor-queue/"));
    let (_, group) = group.unwrap_or_else(|| panic!("no cgroup of its own: {output}"));
    // By version 2 of cgroups, or by version 1.
    let files = [("", "cpu.max", "25000 100000\n"), ("cpu/", "cpu.cfs_quota_us", "25000\n")];
    let limits = files.map(|(controller, file, limit)| {
        let path = format!("/sys/fs/cgroup/{controller}torpor-queue/{group}/{file}");
        std::fs::read_to_string(path).is_ok_and(|text| text == limit)
    });
    assert!(limits.contains(&true), "{group}");
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
}

/// It holds back jobs that would have more checkpoints, and not those that have them: they would never end.
#[test]
fn a_quota_of_images_holds_back_who_has_none() {
    let daemon = Daemon::start(&["--slots", "2"]);
    let go = daemon.dir.path().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = daemon.submit(&["--owner", "ann"], &["sh", "-c", &script]);
    until("it has started", || daemon.show(first)["started"].as_i64());
    daemon.ok(&["preempt", &first.to_string(), "--means", "checkpoint"]);
    until("the checkpoint is durable", || daemon.show(first)["checkpoint"].as_u64());
    daemon.ok(&["quota", "owner:ann", "--images", "1"]);
    let second = daemon.submit(&["--owner", "ann"], &["true"]);
    let other = daemon.submit(&["--owner", "bob"], &["true"]);
    daemon.wait_for(other, "done");
    assert_eq!(daemon.job(second)["state"], "queued");
    let why = daemon.ok(&["show", "--why", &second.to_string()]);
    assert!(why.contains("waits for its quota: owner:ann has checkpoints of"), "{why}");
    daemon.ok(&["resume", &first.to_string()]);
    daemon.wait_for(first, "running");
    std::fs::write(go, "").unwrap();
    daemon.wait_for(first, "done");
    daemon.wait_for(second, "done");
}

#[test]
fn a_key_hands_a_job_in_once() {
    let daemon = Daemon::start(&[]);
    let key = "Idempotency-Key: mine\r\n";
    let spec = r#"{"command": ["true"], "dir": "/"}"#;
    let (status, first) = ask(&daemon, "POST", "/v1/jobs", key, spec);
    assert_eq!(status, 201);
    assert_eq!(ask(&daemon, "POST", "/v1/jobs", key, spec).1, first);
    let other = r#"{"command": ["false"], "dir": "/"}"#;
    assert_eq!(ask(&daemon, "POST", "/v1/jobs", key, other).0, 422);
    // Keys of others are others.
    let of_ann = r#"{"command": ["false"], "dir": "/", "owner": "ann"}"#;
    let (status, second) = ask(&daemon, "POST", "/v1/jobs", key, of_ann);
    assert_eq!(status, 201, "{second}");
    assert_ne!(second, first);
    assert_eq!(ask(&daemon, "POST", "/v1/jobs", key, of_ann).1, second);
    // It may have taken its input by then, without which another one is not taken.
    let (key, input) = ("Idempotency-Key: other\r\n", tempfile::tempdir().unwrap());
    let spec = json!({ "command": ["true"], "dir": "/", "input": input.path() }).to_string();
    let (status, third) = ask(&daemon, "POST", "/v1/jobs", key, &spec);
    assert_eq!(status, 201, "{third}");
    drop(input);
    assert_eq!(ask(&daemon, "POST", "/v1/jobs", key, &spec).1, third);
    let (status, said) = ask(&daemon, "POST", "/v1/jobs", "", &spec);
    assert!(status == 400 && said.contains("is no directory on this machine"), "{status} {said}");
}

#[test]
fn who_asks_often_need_not_hear_what_has_happened() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &["true"]);
    daemon.wait_for(id, "done");
    let job = |query: &str| -> Value {
        let (_, text) = ask(&daemon, "GET", &format!("/v1/jobs/{id}{query}"), "", "");
        serde_json::from_str(&text).unwrap()
    };
    let (all, last, none) = (job(""), job("?events=1"), job("?events=0"));
    let events = all["events"].as_array().unwrap();
    assert_eq!(last["events"], json!([events.last().unwrap()]));
    assert_eq!(last["earlier_events"], events.len() - 1);
    assert_eq!((&none["events"], &none["exit"]), (&json!([]), &json!(0)));
}

#[test]
fn events_go_on_after_the_last_one_seen() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &["true"]);
    daemon.wait_for(id, "done");
    let (_, all) = ask(&daemon, "GET", "/v1/events?follow=0", "", "");
    let ids: Vec<&str> = all.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert!(all.contains("event: submitted") && all.contains("event: ended"), "{all}");
    let last = format!("Last-Event-ID: {}\r\n", ids[1]);
    let (_, rest) = ask(&daemon, "GET", "/v1/events?follow=0", &last, "");
    let later: Vec<&str> = rest.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(later, ids[2..]);
}

/// A client that stays connected hears of them without asking again.
#[test]
fn events_come_as_they_happen() {
    let daemon = Daemon::start(&[]);
    let before = daemon.submit(&[], &["true"]);
    daemon.wait_for(before, "done");
    let stream = common::begin_to_ask(&daemon, "GET", "/v1/events", "", "");
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    let mut hears = |kind: &str, job: u64| {
        let event = format!("event: {kind}");
        loop {
            lines.find(|line| *line == event).expect("the daemon hangs up");
            let data = lines.next().unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            if data["job"] == job {
                break;
            }
        }
    };
    hears("ended", before);
    // All that was there is told by now.
    let next = daemon.submit(&[], &["true"]);
    hears("submitted", next);
    hears("ended", next);
}

#[test]
fn a_jobs_own_directory_belongs_to_its_checkpoint() {
    let mut daemon = Daemon::start(&[]);
    let (input, here) = (daemon.dir.path().join("input"), daemon.dir.path().join("here"));
    std::fs::create_dir(&input).unwrap();
    std::fs::create_dir(&here).unwrap();
    std::fs::write(input.join("seed"), "seed\n").unwrap();
    let script = "cp seed found; i=0; while [ $i -lt 60 ]; do echo $i >>found; i=$((i+1)); \
                  sleep 0.05; done; until [ -e $0 ]; do sleep 0.05; done";
    let may_end = daemon.may_end();
    let mut submit =
        daemon.queue(&["submit", "--input", input.to_str().unwrap(), "--artefact", "found"]);
    let submit = submit.args(["--", "sh", "-c", script]).arg(may_end).current_dir(&here);
    let output = submit.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let found = daemon.data().join("jobs/1/work/found");
    until("the job writes", || {
        std::fs::read_to_string(&found).is_ok_and(|t| t.contains("\n9\n")).then_some(())
    });
    daemon.ok(&["preempt", "1"]);
    until("the checkpoint is durable", || daemon.show(1)["checkpoint"].as_u64());
    // The machine fails, and what was written since is on the disk, too.
    daemon.kill();
    for pid in common::shepherds(&daemon.data()) {
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    }
    std::fs::write(&found, "from the future\n").unwrap();
    daemon.let_end();
    daemon.launch();
    daemon.ok(&["resume", "1"]);
    daemon.wait_for(1, "done");
    let lines: String = (0..60).map(|i| format!("{i}\n")).collect();
    assert_eq!(std::fs::read_to_string(here.join("found")).unwrap(), format!("seed\n{lines}"));
    assert_eq!(std::fs::read_to_string(input.join("seed")).unwrap(), "seed\n");
    // What it had to itself is gone with it.
    until("its directory is removed", || (!found.parent().unwrap().exists()).then_some(()));
}
