//! Whether memory runs out: the kernel counts whom it has killed for that, for each control group and for the host.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::cgroup::{self, Membership};

/// The name of the number, in all of these files.
const KILLS: &str = "oom_kill";
/// The number of the host.
const HOST: &str = "/proc/vmstat";
/// None of these files is longer.
const MAX_LEN: u64 = 64 << 10;

/// A number that grows.
#[derive(Debug)]
struct Counter {
    file: PathBuf,
    before: u64,
    /// Where memory has run out if it has grown.
    place: String,
}

impl Counter {
    fn new(file: PathBuf, place: String) -> Option<Self> {
        let before = read(&file)?;
        Some(Self { file, before, place })
    }
}

/// Notices when the kernel kills somebody since memory has run out.
#[derive(Debug)]
pub struct Shortage {
    counters: Vec<Counter>,
}

impl Shortage {
    /// One that looks at the control groups of these processes, from now on. What is in the root of version 2
    /// is counted for the host only.
    #[must_use]
    pub fn of(pids: impl IntoIterator<Item = i32>) -> Self {
        let memberships = pids.into_iter().filter_map(|pid| cgroup::of(pid).ok());
        let groups: BTreeSet<_> = memberships.filter_map(|them| group(&them)).collect();
        let counters: Vec<Counter> =
            groups.into_iter().filter_map(|(file, place)| Counter::new(file, place)).collect();
        let is_blind = counters.is_empty();
        let found = Self { counters };
        if is_blind { found.and_host() } else { found }
    }

    /// Looks at all of the host besides: it may be another group that is short of memory.
    #[must_use]
    pub fn and_host(mut self) -> Self {
        let place = "on that host, or in one of its cgroups".to_owned();
        self.counters.extend(Counter::new(HOST.into(), place));
        self
    }

    /// Where memory has run out meanwhile.
    #[must_use]
    pub fn place(&self) -> Option<&str> {
        let has_grown = |it: &&Counter| read(&it.file).is_some_and(|now| now > it.before);
        self.counters.iter().find(has_grown).map(|it| it.place.as_str())
    }
}

/// The file of the group that limits memory, and the name of the group.
fn group(all: &Membership) -> Option<(PathBuf, String)> {
    let version_1 = all.iter().find(|(name, _)| name.split(',').any(|it| it == "memory"));
    let (name, group) = version_1.or_else(|| all.get_key_value(""))?;
    let below = group.strip_prefix("/").ok()?;
    let file = if name.is_empty() { "memory.events" } else { "memory.oom_control" };
    let file = Path::new(cgroup::ROOT).join(name).join(below).join(file);
    Some((file, format!("in cgroup {}", group.display())))
}

fn read(file: &Path) -> Option<u64> {
    let mut text = String::new();
    fs::File::open(file).ok()?.take(MAX_LEN).read_to_string(&mut text).ok()?;
    number(&text)
}

fn number(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(KILLS)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_number_is_found() {
        assert_eq!(number("oom_kill_disable 0\nunder_oom 1\noom_kill 3\n"), Some(3));
        assert_eq!(number("oom 9\noom_group_kill 2\n"), None);
    }

    #[test]
    fn the_group_is_that_of_memory() {
        let group = |text: &[u8]| group(&cgroup::parse(text)).unwrap().0;
        let both = b"5:cpuset:/c\n4:memory:/a/b\n0::/u\n";
        assert_eq!(group(both), Path::new("/sys/fs/cgroup/memory/a/b/memory.oom_control"));
        assert_eq!(group(b"0::/u\n"), Path::new("/sys/fs/cgroup/u/memory.events"));
    }

    #[test]
    fn what_grows_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.events");
        fs::write(&file, "oom_kill 1\n").unwrap();
        let counters = vec![Counter::new(file.clone(), "in it".to_owned()).unwrap()];
        let shortage = Shortage { counters };
        assert_eq!(shortage.place(), None);
        fs::write(&file, "oom_kill 2\n").unwrap();
        assert_eq!(shortage.place(), Some("in it"));
    }
}
