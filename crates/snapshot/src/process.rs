//! What the kernel says of a process.

use rustix::process::Pid;
use torpor_kernel::proc::stat;

/// Whether a process has ended.
#[must_use]
pub fn has_ended(pid: u32) -> bool {
    i32::try_from(pid).map_or(true, |pid| stat(pid).map_or(true, |stat| stat.has_ended()))
}

/// When a process was started, in ticks since the machine was.
#[must_use]
pub fn start_of(pid: Pid) -> Option<u64> {
    Some(stat(pid.as_raw_nonzero().get()).ok()?.start_time)
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
