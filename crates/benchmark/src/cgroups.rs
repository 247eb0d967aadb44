//! The control groups of containers: finding, reading and removing them, in both versions.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use torpor_kernel::cgroup::{Freezer, ROOT, hierarchies, is_unified, processes, subgroups};

/// How deep below a hierarchy's root a runtime puts its groups.
const DEPTH: usize = 8;

/// The root of the hierarchy that a controller is in.
#[must_use]
pub(crate) fn hierarchy(controller: &str) -> PathBuf {
    let own = Path::new(ROOT).join(controller);
    if own.join("cgroup.procs").exists() { own } else { PathBuf::from(ROOT) }
}

/// The groups of a controller whose names hold the identifiers of containers or sandboxes, or nothing if one of them
/// has none. The hierarchy is walked once, and takes longer than all else: what is read at certain times is read of groups
/// that were found before.
#[must_use]
pub(crate) fn all_of(controller: &str, ids: &[&str]) -> Option<Vec<PathBuf>> {
    named(&below(&hierarchy(controller)), ids)
}

/// The first group whose name holds each identifier.
fn named(groups: &[PathBuf], ids: &[&str]) -> Option<Vec<PathBuf>> {
    let name = |group: &PathBuf| Some(group.file_name()?.to_string_lossy().into_owned());
    let names: Vec<String> = groups.iter().map(|group| name(group).unwrap_or_default()).collect();
    let of = |id: &&str| names.iter().position(|name| name.contains(id));
    ids.iter().map(|id| Some(groups[of(id)?].clone())).collect()
}

/// All groups below a directory, each before those below it.
fn below(dir: &Path) -> Vec<PathBuf> {
    let (mut all, mut layer) = (Vec::new(), vec![dir.to_owned()]);
    for _ in 0..=DEPTH {
        layer = layer.iter().flat_map(|dir| subgroups(dir)).collect();
        all.extend(layer.iter().cloned());
    }
    all
}

/// A number in a file of a group.
#[must_use]
pub(crate) fn number(group: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
}

/// A number that a file of a group has after a name.
#[must_use]
pub(crate) fn entry(group: &Path, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(group.join(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The bytes that a group is charged for, or nothing where its controller is not there.
#[must_use]
pub(crate) fn memory(group: &Path) -> Option<u64> {
    number(group, "memory.usage_in_bytes").or_else(|| number(group, "memory.current"))
}

/// The controller that accounts for CPU time.
#[must_use]
pub(crate) fn accounts() -> &'static str {
    if is_unified() { "cpu" } else { "cpuacct" }
}

/// The CPU time in seconds that a group of what [`accounts`] has used.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "nanoseconds of some minutes")]
pub(crate) fn cpu_seconds(group: &Path) -> Option<f64> {
    match number(group, "cpuacct.usage") {
        Some(nanoseconds) => Some(nanoseconds as f64 / 1e9),
        None => Some(entry(group, "cpu.stat", "usage_usec")? as f64 / 1e6),
    }
}

/// How often the kernel has throttled a group of the controller `cpu`.
#[must_use]
pub(crate) fn throttled(group: &Path) -> Option<u64> {
    entry(group, "cpu.stat", "nr_throttled")
}

/// The bytes that the groups `name` and all below it have read from disks, by the account of what weighs
/// them.
#[must_use]
pub(crate) fn bytes_read(name: &str) -> Option<u64> {
    let name = name.trim_start_matches('/');
    let text = if is_unified() {
        fs::read_to_string(hierarchy("io").join(name).join("io.stat"))
    } else {
        let group = hierarchy("blkio").join(name);
        fs::read_to_string(group.join("blkio.bfq.io_service_bytes_recursive"))
    };
    Some(reads_in(&text.ok()?))
}

/// The sum of the reads of all devices: `7:0 Read 4096` in the first version, `7:0 rbytes=4096 …` in the
/// second.
fn reads_in(text: &str) -> u64 {
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(' ')?;
        let word = rest.strip_prefix("Read ").or_else(|| rest.strip_prefix("rbytes="))?;
        word.split(' ').next()?.parse::<u64>().ok()
    };
    text.lines().filter_map(of_line).sum()
}

/// Makes a group below the root of a controller's hierarchy.
///
/// # Errors
/// If the group cannot be made, or the one above does not hand the controller on.
pub(crate) fn make(controller: &str, name: &str) -> std::io::Result<PathBuf> {
    let mut dir = hierarchy(controller);
    for part in name.trim_start_matches('/').split('/') {
        // In the second version each group says which controllers those below it have.
        let below = dir.join("cgroup.subtree_control");
        if below.exists() {
            fs::write(below, format!("+{controller}"))?;
        }
        dir.push(part);
        fs::create_dir_all(&dir)?;
    }
    Ok(dir)
}

/// Lets everything in the groups `name` run that is frozen: what is frozen by the first version does
/// not even end when it is killed.
pub(crate) fn thaw(name: &str) {
    for root in hierarchies() {
        thaw_one(&root.join(name.trim_start_matches('/')));
    }
}

fn thaw_one(group: &Path) {
    let freezer = Freezer::of(group);
    if freezer.file.exists() {
        let _ = freezer.set(false);
    }
    subgroups(group).for_each(|group| thaw_one(&group));
}

/// Removes the group `name` of every hierarchy with all below it, and ends what runs in there.
pub(crate) fn remove(name: &str) {
    let until = Instant::now() + Duration::from_secs(10);
    thaw(name);
    for root in hierarchies() {
        let group = root.join(name.trim_start_matches('/'));
        while group.exists() && !remove_one(&group) && Instant::now() < until {
            for pid in processes(&group).into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn remove_one(group: &Path) -> bool {
    // All are tried, whatever comes of the first.
    let left = subgroups(group).filter(|group| !remove_one(group)).count();
    left == 0 && fs::remove_dir(group).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_the_identifiers_in_their_names() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/cri-one.scope/two")).unwrap();
        fs::create_dir_all(at("b/two-inside/one")).unwrap();
        let groups = below(root.path());
        assert_eq!(groups.len(), 6);
        // The one that lies higher, wherever the other is.
        let found = named(&groups, &["one", "two"]).unwrap();
        assert_eq!(found, [at("a/cri-one.scope"), at("b/two-inside")]);
        assert_eq!(named(&groups, &["one", "three"]), None);
    }

    #[test]
    fn cpu_time_is_told_in_seconds_by_both_versions() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        assert_eq!((cpu_seconds(group.path()), throttled(group.path())), (None, None));
        write("cpu.stat", "usage_usec 1500000\nnr_periods 9\nnr_throttled 7\n");
        assert_eq!((cpu_seconds(group.path()), throttled(group.path())), (Some(1.5), Some(7)));
        write("cpuacct.usage", "2500000000\n");
        assert_eq!(cpu_seconds(group.path()), Some(2.5));
    }

    #[test]
    fn reads_are_those_of_all_devices() {
        assert_eq!(reads_in("7:0 Read 4096\n7:0 Write 1\n7:1 Read 4\nTotal 4101\n"), 4100);
        assert_eq!(reads_in("7:0 rbytes=4096 wbytes=1 rios=1\n8:0 rbytes=4 wbytes=0\n"), 4100);
        assert_eq!(reads_in("Total 0\n"), 0);
    }
}
