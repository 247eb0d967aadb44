//! Every benchmark by name: what it measures, in which unit, and what it needs.

mod lines;

use serde::{Deserialize, Serialize};

use self::lines::*;
use crate::config::Config;

/// Which values are good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Less is better.
    Lower,
    /// More is better.
    Higher,
}

/// One row of results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Benchmark {
    /// `context.component.facet`.
    pub name: String,
    /// The unit of its values.
    pub unit: String,
    /// Which values are good.
    pub direction: Direction,
    /// What it measures.
    pub measures: String,
    /// What a difference in it comes from, all else being equal.
    pub isolates: String,
    /// What it needs.
    pub needs: Vec<String>,
    /// What is measured together with it, in one go.
    pub group: Group,
}

/// A procedure that gives the samples of one or more benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// The life of a container with the network of the host.
    Life,
    /// The same with a network of its own.
    Bridge,
    /// Pulling and removing an image.
    Image,
    /// `CheckpointContainer`, and what is restored from it.
    Checkpoint {
        /// The memory of the container in MiB.
        memory: u32,
        /// Whether images are sealed.
        sealed: bool,
    },
    /// A checkpoint by the OCI runtime itself.
    Direct {
        /// The memory of the container in MiB.
        memory: u32,
        /// Whether images are sealed.
        sealed: bool,
    },
    /// A program in a container.
    Cpu,
    /// See [`Group::Cpu`].
    Memory,
    /// See [`Group::Cpu`].
    Disk,
    /// The same on a directory of the host.
    DiskBind,
    /// See [`Group::Cpu`].
    Calls,
    /// See [`Group::Cpu`].
    Loopback,
    /// Between a container and the host.
    Network,
    /// A CPU quota.
    Quota,
    /// A CPU quota that is raised.
    Raise,
    /// A limit of memory that is passed.
    Oom,
    /// A limit of processes.
    Pids,
    /// Weights of input and output.
    Weight,
    /// What is charged to the group of an idle container.
    Charge,
    /// Many containers.
    Scale {
        /// How many.
        containers: u32,
    },
    /// Moving a container.
    Migration {
        /// The memory of the container in MiB.
        memory: u32,
        /// How it is moved.
        mode: Mode,
    },
}

/// How a container is moved: the modes of `torpor migrate` that runtimes can take part in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Stopped, sent, and restored.
    StopAndCopy,
    /// Its memory is sent while it runs, what has changed since when it is stopped.
    PreCopy,
    /// The same, and it is built there while it runs here.
    Pipelined,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::StopAndCopy, Self::PreCopy, Self::Pipelined];

    /// Its name in `torpor migrate`, and in the names of benchmarks.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StopAndCopy => "stop-and-copy",
            Self::PreCopy => "pre-copy",
            Self::Pipelined => "pipelined",
        }
    }
}

impl Group {
    /// How long one sample takes, roughly, in seconds: for the forecast. The times are those of runc with containerd on two
    /// processors, and half as much again, since others take longer.
    #[must_use]
    pub fn seconds(self, effort: f64) -> f64 {
        match self {
            Self::Life => 0.6,
            Self::Bridge | Self::Image | Self::Oom | Self::Pids => 0.3,
            Self::Checkpoint { memory, .. } => 1.0 + f64::from(memory) / 130.0,
            Self::Direct { memory, .. } => 0.7 + f64::from(memory) / 450.0,
            Self::Cpu | Self::Memory => 1.1 * effort + 0.3,
            Self::Calls | Self::Loopback | Self::Network => 0.7 * effort + 0.3,
            Self::Disk | Self::DiskBind => 0.3 * effort + 0.3,
            Self::Charge => 1.0,
            Self::Quota | Self::Raise => 2.6,
            Self::Weight => 2.2,
            Self::Migration { memory, .. } => 0.7 + f64::from(memory) / 450.0,
            // Those that sleep, and are weighed, do so for one and a half.
            Self::Scale { containers } => 1.5 + 0.18 * f64::from(containers),
        }
    }
}

/// All benchmarks that a configuration asks for, filters aside.
#[must_use]
pub fn all(config: &Config) -> Vec<Benchmark> {
    let mut list = Vec::new();
    let mut add =
        |context: &str, lines: &[Described], group: Group, isolates: &str, needs: &[&str]| {
            for (name, unit, direction, measures) in lines {
                list.push(Benchmark {
                    name: format!("{context}.{name}"),
                    unit: (*unit).into(),
                    direction: *direction,
                    measures: (*measures).into(),
                    isolates: isolates.into(),
                    needs: needs.iter().map(|&need| need.into()).collect(),
                    group,
                });
            }
        };
    let sysbench = &["sysbench on this machine"][..];
    let busybox = &[][..];
    let ours = &["a containerd that the tool starts"][..];
    add("operations", LIFE, Group::Life, "CRI, shim and OCI runtime, without CNI", busybox);
    add(
        "operations",
        BRIDGE,
        Group::Bridge,
        "CNI, beside operations.sandbox",
        &["a CNI configuration"],
    );
    add("operations", IMAGE, Group::Image, "image service and snapshotter", busybox);
    for &memory in &config.memory {
        for sealed in [false, true] {
            let kind = if sealed { "sealed" } else { "plain" };
            let usual = !sealed && config.memory.iter().min() == Some(&memory);
            let of = if usual { String::new() } else { format!("-{kind}-{memory}m") };
            let context = format!("operations.container{of}");
            let isolates = "the CRI's own way to a checkpoint";
            let needs = &["containerd 2 or CRI-O", "criu"];
            add(&context, CHECKPOINT, Group::Checkpoint { memory, sealed }, isolates, needs);
            let context = format!("operations.checkpoint-{kind}-{memory}m");
            let isolates = "OCI runtime and checkpoint engine, without CRI";
            let needs = &["an OCI runtime with `checkpoint`", "torpor as criu"];
            add(&context, DIRECT, Group::Direct { memory, sealed }, isolates, needs);
        }
    }
    add("performance", CPU, Group::Cpu, "the CPU as a container sees it", sysbench);
    add("performance", MEMORY, Group::Memory, "memory and page faults", sysbench);
    add(
        "performance",
        DISK,
        Group::Disk,
        "the root file system: snapshotter, and gVisor's memory, which holds what is written there",
        busybox,
    );
    add(
        "performance",
        DISK_BIND,
        Group::DiskBind,
        "the way to a file of the host: mount, or gVisor's gofer",
        busybox,
    );
    add(
        "performance",
        CALLS,
        Group::Calls,
        "the way into the kernel: seccomp, or gVisor's sentry",
        busybox,
    );
    add("performance", LOOPBACK, Group::Loopback, "the network stack inside", busybox);
    add(
        "performance",
        NETWORK,
        Group::Network,
        "veth, bridge, and the network stacks of both sandboxes",
        &["a CNI configuration"],
    );
    add(
        "limits",
        QUOTA,
        Group::Quota,
        "the CPU controller; valid only if the kernel has throttled",
        busybox,
    );
    add("limits", RAISE, Group::Raise, "the runtime's update", busybox);
    add("limits", OOM, Group::Oom, "how an event of the kernel travels to the CRI", busybox);
    add("limits", PIDS, Group::Pids, "the pids controller", ours);
    add(
        "limits",
        WEIGHT,
        Group::Weight,
        "the I/O controller, on a loop device with the scheduler BFQ",
        &[ours[0], "BFQ in the kernel"],
    );
    let inside = "what of the runtime lies inside of the group";
    add("limits", CHARGE, Group::Charge, inside, busybox);
    add("limits", CHARGE_OWN, Group::Charge, inside, ours);
    for &containers in &config.scale {
        let context = format!("scalability.containers-{containers}");
        let group = Group::Scale { containers };
        let isolates = "locks and daemons under many containers";
        add(&context, SCALE, group, isolates, busybox);
        add(&context, SCALE_ALL, group, isolates, ours);
    }
    for &memory in &config.memory {
        for mode in Mode::ALL {
            let context = format!("migration.{}-{memory}m", mode.name());
            let isolates = "OCI runtime, checkpoint engine and migration, without CRI";
            let needs = &["runc", "torpor as criu"];
            add(&context, MIGRATION, Group::Migration { memory, mode }, isolates, needs);
        }
    }
    list
}

/// The benchmarks that a configuration asks for, by its filters.
#[must_use]
pub fn wanted(config: &Config) -> Vec<Benchmark> {
    let mut list = all(config);
    list.retain(|benchmark| config.filters.take(&benchmark.name));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_have_three_parts() {
        let list = all(&Config::default());
        let names: std::collections::BTreeSet<_> = list.iter().map(|b| &b.name).collect();
        assert_eq!(names.len(), list.len());
        assert!(list.iter().all(|b| b.name.split('.').count() == 3), "{names:?}");
    }

    #[test]
    fn what_only_an_own_containerd_gives_says_so() {
        let list = all(&Config::default());
        let own: Vec<&str> = list
            .iter()
            .filter(|b| b.needs.iter().any(|need| need == "a containerd that the tool starts"))
            .map(|b| b.name.as_str())
            .filter(|name| !name.starts_with("scalability.containers-1"))
            .collect();
        let wanted = [
            "limits.pids.refusal",
            "limits.io.weight",
            "limits.charge.runtime",
            "limits.charge.runtime-cpu",
            "scalability.containers-5.running",
            "scalability.containers-5.pss",
            "scalability.containers-50.running",
            "scalability.containers-50.pss",
        ];
        assert_eq!(own, wanted);
    }
}
