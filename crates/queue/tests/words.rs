//! What the commands answer about jobs that are not there, over, or already as they are to be: a
//! sentence that names the job, and a status that says that nothing was done.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use common::{Daemon, shown, until};
use serde_json::{Value, json};

/// What a command that must fail says.
fn refused(daemon: &Daemon, words: &[&str]) -> String {
    let output = daemon.queue(words).output().unwrap();
    assert!(!output.status.success(), "{words:?}: {}", shown(&output));
    assert!(output.stdout.is_empty(), "{words:?}: {}", shown(&output));
    String::from_utf8(output.stderr).unwrap()
}

fn assert_refused(daemon: &Daemon, words: &[&str], wanted: &[&str]) {
    let said = refused(daemon, words);
    for word in wanted {
        assert!(said.contains(word), "{words:?}: no {word:?} in {said}");
    }
}

/// The first line of a request that is read to its end.
fn request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        length =
            line.strip_prefix("Content-Length: ").map_or(length, |n| n.trim().parse().unwrap());
    }
    reader.take(length).read_to_end(&mut Vec::new()).unwrap();
    first
}

/// Is a daemon whose only job must not run, as is said to whoever is that job, and then is over.
fn be_a_daemon_whose_job_waits(listener: &TcpListener) {
    let frame = |kind: u8, text: &str| {
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        [&[kind], &length[..], text.as_bytes()].concat()
    };
    let mut job = r#"{"id":1,"state":"queued"}"#;
    loop {
        let mut stream = listener.accept().unwrap().0;
        let line = request(&stream);
        let mut body = job.as_bytes().to_vec();
        if line.contains("/stream") {
            let end = r#"{"exit":{"code":0},"note":null,"state":"done"}"#;
            body = [frame(4, "this machine is being drained"), frame(3, end)].concat();
            job = r#"{"id":1,"state":"done","exit":0}"#;
        }
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.into_bytes(), body].concat()).unwrap();
        if line.contains("/cancel") {
            return;
        }
    }
}

/// What the client of a job would say of it `check` does not: it has words of its own.
#[test]
fn a_check_says_nothing_as_the_client_of_its_job() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let daemon = std::thread::spawn(move || be_a_daemon_whose_job_waits(&listener));
    let mut check = Command::new(common::torpor());
    check.args(["queue", "check", "--", "true"]).env("TORPOR_QUEUE", address);
    let output = check.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("ended before it could be tried"), "{}", shown(&output));
    // It ends with what is said after that.
    daemon.join().unwrap();
    assert!(!said.contains("waits"), "{said}");
}

#[test]
fn a_job_that_is_not_there_is_named() {
    let daemon = Daemon::start(&[]);
    for verb in ["cancel", "preempt", "resume", "logs", "show"] {
        assert_refused(&daemon, &[verb, "99"], &["there is no job 99", "torpor queue list"]);
    }
    let to = ["move", "99", "--to", "b"];
    assert_refused(&daemon, &to, &["there is no job 99"]);
    assert_refused(&daemon, &["submit", "--after", "99", "--", "true"], &["no job 99"]);
    assert_refused(&daemon, &["list", "--state", "asleep"], &["preempted"]);
}

/// What a command line cannot mean is refused before anything is done.
#[test]
fn what_a_command_cannot_do_is_told_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("list.json");
    std::fs::write(&list, "[]").unwrap();
    let list = list.to_str().unwrap();
    for (words, wanted) in [
        (&["run", "--json", "--", "true"][..], "unexpected argument '--json'"),
        (&["serve", "--store", "nope"], "nope: checkpoints lie in dir:PATH or s3://BUCKET/PREFIX"),
        (&["serve", "--slots", "0"], "'--slots <N>': 0 is not in 1.."),
        (&["simulate", "--slots", "0"], "'--slots <N>': 0 is not in 1.."),
        (&["simulate", "--config", list], "expected a map"),
    ] {
        let mut command = Command::new(common::torpor());
        let output = command.arg("queue").args(words).stdin(Stdio::null()).output().unwrap();
        let said = shown(&output);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {said}");
        assert!(said.contains(wanted), "{words:?}: {said}");
    }
}

/// Programs are told of each job, whether it is as they have asked or not.
#[test]
fn of_several_jobs_each_is_told_of() {
    let daemon = Daemon::start(&[]);
    let [first, second] = [(); 2].map(|()| daemon.submit(&[], &["true"]));
    let lives = daemon.submit(&[], &["sleep", "1000"]);
    for id in [first, second] {
        daemon.wait_for(id, "done");
    }
    let told = |verb: &str, ids: [u64; 3]| {
        let ids = ids.map(|id| id.to_string());
        let output = daemon.queue(&[verb, "--json", &ids[0], &ids[1], &ids[2]]).output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(stderr, format!("Error: {}\n", said["text"].as_str().unwrap()));
        said
    };
    let ids = |refused: &Value| -> Vec<u64> {
        refused.as_array().unwrap().iter().map(|one| one["id"].as_u64().unwrap()).collect()
    };
    let cancelled = told("cancel", [first, lives, 9999]);
    assert_eq!(cancelled["cancelled"], json!([lives]), "{cancelled}");
    assert_eq!(ids(&cancelled["refused"]), [first, 9999], "{cancelled}");
    let forgotten = told("forget", [first, 9999, second]);
    assert_eq!(forgotten["forgotten"], json!([first, second]), "{forgotten}");
    assert_eq!(ids(&forgotten["refused"]), [9999], "{forgotten}");
    let why = forgotten["refused"][0]["why"].as_str().unwrap();
    assert!(why.contains("there is no job 9999"), "{forgotten}");
    assert_eq!(forgotten["class"], "refused", "{forgotten}");
}

/// There is a daemon: another one would not help.
#[test]
fn a_socket_that_this_user_may_not_open_is_told_of() {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let daemon = Daemon::start(&[]);
    // The program may lie where only its owner gets.
    let program = std::fs::File::open(common::torpor()).unwrap();
    let program = format!("/proc/self/fd/{}", program.as_raw_fd());
    let said = || {
        let mut list = Command::new(&program);
        list.arg0("torpor").args(["queue", "list"]).env("TORPOR_QUEUE", daemon.address());
        let output = list.uid(65534).gid(65534).current_dir("/").output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
        String::from_utf8(output.stderr).unwrap()
    };
    let set = |mode| {
        std::fs::set_permissions(daemon.dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set(0o700);
    assert!(said().contains("a directory above it is closed to them"), "{}", said());
    set(0o755);
    let wanted = "user 65534 may not open this socket: it belongs to user 0 and group 0, and has \
                  the mode 600";
    assert!(said().contains(wanted) && !said().contains("torpor queue serve"), "{}", said());
}

#[test]
fn a_job_that_is_over_says_how_it_ended() {
    let daemon = Daemon::configured(&json!({ "pool": { "b": "https://b.example:1" } }), &[]);
    let id = daemon.submit(&[], &["sh", "-c", "exit 3"]).to_string();
    daemon.wait_for(1, "failed");
    for verb in ["cancel", "preempt", "resume"] {
        let wanted = ["job 1 is over: failed, exit status 3", "torpor queue show 1"];
        assert_refused(&daemon, &[verb, &id], &wanted);
    }
    // Those that can be ended are, whatever is said of the others.
    let lives = daemon.submit(&[], &["sleep", "1000"]);
    let words = ["cancel", &id, "99", &lives.to_string()];
    assert_refused(&daemon, &words, &["job 1 is over", "no job 99"]);
    daemon.wait_for(lives, "cancelled");
    // Output is there when a job is over, too; one that never ran has none.
    assert_eq!(daemon.output(1), "");
    let never = daemon.submit(&["--after", "1", "--retries", "0"], &["true"]);
    let output = daemon.queue(&["logs", &never.to_string()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("job {never} ")), "{}", shown(&output));
}

#[test]
fn what_is_so_already_is_refused_by_name() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let first = daemon.submit(&[], &["sleep", "1000"]);
    daemon.wait_for(first, "running");
    let waits = daemon.submit(&[], &["true"]);
    assert_refused(&daemon, &["resume", "1"], &["job 1 runs already"]);
    assert_refused(&daemon, &["resume", "2"], &["job 2 was not preempted by hand", "for job 1"]);
    let output = daemon.queue(&["logs", "2"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("job 2 has not started, it waits for job 1"), "{said}");
    // One that waits is kept from running, once.
    daemon.ok(&["preempt", "2"]);
    assert_refused(&daemon, &["preempt", "2"], &["job 2 has given way already", "resume 2"]);
    daemon.ok(&["preempt", "1"]);
    assert_refused(&daemon, &["preempt", "1"], &["job 1 has given way already", "resume 1"]);
    daemon.ok(&["resume", "2"]);
    daemon.wait_for(waits, "done");
    daemon.ok(&["resume", "1"]);
    daemon.wait_for(first, "running");
    // Means that it does not have.
    let words = ["preempt", "1", "--means", "command"];
    assert_refused(&daemon, &words, &["job 1 cannot give way like that"]);
    assert_refused(&daemon, &["preempt", "1", "--means", "a b&c"], &["stop, checkpoint"]);
    daemon.ok(&["cancel", "1"]);
    daemon.wait_for(first, "cancelled");
}

#[test]
fn a_second_cancel_sends_its_signal() {
    let daemon = Daemon::configured(&json!({ "grace": 3_600_000 }), &[]);
    let script = "trap 'echo no' TERM; echo ready; while :; do sleep 0.05; done";
    let id = daemon.submit(&[], &["sh", "-c", script]);
    daemon.wait_for_output(id, "ready");
    daemon.ok(&["cancel", "1"]);
    daemon.wait_for_output(id, "no");
    assert_refused(&daemon, &["cancel", "1", "--signal", "99"], &["from 1 to 31"]);
    daemon.ok(&["cancel", "1", "--signal", "9"]);
    assert_eq!(daemon.wait_for(id, "cancelled")["exit"], 137);
}

#[test]
fn draining_twice_says_so() {
    let daemon = Daemon::start(&[]);
    assert_refused(&daemon, &["drain", "--end"], &["is not being drained"]);
    daemon.ok(&["drain"]);
    assert_refused(&daemon, &["drain"], &["is being drained already", "drain --end"]);
    daemon.ok(&["drain", "--wait"]);
    let id = daemon.submit(&[], &["true"]);
    assert_refused(&daemon, &["resume", "1"], &["job 1 was not", "being drained"]);
    daemon.ok(&["drain", "--end"]);
    daemon.wait_for(id, "done");
}

/// A name without limits shows the quota: it does not take it away.
#[test]
fn a_quota_is_shown_and_lifted() {
    let daemon = Daemon::start(&[]);
    assert_refused(&daemon, &["quota", "owner:ann"], &["owner:ann has no quota"]);
    assert_refused(&daemon, &["quota", "ann", "--slots", "1"], &["owner:NAME"]);
    let name = "project:kernel/net & more";
    daemon.ok(&["quota", name, "--slots", "2"]);
    let slots = || -> Value {
        let quota: Value = serde_json::from_str(&daemon.ok(&["quota", name])).unwrap();
        quota["slots"].clone()
    };
    assert_eq!(slots(), 2);
    // A size is said as a job's is.
    assert!(daemon.ok(&["quota", name, "--memory", "2G"]).contains("2147483648"));
    daemon.ok(&["quota", name, "--lift"]);
    assert_eq!(slots(), Value::Null);
    until("top", || daemon.ok(&["top"]).contains("slots 0/").then_some(()));
}

/// As `torpor queue list | head`: a command that prints for nobody ends by SIGPIPE, without a word.
#[test]
fn who_is_read_no_more_ends_quietly() {
    use std::os::unix::process::ExitStatusExt;
    let daemon = Daemon::start(&[]);
    let id = daemon.submit(&[], &["seq", "100000"]);
    daemon.wait_for(id, "done");
    for words in [&["list"][..], &["logs", "1"], &["show", "1"], &["top"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = daemon.queue(words);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(13), "{words:?}: {}", shown(&output));
        assert!(output.stderr.is_empty(), "{words:?}: {}", shown(&output));
    }
}

#[test]
fn input_and_artefacts_that_are_not_there_are_told_of() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let at = |name: &str| daemon.dir.path().join(name).to_str().unwrap().to_owned();
    let words = ["submit", "--input", &at("nowhere"), "--", "true"];
    assert_refused(&daemon, &words, &["nowhere is no directory"]);
    // Unless a job before makes it.
    let first = daemon.submit(&[], &["mkdir", &at("made")]);
    let second = ["--input", &at("made"), "--after", &first.to_string()];
    let second = daemon.submit(&second, &["true"]);
    daemon.wait_for(second, "done");
    // A job that went well says what it could not hand over.
    let words = ["submit", "--wait", "--input", &at("made"), "--artefact", "found", "--", "true"];
    let output = daemon.queue(&words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("lost: artefact found"), "{said}");
    // What it has comes to the same place below its directory.
    let script = "mkdir -p 'a b/out' && echo found >'a b/out/x'";
    let here = daemon.dir.path().to_str().unwrap();
    let words = ["submit", "--wait", "--input", &at("made"), "--artefact", "a b/out/x"];
    let words = [&words[..], &["--dir", here, "--", "sh", "-c", script]].concat();
    let output = daemon.queue(&words).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", common::shown(&output));
    assert_eq!(std::fs::read_to_string(at("a b/out/x")).unwrap(), "found\n");
    // One that this machine has too few slots for is told of at once.
    let output = daemon.queue(&["submit", "--slots", "100", "--", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("can never run here"), "{said}");
}

#[test]
fn a_check_that_is_interrupted_takes_its_job_back() {
    use rustix::process::{Pid, Signal, kill_process};
    use std::os::unix::process::ExitStatusExt;
    // The daemon does not miss it meanwhile.
    let daemon = Daemon::configured(&json!({ "orphan_after": 3_600_000 }), &[]);
    let mut check = daemon.queue(&["check", "--after", "1000", "--", "sleep", "1000"]);
    let mut check = check.stdout(Stdio::null()).spawn().unwrap();
    until("the job runs", || {
        daemon.jobs().first().filter(|job| job["state"] == "running").map(drop)
    });
    until("signals are caught", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", check.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
        (caught >> (Signal::INT.as_raw() - 1) & 1 == 1).then_some(())
    });
    kill_process(Pid::from_child(&check), Signal::INT).unwrap();
    assert_eq!(check.wait().unwrap().signal(), Some(Signal::INT.as_raw()));
    daemon.wait_for(1, "cancelled");
}
