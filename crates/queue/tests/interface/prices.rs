//! What preemptions cost: as events, jobs and metrics tell it.

use serde_json::{Value, json};

use super::common::{Daemon, ask, counted, until, words};

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
