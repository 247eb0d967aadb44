//! Commands with all that they start, which somebody may end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::cancel::Cancel;
use crate::engine::wait_readable;
use crate::error::{Context, Error, Result};

/// A command that runs, in a process group of its own. All of that is ended if nobody waits for the end of the command.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    /// Whether somebody has waited: the number may be that of another group then.
    is_over: bool,
    ended: OwnedFd,
    /// What it is, for errors.
    name: String,
}

impl Group {
    /// Starts it. Ctrl-C is for this process to deal with.
    ///
    /// # Errors
    /// If there is no such program, or the kernel starts no process.
    pub(crate) fn start(command: &mut Command, name: &str) -> Result<Self> {
        let mut child = command.process_group(0).spawn().context(|| format!("run {name}"))?;
        let name = name.to_owned();
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(ended) => Ok(Self { child, is_over: false, ended, name }),
            Err(error) => {
                let _ = (child.kill(), child.wait());
                Err(error).context(|| format!("wait for {name}"))
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `ECHILD` if this process ignores the end of its children.
    pub(crate) fn finish(mut self) -> Result<ExitStatus> {
        let status = self.child.wait().context(|| format!("wait for {}", self.name))?;
        self.is_over = true;
        Ok(status)
    }

    /// Waits for its end, or for somebody who cancels.
    ///
    /// # Errors
    /// If somebody does; as [`Group::finish`].
    pub(crate) fn finish_unless(self, cancel: &Cancel) -> Result<ExitStatus> {
        while wait_readable(&[self.as_fd(), cancel.as_fd()], None)? == [false, true] {
            if cancel.is_due() {
                return Err(Error::Cancelled);
            }
        }
        self.finish()
    }
}

impl AsFd for Group {
    /// Readable when the command has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.is_over {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    const STEP: Duration = Duration::from_millis(1);

    fn shell(script: &str) -> Group {
        Group::start(Command::new("sh").args(["-c", script]), "sh").unwrap()
    }

    #[test]
    fn who_cancels_ends_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let group = shell(&format!(
            "sleep 100000 & echo $! >{0}.new; mv {0}.new {0}; wait",
            file.display()
        ));
        let pid = loop {
            if let Ok(text) = std::fs::read_to_string(&file) {
                break text.trim().parse::<i32>().unwrap();
            }
            sleep(STEP);
        };
        let error = group.finish_unless(&Cancel::due().unwrap()).unwrap_err();
        assert!(matches!(error, Error::Cancelled));
        let ends = || torpor_kernel::proc::stat(pid).map_or(true, |stat| stat.has_ended());
        while !ends() {
            sleep(STEP);
        }
        assert_eq!(shell("exit 3").finish().unwrap().code(), Some(3));
        assert_eq!(shell("exit 4").finish_unless(&Cancel::new().unwrap()).unwrap().code(), Some(4));
    }
}
