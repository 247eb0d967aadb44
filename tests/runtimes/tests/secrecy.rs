//! Nothing that a sealed program holds is ever on a disk in plain, not even for a moment.

use std::collections::BTreeSet;
use std::fs::{self, File};

use torpor_runtimes_tests::disk::Disk;
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{Kind, found};
use torpor_runtimes_tests::wait::until_true;

const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");

/// Has a container with secrets of all kinds sleep and wake, and returns which of them images show,
/// by the kind of image, and which were ever on the disk.
fn seen(scratch: &Scratch) -> (BTreeSet<(String, Kind)>, BTreeSet<Kind>) {
    let words = [WORKLOAD, "secrets", "/dev/shm", "/log"];
    let bundle = Bundle::new(scratch, &[WORKLOAD], &words);
    let disk = Disk::under(scratch);
    let mut container = Container::start(scratch, &bundle);
    let log = bundle.file("log");
    let says = |text: &str| fs::read_to_string(&log).is_ok_and(|log| log == text);
    until_true("the secrets are kept", || says("ready\n"));

    // What would go unnoticed here would go unnoticed in a checkpoint.
    fs::write("/var/tmp/removed", Kind::Removed.secret()).unwrap();
    fs::remove_file("/var/tmp/removed").unwrap();
    container.checkpoint(&[]);
    let mut shown = BTreeSet::new();
    for image in fs::read_dir(scratch.join("images")).unwrap() {
        let image = image.unwrap();
        let name = image.file_name().into_string().unwrap();
        let kind = name.split(|c: char| c == '.' || c.is_ascii_digit()).next().unwrap().to_owned();
        let secrets = found(&File::open(image.path()).unwrap());
        shown.extend(secrets.into_iter().map(|secret| (kind.clone(), secret)));
    }
    container.restore(&[]);
    fs::write(&log, "check\n").unwrap();
    until_true("the secrets are still kept", || says("[true, true, true, true, true]\n"));
    drop(container);
    (shown, found(disk.raw()))
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
