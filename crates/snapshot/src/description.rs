//! What a snapshot says of itself: an object in the configuration of its image.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde::{Deserialize, Serialize};
use torpor_blobs::oci::{Descriptor, Manifest};
use torpor_blobs::{self as store, Store};

use crate::error::{Context, Error, Result};
use crate::mounts::Bind;
use crate::sealed::Hidden;

/// The version of what is described here.
pub const VERSION: u32 = 1;
/// The same for snapshots that hide what is said of the container.
pub(crate) const SEALED_VERSION: u32 = 3;

/// The key of the description in the configuration.
const KEY: &str = "org.torpor.snapshot";
/// The key of what is sealed of it.
const SEALED_KEY: &str = "org.torpor.snapshot.sealed";
/// The longest configuration that is read.
pub(crate) const MAX_CONFIG: u64 = 4 << 20;

/// What a snapshot says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// [`VERSION`] or [`SEALED_VERSION`]; or one between them, of a snapshot that comes whole.
    pub version: u32,
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// What it was made from.
    pub origin: Origin,
    /// The configuration that the container had.
    pub configuration: String,
    /// The digest of what matters of that.
    pub configuration_digest: String,
    /// The digest of the container's files before it was started.
    pub files_digest: String,
    /// The machine that it was made on.
    pub machine: Machine,
    /// The layers that are packs. Annotations of layers would say it as well, but there are
    /// tools that lose them.
    pub packs: Vec<Pack>,
    /// Bytes of memory.
    pub memory: u64,
    /// The bytes of it that were touched before the container was ready again.
    pub working_set: u64,
    /// Whether it was started for a trial: it is known then which pages are needed first. Those of earlier versions do not
    /// say it.
    #[serde(default = "yes")]
    pub tried: bool,
    /// Whether its images are sealed.
    #[serde(default)]
    pub sealed: bool,
    /// Processes.
    pub tasks: usize,
    /// Whether programs find the number of their start in a file of each container's own.
    #[serde(default)]
    pub generation: bool,
    /// The standard streams that were files of the host, by their numbers, as the engine names
    /// them. Each container has its own instead.
    #[serde(default)]
    pub streams: BTreeMap<u8, String>,
    /// What is missing here, because it is sealed.
    #[serde(skip)]
    pub hidden: Option<Hidden>,
}

/// What is started where there is no snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// `runc:BUNDLE` or `podman:IMAGE`.
    pub from: String,
    /// What it runs instead of what that says.
    #[serde(default)]
    pub command: Vec<String>,
    /// What it has mounted beside, or in place of, what that says.
    #[serde(default)]
    pub mounts: Vec<Bind>,
}

/// A layer that is a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pack {
    /// The digest of the layer.
    pub layer: String,
    /// The digest of the archive in it.
    pub plain: String,
    /// The number in the name of its file; 0 if that has several, which are sealed, and no list.
    pub number: u32,
    /// Where the list of its pages begins in the archive.
    pub list_offset: u64,
    /// The bytes of the list.
    pub list_size: u64,
    /// The digest of the list.
    pub list_digest: String,
}

/// What is so unless somebody says otherwise.
fn yes() -> bool {
    true
}

/// A machine, as far as snapshots depend on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// As OCI names it.
    pub architecture: String,
    /// The release of its kernel.
    pub kernel: String,
    /// What its processor is called.
    pub processor: String,
    /// The instructions that programs have found there, as the kernel names them. Those of earlier versions do
    /// not say it. The images say it in numbers, and these are what a start compares.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub instructions: BTreeSet<String>,
}

impl Machine {
    /// This one, but for its instructions.
    #[must_use]
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
        let processor = model.unwrap_or_default().trim_start_matches([' ', '\t', ':']).to_owned();
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let instructions = BTreeSet::new();
        Self { architecture: architecture().to_owned(), kernel, processor, instructions }
    }
}

/// This machine's architecture, as OCI names it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

impl Description {
    /// The configuration of an image that has it and these layers.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn to_config(&self, diff_ids: &[String], created: &str) -> Result<Vec<u8>> {
        let mut config = serde_json::json!({
            "created": created,
            "architecture": self.machine.architecture,
            "os": "linux",
            "config": {},
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
            KEY: self,
        });
        if let Some(hidden) = &self.hidden {
            config[SEALED_KEY] = serde_json::json!(hidden);
        }
        serde_json::to_vec(&config).context(|| "the configuration of the image")
    }

    /// The description in the image that `manifest` is of.
    ///
    /// # Errors
    /// If there is none, or one of another version.
    pub fn read(store: &dyn Store, manifest: &Manifest) -> Result<Self> {
        Self::parse(&store::whole(store, &manifest.config, MAX_CONFIG)?)
    }

    /// The description in the configuration of an image.
    ///
    /// # Errors
    /// If there is none, or one of another version.
    pub fn parse(config: &[u8]) -> Result<Self> {
        let mut config: serde_json::Value =
            serde_json::from_slice(config).context(|| "the configuration of the image")?;
        let found = config.get_mut(KEY).map(serde_json::Value::take);
        let found = found.ok_or_else(|| Error::new("the image is no snapshot of torpor"))?;
        let version = found.get("version").and_then(serde_json::Value::as_u64);
        let known = u64::from(VERSION)..=u64::from(SEALED_VERSION);
        if !version.is_some_and(|version| known.contains(&version)) {
            let shown = version.map_or_else(|| "none".to_owned(), |v| v.to_string());
            return Err(Error::new(format!("a snapshot of version {shown} is not known here")));
        }
        let what = || "the description of the snapshot";
        let description: Self = serde_json::from_value(found).context(what)?;
        if description.version == VERSION {
            return Ok(description);
        }
        let hidden = config.get_mut(SEALED_KEY).map(serde_json::Value::take).unwrap_or_default();
        let hidden = Some(serde_json::from_value(hidden).context(what)?);
        Ok(Self { hidden, ..description })
    }

    /// As much of it as brings the packs in: nothing that is ever sealed.
    #[must_use]
    pub(crate) fn of_packs(&self) -> Self {
        let Self { version, tried, sealed, .. } = *self;
        Self { version, tried, sealed, packs: self.packs.clone(), ..Self::default() }
    }

    /// Whether its memory is in the small layer: that of a sealed one of an earlier version is.
    #[must_use]
    pub(crate) fn comes_whole(&self) -> bool {
        self.sealed && self.packs.is_empty()
    }

    /// The packs, with their layers in `manifest`.
    ///
    /// # Errors
    /// If a layer is not there, or two packs have one layer or one number.
    pub fn layers<'m>(&'m self, manifest: &'m Manifest) -> Result<Vec<(&'m Pack, &'m Descriptor)>> {
        let find = |(at, pack): (usize, &'m Pack)| {
            let is_same = |one: &Pack| one.number == pack.number || one.layer == pack.layer;
            if self.packs[..at].iter().any(is_same) {
                return Err(Error::new(format!("the image has its pack {} twice", pack.number)));
            }
            let layer = manifest.layers.iter().find(|layer| layer.digest == pack.layer);
            let missing = || Error::new(format!("the image lacks its layer {}", pack.layer));
            Ok((pack, layer.ok_or_else(missing)?))
        };
        self.packs.iter().enumerate().map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// One of two packs with the same layer would be looked at, and the other one used.
    #[test]
    fn no_two_packs_are_one() {
        let layer = |digest: &str| Descriptor {
            media_type: String::new(),
            digest: digest.to_owned(),
            size: 1,
            annotations: BTreeMap::new(),
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: String::new(),
            config: layer("config"),
            layers: ["small", "one", "other"].map(layer).to_vec(),
            annotations: BTreeMap::new(),
        };
        let pack = |(number, layer): (u32, &str)| Pack {
            layer: layer.to_owned(),
            plain: String::new(),
            number,
            list_offset: 0,
            list_size: 0,
            list_digest: String::new(),
        };
        let of = |packs: [(u32, &str); 2]| {
            let packs = packs.map(pack).to_vec();
            let description = Description { packs, ..Description::default() };
            description.layers(&manifest).map(|found| found.len()).map_err(|e| e.to_string())
        };
        assert_eq!(of([(1, "one"), (2, "other")]), Ok(2));
        for packs in [[(1, "one"), (1, "other")], [(2, "one"), (1, "one")]] {
            assert_eq!(of(packs).unwrap_err(), "the image has its pack 1 twice");
        }
        assert_eq!(of([(1, "one"), (2, "none")]).unwrap_err(), "the image lacks its layer none");
    }
}
