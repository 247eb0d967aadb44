//! Programs that use their address space in ways of their own.

use std::fs;

use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::rootfs::program;
use torpor_runtimes_tests::runc::next_line;
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::goes_on;

fn build(scratch: &Scratch, flags: &[&str]) -> String {
    let built = scratch.join("check").to_str().unwrap().to_owned();
    let source = program("check.c");
    command("gcc", &["-g", "-O1", "-pthread", "-o", &built, source.to_str().unwrap()])
        .args(flags)
        .succeed();
    built
}

/// AddressSanitizer reserves 20 TB of address space for its shadow.
#[test]
fn address_sanitizer() {
    let scratch = Scratch::new("asan");
    let built = build(&scratch, &["-fsanitize=address"]);
    let mut job = Job::start(&scratch, None, &[&built]);
    let log = scratch.join("output.log");
    goes_on(&log);
    for _ in 0..2 {
        job.sleep_and_wake(&[]);
        goes_on(&log);
    }
    let size: u64 = fs::read_dir(job.images())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(size < 256 << 20, "the shadow is in the images: {size} bytes");
}

/// Rounds of its memory, which it checks and changes all the time.
#[test]
fn address_sanitizer_in_rounds() {
    let scratch = Scratch::new("asan-rounds");
    let built = build(&scratch, &["-fsanitize=address"]);
    let mut job = Job::start(&scratch, None, &[&built]);
    let log = scratch.join("output.log");
    goes_on(&log);
    job.pre_dump(&[]);
    let first = job.pages();
    for _ in 0..9 {
        goes_on(&log);
        job.pre_dump(&[]);
    }
    assert!(job.pages() < first, "only changes are saved: {} after {first}", job.pages());
    job.sleep_and_wake(&[]);
    goes_on(&log);
    assert!(process::alive(job.pid()));
}

/// Valgrind runs the program on an emulated processor, and has no vDSO mapped.
#[test]
fn valgrind() {
    let scratch = Scratch::new("valgrind");
    let built = build(&scratch, &[]);
    let log = scratch.join("valgrind.log");
    let to = format!("--log-file={}", log.display());
    // No server for debuggers: it keeps fifos in /tmp.
    let mut job = Job::start(&scratch, None, &["valgrind", "--vgdb=no", &to, &built]);
    let output = scratch.join("output.log");
    for _ in 0..2 {
        goes_on(&output);
        job.sleep_and_wake(&[]);
    }
    goes_on(&output);
    next_line(&output);
    assert!(process::alive(job.pid()));
    let report = fs::read_to_string(&log).unwrap();
    assert!(!report.contains("Invalid"), "{report}");
}
