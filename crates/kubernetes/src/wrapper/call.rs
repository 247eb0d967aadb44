//! Calls of runc that must not take for ever.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::words::Words;
use crate::error::{Context, Error, Result};

/// How long runc may take for what takes it milliseconds.
const SHORT: Duration = Duration::from_secs(10);
/// How often it is looked whether a call has ended.
const STEP: Duration = Duration::from_millis(2);

/// A call of runc, with the options that this one was given: without the log, which is the shim's.
pub fn command(words: &Words, action: &str) -> Command {
    let mut command = Command::new(super::runc());
    command.arg("--root").arg(words.root());
    if words.global.iter().any(|word| word == "--systemd-cgroup") {
        command.arg("--systemd-cgroup");
    }
    command.arg(action);
    command
}

/// Has runc do something with a container.
///
/// # Errors
/// If runc fails, or takes too long.
pub fn runc(words: &Words, action: &str, id: &str) -> Result<()> {
    let mut call = command(words, action);
    call.arg(id).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    within(&mut call, SHORT)
}

/// What runc says that a container does; nothing if it knows none.
pub fn status(words: &Words, id: &str) -> String {
    let mut call = command(words, "state");
    let output = call.arg(id).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let state = output.ok().and_then(|output| serde_json::from_slice(&output.stdout).ok());
    let state: serde_json::Value = state.unwrap_or_default();
    state["status"].as_str().unwrap_or_default().to_owned()
}

/// Carries a call out, and ends it with all that it has started if it takes longer.
///
/// # Errors
/// If the program cannot be started, fails, or takes longer.
pub fn within(call: &mut Command, limit: Duration) -> Result<()> {
    let name = || {
        let words: Vec<&OsStr> = call.get_args().filter(|word| !word.is_empty()).collect();
        words.get(2).map_or_else(String::new, |word| word.display().to_string())
    };
    let name = format!("runc {}", name());
    let mut child = call.process_group(0).spawn().context(|| name.clone())?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait().context(|| name.clone())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(Error::new(format!("{name}: {status}"))),
            None if Instant::now() < until => std::thread::sleep(STEP),
            None => {
                stop(&mut child);
                return Err(Error::new(format!("{name} takes more than {} s", limit.as_secs())));
            }
        }
    }
}

fn stop(child: &mut Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let _ = child.wait();
}
