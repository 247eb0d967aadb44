//! Calls of runc that must not take for ever.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use torpor_kernel::proc;

use super::words::Words;
use crate::error::{Context, Error, Result};

/// How long runc may take for what takes it milliseconds.
pub(super) const SHORT: CallLimits =
    CallLimits { idle: Duration::from_secs(10), whole: Duration::from_secs(60) };
/// How often it is looked whether a call has ended.
const STEP: Duration = Duration::from_millis(2);
/// How often it is looked whether it does anything.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is looked whether it is worth it.
const WEIGH: Duration = Duration::from_millis(100);

/// How long a call may take. On a busy machine it takes long, and must not be given up for that.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallLimits {
    /// How long it may do nothing.
    pub idle: Duration,
    /// How long it may take in all.
    pub whole: Duration,
}

/// A call of runc, with the options that this one was given: without the log, which is the shim's.
pub(super) fn command(words: &Words, action: &str) -> Command {
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
pub(super) fn runc(words: &Words, action: &str, id: &str) -> Result<()> {
    let mut call = command(words, action);
    call.arg(id).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    within(&mut call, SHORT)
}

/// What runc says that a container does; nothing if it knows none.
pub(super) fn status(words: &Words, id: &str) -> String {
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
pub(super) fn within(call: &mut Command, limits: CallLimits) -> Result<()> {
    within_while(call, limits, &|_| true)
}

/// The same, and ends it as soon as it is not `worth` it any more after so much time, which is looked at now and then.
///
/// # Errors
/// If the program cannot be started, fails, takes longer, or is not worth it.
pub(super) fn within_while(
    call: &mut Command,
    limits: CallLimits,
    worth: &dyn Fn(Duration) -> bool,
) -> Result<()> {
    let name = || {
        let words: Vec<&OsStr> = call.get_args().filter(|word| !word.is_empty()).collect();
        words.get(2).map_or_else(String::new, |word| word.display().to_string())
    };
    let name = format!("runc {}", name());
    let mut child = call.process_group(0).spawn().context(|| name.clone())?;
    let began = Instant::now();
    let mut work = Work::new(&child, began);
    let mut weighed = began;
    loop {
        match child.try_wait().context(|| name.clone())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(Error::new(format!("{name}: {status}"))),
            None => {}
        }
        let (idle, whole) = (work.idle(), began.elapsed());
        let mut is_worth = true;
        if weighed.elapsed() >= WEIGH {
            (weighed, is_worth) = (Instant::now(), worth(whole));
        }
        if is_worth && idle < limits.idle && whole < limits.whole {
            std::thread::sleep(STEP);
            continue;
        }
        stop(&mut child);
        let why = match (is_worth, whole < limits.whole) {
            (false, _) => "is too slow".to_owned(),
            (true, true) => format!("has done nothing for {} s", limits.idle.as_secs()),
            (true, false) => format!("takes more than {} s", limits.whole.as_secs()),
        };
        return Err(Error::new(format!("{name} {why}")));
    }
}

/// The work of a call and of what it has started.
struct Work {
    group: i32,
    /// What was seen last of what it has used of processors, and when that was first seen.
    used: u64,
    since: Instant,
    looked: Instant,
}

impl Work {
    fn new(child: &Child, now: Instant) -> Self {
        Self { group: child.id().cast_signed(), used: 0, since: now, looked: now }
    }

    /// How long nothing has been done.
    fn idle(&mut self) -> Duration {
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            let (used, ready) = self.look();
            if ready || used != self.used {
                (self.used, self.since) = (used, self.looked);
            }
        }
        self.since.elapsed()
    }

    /// What its processes have used so far, and whether one of them waits for a processor or a disk: that may take
    /// long on a busy machine.
    fn look(&self) -> (u64, bool) {
        // What has ended does nothing.
        let members = proc::processes().filter_map(|pid| proc::stat(pid).ok());
        let ours = members.filter(|stat| stat.pgid == self.group);
        ours.fold((0, false), |(used, ready), stat| {
            (used + stat.used, ready || matches!(stat.state, 'R' | 'D'))
        })
    }
}

/// Ends what runc does with a container in calls of a wrapper that was killed.
pub(super) fn stop_all(action: &str, id: &str) {
    let does_it = |pid: &i32| {
        let line = proc::bytes(*pid, "cmdline").unwrap_or_default();
        let has = |word: &str| line.split(|byte| *byte == 0).any(|one| one == word.as_bytes());
        has(action) && has(id)
    };
    // Each of these calls leads a group of its own.
    for pid in proc::processes().filter(does_it).filter_map(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

fn stop(child: &mut Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, idle: u64, whole: u64) -> String {
        let limits =
            CallLimits { idle: Duration::from_secs(idle), whole: Duration::from_secs(whole) };
        let mut call = Command::new("sh");
        call.args(["-c", script]);
        within(&mut call, limits).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_call_may_take_long_as_long_as_it_does_something() {
        assert_eq!(run("exit 0", 600, 600), "");
        assert!(run("exit 3", 600, 600).ends_with("exit status: 3"));
        assert!(run("sleep 1000", 2, 600).ends_with("has done nothing for 2 s"));
        assert!(run("while :; do :; done", 2, 5).ends_with("takes more than 5 s"));
    }

    #[test]
    fn a_call_that_is_not_worth_it_any_more_is_ended() {
        let limits = CallLimits { idle: Duration::from_secs(600), whole: Duration::from_secs(600) };
        let mut call = Command::new("sh");
        call.args(["-c", "sleep 1000"]);
        let error = within_while(&mut call, limits, &|_| false).unwrap_err();
        assert!(error.to_string().ends_with("is too slow"), "{error}");
    }
}
