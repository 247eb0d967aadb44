//! The cgroups of a job: what it may use, and a switch that freezes all of it at once.
//!
//! A job gets a cgroup of its own in the hierarchy of version 2, or in each of the
//! controllers of version 1 that are there. Where none can be made the job runs without,
//! and is frozen by signals.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use torpor_kernel::cgroup::{self, Freezer, ROOT};

use crate::spec::Limits;

const PARENT: &str = "torpor-queue";
const CONTROLLERS: [&str; 5] = ["freezer", "pids", "memory", "cpu", "cpuacct"];

/// How long a tree may take to freeze.
const PATIENCE: Duration = Duration::from_secs(10);

/// The cgroups of one job.
#[derive(Debug, Clone)]
pub(crate) struct Cgroups {
    name: String,
    unified: Option<PathBuf>,
    /// Directory of each controller of version 1, by its name.
    split: Vec<(&'static str, PathBuf)>,
}

impl Cgroups {
    /// The cgroups that are named `name`, whether they are there or not.
    #[must_use]
    pub(crate) fn named(name: &str) -> Self {
        let root = Path::new(ROOT);
        if cgroup::is_unified() {
            let dir = root.join(PARENT).join(name);
            return Self { name: name.to_owned(), unified: Some(dir), split: Vec::new() };
        }
        let place = |&controller: &&'static str| {
            let dir = root.join(controller);
            let there = dir.join("cgroup.procs").exists();
            there.then(|| (controller, dir.join(PARENT).join(name)))
        };
        let split = CONTROLLERS.iter().filter_map(place).collect();
        Self { name: name.to_owned(), unified: None, split }
    }

    /// Where they are below each controller.
    #[must_use]
    pub(crate) fn path(&self) -> String {
        format!("/{PARENT}/{}", self.name)
    }

    /// Makes them, with limits.
    ///
    /// # Errors
    /// If a limit that was asked for cannot be set. Where there are no cgroups at all,
    /// only what has limits fails.
    pub(crate) fn create(&self, limits: &Limits) -> io::Result<()> {
        if let Some(dir) = &self.unified {
            self.enable(dir);
        }
        for dir in self.dirs() {
            if let Err(e) = fs::create_dir_all(dir)
                && limits.are_asked()
            {
                return Err(e);
            }
        }
        self.limit(limits)
    }

    /// Hands the controllers down to the parent of the job's cgroup. Those that cannot be
    /// handed down are missed only where a limit needs them.
    fn enable(&self, dir: &Path) {
        let Some(parent) = dir.parent() else { return };
        let _ = fs::create_dir_all(parent);
        for level in [Path::new(ROOT), parent] {
            for controller in ["memory", "pids", "cpu"] {
                let _ = fs::write(level.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
    }

    fn dirs(&self) -> impl Iterator<Item = &Path> {
        self.unified.iter().map(PathBuf::as_path).chain(self.split.iter().map(|(_, d)| d.as_path()))
    }

    fn file(&self, controller: &str, unified: &str, split: &str) -> Option<PathBuf> {
        match &self.unified {
            Some(dir) => Some(dir.join(unified)),
            None => self
                .split
                .iter()
                .find(|(name, _)| *name == controller)
                .map(|(_, dir)| dir.join(split)),
        }
    }

    fn limit(&self, limits: &Limits) -> io::Result<()> {
        let missing = |what: &str| {
            io::Error::other(format!("a limit of {what} needs the cgroup controller of that name"))
        };
        if let Some(bytes) = limits.memory {
            let file = self.file("memory", "memory.max", "memory.limit_in_bytes");
            fs::write(file.ok_or_else(|| missing("memory"))?, bytes.to_string())?;
        }
        if let Some(count) = limits.pids {
            let file = self.file("pids", "pids.max", "pids.max");
            fs::write(file.ok_or_else(|| missing("pids"))?, count.to_string())?;
        } else if let Some(count) = limits.usual_pids
            && let Some(file) = self.file("pids", "pids.max", "pids.max")
        {
            // Nobody has asked for it: where it cannot be had the job runs all the same.
            let _ = fs::write(file, count.to_string());
        }
        if let Some(quota) = limits.cpu_quota() {
            let text = match self.unified {
                Some(_) => format!("{quota} {}", Limits::CPU_PERIOD),
                None => quota.to_string(),
            };
            let file = self.file("cpu", "cpu.max", "cpu.cfs_quota_us");
            fs::write(file.ok_or_else(|| missing("cpu"))?, text)?;
        }
        Ok(())
    }

    /// Moves a process into them; what it forks is in them as well.
    ///
    /// # Errors
    /// If there is a cgroup and the process cannot be moved.
    pub(crate) fn enter(&self, pid: u32) -> io::Result<()> {
        for dir in self.dirs().filter(|dir| dir.exists()) {
            fs::write(dir.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(())
    }

    /// Moves a process back into them that has gone elsewhere; says whether it had and is back.
    ///
    /// # Errors
    /// If a group is gone, or does not take the process.
    pub(crate) fn bring_back(&self, pid: u32) -> io::Result<bool> {
        if self.is_home(pid) != Some(false) {
            return Ok(false);
        }
        self.enter(pid)?;
        // One that is just ending is shown in the topmost groups of the first version, and stays there.
        Ok(self.is_home(pid) == Some(true))
    }

    /// Whether a process is in all of them that there are; `None` if it is gone.
    fn is_home(&self, pid: u32) -> Option<bool> {
        let name = self.dirs().next().and_then(Path::file_name)?;
        let groups = cgroup::of(pid.cast_signed()).ok()?;
        let here = groups.values().filter(|path| path.file_name() == Some(name)).count();
        Some(here >= self.dirs().filter(|dir| dir.exists()).count())
    }

    /// The directory of the cgroup that freezes the job, if there is one.
    #[must_use]
    pub(crate) fn freezer(&self) -> Option<&Path> {
        let dir = match &self.unified {
            Some(dir) => dir.as_path(),
            None => self.split.iter().find(|(n, _)| *n == "freezer").map(|(_, d)| d.as_path())?,
        };
        dir.exists().then_some(dir)
    }

    /// Freezes the job, or lets it go on; says whether there was a cgroup to do it with.
    ///
    /// # Errors
    /// If it does not freeze in time.
    pub(crate) fn set_frozen(&self, frozen: bool) -> io::Result<bool> {
        let Some(dir) = self.freezer() else { return Ok(false) };
        let begun = Instant::now();
        let freezer = Freezer::of(dir);
        freezer.set(frozen).map_err(io::Error::other)?;
        while freezer.is_frozen().map_err(io::Error::other)? != frozen {
            if begun.elapsed() > PATIENCE {
                return Err(io::Error::other("the job does not freeze"));
            }
            std::thread::sleep(Duration::from_millis(1));
            // A task in the middle of fork can escape one pass of version 1.
            freezer.set(frozen).map_err(io::Error::other)?;
        }
        Ok(true)
    }

    /// Bytes of memory that the job holds, but for the cache of files.
    #[must_use]
    pub(crate) fn memory(&self) -> Option<u64> {
        let file = self.file("memory", "memory.stat", "memory.stat")?;
        let text = fs::read_to_string(file).ok()?;
        let words: &[&str] =
            if self.unified.is_some() { &["anon", "shmem"] } else { &["rss", "shmem"] };
        let value = |line: &str| {
            let (word, value) = line.split_once(' ')?;
            words.contains(&word).then(|| value.parse::<u64>().ok())?
        };
        Some(text.lines().filter_map(value).sum())
    }

    /// Whether a process of the job was killed for want of memory.
    #[must_use]
    pub(crate) fn ran_out_of_memory(&self) -> bool {
        let Some(file) = self.file("memory", "memory.events", "memory.oom_control") else {
            return false;
        };
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().any(|l| l.strip_prefix("oom_kill ").is_some_and(|n| n.trim() != "0"))
    }

    /// Whether the job was refused a process or a thread because it had as many as it may.
    #[must_use]
    pub(crate) fn ran_out_of_pids(&self) -> bool {
        let Some(file) = self.file("pids", "pids.events", "pids.events") else { return false };
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().any(|l| l.strip_prefix("max ").is_some_and(|n| n.trim() != "0"))
    }

    /// Microseconds of processor time that the job has used.
    #[must_use]
    pub(crate) fn cpu_time(&self) -> Option<u64> {
        if let Some(dir) = &self.unified {
            let text = fs::read_to_string(dir.join("cpu.stat")).ok()?;
            return text.lines().find_map(|l| l.strip_prefix("usage_usec ")?.parse().ok());
        }
        let file = self.file("cpuacct", "", "cpuacct.usage")?;
        let nanoseconds: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
        Some(nanoseconds / 1000)
    }

    /// Removes them. What does not exist, or is not empty yet, is left to the next call.
    pub(crate) fn remove(&self) {
        self.dirs().for_each(remove);
    }
}

/// Removes a group, and before that those that a job of root has made in it.
fn remove(group: &Path) {
    cgroup::subgroups(group).for_each(|inner| remove(&inner));
    let _ = fs::remove_dir(group);
}
