//! Why an engine that a runtime has started, or the runtime, has failed: what their logs say.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A log may be of any length; as much is read.
const MAX: u64 = 16 << 20;
/// Lines of an error that are told, besides its first one.
const MAX_TOLD: usize = 20;

/// What is in a log; nothing, if there is none.
#[must_use]
pub fn text_of(log: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(log).ok()?.take(MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The error in the engine's log that others follow from, with what it lists in lines of their own.
#[must_use]
pub fn first_error(log: &Path) -> Option<String> {
    let text = text_of(log)?;
    let is_error = |line: &&str| line.contains("Error (");
    let said = |line| str::split_once(line, "): ").map_or(line, |(_, text)| text);
    let mut lines = text.lines().skip_while(|line| !is_error(line)).take_while(is_error).map(said);
    let first = lines.next()?.to_owned();
    let listed = lines.take_while(|line| line.starts_with("  ")).take(MAX_TOLD);
    Some(listed.fold(first, |all, line| format!("{all}\n{line}")))
}

/// The last error that runc has said, in its log or on its standard error.
#[must_use]
pub fn last_error(said: &str) -> Option<String> {
    let line = said.lines().rev().find(|line| line.contains("level=error"))?;
    let text = line.split_once("msg=").map_or(line, |(_, text)| text);
    // It ends with two quotes where it ends with a word in quotes.
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    Some(inner.unwrap_or(text).replace("\\\"", "\""))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_last_error_of_runc_is_whole() {
        let log =
            "time=\"x\" level=error msg=\"no \\\"A B\\\"\"\ntime=\"x\" level=warning msg=other\n";
        assert_eq!(last_error(log).unwrap(), "no \"A B\"");
        assert_eq!(last_error("time=\"x\" level=error msg=short").unwrap(), "short");
        assert_eq!(last_error("level=info msg=nothing"), None);
    }

    #[test]
    fn an_error_is_told_with_what_it_lists() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("restore.log");
        assert_eq!(first_error(&log), None);
        let denied = "the policy does not allow what the images ask for:";
        let lines = [
            "(00.001) begin",
            &format!("(00.002) Error (program.rs:1): {denied}"),
            "(00.002) Error (program.rs:1):   cgroup.img: group /a: it is not (cgroups.allow)",
            "(00.002) Error (program.rs:1):   a policy would allow it by: cgroups.allow = [\"/a\"]",
            "(00.003) Error (other.rs:1): it failed",
        ];
        std::fs::write(&log, lines.join("\n")).unwrap();
        let expected = "  cgroup.img: group /a: it is not (cgroups.allow)\n  \
                        a policy would allow it by: cgroups.allow = [\"/a\"]";
        assert_eq!(first_error(&log).unwrap(), format!("{denied}\n{expected}"));
        std::fs::write(&log, lines[4]).unwrap();
        assert_eq!(first_error(&log).unwrap(), "it failed");
    }
}
