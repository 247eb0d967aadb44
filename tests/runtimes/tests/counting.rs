//! A shell that counts: the smallest program of which a test can tell that it went on.

use std::fs;
use std::path::Path;

use torpor_runtimes_tests::runc::next_line;

/// Counts into the file /count. Each round starts a process, so that there are children too.
pub const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done";

/// Waits until the counter goes on, and checks that it has left no number out and said none twice.
#[track_caller]
pub fn goes_on(file: &Path) {
    next_line(file);
    let text = fs::read_to_string(file).unwrap();
    // The last line may be half written.
    let whole = &text[..=text.rfind('\n').unwrap()];
    for (line, number) in whole.lines().zip(1_u64..) {
        assert_eq!(line, number.to_string(), "in {}", file.display());
    }
}
