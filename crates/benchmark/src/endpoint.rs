//! An endpoint while it is measured: a runtime that was there, or one that was started for this.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use torpor_kernel::proc;
use torpor_worker::tell;

use crate::cell::Network;
use crate::config::{Config, Endpoint, Handler};
use crate::cri::{CallError, Client};
use crate::image::{self, BASE, Contents, PULLED, TAG, TOOLS, find};
use crate::keeper::{DIRECTORY, Job, TAKEN, World};
use crate::results::{PULLED_FACT, Target};
use crate::world::{no_network, plugins, shim, world};
use crate::{cgroups, digest, machine, own, program};

/// The label of all that the benchmark makes.
pub(crate) const LABEL: (&str, &str) = ("torpor.benchmark", "1");

/// How long a containerd may take until it answers.
const START: Duration = Duration::from_secs(30);

/// Why an endpoint cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// A file or process could not be made.
    #[error("{0}: {1}")]
    Io(String, #[source] std::io::Error),
    /// An image could not be made.
    #[error(transparent)]
    Image(#[from] image::ImageError),
    /// The runtime does not do what is needed for all else.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A containerd that was started does not answer.
    #[error("{0} does not answer after {s} s; the end of its log: {1}", s = START.as_secs())]
    Start(PathBuf, String),
    /// A containerd that was started has ended.
    #[error("{0} has ended before it answered; the end of its log: {1}")]
    Ended(PathBuf, String),
    /// Another run is at work there, and each would remove what the other makes.
    #[error(
        "another run measures {0}, or what it has made is still being removed: wait for its end"
    )]
    Taken(String),
    /// The endpoint asks the registry of the tool in a way that it does not speak.
    #[error(
        "{0}: this endpoint asks registries by HTTPS, and that of the benchmark, on the loopback \
         device, speaks HTTP: name 127.0.0.1 as insecure (docs/benchmark.md says how, under \
         \"CRI-O\")"
    )]
    Https(CallError),
}

/// An endpoint, ready.
#[derive(Debug)]
pub struct ReadyEndpoint {
    /// Its configuration.
    pub endpoint: Endpoint,
    /// The connection.
    pub client: Client,
    /// The address of the registry, as the endpoint sees it.
    pub registry: String,
    /// The parent of all control groups, and whether it is ours to write to.
    pub cgroup: Option<String>,
    /// The control group that the keeper removes in the end.
    pub group: String,
    /// The directory of this run.
    pub dir: PathBuf,
    /// What the images hold.
    pub contents: Contents,
    /// Why there is no network besides the host's, if so.
    pub no_network: Option<String>,
    keeper: Keeper,
}

/// The process that removes everything when this one ends.
#[derive(Debug)]
struct Keeper {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The end of its input is its signal; what it removes takes a moment.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

impl ReadyEndpoint {
    /// Makes an endpoint ready: starts it if it is to be started, and gives it the images.
    ///
    /// # Errors
    /// If it does not answer, or cannot run anything.
    pub async fn open(endpoint: &Endpoint, config: &Config) -> Result<Self, EndpointError> {
        let name = format!("{DIRECTORY}{:016x}", fastrand::u64(..));
        let dir = std::env::temp_dir().join(&name);
        // The keeper first: it makes the directory, and removes it whatever happens from here on.
        let same = |other: &&Endpoint| other.socket == endpoint.socket;
        let job = Job {
            dir: dir.clone(),
            cgroup: name.clone(),
            socket: endpoint.socket.clone(),
            first: config.endpoints.iter().find(same).is_none_or(|first| first == endpoint),
        };
        let mut keeper = Keeper::start(&job)?;
        let world = match &endpoint.containerd {
            Some(containerd) => Some(world(endpoint, containerd, &dir)?),
            None => None,
        };
        let ours = world.is_some();
        if !ours && machine::has_kubelet() {
            tell!(
                "{}: a kubelet runs here, and removes what is not its own from the runtime that it \
                 has: stop it, or give `containerd:` instead of `socket:`",
                endpoint.name
            );
        }
        let contents = image::build(&dir.join("store"), config.pulled_image.as_deref())?;
        if let Some(torpor) = config.engine() {
            let failed = |e| EndpointError::Io("bin/criu".into(), e);
            fs::create_dir_all(dir.join("bin")).map_err(failed)?;
            std::os::unix::fs::symlink(torpor, dir.join("bin/criu")).map_err(failed)?;
        }
        let port = keeper.begin(world.as_ref())?;
        let socket = endpoint.socket.clone().unwrap_or_else(|| socket_of(&dir));
        let group = format!("/{name}");
        let cgroup = match (ours, endpoint.cgroup_parent.as_str()) {
            (true, _) => Some(group.clone()),
            (false, "") => None,
            (false, parent) => Some(parent.to_owned()),
        };
        let place = Self {
            client: Client::new(&socket, Duration::from_secs(config.deadline))?,
            contents,
            registry: format!("127.0.0.1:{port}"),
            cgroup,
            group,
            no_network: no_network(ours),
            endpoint: endpoint.clone(),
            dir,
            keeper,
        };
        place.wait().await?;
        if !ours {
            sweep(&place.client).await?;
        }
        for image in [BASE, TOOLS] {
            let client = place.client.within(Duration::from_secs(120));
            client.pull(&place.image(image)).await.map_err(refused)?;
        }
        Ok(place)
    }

    /// An image's name at this endpoint.
    #[must_use]
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}:{TAG}", self.registry)
    }

    /// The network of sandboxes that are better off with one of their own.
    #[must_use]
    pub fn network(&self) -> Network {
        if self.no_network.is_none() { Network::Own } else { Network::Host }
    }

    /// Whether the tool has started this endpoint itself.
    #[must_use]
    pub fn ours(&self) -> bool {
        self.endpoint.containerd.is_some()
    }

    async fn wait(&self) -> Result<(), EndpointError> {
        let until = Instant::now() + START;
        let client = self.client.within(Duration::from_secs(5));
        let mut log = "it is empty".to_owned();
        loop {
            let error = match client.version().await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if !self.ours() {
                return Err(error.into());
            }
            // The keeper of one that has ended removes its log.
            let text = fs::read_to_string(self.dir.join("containerd.log")).unwrap_or_default();
            log = text.lines().last().map_or(log, str::to_owned);
            let program = || self.endpoint.containerd.clone().unwrap_or_default();
            if !self.dir.exists() {
                return Err(EndpointError::Ended(program(), log));
            }
            if Instant::now() > until {
                return Err(EndpointError::Start(program(), log));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Whether the endpoint still answers.
    pub async fn answers(&self) -> bool {
        self.client.within(Duration::from_secs(5)).version().await.is_ok()
    }

    /// All processes of the endpoint that the tool has started, containers included.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let mut all = vec![self.keeper()];
        let mut at = 0;
        while let Some(&pid) = all.get(at) {
            at += 1;
            let children = proc::children_of(pid.cast_signed());
            all.extend(children.into_iter().map(i32::cast_unsigned));
        }
        all.split_off(1)
    }

    /// The keeper's number.
    pub(crate) fn keeper(&self) -> u32 {
        self.keeper.child.id()
    }

    /// The first process of the namespaces of an endpoint that the tool has started.
    #[must_use]
    pub fn init(&self) -> Option<u32> {
        let child = |pid: u32| proc::children_of(pid.cast_signed()).first().copied();
        // The keeper has started `unshare`, which has started it.
        let unshare = child(self.keeper()).filter(|_| self.ours())?;
        child(unshare.cast_unsigned()).map(i32::cast_unsigned)
    }

    /// What there is to say about one of the endpoint's handlers.
    pub async fn describe(&self, handler: &Handler) -> Target {
        let mut target = Target {
            name: format!("{}/{}", self.endpoint.name, handler.name),
            ..Target::default()
        };
        if let Ok(version) = self.client.version().await {
            target.endpoint = format!(
                "{} {}, CRI {}",
                version.runtime_name, version.runtime_version, version.runtime_api_version
            );
        }
        if let Some(binary) = handler.program() {
            target.runtime = told_version(&binary);
        }
        if self.ours() {
            target.facts.insert("snapshotter".into(), self.endpoint.snapshotter.clone());
            target.facts.extend(on_disk(&self.dir));
        }
        target.facts.extend(self.contents.pulled.clone().map(|image| (PULLED_FACT.into(), image)));
        let parts = self.parts(handler).await;
        for (name, binary) in parts.iter().filter(|(name, _)| ["engine", "sysbench"].contains(name))
        {
            target.facts.insert((*name).into(), told_version(binary));
        }
        target.digests.extend(parts.iter().filter_map(|(_, binary)| sum(binary)));
        target.facts.extend(self.facts().await);
        target
    }

    /// The programs that take part, as far as they are known: shim and plugins are those of an endpoint that the
    /// tool has started, and one that was there is asked for itself only.
    async fn parts(&self, handler: &Handler) -> Vec<(&'static str, PathBuf)> {
        let endpoint = match &self.endpoint.containerd {
            Some(containerd) => Some(containerd.clone()),
            None => listener(self.endpoint.socket.as_deref().unwrap_or_default()).await,
        };
        let ours = self.endpoint.containerd.as_deref();
        let plugin = |name: &str| ours.and(plugins()).map(|dir| dir.join(name));
        let all = [
            ("runtime", handler.program()),
            ("endpoint", endpoint),
            ("shim", ours.and_then(|containerd| shim(&self.endpoint, containerd, handler))),
            ("bridge", plugin("bridge")),
            ("host-local", plugin("host-local")),
            ("loopback", plugin("loopback")),
            ("engine", fs::read_link(self.dir.join("bin/criu")).ok()),
            ("sysbench", find("sysbench")),
            ("busybox", find("busybox")),
        ];
        all.into_iter().filter_map(|(name, path)| Some((name, path?))).collect()
    }

    async fn facts(&self) -> BTreeMap<String, String> {
        let mut facts = BTreeMap::new();
        let Ok(status) = self.client.status().await else {
            return facts;
        };
        for condition in status.status.map(|s| s.conditions).unwrap_or_default() {
            facts.insert(condition.r#type, if condition.status { "yes" } else { "no" }.into());
        }
        let config = status.info.get("config").map(String::as_str).unwrap_or_default();
        if let Ok(config) = serde_json::from_str::<serde_json::Value>(config) {
            let snapshotter = &config["containerd"]["snapshotter"];
            if let Some(name) = snapshotter.as_str() {
                facts.insert("snapshotter".into(), name.into());
            }
            facts
                .extend(config["containerdRootDir"].as_str().and_then(|dir| on_disk(dir.as_ref())));
        }
        facts
    }
}

/// What is below the files of an endpoint.
fn on_disk(dir: &Path) -> Option<(String, String)> {
    Some(("file system".into(), machine::file_system(dir)?))
}

/// What the clients of registries that are written in Go say of one without TLS.
const NO_TLS: &str = "server gave HTTP response to HTTPS client";

fn refused(error: CallError) -> EndpointError {
    match &error {
        CallError::Failed { text, .. } if text.contains(NO_TLS) => EndpointError::Https(error),
        _ => error.into(),
    }
}

impl Keeper {
    fn failed(error: std::io::Error) -> EndpointError {
        EndpointError::Io("the keeper".into(), error)
    }

    /// Starts one; when this returns it has made the directory.
    fn start(job: &Job) -> Result<Self, EndpointError> {
        let mut child = Command::new(own::executable()?)
            .args(own::prefix())
            .arg("keep")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Self::failed)?;
        let input = child.stdin.take();
        let output = child.stdout.take().map(BufReader::new);
        let mut keeper = Self { child, input, output };
        match keeper.ask(job)?.trim() {
            TAKEN => Err(EndpointError::Taken(job.socket.clone().unwrap_or_default())),
            _ => Ok(keeper),
        }
    }

    /// Starts a containerd, if it is given, and the registry; returns the registry's port.
    fn begin(&mut self, world: Option<&World>) -> Result<u16, EndpointError> {
        let said = self.ask(&world)?;
        said.trim().parse().map_err(|_| Self::failed(std::io::Error::other(said)))
    }

    /// Sends a line, and reads the answer.
    fn ask(&mut self, message: &impl serde::Serialize) -> Result<String, EndpointError> {
        let mut line = serde_json::to_vec(message).map_err(|e| Self::failed(e.into()))?;
        line.push(b'\n');
        let mut said = String::new();
        if let (Some(input), Some(output)) = (&mut self.input, &mut self.output) {
            input.write_all(&line).map_err(Self::failed)?;
            output.read_line(&mut said).map_err(Self::failed)?;
        }
        if said.is_empty() {
            let text = "it has ended before it began; what it said is above";
            return Err(Self::failed(std::io::Error::other(text)));
        }
        Ok(said)
    }
}

/// Where a containerd that is started for a run listens.
pub(crate) fn socket_of(dir: &Path) -> String {
    dir.join("containerd.sock").display().to_string()
}

/// Whether there are no sandboxes and containers with our label.
///
/// # Errors
/// If the runtime does not tell.
pub(crate) async fn has_none(client: &Client) -> Result<bool, CallError> {
    Ok(client.containers(LABEL).await?.is_empty() && client.sandboxes(LABEL).await?.is_empty())
}

/// Removes all sandboxes and containers with our label.
///
/// # Errors
/// The first error of a call, when everything has been tried.
pub(crate) async fn sweep_pods(client: &Client) -> Result<(), CallError> {
    let mut first = Ok(());
    for id in client.containers(LABEL).await? {
        let _ = client.stop(&id, 0).await;
        let removed = client.remove(&id).await;
        first = first.and(removed);
    }
    for id in client.sandboxes(LABEL).await? {
        let _ = client.stop_sandbox(&id).await;
        let removed = client.remove_sandbox(&id).await;
        first = first.and(removed);
    }
    first
}

/// Removes all sandboxes and containers with our label, and our images.
///
/// # Errors
/// The first error of a call, when everything has been tried.
pub(crate) async fn sweep(client: &Client) -> Result<(), CallError> {
    let mut first = sweep_pods(client).await;
    for image in client.images().await? {
        if is_ours(&image) {
            let removed = client.remove_image(&image).await;
            first = first.and(removed);
        }
    }
    first
}

/// Whether an image is one that a run has pulled from a registry of its own, at whichever port.
fn is_ours(image: &str) -> bool {
    let of_registry = image.strip_prefix("127.0.0.1:").and_then(|rest| rest.split_once('/'));
    let Some((port, rest)) = of_registry else { return false };
    let names = [BASE, TOOLS, PULLED].map(|name| format!("{name}:{TAG}"));
    port.bytes().all(|b| b.is_ascii_digit()) && names.iter().any(|name| name == rest)
}

/// How long a program may take to say its version.
const VERSION: Duration = Duration::from_secs(10);

/// The first line of what a program says about its version.
///
/// # Errors
/// If it cannot be started, or does not end.
pub(crate) fn version_of(binary: &Path) -> std::io::Result<String> {
    let said = program::output(Command::new(binary).arg("--version"), VERSION)?;
    let text = String::from_utf8_lossy(&said.stdout);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The same, or nothing; why is said.
fn told_version(binary: &Path) -> String {
    version_of(binary).unwrap_or_else(|error| {
        tell!("{} --version: {error}", binary.display());
        String::new()
    })
}

/// The program that listens at a socket, if it can be seen from here.
async fn listener(socket: &str) -> Option<PathBuf> {
    let path = socket.strip_prefix("unix://").unwrap_or(socket);
    let pid = UnixStream::connect(path).await.ok()?.peer_cred().ok()?.pid()?;
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

fn sum(binary: &Path) -> Option<(String, String)> {
    let path = if binary.is_absolute() { binary.to_owned() } else { find(binary.to_str()?)? };
    Some((path.display().to_string(), digest::of_file(&path).ok()?))
}

/// Makes a group of its own below the parent of a place, with a limit in it.
///
/// # Errors
/// If the group cannot be made, or does not take the limit.
pub(crate) fn limited(
    place: &ReadyEndpoint,
    controller: &str,
    name: &str,
    file: &str,
    value: &str,
) -> Option<std::io::Result<String>> {
    let parent = place.cgroup.as_ref().filter(|_| place.ours())?;
    let group = format!("{parent}/{name}");
    let made = cgroups::make(controller, &group)
        .and_then(|dir| fs::write(dir.join(file), value))
        .map(|()| group);
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_images_of_our_registries_are_ours() {
        for name in [BASE, TOOLS, PULLED] {
            assert!(is_ours(&format!("127.0.0.1:5000/{name}:1")));
            assert!(is_ours(&format!("127.0.0.1:43210/{name}:1")));
            for other in [
                format!("127.0.0.1:5000/{name}:1.4"),
                format!("127.0.0.1:5000/mirror/{name}:1"),
                format!("registry.example/{name}:1"),
                format!("127.0.0.1:5000x/{name}:1"),
                format!("docker.io/{name}:1"),
            ] {
                assert!(!is_ours(&other), "{other}");
            }
        }
    }
}
