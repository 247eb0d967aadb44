//! The configuration of a run: a YAML file, or what is found on this machine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::filter::Filters;
use crate::image::find;
use crate::machine::{self, HOST, Machine};
use crate::{layout, world};

/// What a run measures, where, and how often. See docs/benchmark.md.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The directory for results, unless the command line gives one.
    pub output: Option<PathBuf>,
    /// Names of benchmarks with `*` for any text; those that begin with `!` are left out.
    pub filters: Filters,
    /// How many samples of each row are kept.
    pub runs: u32,
    /// How many more are taken before, and marked as warm-up.
    pub warmup: u32,
    /// The seed of the order; a random one if it is not given.
    pub seed: Option<u64>,
    /// How many seconds one call may take.
    pub deadline: u64,
    /// How many seconds one benchmark of one target may take, all calls together.
    pub patience: u64,
    /// How many containers the suite `scalability` starts.
    pub scale: Vec<u32>,
    /// How many of them are started at a time.
    pub concurrency: u32,
    /// The MiB of memory that the containers hold which are checkpointed.
    pub memory: Vec<u32>,
    /// How much work the programs of the suite `performance` do; 1 is about a second each.
    pub effort: f64,
    /// A difference smaller than this share does not count in a comparison.
    pub threshold: f64,
    /// The program that acts as `criu`; this one if it is not given.
    pub criu: Option<PathBuf>,
    /// A directory in the OCI image layout, whose image is pulled; one of 16 MiB that the tool makes if it is not given.
    pub pulled_image: Option<PathBuf>,
    /// The runtimes.
    pub endpoints: Vec<Endpoint>,
    /// Other machines that are measured instead of this one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            output: None,
            filters: Filters::default(),
            runs: 10,
            warmup: 1,
            seed: None,
            deadline: 30,
            patience: 180,
            scale: vec![5, 10, 50, 100],
            concurrency: 5,
            memory: vec![16, 256],
            effort: 1.0,
            threshold: 0.05,
            criu: None,
            pulled_image: None,
            endpoints: Vec::new(),
            hosts: Vec::new(),
        }
    }
}

impl Config {
    /// The `torpor` that acts as `criu`, if there is one.
    #[must_use]
    pub fn engine(&self) -> Option<PathBuf> {
        self.criu.clone().or_else(crate::own::torpor)
    }
}

/// Another machine: how an agent is started there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// The directory of its results, below that of all.
    pub name: String,
    /// Where SSH goes: `user@host`, or a name of its configuration.
    pub ssh: Option<String>,
    /// The program there.
    pub program: Option<String>,
    /// In place of SSH: a command to which `run --agent` is added, and whose standard streams are the agent's.
    pub command: Vec<String>,
    /// In place of SSH: where an agent listens (`run --agent --listen`), as `HOST:PORT`.
    pub tls: Option<String>,
}

impl Host {
    /// The host of the command line: `tls:HOST:PORT`, or where SSH goes.
    #[must_use]
    pub fn named(text: &str) -> Self {
        match text.strip_prefix("tls:") {
            Some(address) => Self {
                name: torpor_tls::host_of(address).to_owned(),
                tls: Some(address.to_owned()),
                ..Self::default()
            },
            None => Self {
                name: text.rsplit('@').next().unwrap_or(text).to_owned(),
                ssh: Some(text.to_owned()),
                ..Self::default()
            },
        }
    }

    /// The command that starts an agent there.
    #[must_use]
    pub fn start(&self) -> Vec<String> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let mut all = match &self.ssh {
            Some(to) => {
                let mut all = words("ssh -o BatchMode=yes -o ServerAliveInterval=15 --");
                all.push(to.clone());
                all.extend(words(self.program.as_deref().unwrap_or("torpor benchmark")));
                all
            }
            None => self.command.clone(),
        };
        all.extend(words("run --agent"));
        all
    }
}

/// A CRI endpoint: one that is there already, or a containerd that the tool starts for itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Its name in results.
    pub name: String,
    /// The socket of a runtime that runs.
    #[serde(default)]
    pub socket: Option<String>,
    /// A containerd that is started with state, socket and namespaces of its own.
    #[serde(default)]
    pub containerd: Option<PathBuf>,
    /// The snapshotter of a containerd that the tool starts.
    #[serde(default = "overlayfs")]
    pub snapshotter: String,
    /// The parent of all control groups at an endpoint that is there already; its own default
    /// if it is empty.
    #[serde(default)]
    pub cgroup_parent: String,
    /// The runtime handlers.
    pub handlers: Vec<Handler>,
}

fn overlayfs() -> String {
    "overlayfs".into()
}

/// An OCI runtime as an endpoint knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handler {
    /// Its name in results, and what the endpoint calls it.
    pub name: String,
    /// What the endpoint calls it, where that is not its name; empty is the default.
    #[serde(default)]
    pub handler: Option<String>,
    /// The program, for a containerd that the tool starts, and for what is measured without CRI.
    #[serde(default)]
    pub binary: Option<PathBuf>,
    /// The shim, for a containerd that the tool starts.
    #[serde(default = "runc_shim", rename = "type")]
    pub kind: String,
    /// The configuration of the shim.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// Directories in which containerd looks for the shim, besides its own.
    #[serde(default)]
    pub path: Vec<PathBuf>,
}

fn runc_shim() -> String {
    "io.containerd.runc.v2".into()
}

impl Handler {
    /// The name by which the endpoint knows this handler.
    #[must_use]
    pub fn handler(&self) -> &str {
        self.handler.as_deref().unwrap_or(&self.name)
    }

    /// The OCI runtime itself: what is named, or gVisor's program beside its shim.
    #[must_use]
    pub fn program(&self) -> Option<PathBuf> {
        let beside = || self.path.iter().map(|dir| dir.join("runsc")).find(|file| file.is_file());
        self.binary.clone().or_else(beside)
    }
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Read(PathBuf, #[source] std::io::Error),
    /// The file is not what docs/benchmark.md describes.
    #[error("{0}: {1}")]
    Syntax(PathBuf, String),
    /// A value makes no sense.
    #[error("{0}")]
    Value(String),
    /// There is no runtime on this machine.
    #[error(
        "there is no container runtime here: neither a CRI socket that answers ({sockets}) nor a \
         containerd to start. Install one (Debian: apt-get install containerd runc), or name one \
         in a configuration",
        sockets = SOCKETS.join(", ")
    )]
    Nothing,
}

/// The largest configuration that is read.
const LARGEST: u64 = 1 << 20;

/// The most MiB of memory that a container is asked to hold: 1 TiB.
const MOST_MEMORY: u32 = 1 << 20;

/// The most samples of a row, and as many to warm up.
const MOST_RUNS: u32 = 100_000;

/// The most seconds that anything is waited for: a week.
const LONGEST_WAIT: u64 = 7 * 24 * 60 * 60;

/// Where runtimes listen when nobody says otherwise.
pub const SOCKETS: [&str; 3] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
];

/// Reads a configuration.
///
/// # Errors
/// If it cannot be read, is not what it should be, or makes no sense.
pub fn read(path: &Path) -> Result<Config, ConfigError> {
    let size = std::fs::metadata(path).map_err(|e| ConfigError::Read(path.into(), e))?.len();
    if size > LARGEST {
        return Err(ConfigError::Syntax(path.into(), format!("it is larger than {LARGEST} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| ConfigError::Read(path.into(), e))?;
    let config: Config = serde_saphyr::from_str(&text)
        .map_err(|e| ConfigError::Syntax(path.into(), e.without_snippet().to_string()))?;
    check(&config)?;
    Ok(config)
}

/// Whether the values of a configuration make sense.
///
/// # Errors
/// The first value that makes no sense, and which are possible.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    check_amounts(config)?;
    check_hosts(config)?;
    check_endpoints(config)
}

fn check_amounts(config: &Config) -> Result<(), ConfigError> {
    let wrong = |text: String| Err(ConfigError::Value(text));
    if config.runs == 0 || config.runs > MOST_RUNS || config.warmup > MOST_RUNS {
        return wrong(format!("`runs` must be from 1 to {MOST_RUNS}, `warmup` at most as many"));
    }
    let waits = [config.deadline, config.patience];
    if waits.into_iter().any(|seconds| seconds == 0 || seconds > LONGEST_WAIT) {
        return wrong(format!("`deadline` and `patience` are seconds, from 1 to {LONGEST_WAIT}"));
    }
    if !(config.effort > 0.0 && config.effort <= 1000.0) {
        return wrong("`effort` must be above 0, and at most 1000".into());
    }
    if !(0.0..1.0).contains(&config.threshold) {
        return wrong("`threshold` is a share: at least 0, below 1".into());
    }
    if config.concurrency == 0 || config.scale.iter().any(|&n| n == 0 || n > 10_000) {
        return wrong("`concurrency` must be above 0, each `scale` from 1 to 10000".into());
    }
    if config.memory.iter().any(|&size| size > MOST_MEMORY) {
        return wrong(format!("each `memory` is in MiB, at most {MOST_MEMORY}"));
    }
    for (key, list) in [("scale", &config.scale), ("memory", &config.memory)] {
        // Each row would have each of its samples twice.
        if let Some(amount) = twice(list) {
            return wrong(format!("`{key}` holds {amount} twice"));
        }
    }
    Ok(())
}

/// What a list holds more than once.
fn twice(list: &[u32]) -> Option<u32> {
    let mut seen = std::collections::BTreeSet::new();
    list.iter().copied().find(|&amount| !seen.insert(amount))
}

fn check_endpoints(config: &Config) -> Result<(), ConfigError> {
    let wrong = |text: String| Err(ConfigError::Value(text));
    let mut names = std::collections::BTreeSet::new();
    for endpoint in &config.endpoints {
        let name = &endpoint.name;
        if endpoint.socket.is_some() == endpoint.containerd.is_some() {
            return wrong(format!("endpoint `{name}` needs either `socket` or `containerd`"));
        }
        if endpoint.handlers.is_empty() {
            return wrong(format!("endpoint `{name}` needs at least one of `handlers`"));
        }
        for handler in &endpoint.handlers {
            let no_name = endpoint.name.is_empty() || handler.name.is_empty();
            let name = format!("{}/{}", endpoint.name, handler.name);
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
            if no_name || !name.chars().all(plain) || name.len() > 100 {
                return wrong(format!("`{name}`: names are letters, digits, and -_.+"));
            }
            if !names.insert(name.clone()) {
                return wrong(format!("there are two targets with the name `{name}`"));
            }
        }
    }
    Ok(())
}

/// Whether this machine has what a configuration is about.
///
/// # Errors
/// If it lacks a program that is named, or the memory that a container is to hold.
pub(crate) fn check_here(config: &Config) -> Result<(), ConfigError> {
    if let Some(file) = world::missing(config) {
        return Err(ConfigError::Value(format!("there is no program {}", file.display())));
    }
    if let Some(layout) = &config.pulled_image {
        let wrong = "`pulled_image` must be a directory in the OCI image layout";
        layout::check(layout).map_err(|error| ConfigError::Value(format!("{wrong}: {error}")))?;
    }
    let has = Machine::here().memory;
    match config.memory.iter().max() {
        Some(&most) if has > 0 && u64::from(most) > has => Err(ConfigError::Value(format!(
            "`memory` asks for containers of {most} MiB; this machine has {has}"
        ))),
        _ => Ok(()),
    }
}

fn check_hosts(config: &Config) -> Result<(), ConfigError> {
    let wrong = |text: String| Err(ConfigError::Value(text));
    let mut names = std::collections::BTreeSet::new();
    for host in &config.hosts {
        let name = &host.name;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return wrong(format!("host `{name}`: names are letters, digits, and -_. inside"));
        }
        let ways = [host.ssh.is_some(), !host.command.is_empty(), host.tls.is_some()];
        if ways.into_iter().filter(|way| *way).count() != 1 {
            return wrong(format!("host `{name}` needs either `ssh`, `command` or `tls`"));
        }
        if !names.insert(name) {
            return wrong(format!("there are two hosts with the name `{name}`"));
        }
    }
    Ok(())
}

/// The runtimes of this machine: CRI sockets that answer; if none does, or a kubelet would not leave alone
/// what is made there, the containerd that is installed, with each OCI runtime on the PATH.
///
/// # Errors
/// If no runtime answers, and no containerd is installed.
pub async fn found() -> Result<Vec<Endpoint>, ConfigError> {
    let mut endpoints = Vec::new();
    let sockets = if machine::has_kubelet() { &[][..] } else { &SOCKETS };
    for socket in sockets {
        if let Some(endpoint) = answering(socket).await {
            endpoints.push(endpoint);
        }
    }
    if endpoints.is_empty() {
        endpoints.extend(installed());
    }
    if endpoints.is_empty() { Err(ConfigError::Nothing) } else { Ok(endpoints) }
}

async fn answering(socket: &str) -> Option<Endpoint> {
    if !Path::new(socket).exists() {
        return None;
    }
    let client = crate::cri::Client::new(socket, Duration::from_secs(5)).ok()?;
    let version = client.version().await.ok()?;
    let handler = Handler {
        name: "default".into(),
        handler: Some(String::new()),
        // Which runtime that is the endpoint does not tell.
        binary: None,
        kind: runc_shim(),
        config: None,
        path: Vec::new(),
    };
    Some(Endpoint {
        name: format!("{}-{}", version.runtime_name, short(&version.runtime_version)),
        socket: Some(socket.into()),
        containerd: None,
        snapshotter: overlayfs(),
        cgroup_parent: String::new(),
        handlers: vec![handler],
    })
}

/// The containerd of this machine with each runtime that is installed.
fn installed() -> Option<Endpoint> {
    let containerd = find_here("containerd")?;
    let handlers: Vec<Handler> = ["runc", "crun", "youki"]
        .into_iter()
        .filter_map(|name| Some((name, find_here(name)?)))
        .map(|(name, binary)| Handler {
            name: name.into(),
            handler: None,
            binary: Some(binary),
            kind: runc_shim(),
            config: None,
            path: Vec::new(),
        })
        .collect();
    let endpoint = Endpoint {
        name: "containerd".into(),
        socket: None,
        containerd: Some(containerd),
        snapshotter: overlayfs(),
        cgroup_parent: String::new(),
        handlers,
    };
    (!endpoint.handlers.is_empty()).then_some(endpoint)
}

/// A program of this machine, also from within a pod.
fn find_here(name: &str) -> Option<PathBuf> {
    let node = Path::new(HOST);
    let dirs = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin"];
    let of_node = || dirs.iter().map(|dir| node.join(dir).join(name)).find(|file| file.is_file());
    find(name).or_else(of_node)
}

/// A version without what a distribution adds to it.
fn short(version: &str) -> String {
    let version = version.trim_start_matches('v');
    version.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_mistake_is_told_in_one_line() {
        let said = parse("runs: 3\nwarmups: 1\n").unwrap_err();
        assert!(said.contains("line 2") && said.contains("`warmups`"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }

    #[test]
    fn everything_has_a_default() {
        assert_eq!(parse("{}").unwrap(), Config::default());
    }

    #[test]
    fn a_runtime_is_an_endpoint_and_a_handler() {
        let config = parse(
            "runs: 3\nfilters: ['operations.*', '!*.bridge.*']\nendpoints:\n\
             - name: crio\n  socket: /run/crio/crio.sock\n  handlers: [{name: crun}]\n",
        )
        .unwrap();
        assert_eq!(config.endpoints[0].handlers[0].handler(), "crun");
        assert!(config.filters.take("operations.container.create"));
        assert!(!config.filters.take("operations.bridge.create"));
    }

    /// The keys of a value, and those of a schema's object.
    fn assert_same_keys(value: &impl Serialize, schema: &serde_json::Value) {
        let keys = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(keys(&serde_json::to_value(value).unwrap()), keys(&schema["properties"]));
    }

    #[test]
    fn the_schema_has_every_key_and_its_default() {
        let text = include_str!("../../../docs/benchmark.schema.json");
        let schema: serde_json::Value = serde_json::from_str(text).unwrap();
        let text = "endpoints: [{name: a, socket: /s, handlers: [{name: x}]}]\n\
                    hosts: [{name: a, ssh: b}]\n";
        let config = parse(text).unwrap();
        assert_same_keys(&config, &schema);
        assert_same_keys(&config.endpoints[0], &schema["$defs"]["endpoint"]);
        assert_same_keys(&config.endpoints[0].handlers[0], &schema["$defs"]["handler"]);
        assert_same_keys(&config.hosts[0], &schema["$defs"]["host"]);
        let defaults = serde_json::to_value(Config::default()).unwrap();
        for (key, about) in schema["properties"].as_object().unwrap() {
            let default = about.get("default").filter(|default| **default != serde_json::json!([]));
            if let Some(default) = default {
                let (said, is) = (default.as_f64(), defaults[key].as_f64());
                assert!(said == is && (said.is_some() || *default == defaults[key]), "{key}");
            }
        }
    }

    #[test]
    fn nonsense_is_named() {
        for (text, word) in [
            ("rnus: 3", "rnus"),
            ("runs: 0", "runs"),
            ("warmup: 4294967295", "`warmup` at most"),
            ("deadline: 18446744073709551615", "`deadline` and `patience`"),
            ("patience: 0", "from 1 to 604800"),
            ("effort: .nan", "effort"),
            ("scale: [5, 10, 5]", "`scale` holds 5 twice"),
            ("memory: [16, 16]", "`memory` holds 16 twice"),
            ("endpoints: [{name: a, socket: /s, handlers: []}]", "at least one of `handlers`"),
            ("endpoints: [{name: '', socket: /s, handlers: [{name: x}]}]", "letters"),
            ("endpoints: [{name: a, socket: /s, handlers: [{name: ''}]}]", "letters"),
            ("memory: [99999999]", "MiB, at most"),
            ("endpoints: [{name: a, handlers: []}]", "either"),
            ("hosts: [{name: a}]", "either"),
            ("hosts: [{name: a, ssh: b, tls: 'b:1'}]", "either"),
            ("hosts: [{name: ../a, ssh: b}]", "letters"),
            ("hosts: [{name: a, ssh: b}, {name: a, ssh: c}]", "two hosts"),
            ("endpoints: [{name: 'a b', socket: /s, handlers: [{name: x}]}]", "letters"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
