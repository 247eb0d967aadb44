//! Podman: containers of its images, and images that it knows as checkpoints.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use torpor_blobs::oci::Manifest;

use crate::error::{Context, Error, Result};
use crate::ready::Container;
use crate::source::Image;
use crate::{archive, cri, own, places};

/// The annotations by which Podman knows a checkpoint.
const CHECKPOINT: &str = "io.podman.annotations.checkpoint.";
/// What Podman exports beside the images, and looks for when it restores: what each container has of its
/// own is left out there.
const OTHERS: &[&str] = &[
    "config.dump",
    "spec.dump",
    NETWORK,
    "devshm-checkpoint.tar",
    "rootfs-diff.tar",
    "deleted.files",
];
/// The addresses that a container had.
const NETWORK: &str = "network.status";
/// What Podman says when something has the name already that a container was to get.
const TAKEN: &str = "name is already in use";
/// The annotation of the image that a container was made of.
const ROOTFS_IMAGE: &str = "io.podman.annotations.checkpoint.rootfsImageID";

/// Podman, with this program as the engine of its runtime.
#[derive(Debug)]
pub struct Podman {
    path: OsString,
}

impl Podman {
    /// Podman as it is set up here.
    ///
    /// # Errors
    /// If there is no place for the name `criu`.
    pub fn new() -> Result<Self> {
        Ok(Self { path: places::path()? })
    }

    fn call(&self, words: &[&str]) -> Command {
        let mut command = Command::new("podman");
        command.args(words).env("PATH", &self.path).stdin(Stdio::null());
        command
    }

    /// What a call prints.
    fn say(&self, words: &[&str]) -> Result<String> {
        let output = self.call(words).output().context(|| "starting podman")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => {
                let action = words.iter().take(2).copied().collect::<Vec<_>>().join(" ");
                Err(Error::new(format!("podman {action}: {}", text(&output.stderr))))
            }
        }
    }

    /// Starts a container of an image.
    ///
    /// # Errors
    /// If Podman cannot be started or fails: what it says.
    pub fn start(&self, image: &Image, id: &str, options: &[String]) -> Result<()> {
        // The engine shows nothing to a container that its runtime hides.
        let hidden = format!("mask={}", cri::HIDDEN.join(":"));
        let mut all = vec!["run", "--detach", "--name", id, "--security-opt", &hidden];
        all.extend(options.iter().map(String::as_str));
        all.push(&image.name);
        all.extend(image.command.iter().map(String::as_str));
        self.say(&all).map(drop)
    }

    /// Restores a container from an archive as Podman exports it, with these ports of the host.
    ///
    /// # Errors
    /// If Podman fails: the first error of the engine's log, or what it says.
    pub fn restore(&self, archive: &Path, id: &str, ports: &[String]) -> Result<()> {
        let file = archive.display().to_string();
        let mut words = vec!["container", "restore", "--file-locks", "--import", &file];
        words.extend(["--name", id]);
        words.extend(ports.iter().flat_map(|ports| ["--publish", ports]));
        self.say(&words).map(drop)
    }

    /// Whether there is a container of this name, or something else of Podman's that keeps one from
    /// having it.
    #[must_use]
    pub fn knows(&self, id: &str) -> bool {
        let output = self.call(&["container", "exists", id]).output();
        output.is_ok_and(|output| output.status.success())
    }

    /// Fails unless Podman has a network of this name.
    ///
    /// # Errors
    /// If Podman has none of this name, or does not answer.
    pub(crate) fn check_network(&self, name: &str) -> Result<()> {
        let known = self.say(&["network", "ls", "--format", "{{.Name}}"])?;
        match known.lines().any(|known| known == name) {
            true => Ok(()),
            false => Err(Error::new(format!("Podman has no network {name}"))
                .hint("podman network ls names those that there are")),
        }
    }

    /// Fails if the name of an image leads to another one than the snapshot was made of. Podman
    /// fetches one that is not there.
    ///
    /// # Errors
    /// If the image has changed.
    pub fn fits(&self, manifest: &Manifest, image: &Image) -> Result<()> {
        let here = self.say(&["image", "inspect", "--format", "{{.Id}}", &image.name]);
        match (here, manifest.annotations.get(ROOTFS_IMAGE)) {
            (Ok(here), Some(made_of)) if here != *made_of => Err(Error::new(format!(
                "the snapshot is of another image: {} is {here} now, and not {made_of}",
                image.name
            ))
            .hint("torpor snapshot create makes one of the image as it is now")),
            _ => Ok(()),
        }
    }

    /// Puts a container to sleep; what Podman exports of it is unpacked in `dir`.
    ///
    /// # Errors
    /// If Podman fails: what it says; if its archive cannot be unpacked in `dir`.
    pub fn checkpoint(&self, id: &str, dir: &Path) -> Result<()> {
        let archive = dir.with_extension("tar");
        let name = archive.display().to_string();
        // Whoever talks to it is not there any more when it wakes up.
        let options = dir.with_extension("conf");
        fs::write(&options, "tcp-close\ncompress lz4\nwipe-on-fork\n")
            .context(|| options.display().to_string())?;
        let words = ["container", "checkpoint", "--compress", "none", "--file-locks", "--export"];
        let mut call = self.call(&[&words[..], &[&name, id]].concat());
        let output =
            call.env("CRIU_CONFIG_FILE", &options).output().context(|| "starting podman")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::new(format!("podman container checkpoint: {said}")));
        }
        let file = File::open(&archive).context(|| name.clone())?;
        tar::Archive::new(file).unpack(dir).context(|| name.clone())?;
        fs::remove_file(&archive).context(|| name)
    }

    /// Fails if a container of an image has volumes: Podman exports them in files of their own, and makes volumes of
    /// the same names of them, so that there could be one container.
    ///
    /// # Errors
    /// If the container has volumes, or Podman does not answer.
    pub(crate) fn check_volumes(&self, id: &str, image: &str) -> Result<()> {
        let format =
            "{{range .Mounts}}{{if eq .Type \"volume\"}}{{println .Destination}}{{end}}{{end}}";
        let all = self.say(&["container", "inspect", "--format", format, id])?;
        let places: Vec<&str> = all.lines().filter(|line| !line.is_empty()).collect();
        if places.is_empty() {
            return Ok(());
        }
        let places = places.join(", ");
        Err(Error::new(format!(
            "the image {image} has volumes ({places}): what is in them would be in no snapshot"
        ))
        .hint("--from runc:BUNDLE has files there like any others; so has an image without VOLUME"))
    }

    /// Ends a container, if it is there, and forgets it, with the volumes that were made for it.
    pub fn delete(&self, id: &str) {
        // There may be none.
        let _ = self.call(&["rm", "--force", "--volumes", "--time", "0", id]).output();
    }

    /// The annotations of an image that holds what is unpacked in `dir`.
    ///
    /// # Errors
    /// If `dir` holds no `config.dump` of Podman, or Podman does not answer.
    pub fn annotations(&self, dir: &Path, name: &str) -> Result<BTreeMap<String, String>> {
        let file = dir.join("config.dump");
        let text = fs::read(&file).context(|| file.display().to_string())?;
        let config: Value = serde_json::from_slice(&text).context(|| file.display().to_string())?;
        let of = |key: &str| config[key].as_str().unwrap_or_default().to_owned();
        let runtime = of("runtime");
        let runtime = runtime.rsplit('/').next().unwrap_or_default().to_owned();
        let info: Value = serde_json::from_str(&self.say(&["info", "--format", "json"])?)
            .context(|| "what podman info says")?;
        let host =
            |path: &str| info.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let facts = [
            ("name", name.to_owned()),
            ("rawImageName", of("rawImageName")),
            ("rootfsImageID", of("rootfsImageID")),
            ("rootfsImageName", of("rootfsImageName")),
            ("podman.version", host("/version/Version")),
            ("criu.version", "4.2".to_owned()),
            ("runtime.name", runtime),
            ("runtime.version", host("/host/ociRuntime/version")),
            ("conmon.version", host("/host/conmon/version")),
            ("host.arch", host("/host/arch")),
            ("host.kernel", host("/host/kernel")),
            ("cgroups.version", host("/host/cgroupVersion")),
            ("distribution.name", host("/host/distribution/distribution")),
            ("distribution.version", host("/host/distribution/version")),
        ];
        Ok(facts.into_iter().map(|(key, value)| (format!("{CHECKPOINT}{key}"), value)).collect())
    }

    /// An image's name with its digest, by which others pull it.
    ///
    /// # Errors
    /// If Podman fails: what it says; if it knows no digest of the image.
    pub fn reference(&self, image: &str) -> Result<String> {
        let format = "{{range .RepoDigests}}{{println .}}{{end}}";
        let all = self.say(&["image", "inspect", "--format", format, image])?;
        // One image may have been pulled by several names.
        let (bare, _) =
            image.split_once('@').or_else(|| image.rsplit_once(':')).unwrap_or((image, ""));
        let named = |line: &&str| line.split_once('@').is_some_and(|(name, _)| name == bare);
        // The first one is what it was made with, if it was made here: no registry knows that.
        let found = all.lines().rfind(named).or_else(|| all.lines().next_back());
        let none = || Error::new(format!("podman knows no digest of the image {image}"));
        found.map(str::to_owned).ok_or_else(none)
    }
}

impl Container for Podman {
    fn pid(&self, id: &str) -> Result<u32> {
        let pid = self.say(&["container", "inspect", "--format", "{{.State.Pid}}", id])?;
        let pid = pid.parse().ok().filter(|pid| *pid > 0);
        pid.ok_or_else(|| Error::new(format!("the container {id} does not run")))
    }

    fn exec(&self, id: &str, words: &[&str]) -> Command {
        self.call(&[&["exec", id], words].concat())
    }

    fn printed(&self, id: &str) -> String {
        let output = self.call(&["logs", "--tail", "10", id]).output();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        let both = output.map(|output| [text(&output.stdout), text(&output.stderr)]);
        both.unwrap_or_default().join("\n").trim().to_owned()
    }
}

/// Whether Podman has made no container since somebody else had the name first, meanwhile: that one is not ours to end.
#[must_use]
pub(crate) fn is_taken(error: &Error) -> bool {
    error.to_string().contains(TAKEN)
}

/// Names of the files beside the images that a container is restored from. It gets addresses of its own.
#[must_use]
pub fn names() -> Vec<&'static str> {
    OTHERS.iter().copied().filter(|name| *name != NETWORK).collect()
}

/// Has the container that is exported in `dir` come back with this host name, and in this network.
///
/// # Errors
/// If what describes it is not understood.
pub fn adopt(dir: &Path, hostname: &str, network: Option<&str>) -> Result<()> {
    own::set_hostname(&dir.join(archive::IMAGES), hostname)?;
    edit(&dir.join("spec.dump"), |spec| {
        spec["hostname"] = json!(hostname);
        Ok(())
    })?;
    let Some(network) = network else { return Ok(()) };
    edit(&dir.join("config.dump"), |config| {
        let known = config.get_mut("newNetworks").and_then(Value::as_object_mut);
        let none = || Error::new("the container of the snapshot was in no network of Podman's");
        // The interface keeps its name; addresses are those of the new network.
        let known = known.filter(|known| known.len() == 1).ok_or_else(none)?;
        let interface = known.values().next().map(|network| network["interface_name"].clone());
        let options = json!({ "interface_name": interface.unwrap_or_default() });
        *known = std::iter::once((network.to_owned(), options)).collect();
        Ok(())
    })
}

/// Changes a file of JSON.
fn edit(file: &Path, change: impl FnOnce(&mut Value) -> Result<()>) -> Result<()> {
    let shown = || file.display().to_string();
    let mut value = serde_json::from_slice(&fs::read(file).context(shown)?).context(shown)?;
    change(&mut value)?;
    fs::write(file, serde_json::to_vec(&value).context(shown)?).context(shown)
}

/// The files beside the images in what is unpacked in `dir`.
///
/// # Errors
/// If one of them is there and cannot be read.
pub fn others(dir: &Path) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut found = Vec::new();
    for name in OTHERS {
        let file = dir.join(name);
        if file.exists() {
            found.push((*name, fs::read(&file).context(|| file.display().to_string())?));
        }
    }
    Ok(found)
}
