//! One target while it is measured: pods and containers in it, and the programs that run there.

use std::cell::Cell as Counter;
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::config::{Config, Handler};
use crate::cri::v1::{
    ContainerConfig, ContainerMetadata, ContainerState, ContainerStatus, DnsConfig,
    LinuxContainerConfig, LinuxContainerResources, LinuxContainerSecurityContext,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, Mount, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use crate::cri::{CallError, Client, image_spec};
use crate::endpoint::{LABEL, ReadyEndpoint};
use crate::image::{BASE, PROGRAM, TOOLS};
use crate::{overhead, own};

/// Why there is no value, or none that counts.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Trouble {
    /// The runtime or the machine cannot do this.
    #[error("{0}")]
    Unsupported(String),
    /// It was tried, and failed.
    #[error("{0}")]
    Failed(String),
    /// There is a value, if there is one, but it does not show what it should.
    #[error("{1}")]
    Invalid(Option<f64>, String),
}

/// What a part says to what it is too old for, or does not have, and what that means. The runtimes have no
/// status of the CRI for it.
const LACKING: &[(&str, &str)] = &[
    // crun
    (
        "unknown version specified",
        "this OCI runtime knows only older versions of the specification than the one that the endpoint asks for",
    ),
    // youki
    ("unrecognized subcommand", "this OCI runtime has no such command"),
    // containerd 1 takes what a shim of containerd 2 says for an address.
    (
        r#""protocol":"ttrpc"}: connect: invalid argument"#,
        "this shim speaks to newer versions of the endpoint only",
    ),
];

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        match &error {
            CallError::Unsupported { .. } => Self::Unsupported(error.to_string()),
            CallError::Failed { text, .. } => {
                let reason = LACKING.iter().find(|(said, _)| text.contains(said));
                reason.map_or_else(
                    || Self::Failed(error.to_string()),
                    |(_, reason)| Self::Unsupported(format!("{reason}: {error}")),
                )
            }
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Anything else that goes wrong.
pub fn failed(error: impl std::fmt::Display) -> Trouble {
    Trouble::Failed(error.to_string())
}

/// Values by the names of benchmarks, without the context.
pub type Values = Vec<(String, Result<f64, Trouble>)>;

/// The network of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// That of the host.
    Host,
    /// One of its own.
    Own,
}

/// A target.
#[derive(Debug)]
pub struct Cell<'a> {
    /// Its endpoint.
    pub place: &'a ReadyEndpoint,
    /// Its runtime.
    pub handler: &'a Handler,
    /// The configuration of the run.
    pub config: &'a Config,
    /// Counts what it has made: names are never used twice.
    pub made: &'a Counter<u64>,
    /// The CPU time that weighing has taken.
    pub weighed: &'a Counter<Duration>,
}

/// A sandbox.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its identifier.
    pub id: String,
    /// What it was made from, which containers need again.
    pub config: PodSandboxConfig,
}

/// What a container is made from.
#[derive(Debug, Clone, Default)]
pub struct Spec {
    /// The image, [`BASE`] or [`TOOLS`].
    pub image: &'static str,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its limits.
    pub resources: LinuxContainerResources,
    /// What it sees of the host.
    pub mounts: Vec<Mount>,
}

impl Spec {
    /// A shell script in the small image.
    #[must_use]
    pub fn script(text: &str) -> Self {
        let command = ["/bin/sh", "-c", text].map(str::to_owned).to_vec();
        Self { image: BASE, command, ..Self::default() }
    }

    /// One of our programs, with its arguments.
    #[must_use]
    pub fn workload(arguments: &str) -> Self {
        Self { image: TOOLS, command: workload(arguments), ..Self::default() }
    }
}

/// The command line of one of our programs.
#[must_use]
pub fn workload(arguments: &str) -> Vec<String> {
    let head = std::iter::once(PROGRAM).chain(own::prefix().iter().copied());
    let words = head.chain(std::iter::once("workload")).chain(arguments.split_whitespace());
    words.map(str::to_owned).collect()
}

/// A program that sleeps, and ends at once when it is told to.
pub const IDLE: &str = "echo up; trap 'exit 0' TERM; sleep 2147483647 & wait";

/// How often the state of a container is asked for while it is waited for.
pub(crate) const POLL: Duration = Duration::from_millis(50);

impl Cell<'_> {
    /// The connection.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.place.client
    }

    /// Does what reads of many processes what they take, while nothing else is measured.
    pub(crate) fn weighing<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = overhead::own();
        let value = work();
        let took = overhead::own().saturating_sub(before);
        self.weighed.set(self.weighed.get() + took);
        value
    }

    /// A name that was never used before.
    fn name(&self) -> String {
        self.made.set(self.made.get() + 1);
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
        format!("bench-{now:x}-{}", self.made.get())
    }

    /// The configuration of a new sandbox. `parent` is its control group, unless that is the usual.
    #[must_use]
    pub fn sandbox(&self, network: Network, parent: Option<String>) -> PodSandboxConfig {
        let name = self.name();
        let logs = self.place.dir.join("logs").join(&name);
        let (mode, hostname) = match network {
            Network::Host => (NamespaceMode::Node, ""),
            Network::Own => (NamespaceMode::Pod, "bench"),
        };
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                uid: name.clone(),
                namespace: "torpor-benchmark".into(),
                attempt: 0,
                name,
            }),
            hostname: hostname.into(),
            log_directory: logs.display().to_string(),
            dns_config: Some(DnsConfig {
                servers: vec!["127.0.0.1".into()],
                ..DnsConfig::default()
            }),
            labels: labels(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: parent.or_else(|| self.place.cgroup.clone()).unwrap_or_default(),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(options(mode)),
                    ..LinuxSandboxSecurityContext::default()
                }),
                ..LinuxPodSandboxConfig::default()
            }),
            ..PodSandboxConfig::default()
        }
    }

    /// The configuration of a new container.
    #[must_use]
    pub fn container(&self, pod: &PodSandboxConfig, spec: &Spec) -> ContainerConfig {
        let security = pod.linux.as_ref().and_then(|linux| linux.security_context.clone());
        ContainerConfig {
            metadata: Some(ContainerMetadata { name: self.name(), attempt: 0 }),
            image: Some(image_spec(self.place.image(spec.image))),
            command: spec.command.clone(),
            labels: labels(),
            log_path: format!("{}.log", self.made.get()),
            mounts: spec.mounts.clone(),
            linux: Some(LinuxContainerConfig {
                resources: Some(spec.resources.clone()),
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: security.and_then(|security| security.namespace_options),
                    ..LinuxContainerSecurityContext::default()
                }),
            }),
            ..ContainerConfig::default()
        }
    }

    /// Makes a sandbox.
    ///
    /// # Errors
    /// If the runtime fails.
    pub async fn pod(&self, network: Network) -> Result<Pod, Trouble> {
        self.pod_in(network, None).await
    }

    /// Makes a sandbox in a control group.
    ///
    /// # Errors
    /// If the runtime fails.
    pub(crate) async fn pod_in(
        &self,
        network: Network,
        parent: Option<String>,
    ) -> Result<Pod, Trouble> {
        let config = self.sandbox(network, parent);
        fs::create_dir_all(&config.log_directory).map_err(failed)?;
        let id = self.client().run_sandbox(config.clone(), self.handler.handler()).await?;
        Ok(Pod { id, config })
    }

    /// Makes and starts a container; returns its identifier and the file of what it prints.
    ///
    /// # Errors
    /// If the runtime fails.
    pub async fn launch(&self, pod: &Pod, spec: &Spec) -> Result<Launched, Trouble> {
        let config = self.container(&pod.config, spec);
        let log = format!("{}/{}", pod.config.log_directory, config.log_path);
        let id = self.client().create(&pod.id, config, pod.config.clone()).await?;
        self.client().start(&id).await?;
        Ok(Launched { id, log })
    }

    /// Stops and removes a sandbox with everything in it.
    ///
    /// # Errors
    /// If the runtime fails.
    pub async fn finish(&self, pod: &Pod) -> Result<(), Trouble> {
        self.client().stop_sandbox(&pod.id).await?;
        self.client().remove_sandbox(&pod.id).await?;
        let _ = fs::remove_dir_all(&pod.config.log_directory);
        Ok(())
    }

    /// Runs a program to its end, in a sandbox of its own; returns what it printed.
    ///
    /// # Errors
    /// If the runtime fails, or the program does.
    pub async fn program(&self, spec: &Spec) -> Result<String, Trouble> {
        let pod = self.pod(Network::Host).await?;
        let launched = self.launch(&pod, spec).await?;
        let text = self.output(&launched).await?;
        self.finish(&pod).await?;
        Ok(text)
    }

    /// What a container has printed when it has ended.
    ///
    /// # Errors
    /// If the runtime fails, or the program does.
    pub async fn output(&self, launched: &Launched) -> Result<String, Trouble> {
        let status = self.ended(&launched.id).await?;
        let text = launched.text();
        if status.exit_code != 0 {
            let last = text.lines().last().unwrap_or_default();
            let (code, reason) = (status.exit_code, &status.reason);
            return Err(failed(format!("the program ended with {code} ({reason}): {last}")));
        }
        // The end of a program may be known before all it printed has been written down.
        let until = Instant::now() + Duration::from_secs(5);
        let mut text = text;
        while !text.ends_with('\n') && Instant::now() < until {
            tokio::time::sleep(POLL).await;
            text = launched.text();
        }
        Ok(text)
    }

    /// Waits for the end of a container.
    ///
    /// # Errors
    /// If the runtime fails, or it takes longer than everything may take.
    pub async fn ended(&self, id: &str) -> Result<ContainerStatus, Trouble> {
        // What goes on for long is asked for less often, and is late by a tenth of its time at most.
        self.ended_asking(id, |waited| POLL.max(waited / 10)).await
    }

    /// Waits for the end of a container, and asks for it again after the time that `pause` makes of the time waited.
    ///
    /// # Errors
    /// As [`Cell::ended`].
    pub(crate) async fn ended_asking(
        &self,
        id: &str,
        pause: impl Fn(Duration) -> Duration,
    ) -> Result<ContainerStatus, Trouble> {
        let begun = Instant::now();
        loop {
            let status = self.client().container(id).await?;
            if status.state() == ContainerState::ContainerExited {
                return Ok(status);
            }
            let waited = begun.elapsed();
            if waited > Duration::from_secs(self.config.patience) {
                return Err(failed("the program does not end"));
            }
            tokio::time::sleep(pause(waited)).await;
        }
    }

    /// Runs one of our programs; returns its values.
    ///
    /// # Errors
    /// If the runtime fails, the program does, or prints something else.
    pub async fn values(&self, spec: &Spec) -> Result<Value, Trouble> {
        parse(&self.program(spec).await?)
    }
}

/// The values that one of our programs has printed.
///
/// # Errors
/// If its last line holds none.
pub fn parse(text: &str) -> Result<Value, Trouble> {
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|_| failed(format!("the program printed no values: {last}")))
}

/// The milliseconds since an instant.
#[must_use]
pub fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1000.0
}

fn options(network: NamespaceMode) -> NamespaceOption {
    NamespaceOption {
        network: network.into(),
        pid: NamespaceMode::Container.into(),
        ipc: NamespaceMode::Pod.into(),
        ..NamespaceOption::default()
    }
}

fn labels() -> HashMap<String, String> {
    HashMap::from([(LABEL.0.to_owned(), LABEL.1.to_owned())])
}

/// A container that was started.
#[derive(Debug, Clone)]
pub struct Launched {
    /// Its identifier.
    pub id: String,
    /// The file of what it prints, in the form of the CRI.
    pub log: String,
}

impl Launched {
    /// What it has printed so far.
    #[must_use]
    pub fn text(&self) -> String {
        let raw = fs::read(&self.log).unwrap_or_default();
        let raw = String::from_utf8_lossy(&raw);
        let mut text = String::new();
        for line in raw.lines() {
            // time, stream, and whether the line is whole (F) or goes on (P)
            let mut words = line.splitn(4, ' ');
            let whole = words.nth(2) == Some("F");
            text.push_str(words.next().unwrap_or_default());
            if whole {
                text.push('\n');
            }
        }
        text
    }

    /// When it printed its first line, in seconds within a quarter of an hour.
    #[must_use]
    pub fn first_line(&self) -> Option<f64> {
        let raw = fs::read_to_string(&self.log).ok()?;
        let (_, time) = raw.lines().next()?.split_once(' ')?.0.split_once('T')?;
        let mut parts = time.split([':', 'Z', '+', '-']).skip(1);
        let minutes: f64 = parts.next()?.parse().ok()?;
        let seconds: f64 = parts.next()?.parse().ok()?;
        Some((minutes * 60.0 + seconds).rem_euclid(QUARTER))
    }
}

/// All zones of time differ by whole quarters of an hour.
pub(crate) const QUARTER: f64 = 900.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_part_is_too_old_for_is_not_supported() {
        let judged = |text: &str| {
            Trouble::from(CallError::Failed { call: "RunPodSandbox", text: text.to_owned() })
        };
        for said in [
            "failed to create shim task: OCI runtime create failed: unknown version specified",
            "error: unrecognized subcommand 'update'",
            r#"start failed: dial unix  {"version":2,"address":"unix:///run/containerd/s/1ad5","protocol":"ttrpc"}: connect: invalid argument: unknown"#,
        ] {
            assert!(
                matches!(judged(said), Trouble::Unsupported(text) if text.contains(said)),
                "{said}"
            );
        }
        assert!(matches!(judged("connect: invalid argument"), Trouble::Failed(_)));
    }
}
