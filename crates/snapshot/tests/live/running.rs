//! Snapshots of containers that run, and go on running.

use std::fs::{self, File};
use std::process::Stdio;

use crate::place::{Place, shown, until};

/// Makes a snapshot of a container that runs.
#[track_caller]
pub fn create_of(place: &Place, name: &str, reference: &str) {
    let mut create = place.torpor(&["create", reference, "--json", "--runc-root"]);
    create.arg(place.path("runc")).arg("--from").arg(format!("running:{}", place.id(name)));
    let output = create.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
}

/// Waits until something was logged.
#[track_caller]
fn logged(place: &Place, file: &str, line: &str) {
    until(line, || fs::read_to_string(place.path(file)).is_ok_and(|log| log.contains(line)));
}

/// Those that were started by `snapshot run`, cold or warm, can be taken again.
#[test]
fn containers_of_ours_are_taken_while_they_run() {
    let place = Place::new("running", 500);
    let (first, second) = (place.reference(), place.reference() + ":second");
    place.create(&first, &[]);
    let log = place.path("log").display().to_string();
    let ways = [("cold", "cold", &["--policy", "Never"][..]), ("warm", "snapshot", &[])];
    for (name, from, more) in ways {
        for log in [&[][..], &["--log", &log]] {
            place.run(&first, name, from, &[more, log].concat());
            until("it answers", || {
                let ask =
                    place.runc(&["exec", &place.id(name), "/app", "ask", "page", "3"]).output();
                ask.unwrap().status.success()
            });
            place.exec(name, &["sh", "-c", &format!("echo {name} > /written")]);
            create_of(&place, name, &second);
            assert_eq!(place.exec(name, &["cat", "/written"]), name, "it goes on");
            place.run(&second, "next", "snapshot", log);
            assert_eq!(place.exec("next", &["cat", "/written"]), name);
            let sum = place.exec("next", &["/app", "ask", "sum"]);
            assert_eq!(place.exec(name, &["/app", "ask", "sum"]), sum);
            if !log.is_empty() {
                for printer in [name, "next"] {
                    let line = format!("{printer} of {name}");
                    place.exec(printer, &["/app", "ask", "print", &line]);
                    logged(&place, "log", &line);
                }
            }
            place.delete("next");
            place.delete(name);
        }
    }
}

/// So can one that somebody else has started, with a log of its own.
#[test]
fn any_container_of_the_runtime_is_taken_while_it_runs() {
    let place = Place::new("foreign", 500);
    let mut run = place.runc(&["run", "--detach", "--bundle"]);
    run.arg(place.path("bundle")).arg(place.id("shell"));
    let log = File::create(place.path("shell.log")).unwrap();
    run.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null());
    assert!(run.status().unwrap().success());
    logged(&place, "shell.log", "ready to answer");
    create_of(&place, "shell", &place.reference());
    let own = place.path("own.log").display().to_string();
    place.run(&place.reference(), "warm", "snapshot", &["--log", &own]);
    for (name, file) in [("shell", "shell.log"), ("warm", "own.log")] {
        place.exec(name, &["/app", "ask", "print", name]);
        logged(&place, file, name);
    }
    let shell = fs::read_to_string(place.path("shell.log")).unwrap();
    assert!(!shell.contains("warm"), "{shell}");
    let sum = place.exec("shell", &["/app", "ask", "sum"]);
    assert_eq!(place.exec("warm", &["/app", "ask", "sum"]), sum);
}
