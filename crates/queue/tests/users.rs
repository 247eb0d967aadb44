//! Jobs of users who are not root get no more than these users may have.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;

use common::{Daemon, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A user who may nothing.
const NOBODY: u32 = 65534;

/// A directory where everybody can make files.
fn open_place() -> TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o777)).unwrap();
    place
}

/// Submits a job of that user in a directory, with what else is said of it.
fn submit(daemon: &Daemon, dir: &Path, command: &[&str], more: &Value) -> u64 {
    let mut spec = json!({
        "command": command, "dir": dir, "owner": "nobody",
        "env": [["PATH", std::env::var("PATH").unwrap()]],
        "user": { "uid": NOBODY, "gid": NOBODY, "groups": [] },
    });
    for (name, value) in more.as_object().unwrap() {
        spec[name] = value.clone();
    }
    let (status, answer) = common::ask(daemon, "POST", "/v1/jobs", "", &spec.to_string());
    assert_eq!(status, 201, "{answer}");
    serde_json::from_str::<Value>(&answer).unwrap()["id"].as_u64().unwrap()
}

/// What starts a job has the daemon's rights at first: a library that the dynamic loader is told to load would run with
/// them. It is seen by a file that the loader writes.
#[test]
fn the_environment_of_a_job_counts_for_the_job_alone() {
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let trace = place.path().join("trace");
    let env =
        json!({ "env": [["LD_DEBUG", "libs"], ["LD_DEBUG_OUTPUT", trace], ["WORD", "a word"]] });
    let script = "echo $WORD $TORPOR_JOB";
    let id = submit(&daemon, place.path(), &["/bin/sh", "-c", script], &env);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), format!("a word {id}\n"));
    let files = fs::read_dir(place.path()).unwrap();
    let owners: Vec<u32> = files.map(|file| file.unwrap().metadata().unwrap().uid()).collect();
    assert_eq!(owners, [NOBODY]);
}

/// It would have the keys of whoever has started the daemon, and of the jobs of others.
#[test]
fn each_job_has_a_session_keyring_of_its_own() {
    // KEYCTL_GET_KEYRING_ID of KEY_SPEC_SESSION_KEYRING.
    const SCRIPT: &str = "import ctypes; print(ctypes.CDLL(None).syscall(250, 0, -3, 0))";
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let rings = [(); 2].map(|()| {
        let id = submit(&daemon, place.path(), &["python3", "-c", SCRIPT], &json!({}));
        daemon.wait_for(id, "done");
        daemon.output(id)
    });
    assert!(rings[0] != rings[1], "{rings:?}");
}

/// And not those of the daemon.
#[test]
fn a_job_of_root_has_the_groups_of_its_submitter() {
    let daemon = Daemon::start(&[]);
    let user = json!({ "user": { "uid": 0, "gid": 0, "groups": [7] } });
    let id = submit(&daemon, Path::new("/"), &["id", "-G"], &user);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "0 7\n");
}

/// The files of a job are opened again by root when it is brought back.
#[test]
fn a_job_that_has_slept_has_no_file_that_its_user_may_not_open() {
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let at = |name: &str| place.path().join(name);
    for (dir, text, owner) in [("own", "mine..", NOBODY), ("others", "secret", 0)] {
        fs::create_dir(at(dir)).unwrap();
        let file = at(dir).join("file");
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        [at(dir), file].iter().for_each(|path| chown(path, Some(owner), Some(owner)).unwrap());
    }
    let script = "import os, time\nfile = open('own/file', 'r+')\nprint('begun', flush=True)\n\
                  while not os.path.exists('may-end'): time.sleep(0.02)\nprint(file.read())";
    let id = submit(&daemon, place.path(), &["python3", "-c", script], &json!({}));
    daemon.wait_for_output(id, "begun");
    daemon.ok(&["preempt", "--means", "checkpoint", &id.to_string()]);
    daemon.wait_for(id, "preempted");
    fs::rename(at("own"), at("moved")).unwrap();
    symlink("others", at("own")).unwrap();
    fs::write(at("may-end"), "").unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    let job = until("it is held, or over", || {
        let job = daemon.show(id);
        (job["held"] == true || !job["exit"].is_null()).then_some(job)
    });
    let note = job["note"].as_str().unwrap_or_default();
    assert!(note.contains("no more rights than --files-as gives"), "{job}: {}", daemon.output(id));
    // Nothing is lost.
    fs::remove_file(at("own")).unwrap();
    fs::rename(at("moved"), at("own")).unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "begun\nmine..\n");
}

/// The limits of processes and memory are those of a control group.
#[test]
fn a_jobs_own_command_is_within_its_limits() {
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let script =
        "cat /proc/self/cgroup >job; trap 'exit 0' USR1; echo begun; while :; do sleep 0.05; done";
    let save =
        json!({ "preempt_cmd": "cat /proc/self/cgroup >command; kill -USR1 $TORPOR_JOB_PID" });
    let id = submit(&daemon, place.path(), &["sh", "-c", script], &save);
    daemon.wait_for_output(id, "begun");
    daemon.ok(&["preempt", "--means", "command", &id.to_string()]);
    daemon.wait_for(id, "preempted");
    let [job, command] =
        ["job", "command"].map(|name| fs::read_to_string(place.path().join(name)).unwrap());
    assert!(job.contains("torpor-queue"), "{job}");
    assert_eq!(command, job);
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
}

/// What was copied may have lain in a directory that nobody else could enter; and so may the daemon's own.
#[test]
fn the_copies_of_a_job_are_its_users_alone() {
    let daemon = Daemon::start(&[]);
    // That of the daemon is in one that only root can enter.
    let place = open_place();
    let input = place.path().join("input");
    fs::create_dir(&input).unwrap();
    fs::write(input.join("file"), "mine").unwrap();
    let more = json!({ "input": input, "artefacts": ["made"] });
    let may_end = place.path().join("may-end").display().to_string();
    let script = format!("cat file; cp file made; until [ -e {may_end} ]; do sleep 0.02; done");
    let id = submit(&daemon, place.path(), &["sh", "-c", &script], &more);
    daemon.wait_for_output(id, "mine");
    let open = Permissions::from_mode(0o755);
    fs::set_permissions(daemon.dir.path(), open).unwrap();
    let copy = daemon.data().join(format!("jobs/{id}/work/file"));
    assert!(copy.exists());
    let mut read = std::process::Command::new("cat");
    let read = read.arg(&copy).uid(NOBODY - 1).gid(NOBODY - 1).output().unwrap();
    assert!(!read.status.success() && read.stdout.is_empty(), "{}", common::shown(&read));
    fs::write(may_end, "").unwrap();
    let job = daemon.wait_for(id, "done");
    assert_eq!(fs::read_to_string(place.path().join("made")).unwrap(), "mine", "{job}");
}

/// What is saved gets a name if it has lost the one that it was opened by.
#[test]
fn a_file_of_a_job_gets_no_name_where_its_user_may_make_none() {
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let others = place.path().join("others");
    fs::create_dir(&others).unwrap();
    let script = "import os, time\nos.mkdir('own')\nfile = open('own/file', 'w+')\nfile.write('kept')\n\
                  file.flush()\nos.link('own/file', 'other')\nos.unlink('own/file')\nos.rmdir('own')\n\
                  os.symlink('others', 'own')\nprint('begun', flush=True)\n\
                  while not os.path.exists('may-end'): time.sleep(0.02)\nfile.seek(0)\nprint(file.read())";
    let id = submit(&daemon, place.path(), &["python3", "-c", script], &json!({}));
    daemon.wait_for_output(id, "begun");
    daemon.ok(&["preempt", "--means", "checkpoint", &id.to_string()]);
    daemon.wait_for(id, "preempted");
    assert_eq!(fs::read_dir(&others).unwrap().count(), 0);
    fs::remove_file(place.path().join("own")).unwrap();
    fs::write(place.path().join("may-end"), "").unwrap();
    daemon.ok(&["resume", &id.to_string()]);
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "begun\nkept\n");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3, "others, other, may-end");
}

/// By its name a process of a job, be it root's, is not taken for one that brings in its memory, which a checkpoint waits for.
#[test]
fn a_job_may_have_any_name() {
    let daemon = Daemon::start(&[]);
    let script = "import os, time\nopen('/proc/self/comm', 'w').write('torpor-lazy')\n\
                  print('begun', flush=True)\nwhile not os.path.exists('may-end'): time.sleep(0.02)\n\
                  if os.fork() == 0: time.sleep(1000)\n";
    let words = ["python3", "-c", script];
    for is_roots in [false, true] {
        let place = open_place();
        let id = match is_roots {
            true => daemon.submit(&["--dir", place.path().to_str().unwrap()], &words),
            false => submit(&daemon, place.path(), &words, &json!({})),
        };
        daemon.wait_for_output(id, "begun");
        daemon.ok(&["preempt", "--means", "checkpoint", &id.to_string()]);
        daemon.wait_for(id, "preempted");
        daemon.ok(&["resume", &id.to_string()]);
        fs::write(place.path().join("may-end"), "").unwrap();
        let job = daemon.wait_for(id, "done");
        let note = job["note"].as_str().unwrap_or_default();
        assert!(note.contains("1 of its processes were left and killed: torpor-lazy"), "{job}");
    }
}

/// Whoever copies its input for a job is its user's, who can stop it.
#[test]
fn a_job_that_never_begins_can_be_cancelled() {
    let daemon = Daemon::configured(&json!({ "grace": 300 }), &[]);
    let place = open_place();
    let input = place.path().join("input");
    fs::create_dir(&input).unwrap();
    (0..4000).for_each(|number| fs::write(input.join(number.to_string()), "x").unwrap());
    let data = daemon.data().display().to_string();
    let copier = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains(" queue copy ") && line.contains(&data)
    };
    let id = until("the copy of a job is stopped", || {
        let id = submit(&daemon, place.path(), &["true"], &json!({ "input": input }));
        loop {
            if let Some(pid) = torpor_kernel::proc::processes().find(copier) {
                let pid = Pid::from_raw(pid).unwrap();
                kill_process(pid, Signal::STOP).ok()?;
                let is_stopped = |_: &u64| torpor_kernel::proc::processes().any(|pid| copier(&pid));
                return Some(id).filter(is_stopped);
            }
            if !daemon.job(id)["exit"].is_null() {
                return None;
            }
        }
    });
    daemon.ok(&["cancel", &id.to_string()]);
    daemon.wait_for(id, "cancelled");
}

/// A part of it would work on while the job sleeps, and be missing when it is back.
#[test]
fn a_job_that_lets_processes_out_of_its_tree_is_not_saved() {
    const SCRIPT: &str = r"
import ctypes, os, time
ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
if os.fork() == 0:
    if os.fork() == 0:
        open('/proc/self/comm', 'w').write('apart')
        while os.getppid() != 1: time.sleep(0.01)
        print('begun', flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists('may-end'): time.sleep(0.02)
";
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let id = submit(&daemon, place.path(), &["python3", "-c", SCRIPT], &json!({}));
    daemon.wait_for_output(id, "begun");
    let words = ["preempt", "--means", "checkpoint", &id.to_string()];
    let refused = daemon.queue(&words).output().unwrap();
    let said = common::shown(&refused);
    assert!(
        !refused.status.success() && said.contains("(apart) has left the job's tree"),
        "{said}"
    );
    fs::write(place.path().join("may-end"), "").unwrap();
    let job = daemon.wait_for(id, "done");
    assert!(job["note"].as_str().unwrap_or_default().contains("left and killed: apart"), "{job}");
}

/// With the rights of the user alone what a job has of its own comes back: files that were removed, pipes and sockets by their
/// names, directories, what it watches, shared memory.
#[test]
fn all_that_is_a_users_comes_back() {
    const SCRIPT: &str = r"
import ctypes, mmap, os, socket, subprocess, tempfile, time
os.mkdir('own', 0o700)
os.chdir('own')
log = open('log', 'a')
gone = open('gone', 'w+')
gone.write('gone')
gone.flush()
os.unlink('gone')
scratch = tempfile.TemporaryFile()
scratch.write(b'scratch')
scratch.flush()
os.mkfifo('fifo')
fifo = os.open('fifo', os.O_RDWR)
os.write(fifo, b'fifo')
server = socket.socket(socket.AF_UNIX)
server.bind('socket')
server.listen()
shared = tempfile.TemporaryFile(dir='/dev/shm')
shared.truncate(4096)
memory = mmap.mmap(shared.fileno(), 4096)
memory[:6] = b'memory'
here = os.open('.', os.O_RDONLY)
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, b'.', 0x100) > 0
status = open('/proc/self/status')
child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print('begun', flush=True)
while not os.path.exists('../may-end'): time.sleep(0.02)
log.write('end')
gone.seek(0)
scratch.seek(0)
assert (gone.read(), scratch.read(), os.read(fifo, 4)) == ('gone', b'scratch', b'fifo')
assert memory[:6] == b'memory' and 'Name:' in status.read()
client = socket.socket(socket.AF_UNIX)
client.connect('socket')
assert os.listdir(here) == os.listdir('.')
open('new', 'w').close()
assert b'new' in os.read(watch, 4096)
assert child.communicate(b'child')[0] == b'child'
print('all')
";
    let daemon = Daemon::start(&[]);
    let place = open_place();
    let id = submit(&daemon, place.path(), &["python3", "-c", SCRIPT], &json!({}));
    daemon.wait_for_output(id, "begun");
    daemon.ok(&["preempt", "--means", "checkpoint", &id.to_string()]);
    daemon.wait_for(id, "preempted");
    daemon.ok(&["resume", &id.to_string()]);
    fs::write(place.path().join("may-end"), "").unwrap();
    daemon.wait_for(id, "done");
    assert_eq!(daemon.output(id), "begun\nall\n");
    assert_eq!(fs::read_to_string(place.path().join("own/log")).unwrap(), "end");
}
