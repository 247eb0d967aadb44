//! What a program is told when a dump is refused: the class, the reason, and apart from that what to do.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use torpor_sys::ptrace;

use super::object;
use super::sleeper::{Sleeper, WITHOUT_MOUNTS_OF_OTHERS, wait_until};

/// What begins a program in Python that does something, and is called `sleep` when it has.
const BEGIN: &str = "import ctypes, fcntl, os, socket, sys, time\n\
                     libc = ctypes.CDLL(None)\n";
const END: &str = "\nlibc.prctl(15, b'sleep', 0, 0, 0)\n\
                   while True:\n    time.sleep(1000)";

/// A dump is refused for this reason, with this hint.
fn is_refused(task: &Sleeper, options: &[&str], (reason, hint): (&str, &str)) {
    let refused = object(&task.dump(&[&["--json"], options].concat()));
    assert_eq!(refused["class"], "refused", "{refused}");
    let said = |name: &str| refused[name].as_str().unwrap_or_default().to_owned();
    let (text, advice) = (said("text"), said("hint"));
    assert!(text.contains(reason) && !text.contains(&advice), "{reason}: {refused}");
    assert!(advice.contains(hint), "{reason}: {refused}");
    // The log has all of it.
    let log = task.log("dump.log");
    assert!(log.contains(&format!("{text}; {advice}")), "{log}");
    wait_until(|| task.sleeps());
}

/// What programs do, why they are refused, and the hint.
const OWN: [(&str, &str, &str); 6] = [
    (
        "s = socket.create_server(('127.0.0.1', 0))\n\
         c = socket.create_connection(s.getsockname())\n\
         a = s.accept()[0]\n\
         s.close()",
        "it is a TCP connection",
        "--tcp-established",
    ),
    (
        "s = socket.create_server(('127.0.0.1', 0))\nc = socket.create_connection(s.getsockname())",
        "a connection waits to be accepted",
        "--skip-in-flight",
    ),
    ("f = open(sys.argv[1], 'w')\nfcntl.flock(f, fcntl.LOCK_EX)", "holds a lock", "--file-locks"),
    (
        "f = open(sys.argv[1], 'w')\nf.write('x' * (2 << 20))\nf.flush()\nos.fsync(f)\n\
         os.unlink(sys.argv[1])",
        "it is unlinked and holds",
        "--ghost-limit",
    ),
    (
        "f = open(sys.argv[1], 'w')\nos.link(sys.argv[1], sys.argv[1] + '2')\nos.unlink(sys.argv[1])",
        "its name was removed while others lead to it",
        "--link-remap",
    ),
    (
        "id = libc.shmget(0, 4096, 0o1600)\n\
         libc.shmat.restype = ctypes.c_void_p\n\
         at = libc.shmat(id, None, 0)\n\
         libc.shmctl(id, 0, None)",
        "belongs to the IPC namespace of the host",
        "start the tree in one of its own",
    ),
];

#[test]
fn what_a_task_has_made_itself_is_refused_with_what_to_do() {
    for (does, reason, hint) in OWN {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let program = [BEGIN, does, END].concat();
        let task = Sleeper::start_as(&["python3", "-c", &program, file.to_str().unwrap()]);
        is_refused(&task, &[], (reason, hint));
    }
}

#[test]
fn what_leads_out_of_the_tree_is_refused_with_what_to_do() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let task = Sleeper::start_with(&["sleep", "1000"], Stdio::from(OwnedFd::from(theirs)));
    is_refused(&task, &[], ("outside of the tree", "--external unix["));
    drop(ours);

    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let mut slave = OpenOptions::new();
    let slave = slave.read(true).write(true).custom_flags(libc::O_NOCTTY).open(name).unwrap();
    let task = Sleeper::start_with(&["sleep", "1000"], Stdio::from(slave));
    is_refused(&task, &[], ("the other end of the terminal is outside of the tree", "--shell-job"));

    let task = Sleeper::start();
    ptrace::seize(task.pid, 0).unwrap();
    is_refused(&task, &[], ("is traced by task", "detach it first"));
    task.kill();

    let dir = tempfile::tempdir().unwrap();
    let script = format!("{WITHOUT_MOUNTS_OF_OTHERS} mount -t ramfs none \"$0\"; exec sleep 1000");
    let words = ["unshare", "--mount", "sh", "-ec", &script, dir.path().to_str().unwrap()];
    let task = Sleeper::start_as(&words);
    let reason = "a file system of type ramfs cannot be made again";
    is_refused(&task, &["--external", "mnt[]:ms"], (reason, "--external mnt["));
}
