//! What each procedure measures, line by line.

use super::Direction::{self, Higher, Lower};

/// The name, unit, direction and meaning of a benchmark, before its component is known.
pub(super) type Described = (&'static str, &'static str, Direction, &'static str);

/// The life of a container.
pub(super) const LIFE: &[Described] = &[
    ("sandbox.create", "ms", Lower, "RunPodSandbox, until it has answered"),
    ("container.create", "ms", Lower, "CreateContainer with an image that is there"),
    ("container.start", "ms", Lower, "StartContainer, until it has answered"),
    (
        "container.answer",
        "ms",
        Lower,
        "from StartContainer to the first line that the program has written",
    ),
    (
        "container.exec",
        "ms",
        Lower,
        "ExecSync of `true` in a container that runs, the mean of 10 calls",
    ),
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

/// A network of its own.
pub(super) const BRIDGE: &[Described] = &[
    ("bridge.create", "ms", Lower, "RunPodSandbox with a network of its own"),
    ("bridge.stop", "ms", Lower, "StopPodSandbox, with its network"),
];

/// Images.
pub(super) const IMAGE: &[Described] = &[
    (
        "image.pull",
        "ms",
        Lower,
        "PullImage from a registry on this machine, unpacked: 16 MiB, or what `pulled_image` names",
    ),
    ("image.remove", "ms", Lower, "RemoveImage of the same"),
];

/// The facets of a checkpoint through the CRI.
pub(super) const CHECKPOINT: &[Described] = &[
    ("checkpoint", "ms", Lower, "CheckpointContainer, until it has answered"),
    (
        "checkpoint-pause",
        "ms",
        Lower,
        "the longest silence of a program that writes each millisecond, around that call",
    ),
    (
        "checkpoint-frozen",
        "ms",
        Lower,
        "how long the engine says that the tasks were frozen, by the statistics in the archive",
    ),
    (
        "checkpoint-engine",
        "ms",
        Lower,
        "the engine's work by the clock of its log in the archive, less the frozen time",
    ),
    (
        "checkpoint-storage",
        "ms",
        Lower,
        "the rest of the call: the endpoint starts the runtime, stores images and packs them",
    ),
    ("checkpoint-bytes", "MiB", Lower, "the size of the archive"),
    ("restore", "ms", Lower, "CreateContainer from a checkpoint, and StartContainer"),
    (
        "restore-answer",
        "ms",
        Lower,
        "from that call of CreateContainer to the program's next sign of life, by the program's clock",
    ),
];

/// The facets of a checkpoint by the OCI runtime itself.
pub(super) const DIRECT: &[Described] = &[
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
    (
        "answer",
        "ms",
        Lower,
        "from the call of restore to the program's next sign of life, by its own clock",
    ),
];

/// The processor.
pub(super) const CPU: &[Described] = &[
    ("cpu.total", "ms", Lower, "sysbench: all primes up to 10000, a fixed number of times"),
    ("cpu.minimal", "ms", Lower, "the shortest of these, to 0.01 ms"),
    ("cpu.average", "ms", Lower, "their average: the total by their number"),
    ("cpu.maximal", "ms", Lower, "the longest of these, to 0.01 ms"),
];

/// Memory.
pub(super) const MEMORY: &[Described] = &[
    ("memory.total", "ms", Lower, "sysbench: a fixed amount of memory written in blocks of 4 MiB"),
    ("memory.minimal", "ms", Lower, "the shortest time for a block, to 0.01 ms"),
    ("memory.average", "ms", Lower, "the average time for a block: the total by their number"),
    ("memory.maximal", "ms", Lower, "the longest time for a block, to 0.01 ms"),
    ("memory.fault", "ns", Lower, "the first write to a page of fresh memory"),
];

/// Files.
pub(super) const DISK: &[Described] = &[
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

/// The same files on a directory of the host: what a runtime keeps in a root of its own is not in them.
pub(super) const DISK_BIND: &[Described] = &[
    (
        "disk-bind.sequential-write",
        "MiB/s",
        Higher,
        "a new file in a directory of the host that is mounted into the container, with fsync",
    ),
    ("disk-bind.sequential-rewrite", "MiB/s", Higher, "the same file written again, with fsync"),
    (
        "disk-bind.sequential-read",
        "MiB/s",
        Higher,
        "the same file read in blocks of 1 MiB, from the page cache",
    ),
    ("disk-bind.random-read", "us", Lower, "16 KiB at random places of it, from the page cache"),
    ("disk-bind.random-write", "us", Lower, "16 KiB at random places of it, fsync after each 100"),
];

/// System calls, switches, processes.
pub(super) const CALLS: &[Described] = &[
    ("syscall.getppid", "ns", Lower, "a system call that does nothing"),
    ("syscall.open", "ns", Lower, "open and close of a file in the container's root"),
    ("switch.pipe", "ns", Lower, "a byte to another thread and back through two pipes"),
    ("process.spawn", "us", Lower, "fork, exec and wait of a small program"),
];

/// TCP inside.
pub(super) const LOOPBACK: &[Described] = &[
    ("loopback.throughput", "MiB/s", Higher, "TCP to the container's own loopback, one stream"),
    ("loopback.latency", "us", Lower, "a byte there and back"),
];

/// TCP between sandboxes.
pub(super) const NETWORK: &[Described] = &[
    ("bridge.throughput", "MiB/s", Higher, "TCP from one sandbox to another through the bridge"),
    ("bridge.latency", "us", Lower, "a byte there and back through the bridge"),
];

/// A CPU quota.
pub(super) const QUOTA: &[Described] = &[
    ("cpu.share", "%", Lower, "the CPU used under a quota of 20 %, less the quota (the magnitude)"),
    ("cpu.work", "ms", Lower, "a fixed piece of work under the same quota"),
];

/// A quota that is raised.
pub(super) const RAISE: &[Described] = &[
    ("raise.call", "ms", Lower, "UpdateContainerResources while the container runs"),
    (
        "raise.effect",
        "ms",
        Lower,
        "from that call to the end of the first 100 ms with more CPU than the old quota gives",
    ),
];

/// A limit of memory.
pub(super) const OOM: &[Described] = &[(
    "memory.oom",
    "ms",
    Lower,
    "from the first byte over the limit to the status EXITED (OOMKilled), which is asked for every 2 ms",
)];

/// A limit of processes.
pub(super) const PIDS: &[Described] = &[(
    "pids.refusal",
    "processes",
    Higher,
    "how many processes a limit of 32 lets a container start",
)];

/// Weights of input and output.
pub(super) const WEIGHT: &[Described] = &[(
    "io.weight",
    "%",
    Lower,
    "the share of what two containers read at the same time that the one with a weight of 800 beside 100 \
     gets, less 88.9 % (the magnitude)",
)];

/// What an idle container is charged for.
pub(super) const CHARGE: &[Described] = &[
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

/// What of that is the runtime's own.
pub(super) const CHARGE_OWN: &[Described] = &[
    (
        "charge.runtime",
        "MiB",
        Lower,
        "how much of that memory is not the program's: what the groups are charged for beyond the same \
         program asleep in a group that no runtime has made",
    ),
    ("charge.runtime-cpu", "ms", Lower, "the same of the CPU time"),
];

/// Many containers.
pub(super) const SCALE: &[Described] = &[
    ("start", "s", Lower, "creating and starting all, each in a sandbox of its own"),
    ("stop", "s", Lower, "stopping and removing all"),
    ("available", "MiB", Lower, "memory for each, by what the machine has less available"),
    ("cgroup", "MiB", Lower, "memory for each, by what its control group is charged for"),
];

/// What only an endpoint tells whose processes are known.
pub(super) const SCALE_ALL: &[Described] = &[
    (
        "running",
        "ms",
        Lower,
        "CPU time that all its processes, the runtime's included, take in a second in which all run",
    ),
    (
        "pss",
        "MiB",
        Lower,
        "memory for each, by the proportional share of all its processes, the runtime's included",
    ),
];

/// A container that moves.
pub(super) const MIGRATION: &[Described] = &[
    ("total", "ms", Lower, "torpor migrate, as its caller sees it"),
    (
        "pause",
        "ms",
        Lower,
        "the longest silence of a program that writes each millisecond, and moves to another host",
    ),
    ("stopped", "ms", Lower, "how long torpor says that the tasks were stopped"),
    ("freeze", "ms", Lower, "of that: until the first page of the last round was sent"),
    ("transfer", "ms", Lower, "of that: until all was there"),
    ("restore", "ms", Lower, "of that: until the tasks ran there"),
    ("bytes", "MiB", Lower, "all that went over the link"),
];
