//! The process that is dumped and restored.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::process::gone;

/// A process group that is led by a session leader of its own.
pub struct Subject {
    pid: Pid,
}

impl Subject {
    /// Starts `target KIND COUNT` and waits until it is ready.
    pub fn start(dir: &Path, kind: &str, count: u64) -> Result<Self> {
        let mut child = Command::new("setsid")
            .current_dir(dir)
            .arg(dir.join("target"))
            .args([kind, &count.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut said = String::new();
        child.stdout.take().context("no output")?.read_to_string(&mut said)?;
        ensure!(said == "ready\n", "the target says {said:?}");
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no pid")?;
        Ok(Subject { pid })
    }

    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Reaps what a dump has killed, so that the pids are free.
    pub fn gone(&self) -> Result<()> {
        gone(self.pid().unsigned_abs())
    }

    /// Ends it with all its children.
    pub fn end(self) -> Result<()> {
        kill_process_group(self.pid, Signal::KILL)?;
        self.gone()
    }
}
