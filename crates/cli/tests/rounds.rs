//! Dumps in rounds: each has what was written since the one before, and nothing else.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use torpor_images::pagemap::Pagemap;
use torpor_images::{ImageDir, kind};

mod memory;
mod sleeper;

use memory::{PAGES, Task};

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
