//! What is written into the files of groups, against `linux.resources` of the configuration: more memory, more
//! processors, and what takes something from other groups of this host.

use super::values::{is_above, is_among, is_within, most, number};
use super::{Owner, Property, named};
use crate::resources::{BlockIo, Cpu, DeviceRate, Memory, Resources};

/// The period of a quota that names none, in microseconds; that of real-time tasks.
const PERIOD: u64 = 100_000;
const REALTIME_PERIOD: u64 = 1_000_000;
/// The weights of a group that is given none: `cpu.shares`, `blkio.weight`, all others.
const SHARES: u64 = 1024;
const BLKIO_WEIGHT: u64 = 500;
const WEIGHT: u64 = 100;

/// Files that give nothing to tasks, or that are judged by themselves (devices, release agents).
const HARMLESS: [&str; 29] = [
    "cgroup.clone_children",
    "cgroup.freeze",
    "cgroup.max.depth",
    "cgroup.max.descendants",
    "cgroup.procs",
    "cgroup.subtree_control",
    "cgroup.threads",
    "cgroup.type",
    "cpuset.mem_hardwall",
    "cpuset.memory_migrate",
    "cpuset.memory_spread_page",
    "cpuset.memory_spread_slab",
    "cpuset.sched_load_balance",
    "devices.allow",
    "devices.deny",
    "devices.list",
    "freezer.state",
    "memory.high",
    "memory.move_charge_at_immigrate",
    "memory.oom.group",
    "memory.oom_control",
    "memory.swap.high",
    "memory.swappiness",
    "memory.use_hierarchy",
    "memory.zswap.max",
    "misc.max",
    "notify_on_release",
    "release_agent",
    "tasks",
];

/// Files that count in any group, as rates of version 1 do: each of its groups has its own. By others a group gets no more
/// than the one that it lies in has.
const ANYWHERE: [&str; 10] = [
    "blkio.throttle.read_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.write_iops_device",
    "cpuset.cpu_exclusive",
    "cpuset.cpus.partition",
    "cpuset.mem_exclusive",
    "cpuset.sched_relax_domain_level",
    "net_cls.classid",
    "net_prio.ifpriomap",
];

/// Files of version 2 in which a lower number gives more.
const LESS_IS_MORE: [&str; 2] = ["cpu.idle", "cpu.weight.nice"];

/// The files of a group whose values give more than the configuration does, or that others than this host's root may write to.
/// `inside`: the group lies in another one that is judged.
pub(super) fn beyond<'p>(
    properties: &'p [Property],
    resources: &Resources,
    inside: bool,
) -> Vec<&'p Property> {
    let is_beyond = |property: &&Property| {
        let counts = !inside || ANYWHERE.contains(&property.name.as_str());
        // Nobody can say what another file gives.
        gives_more(property, properties, resources).is_none_or(|more| more && counts)
            || counts && is_limit_of_others(property, resources)
    };
    properties.iter().filter(is_beyond).collect()
}

/// Whether others than this host's root may write to a file that limits something.
fn is_limit_of_others(property: &Property, resources: &Resources) -> bool {
    let name = property.name.as_str();
    let limits = resources.unified.contains_key(name) || !HARMLESS.contains(&name);
    limits && property.owner.is_some_and(Owner::gives_away)
}

/// Whether the value of a file gives more than the configuration; `None` if it is not known what the file does.
fn gives_more(property: &Property, all: &[Property], resources: &Resources) -> Option<bool> {
    let (name, value) = (property.name.as_str(), property.value.trim());
    if let Some(given) = resources.unified.get(name) {
        let given = given.trim();
        return Some(value != given && (LESS_IS_MORE.contains(&name) || !is_within(value, given)));
    }
    match name {
        "pids.max" => Some(is_above(value, most(resources.pids.limit))),
        _ if HARMLESS.contains(&name) => Some(false),
        _ => of_memory(name, value, &resources.memory)
            .or_else(|| of_processors(name, value, all, &resources.cpu))
            .or_else(|| of_devices(name, value, resources))
            .or_else(|| of_network(name, value, resources))
            .or_else(|| named::gives_more(name, value, resources)),
    }
}

fn of_memory(name: &str, value: &str, given: &Memory) -> Option<bool> {
    let limit = match name {
        "memory.limit_in_bytes" | "memory.max" => most(given.limit),
        "memory.memsw.limit_in_bytes" => most(given.swap),
        // What the configuration has is that of both together.
        "memory.swap.max" => match most(given.swap) {
            u64::MAX => u64::MAX,
            both => both.saturating_sub(most(given.limit)),
        },
        "memory.soft_limit_in_bytes" => most(given.reservation),
        "memory.kmem.limit_in_bytes" => most(given.kernel),
        "memory.kmem.tcp.limit_in_bytes" => most(given.kernel_tcp),
        // What is kept for the group, others do not get.
        "memory.low" => given.reservation.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
        "memory.min" => 0,
        _ => return None,
    };
    Some(is_above(value, limit))
}

/// How much memory a group may have that is limited so, with what is swapped out, in bytes, on a host with this much `swap`.
pub(crate) fn most_memory(given: &Resources, swap: u64) -> u64 {
    let file = |name| given.unified.get(name).and_then(|text| number(text));
    let memory = file("memory.max").unwrap_or_else(|| most(given.memory.limit));
    // What the configuration has is that of both together.
    let both = most(given.memory.swap);
    let swapped = file("memory.swap.max").unwrap_or(swap).min(swap);
    both.min(memory.saturating_add(swapped))
}

fn of_processors(name: &str, value: &str, all: &[Property], given: &Cpu) -> Option<bool> {
    let shares = given.shares.filter(|&shares| shares > 0);
    Some(match name {
        "cpu.shares" => is_above(value, shares.unwrap_or(SHARES)),
        "cpu.weight" => is_above(value, shares.map_or(WEIGHT, weight_of_shares)),
        "cpu.idle" => value != "1" && given.idle == Some(1),
        "cpu.max" | "cpu.cfs_quota_us" | "cpu.cfs_period_us" => more_time(all, given),
        "cpu.max.burst" | "cpu.cfs_burst_us" => {
            given.quota.is_some_and(|quota| quota > 0) && is_above(value, given.burst.unwrap_or(0))
        }
        "cpu.rt_runtime_us" => is_above(value, realtime(given)),
        "cpu.rt_period_us" => {
            let period = given.realtime_period.unwrap_or(REALTIME_PERIOD);
            realtime(given) > 0 && number(value).is_none_or(|shorter| shorter < period)
        }
        "cpuset.cpus" => !is_among(value, &given.cpus),
        "cpuset.mems" => !is_among(value, &given.mems),
        "cpuset.cpu_exclusive" | "cpuset.mem_exclusive" => value != "0",
        "cpuset.cpus.partition" => value != "member",
        // The highest of all groups says how far this host looks for a processor with nothing to do.
        "cpuset.sched_relax_domain_level" => value != "-1",
        _ => return None,
    })
}

/// The time of real-time tasks in each period.
fn realtime(given: &Cpu) -> u64 {
    given.realtime_runtime.and_then(|time| u64::try_from(time).ok()).unwrap_or(0)
}

/// Whether what is left when all quotas and periods are written is more than the configuration gives.
fn more_time(all: &[Property], given: &Cpu) -> bool {
    let Some(limit) = given.quota.and_then(|quota| u64::try_from(quota).ok()).filter(|&q| q > 0)
    else {
        return false;
    };
    let each = given.period.filter(|&period| period > 0).unwrap_or(PERIOD);
    // What makes no sense is without end.
    let quota_of = |text: &str| number(text).unwrap_or(u64::MAX);
    let period_of = |text: &str| number(text).unwrap_or(0);
    // A kernel has the files of one hierarchy, and passes over those of the other.
    let (mut split, mut unified) = ((limit, each), (limit, each));
    for Property { name, value, .. } in all {
        match name.as_str() {
            "cpu.cfs_quota_us" => split.0 = quota_of(value),
            "cpu.cfs_period_us" => split.1 = period_of(value),
            "cpu.max" => {
                let mut words = value.split_whitespace();
                unified.0 = quota_of(words.next().unwrap_or_default());
                unified.1 = words.next().map_or(unified.1, period_of);
            }
            _ => {}
        }
    }
    [split, unified].iter().any(|&(quota, period)| {
        quota == u64::MAX
            || u128::from(quota) * u128::from(each) > u128::from(limit) * u128::from(period)
    })
}

/// The most that runtimes make of shares as a weight: they have a line or a curve, both of which are below this.
fn weight_of_shares(shares: u64) -> u64 {
    let line = shares.saturating_mul(WEIGHT).div_ceil(SHARES);
    if shares < SHARES { line * 2 + 2 } else { line }
}

/// Rates of the configuration, the file of version 1 that has them, and their key in `io.max`.
pub(super) fn rates(given: &BlockIo) -> [(&[DeviceRate], &'static str, &'static str); 4] {
    [
        (&given.throttle_read_bps_device, "blkio.throttle.read_bps_device", "rbps"),
        (&given.throttle_write_bps_device, "blkio.throttle.write_bps_device", "wbps"),
        (&given.throttle_read_iops_device, "blkio.throttle.read_iops_device", "riops"),
        (&given.throttle_write_iops_device, "blkio.throttle.write_iops_device", "wiops"),
    ]
}

fn of_devices(name: &str, value: &str, resources: &Resources) -> Option<bool> {
    let given = &resources.block_io;
    if let Some((rates, ..)) = rates(given).into_iter().find(|(_, file, _)| *file == name) {
        return Some(value.lines().any(|line| is_faster(line, rates)));
    }
    Some(match name {
        "io.max" => value.lines().any(|line| is_faster_in_one_way(line, given)),
        // Others wait for this group.
        "io.latency" => !value.is_empty(),
        "blkio.weight" | "blkio.bfq.weight" | "io.weight" | "io.bfq.weight" => {
            let most = most_weight(name, given);
            value.lines().any(|line| is_heavier(line, most))
        }
        _ => return None,
    })
}

/// Whether a line such as `100`, `default 100` or `8:0 100` gives more weight. Of another one the kernel could take another word
/// for the weight.
fn is_heavier(line: &str, most: u64) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [] => false,
        [weight] | ["default", weight] => is_above(weight, most),
        [device, weight] => !device.contains(':') || is_above(weight, most),
        _ => true,
    }
}

/// The highest weight that the configuration gives the group for a device.
fn most_weight(name: &str, given: &BlockIo) -> u64 {
    let devices = given.weight_device.iter().filter_map(|device| device.weight);
    match given.weight.into_iter().chain(devices).max() {
        None if name == "blkio.weight" => BLKIO_WEIGHT,
        None => WEIGHT,
        // This scale goes to 10000, and that of the configuration to 1000.
        Some(weight) if name == "io.weight" => weight.saturating_mul(10),
        Some(weight) => weight,
    }
}

fn of_network(name: &str, value: &str, resources: &Resources) -> Option<bool> {
    let given = &resources.network;
    Some(match name {
        "net_cls.classid" => number(value) != Some(given.class.unwrap_or(0).into()),
        "net_prio.ifpriomap" => value.lines().any(|line| {
            let (device, priority) = line.split_once(' ').unwrap_or((line, ""));
            let named = given.priorities.iter().find(|given| given.name == device);
            number(priority) != Some(named.map_or(0, |named| named.priority).into())
        }),
        _ => return None,
    })
}

/// Whether a line such as `8:0 1048576` lets a device do more than one of these says; 0 is no limit.
fn is_faster(line: &str, given: &[DeviceRate]) -> bool {
    let (device, rate) = line.split_once(' ').unwrap_or((line, ""));
    let rate = number(rate).map(|rate| if rate == 0 { u64::MAX } else { rate });
    exceeds_rate(device, rate, given)
}

/// The same with a line of `io.max`: `8:0 rbps=1048576 wiops=max`.
fn is_faster_in_one_way(line: &str, given: &BlockIo) -> bool {
    let mut words = line.split_whitespace();
    let device = words.next().unwrap_or_default();
    words.any(|word| {
        let (key, rate) = word.split_once('=').unwrap_or((word, ""));
        let known = rates(given).into_iter().find(|(.., known)| *known == key);
        known.is_none_or(|(given, ..)| exceeds_rate(device, number(rate), given))
    })
}

/// Whether a device is named in a way that is not known, or its rate is more than one of these gives it.
fn exceeds_rate(device: &str, rate: Option<u64>, given: &[DeviceRate]) -> bool {
    let numbers = device.split_once(':');
    let numbers = numbers.and_then(|(major, minor)| {
        Some((i64::from(major.parse::<u32>().ok()?), i64::from(minor.parse::<u32>().ok()?)))
    });
    let Some(device) = numbers else { return true };
    let mut of_device = given.iter().filter(|given| (given.major, given.minor) == device);
    of_device.any(|given| given.rate > 0 && rate.is_none_or(|rate| rate > given.rate))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::spec::Spec;

    fn parsed(resources: &str) -> Resources {
        let text = format!(r#"{{"ociVersion":"1.0.2","linux":{{"resources":{{{resources}}}}}}}"#);
        Spec::parse(text.as_bytes()).unwrap().unwrap().linux.resources
    }

    /// The files of a group with these values that give more than these resources.
    fn found(resources: &str, files: &[(&str, &str)], inside: bool) -> Vec<String> {
        let property = |&(name, value): &(&str, &str)| Property {
            name: name.to_owned(),
            value: value.to_owned(),
            owner: None,
        };
        let all: Vec<_> = files.iter().map(property).collect();
        let resources = parsed(resources);
        let found = beyond(&all, &resources, inside);
        found.into_iter().map(|property| property.name.clone()).collect()
    }

    /// `swap` is what memory and swap are together, and no limit if it is none.
    #[test]
    fn memory_has_the_limits_of_both_kinds_of_configurations() {
        for (resources, most) in [
            ("", u64::MAX),
            (r#""memory":{"limit":-1}"#, u64::MAX),
            (r#""memory":{"limit":4096}"#, 4196),
            (r#""memory":{"limit":4096,"swap":-1}"#, 4196),
            (r#""memory":{"limit":4096,"swap":4096}"#, 4096),
            (r#""memory":{"limit":4096,"swap":5000}"#, 4196),
            (r#""memory":{"swap":5000}"#, 5000),
            (r#""unified":{"memory.max":"8192"}"#, 8292),
            (r#""unified":{"memory.max":"8192","memory.swap.max":"0"}"#, 8192),
            (r#""unified":{"memory.max":"max"}"#, u64::MAX),
            (r#""memory":{"limit":4096},"unified":{"memory.swap.max":"7"}"#, 4103),
        ] {
            assert_eq!(most_memory(&parsed(resources), 100), most, "{resources}");
        }
    }

    /// A restore passes over files that this kernel does not have, which are those of one of the two.
    #[test]
    fn a_quota_of_another_hierarchy_hides_none() {
        const HALF: &str = r#""cpu":{"quota":50000}"#;
        for files in [
            [("cpu.max", "max 100000"), ("cpu.cfs_quota_us", "1000")],
            [("cpu.cfs_quota_us", "-1"), ("cpu.max", "1000 100000")],
        ] {
            assert!(!found(HALF, &files, false).is_empty(), "{files:?}");
        }
    }

    /// What each of them gives, what is as much and what is more.
    #[test]
    fn values_count_against_the_configuration() {
        const RATE: &str = r#"[{"major":8,"minor":0,"rate":1000}]"#;
        let rate = |key: &str| format!(r#""blockIO":{{"{key}":{RATE}}}"#);
        let read = rate("throttleReadBpsDevice");
        let write = rate("throttleWriteIOPSDevice");
        let rows: &[(&str, &str, &[&str], &[&str])] = &[
            (r#""memory":{"limit":4096}"#, "memory.max", &["4096", "0"], &["4097", "max", "1K"]),
            (
                r#""memory":{"limit":4096}"#,
                "memory.limit_in_bytes",
                &["4096"],
                &["8192", "-1", "9223372036854771712"],
            ),
            (r#""memory":{"limit":-1}"#, "memory.max", &["max", "4096"], &[]),
            (r#""memory":{"swap":9}"#, "memory.memsw.limit_in_bytes", &["9"], &["10"]),
            (r#""memory":{"limit":4,"swap":9}"#, "memory.swap.max", &["5"], &["6", "max"]),
            (r#""memory":{"limit":4}"#, "memory.swap.max", &["max"], &[]),
            (r#""memory":{"reservation":5}"#, "memory.low", &["5"], &["6"]),
            (r#""memory":{"reservation":5}"#, "memory.soft_limit_in_bytes", &["5"], &["6"]),
            ("", "memory.low", &["0"], &["1", "max"]),
            ("", "memory.min", &["0"], &["1", "max"]),
            (r#""pids":{"limit":7}"#, "pids.max", &["7"], &["8", "max", "x", ""]),
            (r#""pids":{"limit":-1}"#, "pids.max", &["max"], &[]),
            (
                r#""cpu":{"quota":50000}"#,
                "cpu.max",
                &["50000 100000", "50000", "5000 10000", "1 max"],
                &["max 100000", "50001 100000", "max", "50000 50000", "50000 0", "1 x"],
            ),
            (r#""cpu":{"quota":50000}"#, "cpu.cfs_quota_us", &["50000"], &["-1", "60000"]),
            (
                r#""cpu":{"quota":50000}"#,
                "cpu.cfs_period_us",
                &["200000"],
                &["50000", "0200000", "+200000"],
            ),
            (r#""cpu":{"quota":-1}"#, "cpu.cfs_quota_us", &["-1"], &[]),
            (r#""cpu":{"quota":5,"burst":2}"#, "cpu.max.burst", &["2"], &["3"]),
            (r#""cpu":{"shares":512}"#, "cpu.shares", &["512"], &["1024"]),
            ("", "cpu.shares", &["1024", "2"], &["1025"]),
            (r#""cpu":{"shares":2048}"#, "cpu.weight", &["170", "79"], &["201"]),
            ("", "cpu.weight", &["100"], &["101"]),
            ("", "cpu.rt_runtime_us", &["0"], &["1", "-1"]),
            (r#""cpu":{"realtimeRuntime":9}"#, "cpu.rt_period_us", &["1000000"], &["999"]),
            (r#""cpu":{"idle":1}"#, "cpu.idle", &["1"], &["0"]),
            (
                r#""cpu":{"cpus":"0-1,2,7"}"#,
                "cpuset.cpus",
                &["0-2", "7", "1,7"],
                &["3", "0-3", "0-7:2/4", "", "2-4294967295"],
            ),
            (r#""cpu":{"mems":"0"}"#, "cpuset.mems", &["0"], &["0-1"]),
            ("", "cpuset.cpus", &["", "0-63"], &[]),
            ("", "cpuset.cpus.partition", &["member"], &["root", "isolated"]),
            ("", "cpuset.cpu_exclusive", &["0"], &["1"]),
            ("", "cpuset.sched_relax_domain_level", &["-1"], &["0", "5"]),
            (
                &read,
                "io.max",
                &["8:0 rbps=1000 wbps=max", "8:1 rbps=max", ""],
                &["8:0 rbps=1001", "08:0 rbps=max", "8:0 max", "x rbps=1"],
            ),
            (&write, "io.max", &["8:0 wiops=1000 rbps=max"], &["8:16 wiops=1\n8:0 wiops=2000"]),
            (
                &read,
                "blkio.throttle.read_bps_device",
                &["8:0 1000", "8:16 0"],
                &["8:0 0", "8:0 1001", "8: 0 0"],
            ),
            (&write, "blkio.throttle.write_iops_device", &["8:0 1"], &["8:0 0"]),
            ("", "io.latency", &[""], &["8:0 target=75"]),
            ("", "io.weight", &["default 100"], &["default 101", "default 100\n8:0 200"]),
            // The kernel reads the first number, and nothing behind it.
            (
                "",
                "io.weight",
                &["100", "8:0 100", ""],
                &["default 9 1", "9 1", "8:0 9 1", "9 8:0", "default"],
            ),
            (r#""blockIO":{"weight":200}"#, "io.weight", &["default 1920"], &["default 2001"]),
            ("", "blkio.weight", &["500"], &["501"]),
            ("", "net_cls.classid", &["0"], &["1048577", "x"]),
            (
                r#""network":{"classID":1048577}"#,
                "net_cls.classid",
                &["1048577"],
                &["0", "1", "01048577"],
            ),
            ("", "net_prio.ifpriomap", &["lo 0\neth0 0"], &["lo 0\neth0 3"]),
            (
                r#""network":{"priorities":[{"name":"eth0","priority":3}]}"#,
                "net_prio.ifpriomap",
                &["lo 0\neth0 3"],
                &["lo 3"],
            ),
            (r#""unified":{"memory.high":"4096"}"#, "memory.high", &["4096"], &["4097", "max"]),
            (
                r#""unified":{"cpuset.cpus.partition":"root"}"#,
                "cpuset.cpus.partition",
                &["root"],
                &["isolated"],
            ),
            (r#""unified":{"cpu.idle":"1"}"#, "cpu.idle", &["1"], &["0"]),
            (r#""unified":{"cpu.weight.nice":"19"}"#, "cpu.weight.nice", &["19"], &["0", "-20"]),
            (r#""unified":{"hugetlb.2MB.max":"9"}"#, "hugetlb.2MB.max", &["9"], &["10"]),
            (
                r#""unified":{"rdma.max":"mlx hca_handle=2"}"#,
                "rdma.max",
                &["mlx hca_handle=2"],
                &[""],
            ),
            ("", "hugetlb.2MB.events.local", &[], &["0"]),
            ("", "freezer.state", &["FROZEN", "THAWED"], &[]),
        ];
        for (resources, name, fine, more) in rows {
            for value in *fine {
                let none = Vec::<String>::new();
                assert_eq!(
                    found(resources, &[(name, value)], false),
                    none,
                    "{resources} {value:?}"
                );
            }
            for value in *more {
                assert_eq!(
                    found(resources, &[(name, value)], false),
                    [*name],
                    "{resources} {value:?}"
                );
            }
        }
    }

    /// Whoever may write to a limit could give the group more when its tasks run.
    #[test]
    fn limits_are_no_files_of_others() {
        let file = |name: &str, user, mode| Property {
            name: name.to_owned(),
            value: "1".to_owned(),
            owner: Some(Owner { user, group: 0, mode }),
        };
        let found =
            |file: Property, inside| !beyond(&[file], &Resources::default(), inside).is_empty();
        for (user, mode) in [(7, 0o644), (0, 0o664), (0, 0o646)] {
            assert!(found(file("pids.max", user, mode), false), "{user} {mode:o}");
            for (name, inside) in [("pids.max", true), ("cgroup.procs", false)] {
                assert!(!found(file(name, user, mode), inside), "{user} {mode:o} {name}");
            }
        }
        assert!(!found(file("pids.max", 0, 0o644), false));
    }

    /// A quota and its period count together.
    #[test]
    fn time_is_what_is_left_when_all_is_written() {
        const HALF: &str = r#""cpu":{"quota":50000,"period":100000}"#;
        let of = |quota, period| {
            let files = [("cpu.cfs_period_us", period), ("cpu.cfs_quota_us", quota)];
            !found(HALF, &files, false).is_empty()
        };
        for (quota, period, more) in [
            ("50000", "100000", false),
            ("5000", "10000", false),
            ("50000", "50000", true),
            ("25000", "50000", false),
            ("-1", "100000", true),
        ] {
            assert_eq!(of(quota, period), more, "{quota} {period}");
        }
    }

    /// Further inside only that counts which the group above does not limit.
    #[test]
    fn groups_inside_have_no_more_than_the_one_above() {
        let files = [
            ("pids.max", "max"),
            ("memory.max", "max"),
            ("memory.low", "max"),
            ("cpuset.cpus.partition", "root"),
            ("net_cls.classid", "7"),
            ("unknown.file", "1"),
        ];
        let resources = r#""pids":{"limit":7},"memory":{"limit":4096}"#;
        assert_eq!(found(resources, &files, false).len(), files.len());
        let inside = ["cpuset.cpus.partition", "net_cls.classid", "unknown.file"];
        assert_eq!(found(resources, &files, true), inside);
    }
}
