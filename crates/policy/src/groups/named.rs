//! Limits of things that have names: of huge pages by their size, of RDMA and of packets by a device.

use std::collections::{BTreeMap, BTreeSet};

use super::Property;
use super::values::is_above;
use crate::resources::{Rdma, Resources};

/// Files with a line for each device: one of both versions, and one of version 1.
const RDMA: &str = "rdma.max";
const PRIORITIES: &str = "net_prio.ifpriomap";

/// Whether the value of a file gives more than the configuration; `None` if the file is none of these.
pub(super) fn gives_more(name: &str, value: &str, given: &Resources) -> Option<bool> {
    if name == RDMA {
        return Some(value.lines().any(|line| gives_device_more(line, &given.rdma)));
    }
    let (size, ..) = huge_pages(name)?;
    let limits = given.huge_pages.iter().filter(|pages| pages.page_size == size);
    Some(is_above(value, limits.map(|pages| pages.limit).min().unwrap_or(u64::MAX)))
}

/// The size of the pages that a file limits, whether it limits what is reserved, and what it ends with.
fn huge_pages(name: &str) -> Option<(&str, bool, &str)> {
    let (size, file) = name.strip_prefix("hugetlb.")?.split_once('.')?;
    let end = file.strip_prefix("rsvd.");
    let (is_reserved, end) = (end.is_some(), end.unwrap_or(file));
    matches!(end, "max" | "limit_in_bytes").then_some((size, is_reserved, end))
}

/// The file that limits how many huge pages are reserved, beside one for those that are in use. Kernels before Linux 5.7 have none:
/// images need not write it, but a group that has it needs its limit.
pub(super) fn reservations(name: &str) -> Option<String> {
    let (size, is_reserved, end) = huge_pages(name)?;
    (!is_reserved).then(|| format!("hugetlb.{size}.rsvd.{end}"))
}

/// Whether a line such as `mlx5_0 hca_handle=2 hca_object=max` gives its device more than the configuration does.
fn gives_device_more(line: &str, given: &BTreeMap<String, Rdma>) -> bool {
    let mut words = line.split_whitespace();
    let Some(limits) = words.next().and_then(|device| given.get(device)) else { return false };
    words.any(|word| {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let limit = keys(limits).into_iter().find(|(known, _)| *known == key);
        limit.is_none_or(|(_, most)| is_above(value, most.map_or(u64::MAX, u64::from)))
    })
}

/// What is counted of a device, as the file has it.
fn keys(limits: &Rdma) -> [(&'static str, Option<u32>); 2] {
    [("hca_handle", limits.hca_handles), ("hca_object", limits.hca_objects)]
}

/// What a new group has of what the configuration limits and no property does.
pub(super) fn unset(properties: &[Property], given: &Resources, is_unified: bool) -> Vec<Property> {
    let lines = |name: &str| {
        let named = properties.iter().filter(|file| file.name == name);
        named.flat_map(|file| file.value.lines()).collect::<Vec<_>>()
    };
    let rdma = unset_devices(&lines(RDMA), given);
    let packets = if is_unified { vec![] } else { unset_priorities(&lines(PRIORITIES), given) };
    let rdma = rdma.into_iter().map(|line| (RDMA.to_owned(), line));
    let packets = packets.into_iter().map(|line| (PRIORITIES.to_owned(), line));
    let all = unset_pages(properties, given, is_unified).into_iter().chain(rdma).chain(packets);
    all.map(|(name, value)| Property { name, value, owner: None }).collect()
}

/// The files for huge pages that are not among the properties, with what they have then.
fn unset_pages(
    properties: &[Property],
    given: &Resources,
    is_unified: bool,
) -> Vec<(String, String)> {
    let (end, none) = if is_unified { ("max", "max") } else { ("limit_in_bytes", "-1") };
    let sizes = given.huge_pages.iter().map(|pages| pages.page_size.as_str());
    let sizes: BTreeSet<&str> = sizes.collect();
    let names = sizes.into_iter().map(|size| format!("hugetlb.{size}.{end}"));
    let unset = names.filter(|name| properties.iter().all(|file| file.name != *name));
    unset.map(|name| (name, none.to_owned())).collect()
}

/// Lines of [`RDMA`] for what these lines do not limit.
fn unset_devices(lines: &[&str], given: &Resources) -> Vec<String> {
    let mut all = vec![];
    for (device, limits) in &given.rdma {
        let limited = keys(limits).into_iter().filter(|(_, most)| most.is_some());
        let unset = limited.filter(|(key, _)| !lines.iter().any(|line| is_of(line, device, key)));
        all.extend(unset.map(|(key, _)| format!("{device} {key}=max")));
    }
    all
}

/// Whether a line of [`RDMA`] says something of this key of this device.
fn is_of(line: &str, device: &str, key: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some(device) && words.any(|word| word.split('=').next() == Some(key))
}

/// Lines of [`PRIORITIES`] for the devices that none of these lines is for.
fn unset_priorities(lines: &[&str], given: &Resources) -> Vec<String> {
    let of_it = |line: &&str, device: &str| line.split_whitespace().next() == Some(device);
    let devices = given.network.priorities.iter().map(|priority| priority.name.as_str());
    let unset = devices.filter(|device| !lines.iter().any(|line| of_it(line, device)));
    unset.map(|device| format!("{device} 0")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::spec::Spec;

    fn resources(text: &str) -> Resources {
        let text = format!(r#"{{"ociVersion":"1.0.2","linux":{{"resources":{{{text}}}}}}}"#);
        Spec::parse(text.as_bytes()).unwrap().unwrap().linux.resources
    }

    const PAGES: &str =
        r#""hugepageLimits":[{"pageSize":"2MB","limit":4194304},{"pageSize":"1GB","limit":0}]"#;
    const DEVICES: &str =
        r#""rdma":{"mlx5_0":{"hcaHandles":2,"hcaObjects":100},"mlx5_1":{"hcaHandles":0}}"#;

    #[test]
    fn values_count_against_the_configuration() {
        let twice = PAGES.replace("1GB", "2MB");
        let rows: &[(&str, &str, &[&str], &[&str])] = &[
            (PAGES, "hugetlb.2MB.max", &["4194304", "0"], &["4194305", "max", "", "4M"]),
            (PAGES, "hugetlb.2MB.rsvd.max", &["2097152"], &["max"]),
            (PAGES, "hugetlb.2MB.limit_in_bytes", &["4194304"], &["9223372036853727232", "-1"]),
            (PAGES, "hugetlb.2MB.rsvd.limit_in_bytes", &["4194304"], &["-1"]),
            (PAGES, "hugetlb.1GB.max", &["0"], &["1073741824"]),
            (PAGES, "hugetlb.64KB.max", &["max"], &[]),
            (&twice, "hugetlb.2MB.max", &["0"], &["4194304"]),
            ("", "hugetlb.2MB.max", &["max", "0"], &[]),
            (
                DEVICES,
                "rdma.max",
                &[
                    "mlx5_0 hca_handle=2 hca_object=100\nmlx5_1 hca_handle=0 hca_object=max",
                    "",
                    "mlx4_0 hca_handle=max",
                ],
                &[
                    "mlx5_0 hca_handle=3",
                    "mlx5_0 hca_object=max",
                    "mlx4_0 hca_handle=1\nmlx5_1 hca_handle=1",
                    "mlx5_0 hca_handle=m",
                    "mlx5_0 more=1",
                    "mlx5_0 hca_handle",
                ],
            ),
            ("", "rdma.max", &["mlx5_0 hca_handle=max"], &[]),
        ];
        for (text, name, fine, more) in rows {
            let found = |value: &&str| gives_more(name, value, &resources(text)).unwrap();
            let wrong: Vec<_> = fine.iter().filter(|value| found(value)).collect();
            assert!(wrong.is_empty(), "{text} {name} {wrong:?}");
            let wrong: Vec<_> = more.iter().filter(|value| !found(value)).collect();
            assert!(wrong.is_empty(), "{text} {name} {wrong:?}");
        }
        for name in ["hugetlb.2MB.current", "hugetlb.2MB.rsvd.usage", "hugetlb.max", "rdma.current"]
        {
            assert_eq!(gives_more(name, "max", &resources(PAGES)), None, "{name}");
        }
    }

    #[test]
    fn what_is_not_written_limits_nothing() {
        let found = |text: &str, files: &[(&str, &str)], is_unified| {
            let file = |&(name, value): &(&str, &str)| Property {
                name: name.to_owned(),
                value: value.to_owned(),
                owner: None,
            };
            let files: Vec<_> = files.iter().map(file).collect();
            let all = unset(&files, &resources(text), is_unified).into_iter();
            all.map(|file| format!("{} {}", file.name, file.value)).collect::<Vec<_>>()
        };
        let none = Vec::<String>::new();
        assert_eq!(found("", &[], true), none);
        assert_eq!(found(PAGES, &[], true), ["hugetlb.1GB.max max", "hugetlb.2MB.max max"]);
        let split = ["hugetlb.1GB.limit_in_bytes -1", "hugetlb.2MB.limit_in_bytes -1"];
        assert_eq!(found(PAGES, &[], false), split);
        let both = [("hugetlb.1GB.max", "0"), ("hugetlb.2MB.max", "0")];
        assert_eq!(found(PAGES, &both, true), none);
        assert_eq!(found(PAGES, &both[..1], true), ["hugetlb.2MB.max max"]);
        // Both versions have the same file for devices.
        let first = ["rdma.max mlx5_0 hca_object=max", "rdma.max mlx5_1 hca_handle=max"];
        for is_unified in [true, false] {
            let found = |value| found(DEVICES, &[("rdma.max", value)], is_unified);
            assert_eq!(found("mlx5_0 hca_handle=2\nmlx5_1 hca_object=7"), first);
            assert_eq!(found("mlx5_0 hca_handle=2 hca_object=1\nmlx5_1 hca_handle=0"), none);
        }
        const PACKETS: &str = r#""network":{"priorities":[{"name":"eth0","priority":3}]}"#;
        let found =
            |value, is_unified| found(PACKETS, &[("net_prio.ifpriomap", value)], is_unified);
        assert_eq!(found("lo 0", false), ["net_prio.ifpriomap eth0 0"]);
        assert_eq!([found("lo 0\neth0 3", false), found("", true)], [none.clone(), none]);
    }

    #[test]
    fn reservations_stand_beside_what_is_in_use() {
        let rows = [
            ("hugetlb.2MB.max", Some("hugetlb.2MB.rsvd.max")),
            ("hugetlb.1GB.limit_in_bytes", Some("hugetlb.1GB.rsvd.limit_in_bytes")),
            ("hugetlb.2MB.rsvd.max", None),
            ("pids.max", None),
        ];
        for (name, beside) in rows {
            assert_eq!(reservations(name).as_deref(), beside, "{name}");
        }
    }
}
