//! containerd: `ctr task checkpoint`, `ctr container checkpoint` and `ctr container restore`.

use std::fs::{self, File};
use std::path::PathBuf;

use torpor_runtimes_tests::command::wait;
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
    fs::remove_file(&count).unwrap();

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
        fs::remove_file(&count).unwrap();
    }
}
