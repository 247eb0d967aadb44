//! containerd: `ctr task checkpoint`, `ctr container checkpoint` and `ctr container restore`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::Value;
use torpor_runtimes_tests::command::{Run, command, wait};
use torpor_runtimes_tests::containerd::{Containerd, IMAGE};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::inner_processes;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{KEEP_SECRET, check_images, leaks};
use torpor_runtimes_tests::wait::{until, until_true};

use crate::counting::{COUNT, goes_on};

/// Starts a counter, and returns the file that it counts in, in a directory of the host.
fn start(containerd: &Containerd, scratch: &Scratch, name: &str) -> PathBuf {
    let shared = scratch.dir("shared");
    let mount = format!("type=bind,src={},dst=/shared,options=rbind:rw", shared.display());
    let script = format!("{KEEP_SECRET}{}", COUNT.replace("/count", "/shared/count"));
    containerd.ctr(&["run", "--detach", "--mount", &mount, IMAGE, name, "sh", "-c", &script]);
    shared.join("count")
}

#[test]
fn task_checkpoint() {
    checkpoint_task(&Scratch::new("ctr-task"));
}

#[test]
fn task_checkpoint_sealed() {
    checkpoint_task(&Scratch::sealed("ctr-task-sealed"));
}

fn checkpoint_task(scratch: &Scratch) {
    let containerd = Containerd::start(scratch, &[]);
    let name = containerd.name("one");
    let count = start(&containerd, scratch, &name);
    goes_on(&count);
    let before = containerd.task(&name).unwrap();
    let images = scratch.join("images");
    containerd.ctr(&["task", "checkpoint", "--image-path", images.to_str().unwrap(), &name]);
    check_images(scratch, &images);
    assert_eq!(containerd.task(&name).unwrap(), before);
    goes_on(&count);
    let images = scratch.join("last-images");
    containerd.ctr(&[
        "task",
        "checkpoint",
        "--exit",
        "--image-path",
        images.to_str().unwrap(),
        &name,
    ]);
    until_true("the task has stopped", || {
        containerd.task(&name).is_none_or(|(_, status)| status == "STOPPED")
    });
    check_images(scratch, &images);
}

/// What docs/runtimes.md argues from: containerd pauses a container for its checkpoint by the very calls of runc
/// that a person makes, so that nothing in the images tells who has paused it.
#[test]
fn a_pause_by_hand_is_what_containerd_does() {
    let scratch = Scratch::new("ctr-pause");
    let (calls, real) = note_calls_of_runc(&scratch);
    let containerd = Containerd::start(&scratch, &[]);
    let name = containerd.name("one");
    let count = start(&containerd, &scratch, &name);
    goes_on(&count);
    let images = scratch.join("images");
    fs::write(&calls, "").unwrap();
    containerd.ctr(&["task", "checkpoint", "--image-path", images.to_str().unwrap(), &name]);
    goes_on(&count);
    let text = fs::read_to_string(&calls).unwrap();
    let noted = |action: &str| {
        let words = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words.enumerate().find(|(_, words)| words.contains(&action)).expect(&text)
    };
    let [pause, checkpoint, resume] = ["pause", "checkpoint", "resume"].map(noted);
    assert!(pause.0 < checkpoint.0 && checkpoint.0 < resume.0, "{text}");

    // The same by hand, into other images.
    let runc = |words: &[&str]| scratch.command(&real).args(words).succeed();
    let root = pause.1.iter().position(|word| *word == "--root").expect(&text) + 1;
    let other = scratch.dir("images-by-hand");
    let (from, to) = (images.to_str().unwrap(), other.to_str().unwrap());
    let call: Vec<String> = checkpoint.1.iter().map(|word| word.replace(from, to)).collect();
    runc(&["--root", pause.1[root], "pause", &name]);
    runc(&call.iter().map(String::as_str).collect::<Vec<_>>());
    runc(&["--root", pause.1[root], "resume", &name]);
    goes_on(&count);
    for image in ["inventory.img", "cgroup.img"] {
        let [ours, theirs] = [&other, &images].map(|dir| shown(&scratch, &dir.join(image)));
        assert_eq!(ours, theirs, "{image}");
        // It was frozen, and the images say so.
        assert!(image != "cgroup.img" || ours.to_string().contains("FROZEN"), "{ours}");
    }
}

/// Has each call of runc written down before it is made: where, and which program does the work.
fn note_calls_of_runc(scratch: &Scratch) -> (PathBuf, String) {
    let (calls, real) =
        (scratch.join("calls"), command("sh", &["-c", "command -v runc"]).succeed());
    let script = format!("#!/bin/sh\necho \"$*\" >>{}\nexec {real} \"$@\"\n", calls.display());
    // By another process: see `note_calls` of LXC.
    fs::write(scratch.join("noting"), script).unwrap();
    let noting = scratch.criu().with_file_name("runc");
    command("install", &["-m", "755"]).arg(scratch.join("noting")).arg(noting).succeed();
    (calls, real)
}

/// What an image says, without what is another each time.
fn shown(scratch: &Scratch, image: &Path) -> Value {
    // By the name of CRIU the program has CRIU's commands alone.
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let show = &mut scratch.command(torpor.to_str().unwrap());
    let mut all: Value =
        serde_json::from_str(&show.args(["image", "show"]).arg(image).succeed()).unwrap();
    let entry = all["entries"][0].as_object_mut().unwrap();
    for name in ["dump_uptime", "dump_criu_run_id", "torpor_host_mark", "torpor_page_sums"] {
        entry.remove(name);
    }
    all
}

#[test]
fn container_checkpoint_and_restore() {
    checkpoint_and_restore(&Scratch::new("ctr"));
}

#[test]
fn container_checkpoint_and_restore_sealed() {
    checkpoint_and_restore(&Scratch::sealed("ctr-sealed"));
}

fn checkpoint_and_restore(scratch: &Scratch) {
    let containerd = Containerd::start(scratch, &[]);
    let name = containerd.name("one");
    let count = start(&containerd, scratch, &name);
    goes_on(&count);
    let processes = inner_processes(containerd.task(&name).unwrap().0);
    containerd.ctr(&[
        "container",
        "checkpoint",
        "--rw",
        "--image",
        "--task",
        &name,
        "localhost/sleeping:1",
    ]);
    // The image is in the store for content, in archives.
    let store = scratch.join("containerd/root/io.containerd.content.v1.content/blobs");
    assert_eq!(leaks(&store).is_empty(), scratch.is_sealed());
    // It runs on: from here there are two of it.
    goes_on(&count);
    containerd.remove(&name);
    // Not removed: it may have been open at the checkpoint.
    let empty = || fs::write(&count, "").unwrap();
    empty();

    for other in ["two", "three"] {
        let other = containerd.name(other);
        let log = File::create(scratch.join("ctr-restore.log")).unwrap();
        // ctr stays in front of the container that it restores.
        let mut command = containerd.call(&[
            "container",
            "restore",
            "--rw",
            "--live",
            &other,
            "localhost/sleeping:1",
        ]);
        command
            .stdin(File::open("/dev/null").unwrap())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let mut front = command.spawn().unwrap();
        let (pid, _) = until("the task runs", || {
            containerd.task(&other).filter(|(_, status)| status == "RUNNING")
        });
        assert_eq!(inner_processes(pid), processes);
        let first = until("it counts on", || {
            let text = fs::read_to_string(&count).ok()?;
            text.split_once('\n')?.0.parse::<u64>().ok()
        });
        assert!(first > 1, "it counts from the start");
        process::kill(pid);
        wait(&mut front).expect("ctr ends with its container");
        containerd.remove(&other);
        empty();
    }
}
