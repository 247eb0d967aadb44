//! What happens inside of a container that was restored, before anybody talks to it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::Start;
use crate::error::{Context, Error, Result};
use crate::ready::{Container, of_code};
use crate::{generation, instance, interrupt};

impl Start<'_> {
    /// Writes the variables of --env-file to their file inside of the file system `root`.
    pub(super) fn write_environment(&self, root: &Path) -> Result<()> {
        let lines = self.args.environment()?;
        if lines.is_empty() {
            return Ok(());
        }
        instance::write_inside(root, "environment", &(lines.join("\n") + "\n"))
    }

    /// Tells the application that it was restored; it may be marked in the file system `marked`.
    pub(super) fn wake(
        &self,
        runtime: &dyn Container,
        pid: u32,
        number: u64,
        marked: Option<&Path>,
    ) -> Result<()> {
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        match marked.filter(|_| generation::is_marked(&root, number)) {
            Some(marked) => generation::announce(marked, number)?,
            None => {
                // /run is a file system of its own, which came with the images.
                generation::mark(&root, number)?;
                self.write_environment(&root)?;
            }
        }
        let Some(after) = &self.args.after_restore else { return Ok(()) };
        if let Some(signal) = signal_of(after) {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let pid = pid.ok_or_else(|| Error::new("the container has no process"))?;
            return kill_process(pid, signal).context(|| "--after-restore");
        }
        let mut call = runtime.exec(self.id, &["/bin/sh", "-c", after]);
        let timeout = Duration::from_secs(self.args.timeout);
        let call = call.stdin(Stdio::null()).stdout(Stdio::null());
        let status = interrupt::status(call, Instant::now() + timeout);
        let said = match status.context(|| "--after-restore")? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => of_code(status.code()),
            None => format!("it had not ended after {timeout:?} (--timeout)"),
        };
        Err(Error::new(format!("--after-restore {after:?}: {said}")))
    }
}

/// The signals that --after-restore sends, by their names.
const SIGNALS: [(&str, Signal); 8] = [
    ("HUP", Signal::HUP),
    ("INT", Signal::INT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("CONT", Signal::CONT),
    ("TERM", Signal::TERM),
    ("WINCH", Signal::WINCH),
    ("ALRM", Signal::ALARM),
];

/// The signal of this name.
fn signal_of(name: &str) -> Option<Signal> {
    let name = name.strip_prefix("SIG").unwrap_or(name);
    SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, signal)| *signal)
}

/// Fails for a word that is to be a signal and is none, rather than having it run as a command.
pub(super) fn check_signal(after: &str) -> Result<()> {
    let is_name = after.starts_with("SIG")
        && after.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit());
    if !is_name || signal_of(after).is_some() {
        return Ok(());
    }
    let known = SIGNALS.map(|(name, _)| name).join(", ");
    Err(Error::new(format!("--after-restore {after}: there is no such signal, only {known}")))
}
