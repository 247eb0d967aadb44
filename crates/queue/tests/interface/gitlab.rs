//! GitLab's driver.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::common::{self, Daemon, counted, shown, until};

/// Calls the driver as Runner does.
fn gitlab(daemon: &Daemon, dir: &Path, words: &[&str]) -> Command {
    let mut command = daemon.queue(&["gitlab", "--dir"]);
    command
        .arg(dir)
        .args(words)
        .env("CUSTOM_ENV_CI_JOB_ID", "77")
        .env("CUSTOM_ENV_CI_RUNNER_ID", "5")
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
    let configured = |runner: &str| -> Value {
        let mut driver = gitlab(&daemon, dir.path(), &["config"]);
        let output = driver.env("CUSTOM_ENV_CI_RUNNER_ID", runner).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let config = configured("5");
    let builds = dir.path().join("builds/5/12/1");
    assert_eq!(config["builds_dir"], builds.to_str().unwrap());
    // Another Runner of this machine may have a job of the same project, in a slot of the same number.
    assert_ne!(configured("6")["builds_dir"], config["builds_dir"]);
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

/// With it a script could do to all jobs what the driver may.
#[test]
fn a_script_does_not_get_the_token_of_the_driver() {
    let daemon = Daemon::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "echo ${TORPOR_QUEUE_TOKEN-none} $TORPOR_QUEUE").unwrap();
    let mut driver = gitlab(&daemon, dir.path(), &["run", script.to_str().unwrap(), "step_one"]);
    let output = driver.env("TORPOR_QUEUE_TOKEN", "a-token-of-the-driver").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, format!("none {}\n", daemon.address()), "{}", shown(&output));
}

/// A misspelt one is told of: it makes it another job than was meant. An empty one is none, and the small steps have their own.
#[test]
fn the_class_of_a_script_is_the_one_that_its_variable_names() {
    let daemon = Daemon::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "true").unwrap();
    let run = |class: &str, stage: &str| {
        let words = ["--class", "long", "run", script.to_str().unwrap(), stage];
        let mut driver = gitlab(&daemon, dir.path(), &words);
        let output = driver.env("CUSTOM_ENV_TORPOR_CLASS", class).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let job = daemon.jobs().pop().unwrap();
        (job["class"].clone(), String::from_utf8(output.stderr).unwrap())
    };
    for (class, stage, found) in [
        ("batch", "build_script", "batch"),
        ("batch", "step_one", "batch"),
        ("batch", "get_sources", "urgent"),
        ("", "build_script", "long"),
    ] {
        assert_eq!(run(class, stage), (json!(found), String::new()), "{class} {stage}");
    }
    let (class, said) = run("bacth", "build_script");
    assert!(class == "bacth" && said.contains("no class \"bacth\" is configured"), "{said}");
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
