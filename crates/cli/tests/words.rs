//! What is said when a system call fails: which one, and what it was about.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod sleeper;

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process_group, set_child_subreaper};
use serde_json::Value;
use sleeper::wait_until;
use tempfile::TempDir;

/// Calls that a dump or a restore makes, and that fail here one after the other.
const CALLS: &[(&str, i64)] = &[
    ("fstat", libc::SYS_fstat),
    ("statx", libc::SYS_statx),
    ("readlinkat", libc::SYS_readlinkat),
    ("openat2", libc::SYS_openat2),
    ("ioctl", libc::SYS_ioctl),
    ("lseek", libc::SYS_lseek),
    ("pwrite64", libc::SYS_pwrite64),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("ptrace", libc::SYS_ptrace),
    ("kcmp", libc::SYS_kcmp),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("prlimit64", libc::SYS_prlimit64),
    ("getsockopt", libc::SYS_getsockopt),
    ("setsockopt", libc::SYS_setsockopt),
    ("getsockname", libc::SYS_getsockname),
    ("getpeername", libc::SYS_getpeername),
    ("socket", libc::SYS_socket),
    ("bind", libc::SYS_bind),
    ("listen", libc::SYS_listen),
    ("sendmsg", libc::SYS_sendmsg),
    ("recvmsg", libc::SYS_recvmsg),
    ("pipe2", libc::SYS_pipe2),
    ("tee", libc::SYS_tee),
    ("epoll_create1", libc::SYS_epoll_create1),
    ("epoll_ctl", libc::SYS_epoll_ctl),
    ("eventfd2", libc::SYS_eventfd2),
    ("timerfd_create", libc::SYS_timerfd_create),
    ("timerfd_settime", libc::SYS_timerfd_settime),
    ("signalfd4", libc::SYS_signalfd4),
    ("inotify_init1", libc::SYS_inotify_init1),
    ("inotify_add_watch", libc::SYS_inotify_add_watch),
    ("memfd_create", libc::SYS_memfd_create),
    ("ftruncate", libc::SYS_ftruncate),
    ("fchmod", libc::SYS_fchmod),
    ("fchown", libc::SYS_fchown),
    ("fstatfs", libc::SYS_fstatfs),
    ("getdents64", libc::SYS_getdents64),
    ("setns", libc::SYS_setns),
    ("unlinkat", libc::SYS_unlinkat),
    ("name_to_handle_at", libc::SYS_name_to_handle_at),
];

/// A call that neither makes.
const HARMLESS: i64 = libc::SYS_acct;

fn compile(dir: &Path, name: &str) {
    let source = format!("{}/tests/words/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(dir.join(name)).arg(source);
    assert!(compiler.status().unwrap().success());
}

/// Runs a command of ours in which `call` fails. `None` if it does without it.
fn complaint(dir: &Path, call: i64, args: &[&str]) -> Option<String> {
    let mut command = Command::new(dir.join("deny"));
    command.arg(call.to_string()).arg(env!("CARGO_BIN_EXE_torpor")).args(args);
    command.args(["--json", "-D"]).arg(dir.join("images")).current_dir(dir);
    command.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE").stdin(Stdio::null());
    let output = command.output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    assert!(said.is_object(), "{}", String::from_utf8_lossy(&output.stderr));
    (!output.status.success()).then(|| said["text"].as_str().unwrap().to_owned())
}

/// Whether a sentence names a thing: by a number, a path or an image.
fn names_a_thing(text: &str) -> bool {
    let text = text.replace("(os error 22)", "");
    text.contains(|c: char| c.is_ascii_digit() || c == '/') || text.contains(".img")
}

/// Waits until no task that this test has started is left, nor any of theirs.
fn reap() {
    wait_until(|| rustix::process::wait(WaitOptions::NOHANG).is_err_and(|e| e == Errno::CHILD));
}

/// Ends the tasks of a restore.
fn end(root: Pid) {
    kill_process_group(root, Signal::KILL).unwrap();
    reap();
}

/// `after` is called after each command, and told whether it has worked.
fn check(what: &str, dir: &Path, args: &[&str], after: impl Fn(bool)) {
    let mut bare = Vec::new();
    let mut failed = 0;
    for &(name, call) in CALLS {
        let text = complaint(dir, call, args);
        after(text.is_none());
        let Some(text) = text else { continue };
        failed += 1;
        println!("{what} without {name}: {text}");
        if !names_a_thing(&text) {
            bare.push(format!("{name}: {text}"));
        }
    }
    assert!(failed > CALLS.len() / 3, "only {failed} calls matter to a {what}");
    assert!(bare.is_empty(), "a {what} says of nothing what fails:\n{}", bare.join("\n"));
}

#[test]
fn an_error_of_the_kernel_names_what_it_is_about() {
    // What is left of a tree keeps its pids in use until somebody waits for it.
    set_child_subreaper(Some(getpid())).unwrap();
    // What listens has a port that somebody else could take while it is asleep: not in a network of its own.
    torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNET).unwrap();
    let place = TempDir::new().unwrap();
    let dir = place.path();
    compile(dir, "deny");
    compile(dir, "many");
    std::fs::create_dir(dir.join("images")).unwrap();
    let mut command = Command::new("setsid");
    command.arg(dir.join("many")).current_dir(dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let root = i32::try_from(command.spawn().unwrap().id()).unwrap();
    wait_until(|| dir.join("ready").exists());
    check("dump", dir, &["dump", "-R", "-t", &root.to_string()], |_| {});
    assert_eq!(complaint(dir, HARMLESS, &["dump", "-t", &root.to_string()]), None);
    reap();
    let root = Pid::from_raw(root).unwrap();
    let restore = ["restore", "-d"];
    check("restore", dir, &restore, |worked| if worked { end(root) } else { reap() });
    assert_eq!(complaint(dir, HARMLESS, &restore), None);
    end(root);
}
