//! A bundle: the configuration and the files that a container of runc is started from.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use torpor_blobs::oci;

use crate::description::Origin;
use crate::error::{Context, Error, Result};
use crate::mounts::Bind;
use crate::source::Source;
use crate::{listing, mounts};

/// The longest configuration that is read.
const MAX_CONFIG: u64 = 4 << 20;

/// A bundle.
#[derive(Debug, Clone)]
pub struct Bundle {
    /// Its directory.
    pub dir: PathBuf,
    /// Its configuration.
    pub config: Value,
    /// Its root file system.
    pub root: PathBuf,
    /// What the container runs instead of what its configuration said.
    command: Vec<String>,
    /// What it has mounted beside, or in place of, what its configuration said.
    binds: Vec<Bind>,
}

impl Bundle {
    /// Reads a bundle.
    ///
    /// # Errors
    /// If the directory or its `config.json` cannot be read, or that is no configuration.
    pub fn open(dir: &Path) -> Result<Self> {
        let dir = fs::canonicalize(dir).context(|| format!("the bundle {}", dir.display()))?;
        let file = dir.join("config.json");
        let shown = || file.display().to_string();
        let len = fs::metadata(&file).map(|meta| meta.len()).context(shown);
        if len.map_err(|error| error.hint("runc spec, in the bundle, writes one"))? > MAX_CONFIG {
            return Err(Error::new(format!("{} is too long", file.display())));
        }
        let config: Value =
            serde_json::from_slice(&fs::read(&file).context(shown)?).context(shown)?;
        let root = config["root"]["path"].as_str().unwrap_or("rootfs");
        let root = fs::canonicalize(dir.join(root))
            .context(|| format!("the root file system of {}", dir.display()))?;
        Ok(Self { dir, config, root, command: Vec::new(), binds: Vec::new() })
    }

    /// A bundle of which only the configuration is looked at.
    #[cfg(test)]
    pub(crate) fn unread(dir: &Path, config: Value) -> Self {
        let (root, command, binds) = (dir.join("rootfs"), Vec::new(), Vec::new());
        Self { dir: dir.to_owned(), config, root, command, binds }
    }

    /// The same with a container that runs `command`, unless that is empty.
    #[must_use]
    pub fn running(mut self, command: &[String]) -> Self {
        if !command.is_empty() {
            self.config["process"]["args"] = json!(command);
            self.command = command.to_owned();
        }
        self
    }

    /// The same with a container that has these mounts, in place of those at the same places.
    #[must_use]
    pub(crate) fn mounting(mut self, binds: &[Bind]) -> Self {
        for bind in binds {
            let mut all = self.config["mounts"].as_array().cloned().unwrap_or_default();
            match all.iter_mut().find(|mount| bind.replaces(mount)) {
                Some(mount) => *mount = bind.config(),
                None => all.push(bind.config()),
            }
            self.config["mounts"] = json!(all);
        }
        self.binds.extend_from_slice(binds);
        self
    }

    /// The bundle that is named by `origin`.
    ///
    /// # Errors
    /// If it is none of this machine's.
    pub fn of(origin: &Origin) -> Result<Self> {
        match origin.from.parse().map_err(Error::new)? {
            Source::Runc(path) => {
                Ok(Self::open(&path)?.running(&origin.command).mounting(&origin.mounts))
            }
            other => Err(Error::new(format!("{other} cannot be started here"))),
        }
    }

    /// What names it.
    #[must_use]
    pub fn origin(&self) -> Origin {
        let from = Source::Runc(self.dir.clone()).to_string();
        Origin { from, command: self.command.clone(), mounts: self.binds.clone() }
    }

    /// The configuration of a container that has its root file system at `root`.
    #[must_use]
    pub(crate) fn config_at(&self, root: &Path) -> Value {
        let mut config = self.config.clone();
        config["root"]["path"] = json!(root);
        // What is relative is so to the bundle.
        for mount in config["mounts"].as_array_mut().into_iter().flatten() {
            let is_bind = mounts::is_bind(mount);
            if let Some(source) = mount["source"].as_str()
                && is_bind
                && !source.starts_with('/')
            {
                mount["source"] = json!(self.dir.join(source));
            }
        }
        config
    }

    /// The digest of what a snapshot depends on in the configuration: all of it, but for what
    /// each container has its own of, and for what a runtime does beside the container.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn configuration_digest(&self) -> Result<String> {
        let mut config = self.config.clone();
        if let Some(all) = config.as_object_mut() {
            for key in ["hostname", "domainname", "annotations", "hooks"] {
                all.remove(key);
            }
        }
        if let Some(linux) = config.get_mut("linux").and_then(Value::as_object_mut) {
            linux.remove("cgroupsPath");
            linux.remove("resources");
        }
        if let Some(root) = config.get_mut("root").and_then(Value::as_object_mut) {
            root.remove("path");
        }
        config.sort_all_objects();
        Ok(oci::sha256(&serde_json::to_vec(&config).context(|| "config.json")?))
    }

    /// The digest of what is in the root file system: names, kinds, sizes and times of all
    /// files. Times count in seconds, as archives keep them.
    ///
    /// # Errors
    /// If a directory of the root file system cannot be listed, or a file be looked at.
    pub fn files_digest(&self) -> Result<String> {
        listing::digest(&self.root)
    }
}
