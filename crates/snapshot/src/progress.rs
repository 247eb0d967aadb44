//! How far long work is: a bar on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work that takes no longer is not spoken of.
const SHORT: Duration = Duration::from_millis(500);
/// How often a bar is drawn.
const FRAME: Duration = Duration::from_millis(100);
/// How often a line is printed.
const LINE: Duration = Duration::from_secs(5);
/// What a bar looks like.
const BAR: &str = "{msg} [{bar:30}] {percent:>3} %, {decimal_bytes} of {decimal_total_bytes}, \
                   {decimal_bytes_per_sec}";

/// Does `work`, and says on the standard error how far it is: `done()` bytes of `total`.
pub fn during<T>(
    what: &str,
    total: u64,
    done: &(dyn Fn() -> u64 + Sync),
    work: impl FnOnce() -> T,
) -> T {
    let (finished, waiting) = channel::<()>();
    let begin = Instant::now();
    let show = move || {
        let error = std::io::stderr();
        // The end of the channel is the end of the work.
        let goes_on = |pause| waiting.recv_timeout(pause) == Err(RecvTimeoutError::Timeout);
        if !goes_on(SHORT) {
            return;
        }
        if error.is_terminal() {
            let bar = bar(what, total, ProgressDrawTarget::stderr(), begin.elapsed());
            draw(&bar, done, || goes_on(FRAME));
        } else {
            let line = || line(what, total, done(), begin.elapsed());
            say(error, line, || goes_on(LINE));
        }
    };
    thread::scope(|scope| {
        scope.spawn(show);
        let result = work();
        drop(finished);
        result
    })
}

/// A number of bytes, for people.
#[must_use]
pub fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{} kB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

/// A bar for work that was begun before.
fn bar(what: &str, total: u64, target: ProgressDrawTarget, elapsed: Duration) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target).with_elapsed(elapsed);
    if let Ok(style) = ProgressStyle::with_template(BAR) {
        bar.set_style(style.progress_chars("#."));
    }
    bar.with_message(what.to_owned())
}

/// Draws a bar as long as the work goes on, and leaves it there.
fn draw(bar: &ProgressBar, done: &dyn Fn() -> u64, mut goes_on: impl FnMut() -> bool) {
    let most = bar.length().unwrap_or_default();
    let update = || bar.set_position(done().min(most));
    update();
    while goes_on() {
        update();
    }
    update();
    bar.abandon();
}

/// Prints a line now and as long as the work goes on, and one at its end.
fn say(mut to: impl Write, line: impl Fn() -> String, mut goes_on: impl FnMut() -> bool) {
    // Nobody may listen.
    let mut print = || drop(to.write_all(line().as_bytes()));
    print();
    while goes_on() {
        print();
    }
    print();
}

/// What a line says after `elapsed`.
fn line(what: &str, total: u64, done: u64, elapsed: Duration) -> String {
    let done = done.min(total);
    let rate = u128::from(done) * 1000 / elapsed.as_millis().max(1);
    format!(
        "{what}: {} %, {} of {}, {}/s\n",
        done * 100 / total.max(1),
        size(done),
        size(total),
        size(u64::try_from(rate).unwrap_or(u64::MAX))
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_terminal_has_a_bar() {
        assert!(ProgressStyle::with_template(BAR).is_ok());
        let second = Duration::from_secs(1);
        let bar = bar("pushing", 30, ProgressDrawTarget::hidden(), second);
        assert_eq!((bar.message().as_str(), bar.length()), ("pushing", Some(30)));
        assert!(bar.elapsed() >= second, "it tells the rate since the work was begun");
        let done = std::cell::Cell::new(0);
        draw(&bar, &|| done.replace(done.get() + 20), || done.get() < 30);
        assert_eq!(bar.position(), 30, "more than all is all");
        assert!(bar.is_finished());
    }

    #[test]
    fn others_have_lines() {
        let done = std::cell::Cell::new(0);
        let next = || {
            done.set(done.get() + 15_000_000);
            line("pushing", 30_000_000, done.get(), Duration::from_millis(done.get() / 15_000))
        };
        let mut said = Vec::new();
        say(&mut said, next, || false);
        let lines =
            "pushing: 50 %, 15 MB of 30 MB, 15 MB/s\npushing: 100 %, 30 MB of 30 MB, 15 MB/s\n";
        assert_eq!(String::from_utf8(said).unwrap(), lines);
    }

    #[test]
    fn work_is_done() {
        assert_eq!(during("adding", 10, &|| 5, || 2 + 3), 5);
    }

    #[test]
    fn more_than_all_is_all() {
        assert_eq!(line("x", 0, 7, Duration::ZERO), "x: 0 %, 0 B of 0 B, 0 B/s\n");
    }
}
