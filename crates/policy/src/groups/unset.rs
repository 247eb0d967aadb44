//! What limits nothing in a group that is made, because images do not write it.

use super::limits::rates;
use super::{Property, Roots, named};
use crate::resources::Resources;

/// What files of a new group have: the controller of version 1, the file, the value.
const SPLIT: [(&str, &str, &str); 12] = [
    ("cpu", "cpu.cfs_period_us", "100000"),
    ("cpu", "cpu.cfs_quota_us", "-1"),
    ("cpu", "cpu.idle", "0"),
    ("cpu", "cpu.shares", "1024"),
    ("cpuset", "cpuset.cpus", ""),
    ("cpuset", "cpuset.mems", ""),
    ("memory", "memory.kmem.tcp.limit_in_bytes", "-1"),
    ("memory", "memory.limit_in_bytes", "-1"),
    ("memory", "memory.memsw.limit_in_bytes", "-1"),
    ("memory", "memory.soft_limit_in_bytes", "-1"),
    ("net_cls", "net_cls.classid", "0"),
    ("pids", "pids.max", "max"),
];
/// The same of version 2.
const UNIFIED: [(&str, &str); 8] = [
    ("cpu.idle", "0"),
    ("cpu.max", "max 100000"),
    ("cpu.weight", "100"),
    ("cpuset.cpus", ""),
    ("cpuset.mems", ""),
    ("memory.max", "max"),
    ("memory.swap.max", "max"),
    ("pids.max", "max"),
];

/// The files for the weight of transfers, of which a kernel has one at most, in version 1 and in version 2; what those of a new
/// group have, in the measure of the configuration.
const WEIGHTS: [[&str; 2]; 2] =
    [["blkio.bfq.weight", "blkio.weight"], ["io.bfq.weight", "io.weight"]];
const WEIGHT: &str = "100";

/// Whether a hierarchy can have a controller. Devices count as one of version 2, where a program limits them.
pub(super) fn has(hierarchy: &str, roots: &Roots, controller: &str) -> bool {
    match hierarchy.is_empty() {
        true => !roots.split(controller),
        false => hierarchy.split(',').any(|name| name == controller),
    }
}

/// The files of a new group of a hierarchy that are not among the properties, where they matter: what they have then.
/// `is_limited`: a group above has the limits of the configuration, and most of them count for this one, too.
pub(super) fn files(
    hierarchy: &str,
    properties: &[Property],
    (resources, roots): (&Resources, &Roots),
    is_limited: bool,
) -> Vec<Property> {
    let is_unified = hierarchy.is_empty();
    let has = |controller: &str| has(hierarchy, roots, controller);
    let is_set = |name: &str| properties.iter().any(|property| property.name == name);
    // A quota can be written without its period, which is that of a new group then.
    let has_period = |property: &Property| property.value.split_whitespace().nth(1).is_some();
    let is_whole = |name: &str| {
        let mut of_it = properties.iter().filter(|property| property.name == name);
        of_it.any(|property| name != "cpu.max" || has_period(property))
    };
    let mut all: Vec<Property> = vec![];
    if !is_limited && is_unified {
        let others = resources.unified.keys().map(|name| (name.as_str(), ""));
        let others = others.filter(|(name, _)| !UNIFIED.iter().any(|(known, _)| known == name));
        let of_it = UNIFIED.into_iter().chain(others);
        let of_it = of_it.filter(|(name, _)| has(name.split('.').next().unwrap_or(name)));
        all.extend(of_it.filter(|(name, _)| !is_whole(name)).map(property));
    } else if !is_limited {
        let of_it =
            SPLIT.into_iter().filter(|(controller, name, _)| has(controller) && !is_set(name));
        all.extend(of_it.map(|(_, name, value)| property((name, value))));
    }
    if !is_limited {
        let of_it = named::unset(properties, resources, is_unified).into_iter();
        let of_it = of_it.filter(|file| has(file.name.split('.').next().unwrap_or_default()));
        // What is given in the words of version 2 is among them already.
        let is_there = |file: &Property| is_unified && resources.unified.contains_key(&file.name);
        all.extend(of_it.filter(|file| !is_there(file)));
    }
    let transfers_here = has(if is_unified { "io" } else { "blkio" });
    let weights = WEIGHTS[usize::from(is_unified)];
    if transfers_here && !is_limited && !weights.into_iter().any(is_set) {
        all.push(property((weights[0], WEIGHT)));
    }
    // Those of version 1 do not count for the groups inside (blk-throttle.c, throtl_pd_init).
    if transfers_here && !(is_unified && is_limited) {
        all.extend(transfers(properties, resources, is_unified));
    }
    all
}

/// The files that a kernel can have for the limit that a group has by one of them.
pub(super) fn with_same_limit(name: &str) -> Vec<String> {
    if let Some(both) = WEIGHTS.into_iter().find(|both| both.contains(&name)) {
        return both.map(str::to_owned).to_vec();
    }
    [name.to_owned()].into_iter().chain(named::reservations(name)).collect()
}

/// The devices of which no property says how much they may transfer, though the configuration limits it.
fn transfers<'p>(
    properties: &'p [Property],
    resources: &Resources,
    is_unified: bool,
) -> Vec<Property> {
    let lines = |name: &'static str| {
        let named = properties.iter().filter(move |property| property.name == name);
        named.flat_map(|property: &'p Property| property.value.lines())
    };
    let mut all = vec![];
    for (given, file, key) in rates(&resources.block_io) {
        for rate in given.iter().filter(|rate| rate.rate > 0) {
            let device = format!("{}:{}", rate.major, rate.minor);
            let is_set = |line: &str| {
                let mut words = line.split_whitespace();
                let of_it = words.next() == Some(device.as_str());
                of_it && (!is_unified || words.any(|word| word.split('=').next() == Some(key)))
            };
            let (name, value) = match is_unified {
                true => ("io.max", format!("{device} {key}=max")),
                false => (file, format!("{device} 0")),
            };
            if !lines(name).any(is_set) {
                all.push(property((name, &value)));
            }
        }
    }
    all
}

fn property((name, value): (&str, &str)) -> Property {
    Property { name: name.to_owned(), value: value.to_owned(), owner: None }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::limits::beyond;
    use super::*;
    use crate::spec::Spec;

    /// The files of a group with these properties by which it has more than these resources.
    fn found(
        hierarchy: &str,
        resources: &str,
        properties: &[(&str, &str)],
        is_limited: bool,
    ) -> Vec<String> {
        let text = format!(r#"{{"ociVersion":"1.0.2","linux":{{"resources":{{{resources}}}}}}}"#);
        let resources = Spec::parse(text.as_bytes()).unwrap().unwrap().linux.resources;
        let properties: Vec<Property> = properties.iter().copied().map(property).collect();
        let roots = Roots::default();
        let mut all = files(hierarchy, &properties, (&resources, &roots), is_limited);
        all.extend(properties);
        let found = beyond(&all, &resources, is_limited);
        found.into_iter().map(|property| format!("{} {}", property.name, property.value)).collect()
    }

    const ALL: &str = r#""memory":{"limit":4096,"swap":8192,"reservation":1},"pids":{"limit":5},
        "cpu":{"quota":500000,"period":1000000,"shares":512,"cpus":"0","mems":"0","idle":1},
        "network":{"classID":7},"unified":{"memory.high":"4096","pids.max":"5"}"#;

    #[test]
    fn what_is_not_written_limits_nothing() {
        let count = |hierarchy: &str| found(hierarchy, ALL, &[], false).len();
        assert_eq!(
            ["cpu,cpuacct", "cpuset", "memory", "pids", "net_cls"].map(count),
            [4, 2, 3, 1, 1]
        );
        assert_eq!(count(""), 8);
        assert_eq!(["freezer", "cpuacct", "name=systemd"].map(count), [0; 3]);
        let tcp = r#""memory":{"kernelTCP":5}"#;
        assert_eq!(found("memory", tcp, &[], false), ["memory.kmem.tcp.limit_in_bytes -1"]);
        // What limits nothing in the configuration need not be written.
        for hierarchy in ["cpu,cpuacct", "cpuset", "memory", "pids", "net_cls", ""] {
            assert_eq!(found(hierarchy, "", &[], false), Vec::<String>::new(), "{hierarchy}");
            assert_eq!(found(hierarchy, ALL, &[], true), Vec::<String>::new(), "{hierarchy}");
        }
    }

    #[test]
    fn what_is_written_counts() {
        let none = Vec::<String>::new();
        assert_eq!(found("pids", ALL, &[("pids.max", "5")], false), none);
        // A quota of another period than that of a new group.
        const HALF: &str = r#""cpu":{"quota":500000,"period":1000000}"#;
        let quota = ("cpu.cfs_quota_us", "500000");
        assert_eq!(found("cpu", HALF, &[quota], false).len(), 2);
        assert_eq!(found("cpu", HALF, &[("cpu.cfs_period_us", "1000000"), quota], false), none);
        let both = ["cpu.max max 100000", "cpu.max 500000"];
        assert_eq!(found("", HALF, &[("cpu.max", "500000")], false), both);
        assert_eq!(found("", HALF, &[("cpu.max", "500000 1000000")], false), none);
    }

    /// A kernel has one of the files for weights.
    #[test]
    fn weights_are_written() {
        const LIGHT: &str = r#""blockIO":{"weight":10}"#;
        let of_device = r#""blockIO":{"weightDevice":[{"major":8,"minor":0,"weight":10}]}"#;
        for (hierarchy, [bfq, other]) in [("blkio", WEIGHTS[0]), ("", WEIGHTS[1])] {
            let unlimited = [format!("{bfq} 100")];
            let none = Vec::<String>::new();
            assert_eq!(found(hierarchy, LIGHT, &[], false), unlimited);
            assert_eq!(found(hierarchy, of_device, &[], false), unlimited);
            assert_eq!(found(hierarchy, LIGHT, &[], true), none);
            assert_eq!(found(hierarchy, LIGHT, &[(bfq, "10")], false), none);
            assert_eq!(found(hierarchy, LIGHT, &[(other, "default 10")], false), none);
            assert_eq!(found(hierarchy, r#""blockIO":{"weight":500}"#, &[], false), none);
        }
    }

    /// A tree of version 2 has no controller that one of version 1 has: nothing can be written there.
    #[test]
    fn controllers_are_in_one_tree_alone() {
        let text = format!(
            r#"{{"ociVersion":"1.0.2","linux":{{"resources":{{{ALL},"blockIO":{{"weight":10}}}}}}}}"#
        );
        let resources = Spec::parse(text.as_bytes()).unwrap().unwrap().linux.resources;
        let found = |own: &[&str]| {
            let own = own.iter().map(|&name| (name.to_owned(), "/".into())).collect();
            let all = files("", &[], (&resources, &Roots { own, ..Roots::default() }), false);
            all.into_iter().map(|property| property.name).collect::<Vec<_>>()
        };
        let all = ["cpu,cpuacct", "cpuset", "memory", "pids", "blkio", "name=systemd", ""];
        assert_eq!(found(&all), Vec::<String>::new());
        assert_eq!(
            found(&["name=pids", "memory", "cpu", "cpuset", ""]),
            ["pids.max", "io.bfq.weight"]
        );
    }

    /// Each group of version 1 has rates of its own.
    #[test]
    fn rates_are_those_of_each_group() {
        const RATES: &str = r#""blockIO":{"throttleReadBpsDevice":[
            {"major":8,"minor":0,"rate":1000},{"major":8,"minor":16,"rate":0}]}"#;
        let (file, none) = ("blkio.throttle.read_bps_device", Vec::<String>::new());
        for is_limited in [true, false] {
            let found = |properties: &[(&str, &str)]| found("blkio", RATES, properties, is_limited);
            let unlimited = [format!("{file} 8:0 0")];
            assert_eq!(found(&[]), unlimited);
            assert_eq!(found(&[(file, "8:16 5")]), unlimited);
            assert_eq!(found(&[(file, "8:16 5\n8:0 1000")]), none);
            assert_eq!(found(&[(file, "8:0 1001")]), [format!("{file} 8:0 1001")]);
        }
        let found =
            |properties: &[(&str, &str)], is_limited| found("", RATES, properties, is_limited);
        let unlimited = ["io.max 8:0 rbps=max"];
        assert_eq!(found(&[], false), unlimited);
        assert_eq!(found(&[("io.max", "8:0 wbps=5")], false), unlimited);
        assert_eq!(found(&[("io.max", "8:0 wbps=5 rbps=1000")], false), none);
        assert_eq!(found(&[], true), none);
    }
}
