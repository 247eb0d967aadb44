//! runc, with this program as its engine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use torpor_worker::{logs, runc};

use crate::error::{Context, Error, Result};
use crate::places;
use crate::process::{has_ended, start_of};
use crate::ready::Container;

/// What the engine's log says before the time of CLOCK_MONOTONIC from which its own times count.
const BEGAN: &str = "CLOCK_MONOTONIC was ";
/// What it says when it has let the tasks go.
const RAN: &str = "The tasks run";
/// How long is waited for a process that was killed; runc waits as long.
const ENDS: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The runtime that containers belong to.
#[derive(Debug, Args)]
pub struct Runtime {
    /// Where runc keeps the state of its containers (runc --root)
    #[arg(long = "runc-root", value_name = "DIR")]
    pub root: Option<PathBuf>,
}

/// The runtime.
#[derive(Debug, Clone)]
pub struct Runc {
    /// Where it keeps the state of its containers, if not where it usually does.
    root: Option<PathBuf>,
    /// PATH, with this program first as `criu`.
    path: OsString,
}

/// Where the streams of a container go.
#[derive(Debug)]
pub struct Streams {
    /// Its standard output.
    pub out: Stdio,
    /// Its standard error.
    pub err: Stdio,
}

impl Streams {
    /// To nowhere.
    #[must_use]
    pub fn null() -> Self {
        Self { out: Stdio::null(), err: Stdio::null() }
    }
}

impl Runc {
    /// runc, which keeps its state in `root`.
    ///
    /// # Errors
    /// If there is no place for the name `criu`.
    pub fn new(root: Option<&Path>) -> Result<Self> {
        Ok(Self { root: root.map(Path::to_owned), path: places::path()? })
    }

    /// A call of runc.
    fn call(&self, action: &str) -> Command {
        self.call_with(action, None)
    }

    /// A call of runc, which says what goes wrong in a file.
    fn call_with(&self, action: &str, log: Option<&Path>) -> Command {
        let mut command = Command::new("runc");
        if let Some(log) = log {
            command.arg("--log").arg(log);
        }
        if let Some(root) = &self.root {
            command.arg("--root").arg(root);
        }
        command.arg(action).env("PATH", &self.path).stdin(Stdio::null());
        command
    }

    /// Starts a container, which is left behind.
    ///
    /// # Errors
    /// If runc cannot be started or fails: the last line of its log.
    pub fn run(&self, bundle: &Path, id: &str, streams: Streams) -> Result<()> {
        let log = bundle.join("run-runc.log");
        let mut call = self.call_with("run", Some(&log));
        call.arg("--bundle").arg(bundle).args(["--detach", id]);
        left_behind(call, &log, streams, || {}).context(|| "runc run")
    }

    /// Restores a container, which is left behind, and does `meanwhile` as soon as runc is started, which needs a while
    /// before it calls the engine. `options` are lines of the engine's configuration.
    ///
    /// # Errors
    /// If the configuration cannot be written; what `meanwhile` says; if the restore fails: the first error of the
    /// engine's log, or what runc says.
    pub fn restore(
        &self,
        restore: &Restore<'_>,
        streams: Streams,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let log = restore.work.join("restore-runc.log");
        let mut call = self.call_with("restore", Some(&log));
        call.arg("--bundle").arg(restore.bundle).arg("--image-path").arg(restore.images);
        call.arg("--work-path").arg(restore.work).args(["--detach", "--file-locks"]);
        // Which they are the dump has decided: those between tasks of the container.
        call.args(["--ext-unix-sk", "--manage-cgroups-mode", "soft", "--tcp-established"]);
        if restore.lazy {
            call.arg("--lazy-pages");
        }
        call.arg(restore.id);
        set_options(&mut call, restore.work, restore.options)?;
        let _ = fs::remove_file(restore.work.join("restore.log"));
        let mut other = Ok(());
        let restored = left_behind(call, &log, streams, || other = meanwhile());
        other?;
        restored.map_err(|error| match logs::first_error(&restore.work.join("restore.log")) {
            Some(reason) => Error::new(reason),
            None => error.during("runc restore"),
        })
    }

    /// Puts a container to sleep.
    ///
    /// # Errors
    /// If the configuration cannot be written; if the dump fails: the first error of the engine's
    /// log, or what runc says. The container goes on then.
    pub fn checkpoint(
        &self,
        id: &str,
        images: &Path,
        work: &Path,
        leave_running: bool,
        options: &str,
    ) -> Result<()> {
        let mut call = self.call("checkpoint");
        call.arg("--image-path").arg(images).arg("--work-path").arg(work);
        call.args(["--file-locks", "--ext-unix-sk", "--manage-cgroups-mode", "soft"]);
        if leave_running {
            call.arg("--leave-running");
        }
        call.arg(id);
        set_options(&mut call, work, options)?;
        finished(&mut call).map(drop).map_err(|error| {
            match logs::first_error(&work.join("dump.log")) {
                Some(reason) => Error::new(reason),
                None => error.during("runc checkpoint"),
            }
        })
    }

    /// Whether there is a container, which runc keeps a directory for. To start runc takes longer than
    /// a container that is born by a template.
    pub fn knows(&self, id: &str) -> bool {
        self.dir_of(id).exists()
    }

    /// Where runc has its state.
    fn home(&self) -> &Path {
        self.root.as_deref().unwrap_or(Path::new(runc::ROOT))
    }

    /// Where runc keeps the state of a container.
    fn dir_of(&self, id: &str) -> PathBuf {
        self.home().join(id)
    }

    /// What runc knows of a container, if there is one.
    ///
    /// # Errors
    /// If its answer cannot be read.
    pub fn state(&self, id: &str) -> Result<Option<Value>> {
        let output = self.call("state").arg(id).output().context(|| "starting runc")?;
        if !output.status.success() {
            return Ok(None);
        }
        serde_json::from_slice(&output.stdout).context(|| "what runc state says").map(Some)
    }

    /// Ends a container, if it is there, and forgets it.
    pub fn delete(&self, id: &str) {
        if !self.knows(id) {
            return;
        }
        self.kill(id);
        runc::release(self.home(), id);
        // It may be gone by itself.
        let _ = self.call("delete").args(["--force", id]).output();
    }

    /// Ends the first process of a container, and waits for that: runc, which does it as well, looks only
    /// every 100 ms whether it has ended, and whoever waits for a cold start waits for that.
    fn kill(&self, id: &str) {
        let Some((pid, start)) = self.noted(id) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // The number may be that of another process by now.
        if start_of(pid) != Some(start) {
            return;
        }
        let _ = pidfd_send_signal(&process, Signal::KILL);
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&ENDS));
    }

    /// The first process of a container, as runc has noted it, and when that was started.
    fn noted(&self, id: &str) -> Option<(Pid, u64)> {
        let state = fs::read(self.dir_of(id).join("state.json")).ok()?;
        let state: Value = serde_json::from_slice(&state).ok()?;
        let pid = i32::try_from(state["init_process_pid"].as_i64()?).ok()?;
        Some((Pid::from_raw(pid)?, state["init_process_start"].as_u64()?))
    }

    /// The first process of a container that runs, if that can be told without runc: whoever waits for an answer would
    /// wait for another program to start.
    fn at_work(&self, id: &str) -> Option<u32> {
        let (pid, start) = self.noted(id)?;
        // The process of one that is created waits there for its start.
        let is_created = self.dir_of(id).join("exec.fifo").exists();
        let number = u32::try_from(pid.as_raw_nonzero().get()).ok()?;
        (!is_created && start_of(pid) == Some(start) && !has_ended(number)).then_some(number)
    }
}

/// The first process of a container of which runc says that it runs, and is not paused.
///
/// # Errors
/// If runc knows no such container, or says that it has stopped or is paused.
pub(crate) fn running(id: &str, state: Option<&Value>) -> Result<u32> {
    let running = state.filter(|state| state["status"] == "running");
    let pid = running.and_then(|state| u32::try_from(state["pid"].as_u64()?).ok());
    pid.ok_or_else(|| Error::new(format!("the container {id} does not run")))
}

impl Container for Runc {
    fn pid(&self, id: &str) -> Result<u32> {
        self.at_work(id).map_or_else(|| running(id, self.state(id)?.as_ref()), Ok)
    }

    fn exec(&self, id: &str, words: &[&str]) -> Command {
        let mut call = self.call("exec");
        call.arg(id).args(words);
        call
    }
}

/// What is to be restored.
#[derive(Debug)]
pub struct Restore<'a> {
    /// The bundle.
    pub bundle: &'a Path,
    /// The name of the container.
    pub id: &'a str,
    /// Its images.
    pub images: &'a Path,
    /// Where the engine works and writes its log.
    pub work: &'a Path,
    /// Whether memory comes when it is touched.
    pub lazy: bool,
    /// Lines of the engine's configuration.
    pub options: &'a str,
}

/// Has the engine read options that runc has no words for.
fn set_options(call: &mut Command, work: &Path, options: &str) -> Result<()> {
    let file = work.join("engine.conf");
    fs::write(&file, options).context(|| file.display().to_string())?;
    call.env("CRIU_CONFIG_FILE", file);
    Ok(())
}

/// Carries a call out that leaves a container behind: it has the streams. Does `meanwhile` as soon as it is started.
fn left_behind(
    mut call: Command,
    log: &Path,
    streams: Streams,
    meanwhile: impl FnOnce(),
) -> Result<()> {
    let what = || "starting runc";
    let mut runc = call.stdout(streams.out).stderr(streams.err).spawn().context(what)?;
    meanwhile();
    let status = runc.wait().context(what)?;
    if status.success() {
        return Ok(());
    }
    let said = logs::text_of(log).unwrap_or_default();
    Err(Error::new(logs::last_error(&said).unwrap_or_else(|| status.to_string())))
}

/// Carries a call out and gives what it printed.
fn finished(call: &mut Command) -> Result<Output> {
    let output = call.output().context(|| "starting runc")?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(logs::last_error(&said).unwrap_or_else(|| said.trim().to_owned())))
}

/// When the tasks ran that an engine has restored, whose log this is, in nanoseconds of CLOCK_MONOTONIC. They run for a while
/// already when a runtime says so.
pub(crate) fn ran_at(log: &Path) -> Option<u64> {
    let text = logs::text_of(log)?;
    let began = text.lines().find_map(|line| line.split_once(BEGAN)?.1.strip_suffix(" s"))?;
    let ran = text
        .lines()
        .find_map(|line| line.strip_suffix(RAN)?.strip_prefix('(')?.strip_suffix(") "))?;
    nanoseconds(began)?.checked_add(nanoseconds(ran)?)
}

/// Seconds with a point as nanoseconds.
fn nanoseconds(seconds: &str) -> Option<u64> {
    let (whole, part) = seconds.split_once('.')?;
    let part = format!("{part:0<9}");
    let part = part.parse::<u64>().ok().filter(|_| part.len() == 9)?;
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn what_runc_has_noted_is_believed_of_a_process_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let runc = Runc { root: Some(dir.path().to_owned()), path: OsString::new() };
        let own = rustix::process::getpid();
        let (pid, start) = (own.as_raw_nonzero().get(), start_of(own).unwrap());
        for (name, start) in [("here", start), ("created", start), ("another", start + 1)] {
            fs::create_dir(dir.path().join(name)).unwrap();
            let state = json!({ "init_process_pid": pid, "init_process_start": start });
            fs::write(dir.path().join(name).join("state.json"), state.to_string()).unwrap();
        }
        fs::write(dir.path().join("created/exec.fifo"), "").unwrap();
        assert_eq!(runc.at_work("here"), Some(std::process::id()));
        for name in ["created", "another", "absent"] {
            assert_eq!(runc.at_work(name), None, "{name}");
        }
    }

    #[test]
    fn the_engine_says_when_the_tasks_ran() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("restore.log");
        let ran = |text: &str| {
            fs::write(&log, text).unwrap();
            ran_at(&log)
        };
        let began = "(00.000301) At (00.000000) CLOCK_MONOTONIC was 1000.010000500 s\n";
        assert_eq!(ran(&format!("{began}(12.034567) The tasks run\n")), Some(1_012_044_567_500));
        for text in ["(00.034567) The tasks run\n", began, "", "(00.034567) The tasks run twice\n"]
        {
            assert_eq!(ran(&format!("{text}(00.040000) more\n")), None, "{text}");
        }
        assert_eq!(ran(&format!("{began}(00.0345678901) The tasks run\n")), None);
        assert_eq!(ran_at(&dir.path().join("absent")), None);
    }

    #[test]
    fn what_is_paused_does_not_run() {
        let state = |status: &str| json!({ "status": status, "pid": 7 });
        assert_eq!(running("one", Some(&state("running"))).unwrap(), 7);
        for state in [Some(state("paused")), Some(state("stopped")), None] {
            assert!(running("one", state.as_ref()).is_err(), "{state:?}");
        }
    }
}
