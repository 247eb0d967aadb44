//! What the kernel says of a process.

use std::fs;

use rustix::process::Pid;

/// What `/proc/PID/stat` says of a process behind its name, from field 3 on: the name may have
/// brackets and blanks.
fn stat(pid: impl std::fmt::Display) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ").map(|(_, rest)| rest.to_owned())
}

/// Whether a process has ended.
#[must_use]
pub fn has_ended(pid: u32) -> bool {
    stat(pid).is_none_or(|stat| stat.starts_with(['Z', 'X']))
}

/// When a process was started, in ticks since the machine was (field 22).
#[must_use]
pub fn start_of(pid: Pid) -> Option<u64> {
    stat(pid)?.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_process_has_a_start_until_it_has_ended() {
        assert!(!has_ended(std::process::id()));
        assert!(start_of(rustix::process::getpid()).unwrap() > 0);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        child.wait().unwrap();
        assert!(has_ended(child.id()));
        assert_eq!(start_of(pid), None);
    }
}
