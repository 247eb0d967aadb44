//! Which files of a group are kept, and how they are written.

use std::collections::BTreeMap;

/// Properties of every group of a version 1 hierarchy. Of the lists of tasks only
/// owner and mode are kept.
const COMMON_V1: &[&str] = &["cgroup.clone_children", "notify_on_release", "cgroup.procs", "tasks"];

/// Properties of every group of the unified hierarchy.
const COMMON_V2: &[&str] = &[
    "cgroup.type",
    "cgroup.subtree_control",
    "cgroup.max.descendants",
    "cgroup.max.depth",
    "cgroup.freeze",
    "cgroup.procs",
];

/// Properties of controllers, in the order in which they can be set: limits of
/// memory before those that include it, periods before quotas.
const CONTROLLERS: &[(&str, &[&str])] = &[
    (
        "cpu",
        &[
            "cpu.shares",
            "cpu.cfs_period_us",
            "cpu.cfs_quota_us",
            "cpu.cfs_burst_us",
            "cpu.rt_period_us",
            "cpu.rt_runtime_us",
            "cpu.idle",
            "cpu.weight",
            "cpu.max",
            "cpu.max.burst",
        ],
    ),
    (
        "memory",
        &[
            "memory.use_hierarchy",
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            "memory.swappiness",
            "memory.soft_limit_in_bytes",
            "memory.move_charge_at_immigrate",
            "memory.oom_control",
            "memory.kmem.limit_in_bytes",
            "memory.kmem.tcp.limit_in_bytes",
            "memory.min",
            "memory.low",
            "memory.high",
            "memory.max",
            "memory.swap.high",
            "memory.swap.max",
            "memory.zswap.max",
            "memory.oom.group",
        ],
    ),
    (
        "cpuset",
        &[
            "cpuset.cpus",
            "cpuset.mems",
            "cpuset.memory_migrate",
            "cpuset.cpu_exclusive",
            "cpuset.mem_exclusive",
            "cpuset.mem_hardwall",
            "cpuset.memory_spread_page",
            "cpuset.memory_spread_slab",
            "cpuset.sched_load_balance",
            "cpuset.sched_relax_domain_level",
            "cpuset.cpus.partition",
        ],
    ),
    (
        "blkio",
        &[
            "blkio.weight",
            "blkio.bfq.weight",
            "blkio.throttle.read_bps_device",
            "blkio.throttle.write_bps_device",
            "blkio.throttle.read_iops_device",
            "blkio.throttle.write_iops_device",
        ],
    ),
    ("io", &["io.weight", "io.bfq.weight", "io.max", "io.latency"]),
    ("freezer", &["freezer.state"]),
    ("pids", &["pids.max"]),
    ("devices", &[DEVICES]),
    ("net_cls", &["net_cls.classid"]),
    ("net_prio", &["net_prio.ifpriomap"]),
    ("misc", &["misc.max"]),
    (
        "hugetlb",
        &[
            "hugetlb.2MB.limit_in_bytes",
            "hugetlb.2MB.rsvd.limit_in_bytes",
            "hugetlb.1GB.limit_in_bytes",
            "hugetlb.1GB.rsvd.limit_in_bytes",
            "hugetlb.2MB.max",
            "hugetlb.2MB.rsvd.max",
            "hugetlb.1GB.max",
            "hugetlb.1GB.rsvd.max",
        ],
    ),
    ("rdma", &["rdma.max"]),
];

/// What a group of version 1 lets its tasks do with devices. It is written by two other files.
pub(super) const DEVICES: &str = "devices.list";

/// Files whose content is not kept, but only whom they belong to.
#[must_use]
pub(super) fn is_list_of_tasks(name: &str) -> bool {
    matches!(name, "cgroup.procs" | "cgroup.threads" | "tasks")
}

/// How the user's list relates to the one above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strategy {
    Merge,
    Replace,
}

/// What is kept: the lists above, changed as the user says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Properties {
    changes: BTreeMap<String, (Option<Strategy>, Vec<String>)>,
}

impl Properties {
    /// Parses CRIU's YAML form:
    ///
    /// ```text
    /// "c1":
    ///  - "strategy": "merge"
    ///  - "properties": ["a", "b"]
    /// ```
    ///
    /// # Errors
    /// The line that is not of that form.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut all = Properties::default();
        let mut current = None;
        for line in text.lines().filter(|l| !l.trim().is_empty() && !l.trim().starts_with('#')) {
            let bad = || format!("cgroup properties: {line:?} is not understood");
            let trimmed = line.trim();
            let (key, value) = match trimmed.strip_prefix('-') {
                Some(item) => item.trim().split_once(':').ok_or_else(bad)?,
                None => {
                    let name = trimmed.strip_suffix(':').ok_or_else(bad)?;
                    current = Some(unquote(name).to_owned());
                    continue;
                }
            };
            let controller = current.clone().ok_or_else(bad)?;
            let entry = all.changes.entry(controller).or_default();
            match (unquote(key), value.trim()) {
                ("strategy", value) => {
                    entry.0 = Some(match unquote(value) {
                        "merge" => Strategy::Merge,
                        "replace" => Strategy::Replace,
                        _ => return Err(bad()),
                    });
                }
                ("properties", value) => {
                    let list = value.strip_prefix('[').and_then(|v| v.strip_suffix(']'));
                    let names = list.ok_or_else(bad)?.split(',').map(unquote);
                    entry.1 = names.filter(|n| !n.is_empty()).map(str::to_owned).collect();
                    if entry.1.iter().any(|name| name.contains('/')) {
                        return Err(bad());
                    }
                }
                _ => return Err(bad()),
            }
        }
        match all.changes.iter().find(|(_, (strategy, _))| strategy.is_none()) {
            Some((name, _)) => Err(format!("cgroup properties: {name} has no strategy")),
            None => Ok(all),
        }
    }

    /// The properties of groups in the hierarchy of that name.
    #[must_use]
    pub(super) fn of(&self, hierarchy: &str) -> Vec<String> {
        let unified = hierarchy.is_empty();
        let common = if unified { COMMON_V2 } else { COMMON_V1 };
        let mut names: Vec<String> = common.iter().map(|n| (*n).to_owned()).collect();
        let known = CONTROLLERS.iter().map(|(name, _)| *name);
        let added = self.changes.keys().map(String::as_str);
        let mut controllers: Vec<&str> =
            if unified { known.chain(added).collect() } else { hierarchy.split(',').collect() };
        controllers.dedup();
        for controller in controllers {
            let usual = CONTROLLERS.iter().find(|(name, _)| *name == controller);
            let (strategy, own) = match self.changes.get(controller) {
                Some((strategy, own)) => (*strategy, own.as_slice()),
                None => (None, &[][..]),
            };
            if strategy != Some(Strategy::Replace) {
                names.extend(usual.iter().flat_map(|(_, p)| p.iter()).map(|p| (*p).to_owned()));
            }
            names.extend(own.iter().cloned());
        }
        let mut seen = std::collections::BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }
}

fn unquote(text: &str) -> &str {
    text.trim().trim_matches('"')
}

/// What has to be written to which files to give a property its value; nothing for
/// one that is set otherwise, or at another time.
#[must_use]
pub(super) fn writes<'v>(name: &'v str, value: &'v str) -> Vec<(&'v str, &'v str)> {
    match name {
        DEVICES => {
            let allowed = value.lines().map(|line| ("devices.allow", line));
            std::iter::once(("devices.deny", "a")).chain(allowed).collect()
        }
        // oom_kill_disable N, then what cannot be written.
        "memory.oom_control" => {
            let flag = value.lines().find_map(|l| l.strip_prefix("oom_kill_disable "));
            vec![(name, flag.unwrap_or(value))]
        }
        "cgroup.type" if value != "threaded" => vec![],
        "freezer.state" | "cgroup.freeze" | "cgroup.subtree_control" => vec![],
        _ if is_list_of_tasks(name) => vec![],
        // Tables with a line for each device: the kernel takes one line at a time.
        "net_prio.ifpriomap" | "io.weight" | "io.max" | "io.latency" | "misc.max" => {
            value.lines().map(|line| (name, line)).collect()
        }
        // What limits nothing is what a new group has; this host may lack the device.
        "rdma.max" => {
            let limits = |line: &&str| line.split(' ').skip(1).any(|word| !word.ends_with("=max"));
            value.lines().filter(limits).map(|line| (name, line)).collect()
        }
        _ if name.starts_with("blkio.throttle.") => {
            value.lines().map(|line| (name, line)).collect()
        }
        _ => vec![(name, value)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_merged_or_replaced() {
        let text = "\"pids\":\n - \"strategy\": \"merge\"\n - \"properties\": [\"a\", \"b\"]\n\
                    cpu:\n  - strategy: replace\n  - properties: [cpu.shares]\n";
        let properties = Properties::parse(text).unwrap();
        let pids = properties.of("pids");
        assert!(pids.ends_with(&["pids.max".into(), "a".into(), "b".into()]), "{pids:?}");
        let cpu = properties.of("cpu,cpuacct");
        assert!(cpu.ends_with(&["tasks".into(), "cpu.shares".into()]), "{cpu:?}");
        assert!(Properties::default().of("").contains(&"memory.max".to_owned()));
        assert!(Properties::default().of("").contains(&"hugetlb.2MB.rsvd.max".to_owned()));
        assert!(!Properties::default().of("name=systemd").contains(&"memory.max".to_owned()));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "x",
            "- strategy: merge",
            "c:\n - strategy: other",
            "c:\n - properties: a",
            "c:\n - properties: [../x]\n - strategy: merge",
            "c:\n - properties: [a]",
        ] {
            assert!(Properties::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn some_are_written_elsewhere() {
        assert_eq!(
            writes("devices.list", "c 1:3 rwm\nb 8:* r"),
            [("devices.deny", "a"), ("devices.allow", "c 1:3 rwm"), ("devices.allow", "b 8:* r")]
        );
        assert_eq!(
            writes("memory.oom_control", "oom_kill_disable 1\nunder_oom 0"),
            [("memory.oom_control", "1")]
        );
        assert_eq!(writes("io.max", "8:0 rbps=1\n8:16 wbps=2").len(), 2);
        let devices = "mlx5_0 hca_handle=max hca_object=max\nmlx5_1 hca_handle=2 hca_object=max";
        let limited = "mlx5_1 hca_handle=2 hca_object=max";
        assert_eq!(writes("rdma.max", devices), [("rdma.max", limited)]);
        assert_eq!(writes("tasks", ""), []);
        assert_eq!(writes("pids.max", "7"), [("pids.max", "7")]);
    }
}
