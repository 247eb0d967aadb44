//! What happens to the pages of a container in its first seconds, written down by the process that
//! brings them, and read by the one that has started the container.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use torpor_blobs::traffic::{self, Traffic};

use crate::error::{Context, Result};

/// The file, in the directory of the container.
const FILE: &str = "events";
/// How many are written down.
const MOST: usize = 20_000;

/// A time that all processes of this machine agree on, in nanoseconds (CLOCK_MONOTONIC).
#[must_use]
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub at: u64,
    /// Pages that somebody waits for.
    pub asked: u64,
    /// Whether those are not of what is fetched first.
    #[serde(default)]
    pub unforeseen: bool,
    /// Pages that are in place now.
    pub came: u64,
    /// What the process has fetched by now.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// Writes events down.
#[derive(Debug)]
pub struct Notes(Mutex<(File, usize)>);

impl Notes {
    /// Those of the container whose files are in `dir`.
    ///
    /// # Errors
    /// If no file can be made in `dir`: the disk is full.
    pub fn create(dir: &Path) -> Result<Self> {
        let file = File::create(dir.join(FILE)).context(|| "noting what happens")?;
        Ok(Self(Mutex::new((file, 0))))
    }

    /// Writes down that somebody waits for pages.
    pub fn asked(&self, pages: u64, unforeseen: bool) {
        self.note(pages, unforeseen, 0);
    }

    /// Writes down that pages are in place.
    pub fn came(&self, pages: u64) {
        self.note(0, false, pages);
    }

    /// That it cannot be written is no reason not to go on.
    fn note(&self, asked: u64, unforeseen: bool, came: u64) {
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.1 == MOST {
            return;
        }
        notes.1 += 1;
        let event = Event { at: now(), asked, unforeseen, came, traffic: traffic::so_far() };
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        let _: io::Result<()> = notes.0.write_all(&line);
    }
}

/// What was written down for the container whose files are in `dir`, until now.
#[must_use]
pub fn read(dir: &Path) -> Vec<Event> {
    let text = fs::read_to_string(dir.join(FILE)).unwrap_or_default();
    // The last line may be on its way still.
    text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
}

/// What happened by then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    /// How often somebody waited for pages.
    pub waits: u64,
    /// How often these were not of what is fetched first.
    pub unforeseen: u64,
    /// What was fetched.
    pub traffic: Traffic,
}

/// What happened until `at`.
#[must_use]
pub fn until(events: &[Event], at: u64) -> Sum {
    let mut sum = Sum::default();
    for event in events.iter().take_while(|event| event.at <= at) {
        sum.waits += u64::from(event.asked > 0);
        sum.unforeseen += u64::from(event.unforeseen);
        sum.traffic = event.traffic;
    }
    sum
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn events_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).is_empty());
        let notes = Notes::create(dir.path()).unwrap();
        notes.asked(3, true);
        notes.came(9);
        let mut file = File::options().append(true).open(dir.path().join(FILE)).unwrap();
        file.write_all(b"{\"at\":").unwrap();
        let events = read(dir.path());
        assert_eq!(events.len(), 2);
        assert_eq!((events[0].asked, events[1].came), (3, 9));
        assert!(events[0].at <= events[1].at && events[1].at <= now());
    }

    #[test]
    fn what_happened_later_does_not_count() {
        let event = |at, asked, unforeseen, bytes| {
            let traffic = Traffic { requests: 1, bytes };
            Event { at, asked, unforeseen, came: 0, traffic }
        };
        let events = [event(10, 0, false, 100), event(20, 2, false, 100), event(30, 1, true, 200)];
        let sum = |at| {
            let sum = until(&events, at);
            (sum.waits, sum.unforeseen, sum.traffic.bytes)
        };
        assert_eq!(
            [sum(9), sum(10), sum(29), sum(30)],
            [(0, 0, 0), (0, 0, 100), (1, 0, 100), (2, 1, 200)]
        );
    }
}
