//! Dumps in rounds: each has what was written since the one before, and nothing else.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use torpor_images::pagemap::Pagemap;
use torpor_images::{ImageDir, kind};

mod memory;
mod sleeper;

use memory::{PAGES, Task};
use sleeper::criu;

/// A third of the task's pages were never written: they have to stay holes for the next round, of
/// which they are no part.
#[test]
fn what_was_never_written_is_in_no_round() {
    let task = Task::start(PAGES);
    let mut parent: Option<String> = None;
    for round in 0..3 {
        let dir = task.path(&round.to_string());
        std::fs::create_dir(&dir).unwrap();
        let mut options = vec!["--leave-running", "--track-mem", "-D", dir.to_str().unwrap()];
        let before = parent.take();
        options.extend(before.iter().flat_map(|before| ["--prev-images-dir", before]));
        assert!(task.dump(&options), "{}", task.log("dump.log"));
        let images = ImageDir::open(&dir).unwrap();
        let id = u64::from(task.pid.cast_unsigned());
        let stored = Pagemap::read(&images, kind::PAGEMAP, id).unwrap().present_bytes() / 4096;
        // It waits, which takes a few pages of its stack.
        let expected = if round == 0 { PAGES * 2 / 3..PAGES * 3 / 4 } else { 0..PAGES / 100 };
        assert!(expected.contains(&stored), "{stored} pages in round {round}");
        parent = Some(format!("../{round}"));
    }
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

/// A dump into `dir`, which builds on `before`, if that is given.
fn round(task: &Task, dir: &str, before: Option<&str>, more: &[&str]) {
    let images = task.path(dir);
    std::fs::create_dir_all(&images).unwrap();
    let before = before.map(|before| format!("../{before}"));
    let mut options = vec!["-D", images.to_str().unwrap()];
    options.extend(before.iter().flat_map(|before| ["--prev-images-dir", before]));
    options.extend(more);
    assert!(task.dump(&options), "{dir}");
}

const GOES_ON: [&str; 2] = ["--leave-running", "--track-mem"];

/// Whoever has two directories overwrites the one that the other builds on: that one is not built on again.
#[test]
fn two_directories_can_take_turns() {
    let task = Task::start(PAGES);
    round(&task, "a", None, &GOES_ON);
    for (dir, before) in [("b", "a"), ("a", "b"), ("b", "a")] {
        round(&task, dir, Some(before), &GOES_ON);
        // Either builds on the other, or has all.
        let [a, b] =
            ["a", "b"].map(|dir| ImageDir::open(task.path(dir)).unwrap().parent().unwrap());
        assert!(a.is_none() || b.is_none());
    }
    round(&task, "a", Some("b"), &[]);
    torpor_sys::process::wait(task.pid, true).unwrap();
    task.restore(&["-D", task.path("a").to_str().unwrap()]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}

/// Images that have given pages to newer ones are refused by themselves: they would be restored with zeros.
#[test]
fn what_has_lost_its_pages_to_newer_images_is_no_checkpoint() {
    let task = Task::start(PAGES);
    round(&task, "first", None, &GOES_ON);
    round(&task, "second", Some("first"), &["--auto-dedup"]);
    torpor_sys::process::wait(task.pid, true).unwrap();
    let refused = |dir: &str| {
        let dir = task.path(dir);
        let output = criu(&["restore", "-d", "-D", dir.to_str().unwrap()]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("pages were taken out"), "{said}");
    };
    refused("first");
    task.restore(&["--auto-dedup", "-D", task.path("second").to_str().unwrap()]);
    refused("second");
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
    // A new checkpoint in their place is one.
    let task = Task::start(PAGES);
    let again = task.path("first");
    std::fs::create_dir(&again).unwrap();
    std::fs::write(again.join("inventory.img"), "").unwrap();
    std::fs::write(again.join("pages-gone"), "").unwrap();
    round(&task, "first", None, &[]);
    torpor_sys::process::wait(task.pid, true).unwrap();
    task.restore(&["-D", again.to_str().unwrap()]);
    assert_eq!(task.look(), format!("ok {PAGES}\n"));
}
