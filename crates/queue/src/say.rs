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
    let text = plain(&text.to_string());
    writeln!(io::stdout(), "{text}").map_err(|e| format!("write to standard output: {e}"))
}

/// A text without what gives orders to a terminal: classes, notes and names of processes are as the owners of jobs like
/// them. It is written as JSON has it, which so stays the same.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => plain.push(c),
            c if c.is_control() => plain.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_elses_words_give_orders_to_a_terminal() {
        assert_eq!(plain("a\u{1b}[2J\u{9b}1m\tb\n\u{e9}"), "a\\u001b[2J\\u009b1m\tb\n\u{e9}");
        let value = serde_json::json!({ "class": "\u{1b}\u{9b}\n" });
        let said: serde_json::Value = serde_json::from_str(&plain(&value.to_string())).unwrap();
        assert_eq!(said, value);
    }
}
