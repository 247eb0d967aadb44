//! The daemon over HTTP: description, events, tokens, TLS, metrics, and GitLab's driver.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use common::browser::{self, Browser};
use common::{Daemon, ask, counted, shown, until, words};
use serde_json::{Value, json};
use torpor_runtimes_tests::port;

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

/// What a metric is now.
fn metric(daemon: &Daemon, name: &str) -> f64 {
    let (_, text) = ask(daemon, "GET", "/metrics", "", "");
    let name = format!("torpor_queue_{name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
}

/// What all jobs show that they have cost is the metric of waste, and is something.
fn assert_waste(daemon: &Daemon, jobs: &[u64]) {
    assert!(waste(daemon, jobs) > 0.0);
}

/// The metric of waste in milliseconds. It is what all jobs show that they have cost, and the sum of what each event has.
fn waste(daemon: &Daemon, jobs: &[u64]) -> f64 {
    let waste = metric(daemon, "waste_seconds_total") * 1000.0;
    let of_jobs =
        |job: &Value| job["overhead_ms"].as_f64().unwrap() + job["lost_ms"].as_f64().unwrap();
    let of_events = |job: &Value| -> f64 {
        let events = job["events"].as_array().unwrap().iter();
        let prices = events.flat_map(|event| ["cost_ms", "lost_ms"].map(|key| &event["data"][key]));
        prices.filter_map(Value::as_f64).sum()
    };
    let shown: Vec<Value> = jobs.iter().map(|&id| daemon.show(id)).collect();
    for sum in [shown.iter().map(of_jobs).sum::<f64>(), shown.iter().map(of_events).sum()] {
        assert!((waste - sum).abs() < 0.5, "{waste} ms are not {sum}: {shown:?}");
    }
    waste
}

/// Each event tells what it has cost, by whichever means a job gives way.
#[test]
fn each_preemption_has_its_price() {
    let script = "trap 'sleep 0.3; exit 0' USR1; echo begun; until [ -e $0 ]; do sleep 0.02; done";
    for means in ["stop", "checkpoint", "command", "kill"] {
        let daemon = Daemon::start(&["--slots", "1", "--means", means]);
        let options = ["--class", "batch", "--preempt-cmd", "kill -USR1 $TORPOR_JOB_PID"];
        let may_end = daemon.may_end();
        let long = daemon.submit(&options, &["sh", "-c", script, may_end.to_str().unwrap()]);
        daemon.wait_for_output(long, "begun");
        let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
        daemon.wait_for(urgent, "done");
        let back = match means {
            "stop" => "continued",
            "checkpoint" => "resumed",
            _ => "running",
        };
        until("it is back", || daemon.events(long, back).pop());
        daemon.let_end();
        daemon.wait_for(long, "done");
        let cost = waste(&daemon, &[long, urgent]);
        let told = |kind: &str, key: &str| {
            let events = daemon.events(long, kind);
            events.iter().filter(|event| event["data"][key].is_i64()).count()
        };
        let key = if means == "kill" { "lost_ms" } else { "cost_ms" };
        assert_eq!(told("preempted", key), 1, "{means}: {}", daemon.show(long));
        assert_eq!(told(back, "cost_ms"), 1, "{means}: {}", daemon.show(long));
        // What it takes to save itself is time in which it does not work.
        assert!(means != "command" || cost >= 300.0, "{cost} ms");
    }
}

/// A job that is killed begins again: what it had written is cut off, and what it had worked is waste.
#[test]
fn who_is_killed_begins_again_and_that_is_counted() {
    let daemon = Daemon::start(&["--slots", "1", "--means", "kill"]);
    let long = daemon.submit(&["--class", "batch"], &words(&daemon.counter(60, 0.05)));
    daemon.wait_for_output(long, "20\n");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    daemon.let_end();
    daemon.wait_for(long, "done");
    assert_eq!(daemon.output(long), counted(60));
    let job = daemon.show(long);
    let mut events = job["events"].as_array().unwrap().iter();
    let data = &events.find(|event| event["kind"] == "preempted").unwrap()["data"];
    assert_eq!((&data["means"], &data["to"]), (&json!("kill"), &json!(urgent)));
    assert!(data["lost_ms"].as_i64().unwrap() > 0, "{data}");
    assert_eq!((&job["lost_ms"], &job["preemptions"]), (&data["lost_ms"], &json!(1)));
    assert_waste(&daemon, &[long, urgent]);
}

#[test]
fn metrics_add_up() {
    let daemon = Daemon::start(&["--slots", "1", "--means", "checkpoint"]);
    let long = daemon.submit(&["--class", "batch"], &words(&daemon.counter(60, 0.05)));
    daemon.wait_for_output(long, "25\n");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    daemon.let_end();
    daemon.wait_for(long, "done");
    assert_eq!(metric(&daemon, "jobs{state=\"done\"}"), 2.0);
    assert_eq!(metric(&daemon, "preemptions_total"), 1.0);
    assert_waste(&daemon, &[long, urgent]);
    // People are told who made it give way, how, and at what price.
    let why = daemon.ok(&["show", "--why", &long.to_string()]);
    for words in ["preempted 1 times, which cost", "means checkpoint", &format!("to {urgent}")] {
        assert!(why.contains(words), "{words}: {why}");
    }
    for line in ask(&daemon, "GET", "/metrics", "", "").1.lines() {
        let known = line.starts_with("# ") || line.starts_with("torpor_queue_");
        assert!(known && !line.contains("job=\""), "{line}");
    }
}

#[test]
fn over_the_network_a_token_and_a_certificate_are_needed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", &at("key"), "-out", &at("certificate")])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    let tokens = json!([
        { "token": "administrator-token", "owner": "root", "admin": true, "uid": 0, "gid": 0 },
        { "token": "token-of-ann-which-is-long", "owner": "ann" },
        { "token": "token-of-bob-which-is-long", "owner": "bob" },
    ]);
    std::fs::write(at("tokens"), tokens.to_string()).unwrap();
    let address = format!("https://localhost:{}", port::free());
    let daemon = Daemon::start(&[
        "--listen",
        &address,
        "--tls-cert",
        &at("certificate"),
        "--tls-key",
        &at("key"),
        "--tokens",
        &at("tokens"),
    ]);
    let queue = |token: &str, words: &[&str]| {
        Command::new(common::torpor())
            .arg("queue")
            .args(words)
            .env("TORPOR_QUEUE", &address)
            .env("TORPOR_QUEUE_CA", at("certificate"))
            .env("TORPOR_QUEUE_TOKEN", token)
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let output = queue("token-of-ann-which-is-long", &["submit", "--wait", "--", "id", "-u"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "65534\n", "{}", shown(&output));
    let output = queue("token-of-bob-which-is-long", &["list", "--json"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[]\n");
    let output = queue("token-of-bob-which-is-long", &["show", "1"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no job 1"));
    // Nor can they be asked what has become of it by a job of theirs that is to run after it.
    let after = |token: &str, id: &str| {
        let output = queue(token, &["submit", "--after", id, "--", "true"]);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for id in ["1", "4711"] {
        let (taken, said) = after("token-of-bob-which-is-long", id);
        assert!(!taken && said.contains(&format!("there is no job {id} to run after")), "{said}");
    }
    for token in ["token-of-ann-which-is-long", "administrator-token"] {
        let (taken, said) = after(token, "1");
        assert!(taken, "{said}");
    }
    let output = queue("token-of-bob-which-is-long", &["drain"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("administrators"));
    let output = queue("a-wrong-token-of-some-length", &["list"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("token is needed"));
    assert!(queue("administrator-token", &["show", "1"]).status.success());
    drop(daemon);
    let refused = Command::new(common::torpor())
        .args(["queue", "serve", "--data", &at("data"), "--listen", "http://0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("without TLS"));
}

#[test]
fn a_daemon_says_where_it_listens() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(common::torpor())
        .args(["queue", "serve", "--data", "data", "--listen", "unix:socket"])
        .args(["--listen", "http://127.0.0.1:0"])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(daemon.stdout.take().unwrap());
    let said: Vec<String> = said.lines().take(2).map(Result::unwrap).collect();
    let ask = |line: &String, at: &str| {
        let address = line.strip_prefix(&format!("Listening at {at}; clients find it by "));
        let (name, address) = address.and_then(|rest| rest.split_once('=')).unwrap();
        Command::new(common::torpor()).args(["queue", "list"]).env(name, address).output().unwrap()
    };
    let (by_path, by_port) = (ask(&said[0], "unix:socket"), ask(&said[1], "http://127.0.0.1:0"));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(by_path.status.success(), "{said:?}: {}", shown(&by_path));
    assert!(shown(&by_port).contains("token is needed"), "{said:?}: {}", shown(&by_port));
}

/// A daemon in `dir` ends at once, and says `why`.
fn refuses_to_serve(dir: &Path, words: &[&str], why: &str) {
    let daemon = Command::new(common::torpor())
        .args(["queue", "serve", "--data", "data"])
        .args(words)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!daemon.status.success() && shown(&daemon).contains(why), "{}", shown(&daemon));
}

/// A path that is mistyped may lead to a file that somebody needs.
#[test]
fn a_daemon_removes_no_file_but_a_socket_that_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes");
    std::fs::write(&file, "of somebody").unwrap();
    refuses_to_serve(dir.path(), &["--listen", "unix:notes"], "unix:notes");
    assert_eq!(std::fs::read(&file).unwrap(), b"of somebody");
}

/// Whoever has a token is somebody else to the daemon.
#[test]
fn secrets_that_others_may_read_are_warned_of() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, "[]").unwrap();
    for (mode, warns) in [(0o644, true), (0o640, true), (0o600, false)] {
        std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(mode)).unwrap();
        let daemon = Daemon::start(&["--tokens", tokens.to_str().unwrap()]);
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        let warning = format!("others may read {}", tokens.display());
        assert_eq!(log.contains(&warning), warns, "{mode:o}: {log}");
    }
}

/// Its jobs would be saved, and not brought back.
#[test]
fn a_daemon_with_keys_that_do_not_fit_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let classes = json!({ "secret": { "recipient": "nobody", "identity": "/nowhere" } });
    std::fs::write(&config, json!({ "rules": { "classes": classes } }).to_string()).unwrap();
    let words = ["--listen", "unix:socket", "--config", "config.json"];
    refuses_to_serve(dir.path(), &words, "class secret");
    assert!(!dir.path().join("data").exists());
}

/// Another daemon would be asked, or nobody.
#[test]
fn an_address_that_is_none_is_told_of() {
    let list = |address: &[u8]| {
        let address = OsStr::from_bytes(address);
        let output = Command::new(common::torpor())
            .args(["queue", "list"])
            .env("TORPOR_QUEUE", address)
            .output()
            .unwrap();
        assert!(!output.status.success());
        shown(&output)
    };
    for address in [&b"nowhere"[..], b"unix:/\xff", b"https://ci.example:7777\n"] {
        let said = list(address);
        assert!(said.contains("TORPOR_QUEUE") && !said.contains("ask the daemon"), "{said}");
    }
    let said = list(b"https://ci.example");
    assert!(said.contains("TORPOR_QUEUE") && said.contains("no port"), "{said}");
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

/// Calls the driver as Runner does.
fn gitlab(daemon: &Daemon, dir: &Path, words: &[&str]) -> Command {
    let mut command = daemon.queue(&["gitlab", "--dir"]);
    command
        .arg(dir)
        .args(words)
        .env("CUSTOM_ENV_CI_JOB_ID", "77")
        .env("CUSTOM_ENV_CI_PROJECT_ID", "12")
        .env("CUSTOM_ENV_CI_CONCURRENT_PROJECT_ID", "1")
        .env("CUSTOM_ENV_TORPOR_CLASS", "batch")
        .env("BUILD_FAILURE_EXIT_CODE", "41")
        .env("SYSTEM_FAILURE_EXIT_CODE", "42")
        .env("BUILD_EXIT_CODE_FILE", dir.join("exit"));
    command
}

#[test]
fn gitlabs_custom_executor() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let dir = tempfile::tempdir().unwrap();
    let config = gitlab(&daemon, dir.path(), &["config"]).output().unwrap();
    let config: Value = serde_json::from_slice(&config.stdout).unwrap();
    let builds = dir.path().join("builds/12/1");
    assert_eq!(config["builds_dir"], builds.to_str().unwrap());
    assert!(config["driver"]["name"].is_string());
    assert!(gitlab(&daemon, dir.path(), &["prepare"]).status().unwrap().success());
    assert!(builds.is_dir());

    let script = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let good = script("good", "echo hello; echo warning >&2");
    let output = gitlab(&daemon, dir.path(), &["run", &good, "get_sources"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"hello\n"[..]));
    let bad = script("bad", "exit 9");
    let output = gitlab(&daemon, dir.path(), &["run", &bad, "build_script"]).output().unwrap();
    assert_eq!(output.status.code(), Some(41));
    assert_eq!(std::fs::read_to_string(dir.path().join("exit")).unwrap(), "9");

    // The long script gives way to an urgent job, and Runner does not notice.
    let counter = daemon.counter(60, 0.05)[2].replace('\'', "\"");
    let long = script("long", &format!("exec python3 -c '{counter}'"));
    let mut running = gitlab(&daemon, dir.path(), &["run", &long, "build_script"]);
    let running = running.stdout(Stdio::piped()).spawn().unwrap();
    until("the script runs", || {
        let list: Value = serde_json::from_str(&daemon.ok(&["list", "--json"])).unwrap();
        let last = list.as_array().unwrap().last().unwrap().clone();
        (last["state"] == "running" && last["class"] == "batch").then_some(())
    });
    daemon.wait_for_output(3, "5\n");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    daemon.let_end();
    let output = running.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), counted(60));
    assert_eq!(daemon.job(3)["preemptions"], 1);

    // Cancel: Runner signals the driver, and then cleans up.
    let slow = "trap 'sleep 0.5; exit 3' TERM; while :; do sleep 0.05; done";
    let endless = script("endless", slow);
    let mut running = gitlab(&daemon, dir.path(), &["run", &endless, "step_one"]).spawn().unwrap();
    let id = urgent + 1;
    until("the script runs", || {
        daemon.ok(&["list", "--json"]).contains("endless").then(|| daemon.wait_for(id, "running"))
    });
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(gitlab(&daemon, dir.path(), &["cleanup"]).status().unwrap().success());
    // The next one may get its directory.
    assert_eq!(daemon.job(id)["state"], "cancelled");
}

/// A job that is cancelled: Runner sends SIGTERM to the process group of the driver, waits, and cleans up.
#[test]
fn gitlabs_cancel_reaches_the_script() {
    use rustix::process::{Pid, Signal, kill_process_group};
    use std::os::unix::process::CommandExt;

    let daemon = Daemon::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    let text = "trap 'echo trapped; exit 3' TERM\necho ready\nwhile :; do sleep 0.05; done";
    std::fs::write(&script, text).unwrap();
    let mut driver = gitlab(&daemon, dir.path(), &["run", script.to_str().unwrap(), "step_one"]);
    let driver = driver.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
    until("a job", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    daemon.wait_for_output(1, "ready");
    kill_process_group(Pid::from_child(&driver), Signal::TERM).unwrap();
    let output = driver.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(41));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "ready\ntrapped\n");
    assert_eq!(std::fs::read_to_string(dir.path().join("exit")).unwrap(), "3");
    assert!(gitlab(&daemon, dir.path(), &["cleanup"]).status().unwrap().success());
    let job = daemon.job(1);
    assert_eq!((&job["state"], &job["exit"]), (&json!("failed"), &json!(3)));
}

/// Runner tries again what has failed for a cause that is not the script's.
#[test]
fn a_job_that_the_queue_gives_up_is_a_system_failure() {
    let daemon = Daemon::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "sleep 1000").unwrap();
    let mut driver = gitlab(&daemon, dir.path(), &["run", script.to_str().unwrap(), "step_one"]);
    let driver = driver.stderr(Stdio::piped()).spawn().unwrap();
    until("a job", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    until("it is given up", || {
        for pid in common::shepherds(&daemon.data()) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            // It may be about to end.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        (!daemon.job(1)["exit"].is_null()).then_some(())
    });
    let output = driver.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(42), "{}", shown(&output));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("without a checkpoint") && said.contains("given up job 1"), "{said}");
    assert!(!dir.path().join("exit").exists(), "the script has ended with nothing");
}

#[test]
fn a_driver_without_a_daemon_is_a_system_failure() {
    let mut daemon = Daemon::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    daemon.kill();
    let status = gitlab(&daemon, dir.path(), &["prepare"]).status().unwrap();
    assert_eq!(status.code(), Some(42));
    daemon.launch();
}

/// A daemon with one slot that shows its page to a browser, and the address of that.
fn with_page(dir: &Path) -> (Daemon, String) {
    let tokens = json!([{ "token": "administrator-token", "owner": "root", "admin": true }]);
    let file = dir.join("tokens");
    std::fs::write(&file, tokens.to_string()).unwrap();
    let address = format!("http://127.0.0.1:{}", port::free());
    let options = ["--listen", &address, "--tokens", file.to_str().unwrap(), "--slots", "1"];
    (Daemon::start(&options), address)
}

/// The page as it stays open: a job is chosen, and what it writes then comes without being asked for. So does when it gives
/// way, and when it goes on.
#[test]
fn the_page_shows_live_what_a_job_writes() {
    if !browser::is_there("the_page_shows_live_what_a_job_writes") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (daemon, address) = with_page(dir.path());
    let go = daemon.dir.path().join("go");
    let script = format!(
        "echo first; until [ -e {} ]; do sleep 0.05; done; echo second >&2; sleep 1000",
        go.display()
    );
    let id = daemon.submit(&[], &["sh", "-c", &script]);
    daemon.wait_for_output(id, "first");
    let address = format!("{address}/#token=administrator-token&job={id}");
    let mut browser = Browser::open(&dir.path().join("profile"), &address);
    until("the first line", || (browser.text("log") == "first\n").then_some(()));
    assert_eq!(browser.text("title"), format!("Output of job {id}"));
    std::fs::write(go, "").unwrap();
    until("the second line", || (browser.text("log") == "first\nsecond\n").then_some(()));
    assert!(!browser.html("time").contains("--sleep"));
    daemon.ok(&["preempt", &id.to_string()]);
    until("it sleeps", || browser.html("time").contains("--sleep").then_some(()));
    until("its state", || browser.text("jobs").contains("preempted").then_some(()));
    daemon.ok(&["resume", &id.to_string()]);
    until("it runs after that", || {
        let time = browser.html("time");
        time.rsplit_once("--sleep").is_some_and(|(_, after)| after.contains("--run")).then_some(())
    });
    assert!(!browser.text("jobs").contains("cancelled"));
    daemon.ok(&["cancel", &id.to_string()]);
    until("its end", || browser.text("jobs").contains("cancelled").then_some(()));
}

/// The page, in a real browser: what it shows comes from the daemon and from nowhere else.
#[test]
fn the_page_in_a_browser() {
    let name = "the_page_in_a_browser";
    if !common::long(name) || !browser::is_there(name) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (daemon, address) = with_page(dir.path());
    let long = daemon.submit(&["--class", "batch"], &["sh", "-c", "echo a line; sleep 1000"]);
    daemon.wait_for_output(long, "a line");
    let urgent = daemon.submit(&["--class", "urgent"], &["sh", "-c", "sleep 1"]);
    daemon.wait_for(urgent, "done");
    let waits = daemon.submit(&["--class", "batch"], &["true"]);
    let browse = |what: &str, text: bool| {
        let mut browser = Command::new("chromium");
        browser
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args([
                "--disable-dev-shm-usage",
                "--virtual-time-budget=8000",
                "--window-size=1100,700",
                // No other machine is to be found.
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                what,
            ])
            .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
            .arg(format!("{address}/#still=1&token=administrator-token"));
        let output = browser.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        if text { String::from_utf8_lossy(&output.stdout).into_owned() } else { String::new() }
    };
    let page = browse("--dump-dom", true);
    for word in ["1 of 1 slots", "running", "done", "queued", "waits for job 1", "<rect"] {
        assert!(page.contains(word), "{word} in {page}");
    }
    // Whose share is used, and what there is of memory and disk.
    for word in ["of memory free", "of disk free", "<td>/uid-0</td>"] {
        assert!(page.contains(word), "{word} in {page}");
    }
    assert!(!page.contains("https://") && !page.contains("src=\"http"), "{page}");
    daemon.ok(&["cancel", &waits.to_string()]);
    if let Some(picture) = std::env::var_os("TORPOR_SCREENSHOT") {
        browse(&format!("--screenshot={}", picture.to_str().unwrap()), false);
    }
}
