//! Containers that a runtime knows: here by their id, and on the other host afterwards.
//!
//! The runtime calls this program as its engine. It gets options that the runtime has no words for in
//! a file (`CRIU_CONFIG_FILE`), and a script that lets the engine wait where a migration waits.
//!
//! A container of Podman is one of runc that Podman knows more of. So runc has it dumped, as any other; Podman tells
//! what else there is ([`podman`]), and makes it at the destination.

mod archive;
mod bundle;
mod changes;
mod conmon;
mod dump;
mod idle;
mod job;
mod podman;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_worker::runc;

use self::archive::Adaptation;
pub use self::bundle::{Terms, has_come, leave as leave_bundle, lock as lock_bundles};
pub(crate) use self::bundle::{
    clear as clear_bundle, own_root, recover as recover_bundles, remove as remove_bundle,
};
use self::conmon::Conmon;
pub use self::conmon::{NAME as CONMON, run as conmon};
pub use self::idle::serve as idle;
pub use self::job::{Call, Streams, serve, start, start_restore, wait};
pub(crate) use self::job::{KNOWN, end, remove, start_marked};
pub use self::podman::Ways;
pub(crate) use self::podman::{ARCHIVE, demand as make_demand};
use crate::cancel::Cancel;
use crate::error::{Context, Error, Result};
use crate::task::Task;

/// What checkpoints and restores have in common: what runs goes on elsewhere, connected as it was.
const WORDS: [&str; 5] =
    ["--tcp-established", "--file-locks", "--ext-unix-sk", "--manage-cgroups-mode", "soft"];
/// Podman has words for so many of these.
const KNOWN_TO_PODMAN: usize = 2;
/// Names of containers are no longer.
const MAX_NAME: usize = 200;
/// Configurations are no longer: they have to fit into one message.
const MAX_CONFIG: u64 = 900 << 10;

/// The runtimes whose containers can move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Runtime {
    /// runc, by the id of the container.
    Runc,
    /// Podman, by the name of the container.
    Podman,
}

impl Runtime {
    /// Its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Podman => "podman",
        }
    }

    /// Has it list its containers.
    fn list(self) -> &'static str {
        match self {
            Self::Runc => "runc list",
            Self::Podman => "podman ps --all",
        }
    }
}

/// A container, as its runtime on this host knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The runtime.
    pub runtime: Runtime,
    /// The container's id: all of it.
    pub id: String,
    /// Where runc keeps its state, if not where it usually does.
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

/// A container that runc knows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct KnownContainer {
    /// `running`, `paused`, `stopped`, `created`.
    pub status: String,
    bundle: PathBuf,
    rootfs: PathBuf,
}

impl KnownContainer {
    /// Whether its bundle is `dir`, or it has files there.
    #[must_use]
    pub fn uses(&self, dir: &Path) -> bool {
        [&self.bundle, &self.rootfs].into_iter().any(|path| path.starts_with(dir))
    }
}

/// The containers that runc knows, which keeps its state in `root`, if not where it usually does.
///
/// # Errors
/// If there is no runc, or it says something else.
pub fn known(root: Option<&Path>) -> Result<Vec<KnownContainer>> {
    let mut command = Command::new(Runtime::Runc.program());
    match root {
        Some(root) if !root.exists() => return Ok(Vec::new()),
        Some(root) => command.arg("--root").arg(root),
        None => &mut command,
    };
    let output = command.args(["list", "--format", "json"]).stdin(Stdio::null()).output();
    let output = output.context(|| "run runc".to_owned())?;
    let failed = |why: &str| Error::refused(format!("runc list: {why}"));
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim()));
    }
    // Of none it says null.
    let all: Option<Vec<KnownContainer>> =
        serde_json::from_slice(&output.stdout).map_err(|error| failed(&error.to_string()))?;
    Ok(all.unwrap_or_default())
}

impl Container {
    /// The container of this host that a user calls `name`.
    ///
    /// # Errors
    /// If there is none, or no container can have that name.
    pub fn find(runtime: Runtime, name: &str, root: Option<PathBuf>) -> Result<Self> {
        let named = Self { runtime, id: name.to_owned(), root };
        named.check()?;
        if runtime == Runtime::Runc {
            return Ok(named);
        }
        if named.root.is_some() {
            return Err(Error::refused_with(
                "--runtime-root is for containers of runc: Podman knows where its own are",
                "CONTAINERS_CONF and CONTAINERS_STORAGE_CONF name other configurations",
            ));
        }
        let found = podman::inspect(name)?.ok_or_else(|| named.unknown())?;
        Ok(Self { id: found.id, ..named })
    }

    /// The container as runc knows it, which dumps it.
    #[must_use]
    pub fn inner(&self) -> Self {
        Self { runtime: Runtime::Runc, ..self.clone() }
    }

    /// What checkpoints and restores of it have in common.
    #[must_use]
    pub fn words(&self) -> &'static [&'static str] {
        match self.runtime {
            Runtime::Runc => &WORDS,
            Runtime::Podman => &WORDS[..KNOWN_TO_PODMAN],
        }
    }

    /// A call of runc, with what it logs in `log`.
    #[must_use]
    pub fn call(&self, log: Option<&Path>, action: &str) -> Command {
        let mut command = Command::new(Runtime::Runc.program());
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
        if self.runtime == Runtime::Podman {
            return Ok(podman::inspect(&self.id)?.map(podman::Inspected::state));
        }
        let output = self.call(None, "state").arg(&self.id).output();
        let output = output.context(|| "run runc".to_owned())?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            if said.contains("does not exist") {
                return Ok(None);
            }
            return Err(Error::refused(format!("runc state {}: {}", self.id, said.trim())));
        }
        serde_json::from_slice(&output.stdout)
            .map(Some)
            .map_err(|error| Error::refused(format!("runc state {}: {error}", self.id)))
    }

    /// The container, which runs.
    ///
    /// # Errors
    /// If there is none of this name, or it is paused, stopped or still being made.
    pub fn running(&self) -> Result<State> {
        match self.state()? {
            Some(state) if state.status == "running" => Ok(state),
            Some(state) => Err(Error::refused_with(
                format!("container {} does not run: it is {}", self.id, state.status),
                self.runtime.list(),
            )),
            None => Err(self.unknown()),
        }
    }

    fn unknown(&self) -> Error {
        let text = format!("{} knows no container {}", self.runtime.program(), self.id);
        Error::refused_with(text, self.runtime.list())
    }

    /// What the other host has to know of it before it may come.
    ///
    /// # Errors
    /// If it does not run, or cannot be described.
    pub fn describe(&self) -> Result<String> {
        match self.runtime {
            Runtime::Runc => configuration(&self.running()?.bundle),
            Runtime::Podman => podman::describe(&self.id),
        }
    }

    /// Adds to the images of the last round what is not in them: it is stopped now.
    ///
    /// # Errors
    /// If the runtime fails at that; if somebody cancels.
    pub(crate) fn complete(&self, images: &Path, work: &Path, cancel: &Cancel) -> Result<()> {
        match self.runtime {
            Runtime::Runc => Ok(()),
            Runtime::Podman => podman::export(self, images, work, cancel),
        }
    }

    /// A restore from `images`, with what is made for it in `work`.
    ///
    /// # Errors
    /// If the container is not the one that was announced, or brings what it may not; if Podman fails to show its image.
    pub fn restore(&self, images: &Path, base: &Base, work: &Path) -> Result<Call> {
        let mut conmon = None;
        let mut words: Vec<String> = match base {
            Base::Bundle(bundle) => {
                let paths = [bundle, images, work].map(|path| path.display().to_string());
                let [bundle, images, work] = paths;
                let named = ["--bundle", &bundle, "--image-path", &images, "--work-path", &work];
                named.iter().chain(&["--detach"]).map(|&word| word.to_owned()).collect()
            }
            Base::Podman(ways, said) => {
                let archive = work.join(podman::ARCHIVE);
                let mounted = podman::Mounted::new(&said.image_id)?;
                let (id, root) = (&self.id, &mounted.path);
                let adaptation = Adaptation { id, said, images, ways, root };
                adaptation.write(&images.join(podman::ARCHIVE), &archive)?;
                // Pages that come later are told of there.
                let words = vec!["--work-path".to_owned(), work.display().to_string()];
                conmon = Some(Conmon { program: ways.conmon.clone(), words });
                vec!["--import".to_owned(), archive.display().to_string()]
            }
        };
        words.extend(self.words().iter().map(|&word| word.to_owned()));
        Ok(Call { conmon, ..Call::new(self, "restore", words, Vec::new()) })
    }

    /// It runs elsewhere, and may still have to go on here: its runtime is not to start it again when it ends.
    pub(crate) fn look_away(&self, root: &Task) {
        self.tell_conmon(root, Signal::STOP);
    }

    /// It goes on here after all.
    pub(crate) fn look_on(&self, root: &Task) {
        self.tell_conmon(root, Signal::CONT);
    }

    /// Before it is ended here, since it runs elsewhere: its runtime is not to start it again.
    pub(crate) fn abandon(&self, root: &Task) {
        self.tell_conmon(root, Signal::KILL);
    }

    /// Signals who looks after the container, of which this is the first process.
    fn tell_conmon(&self, root: &Task, signal: Signal) {
        match self.runtime {
            Runtime::Runc => {}
            Runtime::Podman => podman::conmon_of(root).iter().for_each(|it| it.signal(signal)),
        }
    }

    /// Has the runtime forget a container that has come here and could not be made.
    pub fn discard(&self) {
        match self.runtime {
            Runtime::Runc => self.forget(),
            Runtime::Podman => podman::discard(self),
        }
    }

    /// Whether the runtime knows it, by the bundle below `bundles` that is made for one that comes. Bundles of Podman's are its
    /// own, and so are its ids.
    fn is_known_by(&self, bundles: &Path) -> bool {
        let Ok(Some(state)) = self.state() else { return false };
        let own = bundles.join(&self.id).canonicalize();
        self.runtime == Runtime::Podman
            || own.is_ok_and(|own| state.bundle.canonicalize().is_ok_and(|it| it == own))
    }

    /// Whether the runtime has kept a container that could not be made. runc itself removes it.
    #[must_use]
    pub(crate) fn stays_behind(&self) -> bool {
        let never_ran = |state: &State| !matches!(state.status.as_str(), "running" | "paused");
        self.runtime == Runtime::Podman
            && matches!(self.state(), Ok(Some(state)) if never_ran(&state))
    }

    /// Ends it, if it is there, and has the runtime forget it.
    pub fn forget(&self) {
        // Where conmon was killed, Podman finds out by the first call that the container has ended, and fails it.
        let done = match self.runtime {
            Runtime::Runc => self.remove(),
            Runtime::Podman => self.remove().or_else(|_| self.remove()),
        };
        if let Err(error) = done {
            tracing::warn!("{error}");
        }
    }

    /// Takes away what a runc that was killed has left of it.
    fn release(&self) {
        runc::release(self.root.as_deref().unwrap_or(Path::new(runc::ROOT)), &self.id);
    }

    fn remove(&self) -> Result<()> {
        self.release();
        let mut command = match self.runtime {
            Runtime::Runc => self.call(None, "delete"),
            Runtime::Podman => podman::call(&["rm", "--time", "0"]),
        };
        let program = self.runtime.program();
        let output = command.args(["--force", &self.id]).output();
        let output = output.context(|| format!("run {program}"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Error::refused(format!("{program}: forget container {}: {}", self.id, said.trim())))
    }

    /// Refuses ids that could be options or paths.
    ///
    /// # Errors
    /// If the id could be an option or a path, or is too long.
    pub fn check(&self) -> Result<()> {
        let plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'+' | b'-' | b'.');
        let fits = (1..=MAX_NAME).contains(&self.id.len())
            && !self.id.starts_with(['-', '.'])
            && self.id.bytes().all(plain);
        if fits {
            Ok(())
        } else {
            Err(Error::refused(format!("{:?} is no container's id", self.id)))
        }
    }
}

/// Judges what describes a container that wants to come ([`Container::describe`]), by what this host has.
///
/// # Errors
/// If Podman has here what is in the way of the container, or not what it needs.
pub fn judge(container: &Container, description: &str, terms: Terms) -> Result<()> {
    match container.runtime {
        Runtime::Runc => Ok(()),
        Runtime::Podman => podman::judge(container, description, terms),
    }
}

/// What the restore of a container begins with, got ready before anything is stopped for it.
#[derive(Debug)]
pub enum Base {
    /// The bundle that runc is given.
    Bundle(PathBuf),
    /// Podman makes a bundle of its own, in its own way, of what was described.
    Podman(Ways, Box<podman::Description>),
}

/// Gets ready what a container is restored with that comes with a migration: a bundle below `dir`. What describes it is judged
/// first.
///
/// # Errors
/// As [`bundle::make`]; if Podman does not say how it does things, or the description is none.
pub(crate) fn make_base(
    dir: &Path,
    container: &Container,
    description: &str,
    terms: Terms,
    migration: &str,
) -> Result<Base> {
    match container.runtime {
        Runtime::Runc => {
            bundle::make(dir, &container.id, description, terms, migration).map(Base::Bundle)
        }
        Runtime::Podman => Ok(Base::Podman(Ways::ask()?, Box::new(podman::read(description)?))),
    }
}

/// What images of a container that could come are judged with: a bundle below `dir`.
///
/// # Errors
/// As [`bundle::make`].
pub(crate) fn make_sketch(
    dir: &Path,
    container: &Container,
    description: &str,
    terms: Terms,
) -> Result<PathBuf> {
    match container.runtime {
        Runtime::Podman => podman::sketch(dir, description),
        Runtime::Runc => bundle::make(dir, &container.id, description, terms, ""),
    }
}

/// The configuration of a bundle, with the whole paths of its root file system and of what it binds.
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
    for mount in config.get_mut("mounts").and_then(Value::as_array_mut).into_iter().flatten() {
        let source = mount["source"].as_str().map(Path::new);
        // One that does not begin at the root is of the bundle.
        let source = source.filter(|source| is_bind(mount) && source.is_relative());
        if let Some(whole) = source.map(|source| bundle.join(source)) {
            let whole = whole.canonicalize().unwrap_or(whole);
            mount["source"] = Value::from(whole.display().to_string());
        }
    }
    Ok(config.to_string())
}

/// Whether a mount of a configuration shows a file or directory of its host.
pub(crate) fn is_bind(mount: &Value) -> bool {
    let options = mount["options"].as_array().map_or(&[][..], Vec::as_slice);
    mount["type"] == "bind" || options.iter().any(|it| it == "bind" || it == "rbind")
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
    fn what_is_of_a_bundle_gets_its_whole_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("rootfs")).unwrap();
        let text = r#"{"root":{"path":"rootfs"}, "mounts":[{"source":"rootfs", "options":["rbind"]}, {"type":"bind", "source":"/a"},
            {"type":"tmpfs", "source":"tmpfs"}]}"#;
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        let config: Value = serde_json::from_str(&configuration(dir.path()).unwrap()).unwrap();
        let whole = dir.path().canonicalize().unwrap().join("rootfs");
        assert_eq!(config["root"]["path"].as_str(), whole.to_str());
        let sources = [0, 1, 2].map(|at| config["mounts"][at]["source"].as_str());
        assert_eq!(sources, [whole.to_str(), Some("/a"), Some("tmpfs")]);
        std::fs::write(dir.path().join("config.json"), r#"{"root":{"path":"rootfs"}}"#).unwrap();
        assert!(!configuration(dir.path()).unwrap().contains("mounts"));
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(configuration(dir.path()).unwrap_err().to_string().contains("names no root"));
    }
}
