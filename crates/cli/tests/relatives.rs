//! Memory that relatives share: in the images once.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;

use torpor_images::dir::{EXTENDED_VERSION, IMAGE_VERSION};
use torpor_images::proto::StatsEntry;
use torpor_images::{ImageDir, kind};
use torpor_sys::process::wait;

mod keys;
mod memory;
mod sleeper;

use keys::seal;
use memory::Task;
use sleeper::wait_until;

/// Of each task's memory; a third of them are zeros.
const PAGES: u64 = 3000;
const CHILDREN: u64 = 3;
/// What a child is stopped for when it is restored: its birth (3), its places and its descriptors (2 each, less
/// what it has of neither), its state, the last of it, and the end of its stub (2).
const MOST_STOPS: u64 = 10;

/// A task with children, which are ours when it is gone.
fn start(children: u64) -> Task {
    start_with(children, 0)
}

/// A task that has overwritten some of its pages since it had its children.
fn start_with(children: u64, others: u64) -> Task {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    Task::start_with_relatives(PAGES, children, others)
}

/// What the tasks of a family use together of the machine's memory, in KiB; none is without
/// others.
fn proportional_size(task: &Task) -> u64 {
    let pids = [vec![task.pid.to_string()], children(task)].concat();
    let size = |pid: &String| {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).unwrap();
        line.trim_end_matches("kB").trim().parse::<u64>().unwrap()
    };
    pids.iter().map(size).sum()
}

fn children(task: &Task) -> Vec<String> {
    let pid = task.pid;
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().map(str::to_owned).collect()
}

/// Puts a family to sleep, which is gone then. Returns how large its memory in the images is.
fn put_to_sleep(task: &Task, options: &[&str]) -> u64 {
    let children = children(task);
    task.put_to_sleep(options);
    for child in children {
        wait(child.parse().unwrap(), true).unwrap();
    }
    let images = fs::read_dir(task.dir.path()).unwrap().map(Result::unwrap);
    let pages = images.filter(|file| file.file_name().to_str().unwrap().starts_with("pages-"));
    pages.map(|file| file.metadata().unwrap().len()).sum()
}

/// How large the memory of a family in the images is: after it was dumped and restored with
/// these options.
fn size(dump: &[&str], restore: &[&str]) -> u64 {
    let task = start(CHILDREN);
    let size = put_to_sleep(&task, dump);
    task.restore(restore);
    assert_eq!(task.look(), format!("ok {PAGES}\n"), "{dump:?} {restore:?}");
    wait_until(|| wait(task.pid, false).unwrap().is_some());
    size
}

/// How often the tasks of a family are stopped while they are restored.
fn stops(children: u64) -> u64 {
    let task = start(children);
    put_to_sleep(&task, &[]);
    task.restore(&[]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    wait_until(|| wait(task.pid, false).unwrap().is_some());
    let images = ImageDir::open(task.dir.path()).unwrap();
    let stats: StatsEntry = images.read_one(kind::STATS_RESTORE, 0).unwrap();
    stats.restore.unwrap().torpor_stops.unwrap()
}

/// What each process of a large tree costs.
#[test]
fn a_child_is_restored_with_few_stops() {
    const MORE: u64 = 20;
    let [few, many] = [2, 2 + MORE].map(stops);
    let each = many.saturating_sub(few).div_ceil(MORE);
    println!("{each} stops for each child");
    assert!(
        (1..=MOST_STOPS).contains(&each),
        "{few} stops with two children, {many} with {MORE} more"
    );
}

#[test]
fn what_relatives_share_is_stored_once() {
    let keys = tempfile::tempdir().unwrap();
    let seal = seal(keys.path());
    let seal: Vec<&str> = seal.iter().map(String::as_str).collect();
    let sums = [&seal[..], &["--suite", "aes-256-xts+hmac-sha256"]].concat();
    let packed = [&seal[..], &["--compress", "lz4"]].concat();
    let ways: [(&[&str], &[&str]); 6] = [
        (&[], &[]),
        (&[], &["--lazy-pages"]),
        (&["--compress", "zstd"], &[]),
        (&seal, &seal[..2]),
        (&sums, &seal[..2]),
        (&packed, &seal[..2]),
    ];
    for (dump, restore) in ways {
        let once = size(&[dump, &["--dedup-relatives"]].concat(), restore);
        let of_each = size(dump, restore);
        // The tasks have a little memory of their own.
        assert!(once * 3 < of_each && once * 5 > of_each, "{dump:?}: {once}, {of_each}");
    }
}

/// The children share with each other what their parent has overwritten, plain and in a chain.
#[test]
fn what_only_children_share_they_share_again() {
    for chain in [false, true] {
        let task = start_with(CHILDREN, PAGES / 2);
        let before = proportional_size(&task);
        let mut options = vec!["--dedup-relatives"];
        let first = task.path("first");
        if chain {
            fs::create_dir(&first).unwrap();
            let round = ["--leave-running", "--track-mem", "-D", first.to_str().unwrap()];
            assert!(task.dump(&[&options[..], &round].concat()));
            options.extend(["--prev-images-dir", "first"]);
        }
        put_to_sleep(&task, &options);
        task.restore(&[]);
        let after = proportional_size(&task);
        assert!(after < before + before / 20, "{chain}: {before} and then {after} KiB");
        assert_eq!(task.look(), format!("ok {PAGES}\n"));
        wait_until(|| wait(task.pid, false).unwrap().is_some());
    }
}

#[test]
fn a_newer_dump_builds_on_it() {
    let task = start(CHILDREN);
    let first = task.path("first");
    fs::create_dir(&first).unwrap();
    let options = ["--dedup-relatives", "--leave-running", "--track-mem", "-D"];
    assert!(task.dump(&[&options[..], &[first.to_str().unwrap()]].concat()));
    put_to_sleep(&task, &["--dedup-relatives", "--prev-images-dir", "first", "--auto-dedup"]);
    task.restore(&[]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

/// A program that does not know relatives must not restore images that have some; other images are
/// as ever.
#[test]
fn the_version_says_so() {
    for (options, relatives, version) in [
        (&["--dedup-relatives"][..], CHILDREN, EXTENDED_VERSION),
        (&["--dedup-relatives"], 0, IMAGE_VERSION),
        (&[], CHILDREN, IMAGE_VERSION),
    ] {
        let task = start(relatives);
        put_to_sleep(&task, options);
        let inventory = ImageDir::open(task.dir.path()).unwrap().inventory().unwrap();
        assert_eq!(inventory.img_version, version, "{options:?}");
    }
}
