//! A daemon with a directory of its own.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

/// How often it is asked whether something has happened, at first; later at each hundredth of what it took so far.
const PAUSE: Duration = Duration::from_millis(20);

/// It is asked at least so often.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A job that has not come to where it is waited for after this time has failed.
const PATIENCE: Duration = Duration::from_secs(7200);

/// A daemon. It and its jobs end when it is dropped.
#[derive(Debug)]
pub struct Daemon {
    torpor: PathBuf,
    dir: TempDir,
    child: Child,
}

impl Daemon {
    /// Starts one with this configuration.
    pub fn start(torpor: &std::path::Path, config: &Value) -> Result<Self> {
        Self::start_by(torpor, Command::new(torpor), config, &[])
    }

    /// Starts one by a command, with more options.
    pub fn start_by(
        torpor: &std::path::Path,
        mut command: Command,
        config: &Value,
        options: &[String],
    ) -> Result<Self> {
        let kept = tempfile::Builder::new().prefix("torpor-bench-queue-").tempdir()?;
        let dir = kept.path();
        std::fs::write(dir.join("config.json"), config.to_string())?;
        let child = command
            .args(["queue", "serve", "--data"])
            .arg(dir.join("data"))
            .arg("--config")
            .arg(dir.join("config.json"))
            .args(["--listen", &format!("unix:{}", dir.join("socket").display())])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("log"))?)
            .spawn()
            .with_context(|| torpor.display().to_string())?;
        let mut daemon = Self { torpor: torpor.to_owned(), dir: kept, child };
        while !daemon.queue(&["list"]).output()?.status.success() {
            ensure!(daemon.child.try_wait()?.is_none(), "the daemon has ended");
            sleep(PAUSE);
        }
        Ok(daemon)
    }

    /// `torpor queue` with these words.
    pub fn queue(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.torpor);
        let address = format!("unix:{}", self.dir.path().join("socket").display());
        command.arg("queue").args(words).env("TORPOR_QUEUE", address).stdin(Stdio::null());
        command
    }

    /// What `torpor queue` prints.
    pub fn ok(&self, words: &[&str]) -> Result<String> {
        let Output { status, stdout, stderr } = self.queue(words).output()?;
        if !status.success() {
            bail!("{}", String::from_utf8_lossy(&stderr).trim().to_owned());
        }
        Ok(String::from_utf8(stdout)?)
    }

    /// Submits a job; returns its number.
    pub fn submit(&self, options: &[&str], command: &[String]) -> Result<String> {
        let command = command.iter().map(String::as_str);
        let words = ["submit"].into_iter().chain(options.iter().copied()).chain(["--"]);
        Ok(self.ok(&words.chain(command).collect::<Vec<_>>())?.trim().to_owned())
    }

    /// A job, with what has happened to it.
    pub fn show(&self, id: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.ok(&["show", "--json", id])?)?)
    }

    /// Waits until a job is so; an end that is not waited for is an error.
    pub fn wait(&self, id: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let begun = Instant::now();
        loop {
            let job = self.show(id)?;
            if is(&job) {
                return Ok(job);
            }
            let over = !job["exit"].is_null() || begun.elapsed() > PATIENCE;
            ensure!(!over, "job {id} is {}: {}", job["state"], job["note"]);
            sleep((begun.elapsed() / 100).clamp(PAUSE, LONGEST_PAUSE));
        }
    }

    /// Waits until a job has run for so many milliseconds, or is over.
    pub fn wait_until_it_ran(&self, id: &str, moment: f64) -> Result<Value> {
        loop {
            let job = self.show(id)?;
            // It cannot be there before that time is over: nobody has to ask until then.
            let missing = moment - job["ran_ms"].as_f64().unwrap_or(0.0);
            if !job["exit"].is_null() || missing <= 0.0 {
                return Ok(job);
            }
            sleep(Duration::from_secs_f64(missing / 1000.0).clamp(PAUSE, LONGEST_PAUSE));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let list = self.ok(&["list", "--json"]).unwrap_or_default();
        let jobs: Value = serde_json::from_str(&list).unwrap_or_default();
        let left = jobs.as_array().into_iter().flatten().filter(|job| job["exit"].is_null());
        for id in left.filter_map(|job| job["id"].as_u64()) {
            let id = id.to_string();
            let _ = self.ok(&["cancel", &id]);
            let _ = self.wait(&id, |job| !job["exit"].is_null());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
