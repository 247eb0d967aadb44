//! How much memory there is left for tasks: what the limits of their cgroups leave, and
//! what the machine has.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::hierarchy::Hierarchies;
use crate::error::{Context, Error, Result};
use crate::namespace::mount;
use crate::proc;

/// The names of files that tell of memory: limit, use, statistics, and in these the part
/// of the use that the kernel gives back first.
struct MemoryFiles {
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

const VERSION_1: MemoryFiles = MemoryFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};
const VERSION_2: MemoryFiles =
    MemoryFiles { limit: "memory.max", usage: "memory.current", cache: "inactive_file" };

/// The least number of bytes that any of these tasks can still have before a limit is
/// met, and whose limit that is.
///
/// # Errors
/// If a task is gone, or a limit of its groups cannot be read.
pub(crate) fn spare_memory(pids: impl Iterator<Item = i32>) -> Result<(u64, String)> {
    let mut groups: BTreeSet<(String, PathBuf)> = BTreeSet::new();
    for pid in pids {
        groups.extend(memory_group(&proc::bytes(pid, "cgroup")?));
    }
    let host = mount::own_tree()?;
    let mut hierarchies = Hierarchies::default();
    let mut least = (available()?, "the machine".to_owned());
    for (name, group) in groups {
        let names = if name.is_empty() { &VERSION_2 } else { &VERSION_1 };
        let hierarchy = hierarchies.get(&name, &host, None)?;
        for level in group.ancestors() {
            // What lies above the part that is mounted here nobody can look at.
            let Ok(dir) = hierarchy.open(level) else { break };
            if let Some(spare) = spare_in(dir.as_fd(), names)
                && spare < least.0
            {
                least = (spare, format!("the limit of cgroup {}", level.display()));
            }
        }
    }
    Ok(least)
}

/// The hierarchy that limits memory, and the group in it.
fn memory_group(membership: &[u8]) -> Option<(String, PathBuf)> {
    let all = torpor_kernel::cgroup::parse(membership);
    let version_1 = all.iter().find(|(name, _)| name.split(',').any(|n| n == "memory"));
    version_1.or_else(|| all.get_key_value("")).map(|(name, group)| (name.clone(), group.clone()))
}

/// What the limit of one group leaves; `None` if it has none.
fn spare_in(dir: BorrowedFd<'_>, names: &MemoryFiles) -> Option<u64> {
    let limit: u64 = read(dir, names.limit)?.trim().parse().ok()?;
    let usage: u64 = read(dir, names.usage)?.trim().parse().ok()?;
    let stat = read(dir, "memory.stat").unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(names.cache)?.trim().parse().ok());
    Some(limit.saturating_sub(usage.saturating_sub(cache.unwrap_or(0))))
}

fn read(dir: BorrowedFd<'_>, name: &str) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, name, flags, Mode::empty()).ok()?;
    let mut text = String::new();
    std::fs::File::from(file).read_to_string(&mut text).ok()?;
    Some(text)
}

/// `MemAvailable` of the machine (proc_meminfo(5)).
fn available() -> Result<u64> {
    let path = Path::new("/proc/meminfo");
    let text = std::fs::read_to_string(path).context(|| path.display().to_string())?;
    let kib = proc::Status::parse(&text).number("MemAvailable", 10);
    let missing = || Error::invalid(path.display().to_string(), "says nothing of MemAvailable");
    Ok(kib.ok_or_else(missing)? << 10)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_group_is_that_of_the_controller() {
        let group = |text: &str| memory_group(text.as_bytes()).unwrap();
        let both = "5:cpuset:/c\n4:hugetlb,memory:/a/b\n0::/u\n";
        assert_eq!(group(both), ("hugetlb,memory".to_owned(), "/a/b".into()));
        assert_eq!(group("0::/u/v\n"), (String::new(), "/u/v".into()));
        assert!(memory_group(b"1:name=systemd:/\n").is_none());
    }

    #[test]
    fn a_limit_leaves_what_is_not_used_or_only_cache() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let spare = || spare_in(std::fs::File::open(dir.path()).unwrap().as_fd(), &VERSION_2);
        put("memory.current", "700\n");
        put("memory.max", "max\n");
        assert_eq!(spare(), None);
        put("memory.max", "1000\n");
        assert_eq!(spare(), Some(300));
        put("memory.stat", "anon 1\ninactive_file 50\n");
        assert_eq!(spare(), Some(350));
    }

    #[test]
    fn the_machine_has_memory() {
        let (spare, _) = spare_memory([1].into_iter()).unwrap();
        assert!(spare > 0);
    }
}
