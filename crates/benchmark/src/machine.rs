//! The machine that a run was made on, and how quiet it was.

use std::collections::BTreeMap;
use std::fs;
use std::ops::AddAssign;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use torpor_kernel::mountinfo;
use torpor_kernel::proc::processes;

use crate::statistics::{deviation, median};

/// What identifies a machine, as far as results depend on it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name.
    pub hostname: String,
    /// The model of its processors.
    pub cpu: String,
    /// How many of them this process may use.
    pub cpus: usize,
    /// The processor architecture.
    pub architecture: String,
    /// Memory in MiB.
    pub memory: u64,
    /// The kernel.
    pub kernel: String,
    /// `v1`, `v2`, or `hybrid`.
    pub cgroup: String,
    /// What governs the processors' frequency.
    pub governor: String,
    /// The distribution.
    pub system: String,
    /// Other facts: the file system below, product, address space randomization, load at the start.
    pub facts: BTreeMap<String, String>,
}

/// Where the root directory of a node is in the pod that measures it.
pub const HOST: &str = "/host";

/// Whether this machine is a node of a Kubernetes. Its kubelet removes, within seconds, what is not its
/// own in the runtime that it has.
#[must_use]
pub(crate) fn has_kubelet() -> bool {
    let mut names = processes().map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")));
    names.any(|name| name.is_ok_and(|name| name.trim() == "kubelet"))
}

impl Machine {
    /// This machine.
    #[must_use]
    pub fn here() -> Self {
        let uname = rustix::system::uname();
        let text = |c: &std::ffi::CStr| c.to_string_lossy().into_owned();
        Self {
            hostname: text(uname.nodename()),
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            architecture: text(uname.machine()),
            memory: field("/proc/meminfo", "MemTotal").map_or(0, |v| kibibytes(&v) / 1024),
            kernel: format!("{} {}", text(uname.release()), text(uname.version())),
            cgroup: cgroup().into(),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            system: system(),
            facts: facts(),
        }
    }

    /// What differs between two machines so that their results must not be mixed.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let pairs = [
            ("name", self.hostname.clone(), other.hostname.clone()),
            ("CPU", self.cpu.clone(), other.cpu.clone()),
            ("number of CPUs", self.cpus.to_string(), other.cpus.to_string()),
            ("architecture", self.architecture.clone(), other.architecture.clone()),
            ("memory in MiB", self.memory.to_string(), self.as_memory(other).to_string()),
            ("kernel", self.kernel.clone(), other.kernel.clone()),
            ("cgroup version", self.cgroup.clone(), other.cgroup.clone()),
            ("governor", self.governor.clone(), other.governor.clone()),
        ];
        let different = pairs.into_iter().filter(|(_, a, b)| a != b);
        different.map(|(what, a, b)| format!("{what}: {a} and {b}")).collect()
    }

    /// Another machine's memory: as large as this one's where they differ by less than one of a hundred parts. What a kernel
    /// keeps for itself differs from one boot to the next, and a hypervisor takes some of it back.
    fn as_memory(&self, other: &Self) -> u64 {
        let alike = self.memory.abs_diff(other.memory) * 100 < self.memory;
        if alike { self.memory } else { other.memory }
    }
}

fn facts() -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() {
            facts.insert(name.to_owned(), value);
        }
    };
    add("address space randomization", line("/proc/sys/kernel/randomize_va_space"));
    add("load at the start", line("/proc/loadavg"));
    add("boot", line("/proc/sys/kernel/random/boot_id"));
    add("product", line("/sys/class/dmi/id/product_name"));
    add("transparent huge pages", line("/sys/kernel/mm/transparent_hugepage/enabled"));
    let stolen = Ticks::now().stolen().unwrap_or_default();
    add("stolen time since boot, %", format!("{stolen:.2}"));
    add("file system", file_system(&std::env::temp_dir()).unwrap_or_default());
    facts
}

/// Processor time in ticks, of all processors together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticks {
    /// What a hypervisor has given to others.
    pub stolen: u64,
    /// All that has passed.
    pub all: u64,
}

impl Ticks {
    /// Since the machine was booted.
    #[must_use]
    pub fn now() -> Self {
        Self::read(&line("/proc/stat"))
    }

    /// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
    fn read(text: &str) -> Self {
        let words = text.split_whitespace().skip(1);
        let ticks: Vec<u64> = words.filter_map(|word| word.parse().ok()).take(8).collect();
        Self { stolen: ticks.get(7).copied().unwrap_or(0), all: ticks.iter().sum() }
    }

    /// What has passed since then.
    #[must_use]
    pub fn since(self, then: Self) -> Self {
        Self {
            stolen: self.stolen.saturating_sub(then.stolen),
            all: self.all.saturating_sub(then.all),
        }
    }

    /// The stolen share in percent, or nothing where no time has passed.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "ticks of 10 ms are far fewer than 2^52")]
    pub fn stolen(self) -> Option<f64> {
        (self.all > 0).then(|| 100.0 * self.stolen as f64 / self.all as f64)
    }
}

impl AddAssign for Ticks {
    fn add_assign(&mut self, other: Self) {
        self.stolen += other.stolen;
        self.all += other.all;
    }
}

/// The type of the file system that a directory lies on, and the device below; nothing where it cannot be told.
#[must_use]
pub fn file_system(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let mounts = mountinfo::of(std::process::id().cast_signed()).ok()?;
    let mount = mountinfo::holding(&mounts, &dir)?;
    Some(format!("{} on {}", mount.fs, mount.source.display()))
}

/// The first line of a file, or nothing.
#[must_use]
pub fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// The value of the first line `name: value` of a file.
#[must_use]
pub fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// The number of a value like `123 kB`.
#[must_use]
pub(crate) fn kibibytes(value: &str) -> u64 {
    value.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Which version of control groups rules here.
#[must_use]
pub fn cgroup() -> &'static str {
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let both = Path::new("/sys/fs/cgroup/unified/cgroup.controllers").exists();
    match (unified, both) {
        (true, _) => "v2",
        (false, true) => "hybrid",
        (false, false) => "v1",
    }
}

fn system() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or_default().trim_matches('"').to_owned()
}

/// How much the same piece of work varied on this machine during the run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// The times of the loop in ms, in their order.
    pub samples: Vec<f64>,
    /// Their median.
    pub median: f64,
    /// Their deviation, as a share of the median.
    pub deviation: f64,
    /// Whether that is so much that small differences between targets mean little.
    pub noisy: bool,
    /// How many percent of the processors' time a hypervisor has given to others during the run, where that is known.
    #[serde(default)]
    pub stolen: Option<f64>,
}

/// Above this deviation a machine is called noisy.
const NOISY: f64 = 0.05;

impl Calibration {
    /// What samples say.
    #[must_use]
    pub fn of(samples: Vec<f64>) -> Self {
        if samples.is_empty() {
            return Self::default();
        }
        let median = median(&samples);
        let deviation = deviation(&samples) / median;
        Self { samples, median, deviation, noisy: deviation > NOISY, stolen: None }
    }
}

/// One turn of the loop: a fixed piece of work on the processor, in ms.
#[must_use]
pub(crate) fn calibrate() -> f64 {
    let begun = Instant::now();
    let mut value = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..2_000_000 {
        value ^= value << 13;
        value ^= value >> 7;
        value ^= value << 17;
    }
    std::hint::black_box(value);
    begun.elapsed().as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noisy_machine_is_called_so() {
        let quiet = Calibration::of(vec![10.0, 10.2, 9.9, 10.1, 10.0]);
        assert!(!quiet.noisy && quiet.deviation < NOISY, "{quiet:?}");
        let noisy = Calibration::of(vec![10.0, 14.0, 9.0, 12.5, 10.0]);
        assert!(noisy.noisy && noisy.deviation > NOISY, "{noisy:?}");
        assert!(!Calibration::of(Vec::new()).noisy);
    }

    #[test]
    fn a_machine_that_was_started_again_is_the_same() {
        let with = |memory, cpus| Machine { memory, cpus, ..Machine::default() };
        let before = with(7950, 2);
        assert!(before.differences(&with(7949, 2)).is_empty());
        assert_eq!(before.differences(&with(7800, 2)), ["memory in MiB: 7950 and 7800"]);
        assert_eq!(before.differences(&with(7951, 4)), ["number of CPUs: 2 and 4"]);
    }

    #[test]
    fn stolen_time_is_a_share_of_what_has_passed() {
        let then = Ticks::read("cpu  100 0 50 800 10 0 0 40 7 7");
        let now = Ticks::read("cpu  150 0 50 1640 20 0 0 140 9 9");
        assert_eq!(now.since(then), Ticks { stolen: 100, all: 1000 });
        assert_eq!(now.since(then).stolen(), Some(10.0));
        assert_eq!(Ticks::read("").stolen(), None);
        assert!(Ticks::now().all > 0);
    }

    #[test]
    fn the_file_system_below_is_the_innermost() {
        assert!(file_system(Path::new("/proc/self")).unwrap().starts_with("proc on "));
        assert_eq!(file_system(Path::new("/nonexistent")), None);
        assert!(file_system(Path::new("/")).is_some());
    }
}
