//! How this program speaks. Where its words cannot be written, on a full disk or a terminal that is gone,
//! that is an error like any other, or does no harm.

use std::fmt;
use std::io::{self, Write};

/// Prints a line on standard output; returns from the function around it, with a sentence, if that fails.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::line(format_args!($($text)*))? };
}

/// Prints a line on standard output.
///
/// # Errors
/// If standard output takes nothing: its reader is gone, or the disk is full.
pub(crate) fn line(text: fmt::Arguments<'_>) -> Result<(), String> {
    writeln!(io::stdout(), "{text}").map_err(|e| format!("write to standard output: {e}"))
}
