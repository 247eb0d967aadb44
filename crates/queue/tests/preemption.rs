//! Urgent jobs start at once, and long ones lose nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::process::{Child, Command};

use common::{Daemon, counted, counter, until, words};
use serde_json::json;

#[test]
fn an_urgent_job_displaces_a_long_one_by_each_means() {
    for means in ["stop", "checkpoint"] {
        let daemon = Daemon::start(&["--slots", "1", "--means", means]);
        let long = daemon.submit(&["--class", "batch"], &words(&daemon.counter(80, 0.03)));
        daemon.wait_for_output(long, "20\n");
        let output = daemon
            .queue(&["submit", "--class", "urgent", "--wait", "--", "echo", "urgent"])
            .output()
            .unwrap();
        assert_eq!(output.stdout, b"urgent\n");
        daemon.let_end();
        let job = daemon.wait_for(long, "done");
        assert_eq!(job["preemptions"], 1, "{means}");
        assert_eq!(daemon.output(long), counted(80), "{means}");
        let events = daemon.show(long)["events"].clone();
        let events = events.as_array().unwrap();
        let preempted = events.iter().find(|event| event["kind"] == "preempted").unwrap();
        assert_eq!(
            (&preempted["data"]["means"], &preempted["data"]["to"]),
            (&json!(means), &json!(2))
        );
        assert!(daemon.ok(&["show", "--why", "1"]).contains("to 2"));
    }
}

/// A job that names no memory may need all that there is: only one that is known to need none of it lets others keep
/// theirs.
#[test]
fn who_names_no_memory_is_made_room_for() {
    for (usual, means) in [(0_u64, "stop"), (1 << 60, "checkpoint")] {
        let daemon = Daemon::configured(&json!({ "usual_memory": usual }), &["--slots", "1"]);
        let long = daemon.submit(&["--class", "batch"], &["sleep", "1000"]);
        daemon.wait_for(long, "running");
        let urgent = daemon.submit(&["--class", "urgent"], &["sleep", "1000"]);
        daemon.wait_for(urgent, "running");
        let events = daemon.show(long)["events"].clone();
        let mut events = events.as_array().unwrap().iter();
        let preempted = events.find(|event| event["kind"] == "preempted").unwrap();
        assert_eq!(preempted["data"]["means"], means);
    }
}

#[test]
fn priority_alone_displaces_and_equals_do_not() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let first = daemon.submit(&[], &["sleep", "1000"]);
    daemon.wait_for(first, "running");
    let equal = daemon.submit(&[], &["true"]);
    let higher = daemon.submit(&["--priority", "5"], &["true"]);
    daemon.wait_for(higher, "done");
    assert_eq!(daemon.job(equal)["state"], "queued");
    assert!(daemon.ok(&["show", &equal.to_string()]).contains("waits for job 1"));
    daemon.ok(&["cancel", &first.to_string()]);
    daemon.wait_for(equal, "done");
    let job = daemon.job(first);
    assert_eq!((&job["state"], &job["exit"]), (&json!("cancelled"), &json!(143)));
}

#[test]
fn a_preempted_job_keeps_its_tree_and_its_memory() {
    let daemon = Daemon::start(&[]);
    let script = "x=0; (for i in 1 2 3 4 5 6 7 8 9 10; do echo child $i; sleep 0.2; done) &\n\
                  until [ -e $0 ]; do sleep 0.05; done | cat\n wait; echo parent $x; exit 4";
    let may_end = daemon.may_end();
    let id = daemon.submit(&[], &["bash", "-c", script, may_end.to_str().unwrap()]);
    daemon.wait_for_output(id, "child 2");
    daemon.ok(&["preempt", &id.to_string()]);
    assert_eq!(daemon.job(id)["state"], "preempted");
    // No process of it is left but its shepherd, which is one.
    assert_eq!(common::shepherds(&daemon.data()).len(), 1);
    daemon.let_end();
    daemon.ok(&["resume", &id.to_string()]);
    let job = daemon.wait_for(id, "failed");
    assert_eq!(job["exit"], 4);
    let expected: String = (1..=10).map(|i| format!("child {i}\n")).collect();
    assert_eq!(daemon.output(id), format!("{expected}parent 0\n"));
}

/// Traces another process, and so cannot be saved; `pid` is the other.
const TRACER: &str = "import ctypes, os, sys, time\npid = os.fork()\nif pid == 0:\n    time.sleep(1000)\n\
                      ctypes.CDLL(None).ptrace(16, pid, 0, 0)\nos.waitpid(pid, 2)\nprint('traced', flush=True)\n";

#[test]
fn what_cannot_be_saved_goes_on_and_is_remembered() {
    let daemon = Daemon::start(&[]);
    let end = "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n\
               print('end', flush=True)\nos.kill(pid, 9)";
    let (script, may_end) = (format!("{TRACER}{end}"), daemon.may_end());
    let command = ["python3", "-c", &script, may_end.to_str().unwrap()];
    let id = daemon.submit(&["--kind", "tracer"], &command);
    daemon.wait_for_output(id, "traced");
    let output =
        daemon.queue(&["preempt", &id.to_string(), "--means", "checkpoint"]).output().unwrap();
    assert!(!output.status.success());
    assert_eq!(daemon.job(id)["state"], "running");
    daemon.let_end();
    daemon.wait_for(id, "done");
    assert!(daemon.output(id).contains("end"));
    let machine = daemon.ok(&["top", "--json"]);
    let machine: serde_json::Value = serde_json::from_str(&machine).unwrap();
    assert!(machine["refusals"]["tracer"].as_str().is_some(), "{machine}");
}

/// What `check` has found out counts when somebody is in a hurry, also for the next daemon.
#[test]
fn what_cannot_be_saved_is_not_tried_under_pressure() {
    let mut daemon = Daemon::start(&["--slots", "1", "--means", "checkpoint,kill"]);
    let end =
        "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\nos.kill(pid, 9)\nprint('end')";
    let script = format!("{TRACER}{end}");
    let go = daemon.dir.path().join("go");
    let command = ["python3", "-c", &script, go.to_str().unwrap()];
    // It can be saved until it traces, so it is tried later and later.
    let mut seconds = 0..;
    let why = until("it is refused", || {
        let after = seconds.next().unwrap().to_string();
        let words = ["check", "--kind", "tracer", "--after", &after, "--"];
        let output = daemon.queue(&[&words[..], &command].concat()).output().unwrap();
        (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
    });
    assert!(why.contains("goes on: ") && why.contains("trace"), "{why}");
    daemon.kill();
    daemon.launch();
    let long = daemon.submit(&["--class", "batch", "--kind", "tracer"], &command);
    daemon.wait_for_output(long, "traced");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    std::fs::write(&go, "").unwrap();
    daemon.wait_for(long, "done");
    let events = daemon.show(long)["events"].clone();
    let of = |kind: &str| -> Vec<serde_json::Value> {
        let events = events.as_array().unwrap().iter();
        events.filter(|event| event["kind"] == kind).map(|event| event["data"].clone()).collect()
    };
    assert_eq!(of("not-saved"), [serde_json::Value::Null; 0]);
    let [preempted] = &of("preempted")[..] else { panic!("{events}") };
    assert_eq!((&preempted["means"], &preempted["to"]), (&json!("kill"), &json!(urgent)));
}

/// Two scripts of one interpreter are two kinds, and what was refused is tried again when somebody wants that.
#[test]
fn a_refusal_is_for_one_kind_and_is_lifted() {
    let daemon = Daemon::start(&["--slots", "4"]);
    let flag = daemon.dir.path().join("traces");
    let end = "\nwhile not os.path.exists(sys.argv[1] + '.end'): time.sleep(0.05)\nos.kill(pid, 9)";
    // Without the flag it is as any other.
    let script = format!(
        "import os, sys, time\nif not os.path.exists(sys.argv[1]):\n    print('idle', flush=True)\n    \
         time.sleep(1000)\n{TRACER}{end}"
    );
    let traced = ["python3", "-c", &script, flag.to_str().unwrap()];
    std::fs::write(&flag, "").unwrap();
    let ids = [0; 2].map(|_| daemon.submit(&[], &traced));
    let other = daemon.submit(&[], &["python3", "-c", "import time\ntime.sleep(1000)"]);
    ids.iter().for_each(|&id| daemon.wait_for_output(id, "traced"));
    daemon.wait_for(other, "running");
    let preempt = |id: u64, options: &[&str]| {
        let output =
            daemon.queue(&[&["preempt", &id.to_string()], options].concat()).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(!preempt(ids[0], &["--means", "checkpoint"]).0);
    let kind = daemon.show(ids[1])["kind"].as_str().unwrap().to_owned();
    let known = || -> Vec<serde_json::Value> {
        serde_json::from_str(&daemon.ok(&["refusals", "--json"])).unwrap()
    };
    let [one] = &known()[..] else { panic!("{:?}", known()) };
    assert!(one["kind"] == kind && one["why"].as_str().unwrap().contains("trace"), "{one}");
    for words in [vec!["refusals"], vec!["top"], vec!["show", &ids[1].to_string()]] {
        assert!(daemon.ok(&words).contains("trace"), "{words:?}");
    }
    // Another script of the same interpreter is saved.
    assert_eq!(preempt(other, &["--means", "checkpoint"]), (true, String::new()));
    // A person may try it, whatever is remembered; it is lifted by hand,
    let (done, why) = preempt(ids[1], &["--means", "checkpoint"]);
    assert!(!done && why.contains("goes on"), "{why}");
    assert_eq!(daemon.ok(&["refusals", "--forget", &kind]), "");
    assert_eq!(known(), [serde_json::Value::Null; 0]);
    let again = daemon.queue(&["refusals", "--forget", &kind]).output().unwrap();
    assert!(String::from_utf8(again.stderr).unwrap().contains("nothing is remembered"));
    // or by a check that succeeds.
    assert!(!preempt(ids[1], &["--means", "checkpoint"]).0);
    assert_eq!(known().len(), 1);
    std::fs::remove_file(&flag).unwrap();
    daemon.ok(&[&["check", "--after", "0", "--"], &traced[..]].concat());
    assert_eq!(known(), [serde_json::Value::Null; 0]);
    std::fs::write(flag.with_extension("end"), "").unwrap();
    ids.iter().for_each(|&id| drop(daemon.wait_for(id, "done")));
}

#[test]
fn check_tries_it_beforehand() {
    let daemon = Daemon::start(&[]);
    let text = daemon.ok(&["check", "--after", "0", "--", "sleep", "1000"]);
    assert!(text.contains("can be saved"), "{text}");
    daemon.wait_for(1, "cancelled");
    let output = daemon.queue(&["check", "--", "true"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("exit status 0: give it more"));
    let output = daemon.queue(&["check", "--", "/nowhere/at/all"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("127: the command is not there"));
}

/// It is an urgent job, which nobody would end.
#[test]
fn what_is_checked_ends_when_nobody_waits_for_that() {
    let daemon = Daemon::configured(&json!({ "orphan_after": 5_000 }), &[]);
    let mut check = daemon.queue(&["check", "--after", "1000", "--", "sleep", "1000"]);
    let mut check = check.spawn().unwrap();
    until("it runs", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    // For as long as somebody waits it goes on.
    std::thread::sleep(std::time::Duration::from_secs(6));
    assert_eq!(daemon.job(1)["state"], "running");
    check.kill().unwrap();
    check.wait().unwrap();
    daemon.wait_for(1, "cancelled");
}

#[test]
fn a_jobs_own_command_makes_it_give_way() {
    let daemon = Daemon::start(&["--slots", "1", "--means", "command"]);
    let state = daemon.dir.path().join("state");
    let script = "s=$1; n=$(cat $s 2>/dev/null || echo 0); trap 'echo $n >$s; exit 0' USR1\n\
                  echo from $n; while [ $n -lt 40 ]; do n=$((n+1)); sleep 0.05; done\n\
                  until [ -e $2 ]; do sleep 0.05; done; echo end";
    let may_end = daemon.may_end();
    let id = daemon.submit(
        &["--class", "batch", "--preempt-cmd", "kill -USR1 $TORPOR_JOB_PID"],
        &["bash", "-c", script, "x", state.to_str().unwrap(), may_end.to_str().unwrap()],
    );
    daemon.wait_for_output(id, "from 0");
    let urgent = daemon.submit(&["--class", "urgent"], &["true"]);
    daemon.wait_for(urgent, "done");
    daemon.let_end();
    let job = daemon.wait_for(id, "done");
    assert_eq!(job["preemptions"], 1);
    let reached: u32 = std::fs::read_to_string(state).unwrap().trim().parse().unwrap();
    assert!(reached > 0);
    assert!(daemon.output(id).ends_with("end\n"));
}

/// Not as the daemon's, which is root.
#[test]
fn a_jobs_own_command_runs_as_its_user() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start(&[]);
    let place = tempfile::tempdir().unwrap();
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(place.path(), open).unwrap();
    let script = "trap 'exit 0' USR1; echo begun; while :; do sleep 0.05; done";
    let spec = json!({
        "command": ["bash", "-c", script], "dir": place.path(), "owner": "nobody",
        "env": [["PATH", std::env::var("PATH").unwrap()]],
        "user": { "uid": 65534, "gid": 65534, "groups": [65534, 7] },
        "preempt_cmd": "{ id -u; id -g; id -G; } >who; kill -USR1 $TORPOR_JOB_PID",
    });
    let (status, answer) = common::ask(&daemon, "POST", "/v1/jobs", "", &spec.to_string());
    assert_eq!(status, 201, "{answer}");
    daemon.wait_for_output(1, "begun");
    daemon.ok(&["preempt", "--means", "command", "1"]);
    daemon.wait_for(1, "preempted");
    let who = std::fs::read_to_string(place.path().join("who")).unwrap();
    assert_eq!(who, "65534\n65534\n65534 7\n");
    daemon.ok(&["cancel", "1"]);
    daemon.wait_for(1, "cancelled");
}

/// Its state is newer than its checkpoints, and its output goes on.
#[test]
fn a_job_that_saves_itself_goes_on_from_there() {
    let config = json!({ "shortest_interval": 200, "mean_time_between_failures": 500 });
    let daemon = Daemon::configured(&config, &[]);
    let state = daemon.dir.path().join("state");
    let script = "s=$1; n=$(cat $s 2>/dev/null || echo 0)\n\
                  trap 'echo saved; echo $n >$s; exit 0' USR1\n\
                  until [ -e $2 ]; do n=$((n+1)); echo step $n; sleep 0.05; done; echo end";
    let (state, may_end) = (state.to_str().unwrap(), daemon.may_end());
    let mut client = daemon.queue(&["run", "--class", "batch"]);
    client.args(["--preempt-cmd", "kill -USR1 $TORPOR_JOB_PID", "--", "bash", "-c", script, "x"]);
    client.arg(state).arg(may_end).stdout(std::process::Stdio::piped());
    let client = client.spawn().unwrap();
    // It is saved from time to time as well.
    until("it is saved", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    until("it is saved", || daemon.show(1)["checkpoint"].as_u64());
    daemon.wait_for_output(1, "step 2\n");
    daemon.ok(&["preempt", "--means", "command", "1"]);
    daemon.wait_for(1, "preempted");
    let before = daemon.output(1);
    assert!(before.ends_with("saved\n"), "{before}");
    daemon.ok(&["resume", "1"]);
    until("it goes on", || (daemon.output(1).len() > before.len() + 20).then_some(()));
    daemon.let_end();
    let output = client.wait_with_output().unwrap();
    let written = String::from_utf8(output.stdout).unwrap();
    assert_eq!(written, daemon.output(1));
    let steps = written.lines().filter(|line| line.starts_with("step ")).count();
    let mut expected: String = (1..=steps).map(|n| format!("step {n}\n")).collect();
    expected.push_str("end\n");
    assert_eq!(written.replacen("saved\n", "", 1), expected);
    let events = daemon.show(1)["events"].clone();
    let starts = events.as_array().unwrap().iter().filter(|event| event["kind"] == "starting");
    assert!(starts.map(|event| &event["data"]["from"]).all(serde_json::Value::is_null));
}

#[test]
fn a_job_that_ends_by_itself_does_not_give_way() {
    // It ends while the command is at work, which fails then; or later, by a status of its own.
    let waits = "touch $0.told; while kill -0 $TORPOR_JOB_PID; do sleep 0.02; done; exit 1";
    for (command, exit) in [(waits, 0), ("touch $0.told", 4)] {
        let daemon = Daemon::start(&[]);
        let told = daemon.dir.path().join("told");
        let command = command.replace("$0.told", told.to_str().unwrap());
        let script = "echo begun; until [ -e $0 ]; do sleep 0.02; done; exit $1";
        let words = ["sh", "-c", script, told.to_str().unwrap(), &exit.to_string()];
        let id = daemon.submit(&["--preempt-cmd", &command], &words);
        daemon.wait_for_output(id, "begun");
        let output = daemon.queue(&["preempt", "--means", "command", &id.to_string()]).output();
        let said = String::from_utf8(output.unwrap().stderr).unwrap();
        assert!(said.contains("was over before it gave way"), "{said}");
        let job =
            until("it has ended", || Some(daemon.job(id)).filter(|job| !job["exit"].is_null()));
        assert_eq!((&job["exit"], &job["run"]), (&json!(exit), &json!(1)), "{job}");
        assert_eq!(daemon.output(id), "begun\n");
    }
}

#[test]
fn a_time_limit_does_not_run_while_a_job_sleeps() {
    let daemon = Daemon::start(&["--slots", "2"]);
    let asleep = ["stop", "checkpoint"].map(|means| {
        // It runs for a second, or some on a busy machine.
        let id = daemon.submit(&["--time", "10"], &words(&daemon.counter(10, 0.1)));
        daemon.wait_for_output(id, "1\n");
        daemon.ok(&["preempt", &id.to_string(), "--means", means]);
        assert_eq!(daemon.events(id, "preempted")[0]["data"]["means"], means);
        id
    });
    std::thread::sleep(std::time::Duration::from_millis(10_500));
    daemon.let_end();
    for id in asleep {
        daemon.ok(&["resume", &id.to_string()]);
        daemon.wait_for(id, "done");
    }
    let late = daemon.submit(&["--time", "1"], &["sleep", "1000"]);
    let job = daemon.wait_for(late, "failed");
    assert_eq!(job["exit"], 143);
    assert!(job["note"].as_str().unwrap().contains("longer than its limit"));
}

#[test]
fn jobs_run_after_others_and_again() {
    let daemon = Daemon::start(&[]);
    let first = daemon.submit(&[], &words(&daemon.counter(1, 0.0)));
    let second = daemon.submit(&["--after", &first.to_string()], &["true"]);
    assert_eq!(daemon.job(second)["state"], "queued");
    daemon.let_end();
    daemon.wait_for(second, "done");
    let failing = daemon.submit(&["--retries", "2"], &["sh", "-c", "echo try; exit 1"]);
    let never = daemon.submit(&["--after", &failing.to_string()], &["true"]);
    daemon.wait_for(failing, "failed");
    assert_eq!(daemon.output(failing), "try\ntry\ntry\n");
    daemon.wait_for(never, "cancelled");
}

/// Whether it has failed before, or fails afterwards.
#[test]
fn what_runs_after_a_job_that_has_failed_ends_as_well() {
    let daemon = Daemon::start(&[]);
    let failed = daemon.submit(&[], &["false"]);
    daemon.wait_for(failed, "failed");
    let never = daemon.submit(&["--after", &failed.to_string()], &["true"]);
    let job = daemon.wait_for(never, "cancelled");
    assert_eq!(job["note"], format!("job {failed}, which it was to run after, has failed"));
    let last = daemon.submit(&["--after", &never.to_string()], &["true"]);
    daemon.wait_for(last, "cancelled");
}

/// Whether it waits, or runs and ends well when it is told to.
#[test]
fn what_runs_after_a_job_that_was_cancelled_ends_as_well() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let script = "trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done";
    let runs = daemon.submit(&[], &["sh", "-c", script]);
    daemon.wait_for_output(runs, "begun\n");
    let waits = daemon.submit(&[], &["true"]);
    for id in [waits, runs] {
        let never = daemon.submit(&["--after", &id.to_string()], &["true"]);
        daemon.ok(&["cancel", &id.to_string()]);
        daemon.wait_for(id, "cancelled");
        let job = daemon.wait_for(never, "cancelled");
        assert_eq!(job["note"], format!("job {id}, which it was to run after, was cancelled"));
    }
    assert_eq!(daemon.job(runs)["exit"], 0);
    let late = daemon.submit(&["--after", &runs.to_string()], &["true"]);
    daemon.wait_for(late, "cancelled");
}

/// A job that gives way has not failed, not even where it is killed for that.
#[test]
fn preemptions_use_up_no_retries() {
    let daemon = Daemon::start(&[]);
    let (go, again) = (daemon.dir.path().join("go"), daemon.dir.path().join("again"));
    let (go, again) = (go.to_str().unwrap(), again.to_str().unwrap());
    let script = "echo try; until [ -e $0 ]; do sleep 0.05; done; [ -e $1 ] && exit; >$1; exit 1";
    let id = daemon.submit(&["--retries", "1"], &["sh", "-c", script, go, again]);
    until("it has started", || daemon.show(id)["started"].as_i64());
    for means in ["stop", "checkpoint", "kill"] {
        daemon.wait_for(id, "running");
        daemon.ok(&["preempt", &id.to_string(), "--means", means]);
        daemon.ok(&["resume", &id.to_string()]);
    }
    std::fs::write(go, "").unwrap();
    daemon.wait_for(id, "done");
    let job = daemon.show(id);
    assert_eq!((&job["preemptions"], &job["failures"]), (&json!(3), &json!(1)), "{job}");
    assert_eq!(daemon.output(id), "try\ntry\n");
}

/// A pipeline: when its first job has ended two run at once, and one of them needs the slot of a long one.
#[test]
fn who_will_have_to_give_way_is_saved_before() {
    // The machine never fails: nothing is saved for that.
    let config = json!({ "shortest_interval": 0, "mean_time_between_failures": 1_i64 << 50 });
    let daemon = Daemon::configured(&config, &["--slots", "2", "--means", "checkpoint"]);
    let at = |name: &str| daemon.dir.path().join(name);
    let until_there =
        |name: &str| format!("until [ -e {} ]; do sleep 0.05; done", at(name).display());
    let submit =
        |options: &[&str], name: &str| daemon.submit(options, &["sh", "-c", &until_there(name)]);
    let first = submit(&["--class", "urgent"], "built");
    let long = submit(&["--class", "batch"], "done");
    daemon.wait_for(first, "running");
    daemon.wait_for(long, "running");
    let after = ["--class", "urgent", "--after", &first.to_string()];
    let tests = [submit(&after, "tested"), submit(&after, "tested")];
    let has = |kind: &str| {
        let shown = daemon.show(long);
        shown["events"].as_array().unwrap().iter().any(|event| event["kind"] == kind)
    };
    until("it is saved", || has("durable").then_some(()));
    assert!(!has("giving-way"), "{}", daemon.show(long));
    std::fs::write(at("built"), "").unwrap();
    daemon.wait_for(long, "preempted");
    // What it gives way by builds on that.
    let place = daemon.data().join(format!("jobs/{long}"));
    let builds = |entry: std::fs::DirEntry| {
        let record = std::fs::read(entry.path().join("record.json")).ok()?;
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        record["base"].as_u64()
    };
    let entries = std::fs::read_dir(place).unwrap();
    assert!(entries.filter_map(|entry| builds(entry.unwrap())).next().is_some());
    std::fs::write(at("tested"), "").unwrap();
    for id in tests {
        daemon.wait_for(id, "done");
    }
    std::fs::write(at("done"), "").unwrap();
    daemon.wait_for(long, "done");
}

/// Has whoever opens a file wait (fanotify(7), `FAN_OPEN_PERM`): the file, where each of them is written down, and what is
/// there when they may.
const DOORMAN: &str = r#"
import ctypes, os, struct, sys, time
seed, asked, go = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
door = libc.fanotify_init(4, os.O_RDONLY)
mark = libc.fanotify_mark(door, 1, ctypes.c_uint64(0x10000), -100, os.fsencode(seed))
if door < 0 or mark < 0:
    raise OSError(ctypes.get_errno(), "fanotify")
open(asked, "w").close()
while True:
    event = os.read(door, 24)
    with open(asked, "a") as out:
        out.write("asked\n")
    while not os.path.exists(go):
        time.sleep(0.05)
    file = struct.unpack_from("i", event, 16)[0]
    os.write(door, struct.pack("iI", file, 1))
    os.close(file)
"#;

/// A process that ends with this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A job that is to give way runs on, and is saved, while the input of the other is copied.
#[test]
fn nobody_gives_way_before_the_other_is_prepared() {
    let own = tempfile::tempdir().unwrap();
    let at = |name: &str| own.path().join(name);
    std::fs::create_dir(at("input")).unwrap();
    let seed = at("input/seed");
    std::fs::write(&seed, "seed\n").unwrap();
    let (asked, go) = (at("asked"), at("go"));
    let doorman = Command::new("python3").args(["-c", DOORMAN]).args([&seed, &asked, &go]).spawn();
    let _doorman = Killed(doorman.unwrap());
    until("it can be asked", || asked.exists().then_some(()));
    let config = json!({ "shortest_interval": 0, "mean_time_between_failures": 1_i64 << 50 });
    let options = ["--slots", "1", "--means", "checkpoint"];
    let daemon = Daemon::configured(&config, &options);
    let until_end = format!("until [ -e {} ]; do sleep 0.05; done", at("end").display());
    let long = daemon.submit(&["--class", "batch"], &["sh", "-c", &until_end]);
    daemon.wait_for(long, "running");
    let input = at("input");
    let options = ["--class", "urgent", "--input", input.to_str().unwrap()];
    let urgent = daemon.submit(&options, &["/bin/cat", "seed"]);
    let is_asked = || std::fs::read_to_string(&asked).unwrap() == "asked\n";
    until("its input is copied", || is_asked().then_some(()));
    let has = |kind: &str| {
        let shown = daemon.show(long);
        shown["events"].as_array().unwrap().iter().any(|event| event["kind"] == kind)
    };
    until("it is saved", || has("durable").then_some(()));
    assert!(!has("giving-way"), "{}", daemon.show(long));
    assert_eq!(daemon.job(long)["state"], "running");
    std::fs::write(&go, "").unwrap();
    daemon.wait_for(urgent, "done");
    assert_eq!(daemon.output(urgent), "seed\n");
    assert_eq!(daemon.job(long)["preemptions"], 1);
    assert!(is_asked(), "it was copied once");
    std::fs::write(at("end"), "").unwrap();
    daemon.wait_for(long, "done");
}

/// Its user can make it last for ever.
#[test]
fn a_job_has_no_slot_while_its_input_is_copied() {
    let own = tempfile::tempdir().unwrap();
    let at = |name: &str| own.path().join(name);
    std::fs::create_dir(at("input")).unwrap();
    let (seed, asked, go) = (at("input/seed"), at("asked"), at("go"));
    std::fs::write(&seed, "seed\n").unwrap();
    let doorman = Command::new("python3").args(["-c", DOORMAN]).args([&seed, &asked, &go]).spawn();
    let _doorman = Killed(doorman.unwrap());
    until("it can be asked", || asked.exists().then_some(()));
    let daemon = Daemon::start(&["--slots", "1"]);
    let input = at("input");
    let id = daemon.submit(&["--input", input.to_str().unwrap()], &["/bin/cat", "seed"]);
    let is_asked = || std::fs::read_to_string(&asked).unwrap() == "asked\n";
    until("its input is copied", || is_asked().then_some(()));
    let short = daemon.submit(&["--class", "short"], &["true"]);
    daemon.wait_for(short, "done");
    assert_eq!(daemon.job(id)["state"], "queued");
    std::fs::write(&go, "").unwrap();
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "seed\n");
    assert!(is_asked(), "it was copied once");
}

#[test]
fn nobody_gives_way_to_a_command_that_is_not_there() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let be = || {
        let words = ["submit", "--class", "urgent", "--wait", "--", "no-such-command"];
        daemon.queue(&words).output().unwrap()
    };
    let alone = be();
    assert_eq!(alone.status.code(), Some(127), "{}", common::shown(&alone));
    let long = daemon.submit(&["--class", "batch"], &["sleep", "1000"]);
    daemon.wait_for(long, "running");
    // What is said is the same.
    let output = be();
    assert_eq!((output.status, output.stdout), (alone.status, alone.stdout));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), String::from_utf8(alone.stderr).unwrap());
    let job = daemon.job(long);
    assert_eq!((&job["state"], &job["preemptions"]), (&json!("running"), &json!(0)));
}

#[test]
fn draining_puts_all_to_sleep_and_ends() {
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &words(&daemon.counter(20, 0.05)));
    daemon.wait_for_output(id, "3\n");
    daemon.ok(&["drain", "--wait"]);
    assert_eq!(daemon.job(id)["state"], "preempted");
    daemon.let_end();
    let late = daemon.submit(&["--class", "urgent"], &["true"]);
    assert!(daemon.ok(&["show", &late.to_string()]).contains("drained"));
    daemon.ok(&["drain", "--end"]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), counted(20));
    until("the late job ends", || (daemon.job(late)["state"] == "done").then_some(()));
}

#[test]
fn under_constant_urgent_load_a_long_job_has_its_turn() {
    let config = json!({ "rules": { "guarantee": { "every": 1500, "slice": 1000 } } });
    let daemon = Daemon::configured(&config, &["--slots", "1"]);
    let end = daemon.dir.path().join("end");
    let script = format!("until [ -e {} ]; do sleep 0.05; done", end.display());
    let submit = |_| daemon.submit(&["--class", "urgent"], &["sh", "-c", &script]);
    let urgent = [0; 3].map(submit);
    daemon.wait_for(urgent[0], "running");
    // The slot is never free: without a guarantee it would wait until they end.
    let long = daemon.submit(&["--class", "batch"], &words(&counter(20, 0.02)));
    daemon.wait_for(long, "done");
    assert_eq!(daemon.output(long), counted(20));
    let events = daemon.show(long)["events"].clone();
    let at = |kind: &str| {
        let mut events = events.as_array().unwrap().iter();
        events.find(|event| event["kind"] == kind).unwrap()["at"].as_i64().unwrap()
    };
    assert!(at("starting") - at("submitted") >= 1500, "it was not due: {events}");
    std::fs::write(end, "").unwrap();
    for id in urgent {
        daemon.wait_for(id, "done");
    }
}
