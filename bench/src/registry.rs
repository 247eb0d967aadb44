//! A registry at the other end of a network of 1 Gbit/s: Debian's docker-registry, in a network
//! namespace of its own.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::bench::run;
use crate::process::{Running, until};

/// Addresses of the two ends (RFC 2544 gives 198.18.0.0/15 to benchmarks of networks).
const HERE: &str = "198.18.0.1";
const THERE: &str = "198.18.0.2";
/// How fast the network is, and how much may wait in it.
const SHAPE: [&str; 7] = ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"];

/// A registry and its network; they go when it is dropped.
pub struct Registry {
    /// Host and port.
    pub host: String,
    namespace: String,
    server: Option<Running>,
}

fn ip(words: &[&str]) -> Result<()> {
    run(Command::new("ip").args(words))
}

impl Registry {
    /// Starts an empty one, which keeps its content in `dir`.
    pub fn start(dir: &Path) -> Result<Self> {
        let namespace = format!("torpor-bench-{}", std::process::id());
        let host = format!("{THERE}:5000");
        ip(&["netns", "add", &namespace])?;
        let mut registry = Self { host, namespace, server: None };
        registry.connect()?;
        let config = dir.join("registry.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: {}\n",
            dir.join("registry").display(),
            registry.host
        );
        fs::write(&config, text)?;
        let mut server = Command::new("ip");
        server.args(["netns", "exec", &registry.namespace, "docker-registry", "serve"]).arg(config);
        registry.server = Some(Running::start(&mut server)?);
        until("the registry", || TcpStream::connect(&registry.host).is_ok())?;
        Ok(registry)
    }

    fn connect(&self) -> Result<()> {
        let there = self.namespace.as_str();
        let device = format!("tb{}", std::process::id());
        ip(&["link", "add", &device, "type", "veth", "peer", "name", "eth0", "netns", there])?;
        ip(&["address", "add", &format!("{HERE}/30"), "dev", &device])?;
        ip(&["link", "set", &device, "up"])?;
        ip(&["-n", there, "address", "add", &format!("{THERE}/30"), "dev", "eth0"])?;
        ip(&["-n", there, "link", "set", "eth0", "up"])?;
        let shape = [&["qdisc", "add", "dev"][..], &[&device, "root"], &SHAPE].concat();
        run(Command::new("tc").args(shape))?;
        let shape = [&["-n", there, "qdisc", "add", "dev", "eth0", "root"][..], &SHAPE].concat();
        run(Command::new("tc").args(shape))
    }
}

impl Drop for Registry {
    /// The devices go with the namespace.
    fn drop(&mut self) {
        self.server = None;
        let _ = ip(&["netns", "delete", &self.namespace]);
    }
}
