//! Every benchmark by name: what it measures, in which unit, and what it needs.

use serde::{Deserialize, Serialize};

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
    Checkpoint,
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
    Migration,
}

impl Group {
    /// How long one sample takes, roughly, in seconds: for the forecast.
    #[must_use]
    pub fn seconds(self, effort: f64) -> f64 {
        match self {
            Self::Life => 1.0,
            Self::Bridge => 1.3,
            Self::Image | Self::Charge | Self::Pids | Self::Checkpoint => 1.0,
            Self::Direct { memory, .. } => 1.5 + f64::from(memory) / 200.0,
            Self::Cpu | Self::Memory => effort + 0.7,
            Self::Calls | Self::Loopback | Self::Network => 2.0 * effort + 0.7,
            Self::Disk => 4.0 * effort + 0.7,
            Self::Quota => 3.0,
            Self::Raise => 4.0,
            Self::Oom => 1.2,
            Self::Weight | Self::Migration => 0.0,
            Self::Scale { containers } => 1.0 + 0.25 * f64::from(containers),
        }
    }
}

/// The name, unit, direction and meaning of a benchmark, before its component is known.
type Line = (&'static str, &'static str, Direction, &'static str);

use Direction::{Higher, Lower};

const LIFE: &[Line] = &[
    ("sandbox.create", "ms", Lower, "RunPodSandbox, until it has answered"),
    ("container.create", "ms", Lower, "CreateContainer with an image that is there"),
    ("container.start", "ms", Lower, "StartContainer, until it has answered"),
    (
        "container.answer",
        "ms",
        Lower,
        "from StartContainer to the first line that the program has written",
    ),
    ("container.exec", "ms", Lower, "ExecSync of `true` in a container that runs"),
    ("container.stop", "ms", Lower, "StopContainer of a program that ends at SIGTERM"),
    ("container.remove", "ms", Lower, "RemoveContainer of one that has ended"),
    ("sandbox.stop", "ms", Lower, "StopPodSandbox"),
    ("sandbox.remove", "ms", Lower, "RemovePodSandbox"),
    (
        "life.total",
        "ms",
        Lower,
        "sandbox and container: create, start, stop and remove, without exec",
    ),
];

const BRIDGE: &[Line] = &[
    ("bridge.create", "ms", Lower, "RunPodSandbox with a network of its own"),
    ("bridge.stop", "ms", Lower, "StopPodSandbox, with its network"),
];

const IMAGE: &[Line] = &[
    ("image.pull", "ms", Lower, "PullImage of 16 MiB from a registry on this machine, unpacked"),
    ("image.remove", "ms", Lower, "RemoveImage of the same"),
];

const CHECKPOINT: &[Line] = &[
    ("container.checkpoint", "ms", Lower, "CheckpointContainer, until it has answered"),
    (
        "container.checkpoint-pause",
        "ms",
        Lower,
        "the longest silence of a program that writes each millisecond, around that call",
    ),
    (
        "container.checkpoint-frozen",
        "ms",
        Lower,
        "how long the engine says that the tasks were frozen, by the statistics in the archive",
    ),
    ("container.checkpoint-bytes", "MiB", Lower, "the size of the archive"),
    ("container.restore", "ms", Lower, "CreateContainer from a checkpoint, and StartContainer"),
];

/// The facets of a checkpoint by the OCI runtime itself.
const DIRECT: &[Line] = &[
    ("checkpoint", "ms", Lower, "the runtime's checkpoint command, as its caller sees it"),
    ("pause", "ms", Lower, "the longest silence of a program that writes each millisecond"),
    ("frozen", "ms", Lower, "how long the engine says that the tasks were frozen"),
    ("engine", "ms", Lower, "the engine's work by its own clock, less the frozen time"),
    (
        "runtime",
        "ms",
        Lower,
        "the caller's time before and after the engine's work: starting both programs, their ends",
    ),
    ("unnamed", "ms", Lower, "what of the caller's time is none of these; invalid above 2 % of it"),
    ("bytes", "MiB", Lower, "the size of the images"),
    ("restore", "ms", Lower, "the runtime's restore command, as its caller sees it"),
    ("answer", "ms", Lower, "from the call of restore to the program's next sign of life"),
];

const CPU: &[Line] = &[
    ("cpu.total", "ms", Lower, "sysbench: all primes up to 10000, a fixed number of times"),
    ("cpu.minimal", "ms", Lower, "the shortest of these"),
    ("cpu.average", "ms", Lower, "their average"),
    ("cpu.maximal", "ms", Lower, "the longest of these"),
];

const MEMORY: &[Line] = &[
    ("memory.total", "ms", Lower, "sysbench: a fixed amount of memory written in blocks of 1 MiB"),
    ("memory.minimal", "ms", Lower, "the shortest time for a block"),
    ("memory.average", "ms", Lower, "the average time for a block"),
    ("memory.maximal", "ms", Lower, "the longest time for a block"),
    ("memory.fault", "ns", Lower, "the first write to a page of fresh memory"),
];

const DISK: &[Line] = &[
    (
        "disk.sequential-write",
        "MiB/s",
        Higher,
        "a new file in the container's own root, with fsync",
    ),
    ("disk.sequential-rewrite", "MiB/s", Higher, "the same file written again, with fsync"),
    (
        "disk.sequential-read",
        "MiB/s",
        Higher,
        "the same file read in blocks of 1 MiB, from the page cache",
    ),
    ("disk.random-read", "us", Lower, "16 KiB at random places of it, from the page cache"),
    ("disk.random-write", "us", Lower, "16 KiB at random places of it, fsync after each 100"),
];

const CALLS: &[Line] = &[
    ("syscall.getppid", "ns", Lower, "a system call that does nothing"),
    ("syscall.open", "ns", Lower, "open and close of a file in the container's root"),
    ("switch.pipe", "ns", Lower, "a byte to another thread and back through two pipes"),
    ("process.spawn", "us", Lower, "fork, exec and wait of a small program"),
];

const LOOPBACK: &[Line] = &[
    ("loopback.throughput", "MiB/s", Higher, "TCP to the container's own loopback, one stream"),
    ("loopback.latency", "us", Lower, "a byte there and back"),
];

const NETWORK: &[Line] = &[
    ("bridge.throughput", "MiB/s", Higher, "TCP from one sandbox to another through the bridge"),
    ("bridge.latency", "us", Lower, "a byte there and back through the bridge"),
];

const QUOTA: &[Line] = &[
    ("cpu.share", "%", Lower, "the CPU used under a quota of 20 %, less the quota (the magnitude)"),
    ("cpu.work", "ms", Lower, "a fixed piece of work under the same quota"),
];

const RAISE: &[Line] = &[
    ("raise.call", "ms", Lower, "UpdateContainerResources while the container runs"),
    (
        "raise.effect",
        "ms",
        Lower,
        "from that call to the first 50 ms with more CPU than the old quota gives",
    ),
];

const OOM: &[Line] = &[(
    "memory.oom",
    "ms",
    Lower,
    "from the first byte over the limit to the status EXITED (OOMKilled)",
)];

const PIDS: &[Line] = &[(
    "pids.refusal",
    "processes",
    Higher,
    "how many processes a limit of 32 lets a container start",
)];

const WEIGHT: &[Line] = &[(
    "io.weight",
    "ratio",
    Higher,
    "bytes that two containers write under weights of 800 and 100",
)];

const CHARGE: &[Line] = &[
    (
        "charge.idle",
        "MiB",
        Lower,
        "memory that the group of a pod with one sleeping container is charged for",
    ),
    (
        "charge.cpu",
        "ms",
        Lower,
        "CPU time that the groups of such a pod are charged for until it sleeps",
    ),
];

const SCALE: &[Line] = &[
    ("start", "s", Lower, "creating and starting all, each in a sandbox of its own"),
    ("stop", "s", Lower, "stopping and removing all"),
    ("available", "MiB", Lower, "memory for each, by what the machine has less available"),
    (
        "pss",
        "MiB",
        Lower,
        "memory for each, by the proportional share of all its processes, the runtime's included",
    ),
    ("cgroup", "MiB", Lower, "memory for each, by what its control group is charged for"),
];

const MIGRATION: &[Line] = &[
    ("container.pause", "ms", Lower, "the longest silence of a program that moves to another host"),
    ("container.total", "ms", Lower, "moving a container, as the caller sees it"),
];

/// All benchmarks that a configuration asks for, filters aside.
#[must_use]
pub fn all(config: &Config) -> Vec<Benchmark> {
    let mut list = Vec::new();
    let mut add = |context: &str, lines: &[Line], group: Group, isolates: &str, needs: &[&str]| {
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
    add("operations", LIFE, Group::Life, "CRI, shim and OCI runtime, without CNI", busybox);
    add(
        "operations",
        BRIDGE,
        Group::Bridge,
        "CNI, beside operations.sandbox",
        &["a CNI configuration"],
    );
    add("operations", IMAGE, Group::Image, "image service and snapshotter", busybox);
    add(
        "operations",
        CHECKPOINT,
        Group::Checkpoint,
        "the CRI's own way to a checkpoint",
        &["containerd 2 or CRI-O", "criu"],
    );
    for &memory in &config.memory {
        for sealed in [false, true] {
            let kind = if sealed { "sealed" } else { "plain" };
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
        "the root file system: snapshotter, and gVisor's gofer",
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
    add(
        "limits",
        PIDS,
        Group::Pids,
        "the pids controller",
        &["a default limit of pids in the runtime"],
    );
    add("limits", WEIGHT, Group::Weight, "the I/O controller", &["cgroup v2 with io.weight"]);
    add("limits", CHARGE, Group::Charge, "what of the runtime lies inside of the group", busybox);
    for &containers in &config.scale {
        let context = format!("scalability.containers-{containers}");
        let group = Group::Scale { containers };
        add(&context, SCALE, group, "locks and daemons under many containers", busybox);
    }
    add("migration", MIGRATION, Group::Migration, "moving between hosts", &["torpor migrate"]);
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
}
