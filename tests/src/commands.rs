//! Runs commands for a case: each with a time limit, its output kept, its line noted.

use crate::wait::wait_for;
use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Runs a command in the case's directory, with what it prints in `NAME.out`.
///
/// # Errors
/// It cannot be started, or does not end within `limit`; it is killed then.
pub fn run(dir: &Path, name: &str, command: &mut Command, limit: Duration) -> Result<ExitStatus> {
    let mut log = OpenOptions::new().create(true).append(true).open(dir.join("commands"))?;
    writeln!(log, "{command:?}")?;
    let out = File::create(dir.join(format!("{name}.out")))?;
    command.current_dir(dir).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    let ended = wait_for(name, limit, || Ok(child.try_wait()?));
    if ended.is_err() {
        child.kill()?;
        child.wait()?;
    }
    ended
}
