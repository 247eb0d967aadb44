//! A pod that gives way: all its containers are frozen at once, dumped, and ended frozen.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::bundle::{self, Bundle, Volume};
use super::call;
use super::layer::{self, Layer};
use super::words::Words;
use crate::error::{Context, Error, Result};

/// Where the changes of a container's files are in a checkpoint.
pub fn changes(container: &str) -> String {
    format!("files.{container}.tar")
}

/// Where the content of a volume is in a checkpoint.
pub fn volume(volume: &Volume) -> String {
    format!("volume.{}.tar", volume.name)
}

/// The saving of a pod.
pub struct Save<'a> {
    /// The command line of `kill`.
    pub words: &'a Words,
    /// The uid of the pod.
    pub uid: &'a str,
    /// Where it is saved.
    pub dir: &'a Path,
    /// For whom the images are sealed.
    pub recipient: Option<&'a str>,
    /// How long it may take.
    pub limit: Duration,
}

/// A pod that is saved and still frozen. Dropped, it goes on.
pub struct Frozen<'a> {
    words: &'a Words,
    ids: Vec<String>,
    names: Vec<String>,
    since: Instant,
}

impl<'a> Save<'a> {
    /// Saves the pod.
    ///
    /// # Errors
    /// If a container cannot be saved, or it takes too long: the pod then goes on.
    pub fn take(&self) -> Result<Frozen<'a>> {
        let all = bundle::of_pod(&self.words.root(), self.uid);
        if all.is_empty() {
            return Err(Error::new(format!("runc knows no container of the pod {}", self.uid)));
        }
        let until = Instant::now() + self.limit;
        let mut frozen =
            Frozen { words: self.words, ids: Vec::new(), names: Vec::new(), since: Instant::now() };
        for (id, _) in &all {
            // One that has ended is no part of the pod any more.
            if runs(self.words, id) {
                frozen.ids.push(id.clone());
                call::runc(self.words, "pause", id)?;
            }
        }
        if frozen.ids.is_empty() {
            return Err(Error::new("all containers have ended"));
        }
        let work = self.dir.join("containers");
        fs::create_dir_all(&work).context(|| work.display().to_string())?;
        for (id, bundle) in all.iter().filter(|(id, _)| frozen.ids.contains(id)) {
            let name = bundle.container.as_ref().map(|c| c.name.clone()).unwrap_or_default();
            self.dump(id, &name, bundle, until)?;
            frozen.names.push(name);
        }
        Ok(frozen)
    }

    fn dump(&self, id: &str, name: &str, bundle: &Bundle, until: Instant) -> Result<()> {
        let images = self.dir.join("containers").join(name);
        let work = self.dir.join("work");
        for dir in [&images, &work] {
            fs::create_dir_all(dir).context(|| dir.display().to_string())?;
        }
        let mut options = String::from("tcp-close\nskip-in-flight\nghost-limit 256M\n");
        if let Some(recipient) = self.recipient {
            options.push_str(&format!("encrypt\nrecipient {recipient}\n"));
        }
        let config = work.join("engine.conf");
        fs::write(&config, options).context(|| config.display().to_string())?;
        let mut call = call::command(self.words, "checkpoint");
        call.args(["--leave-running", "--file-locks", "--ext-unix-sk", "--image-path"]);
        call.arg(&images).arg("--work-path").arg(&work).arg(id);
        call.env("PATH", torpor_snapshot::places::path().context(|| "PATH")?);
        call.env("CRIU_CONFIG_FILE", config);
        call.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let left = until.saturating_duration_since(Instant::now());
        call::within(&mut call, left).map_err(|error| match reason(&work, "dump.log") {
            Some(reason) => Error::new(format!("container {name}: {error}: {reason}")),
            None => error,
        })?;
        Layer::of(&bundle.root())?.save(&self.dir.join(changes(name)))?;
        for found in bundle.volumes() {
            let file = self.dir.join(volume(&found));
            if !file.exists() {
                layer::save(&found.dir, &file)?;
            }
        }
        Ok(())
    }
}

impl Frozen<'_> {
    /// The names of the containers.
    pub fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// How long the pod has been frozen.
    pub fn millis(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Ends the pod; it does nothing any more.
    pub fn end(mut self) {
        for id in std::mem::take(&mut self.ids) {
            end(self.words, &id);
        }
    }

    /// Lets it go on.
    pub fn thaw(self) {}
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        for id in &self.ids {
            // What has ended cannot go on.
            let _ = call::runc(self.words, "resume", id);
        }
    }
}

/// Whether a container has processes.
fn runs(words: &Words, id: &str) -> bool {
    !members(words, id).is_empty()
}

/// The processes of a container.
fn members(words: &Words, id: &str) -> Vec<i32> {
    let state = bundle::read_json(&words.root().join(id).join("state.json")).unwrap_or_default();
    let paths = &state["cgroup_paths"];
    let dir = ["freezer", "pids", ""].iter().find_map(|name| paths[*name].as_str());
    let mut found = Vec::new();
    let mut todo: Vec<PathBuf> = dir.into_iter().map(PathBuf::from).collect();
    while let Some(dir) = todo.pop() {
        let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        let below = fs::read_dir(&dir).into_iter().flatten().flatten();
        todo.extend(below.map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    found
}

/// Kills the processes of a frozen container, which die before they do anything more.
pub fn end(words: &Words, id: &str) {
    for pid in members(words, id).into_iter().filter_map(Pid::from_raw) {
        // It may be gone.
        let _ = kill_process(pid, Signal::KILL);
    }
    // Version 1 of cgroups lets nothing frozen die.
    let _ = call::runc(words, "resume", id);
}

/// The first error in a log of the engine's.
pub fn reason(work: &Path, log: &str) -> Option<String> {
    let mut text = String::new();
    File::open(work.join(log)).ok()?.take(16 << 20).read_to_string(&mut text).ok()?;
    let line = text.lines().find(|line| line.contains("Error ("))?;
    Some(line.split_once("): ").map_or(line, |(_, text)| text).to_owned())
}
