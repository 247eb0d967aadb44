//! Dumps and restores a task, by the command line and over the RPC.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use torpor_images::proto::{CriuOpts, CriuReq, CriuReqType};
use torpor_sys::process::{Status, wait};

mod sleeper;

use sleeper::{
    Client, Sleeper, WITHOUT_MOUNTS_OF_OTHERS, criu, name_of, request, wait_until, write_script,
};

fn parent_of(pid: i32) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let rest = stat.rsplit_once(") ").unwrap().1;
    rest.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// An action script that writes down what it is told, and fails at `stage`.
fn script(dir: &Path, stage: &str) -> (PathBuf, PathBuf) {
    let (script, told) = (dir.join("script"), dir.join("told"));
    let line = "echo $CRTOOLS_SCRIPT_ACTION $CRTOOLS_INIT_PID $CRTOOLS_IMAGE_DIR";
    let text = format!(
        "#!/bin/sh\n{line} >> {}\ntest $CRTOOLS_SCRIPT_ACTION != {stage}\n",
        told.display()
    );
    write_script(&script, &text);
    (script, told)
}

#[test]
fn a_restore_waits_for_its_tasks() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let mut restore = task.restore(&["--pidfile", "pid"]).spawn().unwrap();
    wait_until(|| task.log("restore.log").contains("Restore finished successfully"));
    assert!(task.lives());
    assert_eq!(parent_of(task.pid), i32::try_from(restore.id()).unwrap());
    assert_eq!(task.log("pid"), task.pid.to_string());
    assert!(restore.try_wait().unwrap().is_none());
    task.kill();
    assert!(restore.wait().unwrap().success());
}

#[test]
fn a_detached_restore_does_not() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    assert!(task.restore(&["-d"]).status().unwrap().success());
    assert!(task.lives());
}

#[test]
fn what_was_given_and_is_not_asked_for_is_named() {
    let task = Sleeper::start();
    for (external, said) in [
        ("unix[1]", "nothing in the tree has it open"),
        ("file[1:2]", "nothing in the tree has it open"),
        ("net[1]:outer", "the tree is in net namespace "),
        ("pid[1]:outer", "the tree is in pid namespace "),
    ] {
        assert!(!task.dump(&["--external", external]).status.success());
        let wanted = format!("--external {external}: {said}");
        assert!(task.log("dump.log").contains(&wanted), "{}", task.log("dump.log"));
    }
    task.put_to_sleep(&["--external", "mnt[/not/there]:key"]);
    for (option, value, said) in [
        ("--inherit-fd", "fd[0]:pipe:[1]", "--inherit-fd fd[N]:pipe:[1]"),
        ("--external", "veth[eth0]:outside", "--external veth[eth0]:outside"),
        ("--external", "netdev[eth0]:outside", "--external netdev[eth0]:outside"),
        ("--external", "macvlan[eth0]:outside", "--external macvlan[eth0]:outside"),
    ] {
        assert!(!task.restore(&["-d", option, value]).status().unwrap().success());
        let wanted = format!("{said}: nothing in the images asks for it");
        assert!(task.log("restore.log").contains(&wanted), "{}", task.log("restore.log"));
    }
    assert!(task.restore(&["-d"]).status().unwrap().success());
    assert!(task.lives());
}

/// Runtimes name mounts and terminals that may be there, by the name of CRIU.
#[test]
fn a_place_that_was_named_and_is_not_there_is_an_error_but_for_runtimes() {
    let task = Sleeper::start();
    let torpor = |command: &str, args: &[&str]| {
        let mut torpor = Command::new(env!("CARGO_BIN_EXE_torpor"));
        torpor.args([command, "-D", task.images(), "-v4"]).args(args).stdin(Stdio::null());
        torpor.status().unwrap().success()
    };
    for (external, said) in [
        ("mnt[/not/there]:key", "no mount of the tree's own namespace is that"),
        ("dev[8/1]:disk", "no mount of the tree's own namespace is that"),
        ("tty[8800:d]", "nothing in the tree has it open"),
    ] {
        let pid = task.pid.to_string();
        assert!(!torpor("dump", &["-t", &pid, "-o", "dump.log", "--external", external]));
        let wanted = format!("--external {external}: {said}");
        assert!(task.log("dump.log").contains(&wanted), "{}", task.log("dump.log"));
    }
    let named = [
        "--external",
        "tty[8800:d]",
        "--external",
        "mnt[/not/there]:key",
        "--external",
        "dev[8/1]:disk",
    ];
    task.put_to_sleep(&named);
    for external in named.iter().skip(1).step_by(2) {
        let log = task.log("dump.log");
        let warns = |line: &&str| {
            line.contains("Warn") && line.contains(&format!("--external {external}: "))
        };
        assert!(log.lines().any(|line| warns(&line)), "{log}");
    }
    for external in ["mnt[key]:/srv", "dev[disk]:/dev/null"] {
        assert!(!torpor("restore", &["-d", "-o", "restore.log", "--external", external]));
        let wanted = format!("--external {external}: nothing in the images asks for it");
        assert!(task.log("restore.log").contains(&wanted), "{}", task.log("restore.log"));
    }
    let args = ["-d", "--external", "mnt[key]:/srv", "--external", "dev[disk]:/dev/null"];
    assert!(task.restore(&args).status().unwrap().success());
    assert!(task.lives());
    for external in ["mnt[key]:/srv", "dev[disk]:/dev/null"] {
        let wanted = format!("--external {external}: nothing in the images asks for it");
        assert!(task.log("restore.log").contains(&wanted), "{}", task.log("restore.log"));
    }
}

/// LXC says of each container that it has a console, and by which profile it is confined.
#[test]
fn what_lxc_says_of_its_console_is_taken() {
    let given = ["--external", "console:/dev/pts/0", "--lsm-profile", "apparmor:unconfined"];
    let task = Sleeper::start();
    task.put_to_sleep(&given[..2]);
    let restored = task.restore(&[&["-d"], &given[..]].concat()).status().unwrap();
    assert!(restored.success(), "{}", task.log("restore.log"));
    assert!(task.lives());
}

#[test]
fn a_sibling_belongs_to_the_caller() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    assert!(task.restore(&["-d", "-S"]).status().unwrap().success());
    assert_eq!(u32::try_from(parent_of(task.pid)).unwrap(), std::process::id());
    task.kill();
    let killed = Status::Signaled(libc::SIGKILL);
    assert_eq!(wait(task.pid, true).unwrap(), Some((task.pid, killed)));
}

#[test]
fn a_command_becomes_the_parent() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let mut restore = task.restore(&["--exec-cmd", "--", "cat"]);
    let mut restore = restore.stdin(Stdio::piped()).spawn().unwrap();
    let parent = i32::try_from(restore.id()).unwrap();
    wait_until(|| name_of(parent).as_deref() == Some("cat"));
    assert!(task.lives());
    assert_eq!(parent_of(task.pid), parent);
    drop(restore.stdin.take());
    assert!(restore.wait().unwrap().success());
}

#[test]
fn scripts_are_told_of_each_stage() {
    let task = Sleeper::start();
    let (path, told) = script(task.dir.path(), "none");
    let script = ["--action-script", path.to_str().unwrap()];
    assert!(task.dump(&script).status.success(), "{}", task.log("dump.log"));
    wait(task.pid, true).unwrap();
    assert!(task.restore(&script).arg("-d").status().unwrap().success());
    let told = fs::read_to_string(told).unwrap();
    let mut stages = Vec::new();
    for line in told.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words.last(), Some(&task.images()), "{told}");
        // Before the restore has made one, there is no root task.
        let pid = task.pid.to_string();
        assert!(words.len() == 2 || words[1] == pid, "{told}");
        stages.push(words[0]);
    }
    let expected = [
        "pre-dump",
        "network-lock",
        "post-dump",
        "pre-restore",
        "setup-namespaces",
        "post-setup-namespaces",
        "post-restore",
        "network-unlock",
        "pre-resume",
        "post-resume",
    ];
    assert_eq!(stages, expected, "{told}");
}

/// However that ends.
#[test]
fn a_script_ends_with_its_dump() {
    let task = Sleeper::start();
    let told = task.dir.path().join("script");
    let script = format!("echo $$ >{0}.new && mv {0}.new {0}; exec sleep 1000", told.display());
    let pid = task.pid.to_string();
    let mut dump = criu(&["dump", "-t", &pid, "-D", task.images(), "-o", "dump.log"]);
    let mut dump = dump.args(["--action-script", &script]).spawn().unwrap();
    wait_until(|| told.exists());
    let script: i32 = fs::read_to_string(&told).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_child(&dump), Signal::TERM).unwrap();
    assert!(!dump.wait().unwrap().success());
    wait_until(|| name_of(script).is_none());
    assert!(task.lives());
}

#[test]
fn a_script_that_fails_stops_the_dump() {
    let task = Sleeper::start();
    let (path, _) = script(task.dir.path(), "pre-dump");
    let output = task.dump(&["--action-script", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(task.lives());
    let log = task.log("dump.log");
    assert!(
        log.contains("at pre-dump: exit status: 1") && log.ends_with("Dumping FAILED.\n"),
        "{log}"
    );
}

#[test]
fn the_network_is_let_go_where_tasks_live_on() {
    let task = Sleeper::start();
    for (stage, args) in [("post-dump", &[][..]), ("none", &["--leave-running"])] {
        let (path, told) = script(task.dir.path(), stage);
        task.dump(&[&["--action-script", path.to_str().unwrap()], args].concat());
        assert!(task.lives());
        let told = fs::read_to_string(told).unwrap();
        assert!(told.lines().last().unwrap().starts_with("network-unlock "), "{told}");
    }
}

#[test]
fn a_script_that_fails_at_the_very_end_is_too_late() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let (path, _) = script(task.dir.path(), "post-resume");
    let mut restore = task.restore(&["-d", "--action-script", path.to_str().unwrap()]);
    assert!(restore.status().unwrap().success());
    assert!(task.lives());
    assert!(task.log("restore.log").contains("Warn  ("), "{}", task.log("restore.log"));
}

/// As many threads as the command line says, or else a configuration file.
#[test]
fn threads_are_limited() {
    let task = Sleeper::start();
    task.put_to_sleep(&["--threads", "3"]);
    assert!(task.log("dump.log").contains("with up to 3 threads"), "{}", task.log("dump.log"));
    let config = task.dir.path().join("threads.conf");
    fs::write(&config, "threads 5\n").unwrap();
    let mut restore = task.restore(&["-d"]);
    assert!(restore.env("CRIU_CONFIG_FILE", config).output().unwrap().status.success());
    let log = task.log("restore.log");
    assert!(log.contains("with up to 5 threads"), "{log}");
    assert!(task.lives());
}

#[test]
fn statistics_are_shown() {
    let task = Sleeper::start();
    let output = task.dump(&["--display-stats", "--leave-running"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("Memory pages written: "), "{said}");
    assert!(task.lives());
}

#[test]
fn a_runtime_dumps_and_restores() {
    let task = Sleeper::start();
    let dir = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts {
        images_dir_fd: dir.as_raw_fd(),
        log_level: Some(4),
        notify_scripts: Some(true),
        ..CriuOpts::default()
    };

    let mut client = Client::start();
    let dump = CriuOpts { pid: Some(task.pid), log_file: Some("dump.log".into()), ..opts.clone() };
    let response = client.ask(&request(CriuReqType::Dump, dump), "");
    assert!(response.success, "{}", response.cr_errmsg());
    let (code, told) = client.finish();
    assert_eq!(code, Some(0));
    let stages: Vec<&str> = told.iter().map(|(stage, _)| stage.as_str()).collect();
    assert_eq!(stages.first(), Some(&"pre-dump"));
    assert!(stages.contains(&"post-dump"), "{stages:?}");
    wait(task.pid, true).unwrap();

    let mut client = Client::start();
    let log_file = Some("restore.log".into());
    let restore = CriuOpts { rst_sibling: Some(true), log_file, ..opts };
    let response = client.ask(&request(CriuReqType::Restore, restore), "");
    assert!(response.success, "{}", response.cr_errmsg());
    assert_eq!(response.restore.unwrap().pid, task.pid);
    let (code, told) = client.finish();
    assert_eq!(code, Some(0));
    for stage in ["setup-namespaces", "post-restore", "pre-resume", "post-resume"] {
        assert!(told.contains(&(stage.to_owned(), Some(task.pid))), "{told:?}");
    }
    // The server is gone, and its task lives on, as a child of the client.
    assert!(task.lives());
    assert_eq!(u32::try_from(parent_of(task.pid)).unwrap(), std::process::id());
    task.kill();
    wait(task.pid, true).unwrap();
}

#[test]
fn a_runtime_that_fails_leaves_nothing_behind() {
    let task = Sleeper::start();
    let dir = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts {
        images_dir_fd: dir.as_raw_fd(),
        notify_scripts: Some(true),
        ..CriuOpts::default()
    };
    let mut client = Client::start();
    let dump = CriuOpts { pid: Some(task.pid), ..opts.clone() };
    let response = client.ask(&request(CriuReqType::Dump, dump), "post-dump");
    assert!(!response.success);
    assert_eq!(response.cr_errno(), libc::ECANCELED);
    assert!(response.cr_errmsg().contains("post-dump"), "{}", response.cr_errmsg());
    assert_eq!(client.finish().0, Some(1));
    assert!(task.lives());

    task.put_to_sleep(&[]);
    for stage in ["setup-namespaces", "post-restore"] {
        let mut client = Client::start();
        let response = client.ask(&request(CriuReqType::Restore, opts.clone()), stage);
        assert!(!response.success && response.cr_errmsg().contains(stage));
        assert_eq!(client.finish().0, Some(1));
        assert!(!task.lives());
    }
}

#[test]
fn a_connection_is_kept_for_the_end_of_a_task() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let dir = fs::File::open(task.dir.path()).unwrap();
    let opts = CriuOpts { images_dir_fd: dir.as_raw_fd(), ..CriuOpts::default() };
    let mut client = Client::start();
    let restore = CriuReq { keep_open: Some(true), ..request(CriuReqType::Restore, opts) };
    let response = client.ask(&restore, "");
    assert!(response.success, "{}", response.cr_errmsg());
    task.kill();
    let mut end = CriuReq { pid: u32::try_from(task.pid).ok(), ..CriuReq::default() };
    end.set_type(CriuReqType::WaitPid);
    let response = client.ask(&end, "");
    assert_eq!(response.status(), libc::SIGKILL);
    assert_eq!(client.finish().0, Some(0));
}

#[test]
fn a_restore_looks_at_the_processor() {
    let task = Sleeper::start();
    task.put_to_sleep(&[]);
    let image = task.dir.path().join("cpuinfo.img");
    fs::write(&image, "nonsense").unwrap();
    let output = task.restore(&["-d"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(task.log("restore.log").contains("cpuinfo.img"), "{}", task.log("restore.log"));
    // A user who does not want to know may go on.
    assert!(task.restore(&["-d", "--cpu-cap=none"]).status().unwrap().success());
    assert!(task.lives());
}

/// Debian's own client of the RPC, which knows nothing of Torpor.
const PYCRIU: &str = "
import os, sys
import pycriu
program, images, pid = sys.argv[1], sys.argv[2], int(sys.argv[3])
criu = pycriu.criu()
criu.use_binary(program)
criu.check()
criu.opts.images_dir_fd = os.open(images, os.O_DIRECTORY)
criu.opts.log_level = 4
criu.opts.pid = pid
criu.dump()
input()
print(criu.restore().pid)
";

#[test]
fn an_independent_client() {
    let task = Sleeper::start();
    // pycriu starts the program by its path.
    let program = task.dir.path().join("criu");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_torpor"), &program).unwrap();
    let pid = task.pid.to_string();
    let args = ["-c", PYCRIU, program.to_str().unwrap(), task.images(), pid.as_str()];
    let mut python = Command::new("/usr/bin/python3");
    let python = python.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = python.stderr(Stdio::piped()).spawn().unwrap();
    wait_until(|| !task.lives() || python.try_wait().unwrap().is_some());
    wait(task.pid, true).unwrap();
    // Ends the input that it waits for: the dump is over.
    std::io::Write::write_all(&mut python.stdin.take().unwrap(), b"\n").unwrap();
    let output = python.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}{}", task.log("criu.log"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{pid}\n"));
    assert!(task.lives());
}

/// Mounts a directory upon itself, shared and with the file of a network namespace below, as `ip netns add`
/// does with /run/netns, and puts a task to sleep there that has a copy of the first of these mounts, and
/// wakes it. Prints the mount as the task sees it.
const MOUNTED_UPON_ITSELF: &str = r#"
mkdir "$2/self"
mount --bind "$2/self" "$2/self"
mount --make-shared "$2/self"
setsid unshare --mount sh -c 'exec sleep 1000 </dev/null >/dev/null 2>&1' &
while [ "$(cat /proc/$!/comm)" != sleep ]; do sleep 0.01; done
touch "$2/self/name"
unshare --net="$2/self/name" true
there_and_back --root /
grep "$2/self" "/proc/$(cat "$2/pid")/mountinfo"
"#;

#[test]
fn a_mount_upon_itself_is_in_nobodys_way() {
    let dir = tempfile::tempdir().unwrap();
    let said = alone(MOUNTED_UPON_ITSELF, dir.path());
    let own = dir.path().join("self");
    let own = own.to_str().unwrap();
    assert!(said.contains(&format!("{own} {own} ")), "{said}");
}

/// Puts a task to sleep that lives among the caller's mounts and has a child with mounts of its own, and
/// wakes both. Prints how the caller's mounts have changed, and the child's own mount.
const CHILD_ELSEWHERE: &str = r#"
mkdir "$2/own"
setsid sh -c 'exec </dev/null >/dev/null 2>&1; unshare --mount sh -c "
    mount -t tmpfs own-of-the-child \"$0/own\"; exec sleep 1000 </dev/null >/dev/null 2>&1" & wait' "$2" &
until pgrep -P $! sleep >/dev/null; do sleep 0.01; done
cut -d' ' -f1-6 /proc/self/mountinfo >"$2/before"
there_and_back --root /
cut -d' ' -f1-6 /proc/self/mountinfo | diff "$2/before" -
grep "$2/own" "/proc/$(pgrep -P "$(cat "$2/pid")" sleep)/mountinfo"
"#;

#[test]
fn a_child_s_mounts_are_not_the_caller_s() {
    let dir = tempfile::tempdir().unwrap();
    let said = alone(CHILD_ELSEWHERE, dir.path());
    assert!(said.contains("own-of-the-child"), "{said}");
}

/// Does the same with a name of the host, queues and devices. Prints how the caller's have changed, and
/// the child's.
const CHILD_WITH_OTHER_NAMES: &str = r#"
hostname outer
all() { hostname; ip -o addr; ipcs -q | tail -n +2; }
setsid sh -c 'exec </dev/null >/dev/null 2>&1; unshare --uts --ipc --net sh -c "
    hostname inner; ipcmk -Q; ip link add inner0 type veth peer name inner1; ip addr add 10.8.8.8 dev inner0
    exec sleep 1000" & wait' &
until pgrep -P $! sleep >/dev/null; do sleep 0.01; done
all >"$2/before"
there_and_back
all | diff "$2/before" -
child=$(pgrep -P "$(cat "$2/pid")" sleep)
nsenter --target "$child" --uts --ipc --net sh -c 'hostname; ip -o addr; ipcs -q | tail -n +4'
"#;

#[test]
fn a_child_s_names_are_not_the_caller_s() {
    let dir = tempfile::tempdir().unwrap();
    let said = alone(CHILD_WITH_OTHER_NAMES, dir.path());
    assert!(said.starts_with("inner\n"), "{said}");
    assert!(said.contains("10.8.8.8") && said.contains(" 644 "), "{said}");
}

/// Puts a task to sleep that has one end of a pair of devices, and wakes it with an end of another pair in its
/// place. Prints the address of the task's, the index of its peer, and that of the end on this side.
const DEVICE_OF_ANOTHER_PAIR: &str = r#"
setsid unshare --net sh -c 'exec </dev/null >/dev/null 2>&1; exec sleep 1000' &
while [ "$(cat /proc/$!/comm)" != sleep ]; do sleep 0.01; done
ip link add out0 type veth peer name eth0 netns $!
nsenter --target $! --net ip address add 10.9.0.1/24 dev eth0
nsenter --target $! --net ip link set eth0 up
ip link add mine type veth peer name other
there_and_back --external 'netdev[eth0]:mine'
inside() { nsenter --target "$(cat "$dir/pid")" --net "$@"; }
inside ip -o address show dev eth0
inside ip -o link show eth0 | sed 's/.*eth0@if\([0-9]*\):.*/peer \1 /'
ip -o link show other | sed 's/^\([0-9]*\):.*/other \1 /'
! ip link show mine
"#;

#[test]
fn a_device_is_moved_in_for_one_of_a_pair() {
    let dir = tempfile::tempdir().unwrap();
    let said = alone(DEVICE_OF_ANOTHER_PAIR, dir.path());
    assert!(said.contains("10.9.0.1/24"), "{said}");
    let index = |key: &str| said.lines().find_map(|line| line.strip_prefix(key).map(str::trim));
    assert!(index("peer ").is_some() && index("peer ") == index("other "), "{said}");
}

/// What scripts have: moves the tree of the task that was started last to images and back, with the
/// options of the restore. Its process id is in the file `pid` afterwards.
const THERE_AND_BACK: &str = r#"
set -e
torpor=$1 dir=$2
there_and_back() {
    mkdir "$dir/images"
    "$torpor" dump --tree $! --images-dir "$dir/images"
    wait $! || true
    "$torpor" restore --restore-detached "$@" --images-dir "$dir/images" --pidfile "$dir/pid"
}
"#;

/// What a script of the shell prints in namespaces of its own, with which all that it starts goes. Its
/// arguments are the program and a directory.
fn alone(script: &str, dir: &Path) -> String {
    let script = [WITHOUT_MOUNTS_OF_OTHERS, THERE_AND_BACK, script].concat();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--uts", "--ipc", "--net"]);
    command.args(["--fork", "--mount-proc", "--kill-child"]);
    command.args(["sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_torpor")]).arg(dir);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    said.into_owned()
}
