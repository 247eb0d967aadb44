//! A case is a program in a mode. It runs in a process of its own that is process 1 of a new pid
//! namespace, with new mount, network and IPC namespaces: nothing collides with other cases, no
//! process id is taken by somebody else between dump and restore, orphans are reaped at once, and
//! killing that one process ends everything that the case has started.

use crate::build;
use crate::program::{Mode, Program};
use crate::wait::wait_for;
use anyhow::{Context, Result};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long a case may take before it is killed.
const LIMIT: Duration = Duration::from_secs(300);

/// A program in a mode.
#[derive(Clone, Debug)]
pub struct Case {
    /// The program.
    pub program: Program,
    /// The mode.
    pub mode: Mode,
}

/// What came out of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is as it should be.
    Pass,
    /// The dump was refused as it should be, and the task went on.
    Refused(String),
    /// The machine lacks what the program needs.
    Skip(String),
    /// Something is wrong.
    Fail(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            Self::Refused(why) => write!(f, "refused: {why}"),
            Self::Skip(why) => write!(f, "skip: {why}"),
            Self::Fail(why) => write!(f, "fail: {why}"),
        }
    }
}

impl Outcome {
    /// Reads what [`fmt::Display`] wrote.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let (word, why) = text.split_once(": ").unwrap_or((text.trim(), ""));
        let why = why.trim_end().to_owned();
        match word {
            "pass" => Self::Pass,
            "refused" => Self::Refused(why),
            "skip" => Self::Skip(why),
            "fail" => Self::Fail(why),
            _ => Self::Fail(format!("no verdict but: {text}")),
        }
    }
}

impl Case {
    /// All cases of these programs.
    #[must_use]
    pub fn all(programs: &[Program]) -> Vec<Self> {
        let case = |program: &Program, mode| Self { program: program.clone(), mode };
        programs
            .iter()
            .flat_map(|program| {
                let modes = std::iter::once(Mode::None).chain(program.modes.iter().copied());
                modes.map(move |mode| case(program, mode))
            })
            .collect()
    }

    /// The name, as the test's and the status file's.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}::{}", self.program.name, self.mode)
    }

    /// The case's directory.
    ///
    /// # Errors
    /// See [`build::area`].
    pub fn dir(&self) -> Result<PathBuf> {
        Ok(build::area()?.join("cases").join(&self.program.name).join(self.mode.to_string()))
    }

    /// The command that runs this case again.
    #[must_use]
    pub fn replay(&self) -> String {
        format!(
            "cargo run -q -p torpor-tests --bin zoo -- {} {} --keep",
            self.program.name, self.mode
        )
    }

    /// Runs the case; its directory stays if it fails or is to be kept.
    ///
    /// # Errors
    /// The harness itself could not work.
    pub fn run(&self, zoo: &Path, keep: bool) -> Result<Outcome> {
        let dir = self.dir()?;
        let mode = self.mode.to_string();
        let outcome = isolated(zoo, &dir, &["--inside", &self.program.name, &mode], LIMIT)?;
        if !keep && !matches!(outcome, Outcome::Fail(_)) {
            remove(&dir)?;
        }
        Ok(outcome)
    }
}

/// Runs `zoo` as the first process of a pid namespace, with new mount, network and IPC namespaces, in
/// the fresh directory `dir`, where it leaves its verdict in the file `outcome`.
///
/// # Errors
/// The harness itself could not work.
pub fn isolated(zoo: &Path, dir: &Path, args: &[&str], limit: Duration) -> Result<Outcome> {
    remove(dir)?;
    std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    let log = File::create(dir.join("runner.log"))?;
    let mut runner = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "--ipc"])
        // A restore that mistakes its own namespace for the task's must not rename this machine.
        .args(["--uts"])
        .arg(zoo)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .current_dir(dir)
        .spawn()
        .context("unshare")?;
    let ended = wait_for("the case to end", limit, || Ok(runner.try_wait()?));
    if ended.is_err() {
        runner.kill()?;
        runner.wait()?;
    }
    Ok(match std::fs::read_to_string(dir.join("outcome")) {
        Ok(text) => Outcome::parse(&text),
        Err(_) => {
            let log = std::fs::read_to_string(dir.join("runner.log")).unwrap_or_default();
            let why = ended.err().map(|error| error.to_string()).unwrap_or_default();
            Outcome::Fail(format!("the runner gave no verdict. {why}\n{log}"))
        }
    })
}

fn remove(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}
