//! A control group of a fault's own.

use super::{CALM, states};
use crate::wait::wait_for;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// A control group that pauses tasks. It is taken away at the end, with what is in it set free.
pub(super) struct Group {
    pub(super) dir: PathBuf,
    file: &'static str,
    frozen: &'static str,
    thawed: &'static str,
}

impl Group {
    pub(super) fn of_each_version() -> Result<Vec<Self>> {
        Ok([Self::of_version_1()?, Self::of_version_2()?].into_iter().flatten().collect())
    }

    pub(super) fn of_version_1() -> Result<Option<Self>> {
        Self::below("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED")
    }

    pub(super) fn of_version_2() -> Result<Option<Self>> {
        let hybrid = Path::new("/sys/fs/cgroup/unified").exists();
        let top = if hybrid { "/sys/fs/cgroup/unified" } else { "/sys/fs/cgroup" };
        Self::below(top, "cgroup.freeze", "1", "0")
    }

    fn below(
        top: &str,
        file: &'static str,
        frozen: &'static str,
        thawed: &'static str,
    ) -> Result<Option<Self>> {
        let outside = std::fs::read_link("/proc/self/ns/pid")?;
        let number: String =
            outside.display().to_string().chars().filter(char::is_ascii_digit).collect();
        let dir = Path::new(top).join(format!("zoo-{number}"));
        if !Path::new(top).join("cgroup.procs").exists() {
            return Ok(None);
        }
        // One of this name is what a runner that was killed has left: numbers come again.
        let _ = std::fs::remove_dir(&dir);
        std::fs::create_dir(&dir).with_context(|| format!("make {}", dir.display()))?;
        let group = Group { dir, file, frozen, thawed };
        Ok(group.dir.join(file).exists().then_some(group))
    }

    pub(super) fn take(&self, pid: i32) -> Result<()> {
        Ok(std::fs::write(self.dir.join("cgroup.procs"), pid.to_string())?)
    }

    /// Gives all tasks back to the group above.
    pub(super) fn give_back(&self) -> Result<()> {
        let above = self.dir.parent().context("no group above")?.join("cgroup.procs");
        for pid in std::fs::read_to_string(self.dir.join("cgroup.procs"))?.lines() {
            std::fs::write(&above, pid)?;
        }
        Ok(())
    }

    pub(super) fn freeze(&self) -> Result<()> {
        std::fs::write(self.dir.join(self.file), self.frozen)?;
        self.await_frozen()
    }

    pub(super) fn await_frozen(&self) -> Result<()> {
        wait_for("the tasks to be paused", CALM, || {
            let state = std::fs::read_to_string(self.dir.join(self.file))?;
            Ok((state.trim() == self.frozen).then_some(()))
        })
        .with_context(states)
    }

    pub(super) fn thaw(&self) -> Result<()> {
        Ok(std::fs::write(self.dir.join(self.file), self.thawed)?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group with tasks in it cannot be removed.
        let _ = self.thaw();
        let _ = self.give_back();
        let _ = std::fs::remove_dir(&self.dir);
    }
}
