//! What is said to people: words on standard error that nothing depends on, and words of others.

use std::fmt;
use std::io::{self, Write};

/// Says something on standard error, where nobody may be there any more: a pipe whose reader is gone, a full disk, a
/// terminal that was closed. `eprintln!` would panic then, and end what it only tells of.
#[macro_export]
macro_rules! tell {
    ($($text:tt)*) => { $crate::aside(format_args!($($text)*)) };
}

/// Says something on standard error, if it can be said; what [`tell!`](crate::tell) calls.
pub fn aside(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// What others have said, which may be anything, without what could move a terminal's cursor or begin a line.
#[must_use]
pub fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), "\u{fffd}")
}
