//! `--json`: each command prints how it went as one object, whether it went well or not.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::File;
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

#[path = "outcome/refusals.rs"]
mod refusals;
mod sleeper;

use sleeper::{Sleeper, criu, wait_until};

/// The one object that a command has printed.
fn object(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// Runs a command of ours to its end.
fn said(args: &[&str]) -> (bool, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    let command = command.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE").args(args);
    let output = command.output().unwrap();
    (output.status.success(), object(&output))
}

#[test]
fn what_was_done() {
    let task = Sleeper::start();
    let dumped = object(&task.dump(&["--json", "--leave-running"]));
    assert_eq!(dumped["class"], "done", "{dumped}");
    assert_eq!(dumped["report"]["tasks"], 1);
    assert!(dumped["report"]["statistics"]["pages_written"].as_u64().unwrap() > 0, "{dumped}");
    // It was stopped, asked in batches, and looked at in procfs.
    for effort in ["stops", "procfs_reads", "allocations"] {
        assert!(dumped["report"]["statistics"][effort].as_u64().unwrap() > 1, "{effort}: {dumped}");
    }
    task.put_to_sleep(&[]);
    let restored = object(&task.restore(&["--json", "-d"]).output().unwrap());
    assert_eq!(restored["report"]["pid"], task.pid, "{restored}");
    for figure in ["restore_time", "stops", "procfs_reads", "allocations"] {
        assert!(restored["report"]["statistics"][figure].as_u64().unwrap() > 0, "{restored}");
    }
    let (well, freed) = said(&["dedup", "--json", "-D", task.images()]);
    assert!(well && freed["report"]["statistics"]["freed_bytes"] == 0, "{freed}");
    let (well, _) = said(&["cpuinfo", "dump", "--json", "-D", task.images()]);
    assert!(well);
    let (well, gone) = said(&["image", "discard", "--json", task.images()]);
    assert!(well && gone["removed"].as_array().unwrap().is_empty(), "{gone}");
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    let (well, key) = said(&["key", "generate", "--json", key.to_str().unwrap()]);
    assert!(well && key["recipient"].as_str().unwrap().starts_with("age1"), "{key}");
    let (well, versions) = said(&["benchmark", "version", "--json"]);
    assert!(well && versions[0]["name"] == "torpor benchmark", "{versions}");
}

/// A task that nobody has waited for has its pid until somebody does.
#[test]
fn a_pid_that_is_not_given_up_is_told_of() {
    let task = Sleeper::start();
    assert!(task.dump(&[]).status.success(), "{}", task.log("dump.log"));
    let has_ended = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", task.pid)).unwrap();
        stat.contains(") Z ")
    };
    wait_until(has_ended);
    assert!(!task.restore(&["-d"]).output().unwrap().status.success());
    let (log, own) = (task.log("restore.log"), std::process::id());
    let said = format!("pid {} is in use: its task has ended, and its parent, {own},", task.pid);
    assert!(log.contains(&said), "{log}");
}

/// The first process of a pid namespace, which waits for a task that a dump has ended only when the restore waits
/// for that.
const LATE_INIT: &str = r#"
import os, subprocess, sys, time
torpor, images = sys.argv[1:]
null = subprocess.DEVNULL
task = subprocess.Popen(["sleep", "1000"], stdin=null, stdout=null, stderr=null, start_new_session=True)
while open(f"/proc/{task.pid}/comm").read() != "sleep\n":
    time.sleep(0.01)
subprocess.run([torpor, "dump", "-D", images, "-t", str(task.pid)], check=True)
restore = subprocess.Popen([torpor, "restore", "-D", images, "-d", "-o", "restore.log", "-v4"])
log = lambda: open(f"{images}/restore.log").read() if os.path.exists(f"{images}/restore.log") else ""
while "is in use" not in log() and restore.poll() is None:
    time.sleep(0.01)
assert os.waitpid(task.pid, 0)[0] == task.pid
assert restore.wait() == 0, log()
assert open(f"/proc/{task.pid}/comm").read() == "sleep\n"
os.kill(task.pid, 9)
"#;

/// So a script may dump and restore in a row, however busy init is.
#[test]
fn a_pid_that_init_gives_up_late_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut init = Command::new("unshare");
    init.args(["--pid", "--fork", "--mount-proc", "python3", "-c", LATE_INIT]);
    init.arg(env!("CARGO_BIN_EXE_torpor")).arg(dir.path()).env("HOME", "/nonexistent");
    init.env_remove("CRIU_CONFIG_FILE");
    let output = init.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The task is gone; its number is that of a session yet, which somebody else is in.
#[test]
fn who_is_in_a_session_of_that_number_is_named() {
    let task = Sleeper::start_as(&["sh", "-c", "(sleep 2000 &) && exec sleep 1000"]);
    task.put_to_sleep(&[]);
    let stat = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let session = format!(" {} {} ", task.pid, task.pid);
    let is_other = |pid: &String| {
        stat(pid).is_some_and(|stat| stat.contains("(sleep) ") && stat.contains(&session))
    };
    let mut other = None;
    wait_until(|| {
        let names = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = names.filter_map(|name| name.file_name().into_string().ok());
        other = pids.find(is_other);
        other.is_some()
    });
    let other = other.unwrap();
    let failed = object(&task.restore(&["--json", "-d"]).output().unwrap());
    kill_process(Pid::from_raw(other.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    let said = format!("pid {} is in use: task {other} (sleep) is in a session", task.pid);
    assert!(failed["text"].as_str().unwrap().starts_with(&said), "{failed}");
    wait_until(|| stat(&other).is_none());
    assert!(task.restore(&["-d"]).status().unwrap().success(), "{}", task.log("restore.log"));
    assert!(task.lives());
}

/// Commands of the systems whose failure programs read, with words that make them fail.
const FAILING: [&[&str]; 34] = [
    &["queue", "submit", "--json", "--", "true"],
    &["queue", "list", "--json"],
    &["queue", "show", "1", "--json"],
    &["queue", "cancel", "1", "--json"],
    &["queue", "preempt", "1", "--json"],
    &["queue", "resume", "1", "--json"],
    &["queue", "move", "1", "--to", "b", "--json"],
    &["queue", "check", "--json", "--", "true"],
    &["queue", "top", "--json"],
    &["queue", "drain", "--json"],
    &["queue", "adopt", "--json"],
    &["queue", "quota", "--json"],
    &["snapshot", "inspect", "dir:/nonexistent:none", "--json"],
    &["snapshot", "verify", "dir:/nonexistent:none", "--json"],
    &["snapshot", "rm", "dir:/nonexistent:none", "--json"],
    &["snapshot", "lint", "dir:/nonexistent:none", "--json"],
    &["snapshot", "sign", "dir:/nonexistent:none", "--json"],
    &["snapshot", "run", "dir:/nonexistent:none", "--id", "none", "--json"],
    &["benchmark", "plan", "/nonexistent", "--json"],
    &["benchmark", "report", "/nonexistent", "--json"],
    &["benchmark", "index", "/nonexistent", "--json"],
    &["benchmark", "list", "/nonexistent", "--json"],
    &["benchmark", "compare", "/nonexistent", "/nonexistent", "--json"],
    &["kubernetes", "checkpoint", "pod", "--json"],
    &["kubernetes", "explain", "pod", "--json"],
    &["kubernetes", "restore", "one", "--pod", "pod", "--json"],
    &["key", "inspect", "/nonexistent", "--json"],
    &["image", "discard", "/nonexistent", "--json"],
    &["image", "info", "/nonexistent", "--json"],
    &["image", "ps", "/nonexistent", "--json"],
    &["image", "fds", "/nonexistent", "--json"],
    &["image", "mems", "/nonexistent", "--json"],
    &["image", "rss", "/nonexistent", "--json"],
    &["migrate", "--cancel", "none", "--json"],
];

#[test]
fn systems_say_what_went_wrong() {
    for words in FAILING {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
        let command = command.env_clear().env("TORPOR_QUEUE", "unix:/nonexistent/queue");
        let output = command.args(words).output().unwrap();
        assert!(!output.status.success(), "{words:?}");
        let failure = object(&output);
        let class = failure["class"].as_str().unwrap_or_default();
        assert!(!matches!(class, "" | "done"), "{words:?}: {failure}");
        assert!(!failure["text"].as_str().unwrap_or_default().is_empty(), "{words:?}: {failure}");
        if words[0] == "queue" {
            assert_eq!(class, "peer_lost", "{words:?}: {failure}");
            assert_eq!(output.status.code(), Some(125), "{words:?}");
        }
    }
    for words in [&["plan", "/nonexistent"][..], &["compare", "/nonexistent", "/nonexistent"]] {
        let (well, none) = said(&[&["benchmark"], words, &["--json"]].concat());
        assert!(!well && none["class"] == "kernel", "{words:?}: {none}");
        assert_eq!(none["errno"], libc::ENOENT, "{words:?}: {none}");
    }
    // What makes no sense is said by whoever reads the words.
    let (well, usage) = said(&["queue", "show", "--json", "no-number"]);
    assert!(!well && usage["class"] == "usage", "{usage}");
}

/// Those whose output is something else: daemons, what is a job, data, and what others ask for.
const NOT_FOR_PROGRAMS: [&str; 19] = [
    "service",
    "page-server",
    "lazy-pages",
    "swrk",
    "exec",
    "agent",
    "completion",
    "man",
    "help",
    "image show",
    "image decode",
    "image encode",
    "queue serve",
    "queue run",
    "queue logs",
    "queue gitlab",
    "kubernetes agent",
    "kubernetes controller",
    "kubernetes manifests",
];

#[test]
fn every_other_command_takes_json() {
    let mut root = torpor_cli::help::tree(torpor_cli::program::Name::Torpor);
    root.build();
    let mut all = Vec::new();
    for outer in root.get_subcommands() {
        let inner = outer.get_subcommands().filter(|inner| inner.get_name() != "help");
        let inner: Vec<_> = inner.filter(|inner| !inner.is_hide_set()).collect();
        all.extend(
            inner.iter().map(|inner| {
                (format!("{} {}", outer.get_name(), inner.get_name()), (*inner).clone())
            }),
        );
        if inner.is_empty() || outer.get_name() == "agent" {
            all.push((outer.get_name().to_owned(), outer.clone()));
        }
    }
    assert!(all.len() > 60, "{}", all.len());
    for (name, command) in all {
        let takes = command.get_arguments().any(|arg| arg.get_id() == "json");
        let else_what = NOT_FOR_PROGRAMS.contains(&name.as_str());
        assert!(takes != else_what, "{name} takes --json: {takes}");
    }
}

/// A status that says otherwise would have tasks restored that run already.
#[test]
fn what_was_done_stays_done_where_nobody_can_read_it() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    for word in ["--display-stats", "--json"] {
        let task = Sleeper::start();
        let pid = task.pid.to_string();
        let mut dump = criu(&["dump", "-R", "-t", &pid, "-D", task.images(), word]);
        assert!(dump.stdout(full()).status().unwrap().success(), "{word}");
        task.put_to_sleep(&[]);
        let status = task.restore(&[word, "-d"]).stdout(full()).status().unwrap();
        assert!(status.success() && task.lives(), "{word}");
    }
}

/// By then a lazy dump would have ended its tasks, too.
#[test]
fn nothing_is_restored_that_would_end_at_once() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let mut first = Command::new("unshare");
    first.args(["--pid", "--fork", "--mount-proc", env!("CARGO_BIN_EXE_torpor")]);
    first.args(["restore", "--json", "-d", "-D", task.images()]).env("HOME", "/nonexistent");
    let output = first.env_remove("CRIU_CONFIG_FILE").output().unwrap();
    let refused = object(&output);
    assert!(!output.status.success() && refused["class"] == "usage", "{refused}");
    assert!(refused["text"].as_str().unwrap().contains("first process"), "{refused}");
}

#[test]
fn what_went_wrong() {
    let (well, wrong) = said(&["dump", "--json", "--tree", "no-number"]);
    assert!(!well && wrong["class"] == "usage", "{wrong}");
    assert!(wrong["hint"].as_str().unwrap().contains("--help"));
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().to_str().unwrap();
    let (well, gone) = said(&["dump", "--json", "-D", images, "--tree", "4194000"]);
    assert!(!well && gone["errno"] == libc::ESRCH, "{gone}");
    let (well, empty) = said(&["restore", "--json", "-d", "-D", images]);
    assert!(!well && empty["class"] == "bad_image", "{empty}");
    assert!(empty["text"].as_str().unwrap().contains("inventory.img"), "{empty}");
    let task = Sleeper::start();
    let before = object(&task.dump(&["--json", "--leave-running", "--prev-images-dir", "before"]));
    assert!(before["class"] == "usage", "{before}");
    let said_where = format!("are not in {}/before: the path is relative", task.images());
    assert!(before["text"].as_str().unwrap().contains(&said_where), "{before}");
    let (well, nobody) = said(&["migrate", "--json", "--pid", "4194000", "127.0.0.1:1"]);
    assert!(!well && nobody["class"] == "refused" && nobody["hint"].is_string(), "{nobody}");
    for form in ["audit", "plan"] {
        let (well, none) = said(&["image", form, "--json", "/nonexistent"]);
        assert!(!well && none["class"] == "bad_image", "{none}");
        assert!(none["text"].as_str().unwrap().contains("/nonexistent"), "{none}");
    }
    let (well, unknown) = said(&["check", "--json", "--feature", "no-such-feature"]);
    assert!(!well && unknown["class"] == "usage", "{unknown}");
    assert!(said(&["check", "--json", "--feature", "mem_dirty_track"]).0);
}
