//! A bundle, its snapshots, and the containers that start from them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::{Bench, run};
use crate::process::until;
use crate::registry::Registry;

/// Bytes.
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// What belongs to one bundle.
pub struct Place<'a> {
    torpor: PathBuf,
    pub dir: PathBuf,
    name: String,
    registry: &'a Registry,
}

impl<'a> Place<'a> {
    /// A bundle whose programs are those of this machine, and whose container runs `words`.
    pub fn make(
        bench: &Bench,
        registry: &'a Registry,
        dir: &Path,
        name: &str,
        words: &[&str],
    ) -> Result<Self> {
        let torpor = fs::canonicalize(bench.torpor())?;
        let place = Self { torpor, dir: dir.join(name), name: name.to_owned(), registry };
        for part in ["proc", "sys", "dev", "tmp", "run", "usr", "etc", "var/lib"] {
            fs::create_dir_all(place.root().join(part))?;
        }
        for part in ["bin", "sbin", "lib", "lib64"] {
            symlink(format!("usr/{part}"), place.root().join(part))?;
        }
        run(Command::new("runc").arg("spec").current_dir(place.bundle()))?;
        place.configure(|config| {
            config["process"]["terminal"] = json!(false);
            config["process"]["args"] = json!(words);
            config["root"]["readonly"] = json!(false);
            let binds = ["/usr", "/etc", "/var/lib"].map(|path| {
                json!({"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]})
            });
            if let Some(mounts) = config["mounts"].as_array_mut() {
                mounts.extend(binds);
            }
        })?;
        Ok(place)
    }

    pub fn bundle(&self) -> PathBuf {
        self.dir.join("bundle")
    }

    pub fn root(&self) -> PathBuf {
        self.bundle().join("rootfs")
    }

    /// Changes the configuration of the bundle.
    pub fn configure(&self, change: impl FnOnce(&mut Value)) -> Result<()> {
        let file = self.bundle().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file)?)?;
        change(&mut config);
        Ok(fs::write(file, serde_json::to_vec(&config)?)?)
    }

    /// Where a snapshot is in the registry.
    pub fn in_registry(&self, tag: &str) -> String {
        format!("{}/bench/{}:{tag}", self.registry.host, self.name)
    }

    /// Where it is in a directory.
    pub fn in_directory(&self) -> String {
        format!("dir:{}", self.store().display())
    }

    /// The directory of that.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    pub fn snapshot(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.torpor);
        command.arg("snapshot").args(words);
        command.env("TORPOR_STATE", self.dir.join("state"));
        command.env("TORPOR_CACHE", self.dir.join("cache"));
        command.env("TORPOR_INSECURE_REGISTRIES", &self.registry.host);
        command
    }

    /// Nothing of any snapshot is on this machine any more.
    pub fn forget(&self) -> Result<()> {
        let cache = self.dir.join("cache");
        if cache.exists() { Ok(fs::remove_dir_all(cache)?) } else { Ok(()) }
    }

    /// Makes a snapshot; what was said of it.
    pub fn create(&self, reference: &str, more: &[&str]) -> Result<Value> {
        let from = format!("runc:{}", self.bundle().display());
        let mut create = self.snapshot(&["create", reference, "--json", "--from", &from]);
        let output = create.args(more).output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{create:?}: {error}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn id(name: &str) -> String {
        format!("torpor-bench-{}-{name}", std::process::id())
    }

    /// Starts a container; what was said of it.
    pub fn run(&self, reference: &str, name: &str, more: &[&str]) -> Result<Value> {
        let mut all = self.run_all(reference, name, more)?;
        all.pop().context("nothing was said")
    }

    /// The same for several containers.
    pub fn run_all(&self, reference: &str, name: &str, more: &[&str]) -> Result<Vec<Value>> {
        let id = Self::id(name);
        let mut run = self.snapshot(&["run", reference, "--id", &id, "--json"]);
        let output = run.args(more).output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        // 3: it was started cold, in place of its snapshot.
        ensure!(matches!(output.status.code(), Some(0 | 3)), "{run:?}: {error}");
        let text = String::from_utf8(output.stdout)?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Waits until all of a container's memory is here, and ends it.
    pub fn settle(&self, name: &str) -> Result<()> {
        let log = self.dir.join("state/instances").join(Self::id(name)).join("feed.log");
        until("the rest of the memory", || {
            fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > 1)
        })?;
        self.delete(name)
    }

    pub fn delete(&self, name: &str) -> Result<()> {
        run(Command::new("runc").args(["delete", "--force", &Self::id(name)]))
    }

    /// Bytes of memory that the processes of a container have.
    pub fn resident(&self, name: &str) -> Result<f64> {
        let list =
            Command::new("runc").args(["ps", "--format", "json", &Self::id(name)]).output()?;
        let pids: Vec<u32> = serde_json::from_slice(&list.stdout)?;
        pids.into_iter().map(|pid| memory(pid, "smaps_rollup", "Rss:")).sum()
    }
}

/// The bytes that a file of a process in `/proc` has of something.
pub fn memory(pid: u32, file: &str, key: &str) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    let kilobytes = kilobytes.with_context(|| format!("no {key} in {file}"))?;
    Ok(kilobytes.parse::<f64>()? * 1024.0)
}

/// A number in what was said of a container.
pub fn number(said: &Value, key: &str) -> Result<f64> {
    said[key].as_f64().with_context(|| format!("no {key} in {said}"))
}

/// How many milliseconds the first instruction of a container may take that is born by a template, which has the
/// tables of its pages to be made.
pub fn born(memory: f64) -> f64 {
    15.0 + 25.0 * memory / GIB
}
