//! Podman: containers of runc, of which it knows more.
//!
//! Podman dumps a container in one step, and makes one in one step. So here runc dumps it, as often as a migration
//! needs that; when it is stopped for the last time, Podman [exports](export) what else belongs to it, with an engine
//! that does nothing. At the destination Podman imports that, and its runc finds the images that have come in rounds.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_kernel::{proc, tree};

use super::bundle::{self, Terms};
use super::{Container, Runtime, State, archive, configuration, job};
use crate::cancel::Cancel;
use crate::error::{Context, Error, Result};
use crate::group::Group;
use crate::record::make_private;
use crate::task::Task;

/// What Podman exports lies among the images of the last round under this name.
pub(crate) const ARCHIVE: &str = "podman.tar";
/// Names of images are no longer.
const MAX_NAME: usize = 500;

/// What Podman says of a container.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    /// All of its id.
    pub id: String,
    name: String,
    /// The id of its image.
    image: String,
    #[serde(default)]
    image_name: String,
    state: Running,
    static_dir: PathBuf,
    #[serde(rename = "OCIRuntime", default)]
    runtime: String,
    #[serde(default)]
    pod: String,
    #[serde(default)]
    mounts: Vec<Mount>,
    network_settings: Networks,
    host_config: HostConfig,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Running {
    status: String,
    pid: i32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Mount {
    #[serde(rename = "Type")]
    kind: String,
    /// That of a volume.
    #[serde(default)]
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Networks {
    #[serde(default)]
    networks: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostConfig {
    #[serde(default)]
    network_mode: String,
    #[serde(default)]
    ipc_mode: String,
    #[serde(default)]
    pid_mode: String,
    /// By port of the container, where it is published.
    #[serde(default)]
    port_bindings: Option<BTreeMap<String, Option<Vec<PortBinding>>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct PortBinding {
    #[serde(default)]
    host_port: String,
}

impl Inspected {
    /// What every runtime says of a container.
    #[must_use]
    pub(super) fn state(self) -> State {
        State { status: self.state.status, pid: self.state.pid, bundle: self.static_dir }
    }

    /// What keeps it here whatever the other host is like: in words, and what to do.
    fn obstacle(&self) -> Option<(String, String)> {
        let runtime = Path::new(&self.runtime).file_name().unwrap_or_default();
        if runtime != Runtime::Runc.program() {
            let text = format!("runs by {}, and only those of runc move", runtime.display());
            return Some((text, "podman --runtime runc run".to_owned()));
        }
        if !self.pod.is_empty() {
            let text = format!("is part of pod {}", self.pod);
            return Some((text, "run it outside of a pod".to_owned()));
        }
        let host = &self.host_config;
        let modes = [&host.network_mode, &host.ipc_mode, &host.pid_mode];
        if let Some(other) = modes.iter().find_map(|mode| mode.strip_prefix("container:")) {
            let text = format!("lives in a namespace of container {other}");
            return Some((text, "give it one of its own".to_owned()));
        }
        if self.image_name.is_empty() {
            let text = "is made of a directory, and not of an image".to_owned();
            return Some((text, "podman run IMAGE".to_owned()));
        }
        None
    }

    /// The ports of this host that it publishes.
    fn ports(&self) -> Vec<String> {
        let bindings = self.host_config.port_bindings.iter().flat_map(BTreeMap::values);
        bindings.flatten().flatten().map(|binding| binding.host_port.clone()).collect()
    }

    /// The names of the volumes that Podman keeps for it.
    #[must_use]
    pub(super) fn volumes(&self) -> Vec<String> {
        let volumes = self.mounts.iter().filter(|mount| mount.kind == "volume");
        volumes.map(|mount| mount.name.clone()).collect()
    }
}

/// What describes a container to the destination.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    pub(super) name: String,
    pub(super) image: String,
    pub(super) image_id: String,
    pub(super) networks: Vec<String>,
    pub(super) volumes: Vec<String>,
    /// The ports of its host that it publishes.
    #[serde(default)]
    pub(super) ports: Vec<String>,
    /// Its configuration, as runc has it.
    pub(super) spec: Value,
}

impl Description {
    /// Makes a configuration the one that was described, and so was judged.
    ///
    /// # Errors
    /// If it says anything else.
    pub(super) fn is_spec(&self, found: &mut Value) -> Result<()> {
        // The description has the whole path. Podman here has one of its own.
        if found["root"].is_object() {
            found["root"]["path"] = self.spec["root"]["path"].clone();
        }
        let differs = |name: &&&str| found[**name] != self.spec[**name];
        match found == &self.spec {
            true => Ok(()),
            false => {
                let part = PARTS.iter().find(differs).unwrap_or(&"something");
                Err(archive::wrong(format!("spec.dump: {part} is not what was described")))
            }
        }
    }

    /// The part of the configuration that Podman and runc do before the engine is asked, and that is not of Podman here.
    fn demand(&self) -> Value {
        let mut spec = self.spec.clone();
        // It is in the storage of Podman here.
        spec["root"]["path"] = "rootfs".into();
        if let Some(mounts) = spec["mounts"].as_array_mut() {
            mounts
                .retain(|mount| !mount["destination"].as_str().is_some_and(|at| OWN.contains(&at)));
        }
        spec
    }
}

/// The parts of a configuration, to name one of them.
const PARTS: [&str; 7] = ["process", "root", "hostname", "mounts", "hooks", "annotations", "linux"];
/// Where Podman mounts files of its own: it takes no others.
const OWN: [&str; 6] = [
    "/dev/shm",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/run/.containerenv",
    "/run/secrets",
];

/// The root file system of an image, as long as this is there.
#[derive(Debug)]
pub(super) struct Mounted<'a> {
    image: &'a str,
    pub(super) path: PathBuf,
}

impl<'a> Mounted<'a> {
    /// Has Podman mount the image of this id.
    ///
    /// # Errors
    /// If Podman has none, or fails at that.
    pub(super) fn new(image: &'a str) -> Result<Self> {
        let path = PathBuf::from(say(&["image", "mount", "--", image])?);
        let mounted = Self { image, path };
        match mounted.path.is_absolute() && mounted.path.is_dir() {
            true => Ok(mounted),
            false => Err(Error::refused(format!("podman image mount says {:?}", mounted.path))),
        }
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if let Err(error) = say(&["image", "unmount", "--", self.image]) {
            tracing::warn!("{error}");
        }
    }
}

/// Whether Podman gives containers, networks and volumes such names.
pub(super) fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=MAX_NAME).contains(&text.len())
        && !text.starts_with(['.', '-', '_'])
        && text.bytes().all(plain)
}

/// A call of Podman.
#[must_use]
pub(super) fn call(words: &[&str]) -> Command {
    let mut command = Command::new(Runtime::Podman.program());
    command.args(words).stdin(Stdio::null());
    command
}

/// What a call prints, or the error that it ends with.
fn ask(words: &[&str]) -> Result<std::result::Result<String, String>> {
    let output = call(words).output().context(|| "run podman".to_owned())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let done = output.status.success();
    Ok(if done { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) })
}

/// What a call prints that must succeed.
fn say(words: &[&str]) -> Result<String> {
    let failed = |said| Error::refused(format!("podman {}: {said}", words[..2].join(" ")));
    ask(words)?.map_err(failed)
}

/// Whether Podman here has a thing of this kind: `container`, `image`, `network`, `volume`.
fn has(kind: &str, name: &str) -> Result<bool> {
    let status = call(&[kind, "exists", "--", name]).stderr(Stdio::null()).status();
    match status.context(|| "run podman".to_owned())?.code() {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => Err(Error::refused(format!("podman {kind} exists {name}: it fails"))),
    }
}

/// What Podman knows of a container; `None` if it knows no such container.
///
/// # Errors
/// If there is no Podman, or it says something else.
pub(super) fn inspect(name: &str) -> Result<Option<Inspected>> {
    let text = match ask(&["container", "inspect", "--", name])? {
        Ok(text) => text,
        Err(said) if said.contains("no such container") => return Ok(None),
        Err(said) => return Err(Error::refused(format!("podman container inspect: {said}"))),
    };
    let [found] = serde_json::from_str::<[Inspected; 1]>(&text)
        .map_err(|error| Error::refused(format!("podman container inspect {name}: {error}")))?;
    Ok(Some(found))
}

/// Describes a container that is to move.
///
/// # Errors
/// If Podman does not know it, it does not run, or has what keeps it from moving; if what Podman says of it is no JSON.
pub(super) fn describe(id: &str) -> Result<String> {
    let none = || Error::refused(format!("Podman does not know container {id} any more"));
    let found = inspect(id)?.ok_or_else(none)?;
    if let Some((text, hint)) = found.obstacle() {
        return Err(Error::refused_with(format!("container {} {text}", found.name), hint));
    }
    let spec = configuration(&found.static_dir)?;
    let spec = serde_json::from_str(&spec).map_err(|error| Error::refused(error.to_string()))?;
    // Others are none that could be made.
    let is_bridge = found.host_config.network_mode == "bridge";
    let networks = found.network_settings.networks.iter().filter(|_| is_bridge).flatten();
    let networks = networks.map(|(name, _)| name.clone()).collect();
    let (volumes, ports) = (found.volumes(), found.ports());
    let (name, image, image_id) = (found.name, found.image_name, found.image);
    let description = Description { name, image, image_id, networks, volumes, ports, spec };
    serde_json::to_string(&description).map_err(|error| Error::refused(error.to_string()))
}

/// Reads a description.
///
/// # Errors
/// If it is none, or has names that are none.
pub(super) fn read(description: &str) -> Result<Description> {
    let wrong = |why: String| Error::Protocol(format!("description of a container: {why}"));
    let read: Description =
        serde_json::from_str(description).map_err(|error| wrong(error.to_string()))?;
    let is_plain = |text: &&String| {
        (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let odd = {
        let mut images = [&read.image, &read.image_id].into_iter();
        let mut names = read.networks.iter().chain(&read.volumes).chain([&read.name]);
        images.find(|text| !is_plain(text)).or_else(|| names.find(|text| !is_name(text))).cloned()
    };
    match odd {
        Some(text) => Err(wrong(format!("{text:?} is no name"))),
        None => Ok(read),
    }
}

/// Judges a description by what Podman has here.
///
/// # Errors
/// If the description is no container of Podman; if something has its name or the names of its volumes here, or its image or
/// a network is not here; if it publishes ports, and `terms` do not allow it; if the bundle is refused ([`bundle::judge`]); if
/// Podman does not answer.
pub(super) fn judge(container: &Container, description: &str, terms: Terms) -> Result<()> {
    let Description { name, image, image_id, networks, volumes, ports, spec } = read(description)?;
    bundle::judge(&spec, &name, terms)?;
    if !ports.is_empty() && !terms.ports {
        return Err(Error::refused_with(
            format!("container {name} publishes ports of its host: {}", ports.join(", ")),
            "torpor agent --allow-ports",
        ));
    }
    if terms.rootfs {
        return Err(Error::Protocol(format!("the root file system of container {name} of Podman")));
    }
    if has("container", &name)? {
        return Err(Error::refused(format!("there is a container {name} here")));
    }
    if container.id.len() != 64 || !container.id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Error::Protocol(format!("{:?} is no id of Podman's", container.id)));
    }
    if !has("image", &image)? {
        return Err(Error::refused_with(
            format!("the image {image} of container {name} is not here"),
            format!("there: podman pull {image}, or podman save and podman load"),
        ));
    }
    let here = say(&["image", "inspect", "--format", "{{.Id}}", "--", &image])?;
    if here.trim_start_matches("sha256:") != image_id.trim_start_matches("sha256:") {
        return Err(Error::refused_with(
            format!("the image {image} here is not that of container {name}, which is {image_id}"),
            format!("there: podman pull {image}, or podman save and podman load"),
        ));
    }
    for network in networks {
        if !has("network", &network)? {
            return Err(Error::refused_with(
                format!("container {name} is part of network {network}, which is not here"),
                format!("there: podman network create {network}, with the same subnet"),
            ));
        }
    }
    for volume in volumes {
        if has("volume", &volume)? {
            return Err(Error::refused_with(
                format!("there is a volume {volume} here, which container {name} would bring"),
                format!("there: podman volume rm {volume}, if nothing needs it"),
            ));
        }
    }
    Ok(())
}

/// What images of a container that could come are judged with: a directory with its configuration.
///
/// # Errors
/// If the directory cannot be made, or not be written to.
pub(super) fn sketch(dir: &Path, description: &str) -> Result<PathBuf> {
    write_bundle(dir, &read(description)?.spec)
}

/// What the policy judges before anything is stopped: a bundle in `dir` with the part of the configuration that is done before
/// the engine is asked.
///
/// # Errors
/// If the directory cannot be made, or not be written to.
pub(crate) fn demand(dir: &Path, description: &str) -> Result<PathBuf> {
    write_bundle(dir, &read(description)?.demand())
}

/// Makes a directory with a configuration.
fn write_bundle(dir: &Path, spec: &Value) -> Result<PathBuf> {
    let file = dir.join("config.json");
    make_private(dir)?;
    fs::write(&file, spec.to_string()).context(|| file.display().to_string())?;
    Ok(dir.to_owned())
}

/// Has Podman export a container that is stopped, to where the images of its last round are. Podman believes that its
/// runtime has just dumped it, and goes on.
///
/// # Errors
/// If Podman fails at that; if somebody cancels.
pub(super) fn export(
    container: &Container,
    images: &Path,
    work: &Path,
    cancel: &Cancel,
) -> Result<()> {
    let bin = work.join("idle");
    make_private(&bin)?;
    let engine = bin.join("criu");
    let failed = || engine.display().to_string();
    let own = job::shell(&job::own()?);
    fs::write(&engine, format!("#!/bin/sh\nexec '{own}' agent idle \"$@\"\n")).context(failed)?;
    fs::set_permissions(&engine, fs::Permissions::from_mode(0o700)).context(failed)?;

    let none =
        || Error::refused(format!("Podman does not know container {} any more", container.id));
    let kept = inspect(&container.id)?.ok_or_else(none)?.static_dir;
    let before = names(&kept);
    let archive = images.join(ARCHIVE).display().to_string();
    let words = ["container", "checkpoint", "--leave-running", "--compress", "none"];
    let log = work.join("export.log");
    let mut command = call(&words);
    command.args(["--export", &archive, &container.id]).env("PATH", job::path(&bin));
    command.stdout(Stdio::null()).stderr(File::create(&log).context(|| log.display().to_string())?);
    let ended = Group::start(&mut command, "podman").and_then(|it| it.finish_unless(cancel));
    for name in names(&kept).into_iter().filter(|name| !before.contains(name)) {
        let path = kept.join(name);
        if let Err(error) = tree::remove_at(&path) {
            tracing::warn!("{}: {error}", path.display());
        }
    }
    if ended?.success() {
        return Ok(());
    }
    let said = fs::read(&log).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    Err(Error::refused(format!("podman container checkpoint: {}", said.trim())))
}

/// What a call has failed at, of what it has said.
#[must_use]
pub(super) fn last_error(said: &str) -> Option<String> {
    said.lines().rev().find_map(|line| line.strip_prefix("Error: ")).map(str::to_owned)
}

/// Who looks after the container of this first process, which is its child, also if it has just ended. Podman is not asked: when
/// the container ends since it runs elsewhere, conmon would have Podman start it again, by its restart policy.
pub(super) fn conmon_of(root: &Task) -> Option<Task> {
    let stat = proc::stat(root.pid).ok().filter(|stat| stat.start_time == root.start)?;
    let conmon = Task::find(stat.ppid).ok()?;
    let name = proc::stat(conmon.pid).ok()?.comm;
    (name == b"conmon").then_some(conmon)
}

/// Removes a container that could not be made, and the volumes that were made for it.
pub(super) fn discard(container: &Container) {
    let volumes = inspect(&container.id).ok().flatten().map(|found| found.volumes());
    container.forget();
    for volume in volumes.unwrap_or_default() {
        if let Err(error) = say(&["volume", "rm", "--", &volume]) {
            tracing::warn!("{error}");
        }
    }
}

/// The names of what is in a directory.
fn names(dir: &Path) -> Vec<std::ffi::OsString> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// How Podman here does things, from `podman info`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ways {
    /// The program that looks after containers.
    pub conmon: PathBuf,
    /// Who makes cgroups: `cgroupfs` or `systemd`.
    pub cgroups: String,
}

impl Ways {
    /// Asks it.
    ///
    /// # Errors
    /// If Podman cannot be started, fails, or says something else than that.
    pub fn ask() -> Result<Self> {
        let text = say(&["info", "--format", "{{.Host.Conmon.Path}} {{.Host.CgroupManager}}"])?;
        match text.rsplit_once(' ') {
            Some((conmon, cgroups)) if conmon.starts_with('/') => {
                Ok(Self { conmon: conmon.into(), cgroups: cgroups.to_owned() })
            }
            _ => Err(Error::refused(format!("podman info says {text:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{BufRead, BufReader};

    use rustix::process::Signal;
    use serde_json::json;

    use super::*;

    fn inspected(change: impl FnOnce(&mut Value)) -> Inspected {
        let mut said = json!({
            "Id": "a1", "Name": "web", "Image": "b2", "ImageName": "localhost/web:1",
            "State": { "Status": "running", "Pid": 7 }, "StaticDir": "/x/userdata",
            "OCIRuntime": "/usr/bin/runc", "Pod": "", "Mounts": [],
            "NetworkSettings": { "Networks": { "podman": {} } },
            "HostConfig": { "NetworkMode": "bridge", "IpcMode": "private", "PidMode": "private" },
        });
        change(&mut said);
        serde_json::from_value(said).unwrap()
    }

    #[test]
    fn what_cannot_move_is_named_with_what_to_do() {
        assert!(inspected(|_| {}).obstacle().is_none());
        let named = |at: &str, value: Value| {
            let at = at.to_owned();
            inspected(|said| *said.pointer_mut(&at).unwrap() = value).obstacle().unwrap()
        };
        assert!(named("/OCIRuntime", json!("crun")).1.contains("--runtime runc"));
        assert!(named("/Pod", json!("p3")).0.contains("pod p3"));
        assert!(named("/HostConfig/IpcMode", json!("container:c4")).0.contains("container c4"));
        assert!(named("/ImageName", json!("")).0.contains("directory"));
        let mounts = json!([{ "Type": "bind" }, { "Type": "volume", "Name": "data" }]);
        assert_eq!(inspected(|said| said["Mounts"] = mounts).volumes(), ["data"]);
    }

    /// What this host itself has at such a port would not be reached any more.
    #[test]
    fn ports_of_this_host_are_asked_for() {
        let bindings = json!({
            "6379/tcp": [{ "HostIp": "", "HostPort": "16379" }, { "HostIp": "::1", "HostPort": "22" }],
            "80/tcp": null,
        });
        let ports = inspected(|said| said["HostConfig"]["PortBindings"] = bindings).ports();
        assert_eq!(ports, ["16379", "22"]);
        assert!(inspected(|_| {}).ports().is_empty());
        let description = json!({
            "name": "web", "image": "a", "image_id": "b2", "networks": [], "volumes": [],
            "ports": ports, "spec": {},
        });
        let (runtime, id) = (Runtime::Podman, "a1".to_owned());
        let container = Container { runtime, id, root: None };
        let terms = Terms { hooks: false, rootfs: false, ports: false };
        let error = judge(&container, &description.to_string(), terms).unwrap_err();
        assert!(error.to_string().contains("ports of its host: 16379, 22"), "{error}");
        assert_eq!(error.hint(), Some("torpor agent --allow-ports"));
    }

    #[test]
    fn who_looks_after_a_container_is_its_parent() {
        for (name, is_conmon) in [("conmon", true), ("other", false)] {
            let dir = tempfile::tempdir().unwrap();
            let program = dir.path().join(name);
            // By another process: what this one has open for writing is open in what other tests start, too (`ETXTBSY`).
            let copy = Command::new("cp").arg("/bin/sh").arg(&program).status();
            assert!(copy.unwrap().success());
            let mut shell = Command::new(program);
            shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
            let mut shell = shell.spawn().unwrap();
            let mut line = String::new();
            BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let root = Task::find(line.trim().parse().unwrap()).unwrap();
            let parent = Task::find(shell.id().cast_signed()).unwrap();
            let (found, former) =
                (conmon_of(&root), conmon_of(&Task { start: root.start - 1, ..root }));
            root.signal(Signal::KILL);
            shell.wait().unwrap();
            assert_eq!(found, is_conmon.then_some(parent));
            assert_eq!(former, None, "that was another process of this number");
        }
    }

    #[test]
    fn descriptions_are_checked() {
        let of = |image: &str, networks: Value| {
            let all = json!({
                "name": "web", "image": image, "image_id": "b2", "networks": networks,
                "volumes": [], "spec": {},
            });
            read(&all.to_string())
        };
        assert_eq!(of("localhost/web:1", json!(["podman"])).unwrap().networks, ["podman"]);
        for image in ["", "a b", "a\n", &"a".repeat(MAX_NAME + 1)] {
            assert!(of(image, json!([])).is_err(), "{image:?}");
        }
        assert!(of("a", json!(["x\0"])).is_err());
        assert!(read("{}").is_err());
    }
}
