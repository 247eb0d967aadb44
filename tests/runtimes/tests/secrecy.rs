//! Nothing that a sealed program holds is ever on a disk in plain, not even for a moment.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use torpor_runtimes_tests::command::wait;
use torpor_runtimes_tests::containerd::{self, Containerd};
use torpor_runtimes_tests::disk::Disk;
use torpor_runtimes_tests::podman::{self, Podman};
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{Kind, found};
use torpor_runtimes_tests::wait::until_true;

const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");

/// Waits until a container with secrets of all kinds, which writes what it has into `log`, is ready,
/// and has it say afterwards whether it still has them. Returns which of them were ever on the disk.
fn sleep_and_wake(
    disk: &Disk,
    log: &Path,
    sleep: impl FnOnce(),
    wake: impl FnOnce(),
) -> BTreeSet<Kind> {
    let says = |text: &str| fs::read_to_string(log).is_ok_and(|log| log == text);
    until_true("the secrets are kept", || says("ready\n"));
    sleep();
    // Before others take the blocks of what was removed.
    let mut written = found(disk.raw());
    wake();
    fs::write(log, "check\n").unwrap();
    until_true("the secrets are still kept", || says("[true, true, true, true, true]\n"));
    // What would go unnoticed here would go unnoticed in a checkpoint.
    fs::write("/var/tmp/removed", Kind::Removed.secret()).unwrap();
    fs::remove_file("/var/tmp/removed").unwrap();
    written.extend(found(disk.raw()));
    written
}

/// Has a container sleep and wake, and returns which of its secrets images show, by the kind of
/// image, and which were ever on the disk.
fn seen(scratch: &Scratch) -> (BTreeSet<(String, Kind)>, BTreeSet<Kind>) {
    let words = [WORKLOAD, "secrets", "/dev/shm", "/log"];
    let bundle = Bundle::new(scratch, &[WORKLOAD], &words);
    let disk = Disk::under(scratch);
    let container = RefCell::new(Container::start(scratch, &bundle));
    let mut shown = BTreeSet::new();
    let sleep = || {
        container.borrow_mut().checkpoint(&[]);
        for image in fs::read_dir(scratch.join("images")).unwrap() {
            let image = image.unwrap();
            let name = image.file_name().into_string().unwrap();
            let kind = name.split(|c: char| c == '.' || c.is_ascii_digit()).next().unwrap();
            let secrets = found(&File::open(image.path()).unwrap());
            shown.extend(secrets.into_iter().map(|secret| (kind.to_owned(), secret)));
        }
    };
    let wake = || container.borrow_mut().restore(&[]);
    let written = sleep_and_wake(&disk, &bundle.file("log"), sleep, wake);
    drop(container);
    (shown, written)
}

#[test]
fn plain() {
    let scratch = Scratch::new("secrecy-plain");
    let (shown, written) = seen(&scratch);
    for (image, kind) in [
        ("pages-", Kind::Memory),
        ("pipes-data", Kind::Pipe),
        ("sk-queues", Kind::Socket),
        ("tmpfs-dev-", Kind::Tmpfs),
        ("ghost-file-", Kind::Ghost),
    ] {
        assert!(shown.contains(&(image.to_owned(), kind)), "{image}: {shown:?}");
    }
    assert!(Kind::ALL.iter().all(|kind| written.contains(kind)), "{written:?}");
}

/// A secret of a program is in no image, and was in no file that anybody has made on the way: not in
/// one of Torpor's, of runc's, or of a tool's that either has called.
#[test]
fn sealed() {
    let scratch = Scratch::sealed("secrecy-sealed");
    let (shown, written) = seen(&scratch);
    assert_eq!(shown, BTreeSet::new());
    assert_eq!(written, BTreeSet::from([Kind::Removed]));
}

/// The same with Podman, which keeps the images among its own files.
#[test]
fn sealed_by_podman() {
    let scratch = Scratch::sealed("secrecy-podman");
    let disk = Disk::under(&scratch);
    let podman = Podman::new(&scratch, &[WORKLOAD], "10.97.31");
    let shared = scratch.dir("shared");
    let volume = format!("{}:/shared", shared.display());
    let options = ["run", "--detach", "--name", "one", "--network", scratch.name()];
    // Podman itself saves its /dev/shm, in plain.
    let files = ["--tmpfs", "/hidden", "--volume", &volume, podman::IMAGE];
    let words = [WORKLOAD, "secrets", "/hidden", "/shared/log"];
    podman.run(&[&options[..], &files, &words].concat());
    let call = |action| drop(podman.run(&["container", action, "one"]));
    let log = shared.join("log");
    let written = sleep_and_wake(&disk, &log, || call("checkpoint"), || call("restore"));
    drop(podman);
    assert_eq!(written, BTreeSet::from([Kind::Removed]));
}

/// And with containerd, which packs the images into archives.
#[test]
fn sealed_by_containerd() {
    let scratch = Scratch::sealed("secrecy-ctr");
    let disk = Disk::under(&scratch);
    let containerd = Containerd::start(&scratch, &[WORKLOAD]);
    let (one, two) = (containerd.name("one"), containerd.name("two"));
    let shared = scratch.dir("shared");
    let mount = format!("type=bind,src={},dst=/shared,options=rbind:rw", shared.display());
    let options = ["run", "--detach", "--mount", &mount, containerd::IMAGE, &one];
    let words = [WORKLOAD, "secrets", "/dev/shm", "/shared/log"];
    containerd.ctr(&[&options[..], &words].concat());
    let sleep = || {
        let what = ["container", "checkpoint", "--rw", "--image", "--task"];
        containerd.ctr(&[&what[..], &[&one, "localhost/sleeping:1"]].concat());
        containerd.remove(&one);
    };
    let mut front = None;
    let wake = || {
        let what = ["container", "restore", "--rw", "--live", &two, "localhost/sleeping:1"];
        let mut command = containerd.call(&what);
        command.stdin(File::open("/dev/null").unwrap());
        let log = File::create(scratch.join("ctr-restore.log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        front = Some(command.spawn().unwrap());
        // One that ended before containerd knew its pid would never be known to have ended.
        until_true("the task runs", || {
            containerd.task(&two).is_some_and(|(_, status)| status == "RUNNING")
        });
    };
    let written = sleep_and_wake(&disk, &shared.join("log"), sleep, wake);
    let mut front = front.unwrap();
    wait(&mut front).expect("ctr ends with its container");
    drop(containerd);
    assert_eq!(written, BTreeSet::from([Kind::Removed]));
}
