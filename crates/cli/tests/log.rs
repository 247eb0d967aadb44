//! What the log tells at each level: errors, warnings, phases, and each object with what becomes of it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod sleeper;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use sleeper::{Sleeper, WITHOUT_MOUNTS_OF_OTHERS, criu, wait_until};
use tempfile::TempDir;
use torpor_sys::process::{Status, wait};

/// A listener, a file in memory, a lock, and events that were not read, in a mount namespace that has a file
/// system of its own.
const START: &str = r#"
mkdir "$1/own" && mount -t tmpfs own "$1/own" && exec python3 -c "$2" "$1"
"#;
const PROGRAM: &str = r#"
import ctypes, fcntl, os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
memory = os.memfd_create("notes")
locked = open(sys.argv[1] + "/locked", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
libc = ctypes.CDLL(None)
libc.inotify_add_watch(libc.inotify_init(), sys.argv[1].encode(), 0x100)
open(sys.argv[1] + "/ready", "w").close()
while True:
    time.sleep(1000)
"#;

struct Task {
    dir: TempDir,
    pid: i32,
}

impl Task {
    #[allow(clippy::zombie_processes, reason = "it is waited for by its pid")]
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("setsid");
        let start = [WITHOUT_MOUNTS_OF_OTHERS, START].concat();
        command.args(["unshare", "--mount", "sh", "-ec", &start, "sh"]);
        command.arg(dir.path()).arg(PROGRAM);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let pid = i32::try_from(command.spawn().unwrap().id()).unwrap();
        wait_until(|| dir.path().join("ready").exists());
        Self { dir, pid }
    }

    /// What the log of a dump says at a level.
    fn dumped(&self, level: &str, args: &[&str]) -> String {
        let images = self.dir.path().join(format!("images{}", args.len()));
        let _ = fs::create_dir(&images);
        let mut dump = criu(&["dump", "--tree", &self.pid.to_string(), level, "-o", "log"]);
        dump.arg("-D").arg(&images).args(args).status().unwrap();
        fs::read_to_string(images.join("log")).unwrap()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_raw(self.pid).unwrap(), Signal::KILL);
    }
}

#[test]
fn levels_are_told_apart() {
    let task = Task::start();
    let refusal = task.dumped("-v1", &["--leave-running"]);
    assert!(refusal.contains("--file-locks keeps locks"), "{refusal}");
    // A line of each level.
    let told = ["never", "will be an overflow event", "Dumping namespaces", ": fd 0 (/dev/null): "];
    for level in 1..=4 {
        let log = task.dumped(&format!("-v{level}"), &["--leave-running", "--file-locks"]);
        for (of, words) in (1..).zip(told).skip(1) {
            assert_eq!(log.contains(words), of <= level, "-v{level}: {words}: {log}");
        }
    }
}

#[test]
fn each_object_is_named_with_what_becomes_of_it() {
    let task = Task::start();
    let own = task.dir.path().join("own");
    let has = |log: &str, start: &str, end: &str| {
        let found = log.lines().any(|line| line.contains(start) && line.ends_with(end));
        assert!(found, "{start}…{end}: {log}");
    };
    let log = task.dumped("-v4", &["--file-locks", "--manage-cgroups=soft"]);
    let killed = Status::Signaled(libc::SIGKILL);
    assert_eq!(wait(task.pid, true).unwrap(), Some((task.pid, killed)), "{log}");
    let vpid = task.pid;
    has(&log, &format!("task {vpid} ({vpid} here, "), "");
    has(&log, &format!("task {vpid}: thread {vpid} ({vpid} here)"), "");
    has(&log, &format!("thread {vpid} here: set "), " of cgroups");
    has(&log, ": fd 0 (/dev/null): file ", ", REG");
    has(&log, " (socket:[", ", INETSK");
    has(&log, " (/memfd:notes (deleted)): file ", ", MEMFD");
    has(&log, ": lock 1: FLOCK  ADVISORY  WRITE ", ": dumped");
    has(&log, &format!(" (tmpfs) at {}", own.display()), ": dumped");
    has(&log, "pid namespace ", ": the dumping program's, left out");
    assert!(log.contains(": mapping "), "{log}");

    let images = task.dir.path().join("images2");
    let mut restore = criu(&["restore", "-d", "--file-locks", "--root", "/", "-v4", "-o", "log"]);
    let restored = restore.arg("-D").arg(&images).status().unwrap();
    let log = fs::read_to_string(images.join("log")).unwrap();
    assert!(restored.success() && Path::new(&format!("/proc/{}", task.pid)).exists(), "{log}");
    for kind in ["REG", "INETSK", "MEMFD"] {
        has(&log, "file ", &format!(": {kind}"));
    }
    has(&log, "taking its lock again: ", "");
    has(&log, &format!(" (tmpfs) at {}", own.display()), ": put in place");
    for words in ["Restoring descriptors", ": mapping ", " here"] {
        assert!(log.contains(words), "{words}: {log}");
    }
}

/// Whoever can write to the directory of the images neither chooses what root overwrites, nor has a restore wait.
#[test]
fn what_lies_in_a_work_directory_leads_nowhere() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let away = tempfile::tempdir().unwrap();
    let kept = away.path().join("kept");
    fs::write(&kept, "kept").unwrap();
    let at = |name: &str| task.dir.path().join(name);
    symlink(&kept, at("link")).unwrap();
    symlink(away.path().join("new"), at("hanging")).unwrap();
    symlink(away.path(), at("way")).unwrap();
    fs::hard_link(&kept, at("same")).unwrap();
    assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
    for option in ["--pidfile", "--log-file"] {
        for name in ["link", "hanging", "way/kept", "way/new", "same", "fifo"] {
            let output = task.restore(&["-d", option, name]).output().unwrap();
            let said =
                String::from_utf8_lossy(&output.stderr).into_owned() + &task.log("restore.log");
            let named = said.lines().any(|line| line.contains(&format!(" file {name}: ")));
            assert!(!output.status.success() && named && !task.lives(), "{option} {name}: {said}");
            assert_eq!(fs::read_to_string(&kept).unwrap(), "kept", "{option} {name}");
            assert_eq!(fs::read_dir(away.path()).unwrap().count(), 1, "{option} {name}");
        }
    }
    let restored = task.restore(&["-d", "--pidfile", "pid"]).status().unwrap();
    assert!(restored.success() && task.lives(), "{}", task.log("restore.log"));
    assert_eq!(fs::read_to_string(at("pid")).unwrap(), task.pid.to_string());
}
