//! What a process cannot take back: each case has one of one thread for itself ([`torpor_tests::alone`]).
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::fs::{File, read_to_string};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::process::ExitCode;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{DumpableBehavior, dumpable_behavior};
use rustix::thread::set_keep_capabilities;
use torpor_sys::confine::{Limits, confine};
use torpor_sys::process::{Status, fork, wait};
use torpor_sys::secrecy::protect;

fn main() -> ExitCode {
    torpor_tests::alone::main(&[
        ("confine::time_has_an_end", time_has_an_end),
        ("confine::waiting_has_an_end", waiting_has_an_end),
        ("confine::nothing_is_left_but_to_compute", nothing_is_left_but_to_compute),
        ("secrecy::memory_is_locked_and_not_dumped", memory_is_locked_and_not_dumped),
    ])
}

/// How a process ends that runs `work`.
fn end_of(work: fn() -> i32) -> Status {
    let pid = fork(work).unwrap();
    wait(pid, true).unwrap().unwrap().1
}

fn time_has_an_end() {
    let end = end_of(|| {
        if confine(&[], Limits { seconds: 1, lifetime: 600, bytes: 1 << 20 }).is_err() {
            return 1;
        }
        let mut number = 0_u64;
        loop {
            number = std::hint::black_box(number).wrapping_add(1);
        }
    });
    assert_eq!(end, Status::Signaled(libc::SIGXCPU));
}

/// A process that only waits takes no time of a processor.
fn waiting_has_an_end() {
    let end = end_of(|| {
        let Ok((reader, writer)) = rustix::pipe::pipe() else { return 1 };
        let kept = [reader.as_raw_fd(), writer.as_raw_fd()];
        if confine(&kept, Limits { seconds: 60, lifetime: 1, bytes: 1 << 20 }).is_err() {
            return 2;
        }
        // Nobody writes.
        rustix::io::read(&reader, &mut [0; 1]).map_or(3, |_| 4)
    });
    assert_eq!(end, Status::Signaled(libc::SIGKILL));
}

fn nothing_is_left_but_to_compute() {
    assert_eq!(end_of(|| confined().unwrap_or(43)), Status::Exited(42));
}

/// What a confined process can do: the number of the first line below that is wrong, or 42. It says no more: it has
/// nothing to say it with.
fn confined() -> Option<i32> {
    let kept = File::open("/proc/thread-self/status").ok()?;
    // It is closed before it could be dropped.
    let other = ManuallyDrop::new(File::open("/proc/thread-self/status").ok()?);
    // Another user would be without capabilities by itself.
    set_keep_capabilities(true).ok()?;
    confine(&[kept.as_raw_fd()], Limits { seconds: 60, lifetime: 600, bytes: 16 << 20 }).ok()?;
    let mut text = vec![0; 4096];
    let read = rustix::io::read(&kept, &mut text).ok()?;
    let text = String::from_utf8_lossy(&text[..read]).into_owned();
    let says = |key: &str, value: &str| {
        text.lines().any(|line| line.starts_with(key) && line.ends_with(value))
    };
    let refused = |result: Result<(), Errno>| result == Err(Errno::PERM);
    // Its number is another file's soon.
    let closed = rustix::io::read(&*other, &mut [0; 8]) == Err(Errno::BADF);
    let map = |len, protection, flags| {
        // SAFETY: a mapping anywhere, which is not made.
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }.map(drop)
    };
    let code = map(4096, ProtFlags::EXEC | ProtFlags::READ, MapFlags::PRIVATE);
    // What is no data of its own.
    let shared = map(33 << 20, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    let in_memory = || rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC);
    let file = ManuallyDrop::new(in_memory().ok()?);
    let written = rustix::io::write(&*file, &vec![1; 5 << 20]);
    let opened = (0..2000).map_while(|_| in_memory().ok().map(ManuallyDrop::new)).count();
    let right = [
        says("CapEff:", "0000000000000000"),
        says("CapPrm:", "0000000000000000"),
        says("CapInh:", "0000000000000000"),
        says("Uid:", "\t65534\t65534\t65534"),
        says("NoNewPrivs:", "1"),
        refused(rustix::fs::open("/", rustix::fs::OFlags::PATH, 0.into()).map(drop)),
        closed,
        refused(code),
        shared == Err(Errno::NOMEM),
        written == Ok(4 << 20),
        (250..300).contains(&opened),
        std::hint::black_box(vec![1_u8; 1 << 22]).len() == 1 << 22,
        Vec::<u8>::new().try_reserve_exact(17 << 20).is_err(),
    ];
    match right.iter().position(|right| !right) {
        Some(at) => i32::try_from(at).ok(),
        None => Some(42),
    }
}

fn memory_is_locked_and_not_dumped() {
    protect().unwrap();
    assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    let secret = vec![7_u8; 1 << 20];
    let status = read_to_string("/proc/self/status").unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    let locked: usize = locked.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(locked >= secret.len() >> 10, "{locked} kB");
}
