//! Lazy restores: memory that comes when it is touched, and never wrong.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::Timespec;

mod keys;
mod memory;
mod sleeper;

use keys::{age_key, seal};
use memory::{PAGES, Task};
use sleeper::{criu, name_of, wait_until};

/// The process that brings pages in for a restore whose log is `log`, or the one that
/// watches over it.
fn pagers(dir: &Path) -> Vec<i32> {
    let dir = dir.display().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let Some(pid) = entry.unwrap().file_name().to_str().and_then(|n| n.parse::<i32>().ok())
        else {
            continue;
        };
        let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let name = name_of(pid).unwrap_or_default();
        if words.contains(&dir) && (name == "torpor-pager" || name == "torpor-lazy") {
            found.push(pid);
        }
    }
    found
}

/// One of the two by its name. A process that was just forked is called like the one that has forked it.
fn pager(dir: &Path, name: &str) -> i32 {
    let mut found = None;
    let is =
        |name: &str| pagers(dir).into_iter().find(|&pid| name_of(pid).as_deref() == Some(name));
    wait_until(|| {
        found = is("torpor-pager").and(is(name));
        found.is_some()
    });
    found.unwrap()
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn memory_comes_when_it_is_touched() {
    let task = Task::start(PAGES);
    task.put_to_sleep(&[]);
    task.restore(&["--lazy-pages"]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    wait_until(|| pagers(task.dir.path()).is_empty());
}

#[test]
fn memory_comes_without_being_touched() {
    let task = Task::start(PAGES);
    task.put_to_sleep(&[]);
    task.restore(&["--lazy-pages", "--auto-dedup"]);
    wait_until(|| pagers(task.dir.path()).is_empty());
    let log = task.log("restore.log");
    assert!(log.contains("All pages are in place"), "{log}");
    assert!(log.contains("bytes of restored pages"), "{log}");
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

#[test]
fn a_daemon_brings_the_pages() {
    let task = Task::start(PAGES);
    task.put_to_sleep(&[]);
    let mut daemon = task.command(&["lazy-pages"], "lazy.log").spawn().unwrap();
    wait_until(|| task.path("lazy-pages.socket").exists());
    task.restore(&["--lazy-pages"]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    assert!(daemon.wait().unwrap().success(), "{}", task.log("lazy.log"));
    assert!(!task.path("lazy-pages.socket").exists());
    assert!(task.log("lazy.log").contains("All pages are in place"));
}

/// A socket that listens in the work directory of a task, to be handed to a daemon that comes later.
fn listen_for(task: &Task) -> OwnedFd {
    let how = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = socket_with(how.0, how.1, SocketFlags::CLOEXEC, None).unwrap();
    let address = SocketAddrUnix::new(task.path("lazy-pages.socket")).unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 1).unwrap();
    listener
}

/// A restore that has connected to a socket that nobody takes connections from yet.
fn restore_at(task: &Task, listener: &OwnedFd) -> Child {
    let mut restore = task.command(&["restore", "-d", "--lazy-pages"], "restore.log");
    let restore = restore.spawn().unwrap();
    let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(ready, 1, "{}", task.log("restore.log"));
    restore
}

/// Whoever makes the socket beforehand has the restore begin before there is a daemon.
#[test]
fn a_daemon_may_come_after_its_restore() {
    let task = Task::start(PAGES);
    task.put_to_sleep(&[]);
    let listener = listen_for(&task);
    let mut restore = restore_at(&task, &listener);
    let mut daemon = task.command(&["lazy-pages", "--lazy-socket", "0"], "lazy.log");
    let mut daemon = daemon.stdin(listener).spawn().unwrap();
    assert!(restore.wait().unwrap().success(), "{}", task.log("restore.log"));
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    assert!(daemon.wait().unwrap().success(), "{}", task.log("lazy.log"));
    assert!(!task.path("lazy-pages.socket").exists());
}

/// A daemon that does not come after all leaves no restore waiting.
#[test]
fn a_restore_whose_daemon_does_not_come_fails() {
    let task = Task::start(PAGES);
    task.put_to_sleep(&[]);
    let listener = listen_for(&task);
    let mut restore = restore_at(&task, &listener);
    drop(listener);
    assert!(!restore.wait().unwrap().success());
    let log = task.log("restore.log");
    assert!(log.contains("the lazy-pages process has ended"), "{log}");
    assert!(task.is_gone());
}

#[test]
fn pages_of_a_chain_and_of_sealed_images() {
    let task = Task::start(PAGES);
    let seal = seal(task.dir.path());
    let seal = seal.each_ref().map(String::as_str);
    let pid = task.pid.to_string();
    let round = task.path("round");
    fs::create_dir(&round).unwrap();
    let mut first = criu(&["pre-dump", "-t", &pid, "-D"]);
    assert!(first.arg(&round).args(seal).status().unwrap().success());
    task.put_to_sleep(&[&seal[..], &["--prev-images-dir", "round"]].concat());
    task.restore(&[&["--lazy-pages"], &seal[..2]].concat());
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

/// A plain round and a compressed one on top of it: each page comes from its cluster, which
/// `--auto-dedup` frees in the end; `image` shows where they are.
#[test]
fn compressed_pages_come_one_by_one() {
    let task = Task::start(PAGES);
    let (pid, round) = (task.pid.to_string(), task.path("round"));
    fs::create_dir(&round).unwrap();
    let mut first = criu(&["pre-dump", "--track-mem", "--compress", "zstd", "-t", &pid, "-D"]);
    assert!(first.arg(&round).status().unwrap().success());
    task.put_to_sleep(&["--compress", "lz4", "--prev-images-dir", "round"]);
    assert!(!task.path("pages-1.img").exists());
    let mut image = Command::new(env!("CARGO_BIN_EXE_torpor"));
    let shown =
        image.args(["image", "show"]).arg(round.join("pages-index-1.img")).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("\"cluster_pages\": 16"), "{shown}");
    assert!(shown.contains("\"sizes\""), "{shown}");
    task.restore(&["--lazy-pages", "--auto-dedup"]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    wait_until(|| pagers(task.dir.path()).is_empty());
    let packed = fs::read(round.join("pages-packed-1.img")).unwrap();
    assert!(!packed.is_empty() && packed.iter().all(|&byte| byte == 0));
}

/// Whichever of the two processes is killed: the tasks end, and nothing that is wrong was
/// ever seen.
fn killed(name: &str) {
    let task = Task::start(16 * PAGES);
    task.put_to_sleep(&[]);
    task.restore(&["--lazy-pages"]);
    let [victim, works] = [name, "torpor-pager"].map(|name| pager(task.dir.path(), name));
    // Pages are missing for as long as it is stopped, and the task waits for them.
    signal(works, Signal::STOP);
    task.go();
    signal(victim, Signal::KILL);
    if victim != works {
        signal(works, Signal::CONT);
    }
    wait_until(|| task.is_gone());
    wait_until(|| pagers(task.dir.path()).is_empty());
    assert_eq!(task.log("report"), "");
}

#[test]
fn a_pager_that_is_killed_takes_the_tasks_along() {
    killed("torpor-pager");
}

#[test]
fn so_does_the_process_that_watches_it() {
    killed("torpor-lazy");
}

#[test]
fn a_page_that_was_changed_is_never_shown() {
    let task = Task::start(PAGES);
    let (key, recipient) = age_key(task.dir.path(), "key");
    task.put_to_sleep(&["--encrypt", "--recipient", &recipient]);
    let largest = fs::read_dir(task.dir.path()).unwrap().map(|e| e.unwrap().path());
    let largest = largest.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + (1 << 20)].fill(7);
    fs::write(&largest, bytes).unwrap();
    // The pager can come to the page before the restore has let the task go.
    let mut restore = task.command(&["restore", "-d", "--lazy-pages"], "restore.log");
    restore.args(["--identity", &key]).status().unwrap();
    task.go();
    wait_until(|| task.is_gone());
    wait_until(|| pagers(task.dir.path()).is_empty());
    assert_eq!(task.log("report"), "");
    let log = task.log("restore.log");
    assert!(log.contains("the tasks are killed"), "{log}");
}

#[test]
fn a_daemon_of_other_images_refuses() {
    let (task, other) = (Task::start(PAGES), Task::start(64));
    task.put_to_sleep(&[]);
    other.put_to_sleep(&[]);
    let work = task.dir.path().to_str().unwrap();
    let mut daemon = other.command(&["lazy-pages", "-W", work], "lazy.log").spawn().unwrap();
    wait_until(|| task.path("lazy-pages.socket").exists());
    let mut restore = task.command(&["restore", "-d", "--lazy-pages"], "restore.log");
    assert!(!restore.status().unwrap().success());
    assert!(task.log("restore.log").contains("of other images"), "{}", task.log("restore.log"));
    assert!(!daemon.wait().unwrap().success());
    assert!(task.is_gone());
}

/// Whoever looks for the first error finds the cause: the pager, which ends with the restore, adds none.
#[test]
fn a_restore_that_fails_has_the_word() {
    let task = Task::start(64);
    task.put_to_sleep(&[]);
    fs::remove_file(task.path("memory")).unwrap();
    let mut restore = task.command(&["restore", "-d", "--lazy-pages"], "restore.log");
    assert!(!restore.status().unwrap().success());
    wait_until(|| pagers(task.dir.path()).is_empty());
    let log = task.log("restore.log");
    let pager = log.lines().find(|line| line.contains("the restore has failed"));
    assert!(pager.is_some_and(|line| !line.contains("Error (")), "{log}");
    let errors: Vec<_> = log.lines().filter(|line| line.contains("Error (")).collect();
    assert!(errors.first().is_some_and(|error| error.contains("/memory")), "{log}");
}

#[test]
fn a_dump_waits_for_the_pages() {
    let task = Task::start(16 * PAGES);
    task.put_to_sleep(&[]);
    task.restore(&["--lazy-pages"]);
    // As long as there is a pager the dump is refused, and then it is not.
    let dump = |images: &Path| {
        let pid = task.pid.to_string();
        let mut dump = criu(&["dump", "-R", "-t", &pid, "-o", "again.log", "-D"]);
        dump.arg(images).status().unwrap().success()
    };
    let again = tempfile::tempdir().unwrap();
    while !pagers(task.dir.path()).is_empty() {
        if !dump(again.path()) {
            let log = fs::read_to_string(again.path().join("again.log")).unwrap();
            assert!(log.contains("registered with userfaultfd"), "{log}");
        }
    }
    assert!(dump(again.path()));
    assert_eq!(task.look(), format!("ok {}\n", 16 * PAGES));
}
