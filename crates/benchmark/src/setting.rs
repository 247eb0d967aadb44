//! The scheduler of a device that is changed for a while, and noted for the keeper.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::trust::OwnDir;

/// The scheduler that a device had.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setting {
    path: PathBuf,
    before: String,
}

/// Where it is noted for as long as it is changed.
const NOTE: &str = "scheduler";
/// The most that a note holds.
const LARGEST: u64 = 4096;

impl Setting {
    /// The one that is set: the kernel has it in brackets.
    ///
    /// # Errors
    /// If the kernel does not say which it is.
    pub(crate) fn read(path: PathBuf) -> io::Result<Self> {
        let text = std::fs::read_to_string(&path)?;
        let set = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
        let set = set.ok_or_else(|| io::Error::other("no scheduler is set"))?.to_owned();
        Ok(Self { path, before: set })
    }

    /// Notes it in the directory of a run, for its keeper.
    ///
    /// # Errors
    /// If the file cannot be written: the disk is full, or the directory is gone.
    pub(crate) fn note(&self, dir: &Path) -> io::Result<()> {
        std::fs::write(dir.join(NOTE), serde_json::to_vec(self)?)
    }

    /// What is noted in the directory of a run, if it is what [`Setting::note`] can have written.
    pub(crate) fn noted(dir: &Path) -> Option<Self> {
        let file = OwnDir::open(dir).ok()?.read(NOTE).ok()?;
        let mut text = Vec::new();
        file.take(LARGEST).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok().filter(Self::is_of_a_disk_of_ours)
    }

    /// Whether it is the name of a scheduler, for a loop device: nothing else is ever changed.
    fn is_of_a_disk_of_ours(&self) -> bool {
        let number = self.path.to_str().and_then(|path| {
            path.strip_prefix("/sys/block/loop")?.strip_suffix("/queue/scheduler")
        });
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let is_name = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
        number.is_some_and(is_number) && is_name(&self.before)
    }

    /// Sets another one.
    ///
    /// # Errors
    /// If the kernel does not have it.
    pub(crate) fn change(&self, to: &str) -> io::Result<()> {
        std::fs::write(&self.path, to)
    }

    /// Sets the one that was set before.
    ///
    /// # Errors
    /// If the kernel refuses it; the device may be gone.
    pub(crate) fn restore(&self) -> io::Result<()> {
        let failed = |error| io::Error::other(format!("{}: {error}", self.path.display()));
        self.change(&self.before).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_scheduler_of_a_loop_device_is_set_again() {
        let dir = tempfile::tempdir().unwrap();
        for (path, before, believed) in [
            ("/sys/block/loop12/queue/scheduler", "mq-deadline", true),
            ("/sys/block/loop/queue/scheduler", "none", false),
            ("/sys/block/loop1/../../../etc/x/queue/scheduler", "none", false),
            ("/sys/block/sda/queue/scheduler", "none", false),
            ("/etc/cron.d/x", "none", false),
            ("/sys/block/loop1/queue/scheduler", "* * * * * root x", false),
        ] {
            let setting = Setting { path: path.into(), before: before.into() };
            setting.note(dir.path()).unwrap();
            assert_eq!(Setting::noted(dir.path()).is_some(), believed, "{path} {before}");
        }
    }
}
