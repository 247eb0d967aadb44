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

/// How many bytes of memory a process has that are of no file.
fn anonymous(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Rounds of its memory, which it checks and changes all the time.
#[test]
fn address_sanitizer_in_rounds() {
    let scratch = Scratch::new("asan-rounds");
    let built = build(&scratch, &["-fsanitize=address"]);
    let mut job = Job::start(&scratch, None, &[&built]);
    let log = scratch.join("output.log");
    goes_on(&log);
    for _ in 0..10 {
        job.pre_dump(&[]);
        goes_on(&log);
    }
    // It has more and more of it, the more the longer a round takes: what it frees is not used again for long.
    let (saved, all) = (job.pages(), anonymous(job.pid()));
    assert!(saved < all / 2, "only changes are saved: {saved} of {all}");
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
