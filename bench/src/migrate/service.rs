//! What is moved, and who uses it meanwhile.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::answers::Answers;
use super::counted::{Counted, compiled, number};
use super::load::{Load as Clients, RECORD};
use super::mariadb;
use super::world::{Net, World};
use crate::process::until;

/// The nodes of a graph in a MiB; of so many that are visited one is changed.
const NODES: u64 = (1 << 20) / 64;
const CHANGED: &str = "8";

/// Who uses a service, and verifies what it gets.
pub trait Load {
    fn answers(&self) -> &Answers;

    /// Ends it.
    ///
    /// # Errors
    /// If any answer was wrong, or is missing.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// Redis, of which so many of a hundred requests are reads.
    Redis(u64),
    /// MariaDB under the OLTP load of sysbench.
    MariaDb,
    /// A walk through a graph.
    Graph,
    /// So many processes that pass a number on.
    Tree(u64),
}

impl Service {
    /// The services with a name; a Redis for each share of reads.
    pub fn named(name: &str, reads: &[u64], processes: u64) -> Result<Vec<Self>> {
        match name {
            "redis" => Ok(reads.iter().copied().map(Self::Redis).collect()),
            "mariadb" => Ok(vec![Self::MariaDb]),
            "graph" => Ok(vec![Self::Graph]),
            "tree" => Ok(vec![Self::Tree(processes)]),
            _ => anyhow::bail!("there is no service {name}; there are {}", super::SERVICES),
        }
    }

    /// What it is called in tables.
    pub fn title(&self) -> String {
        match self {
            Self::Redis(reads) => format!("{reads} % reads"),
            Self::MariaDb => "MariaDB".to_owned(),
            Self::Graph => "graph".to_owned(),
            Self::Tree(processes) => format!("{processes} processes"),
        }
    }

    /// A program that it needs and that there is not.
    pub fn missing(&self) -> Option<&'static str> {
        let needed: &[&str] = match self {
            Self::Redis(_) => &["redis-server", "redis-cli"],
            Self::MariaDb => &["mariadbd", "mariadb", "sysbench"],
            Self::Graph | Self::Tree(_) => &["cc"],
        };
        needed
            .iter()
            .copied()
            .find(|program| Command::new(program).arg("--version").output().is_err())
    }

    /// Whether its mounts move along, which a destination has to allow.
    pub fn has_mounts(&self) -> bool {
        *self == Self::MariaDb
    }

    /// Starts it at the first host with so much data, and who uses it.
    pub fn start(&self, dir: &Path, world: &World, mib: u64) -> Result<(Net, Box<dyn Load>)> {
        match self {
            Self::Redis(reads) => redis(dir, world, mib, *reads),
            Self::MariaDb => mariadb::start(dir, world, mib),
            Self::Graph => counting(dir, world, "walker", &[&(mib * NODES).to_string(), CHANGED]),
            Self::Tree(processes) => counting(dir, world, "ring", &[&processes.to_string()]),
        }
    }
}

fn redis(dir: &Path, world: &World, mib: u64, reads: u64) -> Result<(Net, Box<dyn Load>)> {
    let words = ["redis-server", "--save", "", "--bind", "0.0.0.0", "--protected-mode", "no"];
    let service = world.service(dir, &words)?;
    let ping = || service.command("redis-cli").arg("ping").output();
    until("Redis", || ping().is_ok_and(|pong| pong.stdout == b"PONG\n"))?;
    let load = Clients::start(&world.client, (mib << 20) / RECORD as u64, reads)?;
    Ok((service, Box::new(load)))
}

fn counting(dir: &Path, world: &World, name: &str, words: &[&str]) -> Result<(Net, Box<dyn Load>)> {
    let (program, count) = (compiled(dir, name)?, dir.join("count"));
    let [program, file] = [&program, &count].map(|path| path.to_str().context("a path"));
    let service = world.service(dir, &[&[program?, file?], words].concat())?;
    Ok((service, Box::new(Counted::start(count, number)?)))
}
