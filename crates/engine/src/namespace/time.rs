//! Time namespaces: `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` go on where they were when
//! the tree was dumped, whatever they show on the machine that it is restored on.
//!
//! A tree that lives in the host's time namespace gets one of its own when it is
//! restored; its clocks are in `timens-0.img`.

use std::io;

use rustix::time::{ClockId, clock_gettime};
use torpor_images::proto::{TimensEntry, Timespec};
use torpor_images::{ImageDir, kind};

use super::{Namespace, Namespaces, NsKind};
use crate::error::{Context, Error, Result};
use crate::proc;

const NANOS: i128 = 1_000_000_000;

/// What a clock shows, in nanoseconds.
type Nanos = i128;

/// The two clocks of a time namespace, or how far they are ahead of the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Clocks {
    monotonic: Nanos,
    boottime: Nanos,
}

impl Clocks {
    /// What this thread's clocks show.
    fn now() -> Self {
        let read = |id| {
            let time = clock_gettime(id);
            i128::from(time.tv_sec) * NANOS + i128::from(time.tv_nsec)
        };
        Clocks { monotonic: read(ClockId::Monotonic), boottime: read(ClockId::Boottime) }
    }

    /// The offsets in `/proc/PID/timens_offsets`, which are those of the namespace that
    /// the children of the task live in.
    fn offsets(pid: i32) -> Result<Self> {
        let text = proc::read(pid, "timens_offsets")?;
        parse(&text)
            .ok_or_else(|| Error::invalid(format!("/proc/{pid}/timens_offsets"), "unknown layout"))
    }

    fn plus(self, other: Self) -> Self {
        Clocks {
            monotonic: self.monotonic + other.monotonic,
            boottime: self.boottime + other.boottime,
        }
    }

    fn minus(self, other: Self) -> Self {
        Clocks {
            monotonic: self.monotonic - other.monotonic,
            boottime: self.boottime - other.boottime,
        }
    }

    fn to_entry(self) -> TimensEntry {
        let spec = |time: Nanos| Timespec {
            tv_sec: u64::try_from(time.div_euclid(NANOS)).unwrap_or_default(),
            tv_nsec: u64::try_from(time.rem_euclid(NANOS)).unwrap_or_default(),
        };
        TimensEntry { monotonic: spec(self.monotonic), boottime: spec(self.boottime) }
    }

    fn from_entry(entry: &TimensEntry) -> Self {
        let nanos = |time: &Timespec| i128::from(time.tv_sec) * NANOS + i128::from(time.tv_nsec);
        Clocks { monotonic: nanos(&entry.monotonic), boottime: nanos(&entry.boottime) }
    }

    /// As `/proc/PID/timens_offsets` takes it.
    fn to_text(self) -> String {
        let line = |name: &str, time: Nanos| {
            format!("{name} {} {}\n", time.div_euclid(NANOS), time.rem_euclid(NANOS))
        };
        line("monotonic", self.monotonic) + &line("boottime", self.boottime)
    }
}

/// Lines of a clock's name, seconds and nanoseconds.
fn parse(text: &str) -> Option<Clocks> {
    let mut clocks = Clocks { monotonic: 0, boottime: 0 };
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let clock = match words.next()? {
            "monotonic" => &mut clocks.monotonic,
            "boottime" => &mut clocks.boottime,
            _ => return None,
        };
        let (sec, nsec): (i64, i64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        *clock = i128::from(sec) * NANOS + i128::from(nsec);
    }
    Some(clocks)
}

/// Writes `timens-ID.img`: what the clocks of the tree show now. `None` is the host's
/// namespace.
///
/// # Errors
/// If the offsets cannot be read, or the image cannot be written.
pub fn dump(images: &ImageDir, ns: Option<&Namespace>) -> Result<()> {
    let now = Clocks::now();
    let clocks = match ns {
        None => now,
        Some(ns) => {
            let here = Clocks::offsets(own_pid())?;
            now.minus(here).plus(Clocks::offsets(ns.pid)?)
        }
    };
    let entry = clocks.to_entry();
    Ok(images.write_one(kind::TIMENS, ns.map_or(0, |ns| ns.id).into(), &entry)?)
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// What the clocks of the restored tree are to show.
#[derive(Debug, Clone, Copy)]
pub struct Wanted(Clocks);

impl Wanted {
    /// Reads the clocks of the tree; `None` if it is to share the caller's.
    ///
    /// # Errors
    /// Damaged images.
    pub fn load(images: &ImageDir, spaces: &Namespaces) -> Result<Option<Self>> {
        let own = spaces.of_kind(NsKind::Time).find(|ns| !ns.is_host).map_or(0, |ns| ns.id);
        if own == 0 && std::fs::metadata("/proc/self/ns/time").is_err() {
            // A kernel without time namespaces: the clocks are the host's.
            return Ok(None);
        }
        let entry: Option<TimensEntry> = images.read_opt(kind::TIMENS, own.into())?;
        if entry.is_none() && own != 0 {
            return Err(Error::invalid(kind::TIMENS.file_name(own.into()), "is missing"));
        }
        Ok(entry.map(|entry| Wanted(Clocks::from_entry(&entry))))
    }

    /// Makes the children of the calling thread live in a new time namespace, whose
    /// clocks show what is wanted.
    ///
    /// # Errors
    /// `ERANGE` for times that the kernel cannot show.
    pub fn apply(&self) -> io::Result<()> {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        torpor_sys::ns::unshare_time()?;
        self.set(tid).map_err(|e| io::Error::other(e.to_string()))
    }

    /// Sets the clocks of the time namespace that the children of task `pid` will live in, and
    /// nobody lives in yet.
    ///
    /// # Errors
    /// As [`Wanted::apply`].
    pub fn set(&self, pid: i32) -> Result<()> {
        let here = Clocks::offsets(own_pid())?;
        // From here to the end of the restore the clocks run.
        let offsets = self.0.minus(Clocks::now()).plus(here);
        let path = format!("/proc/{pid}/timens_offsets");
        std::fs::write(&path, offsets.to_text()).context(|| format!("write {path}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn offsets_are_read_and_written() {
        let text = "monotonic           -2   500000000\nboottime      86400         0\n";
        let clocks = parse(text).unwrap();
        assert_eq!(clocks.monotonic, -1_500_000_000);
        assert_eq!(parse(&clocks.to_text()), Some(clocks));
        assert_eq!(clocks.to_text().lines().next(), Some("monotonic -2 500000000"));
        let now = Clocks::now();
        assert_eq!(Clocks::from_entry(&now.to_entry()), now);
        assert!(parse("realtime 1 2\n").is_none());
    }

    #[test]
    fn children_find_the_clocks_that_are_wanted() {
        let wanted = Clocks { monotonic: 5_000_000 * NANOS, boottime: 7_000_000 * NANOS };
        let seen = std::thread::spawn(move || {
            Wanted(wanted).apply().unwrap();
            let script =
                "import time; print(int(time.clock_gettime(1)), int(time.clock_gettime(7)))";
            std::process::Command::new("python3").args(["-c", script]).output().unwrap()
        });
        let seen = String::from_utf8(seen.join().unwrap().stdout).unwrap();
        let clocks: Vec<i64> = seen.split_whitespace().map(|w| w.parse().unwrap()).collect();
        assert!((5_000_000..5_001_000).contains(&clocks[0]), "{seen}");
        assert!((7_000_000..7_001_000).contains(&clocks[1]), "{seen}");
    }
}
