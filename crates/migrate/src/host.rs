//! What one host tells the other of itself, so that a mismatch is found before anything is
//! stopped.

use std::fs;

use serde::{Deserialize, Serialize};
use torpor_kernel::processor;

use crate::error::{Error, Result};

/// A host, as far as it matters to what comes from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Host {
    /// Its name.
    pub name: String,
    /// The kernel's version.
    pub kernel: String,
    /// The architecture.
    pub machine: String,
    /// What this boot of it is called.
    pub boot: String,
    /// The pid namespace that commands are carried out in.
    pub pids: u64,
    /// What the processor can do.
    pub cpu: Vec<String>,
}

impl Host {
    /// This one.
    #[must_use]
    pub(crate) fn this() -> Self {
        let system = rustix::system::uname();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Self {
            name: text(system.nodename()),
            kernel: text(system.release()),
            machine: text(system.machine()),
            boot: boot(),
            pids: pid_namespace("self").unwrap_or(0),
            cpu: processor::instructions().into_iter().collect(),
        }
    }

    /// Refuses to go from `self` to `there` where programs would miss something.
    ///
    /// # Errors
    /// If `there` is of another architecture, or its processor lacks instructions: they are named.
    pub(crate) fn can_move_to(&self, there: &Self) -> Result<()> {
        if self.machine != there.machine {
            return Err(Error::refused(format!(
                "{} is a machine of {}, and {} one of {}",
                self.name, self.machine, there.name, there.machine
            )));
        }
        let missing = |word: &&String| !there.cpu.contains(word);
        let missing: Vec<&str> = self.cpu.iter().filter(missing).map(String::as_str).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::refused_with(
            format!(
                "the processor of {} has not what that of {} has: {}",
                there.name,
                self.name,
                missing.join(" ")
            ),
            "programs may have looked for it when they started; --ignore-cpu moves them all the same",
        ))
    }
}

/// What this boot is called.
#[must_use]
pub(crate) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The pid namespace of a process, by its number (or `self`).
#[must_use]
pub(crate) fn pid_namespace(pid: &str) -> Option<u64> {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).ok()?;
    link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_processor_that_can_less_is_named() {
        let here = Host::this();
        here.can_move_to(&here).unwrap();
        let there = Host { name: "old".into(), cpu: Vec::new(), ..here.clone() };
        let text = here.can_move_to(&there).unwrap_err().to_string();
        assert!(text.contains("the processor of old") && text.contains("sse2"), "{text}");
        there.can_move_to(&here).unwrap();
        let other = Host { machine: "riscv64".into(), ..here.clone() };
        assert!(here.can_move_to(&other).is_err());
    }
}
