//! Control groups (cgroups(7)): who is in which, and how one is frozen, in both versions.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::proc;

/// Where the hierarchies of a host are mounted: that of version 2, or one for each controller of
/// version 1.
pub const ROOT: &str = "/sys/fs/cgroup";

/// The group of a task in each hierarchy. A hierarchy is named by its controllers
/// (`cpu,cpuacct`), `name=NAME` if it has none, and by nothing if it is the unified
/// one (version 2).
pub type Membership = BTreeMap<String, PathBuf>;

/// The groups of a process.
///
/// # Errors
/// [`crate::Error::Gone`] if the process is gone.
pub fn of(pid: i32) -> Result<Membership> {
    proc::bytes(pid, "cgroup").map(|text| parse(&text))
}

/// Parses `/proc/PID/cgroup`: `ID:NAMES:PATH` lines.
#[must_use]
pub fn parse(text: &[u8]) -> Membership {
    let line = |line: &[u8]| {
        let mut fields = line.splitn(3, |&b| b == b':');
        let (_, names, path) = (fields.next()?, fields.next()?, fields.next()?);
        // A task can outlive its group.
        let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
        let names = String::from_utf8_lossy(names).into_owned();
        Some((names, PathBuf::from(OsStr::from_bytes(path))))
    };
    text.split(|&b| b == b'\n').filter_map(line).collect()
}

/// Whether all controllers of this host are in version 2. Only that has this file; the root of
/// version 1 is a file system like others.
#[must_use]
pub fn is_unified() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

/// The roots of all hierarchies of this host.
#[must_use]
pub fn hierarchies() -> Vec<PathBuf> {
    if is_unified() {
        return vec![PathBuf::from(ROOT)];
    }
    subgroups(Path::new(ROOT)).filter(|dir| dir.join("cgroup.procs").exists()).collect()
}

/// The groups right below one.
pub fn subgroups(group: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// The processes of a group and of all below it.
#[must_use]
pub fn processes(group: &Path) -> Vec<i32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let mut all: Vec<i32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    all.extend(subgroups(group).flat_map(|group| processes(&group)));
    all
}

/// The file of a group that freezes and thaws it, and the words for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freezer {
    /// The file.
    pub file: PathBuf,
    /// What is written to freeze the group.
    pub frozen: &'static str,
    /// What is written to let it go on.
    pub thawed: &'static str,
}

impl Freezer {
    /// The files of version 1, in the hierarchy of that name.
    pub const SPLIT: (&str, &str, &str) = ("freezer.state", "FROZEN", "THAWED");
    /// The files of version 2.
    pub const UNIFIED: (&str, &str, &str) = ("cgroup.freeze", "1", "0");

    /// That of the group at `dir`, by the files that are there.
    #[must_use]
    pub fn of(dir: &Path) -> Self {
        let split = dir.join(Self::SPLIT.0).exists();
        let (file, frozen, thawed) = if split { Self::SPLIT } else { Self::UNIFIED };
        Self { file: dir.join(file), frozen, thawed }
    }

    /// Tells the group to freeze or to go on. It may take a while to be frozen.
    ///
    /// # Errors
    /// If the group is gone, or may not be written to.
    pub fn set(&self, frozen: bool) -> Result<()> {
        let word = if frozen { self.frozen } else { self.thawed };
        fs::write(&self.file, word).context(|| format!("write {}", self.file.display()))
    }

    /// Whether somebody has told the group to freeze.
    ///
    /// # Errors
    /// If the group is gone.
    pub fn is_set(&self) -> Result<bool> {
        let state = fs::read_to_string(&self.file);
        let state = state.context(|| format!("read {}", self.file.display()))?;
        Ok(state.trim() != self.thawed)
    }

    /// Whether everything in the group stands still.
    ///
    /// # Errors
    /// If the group is gone.
    pub fn is_frozen(&self) -> Result<bool> {
        let (file, word) = if self.frozen == Self::UNIFIED.1 {
            (self.file.with_file_name("cgroup.events"), "frozen 1")
        } else {
            (self.file.clone(), self.frozen)
        };
        let state = fs::read_to_string(&file).context(|| format!("read {}", file.display()))?;
        Ok(state.lines().any(|line| line == word))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn memberships_are_parsed() {
        let text = b"9:name=systemd:/a:b\n4:cpu,cpuacct:/x (deleted)\n0::/\n";
        let found = parse(text);
        let of = |name: &str| found.get(name).and_then(|p| p.to_str());
        assert_eq!(of("name=systemd"), Some("/a:b"));
        assert_eq!(of("cpu,cpuacct"), Some("/x"));
        assert_eq!(of(""), Some("/"));
    }

    #[test]
    fn either_version_is_frozen_by_its_own_words() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("cgroup.freeze", "0\n");
        write("cgroup.events", "populated 1\nfrozen 0\n");
        let freezer = Freezer::of(dir.path());
        assert!(!freezer.is_set().unwrap() && !freezer.is_frozen().unwrap());
        freezer.set(true).unwrap();
        assert!(freezer.is_set().unwrap() && !freezer.is_frozen().unwrap());
        write("cgroup.events", "populated 1\nfrozen 1\n");
        assert!(freezer.is_frozen().unwrap());

        write("freezer.state", "FREEZING\n");
        let freezer = Freezer::of(dir.path());
        assert!(freezer.is_set().unwrap() && !freezer.is_frozen().unwrap());
        freezer.set(true).unwrap();
        assert!(freezer.is_frozen().unwrap());
        freezer.set(false).unwrap();
        assert!(!freezer.is_set().unwrap());
    }
}
