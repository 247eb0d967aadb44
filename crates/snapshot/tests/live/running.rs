//! Snapshots of containers that run, and go on running.

use std::fs::{self, File};
use std::process::{Output, Stdio};

use serde_json::json;
use torpor_snapshot::feed::is_fed;

use crate::fixture::{Fixture, shown, until};

/// Makes a snapshot of a container that runs; what is said.
#[track_caller]
pub fn create_of(fixture: &Fixture, name: &str, reference: &str) -> Output {
    create_with(fixture, name, reference, &[])
}

/// The same with more options.
#[track_caller]
fn create_with(fixture: &Fixture, name: &str, reference: &str, more: &[&str]) -> Output {
    let mut create = fixture.torpor(&["create", reference, "--json", "--runc-root"]);
    create.arg(fixture.path("runc")).arg("--from").arg(format!("running:{}", fixture.id(name)));
    let output = create.args(more).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    output
}

/// The numbers that a container has written to a file of the host, one after the other.
fn counted(fixture: &Fixture) -> Vec<u64> {
    let log = fs::read_to_string(fixture.path("data/log")).unwrap();
    log.lines().map(|line| line.parse().unwrap()).collect()
}

/// Waits until it has written more.
#[track_caller]
fn counts_on(fixture: &Fixture) {
    let before = counted(fixture).len();
    until("it goes on", || counted(fixture).len() > before + 20);
}

/// A trial start is a second copy of the application: unless it is asked for there is none where it would work on the
/// data of the first one.
#[test]
fn no_second_copy_works_on_the_data_of_the_first() {
    let fixture = Fixture::new("data", 10);
    fs::create_dir(fixture.path("data")).unwrap();
    let count = "i=0; while :; do i=$((i+1)); echo $i >>/data/log; busybox usleep 10000; done";
    fixture.configure(|config| {
        config["process"]["args"] = json!(["/bin/sh", "-c", count]);
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/data", "type": "bind", "source": fixture.path("data"), "options": ["rbind"],
        }));
    });
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    let is_in_order = || counted(&fixture).is_sorted_by(|one, next| one < next);
    let no_trial = "not started for a trial, which would write to /data of the host";
    let made = fixture.try_create(&first, &["--ready", "exec:test -s /data/log"]);
    assert!(made.status.success() && shown(&made).contains(no_trial), "{}", shown(&made));
    // The memory of the snapshot goes with what was written last.
    fixture.run(&first, "one", "snapshot", &[]);
    counts_on(&fixture);
    assert!(is_in_order(), "{:?}", counted(&fixture));
    let made = create_of(&fixture, "one", &second);
    assert!(shown(&made).contains(no_trial), "{}", shown(&made));
    counts_on(&fixture);
    assert!(is_in_order(), "{:?}", counted(&fixture));
    // A copy that gets no processor while it is tried writes nothing.
    until("a second copy is seen", || {
        let made = create_with(&fixture, "one", &second, &["--trial"]);
        assert!(!shown(&made).contains("not started for a trial"), "{}", shown(&made));
        !is_in_order()
    });
}

/// Waits until something was logged.
#[track_caller]
fn logged(fixture: &Fixture, file: &str, line: &str) {
    until(line, || fs::read_to_string(fixture.path(file)).is_ok_and(|log| log.contains(line)));
}

/// Those that were started by `snapshot run`, cold or warm, can be taken again.
#[test]
fn containers_of_ours_are_taken_while_they_run() {
    let fixture = Fixture::new("running", 500);
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    fixture.create(&first, &[]);
    let log = fixture.path("log").display().to_string();
    let ways = [("cold", "cold", &["--policy", "Never"][..]), ("warm", "snapshot", &[])];
    for (name, from, more) in ways {
        for log in [&[][..], &["--log", &log]] {
            fixture.run(&first, name, from, &[more, log].concat());
            until("it answers", || {
                let ask =
                    fixture.runc(&["exec", &fixture.id(name), "/app", "ask", "page", "3"]).output();
                ask.unwrap().status.success()
            });
            fixture.exec(name, &["sh", "-c", &format!("echo {name} > /written")]);
            create_of(&fixture, name, &second);
            assert_eq!(fixture.exec(name, &["cat", "/written"]), name, "it goes on");
            fixture.run(&second, "next", "snapshot", log);
            assert_eq!(fixture.exec("next", &["cat", "/written"]), name);
            let sum = fixture.exec("next", &["/app", "ask", "sum"]);
            assert_eq!(fixture.exec(name, &["/app", "ask", "sum"]), sum);
            if !log.is_empty() {
                for printer in [name, "next"] {
                    let line = format!("{printer} of {name}");
                    fixture.exec(printer, &["/app", "ask", "print", &line]);
                    logged(&fixture, "log", &line);
                }
            }
            fixture.delete("next");
            fixture.delete(name);
        }
    }
}

/// So can one that somebody else has started, with a log of its own.
#[test]
fn any_container_of_the_runtime_is_taken_while_it_runs() {
    let fixture = Fixture::new("foreign", 500);
    let mut run = fixture.runc(&["run", "--detach", "--bundle"]);
    run.arg(fixture.path("bundle")).arg(fixture.id("shell"));
    let log = File::create(fixture.path("shell.log")).unwrap();
    run.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null());
    assert!(run.status().unwrap().success());
    logged(&fixture, "shell.log", "ready to answer");
    create_of(&fixture, "shell", &fixture.reference());
    let own = fixture.path("own.log").display().to_string();
    fixture.run(&fixture.reference(), "warm", "snapshot", &["--log", &own]);
    for (name, file) in [("shell", "shell.log"), ("warm", "own.log")] {
        fixture.exec(name, &["/app", "ask", "print", name]);
        logged(&fixture, file, name);
    }
    let shell = fs::read_to_string(fixture.path("shell.log")).unwrap();
    assert!(!shell.contains("warm"), "{shell}");
    let sum = fixture.exec("shell", &["/app", "ask", "sum"]);
    assert_eq!(fixture.exec("warm", &["/app", "ask", "sum"]), sum);
}

/// What a container that runs or sleeps needs stays, wherever its runtime has its state.
#[test]
fn gc_leaves_what_a_sleeping_container_needs() {
    let fixture = Fixture::new("sleeper", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let files = fixture.path("state/instances").join(fixture.id("one"));
    let engine = fs::read_dir(fixture.path("state/engine")).unwrap().next().unwrap().unwrap();
    let path = format!("{}:{}", engine.path().display(), std::env::var("PATH").unwrap());
    let runc = |words: &[&str]| {
        let mut call = fixture.runc(words);
        call.env("PATH", &path).stdout(Stdio::null()).stderr(Stdio::null());
        call.arg("--image-path").arg(fixture.path("asleep")).arg(fixture.id("one"));
        assert!(call.status().unwrap().success(), "{words:?}");
    };
    let gc = || {
        let output = fixture.torpor(&["gc", "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        said["freed"].as_u64().unwrap()
    };
    let said = fixture.run(&reference, "one", "snapshot", &[]);
    fixture.exec("one", &["sh", "-c", "echo precious >/data"]);
    assert_eq!(gc(), 0);
    let pid = said["pid"].as_i64().unwrap().try_into().unwrap();
    until("its pages are there", || !is_fed(pid));
    runc(&["checkpoint", "--file-locks", "--ext-unix-sk"]);
    assert_eq!(gc(), 0);
    let taken = fixture.try_run(&reference, "one", &[]);
    assert!(shown(&taken).contains("it sleeps"), "{}", shown(&taken));
    let bundle = files.display().to_string();
    runc(&["restore", "--detach", "--file-locks", "--ext-unix-sk", "--bundle", &bundle]);
    assert_eq!(fixture.exec("one", &["cat", "/data"]), "precious");
    fixture.delete("one");
    assert!(!files.exists());
    // What is left of a start that was killed goes.
    fs::create_dir_all(files.join("upper")).unwrap();
    fs::write(files.join("upper/data"), "lost").unwrap();
    assert!(gc() > 0);
    assert!(!files.exists());
}

/// Whatever fails, a name is free afterwards; and of several containers all names are looked at first.
#[test]
fn a_start_that_fails_leaves_the_names_free() {
    let fixture = Fixture::new("names", 50);
    let reference = fixture.reference();
    let made = fixture.try_create(&reference, &[]);
    assert!(made.status.success(), "{}", shown(&made));
    assert!(shown(&made).contains("without --ready"), "{}", shown(&made));
    for policy in ["Never", "Always"] {
        let failed =
            fixture.try_run(&reference, "one", &["--policy", policy, "--log", "/nope/log"]);
        assert_eq!(failed.status.code(), Some(1), "{}", shown(&failed));
        assert!(!fixture.path("state/instances").join(fixture.id("one")).exists(), "{policy}");
    }
    fixture.run(&reference, "all-2", "snapshot", &[]);
    let taken = fixture.try_run(&reference, "all", &["--count", "3"]);
    assert_eq!(taken.status.code(), Some(1), "{}", shown(&taken));
    let list = fixture.runc(&["list", "--quiet"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert_eq!(list.trim(), fixture.id("all-2"));
}
