//! fio, which writes by io_uring and checks what it reads again.

use std::fs;

use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

use super::containers::ALONE;
use super::{Outcome, Row, SLEEPS, Times};

/// Its processes share a System V segment, and know each other by their numbers.
const NAMESPACES: [&str; 8] =
    ["unshare", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c", ALONE];

/// How often it writes its file, and reads all of it.
const LOOPS: u32 = 20;

/// A file of 256 blocks, in any order. The pauses make it run for as long as the test takes: a time or a
/// rate that it has to keep would go on while it sleeps. It asks for answers in place of waiting for them: a wait that
/// the kernel ends for whoever stops it (`EINTR`) it takes for the end of a round, since it looks for that in errno,
/// where its own way to call the kernel does not put it.
const SCRIPT: &str = "exec setsid fio --name=job --filename=data --eta=never --ioengine=io_uring \
    --registerfiles=1 --fixedbufs=1 --iodepth=8 --rw=randwrite --bs=4k --size=1m \
    --verify=crc32c --iodepth_batch_complete_min=0 --thinktime=50ms --thinktime_blocks=32";

/// How many requests the worker of a tree has had answered, by an instance that has its file and its
/// buffers registered.
fn answered(root: i32) -> Option<u64> {
    let info = process::tree(root).into_keys().find_map(process::ring)?;
    let number = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().parse::<u64>().ok())
    };
    let registered = number("UserFiles:") == Some(1) && number("UserBufs:") == Some(8);
    registered.then(|| number("CqTail:")).flatten()
}

/// In pid and IPC namespaces of its own.
pub(super) fn fio() -> Row {
    let scratch = Scratch::new("real-fio");
    // What unshare says of its end goes elsewhere.
    let script = format!("{SCRIPT} --loops={LOOPS} >report 2>&1");
    let words = [&NAMESPACES[..], &["sh", "sh", "-c", &script]].concat();
    let starter = Job::start(&scratch, None, &words);
    let first = until("it runs", || {
        let mut tree = process::tree(starter.pid()).into_iter();
        tree.find(|(pid, facts)| process::inner_pid(*pid) == Some(1) && facts.name == "fio")
    });
    let mut job = Job::of_namespace(&scratch, first.0);
    let mut times = Times::default();
    for _ in 0..SLEEPS {
        works_on(&job);
        times.sleep(&mut job, &["--external", "mnt[]:ms"]);
    }
    works_on(&job);
    until_true("it ends", || !process::alive(job.pid()));
    let output = fs::read_to_string(scratch.join("report")).unwrap();
    assert!(output.contains("err= 0:"), "{output}");
    let blocks = 256 * LOOPS;
    assert!(output.contains(&format!("issued rwts: total={blocks},{blocks},0,0 ")), "{output}");
    Row {
        name: "fio",
        version: &["fio", "--version"],
        how: "a file that is written and verified, it and the buffers registered with io_uring; to its end",
        outcome: Outcome::Kept(times),
    }
}

/// What has been answered is not shown while the instance is at work.
fn works_on(job: &Job<'_>) {
    let goal = until("its instance is there", || answered(job.pid())) + 100;
    until_true("it writes on", || answered(job.pid()).is_some_and(|count| count >= goal));
}
