//! Containers that a runtime knows: here by their id, and on the other host afterwards.
//!
//! The runtime calls this program as its engine. It gets options that the runtime has no words for in
//! a file (`CRIU_CONFIG_FILE`), and a script that lets the engine wait where a migration waits.

mod bundle;
mod job;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::bundle::{Terms, make as make_bundle, own_root, remove as remove_bundle};
pub use self::job::{Call, Streams, gate, remove, serve, start, start_restore, wait};
use crate::error::{Context, Error, Result};

/// What checkpoints and restores have in common: what runs goes on elsewhere, connected as it was.
pub const WORDS: [&str; 5] =
    ["--tcp-established", "--file-locks", "--ext-unix-sk", "--manage-cgroups-mode", "soft"];
/// Configurations are no longer: they have to fit into one message.
const MAX_CONFIG: u64 = 900 << 10;

/// The runtimes whose containers can move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Runtime {
    /// runc, by the id of the container.
    Runc,
}

impl Runtime {
    /// Its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => "runc",
        }
    }
}

/// A container, as its runtime on this host knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The runtime.
    pub runtime: Runtime,
    /// The container's id.
    pub id: String,
    /// Where the runtime keeps its state, if not where it usually does.
    pub root: Option<PathBuf>,
}

/// What a runtime says of a container.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    /// `running`, `paused`, `stopped`, `created`.
    pub status: String,
    /// Its first process.
    pub pid: i32,
    /// Its bundle.
    pub bundle: PathBuf,
}

impl Container {
    /// A call of the runtime, with what it logs in `log`.
    #[must_use]
    pub fn call(&self, log: Option<&Path>, action: &str) -> Command {
        let mut command = Command::new(self.runtime.program());
        if let Some(root) = &self.root {
            command.arg("--root").arg(root);
        }
        if let Some(log) = log {
            command.arg("--log").arg(log);
        }
        command.arg(action).stdin(Stdio::null());
        command
    }

    /// What the runtime says of it; `None` if it knows no such container.
    ///
    /// # Errors
    /// If there is no such runtime, or it says something else.
    pub fn state(&self) -> Result<Option<State>> {
        let program = self.runtime.program();
        let output = self.call(None, "state").arg(&self.id).output();
        let output = output.context(|| format!("run {program}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            if said.contains("does not exist") {
                return Ok(None);
            }
            return Err(Error::refused(format!("{program} state {}: {}", self.id, said.trim())));
        }
        serde_json::from_slice(&output.stdout)
            .map(Some)
            .map_err(|error| Error::refused(format!("{program} state {}: {error}", self.id)))
    }

    /// The container, which runs.
    ///
    /// # Errors
    /// If it does not.
    pub fn running(&self) -> Result<State> {
        let program = self.runtime.program();
        let list = format!("{program} list");
        match self.state()? {
            Some(state) if state.status == "running" => Ok(state),
            Some(state) => Err(Error::refused_with(
                format!("container {} does not run: it is {}", self.id, state.status),
                list,
            )),
            None => {
                Err(Error::refused_with(format!("{program} knows no container {}", self.id), list))
            }
        }
    }

    /// Ends it, if it is there, and has the runtime forget it.
    pub fn forget(&self) {
        match self.call(None, "delete").args(["--force", &self.id]).output() {
            Ok(output) if !output.status.success() => {
                let said = String::from_utf8_lossy(&output.stderr);
                tracing::warn!("{} delete {}: {}", self.runtime.program(), self.id, said.trim());
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("run {}: {error}", self.runtime.program()),
        }
    }

    /// Refuses ids that could be options or paths.
    ///
    /// # Errors
    /// If it is one.
    pub fn check(&self) -> Result<()> {
        let plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'+' | b'-' | b'.');
        let fits = (1..=200).contains(&self.id.len())
            && !self.id.starts_with(['-', '.'])
            && self.id.bytes().all(plain);
        if fits {
            Ok(())
        } else {
            Err(Error::refused(format!("{:?} is no container's id", self.id)))
        }
    }
}

/// The configuration of a bundle, with the whole path of its root file system.
///
/// # Errors
/// If there is none that can be read.
pub fn configuration(bundle: &Path) -> Result<String> {
    let path = bundle.join("config.json");
    let wrong = |why: String| Error::refused(format!("{}: {why}", path.display()));
    let len = path.metadata().context(|| path.display().to_string())?.len();
    if len > MAX_CONFIG {
        return Err(wrong(format!("it has {len} bytes, more than {MAX_CONFIG}")));
    }
    let text = std::fs::read_to_string(&path).context(|| path.display().to_string())?;
    let mut config: Value =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let root =
        config["root"]["path"].as_str().ok_or_else(|| wrong("it names no root".to_owned()))?;
    let whole = bundle.join(root);
    let whole = whole.canonicalize().context(|| whole.display().to_string())?;
    config["root"]["path"] = Value::from(whole.display().to_string());
    Ok(config.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn named(id: &str) -> Container {
        Container { runtime: Runtime::Runc, id: id.to_owned(), root: None }
    }

    #[test]
    fn ids_lead_nowhere() {
        for id in ["web", "a.b_c-1+2"] {
            named(id).check().unwrap();
        }
        for id in ["", "-f", "..", "a/b", "a b", "a\0"] {
            assert!(named(id).check().is_err(), "{id:?}");
        }
    }

    #[test]
    fn a_root_gets_its_whole_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("rootfs")).unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"root":{"path":"rootfs"}}"#).unwrap();
        let config: Value = serde_json::from_str(&configuration(dir.path()).unwrap()).unwrap();
        let whole = dir.path().canonicalize().unwrap().join("rootfs");
        assert_eq!(config["root"]["path"].as_str(), whole.to_str());
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(configuration(dir.path()).unwrap_err().to_string().contains("names no root"));
    }
}
