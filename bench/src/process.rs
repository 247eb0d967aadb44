//! The programs that are measured: how they are started, waited for, and ended.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{WaitOptions, wait};

/// How long a program may take to do what it is asked.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that ends when it is dropped.
pub struct Running(Child);

impl Running {
    /// Starts a program with nothing to read and nobody who listens.
    pub fn start(command: &mut Command) -> Result<Self> {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Running(quiet.spawn()?))
    }

    /// Starts a program with nothing to read, which says all to `log`.
    pub fn telling(command: &mut Command, log: File) -> Result<Self> {
        let both = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Running(both.spawn()?))
    }

    /// Starts a program, and waits for the first line that it says.
    pub fn heard(command: &mut Command) -> Result<(Self, String)> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let out = child.stdout.take().context("no output")?;
        let running = Running(child);
        let line = BufReader::new(out).lines().next().context("it says nothing")?;
        Ok((running, line?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it ends by itself.
    pub fn end(mut self) -> Result<()> {
        let status = self.0.wait()?;
        ensure!(status.success(), "a program in the background: {status}");
        Ok(())
    }
}

impl Drop for Running {
    /// What has been restored under its pid ends in its stead.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something is done.
pub fn until(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let limit = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < limit, "waited too long for {what}");
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Reaps what a dump has killed, so that the pids are free.
pub fn gone(pid: u32) -> Result<()> {
    let reap = || while wait(WaitOptions::NOHANG).is_ok_and(|w| w.is_some()) {};
    until("the end of a process", || {
        reap();
        !Path::new(&format!("/proc/{pid}")).exists()
    })?;
    reap();
    Ok(())
}
