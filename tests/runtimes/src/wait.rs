//! Waiting for conditions, with a bound.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a condition may take to come true before the test fails. Far above what any step needs,
/// so that a slow machine fails no test.
pub const LIMIT: Duration = Duration::from_mins(2);

/// Asks `condition` again and again until it gives a value, and returns that.
///
/// # Panics
/// When the condition has given none within [`LIMIT`]; `what` is then in the message.
#[track_caller]
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "waited {LIMIT:?} in vain: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// As [`until`], for a condition without a value.
#[track_caller]
pub fn until_true(what: &str, mut condition: impl FnMut() -> bool) {
    until(what, || condition().then_some(()));
}
