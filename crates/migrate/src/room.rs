//! Whether memory of a tree can be there twice: a dump that lets the tasks run while it copies needs that, and copies all of it
//! while they stand still otherwise.

use std::fs;
use std::path::Path;

use torpor_kernel::cgroup;

/// What the kernel calls the limit of a group, what is used of it, and what of that is cache that it can do without.
type Names = [&'static str; 3];

const VERSION_1: Names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
const VERSION_2: Names = ["memory.max", "memory.current", "inactive_file"];

/// Whether this host and the control groups of a process leave so many bytes more. What cannot be read says nothing.
#[must_use]
pub(crate) fn is_there(pid: i32, bytes: u64) -> bool {
    let of_host = fs::read_to_string("/proc/meminfo").ok();
    let of_host = of_host.and_then(|text| number(&text, "MemAvailable:")).map(|kib| kib << 10);
    of_groups(pid).into_iter().chain(of_host).all(|spare| spare >= bytes)
}

/// What each of the groups leaves that a process is in.
fn of_groups(pid: i32) -> Vec<u64> {
    let all = cgroup::of(pid).unwrap_or_default();
    let version_1 = all.iter().find(|(name, _)| name.split(',').any(|it| it == "memory"));
    let Some((name, group)) = version_1.or_else(|| all.get_key_value("")) else {
        return Vec::new();
    };
    let names = if name.is_empty() { &VERSION_2 } else { &VERSION_1 };
    let root = Path::new(cgroup::ROOT).join(name);
    let levels = group.ancestors().filter_map(|level| level.strip_prefix("/").ok());
    levels.filter_map(|level| of_group(&root.join(level), names)).collect()
}

/// What one group leaves; nothing is said if it has no limit.
fn of_group(dir: &Path, [limit, usage, cache]: &Names) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let limit: u64 = read(limit)?.trim().parse().ok()?;
    let usage: u64 = read(usage)?.trim().parse().ok()?;
    let cache = read("memory.stat").and_then(|text| number(&text, cache)).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

/// The number behind a name.
fn number(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut line| if line.next()? == name { line.next()?.parse().ok() } else { None })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_limit_leaves_what_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(of_group(dir.path(), &VERSION_2), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(of_group(dir.path(), &VERSION_2), None);
        write("memory.max", "1000\n");
        assert_eq!(of_group(dir.path(), &VERSION_2), Some(300));
        write("memory.stat", "anon 500\ninactive_file 200\nactive_file 0\n");
        assert_eq!(of_group(dir.path(), &VERSION_2), Some(500));
        write("memory.max", "100\n");
        assert_eq!(of_group(dir.path(), &VERSION_2), Some(0));
    }

    #[test]
    fn no_host_has_all() {
        let pid = std::process::id().cast_signed();
        assert!(is_there(pid, 0) && !is_there(pid, u64::MAX));
    }
}
