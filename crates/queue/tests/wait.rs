//! `submit --wait` is the job.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::io::{BufRead, Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Daemon, ask, counted, counter, shown, torpor, until, words};

#[test]
fn exit_status_output_and_input_are_the_jobs() {
    let daemon = Daemon::start(&[]);
    let output = daemon
        .queue(&["submit", "--wait", "--", "sh", "-c", "printf 'a\\0b'; printf err >&2; exit 7"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", shown(&output));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"a\0b"[..], &b"err"[..]));

    let mut cat = daemon.queue(&["submit", "--wait", "--", "md5sum"]);
    let mut cat = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = cat.stdin.take().unwrap();
    for part in 0..50_u8 {
        stdin.write_all(&[part; 40_000]).unwrap();
    }
    drop(stdin);
    let output = cat.wait_with_output().unwrap();
    let sum = String::from_utf8(output.stdout).unwrap();
    // md5 of 50 times 40,000 bytes 0, 1, … 49.
    let expected = std::process::Command::new("python3")
        .args(["-c", "import hashlib; print(hashlib.md5(b''.join(bytes([i])*40000 for i in range(50))).hexdigest())"])
        .output()
        .unwrap();
    assert_eq!(sum.split(' ').next(), String::from_utf8(expected.stdout).unwrap().lines().next());
}

/// As at a pipe: neither the disk nor the memory of the daemon holds what a job may never read.
#[test]
fn who_sends_more_than_a_job_reads_waits() {
    const MOST: u64 = 16 << 20;
    /// What is in the pipe of the job, which counts as read.
    const PIPE: u64 = 64 << 10;
    let daemon = Daemon::start(&[]);
    let script = "until [ -e $0 ]; do sleep 0.05; done; wc -c";
    let may_end = daemon.may_end();
    let mut count = daemon.queue(&["submit", "--wait", "--", "sh", "-c", script]);
    let count = count.arg(may_end).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut count = count.spawn().unwrap();
    let mut stdin = count.stdin.take().unwrap();
    let sends = std::thread::spawn(move || stdin.write_all(&vec![0; 20 << 20]).unwrap());
    let input = until("more than is taken", || {
        let there = daemon.jobs().first()?["id"].as_u64()?;
        daemon.show(there)["input_bytes"].as_u64().filter(|&bytes| bytes > MOST + PIPE)
    });
    // Nobody sends the job itself more than the client that is it.
    let (status, said) = ask(&daemon, "PUT", &format!("/v1/jobs/1/stdin?at={input}"), "", "");
    assert_eq!(status, 429, "{said}");
    assert!(daemon.show(1)["input_bytes"].as_u64().unwrap() <= MOST + (256 << 10));
    // What it has not read it has after it was saved, too.
    daemon.ok(&["preempt", "1", "--means", "checkpoint"]);
    daemon.ok(&["resume", "1"]);
    daemon.let_end();
    let output = count.wait_with_output().unwrap();
    sends.join().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), (20 << 20).to_string());
}

/// It reads no more, however much it has not read: its client is done.
#[test]
fn who_sends_more_to_a_job_that_is_over_does_not_wait() {
    let daemon = Daemon::start(&[]);
    let mut head = daemon.queue(&["submit", "--wait", "--", "head", "-c", "1"]);
    let head = head.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut head = head.spawn().unwrap();
    let mut stdin = head.stdin.take().unwrap();
    // Its client may have ended before it has all of it.
    let sends = std::thread::spawn(move || drop(stdin.write_all(&vec![b'x'; 40 << 20])));
    let output = head.wait_with_output().unwrap();
    sends.join().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", shown(&output));
    assert_eq!(output.stdout, b"x");
    // What is missing before that is what is said, and not that it is too early.
    let (status, said) = ask(&daemon, "PUT", "/v1/jobs/1/stdin?at=99999999", "", "");
    assert_eq!(status, 409, "{said}");
}

#[test]
fn what_cannot_be_run_ends_as_in_a_shell() {
    let daemon = Daemon::start(&[]);
    let code = |command: &str| {
        daemon.queue(&["submit", "--wait", "--", command]).output().unwrap().status.code()
    };
    assert_eq!(code("/nowhere/at/all"), Some(127));
    assert_eq!(code("/etc"), Some(126));
    let nobody = std::process::Command::new(common::torpor())
        .args(["queue", "submit", "--wait", "--", "true"])
        .env("TORPOR_QUEUE", "unix:/nowhere/at/all")
        .output()
        .unwrap();
    assert_eq!(nobody.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("torpor queue serve"));
}

#[test]
fn directory_environment_and_umask_are_the_callers() {
    let daemon = Daemon::start(&[]);
    let submit = "umask 027; exec \"$0\" queue submit --wait -- sh -c 'pwd; echo \"$MINE\"; umask'";
    let output = std::process::Command::new("sh")
        .args(["-c", submit])
        .arg(common::torpor())
        .current_dir(daemon.dir.path())
        .env("TORPOR_QUEUE", daemon.address())
        .env("MINE", "a b")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], daemon.dir.path().canonicalize().unwrap().to_str().unwrap());
    assert_eq!(lines[1..], ["a b", "0027"]);
}

/// Over HTTP nobody has to name one.
#[test]
fn without_a_umask_others_may_write_to_nothing() {
    let daemon = Daemon::start(&[]);
    let job = r#"{"command": ["/bin/sh", "-c", "umask"], "dir": "/"}"#;
    assert_eq!(ask(&daemon, "POST", "/v1/jobs", "", job).0, 201);
    daemon.wait_for(1, "done");
    assert_eq!(daemon.ok(&["logs", "1"]), "0022\n");
}

/// They are not higher than the daemon's, and stay while the job gives way.
#[test]
fn limits_and_niceness_are_the_callers() {
    let daemon = Daemon::start(&[]);
    let says = "ulimit -Sn; ulimit -Hn; ulimit -Sc; nice";
    let job =
        format!("{says}; until [ -e {} ]; do sleep 0.05; done; {says}", daemon.may_end().display());
    let submit = "ulimit -c 0; ulimit -Sn 200; ulimit -Hn 300; exec nice -n 7 \"$0\" queue submit -- sh -c \"$1\"";
    let output = std::process::Command::new("sh")
        .args(["-c", submit])
        .arg(common::torpor())
        .arg(job)
        .env("TORPOR_QUEUE", daemon.address())
        .output()
        .unwrap();
    let id: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    let before = until("the first half", || {
        Some(daemon.output(id)).filter(|said| said.lines().count() == 4)
    });
    assert!(before.starts_with("200\n300\n0\n"), "{before}");
    daemon.ok(&["preempt", &id.to_string(), "--means", "checkpoint"]);
    daemon.ok(&["resume", &id.to_string()]);
    daemon.let_end();
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), before.repeat(2));
    let niceness = |of: &[&str]| {
        let output = std::process::Command::new(of[0]).args(&of[1..]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(before.ends_with(&niceness(&["nice", "-n", "7", "nice"])), "{before}");
}

#[test]
fn death_by_a_signal_is_passed_on() {
    let daemon = Daemon::start(&[]);
    for signal in ["KILL", "TERM", "SEGV", "INT"] {
        let script = format!("kill -{signal} $$");
        let status =
            daemon.queue(&["submit", "--wait", "--", "sh", "-c", &script]).status().unwrap();
        let number = match signal {
            "KILL" => 9,
            "TERM" => 15,
            "SEGV" => 11,
            _ => 2,
        };
        assert_eq!(status.signal(), Some(number), "{signal}");
    }
}

#[test]
fn signals_to_the_client_reach_the_job() {
    let daemon = Daemon::start(&[]);
    let script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let client = daemon
        .queue(&["submit", "--wait", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until("a job", || daemon.ok(&["list", "--json"]).contains("\"running\"").then_some(()));
    daemon.wait_for_output(1, "ready");
    let pid = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "ready\ncaught\n");
}

#[test]
fn a_client_does_not_notice_twenty_preemptions() {
    let daemon = Daemon::start(&["--means", "checkpoint"]);
    let script = "import sys, time\nfor i in range(400):\n    print(i, flush=True)\n    \
                  print('e', i, file=sys.stderr, flush=True)\n    time.sleep(0.02)\n\
                  print('end ' + sys.stdin.readline(), end='')\nsys.exit(9)";
    let mut client = daemon
        .queue(&["submit", "--wait", "--class", "batch", "--", "python3", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It has a part of its input, and does not end before it has the rest.
    let mut stdin = client.stdin.take().unwrap();
    stdin.write_all(b"of the ").unwrap();
    until("the job runs", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    for _ in 0..20 {
        daemon.wait_for(1, "running");
        daemon.ok(&["preempt", "1"]);
        assert_eq!(daemon.job(1)["state"], "preempted", "{}", daemon.show(1));
        daemon.ok(&["resume", "1"]);
    }
    stdin.write_all(b"line\n").unwrap();
    drop(stdin);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(9), "{}", shown(&output));
    let numbers: String = (0..400).map(|i| format!("{i}\n")).collect();
    let errors: String = (0..400).map(|i| format!("e {i}\n")).collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{numbers}end of the line\n"));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), errors);
    let job = daemon.job(1);
    assert_eq!((&job["preemptions"], &job["note"]), (&20.into(), &().into()));
}

/// A step of any CI, one word longer: it gives way to an urgent job, and its caller sees the command.
#[test]
fn run_is_the_command_for_any_ci() {
    let daemon = Daemon::start(&["--slots", "1", "--means", "checkpoint"]);
    let end = "import sys\nprint('warned', file=sys.stderr)\nsys.exit(5)";
    let script = format!("{}\n{end}", daemon.counter(60, 0.05)[2]);
    let client = daemon
        .queue(&["run", "--class", "batch", "--", "python3", "-c", &script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    daemon_runs(&daemon);
    daemon.wait_for_output(1, "5\n");
    let urgent = daemon.queue(&["run", "--class", "urgent", "--", "echo", "urgent"]).output();
    assert_eq!(urgent.unwrap().stdout, b"urgent\n");
    daemon.let_end();
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", shown(&output));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), counted(60));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "warned\n");
    assert_eq!(daemon.job(1)["preemptions"], 1);
}

/// As a command that reads nothing: a terminal stops whoever reads from it in the background.
#[test]
fn a_client_in_the_background_of_a_terminal_goes_on() {
    let daemon = Daemon::start(&[]);
    let run =
        format!("'{}' queue run -- sh -c 'sleep 0.5; echo ran' & wait $!", torpor().display());
    let mut shell = Command::new("script");
    shell.args(["-qec", &format!("bash -mc \"{run}\""), "/dev/null"]).stdin(Stdio::null());
    let output = shell.env("TORPOR_QUEUE", daemon.address()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // The shell shows the command of one that it has stopped.
    assert!(text.lines().any(|line| line.trim() == "ran"), "{}", shown(&output));
}

#[test]
fn a_client_outlives_its_daemon() {
    let mut daemon = Daemon::start(&[]);
    let command = counter(60, 0.05);
    let mut line = vec!["submit", "--wait", "--"];
    line.extend(words(&command));
    let client = daemon.queue(&line).stdout(Stdio::piped()).spawn().unwrap();
    until("the job runs", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    for word in ["5", "25"] {
        until("output", || daemon.output(1).lines().any(|line| line == word).then_some(()));
        daemon.kill();
        std::thread::sleep(Duration::from_millis(100));
        daemon.launch();
    }
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), counted(60));
    assert_eq!(daemon.job(1)["run"], 1);
}

#[test]
fn a_job_ends_with_its_client() {
    // Longer than a client takes, on a busy machine, from its job's being accepted to its waiting for it.
    let config = serde_json::json!({ "orphan_after": 10_000 });
    let daemon = Daemon::configured(&config, &[]);
    let mut client = daemon.queue(&["submit", "--wait", "--", "sleep", "1000"]).spawn().unwrap();
    until("the job runs", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    let job = daemon.wait_for(1, "cancelled");
    assert_eq!(job["note"], "who waited for it has vanished");
}

/// Whoever waits while no daemon answers is told so, and can leave.
#[test]
fn a_client_without_a_daemon_says_so_and_can_be_ended() {
    let mut daemon = Daemon::start(&[]);
    let mut client = daemon
        .queue(&["submit", "--wait", "--", "sh", "-c", "echo ready; exec sleep 1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    client.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    daemon.kill();
    let mut lines = std::io::BufReader::new(client.stderr.take().unwrap()).lines();
    let mut line = || lines.next().unwrap().unwrap();
    let said = line();
    assert!(said.contains("does not answer") && said.contains("10 minutes"), "{said}");
    let pid = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let said = line();
    assert!(said.contains("job 1 gets signal 2"), "{said}");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(line().contains("job 1 is left to itself"));
    assert_eq!(client.wait().unwrap().signal(), Some(2));
    // The first of them reaches nobody any more.
    daemon.launch();
    assert_eq!(daemon.job(1)["state"], "running");
}

/// Nothing would come any more: a client that waits is told, once, and that is no word of the job's.
#[test]
fn who_waits_for_a_job_that_is_held_is_told_so() {
    let daemon = Daemon::start(&[]);
    let command = daemon.counter(20, 0.02);
    let mut line = vec!["submit", "--wait", "--"];
    line.extend(words(&command));
    let mut client = daemon.queue(&line);
    let mut client = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    daemon_runs(&daemon);
    daemon.wait_for_output(1, "5\n");
    daemon.ok(&["preempt", "1", "--means", "stop"]);
    let mut errors = std::io::BufReader::new(client.stderr.take().unwrap());
    let mut said = String::new();
    errors.read_line(&mut said).unwrap();
    let expected =
        "torpor queue: job 1 waits: it was told to stay where it is (torpor queue resume)\n";
    assert_eq!(said, expected);
    daemon.ok(&["resume", "1"]);
    daemon.let_end();
    said.clear();
    errors.read_to_string(&mut said).unwrap();
    let output = client.wait_with_output().unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), counted(20));
}

fn daemon_runs(daemon: &Daemon) {
    until("the job runs", || daemon.ok(&["list", "--json"]).contains("running").then_some(()));
}

/// Reads all of a request, in small letters: a server that answers and hangs up before is not heard.
fn read_request(stream: &mut impl Read) -> String {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "the client hangs up");
        bytes.extend(&buffer[..read]);
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        if body.len() >= length.map_or(0, |length| length.trim().parse().unwrap()) {
            return text;
        }
    }
}

/// Answers one request; returns it.
fn answer(listener: &UnixListener, status: u16, body: &str) -> String {
    let mut stream = listener.accept().unwrap().0;
    let request = read_request(&mut stream);
    let length = body.len();
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
    request
}

/// Runs `torpor queue` with these words for the listener there.
fn client_of(socket: &Path, words: &[&str]) -> Command {
    let mut client = Command::new(common::torpor());
    client.arg("queue").args(words).env_clear().stdin(Stdio::null());
    client.env("TORPOR_QUEUE", format!("unix:{}", socket.display()));
    client
}

/// A daemon that does not know the job is none that could be started.
#[test]
fn a_job_that_the_daemon_does_not_know_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let answers = std::thread::spawn(move || {
        answer(&listener, 201, r#"{"id": 7}"#);
        answer(&listener, 404, r#"{"detail": "there is no job 7"}"#);
    });
    let output = client_of(&path, &["submit", "--wait", "--", "true"]).output().unwrap();
    answers.join().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "torpor queue: job 7: there is no job 7\n");
}

/// A daemon that was killed may have taken the job, and not have said so yet.
#[test]
fn a_job_is_handed_in_once_although_its_daemon_dies_before_it_answers() {
    let key = |request: &str| {
        let line = request.lines().find_map(|line| line.strip_prefix("idempotency-key: "));
        line.unwrap().to_owned()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let mut keys = Vec::new();
    for _ in 0..2 {
        let listener = UnixListener::bind(&path).unwrap();
        let client = client_of(&path, &["submit", "--", "true"]).stdout(Stdio::piped()).spawn();
        let mut stream = listener.accept().unwrap().0;
        let before = key(&read_request(&mut stream));
        // For a moment there is no daemon.
        drop((stream, listener));
        std::fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let again = answer(&listener, 201, r#"{"id": 7}"#);
        let output = client.unwrap().wait_with_output().unwrap();
        assert_eq!((key(&again), output.stdout), (before.clone(), b"7\n".to_vec()));
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        keys.push(before);
    }
    assert_ne!(keys[0], keys[1]);
}

/// Nobody is held by a daemon that stands still, or does not come back.
#[test]
fn who_has_no_answer_yet_can_be_ended() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    for is_gone in [false, true] {
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = client_of(&path, &["submit", "--wait", "--", "true"]).spawn().unwrap();
        let mut stream = listener.accept().unwrap().0;
        read_request(&mut stream);
        let _there = if is_gone { None } else { Some((stream, listener)) };
        let pid = rustix::process::Pid::from_child(&client);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(client.wait().unwrap().signal(), Some(15));
        std::fs::remove_file(&path).unwrap();
    }
}

/// A full disk, or a terminal that is gone: that is said where it can be, and nobody is left behind.
#[test]
fn output_that_cannot_be_written_is_an_error_and_ends_the_job() {
    let daemon = Daemon::start(&[]);
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    for words in [&["list"][..], &["top", "--json"], &["submit", "--json", "--", "true"]] {
        let output = daemon.queue(words).stdout(full()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("write to standard output: No space left"), "{}", shown(&output));
        assert!(!text.contains("panicked"), "{text}");
    }
    let missing = ["show", "999"];
    let status = daemon.queue(&missing).stderr(full()).status().unwrap();
    assert_eq!(status, daemon.queue(&missing).output().unwrap().status);
    let be = ["run", "--", "sh", "-c", "echo word; exec sleep 1000"];
    let output = daemon.queue(&be).stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("write what it has written: No space left"), "{text}");
    daemon.wait_for(2, "cancelled");
    // What the job says on standard error, and what is said of it.
    let be = ["run", "--", "/nowhere/at/all"];
    assert_eq!(daemon.queue(&be).stderr(full()).status().unwrap().code(), Some(125));
}
