//! Freezing by cgroup: nothing in the group runs, so that no task can slip away
//! while the others are being stopped one by one.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::guardian::{Guardian, Undo};

/// A group that can be frozen.
#[derive(Debug)]
pub struct Freezer {
    /// The file that freezes it.
    control: PathBuf,
    unified: bool,
    /// Whether it was frozen before.
    was_frozen: bool,
}

/// How often the kernel is asked whether all have frozen.
const PAUSE: Duration = Duration::from_micros(500);

impl Freezer {
    /// The group in the directory `path` of a hierarchy with a freezer.
    ///
    /// # Errors
    /// If it has none.
    pub fn open(path: &Path) -> Result<Self> {
        let unified = !path.join("freezer.state").exists();
        let control = path.join(if unified { "cgroup.freeze" } else { "freezer.state" });
        let mut freezer = Freezer { control, unified, was_frozen: false };
        freezer.was_frozen = match (unified, freezer.read(&freezer.control)?.as_str()) {
            (true, state) => state == "1",
            (false, state) => state != "THAWED",
        };
        Ok(freezer)
    }

    /// Freezes it and waits until that is done. If the caller dies from now on, the
    /// guardian puts the group back into the state it was in.
    ///
    /// # Errors
    /// The kernel's; some task does not freeze before `deadline`.
    pub fn freeze(&self, guardian: &mut Guardian, deadline: Instant) -> Result<()> {
        guardian.watch(&self.undo())?;
        self.write(self.word(true))?;
        while !self.is_frozen()? {
            if Instant::now() >= deadline {
                self.restore(guardian)?;
                return Err(Error::Os {
                    what: format!("freeze {}", self.control.display()),
                    source: std::io::ErrorKind::TimedOut.into(),
                });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Lets the group run: its tasks are stopped otherwise by now, and cannot get to
    /// that stop while they are frozen.
    ///
    /// # Errors
    /// The kernel's.
    pub fn thaw(&self) -> Result<()> {
        self.write(self.word(false))
    }

    /// Puts the group back into the state that it was found in.
    ///
    /// # Errors
    /// The kernel's.
    pub fn restore(&self, guardian: &mut Guardian) -> Result<()> {
        self.write(self.word(self.was_frozen))?;
        guardian.forget(&self.undo())
    }

    fn undo(&self) -> Undo {
        Undo::Write(self.control.clone(), self.word(self.was_frozen).to_owned())
    }

    fn word(&self, frozen: bool) -> &'static str {
        match (self.unified, frozen) {
            (true, true) => "1",
            (true, false) => "0",
            (false, true) => "FROZEN",
            (false, false) => "THAWED",
        }
    }

    fn is_frozen(&self) -> Result<bool> {
        if self.unified {
            let events = self.control.with_file_name("cgroup.events");
            return Ok(self.read(&events)?.lines().any(|line| line == "frozen 1"));
        }
        let state = self.read(&self.control)?;
        if state == "FREEZING" {
            // The kernel looks for tasks that came late only when it is asked to.
            self.write(self.word(true))?;
        }
        Ok(state == "FROZEN")
    }

    fn read(&self, file: &Path) -> Result<String> {
        let mut text = String::new();
        std::fs::File::open(file)
            .and_then(|f| f.take(4096).read_to_string(&mut text))
            .context(|| format!("read {}", file.display()))?;
        Ok(text.trim_end().to_owned())
    }

    fn write(&self, word: &str) -> Result<()> {
        std::fs::OpenOptions::new()
            .write(true)
            .open(&self.control)
            .and_then(|mut f| f.write_all(word.as_bytes()))
            .context(|| format!("write {word} to {}", self.control.display()))
    }
}
