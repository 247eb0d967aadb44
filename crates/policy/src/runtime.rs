//! What the calling runtime passed, as a limit.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use crate::capabilities::number;
use crate::device::Device;
use crate::mount::{From, Mount};
use crate::mount_options::{READ_ONLY, flags, keeps_flags, looser, lost};
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::resources::DeviceRule;
use crate::rules::is_below;
use crate::spec::{Spec, SpecDevice, SpecMount};
use crate::violation::Violation;

/// File systems that show and change nothing but what belongs to the tasks' own
/// namespaces: without the configuration of a container a checkpoint may have them
/// anywhere.
/// A restore makes a `binfmt_misc` only in a user namespace that it has made.
const PRIVATE: [&str; 8] =
    ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "overlay", "binfmt_misc", "nsfs"];
/// With one, those that give access to nothing that the tasks would not have: docs/policy.md
/// says why. The layers of an overlay are judged besides.
const HARMLESS: [&str; 6] = ["tmpfs", "devpts", "mqueue", "overlay", "binfmt_misc", "nsfs"];

/// Devices that every container has (OCI runtime specification, default devices, the
/// terminals, and `/dev/net/tun`, which runtimes allow without being told).
const DEFAULT_DEVICES: [(u32, Option<u32>); 10] = [
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (10, Some(200)),
    (136, None),
];

/// The devices that a container may have.
pub(crate) fn devices(passed: &Passed) -> impl Iterator<Item = Device> {
    let more = passed.spec.iter().flat_map(|spec| &spec.linux.devices);
    let more = more.filter_map(SpecDevice::device);
    let default = DEFAULT_DEVICES.into_iter().map(|(major, minor)| Device {
        block: false,
        major: Some(major),
        minor,
    });
    let groups = passed.spec.iter().flat_map(|spec| of_rules(&spec.linux.resources.devices));
    default.chain(more).chain(groups)
}

/// The devices that the rules for a container's group leave it to read or write.
fn of_rules(rules: &[DeviceRule]) -> Vec<Device> {
    let mut all: Vec<Device> = Vec::new();
    for rule in rules.iter().filter(|rule| !rule.allow || rule.access.contains(['r', 'w'])) {
        let kinds: &[bool] = match rule.kind.as_str() {
            "" | "a" => &[true, false],
            "b" => &[true],
            "c" => &[false],
            _ => continue,
        };
        // A number below zero is as good as none.
        let number = |n: Option<i64>| n.and_then(|n| u32::try_from(n).ok());
        let (major, minor) = (number(rule.major), number(rule.minor));
        let of_rule = kinds.iter().map(|&block| Device { block, major, minor });
        match rule.allow {
            true => all.extend(of_rule),
            // What is denied in part is not given as a whole.
            false => of_rule.for_each(|denied| {
                all.retain(|device| !denied.covers(device) && !device.covers(&denied));
            }),
        }
    }
    all
}

/// The path that the caller passed for a mount, and that `path` is or is below.
pub(crate) fn source<'p>(path: &str, passed: &'p Passed) -> Option<&'p str> {
    let all = sources(passed).filter(|base| is_below(path, base));
    all.max_by_key(|base| Path::new(base).components().count())
}

/// The paths of this host that the caller passed for mounts.
fn sources(passed: &Passed) -> impl Iterator<Item = &str> {
    let configured = passed.spec.iter().flat_map(|spec| &spec.mounts).filter(|m| m.is_bind());
    passed
        .mounts
        .iter()
        .map(|(_, path)| path.as_str())
        .chain(configured.map(|mount| mount.source.as_str()))
        .filter(|path| path.starts_with('/'))
}

/// Whether the caller wants file systems of this type.
pub(crate) fn file_system(name: &str, passed: &Passed) -> bool {
    if passed.file_systems.iter().any(|fs| fs == name || fs == "all") {
        return true;
    }
    match &passed.spec {
        None => PRIVATE.contains(&name),
        Some(spec) => HARMLESS.contains(&name) || spec.mounts.iter().any(|m| is_of_type(m, name)),
    }
}

/// Whether a configured mount is made of the groups of the container.
fn is_of_groups(mount: &SpecMount) -> bool {
    !mount.is_bind() && ["cgroup", "cgroup2"].contains(&mount.kind.as_str())
}

/// Whether a configured mount can be a mount of type `name`. Runtimes make a tmpfs with
/// one mount for each hierarchy for `cgroup`, or one of version 2.
fn is_of_type(mount: &SpecMount, name: &str) -> bool {
    match mount.kind.as_str() {
        "cgroup" | "cgroup2" => ["cgroup", "cgroup2", "tmpfs"].contains(&name),
        kind => kind == name,
    }
}

/// A path without dots and repeated slashes.
pub(crate) fn plain(path: &str) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => drop(out.pop()),
            _ => {}
        }
    }
    out
}

fn configured<'s>(spec: &'s Spec, at: &str) -> Option<&'s SpecMount> {
    // The last one lies on top.
    spec.mounts.iter().rev().find(|mount| plain(&mount.destination) == plain(at))
}

/// Why a mount gives more than the configuration of the container says.
pub(crate) fn wider(mount: &Mount, passed: &Passed) -> Option<String> {
    let why = wider_than_source(mount, passed).or_else(|| made_again(mount, passed));
    if let Some(why) = why.or_else(|| kept_from_swap(mount, passed)) {
        return Some(why);
    }
    let spec = passed.spec.as_ref()?;
    if mount.from == From::Root {
        let missing = spec.root.readonly && mount.flags & READ_ONLY == 0;
        return missing.then(|| "the calling runtime wants it read-only".to_owned());
    }
    if let Some(groups) = groups_given(mount, spec) {
        return wider_than_groups(mount, groups);
    }
    let Some(wanted) = configured(spec, &mount.at()) else {
        return unconfigured(mount, spec);
    };
    // The directory of the hierarchies; runc leaves it writable.
    let only_holds = wanted.kind == "cgroup" && mount.made() == Some("tmpfs");
    let kept = if only_holds { READ_ONLY } else { 0 };
    let lost = lost(flags(wanted) & !kept, mount);
    if !lost.is_empty() {
        return Some(format!("the calling runtime wants it {}", lost.join(", ")));
    }
    let name = mount.made()?;
    let shows_kernel = !HARMLESS.contains(&name);
    if wanted.is_bind() {
        let why = || format!("the calling runtime wants {:?} of this host there", wanted.source);
        return shows_kernel.then(why);
    }
    if !is_of_type(wanted, name) {
        return Some(format!("the calling runtime wants {} there", wanted.kind));
    }
    let is_part = shows_kernel && !is_of_groups(wanted) && mount.root != Path::new("/");
    is_part.then(|| format!("the calling runtime wants all of {name} there"))
}

/// The mount of groups in the configuration that what is given for a mount is a part of: runtimes give each hierarchy
/// by a key of its own, which is its place.
fn groups_given<'s>(mount: &Mount, spec: &'s Spec) -> Option<&'s SpecMount> {
    let From::Given { key, .. } = &mount.from else { return None };
    groups_of_key(key, spec)
}

/// Whether a runtime may give something for this key: they name the places of what the configuration mounts, or what is
/// below them.
pub(crate) fn may_name(key: &str, passed: &Passed) -> bool {
    let Some(spec) = &passed.spec else { return true };
    spec.mounts.iter().any(|wanted| is_below(key, &wanted.destination))
}

pub(crate) fn groups_of_key<'s>(key: &str, spec: &'s Spec) -> Option<&'s SpecMount> {
    if spec.mounts.iter().any(|wanted| wanted.is_bind() && plain(&wanted.destination) == plain(key))
    {
        return None;
    }
    spec.mounts.iter().find(|wanted| is_of_groups(wanted) && is_below(key, &wanted.destination))
}

/// Why a mount gives more than the mount of groups that it is a part of.
fn wider_than_groups(mount: &Mount, groups: &SpecMount) -> Option<String> {
    if !is_below(&mount.at(), &groups.destination) {
        return Some(format!("the calling runtime wants groups at {:?} only", groups.destination));
    }
    let lost = lost(flags(groups), mount);
    (!lost.is_empty()).then(|| format!("the calling runtime wants it {}", lost.join(", ")))
}

/// Whether a mount of groups is to show those of the tasks, and none above them: what is given for `key`, or a file system
/// that is made. So it is for a container whose configuration names none of this host's groups there.
#[must_use]
pub fn shows_own_groups(key: Option<&str>, passed: &Passed) -> bool {
    let Some(spec) = &passed.spec else { return false };
    key.is_none_or(|key| groups_of_key(key, spec).is_some())
}

/// Whether what is given for `key`, or the root (`None`), comes with the flags of the mount of this host that it lies on: the
/// configuration has it, and says nothing of how it is mounted.
#[must_use]
pub fn keeps_host_flags(key: Option<&str>, passed: &Passed) -> bool {
    let Some(spec) = &passed.spec else { return false };
    let keeps = |wanted: &SpecMount| wanted.options.iter().all(|word| keeps_flags(word));
    match key {
        None => true,
        Some(key) => configured(spec, key).is_some_and(|wanted| wanted.is_bind() && keeps(wanted)),
    }
}

/// Why a mount gives more than what it is a part of: of several, the one that gives most
/// counts.
fn wider_than_source(mount: &Mount, passed: &Passed) -> Option<String> {
    let sources: Vec<(&str, u32)> = match &mount.from {
        From::Part { of: (at, flags), .. } => vec![(at.as_str(), *flags)],
        From::Given { key, path } => configured_sources(passed, |wanted| {
            plain(&wanted.destination) == plain(key)
                || path.as_ref().is_some_and(|path| plain(&wanted.source) == plain(path))
        }),
        From::Host(path) => {
            let path = path.to_string_lossy();
            configured_sources(passed, |wanted| is_below(&path, &wanted.source))
        }
        From::Root | From::FileSystem | From::Device { .. } => return None,
    };
    let each: Vec<(&str, Vec<&str>)> =
        sources.into_iter().map(|(at, flags)| (at, lost(flags, mount))).collect();
    if each.iter().any(|(_, lost)| lost.is_empty()) {
        return None;
    }
    let (at, lost) = each.first()?;
    Some(format!("it is a part of the mount at {at:?}, which is {}", lost.join(", ")))
}

/// Why a mount may not show what had been removed of something that is given: until it is mounted, the name is there again,
/// and somebody else's. Whoever may mount could have done so before.
fn made_again(mount: &Mount, passed: &Passed) -> Option<String> {
    let is_made = mount.deleted && matches!(mount.from, From::Part { .. } | From::Host(_));
    (is_made && !passed.grants(number::SYS_ADMIN))
        .then(|| "it shows what had been removed, which would be made there again".to_owned())
}

/// Why a tmpfs may not keep its memory from being swapped out: that takes the right to mount on this host, unless the
/// configuration has one that does.
fn kept_from_swap(mount: &Mount, passed: &Passed) -> Option<String> {
    const NO_SWAP: &str = "noswap";
    let options = mount.fs.options();
    let asked = mount.made() == Some("tmpfs") && options.split(',').any(|word| word == NO_SWAP);
    let is_wanted = |wanted: &SpecMount| {
        wanted.kind == "tmpfs" && wanted.options.iter().any(|word| word == NO_SWAP)
    };
    let mut configured = passed.spec.iter().flat_map(|spec| &spec.mounts);
    (asked && !passed.grants_here(number::SYS_ADMIN) && !configured.any(is_wanted)).then(|| {
        "the option noswap keeps its memory from being swapped out, and CAP_SYS_ADMIN is not given"
            .to_owned()
    })
}

/// The places and flags of the mounts in the configuration that fit.
fn configured_sources(passed: &Passed, fits: impl Fn(&SpecMount) -> bool) -> Vec<(&str, u32)> {
    let all = passed.spec.iter().flat_map(|spec| &spec.mounts);
    all.filter(|wanted| wanted.is_bind() && fits(wanted))
        .map(|wanted| (wanted.destination.as_str(), flags(wanted)))
        .collect()
}

/// A mount at a place that the configuration does not name: file systems of the kernel
/// have no business there, but for their own parts once more, read-only, and below what it
/// makes of a cgroup mount.
fn unconfigured(mount: &Mount, spec: &Spec) -> Option<String> {
    let name = mount.made().filter(|name| !HARMLESS.contains(name))?;
    let at = mount.at();
    if mount.flags & READ_ONLY != 0 && is_in_place(mount, name, spec) {
        return None;
    }
    let cgroups = spec.mounts.iter().filter(|m| m.kind == "cgroup" && is_of_type(m, name));
    let below = |m: &SpecMount| is_below(&at, &m.destination);
    let read_only = |m: &SpecMount| flags(m) & READ_ONLY == 0 || mount.flags & READ_ONLY != 0;
    let mut cgroups = cgroups.filter(|m| below(m));
    match cgroups.next() {
        Some(parent) if read_only(parent) => None,
        _ => Some("the calling runtime wants no such mount there".to_owned()),
    }
}

/// Whether a mount of type `name` shows the file or directory that would be at its place without it: that of the
/// file system that the configuration has there.
fn is_in_place(mount: &Mount, name: &str, spec: &Spec) -> bool {
    let at = plain(&mount.at());
    let wanted = configured_above(spec, &at);
    wanted.filter(|wanted| !wanted.is_bind() && wanted.kind == name).is_some_and(|wanted| {
        let below = at.strip_prefix(plain(&wanted.destination));
        below.is_ok_and(|below| mount.root == Path::new("/").join(below))
    })
}

/// The mount that the configuration has at a place, or around it.
fn configured_above<'s>(spec: &'s Spec, at: &Path) -> Option<&'s SpecMount> {
    let above = spec.mounts.iter().filter(|wanted| at.starts_with(plain(&wanted.destination)));
    // The last one lies on top.
    above.max_by_key(|wanted| plain(&wanted.destination).components().count())
}

/// A mount namespace: its number, the image file, its mounts.
pub(crate) type SpaceMounts<'r> = (u32, &'r str, Vec<&'r Mount>);

pub(crate) fn spaces(requests: &[Request]) -> Vec<SpaceMounts<'_>> {
    let mut spaces: Vec<SpaceMounts<'_>> = vec![];
    for request in requests {
        let Ask::Mount(mount) = &request.ask else { continue };
        match spaces.iter_mut().find(|(space, ..)| *space == mount.space) {
            Some((.., mounts)) => mounts.push(mount),
            None => spaces.push((mount.space, &request.image, vec![mount])),
        }
    }
    spaces
}

/// The numbers of the namespaces that belong to user namespaces below that of the root task.
pub(crate) fn owned_below(requests: &[Request]) -> BTreeSet<u32> {
    let owned = requests.iter().filter_map(|request| match &request.ask {
        Ask::NestedUser { owned, .. } => Some(owned),
        _ => None,
    });
    owned.flatten().copied().collect()
}

/// File systems that have fewer of the options that take something away than the configuration says. Whoever may mount
/// could change them.
pub(crate) fn with_looser_options(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let Some(spec) = passed.spec.as_ref().filter(|_| !passed.grants(number::SYS_ADMIN)) else {
        return vec![];
    };
    let is_made_as = |mount: &Mount, wanted: &SpecMount| {
        !wanted.is_bind() && mount.made().is_some_and(|name| wanted.kind == name)
    };
    let spaces = spaces(requests);
    let mut of_device: HashMap<u32, Vec<&Mount>> = HashMap::new();
    for mount in spaces.iter().flat_map(|(.., mounts)| mounts) {
        of_device.entry(mount.device).or_default().push(mount);
    }
    let (mut known, mut found) = (HashMap::new(), vec![]);
    for (_, image, mounts) in &spaces {
        for mount in mounts {
            // A part of a file system of the kernel can be one of another instance than the one around it.
            let wanted = match is_of_kernel(mount) {
                true => configured_above(spec, &plain(&mount.at())),
                false => configured(spec, &mount.at()),
            };
            let Some(wanted) = wanted.filter(|wanted| is_made_as(mount, wanted)) else { continue };
            let word = known.entry((mount.device, &wanted.destination)).or_insert_with(|| {
                // Of several that show one file system, one is made.
                let same = of_device.get(&mount.device).into_iter().flatten();
                let mut same = same.filter(|other| is_made_as(other, wanted));
                same.find_map(|other| looser(wanted, other, passed.memory))
            });
            let Some(word) = word else { continue };
            let text = format!("{mount}: the calling runtime wants it with the option {word}");
            let (image, rule) = ((*image).to_owned(), "mounts.file-systems".to_owned());
            found.push(Violation { image, task: None, rule, text });
        }
    }
    found
}

/// What takes the place of a root that is to be read-only, and can be written to. Whoever may mount could mount it, as in a
/// user namespace of its own.
pub(crate) fn over_the_root(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let read_only = |spec: &&Spec| spec.root.readonly && !passed.grants(number::SYS_ADMIN);
    let Some(spec) = passed.spec.as_ref().filter(read_only) else { return vec![] };
    let owned = owned_below(requests);
    let spaces = spaces(requests).into_iter().filter(|(space, ..)| !owned.contains(space));
    let all =
        spaces.flat_map(|(_, image, mounts)| mounts.into_iter().map(move |mount| (image, mount)));
    let is_other = |mount: &Mount| {
        let is_root = plain(&mount.at()) == Path::new("/");
        // What the configuration has there, and the root itself, are judged by their flags.
        is_root && mount.from != From::Root && configured(spec, "/").is_none()
    };
    all.filter(|(_, mount)| is_other(mount) && mount.flags & READ_ONLY == 0)
        .map(|(image, mount)| Violation {
            image: image.to_owned(),
            task: None,
            rule: "mounts.file-systems".to_owned(),
            text: format!("{mount}: the calling runtime wants the root read-only"),
        })
        .collect()
}

/// Whether a mount shows what the kernel shows, and not what the caller has given.
pub(crate) fn is_of_kernel(mount: &Mount) -> bool {
    match &mount.from {
        From::FileSystem => !HARMLESS.contains(&mount.fs.name.as_str()),
        From::Host(_) => true,
        From::Root | From::Part { .. } | From::Given { .. } | From::Device { .. } => false,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::FileSystem;
    use crate::origin::{Checked, Origin};
    use crate::rules::Policy;

    #[test]
    fn what_is_given_lies_where_the_configuration_mounts() {
        let text = br#"{"ociVersion":"1.0","mounts":[{"destination":"/data"},{"destination":"/sys/fs/cgroup"}]}"#;
        let spec = Some(Spec::parse(text).unwrap().unwrap());
        let passed = Passed { spec, ..Passed::default() };
        assert!(may_name("/data", &passed) && may_name("/sys/fs/cgroup/pids", &passed));
        assert!(!may_name("/etc", &passed) && !may_name("/database", &passed));
        assert!(may_name("/etc", &Passed::default()), "no runtime says what it mounts");
    }

    #[test]
    fn the_rules_of_the_group_give_devices() {
        let given = |rules: &str| {
            let resources =
                format!(r#"{{"ociVersion":"1.0","linux":{{"resources":{{"devices":{rules}}}}}}}"#);
            let spec = Some(Spec::parse(resources.as_bytes()).unwrap().unwrap());
            let passed = Passed { spec, ..Passed::default() };
            let all: Vec<Device> = devices(&passed).skip(DEFAULT_DEVICES.len()).collect();
            all.iter().map(Device::to_string).collect::<Vec<_>>()
        };
        let deny = r#"{"allow":false,"access":"rwm"}"#;
        assert_eq!(given(r#"[{"allow":true,"access":"rwm"}]"#), ["b *:*", "c *:*"]);
        let disk = r#"{"allow":true,"type":"b","major":8,"minor":-1,"access":"r"}"#;
        assert_eq!(given(&format!("[{deny},{disk}]")), ["b 8:*"]);
        assert!(given(&format!("[{disk},{deny}]")).is_empty());
        // To make a node of a device is not to use it.
        let made = r#"{"allow":true,"type":"c","access":"m"}"#;
        assert!(given(&format!("[{deny},{made}]")).is_empty());
        // All but one is not all.
        let one = r#"{"allow":false,"type":"b","major":8,"minor":0,"access":"rwm"}"#;
        assert_eq!(given(&format!(r#"[{{"allow":true,"access":"rwm"}},{one}]"#)), ["c *:*"]);
    }

    /// A mount that shows what is given.
    pub(crate) fn shows(from: From) -> Mount {
        Mount { space: 1, from, ..Mount::default() }
    }

    /// A file system of the kernel.
    pub(crate) fn fs(name: &str, options: &str) -> Mount {
        let fs =
            FileSystem { name: name.to_owned(), options: options.into(), ..FileSystem::default() };
        Mount { fs, ..shows(From::FileSystem) }
    }

    /// What a runtime gives a container: file systems of the kernel, volumes, and what it hides and protects.
    const SPEC: &str = r#"{"ociVersion": "1.0.2", "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
        {"destination": "/hosts", "type": "bind", "source": "/etc/hosts", "options": ["rbind"]},
        {"destination": "/vol", "type": "none", "source": "/srv", "options": ["rbind", "ro"]},
        {"destination": "/dir", "type": "proc", "source": "/srv", "options": ["bind"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}],
        "linux": {"maskedPaths": ["/proc/keys", "/proc/irq"],
                  "readonlyPaths": ["/proc/bus", "/proc/irq", "/vol/bus", "/sys/fs"]}}"#;

    /// A container that has it.
    pub(crate) fn in_container() -> Passed {
        let spec = Some(Spec::parse(SPEC.as_bytes()).unwrap().unwrap());
        Passed { spec, exists: Some(|_| true), ..Passed::default() }
    }

    /// One of these at a place, and what of it is there.
    pub(crate) fn placed(name: &str, at: &str, root: &str, flags: u32) -> Mount {
        Mount { at: at.into(), root: root.into(), flags, ..fs(name, "") }
    }

    /// Memory that cannot be swapped out is asked for as locked memory is.
    #[test]
    fn memory_stays_only_where_the_configuration_has_it_so() {
        let why = |options: &str, spec: Option<&str>| {
            let spec = spec.map(|spec| Spec::parse(spec.as_bytes()).unwrap().unwrap());
            let passed = Passed { spec, ..Passed::default() };
            wider(&Mount { at: "/x".into(), ..fs("tmpfs", options) }, &passed)
        };
        let given = r#"{"ociVersion": "1.0.2", "mounts": [
            {"destination": "/y", "type": "tmpfs", "source": "tmpfs", "options": ["noswap"]}]}"#;
        assert_eq!(why("size=4k,noswap", Some(given)), None);
        for spec in [None, Some(r#"{"ociVersion": "1.0.2"}"#)] {
            assert_eq!(why("size=4k", spec), None, "{spec:?}");
            assert!(why("size=4k,noswap", spec).unwrap().contains("noswap"), "{spec:?}");
        }
        let all = Passed { capabilities: crate::Capabilities(u64::MAX), ..Passed::default() };
        assert_eq!(wider(&fs("tmpfs", "noswap"), &all), None);
    }

    /// File systems of the kernel are where the configuration has them, and show there what they show in
    /// every container.
    #[test]
    fn file_systems_of_the_kernel_have_their_places() {
        let wider = |mount: &Mount| wider(mount, &in_container());
        for (name, at, root, flags) in [
            ("proc", "/proc", "/", 0),
            ("sysfs", "/sys", "/", 1),
            ("proc", "/proc/bus", "/bus", 1),
            ("sysfs", "/sys/fs", "/fs", 1),
            // As a container in this one protects them.
            ("proc", "/proc/fs", "/fs", 1),
            ("tmpfs", "/hosts", "/x", 0),
            ("tmpfs", "/proc/keys", "/null", 0),
            ("tmpfs", "/sys/fs/cgroup", "/", 0),
        ] {
            let mount = placed(name, at, root, flags);
            assert_eq!(wider(&mount), None, "{mount}");
        }
        for name in ["proc", "sysfs", "cgroup", "cgroup2", "debugfs"] {
            for at in ["/hosts", "/vol", "/dir", "/tmp", "/spare", "/proc/keys", "/vol/bus"] {
                for root in ["/", "/sys/kernel/core_pattern", "/bus"] {
                    for flags in [0, 1] {
                        let mount = placed(name, at, root, flags);
                        assert!(wider(&mount).is_some(), "{mount}");
                    }
                }
            }
        }
        for (name, at, root) in [
            ("proc", "/proc/bus", "/"),
            ("proc", "/proc/bus", "/bus/.."),
            ("proc", "/proc/fs", "/bus"),
            ("proc", "/proc/bus", "/sys"),
            ("sysfs", "/proc/bus", "/"),
            ("sysfs", "/proc/bus", "/bus"),
            ("sysfs", "/sys/fs", "/firmware"),
            ("proc", "/proc", "/sys"),
            ("sysfs", "/sys", "/firmware"),
            ("proc", "/sys", "/"),
        ] {
            let mount = placed(name, at, root, 1);
            assert!(wider(&mount).is_some(), "{mount}");
        }
        let mount = placed("proc", "/proc/fs", "/fs", 0);
        assert!(wider(&mount).is_some(), "{mount}");
    }

    /// Groups that a runtime gives for its mount of groups have the flags of that, and its place.
    #[test]
    fn groups_are_as_their_mount() {
        let given = |key: &str, at: &str, flags| {
            let from = From::Given { key: key.to_owned(), path: Some("/sys/fs/cgroup/x".into()) };
            let mount = Mount { at: at.into(), flags, ..shows(from) };
            (wider(&mount, &in_container()), shows_own_groups(Some(key), &in_container()))
        };
        let memory = "/sys/fs/cgroup/memory";
        assert_eq!(given(memory, memory, 1), (None, true));
        for (at, flags) in [(memory, 0), ("/spare", 0), ("/spare", 1), ("/vol", 0), ("/vol", 1)] {
            let (why, own) = given(memory, at, flags);
            assert!(
                why.is_some_and(|why| why.contains("the calling runtime wants")) && own,
                "{at}"
            );
        }
        // A volume is what it is; what hides files is nothing.
        assert_eq!(given("/hosts", "/hosts", 0), (None, false));
        assert_eq!(given("/proc/keys", "/proc/keys", 0), (None, false));
        assert!(shows_own_groups(None, &in_container()));
        assert!(!shows_own_groups(None, &Passed::default()));
    }

    /// What lies over a root that is to be read-only is read-only, too, but where tasks may mount themselves.
    #[test]
    fn nothing_writable_takes_the_place_of_a_read_only_root() {
        let judged = |change: fn(&mut Mount), owned: Vec<u32>, root: &str| {
            // Without the right to all files no overlay is allowed anywhere.
            let process = r#"{"capabilities": {"bounding": ["CAP_DAC_OVERRIDE"]}}"#;
            let text =
                format!(r#"{{"ociVersion": "1.0.2", "root": {{{root}}}, "process": {process}}}"#);
            let spec = Some(Spec::parse(text.as_bytes()).unwrap().unwrap());
            let passed = Passed { spec, ..Passed::default() };
            let mut over = Mount { id: (2, 1), ..placed("tmpfs", "/", "/", 0) };
            change(&mut over);
            let base = Mount { at: "/".into(), flags: READ_ONLY, ..shows(From::Root) };
            let nested = Ask::NestedUser { number: 9, parent: None, owned };
            let asks = [Ask::Mount(Mount { id: (1, 0), ..base }), Ask::Mount(over), nested];
            let requests =
                asks.map(|ask| Request { image: "mountpoints-1.img".to_owned(), task: None, ask });
            let (origin, checked) = (Origin::Elsewhere, Checked::default());
            let found = Policy::default().judge(&requests, origin, &checked, &passed);
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let none = Vec::<String>::new();
        const READ_ONLY_ROOT: &str = r#""readonly": true"#;
        let changes: [fn(&mut Mount); 4] = [
            |_| (),
            |mount| mount.at = "/.".into(),
            |mount| mount.fs.name = "overlay".to_owned(),
            // The root of another mount namespace.
            |mount| (mount.space, mount.id) = (2, (2, 0)),
        ];
        for change in changes {
            let found = judged(change, vec![], READ_ONLY_ROOT);
            let named =
                "the calling runtime wants the root read-only (foreign.mounts.file-systems)";
            assert!(found.len() == 1 && found[0].contains(named), "{found:?}");
            assert_eq!(judged(change, vec![], ""), none);
        }
        assert_eq!(judged(|mount| mount.flags = READ_ONLY, vec![], READ_ONLY_ROOT), none);
        assert_eq!(judged(|mount| mount.at = "/tmp".into(), vec![], READ_ONLY_ROOT), none);
        assert_eq!(judged(|mount| mount.space = 2, vec![2], READ_ONLY_ROOT), none);
    }

    /// A part of a volume that had been removed would be there again for the moment.
    #[test]
    fn what_had_been_removed_is_not_made_again() {
        let whole = || From::Part { whole: (1, 2), of: ("/data".to_owned(), 0) };
        let removed = |from| Mount { at: "/spare".into(), deleted: true, ..shows(from) };
        let why = |mount: &Mount| wider(mount, &in_container());
        for from in [whole(), From::Host("/etc/hosts/x".into())] {
            assert!(why(&removed(from)).is_some_and(|why| why.contains("had been removed")));
        }
        assert_eq!(why(&Mount { deleted: false, ..removed(whole()) }), None);
        // Nothing of it is made: it is given, or is in a file system of the container's own.
        let given = From::Given { key: "/hosts".into(), path: Some("/etc/hosts".into()) };
        assert_eq!(why(&Mount { at: "/hosts".into(), ..removed(given) }), None);
        assert_eq!(why(&Mount { deleted: true, ..placed("tmpfs", "/spare", "/x", 0) }), None);
        let passed = Passed { capabilities: crate::Capabilities(u64::MAX), ..Passed::default() };
        assert_eq!(wider(&removed(whole()), &passed), None);
    }

    /// Of a file system that the configuration has, too, no option names what is this host's.
    #[test]
    fn options_name_nothing_of_this_host() {
        let judged = |name: &str, at: &str, options: &str| {
            let mount = Mount { at: at.into(), flags: 1, ..fs(name, options) };
            let image = "mountpoints-1.img".to_owned();
            let asked = [Request { image, task: None, ask: Ask::Mount(mount) }];
            let (origin, checked) = (Origin::Elsewhere, Checked::default());
            let found = Policy::default().judge(&asked, origin, &checked, &in_container());
            let named = |text: &String| text.contains(" names a p");
            found.iter().map(ToString::to_string).filter(named).count()
        };
        assert_eq!(judged("proc", "/proc", "rw,pidns=/proc/1/ns/pid"), 1);
        assert_eq!(judged("cgroup", "/sys/fs/cgroup", "release_agent=/x,pids"), 1);
        assert_eq!(judged("proc", "/proc", "rw,hidepid=2"), 0);
    }

    /// A part can be one of another file system than the one around it.
    #[test]
    fn parts_have_the_options_of_the_whole() {
        let text = r#"{"ociVersion": "1.0.2", "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["hidepid=2"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m"]}]}"#;
        let spec = Some(Spec::parse(text.as_bytes()).unwrap().unwrap());
        let passed = Passed { spec, memory: 1 << 30, ..Passed::default() };
        let found = |device, part: Mount| {
            let whole = Mount { at: "/proc".into(), device: 1, ..fs("proc", "hidepid=invisible") };
            let part = Mount { device, ..part };
            let asked = [whole, part].map(|mount| Request {
                image: "mountpoints-1.img".to_owned(),
                task: None,
                ask: Ask::Mount(mount),
            });
            with_looser_options(&asked, &passed).len()
        };
        let part =
            |options| Mount { fs: fs("proc", options).fs, ..placed("", "/proc/fs", "/fs", 1) };
        assert_eq!([found(1, part("hidepid=2")), found(2, part("hidepid=invisible"))], [0, 0]);
        assert_eq!(found(2, part("")), 1);
        // A tmpfs in another one is new memory wherever it is.
        assert_eq!(found(2, placed("tmpfs", "/tmp/x", "/", 0)), 0);
    }
}
